//! Experts streamed through a bounded pool of slots.
//!
//! A pass names the experts that a layer needs. Those in the pool are held at once; for the others
//! slots are found ([`crate::cache`]) and reads started, as many as there are slots; the rest wait
//! until the caller releases leases. A slot owns its memory; while it is being filled the memory is
//! lent to the reads ([`crate::region`]) and nobody can look at it. An expert becomes valid when its
//! last read came back good. If one fails, the slot is free, the error names the expert, and the
//! expert waits again: asking on retries it, ending the pass gives it up.
//!
//! Reads of an ended pass go on and their experts stay, unused, in the pool; a later pass that wants
//! one of them joins its read. Victims are overwritten by the read itself, so a failed read costs
//! the victim, and nothing else.
//!
//! Here is what callers see; how slots are filled is in [`fill`], what is read before anybody asked
//! for it in [`ahead`].

mod ahead;
mod fill;
mod touch;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::ExpertView;
use crate::cache::policy::Policy;
use crate::cache::{Cache, SlotId, State};
use crate::error::{Reader, StoreError};
use crate::io::FileSet;
use crate::layout::Layout;
use crate::queue::{self, IoOptions, ReadQueue};
use crate::region::Region;
use crate::spec::{StoreSpec, expert_layout, expert_view};
use crate::stats::{BusyClock, LayerSnapshot, StoreSnapshot, StoreStats};
use crate::store::{ExpertStore, Lease, Residency, StoreOptions};
use ahead::Ahead;
use fill::Slot;
use touch::{AHEAD_BYTES, Toucher};

/// Bytes of slots that passes over most experts of a layer compute from and read into, so that neither waits for the
/// other: what a fast disk gives in a tenth of a second, and half as much being computed.
const FLOW_BYTES: u64 = 320 << 20;

pub(crate) struct StreamStore {
    files: Arc<FileSet>,
    spec: StoreSpec,
    io: IoOptions,
    policy: Policy,
    /// `[layers][experts]`: how each expert lies in a slot, and whether its scales were found good.
    experts: Vec<Vec<Expert>>,
    cache: Cache,
    slots: Vec<Slot>,
    slot_bytes: u64,
    queue: Box<dyn ReadQueue>,
    pass: Option<Pass>,
    ahead: Ahead,
    /// Has the memory of some free slots.
    toucher: Toucher,
    /// Number of the latest pass.
    serial: u64,
    stats: StoreStats,
    /// Reads in flight that a pass wants or wanted.
    demanded_reads: usize,
    busy: BusyClock,
}

struct Expert {
    layout: Layout,
    scales_good: bool,
}

struct Pass {
    layer: usize,
    /// Without a slot.
    waiting: VecDeque<u16>,
    /// With reads in flight.
    reading: usize,
    /// Held, not yet handed out.
    ready: Vec<SlotId>,
    leased: usize,
    /// To be told at the next `next_ready`.
    error: Option<StoreError>,
}

impl StreamStore {
    pub(crate) fn open(
        spec: &StoreSpec,
        files: Arc<FileSet>,
        slots: usize,
        options: StoreOptions,
    ) -> Result<StreamStore, StoreError> {
        let StoreOptions { io, policy } = options;
        let experts = spec.layers.iter().map(|layer| {
            let expert = |weights| Expert { layout: expert_layout(weights), scales_good: false };
            layer.experts.iter().map(expert).collect()
        });
        let experts_of_layer: Vec<usize> =
            spec.layers.iter().map(|layer| layer.experts.len()).collect();
        let mut store = StreamStore {
            queue: queue::open(&files, &io, slots.min(spec.n_experts_total()))?,
            files,
            io,
            policy,
            experts: experts.collect(),
            cache: Cache::new(0, &experts_of_layer, policy),
            slots: Vec::new(),
            slot_bytes: spec.slot_bytes(),
            pass: None,
            ahead: Ahead::default(),
            toucher: Toucher::default(),
            serial: 0,
            stats: StoreStats::new(spec.layers.len()),
            demanded_reads: 0,
            busy: BusyClock::default(),
            spec: spec.clone(),
        };
        store.cache.set_flow((FLOW_BYTES / store.slot_bytes.max(1)) as usize);
        store.resize(slots)?;
        Ok(store)
    }

    /// Fails if a file of an expert that is not in the pool changed.
    fn check_files(&self, layer: usize, experts: &[u16]) -> Result<(), StoreError> {
        let missing = experts.iter().filter(|&&e| self.cache.lookup(layer, e).is_none());
        let mut files: Vec<(u32, u16)> = missing
            .flat_map(|&e| {
                let files = self.experts[layer][e as usize].layout.files();
                files.into_iter().map(move |file| (file, e))
            })
            .collect();
        files.sort_unstable();
        files.dedup_by_key(|&mut (file, _)| file);
        files.into_iter().try_for_each(|(file, expert)| {
            let layer = self.spec.layers[layer].layer;
            let for_it = |error: StoreError| error.read_for(Reader::Expert { layer, expert });
            self.files.check_unchanged(file).map_err(for_it)
        })
    }

    fn expert(&self, layer: usize, expert: u16) -> LayerRef<'_> {
        let layer = &self.spec.layers[layer];
        LayerRef { number: layer.layer, weights: &layer.experts[expert as usize] }
    }

    /// Bytes of an extent of the expert in a slot.
    fn bytes(&self, id: SlotId, extent: forebay_models::Extent) -> &[u8] {
        let (layer, expert) = self.cache.owner(id);
        let place = self.experts[layer][expert as usize].layout.locate(extent);
        let region = self.slots[id as usize].region.as_ref().expect("a valid slot has its memory");
        &region[place.expect("a layout covers its expert")]
    }

    /// The memory of a slot that nothing is read into.
    fn take_region(&mut self, id: SlotId) -> Region {
        let region = self.slots[id as usize].region.take();
        region.or_else(|| self.toucher.take(id)).expect("a slot without reads has its memory")
    }

    /// Has the memory of the slots that will be filled next touched, as far ahead as that may go.
    fn touch_ahead(&mut self) {
        let most = (AHEAD_BYTES / self.slot_bytes.max(1)) as usize;
        let mut room = most.saturating_sub(self.toucher.len());
        while room > 0 {
            let untouched = |&&id: &&SlotId| {
                let slot = &self.slots[id as usize];
                slot.region.is_some() && !slot.touched
            };
            let Some(&id) = self.cache.next_free().find(untouched) else { return };
            let slot = &mut self.slots[id as usize];
            let region = slot.region.take().expect("just seen");
            slot.touched = true;
            if let Some(region) = self.toucher.give(id, region) {
                slot.region = Some(region);
                return;
            }
            room -= 1;
        }
    }

    /// Gives back the memory of slots that are too many, as far as they can go now.
    fn trim(&mut self) {
        while let Some(id) = self.cache.retire() {
            let region = self.take_region(id);
            self.slots[id as usize] = Slot::default();
            self.queue.retire(region);
        }
    }
}

struct LayerRef<'a> {
    number: usize,
    weights: &'a forebay_models::ExpertWeights,
}

impl ExpertStore for StreamStore {
    fn begin(&mut self, layer: usize, experts: &[u16]) -> Result<(), StoreError> {
        assert!(self.pass.is_none(), "a pass ends before the next begins");
        check_distinct(experts, self.cache.n_experts(layer));
        self.settle_finished();
        self.check_files(layer, experts)?;
        self.serial += 1;
        self.cache.demand(layer, experts);
        self.drop_guesses(layer, experts);
        let (mut waiting, mut ready, mut reading) = (VecDeque::new(), Vec::new(), 0);
        for &expert in experts {
            match self.cache.lookup(layer, expert) {
                Some((slot, State::Reading)) => {
                    self.join(slot);
                    reading += 1;
                }
                Some((slot, _)) => {
                    self.stats.guesses.used += u64::from(self.cache.hold(slot));
                    ready.push(slot);
                }
                None => waiting.push_back(expert),
            }
        }
        self.stats.count(layer, ready.len(), experts.len() - ready.len());
        self.pass = Some(Pass { layer, waiting, reading, ready, leased: 0, error: None });
        self.start_reads();
        Ok(())
    }

    fn next_ready(&mut self, out: &mut Vec<Lease>) -> Result<(), StoreError> {
        loop {
            self.settle_finished();
            self.start_reads();
            let Some(pass) = &mut self.pass else { return Ok(()) };
            if let Some(error) = pass.error.take() {
                return Err(error);
            }
            if !pass.ready.is_empty() {
                pass.leased += pass.ready.len();
                let cache = &self.cache;
                let leases = pass.ready.drain(..).map(|slot| {
                    let (_, expert) = cache.owner(slot);
                    Lease { expert, slot, pass: self.serial }
                });
                out.extend(leases);
                return Ok(());
            }
            if pass.waiting.is_empty() && pass.reading == 0 {
                return Ok(());
            }
            let start = Instant::now();
            let Some(completion) = self.queue.wait() else {
                let layer = self.spec.layers[pass.layer].layer;
                let (waiting, leased) = (pass.waiting.len(), pass.leased);
                assert!(leased > 0, "a pass without leases can always go on");
                return Err(StoreError::AllLeased { layer, waiting, leased });
            };
            self.stats.read_wait += start.elapsed();
            self.settle(completion);
        }
    }

    fn view(&self, lease: &Lease) -> ExpertView<'_> {
        let pass = self.pass.as_ref().filter(|_| lease.pass == self.serial);
        let pass = pass.expect("a lease ends with its pass");
        let weights = self.expert(pass.layer, lease.expert).weights;
        expert_view(weights, |extent| self.bytes(lease.slot, extent))
    }

    fn release(&mut self, leases: &mut Vec<Lease>) {
        for lease in leases.drain(..) {
            if let Some(pass) = &mut self.pass
                && lease.pass == self.serial
            {
                self.cache.unhold(lease.slot);
                pass.leased -= 1;
            }
        }
        self.trim();
        self.settle_finished();
        self.start_reads();
    }

    fn end(&mut self) {
        if let Some(pass) = self.pass.take() {
            self.cache.unhold_layer(pass.layer);
        }
        self.touch_ahead();
        self.trim();
        self.settle_finished();
        self.start_reads();
    }

    fn resize(&mut self, slots: usize) -> Result<usize, StoreError> {
        if slots == 0 {
            return Err(StoreError::NoSlots { slot_bytes: self.slot_bytes });
        }
        self.settle_finished();
        let slots = slots.min(self.spec.n_experts_total());
        // Memory first: a pool that cannot grow as far as asked for grows as far as it can.
        let (mut memory, mut refused) = (Vec::new(), None);
        while self.cache.slots() + memory.len() < slots && refused.is_none() {
            match Region::new(self.slot_bytes as usize, self.io.huge_pages) {
                Ok(region) => memory.push(region),
                Err(error) => refused = Some(error),
            }
        }
        let reached = match refused {
            Some(_) => self.cache.slots() + memory.len(),
            None => slots,
        };
        if reached < self.cache.slots() {
            self.stop_reading_ahead();
        }
        for (id, region) in self.cache.resize(reached).into_iter().zip(memory) {
            if id as usize == self.slots.len() {
                self.slots.push(Slot::default());
            }
            self.slots[id as usize].region = Some(region);
        }
        self.touch_ahead();
        self.trim();
        refused.map_or(Ok(self.cache.slots()), Err)
    }

    fn guess(&mut self, layer: usize, experts: &[u16]) {
        self.settle_finished();
        self.add_guesses(layer, experts);
        self.start_reads();
    }

    fn announce(&mut self, layer: usize, experts: &[u16]) {
        self.settle_finished();
        self.set_announced(layer, experts);
        self.start_reads();
    }

    fn poll(&mut self) {
        self.settle_finished();
        self.start_reads();
    }

    fn hot(&self) -> Vec<(usize, u16)> {
        self.cache.hot()
    }

    fn warm(&mut self, experts: &[(usize, u16)]) {
        self.settle_finished();
        self.set_warm(experts);
        self.start_reads();
    }

    fn snapshot(&self) -> StoreSnapshot {
        let layers = self.spec.layers.iter().enumerate().map(|(i, layer)| LayerSnapshot {
            layer: layer.layer,
            quota: self.cache.quota(i),
            resident: self.cache.resident(i).collect(),
        });
        StoreSnapshot {
            slots: self.cache.slots(),
            free: self.cache.n_free(),
            slot_bytes: self.slot_bytes,
            policy: Some(self.policy),
            layers: layers.collect(),
        }
    }

    fn spec(&self) -> &StoreSpec {
        &self.spec
    }

    fn stats(&self) -> StoreStats {
        let mut stats = self.stats.clone();
        stats.guesses.wasted = self.cache.wasted();
        stats.queue_depth = self.queue.depth();
        stats
    }

    fn reset_stats(&mut self) {
        self.stats = StoreStats::new(self.spec.layers.len());
        self.cache.reset_wasted();
    }

    fn residency(&self) -> Residency {
        Residency::Stream { slots: self.cache.slots() }
    }

    fn slots(&self) -> usize {
        self.cache.slots()
    }

    fn bytes_in_memory(&self) -> u64 {
        let touched = self.slots.iter().filter(|slot| slot.touched).count();
        touched as u64 * self.slot_bytes
    }
}

/// Panics unless the experts exist and differ.
pub(crate) fn check_distinct(experts: &[u16], n_experts: usize) {
    let mut seen = vec![false; n_experts];
    for &expert in experts {
        let seen = seen.get_mut(expert as usize).expect("an expert of this layer");
        assert!(!std::mem::replace(seen, true), "expert {expert} twice in one pass");
    }
}

#[cfg(test)]
mod tests;
