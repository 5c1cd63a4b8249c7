//! A conversation without HTTP: for the terminal, and for batches.

use std::sync::Arc;

use forebay_chat::Call;
use forebay_engine::SamplerParams;
use forebay_schedule::Usage;
use serde_json::{Map, Value};

use crate::error::ApiError;
use crate::service::{Answers, Event, Input, Request, Service, ToolChoice};

/// Something that was said.
#[derive(Clone, Debug, PartialEq)]
pub enum Said {
    /// Text of the reasoning.
    Reasoning(String),
    /// Text for the user.
    Content(String),
    /// A call, although no tool was offered.
    Call(Call),
    /// The end: `stop`, `length` or `tool_calls`.
    Done(&'static str, Usage),
    /// It failed.
    Failed(ApiError),
}

/// An answer on its way. Dropping it stops it.
#[derive(Debug)]
pub struct Talk {
    answers: Answers,
    ready: std::collections::VecDeque<Said>,
    over: bool,
}

/// How to answer.
#[derive(Clone, Debug, Default)]
pub struct TalkOptions {
    /// Sampling.
    pub sampling: SamplerParams,
    /// At most this many tokens.
    pub max_tokens: Option<usize>,
    /// Texts that end the answer.
    pub stops: Vec<String>,
    /// Variables of the template.
    pub kwargs: Map<String, Value>,
}

impl Service {
    /// Answers a conversation of OpenAI messages.
    pub fn talk(&self, messages: &[Value], options: &TalkOptions) -> Result<Talk, ApiError> {
        let request = Request {
            names: crate::check::CHAT,
            input: Input::Chat { messages: messages.to_vec(), kwargs: options.kwargs.clone() },
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            parallel_calls: true,
            shape: None,
            max_tokens: options.max_tokens,
            sampling: options.sampling.clone(),
            bias: Vec::new(),
            echo: false,
            ignores_ends: false,
            stops: options.stops.clone(),
            n: 1,
            logprobs: None,
            steering: self.steering(),
        };
        Ok(Talk { answers: self.begin(&request, None)?, ready: Default::default(), over: false })
    }

    /// Answers the body of a request to `url`, as a batch has it: the body of the response.
    pub async fn answer(self: &Arc<Self>, url: &str, body: &Value) -> Result<Value, ApiError> {
        crate::openai::offline(self, url, body).await
    }

    /// What the model is.
    pub fn info(&self) -> &crate::service::ModelInfo {
        &self.info
    }
}

impl ApiError {
    /// The body that OpenAI's API gives for it.
    pub fn openai_body(&self) -> Value {
        crate::openai::error_body(self)
    }
}

impl Talk {
    /// What is said next; `Ok(None)` where nothing was said yet, `Err` after the end.
    #[allow(clippy::result_unit_err, reason = "the end is no fault")]
    pub fn heard(&mut self) -> Result<Option<Said>, ()> {
        use tokio::sync::mpsc::error::TryRecvError;
        if let Some(said) = self.ready.pop_front() {
            return Ok(Some(said));
        }
        if self.over {
            return Err(());
        }
        match self.answers.events.try_recv() {
            Err(TryRecvError::Empty) => return Ok(None),
            Err(TryRecvError::Disconnected) => return Err(()),
            Ok((_, Event::Piece { deltas, .. })) => {
                self.ready.extend(deltas.into_iter().map(|delta| match delta {
                    forebay_chat::Delta::Reasoning(text) => Said::Reasoning(text),
                    forebay_chat::Delta::Content(text) => Said::Content(text),
                    forebay_chat::Delta::Call(call) => Said::Call(call),
                }));
            }
            Ok((_, Event::Done(finished))) => {
                self.over = true;
                return Ok(Some(Said::Done(finished.reason, finished.usage)));
            }
            Ok((_, Event::Failed(error))) => {
                self.over = true;
                return Ok(Some(Said::Failed(error)));
            }
        }
        Ok(self.ready.pop_front())
    }
}
