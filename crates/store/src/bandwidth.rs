//! What the disk can do: random direct reads of one file, as the expert store would do them.
//!
//! A bench divides what it got by this, so the same queue, alignment and fallbacks are used here.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::StoreError;
use crate::io::FileSet;
use crate::queue::{ReadQueue, ReadRequest, Urgency};
use crate::region::{ALIGN, HugePages, Region};
use crate::threads::ThreadQueue;

/// A measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Bandwidth {
    /// Bytes read.
    pub bytes: u64,
    /// Reads.
    pub reads: u64,
    /// From the first submission to the last completion.
    pub elapsed: Duration,
    /// Whether the page cache was bypassed; otherwise the number may be the memory's.
    pub direct: bool,
}

impl Bandwidth {
    /// Bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.bytes as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// Reads blocks of `block_bytes` (rounded up to 4096) at random places, `queue_depth` at once, until
/// `duration` is over. A file smaller than a block gives `Truncated`.
pub fn measure(
    files: &Arc<FileSet>,
    file: u32,
    block_bytes: usize,
    queue_depth: usize,
    duration: Duration,
) -> Result<Bandwidth, StoreError> {
    let block = block_bytes.next_multiple_of(ALIGN).max(ALIGN);
    let places = (files.entry(file).len / block as u64).max(1);
    let queue_depth = queue_depth.max(1);
    let mut queue = ThreadQueue::new(files.clone(), queue_depth);
    let mut random = 0x9E37_79B9_7F4A_7C15_u64;
    let mut place = move || {
        // xorshift64 (Marsaglia 2003)
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % places * block as u64
    };
    let urgency = Urgency::Demanded;
    let request = |offset, dest| ReadRequest { tag: 0, file, offset, need: block, dest, urgency };
    let region = Region::new(block * queue_depth, HugePages::Default)?;
    let (_loan, pieces) = region.lend((0..queue_depth).map(|i| i * block..(i + 1) * block));
    let start = Instant::now();
    for piece in pieces {
        queue.submit(request(place(), piece));
    }
    let (mut reads, mut end) = (0, start);
    while let Some(completion) = queue.wait() {
        completion.result?;
        reads += 1;
        end = end.max(completion.finished);
        if end - start < duration {
            queue.submit(request(place(), completion.dest));
        }
    }
    let bytes = reads * block as u64;
    Ok(Bandwidth { bytes, reads, elapsed: end - start, direct: files.is_direct(file) })
}
