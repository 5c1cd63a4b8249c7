//! Calls, and one reader per way of writing them.
//!
//! A reader looks at text that begins with an opener. What it says of a text holds for every longer text too,
//! so it makes no difference when it is asked.

pub(crate) mod gemma;
pub(crate) mod json;
pub(crate) mod mistral;
pub(crate) mod xml;

use serde_json::{Value, json};

use crate::parser::End;

/// A function that a model may call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tool {
    /// Its name.
    pub name: String,
    /// What it does, for the prompt.
    pub description: Option<String>,
    /// JSON schema of its arguments; null where none is given.
    pub parameters: Value,
}

impl Tool {
    /// From OpenAI's form (`{"type": "function", "function": {…}}`) or the function alone.
    pub fn from_json(value: &Value) -> Option<Tool> {
        let function = value.get("function").filter(|f| f.is_object()).unwrap_or(value);
        Some(Tool {
            name: function.get("name")?.as_str()?.to_owned(),
            description: function.get("description").and_then(Value::as_str).map(str::to_owned),
            parameters: function.get("parameters").cloned().unwrap_or(Value::Null),
        })
    }
}

/// A call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Name of the function.
    pub name: String,
    /// A JSON object, as text.
    pub arguments: String,
}

impl Call {
    /// With arguments as an object.
    pub fn json(&self) -> Value {
        let arguments: Value = serde_json::from_str(&self.arguments)
            .expect("the arguments of a call are checked when it is read");
        json!({ "name": self.name, "arguments": arguments })
    }
}

/// What a text that begins with an opener is.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// More text will tell.
    Incomplete,
    /// No call.
    No,
    /// Calls, and how many bytes they take.
    Done(usize, Vec<Call>),
}

/// Where to read.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Site<'a> {
    /// Text from the opener on.
    pub text: &'a str,
    /// Set when no more text comes.
    pub end: Option<End>,
    /// What may be called.
    pub tools: &'a [Tool],
}

impl<'a> Site<'a> {
    /// Whether the text at `at` begins with `word`; none: it may still turn out so.
    pub fn has(&self, at: usize, word: &str) -> Option<bool> {
        let rest = &self.text[at..];
        match rest.len() < word.len() && self.end.is_none() && word.starts_with(rest) {
            true => None,
            false => Some(rest.starts_with(word)),
        }
    }

    /// The first byte from `at` on that is no blank.
    pub fn skip_blanks(&self, at: usize) -> usize {
        at + self.text[at..].len() - self.text[at..].trim_start().len()
    }

    /// Skips blanks and then `word`, where it is there. None: more text will tell.
    pub fn skip_closer(&self, at: usize, word: &str) -> Option<usize> {
        let next = self.skip_blanks(at);
        Some(if self.has(next, word)? { next + word.len() } else { at })
    }

    /// Whether a tool of that name was offered.
    pub fn knows(&self, name: &str) -> bool {
        self.tools.iter().any(|tool| tool.name == name)
    }

    /// What an unfinished call is: at the end, none.
    pub fn unfinished(&self) -> Attempt {
        match self.end {
            None => Attempt::Incomplete,
            Some(_) => Attempt::No,
        }
    }
}

/// Length of the longest end of `text` that begins one of `markers` without being all of it.
pub(crate) fn open_tail<'m>(text: &str, markers: impl IntoIterator<Item = &'m str>) -> usize {
    let text = text.as_bytes();
    let tail = |marker: &str| {
        let marker = marker.as_bytes();
        let longest = (marker.len() - 1).min(text.len());
        (1..=longest).rev().find(|&n| text.ends_with(&marker[..n])).unwrap_or(0)
    };
    markers.into_iter().map(tail).max().unwrap_or(0)
}

/// The first marker in `text`: its start and index.
pub(crate) fn first_marker(text: &str, markers: &[&str]) -> Option<(usize, usize)> {
    let found = markers.iter().enumerate().filter_map(|(i, m)| Some((text.find(m)?, i)));
    found.min()
}
