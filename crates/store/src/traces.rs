//! Generated routing traces, for comparing cache policies where no real ones are at hand.
//!
//! A token's experts in a layer are partly those of the token before (temporal locality) and
//! otherwise drawn by popularity, which falls off with the rank (Zipf, with an exponential end, as
//! the published hit rates rise faster with more slots than a power alone allows) and shifts slowly,
//! as topics do. Layers differ in how skewed they are. [`fitted`] are generators with the hit rates
//! that were published for real models. What they say about other models is a guess.

/// How experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Routing {
    /// MoE layers.
    pub layers: usize,
    /// Experts of a layer.
    pub experts: usize,
    /// Distinct experts of a token.
    pub top_k: usize,
    /// Exponent of popularity over rank; 0: all alike.
    pub skew: f64,
    /// After so many ranks popularity has fallen by another factor of e.
    pub reach: f64,
    /// Exponents and reaches of layers lie this far below and above, as a share.
    pub spread: f64,
    /// Probability that a token keeps an expert of the token before.
    pub repeat: f64,
    /// Swaps of two experts' ranks per layer and token.
    pub drift: f64,
}

/// Hit rates of a real model that a generator is fitted to: (slots a layer, percent of hits).
pub type Published = &'static [(usize, f64)];

/// Gemma 4 26B with 8, 16 and 32 slots a layer.
pub const GEMMA4_26B: Published = &[(8, 42.0), (16, 64.0), (32, 83.0)];

/// Qwen3-30B-A3B with 2 and 4 GB, which hold about 14 and 29 experts a layer in 4-bit formats.
pub const QWEN3_30B: Published = &[(14, 53.0), (29, 76.0)];

/// Generators that reproduce published hit rates, by name. The rates do not say how fast popularity
/// shifts, which is what policies differ in; so each model has three, from steady to restless.
pub fn fitted() -> [(&'static str, Routing, Published); 6] {
    let gemma = |skew, reach, repeat, drift| {
        let (layers, experts, top_k, spread) = (30, 128, 8, 0.3);
        Routing { layers, experts, top_k, skew, reach, spread, repeat, drift }
    };
    let qwen =
        |skew, reach, repeat, drift| Routing { layers: 48, ..gemma(skew, reach, repeat, drift) };
    [
        ("gemma-4-26b steady", gemma(0.9, 27.0, 0.0, 0.5), GEMMA4_26B),
        ("gemma-4-26b shifting", gemma(0.4, 14.0, 0.1, 2.0), GEMMA4_26B),
        ("gemma-4-26b restless", gemma(0.3, 10.0, 0.0, 4.0), GEMMA4_26B),
        ("qwen3-30b steady", qwen(0.8, 30.0, 0.0, 0.5), QWEN3_30B),
        ("qwen3-30b shifting", qwen(0.5, 18.0, 0.0, 2.0), QWEN3_30B),
        ("qwen3-30b restless", qwen(0.0, 10.0, 0.0, 4.0), QWEN3_30B),
    ]
}

impl Routing {
    /// Passes of `tokens` tokens, layer by layer: (layer, ascending experts).
    pub fn trace(self, tokens: usize, seed: u64) -> impl Iterator<Item = (usize, Vec<u16>)> {
        assert!(self.top_k <= self.experts && self.experts <= 1 << 16);
        let mut random = Random(seed);
        let mut layers: Vec<Layer> =
            (0..self.layers).map(|_| Layer::new(&self, &mut random)).collect();
        (0..tokens).flat_map(move |_| {
            let passes = layers.iter_mut().map(|layer| layer.next(&self, &mut random));
            passes.enumerate().collect::<Vec<_>>()
        })
    }
}

struct Layer {
    /// `[experts]`: how popular ranks up to this one are together.
    cumulated: Vec<f64>,
    /// `[experts]`: which expert has the rank.
    ranks: Vec<u16>,
    /// Of the token before.
    chosen: Vec<u16>,
}

impl Layer {
    fn new(routing: &Routing, random: &mut Random) -> Layer {
        let mut around_one = || 1.0 + routing.spread * (2.0 * random.unit() - 1.0);
        let (skew, reach) = (routing.skew * around_one(), routing.reach * around_one());
        let mut sum = 0.0;
        let popularity = |rank: usize| {
            sum += (rank as f64 + 1.0).powf(-skew) * (-(rank as f64) / reach).exp();
            sum
        };
        let cumulated = (0..routing.experts).map(popularity).collect();
        let mut ranks: Vec<u16> = (0..routing.experts as u16).collect();
        for i in (1..ranks.len()).rev() {
            ranks.swap(i, random.below(i + 1));
        }
        Layer { cumulated, ranks, chosen: Vec::new() }
    }

    fn next(&mut self, routing: &Routing, random: &mut Random) -> Vec<u16> {
        let mut swaps = routing.drift.floor() as usize;
        swaps += usize::from(random.unit() < routing.drift.fract());
        for _ in 0..swaps {
            let (a, b) = (random.below(self.ranks.len()), random.below(self.ranks.len()));
            self.ranks.swap(a, b);
        }
        self.chosen.retain(|_| random.unit() < routing.repeat);
        while self.chosen.len() < routing.top_k {
            let at = random.unit() * self.cumulated[self.cumulated.len() - 1];
            let rank = self.cumulated.partition_point(|&sum| sum <= at).min(self.ranks.len() - 1);
            let expert = self.ranks[rank];
            if !self.chosen.contains(&expert) {
                self.chosen.push(expert);
            }
        }
        let mut experts = self.chosen.clone();
        experts.sort_unstable();
        experts
    }
}

/// SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In `0.0..1.0`.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Policy, replay};

    /// The publications say nothing of their policy; least recently used is the usual one.
    #[test]
    fn generators_have_the_published_hit_rates() {
        for (name, routing, published) in fitted() {
            let shape = vec![routing.experts; routing.layers];
            for &(slots, percent) in published {
                let trace = routing.trace(700, 7);
                let found = replay(&shape, trace, Policy::Lru, slots * routing.layers).unwrap();
                let (hits, misses) =
                    found.iter().fold((0, 0), |sum, l| (sum.0 + l.hits, sum.1 + l.misses));
                let found = 100.0 * hits as f64 / (hits + misses) as f64;
                assert!((found - percent).abs() < 2.0, "{name}, {slots} slots: {found:.1}%");
            }
        }
    }

    #[test]
    fn passes_are_what_a_trace_is_made_of() {
        let (_, routing, _) = fitted()[0];
        let routing = Routing { layers: 3, experts: 9, ..routing };
        let trace: Vec<_> = routing.trace(5, 1).collect();
        assert_eq!(trace.len(), 15);
        for (i, (layer, experts)) in trace.iter().enumerate() {
            assert_eq!((*layer, experts.len()), (i % 3, 8));
            assert!(experts.is_sorted() && experts.iter().all(|&e| e < 9));
        }
        assert_eq!(trace, routing.trace(5, 1).collect::<Vec<_>>());
        assert_ne!(trace, routing.trace(5, 2).collect::<Vec<_>>());
    }
}
