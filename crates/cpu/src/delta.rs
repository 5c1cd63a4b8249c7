//! Gated delta net: causal depthwise convolution, the delta rule, and the gated norm of its output.
//!
//! Source: Yang, Kautz, Hatamizadeh 2024 (Gated Delta Networks); `modeling_qwen3_5_moe.py` of
//! transformers, recurrent form. Rows of a sequence are worked through one after the other, whatever the
//! chunk, so that a state depends on its tokens only. A pass reads the state from before it and writes
//! the new one elsewhere: a pass that fails leaves the old one whole.
//!
//! Order of sums: convolution taps ascending; `S^T k` and `S^T q` over the key dimension ascending; L2
//! norms in 16 lanes as [`crate::ops`]. Not here: the projections around it.

use std::ops::Range;

use crate::dispatch::per_level;
use crate::ops::sum_of_squares;
use crate::pool::Pool;
use crate::rows::{Rows, RowsMut};
use crate::simd::Level;
use crate::vecmath;

/// Added to the sum of squares under the root of an L2 norm.
const L2_EPS: f32 = 1e-6;

/// Channels of one piece of work of a convolution.
const CHANNELS: usize = 256;

/// Sizes of a gated delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaShape {
    /// Key heads.
    pub n_k_heads: usize,
    /// Value heads, a multiple of the key heads.
    pub n_v_heads: usize,
    /// Width of a key head.
    pub k_dim: usize,
    /// Width of a value head.
    pub v_dim: usize,
    /// Taps of the convolution.
    pub conv_width: usize,
    /// Value head `v` uses key head `v mod n_k_heads`; otherwise `v / (n_v_heads / n_k_heads)`.
    pub tiled: bool,
}

impl DeltaShape {
    /// Channels of the convolution: `[q | k | v]`.
    pub fn channels(&self) -> usize {
        2 * self.n_k_heads * self.k_dim + self.n_v_heads * self.v_dim
    }
    /// Floats of the convolution's state: the last `conv_width - 1` inputs, `[conv_width - 1, channels]`.
    pub fn conv_state(&self) -> usize {
        (self.conv_width - 1) * self.channels()
    }
    /// Floats of the recurrent state `[n_v_heads, k_dim, v_dim]`.
    pub fn recurrent_state(&self) -> usize {
        self.n_v_heads * self.k_dim * self.v_dim
    }
    fn key_head(&self, v: usize) -> usize {
        match self.tiled {
            true => v % self.n_k_heads,
            false => v / (self.n_v_heads / self.n_k_heads),
        }
    }
}

/// `out = silu(conv(x))` over the rows of one sequence: `x` and `out` `[rows, channels]`, `taps`
/// `[conv_width, channels]` (tap 0 is the oldest input), states `[conv_width - 1, channels]`.
pub fn conv_silu(
    pool: &Pool,
    level: Level,
    taps: &[f32],
    x: Rows<'_>,
    before: &[f32],
    after: &mut [f32],
    out: RowsMut<'_>,
) {
    let (rows, channels) = (x.rows(), x.width());
    let width = taps.len() / channels;
    assert!(taps.len() == width * channels && out.rows() == rows && out.width() == channels);
    assert!(before.len() == (width - 1) * channels && after.len() == before.len());
    // Input `t` steps before row `r`.
    let input = |r: usize, t: usize| match r.checked_sub(t) {
        Some(r) => x.row(r),
        None => &before[(width - 1 + r - t) * channels..][..channels],
    };
    let (out, stride) = out.into_disjoint();
    pool.run_chunks(channels.div_ceil(CHANNELS), 1, &|parts: Range<usize>| {
        for part in parts {
            let c = part * CHANNELS..((part + 1) * CHANNELS).min(channels);
            for r in 0..rows {
                // SAFETY: a row's channels are split between parts, and each part is run once.
                let out = unsafe { out.slice(r * stride + c.start..r * stride + c.end) };
                out.fill(0.0);
                for t in (0..width).rev() {
                    let taps = &taps[(width - 1 - t) * channels..][..channels];
                    accumulate(level, &taps[c.clone()], &input(r, t)[c.clone()], out);
                }
                silu(level, out);
            }
        }
    });
    for (i, row) in after.chunks_exact_mut(channels).enumerate() {
        // The input `width - 1 - i` steps before the row after the last.
        row.copy_from_slice(input(rows, width - 1 - i));
    }
}

per_level! {
    fn accumulate(w: &[f32], x: &[f32], out: &mut [f32]) = {
        #[inline(always)]
        fn body(w: &[f32], x: &[f32], out: &mut [f32]) {
            for ((o, w), x) in out.iter_mut().zip(w).zip(x) {
                *o = w.mul_add(*x, *o);
            }
        }
        body
    }
}

per_level! {
    fn silu(x: &mut [f32]) = {
        #[inline(always)]
        fn body(x: &mut [f32]) {
            for x in x {
                *x = vecmath::silu(*x);
            }
        }
        body
    }
}

/// Inputs of the delta rule for the rows of one sequence.
#[derive(Clone, Copy, Debug)]
pub struct DeltaInput<'a> {
    /// `[rows, channels]`: q, k and v after the convolution.
    pub qkv: Rows<'a>,
    /// `[rows, n_v_heads]`
    pub a: Rows<'a>,
    /// `[rows, n_v_heads]`
    pub b: Rows<'a>,
    /// `-exp(A_log)`, `[n_v_heads]`
    pub neg_exp_a: &'a [f32],
    /// `[n_v_heads]`
    pub dt_bias: &'a [f32],
}

/// The delta rule, per value head and token, with `S` `[k_dim, v_dim]`:
/// `S *= exp(-exp(A_log) softplus(a + dt_bias)); S += k (sigmoid(b) (v - S^T k))^T; out = S^T q`; q and k
/// are L2-normed, q divided by `sqrt(k_dim)`. States `[n_v_heads, k_dim, v_dim]`, `out`
/// `[rows, n_v_heads * v_dim]`.
pub fn delta_rule(
    pool: &Pool,
    level: Level,
    shape: &DeltaShape,
    input: &DeltaInput<'_>,
    before: &[f32],
    after: &mut [f32],
    out: RowsMut<'_>,
) {
    let rows = input.qkv.rows();
    let head = shape.k_dim * shape.v_dim;
    assert!(input.qkv.width() == shape.channels() && out.rows() == rows);
    assert!(out.width() == shape.n_v_heads * shape.v_dim);
    assert!(before.len() == shape.recurrent_state() && after.len() == before.len());
    assert!(input.neg_exp_a.len() == shape.n_v_heads && input.dt_bias.len() == shape.n_v_heads);
    let (out, stride) = out.into_disjoint();
    let (after, _) = RowsMut::dense(after, head).into_disjoint();
    pool.run_chunks(shape.n_v_heads, 1, &|heads: Range<usize>| {
        for h in heads {
            // SAFETY: heads are apart, and each is run once.
            let state = unsafe { after.slice(h * head..(h + 1) * head) };
            state.copy_from_slice(&before[h * head..][..head]);
            for r in 0..rows {
                let at = r * stride + h * shape.v_dim;
                // SAFETY: a row's heads are apart, and each is run once.
                let out = unsafe { out.slice(at..at + shape.v_dim) };
                step(level, shape, input, r, h, state, out);
            }
        }
    });
}

per_level! {
    fn step(
        shape: &DeltaShape, input: &DeltaInput<'_>, r: usize, h: usize, state: &mut [f32],
        out: &mut [f32],
    ) = step_body
}

#[inline(always)]
fn step_body(
    shape: &DeltaShape,
    input: &DeltaInput<'_>,
    r: usize,
    h: usize,
    state: &mut [f32],
    out: &mut [f32],
) {
    let (dk, dv) = (shape.k_dim, shape.v_dim);
    let row = input.qkv.row(r);
    let key = shape.key_head(h) * dk;
    let q = &row[key..][..dk];
    let k = &row[shape.n_k_heads * dk + key..][..dk];
    let v = &row[2 * shape.n_k_heads * dk + h * dv..][..dv];
    let q_scale = l2_scale(q) * (1.0 / (dk as f32).sqrt());
    let k_scale = l2_scale(k);
    let step = vecmath::softplus(input.a.row(r)[h] + input.dt_bias[h]);
    let decay = vecmath::exp(input.neg_exp_a[h] * step);
    let beta = vecmath::sigmoid(input.b.row(r)[h]);
    // out = S^T k of the decayed state
    out.fill(0.0);
    for (s, k) in state.chunks_exact_mut(dv).zip(k) {
        let k = k * k_scale;
        for (s, o) in s.iter_mut().zip(out.iter_mut()) {
            *s *= decay;
            *o = s.mul_add(k, *o);
        }
    }
    // out = what the state lacks
    for (o, v) in out.iter_mut().zip(v) {
        *o = beta * (v - *o);
    }
    for (s, k) in state.chunks_exact_mut(dv).zip(k) {
        let k = k * k_scale;
        for (s, o) in s.iter_mut().zip(out.iter()) {
            *s = k.mul_add(*o, *s);
        }
    }
    out.fill(0.0);
    for (s, q) in state.chunks_exact(dv).zip(q) {
        let q = q * q_scale;
        for (s, o) in s.iter().zip(out.iter_mut()) {
            *o = s.mul_add(q, *o);
        }
    }
}

/// `1 / sqrt(sum of squares + eps)`.
#[inline(always)]
fn l2_scale(x: &[f32]) -> f32 {
    1.0 / (sum_of_squares(x) + L2_EPS).sqrt()
}

/// `x *= silu(gate)`, element by element: what follows the norm of a delta net's output.
pub fn mul_silu(pool: &Pool, level: Level, gate: &[f32], x: &mut [f32]) {
    assert!(gate.len() == x.len());
    crate::rows::for_each_chunk(pool, x, |range, x| mul_silu_body(level, &gate[range], x));
}

per_level! {
    fn mul_silu_body(gate: &[f32], x: &mut [f32]) = {
        #[inline(always)]
        fn body(gate: &[f32], x: &mut [f32]) {
            for (x, g) in x.iter_mut().zip(gate) {
                *x *= vecmath::silu(*g);
            }
        }
        body
    }
}

/// `x *= sigmoid(gate)`, element by element: the output gate of an attention layer.
pub fn mul_sigmoid(pool: &Pool, level: Level, gate: &[f32], x: &mut [f32]) {
    assert!(gate.len() == x.len());
    crate::rows::for_each_chunk(pool, x, |range, x| mul_sigmoid_body(level, &gate[range], x));
}

per_level! {
    fn mul_sigmoid_body(gate: &[f32], x: &mut [f32]) = {
        #[inline(always)]
        fn body(gate: &[f32], x: &mut [f32]) {
            for (x, g) in x.iter_mut().zip(gate) {
                *x *= vecmath::sigmoid(*g);
            }
        }
        body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: DeltaShape = DeltaShape {
        n_k_heads: 2,
        n_v_heads: 4,
        k_dim: 24,
        v_dim: 20,
        conv_width: 4,
        tiled: false,
    };

    fn random(n: usize, seed: u64) -> Vec<f32> {
        let mut x = seed.wrapping_mul(0x9e3779b97f4a7c15) | 1;
        (0..n)
            .map(|_| {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                (x >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    struct Run {
        conv: Vec<f32>,
        state: Vec<f32>,
        out: Vec<f32>,
    }

    /// Rows in chunks of `chunk`, from the given state.
    fn run(pool: &Pool, level: Level, shape: &DeltaShape, rows: usize, chunk: usize) -> Run {
        let c = shape.channels();
        let x = random(rows * c, 1);
        let taps = random(4 * c, 2);
        let (a, b) = (random(rows * 4, 3), random(rows * 4, 4));
        let neg_exp_a = [-0.5, -1.0, -0.1, -3.0];
        let dt_bias = [0.1, -0.2, 0.3, 0.0];
        let mut conv = random(shape.conv_state(), 5);
        let mut state = random(shape.recurrent_state(), 6);
        let mut out = vec![0.0; rows * 4 * shape.v_dim];
        let width = 4 * shape.v_dim;
        let mut r = 0;
        while r < rows {
            let n = chunk.min(rows - r);
            let mut mixed = vec![0.0; n * c];
            let mut conv_after = vec![0.0; conv.len()];
            let xs = Rows::dense(&x[r * c..(r + n) * c], c);
            let mixed_rows = RowsMut::dense(&mut mixed, c);
            conv_silu(pool, level, &taps, xs, &conv, &mut conv_after, mixed_rows);
            let input = DeltaInput {
                qkv: Rows::dense(&mixed, c),
                a: Rows::dense(&a[r * 4..(r + n) * 4], 4),
                b: Rows::dense(&b[r * 4..(r + n) * 4], 4),
                neg_exp_a: &neg_exp_a,
                dt_bias: &dt_bias,
            };
            let mut after = vec![0.0; state.len()];
            let rows_out = RowsMut::dense(&mut out[r * width..(r + n) * width], width);
            delta_rule(pool, level, shape, &input, &state, &mut after, rows_out);
            (conv, state) = (conv_after, after);
            r += n;
        }
        Run { conv, state, out }
    }

    fn bits(x: &[f32]) -> Vec<u32> {
        x.iter().map(|v| v.to_bits()).collect()
    }

    #[test]
    fn bits_do_not_depend_on_level_threads_or_chunk() {
        let want = run(&Pool::new(1), Level::Scalar, &SHAPE, 11, 11);
        for level in Level::available() {
            for threads in 1..=3 {
                for chunk in [1, 3, 11] {
                    let got = run(&Pool::new(threads), level, &SHAPE, 11, chunk);
                    assert_eq!(bits(&got.out), bits(&want.out), "{level} {threads} {chunk}");
                    assert_eq!(bits(&got.state), bits(&want.state), "{level} {threads} {chunk}");
                    assert_eq!(bits(&got.conv), bits(&want.conv), "{level} {threads} {chunk}");
                }
            }
        }
    }

    /// Against the formulas of the paper in f64.
    #[test]
    fn follows_the_formulas() {
        for tiled in [false, true] {
            let shape = DeltaShape { tiled, ..SHAPE };
            let rows = 5;
            let got = run(&Pool::new(1), Level::best(), &shape, rows, rows);
            let c = shape.channels();
            let x: Vec<f64> = random(rows * c, 1).iter().map(|v| *v as f64).collect();
            let taps: Vec<f64> = random(4 * c, 2).iter().map(|v| *v as f64).collect();
            let before = random(shape.conv_state(), 5);
            let (a, b) = (random(rows * 4, 3), random(rows * 4, 4));
            let neg_exp_a = [-0.5, -1.0, -0.1, -3.0];
            let dt_bias = [0.1f32, -0.2, 0.3, 0.0];
            let sigmoid = |v: f64| 1.0 / (1.0 + (-v).exp());
            let all: Vec<f64> = before.iter().map(|v| *v as f64).chain(x).collect();
            let mut state: Vec<f64> =
                random(shape.recurrent_state(), 6).iter().map(|v| *v as f64).collect();
            let (dk, dv) = (shape.k_dim, shape.v_dim);
            for r in 0..rows {
                let mixed: Vec<f64> = (0..c)
                    .map(|ch| {
                        let s: f64 = (0..4).map(|t| taps[t * c + ch] * all[(r + t) * c + ch]).sum();
                        s * sigmoid(s)
                    })
                    .collect();
                let unit = |v: &[f64]| {
                    let n = (v.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                    v.iter().map(|x| x / n).collect::<Vec<f64>>()
                };
                for h in 0..4 {
                    let kh = if tiled { h % 2 } else { h / 2 };
                    let q = unit(&mixed[kh * dk..][..dk]);
                    let k = unit(&mixed[2 * dk + kh * dk..][..dk]);
                    let v = &mixed[4 * dk + h * dv..][..dv];
                    let softplus = (1.0 + ((a[r * 4 + h] + dt_bias[h]) as f64).exp()).ln();
                    let g = (neg_exp_a[h] * softplus).exp();
                    let beta = sigmoid(b[r * 4 + h] as f64);
                    let s = &mut state[h * dk * dv..][..dk * dv];
                    s.iter_mut().for_each(|s| *s *= g);
                    for j in 0..dv {
                        let m: f64 = (0..dk).map(|i| s[i * dv + j] * k[i]).sum();
                        let d = beta * (v[j] - m);
                        for i in 0..dk {
                            s[i * dv + j] += k[i] * d;
                        }
                        let o: f64 = (0..dk).map(|i| s[i * dv + j] * q[i]).sum();
                        let o = o / (dk as f64).sqrt();
                        let got = got.out[(r * 4 + h) * dv + j] as f64;
                        // A few dozen f32 roundings of numbers below 2.
                        assert!((got - o).abs() < 2e-5, "{got} {o}");
                    }
                }
            }
        }
    }
}
