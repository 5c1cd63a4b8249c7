//! One answer to be computed, and who hears of it.

use std::sync::Arc;

use forebay_engine::{SamplerParams, Steering};

/// What to answer, and how.
pub struct Job {
    /// Token ids; at least one, and fewer than the context.
    pub prompt: Arc<[u32]>,
    /// At most this many tokens. The context's end is a limit as well.
    pub max_tokens: usize,
    /// Ids that end the answer.
    pub ends: Arc<[u32]>,
    /// Sampling, the seed included.
    pub sampling: SamplerParams,
    /// Added to the logits of these tokens before one is chosen; log-probabilities are of the model's own.
    pub bias: Arc<[(u32, f32)]>,
    /// How many of the most likely tokens the listener wants to hear of; none: no log-probabilities.
    pub logprobs: Option<usize>,
    /// Lengths of the prompt at which others are likely to part from it, such as the end of a message.
    pub checkpoints: Vec<usize>,
    /// How its rows are steered.
    pub steering: Option<Arc<Steering>>,
    /// Rules that tokens must follow.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Who hears of it.
    pub listener: Box<dyn Listener>,
}

/// A chosen token.
#[derive(Clone, Debug, PartialEq)]
pub struct Token {
    /// Its id.
    pub id: u32,
    /// Its log-probability under the model's own distribution; 0 where the job wants none.
    pub logprob: f32,
    /// The most likely tokens with theirs, best first; as many as the job wants.
    pub top: Vec<(u32, f32)>,
    /// Whether it is one of the ids that end the answer.
    pub is_end: bool,
}

/// What the listener wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flow {
    /// Another token.
    Continue,
    /// No more: the answer is whole.
    Stop,
}

/// Why an answer is over.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// A token that ends it, or the listener asked for it.
    Stop,
    /// The token limit, or the context's end.
    Length,
    /// The listener is gone.
    Gone,
    /// The engine failed, or is shut down.
    Failed(String),
}

/// What an answer took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Usage {
    /// Tokens of the prompt.
    pub prompt: usize,
    /// Of these, taken from an earlier request's.
    pub cached: usize,
    /// Tokens chosen, one that ends the answer included.
    pub generated: usize,
    /// Seconds in the queue.
    pub queued_s: f64,
    /// Seconds from the queue's end to the first token.
    pub first_token_s: f64,
    /// Seconds from the first token to the last.
    pub decode_s: f64,
}

/// Hears of an answer, on the engine's thread: what it does there should be short.
pub trait Listener: Send {
    /// A token was chosen.
    fn token(&mut self, token: &Token) -> Flow;

    /// The answer is over; nothing follows.
    fn done(self: Box<Self>, outcome: Outcome, usage: Usage);

    /// Whether nobody waits for the answer any more. Asked before every step, and while a drafter reads.
    fn is_gone(&self) -> bool;
}

/// Rules that tokens must follow, such as a grammar.
pub trait Constraint: Send {
    /// Sets the logits of tokens that may not come next to negative infinity.
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String>;

    /// Takes the token that was chosen. True: nothing may follow, the answer is whole.
    fn accept(&mut self, token: u32) -> Result<bool, String>;
}
