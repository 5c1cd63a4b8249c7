//! OpenAI's responses. Nothing is stored: a request brings its whole conversation.

use std::sync::Arc;

use axum::response::Response;
use forebay_chat::Delta;
use forebay_schedule::Usage;
use serde_json::{Map, Value, json};

use crate::check::{self, Names};
use crate::error::{ApiError, Kind};
use crate::fields::Fields;
use crate::grammar::Shape;
use crate::http::ok_json;
use crate::openai;
use crate::service::{Event, Input, Request, Service, Whole};
use crate::stream::{self, Encode};

/// `POST /v1/responses`
pub(crate) async fn responses(service: Arc<Service>, body: Value) -> Result<Response, ApiError> {
    let fields = Fields::of(&body)?;
    let request = request(&service, fields)?;
    let streams = fields.bool("stream")?.unwrap_or(false);
    let answers = crate::http::begin(&service, request).await?;
    let mut output =
        Output::new(&service, &answers.id, answers.created, answers.prompt_tokens, &body);
    if streams {
        return Ok(stream::response(&service, answers, output));
    }
    let whole = answers.whole().await?.remove(0);
    output.take(&whole);
    Ok(ok_json(&output.response()))
}

fn request(service: &Service, fields: Fields<'_>) -> Result<Request, ApiError> {
    service.check_model(fields.str("model")?)?;
    fields.refuse(&[
        ("previous_response_id", "nothing is stored; send the whole conversation as `input`"),
        ("conversation", "nothing is stored; send the whole conversation as `input`"),
        ("background", "ask with `stream`"),
        ("prompt", "send `input`"),
        ("context_management", "send the context that you want"),
        ("store", "nothing is stored"),
    ])?;
    openai::usual_only(fields)?;
    if let Some(text) = fields.object("text")? {
        text.only("verbosity", &["medium"], "or ask for it in a message")?;
    }
    if let Some(options) = fields.object("stream_options")? {
        openai::unpadded(options)?;
    }
    if fields.count("top_logprobs", 0)?.unwrap_or(0) > 0 {
        return Err(ApiError::unsupported("top_logprobs", "use /v1/chat/completions"));
    }
    // Reasoning is sent as it is, so there is nothing to encrypt; other entries are of tools that are not here.
    if fields.array("include")?.into_iter().flatten().any(|i| i == "message.output_text.logprobs") {
        return Err(ApiError::unsupported("include", "use /v1/chat/completions for `logprobs`"));
    }
    if fields.str("truncation")?.is_some_and(|t| t != "disabled") {
        return Err(ApiError::unsupported("truncation", "nothing is cut silently; use `disabled`"));
    }
    let mut messages = Vec::new();
    if let Some(text) = fields.str("instructions")? {
        messages.push(json!({ "role": "system", "content": text }));
    }
    match fields.get("input").ok_or_else(|| fields.wrong("input", "is missing"))? {
        Value::String(text) => messages.push(json!({ "role": "user", "content": text })),
        Value::Array(items) => {
            for (i, item) in items.iter().enumerate() {
                translate(item, &format!("input[{i}]"), &mut messages)?;
            }
        }
        _ => return Err(fields.wrong("input", "must be a string or a list of items")),
    }
    let mut kwargs = Map::new();
    let reasoning = fields.object("reasoning")?;
    for name in ["summary", "generate_summary"] {
        let instead = "reasoning is sent whole";
        reasoning.map_or(Ok(()), |r| r.only(name, &["auto"], instead))?;
    }
    if let Some(effort) = reasoning.map(|r| r.str("effort")).transpose()?.flatten() {
        openai::effort_kwargs("reasoning.effort", effort, &mut kwargs)?;
    }
    Ok(Request {
        names: Names { prompt: "input", shape: "text.format", schema: "parameters" },
        input: Input::Chat { messages, kwargs },
        tools: tools(fields)?,
        tool_choice: openai::tool_choice(fields, |choice| {
            choice.str("name")?.ok_or_else(|| choice.wrong("name", "is missing"))
        })?,
        parallel_calls: fields.bool("parallel_tool_calls")?.unwrap_or(true),
        shape: text_format(fields)?,
        max_tokens: fields.count("max_output_tokens", 0)?,
        sampling: openai::sampling(service, fields)?,
        bias: Vec::new(),
        echo: false,
        ignores_ends: false,
        stops: Vec::new(),
        n: 1,
        logprobs: None,
        steering: service.steering_of(fields)?,
    })
}

fn text_format(fields: Fields<'_>) -> Result<Option<Shape>, ApiError> {
    let Some(format) = fields.object("text")?.and_then(|text| text.get("format")) else {
        return Ok(None);
    };
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Shape::JsonObject)),
        Some("json_schema") if format["schema"].is_object() => {
            Ok(Some(Shape::Schema(format["schema"].clone())))
        }
        Some("json_schema") => Err(ApiError::field("text.format.schema", "must be an object")),
        _ => Err(ApiError::field("text.format.type", "must be text, json_object or json_schema")),
    }
}

/// Tools, whose functions lie flat in this API.
fn tools(fields: Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let found = check::tools(fields, "parameters", |tool, path| {
        let kind = Fields::inside(tool, path);
        match kind.str("type")? {
            Some("function") => Ok((tool, path.to_owned())),
            Some(other) => {
                let what = format!("`{other}` is no function");
                Err(ApiError::unsupported(kind.path("type"), &what))
            }
            None => Err(kind.wrong("type", "must be `function`")),
        }
    })?;
    let one = |tool: &Value| {
        json!({
            "type": "function",
            "function": {
                "name": tool["name"],
                "description": tool["description"],
                "parameters": tool["parameters"],
            },
        })
    };
    Ok(found.into_iter().map(one).collect())
}

/// One item of the input to OpenAI's chat form. Items of one turn join in one message.
fn translate(item: &Value, path: &str, out: &mut Vec<Value>) -> Result<(), ApiError> {
    let assistant = |out: &mut Vec<Value>| {
        if out.last().is_none_or(|last| last["role"] != "assistant") {
            out.push(json!({ "role": "assistant", "content": "" }));
        }
    };
    let parts = item.as_object().ok_or_else(|| ApiError::field(path, "must be an object"))?;
    let parts = Fields::inside(parts, path);
    match parts.str("type")? {
        None | Some("message") => {
            let role = parts.str("role")?.ok_or_else(|| parts.wrong("role", "must be a string"))?;
            if !["system", "developer", "user", "assistant"].contains(&role) {
                let what = "must be system, developer, user or assistant";
                return Err(parts.wrong("role", what));
            }
            let content = content(&item["content"], &parts.path("content"))?;
            if role == "assistant" && out.last().is_some_and(|last| last["role"] == "assistant") {
                let last = out.last_mut().expect("there is one");
                if last["content"] == "" {
                    last["content"] = content.into();
                    return Ok(());
                }
            }
            out.push(json!({ "role": role, "content": content }));
        }
        Some("function_call") => {
            check::call(parts, "arguments")?;
            assistant(out);
            let last = out.last_mut().expect("one was pushed");
            let call = json!({
                "id": item["call_id"],
                "type": "function",
                "function": { "name": item["name"], "arguments": item["arguments"] },
            });
            match last["tool_calls"].as_array_mut() {
                Some(calls) => calls.push(call),
                None => last["tool_calls"] = json!([call]),
            }
        }
        Some("function_call_output") => {
            let content = content(&item["output"], &parts.path("output"))?;
            let id = &item["call_id"];
            out.push(json!({ "role": "tool", "tool_call_id": id, "content": content }));
        }
        Some("reasoning") => {
            let (own, summary) = (parts.array("content")?, parts.array("summary")?);
            let all = own.into_iter().flatten().chain(summary.into_iter().flatten());
            let texts: Vec<&str> = all.filter_map(|part| part["text"].as_str()).collect();
            if !texts.is_empty() {
                out.push(json!({
                    "role": "assistant", "content": "", "reasoning_content": texts.join("\n"),
                }));
            }
        }
        Some(kind) => {
            let what = format!("items of type `{kind}` are not supported");
            return Err(ApiError::field(path, what));
        }
    }
    Ok(())
}

/// Text of a string or of parts.
fn content(content: &Value, path: &str) -> Result<String, ApiError> {
    let parts = match content {
        Value::String(text) => return Ok(text.clone()),
        Value::Array(parts) => parts,
        _ => return Err(ApiError::field(path, "must be a string or a list of parts")),
    };
    let mut texts = Vec::new();
    for (i, part) in parts.iter().enumerate() {
        let path = format!("{path}[{i}]");
        let (key, text) = match part["type"].as_str() {
            Some("input_text" | "output_text" | "text") => ("text", part["text"].as_str()),
            Some("refusal") => ("refusal", part["refusal"].as_str()),
            _ => return Err(check::refused_part(&path, part)),
        };
        let wrong = || ApiError::field(format!("{path}.{key}"), "must be a string");
        texts.push(text.ok_or_else(wrong)?);
    }
    Ok(texts.join("\n"))
}

/// The output so far.
struct Output {
    id: String,
    created: u64,
    model: String,
    prompt: usize,
    /// Fields of the request that a response repeats.
    echo: Map<String, Value>,
    items: Vec<Value>,
    /// Whether the last item is still written to.
    open: bool,
    status: &'static str,
    usage: Option<Usage>,
    sequence: u64,
}

impl Output {
    fn new(service: &Service, id: &str, created: u64, prompt: usize, body: &Value) -> Output {
        let mut echo = Map::new();
        for (name, default) in [
            ("instructions", Value::Null),
            ("metadata", json!({})),
            ("temperature", Value::Null),
            ("top_p", Value::Null),
            ("max_output_tokens", Value::Null),
            ("parallel_tool_calls", true.into()),
            ("tool_choice", "auto".into()),
            ("tools", json!([])),
            ("text", json!({ "format": { "type": "text" } })),
            ("reasoning", json!({ "effort": null, "summary": null })),
        ] {
            let given = body.get(name).filter(|v| !v.is_null()).cloned();
            echo.insert(name.to_owned(), given.unwrap_or(default));
        }
        Output {
            id: id.to_owned(),
            created,
            model: service.info.name.clone(),
            prompt,
            echo,
            items: Vec::new(),
            open: false,
            status: "in_progress",
            usage: None,
            sequence: 0,
        }
    }

    fn response(&self) -> Value {
        let mut response = json!({
            "id": format!("resp_{}", self.id),
            "object": "response",
            "created_at": self.created,
            "status": self.status,
            "error": null,
            "incomplete_details": null,
            "model": self.model,
            "output": self.items,
            "previous_response_id": null,
            "store": false,
            "truncation": "disabled",
            "usage": self.usage.map(|usage| json!({
                "input_tokens": self.prompt,
                "input_tokens_details": { "cached_tokens": usage.cached },
                "output_tokens": usage.generated,
                "output_tokens_details": { "reasoning_tokens": 0 },
                "total_tokens": self.prompt + usage.generated,
            })),
        });
        if self.status == "incomplete" {
            response["incomplete_details"] = json!({ "reason": "max_output_tokens" });
        }
        for (name, value) in &self.echo {
            response[name.as_str()] = value.clone();
        }
        response
    }

    fn event(&mut self, kind: &str, mut value: Value) -> String {
        value["type"] = kind.into();
        value["sequence_number"] = self.sequence.into();
        self.sequence += 1;
        format!("event: {kind}\ndata: {value}\n\n")
    }

    fn item_id(&self, prefix: &str) -> String {
        format!("{prefix}_{}_{}", self.id, self.items.len())
    }

    /// Where events of the open item belong.
    fn place(&self) -> Value {
        let item = self.items.last().expect("an item is open");
        json!({
            "item_id": item["id"], "output_index": self.items.len() - 1, "content_index": 0,
        })
    }

    fn with(&self, name: &str, value: Value) -> Value {
        let mut place = self.place();
        place[name] = value;
        place
    }

    /// Adds text to the open item of this kind, or to a new one.
    fn text(&mut self, kind: &'static str, text: &str) -> String {
        let part_kind = if kind == "message" { "output_text" } else { "reasoning_text" };
        let mut out = String::new();
        let is_open = self.open && self.items.last().is_some_and(|item| item["type"] == kind);
        if !is_open {
            out += &self.close();
            let mut item = json!({ "type": kind, "status": "in_progress", "content": [] });
            match kind {
                "message" => {
                    item["id"] = self.item_id("msg").into();
                    item["role"] = "assistant".into();
                }
                _ => {
                    item["id"] = self.item_id("rs").into();
                    item["summary"] = json!([]);
                }
            }
            out += &self.added(item);
            let mut part = json!({ "type": part_kind, "text": "" });
            if kind == "message" {
                part["annotations"] = json!([]);
            }
            self.items.last_mut().expect("just added")["content"] = json!([part]);
            let added = self.with("part", part);
            out += &self.event("response.content_part.added", added);
        }
        let part = &mut self.items.last_mut().expect("one is open")["content"][0];
        let whole = format!("{}{text}", part["text"].as_str().unwrap_or_default());
        part["text"] = whole.into();
        let delta = self.with("delta", text.into());
        out + &self.event(&format!("response.{part_kind}.delta"), delta)
    }

    fn added(&mut self, item: Value) -> String {
        self.items.push(item.clone());
        self.open = true;
        let index = self.items.len() - 1;
        self.event("response.output_item.added", json!({ "output_index": index, "item": item }))
    }

    fn close(&mut self) -> String {
        if !std::mem::take(&mut self.open) {
            return String::new();
        }
        let item = self.items.last_mut().expect("an item was open");
        item["status"] = "completed".into();
        let item = item.clone();
        let mut out = String::new();
        if item["type"] == "function_call" {
            let done = self.with("arguments", item["arguments"].clone());
            out += &self.event("response.function_call_arguments.done", done);
        } else {
            let part = item["content"][0].clone();
            let kind = part["type"].as_str().unwrap_or_default().to_owned();
            let done = self.with("text", part["text"].clone());
            out += &self.event(&format!("response.{kind}.done"), done);
            let done = self.with("part", part);
            out += &self.event("response.content_part.done", done);
        }
        let index = self.items.len() - 1;
        out + &self
            .event("response.output_item.done", json!({ "output_index": index, "item": item }))
    }

    fn delta(&mut self, delta: Delta) -> String {
        match delta {
            Delta::Content(text) => self.text("message", &text),
            Delta::Reasoning(text) => self.text("reasoning", &text),
            Delta::Call(call) => {
                let closed = self.close();
                let id = self.item_id("fc");
                let item = json!({
                    "type": "function_call",
                    "id": id,
                    "call_id": id.replacen("fc", "call", 1),
                    "name": call.name,
                    "arguments": "",
                    "status": "in_progress",
                });
                let added = self.added(item);
                let arguments: Value = call.arguments.into();
                self.items.last_mut().expect("just added")["arguments"] = arguments.clone();
                let delta = self.with("delta", arguments);
                let delta = self.event("response.function_call_arguments.delta", delta);
                closed + &added + &delta + &self.close()
            }
        }
    }

    /// Takes a whole answer.
    fn take(&mut self, whole: &Whole) {
        let parsed = &whole.parsed;
        for text in parsed.reasoning.iter() {
            self.delta(Delta::Reasoning(text.clone()));
        }
        for text in parsed.content.iter() {
            self.delta(Delta::Content(text.clone()));
        }
        for call in &parsed.tool_calls {
            self.delta(Delta::Call(call.clone()));
        }
        self.close();
        self.finish(whole.finished.reason, whole.finished.usage);
    }

    fn finish(&mut self, reason: &str, usage: Usage) {
        self.status = if reason == "length" { "incomplete" } else { "completed" };
        self.usage = Some(usage);
    }
}

impl Encode for Output {
    fn start(&mut self) -> String {
        let response = self.response();
        let created = self.event("response.created", json!({ "response": response }));
        created + &self.event("response.in_progress", json!({ "response": response }))
    }

    fn event(&mut self, _: usize, event: Event) -> String {
        match event {
            Event::Piece { deltas, .. } => deltas.into_iter().map(|d| self.delta(d)).collect(),
            Event::Done(finished) => {
                let closed = self.close();
                self.finish(finished.reason, finished.usage);
                let kind = format!("response.{}", self.status);
                let response = self.response();
                closed + &Output::event(self, &kind, json!({ "response": response }))
            }
            Event::Failed(error) => {
                self.status = "failed";
                let mut response = self.response();
                let code = match error.kind {
                    Kind::Busy => "rate_limit_exceeded",
                    _ => "server_error",
                };
                response["error"] = json!({ "code": code, "message": error.message });
                Output::event(self, "response.failed", json!({ "response": response }))
            }
        }
    }
}
