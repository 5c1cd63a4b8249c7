//! `batch`: works through lines of requests, many at once, so that each expert read from disk serves all of them.
//!
//! Answers come in the order of the requests. Each is written to a journal beside the output as soon as it is
//! there, and to the output when those before it are; after a kill, what is in either is not computed again.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use forebay_schedule::Pace;
use forebay_serve::room::Demand;
use serde_json::{Map, Value, json};

use crate::args::BatchArgs;
use crate::cmd::{bench, serve};
use crate::failure::usage;
use crate::term::{Bar, interruption, note, say};

/// Answers at once where nothing is told.
const PARALLEL: usize = 16;

/// One line of the input.
struct Line {
    id: String,
    url: String,
    body: Value,
}

impl Line {
    /// Whether the answer has to follow a grammar.
    fn is_constrained(&self) -> bool {
        let says = |key: &str| self.body.get(key).is_some_and(|v| !v.is_null());
        says("response_format") || says("tools")
    }
}

pub fn run(args: BatchArgs) -> anyhow::Result<ExitCode> {
    forebay_store::heap::settle();
    args.sampling.params(None)?;
    if args.parallel == Some(0) {
        return Err(usage("--parallel must be at least 1"));
    }
    if args.contexts == Some(0) {
        return Err(usage("--contexts must be at least 1"));
    }
    let lines = read(&args.input)?;
    let mut output = Output::open(&args.output, &lines)?;
    let todo: Vec<usize> = (0..lines.len()).filter(|i| !output.has(*i)).collect();
    let before = lines.len() - todo.len();
    if before > 0 {
        note!("{before} of {} lines are done already", lines.len());
    }
    if todo.is_empty() {
        output.finish()?;
        return Ok(ExitCode::SUCCESS);
    }
    let parallel = args.parallel.unwrap_or(PARALLEL).min(todo.len());
    let load = serve::Load {
        parallel,
        contexts: serve::contexts(args.contexts, args.parallel),
        queue: parallel,
        room: Demand {
            max_body: None,
            connections: 0,
            constrained: todo.iter().filter(|&&i| lines[i].is_constrained()).count().min(parallel),
        },
        pace: Pace::Full,
        steers_all: false,
        quiet: false,
    };
    let (service, peak) = serve::service(&args.model, &args.sampling, load, None)?;
    let service = Arc::new(service);
    let cancel = interruption();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(2)
        .enable_all()
        .build()
        .context("starting a thread")?;
    let began = Instant::now();
    let bar = Bar::steps("answering");
    let (send, mut receive) = tokio::sync::mpsc::unbounded_channel();
    let done = runtime.block_on(async {
        let mut next = todo.iter().copied();
        let mut open = 0;
        let mut done = 0;
        let mut failed = 0;
        loop {
            // As many as are computed at once, and as many that wait for a place.
            while open < 2 * parallel && !cancel.load(Ordering::Relaxed) {
                let Some(index) = next.next() else { break };
                let (service, send) = (service.clone(), send.clone());
                let (url, body) = (lines[index].url.clone(), lines[index].body.clone());
                tokio::spawn(async move {
                    let answer = service.answer(&url, &body).await;
                    // The receiver lives until all are done.
                    let _ = send.send((index, answer));
                });
                open += 1;
            }
            if open == 0 {
                break;
            }
            let received = tokio::time::timeout(Duration::from_millis(100), receive.recv()).await;
            if cancel.load(Ordering::Relaxed) {
                service.scheduler().abort();
                break;
            }
            let Ok(Some((index, answer))) = received else { continue };
            open -= 1;
            failed += usize::from(answer.is_err());
            output.put(index, &line(index, &lines[index], answer))?;
            done += 1;
            bar.set((before + done) as u64, lines.len() as u64);
        }
        anyhow::Ok((done, failed))
    });
    bar.clear();
    // An output that takes no more ends the answers that nobody will see.
    let (done, failed) = done.inspect_err(|_| service.scheduler().abort())?;
    let seconds = began.elapsed().as_secs_f64();
    let load = service.scheduler().load();
    let per_second = load.generated_tokens as f64 / seconds;
    let (stats, phases) = (&load.stats, load.stats.phases.named());
    let phases: Map<String, Value> =
        phases.into_iter().map(|(k, v)| (k.into(), json!(v))).collect();
    let disk = match args.json {
        true => service.scheduler().with_engine(|engine| bench::with_disk(engine, None).disk).ok(),
        false => None,
    };
    let summary = json!({
        "lines": lines.len(),
        "answered": done,
        "failed": failed,
        "generated_tokens": load.generated_tokens,
        "prompt_tokens": load.prompt_tokens,
        "cached_tokens": load.cached_tokens,
        "steps": load.steps,
        "seconds": seconds,
        "generated_tokens_per_s": per_second,
        "rows": stats.rows,
        "expert_hits": stats.store.hits,
        "expert_misses": stats.store.misses,
        "disk_bytes": stats.store.bytes_read,
        "disk_bandwidth_bytes_per_s": disk.flatten(),
        "phases_s": phases,
        "peak_bytes": peak.as_ref().map(|p| p.peak_bytes()),
    });
    match args.json {
        true => say!("{summary}")?,
        false => note!(
            "{done} answers ({failed} of them refusals), {} tokens, {per_second:.1} tokens/s, {} steps",
            load.generated_tokens,
            load.steps
        ),
    }
    if cancel.load(Ordering::Relaxed) {
        note!("interrupted: the same command goes on where this one ended");
        return Ok(ExitCode::from(130));
    }
    output.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// A line of the output.
fn line(index: usize, line: &Line, answer: Result<Value, forebay_serve::ApiError>) -> Value {
    let (status, body) = match answer {
        Ok(body) => (200, body),
        Err(error) => (error.status(), error.openai_body()),
    };
    json!({
        "id": format!("batch_req_{index}"),
        "custom_id": line.id,
        "response": { "status_code": status, "request_id": format!("req_{index}"), "body": body },
        "error": null,
    })
}

/// Longest line of a request, in bytes.
const MAX_LINE: u64 = 64 << 20;
/// Longest line of an answer or of the journal.
const MAX_ANSWER: u64 = 1 << 30;

fn read(path: &Path) -> anyhow::Result<Vec<Line>> {
    let shown = path.display();
    let file = File::open(path).map_err(|e| usage(format!("{shown}: {e}")))?;
    let mut reader = BufReader::new(file);
    let mut lines = Vec::new();
    let mut text = Vec::new();
    for at in 1.. {
        let bad = |what: String| usage(format!("{shown}: line {at}: {what}"));
        text.clear();
        let line = (&mut reader).take(MAX_LINE + 1).read_until(b'\n', &mut text);
        if line.map_err(|e| bad(e.to_string()))? == 0 {
            break;
        }
        if text.len() as u64 > MAX_LINE {
            return Err(bad(format!("is longer than {MAX_LINE} bytes")));
        }
        if text.trim_ascii().is_empty() {
            continue;
        }
        let value: Value = serde_json::from_slice(&text).map_err(|e| bad(e.to_string()))?;
        let id = value["custom_id"].as_str().ok_or_else(|| bad("has no `custom_id`".into()))?;
        if value["method"].as_str().is_some_and(|method| method != "POST") {
            return Err(bad("`method` must be POST".into()));
        }
        let url = value["url"].as_str().unwrap_or("/v1/chat/completions");
        if !["/v1/chat/completions", "/v1/completions"].contains(&url) {
            return Err(bad(format!("`url` {url:?} is not one of batches")));
        }
        if !value["body"].is_object() {
            return Err(bad("`body` must be an object".into()));
        }
        lines.push(Line { id: id.to_owned(), url: url.to_owned(), body: value["body"].clone() });
    }
    match lines.is_empty() {
        true => Err(usage(format!("{shown} holds no request"))),
        false => Ok(lines),
    }
}

/// The output and its journal.
struct Output {
    file: Kept,
    journal: Kept,
    /// Lines in the output.
    written: usize,
    /// Lines that wait for those before them.
    early: BTreeMap<usize, String>,
}

impl Output {
    /// Opens both, and takes what an earlier run has done. A last line that was cut off goes.
    fn open(path: &Path, lines: &[Line]) -> anyhow::Result<Output> {
        let mut journal_path = path.as_os_str().to_owned();
        journal_path.push(".journal");
        let journal_path = PathBuf::from(journal_path);
        let (file, done) = Kept::open(path.to_owned())?;
        let (journal, entries) = Kept::open(journal_path)?;
        let shown = path.display();
        if done.len() > lines.len() {
            let text =
                format!("{shown} has {} lines already, more than there are requests", done.len());
            return Err(usage(text + "; name another file"));
        }
        for (at, (value, line)) in done.iter().zip(lines).enumerate() {
            if value["custom_id"].as_str() != Some(&line.id) || !value["response"].is_object() {
                let what = "is not the answer to that request; name another file";
                return Err(usage(format!("{shown}: line {} {what}", at + 1)));
            }
        }
        let mut output = Output { file, journal, written: done.len(), early: BTreeMap::new() };
        for entry in entries {
            let index = entry["index"].as_u64().unwrap_or(u64::MAX) as usize;
            let is_own = |line: &Line| entry["line"]["custom_id"].as_str() == Some(&line.id);
            if index >= output.written && lines.get(index).is_some_and(is_own) {
                output.early.insert(index, entry["line"].to_string());
            }
        }
        output.write_ready()?;
        Ok(output)
    }

    fn has(&self, index: usize) -> bool {
        index < self.written || self.early.contains_key(&index)
    }

    fn put(&mut self, index: usize, line: &Value) -> anyhow::Result<()> {
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
    fn finish(self) -> anyhow::Result<()> {
        self.file.sync()?;
        let path = self.journal.path;
        drop(self.journal.file);
        std::fs::remove_file(&path).with_context(|| path.display().to_string())
    }
}

/// A file of lines that a later run goes on with.
struct Kept {
    path: PathBuf,
    file: File,
}

impl Kept {
    /// Opens a file for more lines, and gives the whole lines that it holds.
    fn open(path: PathBuf) -> anyhow::Result<(Kept, Vec<Value>)> {
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
        let (lines, end) = whole_lines(&mut file, &path)?;
        file.set_len(end).with_context(|| shown.to_string())?;
        file.seek(SeekFrom::End(0)).with_context(|| shown.to_string())?;
        Ok((Kept { path, file }, lines))
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

/// The whole lines of a file, and where they end.
fn whole_lines(file: &mut File, path: &Path) -> anyhow::Result<(Vec<Value>, u64)> {
    let shown = path.display();
    let mut lines = Vec::new();
    let mut end = 0;
    let mut reader = BufReader::new(file);
    let mut text = Vec::new();
    loop {
        text.clear();
        let n = (&mut reader).take(MAX_ANSWER).read_until(b'\n', &mut text);
        let n = n.with_context(|| shown.to_string())?;
        if n == 0 {
            return Ok((lines, end));
        }
        if text.last() != Some(&b'\n') {
            // A line that a kill cut off goes; what is no such line is somebody's.
            let cut_off = text[0] == b'{' && serde_json::from_slice::<Value>(&text).is_err();
            return match cut_off {
                true => Ok((lines, end)),
                false => Err(usage(format!(
                    "{shown}: ends with what is no line of a batch; name another file"
                ))),
            };
        }
        let Ok(value) = serde_json::from_slice(&text) else {
            return Err(usage(format!(
                "{shown}: line {} is no JSON; name another file",
                lines.len() + 1
            )));
        };
        lines.push(value);
        end += n as u64;
    }
}
