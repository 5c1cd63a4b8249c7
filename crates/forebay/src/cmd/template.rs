//! `template`: a chat request to the text, and the ids, that a model would get.

use std::io::Read;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use forebay_files::Catalog;
use forebay_text::{
    ChatRequest, ChatTemplate, TextError, Tokenizer, TokenizerOptions, render_prompt,
};
use serde_json::json;

use crate::args::TemplateArgs;
use crate::failure::usage;
use crate::model::{self, Found};
use crate::term::say;

pub fn run(args: TemplateArgs) -> anyhow::Result<ExitCode> {
    let request = read_request(&args.request)?;
    let (text, ids) = match is_template(&args.model) {
        true => {
            let shown = args.model.display();
            let source = std::fs::read_to_string(&args.model).context(shown.to_string())?;
            (ChatTemplate::new(&source)?.render(&request)?, None)
        }
        false => {
            let path = match model::find(&args.model)? {
                Found::Here(path) => path,
                Found::OnHub(wanted) => return Err(wanted.refusal("`forebay pull` fetches it")),
            };
            let catalog = Catalog::open(&path)?;
            forebay_models::refuse_others(&catalog)?;
            let template = ChatTemplate::from_catalog(&catalog)?.ok_or(TextError::NoTemplate)?;
            let tokenizer = Tokenizer::from_catalog(&catalog, TokenizerOptions::default())?;
            let prompt = render_prompt(&template, &tokenizer, &request)?;
            (prompt.text(), Some(prompt.ids))
        }
    };
    match (args.json, ids) {
        (false, _) => say!("{text}")?,
        (true, None) => say!("{}", json!({ "text": text }))?,
        (true, Some(ids)) => say!("{}", json!({ "text": text, "ids": ids }))?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Whether it is the source of a template rather than a model.
fn is_template(path: &Path) -> bool {
    let extension = path.extension().and_then(|e| e.to_str()).unwrap_or_default();
    path.is_file() && ["jinja", "jinja2", "j2", "txt"].contains(&extension)
}

/// A request of a file, or of standard input for `-`.
fn read_request(path: &Path) -> anyhow::Result<ChatRequest> {
    let shown = path.display();
    let mut text = String::new();
    let read = match path == Path::new("-") {
        true => std::io::stdin().read_to_string(&mut text).map(|_| ()),
        false => std::fs::read_to_string(path).map(|t| text = t),
    };
    read.map_err(|e| usage(format!("{shown}: {e}")))?;
    serde_json::from_str(&text).map_err(|e| usage(format!("{shown} is no chat request: {e}")))
}
