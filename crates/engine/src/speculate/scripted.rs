//! Recorded tokens as drafts, wrong at a set rate: what a drafter with so many right would be worth.
//!
//! For measuring only. A wrong draft is a token that the model does not choose, and is never accepted. With the
//! model's own block beside it, the block runs as well and its drafts are thrown away: then the time is that of
//! drafting with it.

use std::sync::OnceLock;

use super::{DraftRequest, Drafter, Observed};
use crate::engine::Engine;
use crate::error::EngineError;
use crate::forward::Control;
use crate::sampler::uniform;

/// What is replayed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Script {
    /// All tokens, the prompt's first; nothing is drafted before they are recorded.
    pub tokens: OnceLock<Vec<u32>>,
    /// Part of the drafts that is wrong, 0 to 1.
    pub wrong: f64,
    /// Run the model's own block as well.
    pub with_block: bool,
}

/// Replays a [`Script`].
pub struct Scripted {
    script: std::sync::Arc<Script>,
    beside: Option<Box<dyn Drafter>>,
}

impl Scripted {
    /// With a drafter that only costs time, or none.
    pub fn new(script: std::sync::Arc<Script>, beside: Option<Box<dyn Drafter>>) -> Scripted {
        Scripted { script, beside }
    }
}

impl Drafter for Scripted {
    fn name(&self) -> &'static str {
        "scripted"
    }

    fn layers(&self) -> Vec<usize> {
        self.beside.as_ref().map_or_else(Vec::new, |d| d.layers())
    }

    fn follow(&mut self, kept: usize) {
        if let Some(beside) = &mut self.beside {
            beside.follow(kept);
        }
    }

    fn observe(&mut self, target: &mut Engine, rows: Observed<'_>) -> Result<(), EngineError> {
        self.beside.as_mut().map_or(Ok(()), |d| d.observe(target, rows))
    }

    fn draft(
        &mut self,
        target: &mut Engine,
        request: &mut DraftRequest<'_>,
        control: &mut Control<'_>,
    ) -> Result<(), EngineError> {
        if let Some(beside) = &mut self.beside {
            beside.draft(target, request, control)?;
            request.drafts.clear();
        }
        let vocab = target.spec.vocab_size as u32;
        let tokens = self.script.tokens.get().map_or(&[][..], |tokens| tokens);
        let from = request.tokens.len().min(tokens.len());
        for (i, &token) in tokens[from..].iter().take(request.most).enumerate() {
            let is_wrong = uniform(0x5c21, (from + i) as u64, 1) < self.script.wrong;
            request.push(if is_wrong { (token + 1) % vocab } else { token });
        }
        Ok(())
    }
}
