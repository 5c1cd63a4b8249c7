//! Where the byte ranges of files come to lie in memory when they are read with aligned reads.
//!
//! A [`Layout`] covers a set of extents (which may overlap: gate and up rows that alternate share
//! their bytes) with few *runs*. A run is an aligned range of one file and lies in memory at a
//! multiple of [`ALIGN`], so every byte's memory offset is congruent to its file offset and a direct
//! read of the run lands in place, without a bounce copy.

use std::ops::Range;

use forebay_models::Extent;

use crate::region::ALIGN;

/// How a set of extents lies in memory.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    /// Ascending in (file, offset) and in memory.
    runs: Vec<Run>,
    bytes: u64,
}

/// An aligned range of a file and its place in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Run {
    file: u32,
    /// Multiple of `ALIGN`.
    offset: u64,
    /// Bytes up to the last one wanted, not rounded.
    need: u64,
    /// Offset in memory, multiple of `ALIGN`.
    at: u64,
}

/// One read of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlannedRead {
    /// File.
    pub file: u32,
    /// Offset in the file, aligned.
    pub offset: u64,
    /// Bytes that must exist.
    pub need: usize,
    /// Place in memory, aligned at both ends.
    pub range: Range<usize>,
}

const A: u64 = ALIGN as u64;

impl Layout {
    /// Covers `extents`; those closer than `max_gap` bytes (at least [`ALIGN`]) become one run.
    pub fn cover(extents: impl IntoIterator<Item = Extent>, max_gap: u64) -> Layout {
        let max_gap = max_gap.max(A);
        let mut sorted: Vec<Extent> = extents.into_iter().filter(|e| e.len > 0).collect();
        sorted.sort_unstable();
        let mut layout = Layout::default();
        for extent in sorted {
            let end = extent.offset + extent.len;
            match layout.runs.last_mut() {
                Some(run)
                    if run.file == extent.file
                        && extent.offset < run.offset + run.need + max_gap =>
                {
                    run.need = run.need.max(end - run.offset);
                }
                _ => {
                    let offset = extent.offset / A * A;
                    let run = Run { file: extent.file, offset, need: end - offset, at: 0 };
                    layout.runs.push(run);
                }
            }
        }
        for run in &mut layout.runs {
            run.at = layout.bytes;
            layout.bytes += run.need.next_multiple_of(A);
        }
        layout
    }

    /// Bytes of memory, a multiple of [`ALIGN`].
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Files that the layout reads, ascending.
    pub fn files(&self) -> Vec<u32> {
        let mut files: Vec<u32> = self.runs.iter().map(|run| run.file).collect();
        files.dedup();
        files
    }

    /// Where an extent lies in memory, if the layout covers it.
    pub fn locate(&self, extent: Extent) -> Option<Range<usize>> {
        if extent.len == 0 {
            return Some(0..0);
        }
        let key = (extent.file, extent.offset);
        let after = self.runs.partition_point(|run| (run.file, run.offset) <= key);
        let run = self.runs.get(after.checked_sub(1)?)?;
        let skew = extent.offset - run.offset;
        if run.file != extent.file || skew.checked_add(extent.len)? > run.need {
            return None;
        }
        let start = (run.at + skew) as usize;
        Some(start..start + extent.len as usize)
    }

    /// The reads that fill the memory, none larger than about `max_read` bytes, in file order.
    pub fn reads(&self, max_read: u64) -> Vec<PlannedRead> {
        let mut reads = Vec::with_capacity(self.runs.len());
        for run in &self.runs {
            let parts = run.need.div_ceil(max_read.max(A));
            let step = run.need.div_ceil(parts).next_multiple_of(A);
            let mut start = 0;
            while start < run.need {
                let need = step.min(run.need - start);
                let at = (run.at + start) as usize;
                reads.push(PlannedRead {
                    file: run.file,
                    offset: run.offset + start,
                    need: need as usize,
                    range: at..at + need.next_multiple_of(A) as usize,
                });
                start += step;
            }
        }
        reads
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn extent(file: u32, offset: u64, len: u64) -> Extent {
        Extent { file, offset, len }
    }

    #[test]
    fn neighbours_merge_and_strangers_do_not() {
        let cases: [(&str, &[Extent], u64, usize, u64); 7] = [
            ("none", &[], 0, 0, 0),
            ("empty extent", &[extent(0, 5, 0)], 0, 0, 0),
            ("one byte", &[extent(0, 4095, 1)], 0, 1, 4096),
            ("across a page", &[extent(0, 4095, 2)], 0, 1, 8192),
            ("overlap", &[extent(0, 10, 100), extent(0, 20, 100)], 0, 1, 4096),
            ("far", &[extent(0, 0, 1), extent(0, 4097, 1)], 0, 2, 8192),
            ("files", &[extent(0, 0, 1), extent(1, 1, 1)], 0, 2, 8192),
        ];
        for (name, extents, gap, runs, bytes) in cases {
            let layout = Layout::cover(extents.iter().copied(), gap);
            assert_eq!((layout.runs.len(), layout.bytes()), (runs, bytes), "{name}");
        }
        let near = [extent(0, 0, 1), extent(0, 65536, 1)];
        assert_eq!(Layout::cover(near, 65536).runs.len(), 1);
        assert_eq!(Layout::cover(near, 65535).runs.len(), 2);
    }

    /// Bytes that at least one extent covers.
    fn union_bytes(extents: &[Extent]) -> u64 {
        let mut sorted: Vec<Extent> = extents.iter().copied().filter(|e| e.len > 0).collect();
        sorted.sort_unstable();
        let (mut sum, mut end) = (0, (0, 0));
        for e in sorted {
            let from = if end.0 == e.file { e.offset.max(end.1) } else { e.offset };
            let to = e.offset + e.len;
            sum += to.saturating_sub(from);
            end = (e.file, if end.0 == e.file { to.max(end.1) } else { to });
        }
        sum
    }

    proptest! {
        /// Wherever extents lie, a read takes less than a page too much at either end, and gaps that
        /// are read over are less than a page.
        #[test]
        fn little_is_read_for_nothing(
            extents in prop::collection::vec((0u32..3, 0u64..9_000_000, 0u64..500_000), 1..12),
        ) {
            let extents: Vec<_> = extents.iter().map(|&(f, o, l)| extent(f, o, l)).collect();
            let layout = Layout::cover(extents.iter().copied(), A);
            let wanted = extents.iter().filter(|e| e.len > 0).count() as u64;
            let extra = layout.bytes() - union_bytes(&extents);
            prop_assert!(extra <= wanted * 2 * (A - 1), "{} bytes for {} extents", extra, wanted);
        }

        #[test]
        fn reads_tile_the_memory_and_cover_every_extent(
            extents in prop::collection::vec((0u32..3, 0u64..200_000, 0u64..50_000), 0..12),
            gap in 0u64..70_000,
            max_read in 1u64..100_000,
        ) {
            let extents: Vec<_> = extents.iter().map(|&(f, o, l)| extent(f, o, l)).collect();
            let layout = Layout::cover(extents.iter().copied(), gap);
            let reads = layout.reads(max_read);
            let mut end = 0;
            for read in &reads {
                prop_assert_eq!(read.range.start, end);
                end = read.range.end;
                prop_assert_eq!(read.offset % A, 0);
                prop_assert_eq!(read.range.len(), read.need.next_multiple_of(ALIGN));
                prop_assert!(read.need > 0 && read.need as u64 <= max_read.max(A) + A);
            }
            prop_assert_eq!(end as u64, layout.bytes());
            for e in extents {
                let place = layout.locate(e).expect("covered");
                prop_assert_eq!(place.len() as u64, e.len);
                for (at, byte) in place.zip(e.offset..).step_by(997) {
                    let read = reads.iter().find(|r| r.range.contains(&at)).unwrap();
                    prop_assert_eq!(read.file, e.file);
                    prop_assert_eq!(read.offset + (at - read.range.start) as u64, byte);
                    prop_assert!(at - read.range.start < read.need);
                }
            }
        }
    }
}
