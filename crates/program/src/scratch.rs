//! Scratch planning: buffers whose lives do not overlap share memory.
//!
//! A buffer lives from the operation that first writes it to the last that touches it. Offsets are in
//! floats per row; the arena of a batch is `width * rows` floats, a buffer being contiguous in it.

/// First and last operation that touch a buffer, and its width in floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// Floats per row.
    pub width: usize,
    /// Index of the first operation.
    pub first: usize,
    /// Index of the last operation.
    pub last: usize,
}

/// Offsets are multiples of this, so that every buffer starts on a cache line when the arena does.
const ALIGN: usize = 16;

/// Chooses an offset per buffer (first fit, widest first) and returns them with the arena's width.
pub fn plan(lives: &[Life]) -> (Vec<usize>, usize) {
    let mut order: Vec<usize> = (0..lives.len()).collect();
    order.sort_by_key(|&i| (std::cmp::Reverse(lives[i].width), lives[i].first, i));
    let mut offsets = vec![0; lives.len()];
    let mut placed: Vec<usize> = Vec::new();
    let mut total = 0;
    for i in order {
        let life = lives[i];
        let overlaps = |&&j: &&usize| lives[j].first <= life.last && life.first <= lives[j].last;
        let mut taken: Vec<(usize, usize)> = placed
            .iter()
            .filter(overlaps)
            .map(|&j| (offsets[j], offsets[j] + lives[j].width.next_multiple_of(ALIGN)))
            .collect();
        taken.sort_unstable();
        let mut at = 0;
        for (start, end) in taken {
            if at + life.width.next_multiple_of(ALIGN) <= start {
                break;
            }
            at = at.max(end);
        }
        offsets[i] = at;
        total = total.max(at + life.width.next_multiple_of(ALIGN));
        placed.push(i);
    }
    (offsets, total)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn living_buffers_never_overlap(
            raw in proptest::collection::vec((1usize..100, 0usize..40, 0usize..10), 0..40)
        ) {
            let lives: Vec<Life> = raw
                .into_iter()
                .map(|(width, first, len)| Life { width, first, last: first + len })
                .collect();
            let (offsets, total) = plan(&lives);
            for (i, a) in lives.iter().enumerate() {
                prop_assert!(offsets[i] + a.width <= total);
                for (j, b) in lives.iter().enumerate().skip(i + 1) {
                    let together = a.first <= b.last && b.first <= a.last;
                    let apart = offsets[i] + a.width <= offsets[j]
                        || offsets[j] + b.width <= offsets[i];
                    prop_assert!(!together || apart);
                }
            }
        }
    }
}
