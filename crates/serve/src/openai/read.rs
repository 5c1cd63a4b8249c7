//! Bodies of chat completions and completions to requests; some of it is shared with the other APIs.

use forebay_engine::SamplerParams;
use serde_json::{Map, Value};

use crate::check::{self, Names};
use crate::error::ApiError;
use crate::fields::Fields;
use crate::grammar::Shape;
use crate::service::{Input, Request, Service, ToolChoice};

/// Most answers to one request.
const MAX_N: usize = 16;
/// Most stop strings.
const MAX_STOPS: usize = 16;
/// Most entries of `logit_bias`.
const MAX_BIASES: usize = 1024;
/// Most alternatives per token.
const MAX_TOP_LOGPROBS: usize = 20;

/// The same without HTTP, for batches: a request's body to a response's.
pub(super) fn chat_request(service: &Service, fields: Fields<'_>) -> Result<Request, ApiError> {
    service.check_model(fields.str("model")?)?;
    fields.refuse(&[
        ("functions", "use `tools`"),
        ("function_call", "use `tool_choice`"),
        ("audio", "this model writes text"),
        ("prediction", "leave it away"),
        ("store", "nothing is stored"),
    ])?;
    if fields.get("web_search_options").is_some() {
        // An empty object asks for a search, too.
        return Err(ApiError::unsupported("web_search_options", "this server searches nothing"));
    }
    usual_only(fields)?;
    if let Some(modalities) = fields.array("modalities")?
        && modalities.iter().any(|m| m != "text")
    {
        return Err(ApiError::unsupported("modalities", "this model writes text"));
    }
    let messages = fields.array("messages")?;
    let messages = messages.ok_or_else(|| fields.wrong("messages", "is missing"))?;
    let messages = check::messages(messages)?;
    let tools = tools(fields)?;
    let mut kwargs = match fields.object("chat_template_kwargs")? {
        Some(_) => fields.get("chat_template_kwargs").and_then(Value::as_object).cloned(),
        None => None,
    }
    .unwrap_or_default();
    if let Some(effort) = fields.str("reasoning_effort")? {
        effort_kwargs("reasoning_effort", effort, &mut kwargs)?;
    }
    let logprobs = match fields.bool("logprobs")? {
        Some(true) => Some(fields.count("top_logprobs", 0)?.unwrap_or(0)),
        _ if fields.count("top_logprobs", 0)?.unwrap_or(0) > 0 => {
            return Err(fields.wrong("top_logprobs", "needs `logprobs` to be true"));
        }
        _ => None,
    };
    if logprobs.is_some_and(|n| n > MAX_TOP_LOGPROBS) {
        return Err(
            fields.wrong("top_logprobs", format_args!("must be at most {MAX_TOP_LOGPROBS}"))
        );
    }
    let max_tokens = match fields.count("max_completion_tokens", 0)? {
        Some(n) => Some(n),
        None => fields.count("max_tokens", 0)?,
    };
    Ok(Request {
        names: check::CHAT,
        input: Input::Chat { messages, kwargs },
        tool_choice: tool_choice(fields, |choice| {
            let function = choice.object_at("function", "tool_choice.function")?;
            let function = function.ok_or_else(|| choice.wrong("function", "is missing"))?;
            function.str("name")?.ok_or_else(|| function.wrong("name", "is missing"))
        })?,
        tools,
        parallel_calls: fields.bool("parallel_tool_calls")?.unwrap_or(true),
        shape: response_format(fields)?,
        max_tokens,
        sampling: sampling(service, fields)?,
        bias: bias(service, fields)?,
        echo: false,
        ignores_ends: fields.bool("ignore_eos")?.unwrap_or(false),
        stops: fields.strings("stop", MAX_STOPS)?,
        n: n(fields)?,
        logprobs,
        steering: service.steering_of(fields)?,
    })
}

/// Refuses what OpenAI's newer routes have and this server has in one way only. What is for the provider's own books
/// (`user`, `metadata`, `safety_identifier`, `prompt_cache_key`, `prompt_cache_retention`) changes no answer and is taken.
pub(crate) fn usual_only(fields: Fields<'_>) -> Result<(), ApiError> {
    fields.only("service_tier", &["auto", "default"], "there is one")?;
    fields.only("verbosity", &["medium"], "or ask for it in a message")
}

pub(super) fn completion_request(
    service: &Service,
    fields: Fields<'_>,
) -> Result<Request, ApiError> {
    service.check_model(fields.str("model")?)?;
    fields.refuse(&[(
        "suffix",
        "this model continues texts and does not fill gaps; leave it away",
    )])?;
    let echo = fields.bool("echo")?.unwrap_or(false);
    let n = n(fields)?;
    if fields.count("best_of", 1)?.is_some_and(|best| best != n) {
        return Err(ApiError::unsupported("best_of", "use `n`"));
    }
    let logprobs = fields.count("logprobs", 0)?;
    if logprobs.is_some_and(|n| n > MAX_TOP_LOGPROBS) {
        return Err(fields.wrong("logprobs", format_args!("must be at most {MAX_TOP_LOGPROBS}")));
    }
    if echo && logprobs.is_some() {
        let instead = "those of a prompt are not computed; ask for `logprobs` without `echo`";
        return Err(ApiError::unsupported("echo", instead));
    }
    Ok(Request {
        names: Names { prompt: "prompt", ..check::CHAT },
        input: prompt(fields)?,
        tools: Vec::new(),
        tool_choice: ToolChoice::Auto,
        parallel_calls: true,
        shape: response_format(fields)?,
        // The API's own default.
        max_tokens: Some(fields.count("max_tokens", 0)?.unwrap_or(16)),
        sampling: sampling(service, fields)?,
        bias: bias(service, fields)?,
        echo,
        ignores_ends: fields.bool("ignore_eos")?.unwrap_or(false),
        stops: fields.strings("stop", MAX_STOPS)?,
        n,
        logprobs,
        steering: service.steering_of(fields)?,
    })
}

fn n(fields: Fields<'_>) -> Result<usize, ApiError> {
    match fields.count("n", 1)?.unwrap_or(1) {
        n if n > MAX_N => Err(fields.wrong("n", format_args!("must be at most {MAX_N}"))),
        n => Ok(n),
    }
}

/// A prompt as text or ids; a list of one prompt is that prompt.
fn prompt(fields: Fields<'_>) -> Result<Input, ApiError> {
    let wrong = || fields.wrong("prompt", "must be a string or a list of token ids");
    let ids = |list: &[Value]| -> Result<Input, ApiError> {
        let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
        let ids: Option<Vec<u32>> = list.iter().map(id).collect();
        ids.map(Input::Ids).ok_or_else(wrong)
    };
    match fields.get("prompt").ok_or_else(|| fields.wrong("prompt", "is missing"))? {
        Value::String(text) => Ok(Input::Text(text.clone())),
        Value::Array(list) => match list.as_slice() {
            [Value::String(text)] => Ok(Input::Text(text.clone())),
            [Value::Array(one)] => ids(one),
            [Value::String(_) | Value::Array(_), ..] => {
                Err(ApiError::unsupported("prompt", "send one prompt per request"))
            }
            list => ids(list),
        },
        _ => Err(wrong()),
    }
}

/// Sampling as OpenAI names it, with names that other servers have added.
pub(crate) fn sampling(service: &Service, fields: Fields<'_>) -> Result<SamplerParams, ApiError> {
    let mut s = service.sampling();
    if let Some(t) = fields.number("temperature", 0.0..=100.0)? {
        s.temperature = t;
    }
    if let Some(p) = fields.number("top_p", 0.0..=1.0)? {
        // 0 keeps the most likely token, as with other servers.
        s.top_p = p.max(f32::MIN_POSITIVE);
    }
    match fields.get("top_k").and_then(Value::as_i64) {
        // As other servers write that there is no limit.
        Some(-1) => s.top_k = 0,
        _ => s.top_k = fields.count("top_k", 0)?.unwrap_or(s.top_k),
    }
    if let Some(p) = fields.number("min_p", 0.0..=1.0)? {
        s.min_p = p;
    }
    for name in ["repetition_penalty", "repeat_penalty"] {
        if let Some(p) = fields.number(name, 0.01..=100.0)? {
            s.repeat_penalty = p;
        }
    }
    if let Some(p) = fields.number("presence_penalty", -2.0..=2.0)? {
        s.presence_penalty = p;
    }
    if let Some(p) = fields.number("frequency_penalty", -2.0..=2.0)? {
        s.frequency_penalty = p;
    }
    if let Some(seed) = fields.get("seed") {
        // Some clients write 5.0.
        let float = seed.as_f64().filter(|x| x.fract() == 0.0 && x.abs() < 1e15);
        let whole = seed.as_i64().map(|s| s as u64).or(seed.as_u64());
        let whole = whole.or(float.map(|x| x as i64 as u64));
        s.seed = whole.ok_or_else(|| fields.wrong("seed", "must be a whole number"))?;
    }
    Ok(s)
}

/// `logit_bias`: token ids, as JSON's keys are texts, to what is added to their logits.
fn bias(service: &Service, fields: Fields<'_>) -> Result<Vec<(u32, f32)>, ApiError> {
    let Some(entries) = fields.get("logit_bias") else { return Ok(Vec::new()) };
    let wrong = |what: &str| fields.wrong("logit_bias", what);
    let entries = entries.as_object();
    let entries = entries.ok_or_else(|| wrong("must be an object of token ids and numbers"))?;
    if entries.len() > MAX_BIASES {
        return Err(wrong(&format!("may have at most {MAX_BIASES} entries")));
    }
    let one = |(id, bias): (&String, &Value)| {
        let known = id.parse::<u32>().ok().filter(|id| (*id as usize) < service.info.vocab);
        let known = known.ok_or_else(|| wrong(&format!("{id:?} is no token id of this model")))?;
        let bias = bias.as_f64().filter(|b| (-100.0..=100.0).contains(b));
        let bias = bias.ok_or_else(|| wrong("values must be numbers between -100 and 100"))?;
        Ok((known, bias as f32))
    };
    entries.iter().map(one).collect()
}

/// Variables of templates that say how long to reason.
pub(crate) fn effort_kwargs(
    field: &str,
    effort: &str,
    kwargs: &mut Map<String, Value>,
) -> Result<(), ApiError> {
    match effort {
        "none" => {
            kwargs.entry("enable_thinking").or_insert(false.into());
        }
        "minimal" | "low" | "medium" | "high" | "xhigh" => {
            let known = match effort {
                "minimal" => "low",
                "xhigh" => "high",
                other => other,
            };
            kwargs.entry("reasoning_effort").or_insert(known.into());
            kwargs.entry("enable_thinking").or_insert(true.into());
        }
        _ => {
            let what = "must be none, minimal, low, medium, high or xhigh";
            return Err(ApiError::field(field, what));
        }
    }
    Ok(())
}

fn response_format(fields: Fields<'_>) -> Result<Option<Shape>, ApiError> {
    let Some(format) = fields.object("response_format")? else { return Ok(None) };
    match format.str("type")? {
        Some("text") => Ok(None),
        Some("json_object") => Ok(Some(Shape::JsonObject)),
        Some("json_schema") => {
            let own = format.object_at("json_schema", "response_format.json_schema")?;
            let own = own.ok_or_else(|| format.wrong("json_schema", "is missing"))?;
            let schema = own.get("schema").ok_or_else(|| own.wrong("schema", "is missing"))?;
            match schema.is_object() || schema.is_boolean() {
                true => Ok(Some(Shape::Schema(schema.clone()))),
                false => Err(own.wrong("schema", "must be a JSON schema: an object")),
            }
        }
        _ => Err(format.wrong("type", "must be text, json_object or json_schema")),
    }
}

fn tools(fields: Fields<'_>) -> Result<Vec<Value>, ApiError> {
    let found = check::tools(fields, "parameters", |tool, path| {
        let kind = Fields::inside(tool, path);
        match kind.str("type")? {
            Some("function") => check::nested(tool, path),
            Some(other) => {
                let what = format!("`{other}` is no function");
                Err(ApiError::unsupported(kind.path("type"), &what))
            }
            None => Err(kind.wrong("type", "must be `function`")),
        }
    })?;
    Ok(found.into_iter().cloned().collect())
}

/// `tool_choice`; `named` finds the name in one that is an object.
pub(crate) fn tool_choice<'a>(
    fields: Fields<'a>,
    named: impl FnOnce(Fields<'a>) -> Result<&'a str, ApiError>,
) -> Result<ToolChoice, ApiError> {
    match fields.get("tool_choice") {
        None => Ok(ToolChoice::Auto),
        Some(Value::String(word)) => match word.as_str() {
            "auto" => Ok(ToolChoice::Auto),
            "none" => Ok(ToolChoice::None),
            "required" | "any" => Ok(ToolChoice::Required),
            _ => Err(fields.wrong("tool_choice", "must be auto, none, required or a function")),
        },
        Some(Value::Object(choice)) => {
            let choice = Fields::inside(choice, "tool_choice");
            match choice.str("type")? {
                Some("function") => Ok(ToolChoice::Named(named(choice)?.to_owned())),
                Some(other) => {
                    let what = format!(
                        "`{other}` is no function; offer only the tools that may be called"
                    );
                    Err(ApiError::unsupported(choice.path("type"), &what))
                }
                None => Err(choice.wrong("type", "must be `function`")),
            }
        }
        Some(_) => Err(fields.wrong("tool_choice", "must be auto, none, required or a function")),
    }
}

/// What shape the response has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Style {
    pub legacy: bool,
    pub stream: bool,
    pub usage: bool,
    pub logprobs: bool,
}

pub(super) fn style(fields: Fields<'_>, legacy: bool) -> Result<Style, ApiError> {
    let stream = fields.bool("stream")?.unwrap_or(false);
    let usage = match fields.object("stream_options")? {
        Some(_) if !stream => {
            return Err(fields.wrong("stream_options", "needs `stream` to be true"));
        }
        Some(options) => {
            unpadded(options)?;
            options.bool("include_usage")?.unwrap_or(false)
        }
        None => false,
    };
    let logprobs = match legacy {
        true => fields.get("logprobs").is_some(),
        false => fields.bool("logprobs")?.unwrap_or(false),
    };
    Ok(Style { legacy, stream, usage, logprobs })
}

/// Refuses padding in `stream_options`.
pub(crate) fn unpadded(options: Fields<'_>) -> Result<(), ApiError> {
    options.refuse(&[("include_obfuscation", "chunks are not padded")])
}
