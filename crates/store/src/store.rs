//! The one interface to experts, wherever they live.
//!
//! ```text
//! begin(layer, experts)          hits are held, reads for misses start
//! loop:
//!     next_ready(&mut leases)    blocks until at least one expert is there; nothing: all were handed out
//!     view(&lease) ...           compute
//!     release(&mut leases)       their slots may be used again, more reads start
//! end()                          also after an error or in the middle
//! ```
//!
//! Every expert of a pass is handed out exactly once, in any order. One slot is enough: then the
//! experts of a pass come one after the other, and the caller has to release before it asks on.

use std::sync::Arc;

use crate::ExpertView;
use crate::cache::policy::Policy;
use crate::error::StoreError;
use crate::io::FileSet;
use crate::present::PresentStore;
use crate::queue::IoOptions;
use crate::spec::StoreSpec;
use crate::stats::{StoreSnapshot, StoreStats};
use crate::stream::StreamStore;

/// How a store works.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StoreOptions {
    /// How weights are read.
    pub io: IoOptions,
    /// Who has to go when a slot is needed.
    pub policy: Policy,
}

impl From<IoOptions> for StoreOptions {
    fn from(io: IoOptions) -> StoreOptions {
        StoreOptions { io, ..StoreOptions::default() }
    }
}

/// Where experts live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Residency {
    /// On disk, read on demand into a bounded pool.
    Stream {
        /// Experts that fit in the pool. More than there are experts means as many as there are.
        slots: usize,
    },
    /// Mapped files, paged by the system. See [`crate::map`] for the risk.
    Mapped,
    /// All in memory.
    Resident,
}

/// The right to look at one expert until it is released or its pass ends.
#[derive(Debug)]
#[must_use = "a lease keeps its slot until it is released"]
pub struct Lease {
    /// Expert of the pass's layer.
    pub expert: u16,
    pub(crate) slot: u32,
    pub(crate) pass: u64,
}

/// Hands out experts. See the module's header for the order of calls.
pub trait ExpertStore: Send {
    /// Starts a pass over distinct experts of one MoE layer (an index into [`StoreSpec::layers`]).
    /// After an error there is no pass. Panics if a pass is under way or an expert does not exist.
    fn begin(&mut self, layer_index: usize, experts: &[u16]) -> Result<(), StoreError>;

    /// Blocks until an expert of the pass is ready and appends all that are. Appends nothing when
    /// all were handed out. After an error the pass is still under way: asking again tries the
    /// failed expert again, [`ExpertStore::end`] gives up.
    fn next_ready(&mut self, out: &mut Vec<Lease>) -> Result<(), StoreError>;

    /// The expert's matrices. Panics if the lease's pass is over.
    fn view(&self, lease: &Lease) -> ExpertView<'_>;

    /// Gives leases back; their slots become evictable and more reads of the pass may start. Leases
    /// of an ended pass are ignored.
    fn release(&mut self, leases: &mut Vec<Lease>);

    /// Ends the pass, finished or not; all of its leases are void. Reads in flight complete on their
    /// own. Does nothing when there is no pass.
    fn end(&mut self);

    /// Changes how many experts can be in memory, at any time: also with reads in flight and leases
    /// held. More than there are experts means as many as there are. Memory of slots that go is given
    /// back to the system at once; those that are read into or held by a pass go when they are
    /// released, so the number reached now, which is returned, may be larger than asked for
    /// ([`ExpertStore::slots`] tells later). If the system refuses memory, the pool stays as large as
    /// it got. Where there is no pool, nothing happens.
    fn resize(&mut self, slots: usize) -> Result<usize, StoreError> {
        let _ = slots;
        Ok(self.slots())
    }

    /// These experts may be wanted soon: they are read while no demanded read waits or is in flight, few
    /// at once, into slots that are free or colder. Nothing is said about when, or whether. A later
    /// pass over the layer ends the guess. Panics if an expert does not exist.
    fn guess(&mut self, layer_index: usize, experts: &[u16]) {
        let _ = (layer_index, experts);
    }

    /// The next pass will be over this layer and want these distinct experts, or nearly all of them, in
    /// this order: they are read with the urgency of guesses into slots that the pass would take as
    /// well, and count as demanded. The next pass over any layer ends it. Panics if an expert does not
    /// exist.
    fn announce(&mut self, layer_index: usize, experts: &[u16]) {
        let _ = (layer_index, experts);
    }

    /// Goes on with reads that were guessed or announced: for those who compute for long between passes.
    /// Returns at once.
    fn poll(&mut self) {}

    /// Experts that were used, as (MoE layer, expert), hottest first, whether they are in memory or
    /// not. Empty where there is no pool.
    fn hot(&self) -> Vec<(usize, u16)> {
        Vec::new()
    }

    /// Reads these experts in this order into free slots, as far as there are any, with the urgency
    /// of guesses. Returns at once; replaces an earlier list. Experts that do not exist are left out.
    fn warm(&mut self, experts: &[(usize, u16)]) {
        let _ = experts;
    }

    /// The experts it was opened for.
    fn spec(&self) -> &StoreSpec;

    /// What is in memory now.
    fn snapshot(&self) -> StoreSnapshot {
        StoreSnapshot::default()
    }

    /// Counters.
    fn stats(&self) -> StoreStats;

    /// Sets the counters to zero.
    fn reset_stats(&mut self);

    /// Where experts live.
    fn residency(&self) -> Residency;

    /// Experts that can be in memory at once.
    fn slots(&self) -> usize;

    /// Own memory that experts take now, slots included that are touched ahead of use. Mapped pages are
    /// the system's.
    fn bytes_in_memory(&self) -> u64;
}

/// Opens a store. `progress` is told (bytes read, bytes in all) while a resident one loads.
pub fn open_store(
    spec: &StoreSpec,
    files: Arc<FileSet>,
    mode: Residency,
    options: impl Into<StoreOptions>,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Box<dyn ExpertStore>, StoreError> {
    spec.check(&files)?;
    let options = options.into();
    Ok(match mode {
        Residency::Stream { slots } => Box::new(StreamStore::open(spec, files, slots, options)?),
        Residency::Mapped => Box::new(PresentStore::map(spec, files)?),
        Residency::Resident => Box::new(PresentStore::load(spec, &files, &options.io, progress)?),
    })
}
