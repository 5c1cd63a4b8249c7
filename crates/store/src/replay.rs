//! A routing trace through the cache alone: what a policy and a number of slots would have hit.
//!
//! The same bookkeeping as that of streamed experts is used, driven as a pass drives it; only the
//! reads are missing. A trace is a sequence of passes: (MoE layer, distinct experts).

use crate::cache::{Cache, State, policy::Policy};
use crate::error::StoreError;
use crate::stats::LayerStats;

/// Hits and misses per layer. `experts_of_layer` is the number of experts of each MoE layer.
pub fn replay<E: AsRef<[u16]>>(
    experts_of_layer: &[usize],
    passes: impl IntoIterator<Item = (usize, E)>,
    policy: Policy,
    slots: usize,
) -> Result<Vec<LayerStats>, StoreError> {
    let mut found = vec![LayerStats::default(); experts_of_layer.len()];
    replay_each(experts_of_layer, passes, policy, slots, &mut |layer, hits, misses| {
        found[layer].hits += hits;
        found[layer].misses += misses;
    })?;
    Ok(found)
}

/// The same, telling of every pass: (MoE layer, hits, misses).
pub fn replay_each<E: AsRef<[u16]>>(
    experts_of_layer: &[usize],
    passes: impl IntoIterator<Item = (usize, E)>,
    policy: Policy,
    slots: usize,
    tell: &mut dyn FnMut(usize, u64, u64),
) -> Result<(), StoreError> {
    if slots == 0 {
        return Err(StoreError::NoSlots { slot_bytes: 0 });
    }
    let slots = slots.min(experts_of_layer.iter().sum());
    let mut cache = Cache::new(slots, experts_of_layer, policy);
    for (nth, (layer, experts)) in passes.into_iter().enumerate() {
        let experts = experts.as_ref();
        check(experts_of_layer, nth as u64, layer, experts)?;
        let hits = pass(&mut cache, layer, experts);
        tell(layer, hits, experts.len() as u64 - hits);
    }
    Ok(())
}

fn check(of_layer: &[usize], pass: u64, layer: usize, experts: &[u16]) -> Result<(), StoreError> {
    let bad = |what: String| Err(StoreError::BadTrace { pass, what });
    let Some(&n_experts) = of_layer.get(layer) else {
        return bad(format!("layer {layer} of {}", of_layer.len()));
    };
    if let Some(expert) = experts.iter().find(|&&expert| expert as usize >= n_experts) {
        return bad(format!("expert {expert} of {n_experts} in layer {layer}"));
    }
    let mut sorted = experts.to_vec();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => bad(format!("expert {} twice in layer {layer}", pair[0])),
        None => Ok(()),
    }
}

/// One pass as a store does it. Returns the hits.
fn pass(cache: &mut Cache, layer: usize, experts: &[u16]) -> u64 {
    cache.demand(layer, experts);
    let mut missing = Vec::new();
    for &expert in experts {
        match cache.lookup(layer, expert) {
            Some((slot, State::Idle)) => {
                cache.hold(slot);
            }
            Some(_) => unreachable!("between passes every slot with bytes is idle"),
            None => missing.push(expert),
        }
    }
    for &expert in &missing {
        let slot = cache.reserve(layer, expert).unwrap_or_else(|| {
            // What was computed is released; then there is room.
            cache.unhold_layer(layer);
            cache.reserve(layer, expert).expect("a layer has a slot")
        });
        cache.filled(slot);
        cache.hold(slot);
    }
    cache.unhold_layer(layer);
    (experts.len() - missing.len()) as u64
}
