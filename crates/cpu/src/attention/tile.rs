//! The one hot loop of attention, written with vector types because the compiler keeps its sums in
//! registers reliably only so. All types compute the same bits: a lane is an IEEE fused multiply-add.
//!
//! Unsafe here: unchecked loads, whose bounds [`sums`] asserts first, and instructions of a vector level,
//! which the caller of [`sums`] must be compiled for.

// Indexed loops over fixed arrays say which registers meet.
#![allow(clippy::needless_range_loop)]

use std::ops::Range;

use super::layout::BLOCK;

/// A vector of `BLOCK / N` floats.
///
/// # Safety
/// `load` reads, and `store` writes, `BLOCK / N` floats at any address. A method may only be
/// called on a machine that has the type's instructions.
pub(super) unsafe trait Lanes<const N: usize>: Copy {
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// `fma(a, b, sum)`
    unsafe fn fma(a: Self, b: Self, sum: Self) -> Self;
    unsafe fn store(self, to: *mut f32);
}

/// `out[t][j]` = from +0, `fma(a[t * a_stride + k], b[k * b_stride + j], sum)` for `k` ascending in `ks`.
///
/// # Safety
/// The machine has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn sums<V: Lanes<N>, const N: usize, const T: usize>(
    (a, a_stride): (&[f32], usize),
    (b, b_stride): (&[f32], usize),
    ks: Range<usize>,
) -> [[f32; BLOCK]; T] {
    let mut out = [[0.0f32; BLOCK]; T];
    if ks.is_empty() {
        return out;
    }
    assert!(a.len() >= (T - 1) * a_stride + ks.end);
    assert!(b.len() >= (ks.end - 1) * b_stride + BLOCK);
    let (a, b) = (a.as_ptr(), b.as_ptr());
    // SAFETY: `a` is read at `t * a_stride + k` and `b` at `k * b_stride .. + BLOCK` with `t < T` and
    // `k < ks.end`, inside the slices as asserted; `out` has `N` vectors in each of its rows. The
    // instructions are there by the caller's promise.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; T];
        for k in ks {
            let row: [V; N] =
                std::array::from_fn(|n| V::load(b.add(k * b_stride + n * (BLOCK / N))));
            for t in 0..T {
                let x = V::splat(*a.add(t * a_stride + k));
                for n in 0..N {
                    sums[t][n] = V::fma(x, row[n], sums[t][n]);
                }
            }
        }
        for (sums, out) in sums.iter().zip(&mut out) {
            for (n, sum) in sums.iter().enumerate() {
                sum.store(out.as_mut_ptr().add(n * (BLOCK / N)));
            }
        }
    }
    out
}

/// Eight floats in plain Rust.
#[cfg(not(target_arch = "aarch64"))]
#[derive(Clone, Copy)]
pub(super) struct Portable([f32; 8]);

// SAFETY: eight floats are read and written; no special instructions.
#[cfg(not(target_arch = "aarch64"))]
unsafe impl Lanes<4> for Portable {
    #[inline(always)]
    unsafe fn splat(x: f32) -> Self {
        Portable([x; 8])
    }
    #[inline(always)]
    unsafe fn load(from: *const f32) -> Self {
        // SAFETY: the caller's pointer is good for eight floats.
        Portable(unsafe { from.cast::<[f32; 8]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn fma(a: Self, b: Self, sum: Self) -> Self {
        Portable(std::array::from_fn(|i| a.0[i].mul_add(b.0[i], sum.0[i])))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32) {
        // SAFETY: the caller's pointer is good for eight floats.
        unsafe { to.cast::<[f32; 8]>().write_unaligned(self.0) }
    }
}

/// Implements [`Lanes`] with intrinsics of one register type.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! lanes {
    ($n:literal, $vector:ty, $splat:ident, $load:ident, $store:ident, |$a:ident, $b:ident, $sum:ident| $fma:expr) => {
        // SAFETY: the register holds `BLOCK / n` floats; loads and stores are of the unaligned kind.
        unsafe impl Lanes<$n> for $vector {
            #[inline(always)]
            unsafe fn splat(x: f32) -> Self {
                // SAFETY: the machine has the instruction by the caller's promise.
                unsafe { $splat(x) }
            }
            #[inline(always)]
            unsafe fn load(from: *const f32) -> Self {
                // SAFETY: as above, and the pointer is good for a register.
                unsafe { $load(from) }
            }
            #[inline(always)]
            unsafe fn fma($a: Self, $b: Self, $sum: Self) -> Self {
                // SAFETY: as above.
                unsafe { $fma }
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut f32) {
                // SAFETY: as above, and the pointer is good for a register.
                unsafe { $store(to, self) }
            }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use std::arch::x86_64::*;

    lanes!(4, __m256, _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, |a, b, sum| {
        _mm256_fmadd_ps(a, b, sum)
    });
    lanes!(2, __m512, _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, |a, b, sum| {
        _mm512_fmadd_ps(a, b, sum)
    });
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use super::Lanes;
    use std::arch::aarch64::*;

    lanes!(8, float32x4_t, vdupq_n_f32, vld1q_f32, vst1q_f32, |a, b, sum| vfmaq_f32(sum, a, b));
}
