//! What the memory can do: all threads read one large buffer. A bench divides what it got by this.

use std::time::Instant;

use crate::pool::Pool;

/// Passes over the buffer; the fastest counts, the first also faults the pages in.
const PASSES: usize = 6;

/// Bytes per second at which `pool` reads `bytes` bytes of memory, which should be much more than the
/// caches hold.
pub fn measure(pool: &Pool, bytes: usize) -> f64 {
    let words = vec![1u64; bytes / 8];
    let part = words.len().div_ceil(pool.threads());
    let mut best = f64::INFINITY;
    for _ in 0..PASSES {
        let clock = Instant::now();
        pool.run(&|t| {
            let start = (t * part).min(words.len());
            let mine = &words[start..(start + part).min(words.len())];
            std::hint::black_box(sum(mine));
        });
        best = best.min(clock.elapsed().as_secs_f64());
    }
    (words.len() * 8) as f64 / best
}

/// Eight sums at once, so that loads and not additions are the limit.
fn sum(words: &[u64]) -> u64 {
    let (chunks, _) = words.as_chunks::<32>();
    let mut sums = [0u64; 32];
    for chunk in chunks {
        for (s, w) in sums.iter_mut().zip(chunk) {
            *s = s.wrapping_add(*w);
        }
    }
    sums.iter().fold(0, |a, b| a.wrapping_add(*b))
}
