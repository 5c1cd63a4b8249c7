//! How many slots each layer is entitled to.
//!
//! All layers of a model are visited once per token, so with one shared order by recency a little
//! less memory than a token's experts means no hits at all. Each layer is therefore entitled to a
//! number of slots; what it has beyond that is borrowed and goes first.
//!
//! Measured quotas follow utility-based cache partitioning (Qureshi and Patt, MICRO 2006): the rank
//! of a used expert among all of its layer, by heat, says how many slots the layer would have needed
//! to hit. A histogram of ranks per layer gives the hits that one slot more would bring and one less
//! would cost, without ghost entries, because the heat of every expert is known anyway. Once per
//! token one slot may move from the layer that loses least to the layer that gains most.

use super::heat::Key;
use super::policy::Sharing;

#[derive(Debug)]
pub(crate) struct Quotas {
    sharing: Sharing,
    experts: Vec<usize>,
    /// Empty when layers share all slots: that is asked for, or there are fewer slots than layers.
    quotas: Vec<usize>,
    /// The latest pass used most experts of its layer.
    wide: bool,
    /// Slots that no layer is entitled to in such passes.
    flow: usize,
    /// `[layers][experts]`: uses by rank, decaying.
    ranks: Vec<Vec<f32>>,
    passes: usize,
}

/// Slots that no layer is entitled to. A layer that has all of its own reads into these, so it need
/// not give up its hottest experts for what it wants just now, nor wait for those it is computing.
const SHARED: usize = 4;
/// What a token's observations weigh after the next token.
const DECAY: f32 = 0.995;
/// A slot moves if the gain is so much larger than the loss.
const MARGIN: f32 = 1.1;
/// And if the difference is so many uses per slot, so that chance alone moves little.
const NOISE: f32 = 0.5;

impl Quotas {
    pub(crate) fn new(sharing: Sharing, experts_of_layer: &[usize], slots: usize) -> Quotas {
        let ranks = match sharing {
            Sharing::Measured => experts_of_layer.iter().map(|&n| vec![0.0; n]).collect(),
            Sharing::None | Sharing::Even => Vec::new(),
        };
        let experts = experts_of_layer.to_vec();
        let mut quotas = Quotas {
            sharing,
            experts,
            quotas: Vec::new(),
            wide: false,
            flow: SHARED,
            ranks,
            passes: 0,
        };
        quotas.resize(slots);
        quotas
    }

    /// Slots that no layer is entitled to while passes use most experts of their layers.
    pub(crate) fn set_flow(&mut self, slots: usize) {
        self.flow = slots.max(SHARED);
    }

    /// The layer's quota; none where layers share all slots.
    ///
    /// A pass that uses most experts of its layer (a prompt, a batch) needs slots for what is being computed, for
    /// what is being read meanwhile and for what the next layer was announced to want: with no more than the few
    /// shared ones it would compute and read in turn. So each layer gives up a part of its own for it.
    pub(crate) fn of(&self, layer: usize) -> Option<usize> {
        let quota = self.quotas.get(layer).copied()?;
        if !self.wide {
            return Some(quota);
        }
        let entitled: usize = self.quotas.iter().sum();
        let given = (self.flow - SHARED).min(entitled * 3 / 8);
        Some((quota * (entitled - given) / entitled).max(1))
    }

    /// Divides another number of slots. Measured quotas keep their proportions.
    pub(crate) fn resize(&mut self, slots: usize) {
        let layers = self.experts.len();
        if self.sharing == Sharing::None || layers == 0 || slots < layers {
            self.quotas.clear();
            return;
        }
        let entitled = (slots - (slots / 8).min(SHARED)).max(layers);
        let before: usize = self.quotas.iter().sum();
        if before == 0 {
            self.quotas = vec![0; layers];
        }
        for (quota, &experts) in self.quotas.iter_mut().zip(&self.experts) {
            *quota = (*quota * entitled / before.max(1)).clamp(1, experts.max(1));
        }
        // Rounding up to one slot may have given out too much.
        while self.quotas.iter().sum::<usize>() > entitled {
            *self.quotas.iter_mut().max().expect("there are layers") -= 1;
        }
        self.spread(entitled);
    }

    /// Gives out what is left, one slot a layer in turn, to layers that have the experts for it.
    fn spread(&mut self, entitled: usize) {
        let mut left = entitled - self.quotas.iter().sum::<usize>();
        while left > 0 {
            let before = left;
            for (quota, &experts) in self.quotas.iter_mut().zip(&self.experts) {
                if left > 0 && *quota < experts {
                    *quota += 1;
                    left -= 1;
                }
            }
            if left == before {
                return;
            }
        }
    }

    /// A pass uses `experts`; `keys` are the layer's before it.
    pub(crate) fn observe(&mut self, layer: usize, experts: &[u16], keys: &[Key]) {
        self.wide = experts.len() * 2 > keys.len();
        if self.sharing != Sharing::Measured || self.quotas.is_empty() {
            return;
        }
        // A pass that uses most of a layer says nothing about which experts it prefers.
        if !self.wide {
            for &expert in experts {
                let key = keys[expert as usize];
                let rank = keys.iter().filter(|&&other| other > key).count();
                self.ranks[layer][rank] += 1.0;
            }
        }
        self.passes += 1;
        if self.passes.is_multiple_of(self.experts.len()) {
            self.move_one();
            self.ranks.iter_mut().flatten().for_each(|uses| *uses *= DECAY);
        }
    }

    fn move_one(&mut self) {
        let layers = 0..self.quotas.len();
        let gains = layers.clone().filter_map(|layer| Some((self.gain(layer)?, layer)));
        let Some((gain, to)) = gains.max_by(|a, b| a.0.total_cmp(&b.0)) else { return };
        let losses = layers.filter(|&layer| layer != to);
        let losses = losses.filter_map(|layer| Some((self.loss(layer)?, layer)));
        let Some((loss, from)) = losses.min_by(|a, b| a.0.total_cmp(&b.0)) else { return };
        if gain > MARGIN * loss + NOISE {
            self.quotas[to] += 1;
            self.quotas[from] -= 1;
        }
    }

    /// Hits that one slot more would bring: the mean over a few ranks, as one alone is noisy.
    fn gain(&self, layer: usize) -> Option<f32> {
        let quota = self.quotas[layer];
        let ranks = &self.ranks[layer];
        (quota < ranks.len()).then(|| mean(&ranks[quota..(quota + window(quota)).min(ranks.len())]))
    }

    /// Hits that one slot less would cost.
    fn loss(&self, layer: usize) -> Option<f32> {
        let quota = self.quotas[layer];
        (quota > 1).then(|| mean(&self.ranks[layer][quota - window(quota).min(quota)..quota]))
    }
}

fn window(quota: usize) -> usize {
    2 + quota / 8
}

fn mean(values: &[f32]) -> f32 {
    values.iter().sum::<f32>() / values.len() as f32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_divided_and_divided_again() {
        let cases: [(&[usize], usize, &[usize]); 7] = [
            (&[8, 8, 8], 12, &[4, 4, 3]),
            (&[8, 8, 8], 14, &[5, 4, 4]),
            (&[8, 8, 8], 3, &[1, 1, 1]),
            (&[8, 8, 8], 2, &[]),
            (&[2, 8, 8], 16, &[2, 6, 6]),
            (&[2, 2, 2], 6, &[2, 2, 2]),
            (&[100, 100], 100, &[48, 48]),
        ];
        for (experts, slots, expected) in cases {
            assert_eq!(Quotas::new(Sharing::Even, experts, slots).quotas, expected, "{slots}");
        }
        assert!(Quotas::new(Sharing::None, &[8; 3], 12).quotas.is_empty());
        let mut quotas = Quotas::new(Sharing::Measured, &[16; 3], 24);
        quotas.quotas = vec![14, 5, 5];
        quotas.resize(12);
        assert_eq!(quotas.quotas.iter().sum::<usize>(), 11);
        assert!(quotas.quotas[0] > quotas.quotas[1]);
        quotas.resize(2);
        assert_eq!(quotas.of(0), None);
        quotas.resize(52);
        assert_eq!(quotas.quotas, [16; 3]);
    }

    #[test]
    fn slots_move_to_the_layer_that_uses_more_experts() {
        // Layer 0 uses 2 experts, layer 1 uses 12 in turn.
        let mut quotas = Quotas::new(Sharing::Measured, &[16; 2], 16);
        let mut keys = [[0; 16]; 2];
        for token in 0..400u64 {
            for (layer, used) in [(0, 2), (1, 12)] {
                let expert = (token % used) as u16;
                quotas.observe(layer, &[expert], &keys[layer]);
                keys[layer][expert as usize] = 2 * token + 1;
            }
        }
        let found = (quotas.quotas[0], quotas.quotas[1]);
        assert!(found.0 <= 4 && found.1 >= 11 && found.0 + found.1 == 14, "{found:?}");
    }
}
