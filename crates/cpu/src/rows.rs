//! Matrices of activations: rows of `width` floats, `stride` apart; and their parallel, disjoint writing.
//!
//! The only unsafe code is `DisjointMut`: several threads write parts of one slice that do not overlap.

use std::marker::PhantomData;
use std::ops::Range;

use crate::pool::Pool;

/// Below this many elements a job is not worth waking the other threads.
const INLINE_ELEMENTS: usize = 8 * 1024;

/// Elements in one piece of work.
const CHUNK_ELEMENTS: usize = 4 * 1024;

/// Activations `[rows, width]` to read.
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    data: &'a [f32],
    rows: usize,
    width: usize,
    stride: usize,
}

/// Activations `[rows, width]` to write.
#[derive(Debug)]
pub struct RowsMut<'a> {
    data: &'a mut [f32],
    rows: usize,
    width: usize,
    stride: usize,
}

fn check(len: usize, rows: usize, width: usize, stride: usize) {
    let needed = if rows == 0 { 0 } else { (rows - 1) * stride + width };
    assert!(len >= needed, "{rows} rows of {width}, {stride} apart, do not fit into {len} floats");
    assert!(rows <= 1 || stride >= width, "rows of {width} overlap at stride {stride}");
}

impl<'a> Rows<'a> {
    /// Row `r` is `data[r * stride..][..width]`. Panics if the rows do not fit or overlap.
    pub fn new(data: &'a [f32], rows: usize, width: usize, stride: usize) -> Rows<'a> {
        check(data.len(), rows, width, stride);
        Rows { data, rows, width, stride }
    }
    /// Rows without gaps: `data.len()` is a multiple of `width`.
    pub fn dense(data: &'a [f32], width: usize) -> Rows<'a> {
        assert!(
            width > 0 && data.len().is_multiple_of(width),
            "{} floats are not rows of {width}",
            data.len()
        );
        Rows { data, rows: data.len() / width, width, stride: width }
    }
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Floats of a row.
    pub fn width(&self) -> usize {
        self.width
    }
    /// Row `r`, `[width]`.
    pub fn row(&self, r: usize) -> &'a [f32] {
        assert!(r < self.rows);
        &self.data[r * self.stride..][..self.width]
    }
}

impl<'a> RowsMut<'a> {
    /// Row `r` is `data[r * stride..][..width]`. Panics if the rows do not fit or overlap.
    pub fn new(data: &'a mut [f32], rows: usize, width: usize, stride: usize) -> RowsMut<'a> {
        check(data.len(), rows, width, stride);
        RowsMut { data, rows, width, stride }
    }
    /// Rows without gaps: `data.len()` is a multiple of `width`.
    pub fn dense(data: &'a mut [f32], width: usize) -> RowsMut<'a> {
        assert!(
            width > 0 && data.len().is_multiple_of(width),
            "{} floats are not rows of {width}",
            data.len()
        );
        RowsMut { rows: data.len() / width, width, stride: width, data }
    }
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }
    /// Floats of a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Calls `f(r, row)` for every row, on several threads when that pays.
    pub fn for_each_row(self, pool: &Pool, f: impl Fn(usize, &mut [f32]) + Sync) {
        let RowsMut { data, rows, width, stride } = self;
        if rows * width < INLINE_ELEMENTS {
            for r in 0..rows {
                f(r, &mut data[r * stride..][..width]);
            }
            return;
        }
        let out = DisjointMut::new(data);
        pool.run_chunks(rows, (CHUNK_ELEMENTS / width.max(1)).max(1), &|range| {
            for r in range {
                // SAFETY: `run_chunks` hands out every row once, and rows do not overlap (`check`).
                f(r, unsafe { out.slice(r * stride..r * stride + width) });
            }
        });
    }

    /// Calls `f(row)` for every row, one after the other on this thread.
    pub fn for_each_row_here(self, f: impl Fn(&mut [f32])) {
        let RowsMut { data, rows, width, stride } = self;
        for r in 0..rows {
            f(&mut data[r * stride..][..width]);
        }
    }

    /// The rows for writers that share them out by themselves: data and stride.
    pub(crate) fn into_disjoint(self) -> (DisjointMut<'a>, usize) {
        (DisjointMut::new(self.data), self.stride)
    }
}

/// Calls `f(range, &mut out[range])` for ranges that cover `out`, on several threads when that pays.
pub(crate) fn for_each_chunk(
    pool: &Pool,
    out: &mut [f32],
    f: impl Fn(Range<usize>, &mut [f32]) + Sync,
) {
    let len = out.len();
    if len < INLINE_ELEMENTS {
        return f(0..len, out);
    }
    let out = DisjointMut::new(out);
    pool.run_chunks(len, CHUNK_ELEMENTS, &|range| {
        // SAFETY: `run_chunks` hands out every element once.
        f(range.clone(), unsafe { out.slice(range) });
    });
}

/// A slice that several threads write at once, each its own part.
pub(crate) struct DisjointMut<'a> {
    start: *mut f32,
    len: usize,
    _slice: PhantomData<&'a mut [f32]>,
}

// SAFETY: the only access is `slice`, whose callers promise that parts held at the same time do not overlap.
unsafe impl Sync for DisjointMut<'_> {}

impl<'a> DisjointMut<'a> {
    pub(crate) fn new(slice: &'a mut [f32]) -> DisjointMut<'a> {
        DisjointMut { start: slice.as_mut_ptr(), len: slice.len(), _slice: PhantomData }
    }

    /// The part `range`.
    ///
    /// # Safety
    /// No two parts that are alive at the same time overlap.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: inside the slice that `self` borrows for `'a`, and not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
}
