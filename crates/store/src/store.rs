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
use crate::error::StoreError;
use crate::io::FileSet;
use crate::present::PresentStore;
use crate::queue::IoOptions;
use crate::spec::StoreSpec;
use crate::stats::StoreStats;
use crate::stream::StreamStore;

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

    /// Counters.
    fn stats(&self) -> StoreStats;

    /// Sets the counters to zero.
    fn reset_stats(&mut self);

    /// Where experts live.
    fn residency(&self) -> Residency;

    /// Experts that can be in memory at once.
    fn slots(&self) -> usize;

    /// Own memory that experts take now. Mapped pages are the system's.
    fn bytes_in_memory(&self) -> u64;
}

/// Opens a store. `progress` is told (bytes read, bytes in all) while a resident one loads.
pub fn open_store(
    spec: &StoreSpec,
    files: Arc<FileSet>,
    mode: Residency,
    io: IoOptions,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Box<dyn ExpertStore>, StoreError> {
    spec.check(&files)?;
    Ok(match mode {
        Residency::Stream { slots } => Box::new(StreamStore::open(spec, files, slots, io)?),
        Residency::Mapped => Box::new(PresentStore::map(spec, files)?),
        Residency::Resident => Box::new(PresentStore::load(spec, &files, &io, progress)?),
    })
}
