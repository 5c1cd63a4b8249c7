//! The answers of a batch, in the order of the requests, and the journal of those that came early.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};

use super::input::Line;
use crate::failure::usage;

/// Longest line of an answer or of the journal.
const MAX_ANSWER: u64 = 1 << 30;

/// The output and its journal.
pub struct Output {
    file: Kept,
    journal: Kept,
    /// Lines in the output.
    written: usize,
    /// Of those that an earlier run has written, what the engine failed at.
    faults: usize,
    /// Lines that wait for those before them.
    early: BTreeMap<usize, String>,
}

impl Output {
    /// Opens both, and takes what an earlier run has done. A last line that was cut off goes.
    ///
    /// # Errors
    /// Wrong usage where one of them is the input, or holds what is no answer to these lines; it is left as it is.
    pub fn open(path: &Path, input: &Path, lines: &[Line]) -> anyhow::Result<Output> {
        let mut journal_path = path.as_os_str().to_owned();
        journal_path.push(".journal");
        let journal_path = PathBuf::from(journal_path);
        let shown = path.display();
        for written in [path, &journal_path] {
            if is_same_file(written, input) {
                let what = format!("{} is the input, and would be written", written.display());
                return Err(usage(format!("{what}; name another file than {shown}")));
            }
        }
        let (mut written, mut faults) = (0, 0);
        let file = Kept::open(path.to_owned(), |value| {
            let Some(line) = lines.get(written) else {
                return Err(format!("there are no more than {written} requests"));
            };
            written += 1;
            faults += usize::from(is_fault(&value));
            match is_answer(&value, line) {
                true => Ok(()),
                false if value["custom_id"].as_str() == Some(&line.id) => {
                    Err(format!("it answers another request that was called {:?}", line.id))
                }
                false => Err(format!("it is not the answer to request {:?}", line.id)),
            }
        })?;
        let mut early = BTreeMap::new();
        let journal = Kept::open(journal_path, |value| {
            let index = value["index"].as_u64().filter(|_| value["line"].is_object());
            let index = index.ok_or("it is no entry of a batch's journal")? as usize;
            // Of another batch, of a line that has been written since, or no answer: of no use.
            let own = lines.get(index).is_some_and(|line| is_answer(&value["line"], line));
            let own = own && !is_fault(&value["line"]);
            if own && index >= written {
                early.insert(index, value["line"].to_string());
            }
            Ok(())
        })?;
        let mut output = Output { file, journal, written, faults, early };
        output.write_ready()?;
        Ok(output)
    }

    /// Whether a line is answered.
    pub fn has(&self, index: usize) -> bool {
        index < self.written || self.early.contains_key(&index)
    }

    /// Lines that are answered.
    pub fn count(&self) -> usize {
        self.written + self.early.len()
    }

    /// Lines that an earlier run has written and that have no answer, because the engine failed at them.
    pub fn faults(&self) -> usize {
        self.faults
    }

    /// Takes the answer of a line.
    pub fn put(&mut self, index: usize, line: &Value) -> anyhow::Result<()> {
        if index == self.written {
            self.early.insert(index, line.to_string());
            return self.write_ready();
        }
        let entry = json!({ "index": index, "line": line });
        self.journal.write(format!("{entry}\n"))?;
        self.early.insert(index, line.to_string());
        Ok(())
    }

    fn write_ready(&mut self) -> anyhow::Result<()> {
        while let Some(line) = self.early.remove(&self.written) {
            self.file.write(format!("{line}\n"))?;
            self.written += 1;
        }
        Ok(())
    }

    /// All is done: the journal goes.
    pub fn finish(self) -> anyhow::Result<()> {
        self.file.sync()?;
        let path = self.journal.path;
        drop(self.journal.file);
        std::fs::remove_file(&path).with_context(|| path.display().to_string())
    }
}

/// What the answer to a request is called.
pub fn name(line: &Line) -> String {
    format!("batch_req_{}", line.digest)
}

/// Whether a line of the output is the answer to a request.
fn is_answer(value: &Value, line: &Line) -> bool {
    value["id"].as_str() == Some(&name(line))
        && value["custom_id"].as_str() == Some(&line.id)
        && value["response"].is_object()
}

/// Whether a line of the output says that the engine failed.
fn is_fault(value: &Value) -> bool {
    value["response"]["status_code"].as_u64().is_some_and(|status| status >= 500)
}

/// Whether two paths lead to one file that is there.
fn is_same_file(a: &Path, b: &Path) -> bool {
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let id = |path| std::fs::metadata(path).map(|m| (m.dev(), m.ino())).ok();
        id(a).is_some() && id(a) == id(b)
    }
    #[cfg(not(unix))]
    {
        let id = |path| std::fs::canonicalize(path).ok();
        id(a).is_some() && id(a) == id(b)
    }
}

/// A file of lines that a later run goes on with.
struct Kept {
    path: PathBuf,
    file: File,
}

impl Kept {
    /// Opens a file for more lines, and shows `take` the whole lines that it holds; with what `take` does not know, it is
    /// somebody's, and left alone.
    fn open(
        path: PathBuf,
        mut take: impl FnMut(Value) -> Result<(), String>,
    ) -> anyhow::Result<Kept> {
        let shown = path.display();
        // A device or a pipe has no lines to go on with, and may have bytes without end.
        if std::fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
            let what = "is no regular file; a batch needs one, to go on where it was interrupted";
            return Err(usage(format!("{shown} {what}")));
        }
        let mut options = OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(false).open(&path);
        let mut file = file.map_err(|e| usage(format!("{shown}: {e}")))?;
        // Where the system knows no locks, nobody is kept off.
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            return Err(usage(format!("{shown}: another batch is writing it; name another file")));
        }
        let (end, is_ended) = whole_lines(&mut file, &path, &mut take)?;
        file.set_len(end).with_context(|| shown.to_string())?;
        file.seek(SeekFrom::End(0)).with_context(|| shown.to_string())?;
        let mut kept = Kept { path, file };
        if !is_ended {
            kept.write("\n".into())?;
        }
        Ok(kept)
    }

    /// One write, so that a kill leaves at most one line cut off.
    fn write(&mut self, line: String) -> anyhow::Result<()> {
        if !self.is_there() {
            let shown = self.path.display();
            anyhow::bail!(
                "{shown} was removed or replaced while the batch was running; run it again"
            );
        }
        self.file.write_all(line.as_bytes()).with_context(|| self.fault())
    }

    fn sync(&self) -> anyhow::Result<()> {
        self.file.sync_all().with_context(|| self.fault())
    }

    fn fault(&self) -> String {
        let shown = self.path.display();
        format!("writing {shown} (what is there stays: the same command goes on with it)")
    }

    /// Whether the path still leads to this file.
    fn is_there(&self) -> bool {
        #[cfg(unix)]
        {
            use std::os::unix::fs::MetadataExt;
            let own = self.file.metadata().map(|m| (m.dev(), m.ino()));
            let found = std::fs::metadata(&self.path).map(|m| (m.dev(), m.ino()));
            own.is_ok() && own.ok() == found.ok()
        }
        #[cfg(not(unix))]
        self.path.exists()
    }
}

/// How lines of the output and of the journal begin.
const BEGINNINGS: [&[u8]; 2] = [b"{\"id\"", b"{\"index\""];

/// Shows `take` the whole lines of a file. Gives where they end, and whether the last has its line's end: a kill may cut off
/// just that.
fn whole_lines(
    file: &mut File,
    path: &Path,
    take: &mut dyn FnMut(Value) -> Result<(), String>,
) -> anyhow::Result<(u64, bool)> {
    let shown = path.display();
    let mut end = 0;
    let mut reader = BufReader::new(file);
    let mut text = Vec::new();
    for number in 1.. {
        let foreign = |what: &str| {
            usage(format!("{shown}: line {number} is not of this batch: {what}; name another file"))
        };
        text.clear();
        let n = (&mut reader).take(MAX_ANSWER).read_until(b'\n', &mut text);
        let n = n.with_context(|| shown.to_string())?;
        if n == 0 {
            break;
        }
        let is_ended = text.last() == Some(&b'\n');
        match serde_json::from_slice(&text) {
            Ok(value) => take(value).map_err(|what| foreign(&what))?,
            // A line that a kill cut off goes, and so do zeros where power was lost; what can be neither is somebody's.
            Err(_) if !is_ended && BEGINNINGS.iter().any(|b| agree(b, &text)) => break,
            Err(_) if !is_ended && end > 0 && text.iter().all(|b| *b == 0) => break,
            Err(_) => return Err(foreign("it is no JSON")),
        }
        end += n as u64;
        if !is_ended {
            return Ok((end, false));
        }
    }
    Ok((end, true))
}

/// Whether one begins with the other.
fn agree(a: &[u8], b: &[u8]) -> bool {
    a.iter().zip(b).all(|(a, b)| a == b)
}
