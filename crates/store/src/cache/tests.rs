use super::*;

impl Cache {
    /// Panics if a slot is lost or in two places, or if there are too many.
    pub(crate) fn audit(&self) {
        let mut seen = vec![false; self.slots.len()];
        let mut see = |id: SlotId| assert!(!std::mem::replace(&mut seen[id as usize], true));
        for (ids, state) in [(&self.free, State::Free), (&self.gone, State::Gone)] {
            for &id in ids {
                see(id);
                assert_eq!(self.state(id), state);
            }
        }
        for (layer, table) in self.table.iter().enumerate() {
            let mut count = 0;
            for (expert, id) in table.iter().enumerate() {
                let Some(id) = *id else { continue };
                see(id);
                count += 1;
                assert_eq!(self.owner(id), (layer, expert as u16));
                let sorted = self.idle[layer].contains(&(self.slots[id as usize].key, id));
                assert_eq!(sorted, self.state(id) == State::Idle);
            }
            assert_eq!(count, self.count[layer]);
            let idle = table.iter().flatten().filter(|&&id| self.state(id) == State::Idle);
            assert_eq!(self.idle[layer].len(), idle.count());
        }
        assert!(seen.iter().all(|&seen| seen), "a slot is lost");
        if self.slots() > self.target {
            let busy = |&id: &SlotId| matches!(self.state(id), State::Reading | State::Held);
            let busy = (0..self.slots.len() as SlotId).filter(busy).count();
            assert_eq!(busy, self.slots(), "a slot that could go is still there");
        }
        let quotas: usize = (0..self.table.len()).filter_map(|layer| self.quota(layer)).sum();
        assert!(quotas <= self.target, "quotas exceed the pool");
    }
}

fn lru(slots: usize, experts: &[usize]) -> Cache {
    Cache::new(slots, experts, Policy::Lru)
}

/// One pass of a layer that holds one expert at a time. Returns the hits.
fn visit(cache: &mut Cache, layer: usize, experts: &[u16]) -> usize {
    cache.demand(layer, experts);
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

fn has(cache: &Cache, layer: usize, expert: u16) -> bool {
    cache.lookup(layer, expert).is_some()
}

#[test]
fn no_cliff_below_the_working_set() {
    for policy in [Policy::Lru, Policy::Lfu, Policy::Adaptive, Policy::LfuShared] {
        // 24 layers, 8 slots each, 4 of 32 experts per token; each layer prefers 6 experts.
        let mut cache = Cache::new(24 * 8, &[32; 24], policy);
        for layer in 0..24 {
            visit(&mut cache, layer, &(0..32).collect::<Vec<_>>());
        }
        let mut hits = 0;
        for token in 0..60u16 {
            for layer in 0..24 {
                let mut experts: Vec<u16> =
                    (0..4).map(|i| (token + i * 7 + layer as u16) % 6).collect();
                experts.sort_unstable();
                experts.dedup();
                hits += visit(&mut cache, layer, &experts) * usize::from(token >= 10);
            }
        }
        assert!(hits > 24 * 50 * 3, "{policy}: {hits} hits: a warm working set of 6 fits 8 slots");
    }
}

#[test]
fn order_of_victims() {
    let mut cache = lru(4, &[8, 8]);
    visit(&mut cache, 0, &[2, 1, 0]);
    visit(&mut cache, 1, &[0]);
    // Layer 0 is over its quota of 2: its oldest goes, whoever asks; of one pass the last.
    visit(&mut cache, 1, &[1]);
    assert!(!has(&cache, 0, 0) && has(&cache, 0, 1));
    // Both at their quota: the own oldest goes.
    visit(&mut cache, 1, &[2]);
    assert!(!has(&cache, 1, 0) && has(&cache, 0, 1));
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
    assert!(!has(&cache, 1, 2) && !has(&cache, 1, 3));
    cache.audit();
}

#[test]
fn fewer_slots_than_layers_share_one_lru() {
    let mut cache = lru(2, &[4; 3]);
    visit(&mut cache, 0, &[0]);
    visit(&mut cache, 1, &[0]);
    visit(&mut cache, 2, &[0]);
    assert!(!has(&cache, 0, 0) && has(&cache, 1, 0));
}

#[test]
fn what_is_used_often_outlives_what_was_used_last() {
    for (policy, often_stays) in [(Policy::Lru, false), (Policy::Lfu, true)] {
        let mut cache = Cache::new(2, &[8], policy);
        for _ in 0..5 {
            visit(&mut cache, 0, &[0]);
        }
        visit(&mut cache, 0, &[1]);
        visit(&mut cache, 0, &[2]);
        assert_eq!((has(&cache, 0, 0), has(&cache, 0, 1)), (often_stays, !often_stays), "{policy}");
        // Uses of long ago count for nothing.
        for _ in 0..200 {
            visit(&mut cache, 0, &[3]);
            visit(&mut cache, 0, &[4]);
        }
        assert!(!has(&cache, 0, 0));
        assert_eq!(cache.hot()[..2], [(0, 4), (0, 3)]);
    }
}

#[test]
fn a_smaller_pool_loses_the_coldest_and_waits_for_the_rest() {
    let mut cache = lru(6, &[8, 8]);
    visit(&mut cache, 0, &[2, 1, 0]);
    visit(&mut cache, 1, &[2, 1, 0]);
    let (held, _) = cache.lookup(0, 0).unwrap();
    cache.hold(held);
    let reading = {
        cache.demand(1, &[3]);
        cache.reserve(1, 3).unwrap()
    };
    cache.resize(1);
    let gone: Vec<_> = std::iter::from_fn(|| cache.retire()).collect();
    assert_eq!((gone.len(), cache.slots()), (4, 2), "a held and a reading slot stay");
    cache.audit();
    cache.filled(reading);
    assert_eq!(cache.retire(), Some(reading));
    assert_eq!(cache.retire(), None);
    cache.unhold(held);
    cache.audit();
    let back = cache.resize(3);
    assert_eq!(cache.slots(), 3);
    assert!(back.iter().all(|id| gone.contains(id) || *id == reading));
    cache.audit();
}

#[test]
fn guesses_take_only_what_is_colder_and_mistakes_go_first() {
    for policy in [Policy::Lru, Policy::Lfu] {
        let mut cache = Cache::new(4, &[8, 8], policy);
        for _ in 0..8 {
            visit(&mut cache, 0, &[0, 1]);
            visit(&mut cache, 1, &[0, 1]);
        }
        assert_eq!(cache.reserve_guess(1, 5, 0.5), None, "{policy}: all are hotter");
        // Layer 1 now uses others; 0 gets cold.
        for _ in 0..400 {
            visit(&mut cache, 1, &[1]);
            visit(&mut cache, 0, &[0, 1]);
        }
        let slot = cache.reserve_guess(1, 5, 0.5).expect("0 of layer 1 is cold");
        assert!(!has(&cache, 1, 0));
        cache.filled(slot);
        cache.audit();
        // Not used: the next miss takes it, although it came last.
        visit(&mut cache, 1, &[1, 6]);
        assert!(has(&cache, 1, 1) && has(&cache, 1, 6) && !has(&cache, 1, 5));
        assert_eq!(cache.wasted(), 1);
        let slot = cache.reserve_guess(0, 7, 0.5);
        assert_eq!(slot, None, "{policy}: layer 0 is hot");
    }
}

#[test]
fn warm_experts_take_free_slots_up_to_their_layers_share() {
    let mut cache = lru(4, &[8, 8]);
    let list = [(0, 3), (0, 4), (0, 5), (1, 1)];
    let taken = list.map(|(layer, expert)| {
        let slot = cache.reserve_warm(layer, expert, 0);
        slot.inspect(|&id| cache.filled(id)).is_some()
    });
    assert_eq!(taken, [true, true, false, true]);
    assert_eq!(cache.hot().len(), 3);
    // What is used now is hotter than what was remembered.
    visit(&mut cache, 0, &[6]);
    visit(&mut cache, 0, &[7]);
    assert!(has(&cache, 0, 6) && has(&cache, 0, 7) && has(&cache, 1, 1));
    cache.audit();
}
