//! What all APIs ask of functions and messages, in the words of the one that was asked. What is dropped or shown as
//! nothing by a template is refused here instead.

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::fields::Fields;

/// Longest name of a function.
const MAX_NAME: usize = 128;

/// What an API calls the parts of a request that faults are found in late.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names {
    /// What the prompt is made of.
    pub prompt: &'static str,
    /// The shape that is asked for.
    pub shape: &'static str,
    /// The schema inside a tool.
    pub schema: &'static str,
}

/// Names of OpenAI's chat completions.
pub(crate) const CHAT: Names =
    Names { prompt: "messages", shape: "response_format", schema: "function.parameters" };

/// The object of a tool that names the function, with its path.
pub(crate) type Found<'a> = (&'a Map<String, Value>, String);

/// The list `tools`. `find` finds the object of one that names its function, `schema` is the field of it that describes
/// the arguments.
pub(crate) fn tools<'a>(
    fields: Fields<'a>,
    schema: &str,
    find: impl Fn(&'a Map<String, Value>, &str) -> Result<Found<'a>, ApiError>,
) -> Result<Vec<&'a Value>, ApiError> {
    let mut names = HashSet::new();
    let mut tools = Vec::new();
    for (i, tool) in fields.array("tools")?.into_iter().flatten().enumerate() {
        let path = format!("tools[{i}]");
        let object = tool.as_object();
        let object = object.ok_or_else(|| ApiError::field(path.as_str(), "must be an object"))?;
        let (function, path) = find(object, &path)?;
        let parts = Fields::inside(function, &path);
        let name = parts.str("name")?.ok_or_else(|| parts.wrong("name", "is missing"))?;
        if let Some(what) = unfit(name) {
            return Err(parts.wrong("name", what));
        }
        if !names.insert(name.to_owned()) {
            let what = format!("`{name}` is there twice; give each function a name of its own");
            return Err(parts.wrong("name", what));
        }
        parts.str("description")?;
        if parts.get(schema).is_some_and(|schema| !schema.is_object()) {
            return Err(parts.wrong(schema, "must be a JSON schema: an object"));
        }
        tools.push(tool);
    }
    Ok(tools)
}

/// The object `function` of a tool, as OpenAI and Ollama have it.
pub(crate) fn nested<'a>(tool: &'a Map<String, Value>, path: &str) -> Result<Found<'a>, ApiError> {
    let path = format!("{path}.function");
    match tool.get("function") {
        Some(Value::Object(function)) => Ok((function, path)),
        None | Some(Value::Null) => Err(ApiError::field(path, "is missing")),
        Some(_) => Err(ApiError::field(path, "must be an object")),
    }
}

/// Why a name cannot stand in every language of calls.
fn unfit(name: &str) -> Option<String> {
    let fits = |c: char| c.is_alphanumeric() || "_-.:/".contains(c);
    if name.is_empty() {
        return Some("must not be empty".to_owned());
    }
    if name.len() > MAX_NAME {
        return Some(format!("must have at most {MAX_NAME} bytes"));
    }
    (!name.chars().all(fits)).then(|| "must be letters, digits, and any of `_-.:/`".to_owned())
}

/// A call that was made before: its name, and its arguments in the field `arguments`.
pub(crate) fn call(call: Fields<'_>, arguments: &str) -> Result<(), ApiError> {
    let name = call.str("name")?.ok_or_else(|| call.wrong("name", "is missing"))?;
    if name.is_empty() {
        return Err(call.wrong("name", "must not be empty"));
    }
    let is_object = match call.get(arguments) {
        None | Some(Value::Object(_)) => true,
        Some(Value::String(text)) => {
            text.trim().is_empty() || serde_json::from_str::<Map<String, Value>>(text).is_ok()
        }
        Some(_) => false,
    };
    match is_object {
        true => Ok(()),
        false => Err(call.wrong(arguments, "must be a JSON object")),
    }
}

/// A part of a list that is no text, refused by what it is.
pub(crate) fn refused_part(path: &str, part: &Value) -> ApiError {
    match part["type"].as_str() {
        Some(kind) => {
            let kind: String = kind.chars().take(60).collect();
            let what = format!("type `{kind}` is not supported; send text only");
            ApiError::field(path, what)
        }
        None => ApiError::field(path, "must be an object with a `type` and a `text`"),
    }
}

/// Messages as OpenAI and Ollama have them, as templates may see them.
pub(crate) fn messages(messages: &[Value]) -> Result<Vec<Value>, ApiError> {
    let one = |(i, message): (usize, &Value)| {
        let path = format!("messages[{i}]");
        let object = message.as_object();
        let object = object.ok_or_else(|| ApiError::field(path.as_str(), "must be an object"))?;
        let parts = Fields::inside(object, &path);
        let role = parts.str("role")?.ok_or_else(|| parts.wrong("role", "must be a string"))?;
        match role {
            "system" | "developer" | "user" | "assistant" | "tool" => {}
            "function" => {
                return Err(ApiError::unsupported(parts.path("role"), "use the role `tool`"));
            }
            _ => {
                let what = "must be system, developer, user, assistant or tool";
                return Err(parts.wrong("role", what));
            }
        }
        parts.refuse(&[
            ("function_call", "use `tool_calls`"),
            ("audio", "this model reads text only"),
            ("images", "this model reads text only"),
        ])?;
        for name in ["name", "reasoning_content", "reasoning", "thinking"] {
            parts.str(name)?;
        }
        let silent = parts.get("content").is_none();
        if silent && matches!(role, "system" | "developer" | "user") {
            return Err(parts.wrong("content", "is missing"));
        }
        if role != "assistant" && parts.array("tool_calls")?.is_some_and(|calls| !calls.is_empty())
        {
            return Err(parts.wrong("tool_calls", "only messages of the assistant hold calls"));
        }
        let mut message = message.clone();
        if silent && let Some(refusal) = parts.str("refusal")? {
            message["content"] = refusal.into();
        }
        Ok(message)
    };
    messages.iter().enumerate().map(one).collect()
}
