//! From an error to one line on stderr and an exit code.

use crate::term::note;
use std::process::ExitCode;

use forebay_engine::EngineError;
use forebay_files::FilesError;
use forebay_hub::HubError;
use forebay_models::ModelError;
use forebay_store::StoreError;
use forebay_text::TextError;

/// Wrong usage that clap cannot see.
#[derive(Debug)]
pub struct Usage(pub String);

impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Usage {}

/// A wrong-usage error.
pub fn usage(text: impl Into<String>) -> anyhow::Error {
    Usage(text.into()).into()
}

/// Class and exit code of an error.
pub fn classify(error: &anyhow::Error) -> (&'static str, u8) {
    let refused = |class: &'static str| match class {
        "Unsupported" | "BudgetTooSmall" | "OutOfMemoryBudget" => 3,
        _ => 1,
    };
    for cause in error.chain() {
        if cause.is::<Usage>() {
            return ("Usage", 2);
        }
        if let Some(e) = cause.downcast_ref::<EngineError>() {
            return (e.class(), e.exit_code() as u8);
        }
        if let Some(e) = cause.downcast_ref::<HubError>() {
            let code = match e.class() {
                "Usage" | "NoMatch" => 2,
                "Ambiguous" | "NoSpace" | "Offline" => 3,
                "Cancelled" => 130,
                _ => 1,
            };
            return (e.class(), code);
        }
        let class = cause
            .downcast_ref::<FilesError>()
            .map(|e| e.class())
            .or_else(|| cause.downcast_ref::<ModelError>().map(|e| e.class()))
            .or_else(|| cause.downcast_ref::<StoreError>().map(|e| e.class()))
            .or_else(|| cause.downcast_ref::<TextError>().map(|e| e.class()));
        if let Some(class) = class {
            return (class, refused(class));
        }
    }
    ("IoError", 1)
}

/// Prints the error and gives its exit code. A reader that closed our output is no failure.
pub fn report(error: &anyhow::Error, json: bool) -> ExitCode {
    let broken_pipe = error.chain().any(|c| {
        c.downcast_ref::<std::io::Error>()
            .is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
    });
    if broken_pipe {
        return ExitCode::SUCCESS;
    }
    let (class, code) = classify(error);
    let text = format!("{error:#}").replace('\n', " ");
    if json {
        let line = serde_json::json!({ "error": { "class": class, "message": text } });
        // Who reads has the message on stderr as well.
        let _ = crate::term::say!("{line}");
    }
    note!("forebay: {text}");
    ExitCode::from(code)
}
