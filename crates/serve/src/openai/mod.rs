//! OpenAI's chat completions, completions and models: `read` (bodies to requests), `write` (answers to bodies), and
//! the routes here.

mod read;
mod write;

use std::sync::Arc;

use axum::response::Response;
use serde_json::{Value, json};

use self::read::{Style, chat_request, completion_request, style};
pub(crate) use self::read::{effort_kwargs, sampling, tool_choice, unpadded, usual_only};
use self::write::{Chunks, Head};
use crate::error::{ApiError, Kind};
use crate::fields::Fields;
use crate::http::ok_json;
use crate::service::{Request, Service};
use crate::stream;

/// An error as OpenAI writes it.
pub(crate) fn error_body(error: &ApiError) -> Value {
    let (kind, code) = match error.kind {
        Kind::ContextLength => ("invalid_request_error", Some("context_length_exceeded")),
        Kind::Unauthorized => ("invalid_request_error", Some("invalid_api_key")),
        Kind::NoModel => ("invalid_request_error", Some("model_not_found")),
        Kind::Busy => ("rate_limit_error", Some("rate_limit_exceeded")),
        Kind::Internal | Kind::Full | Kind::Closing => ("server_error", None),
        Kind::Forbidden => ("permission_error", None),
        _ => ("invalid_request_error", None),
    };
    json!({
        "error": { "message": error.message, "type": kind, "param": error.param, "code": code }
    })
}

/// `POST /v1/chat/completions`
pub(crate) async fn chat(service: Arc<Service>, body: Value) -> Result<Response, ApiError> {
    let fields = Fields::of(&body)?;
    let request = chat_request(&service, fields)?;
    let style = style(fields, false)?;
    answer(service, request, style).await
}

/// `POST /v1/completions`
pub(crate) async fn completions(service: Arc<Service>, body: Value) -> Result<Response, ApiError> {
    let fields = Fields::of(&body)?;
    let request = completion_request(&service, fields)?;
    let style = style(fields, true)?;
    answer(service, request, style).await
}

/// `GET /v1/models`
pub(crate) fn models(service: &Service) -> Value {
    json!({ "object": "list", "data": [model(service)] })
}

/// `GET /v1/models/NAME`
pub(crate) fn model(service: &Service) -> Value {
    json!({
        "id": service.info.name,
        "object": "model",
        "created": service.info.created,
        "owned_by": "forebay",
        "context_length": service.info.context,
    })
}

async fn answer(
    service: Arc<Service>,
    request: Request,
    style: Style,
) -> Result<Response, ApiError> {
    let answers = crate::http::begin(&service, request).await?;
    let head = Head::new(&service, &answers, style.legacy);
    if style.stream {
        let encoder = Chunks::new(head, style, answers.n, answers.prompt_tokens);
        return Ok(stream::response(&service, answers, encoder));
    }
    let prompt_tokens = answers.prompt_tokens;
    let whole = answers.whole().await?;
    Ok(ok_json(&head.whole(&whole, prompt_tokens, &style)))
}

/// A line of a batch: the body of a request to `url` to the body of its response.
pub(crate) async fn offline(
    service: &Arc<Service>,
    url: &str,
    body: &Value,
) -> Result<Value, ApiError> {
    let fields = Fields::of(body)?;
    let legacy = match url {
        "/v1/chat/completions" => false,
        "/v1/completions" => true,
        other => {
            let message = format!("{other} is no route of batches");
            return Err(ApiError::new(Kind::NoRoute, message));
        }
    };
    let request = match legacy {
        true => completion_request(service, fields)?,
        false => chat_request(service, fields)?,
    };
    let style = Style { stream: false, ..style(fields, legacy)? };
    let answers = service.begin(&request, None)?;
    let head = Head::new(service, &answers, legacy);
    let prompt_tokens = answers.prompt_tokens;
    let whole = answers.whole().await?;
    Ok(head.whole(&whole, prompt_tokens, &style))
}
