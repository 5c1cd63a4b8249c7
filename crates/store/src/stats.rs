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
    /// Bytes read for misses, alignment included.
    pub bytes_read: u64,
    /// Reads for misses.
    pub reads: u64,
    /// Time for which `next_ready` blocked.
    pub read_wait: Duration,
    /// Time in which at least one read was in flight.
    pub read_busy: Duration,
    /// Always 0: a store never writes.
    pub bytes_written: u64,
    /// One entry per MoE layer.
    pub layers: Vec<LayerStats>,
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
