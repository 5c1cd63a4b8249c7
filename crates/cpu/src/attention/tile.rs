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
/// `load` reads, and `store` writes, `BLOCK / N` floats at any address; the other loads read as many elements.
/// A method may only be called on a machine that has the type's instructions.
pub(super) unsafe trait Lanes<const N: usize>: Copy {
    unsafe fn splat(x: f32) -> Self;
    unsafe fn load(from: *const f32) -> Self;
    /// Widens `BLOCK / N` halves.
    unsafe fn load_halves(from: *const [u8; 2]) -> Self;
    /// Widens `BLOCK / N` signed codes.
    unsafe fn load_codes(from: *const [u8; 1]) -> Self;
    /// Asks for the cache line of an address, which need not be good.
    unsafe fn prefetch(at: *const u8);
    /// `fma(a, b, sum)`
    unsafe fn fma(a: Self, b: Self, sum: Self) -> Self;
    unsafe fn store(self, to: *mut f32);
}

/// An element of keys or values as it is stored.
///
/// # Safety
/// `load` reads `BLOCK / N` elements.
pub(super) unsafe trait Element: Copy {
    /// # Safety
    /// The machine has the instructions of `V`; the elements are there.
    unsafe fn load<V: Lanes<N>, const N: usize>(from: *const Self) -> V;
}

// SAFETY: as `Lanes` promises, here and below.
unsafe impl Element for f32 {
    #[inline(always)]
    unsafe fn load<V: Lanes<N>, const N: usize>(from: *const f32) -> V {
        // SAFETY: the caller's promise, here and below.
        unsafe { V::load(from) }
    }
}

/// A half.
// SAFETY: as above.
unsafe impl Element for [u8; 2] {
    #[inline(always)]
    unsafe fn load<V: Lanes<N>, const N: usize>(from: *const [u8; 2]) -> V {
        // SAFETY: as above.
        unsafe { V::load_halves(from) }
    }
}

/// A signed code.
// SAFETY: as above.
unsafe impl Element for [u8; 1] {
    #[inline(always)]
    unsafe fn load<V: Lanes<N>, const N: usize>(from: *const [u8; 1]) -> V {
        // SAFETY: as above.
        unsafe { V::load_codes(from) }
    }
}

/// The second factor of [`sums`]: row `k` is `data[k * stride..][..BLOCK]`.
#[derive(Clone, Copy)]
pub(super) struct Columns<'a, E> {
    pub data: &'a [E],
    pub stride: usize,
    /// The same rows of the block that comes next: each is prefetched when its like here is read.
    pub next: Option<&'a [E]>,
}

impl<'a, E> Columns<'a, E> {
    /// The same from column `first` on.
    #[inline(always)]
    pub fn from(&self, first: usize) -> Columns<'a, E> {
        let (data, next) = (&self.data[first..], self.next.map(|next| &next[first..]));
        Columns { data, next, stride: self.stride }
    }
}

/// `out[t][j]` = from +0, `fma(a[t * a_stride + k], b[k][j], sum)` for `k` ascending in `ks`.
///
/// # Safety
/// The machine has the instructions of `V`.
#[inline(always)]
pub(super) unsafe fn sums<V: Lanes<N>, E: Element, const N: usize, const T: usize>(
    (a, a_stride): (&[f32], usize),
    b: Columns<'_, E>,
    ks: Range<usize>,
) -> [[f32; BLOCK]; T] {
    let mut out = [[0.0f32; BLOCK]; T];
    if ks.is_empty() {
        return out;
    }
    assert!(a.len() >= (T - 1) * a_stride + ks.end);
    assert!(b.data.len() >= (ks.end - 1) * b.stride + BLOCK);
    let a = a.as_ptr();
    let (b, stride, next) = (b.data.as_ptr(), b.stride, b.next.map(<[E]>::as_ptr));
    // SAFETY: `a` is read at `t * a_stride + k` and `b` at `k * stride .. + BLOCK` with `t < T` and
    // `k < ks.end`, inside the slices as asserted; `out` has `N` vectors in each of its rows. The
    // instructions are there by the caller's promise.
    unsafe {
        let mut sums = [[V::splat(0.0); N]; T];
        for k in ks {
            if let Some(next) = next {
                V::prefetch(next.wrapping_add(k * stride).cast());
            }
            let row: [V; N] =
                std::array::from_fn(|n| E::load::<V, N>(b.add(k * stride + n * (BLOCK / N))));
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
    unsafe fn load_halves(from: *const [u8; 2]) -> Self {
        // SAFETY: the caller's pointer is good for eight halves.
        Portable(unsafe { from.cast::<[[u8; 2]; 8]>().read() }.map(half))
    }
    #[inline(always)]
    unsafe fn load_codes(from: *const [u8; 1]) -> Self {
        // SAFETY: the caller's pointer is good for eight codes.
        Portable(unsafe { from.cast::<[u8; 8]>().read() }.map(|code| code as i8 as f32))
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
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

#[cfg(not(target_arch = "aarch64"))]
#[inline(always)]
fn half(bytes: [u8; 2]) -> f32 {
    let mut out = [0.0];
    crate::half_float::to_f32_portable(&bytes, &mut out);
    out[0]
}

/// Implements [`Lanes`] with intrinsics of one register type.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! lanes {
    ($n:literal, $vector:ty, $splat:ident, $load:ident, $store:ident,
        |$a:ident, $b:ident, $sum:ident| $fma:expr,
        halves |$halves:ident| $load_halves:expr, codes |$codes:ident| $load_codes:expr,
        prefetch |$at:ident| $prefetch:expr) => {
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
            unsafe fn load_halves($halves: *const [u8; 2]) -> Self {
                // SAFETY: as above.
                unsafe { $load_halves }
            }
            #[inline(always)]
            unsafe fn load_codes($codes: *const [u8; 1]) -> Self {
                // SAFETY: as above.
                unsafe { $load_codes }
            }
            #[inline(always)]
            #[allow(unused_unsafe)]
            unsafe fn prefetch($at: *const u8) {
                // SAFETY: as above; a prefetch reads nothing.
                unsafe { $prefetch }
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

    lanes!(
        4,
        __m256,
        _mm256_set1_ps,
        _mm256_loadu_ps,
        _mm256_storeu_ps,
        |a, b, sum| _mm256_fmadd_ps(a, b, sum),
        halves | from | _mm256_cvtph_ps(_mm_loadu_si128(from.cast())),
        codes | from | _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()))),
        prefetch | at | _mm_prefetch::<_MM_HINT_T0>(at.cast())
    );
    lanes!(
        2,
        __m512,
        _mm512_set1_ps,
        _mm512_loadu_ps,
        _mm512_storeu_ps,
        |a, b, sum| _mm512_fmadd_ps(a, b, sum),
        halves | from | _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())),
        codes | from | _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))),
        prefetch | at | _mm_prefetch::<_MM_HINT_T0>(at.cast())
    );
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use super::Lanes;
    use std::arch::aarch64::*;

    lanes!(
        8,
        float32x4_t,
        vdupq_n_f32,
        vld1q_f32,
        vst1q_f32,
        |a, b, sum| vfmaq_f32(sum, a, b),
        halves | from | crate::half_float::arm::widen(vreinterpret_u16_u8(vld1_u8(from.cast()))),
        codes | from | {
            let four = vcreate_s8(from.cast::<u32>().read_unaligned() as u64);
            vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(four))))
        },
        prefetch | at | crate::matmul::neon::prefetch_line(at)
    );
}
