//! The requests of a batch. All are checked before anything is computed, so that a mistake in the last line shows at
//! once. What stays in memory of a line is its id and where it lies: bodies are read again when their turn comes.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::Value;

use super::needs::Need;
use crate::failure::usage;

/// Longest line, in bytes.
const MAX_LINE: u64 = 64 << 20;
/// Where requests of a batch may go.
const URLS: [&str; 2] = ["/v1/chat/completions", "/v1/completions"];
/// What some editors put before the first line.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// One line.
pub struct Line {
    /// `custom_id`; no other line has it.
    pub id: String,
    /// One of [`URLS`].
    pub url: &'static str,
    /// Of id, URL and body; blanks between the body's parts do not count. It is a part of the answer, so that another request with
    /// the same id is told from this one.
    pub digest: String,
    /// Whether the answer has to follow a grammar.
    pub is_constrained: bool,
    /// What it will take.
    pub need: Need,
    /// Line of the file, from 1.
    number: usize,
    place: Place,
}

/// Where the text of a line is.
enum Place {
    /// Bytes of the file.
    File { at: u64, len: usize },
    /// Here: what came through a pipe does not come twice.
    Memory(Box<[u8]>),
}

/// A file of requests.
pub struct Requests {
    path: PathBuf,
    file: File,
    lines: Vec<Line>,
}

impl Requests {
    /// Reads and checks all lines. Blank lines are passed over, and so are a byte order mark and carriage returns.
    ///
    /// # Errors
    /// Wrong usage, naming the first line that is no request.
    pub fn open(path: &Path) -> anyhow::Result<Requests> {
        let shown = path.display();
        let file = File::open(path).map_err(|e| usage(format!("{shown}: {e}")))?;
        let again = file.metadata().is_ok_and(|found| found.is_file());
        let mut reader = BufReader::new(&file);
        let mut lines = Vec::new();
        let mut text = Vec::new();
        let mut at = 0;
        for number in 1.. {
            let bad = |what: String| usage(format!("{shown}: line {number}: {what}"));
            text.clear();
            let read = (&mut reader).take(MAX_LINE + 1).read_until(b'\n', &mut text);
            let len = read.map_err(|e| bad(e.to_string()))?;
            if len == 0 {
                break;
            }
            if text.len() as u64 > MAX_LINE {
                return Err(bad(format!("is longer than {MAX_LINE} bytes")));
            }
            let json = bare(&text, at);
            if !json.is_empty() {
                let (id, url, body) = parse(json).map_err(bad)?;
                let digest = digest(&id, url, &body);
                let says = |key: &str| body.get(key).is_some_and(|v| !v.is_null());
                let is_constrained = says("response_format") || says("tools");
                let place = match again {
                    true => Place::File { at, len },
                    false => Place::Memory(json.into()),
                };
                let need = Need::of(&body, url == URLS[0]);
                lines.push(Line { id, url, digest, is_constrained, need, number, place });
            }
            at += len as u64;
        }
        if lines.is_empty() {
            return Err(usage(format!("{shown} holds no request")));
        }
        let mut ids: Vec<&Line> = lines.iter().collect();
        ids.sort_by(|a, b| a.id.cmp(&b.id).then(a.number.cmp(&b.number)));
        if let Some(pair) = ids.windows(2).find(|pair| pair[0].id == pair[1].id) {
            let (a, b) = (pair[0], pair[1]);
            let what = format!("has the `custom_id` {:?} of line {}", a.id, a.number);
            return Err(usage(format!("{shown}: line {}: {what}; each needs its own", b.number)));
        }
        Ok(Requests { path: path.to_owned(), file, lines })
    }

    /// The lines, in their order.
    pub fn lines(&self) -> &[Line] {
        &self.lines
    }

    /// The body of a line's request.
    ///
    /// # Errors
    /// The file was changed, or cannot be read any more.
    pub fn body(&mut self, index: usize) -> anyhow::Result<Value> {
        let line = &self.lines[index];
        let shown = self.path.display();
        let mut text = Vec::new();
        let json = match &line.place {
            Place::Memory(json) => json,
            Place::File { at, len } => {
                text.resize(*len, 0);
                self.file.seek(SeekFrom::Start(*at)).with_context(|| shown.to_string())?;
                let read = self.file.read_exact(&mut text);
                read.with_context(|| format!("{shown}: line {}", line.number))?;
                bare(&text, *at)
            }
        };
        match parse(json) {
            Ok((id, url, body)) if digest(&id, url, &body) == line.digest => Ok(body),
            _ => anyhow::bail!(
                "{shown}: line {} was changed while the batch was running; run it again",
                line.number
            ),
        }
    }
}

/// The JSON of a line that begins at byte `at` of its file; empty for a blank line.
fn bare(text: &[u8], at: u64) -> &[u8] {
    let text = if at == 0 { text.strip_prefix(BYTE_ORDER_MARK).unwrap_or(text) } else { text };
    text.trim_ascii()
}

/// Id, URL and body of a request, or what is wrong with it.
fn parse(json: &[u8]) -> Result<(String, &'static str, Value), String> {
    let mut value: Value = serde_json::from_slice(json).map_err(|e| {
        let (what, place) = (e.to_string(), format!(" at line {} column {}", e.line(), e.column()));
        let what = what.strip_suffix(&place).unwrap_or(&what);
        format!("is no JSON: {what}, at byte {}", e.column())
    })?;
    if !value.is_object() {
        return Err("is no JSON object".into());
    }
    let id = match value["custom_id"].take() {
        Value::String(id) => id,
        Value::Null => return Err("has no `custom_id`".into()),
        _ => return Err("`custom_id` must be a string".into()),
    };
    match &value["method"] {
        Value::Null => {}
        Value::String(method) if method == "POST" => {}
        other => return Err(format!("`method` must be \"POST\", not {}", short(other))),
    }
    let url = match &value["url"] {
        Value::Null => Some(URLS[0]),
        Value::String(url) => URLS.into_iter().find(|known| known == url),
        _ => None,
    };
    let url = url.ok_or_else(|| {
        format!(
            "`url` {} is not one of batches; there are {}",
            short(&value["url"]),
            URLS.join(", ")
        )
    })?;
    match value["body"].take() {
        body @ Value::Object(_) => Ok((id, url, body)),
        other => Err(format!("`body` must be an object, not {}", short(&other))),
    }
}

/// What tells a request from others: 16 hexadecimal digits.
fn digest(id: &str, url: &str, body: &Value) -> String {
    let mut hasher = blake3::Hasher::new();
    for part in [id, url, &body.to_string()] {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    hasher.finalize().to_hex()[..16].to_owned()
}

/// The beginning of a value, for a message.
fn short(value: &Value) -> String {
    const MOST: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(MOST) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text,
    }
}
