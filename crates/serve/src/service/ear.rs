//! What the engine's thread says of one answer, as events.

use std::sync::Arc;

use forebay_chat::{Answer, Delta, End};
use forebay_schedule::{Flow, Listener, Outcome, Token, Usage};
use forebay_text::Tokenizer;
use tokio::sync::mpsc::UnboundedSender;

use super::{Event, Finished, TokenInfo};
use crate::error::{ApiError, Kind};
use crate::grammar::UNFOLLOWED;
use crate::record::Record;

/// Hears of one answer on the engine's thread and sends events.
pub(super) struct Ear {
    pub index: usize,
    pub answer: Answer,
    pub stops: Vec<String>,
    pub wants_tokens: bool,
    /// The answer is held to be calls: what is no call is a part of one.
    pub calls_only: bool,
    pub tokenizer: Tokenizer,
    pub send: UnboundedSender<(usize, Event)>,
    /// Line of the log that waits for the answer's end.
    pub record: Option<Arc<Record>>,
}

impl Ear {
    fn info(&self, token: &Token) -> TokenInfo {
        let text = |id: u32| {
            let bytes = self.tokenizer.token_bytes(id);
            (String::from_utf8_lossy(&bytes).into_owned(), bytes)
        };
        let (own, bytes) = text(token.id);
        let top = token.top.iter().map(|&(id, logprob)| {
            let (text, bytes) = text(id);
            (text, bytes, logprob)
        });
        TokenInfo { text: own, bytes, logprob: token.logprob, top: top.collect() }
    }
}

impl Listener for Ear {
    fn token(&mut self, token: &Token) -> Flow {
        if token.is_end {
            return Flow::Stop;
        }
        let deltas = self.answer.push(token.id);
        let info = self.wants_tokens.then(|| self.info(token));
        if !deltas.is_empty() || info.is_some() {
            // Who does not listen any more is noticed before the next step.
            let _ = self.send.send((self.index, Event::Piece { deltas, token: info }));
        }
        match self.answer.parser().stopped() {
            Some(_) => Flow::Stop,
            None => Flow::Continue,
        }
    }

    fn done(mut self: Box<Self>, outcome: Outcome, usage: Usage) {
        if let Some(record) = &self.record {
            record.ended(&usage);
        }
        let end = match outcome {
            Outcome::Stop => End::Eos,
            Outcome::Length => End::Length,
            Outcome::Gone => return,
            Outcome::Failed(message) => {
                let kind = match &message {
                    m if m.contains("shutting down") => Kind::Closing,
                    m if m.starts_with(UNFOLLOWED) => Kind::Invalid,
                    _ => Kind::Internal,
                };
                let failed = Event::Failed(ApiError::new(kind, message));
                let _ = self.send.send((self.index, failed));
                return;
            }
        };
        let mut deltas = self.answer.finish(end);
        if self.calls_only && end == End::Length {
            deltas.retain(|delta| !matches!(delta, Delta::Content(_)));
        }
        if !deltas.is_empty() {
            let _ = self.send.send((self.index, Event::Piece { deltas, token: None }));
        }
        let parser = self.answer.parser();
        let finished = Finished {
            reason: parser.finish_reason(end),
            stop: parser.stopped().map(|at| self.stops[at].clone()),
            usage,
        };
        let _ = self.send.send((self.index, Event::Done(finished)));
    }

    fn is_gone(&self) -> bool {
        self.send.is_closed()
    }
}
