//! One round: draft, check, choose, and take back what was wrong.
//!
//! The checking pass has the chosen token and the drafts as rows of one sequence. Choosing goes row by row and ends with
//! the first token that differs from the draft after it. Until [`Engine::settle`] the sequence is as before the
//! pass; then it grows by the rows that hold. Keys and values of the others lie beyond its length, where nobody
//! looks and the next rows go. Pages were given back by its old length only, so what a sliding window
//! sees is whole. Recurrent states were filled in a slot beside the old one, and are filled once more from the
//! old one by the taped rows that hold (`Backend::replay`).

use std::time::{Duration, Instant};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::forward::{Batch, Control, Logits};
use crate::sampler::{LineDraw, Sampler, SamplerParams};
use crate::speculate::{DraftRequest, MOST_TOKENS};
use crate::state::Sequence;

/// What a round goes on from.
#[derive(Clone, Copy, Debug)]
pub struct Turn<'a> {
    /// The last token: chosen, and not computed yet.
    pub token: u32,
    /// How tokens are chosen: drafts are chosen alike.
    pub params: &'a SamplerParams,
    /// The last tokens, `token` included, as far as penalties look at them.
    pub recent: &'a [u32],
    /// At most so many tokens are wanted, at least 1.
    pub most: usize,
    /// Whoever chooses does it by [`Sampler::choose`] with `params` after `recent`, and looks at no logits: they may stay
    /// where they are.
    pub by_lines: bool,
}

/// What was chosen from a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen {
    /// This token, and others may follow.
    More(u32),
    /// Nothing after it is wanted in this round.
    Last(u32),
}

/// A pass whose rows are not part of the sequence yet.
#[derive(Debug)]
#[must_use = "the sequence grows when the round is settled"]
pub struct Round {
    rows: Vec<u32>,
    chosen: usize,
    taped: bool,
    /// Rows that the drafter read before it drafted.
    unread: usize,
    time: Duration,
}

impl Round {
    /// How many tokens were chosen.
    pub fn chosen(&self) -> usize {
        self.chosen
    }
}

/// Chooses from the logits of a row; it is told how many were chosen before in the round.
pub type Choose<'a> = &'a mut dyn FnMut(&Logits<'_>, usize) -> Result<Chosen, EngineError>;

impl Engine {
    /// Computes the chosen token's row, and rows of drafts where something drafts for this sequence. `choose` gets the logits
    /// of one row after the other, and how many came before in this round.
    ///
    /// # Errors
    /// The sequence is as before.
    pub fn round(
        &mut self,
        sequence: &mut Sequence,
        turn: &Turn<'_>,
        control: &mut Control<'_>,
        choose: Choose<'_>,
    ) -> Result<Round, EngineError> {
        let clock = Instant::now();
        let room = self.plan.context.saturating_sub(sequence.len() + 1);
        let (drafts, unread) = self.drafts(sequence, turn, room, control)?;
        let taped = !drafts.is_empty();
        let mut rows = vec![turn.token];
        rows.extend(drafts);
        let logit_rows = (0..rows.len() as u32).collect();
        let draw = (turn.by_lines && !taped)
            .then(|| LineDraw::new(turn.params, turn.recent, sequence.len() as u64 + 1))
            .flatten();
        let batch = Batch { tape: taped, draw, ..Batch::single(&rows, logit_rows) };
        let mut chosen = 0;
        let mut more = true;
        self.pass(&batch, &mut [&mut *sequence], control, &mut |row, logits| {
            if !more {
                return Ok(());
            }
            let token = match choose(&logits, row) {
                Ok(Chosen::More(token)) => Some(token),
                Ok(Chosen::Last(_)) => None,
                // What came before it holds; the row comes again.
                Err(_) if row > 0 => {
                    more = false;
                    return Ok(());
                }
                Err(e) => return Err(e),
            };
            chosen += 1;
            more = token.is_some() && rows.get(row + 1) == token.as_ref();
            Ok(())
        })?;
        Ok(Round { rows, chosen, taped, unread, time: clock.elapsed() })
    }

    /// Ends a round: the sequence grows by the rows that the first `used` chosen tokens came from (at least 1), as if there
    /// had been no others. No pass may have been run since the round's.
    pub fn settle(
        &mut self,
        sequence: &mut Sequence,
        round: Round,
        used: usize,
    ) -> Result<(), EngineError> {
        let Round { rows, chosen, taped, unread, time } = round;
        assert!((1..=chosen).contains(&used), "tokens of the round");
        let clock = Instant::now();
        if used < rows.len() {
            self.backend.replay(&sequence.tables(), used);
        }
        let observed = self.observed(sequence, &rows[..used]);
        sequence.commit(&mut self.pages, used);
        sequence.trim(&mut self.pages);
        self.stats.rows += rows.len() as u64;
        if let Some(s) = &mut self.speculation {
            let time = time + clock.elapsed();
            if taped {
                let (drafted, right) = (rows.len() - 1, chosen - 1);
                match unread > MOST_TOKENS + 1 {
                    true => s.controller.caught_up(unread, drafted, right, time),
                    false => s.controller.round(drafted, right, time),
                }
                s.counts.rounds += 1;
                s.counts.drafted += drafted as u64;
                s.counts.accepted += right as u64;
                s.counts.first_accepted += u64::from(right > 0);
                s.counts.tokens += used as u64;
            } else {
                s.controller.plain(time);
                s.counts.plain += 1;
            }
        }
        observed
    }

    /// Drafts for the followed sequence, and how many rows were read first; none for another, or where they do not pay.
    fn drafts(
        &mut self,
        sequence: &Sequence,
        turn: &Turn<'_>,
        room: usize,
        control: &mut Control<'_>,
    ) -> Result<(Vec<u32>, usize), EngineError> {
        // Of the tokens that are wanted one comes without a draft.
        let mut most = turn.most.saturating_sub(1).min(room);
        // A capture keeps what passes, and knows nothing of rows that are taken back.
        if self.capture.is_some() {
            most = 0;
        }
        let Some(mut s) = self.speculation.take_if(|s| s.follows(sequence) && s.wanted(most) > 0)
        else {
            return Ok((Vec::new(), 0));
        };
        let clock = Instant::now();
        if s.params != *turn.params {
            s.params = turn.params.clone();
            s.sampler = Sampler::new(s.params.clone());
        }
        let most = s.wanted(most);
        let unread = s.drafter.unread(&s.tokens);
        s.tokens.push(turn.token);
        let mut request = DraftRequest {
            tokens: &s.tokens,
            most,
            drafts: Vec::with_capacity(most),
            sampler: &mut s.sampler,
            recent: turn.recent.to_vec(),
            position: sequence.len() as u64 + 1,
        };
        let result = s.drafter.draft(self, &mut request, control);
        let mut drafts = request.drafts;
        s.tokens.pop();
        let vocab = self.spec.vocab_size;
        let known = drafts.iter().take_while(|&&token| (token as usize) < vocab).count();
        drafts.truncate(known.min(most));
        if result.is_err() {
            s.followed = None;
        }
        self.stats.phases.draft += clock.elapsed();
        s.counts.time += clock.elapsed();
        self.speculation = Some(s);
        result.map(|()| (drafts, unread))
    }
}
