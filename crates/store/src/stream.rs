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

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use crate::ExpertView;
use crate::cache::{Cache, SlotId, State};
use crate::error::{Reader, StoreError};
use crate::io::FileSet;
use crate::layout::Layout;
use crate::queue::{Completion, IoOptions, ReadQueue, ReadRequest, ThreadQueue};
use crate::region::{Loan, Region};
use crate::spec::{StoreSpec, check_expert_scales, expert_layout, expert_view};
use crate::stats::{BusyClock, StoreStats};
use crate::store::{ExpertStore, Lease, Residency};

pub(crate) struct StreamStore {
    files: Arc<FileSet>,
    spec: StoreSpec,
    io: IoOptions,
    /// `[layers][experts]`: how each expert lies in a slot, and whether its scales were found good.
    experts: Vec<Vec<Expert>>,
    cache: Cache,
    slots: Vec<Slot>,
    queue: Box<dyn ReadQueue>,
    pass: Option<Pass>,
    /// Number of the latest pass.
    serial: u64,
    stats: StoreStats,
    busy: BusyClock,
}

struct Expert {
    layout: Layout,
    scales_good: bool,
}

/// A slot's memory: here, or lent to the reads that fill it.
#[derive(Default)]
struct Slot {
    region: Option<Region>,
    fill: Option<Fill>,
    touched: bool,
}

struct Fill {
    loan: Loan,
    /// Reads whose completions are still to come.
    outstanding: usize,
    error: Option<StoreError>,
    /// The pass that wants it last.
    pass: u64,
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
        io: IoOptions,
    ) -> Result<StreamStore, StoreError> {
        let slot_bytes = spec.slot_bytes();
        if slots == 0 {
            return Err(StoreError::NoSlots { slot_bytes });
        }
        let queue = Box::new(ThreadQueue::new(files.clone(), io.threads));
        let slots = slots.min(spec.n_experts_total());
        let memory = (0..slots)
            .map(|_| {
                let region = Some(Region::new(slot_bytes as usize, io.huge_pages)?);
                Ok(Slot { region, ..Slot::default() })
            })
            .collect::<Result<_, StoreError>>()?;
        let experts = spec.layers.iter().map(|layer| {
            let expert = |weights| Expert { layout: expert_layout(weights), scales_good: false };
            layer.experts.iter().map(expert).collect()
        });
        Ok(StreamStore {
            files,
            io,
            experts: experts.collect(),
            cache: Cache::new(slots, spec.layers.iter().map(|layer| layer.experts.len())),
            slots: memory,
            queue,
            pass: None,
            serial: 0,
            stats: StoreStats::new(spec.layers.len()),
            busy: BusyClock::default(),
            spec: spec.clone(),
        })
    }

    /// Fails if a file of an expert that is not in the pool changed.
    fn check_files(&self, layer: usize, experts: &[u16]) -> Result<(), StoreError> {
        let missing = experts.iter().filter(|&&e| self.cache.lookup(layer, e).is_none());
        let mut files: Vec<u32> =
            missing.flat_map(|&e| self.experts[layer][e as usize].layout.files()).collect();
        files.sort_unstable();
        files.dedup();
        files.into_iter().try_for_each(|file| self.files.check_unchanged(file))
    }

    /// Starts reads for the experts that wait, as far as there are slots.
    fn start_reads(&mut self) {
        while let Some(pass) = &mut self.pass
            && pass.error.is_none()
            && let Some(&expert) = pass.waiting.front()
            && let Some(slot) = self.cache.reserve(pass.layer, expert)
        {
            pass.waiting.pop_front();
            pass.reading += 1;
            let layout = &self.experts[pass.layer][expert as usize].layout;
            let reads = layout.reads(self.io.max_read_bytes);
            let memory = &mut self.slots[slot as usize];
            let region = memory.region.take().expect("a slot without reads has its memory");
            let (loan, pieces) = region.lend(reads.iter().map(|read| read.range.clone()));
            let outstanding = reads.len();
            memory.fill = Some(Fill { loan, outstanding, error: None, pass: self.serial });
            memory.touched = true;
            self.stats.reads += outstanding as u64;
            self.stats.bytes_read += layout.bytes();
            self.busy.start();
            for (read, piece) in reads.iter().zip(pieces) {
                self.queue.submit(ReadRequest::new(slot as u64, read, piece));
            }
        }
    }

    /// Takes note of everything that is over already.
    fn settle_finished(&mut self) {
        while let Some(completion) = self.queue.poll() {
            self.settle(completion);
        }
    }

    fn settle(&mut self, completion: Completion) {
        let Completion { tag, dest, result, finished } = completion;
        self.stats.read_busy += self.busy.finish(finished, self.queue.in_flight() == 0);
        drop(dest);
        let id = tag as SlotId;
        let slot = &mut self.slots[id as usize];
        let fill = slot.fill.as_mut().expect("a completion belongs to a fill");
        fill.outstanding -= 1;
        if let Err(error) = result {
            fill.error.get_or_insert(error);
        }
        if fill.outstanding > 0 {
            return;
        }
        let fill = slot.fill.take().expect("just seen");
        slot.region = Some(fill.loan.reclaim().expect("all reads came back"));
        let outcome = match fill.error {
            Some(error) => Err(error),
            None => self.check_fill(id),
        };
        self.settle_fill(id, fill.pass, outcome);
    }

    /// The bytes of a slot are all there or not.
    fn settle_fill(&mut self, id: SlotId, wanted_by: u64, outcome: Result<(), StoreError>) {
        let (layer, expert) = self.cache.owner(id);
        match &outcome {
            Ok(()) => self.cache.filled(id),
            Err(_) => self.cache.failed(id),
        }
        let error = outcome.err().map(|error| {
            error.read_for(Reader::Expert { layer: self.spec.layers[layer].layer, expert })
        });
        match (&mut self.pass, error) {
            (Some(pass), None) if wanted_by == self.serial => {
                self.cache.hold(id);
                pass.reading -= 1;
                pass.ready.push(id);
            }
            (Some(pass), Some(error)) if wanted_by == self.serial => {
                pass.reading -= 1;
                pass.waiting.push_back(expert);
                pass.error.get_or_insert(error);
            }
            (_, Some(error)) => tracing::warn!(%error, "a read that nobody waits for failed"),
            (_, None) => {}
        }
    }

    /// Once per expert: are its scales numbers?
    fn check_fill(&mut self, id: SlotId) -> Result<(), StoreError> {
        let (layer, expert) = self.cache.owner(id);
        let LayerRef { number, weights } = self.expert(layer, expert);
        if !self.experts[layer][expert as usize].scales_good {
            check_expert_scales(weights, |e| self.bytes(id, e), number, expert)?;
            self.experts[layer][expert as usize].scales_good = true;
        }
        Ok(())
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

    #[cfg(test)]
    pub(crate) fn audit(&self) {
        self.cache.audit();
        for (id, slot) in self.slots.iter().enumerate() {
            let reading = self.cache.state(id as SlotId) == State::Reading;
            assert_eq!((slot.region.is_none(), slot.fill.is_some()), (reading, reading));
        }
        let held =
            (0..self.slots.len() as SlotId).filter(|&id| self.cache.state(id) == State::Held);
        let expected = self.pass.as_ref().map_or(0, |pass| pass.ready.len() + pass.leased);
        assert_eq!(held.count(), expected);
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
        let (mut waiting, mut ready, mut reading) = (VecDeque::new(), Vec::new(), 0);
        for &expert in experts {
            match self.cache.lookup(layer, expert) {
                Some((slot, State::Reading)) => {
                    let fill = self.slots[slot as usize].fill.as_mut();
                    fill.expect("a reading slot has a fill").pass = self.serial;
                    reading += 1;
                }
                Some((slot, _)) => {
                    self.cache.hold(slot);
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
        self.settle_finished();
        self.start_reads();
    }

    fn end(&mut self) {
        if let Some(pass) = self.pass.take() {
            self.cache.unhold_layer(pass.layer);
        }
    }

    fn stats(&self) -> StoreStats {
        self.stats.clone()
    }

    fn reset_stats(&mut self) {
        self.stats = StoreStats::new(self.spec.layers.len());
    }

    fn residency(&self) -> Residency {
        Residency::Stream { slots: self.cache.slots() }
    }

    fn slots(&self) -> usize {
        self.cache.slots()
    }

    fn bytes_in_memory(&self) -> u64 {
        let touched = self.slots.iter().filter(|slot| slot.touched).count();
        touched as u64 * self.spec.slot_bytes()
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
#[path = "stream_tests.rs"]
mod tests;
