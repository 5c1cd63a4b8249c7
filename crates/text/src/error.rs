//! What can go wrong with text, as one closed set of classes.

use std::path::{Path, PathBuf};

/// Result of this crate.
pub type Result<T> = std::result::Result<T, TextError>;

/// An error with everything needed to act on it. Messages are one line.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// A file could not be read.
    #[error("cannot read {}: {error}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// A JSON file does not parse, or is not the kind of JSON it should be.
    #[error("{} is not a usable JSON file: {detail}; download it again", path.display())]
    BadJson {
        /// The file.
        path: PathBuf,
        /// Where and why.
        detail: String,
    },
    /// A key that a tokenizer cannot do without is absent.
    #[error(
        "the model has no `{key}`, so its text cannot be turned into tokens; use a complete conversion"
    )]
    MissingKey {
        /// The key or file.
        key: String,
    },
    /// A key is present but cannot be what it claims.
    #[error("`{key}`: {detail}")]
    BadValue {
        /// The key or file.
        key: String,
        /// Expected and found.
        detail: String,
    },
    /// Well formed, but of a kind this crate has no code for.
    #[error("{what} `{name}` is not supported; {remedy}")]
    Unsupported {
        /// Kind of thing, such as "tokenizer model".
        what: &'static str,
        /// Its name in the file.
        name: String,
        /// What to do instead.
        remedy: &'static str,
    },
    /// The tokenizer failed on a text.
    #[error("the tokenizer failed on this text: {detail}")]
    Tokenize {
        /// What it said.
        detail: String,
    },
    /// The model has no chat template.
    #[error("the model has no chat template; use a raw prompt or give a template file")]
    NoTemplate,
    /// The template does not parse, or failed while it ran.
    #[error("chat template failed at line {line}: {detail}")]
    Template {
        /// Line in the template, 0 if unknown.
        line: usize,
        /// What went wrong.
        detail: String,
    },
    /// The template wanted to do more than one prompt is worth.
    #[error(
        "chat template `{template}` exceeds {what} ({limit}); shorten the conversation, or use another template"
    )]
    LimitExceeded {
        /// Its name among the model's templates.
        template: String,
        /// What it would have exceeded.
        what: &'static str,
        /// How much is allowed.
        limit: String,
    },
    /// The template itself refused the conversation (`raise_exception`).
    #[error("the chat template refuses this conversation: {message}")]
    Refused {
        /// The template's own words.
        message: String,
    },
    /// A field of the request is not what it must be.
    #[error("{field}: {detail}")]
    BadRequest {
        /// Path of the field, such as `messages[1].tool_calls[0]`.
        field: String,
        /// Expected and found.
        detail: String,
    },
    /// A message part of a kind that this model cannot take.
    #[error("{field}: parts of type `{kind}` are not supported; send text only")]
    UnsupportedPart {
        /// Path of the part.
        field: String,
        /// Its type.
        kind: String,
    },
}

impl TextError {
    /// Name of the error class.
    pub fn class(&self) -> &'static str {
        match self {
            Self::Io { .. } => "IoError",
            Self::BadJson { .. } => "BadJson",
            Self::MissingKey { .. } | Self::NoTemplate => "MissingKey",
            Self::BadValue { .. } | Self::Tokenize { .. } => "BadValue",
            Self::Unsupported { .. } | Self::UnsupportedPart { .. } => "Unsupported",
            Self::Template { .. } => "TemplateError",
            Self::LimitExceeded { .. } => "LimitExceeded",
            Self::Refused { .. } => "TemplateRefused",
            Self::BadRequest { .. } => "BadRequest",
        }
    }

    /// Whether the request is at fault rather than the model's files.
    pub fn is_request_fault(&self) -> bool {
        matches!(
            self,
            Self::Refused { .. } | Self::BadRequest { .. } | Self::UnsupportedPart { .. }
        )
    }

    /// The name comes from a file: it is cut and kept on one line.
    pub(crate) fn unsupported(what: &'static str, name: &str, remedy: &'static str) -> Self {
        let name = one_line(name).chars().take(60).collect();
        Self::Unsupported { what, name, remedy }
    }

    pub(crate) fn bad_value(key: impl Into<String>, detail: impl Into<String>) -> Self {
        Self::BadValue { key: key.into(), detail: one_line(&detail.into()) }
    }

    pub(crate) fn bad_json(path: &Path, detail: impl ToString) -> Self {
        Self::BadJson { path: path.to_owned(), detail: one_line(&detail.to_string()) }
    }
}

/// Newlines out, so that a message stays one line.
pub(crate) fn one_line(text: &str) -> String {
    text.split(['\n', '\r']).filter(|s| !s.is_empty()).collect::<Vec<_>>().join(" ")
}
