//! Drafting with the model's own multi-token-prediction block (DeepSeek-V3 2024; Qwen3.5's `mtp.*`).
//!
//! The block turns the state of a position (last layer, last norm) and the token after it into a state from which the
//! model's own head reads the token after that. A longer draft goes on from the block's own output. It is a decoder layer
//! with keys and values of its own: of the prompt's rows as of the answer's, as soon as their states and next tokens are
//! known. Rows that were computed for a draft are computed again with the model's states when these are there.
//!
//! Its cache holds the rows one after the other, whatever their positions: where some were never shown, those that are kept
//! move together. Rotary angles are relative, so nothing else changes, and what is missing makes drafts worse, not answers.

use std::sync::atomic::AtomicBool;

use forebay_program::{Pass, SequenceTables};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::forward::Control;
use crate::speculate::{DraftRequest, Drafter, MOST_TOKENS, Observed};
use crate::steer::SteeredRows;

/// States of rows that wait for their next token, or for company; more than these are run at once.
const WAITING: usize = 2 * (MOST_TOKENS + 1);

/// Drafts with the block.
pub struct Mtp {
    /// Index of the token whose state each row of the cache was made from; ascending.
    rows: Vec<u32>,
    /// States that no row was made from yet, `[n, d]`.
    waiting: Vec<f32>,
    /// Index of the token of the first of them.
    waiting_from: usize,
    d: usize,
    /// Rows that the cache holds.
    context: usize,
    /// Page tables: the block's pages are in order, nobody else has any.
    tables: Vec<Vec<u32>>,
}

impl Mtp {
    /// For a model with so many classes of keys and values besides the block's own.
    pub fn new(d: usize, classes: usize, context: usize, max_rows: usize) -> Mtp {
        let pages = context.div_ceil(forebay_cpu::attention::BLOCK) as u32;
        let mut tables = vec![Vec::new(); classes];
        tables.push((0..pages).collect());
        Mtp {
            rows: Vec::with_capacity(context),
            waiting: Vec::with_capacity((max_rows + WAITING) * d),
            waiting_from: 0,
            d,
            context,
            tables,
        }
    }

    /// Host memory that it takes.
    pub fn host_bytes(d: usize, context: usize, max_rows: usize) -> u64 {
        ((max_rows + WAITING) * d * 4 + max_rows * d * 4 + context * 8) as u64
    }

    /// Index of the first token whose state was never shown.
    fn shown(&self) -> usize {
        self.waiting_from + self.waiting.len() / self.d
    }

    /// Makes rows of the states whose next tokens are in `tokens`. Gives how many rows the last pass had.
    fn run(&mut self, target: &mut Engine, tokens: &[u32]) -> Result<usize, EngineError> {
        let mut last = 0;
        loop {
            let known = tokens.len().saturating_sub(self.waiting_from + 1);
            let n = (self.waiting.len() / self.d).min(known).min(target.plan.shape.max_rows);
            if n == 0 {
                return Ok(last);
            }
            if self.rows.len() + n > self.context {
                // Cannot be: there are fewer rows than tokens.
                self.rows.clear();
            }
            let next = &tokens[self.waiting_from + 1..][..n];
            let pass = BlockPass { tables: &self.tables, from: self.rows.len() };
            target.draft_pass(&pass, next, &self.waiting[..n * self.d])?;
            self.rows.extend(self.waiting_from as u32..(self.waiting_from + n) as u32);
            self.waiting.drain(..n * self.d);
            self.waiting_from += n;
            last = n;
        }
    }
}

impl Drafter for Mtp {
    fn name(&self) -> &'static str {
        "mtp"
    }

    fn follow(&mut self, kept: usize) {
        // A row stands for its token and the next.
        let kept = self.rows.partition_point(|&row| row as usize + 1 < kept);
        self.rows.truncate(kept);
        self.waiting.clear();
    }

    fn observe(&mut self, target: &mut Engine, rows: Observed<'_>) -> Result<(), EngineError> {
        if self.waiting.is_empty() || self.shown() != rows.from() {
            self.waiting.clear();
            self.waiting_from = rows.from();
        }
        let source = target.program.draft.as_ref().expect("a draft block").source;
        target.backend.read(source, 0..rows.rows, &mut self.waiting);
        if self.waiting.len() / self.d > WAITING - MOST_TOKENS - 1 {
            self.run(target, rows.tokens)?;
        }
        Ok(())
    }

    fn unread(&self, _: &[u32]) -> usize {
        self.waiting.len() / self.d
    }

    fn draft(
        &mut self,
        target: &mut Engine,
        request: &mut DraftRequest<'_>,
        _: &mut Control<'_>,
    ) -> Result<(), EngineError> {
        let tokens = request.tokens;
        if self.waiting.is_empty() || self.shown() + 1 != tokens.len() {
            return Ok(());
        }
        let mut last = self.run(target, tokens)?;
        let next = target.program.draft.as_ref().expect("a draft block").next;
        let mut state = Vec::with_capacity(self.d); // [1, d]
        for from in self.rows.len().. {
            let chosen = target.draft_logits(last - 1, |logits| request.choose(logits))?;
            if !chosen || request.is_full() || from >= self.context {
                break;
            }
            state.clear();
            target.backend.read(next, last - 1..last, &mut state);
            let pass = BlockPass { tables: &self.tables, from };
            let token = *request.drafts.last().expect("one was chosen");
            target.draft_pass(&pass, &[token], &state)?;
            last = 1;
        }
        Ok(())
    }
}

/// Where the rows of a pass of the block go.
struct BlockPass<'a> {
    tables: &'a [Vec<u32>],
    /// Row of the cache that the first becomes.
    from: usize,
}

static NEVER: AtomicBool = AtomicBool::new(false);

impl Engine {
    /// Runs the draft block over rows of next tokens `[n]` and states `[n, d]`.
    fn draft_pass(
        &mut self,
        place: &BlockPass<'_>,
        tokens: &[u32],
        states: &[f32],
    ) -> Result<(), EngineError> {
        let program = self.program.clone();
        let block = program.draft.as_ref().expect("a program with a draft block");
        self.embed(tokens)?;
        if let Some(scale) = self.spec.embedding_scale {
            self.hidden.iter_mut().for_each(|x| *x *= scale);
        }
        self.backend.write(block.embedding, &self.hidden);
        self.backend.write(block.hidden, states);
        let positions: Vec<u32> = (place.from as u32..).take(tokens.len()).collect();
        let sequences = [SequenceTables { classes: place.tables, state: [0; 2] }];
        let row_sequence = vec![0; tokens.len()];
        let pass = Pass {
            positions: &positions,
            row_sequence: &row_sequence,
            sequences: &sequences,
            tape: false,
        };
        // A block is a layer: who cancels waits no longer than that.
        let control = Control { cancel: &NEVER, progress: &mut |_, _| {} };
        let result = block.segments.iter().try_for_each(|segment| {
            self.run_segment(&pass, segment, &SteeredRows::default(), &control)
        });
        if let (Err(_), Some(store)) = (&result, &mut self.store) {
            store.end();
        }
        result
    }

    /// Hands the draft block's logits `[vocab]` of a row of its last pass to `f`.
    pub(super) fn draft_logits<R>(
        &mut self,
        row: usize,
        f: impl FnOnce(&[f32]) -> R,
    ) -> Result<R, EngineError> {
        self.logits.resize(self.spec.vocab_size, 0.0);
        self.backend.draft_logits(&[row as u32], &mut self.logits)?;
        Ok(f(&self.logits))
    }
}
