//! Speculation: a cheap drafter guesses the next tokens, one pass of the model checks them all.
//!
//! What comes out does not depend on it. The rows of the checking pass are the rows that would have been computed
//! one by one, with the same bits; every token is sampled from its row as ever, the random number being a function of
//! seed and position; and a draft is worth something exactly where it equals the token that was sampled. Rows
//! after the first that differs are taken back: `round`.
//!
//! A [`Drafter`] follows one sequence. It is told of rows that are final and never of others, so whatever it did for a draft
//! of its own is void when it is told of rows, or asked, again. [`Controller`] drafts only while that is measured to be
//! quicker. Drafters: [`ngram`], [`mtp`], [`model`], [`dflash`]; [`scripted`] is for measuring. Design and figures:
//! `docs/design/013-speculation.md`.

pub mod controller;
pub mod dflash;
#[cfg(test)]
mod dflash_tests;
pub mod model;
pub mod mtp;
pub mod ngram;
pub mod round;
pub mod scripted;
pub(crate) mod setup;
#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::engine::Engine;
use crate::error::EngineError;
use crate::forward::Control;
use crate::sampler::{Sampler, SamplerParams};
use crate::state::Sequence;

pub use controller::Controller;
pub use round::{Chosen, Round, Turn};
pub use scripted::Script;

/// Most tokens of a draft: with the token before them they are the rows of one pass of the output head.
pub const MOST_TOKENS: usize = 15;

/// Tokens that are remembered of a sequence beyond its context's: those of a draft.
const BYTES_PER_POSITION: u64 = 8;

/// `--speculate`
#[derive(Clone, Debug, Default, PartialEq)]
pub enum DrafterChoice {
    /// Nothing drafts, and nothing is allocated for it.
    #[default]
    Off,
    /// The model's own block where it has one, else what was said before.
    Auto,
    /// What followed the last time that the last tokens were there.
    Ngram,
    /// The model's multi-token-prediction block.
    Mtp,
    /// A small model with the same vocabulary.
    Model(PathBuf),
    /// A DFlash block drafter that was trained for the model.
    Dflash(PathBuf),
    /// Recorded tokens, partly wrong: for measuring.
    Scripted(Arc<Script>),
}

impl DrafterChoice {
    /// As in `--speculate`.
    pub fn name(&self) -> &'static str {
        match self {
            DrafterChoice::Off => "off",
            DrafterChoice::Auto => "auto",
            DrafterChoice::Ngram => "ngram",
            DrafterChoice::Mtp => "mtp",
            DrafterChoice::Model(_) => "draft",
            DrafterChoice::Dflash(_) => "dflash",
            DrafterChoice::Scripted(_) => "scripted",
        }
    }

    /// Most tokens of a draft where nobody says.
    fn default_tokens(&self) -> usize {
        match self {
            DrafterChoice::Ngram => 7,
            // The block's own size is the limit.
            DrafterChoice::Dflash(_) => MOST_TOKENS,
            _ => 4,
        }
    }
}

/// How tokens are drafted.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SpeculateOptions {
    /// By what.
    pub drafter: DrafterChoice,
    /// Most tokens of a draft; none: the drafter's own number.
    pub tokens: Option<usize>,
    /// Also while it is measured to be slower, and always as many tokens as may be: for tests and measurements.
    pub always: bool,
}

impl SpeculateOptions {
    /// Most tokens of a draft; 0 where nothing drafts.
    pub fn most(&self) -> usize {
        match self.drafter {
            DrafterChoice::Off => 0,
            _ => self.tokens.unwrap_or(self.drafter.default_tokens()).min(MOST_TOKENS),
        }
    }

    /// Rows of the longest pass that may be taken back in part; 0 where nothing drafts.
    pub(crate) fn tape_rows(&self) -> usize {
        match self.most() {
            0 => 0,
            most => most + 1,
        }
    }

    /// Host memory for a context of so many positions: tokens, and the drafter's notes on each.
    pub(crate) fn host_bytes(&self, context: usize) -> u64 {
        match self.most() {
            0 => 0,
            _ => (context + MOST_TOKENS + 1) as u64 * BYTES_PER_POSITION,
        }
    }
}

/// Rows that the model has run for the followed sequence, and that will not be taken back.
#[derive(Clone, Copy, Debug)]
pub struct Observed<'a> {
    /// All tokens of the sequence that are known to the drafter's owner, these rows' tokens being the last.
    pub tokens: &'a [u32],
    /// How many rows: rows `0..rows` of the last pass, as [`Engine::layer_rows`] gives them.
    pub rows: usize,
}

impl Observed<'_> {
    /// Index of the first row's token.
    pub fn from(&self) -> usize {
        self.tokens.len() - self.rows
    }
}

/// What is wanted of a drafter.
pub struct DraftRequest<'a> {
    /// Tokens of the sequence; the last was chosen and is not computed yet.
    pub tokens: &'a [u32],
    /// At most so many.
    pub most: usize,
    /// The drafts.
    pub drafts: Vec<u32>,
    sampler: &'a mut Sampler,
    recent: Vec<u32>,
    position: u64,
}

impl DraftRequest<'_> {
    /// Chooses the next draft from a drafter's logits `[vocab]`, just as the model's own token will be chosen from its
    /// logits: with the same parameters and the same random number. So a drafter that gives the model's logits is
    /// always right, sampled or not. False: these are no logits to choose from.
    pub fn choose(&mut self, logits: &[f32]) -> bool {
        let position = self.position + self.drafts.len() as u64;
        let Some(choice) = self.sampler.sample(logits, &self.recent, position) else {
            return false;
        };
        self.push(choice.token);
        true
    }

    /// Adds a draft.
    pub fn push(&mut self, token: u32) {
        self.drafts.push(token);
        self.recent.push(token);
    }

    /// Whether there are as many as may be.
    pub fn is_full(&self) -> bool {
        self.drafts.len() >= self.most
    }
}

/// Guesses tokens. What it guesses decides how quick an answer is, and nothing in it.
///
/// It follows one sequence at a time and keeps what it needs of it (keys and values, say). Rows of a pass come in order,
/// but some may never be shown: while others are computed beside the sequence, or while drafting does not pay. A
/// drafter does without them.
pub trait Drafter: Send {
    /// As in `--speculate`.
    fn name(&self) -> &'static str;

    /// Layers whose output rows it looks at by [`Engine::layer_rows`]. The program must have been lowered with them:
    /// [`forebay_program::Extras::kept_layers`].
    fn layers(&self) -> Vec<usize> {
        Vec::new()
    }

    /// Another sequence is followed from now on, or the same one over a gap: of all tokens shown so far the first `kept`
    /// are its beginning as well.
    fn follow(&mut self, kept: usize) {
        let _ = kept;
    }

    /// Rows are final. Called right after their pass, so that their layers can be read. Drafts of its own are void.
    ///
    /// # Errors
    /// Nothing is followed any more.
    fn observe(&mut self, target: &mut Engine, rows: Observed<'_>) -> Result<(), EngineError> {
        let _ = (target, rows);
        Ok(())
    }

    /// Rows that it reads before its next draft, after the computed `tokens`: a few of the last round, or what it missed
    /// while it rested, or a prompt.
    fn unread(&self, tokens: &[u32]) -> usize {
        let _ = tokens;
        0
    }

    /// Drafts what comes after `request.tokens`; nothing, where it has no idea. Where that takes long, because it reads a
    /// prompt first, it stops within a layer when `control` says so.
    ///
    /// # Errors
    /// Nothing is followed any more.
    fn draft(
        &mut self,
        target: &mut Engine,
        request: &mut DraftRequest<'_>,
        control: &mut Control<'_>,
    ) -> Result<(), EngineError>;
}

/// What became of drafts.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct SpeculationStats {
    /// Passes with drafts in them.
    pub rounds: u64,
    /// Tokens drafted.
    pub drafted: u64,
    /// Of these, right.
    pub accepted: u64,
    /// Of the first tokens of drafts, right.
    pub first_accepted: u64,
    /// Tokens that came out of these passes.
    pub tokens: u64,
    /// Passes of one row without a draft.
    pub plain: u64,
    /// Time that the drafter took, and taking back.
    pub time: Duration,
}

/// The drafter of an engine, and what it follows.
pub(crate) struct Speculation {
    pub drafter: Box<dyn Drafter>,
    pub controller: Controller,
    pub counts: SpeculationStats,
    /// Id of the followed sequence, and the positions that it had when it was last seen.
    followed: Option<(u64, usize)>,
    /// Its tokens that are computed, as far as they are known.
    tokens: Vec<u32>,
    sampler: Sampler,
    params: SamplerParams,
    most: usize,
}

impl Speculation {
    pub(crate) fn new(
        drafter: Box<dyn Drafter>,
        options: &SpeculateOptions,
        max_rows: usize,
    ) -> Speculation {
        let most = options.most().min(max_rows.saturating_sub(1));
        let params = SamplerParams::default();
        Speculation {
            drafter,
            controller: Controller::new(most, options.always),
            counts: SpeculationStats::default(),
            followed: None,
            tokens: Vec::new(),
            sampler: Sampler::new(params.clone()),
            params,
            most,
        }
    }

    /// Most tokens that the next draft may have.
    pub(crate) fn wanted(&self, most: usize) -> usize {
        self.controller.wanted().min(self.most).min(most)
    }

    fn follows(&self, sequence: &Sequence) -> bool {
        self.followed == Some((sequence.id(), sequence.len()))
    }
}

impl Engine {
    /// Drafts are for `sequence` from now on, whose computed tokens are `tokens` (none, where they are not known).
    /// Does nothing where nothing drafts, or where it is followed already.
    pub fn follow(&mut self, sequence: &Sequence, tokens: &[u32]) {
        let Some(s) = self.speculation.as_mut().filter(|s| !s.follows(sequence)) else { return };
        let common = s.tokens.iter().zip(tokens).take_while(|(a, b)| a == b).count();
        s.drafter.follow(common);
        s.tokens.clear();
        s.tokens.extend_from_slice(tokens);
        s.followed = Some((sequence.id(), sequence.len()));
    }

    /// Rows of the last pass of a sequence are final: the drafter hears of them if it follows it.
    pub(crate) fn observed(
        &mut self,
        sequence: &Sequence,
        tokens: &[u32],
    ) -> Result<(), EngineError> {
        let Some(mut s) = self.speculation.take_if(|s| s.follows(sequence)) else { return Ok(()) };
        s.tokens.extend_from_slice(tokens);
        s.followed = Some((sequence.id(), sequence.len() + tokens.len()));
        let mut result = Ok(());
        if s.controller.listens() {
            let clock = std::time::Instant::now();
            let rows = Observed { tokens: &s.tokens, rows: tokens.len() };
            result = s.drafter.observe(self, rows);
            self.stats.phases.draft += clock.elapsed();
        }
        if result.is_err() {
            s.followed = None;
        }
        self.speculation = Some(s);
        result
    }

    /// Appends rows `0..rows` of a layer's output in the last pass, `[rows, d]`, to `out`. The layer is one of the
    /// drafter's [layers](Drafter::layers).
    pub fn layer_rows(&self, layer: usize, rows: usize, out: &mut Vec<f32>) {
        let kept = self.program.kept_layers.iter().find(|(l, _)| *l == layer);
        let (_, buffer) = kept.expect("a layer that the program was lowered to keep");
        self.backend.read(*buffer, 0..rows, out);
    }

    /// Name of the drafter, what became of its drafts, and what is thought of it; none: nothing drafts.
    pub fn speculation(&self) -> Option<(&'static str, SpeculationStats, &Controller)> {
        self.speculation.as_ref().map(|s| (s.drafter.name(), s.counts, &s.controller))
    }
}
