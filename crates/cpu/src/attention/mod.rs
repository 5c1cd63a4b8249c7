//! Softmax attention over paged keys and values.
//!
//! # The order of sums
//! For one query (a row and a head) at position `i`, with keys and values as they are in the cache:
//!
//! - It sees positions `j` with `max(0, i - window + 1) <= j <= i`. Anything else contributes nothing at
//!   all, whatever its bytes; a block of [`BLOCK`] positions without a visible one is skipped.
//! - Score: from +0, `s = fma(q[d], k[j][d], s)` with `d` ascending; then `s * scale`; for `Q8` the sum is
//!   over codes and the score is `(s * k_scale[j]) * scale`.
//! - A block gives `m_b`, the maximum of its visible scores; `p_j = exp(s_j - m_b)`; `l_b`, from +0 the sum
//!   of `p_j`; `acc_b[d]`, from +0 `fma(p_j, v[j][d], acc_b[d])`; both with `j` ascending. For `Q8` the factor
//!   is `p_j * v_scale[j]` (rounded) and `v` the code.
//! - Blocks are merged in ascending order, from `(m, l, acc) = (-inf, +0, +0)`: `m' = max(m, m_b)`,
//!   `a = exp(m - m')`, `b = exp(m_b - m')`, `l' = fma(l, a, l_b * b)`, `acc' = fma(acc, a, acc_b * b)`.
//! - A sink comes last: `m' = max(m, sink)`, `a = exp(m - m')`, `l' = fma(l, a, exp(sink - m'))`,
//!   `acc' = acc * a`.
//! - `out = acc / l`.
//!
//! Nothing in this depends on other rows, so a chunk of rows has the bits of its rows one by one.
//!
//! Not here: which pages a sequence owns (the engine's state), rope and norms ([`crate::ops`]).

mod kernel;
mod layout;
mod scratch;
mod split;
#[cfg(test)]
mod tests;
mod tile;

use std::cell::RefCell;
use std::ops::Range;

pub use layout::{BLOCK, KvLayout, KvType};
pub use split::SPLIT_BYTES;

use crate::pool::Pool;
use crate::rows::{Rows, RowsMut};
use crate::simd::Level;
use kernel::{UNIT_QUERIES, Unit};

/// What a layer's attention is, apart from its cache.
#[derive(Clone, Copy, Debug)]
pub struct AttnParams<'a> {
    /// Query heads: a multiple of the KV heads; head `h` uses KV head `h / (n_heads / n_kv_heads)`.
    pub n_heads: usize,
    /// Factor on `q . k`.
    pub scale: f32,
    /// Sliding window in positions, the query's own included; none: all positions.
    pub window: Option<usize>,
    /// `[n_heads]`: a logit that joins the denominator only.
    pub sinks: Option<&'a [f32]>,
}

/// One query row.
#[derive(Clone, Copy, Debug)]
pub struct AttnRow<'a> {
    /// Absolute position in its sequence.
    pub pos: u32,
    /// Page of each block of positions: position `j` lies in page `table[j / BLOCK]`. Entries of blocks that
    /// the window masks are not read.
    pub table: &'a [u32],
}

impl AttnRow<'_> {
    /// Visible positions.
    #[inline(always)]
    fn visible(&self, window: Option<usize>) -> Range<usize> {
        let end = self.pos as usize + 1;
        window.map_or(0, |w| end.saturating_sub(w))..end
    }
}

/// One layer's pages: page `p` is `data[p * stride..][..layout.page_bytes()]`.
#[derive(Clone, Copy, Debug)]
pub struct KvPages<'a> {
    /// Shape.
    pub layout: KvLayout,
    /// The pages.
    pub data: &'a [u8],
    /// Distance between two pages in bytes.
    pub stride: usize,
}

impl<'a> KvPages<'a> {
    fn page(&self, index: u32) -> &'a [u8] {
        &self.data[index as usize * self.stride..][..self.layout.page_bytes()]
    }
}

thread_local! {
    /// Grows to [`scratch_bytes`] and is kept.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// The most scratch memory one thread keeps for [`attend`] on such a layer, in bytes; the calling thread
/// keeps up to [`SPLIT_BYTES`] more.
pub fn scratch_bytes(layout: &KvLayout, n_heads: usize) -> usize {
    let group = n_heads / layout.n_kv_heads;
    scratch::scratch_len(layout, UNIT_QUERIES.max(group)) * size_of::<f32>()
}

/// Attention of `rows` over the cache, which already holds each row's own key and value. `q` `[rows, n_heads *
/// head_dim]`, `out` `[rows, n_heads * v_head_dim]`.
pub fn attend(
    pool: &Pool,
    level: Level,
    params: &AttnParams,
    kv: &KvPages,
    rows: &[AttnRow],
    q: Rows,
    out: RowsMut,
) {
    let layout = &kv.layout;
    let (n_heads, v_head_dim) = (params.n_heads, layout.v_head_dim);
    assert!(
        n_heads > 0 && n_heads.is_multiple_of(layout.n_kv_heads),
        "{n_heads} heads on {}",
        layout.n_kv_heads
    );
    assert!(params.window != Some(0), "a window contains at least the position itself");
    assert!(params.sinks.is_none_or(|s| s.len() == n_heads));
    assert!(q.rows() == rows.len() && q.width() == n_heads * layout.head_dim);
    assert!(out.rows() == rows.len() && out.width() == n_heads * v_head_dim);

    let (out, out_stride) = out.into_disjoint();
    let write = |row: usize, head: usize, result: &[f32]| {
        let start = row * out_stride + head * v_head_dim;
        // SAFETY: both ways of sharing out the work compute each (row, head) once.
        unsafe { out.slice(start..start + v_head_dim) }.copy_from_slice(result);
    };
    if let Some(wave) = split::wave(pool, params, kv, rows) {
        return split::attend(pool, level, wave, (params, kv, rows), q, &write);
    }

    // A unit: some rows, the heads of one KV head.
    let group = n_heads / layout.n_kv_heads;
    let enough = (rows.len() * layout.n_kv_heads).div_ceil(pool.threads());
    let unit_rows = unit_rows(params, kv).min(enough.max(1));
    let row_units = rows.len().div_ceil(unit_rows);
    pool.run_chunks(row_units * layout.n_kv_heads, 1, &|units| {
        for u in units {
            let (kv_head, row_unit) = (u % layout.n_kv_heads, u / layout.n_kv_heads);
            let first_row = row_unit * unit_rows;
            let unit = Unit {
                params,
                kv,
                rows: &rows[first_row..rows.len().min(first_row + unit_rows)],
                first_row,
                kv_head,
                heads: kv_head * group..(kv_head + 1) * group,
                q,
                partial: false,
            };
            SCRATCH.with_borrow_mut(|s| kernel::attend_unit(level, &unit, s, write));
        }
    });
}

/// Rows of a unit.
fn unit_rows(params: &AttnParams, kv: &KvPages) -> usize {
    (UNIT_QUERIES * kv.layout.n_kv_heads / params.n_heads).max(1)
}
