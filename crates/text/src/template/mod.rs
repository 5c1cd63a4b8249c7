//! Chat templates: a conversation to a prompt, byte for byte as transformers' `apply_chat_template` renders it.

mod clock;
mod costs;
mod environment;
mod json;
mod meter;
mod metered;
mod methods;
mod python;
mod request;
mod slice;

use std::collections::BTreeMap;
use std::path::Path;

use forebay_files::{Catalog, MetaValue, Source};
use minijinja::{Environment, Value as Jinja};
use serde_json::{Map, Value};

use crate::error::{Result, TextError};
use crate::tokenizer::read_optional;
pub(crate) use environment::PLACEHOLDERS;
use metered::Program;
pub use request::ChatRequest;

/// Name of the template that serves every conversation.
const DEFAULT: &str = "default";
/// Name of the one that serves conversations with tools, where a model has two.
const TOOL_USE: &str = "tool_use";

/// A compiled chat template, or a set of named ones.
#[derive(Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    /// In the order of `sources`.
    programs: Vec<Program>,
    /// Name and source, the default one first.
    sources: Vec<(String, String)>,
    /// Takes a message's content as a list of parts itself.
    takes_parts: bool,
    /// `bos_token` and its like, where the request does not give them.
    tokens: Map<String, Value>,
}

impl ChatTemplate {
    /// From a template's source.
    pub fn new(source: &str) -> Result<Self> {
        Self::from_named(vec![(DEFAULT.to_owned(), source.to_owned())])
    }

    fn from_named(mut sources: Vec<(String, String)>) -> Result<Self> {
        sources.sort_by_key(|(name, _)| name != DEFAULT);
        let environment = environment::environment();
        let mut programs = Vec::new();
        meter::start(0);
        for (name, source) in &sources {
            let program = Program::new(name, environment::without_generation_tags(source));
            programs.push(program.map_err(|error| environment::template_error(name, &error))?);
        }
        let tokens = Map::new();
        let mut template = Self { environment, programs, sources, takes_parts: false, tokens };
        template.takes_parts = template.probe_parts();
        Ok(template)
    }

    /// From a folder: `chat_template.jinja`, else `chat_template` in `tokenizer_config.json` (a string or a list
    /// of named ones), else `chat_template.json`. `None` if there is none.
    pub fn from_folder(dir: &Path) -> Result<Option<Self>> {
        let config = read_optional(&dir.join("tokenizer_config.json"))?;
        let path = dir.join("chat_template.jinja");
        let sources = if path.exists() {
            let source =
                std::fs::read_to_string(&path).map_err(|error| TextError::Io { path, error })?;
            vec![(DEFAULT.to_owned(), source)]
        } else {
            let mut sources = named_sources(&config["chat_template"])?;
            if sources.is_empty() {
                sources = named_sources(
                    &read_optional(&dir.join("chat_template.json"))?["chat_template"],
                )?;
            }
            sources
        };
        if sources.is_empty() {
            return Ok(None);
        }
        let mut template = Self::from_named(sources)?;
        for key in ["bos_token", "eos_token", "unk_token", "pad_token"] {
            let value = &config[key];
            if let Some(text) = value.as_str().or_else(|| value["content"].as_str()) {
                template.tokens.insert(key.to_owned(), text.into());
            }
        }
        Ok(Some(template))
    }

    /// From GGUF metadata: `tokenizer.chat_template` and `tokenizer.chat_template.NAME`. `None` if there is none.
    pub fn from_gguf(metadata: &BTreeMap<String, MetaValue>) -> Result<Option<Self>> {
        const KEY: &str = "tokenizer.chat_template";
        let mut sources = Vec::new();
        for (key, value) in
            metadata.range(KEY.to_owned()..).take_while(|(key, _)| key.starts_with(KEY))
        {
            let name =
                match key.strip_prefix(KEY).map(|rest| rest.strip_prefix('.').unwrap_or(rest)) {
                    Some("") => DEFAULT,
                    Some(name) if key.as_bytes()[KEY.len()] == b'.' => name,
                    _ => continue, // `tokenizer.chat_templates`, the list of names
                };
            let source =
                value.as_str().ok_or_else(|| TextError::bad_value(key, "is not a string"))?;
            sources.push((name.to_owned(), source.to_owned()));
        }
        if sources.is_empty() {
            return Ok(None);
        }
        let mut template = Self::from_named(sources)?;
        let tokens =
            metadata.get("tokenizer.ggml.tokens").and_then(MetaValue::as_array).unwrap_or_default();
        for (name, key) in [
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        ] {
            let id =
                metadata.get(&format!("tokenizer.ggml.{key}_token_id")).and_then(MetaValue::as_u64);
            if let Some(text) =
                id.and_then(|id| tokens.get(usize::try_from(id).ok()?)).and_then(MetaValue::as_str)
            {
                template.tokens.insert(name.to_owned(), text.into());
            }
        }
        Ok(Some(template))
    }

    /// Of an opened checkpoint.
    pub fn from_catalog(catalog: &Catalog) -> Result<Option<Self>> {
        match &catalog.source {
            Source::Gguf { metadata } => Self::from_gguf(metadata),
            Source::Folder { dir, .. } => Self::from_folder(dir),
        }
    }

    /// The template's source, the default one where there are several.
    pub fn source(&self) -> &str {
        &self.sources[0].1
    }

    /// Text of the prompt. What a user wrote may read like a marker in it: see
    /// [`render_prompt`](crate::render_prompt) for ids.
    pub fn render(&self, request: &ChatRequest) -> Result<String> {
        self.render_normal(&request.normalized(self.takes_parts)?)
    }

    /// Whether parts are passed on to the template.
    pub(crate) fn takes_parts(&self) -> bool {
        self.takes_parts
    }

    /// A token's text that came with the template.
    pub(crate) fn own_token(&self, name: &str) -> Option<String> {
        self.tokens.get(name)?.as_str().map(str::to_owned)
    }

    pub(crate) fn sources(&self) -> impl Iterator<Item = &str> {
        self.sources.iter().map(|(_, source)| source.as_str())
    }

    /// Renders a request that [`ChatRequest::normalized`] made.
    pub(crate) fn render_normal(&self, request: &ChatRequest) -> Result<String> {
        let rendered = self.render_once(request);
        // Some older templates join `arguments` to text, which takes a string.
        if let Err(TextError::Template { .. }) = &rendered
            && let Some(request) = request.with_text_arguments()
            && let Ok(text) = self.render_once(&request)
        {
            return Ok(text);
        }
        rendered
    }

    fn render_once(&self, request: &ChatRequest) -> Result<String> {
        let tools = request.tools.as_deref().unwrap_or_default();
        let wants_tools = !tools.is_empty();
        let for_tools = self.programs.iter().find(|p| wants_tools && p.name() == TOOL_USE);
        let program = for_tools.unwrap_or(&self.programs[0]);
        meter::start(request.bytes());

        let mut context: BTreeMap<String, Jinja> = BTreeMap::new();
        for (name, value) in &self.tokens {
            context.insert(name.clone(), python::value(value));
        }
        let tokens = [("bos_token", &request.bos_token), ("eos_token", &request.eos_token)];
        for (name, text) in tokens {
            if let Some(text) = text {
                context.insert(name.to_owned(), Jinja::from(text.as_str()));
            }
        }
        context.insert("documents".to_owned(), Jinja::from(()));
        for (name, value) in &request.kwargs {
            context.insert(name.clone(), python::value(value));
        }
        context.insert("messages".to_owned(), python::list(&request.messages));
        let tools = if wants_tools { python::list(tools) } else { Jinja::from(()) };
        context.insert("tools".to_owned(), tools);
        context
            .insert("add_generation_prompt".to_owned(), Jinja::from(request.add_generation_prompt));
        let now = request.clock()?;
        let strftime = move |format: &str| {
            meter::make(64 * format.len() as u64)?;
            now.strftime(format)
        };
        context.insert("strftime_now".to_owned(), Jinja::from_function(strftime));

        let text = program.render(&self.environment, Jinja::from_serialize(&context));
        text.map_err(|error| environment::template_error(program.name(), &error))
    }

    /// Whether the template takes a list of parts and writes their text.
    fn probe_parts(&self) -> bool {
        const PROBE: &str = "PartProbe";
        let request = ChatRequest {
            messages: vec![
                serde_json::json!({"role": "user", "content": [{"type": "text", "text": PROBE}]}),
            ],
            ..ChatRequest::default()
        };
        let Ok(text) = self.render_once(&request) else {
            return false;
        };
        let Some(at) = text.find(PROBE) else {
            return false;
        };
        // A template that knows nothing of parts writes the list as Python would.
        !text[..at].ends_with(['\'', '"'])
    }
}

fn named_sources(value: &Value) -> Result<Vec<(String, String)>> {
    let bad = || {
        TextError::bad_value(
            "chat_template",
            "is neither a string nor a list of `name` and `template`",
        )
    };
    match value {
        Value::Null => Ok(Vec::new()),
        Value::String(source) => Ok(vec![(DEFAULT.to_owned(), source.clone())]),
        Value::Array(list) => list
            .iter()
            .map(|entry| {
                let text = |key: &str| entry[key].as_str().map(str::to_owned).ok_or_else(bad);
                Ok((text("name")?, text("template")?))
            })
            .collect(),
        _ => Err(bad()),
    }
}
