//! IEEE half to single and back, for bytes at any address. Round to nearest, ties to even; subnormals kept.
//!
//! The portable code defines the bits (NaN payloads excepted); F16C, AVX-512 and AArch64 have the same rounding.

use half::f16;

use crate::simd::Level;

/// `out[i]` = the half at `bytes[2 i..]`.
pub(crate) fn f16_to_f32(level: Level, bytes: &[u8], out: &mut [f32]) {
    assert!(bytes.len() == 2 * out.len());
    #[cfg(target_arch = "x86_64")]
    {
        if level == Level::Avx512 && crate::dispatch::runs(level) {
            // SAFETY: `runs` has found AVX-512F.
            return unsafe { x86::to_f32_avx512(bytes, out) };
        }
        if level == Level::Avx2 && crate::dispatch::runs(level) {
            // SAFETY: `runs` has found F16C.
            return unsafe { x86::to_f32_f16c(bytes, out) };
        }
    }
    #[cfg(target_arch = "aarch64")]
    if level != Level::Scalar {
        return arm::to_f32(bytes, out);
    }
    let _ = level;
    to_f32_portable(bytes, out);
}

/// `out[i]` = the bits of `x[i]` as a half.
pub(crate) fn f32_to_f16(level: Level, x: &[f32], out: &mut [u16]) {
    assert!(x.len() == out.len());
    #[cfg(target_arch = "x86_64")]
    if matches!(level, Level::Avx2 | Level::Avx512) && crate::dispatch::runs(level) {
        // SAFETY: `runs` has found F16C.
        return unsafe { x86::from_f32_f16c(x, out) };
    }
    #[cfg(target_arch = "aarch64")]
    if level != Level::Scalar {
        return arm::from_f32(x, out);
    }
    let _ = level;
    from_f32_portable(x, out);
}

#[inline(always)]
pub(crate) fn to_f32_portable(bytes: &[u8], out: &mut [f32]) {
    for (b, o) in bytes.as_chunks::<2>().0.iter().zip(out) {
        let h = u16::from_le_bytes(*b);
        let magnitude = ((h & 0x7fff) as u32) << 13;
        // Exponent and mantissa are in place but for the bias, 127 - 15 = 112: a product by 2^112 puts
        // that right, exactly, for subnormals as well.
        let finite = (f32::from_bits(magnitude) * f32::from_bits((127 + 112) << 23)).to_bits();
        let bits = if h & 0x7c00 == 0x7c00 { magnitude | 0x7f80_0000 } else { finite };
        *o = f32::from_bits(bits | ((h & 0x8000) as u32) << 16);
    }
}

#[inline(always)]
fn from_f32_portable(x: &[f32], out: &mut [u16]) {
    for (&x, o) in x.iter().zip(out) {
        *o = f16::from_f32_const(x).to_bits();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    #[target_feature(enable = "avx512f")]
    pub(super) fn to_f32_avx512(bytes: &[u8], out: &mut [f32]) {
        let (from, from_tail) = bytes.as_chunks::<32>();
        let (to, to_tail) = out.as_chunks_mut::<16>();
        for (b, o) in from.iter().zip(to) {
            // SAFETY: reads the 32 bytes of `b` and writes the 16 floats of `o`, unaligned.
            unsafe {
                let h = _mm256_loadu_si256(b.as_ptr().cast());
                _mm512_storeu_ps(o.as_mut_ptr(), _mm512_cvtph_ps(h));
            }
        }
        super::to_f32_portable(from_tail, to_tail);
    }

    #[target_feature(enable = "avx,f16c")]
    pub(super) fn to_f32_f16c(bytes: &[u8], out: &mut [f32]) {
        let (from, from_tail) = bytes.as_chunks::<16>();
        let (to, to_tail) = out.as_chunks_mut::<8>();
        for (b, o) in from.iter().zip(to) {
            // SAFETY: reads the 16 bytes of `b` and writes the 8 floats of `o`, unaligned.
            unsafe {
                let h = _mm_loadu_si128(b.as_ptr().cast());
                _mm256_storeu_ps(o.as_mut_ptr(), _mm256_cvtph_ps(h));
            }
        }
        super::to_f32_portable(from_tail, to_tail);
    }

    #[target_feature(enable = "avx,f16c")]
    pub(super) fn from_f32_f16c(x: &[f32], out: &mut [u16]) {
        let (from, from_tail) = x.as_chunks::<8>();
        let (to, to_tail) = out.as_chunks_mut::<8>();
        for (x, o) in from.iter().zip(to) {
            // SAFETY: reads the 8 floats of `x` and writes the 8 halves of `o`, unaligned.
            unsafe {
                let h = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(_mm256_loadu_ps(x.as_ptr()));
                _mm_storeu_si128(o.as_mut_ptr().cast(), h);
            }
        }
        super::from_f32_portable(from_tail, to_tail);
    }
}

/// `fcvtl` and `fcvtn`, which every AArch64 processor has. Inline assembly, as their intrinsics are not stable in the
/// oldest compiler that is supported.
#[cfg(target_arch = "aarch64")]
pub(crate) mod arm {
    use std::arch::aarch64::*;
    use std::arch::asm;

    /// Four halves to singles.
    #[inline(always)]
    pub(crate) fn widen(halves: uint16x4_t) -> float32x4_t {
        let out;
        // SAFETY: a register operation.
        unsafe {
            asm!(
                "fcvtl {0:v}.4s, {1:v}.4h",
                out(vreg) out,
                in(vreg) halves,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        out
    }

    /// Four singles to halves.
    #[inline(always)]
    fn narrow(singles: float32x4_t) -> uint16x4_t {
        let out;
        // SAFETY: a register operation.
        unsafe {
            asm!(
                "fcvtn {0:v}.4h, {1:v}.4s",
                out(vreg) out,
                in(vreg) singles,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        out
    }

    pub(super) fn to_f32(bytes: &[u8], out: &mut [f32]) {
        let (from, from_tail) = bytes.as_chunks::<8>();
        let (to, to_tail) = out.as_chunks_mut::<4>();
        for (b, o) in from.iter().zip(to) {
            // SAFETY: reads the 8 bytes of `b` and writes the 4 floats of `o`, unaligned.
            unsafe { vst1q_f32(o.as_mut_ptr(), widen(vreinterpret_u16_u8(vld1_u8(b.as_ptr())))) }
        }
        super::to_f32_portable(from_tail, to_tail);
    }

    pub(super) fn from_f32(x: &[f32], out: &mut [u16]) {
        let (from, from_tail) = x.as_chunks::<4>();
        let (to, to_tail) = out.as_chunks_mut::<4>();
        for (x, o) in from.iter().zip(to) {
            // SAFETY: reads the 4 floats of `x` and writes the 4 halves of `o`.
            unsafe { vst1_u16(o.as_mut_ptr(), narrow(vld1q_f32(x.as_ptr()))) }
        }
        super::from_f32_portable(from_tail, to_tail);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_becomes_the_same_single() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        // One byte off, so that nothing is aligned.
        let bytes: Vec<u8> =
            [0].into_iter().chain(all.iter().flat_map(|h| h.to_le_bytes())).collect();
        for level in Level::available() {
            let mut out = vec![0.0; all.len()];
            f16_to_f32(level, &bytes[1..], &mut out);
            for (&h, &x) in all.iter().zip(&out) {
                let want = f16::from_bits(h).to_f32_const();
                assert!(
                    x.to_bits() == want.to_bits() || (x.is_nan() && want.is_nan()),
                    "{level}: {h:#x}"
                );
            }
        }
    }

    #[test]
    fn singles_round_as_half_does() {
        // Every half, the midpoint to its neighbour and both sides of that.
        let mut xs: Vec<f32> = Vec::new();
        for h in 0..0x7c00u16 {
            let a = f16::from_bits(h).to_f32_const();
            let b = if h == 0x7bff { 65536.0 } else { f16::from_bits(h + 1).to_f32_const() };
            let mid = (a + b) / 2.0;
            for x in [a, mid.next_down(), mid, mid.next_up()] {
                xs.extend([x, -x]);
            }
        }
        xs.extend([
            f32::INFINITY,
            f32::NEG_INFINITY,
            1e-45,
            1e30,
            -1e30,
            2f32.powi(-25),
            f32::MIN_POSITIVE,
        ]);
        for level in Level::available() {
            let mut out = vec![0; xs.len()];
            f32_to_f16(level, &xs, &mut out);
            for (&x, &h) in xs.iter().zip(&out) {
                assert_eq!(h, f16::from_f32_const(x).to_bits(), "{level}: {x}");
            }
            let mut nan = [0; 9];
            f32_to_f16(level, &[f32::NAN; 9], &mut nan);
            assert!(nan.iter().all(|&h| f16::from_bits(h).is_nan()));
        }
    }
}
