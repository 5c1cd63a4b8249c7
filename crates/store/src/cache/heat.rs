//! How hot every expert is, in memory or not: a number that changes only when the expert is used.
//!
//! By recency it is the time of the last use. By frequency it is the sum of all uses, each weighing
//! `2^-(age / half life)`; its logarithm is kept, relative to time zero instead of now, so that the
//! order of two experts does not change while neither is used and victims can be kept sorted
//! (Lee et al., "LRFU", IEEE Transactions on Computers 2001). There are few experts, so the history
//! of those that were evicted is kept as well: one that comes back is as hot as it was.

use super::policy::Order;

/// Larger is hotter; 0 was never used.
pub(crate) type Key = u64;

#[derive(Debug)]
pub(crate) struct Heat {
    order: Order,
    layers: u64,
    /// Passes so far. Starts above zero, so that there is a past for what was hot in an earlier run.
    clock: u64,
    /// `[layers][experts]`
    keys: Vec<Vec<Key>>,
    /// `[layers][experts]`: uses so far.
    uses: Vec<Vec<u32>>,
}

const FRACTION_BITS: u32 = 20;
/// Experts of one pass differ in recency by less than a pass.
const PASS_BITS: u32 = 16;
/// Tokens before the first one.
const PAST_TOKENS: u64 = 1 << 16;
/// By recency, a guess may take the slot of an expert that was not used for so many tokens.
const STALE_TOKENS: u64 = 4;

impl Heat {
    pub(crate) fn new(order: Order, experts_of_layer: &[usize]) -> Heat {
        let layers = experts_of_layer.len().max(1) as u64;
        Heat {
            order,
            layers,
            clock: PAST_TOKENS * layers,
            keys: experts_of_layer.iter().map(|&n| vec![0; n]).collect(),
            uses: experts_of_layer.iter().map(|&n| vec![0; n]).collect(),
        }
    }

    pub(crate) fn key(&self, layer: usize, expert: u16) -> Key {
        self.keys[layer][expert as usize]
    }

    pub(crate) fn keys(&self, layer: usize) -> &[Key] {
        &self.keys[layer]
    }

    pub(crate) fn uses(&self, layer: usize, expert: u16) -> u32 {
        self.uses[layer][expert as usize]
    }

    /// The next pass begins.
    pub(crate) fn tick(&mut self) {
        self.clock += 1;
    }

    /// The expert is used by the pass, as its `nth`: earlier ones are hotter.
    pub(crate) fn touch(&mut self, layer: usize, expert: u16, nth: usize) {
        let key = match self.order {
            Order::Recency => (self.clock << PASS_BITS) - nth as u64,
            Order::Frequency { half_life_tokens } => self.sum(layer, expert, 1.0, half_life_tokens),
        };
        self.keys[layer][expert as usize] = key;
        let uses = &mut self.uses[layer][expert as usize];
        *uses = uses.saturating_add(1);
    }

    /// How hot an expert is that will be used next with this probability: what a guess may replace
    /// is colder.
    pub(crate) fn guessed_key(&self, layer: usize, expert: u16, probability: f64) -> Key {
        match self.order {
            Order::Recency => (self.clock - STALE_TOKENS * self.layers) << PASS_BITS,
            Order::Frequency { half_life_tokens } => {
                self.sum(layer, expert, probability, half_life_tokens)
            }
        }
    }

    /// The expert was the `nth` hottest in an earlier run: unless it is hotter already, it is as hot as if it
    /// had been used once, so long ago.
    pub(crate) fn remember(&mut self, layer: usize, expert: u16, nth: usize) {
        let nth = nth as u64;
        let key = match self.order {
            Order::Recency => {
                let clock = self.clock - STALE_TOKENS * self.layers - 1;
                (clock << PASS_BITS) - nth.min(self.layers << PASS_BITS)
            }
            Order::Frequency { half_life_tokens } => {
                fixed(self.now(half_life_tokens)) - nth.min(1 << (FRACTION_BITS + 4))
            }
        };
        let known = &mut self.keys[layer][expert as usize];
        *known = key.max(*known);
    }

    /// Half lives since time zero.
    fn now(&self, half_life_tokens: f64) -> f64 {
        self.clock as f64 / (self.layers as f64 * half_life_tokens)
    }

    /// The key with another use of this weight.
    fn sum(&self, layer: usize, expert: u16, weight: f64, half_life_tokens: f64) -> Key {
        let now = self.now(half_life_tokens);
        let known = match self.key(layer, expert) {
            0 => 0.0,
            key => (key as f64 / f64::from(1u32 << FRACTION_BITS) - now).exp2(),
        };
        fixed(now + (known + weight).log2())
    }
}

fn fixed(log: f64) -> Key {
    (log.max(0.0) * f64::from(1u32 << FRACTION_BITS)) as Key
}
