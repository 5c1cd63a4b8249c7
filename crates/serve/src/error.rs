//! What can be wrong with a request, before it has the shape of an API.

use forebay_text::TextError;

/// Kinds of faults; each API has a status and a name for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A field is wrong, missing or not supported.
    Invalid,
    /// The prompt does not fit.
    ContextLength,
    /// No key, or a wrong one.
    Unauthorized,
    /// A page of another origin asks.
    Forbidden,
    /// No such route.
    NoRoute,
    /// No such model.
    NoModel,
    /// A route that does not take this method.
    Method,
    /// The body did not come in time.
    Timeout,
    /// The body is encoded.
    Encoding,
    /// The body is too large.
    TooLarge,
    /// The headers are too large.
    Headers,
    /// The queue is full.
    Busy,
    /// As many connections are open as may be.
    Full,
    /// The server is shutting down.
    Closing,
    /// Our own fault.
    Internal,
}

/// A fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ApiError {
    /// Its kind.
    pub kind: Kind,
    /// One line.
    pub message: String,
    /// Path of the field at fault.
    pub param: Option<String>,
}

impl ApiError {
    /// A fault of a field.
    pub fn field(param: impl Into<String>, what: impl std::fmt::Display) -> ApiError {
        let param = param.into();
        let message = format!("{param}: {what}");
        ApiError { kind: Kind::Invalid, message, param: Some(param) }
    }

    /// Another fault.
    pub fn new(kind: Kind, message: impl Into<String>) -> ApiError {
        ApiError { kind, message: message.into(), param: None }
    }

    /// A field that the API has and this server does not support.
    pub fn unsupported(param: impl Into<String>, instead: &str) -> ApiError {
        ApiError::field(param, format_args!("not supported by this server; {instead}"))
    }

    /// HTTP status.
    pub fn status(&self) -> u16 {
        match self.kind {
            Kind::Invalid | Kind::ContextLength => 400,
            Kind::Unauthorized => 401,
            Kind::Forbidden => 403,
            Kind::NoRoute | Kind::NoModel => 404,
            Kind::Method => 405,
            Kind::Timeout => 408,
            Kind::TooLarge => 413,
            Kind::Encoding => 415,
            Kind::Headers => 431,
            Kind::Busy => 429,
            Kind::Internal => 500,
            Kind::Full | Kind::Closing => 503,
        }
    }
}

impl From<TextError> for ApiError {
    fn from(error: TextError) -> ApiError {
        let message = error.to_string();
        match error {
            TextError::BadRequest { field, .. } | TextError::UnsupportedPart { field, .. } => {
                ApiError { kind: Kind::Invalid, message, param: Some(field) }
            }
            TextError::Refused { .. }
            | TextError::NoTemplate
            | TextError::LimitExceeded { .. }
            | TextError::Template { .. } => {
                ApiError { kind: Kind::Invalid, message, param: Some("messages".into()) }
            }
            _ => ApiError::new(Kind::Internal, message),
        }
    }
}
