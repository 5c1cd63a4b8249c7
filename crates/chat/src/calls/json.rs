//! `{"name": …, "arguments": {…}}`.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Attempt, Call, Site};

/// Where a JSON value ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    /// Not yet.
    Open,
    /// It cannot become JSON.
    Broken,
    /// After this many bytes.
    Bytes(usize),
}

/// Finds the end of the object or array that `text` begins with. Checks as much as tells broken JSON from
/// JSON that is not complete; what is complete is for a real reader.
pub(crate) fn extent(text: &str) -> Extent {
    let mut open = Vec::new();
    let mut in_string = false;
    let mut escaped = false;
    for (at, byte) in text.bytes().enumerate() {
        if in_string {
            match byte {
                _ if escaped => escaped = false,
                b'\\' => escaped = true,
                b'"' => in_string = false,
                _ => {}
            }
            continue;
        }
        match byte {
            b'"' => in_string = true,
            b'{' | b'[' => open.push(byte),
            b'}' | b']' => {
                let opener = if byte == b'}' { b'{' } else { b'[' };
                if open.pop() != Some(opener) {
                    return Extent::Broken;
                }
                if open.is_empty() {
                    return Extent::Bytes(at + 1);
                }
            }
            b' ' | b'\t' | b'\n' | b'\r' | b',' | b':' | b'+' | b'-' | b'.' => {}
            _ if byte.is_ascii_alphanumeric() => {}
            _ => return Extent::Broken,
        }
        if open.is_empty() {
            return Extent::Broken;
        }
    }
    Extent::Open
}

/// What models write; other keys are theirs.
#[derive(Deserialize)]
struct Written<'a> {
    name: String,
    #[serde(borrow, alias = "parameters")]
    arguments: Option<&'a RawValue>,
}

/// A call from a whole JSON object.
pub(crate) fn call(text: &str) -> Option<Call> {
    let written: Written<'_> = serde_json::from_str(text).ok()?;
    let arguments = match written.arguments {
        None => "{}".to_owned(),
        Some(raw) => object(raw.get())?,
    };
    (!written.name.is_empty()).then_some(Call { name: written.name, arguments })
}

/// The text of a JSON object, given as one or as a string that holds one. An absent one is empty.
pub(crate) fn object(text: &str) -> Option<String> {
    let text = text.trim();
    match text.as_bytes().first() {
        Some(b'{') => {
            serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text).ok()?;
            Some(text.to_owned())
        }
        Some(b'"') => object(&serde_json::from_str::<String>(text).ok()?),
        None => Some("{}".to_owned()),
        Some(_) if text == "null" => Some("{}".to_owned()),
        Some(_) => None,
    }
}

/// A call after `opener`, up to `closer`, which may be missing.
pub(crate) fn tagged(site: Site<'_>, opener: &str, closer: &str) -> Attempt {
    let start = site.skip_blanks(opener.len());
    let body = &site.text[start..];
    if body.is_empty() {
        return site.unfinished();
    }
    match extent(body) {
        Extent::Open => site.unfinished(),
        Extent::Broken => Attempt::No,
        Extent::Bytes(n) => {
            let Some(call) = call(&body[..n]) else { return Attempt::No };
            match site.skip_closer(start + n, closer) {
                None => Attempt::Incomplete,
                Some(after) => Attempt::Done(after, vec![call]),
            }
        }
    }
}
