//! Drafting with a DFlash block drafter (arXiv 2602.06036): one pass over a block of masks proposes all of its tokens.
//!
//! Its context are features of the target: outputs of several layers, joined and projected once for each row as soon as the row is
//! final, and kept as keys and values of every draft layer. A block's own keys and values lie behind them for one pass; the next rows
//! of context take their place, so masks and guesses never come into the cache.
//!
//! The cache holds the rows one after the other, whatever their positions: where some were never shown, those that are kept move
//! together. Rotary angles are relative, so what is missing makes drafts worse, not answers. The block is always whole, also where fewer
//! drafts are wanted: a shorter one would change what each mask sees.

use forebay_program::{Pass, SequenceTables};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::forward::Control;
use crate::speculate::{DraftRequest, Drafter, Observed};

/// Drafts with the block drafter of the program.
pub struct Dflash {
    /// Index of the token that each row of the cache was made from; ascending.
    rows: Vec<u32>,
    /// Rows of context that the cache has room for.
    context: usize,
    /// Token of a mask.
    mask: u32,
    /// Places of a block.
    block_size: usize,
    /// Layers of the target that it looks at.
    taps: Vec<usize>,
    /// Page tables: the drafter's pages are in order, nobody else has any.
    tables: Vec<Vec<u32>>,
}

impl Dflash {
    /// For a model with so many classes of keys and values besides the drafter's own.
    pub fn new(drafter: &forebay_models::BlockDrafter, classes: usize, context: usize) -> Dflash {
        let positions = context + drafter.block_size;
        let pages = positions.div_ceil(forebay_cpu::attention::BLOCK) as u32;
        let mut tables = vec![Vec::new(); classes];
        tables.push((0..pages).collect());
        Dflash {
            rows: Vec::with_capacity(context),
            context,
            mask: drafter.mask,
            block_size: drafter.block_size,
            taps: drafter.taps.clone(),
            tables,
        }
    }

    /// Runs a part of the drafter over `rows` rows that come behind those of the cache.
    fn run(&self, target: &mut Engine, rows: usize, part: Part) -> Result<(), EngineError> {
        let program = target.program.clone();
        let drafter = program.block_draft.as_ref().expect("a program with a block drafter");
        let ops = match part {
            Part::Context => &drafter.context,
            Part::Block => &drafter.block,
        };
        let from = self.rows.len() as u32;
        let positions: Vec<u32> = (from..from + rows as u32).collect();
        let row_sequence = vec![0; rows];
        let sequences = [SequenceTables { classes: &self.tables, state: [0; 2] }];
        let pass = Pass {
            positions: &positions,
            row_sequence: &row_sequence,
            sequences: &sequences,
            tape: false,
        };
        Ok(target.backend.run(&pass, ops)?)
    }
}

/// Of a drafter's pass.
enum Part {
    /// Rows of the last pass of the target become rows of context.
    Context,
    /// A block of masks.
    Block,
}

impl Drafter for Dflash {
    fn name(&self) -> &'static str {
        "dflash"
    }

    fn layers(&self) -> Vec<usize> {
        self.taps.clone()
    }

    fn follow(&mut self, kept: usize) {
        self.rows.truncate(self.rows.partition_point(|&row| (row as usize) < kept));
    }

    fn observe(&mut self, target: &mut Engine, rows: Observed<'_>) -> Result<(), EngineError> {
        if self.rows.len() + rows.rows > self.context {
            // Cannot be: there are no more rows than positions.
            self.rows.clear();
        }
        self.run(target, rows.rows, Part::Context)?;
        self.rows.extend(rows.from() as u32..(rows.from() + rows.rows) as u32);
        Ok(())
    }

    fn draft(
        &mut self,
        target: &mut Engine,
        request: &mut DraftRequest<'_>,
        _: &mut Control<'_>,
    ) -> Result<(), EngineError> {
        let Some(&anchor) = request.tokens.last() else { return Ok(()) };
        if self.rows.is_empty() {
            return Ok(());
        }
        let mut ids = vec![self.mask; self.block_size];
        ids[0] = anchor;
        target.embed(&ids)?;
        let program = target.program.clone();
        let drafter = program.block_draft.as_ref().expect("a program with a block drafter");
        target.backend.write(drafter.stream, &target.hidden);
        self.run(target, self.block_size, Part::Block)?;
        let wanted = request.most.min(self.block_size - 1);
        let places: Vec<u32> = (1..=wanted as u32).collect();
        let vocab = target.spec.vocab_size;
        for places in places.chunks(target.backend.max_logit_rows()) {
            target.logits.resize(places.len() * vocab, 0.0);
            target.backend.draft_logits(places, &mut target.logits)?;
            for logits in target.logits.chunks_exact(vocab) {
                if !request.choose(logits) {
                    return Ok(());
                }
            }
        }
        Ok(())
    }
}
