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
mod tests;
