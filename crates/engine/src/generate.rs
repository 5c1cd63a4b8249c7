//! Prompt in, tokens out: chunks of prefill, then rounds: one row at a time, or several with a drafter.

use std::time::Instant;

use crate::engine::Engine;
use crate::error::EngineError;
use crate::forward::{Batch, Control};
use crate::sampler::{Choice, Sampler};
use crate::speculate::{Chosen, Turn};
use crate::state::Sequence;

/// What to generate.
#[derive(Clone, Debug, Default)]
pub struct GenerateParams {
    /// At most this many tokens.
    pub max_tokens: usize,
    /// Go on after an end token.
    pub ignore_eos: bool,
    /// Ids that end the answer.
    pub eos_ids: Vec<u32>,
}

/// Why generation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Finish {
    /// An end token.
    Stop,
    /// The token limit or the context's end.
    Length,
    /// The callback asked for it (a stop string).
    Callback,
    /// Interrupted.
    Cancelled,
}

impl Finish {
    /// As in the JSON output.
    pub fn name(self) -> &'static str {
        match self {
            Finish::Stop | Finish::Callback => "stop",
            Finish::Length => "length",
            Finish::Cancelled => "cancelled",
        }
    }
}

/// A generated token.
#[derive(Clone, Copy, Debug)]
pub struct TokenEvent {
    /// Its id.
    pub token: u32,
    /// Its log-probability.
    pub logprob: f32,
    /// Whether it is one of the end ids (not part of the content).
    pub is_eos: bool,
    /// Whether none follows, unless the callback asks for an earlier end.
    pub is_last: bool,
}

/// What the callback wants next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Another token.
    Continue,
    /// No more.
    Stop,
}

/// Result of a generation.
#[derive(Clone, Debug)]
pub struct Generated {
    /// All ids, an end token included.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: Finish,
    /// Seconds of prefill, up to the first token's logits.
    pub prefill_s: f64,
    /// Seconds of each decode step after the first token.
    pub step_s: Vec<f64>,
}

impl Engine {
    /// Computes `tokens` as the continuation of `sequence`, in chunks; logits of the last row only.
    pub fn prefill(
        &mut self,
        sequence: &mut Sequence,
        tokens: &[u32],
        control: &mut Control<'_>,
    ) -> Result<Vec<f32>, EngineError> {
        let mut last = Vec::new();
        let chunks = tokens.chunks(self.plan.chunk.max(1));
        let total = chunks.len();
        let segments = self.program.segments.len();
        for (i, chunk) in chunks.enumerate() {
            let wants = if i + 1 == total { vec![chunk.len() as u32 - 1] } else { Vec::new() };
            let batch = Batch::single(chunk, wants);
            let mut progress = |done: usize, _: usize| {
                (control.progress)(i * segments + done, total * segments);
            };
            let mut inner = Control { cancel: control.cancel, progress: &mut progress };
            self.forward(&batch, &mut [&mut *sequence], &mut inner, &mut |_, logits| {
                last.extend_from_slice(logits);
                Ok(())
            })?;
        }
        Ok(last)
    }

    /// Answers a prompt. `on_token` sees every token as it is chosen.
    pub fn generate(
        &mut self,
        sequence: &mut Sequence,
        prompt: &[u32],
        params: &GenerateParams,
        sampler: &mut Sampler,
        control: &mut Control<'_>,
        on_token: &mut dyn FnMut(&mut Engine, TokenEvent) -> Next,
    ) -> Result<Generated, EngineError> {
        let room = self.plan.context.saturating_sub(sequence.len());
        if prompt.is_empty() || prompt.len() >= room.max(1) {
            return Err(EngineError::ContextExceeded {
                prompt: sequence.len() + prompt.len(),
                context: self.plan.context,
            });
        }
        let clock = Instant::now();
        self.follow(sequence, &[]);
        let logits = self.prefill(sequence, prompt, control)?;
        let mut out = Generated {
            tokens: Vec::new(),
            finish: Finish::Length,
            prefill_s: clock.elapsed().as_secs_f64(),
            step_s: Vec::new(),
        };
        let mut history = prompt.to_vec();
        let limit = params.max_tokens.min(room - prompt.len());
        let mut quiet = |_: usize, _: usize| {};
        if limit == 0 {
            return Ok(out);
        }
        let clock = Instant::now();
        let first = sampler
            .sample(&logits, &history, sequence.len() as u64)
            .ok_or(EngineError::LogitNan { position: sequence.len() - 1 })?;
        self.stats.phases.sampling += clock.elapsed();
        history.push(first.token);
        // What the last round chose, in order, and the round.
        let mut chosen = vec![first];
        let mut round = None;
        let mut clock = Instant::now();
        loop {
            let mut used = 0;
            let over = loop {
                let choice: Choice = chosen[used];
                used += 1;
                let is_eos = params.eos_ids.contains(&choice.token);
                out.tokens.push(choice.token);
                let ends = is_eos && !params.ignore_eos;
                let is_last = ends || out.tokens.len() == limit;
                let event =
                    TokenEvent { token: choice.token, logprob: choice.logprob, is_eos, is_last };
                let next = on_token(self, event);
                if ends {
                    out.finish = Finish::Stop;
                    break true;
                }
                if next == Next::Stop {
                    out.finish = Finish::Callback;
                    break true;
                }
                if is_last || used == chosen.len() {
                    break is_last;
                }
            };
            if let Some(round) = round.take() {
                match self.settle(sequence, round, used) {
                    Err(EngineError::Cancelled) => {
                        out.finish = Finish::Cancelled;
                        break;
                    }
                    other => other?,
                }
                let each = clock.elapsed().as_secs_f64() / used as f64;
                out.step_s.extend(std::iter::repeat_n(each, used));
            }
            if over {
                break;
            }
            clock = Instant::now();
            let recent = history.len().saturating_sub(sampler.params().repeat_last);
            let recent = history[recent..].to_vec();
            let turn = Turn {
                token: chosen[used - 1].token,
                params: &sampler.params().clone(),
                recent: &recent,
                most: limit - out.tokens.len(),
                by_lines: true,
            };
            chosen.clear();
            let position = sequence.len() as u64 + 1;
            let mut inner = Control { cancel: control.cancel, progress: &mut quiet };
            let step = self.round(sequence, &turn, &mut inner, &mut |logits, before| {
                let position = position + before as u64;
                let choice = sampler.choose(logits, &history, position);
                let nan = EngineError::LogitNan { position: position as usize - 1 };
                let choice = choice.ok_or(nan)?;
                history.push(choice.token);
                chosen.push(choice);
                let ends = params.eos_ids.contains(&choice.token) && !params.ignore_eos;
                Ok(if ends { Chosen::Last(choice.token) } else { Chosen::More(choice.token) })
            });
            match step {
                Ok(done) => round = Some(done),
                Err(EngineError::Cancelled) => {
                    out.finish = Finish::Cancelled;
                    break;
                }
                Err(e) => return Err(e),
            }
        }
        Ok(out)
    }
}
