//! Where weight bytes live: positioned reads, memory regions, the trunk image and the expert store.
//!
//! What is here: everything that touches the disk for weights, behind one platform trait, and the
//! bounded cache of experts with its leases ([`ExpertStore`]). What is not here: what the bytes mean to
//! a kernel beyond a checked [`forebay_quant::MatrixView`].
//!
//! From the system upwards: [`platform`] (its calls), [`region`] (memory), [`map`] (mapped files),
//! [`io`] and `progress` (one read, whole or an error), [`layout`] (where ranges come to lie),
//! [`queue`] (reads in flight) with `backlog` and [`depth`] (which read is next, how many at once) and
//! its engines `threads` and [`ring`] (`uring` on Linux), [`trunk`] (everything at once), [`spec`]
//! (which experts there are), `cache` (who has to go), [`store`] with `stream` and `present` (experts
//! on demand, or always there). Beside them [`memory`] (what the process has and may have), [`bandwidth`] (what the disk
//! can do), [`heap`] (how the allocator behaves), [`mod@replay`] (the cache without reads), [`stats`] and [`faults`] (for tests).

use forebay_quant::MatrixView;

// The tests beside the code share `tests/common`, which names the crate from outside.
#[cfg(test)]
extern crate self as forebay_store;

mod backlog;
pub mod bandwidth;
mod cache;
pub mod depth;
pub mod error;
pub mod faults;
pub mod heap;
pub mod io;
pub mod layout;
pub mod map;
pub mod memory;
pub mod platform;
mod present;
pub mod pressure;
mod progress;
pub mod queue;
pub mod region;
pub mod replay;
pub mod ring;
pub mod spec;
pub mod stats;
pub mod store;
mod stream;
mod threads;
pub mod traces;
pub mod trunk;
#[cfg(target_os = "linux")]
mod uring;

pub use cache::policy::Policy;
pub use depth::QueueDepth;
pub use error::{Reader, StoreError};
pub use io::{FileSet, IoMode};
pub use queue::{IoEngine, IoOptions};
pub use region::{HugePages, Region};
pub use replay::{replay, replay_each};
pub use spec::{LayerExperts, StoreSpec};
pub use stats::{GuessStats, LayerSnapshot, LayerStats, StoreSnapshot, StoreStats};
pub use store::{ExpertStore, Lease, Residency, StoreOptions, open_store};
pub use trunk::TrunkImage;

/// One expert's matrices in memory. Kernels see this and never a slot index.
#[derive(Clone, Copy, Debug)]
pub struct ExpertView<'a> {
    /// `[inter, d]`
    pub gate: MatrixView<'a>,
    /// `[inter, d]`
    pub up: MatrixView<'a>,
    /// `[d, inter]`
    pub down: MatrixView<'a>,
}
