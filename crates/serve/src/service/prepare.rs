//! Prompts: a conversation, a text or ids to the ids that the engine begins with, and what their end says about the
//! answer.

use forebay_chat::{Format, Tool};
use forebay_text::{ChatRequest, Piece, Prompt, Specials, render_prompt};
use serde_json::{Map, Value};

use super::{Input, Request, Service, ToolChoice};
use crate::error::{ApiError, Kind};
use crate::fallback;
use crate::grammar::Reasons;

/// Texts longer than this many bytes per position of the context cannot fit and are not even encoded.
const MAX_BYTES_PER_TOKEN: usize = 256;

impl Service {
    pub(super) fn too_long(&self, request: &Request, tokens: usize, least: &str) -> ApiError {
        let context = self.info.context;
        let message = format!(
            "the prompt has {least}{tokens} tokens and the context holds {context}: shorten it, or serve with a \
             longer --context"
        );
        ApiError { kind: Kind::ContextLength, message, param: Some(request.names.prompt.into()) }
    }

    /// A text of that size cannot fit: encoding it would take memory that the plan does not have.
    fn check_size(&self, request: &Request, bytes: usize) -> Result<(), ApiError> {
        match bytes / MAX_BYTES_PER_TOKEN >= self.info.context {
            true => Err(self.too_long(request, bytes / MAX_BYTES_PER_TOKEN, "at least ")),
            false => Ok(()),
        }
    }

    pub(super) fn prepare(&self, request: &Request) -> Result<Prepared, ApiError> {
        let plain = |ids| Prepared {
            ids,
            format: Format::Plain,
            tools: Vec::new(),
            tail: String::new(),
            checkpoints: Vec::new(),
            reasons: Reasons::Not,
        };
        match &request.input {
            Input::Ids(ids) => {
                let vocab = self.info.vocab;
                match ids.iter().find(|&&id| id as usize >= vocab) {
                    Some(id) => Err(ApiError::field(
                        "prompt",
                        format_args!("token id {id} is outside of the vocabulary of {vocab}"),
                    )),
                    None if ids.is_empty() => Err(ApiError::field("prompt", "must not be empty")),
                    None => Ok(plain(ids.clone())),
                }
            }
            Input::Text(text) => {
                self.check_size(request, text.len())?;
                let _turn = self.encoding.turn(text.len());
                let ids = self.tokenizer.encode_prompt(text, Specials::Ignore)?;
                match ids.is_empty() {
                    true => Err(ApiError::field("prompt", "must not be empty")),
                    false => Ok(plain(ids)),
                }
            }
            Input::Chat { messages, kwargs } => self.prepare_chat(request, messages, kwargs),
        }
    }

    fn prepare_chat(
        &self,
        request: &Request,
        messages: &[Value],
        kwargs: &Map<String, Value>,
    ) -> Result<Prepared, ApiError> {
        let template = self.template.as_ref().ok_or_else(|| {
            let message =
                "the model has no chat template: use a completions route, with a raw prompt";
            ApiError::new(Kind::Invalid, message)
        })?;
        if messages.is_empty() {
            return Err(ApiError::field(request.names.prompt, "must not be empty"));
        }
        let bytes = messages.iter().chain(&request.tools).map(|m| m.to_string().len()).sum();
        self.check_size(request, bytes)?;
        let _turn = self.encoding.turn(bytes);
        let offered = match request.tool_choice {
            ToolChoice::None => &[],
            _ => request.tools.as_slice(),
        };
        let tools: Vec<Tool> = offered.iter().filter_map(Tool::from_json).collect();
        let (messages, templated, format) = if self.writes_tools {
            let templated = (!offered.is_empty()).then(|| offered.to_vec());
            (messages.to_vec(), templated, self.format)
        } else {
            let format = match self.format {
                Format::Plain if !tools.is_empty() => Format::Qwen3Json,
                own => own,
            };
            // Parts are judged before they are turned into text.
            ChatRequest { messages: messages.to_vec(), ..ChatRequest::default() }
                .check()
                .map_err(ApiError::from)?;
            (fallback::messages(messages, &tools), None, format)
        };
        let chat = ChatRequest {
            messages,
            tools: templated,
            kwargs: kwargs.clone(),
            ..ChatRequest::default()
        };
        let render = |request: &ChatRequest| render_prompt(template, &self.tokenizer, request);
        let prompt = render(&chat)?;
        // What the template wrote to open the answer, and where others will part from this prompt: before it,
        // and before the last message.
        let mut tail = last_text(&prompt);
        let mut checkpoints = Vec::new();
        let mut shorter = ChatRequest { add_generation_prompt: false, ..chat };
        if let Ok(history) = render(&shorter) {
            checkpoints.push(common(&prompt.ids, &history.ids));
            if let Some(written) = prompt.text().strip_prefix(&history.text()) {
                tail = written.to_owned();
            }
        }
        if shorter.messages.len() > 1 {
            shorter.messages.pop();
            checkpoints.extend(render(&shorter).ok().map(|h| common(&prompt.ids, &h.ids)));
        }
        Ok(Prepared {
            reasons: match (format, kwargs.get("enable_thinking")) {
                // A channel of its own, which the template does not open.
                (Format::Harmony, Some(Value::Bool(false))) => Reasons::Not,
                (Format::Harmony, _) => Reasons::May,
                _ => reasons(&tail, template.source()),
            },
            ids: prompt.ids,
            format,
            tools,
            tail,
            checkpoints,
        })
    }
}

/// A request as the engine needs it.
pub(super) struct Prepared {
    pub ids: Vec<u32>,
    pub format: Format,
    pub tools: Vec<Tool>,
    pub tail: String,
    pub checkpoints: Vec<usize>,
    pub reasons: Reasons,
}

/// Length of the common beginning.
fn common(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Text from the last but one marker on: the header of the answer, where the template cannot tell.
fn last_text(prompt: &Prompt) -> String {
    let markers = prompt.pieces.iter().enumerate();
    let markers = markers.filter(|(_, piece)| matches!(piece, Piece::Marker { .. }));
    let at = markers.map(|(at, _)| at).next_back().unwrap_or(prompt.pieces.len());
    let pieces = prompt.pieces[at..].to_vec();
    Prompt { pieces, ids: Vec::new() }.text()
}

/// What a prompt's end says about reasoning.
fn reasons(tail: &str, template: &str) -> Reasons {
    const OPENERS: [&str; 3] = ["<think>", "<|channel>", "[THINK]"];
    let last = |words: &[&str]| words.iter().filter_map(|word| tail.rfind(word)).max();
    let open = last(&OPENERS);
    let close = last(&["</think>", "<channel|>", "[/THINK]"]);
    match (open, close) {
        (Some(open), Some(close)) if open < close => Reasons::Not,
        (Some(_), _) => Reasons::Inside,
        (None, Some(_)) => Reasons::Not,
        // A template that never writes reasoning is of a model that was never shown any.
        (None, None) if !OPENERS.iter().any(|word| template.contains(word)) => Reasons::Not,
        (None, None) => Reasons::May,
    }
}
