//! The driver: one batch of rows through the program.
//!
//! A decode is a batch of one row, a prefill chunk many rows of one sequence, a server step rows of many
//! sequences: all are the same walk. At each router read-back the union of the chosen experts goes to
//! the store; experts are computed as they become ready, each for all rows that chose it, into
//! `[rows, top_k, d]`; the rows sum them in rank order once all are in. So the order in which experts
//! arrive, and in how many waves, decides nothing.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forebay_program::{ExpertMatrices, LogitLines, MoeId, Op, Pass, Segment, SequenceTables};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::pilot::{Hint, MOST_ROWS};
use crate::sampler::LineDraw;
use crate::state::Sequence;
use crate::steer::SteeredRows;

/// Rows to compute.
#[derive(Clone, Debug, Default)]
pub struct Batch {
    /// Token of each row.
    pub tokens: Vec<u32>,
    /// Index into the sequences of the call, per row. Rows of one sequence are in order and adjacent.
    pub row_sequence: Vec<u32>,
    /// Rows that want logits, ascending.
    pub logit_rows: Vec<u32>,
    /// Some rows may be taken back: [`Pass::tape`].
    pub(crate) tape: bool,
    /// The one row of the batch is drawn from so: its logits need not be handed out where the backend can spare them.
    pub(crate) draw: Option<LineDraw>,
}

impl Batch {
    /// Consecutive tokens of one sequence.
    pub fn single(tokens: &[u32], logit_rows: Vec<u32>) -> Batch {
        let row_sequence = vec![0; tokens.len()];
        Batch { tokens: tokens.to_vec(), row_sequence, logit_rows, tape: false, draw: None }
    }
}

/// How a caller watches and stops a pass.
pub struct Control<'a> {
    /// Set to stop within a layer.
    pub cancel: &'a AtomicBool,
    /// Called with (segments done, segments in all).
    pub progress: &'a mut dyn FnMut(usize, usize),
}

static NEVER: AtomicBool = AtomicBool::new(false);

impl Control<'_> {
    /// Runs `f` with a control that neither stops nor reports.
    pub fn none<R>(f: impl FnOnce(&mut Control<'_>) -> R) -> R {
        f(&mut Control { cancel: &NEVER, progress: &mut |_, _| {} })
    }
}

/// Receives the logits of a row: (row in the batch, `[vocab]`).
pub type LogitSink<'a> = &'a mut dyn FnMut(usize, &[f32]) -> Result<(), EngineError>;

/// What is handed out of a row: all its logits `[vocab]`, or what is enough to choose from it.
#[derive(Clone, Copy, Debug)]
pub enum Logits<'a> {
    /// All of them.
    All(&'a [f32]),
    /// Where a turn [allows it](crate::speculate::Turn::by_lines) only.
    Lines(&'a LogitLines),
}

impl Deref for Logits<'_> {
    type Target = [f32];

    /// # Panics
    /// Where there are only lines.
    fn deref(&self) -> &[f32] {
        match self {
            Logits::All(logits) => logits,
            Logits::Lines(_) => panic!("whoever wants logits allows no lines"),
        }
    }
}

/// As [`LogitSink`].
pub(crate) type RowSink<'a> = &'a mut dyn FnMut(usize, Logits<'_>) -> Result<(), EngineError>;

impl Engine {
    /// Computes a batch: extends every sequence by its rows and hands out the logits asked for.
    ///
    /// On an error the sequences are as before; their pages beyond the old length may hold garbage,
    /// which the next pass overwrites.
    pub fn forward(
        &mut self,
        batch: &Batch,
        sequences: &mut [&mut Sequence],
        control: &mut Control<'_>,
        sink: LogitSink<'_>,
    ) -> Result<(), EngineError> {
        let added = self.pass(batch, sequences, control, &mut |row, logits| sink(row, &logits))?;
        if let [sequence] = sequences {
            self.observed(sequence, &batch.tokens)?;
        }
        for (s, rows) in sequences.iter_mut().zip(added) {
            s.commit(&mut self.pages, rows);
        }
        self.stats.rows += batch.tokens.len() as u64;
        Ok(())
    }

    /// The same without the end of it: the sequences are as before, with their rows' keys, values and states where the next
    /// pass would put its own. Gives the rows of each.
    pub(crate) fn pass(
        &mut self,
        batch: &Batch,
        sequences: &mut [&mut Sequence],
        control: &mut Control<'_>,
        sink: RowSink<'_>,
    ) -> Result<Vec<usize>, EngineError> {
        let added = self.check(batch, sequences)?;
        for (s, rows) in sequences.iter_mut().zip(&added) {
            if !self.reserve(s, *rows) {
                return Err(EngineError::ContextExceeded {
                    prompt: s.len() + rows,
                    context: self.plan.context,
                });
            }
        }
        self.lend()?;
        let positions = positions(batch, sequences);
        let tables: Vec<SequenceTables<'_>> = sequences.iter().map(|s| s.tables()).collect();
        let pass = Pass {
            positions: &positions,
            row_sequence: &batch.row_sequence,
            sequences: &tables,
            tape: batch.tape,
        };
        let steered = steered_rows(batch, sequences);
        if let Some(capture) = &mut self.capture {
            capture.pass(&positions, &batch.tokens, &batch.logit_rows)?;
        }
        self.govern();
        let clock = Instant::now();
        let result = self.run_pass(&pass, batch, &steered, control, sink);
        self.pilot.passed(pass.rows(), clock.elapsed());
        if let (Err(_), Some(store)) = (&result, &mut self.store) {
            store.end();
        }
        if let (Ok(()), Some(capture)) = (&result, &mut self.capture) {
            capture.passed();
        }
        result.map(|()| added)
    }

    /// Rows per sequence, all bounds checked.
    fn check(&self, batch: &Batch, sequences: &[&mut Sequence]) -> Result<Vec<usize>, EngineError> {
        assert_eq!(batch.tokens.len(), batch.row_sequence.len(), "one sequence index per row");
        assert!(batch.tokens.len() <= self.plan.shape.max_rows, "more rows than were planned for");
        let vocab = self.spec.vocab_size;
        if let Some(&id) = batch.tokens.iter().find(|&&t| t as usize >= vocab) {
            return Err(EngineError::BadToken { id, vocab });
        }
        let mut added = vec![0; sequences.len()];
        for &s in &batch.row_sequence {
            added[s as usize] += 1;
        }
        for (s, rows) in sequences.iter().zip(&added) {
            if s.len() + rows > self.plan.context {
                return Err(EngineError::ContextExceeded {
                    prompt: s.len() + rows,
                    context: self.plan.context,
                });
            }
        }
        Ok(added)
    }

    fn run_pass(
        &mut self,
        pass: &Pass<'_>,
        batch: &Batch,
        steered: &SteeredRows,
        control: &mut Control<'_>,
        sink: RowSink<'_>,
    ) -> Result<(), EngineError> {
        let program = self.program.clone();
        let total = program.segments.len();
        if let Some(whole) = self.backend.whole() {
            if control.cancel.load(Ordering::Relaxed) {
                return Err(EngineError::Cancelled);
            }
            timed(&mut self.stats.phases.body, || whole.pass(pass, &batch.tokens))?;
            (control.progress)(total, total);
            return self.logits(batch, sink);
        }
        let clock = Instant::now();
        self.embed(&batch.tokens)?;
        self.backend.begin(pass, &self.hidden);
        self.stats.phases.embed += clock.elapsed();
        for (index, segment) in program.segments.iter().enumerate() {
            self.run_segment(pass, segment, steered, control)?;
            (control.progress)(index + 1, total);
        }
        self.logits(batch, sink)
    }

    /// Operations up to a router, then the experts that it chose.
    pub(crate) fn run_segment(
        &mut self,
        pass: &Pass<'_>,
        segment: &Segment,
        steered: &SteeredRows,
        control: &Control<'_>,
    ) -> Result<(), EngineError> {
        if control.cancel.load(Ordering::Relaxed) {
            return Err(EngineError::Cancelled);
        }
        let (body, router) = segment.ops.split_at(segment.router);
        let clock = Instant::now();
        self.run_tapped(pass, body, steered)?;
        self.stats.phases.body += clock.elapsed();
        let clock = Instant::now();
        self.run_tapped(pass, router, steered)?;
        self.stats.phases.router += clock.elapsed();
        match segment.moe {
            Some(moe) => self.run_experts(pass, moe, segment, control),
            None => Ok(()),
        }
    }

    /// Runs operations up to each tap, and does there what is to be done. Without taps this is one run.
    fn run_tapped(
        &mut self,
        pass: &Pass<'_>,
        ops: &[Op],
        steered: &SteeredRows,
    ) -> Result<(), EngineError> {
        for part in ops.split_inclusive(|op| matches!(op, Op::Tap(_))) {
            let Some((Op::Tap(tap), plain)) = part.split_last() else {
                self.backend.run(pass, part)?;
                continue;
            };
            self.backend.run(pass, plain)?;
            let rows = self.backend.buffer(tap.buf, pass.rows());
            let rows = rows.expect("programs with taps are for backends that show their buffers");
            let width = self.program.buffers[tap.buf.0].width;
            for (range, steering) in steered {
                let part = &mut rows[range.start * width..range.end * width];
                self.steer.apply(self.level, tap, steering, part);
            }
            if let Some(capture) = &mut self.capture {
                capture.tapped(tap, rows, width)?;
            }
        }
        Ok(())
    }

    /// Hands out the logits of the rows that want them.
    fn logits(&mut self, batch: &Batch, sink: RowSink<'_>) -> Result<(), EngineError> {
        self.expect_the_like(batch);
        let vocab = self.spec.vocab_size;
        let phases = &mut self.stats.phases;
        if let (Some(draw), [row]) = (&batch.draw, &batch.logit_rows[..]) {
            let lines = &mut self.lines;
            let (backend, pick) = (&mut self.backend, |lines: &LogitLines| draw.pick(lines));
            if timed(&mut phases.head, || backend.logit_lines(*row, draw.factor(), lines, &pick))? {
                self.stats.memory_bytes += self.backend.take_bytes_moved();
                let lines = Logits::Lines(&self.lines);
                return timed(&mut phases.sampling, || sink(*row as usize, lines));
            }
        }
        for rows in batch.logit_rows.chunks(self.backend.max_logit_rows()) {
            if let Some(store) = &mut self.store {
                store.poll();
            }
            self.logits.resize(rows.len() * vocab, 0.0);
            timed(&mut phases.head, || self.backend.logits(rows, &mut self.logits))?;
            let rows = rows.iter().zip(self.logits.chunks_exact(vocab));
            let each = |(&row, l)| sink(row as usize, Logits::All(l));
            timed(&mut phases.sampling, || { rows }.try_for_each(each))?;
        }
        self.stats.memory_bytes += self.backend.take_bytes_moved();
        Ok(())
    }

    /// Where many sequences get a token each, another such pass follows and wants about the same experts of the first
    /// routed layer: they are read while logits are computed.
    fn expect_the_like(&mut self, batch: &Batch) {
        let many = batch.logit_rows.len() > MOST_ROWS;
        let first = self.program.segments.iter().find_map(|segment| segment.moe);
        let (Some(store), Some(first)) = (self.store.as_mut().filter(|_| many), first) else {
            return;
        };
        if self.pilot.hint(batch.tokens.len()) == Hint::Announce {
            let ids = &self.backend.routing(first).ids;
            store.announce(first.0, &likely(ids, self.program.moes[first.0].n_experts));
        }
    }

    fn run_experts(
        &mut self,
        pass: &Pass<'_>,
        id: MoeId,
        segment: &Segment,
        control: &Control<'_>,
    ) -> Result<(), EngineError> {
        let phases = &mut self.stats.phases;
        let store = self.store.as_mut().expect("a routed model has a store");
        let clock = Instant::now();
        let moe = &self.program.moes[id.0];
        let routing = self.backend.routing(id);
        let chosen = union(&routing.ids, moe.n_experts);
        // The draft block's experts are no layer's of the model.
        if self.program.draft.as_ref().is_none_or(|block| block.moe != Some(id)) {
            for tap in &mut self.taps {
                tap.routed(id.0, moe.top_k, routing);
            }
            if let Some(capture) = &mut self.capture {
                capture.chosen(moe.layer, moe.top_k, routing)?;
            }
            self.pilot.chosen(id, &chosen);
        }
        store.begin(id.0, &chosen)?;
        phases.plan += clock.elapsed();
        let hint = self.pilot.hint(pass.rows());
        if let Some(pilot) = segment.pilot.as_ref().filter(|_| hint != Hint::None) {
            timed(&mut phases.router, || self.backend.run(pass, &pilot.ops))?;
            let ids = self.backend.guessed(pilot.moe);
            match hint {
                Hint::Announce => {
                    let experts = likely(ids, self.program.moes[pilot.moe.0].n_experts);
                    store.announce(pilot.moe.0, &experts);
                }
                _ => store.guess(pilot.moe.0, self.pilot.guessed(pilot.moe, ids)),
            }
        }
        timed(&mut phases.body, || self.backend.run(pass, &segment.overlap))?;
        let mut leases = Vec::new();
        loop {
            if control.cancel.load(Ordering::Relaxed) {
                return Err(EngineError::Cancelled);
            }
            timed(&mut phases.read_wait, || store.next_ready(&mut leases))?;
            if leases.is_empty() {
                break;
            }
            let clock = Instant::now();
            let ready: Vec<ExpertMatrices<'_>> = leases
                .iter()
                .map(|lease| {
                    let v = store.view(lease);
                    ExpertMatrices { expert: lease.expert, gate: v.gate, up: v.up, down: v.down }
                })
                .collect();
            phases.bind += clock.elapsed();
            timed(&mut phases.experts, || self.backend.experts(id, &ready));
            drop(ready);
            timed(&mut phases.plan, || store.release(&mut leases));
        }
        store.end();
        Ok(())
    }
}

/// Runs `f` and adds its time to `phase`.
fn timed<R>(phase: &mut Duration, f: impl FnOnce() -> R) -> R {
    let clock = Instant::now();
    let r = f();
    *phase += clock.elapsed();
    r
}

/// Distinct experts, those with the most rows first so that the longest work starts early.
fn union(ids: &[u16], n_experts: usize) -> Vec<u16> {
    of_rows(ids, n_experts, 1)
}

/// Experts that guesses of several rows agree on, in the same order. What only one row is guessed to want is wrong so
/// often that waiting for its demand costs less than reading it for nothing.
fn likely(guesses: &[u16], n_experts: usize) -> Vec<u16> {
    of_rows(guesses, n_experts, 2)
}

/// Distinct experts of so many rows at least.
fn of_rows(ids: &[u16], n_experts: usize, least: u32) -> Vec<u16> {
    let mut count = vec![0u32; n_experts];
    for &id in ids {
        count[id as usize] += 1;
    }
    let mut union: Vec<u16> =
        (0..n_experts as u16).filter(|&e| count[e as usize] >= least).collect();
    union.sort_by_key(|&e| std::cmp::Reverse(count[e as usize]));
    union
}

/// Ranges of rows whose sequences are steered.
fn steered_rows(batch: &Batch, sequences: &[&mut Sequence]) -> SteeredRows {
    let mut start = 0;
    let mut steered = Vec::new();
    for rows in batch.row_sequence.chunk_by(|a, b| a == b) {
        let range = start..start + rows.len();
        start = range.end;
        if let Some(steering) = sequences[rows[0] as usize].steering() {
            steered.push((range, steering.clone()));
        }
    }
    steered
}

/// Position of each row.
fn positions(batch: &Batch, sequences: &[&mut Sequence]) -> Vec<u32> {
    let mut next: Vec<u32> = sequences.iter().map(|s| s.len() as u32).collect();
    let rows = batch.row_sequence.iter();
    rows.map(|&s| {
        next[s as usize] += 1;
        next[s as usize] - 1
    })
    .collect()
}
