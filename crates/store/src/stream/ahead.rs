//! Reads that nobody demanded yet: what the next pass was announced to want, guesses of what a later
//! layer will choose, and what was hot in an earlier run.
//!
//! They begin only while no demanded read is waiting or, but for what was announced, in flight, few at once, and are
//! overtaken in the queue by demanded ones. A guess takes a free slot or one that is colder than an expert that
//! will be used as probably as guesses so far were; a warm expert takes free slots only; an announced
//! one takes what the next pass would take. What a pass turns out not to want is withdrawn as far as it
//! was not begun.

use std::collections::VecDeque;

use super::fill::Why;
use super::{StreamStore, check_distinct};
use crate::cache::SlotId;

#[derive(Default)]
pub(super) struct Ahead {
    /// Not yet begun, those that take longest to compute first.
    announced: VecDeque<(usize, u16)>,
    /// Not yet begun.
    guesses: VecDeque<(usize, u16)>,
    /// Not yet begun, hottest first, with its place in the list.
    warm: VecDeque<(usize, u16, usize)>,
    /// Slots being filled that nobody demanded.
    filling: Vec<SlotId>,
}

/// Experts that are read ahead at once.
const MAX_FILLING: usize = 4;
/// Bytes of announced experts that are read at once, where that is more: what the disk gives while the engine
/// computes without calling the store, as in attention over many rows.
const ANNOUNCED_BYTES: u64 = 128 << 20;
/// Guesses that wait at most; older ones are forgotten.
const MAX_GUESSES: usize = 64;

impl StreamStore {
    pub(super) fn add_guesses(&mut self, layer: usize, experts: &[u16]) {
        for &expert in experts {
            assert!((expert as usize) < self.cache.n_experts(layer), "an expert of this layer");
            if self.ahead.guesses.len() == MAX_GUESSES {
                self.ahead.guesses.pop_front();
            }
            self.ahead.guesses.push_back((layer, expert));
        }
    }

    pub(super) fn set_announced(&mut self, layer: usize, experts: &[u16]) {
        check_distinct(experts, self.cache.n_experts(layer));
        self.ahead.announced = experts.iter().map(|&expert| (layer, expert)).collect();
    }

    pub(super) fn set_warm(&mut self, experts: &[(usize, u16)]) {
        // The list may be another model's: what does not exist is left out.
        let exists = |&(layer, expert): &(usize, u16)| {
            layer < self.experts.len() && (expert as usize) < self.experts[layer].len()
        };
        let list = experts.iter().copied().filter(exists).enumerate();
        self.ahead.warm = list.map(|(nth, (layer, expert))| (layer, expert, nth)).collect();
    }

    /// Begins what may be begun.
    pub(super) fn read_ahead(&mut self) {
        while self.may_read_ahead() {
            let (slot, why) = if let Some(&(layer, expert)) = self.ahead.announced.front() {
                let slot = self.reserve_absent(layer, expert, |store| {
                    store.cache.reserve_announced(layer, expert)
                });
                if slot.is_none() && self.cache.lookup(layer, expert).is_none() {
                    // It is read when the pass at work gives slots back.
                    return;
                }
                self.ahead.announced.pop_front();
                (slot, Why::Announced)
            } else if let Some((layer, expert)) = self.ahead.guesses.pop_front() {
                let probability = self.stats.guesses.precision(self.cache.wasted());
                let slot = self.reserve_absent(layer, expert, |store| {
                    store.cache.reserve_guess(layer, expert, probability)
                });
                (slot, Why::Guessed)
            } else if self.cache.n_free() == 0 {
                self.ahead.warm.clear();
                return;
            } else if let Some((layer, expert, nth)) = self.ahead.warm.pop_front() {
                let slot = self.reserve_absent(layer, expert, |store| {
                    store.cache.reserve_warm(layer, expert, nth)
                });
                (slot, Why::Warm)
            } else {
                return;
            };
            if let Some(slot) = slot {
                self.ahead.filling.push(slot);
                self.fill(slot, why);
            }
        }
    }

    /// Whether another read that nobody demanded may begin. Announced experts come nearly always to be wanted, so they
    /// follow the last demanded ones at once: a disk that waits for those alone goes slower and slower.
    fn may_read_ahead(&self) -> bool {
        let none_waits = self.pass.as_ref().is_none_or(|pass| pass.waiting.is_empty());
        let filling = self.ahead.filling.len();
        none_waits
            && match self.ahead.announced.is_empty() {
                true => self.demanded_reads == 0 && filling < MAX_FILLING,
                false => {
                    let most = (ANNOUNCED_BYTES / self.slot_bytes.max(1)) as usize;
                    filling < most.max(MAX_FILLING)
                }
            }
    }

    fn reserve_absent(
        &mut self,
        layer: usize,
        expert: u16,
        reserve: impl FnOnce(&mut StreamStore) -> Option<SlotId>,
    ) -> Option<SlotId> {
        match self.cache.lookup(layer, expert) {
            Some(_) => None,
            None => reserve(self),
        }
    }

    /// A pass over a layer begins: guesses for it are over, right or wrong.
    pub(super) fn drop_guesses(&mut self, layer: usize, wanted: &[u16]) {
        self.ahead.announced.clear();
        self.ahead.guesses.retain(|&(of, _)| of != layer);
        let wrong = |&id: &SlotId| {
            let (of, expert) = self.cache.owner(id);
            let fill = self.slots[id as usize].fill.as_ref();
            let early = fill.is_some_and(|fill| matches!(fill.why, Why::Guessed | Why::Announced));
            early && of == layer && !wanted.contains(&expert)
        };
        let wrong: Vec<SlotId> = self.ahead.filling.iter().copied().filter(wrong).collect();
        wrong.into_iter().for_each(|id| self.withdraw(id));
    }

    /// Memory is wanted back.
    pub(super) fn stop_reading_ahead(&mut self) {
        self.ahead.announced.clear();
        self.ahead.guesses.clear();
        self.ahead.warm.clear();
        for id in self.ahead.filling.clone() {
            self.withdraw(id);
        }
    }

    /// A slot is not filled ahead of demand any more.
    pub(super) fn ahead_is_over(&mut self, id: SlotId) {
        self.ahead.filling.retain(|&other| other != id);
    }
}
