//! The integer kernel: tiles of output features times activation rows, for any instruction set and format.
#![cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]

use std::mem::MaybeUninit;

use forebay_quant::group::{BLOCK, GROUP, LANES};
use forebay_quant::{MatrixView, Q8Group, Q8Rows};

use super::decode::{Decoded, Decoder};
use super::isa::{Folded, Isa, RowPtrs};
use super::job::Tile;

/// Activation rows between two decodings of the same weights.
const ROWS: usize = 32;
/// So many rows and fewer are not worth the blocks of [`many_rows`]: weights from memory cost more than they do.
const FEW: usize = 8;
/// Output features whose lane sums are kept at once.
const FEATURES: usize = 16;
/// How many bytes ahead weights are prefetched, at least; in whole features, because what is read next is the
/// same place some rows on.
const AHEAD: usize = 6 << 10;
/// The same in features.
const AHEAD_FEATURES: [usize; 2] = [4, 32];
/// Most bytes that a group takes in one plane.
const MAX_GROUP_BYTES: usize = 288;

/// Picks the decoder of a format and hands it to `$run`, a function generic over decoders.
macro_rules! with_decoder {
    ($format:expr, $run:ident :: <_ $(, $n:literal)*> ($($arg:expr),*)) => {{
        use forebay_quant::grid;
        use $crate::matmul::decode::*;
        let format: forebay_quant::Format = $format;
        match format {
            Format::Q8_0 => $run::<_ $(, $n)*>(&Q8_0, $($arg),*),
            Format::Q4_0 => $run::<_ $(, $n)*>(&Q4_0, $($arg),*),
            Format::Q4_1 => $run::<_ $(, $n)*>(&Q4_1, $($arg),*),
            Format::Q5_0 => $run::<_ $(, $n)*>(&Q5_0, $($arg),*),
            Format::Q5_1 => $run::<_ $(, $n)*>(&Q5_1, $($arg),*),
            Format::Q2K => $run::<_ $(, $n)*>(&Q2K, $($arg),*),
            Format::Q3K => $run::<_ $(, $n)*>(&Q3K, $($arg),*),
            Format::Q4K => $run::<_ $(, $n)*>(&Q4K, $($arg),*),
            Format::Q5K => $run::<_ $(, $n)*>(&Q5K, $($arg),*),
            Format::Q6K => $run::<_ $(, $n)*>(&Q6K, $($arg),*),
            Format::Mxfp4 => $run::<_ $(, $n)*>(&Mxfp4, $($arg),*),
            Format::Mxfp4Split => $run::<_ $(, $n)*>(&Mxfp4Split, $($arg),*),
            Format::Iq4Nl => $run::<_ $(, $n)*>(&Iq4Nl, $($arg),*),
            Format::Iq4Xs => $run::<_ $(, $n)*>(&Iq4Xs, $($arg),*),
            Format::Iq1S => $run::<_ $(, $n)*>(&Grid(grid::Iq1S), $($arg),*),
            Format::Iq1M => $run::<_ $(, $n)*>(&Grid(grid::Iq1M), $($arg),*),
            Format::Iq2Xxs => $run::<_ $(, $n)*>(&Grid(grid::Iq2Xxs), $($arg),*),
            Format::Iq2Xs => $run::<_ $(, $n)*>(&Grid(grid::Iq2Xs), $($arg),*),
            Format::Iq2S => $run::<_ $(, $n)*>(&Grid(grid::Iq2S), $($arg),*),
            Format::Iq3Xxs => $run::<_ $(, $n)*>(&Grid(grid::Iq3Xxs), $($arg),*),
            Format::Iq3S => $run::<_ $(, $n)*>(&Grid(grid::Iq3S), $($arg),*),
            Format::MlxAffine { bits: 2, group, params } => {
                $run::<_ $(, $n)*>(&Mlx::<2> { group: group as usize, params }, $($arg),*)
            }
            Format::MlxAffine { bits: 3, group, params } => {
                $run::<_ $(, $n)*>(&Mlx::<3> { group: group as usize, params }, $($arg),*)
            }
            Format::MlxAffine { bits: 4, group, params } => {
                $run::<_ $(, $n)*>(&Mlx::<4> { group: group as usize, params }, $($arg),*)
            }
            Format::MlxAffine { bits: 5, group, params } => {
                $run::<_ $(, $n)*>(&Mlx::<5> { group: group as usize, params }, $($arg),*)
            }
            Format::MlxAffine { bits: 6, group, params } => {
                $run::<_ $(, $n)*>(&Mlx::<6> { group: group as usize, params }, $($arg),*)
            }
            Format::MlxAffine { bits: 8, group, params } => {
                $run::<_ $(, $n)*>(&Mlx::<8> { group: group as usize, params }, $($arg),*)
            }
            format => {
                let facts = format.codes().expect("checked: quantised");
                let offset = facts.offset;
                match (facts.halves, facts.bias) {
                    (false, false) => $run(&Portable::<false, false> { format, offset }, $($arg),*),
                    (false, true) => $run(&Portable::<false, true> { format, offset }, $($arg),*),
                    (true, false) => $run(&Portable::<true, false> { format, offset }, $($arg),*),
                    (true, true) => $run(&Portable::<true, true> { format, offset }, $($arg),*),
                }
            }
        }
    }};
}
pub(super) use with_decoder;

/// One tile. A vector holds `I::ROWS` features; `ONE` vectors are worked on together
/// for one activation row, and `MANY` are kept in registers over many.
///
/// # Safety
/// The instruction set of `I` must be there. Inputs and outputs were checked by `run_jobs`.
#[inline(always)]
pub(super) unsafe fn tile<I: Isa, D: Decoder<I>, const ONE: usize, const MANY: usize>(
    decoder: &D,
    tile: &Tile<'_>,
    q: &Q8Rows,
) {
    // SAFETY: as the caller's.
    unsafe {
        let rows = tile.job.rows;
        if rows.len() == 1 {
            return one_row::<I, D, ONE>(decoder, tile, q.row(rows.get(0).0), rows.get(0).1);
        }
        if rows.len() <= FEW {
            return few_rows::<I, D>(decoder, tile, q);
        }
        for row0 in (0..rows.len()).step_by(ROWS) {
            many_rows::<I, D, MANY>(decoder, tile, q, row0, (rows.len() - row0).min(ROWS));
        }
    }
}

/// Pointers to the first group of `I::ROWS` features, in each plane.
#[derive(Clone, Copy)]
pub(super) struct Features {
    planes: [RowPtrs; 3],
}

impl Features {
    /// Features `first..first + I::ROWS`; those from `end` on are replaced by the last.
    #[inline(always)]
    pub(super) fn new<I: Isa>(weight: &MatrixView<'_>, first: usize, end: usize) -> Features {
        let last = end - 1;
        let mut planes = [[std::ptr::null(); 2]; 3];
        for (p, rows) in planes.iter_mut().enumerate() {
            let plane = weight.plane(p);
            for (r, row) in rows.iter_mut().enumerate().take(I::ROWS) {
                *row = plane.data.as_ptr().wrapping_add((first + r).min(last) * plane.stride);
            }
        }
        Features { planes }
    }

    #[inline(always)]
    fn offset(&self, bytes: [usize; 3]) -> [RowPtrs; 3] {
        let mut planes = self.planes;
        for (rows, bytes) in planes.iter_mut().zip(bytes) {
            for row in rows {
                *row = row.wrapping_add(bytes);
            }
        }
        planes
    }

    #[inline(always)]
    pub(super) fn group(&self, g: usize, [a, b, c]: [usize; 3]) -> [RowPtrs; 3] {
        self.offset([g * a, g * b, g * c])
    }

    /// Decodes the last group of a row, which has only `blocks` blocks: nothing behind it is read.
    #[inline(always)]
    pub(super) unsafe fn decode_tail<I: Isa, D: Decoder<I>>(
        &self,
        decoder: &D,
        weight: &MatrixView<'_>,
        bytes: [usize; 3],
        blocks: usize,
    ) -> Decoded<I> {
        // SAFETY: the row's last 8 blocks are there if it has so many; if not, what there is fits the buffer.
        unsafe {
            let mut w = if weight.cols() >= GROUP {
                // The last 8 blocks, turned so that the last `blocks` of them come first.
                let mut start = [0; 3];
                for p in 0..3 {
                    start[p] = weight.row_bytes(p) - bytes[p];
                }
                let mut w = decoder.decode(self.offset(start));
                for code in &mut w.codes {
                    *code = I::rotate(*code, LANES - blocks);
                }
                for half in 0..2 {
                    w.ws[half] = I::rotate_f32(w.ws[half], LANES - blocks);
                    w.wb[half] = I::rotate_f32(w.wb[half], LANES - blocks);
                }
                w
            } else {
                let mut padded = [[[0u8; MAX_GROUP_BYTES]; 2]; 3];
                let mut rows = [[std::ptr::null(); 2]; 3];
                for p in 0..3 {
                    for r in 0..I::ROWS {
                        let to = padded[p][r].as_mut_ptr();
                        rows[p][r] = to.cast_const();
                        if weight.row_bytes(p) > 0 {
                            to.copy_from_nonoverlapping(self.planes[p][r], weight.row_bytes(p));
                        }
                    }
                }
                decoder.decode(rows)
            };
            for half in 0..2 {
                w.ws[half] = I::keep_blocks(w.ws[half], blocks);
                w.wb[half] = I::keep_blocks(w.wb[half], blocks);
            }
            w
        }
    }
}

/// Adds one group to the lanes.
#[inline(always)]
unsafe fn add_group<I: Isa, D: Decoder<I>>(
    decoder: &D,
    w: &Decoded<I>,
    a: *const Q8Group,
    acc: I::F,
) -> I::F {
    let (facts, offset) = (D::FACTS, decoder.offset());
    // SAFETY: a points to a group of activations.
    unsafe {
        let scale = I::act_f32(&raw const (*a).scale);
        let sum = I::act_i32(&raw const (*a).sum);
        if !facts.halves {
            let dot = I::dot::<8>(&w.codes, 0, offset, facts.max_code, a, sum);
            return add_dot(w, dot, a, facts.bias, acc);
        }
        let first = I::act_i32(&raw const (*a).sum_first);
        let sums = [first, I::sub(sum, first)];
        let mut acc = acc;
        for half in 0..2 {
            let dot = I::dot::<4>(&w.codes, 4 * half, offset, facts.max_code, a, sums[half]);
            acc = I::fma(I::to_f32(dot), I::mul(w.ws[half], scale), acc);
            if facts.bias {
                let asum = I::mul(scale, I::to_f32(sums[half]));
                acc = I::fma(w.wb[half], asum, acc);
            }
        }
        acc
    }
}

/// Adds the integer sums of a group's blocks, scaled, to the lanes; for formats with one scale a block.
#[inline(always)]
unsafe fn add_dot<I: Isa>(
    w: &Decoded<I>,
    dot: I::I,
    a: *const Q8Group,
    bias: bool,
    acc: I::F,
) -> I::F {
    // SAFETY: a points to a group of activations.
    unsafe {
        let scale = I::act_f32(&raw const (*a).scale);
        let acc = I::fma(I::to_f32(dot), I::mul(w.ws[0], scale), acc);
        match bias {
            true => I::fma(w.wb[0], I::act_f32(&raw const (*a).asum), acc),
            false => acc,
        }
    }
}

/// Whole groups of a row, and blocks of a shorter last one.
#[inline(always)]
pub(super) fn groups_of<I: Isa, D: Decoder<I>>(cols: usize) -> (usize, usize) {
    // A constant where there is none, so that nothing is compiled for it.
    (cols / GROUP, if D::TAIL { cols % GROUP / BLOCK } else { 0 })
}

/// Where the features of a vector lie, and those that are read `by` features later, maybe in the tile behind this one.
struct Stream<'a> {
    weight: &'a MatrixView<'a>,
    end: usize,
    next: Option<(&'a MatrixView<'a>, usize)>,
    by: usize,
}

impl<'a> Stream<'a> {
    fn new(tile: &Tile<'a>, by: usize) -> Stream<'a> {
        Stream { weight: &tile.job.weight, end: tile.features.end, next: tile.next, by }
    }

    /// For vectors that are read one after the other.
    fn by_vectors(tile: &Tile<'a>) -> Stream<'a> {
        let weight = &tile.job.weight;
        let row_bytes: usize = (0..weight.n_planes()).map(|p| weight.row_bytes(p)).sum();
        let [least, most] = AHEAD_FEATURES;
        let by = AHEAD.div_ceil(row_bytes.max(1)).clamp(least, most).next_multiple_of(2);
        Stream::new(tile, by)
    }

    #[inline(always)]
    fn here<I: Isa>(&self, first: usize) -> Features {
        Features::new::<I>(self.weight, first, self.end)
    }

    #[inline(always)]
    fn ahead<I: Isa>(&self, first: usize) -> Features {
        let first = first + self.by;
        match self.next {
            Some((next, start)) if first >= self.end => {
                Features::new::<I>(next, start + first - self.end, next.rows())
            }
            _ => Features::new::<I>(self.weight, first, self.end),
        }
    }
}

/// One activation row: the weights stream through, lane sums stay in registers.
#[inline(always)]
unsafe fn one_row<I: Isa, D: Decoder<I>, const NV: usize>(
    decoder: &D,
    tile: &Tile<'_>,
    a: &[Q8Group],
    out_row: usize,
) {
    let weight = &tile.job.weight;
    let bytes = weight.format().group_bytes();
    let (whole, rest) = groups_of::<I, D>(weight.cols());
    let stream = Stream::by_vectors(tile);
    // SAFETY: groups lie within the rows, activations have as many.
    unsafe {
        for f0 in tile.features.clone().step_by(NV * I::ROWS) {
            let mut ptrs = [Features { planes: [[std::ptr::null(); 2]; 3] }; NV];
            let mut ahead = ptrs;
            for v in 0..NV {
                ptrs[v] = stream.here::<I>(f0 + v * I::ROWS);
                ahead[v] = stream.ahead::<I>(f0 + v * I::ROWS);
            }
            let mut acc = [I::zero(); NV];
            for g in 0..whole {
                for v in 0..NV {
                    prefetch::<I, D>(ahead[v].group(g, bytes));
                    let w = decoder.decode(ptrs[v].group(g, bytes));
                    acc[v] = add_group(decoder, &w, a.as_ptr().add(g), acc[v]);
                }
            }
            if rest > 0 {
                for v in 0..NV {
                    let w = ptrs[v].decode_tail(decoder, weight, bytes, rest);
                    acc[v] = add_group(decoder, &w, a.as_ptr().add(whole), acc[v]);
                }
            }
            for v in 0..NV {
                write::<I>(tile, out_row, f0 + v * I::ROWS, acc[v]);
            }
        }
    }
}

/// As many activation rows as a speculated block or a few sequences have: the weights stream through as for one row,
/// each group is decoded once, and the lane sums of one vector of features wait in the nearest cache.
#[inline(always)]
unsafe fn few_rows<I: Isa, D: Decoder<I>>(decoder: &D, tile: &Tile<'_>, q: &Q8Rows) {
    let (weight, rows) = (&tile.job.weight, tile.job.rows);
    let (n, bytes) = (rows.len().min(FEW), weight.format().group_bytes());
    let (whole, rest) = groups_of::<I, D>(weight.cols());
    let a: [*const Q8Group; FEW] =
        std::array::from_fn(|r| q.row(rows.get(r.min(n - 1)).0).as_ptr());
    let stream = Stream::by_vectors(tile);
    // SAFETY: as `one_row`.
    unsafe {
        for first in tile.features.clone().step_by(I::ROWS) {
            let (ptrs, ahead) = (stream.here::<I>(first), stream.ahead::<I>(first));
            let mut acc = [I::zero(); FEW];
            for g in 0..whole {
                prefetch::<I, D>(ahead.group(g, bytes));
                let w = decoder.decode(ptrs.group(g, bytes));
                for (a, acc) in a.iter().zip(&mut acc[..n]) {
                    *acc = add_group(decoder, &w, a.add(g), *acc);
                }
            }
            if rest > 0 {
                let w = ptrs.decode_tail(decoder, weight, bytes, rest);
                for (a, acc) in a.iter().zip(&mut acc[..n]) {
                    *acc = add_group(decoder, &w, a.add(whole), *acc);
                }
            }
            for (r, acc) in acc[..n].iter().enumerate() {
                write::<I>(tile, rows.get(r).1, first, *acc);
            }
        }
    }
}

/// Asks for a group of each row.
#[inline(always)]
unsafe fn prefetch<I: Isa, D: Decoder<I>>(planes: [RowPtrs; 3]) {
    for p in 0..3 {
        for r in 0..I::ROWS {
            for line in 0..D::PREFETCH[p].div_ceil(64) {
                // SAFETY: prefetching reads nothing.
                unsafe { I::prefetch(planes[p][r].wrapping_add(64 * line)) }
            }
        }
    }
}

/// Joins and writes the features of one vector.
#[inline(always)]
unsafe fn write<I: Isa>(tile: &Tile<'_>, out_row: usize, first: usize, acc: I::F) {
    // SAFETY: only features of the tile are written.
    unsafe {
        let dots = I::join(acc);
        for (i, dot) in dots.into_iter().enumerate().take(I::ROWS) {
            if first + i < tile.features.end {
                tile.write(out_row, first + i, dot);
            }
        }
    }
}

/// Lane sums `[vector of features][activation row]`, each `I::ROWS * 8` floats.
#[repr(C, align(64))]
struct Sums([f32; ROWS * FEATURES * LANES]);

/// `n` activation rows from `row0` on: each group of weights is decoded once for all of them.
#[inline(always)]
unsafe fn many_rows<I: Isa, D: Decoder<I>, const NV: usize>(
    decoder: &D,
    tile: &Tile<'_>,
    q: &Q8Rows,
    row0: usize,
    n: usize,
) {
    let (weight, rows) = (&tile.job.weight, tile.job.rows);
    let (bytes, end) = (weight.format().group_bytes(), tile.features.end);
    let (whole, rest) = groups_of::<I, D>(weight.cols());
    let a: [*const Q8Group; ROWS] =
        std::array::from_fn(|r| q.row(rows.get(row0 + r.min(n - 1)).0).as_ptr());
    let mut folded = [MaybeUninit::<Folded>::uninit(); ROWS];
    let mut sums = MaybeUninit::<Sums>::uninit();
    let sums = sums.as_mut_ptr().cast::<f32>();
    let width = I::ROWS * LANES;
    let stream = Stream::new(tile, FEATURES);
    // SAFETY: groups lie within the rows, activations have as many; `sums` has room for
    // FEATURES * LANES floats for each row; what the first group writes the others read.
    unsafe {
        for f0 in tile.features.clone().step_by(FEATURES) {
            let n_features = (tile.features.end - f0).min(FEATURES);
            let n_sub = n_features.div_ceil(NV * I::ROWS);
            if weight.cols() == 0 {
                sums.write_bytes(0, n_sub * NV * n * width);
            }
            let ptrs: [Features; FEATURES] =
                std::array::from_fn(|v| Features::new::<I>(weight, f0 + v * I::ROWS, end));
            let ahead: [Features; FEATURES] =
                std::array::from_fn(|v| stream.ahead::<I>(f0 + v * I::ROWS));
            // A last group of one or two blocks has a shorter way.
            let folds = I::FOLDS && D::TAIL && !D::FACTS.halves && (1..=2).contains(&rest);
            for g in 0..whole + (rest > 0 && !folds) as usize {
                for sub in 0..n_sub {
                    let mut w = [MaybeUninit::<Decoded<I>>::uninit(); NV];
                    for v in 0..NV {
                        let p = &ptrs[sub * NV + v];
                        if row0 == 0 {
                            prefetch::<I, D>(ahead[sub * NV + v].group(g, bytes));
                        }
                        w[v].write(if !D::TAIL || g < whole {
                            decoder.decode(p.group(g, bytes))
                        } else {
                            p.decode_tail(decoder, weight, bytes, rest)
                        });
                    }
                    let mut acc = sums.add(sub * NV * n * width);
                    for a in &a[..n] {
                        let a = a.add(g);
                        let mut new = [I::zero(); NV];
                        for v in 0..NV {
                            let old =
                                if g == 0 { I::zero() } else { I::load_acc(acc.add(v * width)) };
                            new[v] = add_group(decoder, w[v].assume_init_ref(), a, old);
                        }
                        for v in 0..NV {
                            I::store_acc(new[v], acc.add(v * width));
                        }
                        acc = acc.add(NV * width);
                    }
                }
            }
            if folds {
                if f0 == tile.features.start {
                    for r in 0..n {
                        folded[r].write(Folded::of(&*a[r].add(whole)));
                    }
                }
                let tail = FoldedTail { whole, rest, rows: &a[..n], folded: &folded[..n] };
                tail.add::<I, D, NV>(decoder, weight, &ptrs[..n_sub * NV], sums);
            }
            if n_features == FEATURES {
                for r in 0..n {
                    let mut acc = [std::ptr::null(); FEATURES];
                    for i in 0..FEATURES / I::ROWS {
                        acc[i] = sums.add(((i / NV * n + r) * NV + i % NV) * width).cast_const();
                    }
                    tile.write16(rows.get(row0 + r).1, f0, I::join16(acc));
                }
                continue;
            }
            for sub in 0..n_sub {
                for r in 0..n {
                    for v in 0..NV {
                        let acc = I::load_acc(sums.add(((sub * n + r) * NV + v) * width));
                        let first = f0 + (sub * NV + v) * I::ROWS;
                        write::<I>(tile, rows.get(row0 + r).1, first, acc);
                    }
                }
            }
        }
    }
}

/// The last group of activation rows where it has one or two blocks only: two such blocks of weights go into one product.
struct FoldedTail<'a> {
    /// Groups before it, and its blocks.
    whole: usize,
    rest: usize,
    /// First groups of the activation rows.
    rows: &'a [*const Q8Group],
    /// Their last groups, folded.
    folded: &'a [MaybeUninit<Folded>],
}

impl FoldedTail<'_> {
    /// Adds its products with some vectors of features to the lane sums `[vectors / NV][rows][NV]`.
    ///
    /// # Safety
    /// The instruction set of `I` must be there; `rows` have a group behind `whole`, which is in `folded`; `sums` has
    /// room, and holds the sums of the groups before unless there are none.
    #[inline(always)]
    unsafe fn add<I: Isa, D: Decoder<I>, const NV: usize>(
        &self,
        decoder: &D,
        weight: &MatrixView<'_>,
        features: &[Features],
        sums: *mut f32,
    ) {
        let (whole, rest, n) = (self.whole, self.rest, self.rows.len());
        let (bytes, width) = (weight.format().group_bytes(), I::ROWS * LANES);
        // SAFETY: as the caller says.
        unsafe {
            for (i, features) in features.iter().enumerate() {
                let (sub, v) = (i / NV, i % NV);
                let w = features.decode_tail(decoder, weight, bytes, rest);
                let codes = I::fold(&w.codes);
                for r in 0..n {
                    let acc = sums.add(((sub * n + r) * NV + v) * width);
                    let old = if whole == 0 { I::zero() } else { I::load_acc(acc) };
                    let a = self.rows[r].add(whole);
                    let sum = I::act_i32(&raw const (*a).sum);
                    let folded = self.folded[r].assume_init_ref();
                    let dot = I::dot_folded(&codes, rest, decoder.offset(), folded, sum);
                    I::store_acc(add_dot(&w, dot, a, D::FACTS.bias, old), acc);
                }
            }
        }
    }
}
