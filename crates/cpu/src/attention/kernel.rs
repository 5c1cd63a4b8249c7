//! Attention of some rows and query heads over one KV head: the arithmetic of the module's header.
//!
//! One body for every level. A block of keys and values is widened once and then used by all queries
//! (rows times heads of the group) that see it; up to `T` of them are worked on side by side, so that the
//! vector units have independent sums. `T` is a matter of registers and does not touch any bit. Where the
//! queries are few (decoding), elements are widened as they are read, and the next block is asked for
//! meanwhile: writing them down would cost more than the sums.

// Indexed loops over fixed arrays say which lanes meet.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::layout::{BLOCK, KvLayout};
use super::scratch::{Queries, Scratch, Stored, Widened};
use super::tile::{Columns, Element, Lanes, sums};
use super::{AttnParams, AttnRow, KvPages, KvType};
use crate::dispatch::per_level;
use crate::rows::Rows;
use crate::simd::Level;
use crate::vecmath::exp;

/// Queries that one call of [`attend_unit`] works on, more or less.
pub(super) const UNIT_QUERIES: usize = 64;

/// Up to so many queries read elements as they are stored.
const DIRECT_QUERIES: usize = 8;

/// One piece of work: `rows` of the batch, query heads `heads`, which share KV head `kv_head`.
pub(super) struct Unit<'a> {
    pub params: &'a AttnParams<'a>,
    pub kv: &'a KvPages<'a>,
    /// The rows of this unit.
    pub rows: &'a [AttnRow<'a>],
    /// Index of the first of them in `q`.
    pub first_row: usize,
    pub kv_head: usize,
    pub heads: Range<usize>,
    /// `[batch rows, n_heads * head_dim]`
    pub q: Rows<'a>,
    /// Keep each block's own result instead of merging it; for [`attend_unit_blocks`].
    pub partial: bool,
}

impl Unit<'_> {
    fn queries(&self) -> usize {
        self.rows.len() * self.heads.len()
    }
    /// Page and visible positions of block `b` for row `r`; none if all are masked.
    #[inline(always)]
    fn sees(&self, r: usize, b: usize) -> Option<(u32, Range<usize>)> {
        let visible = self.rows[r].visible(self.params.window);
        let start = b * BLOCK;
        if visible.end <= start || visible.start >= start + BLOCK {
            return None;
        }
        let lo = visible.start.saturating_sub(start);
        let hi = (visible.end - start).min(BLOCK);
        Some((self.rows[r].table[b], lo..hi))
    }
}

/// Computes a unit; `write(row, head, out)` receives each query's result, `[v_head_dim]`.
pub(super) fn attend_unit(
    level: Level,
    unit: &Unit,
    buffer: &mut Vec<f32>,
    mut write: impl FnMut(usize, usize, &[f32]),
) {
    let mut scratch = prepare(unit, buffer);
    let of = blocks(unit.rows, unit.params.window);
    for b in of.clone() {
        for_each_run(unit, b, |rows, page| {
            block(level, unit, (rows, b, page), of.end, &mut scratch);
        });
    }
    let scratch = &mut scratch.queries;
    finish(level, unit, scratch);
    let (vp, group) = (unit.kv.layout.padded_v(), unit.heads.len());
    for (i, acc) in scratch.acc.chunks_exact(vp).enumerate() {
        let (row, head) = (unit.first_row + i / group, unit.heads.start + i % group);
        write(row, head, &acc[..unit.kv.layout.v_head_dim]);
    }
}

/// Computes the blocks `of` of a partial unit, each by itself; `write(b, row, head, acc_b, m_b, l_b)`
/// receives the result of each query that sees block `b`; `acc_b` `[padded_v]`.
pub(super) fn attend_unit_blocks(
    level: Level,
    unit: &Unit,
    of: Range<usize>,
    buffer: &mut Vec<f32>,
    mut write: impl FnMut(usize, usize, usize, &[f32], f32, f32),
) {
    let (vp, group) = (unit.kv.layout.padded_v(), unit.heads.len());
    let mut scratch = prepare(unit, buffer);
    for b in of.clone() {
        for_each_run(unit, b, |rows, page| {
            block(level, unit, (rows.clone(), b, page), of.end, &mut scratch);
            let scratch = &scratch.queries;
            for i in rows.start * group..rows.end * group {
                let (row, head) = (unit.first_row + i / group, unit.heads.start + i % group);
                write(b, row, head, &scratch.acc[i * vp..][..vp], scratch.m[i], scratch.l[i]);
            }
        });
    }
}

/// Blocks that some of `rows` sees, and perhaps others between them.
pub(super) fn blocks(rows: &[AttnRow], window: Option<usize>) -> Range<usize> {
    let visible = || rows.iter().map(|row| row.visible(window));
    let first = visible().map(|v| v.start / BLOCK).min().unwrap_or(0);
    first..visible().map(|v| v.end.div_ceil(BLOCK)).max().unwrap_or(0)
}

/// The queries, side by side, and the state before the first block.
fn prepare<'a>(unit: &Unit, buffer: &'a mut Vec<f32>) -> Scratch<'a> {
    let (hd, group) = (unit.kv.layout.head_dim, unit.heads.len());
    let mut scratch = Scratch::new(buffer, &unit.kv.layout, unit.queries());
    let queries = &mut scratch.queries;
    for (r, q) in queries.q.chunks_exact_mut(group * hd).enumerate() {
        let row = unit.q.row(unit.first_row + r);
        q.copy_from_slice(&row[unit.heads.start * hd..unit.heads.end * hd]);
    }
    queries.m.fill(f32::NEG_INFINITY);
    queries.l.fill(0.0);
    queries.acc.fill(0.0);
    scratch
}

/// Calls `f(rows, page)` for each run of rows that see the same page in block `b`; usually there is one.
fn for_each_run(unit: &Unit, b: usize, mut f: impl FnMut(Range<usize>, u32)) {
    let page = |r| unit.sees(r, b).map(|(page, _)| page);
    let mut r = 0;
    while r < unit.rows.len() {
        let start = r;
        r += 1;
        if let Some(seen) = page(start) {
            while r < unit.rows.len() && page(r) == Some(seen) {
                r += 1;
            }
            f(start..r, seen);
        }
    }
}

/// Merges block `b`, which lies in `page`, into the state of the queries of `rows`; blocks from `end` on are
/// not wanted.
fn block(
    level: Level,
    unit: &Unit,
    (rows, b, page): (Range<usize>, usize, u32),
    end: usize,
    scratch: &mut Scratch,
) {
    let layout = &unit.kv.layout;
    let head = layout.head(unit.kv.page(page), unit.kv_head);
    let few = rows.len() * unit.heads.len() <= DIRECT_QUERIES;
    let as_stored = few && layout.kv_type != KvType::F32 && layout.v_head_dim == layout.padded_v();
    let Scratch { block, queries } = scratch;
    let run = Run { rows: rows.clone(), b };
    if !as_stored {
        block.fill(level, layout, &head);
        return attend_wide(level, unit, run, block, queries);
    }
    block.fill_scales(layout, &head);
    let next = match b + 1 < end {
        true => unit.sees(rows.start, b + 1),
        false => None,
    };
    let next = next.map(|(page, _)| layout.head(unit.kv.page(page), unit.kv_head));
    match layout.kv_type {
        KvType::F16 => attend_halves(level, unit, run, Stored { head, next }, block, queries),
        _ => attend_codes(level, unit, run, Stored { head, next }, block, queries),
    }
}

/// Rows that see the same page in block `b`.
struct Run {
    rows: Range<usize>,
    b: usize,
}

/// The state of a query, or one block's part of it: `acc` `[padded_v]`, then `m` and `l`.
pub(super) fn record_len(layout: &KvLayout) -> usize {
    layout.padded_v() + 2
}

per_level! {
    /// Merges a block's record into a state's, as `attend_block` would have done.
    pub(super) fn merge_record(block: &[f32], state: &mut [f32]) = {
        #[inline(always)]
        fn body(block: &[f32], state: &mut [f32]) {
            let (acc_b, block) = block.split_at(block.len() - 2);
            let (acc, state) = state.split_at_mut(state.len() - 2);
            let (mut m, mut l, mut old, mut new) = ([state[0]], [state[1]], [0.0], [0.0]);
            merge_scalars((&mut m, &mut l), (&block[..1], &block[1..]), (&mut old, &mut new));
            state.copy_from_slice(&[m[0], l[0]]);
            for (acc, acc_b) in acc.iter_mut().zip(acc_b) {
                *acc = acc.mul_add(old[0], acc_b * new[0]);
            }
        }
        body
    }
}

per_level! {
    /// Merges the sink of a state's record, and divides: its `acc` is then the output.
    pub(super) fn finish_record(state: &mut [f32], sink: Option<f32>) = {
        #[inline(always)]
        fn body(state: &mut [f32], sink: Option<f32>) {
            let (acc, scalars) = state.split_at_mut(state.len() - 2);
            finish_query(acc, scalars[0], scalars[1], sink);
        }
        body
    }
}

per_level! {
    /// Merges the sinks, and divides: `acc` is then the output.
    fn finish(unit: &Unit, scratch: &mut Queries) = {
        #[inline(always)]
        fn body(unit: &Unit, scratch: &mut Queries) {
            let group = unit.heads.len();
            let vp = unit.kv.layout.padded_v();
            for (i, acc) in scratch.acc.chunks_exact_mut(vp).enumerate() {
                let sink = unit.params.sinks.map(|s| s[unit.heads.start + i % group]);
                finish_query(acc, scratch.m[i], scratch.l[i], sink);
            }
        }
        body
    }
}

#[inline(always)]
fn finish_query(acc: &mut [f32], m: f32, mut l: f32, sink: Option<f32>) {
    if let Some(sink) = sink {
        let max = if sink > m { sink } else { m };
        let old = exp(m - max);
        l = l.mul_add(old, exp(sink - max));
        for a in acc.iter_mut() {
            *a *= old;
        }
    }
    for a in acc.iter_mut() {
        *a /= l;
    }
}

// `per_level` runs the first two only where the machine has their registers; NEON is part of AArch64.
per_level! {
    fn attend_wide(unit: &Unit, run: Run, block: &Widened, state: &mut Queries)
        = avx512: wide_body::<std::arch::x86_64::__m512, 2, 4>,
          avx2: wide_body::<std::arch::x86_64::__m256, 4, 2>,
          portable: wide_body::<Widest, WIDEST_N, WIDEST_T>
}

per_level! {
    fn attend_halves(unit: &Unit, run: Run, stored: Stored, block: &Widened, state: &mut Queries)
        = avx512: halves_body::<std::arch::x86_64::__m512, 2, 8>,
          avx2: halves_body::<std::arch::x86_64::__m256, 4, 2>,
          portable: halves_body::<Widest, WIDEST_N, WIDEST_T>
}

per_level! {
    fn attend_codes(unit: &Unit, run: Run, stored: Stored, block: &Widened, state: &mut Queries)
        = avx512: codes_body::<std::arch::x86_64::__m512, 2, 8>,
          avx2: codes_body::<std::arch::x86_64::__m256, 4, 2>,
          portable: codes_body::<Widest, WIDEST_N, WIDEST_T>
}

#[cfg(target_arch = "aarch64")]
type Widest = std::arch::aarch64::float32x4_t;
#[cfg(target_arch = "aarch64")]
const WIDEST_N: usize = 8;
#[cfg(target_arch = "aarch64")]
const WIDEST_T: usize = 2;
#[cfg(not(target_arch = "aarch64"))]
type Widest = super::tile::Portable;
#[cfg(not(target_arch = "aarch64"))]
const WIDEST_N: usize = 4;
#[cfg(not(target_arch = "aarch64"))]
const WIDEST_T: usize = 1;

#[inline(always)]
fn wide_body<V: Lanes<N>, const N: usize, const T: usize>(
    unit: &Unit,
    run: Run,
    block: &Widened,
    state: &mut Queries,
) {
    let keys = Columns { data: &*block.keys, stride: BLOCK, next: None };
    let values = Columns { data: &*block.values, stride: unit.kv.layout.padded_v(), next: None };
    block_body::<V, f32, N, T>(unit, run, (keys, values), block, state);
}

#[inline(always)]
fn halves_body<V: Lanes<N>, const N: usize, const T: usize>(
    unit: &Unit,
    run: Run,
    stored: Stored,
    block: &Widened,
    state: &mut Queries,
) {
    block_body::<V, [u8; 2], N, T>(unit, run, stored.columns(&unit.kv.layout), block, state);
}

#[inline(always)]
fn codes_body<V: Lanes<N>, const N: usize, const T: usize>(
    unit: &Unit,
    run: Run,
    stored: Stored,
    block: &Widened,
    state: &mut Queries,
) {
    block_body::<V, [u8; 1], N, T>(unit, run, stored.columns(&unit.kv.layout), block, state);
}

/// Merges a block into the state of the queries of a run.
#[inline(always)]
fn block_body<V: Lanes<N>, E: Element, const N: usize, const T: usize>(
    unit: &Unit,
    Run { rows, b }: Run,
    (keys, values): (Columns<'_, E>, Columns<'_, E>),
    block: &Widened,
    scratch: &mut Queries,
) {
    let layout = &unit.kv.layout;
    let (hd, vp, group) = (layout.head_dim, layout.padded_v(), unit.heads.len());
    let q8 = layout.kv_type == KvType::Q8;
    let queries = rows.start * group..rows.end * group;

    // s = q . k
    let mut i = queries.start;
    while i < queries.end {
        let (q, s) = ((&scratch.q[i * hd..], hd), &mut scratch.s[i * BLOCK..]);
        i += match queries.end - i {
            8.. if T >= 8 => store(sums_of::<V, E, N, 8>(q, keys, 0..hd), s),
            4.. if T >= 4 => store(sums_of::<V, E, N, 4>(q, keys, 0..hd), s),
            3.. if T >= 4 => store(sums_of::<V, E, N, 3>(q, keys, 0..hd), s),
            2.. if T >= 2 => store(sums_of::<V, E, N, 2>(q, keys, 0..hd), s),
            _ => store(sums_of::<V, E, N, 1>(q, keys, 0..hd), s),
        };
    }

    // Scale, maximum, p = exp(s - m_b); masked positions: p = +0.
    let scale = unit.params.scale;
    for r in rows.clone() {
        let Some((_, visible)) = unit.sees(r, b) else { continue };
        for i in r * group..(r + 1) * group {
            let (s, _) =
                scratch.s[i * BLOCK..].split_first_chunk_mut::<BLOCK>().expect("a row of s");
            if q8 {
                let (k_scales, _) = block.k_scales.split_first_chunk::<BLOCK>().expect("32 scales");
                for j in 0..BLOCK {
                    s[j] = (s[j] * k_scales[j]) * scale;
                }
            } else {
                for s in s.iter_mut() {
                    *s *= scale;
                }
            }
            scratch.m_b[i] = softmax_numerators(s, visible.start as u32, visible.end as u32);
        }
    }

    // l_b, positions ascending (adding +0 changes nothing); several queries side by side.
    let mut i = queries.start;
    while i < queries.end {
        let (s, l_b) = (&scratch.s[i * BLOCK..], &mut scratch.l_b[i..]);
        i += match queries.end - i {
            8.. => column_sums::<8>(s, l_b),
            4.. => column_sums::<4>(s, l_b),
            _ => column_sums::<1>(s, l_b),
        };
    }

    // The merge's factors, and l.
    let q = queries.clone();
    let (m, l) = (&mut scratch.m[q.clone()], &mut scratch.l[q.clone()]);
    let (m_b, l_b) = (&scratch.m_b[q.clone()], &scratch.l_b[q.clone()]);
    if unit.partial {
        m.copy_from_slice(m_b);
        l.copy_from_slice(l_b);
    } else {
        let factors = (&mut scratch.old[q.clone()], &mut scratch.new[q]);
        merge_scalars((m, l), (m_b, l_b), factors);
    }

    // acc_b = p . v, merged into acc.
    if q8 {
        for s in scratch.s[queries.start * BLOCK..queries.end * BLOCK].chunks_exact_mut(BLOCK) {
            for (s, scale) in s.iter_mut().zip(block.v_scales.iter()) {
                *s *= scale;
            }
        }
    }
    let mut r = rows.start;
    while r < rows.end {
        // Rows with the same visible positions: all, in a block that none of them masks.
        let (_, visible) = unit.sees(r, b).expect("every row of a run sees the block");
        let mut same_end = r + 1;
        while same_end < rows.end && unit.sees(same_end, b).is_some_and(|(_, v)| v == visible) {
            same_end += 1;
        }
        let mut i = r * group;
        while i < same_end * group {
            let left = same_end * group - i;
            let mut n = 1;
            for d in (0..vp).step_by(BLOCK) {
                let p = (&scratch.s[i * BLOCK..], BLOCK);
                let v = values.from(d);
                let factors = (!unit.partial).then(|| (&scratch.old[i..], &scratch.new[i..]));
                let acc = &mut scratch.acc[i * vp + d..];
                let ks = visible.clone();
                n = match left {
                    8.. if T >= 8 => merge(sums_of::<V, E, N, 8>(p, v, ks), factors, acc, vp),
                    4.. if T >= 4 => merge(sums_of::<V, E, N, 4>(p, v, ks), factors, acc, vp),
                    3.. if T >= 4 => merge(sums_of::<V, E, N, 3>(p, v, ks), factors, acc, vp),
                    2.. if T >= 2 => merge(sums_of::<V, E, N, 2>(p, v, ks), factors, acc, vp),
                    _ => merge(sums_of::<V, E, N, 1>(p, v, ks), factors, acc, vp),
                };
            }
            i += n;
        }
        r = same_end;
    }
}

/// [`sums`], safely.
#[inline(always)]
fn sums_of<V: Lanes<N>, E: Element, const N: usize, const T: usize>(
    a: (&[f32], usize),
    b: Columns<'_, E>,
    ks: Range<usize>,
) -> [[f32; BLOCK]; T] {
    // SAFETY: reached from the bodies above only, which `per_level` runs with a vector type only where the
    // machine has its instructions.
    unsafe { sums::<V, E, N, T>(a, b, ks) }
}

/// Returns `T`.
#[inline(always)]
fn store<const T: usize>(sums: [[f32; BLOCK]; T], s: &mut [f32]) -> usize {
    s[..T * BLOCK].copy_from_slice(sums.as_flattened());
    T
}

/// `acc[t] = fma(acc[t], old[t], acc_b[t] * new[t])` with the factors `(old, new)`; without, `acc_b` itself. Returns
/// `T`.
#[inline(always)]
fn merge<const T: usize>(
    acc_b: [[f32; BLOCK]; T],
    factors: Option<(&[f32], &[f32])>,
    acc: &mut [f32],
    stride: usize,
) -> usize {
    for t in 0..T {
        let (acc, _) = acc[t * stride..].split_first_chunk_mut::<BLOCK>().expect("rows of 32");
        let Some((old, new)) = factors else {
            *acc = acc_b[t];
            continue;
        };
        let (old, new) = (old[t], new[t]);
        for j in 0..BLOCK {
            acc[j] = acc[j].mul_add(old, acc_b[t][j] * new);
        }
    }
    T
}

/// Maximum and denominator of each state after a block, and the factors for the accumulators: all `[n]`.
#[inline(always)]
fn merge_scalars(
    (m, l): (&mut [f32], &mut [f32]),
    (m_b, l_b): (&[f32], &[f32]),
    (old, new): (&mut [f32], &mut [f32]),
) {
    let n = m.len();
    let (l, m_b, l_b) = (&mut l[..n], &m_b[..n], &l_b[..n]);
    let (old, new) = (&mut old[..n], &mut new[..n]);
    for i in 0..n {
        let max = if m_b[i] > m[i] { m_b[i] } else { m[i] };
        old[i] = exp(m[i] - max);
        new[i] = exp(m_b[i] - max);
        m[i] = max;
        l[i] = l[i].mul_add(old[i], l_b[i] * new[i]);
    }
}

/// Replaces visible scores by `exp(s - max)`, masked ones by +0, and returns the maximum of the visible.
#[inline(always)]
fn softmax_numerators(s: &mut [f32; BLOCK], lo: u32, hi: u32) -> f32 {
    // NaN is passed over here (no comparison with it is true) and comes back out of exp.
    let mut lanes = [f32::NEG_INFINITY; BLOCK];
    for j in 0..BLOCK {
        let visible = (j as u32) >= lo && (j as u32) < hi;
        lanes[j] = if visible & (s[j] > f32::NEG_INFINITY) { s[j] } else { f32::NEG_INFINITY };
    }
    let mut half = BLOCK / 2;
    while half > 0 {
        for j in 0..half {
            let (a, b) = (lanes[j], lanes[j + half]);
            lanes[j] = if b > a { b } else { a };
        }
        half /= 2;
    }
    let max = lanes[0];
    for j in 0..BLOCK {
        let visible = (j as u32) >= lo && (j as u32) < hi;
        let p = exp(s[j] - max);
        s[j] = if visible { p } else { 0.0 };
    }
    max
}

/// `out[t]` = the sum of row `t` of `s` `[T, BLOCK]`, ascending. Returns `T`.
#[inline(always)]
fn column_sums<const T: usize>(s: &[f32], out: &mut [f32]) -> usize {
    let s = &s[..T * BLOCK];
    let mut sums = [0.0f32; T];
    for j in 0..BLOCK {
        for t in 0..T {
            sums[t] += s[t * BLOCK + j];
        }
    }
    out[..T].copy_from_slice(&sums);
    T
}
