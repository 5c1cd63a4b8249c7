//! Filling slots: a slot's memory goes out with its reads and comes back valid or not.

use super::{LayerRef, StreamStore};
use crate::cache::SlotId;
use crate::error::{Reader, StoreError};
use crate::queue::{Completion, ReadRequest, Urgency};
use crate::region::{Loan, Region};
use crate::spec::check_expert_scales;

/// A slot's memory: here, or lent to the reads that fill it.
#[derive(Default)]
pub(super) struct Slot {
    pub(super) region: Option<Region>,
    pub(super) fill: Option<Fill>,
    pub(super) touched: bool,
}

pub(super) struct Fill {
    loan: Loan,
    /// Reads whose completions are still to come.
    outstanding: usize,
    /// What they read.
    bytes: u64,
    error: Option<StoreError>,
    pub(super) why: Why,
    /// Some of its reads will never be made.
    withdrawn: bool,
}

/// For whom a slot is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Why {
    /// The pass that wants it last.
    Demanded {
        pass: u64,
    },
    /// The next pass.
    Announced,
    Guessed,
    Warm,
}

enum Outcome {
    Filled,
    Failed(StoreError),
    Withdrawn,
}

impl StreamStore {
    /// Starts reads for the experts that wait, as far as there are slots, and if none is left in
    /// flight, those that may be wanted later.
    pub(super) fn start_reads(&mut self) {
        while let Some(pass) = &mut self.pass
            && pass.error.is_none()
            && let Some(&expert) = pass.waiting.front()
            && let Some(slot) = self.cache.reserve(pass.layer, expert)
        {
            pass.waiting.pop_front();
            pass.reading += 1;
            self.fill(slot, Why::Demanded { pass: self.serial });
        }
        self.read_ahead();
        self.queue.flush();
    }

    /// Starts the reads that fill a slot for its owner.
    pub(super) fn fill(&mut self, id: SlotId, why: Why) {
        let (layer, expert) = self.cache.owner(id);
        let region = self.take_region(id);
        let layout = &self.experts[layer][expert as usize].layout;
        let reads = layout.reads(self.io.max_read_bytes);
        let memory = &mut self.slots[id as usize];
        let (loan, pieces) = region.lend(reads.iter().map(|read| read.range.clone()));
        let (outstanding, bytes) = (reads.len(), layout.bytes());
        memory.fill = Some(Fill { loan, outstanding, bytes, error: None, why, withdrawn: false });
        memory.touched = true;
        let urgency = match why {
            Why::Demanded { .. } => {
                self.stats.reads += outstanding as u64;
                self.stats.bytes_read += bytes;
                self.demanded_reads += outstanding;
                self.busy.start();
                Urgency::Demanded
            }
            Why::Announced => {
                self.stats.reads += outstanding as u64;
                self.stats.bytes_read += bytes;
                Urgency::Ahead
            }
            Why::Guessed => {
                self.stats.guesses.guessed += 1;
                self.stats.guesses.bytes += bytes;
                Urgency::Ahead
            }
            Why::Warm => {
                self.stats.warmed += 1;
                self.stats.warmed_bytes += bytes;
                Urgency::Ahead
            }
        };
        for (read, piece) in reads.iter().zip(pieces) {
            self.queue.submit(ReadRequest::new(id as u64, read, piece, urgency));
        }
    }

    /// The pass at work wants an expert whose bytes are on their way.
    pub(super) fn join(&mut self, id: SlotId) {
        self.stats.guesses.used += u64::from(self.cache.used(id));
        let fill = self.slots[id as usize].fill.as_mut().expect("a reading slot has a fill");
        let before = std::mem::replace(&mut fill.why, Why::Demanded { pass: self.serial });
        let bytes_before = match before {
            Why::Demanded { .. } => return,
            Why::Announced => None,
            Why::Guessed => Some(&mut self.stats.guesses.bytes),
            Why::Warm => Some(&mut self.stats.warmed_bytes),
        };
        // What is still to come counts as demanded from now on.
        if let Some(bytes_before) = bytes_before {
            *bytes_before = bytes_before.saturating_sub(fill.bytes);
            self.stats.bytes_read += fill.bytes;
            self.stats.reads += fill.outstanding as u64;
        }
        self.demanded_reads += fill.outstanding;
        self.busy.start();
        self.queue.promote(id as u64);
        self.ahead_is_over(id);
    }

    /// Takes back what was not begun of a fill that nobody demanded.
    pub(super) fn withdraw(&mut self, id: SlotId) {
        let pieces = self.queue.withdraw(id as u64);
        if pieces.is_empty() {
            return;
        }
        let fill = self.slots[id as usize].fill.as_mut().expect("a reading slot has a fill");
        let bytes: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        fill.withdrawn = true;
        fill.outstanding -= pieces.len();
        fill.bytes -= bytes;
        match fill.why {
            Why::Demanded { .. } => unreachable!("what is demanded is read"),
            Why::Announced => {
                self.stats.reads -= pieces.len() as u64;
                self.stats.bytes_read = self.stats.bytes_read.saturating_sub(bytes);
            }
            Why::Guessed => {
                self.stats.guesses.withdrawn += 1;
                self.stats.guesses.bytes = self.stats.guesses.bytes.saturating_sub(bytes);
            }
            Why::Warm => self.stats.warmed_bytes = self.stats.warmed_bytes.saturating_sub(bytes),
        }
        drop(pieces);
        self.finish_fill(id);
    }

    /// Takes note of everything that is over already.
    pub(super) fn settle_finished(&mut self) {
        while let Some(completion) = self.queue.poll() {
            self.settle(completion);
        }
    }

    pub(super) fn settle(&mut self, completion: Completion) {
        let Completion { tag, dest, result, finished } = completion;
        let id = tag as SlotId;
        let fill = self.slots[id as usize].fill.as_mut().expect("a completion belongs to a fill");
        fill.outstanding -= 1;
        fill.bytes -= dest.len() as u64;
        drop(dest);
        if let Err(error) = result {
            fill.error.get_or_insert(error);
        }
        if let Why::Demanded { .. } = fill.why {
            self.demanded_reads -= 1;
            self.stats.read_busy += self.busy.finish(finished, self.demanded_reads == 0);
        }
        self.finish_fill(id);
    }

    /// If no read of the slot is left, its bytes are all there or not.
    fn finish_fill(&mut self, id: SlotId) {
        let slot = &mut self.slots[id as usize];
        let Some(fill) = slot.fill.take_if(|fill| fill.outstanding == 0) else { return };
        slot.region = Some(fill.loan.reclaim().expect("all reads came back"));
        self.ahead_is_over(id);
        let outcome = match fill.error {
            Some(error) => Outcome::Failed(error),
            None if fill.withdrawn => Outcome::Withdrawn,
            None => match self.check_fill(id) {
                Ok(()) => Outcome::Filled,
                Err(error) => Outcome::Failed(error),
            },
        };
        let (layer, expert) = self.cache.owner(id);
        match outcome {
            Outcome::Filled => self.cache.filled(id),
            Outcome::Failed(_) | Outcome::Withdrawn => self.cache.failed(id),
        }
        let wanted = fill.why == Why::Demanded { pass: self.serial };
        let pass = self.pass.as_mut().filter(|_| wanted);
        match (pass, outcome) {
            (Some(pass), Outcome::Filled) => {
                self.cache.hold(id);
                pass.reading -= 1;
                pass.ready.push(id);
            }
            (Some(pass), outcome) => {
                pass.reading -= 1;
                pass.waiting.push_back(expert);
                if let Outcome::Failed(error) = outcome {
                    let layer = self.spec.layers[layer].layer;
                    pass.error.get_or_insert(error.read_for(Reader::Expert { layer, expert }));
                }
            }
            (None, Outcome::Failed(error)) => {
                let error =
                    error.read_for(Reader::Expert { layer: self.spec.layers[layer].layer, expert });
                tracing::warn!(%error, "a read that nobody waits for failed");
            }
            (None, Outcome::Filled | Outcome::Withdrawn) => {}
        }
        self.trim();
    }

    /// The file is still the same, and, once per expert: are its scales numbers?
    fn check_fill(&mut self, id: SlotId) -> Result<(), StoreError> {
        let (layer, expert) = self.cache.owner(id);
        let layout = &self.experts[layer][expert as usize].layout;
        layout.files().into_iter().try_for_each(|file| self.files.check_unchanged(file))?;
        let LayerRef { number, weights } = self.expert(layer, expert);
        if !self.experts[layer][expert as usize].scales_good {
            check_expert_scales(weights, |e| self.bytes(id, e), number, expert)?;
            self.experts[layer][expert as usize].scales_good = true;
        }
        Ok(())
    }
}
