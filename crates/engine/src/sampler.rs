//! From logits to a token.
//!
//! Order: repetition penalties, temperature, top-k, top-p, min-p, then a draw. The random number is a
//! function of (seed, position, choice) and of nothing that happened before, so that a token does not
//! depend on how its predecessors were computed (drafted, batched, resumed).

use std::cmp::Ordering;

use forebay_cpu::Level;
use forebay_cpu::vecmath::exp_slice;
use forebay_program::{LOGIT_LINE as LINE, LogitLines};

use crate::forward::Logits;

/// Sampling parameters. The default is greedy.
#[derive(Clone, Debug, PartialEq)]
pub struct SamplerParams {
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the k most likely; 0 keeps all.
    pub top_k: usize,
    /// Keep the smallest set whose probability reaches this; 1 keeps all.
    pub top_p: f32,
    /// Keep what has at least this part of the largest probability; 0 keeps all.
    pub min_p: f32,
    /// Divides positive and multiplies negative logits of tokens seen lately; 1 is off.
    pub repeat_penalty: f32,
    /// Subtracted from logits of tokens seen lately.
    pub presence_penalty: f32,
    /// Subtracted once per occurrence.
    pub frequency_penalty: f32,
    /// How many last tokens count as lately.
    pub repeat_last: usize,
    /// Seed.
    pub seed: u64,
}

impl Default for SamplerParams {
    fn default() -> Self {
        SamplerParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repeat_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repeat_last: 64,
            seed: 0,
        }
    }
}

/// Chooses tokens.
#[derive(Clone, Debug)]
pub struct Sampler {
    params: SamplerParams,
    candidates: Vec<(u32, f32)>,
}

/// A chosen token.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Choice {
    /// Its id.
    pub token: u32,
    /// Its log-probability under the model's own distribution (no temperature, no cuts).
    pub logprob: f32,
}

impl SamplerParams {
    /// Whether logits change by what was seen lately.
    fn penalises(&self, recent: &[u32]) -> bool {
        let off = self.repeat_penalty == 1.0
            && self.presence_penalty == 0.0
            && self.frequency_penalty == 0.0;
        !recent.is_empty() && !off
    }

    /// Whether every token can be drawn.
    fn draws_from_all(&self) -> bool {
        self.top_k == 0 && self.top_p >= 1.0 && self.min_p <= 0.0
    }
}

impl Sampler {
    /// A sampler.
    pub fn new(params: SamplerParams) -> Sampler {
        Sampler { params, candidates: Vec::new() }
    }

    /// How it chooses.
    pub fn params(&self) -> &SamplerParams {
        &self.params
    }

    /// Chooses the token after `history`, at `position`. `None` when a logit is NaN or none is finite.
    pub fn sample(&mut self, logits: &[f32], history: &[u32], position: u64) -> Option<Choice> {
        let max = finite_max(logits)?;
        let sums = line_sums(logits, max, 1.0);
        let log_sum = sums.iter().sum::<f64>().ln();
        let p = &self.params;
        let recent = &history[history.len().saturating_sub(p.repeat_last)..];
        let penalised = p.penalises(recent);
        let token = if p.temperature <= 0.0 && !penalised {
            argmax(logits)
        } else if !penalised && p.draws_from_all() {
            // A temperature of one needs no exponentials of its own.
            let own = (p.temperature != 1.0).then(|| line_sums(logits, max, 1.0 / p.temperature));
            draw_from_all(logits, max, own.as_deref().unwrap_or(&sums), p, position)
        } else {
            self.candidates.clear();
            self.candidates.extend(logits.iter().enumerate().map(|(i, &l)| (i as u32, l)));
            if penalised {
                penalise(&mut self.candidates, recent, p);
            }
            self.draw(position)
        };
        let logprob = (logits[token as usize] as f64 - max as f64 - log_sum) as f32;
        Some(Choice { token, logprob })
    }

    /// As [`Sampler::sample`], from whatever a pass handed out.
    pub fn choose(
        &mut self,
        logits: &Logits<'_>,
        history: &[u32],
        position: u64,
    ) -> Option<Choice> {
        match logits {
            Logits::All(logits) => self.sample(logits, history, position),
            Logits::Lines(lines) => {
                let recent = &history[history.len().saturating_sub(self.params.repeat_last)..];
                LineDraw::new(&self.params, recent, position)?.choose(lines)
            }
        }
    }

    fn draw(&mut self, position: u64) -> u32 {
        let p = &self.params;
        let c = &mut self.candidates;
        if p.temperature <= 0.0 {
            return c.iter().min_by(|a, b| better(a, b)).expect("vocabulary is not empty").0;
        }
        let k = if p.top_k == 0 { c.len() } else { p.top_k.min(c.len()) };
        if k < c.len() {
            c.select_nth_unstable_by(k - 1, better);
            c.truncate(k);
        }
        let max = c.iter().fold(f32::NEG_INFINITY, |max, (_, l)| max.max(*l)) as f64;
        let inv_t = 1.0 / p.temperature as f64;
        let weight = |l: f32| ((l as f64 - max) * inv_t).exp();
        // Sorting a whole vocabulary takes longer than all the rest: no more is sorted than can be drawn, and nothing
        // where nothing is cut.
        let total: f64 = c.iter().map(|(_, l)| weight(*l)).sum();
        if p.min_p > 0.0 {
            c.retain(|(_, l)| *l as f64 == max || weight(*l) >= p.min_p as f64);
        }
        let cuts = p.top_p < 1.0 || p.min_p > 0.0 || p.top_k > 0;
        let mut sorted = if cuts { 0 } else { c.len() };
        let mut weights = Vec::new();
        let mut mass = 0.0;
        while let Some(keep) = Some(weights.len()).filter(|&keep| keep < c.len()) {
            if keep == sorted {
                sorted = sort_more(c, sorted);
            }
            let w = weight(c[keep].1);
            if keep > 0 && (mass >= p.top_p as f64 * total || w < p.min_p as f64) {
                break;
            }
            mass += w;
            weights.push(w);
        }
        let keep = weights.len();
        let mut left = uniform(p.seed, position, 0) * mass;
        for (candidate, w) in c[..keep].iter().zip(&weights) {
            left -= w;
            if left < 0.0 {
                return candidate.0;
            }
        }
        c[keep - 1].0
    }
}

/// Highest logit first; ties go to the lower id.
fn better(a: &(u32, f32), b: &(u32, f32)) -> Ordering {
    b.1.total_cmp(&a.1).then(a.0.cmp(&b.0))
}

/// With the best `sorted` in their places, brings more there. Returns how many.
fn sort_more(c: &mut [(u32, f32)], sorted: usize) -> usize {
    let more = (sorted * 8).max(256).min(c.len());
    if more < c.len() {
        c[sorted..].select_nth_unstable_by(more - sorted - 1, better);
    }
    c[sorted..more].sort_unstable_by(better);
    more
}

fn penalise(candidates: &mut [(u32, f32)], recent: &[u32], p: &SamplerParams) {
    let mut recent: Vec<u32> = recent.to_vec();
    recent.sort_unstable();
    for group in recent.chunk_by(|a, b| a == b) {
        let Some((_, logit)) = candidates.get_mut(group[0] as usize) else { continue };
        let scaled =
            if *logit > 0.0 { *logit / p.repeat_penalty } else { *logit * p.repeat_penalty };
        *logit = scaled - p.presence_penalty - p.frequency_penalty * group.len() as f32;
    }
}

/// Index of the largest; the first among equals.
pub fn argmax(logits: &[f32]) -> u32 {
    // Whole lines first, so that the search is made of vector operations.
    let mut best = (0, f32::NEG_INFINITY);
    for (i, line) in logits.chunks(LINE).enumerate() {
        let max = largest(line);
        if max > best.1 {
            best = (i * LINE, max);
        }
    }
    let line = &logits[best.0..logits.len().min(best.0 + LINE)];
    (best.0 + line.iter().position(|l| *l == best.1).unwrap_or(0)) as u32
}

/// The largest; NaN is passed over.
fn largest(logits: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let (parts, rest) = logits.as_chunks::<16>();
    for part in parts {
        for i in 0..16 {
            lanes[i] = if part[i] > lanes[i] { part[i] } else { lanes[i] };
        }
    }
    lanes.iter().chain(rest).fold(f32::NEG_INFINITY, |max, l| if *l > max { *l } else { max })
}

/// Calls `f(line, exponentials, their sum)` for every line of logits, with `exp((l - max) * inv_t)`.
///
/// In f32: a vocabulary of f64 exponentials takes as long as a GPU's whole step. What is below e^-80 is taken as that:
/// it adds nothing, and subnormal numbers are slow. Sums are f64.
fn exponentials(logits: &[f32], max: f32, inv_t: f32, mut f: impl FnMut(usize, &[f32], f64)) {
    let level = Level::best();
    let mut line = [0.0f32; LINE];
    for (i, logits) in logits.chunks(LINE).enumerate() {
        let line = &mut line[..logits.len()];
        for (to, l) in line.iter_mut().zip(logits) {
            let x = (l - max) * inv_t;
            *to = if x < -80.0 { -80.0 } else { x };
        }
        exp_slice(level, line);
        let mut sums = [0.0f64; 8];
        let (parts, rest) = line.as_chunks::<8>();
        for part in parts {
            for i in 0..8 {
                sums[i] += part[i] as f64;
            }
        }
        let rest: f64 = rest.iter().map(|e| *e as f64).sum();
        f(i, line, sums.iter().sum::<f64>() + rest);
    }
}

/// The sum of every line's exponentials.
fn line_sums(logits: &[f32], max: f32, inv_t: f32) -> Vec<f64> {
    let mut sums = Vec::with_capacity(logits.len().div_ceil(LINE));
    exponentials(logits, max, inv_t, |_, _, sum| sums.push(sum));
    sums
}

/// A choice that needs no more of a row than [`LogitLines`]: greedy, or where nothing is cut.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LineDraw {
    /// None: greedy.
    uniform: Option<f64>,
    t: f32,
}

impl LineDraw {
    /// None: such a choice needs all logits.
    pub(crate) fn new(p: &SamplerParams, recent: &[u32], position: u64) -> Option<LineDraw> {
        let greedy = p.temperature <= 0.0;
        if p.penalises(recent) || !(greedy || p.draws_from_all()) {
            return None;
        }
        let uniform = (!greedy).then(|| uniform(p.seed, position, 0));
        Some(LineDraw { uniform, t: if greedy { 1.0 } else { 1.0 / p.temperature } })
    }

    /// What differences of logits are multiplied by.
    pub(crate) fn factor(&self) -> f32 {
        self.t
    }

    /// The line of the token.
    pub(crate) fn pick(&self, lines: &LogitLines) -> usize {
        match self.uniform {
            None => {
                let max = largest(&lines.largest);
                lines.largest.iter().position(|l| *l == max).unwrap_or(0)
            }
            Some(uniform) => line_of(self.own_sums(lines), uniform).0,
        }
    }

    fn own_sums<'a>(&self, lines: &'a LogitLines) -> &'a [f64] {
        // A temperature of one needs no exponentials of its own.
        if self.t == 1.0 { &lines.sums } else { &lines.own_sums }
    }

    /// The token, with the line that was picked. As [`Sampler::sample`].
    fn choose(&self, lines: &LogitLines) -> Option<Choice> {
        let max = finite_max(&lines.largest)?;
        let log_sum = lines.sums.iter().sum::<f64>().ln();
        let within = match self.uniform {
            None => argmax(&lines.line) as usize,
            Some(uniform) => {
                let (_, left) = line_of(self.own_sums(lines), uniform);
                draw_in_line(&lines.line, max, self.t, left)
            }
        };
        let token = (self.pick(lines) * LINE + within) as u32;
        let logprob = (lines.line[within] as f64 - max as f64 - log_sum) as f32;
        Some(Choice { token, logprob })
    }
}

/// Draws where nothing is cut: the line first, by the lines' sums, then the token in it.
fn draw_from_all(logits: &[f32], max: f32, sums: &[f64], p: &SamplerParams, position: u64) -> u32 {
    let (at, left) = line_of(sums, uniform(p.seed, position, 0));
    let start = at * LINE;
    let line = &logits[start..logits.len().min(start + LINE)];
    (start + draw_in_line(line, max, 1.0 / p.temperature, left)) as u32
}

/// The line that a number in `[0, 1)` falls into, and what is left of it there.
fn line_of(sums: &[f64], uniform: f64) -> (usize, f64) {
    let mut left = uniform * sums.iter().sum::<f64>();
    let mut at = 0;
    while at + 1 < sums.len() && left >= sums[at] {
        left -= sums[at];
        at += 1;
    }
    (at, left)
}

/// The token in a line.
fn draw_in_line(line: &[f32], max: f32, inv_t: f32, mut left: f64) -> usize {
    let mut chosen = line.len() - 1;
    exponentials(line, max, inv_t, |_, weights, _| {
        for (i, w) in weights.iter().enumerate() {
            left -= *w as f64;
            if left < 0.0 {
                chosen = i;
                break;
            }
        }
    });
    chosen
}

/// The largest logit. `None` when a logit is NaN or +inf, or all are -inf.
fn finite_max(logits: &[f32]) -> Option<f32> {
    // Without an early end, which would keep the compiler from vectors.
    if logits.iter().fold(false, |nan, l| nan | l.is_nan()) {
        return None;
    }
    Some(largest(logits)).filter(|max| max.is_finite())
}

/// Largest logit and `ln(sum(exp(l - max)))`. `None` when a logit is NaN or +inf, or all are -inf.
pub fn log_sum_exp(logits: &[f32]) -> Option<(f32, f64)> {
    let max = finite_max(logits)?;
    Some((max, line_sums(logits, max, 1.0).iter().sum::<f64>().ln()))
}

/// A number in `[0, 1)` from a counter: two rounds of the SplitMix64 finaliser (Steele et al. 2014) over
/// seed, position and choice.
pub fn uniform(seed: u64, position: u64, choice: u64) -> f64 {
    let mix = |mut z: u64| {
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d049bb133111eb);
        z ^ (z >> 31)
    };
    let a = mix(seed.wrapping_add(0x9e3779b97f4a7c15));
    let b = mix(a ^ position.wrapping_mul(0x9e3779b97f4a7c15).wrapping_add(choice << 56));
    (mix(b) >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(params: SamplerParams, logits: &[f32], history: &[u32], pos: u64) -> u32 {
        Sampler::new(params).sample(logits, history, pos).unwrap().token
    }

    #[test]
    fn greedy_takes_the_first_of_the_largest() {
        assert_eq!(sample(SamplerParams::default(), &[0.0, 2.0, 2.0, 1.0], &[], 0), 1);
    }

    #[test]
    fn nan_is_reported() {
        assert!(Sampler::new(SamplerParams::default()).sample(&[0.0, f32::NAN], &[], 0).is_none());
        assert!(
            Sampler::new(SamplerParams::default()).sample(&[f32::NEG_INFINITY], &[], 0).is_none()
        );
    }

    /// Lines by the words of their definition, one number after the other.
    fn lines_of(logits: &[f32], draw: &LineDraw) -> LogitLines {
        let max = logits.iter().fold(f32::NEG_INFINITY, |m, l| if *l > m { *l } else { m });
        let sums = |t: f32| {
            let line = |line: &[f32]| {
                let exp = |l: &f32| {
                    let mut x = [((l - max) * t).max(-80.0)];
                    exp_slice(Level::Scalar, &mut x);
                    x[0] as f64
                };
                let whole = line.len() / 8 * 8;
                let lane = |i| line[..whole].iter().skip(i).step_by(8).map(exp).sum::<f64>();
                let rest = line[whole..].iter().map(exp).sum::<f64>();
                (0..8).map(lane).sum::<f64>() + rest
            };
            logits.chunks(LINE).map(line).collect::<Vec<f64>>()
        };
        let mut lines = LogitLines {
            largest: logits
                .chunks(LINE)
                .map(|l| if l.iter().any(|x| x.is_nan()) { f32::NAN } else { largest(l) })
                .collect(),
            sums: sums(1.0),
            own_sums: if draw.t == 1.0 { Vec::new() } else { sums(draw.t) },
            line: Vec::new(),
        };
        let at = draw.pick(&lines) * LINE;
        lines.line = logits[at..logits.len().min(at + LINE)].to_vec();
        lines
    }

    #[test]
    fn lines_are_enough_to_choose_from() {
        for n in [5usize, 1024, 5003] {
            for seed in 0..400 {
                let params = SamplerParams {
                    temperature: [0.0, 1.0, 0.7, 1.9][seed % 4],
                    seed: seed as u64,
                    ..Default::default()
                };
                // Few values, so that the largest comes more than once.
                let value = |i: usize| (uniform(9, seed as u64, i as u64) * 40.0).floor() as f32;
                let mut logits: Vec<f32> = (0..n).map(|i| value(i) * 0.3 - 6.0).collect();
                logits[seed % n] = f32::NEG_INFINITY;
                let whole = Sampler::new(params.clone()).sample(&logits, &[1], 77);
                let draw = LineDraw::new(&params, &[1], 77).unwrap();
                assert_eq!(draw.choose(&lines_of(&logits, &draw)), whole, "{n} {seed}");
                assert!(whole.is_some());
                logits[(seed * 7) % n] = f32::NAN;
                assert_eq!(draw.choose(&lines_of(&logits, &draw)), None);
            }
        }
        let cut = SamplerParams { temperature: 1.0, top_k: 4, ..Default::default() };
        assert_eq!(LineDraw::new(&cut, &[], 0), None);
        let penalised = SamplerParams { repeat_penalty: 1.1, ..Default::default() };
        assert_eq!(LineDraw::new(&penalised, &[1], 0), None);
        assert!(LineDraw::new(&penalised, &[], 0).is_some());
    }

    #[test]
    fn frequencies_follow_the_softmax() {
        let logits = [1.0f32, 0.0, -1.0, 0.5];
        let z: f64 = logits.iter().map(|l| (*l as f64).exp()).sum();
        let mut counts = [0usize; 4];
        let n = 20000;
        let p = SamplerParams { temperature: 1.0, seed: 7, ..Default::default() };
        let mut s = Sampler::new(p);
        for pos in 0..n {
            counts[s.sample(&logits, &[], pos).unwrap().token as usize] += 1;
        }
        for (c, l) in counts.iter().zip(logits) {
            let want = (l as f64).exp() / z;
            // Five standard deviations of a binomial share.
            let sd = (want * (1.0 - want) / n as f64).sqrt();
            assert!((*c as f64 / n as f64 - want).abs() < 5.0 * sd, "{counts:?}");
        }
    }

    #[test]
    fn cuts_keep_what_they_say() {
        let logits = [3.0f32, 2.0, 1.0, 0.0];
        for pos in 0..200 {
            let hot = SamplerParams { temperature: 5.0, ..Default::default() };
            assert_eq!(sample(SamplerParams { top_k: 1, ..hot.clone() }, &logits, &[], pos), 0);
            assert!(sample(SamplerParams { top_k: 2, ..hot.clone() }, &logits, &[], pos) < 2);
            assert_eq!(sample(SamplerParams { top_p: 0.1, ..hot.clone() }, &logits, &[], pos), 0);
            let min_p = SamplerParams { min_p: 0.5, temperature: 1.0, ..Default::default() };
            assert_eq!(sample(min_p, &logits, &[], pos), 0);
        }
    }

    /// Sorted piece by piece is sorted.
    #[test]
    fn sorting_more_gives_what_a_whole_sort_gives() {
        for n in [1, 255, 256, 257, 3000] {
            // Few different values, so that ids decide often.
            let value = |i: u32| (uniform(3, i as u64, 0) * 50.0) as f32;
            let mut pieces: Vec<(u32, f32)> = (0..n).map(|i| (i, value(i))).collect();
            let mut whole = pieces.clone();
            whole.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
            let mut sorted = 0;
            while sorted < pieces.len() {
                sorted = sort_more(&mut pieces, sorted);
                assert_eq!(pieces[..sorted], whole[..sorted], "{n} {sorted}");
            }
        }
    }

    /// Where nearly all of a flat distribution is kept, draws come from beyond the first piece too.
    #[test]
    fn a_wide_nucleus_is_drawn_from_whole() {
        let logits: Vec<f32> = (0..4000).map(|i| -(i as f32) * 1e-4).collect();
        let p = SamplerParams { temperature: 1.0, top_p: 0.5, seed: 5, ..Default::default() };
        let drawn: Vec<u32> = (0..400).map(|pos| sample(p.clone(), &logits, &[], pos)).collect();
        let weight = |i: u32| (-(i as f64) * 1e-4).exp();
        let all: f64 = (0..4000).map(weight).sum();
        let mut mass = 0.0;
        let kept = (0..4000).take_while(|&i| {
            let is = mass < 0.5 * all;
            mass += weight(i);
            is
        });
        let kept = kept.count() as u32;
        assert!(drawn.iter().all(|&t| t < kept), "{kept}");
        assert!(drawn.iter().filter(|&&t| t >= kept / 2).count() > 120, "{kept}");
    }

    #[test]
    fn penalties_move_repeated_tokens_down() {
        let p = SamplerParams { repeat_penalty: 2.0, ..Default::default() };
        assert_eq!(sample(p, &[2.0, 1.5, -1.0], &[0], 0), 1);
        let p = SamplerParams { frequency_penalty: 0.3, ..Default::default() };
        assert_eq!(sample(p.clone(), &[2.0, 1.5], &[0], 0), 0);
        assert_eq!(sample(p, &[2.0, 1.5], &[0, 0], 0), 1);
    }

    #[test]
    fn a_draw_depends_on_seed_and_position_only() {
        let u = uniform(1, 2, 0);
        assert!((0.0..1.0).contains(&u));
        assert_ne!(u, uniform(2, 2, 0));
        assert_ne!(u, uniform(1, 3, 0));
        assert_eq!(u, uniform(1, 2, 0));
    }
}
