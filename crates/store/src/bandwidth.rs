//! What the disk can do: random direct reads of one file, as the expert store would do them.
//!
//! A bench divides what it got by this, so the same queue, alignment and fallbacks are used here.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::depth::QueueDepth;
use crate::error::StoreError;
use crate::io::FileSet;
use crate::queue::{self, IoOptions, ReadRequest, Urgency};
use crate::region::{ALIGN, HugePages, Region};

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
    let options = IoOptions { depth: QueueDepth::Fixed(queue_depth), ..IoOptions::default() };
    measure_with(files, file, block_bytes, &options, duration)
}

/// The same, reading as `options` say. Where the depth is measured, there are always reads waiting.
pub fn measure_with(
    files: &Arc<FileSet>,
    file: u32,
    block_bytes: usize,
    options: &IoOptions,
    duration: Duration,
) -> Result<Bandwidth, StoreError> {
    let block = block_bytes.next_multiple_of(ALIGN).max(ALIGN);
    let places = (files.entry(file).len / block as u64).max(1);
    // Other places in every run: something below may have kept what was read before.
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |t| t.as_nanos() as u64);
    let mut random = seed | 1;
    let mut place = move || {
        // xorshift64 (Marsaglia 2003)
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random % places * block as u64
    };
    let urgency = Urgency::Demanded;
    let request = |offset, dest| ReadRequest { tag: 0, file, offset, need: block, dest, urgency };
    let blocks = options.depth.most();
    let mut queue = queue::open(files, options, 1)?;
    let mut region = Region::new(block * blocks, HugePages::Advise)?;
    // Memory that was never touched would be cleared while reading.
    region.fill(0);
    let (_loan, pieces) = region.lend((0..blocks).map(|i| i * block..(i + 1) * block));
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
