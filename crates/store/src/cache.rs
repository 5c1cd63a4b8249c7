//! Which expert is in which slot, and who has to go: bookkeeping without memory or reads.
//!
//! A slot is free, reading (its bytes are on their way), idle (valid, may be evicted) or held (valid
//! and part of the pass at work, ready or leased). Only free and idle slots are given to another
//! expert. The order of victims keeps layers from eating each other: all layers of a model are
//! visited once per token, so with one shared LRU a little less memory than the working set means no
//! hits at all. Each layer is therefore entitled to `slots / layers` slots; slots beyond that are
//! borrowed and go first.

/// Index of a slot.
pub(crate) type SlotId = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Free,
    Reading,
    Idle,
    Held,
}

#[derive(Debug)]
struct Slot {
    state: State,
    /// Whose bytes these are, unless free.
    layer: usize,
    expert: u16,
    /// When it was last used.
    stamp: u64,
}

#[derive(Debug)]
pub(crate) struct Cache {
    slots: Vec<Slot>,
    free: Vec<SlotId>,
    /// `[layers][experts]`
    table: Vec<Vec<Option<SlotId>>>,
    /// Slots of each layer, in no order.
    of_layer: Vec<Vec<SlotId>>,
    clock: u64,
}

impl Cache {
    pub(crate) fn new(slots: usize, experts_of_layer: impl Iterator<Item = usize>) -> Cache {
        let table: Vec<_> = experts_of_layer.map(|experts| vec![None; experts]).collect();
        Cache {
            slots: (0..slots)
                .map(|_| Slot { state: State::Free, layer: 0, expert: 0, stamp: 0 })
                .collect(),
            free: (0..slots as SlotId).rev().collect(),
            of_layer: vec![Vec::new(); table.len()],
            table,
            clock: 0,
        }
    }

    pub(crate) fn slots(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn n_experts(&self, layer: usize) -> usize {
        self.table[layer].len()
    }

    pub(crate) fn lookup(&self, layer: usize, expert: u16) -> Option<(SlotId, State)> {
        let slot = self.table[layer][expert as usize]?;
        Some((slot, self.slots[slot as usize].state))
    }

    pub(crate) fn state(&self, slot: SlotId) -> State {
        self.slots[slot as usize].state
    }

    /// Layer and expert of a slot that is not free.
    pub(crate) fn owner(&self, slot: SlotId) -> (usize, u16) {
        let slot = &self.slots[slot as usize];
        assert_ne!(slot.state, State::Free);
        (slot.layer, slot.expert)
    }

    /// A slot for an expert that has none, now reading; none if the expert has to wait for one that
    /// its layer is using.
    pub(crate) fn reserve(&mut self, layer: usize, expert: u16) -> Option<SlotId> {
        assert!(self.table[layer][expert as usize].is_none(), "one slot per expert");
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let victim = self.victim(layer)?;
                self.forget(victim);
                victim
            }
        };
        let slot = &mut self.slots[id as usize];
        (slot.state, slot.layer, slot.expert) = (State::Reading, layer, expert);
        self.table[layer][expert as usize] = Some(id);
        self.of_layer[layer].push(id);
        Some(id)
    }

    /// The last byte arrived.
    pub(crate) fn filled(&mut self, id: SlotId) {
        self.change(id, State::Reading, State::Idle);
    }

    /// The bytes did not arrive.
    pub(crate) fn failed(&mut self, id: SlotId) {
        self.change(id, State::Reading, State::Idle);
        self.forget(id);
        self.free.push(id);
    }

    pub(crate) fn hold(&mut self, id: SlotId) {
        self.change(id, State::Idle, State::Held);
    }

    pub(crate) fn unhold(&mut self, id: SlotId) {
        self.change(id, State::Held, State::Idle);
    }

    /// Lets go of every slot of a layer that is held.
    pub(crate) fn unhold_layer(&mut self, layer: usize) {
        for i in 0..self.of_layer[layer].len() {
            let id = self.of_layer[layer][i];
            if self.state(id) == State::Held {
                self.unhold(id);
            }
        }
    }

    fn change(&mut self, id: SlotId, from: State, to: State) {
        self.clock += 1;
        let slot = &mut self.slots[id as usize];
        assert_eq!(slot.state, from, "slot {id} cannot become {to:?}");
        (slot.state, slot.stamp) = (to, self.clock);
    }

    /// Takes an idle slot from its expert.
    fn forget(&mut self, id: SlotId) {
        let slot = &mut self.slots[id as usize];
        assert_eq!(slot.state, State::Idle, "only idle slots are taken");
        slot.state = State::Free;
        self.table[slot.layer][slot.expert as usize] = None;
        self.of_layer[slot.layer].retain(|&other| other != id);
    }

    fn victim(&self, layer: usize) -> Option<SlotId> {
        let layers = self.of_layer.len();
        let quota = self.slots.len() / layers;
        if quota == 0 {
            return self.oldest(0..layers);
        }
        let own = &self.of_layer[layer];
        self.oldest((0..layers).filter(|&other| self.of_layer[other].len() > quota))
            .or_else(|| self.oldest([layer]))
            .or_else(|| match own.is_empty() {
                true => self.oldest(0..layers),
                // All of the layer's slots are at work and will come back; taking another layer's
                // instead would cost that layer a hit.
                false => None,
            })
    }

    /// The idle slot of these layers that was not used for longest.
    fn oldest(&self, layers: impl IntoIterator<Item = usize>) -> Option<SlotId> {
        layers
            .into_iter()
            .flat_map(|layer| self.of_layer[layer].iter().copied())
            .filter(|&id| self.state(id) == State::Idle)
            .min_by_key(|&id| self.slots[id as usize].stamp)
    }

    /// Panics if a slot is lost or in two places.
    #[cfg(test)]
    pub(crate) fn audit(&self) {
        let mut seen = vec![false; self.slots.len()];
        let mut see = |id: SlotId| assert!(!std::mem::replace(&mut seen[id as usize], true));
        for &id in &self.free {
            see(id);
            assert_eq!(self.state(id), State::Free);
        }
        for (layer, ids) in self.of_layer.iter().enumerate() {
            for &id in ids {
                see(id);
                let (owner, expert) = self.owner(id);
                assert_eq!(owner, layer);
                assert_eq!(self.table[layer][expert as usize], Some(id));
            }
        }
        assert!(seen.iter().all(|&seen| seen), "a slot is lost");
        let listed = self.table.iter().flatten().flatten().count();
        assert_eq!(listed + self.free.len(), self.slots.len());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One pass of a layer that holds one expert at a time. Returns the hits.
    fn visit(cache: &mut Cache, layer: usize, experts: &[u16]) -> usize {
        let (hits, misses): (Vec<u16>, Vec<u16>) =
            experts.iter().partition(|&&e| cache.lookup(layer, e).is_some());
        for &expert in &hits {
            let (slot, _) = cache.lookup(layer, expert).unwrap();
            cache.hold(slot);
        }
        cache.unhold_layer(layer);
        for &expert in &misses {
            let slot = cache.reserve(layer, expert).expect("nothing is held");
            cache.filled(slot);
            cache.audit();
        }
        hits.len()
    }

    #[test]
    fn no_cliff_below_the_working_set() {
        // 24 layers, 8 slots each, 4 of 32 experts per token; each layer prefers 6 experts.
        let mut cache = Cache::new(24 * 8, [32; 24].into_iter());
        for layer in 0..24 {
            visit(&mut cache, layer, &(0..32).collect::<Vec<_>>());
        }
        let mut hits = 0;
        for token in 0..60u16 {
            for layer in 0..24 {
                let experts: Vec<u16> =
                    (0..4).map(|i| (token + i * 7 + layer as u16) % 6).collect();
                let mut experts = experts;
                experts.sort_unstable();
                experts.dedup();
                hits += visit(&mut cache, layer, &experts) * usize::from(token >= 10);
            }
        }
        assert!(cache.of_layer.iter().all(|slots| slots.len() == 8));
        assert!(hits > 24 * 50 * 3, "{hits} hits: a warm working set of 6 fits 8 slots");
    }

    #[test]
    fn order_of_victims() {
        let mut cache = Cache::new(4, [8, 8].into_iter());
        visit(&mut cache, 0, &[0, 1, 2]);
        visit(&mut cache, 1, &[0]);
        // Layer 0 is over its quota of 2: its oldest goes, whoever asks.
        visit(&mut cache, 1, &[1]);
        assert!(cache.lookup(0, 0).is_none() && cache.lookup(0, 1).is_some());
        // Both at their quota: the own oldest goes.
        visit(&mut cache, 1, &[2]);
        assert!(cache.lookup(1, 0).is_none() && cache.lookup(0, 1).is_some());
        // All own slots held: wait.
        for expert in [1, 2] {
            let (slot, _) = cache.lookup(1, expert).unwrap();
            cache.hold(slot);
        }
        assert_eq!(cache.reserve(1, 3), None);
        let (slot, _) = cache.lookup(1, 2).unwrap();
        cache.unhold(slot);
        assert_eq!(cache.reserve(1, 3), Some(slot));
        cache.failed(slot);
        assert!(cache.lookup(1, 2).is_none() && cache.lookup(1, 3).is_none());
        cache.audit();
    }

    #[test]
    fn fewer_slots_than_layers_share_one_lru() {
        let mut cache = Cache::new(2, [4; 3].into_iter());
        visit(&mut cache, 0, &[0]);
        visit(&mut cache, 1, &[0]);
        visit(&mut cache, 2, &[0]);
        assert!(cache.lookup(0, 0).is_none() && cache.lookup(1, 0).is_some());
    }
}
