//! Anthropic's messages.

use std::sync::Arc;

use axum::response::Response;
use forebay_chat::{Call, Delta};
use forebay_schedule::Usage;
use serde_json::{Map, Value, json};

use crate::check::{self, Names};
use crate::error::{ApiError, Kind};
use crate::fields::Fields;
use crate::grammar::Shape;
use crate::http::ok_json;
use crate::service::{Event, Finished, Input, Request, Service, ToolChoice};
use crate::stream::{self, Encode};

const MAX_STOPS: usize = 16;
const NAMES: Names =
    Names { prompt: "messages", shape: "output_config.format", schema: "input_schema" };

/// An error as Anthropic writes it.
pub(crate) fn error_body(error: &ApiError) -> Value {
    let kind = match error.kind {
        Kind::Unauthorized => "authentication_error",
        Kind::Forbidden => "permission_error",
        Kind::NoRoute | Kind::NoModel => "not_found_error",
        Kind::TooLarge => "request_too_large",
        Kind::Busy => "rate_limit_error",
        Kind::Full | Kind::Closing => "overloaded_error",
        Kind::Internal => "api_error",
        _ => "invalid_request_error",
    };
    json!({ "type": "error", "error": { "type": kind, "message": error.message } })
}

/// `POST /v1/messages`
pub(crate) async fn messages(service: Arc<Service>, body: Value) -> Result<Response, ApiError> {
    let fields = Fields::of(&body)?;
    let mut request = request(&service, fields)?;
    let max_tokens = fields.count("max_tokens", 0)?;
    request.max_tokens = Some(max_tokens.ok_or_else(|| fields.wrong("max_tokens", "is missing"))?);
    let shows_thinking = shows_thinking(fields)?;
    let streams = fields.bool("stream")?.unwrap_or(false);
    let answers = crate::http::begin(&service, request).await?;
    let mut blocks = Blocks {
        id: answers.id.clone(),
        model: service.info.name.clone(),
        prompt: answers.prompt_tokens,
        shows_thinking,
        open: None,
        index: 0,
        calls: 0,
    };
    if streams {
        return Ok(stream::response(&service, answers, blocks));
    }
    let whole = answers.whole().await?.remove(0);
    let mut content = Vec::new();
    if let Some(thinking) = whole.parsed.reasoning.filter(|_| shows_thinking) {
        content.push(json!({ "type": "thinking", "thinking": thinking, "signature": "" }));
    }
    if let Some(text) = whole.parsed.content {
        content.push(json!({ "type": "text", "text": text }));
    }
    for call in &whole.parsed.tool_calls {
        let mut block = blocks.tool_use(call);
        block["input"] = call.json()["arguments"].take();
        content.push(block);
    }
    let mut message = blocks.message(content.into());
    let (reason, sequence) = stop_reason(&whole.finished);
    message["stop_reason"] = reason.into();
    message["stop_sequence"] = sequence;
    message["usage"] = usage(blocks.prompt, &whole.finished.usage);
    Ok(ok_json(&message))
}

/// `POST /v1/messages/count_tokens`
pub(crate) async fn count_tokens(service: Arc<Service>, body: Value) -> Result<Response, ApiError> {
    let request = request(&service, Fields::of(&body)?)?;
    let count = crate::http::off_the_reactor(move || service.count(&request)).await?;
    Ok(ok_json(&json!({ "input_tokens": count })))
}

fn request(service: &Service, fields: Fields<'_>) -> Result<Request, ApiError> {
    service.check_model(fields.str("model")?)?;
    fields.refuse(&[
        ("mcp_servers", "this server calls none"),
        ("container", "this server runs no code"),
        ("context_management", "send the context that you want"),
        ("inference_geo", "this server computes where it is"),
    ])?;
    fields.only("service_tier", &["auto", "standard_only"], "there is one")?;
    fields.only("speed", &["standard"], "there is one")?;
    let mut messages = Vec::new();
    if let Some(system) = fields.get("system") {
        let text = text_of(system, "system")?;
        if !text.is_empty() {
            messages.push(json!({ "role": "system", "content": text }));
        }
    }
    let given = fields.array("messages")?;
    let given = given.ok_or_else(|| fields.wrong("messages", "is missing"))?;
    for (i, message) in given.iter().enumerate() {
        translate(message, &format!("messages[{i}]"), &mut messages)?;
    }
    let mut sampling = service.sampling();
    if let Some(t) = fields.number("temperature", 0.0..=1.0)? {
        sampling.temperature = t;
    }
    if let Some(p) = fields.number("top_p", 0.0..=1.0)? {
        sampling.top_p = p.max(f32::MIN_POSITIVE);
    }
    if let Some(k) = fields.count("top_k", 0)? {
        sampling.top_k = k;
    }
    let mut kwargs = Map::new();
    if let Some(thinking) = fields.object("thinking")? {
        kwargs.insert("enable_thinking".into(), (thinking.str("type")? != Some("disabled")).into());
    }
    let output = fields.object("output_config")?;
    if let Some(output) = output {
        output.refuse(&[("task_budget", "use `max_tokens`")])?;
    }
    if let Some(effort) = output.map(|o| o.str("effort")).transpose()?.flatten() {
        let effort = if effort == "max" { "high" } else { effort };
        crate::openai::effort_kwargs("output_config.effort", effort, &mut kwargs)?;
    }
    let format = output.and_then(|o| o.get("format")).or(fields.get("output_format"));
    let shape = match format {
        None => None,
        Some(format) if format["type"] == "json_schema" && format["schema"].is_object() => {
            Some(Shape::Schema(format["schema"].clone()))
        }
        Some(format) if format["type"] == "json_schema" => {
            let what = "must be a JSON schema: an object";
            return Err(ApiError::field("output_config.format.schema", what));
        }
        Some(_) => {
            return Err(ApiError::field("output_config.format.type", "must be json_schema"));
        }
    };
    let choice = fields.object("tool_choice")?;
    let tool_choice = match choice.map(|c| c.str("type")).transpose()?.flatten() {
        None if choice.is_some() => return Err(fields.wrong("tool_choice", "has no type")),
        None | Some("auto") => ToolChoice::Auto,
        Some("none") => ToolChoice::None,
        Some("any") => ToolChoice::Required,
        Some("tool") => {
            let name = choice.map(|c| c.str("name")).transpose()?.flatten();
            let name = name.ok_or_else(|| fields.wrong("tool_choice", "has no name"))?;
            ToolChoice::Named(name.to_owned())
        }
        Some(_) => {
            return Err(fields.wrong("tool_choice", "must be of type auto, any, tool or none"));
        }
    };
    let single = choice.map(|c| c.bool("disable_parallel_tool_use")).transpose()?.flatten();
    Ok(Request {
        names: NAMES,
        input: Input::Chat { messages, kwargs },
        tools: tools(fields)?,
        tool_choice,
        parallel_calls: !single.unwrap_or(false),
        shape,
        max_tokens: None,
        sampling,
        bias: Vec::new(),
        echo: false,
        ignores_ends: false,
        stops: fields.strings("stop_sequences", MAX_STOPS)?,
        n: 1,
        logprobs: None,
        steering: service.steering_of(fields)?,
    })
}

fn shows_thinking(fields: Fields<'_>) -> Result<bool, ApiError> {
    let Some(thinking) = fields.object("thinking")? else { return Ok(false) };
    thinking.only("display", &["summarized", "omitted"], "thinking is sent whole or not at all")?;
    let shown = thinking.str("display")? != Some("omitted");
    match thinking.str("type")? {
        Some("disabled") => Ok(false),
        Some("enabled" | "adaptive") => Ok(shown),
        _ => Err(thinking.wrong("type", "must be enabled, adaptive or disabled")),
    }
}

fn tools(fields: Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let found = check::tools(fields, "input_schema", |tool, path| {
        let parts = Fields::inside(tool, path);
        if let Some(kind) = parts.str("type")?.filter(|kind| *kind != "custom") {
            let what = format!("`{kind}` is a tool of Anthropic's own");
            return Err(ApiError::unsupported(parts.path("type"), &what));
        }
        if parts.bool("defer_loading")? == Some(true) {
            let path = parts.path("defer_loading");
            return Err(ApiError::unsupported(path, "all tools are in the prompt"));
        }
        Ok((tool, path.to_owned()))
    })?;
    let one = |tool: &Value| {
        json!({
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool["input_schema"],
            },
        })
    };
    Ok(found.into_iter().map(one).collect())
}

/// Text of a string or of text blocks.
fn text_of(content: &Value, path: &str) -> Result<String, ApiError> {
    let blocks = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(blocks) => blocks,
        _ => return Err(ApiError::field(path, "must be a string or a list of text blocks")),
    };
    let mut texts = Vec::new();
    for (i, block) in blocks.iter().enumerate() {
        let path = format!("{path}[{i}]");
        match block["type"].as_str() {
            Some("text") => texts.push(text_in(block, "text", &path)?),
            _ => return Err(check::refused_part(&path, block)),
        }
    }
    Ok(texts.join("\n"))
}

/// A text that a block must have.
fn text_in<'b>(block: &'b Value, key: &str, path: &str) -> Result<&'b str, ApiError> {
    let wrong = || ApiError::field(format!("{path}.{key}"), "must be a string");
    block[key].as_str().ok_or_else(wrong)
}

/// One message to OpenAI's form: results of tools become messages of their own.
fn translate(message: &Value, path: &str, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let role = message["role"].as_str();
    let role = role
        .filter(|r| ["user", "assistant", "system"].contains(r))
        .ok_or_else(|| ApiError::field(format!("{path}.role"), "must be `user` or `assistant`"))?;
    let blocks = match &message["content"] {
        Value::String(text) => {
            out.push(json!({ "role": role, "content": text }));
            return Ok(());
        }
        Value::Array(blocks) => blocks,
        _ => {
            let what = "must be a string or a list of blocks";
            return Err(ApiError::field(format!("{path}.content"), what));
        }
    };
    let mut texts = Vec::new();
    let mut thinking = Vec::new();
    let mut calls = Vec::new();
    let mut results = Vec::new();
    for (i, block) in blocks.iter().enumerate() {
        let path = format!("{path}.content[{i}]");
        match block["type"].as_str() {
            Some("text") => texts.push(text_in(block, "text", &path)?),
            Some("thinking") => thinking.push(text_in(block, "thinking", &path)?),
            Some("redacted_thinking") => {}
            Some("tool_use") => {
                let parts = block.as_object().expect("it has a type");
                check::call(Fields::inside(parts, &path), "input")?;
                calls.push(json!({
                    "id": block["id"],
                    "type": "function",
                    "function": { "name": block["name"], "arguments": block["input"] },
                }));
            }
            Some("tool_result") => {
                let content = match &block["content"] {
                    Value::Null => String::new(),
                    content => text_of(content, &format!("{path}.content"))?,
                };
                results.push(json!({
                    "role": "tool", "tool_call_id": block["tool_use_id"], "content": content,
                }));
            }
            _ => return Err(check::refused_part(&path, block)),
        }
    }
    out.extend(results.iter().cloned());
    if !texts.is_empty() || !calls.is_empty() || results.is_empty() {
        let mut own = json!({ "role": role, "content": texts.join("\n") });
        if !calls.is_empty() {
            own["tool_calls"] = calls.into();
        }
        if !thinking.is_empty() {
            own["reasoning_content"] = thinking.join("\n").into();
        }
        out.push(own);
    }
    Ok(())
}

fn stop_reason(finished: &Finished) -> (&'static str, Value) {
    match (&finished.stop, finished.reason) {
        (Some(stop), _) => ("stop_sequence", stop.as_str().into()),
        (None, "tool_calls") => ("tool_use", Value::Null),
        (None, "length") => ("max_tokens", Value::Null),
        (None, _) => ("end_turn", Value::Null),
    }
}

fn usage(prompt: usize, usage: &Usage) -> Value {
    json!({
        "input_tokens": prompt - usage.cached.min(prompt),
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.generated,
    })
}

/// A message in blocks.
struct Blocks {
    id: String,
    model: String,
    prompt: usize,
    shows_thinking: bool,
    /// Type of the block that is open.
    open: Option<&'static str>,
    /// Index of the block that is open, or of the next.
    index: usize,
    calls: usize,
}

impl Blocks {
    fn message(&self, content: Value) -> Value {
        json!({
            "id": format!("msg_{}", self.id),
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": content,
            "stop_reason": null,
            "stop_sequence": null,
        })
    }

    fn tool_use(&mut self, call: &Call) -> Value {
        self.calls += 1;
        let id = format!("toolu_{}_{}", self.id, self.calls);
        json!({ "type": "tool_use", "id": id, "name": call.name, "input": {} })
    }

    fn close(&mut self) -> String {
        let Some(kind) = self.open.take() else { return String::new() };
        let index = self.index;
        self.index += 1;
        let mut out = String::new();
        if kind == "thinking" {
            let delta = json!({ "type": "signature_delta", "signature": "" });
            out = event("content_block_delta", json!({ "index": index, "delta": delta }));
        }
        out + &event("content_block_stop", json!({ "index": index }))
    }

    /// Opens a block of this kind, unless it is open.
    fn ensure(&mut self, kind: &'static str, block: Value) -> String {
        if self.open == Some(kind) {
            return String::new();
        }
        let closed = self.close();
        self.open = Some(kind);
        closed
            + &event("content_block_start", json!({ "index": self.index, "content_block": block }))
    }

    fn delta(&self, delta: Value) -> String {
        event("content_block_delta", json!({ "index": self.index, "delta": delta }))
    }
}

fn event(kind: &str, mut value: Value) -> String {
    value["type"] = kind.into();
    format!("event: {kind}\ndata: {value}\n\n")
}

impl Encode for Blocks {
    fn start(&mut self) -> String {
        let mut message = self.message(json!([]));
        message["usage"] = usage(self.prompt, &Usage::default());
        event("message_start", json!({ "message": message })) + &event("ping", json!({}))
    }

    fn event(&mut self, _: usize, happened: Event) -> String {
        match happened {
            Event::Piece { deltas, .. } => {
                let mut out = String::new();
                for delta in deltas {
                    out += &match delta {
                        Delta::Reasoning(_) if !self.shows_thinking => continue,
                        Delta::Reasoning(text) => {
                            let block =
                                json!({ "type": "thinking", "thinking": "", "signature": "" });
                            let opened = self.ensure("thinking", block);
                            opened
                                + &self.delta(json!({ "type": "thinking_delta", "thinking": text }))
                        }
                        Delta::Content(text) => {
                            let opened = self.ensure("text", json!({ "type": "text", "text": "" }));
                            opened + &self.delta(json!({ "type": "text_delta", "text": text }))
                        }
                        Delta::Call(call) => {
                            let closed = self.close();
                            let block = self.tool_use(&call);
                            let opened = self.ensure("tool_use", block);
                            let arguments = call.arguments;
                            let delta =
                                json!({ "type": "input_json_delta", "partial_json": arguments });
                            closed + &opened + &self.delta(delta) + &self.close()
                        }
                    };
                }
                out
            }
            Event::Done(finished) => {
                let (reason, sequence) = stop_reason(&finished);
                let delta = json!({ "stop_reason": reason, "stop_sequence": sequence });
                let usage = usage(self.prompt, &finished.usage);
                self.close() + &event("message_delta", json!({ "delta": delta, "usage": usage }))
            }
            Event::Failed(error) => event("error", json!({ "error": error_body(&error)["error"] })),
        }
    }

    fn end(&mut self) -> String {
        event("message_stop", json!({}))
    }

    fn keep_alive(&mut self) -> String {
        event("ping", json!({}))
    }
}
