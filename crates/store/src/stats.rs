//! Counters of an expert store.

use std::time::{Duration, Instant};

/// What a store did since it was opened or its counters were reset.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreStats {
    /// Experts of passes that were in memory (or mapped).
    pub hits: u64,
    /// Experts of passes that had to be waited for.
    pub misses: u64,
    /// Of the hits, those of passes with misses: what could be computed while those were read.
    pub hits_beside_misses: u64,
    /// Bytes read for misses and for what was announced, alignment included. What was guessed is
    /// counted apart, and moves here as far as it is still to be read when a pass demands it.
    pub bytes_read: u64,
    /// Reads for misses.
    pub reads: u64,
    /// Time for which `next_ready` blocked.
    pub read_wait: Duration,
    /// Time in which at least one demanded read was in flight.
    pub read_busy: Duration,
    /// Reads of one disk that may be in flight at once, as last measured.
    pub queue_depth: usize,
    /// Always 0: a store never writes.
    pub bytes_written: u64,
    /// Guessed reads.
    pub guesses: GuessStats,
    /// Experts read because they were hot in an earlier run.
    pub warmed: u64,
    /// Their bytes.
    pub warmed_bytes: u64,
    /// One entry per MoE layer.
    pub layers: Vec<LayerStats>,
}

/// Experts that were read because they might be wanted next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct GuessStats {
    /// Experts whose reads were begun.
    pub guessed: u64,
    /// Of these, those that a pass wanted, while their reads were in flight or later.
    pub used: u64,
    /// Of these, those that were evicted before any pass wanted them.
    pub wasted: u64,
    /// Of these, those that turned out to be wrong before all of their reads had begun.
    pub withdrawn: u64,
    /// Bytes read.
    pub bytes: u64,
}

impl GuessStats {
    /// How probably a guess is used, to go by what became of earlier ones.
    pub(crate) fn precision(&self, wasted: u64) -> f64 {
        let wrong = wasted + self.withdrawn;
        (self.used + 1) as f64 / (self.used + wrong + 2) as f64
    }
}

/// What is in memory at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct StoreSnapshot {
    /// Experts that the pool can hold; 0 where there is no pool.
    pub slots: usize,
    /// Slots that hold nothing.
    pub free: usize,
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Who has to go; none where nobody has to.
    pub policy: Option<crate::Policy>,
    /// One entry per MoE layer; empty where there is no pool.
    pub layers: Vec<LayerSnapshot>,
}

/// What is in memory of one layer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct LayerSnapshot {
    /// Layer of the model.
    pub layer: usize,
    /// Slots it is entitled to; none where layers share all slots.
    pub quota: Option<usize>,
    /// Experts in memory, ascending, and how often each was used since the store was opened.
    pub resident: Vec<(u16, u32)>,
}

/// Counters of one layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerStats {
    /// As [`StoreStats::hits`].
    pub hits: u64,
    /// As [`StoreStats::misses`].
    pub misses: u64,
}

impl StoreStats {
    pub(crate) fn new(layers: usize) -> StoreStats {
        StoreStats { layers: vec![LayerStats::default(); layers], ..StoreStats::default() }
    }

    pub(crate) fn count(&mut self, layer: usize, hits: usize, misses: usize) {
        self.hits += hits as u64;
        self.misses += misses as u64;
        self.hits_beside_misses += if misses > 0 { hits as u64 } else { 0 };
        self.layers[layer].hits += hits as u64;
        self.layers[layer].misses += misses as u64;
    }
}

/// Measures the time in which something was in flight.
#[derive(Debug, Default)]
pub(crate) struct BusyClock {
    since: Option<Instant>,
    /// The latest end seen since.
    last: Option<Instant>,
}

impl BusyClock {
    pub(crate) fn start(&mut self) {
        self.since.get_or_insert_with(Instant::now);
    }

    /// Something finished; `idle` if it was the last thing in flight. Returns the time to add.
    pub(crate) fn finish(&mut self, at: Instant, idle: bool) -> Duration {
        let last = self.last.map_or(at, |last| last.max(at));
        self.last = Some(last);
        if !idle {
            return Duration::ZERO;
        }
        self.last = None;
        self.since.take().map_or(Duration::ZERO, |since| last.saturating_duration_since(since))
    }
}
