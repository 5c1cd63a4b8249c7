//! `<|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,2]}<tool_call|>`.
//!
//! Strings are literal between their delimiters; keys are bare. Nesting is bounded, and a scan always moves on.

use serde_json::{Map, Value};

use super::{Attempt, Call, Site};

const OPENER: &str = "<|tool_call>";
const CLOSER: &str = "<tool_call|>";
const CALL: &str = "call:";
const QUOTE: &str = "<|\"|>";
const MAX_DEPTH: usize = 64;

/// Why a value could not be read.
enum Fault {
    Open,
    Broken,
}

type Read<T> = Result<T, Fault>;

/// A call that begins with `<|tool_call>`.
pub(crate) fn tagged(site: Site<'_>) -> Attempt {
    let mut reader = Reader { site, at: OPENER.len() };
    match reader.call() {
        Err(Fault::Open) => site.unfinished(),
        Err(Fault::Broken) => Attempt::No,
        Ok(call) => match site.skip_closer(reader.at, CLOSER) {
            None => Attempt::Incomplete,
            Some(after) => Attempt::Done(after, vec![call]),
        },
    }
}

struct Reader<'a> {
    site: Site<'a>,
    at: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.site.text[self.at..]
    }

    /// Takes `word` where it is next.
    fn take(&mut self, word: &str) -> Read<bool> {
        let is = self.site.has(self.at, word).ok_or(Fault::Open)?;
        if is {
            self.at += word.len();
        }
        Ok(is)
    }

    fn blanks(&mut self) -> Read<()> {
        self.at = self.site.skip_blanks(self.at);
        if self.rest().is_empty() { Err(Fault::Open) } else { Ok(()) }
    }

    fn call(&mut self) -> Read<Call> {
        self.blanks()?;
        if !self.take(CALL)? {
            return Err(Fault::Broken);
        }
        let rest = self.rest();
        let end = rest.find(['{', '<', '\n', '}']).ok_or(Fault::Open)?;
        let name = rest[..end].trim();
        self.at += end;
        if name.is_empty() || !self.rest().starts_with('{') {
            return Err(Fault::Broken);
        }
        let arguments = self.object(0)?;
        Ok(Call { name: name.to_owned(), arguments: arguments.to_string() })
    }

    fn object(&mut self, depth: usize) -> Read<Value> {
        self.at += 1;
        let mut object = Map::new();
        loop {
            self.blanks()?;
            if self.take("}")? {
                return Ok(Value::Object(object));
            }
            let key = self.key()?;
            self.blanks()?;
            let value = self.value(depth + 1)?;
            object.insert(key, value);
            self.separator("}")?;
        }
    }

    fn array(&mut self, depth: usize) -> Read<Value> {
        self.at += 1;
        let mut items = Vec::new();
        loop {
            self.blanks()?;
            if self.take("]")? {
                return Ok(Value::Array(items));
            }
            items.push(self.value(depth + 1)?);
            self.separator("]")?;
        }
    }

    /// A comma, or `closer`, which stays.
    fn separator(&mut self, closer: &str) -> Read<()> {
        self.blanks()?;
        match self.take(",")? || self.rest().starts_with(closer) {
            true => Ok(()),
            false => Err(Fault::Broken),
        }
    }

    /// A key with its colon.
    fn key(&mut self) -> Read<String> {
        if self.take(QUOTE)? {
            let key = self.quoted()?;
            self.blanks()?;
            return if self.take(":")? { Ok(key) } else { Err(Fault::Broken) };
        }
        let rest = self.rest();
        let end = rest.find([':', ',', '{', '}', '[', ']', '<']).ok_or(Fault::Open)?;
        let key = rest[..end].trim();
        self.at += end;
        if key.is_empty() || !self.take(":")? {
            return Err(Fault::Broken);
        }
        Ok(key.trim_matches('"').to_owned())
    }

    fn value(&mut self, depth: usize) -> Read<Value> {
        if depth > MAX_DEPTH {
            return Err(Fault::Broken);
        }
        if self.take(QUOTE)? {
            return self.quoted().map(Value::String);
        }
        match self.rest().as_bytes().first() {
            None => Err(Fault::Open),
            Some(b'{') => self.object(depth),
            Some(b'[') => self.array(depth),
            Some(_) => self.plain(),
        }
    }

    /// The text up to the closing delimiter.
    fn quoted(&mut self) -> Read<String> {
        let end = self.rest().find(QUOTE).ok_or(Fault::Open)?;
        let text = self.rest()[..end].to_owned();
        self.at += end + QUOTE.len();
        Ok(text)
    }

    /// A number, a word, or a string as JSON writes it.
    fn plain(&mut self) -> Read<Value> {
        let rest = self.rest();
        let end = if let Some(text) = rest.strip_prefix('"') {
            let mut escaped = false;
            let closes = |b: u8| {
                let closing = b == b'"' && !escaped;
                escaped = b == b'\\' && !escaped;
                closing
            };
            text.bytes().position(closes).ok_or(Fault::Open)? + 2
        } else {
            rest.find([',', '}', ']', '<', '{', '[', '\n']).ok_or(Fault::Open)?
        };
        let value = serde_json::from_str(rest[..end].trim()).map_err(|_| Fault::Broken)?;
        self.at += end;
        Ok(value)
    }
}
