//! Ollama's chat, generate, tags, ps and show: the least that tools which speak only that need.

use std::sync::Arc;

use axum::response::Response;
use forebay_chat::Delta;
use serde_json::{Map, Value, json};

use crate::check::{self, Names};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::grammar::Shape;
use crate::http::ok_json;
use crate::service::{Event, Finished, Input, Request, Service, ToolChoice, now};
use crate::stream::{self, Encode};

const MAX_STOPS: usize = 16;
/// The last second of the year 9999: later ones some clients cannot read.
const NEVER: u64 = 253_402_300_799;

/// An error as Ollama writes it.
pub(crate) fn error_body(error: &ApiError) -> Value {
    json!({ "error": error.message })
}

/// `POST /api/chat`
pub(crate) async fn chat(service: Arc<Service>, body: Value) -> Result<Response, ApiError> {
    let fields = Fields::of(&body)?;
    let mut messages = fields.array("messages")?.cloned().unwrap_or_default();
    // Here a content that is not there is empty.
    for message in messages.iter_mut().filter_map(Value::as_object_mut) {
        let content = message.entry("content").or_insert(Value::Null);
        if content.is_null() {
            *content = "".into();
        }
    }
    let messages = check::messages(&messages)?;
    if messages.is_empty() {
        return loaded(&service, fields, true);
    }
    let tools = check::tools(fields, "parameters", |tool, path| {
        let kind = Fields::inside(tool, path);
        match kind.str("type")? {
            None | Some("function") => check::nested(tool, path),
            Some(other) => {
                let what = format!("`{other}` is no function");
                Err(ApiError::unsupported(kind.path("type"), &what))
            }
        }
    })?;
    let tools = tools.into_iter().cloned().collect();
    let request =
        request(&service, fields, Input::Chat { messages, kwargs: kwargs(fields)? }, tools)?;
    answer(service, request, fields.bool("stream")?.unwrap_or(true), true).await
}

/// `POST /api/generate`
pub(crate) async fn generate(service: Arc<Service>, body: Value) -> Result<Response, ApiError> {
    let fields = Fields::of(&body)?;
    fields.refuse(&[
        ("suffix", "leave it away"),
        ("images", "this model reads text only"),
        ("template", "the model's own is used"),
        ("context", "send the text; what was computed of it is kept"),
    ])?;
    let prompt = fields.str("prompt")?.unwrap_or_default().to_owned();
    if prompt.is_empty() {
        return loaded(&service, fields, false);
    }
    let input = if fields.bool("raw")?.unwrap_or(false) {
        Input::Text(prompt)
    } else {
        let mut messages = Vec::new();
        if let Some(system) = fields.str("system")?.filter(|text| !text.is_empty()) {
            messages.push(json!({ "role": "system", "content": system }));
        }
        messages.push(json!({ "role": "user", "content": prompt }));
        Input::Chat { messages, kwargs: kwargs(fields)? }
    };
    let request = request(&service, fields, input, Vec::new())?;
    answer(service, request, fields.bool("stream")?.unwrap_or(true), false).await
}

/// Who asks nothing wants the model to be loaded, or unloaded. It is there as long as the server is.
fn loaded(service: &Service, fields: Fields<'_>, chat: bool) -> Result<Response, ApiError> {
    service.check_model(fields.str("model")?)?;
    let lines = Lines { model: service.info.name.clone(), chat, prompt: 0 };
    let mut line = lines.line(Vec::new(), None);
    line["done"] = true.into();
    line["done_reason"] = "load".into();
    Ok(ok_json(&line))
}

/// `GET /api/tags`
pub(crate) fn tags(service: &Service) -> Value {
    let info = &service.info;
    json!({ "models": [{
        "name": info.name,
        "model": info.name,
        "modified_at": timestamp(info.created),
        "size": info.bytes,
        "digest": "",
        "details": details(service),
    }]})
}

/// `GET /api/ps`: the model is loaded as long as the server is. Its size is what the memory plan has for it.
pub(crate) fn loaded_models(service: &Service) -> Value {
    let info = &service.info;
    json!({ "models": [{
        "name": info.name,
        "model": info.name,
        "size": info.ledger.iter().map(|(_, bytes)| bytes).sum::<u64>() + info.device_bytes,
        "digest": "",
        "details": details(service),
        "expires_at": timestamp(NEVER),
        "size_vram": info.device_bytes,
        "context_length": info.context,
    }]})
}

/// `POST /api/show`
pub(crate) async fn show(service: Arc<Service>, body: Value) -> Result<Response, ApiError> {
    let fields = Fields::of(&body)?;
    let name = match fields.str("model")? {
        Some(name) => Some(name),
        None => fields.str("name")?,
    };
    service.check_model(name)?;
    let family = &service.info.family;
    let mut model_info = Map::new();
    model_info.insert("general.architecture".into(), family.as_str().into());
    model_info.insert(format!("{family}.context_length"), service.info.context.into());
    Ok(ok_json(&json!({
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": details(&service),
        "model_info": model_info,
        "capabilities": ["completion", "tools"],
        "modified_at": timestamp(service.info.created),
    })))
}

fn details(service: &Service) -> Value {
    let family = &service.info.family;
    json!({
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    })
}

fn kwargs(fields: Fields<'_>) -> Result<Map<String, Value>, ApiError> {
    let mut kwargs = Map::new();
    match fields.get("think") {
        None => {}
        Some(Value::Bool(think)) => {
            kwargs.insert("enable_thinking".into(), (*think).into());
        }
        Some(Value::String(effort)) => crate::openai::effort_kwargs("think", effort, &mut kwargs)?,
        Some(_) => return Err(fields.wrong("think", "must be true, false, low, medium or high")),
    }
    Ok(kwargs)
}

fn request(
    service: &Service,
    fields: Fields<'_>,
    input: Input,
    tools: Vec<Value>,
) -> Result<Request, ApiError> {
    service.check_model(fields.str("model")?)?;
    let shape = match fields.get("format") {
        None => None,
        Some(Value::String(text)) if text.is_empty() => None,
        Some(Value::String(text)) if text == "json" => Some(Shape::JsonObject),
        Some(schema @ Value::Object(_)) => Some(Shape::Schema(schema.clone())),
        Some(_) => return Err(fields.wrong("format", "must be `json` or a JSON schema")),
    };
    let empty = Map::new();
    let options = fields
        .get("options")
        .map(|o| o.as_object().ok_or_else(|| fields.wrong("options", "must be an object")));
    let options = options.transpose()?.unwrap_or(&empty);
    let options = Fields::inside(options, "options");
    refuse_options(service, options)?;
    let instead = "ask for them at /v1/chat/completions";
    fields.refuse(&[("logprobs", instead), ("top_logprobs", instead)])?;
    let mut sampling = crate::openai::sampling(service, options)?;
    sampling.repeat_last = match options.get("repeat_last_n").and_then(Value::as_i64) {
        Some(-1) => usize::MAX,
        _ => options.count("repeat_last_n", 0)?.unwrap_or(sampling.repeat_last),
    };
    // Negative counts mean no limit.
    let max_tokens = match options.get("num_predict").and_then(Value::as_i64) {
        Some(n) if n < 0 => None,
        _ => options.count("num_predict", 0)?,
    };
    Ok(Request {
        names: Names { prompt: "messages", shape: "format", schema: "function.parameters" },
        input,
        tools,
        tool_choice: ToolChoice::Auto,
        parallel_calls: true,
        shape,
        max_tokens,
        sampling,
        bias: Vec::new(),
        echo: false,
        ignores_ends: false,
        stops: options.strings("stop", MAX_STOPS)?,
        n: 1,
        logprobs: None,
        steering: service.steering_of(fields)?,
    })
}

/// Refuses samplers that this server does not have, where they would do something, and a longer context than there
/// is. How to load a model is not the request's affair: `num_gpu`, `num_thread`, `use_mmap` and the like are passed over.
fn refuse_options(service: &Service, options: Fields<'_>) -> Result<(), ApiError> {
    for (name, neutral) in [("typical_p", 1.0), ("tfs_z", 1.0), ("mirostat", 0.0)] {
        if options.number(name, 0.0..=f64::MAX)?.is_some_and(|value| value != neutral) {
            return Err(ApiError::unsupported(options.path(name), "use top_p, top_k or min_p"));
        }
    }
    let context = service.info.context;
    if options.count("num_ctx", 0)?.is_some_and(|asked| asked > context) {
        let instead = format!("the context holds {context}: serve with a longer --context");
        return Err(ApiError::unsupported(options.path("num_ctx"), &instead));
    }
    Ok(())
}

async fn answer(
    service: Arc<Service>,
    request: Request,
    streams: bool,
    chat: bool,
) -> Result<Response, ApiError> {
    let answers = crate::http::begin(&service, request).await?;
    let lines = Lines { model: service.info.name.clone(), chat, prompt: answers.prompt_tokens };
    if streams {
        return Ok(stream::response(&service, answers, lines));
    }
    let whole = answers.whole().await?.remove(0);
    let mut deltas: Vec<Delta> = Vec::new();
    deltas.extend(whole.parsed.reasoning.map(Delta::Reasoning));
    deltas.extend(whole.parsed.content.map(Delta::Content));
    deltas.extend(whole.parsed.tool_calls.into_iter().map(Delta::Call));
    Ok(ok_json(&lines.line(deltas, Some(&whole.finished))))
}

/// An answer in lines of JSON.
struct Lines {
    model: String,
    chat: bool,
    prompt: usize,
}

impl Lines {
    fn line(&self, deltas: Vec<Delta>, finished: Option<&Finished>) -> Value {
        let (mut content, mut thinking) = (String::new(), String::new());
        let mut calls = Vec::new();
        for delta in deltas {
            match delta {
                Delta::Content(text) => content.push_str(&text),
                Delta::Reasoning(text) => thinking.push_str(&text),
                Delta::Call(call) => calls.push(json!({ "function": call.json() })),
            }
        }
        let mut line = json!({ "model": self.model, "created_at": timestamp(now()) });
        if self.chat {
            let mut message = json!({ "role": "assistant", "content": content });
            if !thinking.is_empty() {
                message["thinking"] = thinking.into();
            }
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
            }
            line["message"] = message;
        } else {
            line["response"] = content.into();
            if !thinking.is_empty() {
                line["thinking"] = thinking.into();
            }
        }
        line["done"] = finished.is_some().into();
        if let Some(finished) = finished {
            let usage = &finished.usage;
            let nanos = |s: f64| (s * 1e9) as u64;
            line["done_reason"] =
                if finished.reason == "length" { "length" } else { "stop" }.into();
            line["total_duration"] =
                nanos(usage.queued_s + usage.first_token_s + usage.decode_s).into();
            line["load_duration"] = 0.into();
            line["prompt_eval_count"] = self.prompt.into();
            line["prompt_eval_duration"] = nanos(usage.first_token_s).into();
            line["eval_count"] = usage.generated.into();
            line["eval_duration"] = nanos(usage.decode_s).into();
        }
        line
    }
}

impl Encode for Lines {
    fn event(&mut self, _: usize, event: Event) -> String {
        let line = match event {
            Event::Piece { deltas, .. } if deltas.is_empty() => return String::new(),
            Event::Piece { deltas, .. } => self.line(deltas, None),
            Event::Done(finished) => self.line(Vec::new(), Some(&finished)),
            Event::Failed(error) => error_body(&error),
        };
        format!("{line}\n")
    }

    fn keep_alive(&mut self) -> String {
        // Lines have no comments.
        String::new()
    }

    fn content_type(&self) -> &'static str {
        "application/x-ndjson"
    }
}

/// `2026-01-02T03:04:05Z` of seconds since 1970, by the civil calendar (Hinnant's days algorithm).
fn timestamp(seconds: u64) -> String {
    let (days, rest) = ((seconds / 86400) as i64, seconds % 86400);
    let z = days + 719_468;
    let era = z.div_euclid(146_097);
    let day_of_era = z.rem_euclid(146_097);
    let year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    let year = year_of_era + era * 400 + i64::from(month <= 2);
    let (h, m, s) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{h:02}:{m:02}:{s:02}Z")
}

#[cfg(test)]
mod tests {
    #[test]
    fn timestamps() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_767_323_045, "2026-01-02T03:04:05Z"),
            (4_102_444_799, "2099-12-31T23:59:59Z"),
            (super::NEVER, "9999-12-31T23:59:59Z"),
        ] {
            assert_eq!(super::timestamp(seconds), text);
        }
    }
}
