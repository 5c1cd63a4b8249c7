//! How many reads of a disk to keep in flight: measured while reading, not fixed.
//!
//! Too few leave the disk waiting; too many only make each read take longer, and with it the first
//! expert that could be computed and the demanded read behind a guess. While reads are waiting, the
//! disk's rate at the present depth shows. The depth in use is the smallest whose rate is within
//! `ENOUGH` of the best; now and then a neighbour is tried, as disks and their other users change.

use std::time::Instant;

/// Reads in flight at once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum QueueDepth {
    /// What turns out to be enough.
    #[default]
    Measured,
    /// So many (at least one).
    Fixed(usize),
}

/// At least two, so that one read that hangs does not stop all others.
const LEVELS: [usize; 5] = [2, 4, 8, 16, 32];
const FIRST_LEVEL: usize = 1;
/// A depth is good enough with this share of the best rate.
const ENOUGH: f64 = 0.9;
/// Every so many stretches another depth is tried.
const TRY_EVERY: usize = 8;
/// A stretch is at least so many times the depth in reads, and at most `MAX_READS`.
const MIN_TURNS: usize = 2;
const MAX_READS: usize = 64;
/// What the latest stretch weighs.
const WEIGHT: f64 = 0.2;

impl QueueDepth {
    /// The most reads that will ever be in flight.
    pub fn most(self) -> usize {
        match self {
            QueueDepth::Measured => LEVELS[LEVELS.len() - 1],
            QueueDepth::Fixed(depth) => depth.max(1),
        }
    }
}

/// The depth of one disk.
#[derive(Debug)]
pub(crate) struct Depth {
    setting: QueueDepth,
    level: usize,
    /// Bytes per second at each level, where known.
    rates: [Option<f64>; LEVELS.len()],
    stretch: Option<Stretch>,
    stretches: usize,
}

/// A time in which the disk had as many reads as allowed and more were waiting.
#[derive(Debug)]
struct Stretch {
    start: Instant,
    end: Instant,
    reads: usize,
    bytes: u64,
}

impl Depth {
    pub(crate) fn new(setting: QueueDepth) -> Depth {
        let rates = [None; LEVELS.len()];
        Depth { setting, level: FIRST_LEVEL, rates, stretch: None, stretches: 0 }
    }

    pub(crate) fn limit(&self) -> usize {
        match self.setting {
            QueueDepth::Measured => LEVELS[self.level],
            QueueDepth::Fixed(depth) => depth.max(1),
        }
    }

    /// As many reads as allowed are in flight, and others wait.
    pub(crate) fn full(&mut self, now: Instant) {
        self.stretch.get_or_insert(Stretch { start: now, end: now, reads: 0, bytes: 0 });
    }

    /// A read is over; `waiting`: others wait.
    pub(crate) fn finished(&mut self, bytes: u64, now: Instant, waiting: bool) {
        let Some(stretch) = &mut self.stretch else { return };
        stretch.reads += 1;
        stretch.bytes += bytes;
        stretch.end = stretch.end.max(now);
        if waiting && stretch.reads < MAX_READS {
            return;
        }
        let seconds = (stretch.end - stretch.start).as_secs_f64();
        if stretch.reads >= MIN_TURNS * LEVELS[self.level] && seconds > 0.0 {
            let rate = stretch.bytes as f64 / seconds;
            let known = &mut self.rates[self.level];
            *known = Some(known.map_or(rate, |known| known + WEIGHT * (rate - known)));
            self.stretches += 1;
            self.level = self.next_level();
        }
        self.stretch = None;
    }

    fn next_level(&self) -> usize {
        let best = self.rates.iter().flatten().fold(0.0, |best: f64, &rate| best.max(rate));
        let good = |rate: &Option<f64>| rate.is_some_and(|rate| rate >= ENOUGH * best);
        let chosen = self.rates.iter().position(good).unwrap_or(FIRST_LEVEL);
        // What was never tried is tried first, upwards, then downwards.
        let (above, below) = ((chosen + 1).min(LEVELS.len() - 1), chosen.saturating_sub(1));
        if let Some(unknown) = [above, below].into_iter().find(|&l| self.rates[l].is_none()) {
            return unknown;
        }
        match (self.stretches % TRY_EVERY, self.stretches / TRY_EVERY % 2) {
            (0, 0) => above,
            (0, _) => below,
            _ => chosen,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    /// Feeds stretches of a disk with this rate per depth; returns how often each depth was in use.
    fn run(depth: &mut Depth, rate: impl Fn(usize) -> f64, stretches: usize) -> [usize; 5] {
        let mut now = Instant::now();
        let mut uses = [0; 5];
        for _ in 0..stretches {
            uses[depth.level] += 1;
            let limit = depth.limit();
            depth.full(now);
            for i in 0..3 * limit {
                now += Duration::from_secs_f64(1e6 / rate(limit));
                depth.finished(1_000_000, now, i + 1 < 3 * limit);
            }
        }
        uses
    }

    #[test]
    fn the_smallest_depth_that_is_enough_is_used_most() {
        let saturates_at = |n: usize| move |depth: usize| 1e9 * depth.min(n) as f64 / n as f64;
        for (enough, level) in [(1, 0), (2, 0), (4, 1), (8, 2), (16, 3), (32, 4), (1000, 4)] {
            let mut depth = Depth::new(QueueDepth::Measured);
            let uses = run(&mut depth, saturates_at(enough), 200);
            assert!(uses[level] >= 160, "enough at {enough}: {uses:?}");
        }
        // Deeper can be worse, and disks change.
        let mut depth = Depth::new(QueueDepth::Measured);
        let uses = run(&mut depth, |depth| 1e9 / depth as f64, 200);
        assert!(uses[0] >= 160, "{uses:?}");
        let uses = run(&mut depth, saturates_at(16), 400);
        assert!(uses[3] >= 250, "{uses:?}");
    }

    #[test]
    fn a_fixed_depth_stays() {
        for fixed in [0, 1, 3, 100] {
            let mut depth = Depth::new(QueueDepth::Fixed(fixed));
            run(&mut depth, |depth| 1e9 / depth as f64, 50);
            assert_eq!(depth.limit(), fixed.max(1));
        }
    }

    #[test]
    fn short_bursts_say_nothing() {
        let mut depth = Depth::new(QueueDepth::Measured);
        let now = Instant::now();
        for _ in 0..100 {
            depth.full(now);
            depth.finished(1_000_000, now + Duration::from_millis(1), true);
            depth.finished(1_000_000, now + Duration::from_millis(2), false);
        }
        assert_eq!((depth.limit(), depth.stretches), (4, 0));
    }
}
