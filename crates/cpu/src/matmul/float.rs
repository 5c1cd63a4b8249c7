//! Precision `f32`: weights are dequantised a few rows and some hundred columns at a time into scratch that
//! stays in the first-level cache, then multiplied with blocks of activation rows, 16 lanes each.

use std::ops::Range;

use forebay_quant::dequant::{decode_floats, dequantize_group};
use forebay_quant::group::GROUP;
use forebay_quant::oracle::join;
use forebay_quant::{Format, MatrixView};

use super::job::Tile;

/// Vector operations on 16 f32 lanes.
///
/// # Safety
/// All functions need the instruction set of the implementing type; pointers need 16 readable (writable) floats.
pub(super) trait FloatIsa: Copy {
    type X: Copy;
    unsafe fn load(p: *const f32) -> Self::X;
    /// 16 half floats.
    unsafe fn load_f16(p: *const u8) -> Self::X;
    /// 16 bfloat16.
    unsafe fn load_bf16(p: *const u8) -> Self::X;
    unsafe fn fma(a: Self::X, b: Self::X, c: Self::X) -> Self::X;
    unsafe fn store(x: Self::X, p: *mut f32);
    /// Asks for the cache line at `p`, which need not be valid.
    #[inline(always)]
    unsafe fn prefetch(_p: *const u8) {}
}

/// Output features that are worked on together.
const FEATURES: usize = 4;
/// Columns dequantised at a time; a multiple of a group.
const COLUMNS: usize = 1024;
/// Activation rows between two dequantisations of the same weights.
const ROWS: usize = 64;

#[repr(C, align(64))]
struct Scratch {
    weights: [[f32; COLUMNS]; FEATURES],
    /// `[row][feature][lane]`
    acc: [[[f32; 16]; FEATURES]; ROWS],
}

/// Columns of some features of a quantised matrix: row `i` goes to `out + i * stride`.
#[derive(Clone)]
pub(super) struct Dequantize<'a> {
    pub weight: &'a MatrixView<'a>,
    pub features: Range<usize>,
    /// Starts at a whole group.
    pub columns: Range<usize>,
    pub stride: usize,
}

/// Dequantises the portable way.
///
/// # Safety
/// `out` has room for the columns of all features.
pub(super) unsafe fn dequantize(rows: Dequantize<'_>, out: *mut f32) {
    for (i, feature) in rows.features.enumerate() {
        for c in rows.columns.clone().step_by(GROUP) {
            let n = (rows.columns.end - c).min(GROUP);
            // SAFETY: by the contract; zeroed before it becomes a reference.
            let out = unsafe {
                let out = out.add(i * rows.stride + c - rows.columns.start);
                out.write_bytes(0, n);
                std::slice::from_raw_parts_mut(out, n)
            };
            dequantize_group(rows.weight, feature, c / GROUP, out);
        }
    }
}

/// One tile. `dequantize` fills scratch from quantised weights. `RA` activation rows share the loads of a block of weights.
///
/// # Safety
/// The instruction set of `I` must be there. Inputs and outputs were checked by `run_jobs`.
#[inline(always)]
pub(super) unsafe fn tile<I: FloatIsa, const RA: usize>(
    tile: &Tile<'_>,
    data: &[f32],
    stride: usize,
    dequantize: unsafe fn(Dequantize<'_>, *mut f32),
) {
    let (weight, rows) = (&tile.job.weight, tile.job.rows);
    let cols = weight.cols();
    let mut scratch = std::mem::MaybeUninit::<Scratch>::uninit();
    let s = scratch.as_mut_ptr();
    for row0 in (0..rows.len()).step_by(ROWS) {
        let n = (rows.len() - row0).min(ROWS);
        let x: [*const f32; ROWS] = std::array::from_fn(|i| {
            let row = rows.get(row0 + i.min(n - 1)).0;
            data[row * stride..][..cols].as_ptr()
        });
        for f0 in tile.features.clone().step_by(FEATURES) {
            let n_features = (tile.features.end - f0).min(FEATURES);
            // SAFETY: plain floats in our own scratch; zero bytes are 0.0.
            let (weights, acc) = unsafe {
                (&raw mut (*s).acc).cast::<[[f32; 16]; FEATURES]>().write_bytes(0, n);
                (&raw mut (*s).weights, (&raw mut (*s).acc).cast::<[[f32; 16]; FEATURES]>())
            };
            for c0 in (0..cols).step_by(COLUMNS) {
                let c1 = (c0 + COLUMNS).min(cols);
                let quantized = weight.format().is_quantized();
                if quantized {
                    let (features, columns) = (f0..f0 + n_features, c0..c1);
                    let rows = Dequantize { weight, features, columns, stride: COLUMNS };
                    // SAFETY: `weights` has room for COLUMNS floats per feature.
                    unsafe { dequantize(rows, weights.cast()) }
                }
                let mut w = [std::ptr::null(); FEATURES];
                for (i, w) in w.iter_mut().enumerate() {
                    let i = i.min(n_features - 1);
                    // SAFETY: as above.
                    *w = unsafe {
                        let out = (&raw mut (*weights)[i]).cast::<f32>();
                        if quantized { out } else { load_floats::<I>(weight, f0 + i, c0, c1, out) }
                    };
                }
                let mut r = 0;
                while r < n {
                    // SAFETY: rows of x and w hold the columns c0..c1, acc the rows r.. below n.
                    unsafe {
                        let acc = acc.add(r);
                        if r + RA <= n {
                            let x = std::array::from_fn::<_, RA, _>(|i| x[r + i].add(c0));
                            block::<I, RA>(w, x, c1 - c0, acc);
                            r += RA;
                        } else {
                            block::<I, 1>(w, [x[r].add(c0)], c1 - c0, acc);
                            r += 1;
                        }
                    }
                }
            }
            for r in 0..n {
                for i in 0..n_features {
                    // SAFETY: acc of row r was written above; feature and row are the tile's.
                    unsafe {
                        let mut lanes = (*acc.add(r))[i];
                        tile.write(rows.get(row0 + r).1, f0 + i, join(&mut lanes));
                    }
                }
            }
        }
    }
}

/// Columns `c0..c1` of a row of a float matrix as f32: in place if they are that already, else in `out`.
///
/// # Safety
/// `out` has room for them.
#[inline(always)]
unsafe fn load_floats<I: FloatIsa>(
    weight: &MatrixView<'_>,
    feature: usize,
    c0: usize,
    c1: usize,
    out: *mut f32,
) -> *const f32 {
    let format = weight.format();
    let size = if format == Format::F32 { 4 } else { 2 };
    let bytes = &weight.row(0, feature)[c0 * size..c1 * size];
    // What will be read next is the same place some features on, which the hardware cannot guess.
    let ahead = bytes.as_ptr().wrapping_add(FEATURES * weight.plane(0).stride);
    for line in 0..bytes.len().div_ceil(64) {
        // SAFETY: prefetching reads nothing.
        unsafe { I::prefetch(ahead.wrapping_add(64 * line)) }
    }
    if format == Format::F32 && cfg!(target_endian = "little") {
        return bytes.as_ptr().cast();
    }
    let (n, whole) = (c1 - c0, (c1 - c0) / 16 * 16);
    // SAFETY: `out` has room for n; 16 weights take 32 of the `bytes`. The rest is zeroed before it becomes a
    // reference.
    unsafe {
        for i in (0..whole).step_by(16) {
            let p = bytes.as_ptr().add(2 * i);
            let x = if format == Format::F16 { I::load_f16(p) } else { I::load_bf16(p) };
            I::store(x, out.add(i));
        }
        if whole < n {
            out.add(whole).write_bytes(0, n - whole);
            let rest = std::slice::from_raw_parts_mut(out.add(whole), n - whole);
            decode_floats(format, &bytes[2 * whole..], rest);
        }
    }
    out
}

/// Adds `n` columns of 4 features times `RA` rows to their lanes.
///
/// # Safety
/// All pointers have `n` readable floats, at any alignment; `acc` has `RA` rows.
#[inline(always)]
unsafe fn block<I: FloatIsa, const RA: usize>(
    w: [*const f32; FEATURES],
    x: [*const f32; RA],
    n: usize,
    acc: *mut [[f32; 16]; FEATURES],
) {
    // SAFETY: by the contract; full steps stay below n, the rest goes through padded copies.
    unsafe {
        let acc = acc.cast::<f32>();
        let mut sums = [[I::load(acc); FEATURES]; RA];
        for r in 0..RA {
            for f in 0..FEATURES {
                sums[r][f] = I::load(acc.add((r * FEATURES + f) * 16));
            }
        }
        let mut c = 0;
        while c + 16 <= n {
            let mut ws = [I::load(w[0].add(c)); FEATURES];
            for f in 1..FEATURES {
                ws[f] = I::load(w[f].add(c));
            }
            for r in 0..RA {
                let x = I::load(x[r].add(c));
                for f in 0..FEATURES {
                    sums[r][f] = I::fma(ws[f], x, sums[r][f]);
                }
            }
            c += 16;
        }
        if c < n {
            // Missing weights are -0: adding the product (-0 * 0) changes nothing.
            for r in 0..RA {
                let x = padded(x[r].add(c), n - c, 0.0);
                let x = I::load(x.as_ptr());
                for f in 0..FEATURES {
                    let w = padded(w[f].add(c), n - c, -0.0);
                    sums[r][f] = I::fma(I::load(w.as_ptr()), x, sums[r][f]);
                }
            }
        }
        for r in 0..RA {
            for f in 0..FEATURES {
                I::store(sums[r][f], acc.add((r * FEATURES + f) * 16));
            }
        }
    }
}

/// `n` floats at `p`, then `fill`.
///
/// # Safety
/// `p` has `n` readable floats, at any alignment.
#[inline(always)]
unsafe fn padded(p: *const f32, n: usize, fill: f32) -> [f32; 16] {
    let mut lanes = [fill; 16];
    for (i, lane) in lanes.iter_mut().enumerate().take(n) {
        // SAFETY: by the contract.
        *lane = unsafe { p.add(i).read_unaligned() };
    }
    lanes
}
