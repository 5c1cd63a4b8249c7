//! Rows of the residual stream moved along a direction.
//!
//! Every row is changed by itself. Sums run in the 16 lanes of [`crate::ops`], so the bits depend on neither the vector
//! width nor the rows beside it.
//!
//! Not here: which rows, where, and along what (`forebay-engine`).

use crate::dispatch::per_level;
use crate::ops::{LANES, join, sum_of_squares};
use crate::rows::RowsMut;
use crate::simd::Level;

/// What is done to a row `x` `[d]`; `unit` has length 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Edit<'a> {
    /// `x += strength * direction`
    Add {
        /// `[d]`
        direction: &'a [f32],
        /// Factor.
        strength: f32,
    },
    /// `x -= strength * (x . unit) * unit`: strength 1 leaves nothing of the component.
    Ablate {
        /// `[d]`
        unit: &'a [f32],
        /// Part of the component that goes.
        strength: f32,
    },
    /// `x += strength * (p' - p) * unit`, where `p = x . unit` and `p'` is `p` held between `min` and `max`.
    Clamp {
        /// `[d]`
        unit: &'a [f32],
        /// Least projection.
        min: f32,
        /// Largest projection.
        max: f32,
        /// Part of the way that is gone.
        strength: f32,
    },
    /// `x += strength * direction`, then scaled to the length that it had.
    Renormalise {
        /// `[d]`
        direction: &'a [f32],
        /// Factor.
        strength: f32,
    },
}

/// `a . b`: products by fma in 16 lanes, then [`join`].
#[inline(always)]
fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let ((chunks, tail), (others, other_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (x, y) in chunks.iter().zip(others) {
        for i in 0..LANES {
            lanes[i] = x[i].mul_add(y[i], lanes[i]);
        }
    }
    for (lane, (x, y)) in lanes.iter_mut().zip(tail.iter().zip(other_tail)) {
        *lane = x.mul_add(*y, *lane);
    }
    join(lanes)
}

/// `x += factor * direction`
#[inline(always)]
fn add(x: &mut [f32], direction: &[f32], factor: f32) {
    for (x, v) in x.iter_mut().zip(direction) {
        *x = v.mul_add(factor, *x);
    }
}

#[inline(always)]
fn edit_body(x: &mut [f32], edit: Edit<'_>) {
    match edit {
        Edit::Add { direction, strength } => add(x, direction, strength),
        Edit::Ablate { unit, strength } => {
            let p = dot(x, unit);
            add(x, unit, -strength * p);
        }
        Edit::Clamp { unit, min, max, strength } => {
            let p = dot(x, unit);
            let held = p.max(min).min(max);
            // Inside the range nothing is touched, not even the sign of a zero.
            if held != p {
                add(x, unit, strength * (held - p));
            }
        }
        Edit::Renormalise { direction, strength } => {
            let before = sum_of_squares(x);
            add(x, direction, strength);
            let after = sum_of_squares(x);
            if after > 0.0 {
                let factor = (before / after).sqrt();
                x.iter_mut().for_each(|x| *x *= factor);
            }
        }
    }
}

per_level! {
    fn edit_row(x: &mut [f32], edit: Edit<'_>) = edit_body
}

/// Changes every row, `[rows, d]`.
pub fn edit(level: Level, rows: RowsMut<'_>, edit: Edit<'_>) {
    let (Edit::Add { direction: v, .. }
    | Edit::Ablate { unit: v, .. }
    | Edit::Clamp { unit: v, .. }
    | Edit::Renormalise { direction: v, .. }) = edit;
    assert_eq!(v.len(), rows.width(), "a direction is as wide as a row");
    rows.for_each_row_here(|row| edit_row(level, row, edit));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The definitions in f64, in the plainest order.
    fn oracle(x: &[f32], edit: Edit<'_>) -> Vec<f64> {
        let x: Vec<f64> = x.iter().map(|v| *v as f64).collect();
        let dot = |v: &[f32]| x.iter().zip(v).map(|(a, b)| a * *b as f64).sum::<f64>();
        let moved = |v: &[f32], by: f64| -> Vec<f64> {
            x.iter().zip(v).map(|(a, b)| a + by * *b as f64).collect()
        };
        let norm = |v: &[f64]| v.iter().map(|a| a * a).sum::<f64>().sqrt();
        match edit {
            Edit::Add { direction, strength } => moved(direction, strength as f64),
            Edit::Ablate { unit, strength } => moved(unit, -strength as f64 * dot(unit)),
            Edit::Clamp { unit, min, max, strength } => {
                let p = dot(unit);
                moved(unit, strength as f64 * (p.clamp(min as f64, max as f64) - p))
            }
            Edit::Renormalise { direction, strength } => {
                let y = moved(direction, strength as f64);
                let factor = norm(&x) / norm(&y);
                y.into_iter().map(|v| v * factor).collect()
            }
        }
    }

    proptest! {
        /// Close to the definition, and the same bits at every level and for every number of rows.
        #[test]
        fn edits_are_what_they_say(
            rows in proptest::collection::vec(proptest::collection::vec(-3f32..3.0, 37), 1..5),
            direction in proptest::collection::vec(-3f32..3.0, 37),
            strength in -2f32..2.0,
            which in 0usize..4,
            (min, width) in (-2f32..2.0, 0f32..2.0),
        ) {
            let norm = direction.iter().map(|v| *v as f64 * *v as f64).sum::<f64>().sqrt();
            prop_assume!(norm > 0.1);
            let unit: Vec<f32> = direction.iter().map(|v| (*v as f64 / norm) as f32).collect();
            let e = match which {
                0 => Edit::Add { direction: &direction, strength },
                1 => Edit::Ablate { unit: &unit, strength },
                2 => Edit::Clamp { unit: &unit, min, max: min + width, strength },
                _ => Edit::Renormalise { direction: &direction, strength },
            };
            let all = rows.concat();
            let mut first: Option<Vec<u32>> = None;
            for level in Level::available() {
                let mut together = all.clone();
                edit(level, RowsMut::dense(&mut together, 37), e);
                let mut apart = all.clone();
                for row in apart.chunks_exact_mut(37) {
                    edit(level, RowsMut::dense(row, 37), e);
                }
                let bits: Vec<u32> = together.iter().map(|v| v.to_bits()).collect();
                let apart: Vec<u32> = apart.iter().map(|v| v.to_bits()).collect();
                prop_assert_eq!(&bits, &apart);
                prop_assert_eq!(first.get_or_insert(bits.clone()), &bits);
                for (row, was) in together.chunks_exact(37).zip(&rows) {
                    let want = oracle(was, e);
                    // A row that cancels to nearly nothing has no direction to keep.
                    let short = want.iter().map(|v| v * v).sum::<f64>() < 1e-3;
                    for (got, want) in row.iter().zip(want) {
                        prop_assert!(short || (*got as f64 - want).abs() < 1e-3, "{got} {want}");
                    }
                }
            }
        }
    }
}
