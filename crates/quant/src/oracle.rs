//! The definition of a dot product in both precisions. Slow, plain, and the law: every kernel, on every
//! backend, gives these bits.
//!
//! `fma(a, b, c)` is `a * b + c` rounded once. All other operations are single f32 operations, rounded to nearest even;
//! denormals are kept. Sums never depend on how work was split.
//!
//! # Precision `f32`
//! The weights of a row are dequantised to f32 (`w`, see [`crate::dequant`]), activations `x` stay f32. There are
//! 16 lanes, all starting at +0. In ascending order of the element index `e`:
//! `acc[e mod 16] = fma(w[e], x[e], acc[e mod 16])`. Lanes are joined by plain adds as a tree: `acc[i] + acc[i + 8]`, of these
//! eight `i` and `i + 4`, then `i` and `i + 2`, then `i` and `i + 1`.
//! `F32`, `F16` and `BF16` weights compute like this in both precisions.
//!
//! # Precision `q8`
//! The activation row is quantised per block of 32 ([`crate::q8::Q8Block::quantize`]): a scale `as` and codes
//! `a[e]` in -127..=127; `asum = as * (sum of the codes as f32)`. Weights are unsigned codes `c[e]` with a fixed offset, a scale `ws`
//! and, in some formats, a bias `wb` ([`crate::group::Group`]). A *group* is 8 blocks; there are 8 lanes, all starting at
//! +0. In ascending order of the block index `b`, with `l = b mod 8`:
//!
//! * one scale per 32 weights: `i = sum over the block of (c[e] - offset) * a[e]`, exactly;
//!   `acc[l] = fma(i as f32, ws * as, acc[l])`; with a bias, then `acc[l] = fma(wb, asum, acc[l])`;
//! * one scale per 16 weights: first half, then second half, each with its own `i`, `ws`, `wb`, and
//!   `asum = as * (sum of the half's codes as f32)`: for each half the same one or two steps as above.
//!
//! Lanes are joined by plain adds as a tree: `i` and `i + 4`, then `i` and `i + 2`, then `i` and `i + 1`.
//! A row whose last group has fewer than 8 blocks simply has no further terms. (Kernels that work on whole
//! groups give missing blocks the scale -0 and the integer 0: adding the product -0 changes nothing, not even the sign of a
//! zero.)
//!
//! A matrix product adds its bias vector, if any, to the joined sum with one f32 add.
//! NaNs are equal whatever their payload and sign.

use crate::dequant::dequantize_row;
use crate::group::{BLOCK, Group, LANES, decode_group};
use crate::matrix::MatrixView;
use crate::q8::Q8Block;

/// Row `row` of `weight` times `x`, precision `f32`.
pub fn dot_f32(weight: &MatrixView<'_>, row: usize, x: &[f32]) -> f32 {
    assert_eq!(x.len(), weight.cols());
    let mut w = vec![0.0; x.len()];
    dequantize_row(weight, row, &mut w);
    let mut acc = [0.0f32; 16];
    for (e, (&w, &x)) in w.iter().zip(x).enumerate() {
        acc[e % 16] = w.mul_add(x, acc[e % 16]);
    }
    join(&mut acc)
}

/// Row `row` of `weight` times `x`, precision `q8`; float formats compute as in precision `f32`.
pub fn dot_q8(weight: &MatrixView<'_>, row: usize, x: &[f32]) -> f32 {
    assert_eq!(x.len(), weight.cols());
    let Some(facts) = weight.format().codes() else { return dot_f32(weight, row, x) };
    let parts = if facts.halves { 2 } else { 1 };
    let mut acc = [0.0f32; LANES];
    let mut group = Group::EMPTY;
    for (b, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
        let (g, l) = (b / LANES, b % LANES);
        if l == 0 {
            let blocks = (weight.cols() / BLOCK - b).min(LANES);
            decode_group(weight.format(), weight.group(row, g), blocks, &mut group);
        }
        let q = Q8Block::quantize(x);
        for part in 0..parts {
            let n = BLOCK / parts;
            let codes = &group.codes[l * BLOCK + part * n..][..n];
            let a = &q.codes[part * n..][..n];
            let i: i32 =
                codes.iter().zip(a).map(|(&c, &a)| (c as i32 - facts.offset) * a as i32).sum();
            acc[l] = (i as f32).mul_add(group.ws[part][l] * q.scale, acc[l]);
            if facts.bias {
                let asum = q.scale * a.iter().map(|&a| a as i32).sum::<i32>() as f32;
                acc[l] = group.wb[part][l].mul_add(asum, acc[l]);
            }
        }
    }
    join(&mut acc)
}

/// Joins lanes: halves are added onto each other until one is left.
#[inline(always)]
pub fn join(acc: &mut [f32]) -> f32 {
    let mut n = acc.len() / 2;
    while n > 0 {
        for i in 0..n {
            acc[i] += acc[i + n];
        }
        n /= 2;
    }
    acc[0]
}
