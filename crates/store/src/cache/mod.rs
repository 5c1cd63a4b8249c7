//! Which expert is in which slot, and who has to go: bookkeeping without memory or reads.
//!
//! A slot is free, reading (its bytes are on their way), idle (valid, may be evicted) or held (valid
//! and part of the pass at work, ready or leased). Only free and idle slots are given to another
//! expert. Slots are numbered; a smaller pool leaves numbers without memory (gone), which a larger
//! one uses again. How hot an expert is, is said in [`heat`]; what each layer is entitled to, in
//! [`quota`]; which combination has which name, in [`policy`].
//!
//! Idle slots are kept sorted per layer, so a victim costs a look at the coldest of each layer,
//! however many slots there are.

mod heat;
pub(crate) mod policy;
mod quota;

use std::collections::BTreeSet;

use heat::{Heat, Key};
use policy::Policy;
use quota::Quotas;

/// Index of a slot.
pub(crate) type SlotId = u32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    /// Not part of the pool now.
    Gone,
    Free,
    Reading,
    Idle,
    Held,
}

#[derive(Debug)]
struct Slot {
    state: State,
    /// Whose bytes these are, unless free or gone.
    layer: usize,
    expert: u16,
    /// As it is sorted while idle.
    key: Key,
    /// Filled ahead of demand and not used yet.
    early: Option<Early>,
}

/// Why an expert is filled before a pass wants it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Early {
    /// It will be used with some probability.
    Guessed,
    /// The pass that comes next will use it.
    Announced,
}

#[derive(Debug)]
pub(crate) struct Cache {
    slots: Vec<Slot>,
    free: Vec<SlotId>,
    gone: Vec<SlotId>,
    /// Slots there shall be; while it is lower than the slots there are, they go as they become idle.
    target: usize,
    /// `[layers][experts]`
    table: Vec<Vec<Option<SlotId>>>,
    /// Idle slots of each layer, coldest first.
    idle: Vec<BTreeSet<(Key, SlotId)>>,
    /// Slots of each layer, whatever their state.
    count: Vec<usize>,
    heat: Heat,
    quotas: Quotas,
    /// Slots of guesses that were not used yet.
    guesses: Vec<SlotId>,
    /// Guesses that were evicted unused.
    wasted: u64,
}

impl Cache {
    pub(crate) fn new(slots: usize, experts_of_layer: &[usize], policy: Policy) -> Cache {
        let layers = experts_of_layer.len();
        let mut cache = Cache {
            slots: Vec::new(),
            free: Vec::new(),
            gone: Vec::new(),
            target: 0,
            table: experts_of_layer.iter().map(|&experts| vec![None; experts]).collect(),
            idle: vec![BTreeSet::new(); layers],
            count: vec![0; layers],
            heat: Heat::new(policy.order(), experts_of_layer),
            quotas: Quotas::new(policy.sharing(), experts_of_layer, slots),
            guesses: Vec::new(),
            wasted: 0,
        };
        cache.resize(slots);
        cache
    }

    /// See [`Quotas::set_flow`].
    pub(crate) fn set_flow(&mut self, slots: usize) {
        self.quotas.set_flow(slots);
    }

    /// Slots that have memory.
    pub(crate) fn slots(&self) -> usize {
        self.slots.len() - self.gone.len()
    }

    pub(crate) fn n_experts(&self, layer: usize) -> usize {
        self.table[layer].len()
    }

    pub(crate) fn n_free(&self) -> usize {
        self.free.len()
    }

    /// Free slots, the one that is used next first.
    pub(crate) fn next_free(&self) -> impl Iterator<Item = &SlotId> {
        self.free.iter().rev()
    }

    pub(crate) fn quota(&self, layer: usize) -> Option<usize> {
        self.quotas.of(layer)
    }

    pub(crate) fn wasted(&self) -> u64 {
        self.wasted
    }

    pub(crate) fn reset_wasted(&mut self) {
        self.wasted = 0;
    }

    pub(crate) fn lookup(&self, layer: usize, expert: u16) -> Option<(SlotId, State)> {
        let slot = self.table[layer][expert as usize]?;
        Some((slot, self.state(slot)))
    }

    pub(crate) fn state(&self, slot: SlotId) -> State {
        self.slots[slot as usize].state
    }

    /// Layer and expert of a slot that is not free.
    pub(crate) fn owner(&self, slot: SlotId) -> (usize, u16) {
        let slot = &self.slots[slot as usize];
        assert!(!matches!(slot.state, State::Free | State::Gone), "a slot with bytes");
        (slot.layer, slot.expert)
    }

    /// Sets how many slots there shall be. Returns those that came to life: they need memory. Slots
    /// that are too many go by [`Cache::retire`].
    pub(crate) fn resize(&mut self, slots: usize) -> Vec<SlotId> {
        self.target = slots;
        self.quotas.resize(slots);
        let mut new = Vec::new();
        while self.slots() < slots {
            let id = self.gone.pop().unwrap_or_else(|| {
                let state = State::Gone;
                self.slots.push(Slot { state, layer: 0, expert: 0, key: 0, early: None });
                self.slots.len() as SlotId - 1
            });
            self.slots[id as usize].state = State::Free;
            new.push(id);
        }
        // The lowest number is used first.
        self.free.extend(new.iter().rev());
        new
    }

    /// A slot that is one too many, if one can go now; its memory may be given back.
    pub(crate) fn retire(&mut self) -> Option<SlotId> {
        if self.slots() <= self.target {
            return None;
        }
        let id = self.free.pop().or_else(|| {
            let victim = self.coldest_borrowed(|_| true).or_else(|| self.coldest_of_all())?.1;
            self.forget(victim);
            Some(victim)
        })?;
        self.slots[id as usize].state = State::Gone;
        self.gone.push(id);
        Some(id)
    }

    /// A pass is about to use these experts.
    pub(crate) fn demand(&mut self, layer: usize, experts: &[u16]) {
        self.quotas.observe(layer, experts, self.heat.keys(layer));
        self.heat.tick();
        for (nth, &expert) in experts.iter().enumerate() {
            self.heat.touch(layer, expert, nth);
        }
        // What was guessed for this pass and is not part of it was a mistake: it may go like others.
        let guesses = std::mem::take(&mut self.guesses);
        for id in guesses {
            let Slot { state, layer: of, expert, early, .. } = self.slots[id as usize];
            if early.is_none() {
                continue;
            }
            if of != layer || experts.contains(&expert) {
                self.guesses.push(id);
            } else if state == State::Idle {
                self.sort_out(id);
                self.sort_in(id, self.heat.key(of, expert));
            } else {
                self.slots[id as usize].key = 0;
            }
        }
    }

    /// A slot for an expert that has none, now reading; none if the expert has to wait for one that
    /// its layer is using.
    pub(crate) fn reserve(&mut self, layer: usize, expert: u16) -> Option<SlotId> {
        let id = match self.free.pop() {
            Some(id) => id,
            None => self.evict(self.victim(layer)?),
        };
        self.fill(id, layer, expert);
        Some(id)
    }

    /// The same for an expert that will be used with this probability: a slot that is free or colder.
    pub(crate) fn reserve_guess(
        &mut self,
        layer: usize,
        expert: u16,
        probability: f64,
    ) -> Option<SlotId> {
        let key = self.heat.guessed_key(layer, expert, probability);
        let id = match self.free.pop() {
            Some(id) => id,
            None => self.evict(self.victim(layer).filter(|&(victim, _)| victim < key)?),
        };
        self.fill_early(id, layer, expert, Early::Guessed, key);
        Some(id)
    }

    /// The same for an expert that the next pass will use: a slot that is free, or one that another
    /// layer only borrowed, which the next pass would take as well. Never one of the expert's own
    /// layer: what is there will be used.
    pub(crate) fn reserve_announced(&mut self, layer: usize, expert: u16) -> Option<SlotId> {
        let key = self.heat.guessed_key(layer, expert, 1.0);
        let id = match self.free.pop() {
            Some(id) => id,
            None => {
                let victim = self.coldest_borrowed(|of| of != layer)?;
                self.evict(victim)
            }
        };
        self.fill_early(id, layer, expert, Early::Announced, key);
        Some(id)
    }

    fn fill_early(&mut self, id: SlotId, layer: usize, expert: u16, early: Early, key: Key) {
        self.fill(id, layer, expert);
        let slot = &mut self.slots[id as usize];
        (slot.early, slot.key) = (Some(early), key);
        if !self.guesses.contains(&id) {
            self.guesses.push(id);
        }
    }

    /// The same for an expert that was the `nth` hottest in an earlier run: a free slot, while its
    /// layer has fewer than it is entitled to.
    pub(crate) fn reserve_warm(&mut self, layer: usize, expert: u16, nth: usize) -> Option<SlotId> {
        if self.quotas.of(layer).is_some_and(|quota| self.count[layer] >= quota) {
            return None;
        }
        let id = self.free.pop()?;
        self.heat.remember(layer, expert, nth);
        self.fill(id, layer, expert);
        Some(id)
    }

    /// The last byte arrived.
    pub(crate) fn filled(&mut self, id: SlotId) {
        let Slot { layer, expert, early, key, .. } = self.slots[id as usize];
        self.change(id, State::Reading, State::Idle);
        let known = self.heat.key(layer, expert);
        self.sort_in(id, if early.is_some() { known.max(key) } else { known });
    }

    /// The bytes did not arrive.
    pub(crate) fn failed(&mut self, id: SlotId) {
        self.change(id, State::Reading, State::Free);
        self.used(id);
        self.disown(id);
        self.free.push(id);
    }

    /// Part of the pass at work. Returns whether this is the first use of a guess.
    pub(crate) fn hold(&mut self, id: SlotId) -> bool {
        self.change(id, State::Idle, State::Held);
        self.sort_out(id);
        self.used(id)
    }

    /// A slot that is still reading will be used. Returns whether it was guessed.
    pub(crate) fn used(&mut self, id: SlotId) -> bool {
        self.slots[id as usize].early.take() == Some(Early::Guessed)
    }

    pub(crate) fn unhold(&mut self, id: SlotId) {
        self.change(id, State::Held, State::Idle);
        let (layer, expert) = self.owner(id);
        self.sort_in(id, self.heat.key(layer, expert));
    }

    /// Lets go of every slot of a layer that is held.
    pub(crate) fn unhold_layer(&mut self, layer: usize) {
        for expert in 0..self.table[layer].len() {
            if let Some((id, State::Held)) = self.lookup(layer, expert as u16) {
                self.unhold(id);
            }
        }
    }

    /// Experts that were ever used, hottest first, in memory or not.
    pub(crate) fn hot(&self) -> Vec<(usize, u16)> {
        let layers = self.table.iter().enumerate();
        let mut hot: Vec<(Key, usize, u16)> = layers
            .flat_map(|(layer, experts)| (0..experts.len() as u16).map(move |e| (layer, e)))
            .map(|(layer, expert)| (self.heat.key(layer, expert), layer, expert))
            .filter(|&(key, ..)| key > 0)
            .collect();
        hot.sort_unstable_by(|a, b| b.cmp(a));
        hot.into_iter().map(|(_, layer, expert)| (layer, expert)).collect()
    }

    /// Experts of a layer whose bytes are there, and how often each was used.
    pub(crate) fn resident(&self, layer: usize) -> impl Iterator<Item = (u16, u32)> {
        (0..self.table[layer].len() as u16).filter_map(move |expert| {
            let (_, state) = self.lookup(layer, expert)?;
            matches!(state, State::Idle | State::Held)
                .then(|| (expert, self.heat.uses(layer, expert)))
        })
    }

    fn change(&mut self, id: SlotId, from: State, to: State) {
        let slot = &mut self.slots[id as usize];
        assert_eq!(slot.state, from, "slot {id} cannot become {to:?}");
        slot.state = to;
    }

    fn sort_in(&mut self, id: SlotId, key: Key) {
        let slot = &mut self.slots[id as usize];
        slot.key = key;
        self.idle[slot.layer].insert((key, id));
    }

    fn sort_out(&mut self, id: SlotId) {
        let slot = &self.slots[id as usize];
        assert!(self.idle[slot.layer].remove(&(slot.key, id)), "an idle slot is sorted in");
    }

    fn fill(&mut self, id: SlotId, layer: usize, expert: u16) {
        let entry = &mut self.table[layer][expert as usize];
        assert!(entry.is_none(), "one slot per expert");
        *entry = Some(id);
        self.count[layer] += 1;
        self.slots[id as usize] =
            Slot { state: State::Reading, layer, expert, key: 0, early: None };
    }

    fn evict(&mut self, (_, id): (Key, SlotId)) -> SlotId {
        self.forget(id);
        id
    }

    /// Takes an idle slot from its expert.
    fn forget(&mut self, id: SlotId) {
        self.change(id, State::Idle, State::Free);
        self.sort_out(id);
        self.disown(id);
    }

    fn disown(&mut self, id: SlotId) {
        let slot = &mut self.slots[id as usize];
        self.wasted += u64::from(slot.early.take() == Some(Early::Guessed));
        self.table[slot.layer][slot.expert as usize] = None;
        self.count[slot.layer] -= 1;
    }

    fn victim(&self, layer: usize) -> Option<(Key, SlotId)> {
        if self.quotas.of(layer).is_none() {
            return self.coldest_of_all();
        }
        let borrowed = self.coldest_borrowed(|_| true);
        borrowed.or_else(|| self.idle[layer].first().copied()).or_else(|| {
            match self.count[layer] {
                0 => self.coldest_of_all(),
                // All of the layer's slots are at work and will come back; taking another layer's
                // instead would cost that layer a hit.
                _ => None,
            }
        })
    }

    /// The coldest idle slot of those among these layers that have more than they are entitled to.
    fn coldest_borrowed(&self, of: impl Fn(usize) -> bool) -> Option<(Key, SlotId)> {
        let over = |&layer: &usize| {
            of(layer) && self.quotas.of(layer).is_some_and(|q| self.count[layer] > q)
        };
        (0..self.idle.len()).filter(over).filter_map(|l| self.idle[l].first().copied()).min()
    }

    fn coldest_of_all(&self) -> Option<(Key, SlotId)> {
        self.idle.iter().filter_map(|idle| idle.first().copied()).min()
    }
}

#[cfg(test)]
mod tests;
