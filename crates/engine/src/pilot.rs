//! Guessing the experts of the next routed layer, and finding out whether that pays.
//!
//! The guess itself is an operation of the program ([`forebay_program::Pilot`]); reading what was
//! guessed is the store's business, which lets demanded reads go first. Here is the judge: how often
//! guesses are right, per layer, and whether passes are quicker with them. Nothing here can change an
//! answer.
//!
//! The trial: passes of a few rows are timed in blocks, with and without guesses in turn. The median
//! of each kind decides for a while, then the trial is repeated. Guesses are off from the start until
//! a trial has shown a gain, so that a disk or a model for which they lose pays for the trials only.

use std::time::Duration;

use forebay_program::MoeId;

/// `--prefetch`
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefetch {
    /// While it is measured to pay.
    #[default]
    Auto,
    /// Never.
    Off,
    /// Always: for measuring.
    On,
}

/// What the store is told of the next layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    /// Nothing.
    None,
    /// What may be wanted.
    Guess,
    /// What will be wanted: the union of many rows' guesses is nearly the union of their choices.
    Announce,
}

/// More rows than this choose so many experts that their union hardly has to be guessed.
pub const MOST_ROWS: usize = 8;

/// Passes of one kind before the other kind's turn.
const BLOCK: usize = 8;
/// Blocks of a trial, both kinds together.
const BLOCKS: usize = 6;
/// Passes before the first trial: the pool has to fill first.
const WARM_UP: usize = 32;
/// Passes between trials, the first time; doubled after each trial that says "off".
const PAUSE: usize = 512;
/// Guesses must be quicker by this much.
const GAIN: f64 = 0.97;

/// How well guesses do at one routed layer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PilotCounts {
    /// Experts guessed.
    pub guessed: u64,
    /// Of these, chosen.
    pub right: u64,
    /// Experts chosen after a guess was made.
    pub chosen: u64,
}

/// The judge.
#[derive(Debug)]
pub struct Pilot {
    mode: Prefetch,
    counts: Vec<PilotCounts>,
    /// The last guess: sorted, distinct.
    guess: Option<(MoeId, Vec<u16>)>,
    trial: Trial,
}

#[derive(Debug)]
struct Trial {
    /// Passes since the last decision; a trial begins at `pause`.
    passes: usize,
    pause: usize,
    times: [Vec<Duration>; 2],
    decided: bool,
}

impl Pilot {
    /// For so many routed layers.
    pub fn new(mode: Prefetch, layers: usize) -> Pilot {
        let trial = Trial { passes: 0, pause: WARM_UP, times: Default::default(), decided: false };
        Pilot { mode, counts: vec![PilotCounts::default(); layers], guess: None, trial }
    }

    /// What a pass of so many rows tells.
    pub fn hint(&self, rows: usize) -> Hint {
        match self.mode {
            Prefetch::Off => Hint::None,
            _ if rows > MOST_ROWS => Hint::Announce,
            Prefetch::Auto if !self.trial.guesses() => Hint::None,
            _ => Hint::Guess,
        }
    }

    /// Takes a guess; returns the experts, distinct.
    pub fn guessed(&mut self, moe: MoeId, ids: &[u16]) -> &[u16] {
        let mut ids = ids.to_vec();
        ids.sort_unstable();
        ids.dedup();
        &self.guess.insert((moe, ids)).1
    }

    /// The choice is known.
    pub fn chosen(&mut self, moe: MoeId, union: &[u16]) {
        let Some((_, guess)) = self.guess.take().filter(|(of, _)| *of == moe) else { return };
        let counts = &mut self.counts[moe.0];
        counts.guessed += guess.len() as u64;
        counts.chosen += union.len() as u64;
        counts.right += union.iter().filter(|e| guess.binary_search(e).is_ok()).count() as u64;
    }

    /// A pass of so many rows is over.
    pub fn passed(&mut self, rows: usize, time: Duration) {
        self.guess = None;
        if self.mode == Prefetch::Auto && rows <= MOST_ROWS {
            self.trial.passed(time);
        }
    }

    /// Per routed layer.
    pub fn counts(&self) -> &[PilotCounts] {
        &self.counts
    }

    /// What the judge thinks at present, for people.
    pub fn verdict(&self) -> &'static str {
        match (self.mode, self.trial.decided) {
            (Prefetch::Off, _) => "off",
            (Prefetch::On, _) => "on",
            (Prefetch::Auto, true) => "auto: pays",
            (Prefetch::Auto, false) => "auto: does not pay so far",
        }
    }
}

impl Trial {
    /// Number of the block of a trial that the next pass belongs to.
    fn block(&self) -> Option<usize> {
        self.passes.checked_sub(self.pause).map(|p| p / BLOCK)
    }

    fn guesses(&self) -> bool {
        self.block().map_or(self.decided, |block| block % 2 == 1)
    }

    fn passed(&mut self, time: Duration) {
        if let Some(block) = self.block() {
            self.times[block % 2].push(time);
        }
        self.passes += 1;
        if self.block() == Some(BLOCKS) {
            let [without, with] = std::mem::take(&mut self.times).map(median);
            self.decided = with.as_secs_f64() < without.as_secs_f64() * GAIN;
            self.pause = if self.decided { PAUSE } else { (self.pause * 2).max(PAUSE) };
            self.passes = 0;
        }
    }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs `passes` whose time depends on whether guesses were made.
    fn run(pilot: &mut Pilot, passes: usize, with: u64, without: u64) -> usize {
        let mut guessed = 0;
        for _ in 0..passes {
            let wanted = pilot.hint(1) == Hint::Guess;
            guessed += usize::from(wanted);
            let ms = if wanted { with } else { without };
            pilot.passed(1, Duration::from_millis(ms));
        }
        guessed
    }

    #[test]
    fn stays_off_where_guesses_lose() {
        let mut pilot = Pilot::new(Prefetch::Auto, 2);
        let guessed = run(&mut pilot, 10_000, 12, 10);
        assert_eq!(pilot.hint(1), Hint::None);
        assert!(guessed < 300, "{guessed} of 10000 passes paid for guesses that lose");
    }

    #[test]
    fn goes_on_where_guesses_win_and_off_again() {
        let mut pilot = Pilot::new(Prefetch::Auto, 2);
        let guessed = run(&mut pilot, 1000, 8, 10);
        assert!(guessed > 800, "{guessed}");
        run(&mut pilot, PAUSE + BLOCK * BLOCKS, 12, 10);
        assert!(!pilot.trial.decided);
    }

    #[test]
    fn large_passes_announce_and_are_not_tried() {
        for mode in [Prefetch::On, Prefetch::Auto] {
            let mut pilot = Pilot::new(mode, 1);
            assert_eq!(pilot.hint(MOST_ROWS + 1), Hint::Announce);
            (0..10 * PAUSE).for_each(|_| pilot.passed(512, Duration::ZERO));
            assert_eq!(pilot.trial.passes, 0);
        }
        assert_eq!(Pilot::new(Prefetch::On, 1).hint(1), Hint::Guess);
        assert_eq!(Pilot::new(Prefetch::Auto, 1).hint(1), Hint::None);
        assert_eq!(Pilot::new(Prefetch::Off, 1).hint(512), Hint::None);
    }

    #[test]
    fn counts_recall_and_precision() {
        let mut pilot = Pilot::new(Prefetch::On, 3);
        assert_eq!(pilot.guessed(MoeId(1), &[5, 2, 5, 9]), [2, 5, 9]);
        pilot.chosen(MoeId(1), &[5, 9, 1, 3]);
        assert_eq!(pilot.counts()[1], PilotCounts { guessed: 3, right: 2, chosen: 4 });
        // Without a guess before, nothing is counted.
        pilot.chosen(MoeId(2), &[1]);
        assert_eq!(pilot.counts()[2], PilotCounts::default());
    }
}
