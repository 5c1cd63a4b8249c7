//! Drafting with a separate small model of the same vocabulary.
//!
//! It is an engine of its own, all resident, on the same threads. Tokens that the model has chosen are computed by it as
//! well, all that it has not seen yet in one go, and kept. Rows of its own drafts are never kept: the k-th draft's pass
//! computes the k - 1 before it once more, in the slots that the next rows take. So it needs no way back, whatever its
//! layers are; and for so few rows a small model's pass takes the same time, its weights being read once.

use crate::engine::Engine;
use crate::error::EngineError;
use crate::forward::{Batch, Control};
use crate::speculate::{DraftRequest, Drafter};
use crate::state::Sequence;

/// Drafts with a model.
pub struct DraftModel {
    engine: Box<Engine>,
    sequence: Sequence,
    /// Tokens that it has computed.
    computed: Vec<u32>,
}

impl DraftModel {
    /// With a loaded model.
    pub fn new(engine: Box<Engine>) -> DraftModel {
        let sequence = engine.new_sequence();
        DraftModel { engine, sequence, computed: Vec::new() }
    }

    /// Computes all of `tokens`, and gives the last row's logits to the request.
    fn catch_up(
        &mut self,
        request: &mut DraftRequest<'_>,
        control: &mut Control<'_>,
    ) -> Result<bool, EngineError> {
        let tokens = request.tokens;
        if !tokens.starts_with(&self.computed) || self.computed.len() == tokens.len() {
            self.engine.release(&mut self.sequence);
            self.computed.clear();
        }
        let new = &tokens[self.computed.len()..];
        let logits = self.engine.prefill(&mut self.sequence, new, control);
        match logits {
            Ok(logits) => {
                self.computed.extend_from_slice(new);
                Ok(request.choose(&logits))
            }
            Err(e) => {
                self.engine.release(&mut self.sequence);
                self.computed.clear();
                Err(e)
            }
        }
    }
}

impl Drafter for DraftModel {
    fn name(&self) -> &'static str {
        "draft"
    }

    fn unread(&self, tokens: &[u32]) -> usize {
        match tokens.starts_with(&self.computed) {
            true => tokens.len() - self.computed.len(),
            false => tokens.len(),
        }
    }

    fn draft(
        &mut self,
        _: &mut Engine,
        request: &mut DraftRequest<'_>,
        control: &mut Control<'_>,
    ) -> Result<(), EngineError> {
        let room = self.engine.plan.context;
        let vocab = self.engine.spec.vocab_size;
        let unknown = |&token: &u32| token as usize >= vocab;
        if request.tokens.len() + request.most > room || request.tokens.iter().any(unknown) {
            return Ok(());
        }
        if !self.catch_up(request, control)? {
            return Ok(());
        }
        let rows = self.engine.plan.chunk;
        while !request.is_full() && request.drafts.len() <= rows {
            let last = request.drafts.len() as u32 - 1;
            let batch = Batch::single(&request.drafts, vec![last]);
            let mut chosen = false;
            self.engine.pass(&batch, &mut [&mut self.sequence], control, &mut |_, logits| {
                chosen = request.choose(&logits);
                Ok(())
            })?;
            if !chosen {
                break;
            }
        }
        Ok(())
    }
}
