//! What lies between the matrix products: norms, rotary embedding, activations, routing, combining.
//!
//! Matrices of activations are [`Rows`] and [`RowsMut`], `[rows, width]` with a stride; every row is
//! computed by itself, so its bits do not depend on its neighbours. Flat element-wise operations take
//! slices. The order of every sum is written at its function.
//!
//! Not here: softmax attention ([`crate::attention`]), products with weights ([`crate::matmul`]).

use forebay_models::spec::{Activation, RopePairs, Score};

use crate::dispatch::per_level;
use crate::pool::Pool;
use crate::rows::{Rows, RowsMut, for_each_chunk};
use crate::simd::Level;
use crate::vecmath;

/// Lanes of a sum over a row: element `i` goes to lane `i mod 16`.
pub(crate) const LANES: usize = 16;

/// Joins the lanes in a fixed tree: `(i, i + 8)`, `(i, i + 4)`, `(i, i + 2)`, `(0, 1)`.
#[inline(always)]
pub(crate) fn join(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Sum of `x^2`: squares by fma in 16 lanes, then [`join`].
#[inline(always)]
pub(crate) fn sum_of_squares(x: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (chunks, tail) = x.as_chunks::<LANES>();
    for c in chunks {
        for i in 0..LANES {
            lanes[i] = c[i].mul_add(c[i], lanes[i]);
        }
    }
    for (lane, v) in lanes.iter_mut().zip(tail) {
        *lane = v.mul_add(*v, *lane);
    }
    join(lanes)
}

/// `1 / sqrt(mean(x^2) + eps)`.
#[inline(always)]
fn rms_scale(x: &[f32], eps: f32) -> f32 {
    1.0 / (sum_of_squares(x) / x.len() as f32 + eps).sqrt()
}

#[inline(always)]
fn rms_norm_row_body(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
    let scale = rms_scale(x, eps);
    match weight {
        Some(w) => {
            for ((o, x), w) in out.iter_mut().zip(x).zip(w) {
                *o = (x * scale) * w;
            }
        }
        None => {
            for (o, x) in out.iter_mut().zip(x) {
                *o = x * scale;
            }
        }
    }
}

/// The same in place, head by head.
#[inline(always)]
fn rms_norm_heads_body(x: &mut [f32], head_dim: usize, weight: Option<&[f32]>, eps: f32) {
    for head in x.chunks_exact_mut(head_dim) {
        let scale = rms_scale(head, eps);
        match weight {
            Some(w) => {
                for (x, w) in head.iter_mut().zip(w) {
                    *x = (*x * scale) * w;
                }
            }
            None => {
                for x in head.iter_mut() {
                    *x *= scale;
                }
            }
        }
    }
}

per_level! {
    fn rms_norm_row(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) = rms_norm_row_body
}
per_level! {
    fn rms_norm_heads_row(x: &mut [f32], head_dim: usize, weight: Option<&[f32]>, eps: f32)
        = rms_norm_heads_body
}

/// RMSNorm of every row: `out = (x * s) * w` with `s = 1 / sqrt(mean(x^2) + eps)`. `x` and `out`
/// `[rows, d]`, `weight` `[d]` (with the 1 already added where a family stores `w - 1`), none means 1.
pub fn rms_norm(
    pool: &Pool,
    level: Level,
    x: Rows,
    weight: Option<&[f32]>,
    eps: f32,
    out: RowsMut,
) {
    assert!(x.rows() == out.rows() && x.width() == out.width());
    assert!(weight.is_none_or(|w| w.len() == x.width()));
    out.for_each_row(pool, |r, out| rms_norm_row(level, x.row(r), weight, eps, out));
}

/// [`rms_norm`] in place of every `head_dim` floats of every row: `x` `[rows, heads * head_dim]`,
/// `weight` `[head_dim]`. With `head_dim` = width it norms whole rows.
pub fn rms_norm_heads(
    pool: &Pool,
    level: Level,
    x: RowsMut,
    head_dim: usize,
    weight: Option<&[f32]>,
    eps: f32,
) {
    assert!(head_dim > 0 && x.width().is_multiple_of(head_dim));
    assert!(weight.is_none_or(|w| w.len() == head_dim));
    x.for_each_row(pool, |_, row| rms_norm_heads_row(level, row, head_dim, weight, eps));
}

/// Cosines and sines of a rotary table: `cos`, `sin` `[rows, pairs]`, `inv_freq` `[pairs]`.
///
/// The angle is the f32 product `position * inv_freq` (as the reference implementations compute it);
/// its cosine and sine are evaluated in f64, rounded to f32, then multiplied by `factor` in f32.
pub fn rope_angles(
    level: Level,
    positions: &[u32],
    inv_freq: &[f32],
    factor: f32,
    cos: &mut [f32],
    sin: &mut [f32],
) {
    let pairs = inv_freq.len();
    assert!(cos.len() == positions.len() * pairs && sin.len() == cos.len());
    for (r, &position) in positions.iter().enumerate() {
        let row = r * pairs..(r + 1) * pairs;
        rope_row(level, position, inv_freq, factor, &mut cos[row.clone()], &mut sin[row]);
    }
}

per_level! {
    fn rope_row(position: u32, inv_freq: &[f32], factor: f32, cos: &mut [f32], sin: &mut [f32]) = {
        #[inline(always)]
        fn body(position: u32, inv_freq: &[f32], factor: f32, cos: &mut [f32], sin: &mut [f32]) {
            for ((f, cos), sin) in inv_freq.iter().zip(cos).zip(sin) {
                let angle = position as f32 * f;
                let (s, c) = vecmath::sin_cos_f64(angle as f64);
                *cos = c as f32 * factor;
                *sin = s as f32 * factor;
            }
        }
        body
    }
}

/// How heads are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Turn {
    /// Width of a head.
    pub head_dim: usize,
    /// Dimensions that turn, from a head's first: even, at most `head_dim`.
    pub rotary_dim: usize,
    /// Which of them are a pair.
    pub pairs: RopePairs,
}

/// Rotates every head in place: with `h = rotary_dim / 2` pair `i` is `(a, b) = (x[i], x[i + h])`, or
/// `(x[2 i], x[2 i + 1])` where pairs are adjacent; it becomes
/// `(fma(a, cos, -(b * sin)), fma(b, cos, a * sin))`. `x` `[rows, heads * head_dim]`, `cos` and `sin`
/// `[rows, h]`.
pub fn apply_rope(pool: &Pool, level: Level, x: RowsMut, turn: Turn, cos: &[f32], sin: &[f32]) {
    let Turn { head_dim, rotary_dim, pairs } = turn;
    let half = rotary_dim / 2;
    assert!(head_dim > 0 && x.width().is_multiple_of(head_dim));
    assert!(rotary_dim.is_multiple_of(2) && rotary_dim <= head_dim);
    assert!(cos.len() == x.rows() * half && sin.len() == cos.len());
    x.for_each_row(pool, |r, row| {
        let angles = r * half..(r + 1) * half;
        let (cos, sin) = (&cos[angles.clone()], &sin[angles]);
        match pairs {
            RopePairs::Halves => rotate_halves(level, row, head_dim, cos, sin),
            RopePairs::Adjacent => rotate_adjacent(level, row, head_dim, cos, sin),
        }
    });
}

per_level! {
    fn rotate_halves(row: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) = {
        #[inline(always)]
        fn body(row: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
            for head in row.chunks_exact_mut(head_dim) {
                let (first, rest) = head.split_at_mut(cos.len());
                for (((a, b), c), s) in first.iter_mut().zip(rest).zip(cos).zip(sin) {
                    let (x, y) = (*a, *b);
                    *a = x.mul_add(*c, -(y * s));
                    *b = y.mul_add(*c, x * s);
                }
            }
        }
        body
    }
}
per_level! {
    fn rotate_adjacent(row: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) = {
        #[inline(always)]
        fn body(row: &mut [f32], head_dim: usize, cos: &[f32], sin: &[f32]) {
            for head in row.chunks_exact_mut(head_dim) {
                for ((pair, c), s) in head.as_chunks_mut::<2>().0.iter_mut().zip(cos).zip(sin) {
                    let [x, y] = *pair;
                    *pair = [x.mul_add(*c, -(y * s)), y.mul_add(*c, x * s)];
                }
            }
        }
        body
    }
}

/// A gated activation in place: `gate = act(gate) * up`, element by element; see [`Activation`] for the
/// formulas. Two slices of one length.
pub fn glu(pool: &Pool, level: Level, activation: Activation, gate: &mut [f32], up: &[f32]) {
    assert!(gate.len() == up.len());
    for_each_chunk(pool, gate, |range, gate| {
        let up = &up[range];
        match activation {
            Activation::Silu => silu_glu(level, gate, up),
            Activation::GeluTanh => gelu_glu(level, gate, up),
            Activation::ClampedSwiglu { alpha, limit } => {
                clamped_swiglu(level, gate, up, alpha, limit)
            }
            other => panic!("the CPU backend has no kernel for {other:?}"),
        }
    });
}

macro_rules! glu_kernel {
    ($name:ident($($param:ident),*) = |$g:ident, $u:ident| $value:expr) => {
        per_level! {
            fn $name(gate: &mut [f32], up: &[f32], $($param: f32),*) = {
                #[inline(always)]
                fn body(gate: &mut [f32], up: &[f32], $($param: f32),*) {
                    for (o, &$u) in gate.iter_mut().zip(up) {
                        let $g = *o;
                        *o = $value;
                    }
                }
                body
            }
        }
    };
}

glu_kernel!(silu_glu() = |g, u| vecmath::silu(g) * u);
glu_kernel!(gelu_glu() = |g, u| vecmath::gelu_tanh(g) * u);
glu_kernel!(
    clamped_swiglu(alpha, limit) = |g, u| {
        // Comparisons that keep NaN.
        let g = if g > limit { limit } else { g };
        let u = if u > limit { limit } else { u };
        let u = if u < -limit { -limit } else { u };
        (u + 1.0) * (g * vecmath::sigmoid(alpha * g))
    }
);

/// `out += x`, element by element.
pub fn add_into(pool: &Pool, level: Level, x: &[f32], out: &mut [f32]) {
    assert!(x.len() == out.len());
    for_each_chunk(pool, out, |range, out| add_body(level, &x[range], out));
}

/// `out *= x`, element by element.
pub fn mul_into(pool: &Pool, level: Level, x: &[f32], out: &mut [f32]) {
    assert!(x.len() == out.len());
    for_each_chunk(pool, out, |range, out| mul_body(level, &x[range], out));
}

/// `x[r] += bias` for every row: `x` `[rows, width]`, `bias` `[width]`.
pub fn add_bias(pool: &Pool, level: Level, bias: &[f32], x: RowsMut) {
    assert!(bias.len() == x.width());
    x.for_each_row(pool, |_, row| add_body(level, bias, row));
}

/// `x *= factor`, element by element.
pub fn scale(pool: &Pool, level: Level, factor: f32, x: &mut [f32]) {
    for_each_chunk(pool, x, |_, x| scale_body(level, factor, x));
}

/// `x = cap * tanh(x / cap)`, element by element.
pub fn softcap(pool: &Pool, level: Level, cap: f32, x: &mut [f32]) {
    for_each_chunk(pool, x, |_, x| softcap_body(level, cap, x));
}

per_level! {
    fn add_body(x: &[f32], out: &mut [f32]) = {
        #[inline(always)]
        fn body(x: &[f32], out: &mut [f32]) {
            for (o, x) in out.iter_mut().zip(x) {
                *o += x;
            }
        }
        body
    }
}
per_level! {
    fn mul_body(x: &[f32], out: &mut [f32]) = {
        #[inline(always)]
        fn body(x: &[f32], out: &mut [f32]) {
            for (o, x) in out.iter_mut().zip(x) {
                *o *= x;
            }
        }
        body
    }
}
per_level! {
    fn scale_body(factor: f32, x: &mut [f32]) = {
        #[inline(always)]
        fn body(factor: f32, x: &mut [f32]) {
            for x in x {
                *x *= factor;
            }
        }
        body
    }
}
per_level! {
    fn softcap_body(cap: f32, x: &mut [f32]) = {
        #[inline(always)]
        fn body(cap: f32, x: &mut [f32]) {
            for x in x {
                *x = cap * vecmath::tanh(*x / cap);
            }
        }
        body
    }
}

/// Why a row of router logits chooses nothing.
#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum RouteError {
    /// A logit is NaN.
    #[error("router logit of expert {expert} is NaN")]
    Nan {
        /// Index of the first such expert.
        expert: usize,
    },
    /// The largest logit is infinite, so that no softmax exists.
    #[error("largest router logit is {value}, of expert {expert}")]
    Infinite {
        /// The expert in rank 0.
        expert: usize,
        /// Its logit.
        value: f32,
    },
}

/// Chooses `ids.len()` = top_k experts of `logits` `[E]`: `ids` in rank order, highest logit first, ties
/// to the lower index; `weights` `[top_k]` by `score`.
///
/// With `m` the highest logit, the weight of rank `i` is `exp(l_i - m) / sum`. `SoftmaxSelected` sums the
/// selected terms in ascending rank; `SoftmaxAll` sums over all experts, expert `e` in lane `e mod 16`,
/// lanes joined in the fixed tree.
pub fn route(
    level: Level,
    logits: &[f32],
    score: Score,
    ids: &mut [u16],
    weights: &mut [f32],
) -> Result<(), RouteError> {
    let top_k = ids.len();
    assert!(top_k == weights.len() && (1..=logits.len()).contains(&top_k));
    assert!(logits.len() <= 1 << 16, "expert ids are 16 bits wide");
    // `weights` holds the selected logits until the end.
    let mut found = 0;
    for (e, &logit) in logits.iter().enumerate() {
        if logit.is_nan() {
            return Err(RouteError::Nan { expert: e });
        }
        if found == top_k && logit <= weights[top_k - 1] {
            continue;
        }
        found = top_k.min(found + 1);
        // Move what is smaller one rank down. Equal ones came earlier and stay before.
        let mut rank = found - 1;
        while rank > 0 && weights[rank - 1] < logit {
            weights[rank] = weights[rank - 1];
            ids[rank] = ids[rank - 1];
            rank -= 1;
        }
        weights[rank] = logit;
        ids[rank] = e as u16;
    }
    let max = weights[0];
    if max.is_infinite() {
        return Err(RouteError::Infinite { expert: ids[0] as usize, value: max });
    }
    for w in weights.iter_mut() {
        *w = vecmath::exp(*w - max);
    }
    let sum = match score {
        Score::SoftmaxSelected => weights.iter().fold(0.0, |sum, w| sum + w),
        Score::SoftmaxAll => sum_of_exp(level, logits, max),
        other => panic!("the CPU backend has no router score {other:?}"),
    };
    for w in weights.iter_mut() {
        *w /= sum;
    }
    Ok(())
}

per_level! {
    fn sum_of_exp(x: &[f32], max: f32) -> f32 = {
        #[inline(always)]
        fn body(x: &[f32], max: f32) -> f32 {
            let mut lanes = [0.0f32; LANES];
            let (chunks, tail) = x.as_chunks::<LANES>();
            for c in chunks {
                for i in 0..LANES {
                    lanes[i] += vecmath::exp(c[i] - max);
                }
            }
            for (lane, x) in lanes.iter_mut().zip(tail) {
                *lane += vecmath::exp(x - max);
            }
            join(lanes)
        }
        body
    }
}

/// Sums the chosen experts' outputs: `expert_out` `[rows, top_k, d]`, `weights` `[rows, top_k]`, `out`
/// `[rows, d]`. From +0, `out = fma(weight, expert_out, out)` in ascending rank.
pub fn combine(pool: &Pool, level: Level, expert_out: &[f32], weights: &[f32], out: RowsMut) {
    let (rows, d) = (out.rows(), out.width());
    assert!(rows == 0 || weights.len().is_multiple_of(rows));
    let top_k = weights.len() / rows.max(1);
    assert!(expert_out.len() == rows * top_k * d);
    out.for_each_row(pool, |r, out| {
        let experts = &expert_out[r * top_k * d..(r + 1) * top_k * d];
        combine_row(level, experts, &weights[r * top_k..(r + 1) * top_k], out);
    });
}

per_level! {
    fn combine_row(experts: &[f32], weights: &[f32], out: &mut [f32]) = {
        #[inline(always)]
        fn body(experts: &[f32], weights: &[f32], out: &mut [f32]) {
            out.fill(0.0);
            for (x, &w) in experts.chunks_exact(out.len()).zip(weights) {
                for (o, x) in out.iter_mut().zip(x) {
                    *o = w.mul_add(*x, *o);
                }
            }
        }
        body
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Uniform in [-1, 1).
    fn random(n: usize, seed: u32) -> Vec<f32> {
        let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                (state >> 8) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

    /// Calls `f` for every level and several thread counts; its results must have the same bits. Returns them.
    fn same_everywhere(f: impl Fn(&Pool, Level) -> Vec<f32>) -> Vec<f32> {
        let want = f(&Pool::new(1), Level::Scalar);
        for threads in [1, 2, 3] {
            let pool = Pool::new(threads);
            for level in Level::available() {
                let got = f(&pool, level);
                let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
                assert!(same && got.len() == want.len(), "{level}, {threads} threads");
            }
        }
        want
    }

    #[test]
    fn rms_norm_is_the_formula() {
        for (rows, width) in [(1, 1), (3, 15), (2, 16), (5, 17), (4, 64), (33, 720), (1, 2881)] {
            let stride = width + 3;
            let x = random(rows * stride, 1);
            let w = random(width, 2);
            for weight in [None, Some(&w[..])] {
                let got = same_everywhere(|pool, level| {
                    let mut out = vec![7.0; rows * stride];
                    let x = Rows::new(&x, rows, width, stride);
                    rms_norm(
                        pool,
                        level,
                        x,
                        weight,
                        1e-5,
                        RowsMut::new(&mut out, rows, width, stride),
                    );
                    out
                });
                for r in 0..rows {
                    let row = &x[r * stride..][..width];
                    let mean = row.iter().map(|&v| (v as f64).powi(2)).sum::<f64>() / width as f64;
                    for i in 0..width {
                        let want = row[i] as f64 / (mean + 1e-5).sqrt()
                            * weight.map_or(1.0, |w| w[i] as f64);
                        let error = (got[r * stride + i] as f64 - want).abs();
                        assert!(error <= 1e-6 * want.abs(), "{rows}x{width}: row {r}, {i}");
                    }
                    // Nothing is written between the rows.
                    assert!(got[r * stride + width..][..3].iter().all(|&v| v == 7.0));
                }
                // A row alone, and the in-place form, have the same bits.
                let mut alone = vec![0.0; width];
                let last = Rows::dense(&x[(rows - 1) * stride..][..width], width);
                let pool = Pool::new(1);
                rms_norm(
                    &pool,
                    Level::best(),
                    last,
                    weight,
                    1e-5,
                    RowsMut::dense(&mut alone, width),
                );
                assert_eq!(alone, got[(rows - 1) * stride..][..width]);
                let mut inside = x.clone();
                let view = RowsMut::new(&mut inside, rows, width, stride);
                rms_norm_heads(&pool, Level::best(), view, width, weight, 1e-5);
                assert_eq!(inside[(rows - 1) * stride..][..width], alone);
            }
        }
    }

    #[test]
    fn head_norm_norms_every_head() {
        let (rows, heads, hd) = (9, 4, 96);
        let x = random(rows * heads * hd, 3);
        let w = random(hd, 4);
        let got = same_everywhere(|pool, level| {
            let mut y = x.clone();
            rms_norm_heads(pool, level, RowsMut::dense(&mut y, heads * hd), hd, Some(&w), 1e-6);
            y
        });
        let mut want = vec![0.0; x.len()];
        let (pool, level) = (Pool::new(1), Level::best());
        rms_norm(&pool, level, Rows::dense(&x, hd), Some(&w), 1e-6, RowsMut::dense(&mut want, hd));
        assert_eq!(got, want);
    }

    #[test]
    fn rope_rotates_pairs() {
        let (rows, heads, hd, rot) = (7, 3, 24, 18);
        let inv_freq: Vec<f32> = (0..rot / 2)
            .map(|i| vecmath::pow_f64(1e4, -2.0 * i as f64 / rot as f64) as f32)
            .collect();
        let positions = [0, 1, 2, 100, 4095, 131_071, 1_000_000];
        let x = random(rows * heads * hd, 5);
        for pairs in [RopePairs::Halves, RopePairs::Adjacent] {
            let got = same_everywhere(|pool, level| {
                let mut cos = vec![0.0; rows * rot / 2];
                let mut sin = cos.clone();
                rope_angles(level, &positions, &inv_freq, 1.25, &mut cos, &mut sin);
                let mut y = x.clone();
                let turn = Turn { head_dim: hd, rotary_dim: rot, pairs };
                apply_rope(pool, level, RowsMut::dense(&mut y, heads * hd), turn, &cos, &sin);
                y
            });
            for (r, position) in positions.into_iter().enumerate() {
                for h in 0..heads {
                    let at = |i: usize| (r * heads + h) * hd + i;
                    for (i, freq) in inv_freq.iter().enumerate() {
                        let angle = (position as f32 * freq) as f64;
                        let (s, c) = angle.sin_cos();
                        let (first, second) = match pairs {
                            RopePairs::Halves => (at(i), at(i + rot / 2)),
                            RopePairs::Adjacent => (at(2 * i), at(2 * i + 1)),
                        };
                        let (a, b) = (x[first] as f64, x[second] as f64);
                        assert!((got[first] as f64 - 1.25 * (a * c - b * s)).abs() < 4e-7);
                        assert!((got[second] as f64 - 1.25 * (b * c + a * s)).abs() < 4e-7);
                    }
                    assert_eq!(got[at(rot)..at(hd)], x[at(rot)..at(hd)]);
                }
            }
        }
    }

    #[test]
    fn gated_activations() {
        let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
        let clamped = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
        for n in [0, 1, 15, 33, 20_000] {
            let gate: Vec<f32> = random(n, 6).iter().map(|x| x * 12.0).collect();
            let up: Vec<f32> = random(n, 7).iter().map(|x| x * 12.0).collect();
            for activation in [Activation::Silu, Activation::GeluTanh, clamped] {
                let got = same_everywhere(|pool, level| {
                    let mut out = gate.clone();
                    glu(pool, level, activation, &mut out, &up);
                    out
                });
                for i in 0..n {
                    let (g, u) = (gate[i] as f64, up[i] as f64);
                    let want = match activation {
                        Activation::Silu => g * sigmoid(g) * u,
                        Activation::GeluTanh => {
                            let z =
                                (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                            0.5 * g * (1.0 + z.tanh()) * u
                        }
                        _ => {
                            let (g, u) = (g.min(7.0), u.clamp(-7.0, 7.0));
                            (u + 1.0) * g * sigmoid(1.702 * g)
                        }
                    };
                    let error = (got[i] as f64 - want).abs();
                    assert!(
                        error <= 1e-6 * want.abs() + 2e-6,
                        "{activation:?}({g}, {u}) = {}",
                        got[i]
                    );
                }
            }
        }
    }

    #[test]
    fn element_wise() {
        for n in [1, 31, 10_000] {
            let (x, y) = (random(n, 8), random(n, 9));
            let got = same_everywhere(|pool, level| {
                let mut out = y.clone();
                add_into(pool, level, &x, &mut out);
                scale(pool, level, 3.0, &mut out);
                mul_into(pool, level, &x, &mut out);
                add_bias(pool, level, &x, RowsMut::dense(&mut out, n));
                softcap(pool, level, 2.0, &mut out);
                out
            });
            for i in 0..n {
                let (x, y) = (x[i] as f64, y[i] as f64);
                let want = 2.0 * (((y + x) * 3.0 * x + x) / 2.0).tanh();
                assert!((got[i] as f64 - want).abs() < 1e-6);
            }
        }
    }

    #[test]
    fn routing_ranks_by_logit_and_breaks_ties_downwards() {
        let cases: [(&str, &[f32], usize, &[u16]); 6] = [
            ("plain", &[0.0, 3.0, 1.0, 2.0], 2, &[1, 3]),
            ("tie", &[1.0, 2.0, 2.0, 2.0], 2, &[1, 2]),
            ("tie of all", &[5.0; 6], 4, &[0, 1, 2, 3]),
            ("tie of zeros", &[-0.0, 0.0, -1.0], 2, &[0, 1]),
            ("all", &[1.0, 3.0, 2.0], 3, &[1, 2, 0]),
            ("masked", &[f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY], 2, &[1, 0]),
        ];
        for (name, logits, top_k, want) in cases {
            for level in Level::available() {
                let (mut ids, mut weights) = (vec![0; top_k], vec![0.0; top_k]);
                route(level, logits, Score::SoftmaxSelected, &mut ids, &mut weights).expect(name);
                assert_eq!(ids, want, "{name}");
                assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{name}");
            }
        }
    }

    #[test]
    fn routing_weights() {
        for experts in [4, 16, 32, 61, 128] {
            let logits: Vec<f32> = random(experts, 10).iter().map(|x| x * 8.0).collect();
            for score in [Score::SoftmaxSelected, Score::SoftmaxAll] {
                let mut ids = [0u16; 4];
                let got = same_everywhere(|_, level| {
                    let (mut ids, mut weights) = ([0; 4], vec![0.0; 4]);
                    route(level, &logits, score, &mut ids, &mut weights).unwrap();
                    weights
                });
                let mut weights = [0.0; 4];
                route(Level::best(), &logits, score, &mut ids, &mut weights).unwrap();
                let mut order: Vec<usize> = (0..experts).collect();
                order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
                let chosen: Vec<usize> = ids.iter().map(|&i| i as usize).collect();
                assert_eq!(chosen, order[..4]);
                let over = if score == Score::SoftmaxAll { &order[..] } else { &order[..4] };
                let sum: f64 = over.iter().map(|&e| (logits[e] as f64).exp()).sum();
                for (w, &e) in got.iter().zip(&chosen) {
                    let want = (logits[e] as f64).exp() / sum;
                    assert!((*w as f64 / want - 1.0).abs() < 1e-6);
                }
            }
        }
    }

    #[test]
    fn routing_refuses_nan() {
        let (mut ids, mut weights) = ([0; 2], [0.0; 2]);
        let mut go = |logits: &[f32]| {
            route(Level::best(), logits, Score::SoftmaxSelected, &mut ids, &mut weights)
        };
        assert_eq!(go(&[0.0, 1.0, f32::NAN]), Err(RouteError::Nan { expert: 2 }));
        let infinite = RouteError::Infinite { expert: 1, value: f32::INFINITY };
        assert_eq!(go(&[0.0, f32::INFINITY]), Err(infinite));
        let nothing = RouteError::Infinite { expert: 0, value: f32::NEG_INFINITY };
        assert_eq!(go(&[f32::NEG_INFINITY; 3]), Err(nothing));
    }

    #[test]
    fn combine_sums_in_rank_order() {
        for (rows, top_k, d) in [(1, 1, 5), (3, 4, 17), (40, 3, 300)] {
            let experts = random(rows * top_k * d, 11);
            let weights = random(rows * top_k, 12);
            let got = same_everywhere(|pool, level| {
                let mut out = vec![9.0; rows * d];
                combine(pool, level, &experts, &weights, RowsMut::dense(&mut out, d));
                out
            });
            for r in 0..rows {
                for i in 0..d {
                    let want = (0..top_k).fold(0.0f32, |sum, k| {
                        weights[r * top_k + k].mul_add(experts[(r * top_k + k) * d + i], sum)
                    });
                    assert_eq!(got[r * d + i].to_bits(), want.to_bits());
                }
            }
        }
    }
}
