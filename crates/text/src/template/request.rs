//! A chat request, and the one form in which templates see it.
//!
//! Clients write the same history in many ways: content absent, null or empty; arguments as an object or as a
//! string holding one. Templates get one form, so that all of these render alike.

use serde::Deserialize;
use serde_json::{Map, Value};

use super::clock::Clock;
use super::{json, meter};
use crate::error::{Result, TextError, one_line};

/// What a template renders.
#[derive(Clone, Debug, Deserialize)]
#[serde(default)]
pub struct ChatRequest {
    /// OpenAI messages.
    pub messages: Vec<Value>,
    /// OpenAI tools.
    pub tools: Option<Vec<Value>>,
    /// End with the opening of the model's answer. True unless told.
    pub add_generation_prompt: bool,
    /// Further variables of the template, such as `enable_thinking`.
    pub kwargs: Map<String, Value>,
    /// Text of the begin token, where it is not the model's.
    pub bos_token: Option<String>,
    /// Text of the end token, where it is not the model's.
    pub eos_token: Option<String>,
    /// The clock that the template reads, as `2026-01-02T03:04:05`. The system's (UTC) unless told.
    pub now: Option<String>,
}

impl Default for ChatRequest {
    fn default() -> Self {
        Self {
            messages: Vec::new(),
            tools: None,
            add_generation_prompt: true,
            kwargs: Map::new(),
            bos_token: None,
            eos_token: None,
            now: None,
        }
    }
}

/// Names under which clients send a message's reasoning, the standard one first.
const REASONING: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

impl ChatRequest {
    pub(crate) fn clock(&self) -> Result<Clock> {
        match &self.now {
            None => Ok(Clock::system()),
            Some(text) => Clock::parse(text).ok_or_else(|| {
                let text = shown(text);
                bad("now", format!("`{text}` is not a time such as 2026-01-02T03:04:05"))
            }),
        }
    }

    /// About the bytes of all that a template sees.
    pub(crate) fn bytes(&self) -> u64 {
        let tools = self.tools.as_deref().unwrap_or_default();
        let values = self.messages.iter().chain(tools).chain(self.kwargs.values());
        values.map(meter::json_bytes).sum()
    }

    /// Whether templates could see it: what is wrong with its messages or tools, before it is changed.
    pub fn check(&self) -> Result<()> {
        self.normalized(false).map(|_| ())
    }

    /// The form that templates see. `keep_parts` leaves lists of text parts as they are.
    pub(crate) fn normalized(&self, keep_parts: bool) -> Result<Self> {
        let mut request = self.clone();
        for (index, message) in request.messages.iter_mut().enumerate() {
            normalize(message, &format!("messages[{index}]"), keep_parts)?;
        }
        for (index, tool) in request.tools.iter().flatten().enumerate() {
            if !tool.is_object() {
                return Err(bad(format!("tools[{index}]"), "must be an object"));
            }
        }
        Ok(request)
    }

    /// The same with each call's `arguments` as a string, or `None` where there is no call.
    pub(crate) fn with_text_arguments(&self) -> Option<Self> {
        let mut request = self.clone();
        let mut any = false;
        let calls = request.messages.iter_mut().filter_map(|message| message.get_mut("tool_calls"));
        for call in calls.filter_map(Value::as_array_mut).flatten() {
            let function = if call["function"].is_object() { &mut call["function"] } else { call };
            if let Some(arguments) = function.get_mut("arguments") {
                *arguments = json::dumps(arguments).into();
                any = true;
            }
        }
        any.then_some(request)
    }
}

/// A client's text in a message: on one line, and not all of it.
fn shown(text: &str) -> String {
    one_line(text).chars().take(60).collect()
}

fn bad(field: impl Into<String>, detail: impl Into<String>) -> TextError {
    TextError::BadRequest { field: field.into(), detail: detail.into() }
}

fn normalize(message: &mut Value, path: &str, keep_parts: bool) -> Result<()> {
    let message = message.as_object_mut().ok_or_else(|| bad(path, "must be an object"))?;
    if !message.get("role").is_some_and(Value::is_string) {
        return Err(bad(format!("{path}.role"), "must be a string"));
    }
    message.retain(|_, value| !value.is_null());
    if message.get("tool_calls").and_then(Value::as_array).is_some_and(Vec::is_empty) {
        message.remove("tool_calls");
    }

    normalize_content(message, path, keep_parts)?;
    let reasoning = REASONING.iter().find_map(|name| message.get(*name)).cloned();
    if let Some(reasoning) = reasoning {
        message.entry("thinking").or_insert_with(|| reasoning.clone());
        message.insert("reasoning_content".to_owned(), reasoning);
    }

    let Some(calls) = message.get_mut("tool_calls") else {
        return Ok(());
    };
    let calls =
        calls.as_array_mut().ok_or_else(|| bad(format!("{path}.tool_calls"), "must be a list"))?;
    for (index, call) in calls.iter_mut().enumerate() {
        normalize_call(call, &format!("{path}.tool_calls[{index}]"))?;
    }
    Ok(())
}

fn normalize_content(message: &mut Map<String, Value>, path: &str, keep_parts: bool) -> Result<()> {
    let content = message.entry("content").or_insert_with(|| "".into());
    let parts = match content {
        Value::String(_) => return Ok(()),
        Value::Array(parts) => parts,
        _ => return Err(bad(format!("{path}.content"), "must be a string or a list of parts")),
    };
    let mut texts = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        let field = format!("{path}.content[{index}]");
        let kind = part["type"].as_str().unwrap_or(if part["text"].is_string() {
            "text"
        } else {
            "unknown"
        });
        if kind != "text" {
            return Err(TextError::UnsupportedPart { field, kind: shown(kind) });
        }
        let text = part["text"]
            .as_str()
            .ok_or_else(|| bad(format!("{field}.text"), "must be a string"))?;
        texts.push(text);
    }
    if texts.is_empty() || !keep_parts {
        *content = texts.join("\n").into();
    }
    Ok(())
}

/// Arguments become an object, whatever form they came in.
fn normalize_call(call: &mut Value, path: &str) -> Result<()> {
    if !call.is_object() {
        return Err(bad(path, "must be an object"));
    }
    let function = if call["function"].is_object() { &mut call["function"] } else { call };
    if !function["name"].is_string() {
        return Err(bad(path, "has no function name"));
    }
    let arguments = &mut function["arguments"];
    let not_an_object =
        |found: &str| bad(path, format!("`arguments` must be a JSON object, found {found}"));
    match arguments {
        Value::Object(_) => {}
        Value::Null => *arguments = Map::new().into(),
        // Some clients send nothing for a call without arguments.
        Value::String(text) if text.trim().is_empty() => *arguments = Map::new().into(),
        Value::String(text) => match serde_json::from_str(text) {
            Ok(Value::Object(object)) => *arguments = object.into(),
            Ok(_) => return Err(not_an_object("a string holding another kind of JSON")),
            Err(_) => return Err(not_an_object("a string that is not JSON")),
        },
        Value::Array(_) => return Err(not_an_object("a list")),
        Value::Bool(_) | Value::Number(_) => return Err(not_an_object("a plain value")),
    }
    Ok(())
}
