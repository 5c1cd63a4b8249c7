//! A chat request to ids, such that nothing a user wrote becomes a control token.
//!
//! The template mixes its own markers with the user's text into one string, and text alone does not tell which is
//! which. So before rendering, the first character of every marker in user text, and of every beginning or end
//! of a marker at the edges of a user's string (the template or the next string might supply the rest), is
//! replaced by a private-use character; templates still see strings of the same length and nearly the same
//! letters. The markers in the rendered text are then the template's alone. Between them the replaced
//! characters are put back and encoded as ordinary text.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::error::{Result, TextError};
use crate::template::{ChatRequest, ChatTemplate, PLACEHOLDERS};
use crate::tokenizer::Tokenizer;

/// A stretch of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A control token that the template wrote.
    Marker {
        /// Its text.
        text: String,
        /// Its id.
        id: u32,
    },
    /// Ordinary text, whoever wrote it.
    Text(String),
}

/// A rendered prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prompt {
    /// Markers and what lies between.
    pub pieces: Vec<Piece>,
    /// All of it, the begin token included.
    pub ids: Vec<u32>,
}

impl Prompt {
    /// The rendered text.
    pub fn text(&self) -> String {
        let text = |piece: &Piece| match piece {
            Piece::Marker { text, .. } | Piece::Text(text) => text.clone(),
        };
        self.pieces.iter().map(text).collect()
    }
}

/// Renders a request and turns it into ids. The begin token is put in front where the model wants one and the
/// template did not write it; none is ever taken away.
pub fn render_prompt(
    template: &ChatTemplate,
    tokenizer: &Tokenizer,
    request: &ChatRequest,
) -> Result<Prompt> {
    let mut request = request.normalized(template.takes_parts())?;
    let mut mask = Mask::new(tokenizer, template);
    mask.request(&mut request)?;
    if request.bos_token.is_none() {
        request.bos_token =
            template.own_token("bos_token").or(tokenizer.bos_text().map(Into::into));
    }
    if request.eos_token.is_none() {
        request.eos_token =
            template.own_token("eos_token").or(tokenizer.eos_text().map(Into::into));
    }
    let rendered = template.render_normal(&request).map_err(|error| mask.restore_error(error))?;

    let mut pieces = Vec::new();
    let mut ids = Vec::new();
    let mut rest = rendered.as_str();
    while !rest.is_empty() {
        let found = tokenizer.find_marker(rest);
        let (text, after) = rest.split_at(found.map_or(rest.len(), |(start, _)| start));
        if !text.is_empty() {
            let text = mask.restore(text);
            ids.extend(tokenizer.encode_ordinary(&text, pieces.is_empty())?);
            pieces.push(Piece::Text(text));
        }
        rest = after;
        if let Some((_, index)) = found {
            let (text, id) = &tokenizer.markers()[index];
            ids.push(*id);
            pieces.push(Piece::Marker { text: text.clone(), id: *id });
            rest = &rest[text.len()..];
        }
    }
    tokenizer.begin(&mut ids);
    Ok(Prompt { pieces, ids })
}

/// Roles are part of a template's language, as in `'<|' + role + '|>'`.
const ROLES: [&str; 8] =
    ["system", "developer", "user", "assistant", "tool", "function", "ipython", "tool_results"];

/// Hides markers in user text, and undoes it.
struct Mask<'t> {
    tokenizer: &'t Tokenizer,
    reserved: Vec<char>,
    stands_for: BTreeMap<char, char>,
    placeholder_of: BTreeMap<char, char>,
}

impl<'t> Mask<'t> {
    fn new(tokenizer: &'t Tokenizer, template: &ChatTemplate) -> Self {
        let in_template =
            template.sources().flat_map(str::chars).filter(|c| PLACEHOLDERS.contains(c));
        Self {
            tokenizer,
            reserved: in_template.collect(),
            stands_for: BTreeMap::new(),
            placeholder_of: BTreeMap::new(),
        }
    }

    fn request(&mut self, request: &mut ChatRequest) -> Result<()> {
        for message in &mut request.messages {
            let role =
                message["role"].as_str().filter(|role| ROLES.contains(role)).map(str::to_owned);
            self.value(message)?;
            if let Some(role) = role {
                message["role"] = role.into();
            }
        }
        for tool in request.tools.iter_mut().flatten() {
            self.value(tool)?;
        }
        for value in request.kwargs.values_mut() {
            self.value(value)?;
        }
        Ok(())
    }

    /// Every string inside, keys included.
    fn value(&mut self, value: &mut Value) -> Result<()> {
        match value {
            Value::String(text) => self.text(text)?,
            Value::Array(items) => items.iter_mut().try_for_each(|item| self.value(item))?,
            Value::Object(map) => {
                let mut masked = Map::with_capacity(map.len());
                for (mut key, mut value) in std::mem::take(map) {
                    self.text(&mut key)?;
                    self.value(&mut value)?;
                    masked.insert(key, value);
                }
                *map = masked;
            }
            _ => {}
        }
        Ok(())
    }

    fn text(&mut self, text: &mut String) -> Result<()> {
        let mut at = self.risks(text);
        at.extend(text.char_indices().filter(|(_, c)| PLACEHOLDERS.contains(c)).map(|(at, _)| at));
        if at.is_empty() {
            return Ok(());
        }
        let mut out = String::with_capacity(text.len() + 4 * at.len());
        for (start, c) in text.char_indices() {
            out.push(if at.contains(&start) { self.placeholder(c)? } else { c });
        }
        *text = out;
        Ok(())
    }

    /// Where a marker begins, or might begin or end once this string stands among others.
    fn risks(&self, text: &str) -> std::collections::BTreeSet<usize> {
        let mut at = std::collections::BTreeSet::new();
        let mut from = 0;
        while let Some((start, _)) = self.tokenizer.find_marker(&text[from..]) {
            at.insert(from + start);
            from += start + text[from + start..].chars().next().map_or(1, char::len_utf8);
        }
        for (marker, _) in self.tokenizer.markers() {
            // Whole words occur inside markers (`<|start|>`) and mean nothing by themselves.
            let word = text.chars().all(|c| c.is_alphanumeric() || c == '_' || c == '-');
            let inner = marker.char_indices().skip(1).map(|(start, _)| start);
            for cut in inner {
                let (head, tail) = marker.split_at(cut);
                if text.ends_with(head) {
                    at.insert(text.len() - head.len());
                }
                if text.starts_with(tail) || (!word && !text.is_empty() && tail.starts_with(text)) {
                    at.insert(0);
                }
            }
        }
        at
    }

    fn placeholder(&mut self, c: char) -> Result<char> {
        if let Some(placeholder) = self.placeholder_of.get(&c) {
            return Ok(*placeholder);
        }
        let free = PLACEHOLDERS
            .into_iter()
            .find(|p| !self.stands_for.contains_key(p) && !self.reserved.contains(p));
        let placeholder = free.ok_or_else(|| TextError::BadRequest {
            field: "messages".to_owned(),
            detail: "too many different private-use characters (U+F1000 to U+F1FFF)".to_owned(),
        })?;
        self.stands_for.insert(placeholder, c);
        self.placeholder_of.insert(c, placeholder);
        Ok(placeholder)
    }

    fn restore(&self, text: &str) -> String {
        text.chars().map(|c| self.stands_for.get(&c).copied().unwrap_or(c)).collect()
    }

    /// A refusal may quote the user.
    fn restore_error(&self, error: TextError) -> TextError {
        match error {
            TextError::Refused { message } => {
                TextError::Refused { message: self.restore(&message) }
            }
            TextError::Template { line, detail } => {
                TextError::Template { line, detail: self.restore(&detail) }
            }
            other => other,
        }
    }
}
