//! Whether to draft, and how many tokens: by what passes took and how many drafts were right.
//!
//! Three things are measured: the time of a pass of one row, the time of a round (drafting, the checking pass, taking
//! back) for each length of draft, and how often the k-th draft is right when those before it were. A draft of m tokens is
//! then expected to give `1 + a1 + a1 a2 + ...` tokens in the time of its round; the gain is that rate over the rate
//! of plain passes. Under streaming a round's time has the reads in it that its further rows cause, so nothing has to be
//! known of experts here.
//!
//! Plain passes are measured first, then drafts of one token are tried, the cheapest that there are. While no length
//! promises a gain, drafting rests, and is tried again after a pause that doubles: what loses costs a few rounds in
//! hundreds of tokens. A drafter that first reads what it missed (a draft model) makes a trial dearer the longer it rested:
//! so what lost trials took is added up, and there is no further one unless all together stay a small share of the time.
//! Medians are taken, since a pass beside other programs may take any time. Nothing decided here can change an answer.

use std::time::Duration;

/// Plain passes that are measured before a first trial.
const PLAIN: usize = 6;
/// Rounds of a trial.
const TRIAL: usize = 3;
/// Plain tokens between a trial that failed and the next, the first time.
const PAUSE: usize = 128;
/// Longest pause.
const MAX_PAUSE: usize = 2048;
/// Trials that lose may take this share of the time of plain passes ...
const SHARE: f64 = 0.025;
/// ... for all tokens so far, or for so many.
const SHARE_OF: usize = 500;
/// Before a trial the drafter is shown rows again for so many tokens.
const WARM_UP: usize = 16;
/// Rounds after which a plain pass is measured again.
const REFRESH: usize = 64;
/// Measurements that are remembered of a kind.
const REMEMBERED: usize = 9;
/// Drafting has to promise this much.
const GAIN: f64 = 1.02;
/// What is thought of drafts before any was seen: so many of so many right.
const PRIOR: (f64, f64) = (1.3, 2.0);
/// Weight of older drafts against the newest.
const FADE: f64 = 0.95;

/// The last few durations of a kind, in seconds.
#[derive(Clone, Debug, Default)]
struct Times {
    last: Vec<f64>,
    next: usize,
}

impl Times {
    fn add(&mut self, seconds: f64) {
        match self.last.get_mut(self.next) {
            Some(oldest) => *oldest = seconds,
            None => self.last.push(seconds),
        }
        self.next = (self.next + 1) % REMEMBERED;
    }

    fn median(&self) -> Option<f64> {
        let mut sorted = self.last.clone();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }
}

/// How often the k-th draft is right when those before it were; older ones fade.
#[derive(Clone, Copy, Debug)]
struct Odds {
    right: f64,
    seen: f64,
}

impl Odds {
    fn add(&mut self, right: bool) {
        self.right = self.right * FADE + f64::from(right);
        self.seen = self.seen * FADE + 1.0;
    }

    fn estimate(&self) -> f64 {
        (self.right + PRIOR.0) / (self.seen + PRIOR.1)
    }
}

/// What is being done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// So many plain passes are still to be measured.
    Measuring(usize),
    /// So many rounds have been tried.
    Trying(usize),
    /// Drafting, for so many rounds since a plain pass was measured.
    On(usize),
    /// So many tokens until the next trial.
    Resting(usize),
}

/// What trials cost, in seconds beyond those of plain passes for the same tokens.
#[derive(Clone, Debug, Default)]
struct Trials {
    /// All that lost.
    lost: f64,
    /// Rounds of this trial or the last one.
    rounds: f64,
    /// Reading what was missed before them.
    reading: f64,
    /// That for one row.
    row: f64,
    /// Tokens so far.
    tokens: usize,
    /// Tokens since the last trial.
    rested: usize,
}

impl Trials {
    fn begin(&mut self) {
        (self.rounds, self.reading) = (0.0, 0.0);
    }

    /// Whether one more stays within the share, where a plain pass takes so long.
    fn affordable(&self, plain: f64) -> bool {
        let next = self.rounds + self.row * self.rested as f64;
        self.lost + next <= SHARE * plain * self.tokens.max(SHARE_OF) as f64
    }
}

/// Decides.
#[derive(Clone, Debug)]
pub struct Controller {
    most: usize,
    always: bool,
    phase: Phase,
    pause: usize,
    plain: Times,
    /// By tokens drafted, 1 first.
    rounds: Vec<Times>,
    odds: Vec<Odds>,
    trials: Trials,
    /// The gain that the last decision was made with.
    last_gain: Option<f64>,
}

impl Controller {
    /// For drafts of at most `most` tokens. `always`: of as many as may be, whatever they cost.
    pub fn new(most: usize, always: bool) -> Controller {
        Controller {
            most,
            always,
            phase: Phase::Measuring(PLAIN),
            pause: PAUSE,
            plain: Times::default(),
            rounds: vec![Times::default(); most],
            odds: vec![Odds { right: 0.0, seen: 0.0 }; most],
            trials: Trials::default(),
            last_gain: None,
        }
    }

    /// How many tokens to draft next; 0: none.
    pub fn wanted(&self) -> usize {
        if self.always || self.most == 0 {
            return self.most;
        }
        match self.phase {
            Phase::Measuring(_) | Phase::Resting(_) => 0,
            Phase::Trying(0) => 1,
            Phase::On(REFRESH..) => 0,
            Phase::Trying(_) | Phase::On(_) => self.best().0.max(1),
        }
    }

    /// Whether the drafter should be shown rows.
    pub fn listens(&self) -> bool {
        self.most > 0
            && (self.always || !matches!(self.phase, Phase::Resting(left) if left > WARM_UP))
    }

    /// A pass of one row without a draft.
    pub fn plain(&mut self, time: Duration) {
        self.plain.add(time.as_secs_f64());
        self.trials.tokens += 1;
        self.trials.rested += 1;
        self.phase = match self.phase {
            Phase::Measuring(left) if left > 1 => Phase::Measuring(left - 1),
            Phase::Resting(left) if left > 1 => Phase::Resting(left - 1),
            Phase::Resting(_) if !self.trials.affordable(self.plain.median().unwrap_or(0.0)) => {
                Phase::Resting(self.pause)
            }
            Phase::Measuring(_) | Phase::Resting(_) => {
                self.trials.begin();
                Phase::Trying(0)
            }
            Phase::On(_) => Phase::On(0),
            // The drafter had no idea.
            Phase::Trying(rounds) => Phase::Trying(rounds),
        };
    }

    /// A round before whose draft the drafter read `missed` rows: its time says nothing of those that follow.
    pub fn caught_up(&mut self, missed: usize, drafted: usize, right: usize, time: Duration) {
        let over = self.seen(drafted, right, time);
        self.trials.row = over.max(0.0) / missed.max(1) as f64;
        self.trials.reading += over;
    }

    /// Of `drafted` tokens the first `right` were right. Gives the seconds beyond those of plain passes.
    fn seen(&mut self, drafted: usize, right: usize, time: Duration) -> f64 {
        self.trials.tokens += right + 1;
        let drafted = drafted.min(self.most);
        for (k, odds) in self.odds[..drafted].iter_mut().enumerate().take(right + 1) {
            odds.add(k < right);
        }
        time.as_secs_f64() - (right + 1) as f64 * self.plain.median().unwrap_or(0.0)
    }

    /// A round with `drafted` tokens, of which the first `right` were right.
    pub fn round(&mut self, drafted: usize, right: usize, time: Duration) {
        self.trials.rounds += self.seen(drafted, right, time);
        let drafted = drafted.min(self.most);
        self.rounds[drafted - 1].add(time.as_secs_f64());
        let (_, gain) = self.best();
        self.last_gain = (gain > 0.0).then_some(gain);
        self.phase = match self.phase {
            Phase::Trying(rounds) if rounds + 1 < TRIAL && !self.is_hopeless() => {
                Phase::Trying(rounds + 1)
            }
            Phase::On(rounds) if gain >= 1.0 => Phase::On(rounds + 1),
            Phase::Trying(_) if gain >= GAIN => {
                self.pause = PAUSE;
                self.trials.lost = 0.0;
                Phase::On(0)
            }
            Phase::Trying(_) | Phase::On(_) => {
                if let Phase::Trying(_) = self.phase {
                    self.trials.lost += (self.trials.rounds + self.trials.reading).max(0.0);
                }
                self.trials.rested = 0;
                let pause = self.pause;
                self.pause = (pause * 2).min(MAX_PAUSE);
                // Times of a disk and of other programs change; what was right of drafts stays.
                self.rounds.iter_mut().for_each(|times| *times = Times::default());
                Phase::Resting(pause)
            }
            // Asked for by the caller alone.
            other => other,
        };
    }

    /// Tokens that a round with `m` drafts is expected to give.
    fn expected(&self, m: usize) -> f64 {
        let mut likely = 1.0;
        let more = self.odds[..m].iter().map(|odds| {
            likely *= odds.estimate();
            likely
        });
        1.0 + more.sum::<f64>()
    }

    /// Seconds of a round with `m` drafts: measured, or by the straight line through plain passes and the nearest length
    /// that was.
    fn seconds(&self, m: usize) -> Option<f64> {
        if let Some(known) = self.rounds[m - 1].median() {
            return Some(known);
        }
        let plain = self.plain.median()?;
        let known = |&k: &usize| self.rounds[k - 1].median().is_some();
        let nearest = (1..=self.most).filter(known).min_by_key(|k| k.abs_diff(m))?;
        let slope = (self.rounds[nearest - 1].median()? - plain) / nearest as f64;
        Some(plain + slope.max(0.0) * m as f64)
    }

    /// The best length of drafts and its gain; (0, 0) while nothing is known.
    fn best(&self) -> (usize, f64) {
        let Some(plain) = self.plain.median() else { return (0, 0.0) };
        let gain = |m: usize| Some((m, self.expected(m) * plain / self.seconds(m)?));
        let gains = (1..=self.most).filter_map(gain);
        gains.max_by(|a, b| a.1.total_cmp(&b.1).then(b.0.cmp(&a.0))).unwrap_or((0, 0.0))
    }

    /// Whether no length could gain even if all of its drafts were right.
    fn is_hopeless(&self) -> bool {
        let Some(plain) = self.plain.median() else { return false };
        let loses = |m: usize| self.seconds(m).is_some_and(|s| s >= (m + 1) as f64 * plain);
        (1..=self.most).all(loses)
    }

    /// Speed with drafts over speed without, as expected when a round was last seen; none while nothing was tried.
    pub fn gain(&self) -> Option<f64> {
        self.last_gain
    }

    /// For people.
    pub fn verdict(&self) -> &'static str {
        match self.phase {
            _ if self.always => "always",
            _ if self.most == 0 => "off: a pass has one row",
            Phase::Measuring(_) => "measuring",
            Phase::Trying(_) => "trying",
            Phase::On(_) => "on",
            Phase::Resting(_) => "resting",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Plays `tokens` tokens: a round with m drafts takes `cost(m)`, each draft is right with `odds`. Gives (time over
    /// the time of plain passes alone, tokens out of rounds).
    fn play(
        c: &mut Controller,
        tokens: usize,
        odds: f64,
        cost: impl Fn(usize) -> f64,
    ) -> (f64, usize) {
        let (mut done, mut time, mut drafted_tokens, mut draw) = (0, 0.0, 0, 0);
        while done < tokens {
            let m = c.wanted();
            let seconds = cost(m);
            time += seconds;
            let took = Duration::from_secs_f64(seconds);
            if m == 0 {
                c.plain(took);
                done += 1;
                continue;
            }
            let mut right = 0;
            while right < m {
                draw += 1;
                if crate::sampler::uniform(7, draw, 0) >= odds {
                    break;
                }
                right += 1;
            }
            c.round(m, right, took);
            done += right + 1;
            drafted_tokens += right + 1;
        }
        (time / (done as f64 * cost(0)), drafted_tokens)
    }

    /// Each row reads experts of its own from a disk: nothing can be gained.
    #[test]
    fn what_loses_rests_and_costs_little() {
        for (odds, row) in [(0.9, 1.2), (0.7, 0.9), (0.3, 0.8), (0.0, 0.5)] {
            let mut c = Controller::new(4, false);
            let (over, drafted) = play(&mut c, 500, odds, |m| 1.0 + row * m as f64);
            assert!(over < 1.03, "odds {odds}, {row} for a row: {over}");
            assert!(drafted < 40, "{drafted}");
            assert_eq!(c.verdict(), "resting");
        }
    }

    /// A drafter that reads first what it missed, and is never right.
    #[test]
    fn reading_what_was_missed_counts() {
        for (tokens, row) in [(500, 0.001), (500, 0.02), (500, 0.1), (5000, 0.02), (5000, 0.1)] {
            let mut c = Controller::new(4, false);
            let (mut over, mut missed, mut rounds) = (0.0, 16, 0);
            for _ in 0..tokens {
                let m = c.wanted();
                missed += 1;
                if m == 0 {
                    c.plain(Duration::from_secs(1));
                    continue;
                }
                rounds += 1;
                let lags = missed > 5;
                let seconds = 1.0 + 0.6 * m as f64 + if lags { row * missed as f64 } else { 0.0 };
                over += seconds - 1.0;
                match lags {
                    true => c.caught_up(missed, m, 0, Duration::from_secs_f64(seconds)),
                    false => c.round(m, 0, Duration::from_secs_f64(seconds)),
                }
                missed = 0;
            }
            assert!(over < 0.03 * tokens as f64, "{row} for a row, {tokens} tokens: {over}");
            assert!(rounds >= 2, "{rounds}");
            assert_eq!(c.verdict(), "resting");
        }
    }

    /// Weights are read once for all rows: the more drafts the better, where they are right.
    #[test]
    fn what_gains_is_on_from_the_start() {
        for (odds, row) in [(0.7, 0.05), (0.9, 0.1), (0.5, 0.02)] {
            let mut c = Controller::new(6, false);
            let cost = |m: usize| 1.0 + row * m as f64;
            let (over, _) = play(&mut c, 500, odds, cost);
            // Against who knows the odds and always drafts the best number.
            let tokens = |m: usize| (0..=m as i32).map(|k| f64::powi(odds, k)).sum::<f64>();
            let best = (1..=6).map(|m| cost(m) / tokens(m)).fold(1.0, f64::min);
            assert!(over < best * 1.1, "odds {odds}, {row} for a row: {over}, best {best}");
            assert_eq!(c.verdict(), "on");
        }
    }

    /// A length that costs too much is not taken, a shorter one that gains is.
    #[test]
    fn the_length_follows_the_cost() {
        let mut c = Controller::new(6, false);
        play(&mut c, 400, 0.75, |m| if m <= 2 { 1.0 + 0.1 * m as f64 } else { 1.0 + m as f64 });
        assert_eq!(c.wanted().min(2), c.wanted());
        assert!(c.gain().unwrap() > 1.5);
    }

    /// What began to lose rests, what began to gain is found in the end.
    #[test]
    fn a_change_is_noticed() {
        let mut c = Controller::new(4, false);
        play(&mut c, 200, 0.8, |m| 1.0 + 0.05 * m as f64);
        assert_eq!(c.verdict(), "on");
        let (over, _) = play(&mut c, 500, 0.8, |m| 1.0 + 1.1 * m as f64);
        assert!(over < 1.06, "{over}");
        assert_eq!(c.verdict(), "resting");
        play(&mut c, 3000, 0.8, |m| 1.0 + 0.05 * m as f64);
        assert_eq!(c.verdict(), "on");
    }

    #[test]
    fn always_is_always() {
        let mut c = Controller::new(3, true);
        play(&mut c, 100, 0.0, |m| 1.0 + 5.0 * m as f64);
        assert_eq!((c.wanted(), c.verdict()), (3, "always"));
        assert_eq!(Controller::new(0, true).wanted(), 0);
    }
}
