//! Dot products of AArch64: with instructions of every processor, with `sdot`, with `usdot`.
//!
//! In a vector of codes the 32-bit lane is the block, as in one of activations: four products of bytes
//! are added into each lane. All sums are exact, so the ways differ in nothing but speed.
//!
//! The last two are inline assembly: their intrinsics are not stable in the oldest compiler that is supported.

use std::arch::aarch64::*;
use std::arch::asm;

use super::neon::{Bytes, Ints};

/// A way to multiply.
pub(super) trait Product: Copy {
    /// Largest code that is multiplied as it is; of codes in formats with larger ones 128 is subtracted first.
    const MAX_CODE: u8;

    /// `start` plus the sum over `j < N` of the products of `codes[from + j]` (less 128, see `MAX_CODE`) and `words[j]`.
    ///
    /// # Safety
    /// The processor has the instructions; `words` has `N` elements.
    unsafe fn dot<const N: usize>(
        codes: &[Bytes; 8],
        from: usize,
        max_code: u8,
        words: *const [i8; 32],
        start: Ints,
    ) -> Ints;
}

/// Codes less 128, as signed bytes.
#[inline(always)]
#[allow(unused_unsafe)]
fn signed(codes: uint8x16_t, subtract: bool) -> int8x16_t {
    // SAFETY: register operations of every AArch64 processor.
    unsafe { vreinterpretq_s8_u8(if subtract { veorq_u8(codes, vdupq_n_u8(0x80)) } else { codes }) }
}

/// Both halves of the activations' word.
#[inline(always)]
unsafe fn load(word: *const [i8; 32]) -> [int8x16_t; 2] {
    // SAFETY: 32 bytes, by the caller's promise.
    unsafe { [vld1q_s8(word.cast()), vld1q_s8(word.cast::<i8>().add(16))] }
}

/// `smull` and `smlal` into 16 bits as long as that stays exact, then `sadalp` into 32.
#[derive(Clone, Copy)]
pub(super) struct Plain;

impl Product for Plain {
    const MAX_CODE: u8 = 127;

    #[inline(always)]
    #[allow(unused_unsafe)]
    unsafe fn dot<const N: usize>(
        codes: &[Bytes; 8],
        from: usize,
        max_code: u8,
        words: *const [i8; 32],
        start: Ints,
    ) -> Ints {
        let subtract = max_code > Self::MAX_CODE;
        // So many products fit 16 bits: 2 * 128 * 127 = 32512.
        let run = if subtract { 2 } else { 32767 / (127 * (max_code as usize).max(1)) };
        // SAFETY: as promised.
        unsafe {
            let zero = vdupq_n_s32(0);
            // Of each half of a vector: two sums for each of two blocks.
            let mut sums = [[zero; 2]; 2];
            let mut parts = [[vdupq_n_s16(0); 2]; 2];
            for j in 0..N {
                let word = load(words.add(j));
                for half in 0..2 {
                    let (code, word) = (signed(codes[from + j][half], subtract), word[half]);
                    let (low, high) = (vget_low_s8(code), vget_low_s8(word));
                    if j % run == 0 {
                        parts[half] = [vmull_s8(low, high), vmull_high_s8(code, word)];
                    } else {
                        let [a, b] = parts[half];
                        parts[half] = [vmlal_s8(a, low, high), vmlal_high_s8(b, code, word)];
                    }
                    if j % run == run - 1 || j == N - 1 {
                        for side in 0..2 {
                            sums[half][side] = vpadalq_s16(sums[half][side], parts[half][side]);
                        }
                    }
                }
            }
            [
                vaddq_s32(start[0], vpaddq_s32(sums[0][0], sums[0][1])),
                vaddq_s32(start[1], vpaddq_s32(sums[1][0], sums[1][1])),
            ]
        }
    }
}

/// A way that is one instruction: four products of a code and an activation into each lane.
macro_rules! one_instruction {
    ($(#[$doc:meta])* $name:ident, $instruction:literal, $max_code:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(super) struct $name;

        impl Product for $name {
            const MAX_CODE: u8 = $max_code;

            #[inline(always)]
            unsafe fn dot<const N: usize>(
                codes: &[Bytes; 8],
                from: usize,
                max_code: u8,
                words: *const [i8; 32],
                start: Ints,
            ) -> Ints {
                let subtract = max_code > Self::MAX_CODE;
                let mut sums = start;
                // SAFETY: as promised.
                unsafe {
                    for j in 0..N {
                        let word = load(words.add(j));
                        for half in 0..2 {
                            asm!(
                                concat!($instruction, " {0:v}.4s, {1:v}.16b, {2:v}.16b"),
                                inout(vreg) sums[half],
                                in(vreg) signed(codes[from + j][half], subtract),
                                in(vreg) word[half],
                                options(pure, nomem, nostack, preserves_flags)
                            );
                        }
                    }
                }
                sums
            }
        }
    };
}

one_instruction!(
    /// `sdot`: signed codes.
    Dot,
    "sdot",
    127
);
one_instruction!(
    /// `usdot`: unsigned codes, so that none need become signed.
    Usdot,
    "usdot",
    255
);
