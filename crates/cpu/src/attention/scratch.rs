//! What a unit of attention works on: blocks of keys and values as they are stored or widened, and the state of its
//! queries. Here is memory only; the arithmetic is in `kernel.rs`.

use super::KvType;
use super::layout::{BLOCK, HeadParts, KvLayout};
use super::tile::Columns;
use crate::simd::Level;

/// Floats of scratch for `queries` queries.
pub(super) fn scratch_len(layout: &KvLayout, queries: usize) -> usize {
    let (hd, vp) = (layout.head_dim, layout.padded_v());
    let block = BLOCK * (hd + vp) + 2 * BLOCK;
    let per_query = [hd, BLOCK, vp, 1, 1, 1, 1, 1, 1];
    let queries: usize = per_query.iter().map(|n| (queries * n).next_multiple_of(LINE)).sum();
    LINE + block + queries
}

/// Floats of a cache line. Every part of the scratch starts on one: vector loads that straddle two
/// lines cost twice.
const LINE: usize = 16;

/// Working memory of a unit.
pub(super) struct Scratch<'a> {
    pub block: Widened<'a>,
    pub queries: Queries<'a>,
}

/// A block of one KV head in f32 (codes of `Q8` stay codes).
pub(super) struct Widened<'a> {
    /// `[head_dim][BLOCK]`
    pub keys: &'a mut [f32],
    /// `[BLOCK][padded_v]`
    pub values: &'a mut [f32],
    /// `[BLOCK]`, `Q8` only.
    pub k_scales: &'a mut [f32],
    /// `[BLOCK]`, `Q8` only.
    pub v_scales: &'a mut [f32],
}

/// The state of `n` queries.
pub(super) struct Queries<'a> {
    /// `[n, head_dim]`
    pub q: &'a mut [f32],
    /// Scores, then probabilities, `[n, BLOCK]`.
    pub s: &'a mut [f32],
    /// Running maximum, denominator `[n]` and accumulator `[n, padded_v]`.
    pub m: &'a mut [f32],
    pub l: &'a mut [f32],
    pub acc: &'a mut [f32],
    /// Of the block: maximum and denominator; factors of old and new in the merge; all `[n]`.
    pub m_b: &'a mut [f32],
    pub l_b: &'a mut [f32],
    pub old: &'a mut [f32],
    pub new: &'a mut [f32],
}

impl<'a> Scratch<'a> {
    pub fn new(buffer: &'a mut Vec<f32>, layout: &KvLayout, n: usize) -> Scratch<'a> {
        let needed = scratch_len(layout, n);
        if buffer.len() < needed {
            buffer.resize(needed, 0.0);
        }
        let (hd, vp) = (layout.head_dim, layout.padded_v());
        let aligned = buffer.as_ptr().align_offset(LINE * size_of::<f32>()).min(LINE);
        let mut rest = &mut buffer[aligned..];
        let mut take = |len: usize| {
            let (part, others) = std::mem::take(&mut rest).split_at_mut(len.next_multiple_of(LINE));
            rest = others;
            &mut part[..len]
        };
        Scratch {
            block: Widened {
                keys: take(hd * BLOCK),
                values: take(vp * BLOCK),
                k_scales: take(BLOCK),
                v_scales: take(BLOCK),
            },
            queries: Queries {
                q: take(n * hd),
                s: take(n * BLOCK),
                acc: take(n * vp),
                m: take(n),
                l: take(n),
                m_b: take(n),
                l_b: take(n),
                old: take(n),
                new: take(n),
            },
        }
    }
}

impl Widened<'_> {
    pub fn fill(&mut self, level: Level, layout: &KvLayout, head: &HeadParts) {
        layout.widen(level, head.keys, self.keys);
        let (v_head_dim, padded) = (layout.v_head_dim, layout.padded_v());
        if v_head_dim == padded {
            layout.widen(level, head.values, self.values);
        } else {
            // The padding is never read into a result.
            let rows = self.values.chunks_exact_mut(padded);
            let stored = head.values.chunks_exact(v_head_dim * layout.kv_type.bytes());
            for (from, to) in stored.zip(rows) {
                layout.widen(level, from, &mut to[..v_head_dim]);
            }
        }
        self.fill_scales(layout, head);
    }

    pub fn fill_scales(&mut self, layout: &KvLayout, head: &HeadParts) {
        if layout.kv_type == KvType::Q8 {
            head.scales(self.k_scales, self.v_scales);
        }
    }
}

/// A head's part of a page, and of the page that comes next.
pub(super) struct Stored<'a> {
    pub head: HeadParts<'a>,
    pub next: Option<HeadParts<'a>>,
}

impl<'a> Stored<'a> {
    /// Keys and values, of elements of `BYTES` bytes.
    #[inline(always)]
    pub fn columns<const BYTES: usize>(
        &self,
        layout: &KvLayout,
    ) -> (Columns<'a, [u8; BYTES]>, Columns<'a, [u8; BYTES]>) {
        let next = self.next.as_ref();
        let columns = |data: &'a [u8], next: Option<&'a [u8]>, stride| Columns {
            data: data.as_chunks::<BYTES>().0,
            stride,
            next: next.map(|next| next.as_chunks::<BYTES>().0),
        };
        let values = layout.v_head_dim;
        (
            columns(self.head.keys, next.map(|n| n.keys), BLOCK),
            columns(self.head.values, next.map(|n| n.values), values),
        )
    }
}
