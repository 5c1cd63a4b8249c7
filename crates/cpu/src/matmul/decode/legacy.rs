//! `Q8_0`, `Q4_0`, `Q4_1`, `Q5_0`, `Q5_1`: blocks of 32 with a scale and perhaps a bias.

use forebay_quant::{ActOrder, CodeFacts, Format};

use super::{Decoded, Decoder, bytes, concat, facts, halves, split_nibbles, where_set, words};
use crate::matmul::isa::{Isa, RowPtrs};

pub(in crate::matmul) struct Q8_0;

impl<I: Isa> Decoder<I> for Q8_0 {
    const FACTS: CodeFacts = facts(Format::Q8_0);
    const ORDER: ActOrder = Format::Q8_0.act_order();
    const PREFETCH: [usize; 3] = Format::Q8_0.group_bytes();
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: blocks of 34 bytes, 272 in all.
        unsafe {
            let ws = halves::<I>(p, 0, 34);
            let sign = I::splat(0x80);
            let mut codes = concat(words::<I>(p, 2, 34), words::<I>(p, 18, 34));
            for code in &mut codes {
                *code = I::xor(*code, sign);
            }
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

pub(in crate::matmul) struct Q4_0;

impl<I: Isa> Decoder<I> for Q4_0 {
    const FACTS: CodeFacts = facts(Format::Q4_0);
    const ORDER: ActOrder = Format::Q4_0.act_order();
    const PREFETCH: [usize; 3] = Format::Q4_0.group_bytes();
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: blocks of 18 bytes, 144 in all.
        unsafe {
            let ws = halves::<I>(p, 0, 18);
            let codes = split_nibbles::<I>(words::<I>(p, 2, 18));
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

pub(in crate::matmul) struct Q4_1;

impl<I: Isa> Decoder<I> for Q4_1 {
    const FACTS: CodeFacts = facts(Format::Q4_1);
    const ORDER: ActOrder = Format::Q4_1.act_order();
    const PREFETCH: [usize; 3] = Format::Q4_1.group_bytes();
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: blocks of 20 bytes, 160 in all.
        unsafe {
            let (ws, wb) = (halves::<I>(p, 0, 20), halves::<I>(p, 2, 20));
            let codes = split_nibbles::<I>(words::<I>(p, 4, 20));
            Decoded { codes, ws: [ws; 2], wb: [wb; 2] }
        }
    }
}

/// In each block of `stride` bytes 32 high bits at `at`, then nibbles.
#[inline(always)]
unsafe fn five_bits<I: Isa>(p: RowPtrs, at: usize, stride: usize) -> [I::V; 8] {
    // SAFETY: as `bytes`.
    unsafe {
        let mut words32 = [[0; 8]; 2];
        for r in 0..I::ROWS {
            for b in 0..8 {
                words32[r][b] = u32::from_le_bytes(bytes(p[r], at + b * stride));
            }
        }
        let high = I::words(words32);
        let mut codes = split_nibbles::<I>(words::<I>(p, at + 4, stride));
        for (j, code) in codes.iter_mut().enumerate() {
            *code = I::or(*code, where_set::<I>(high, j, 16));
        }
        codes
    }
}

pub(in crate::matmul) struct Q5_0;

impl<I: Isa> Decoder<I> for Q5_0 {
    const FACTS: CodeFacts = facts(Format::Q5_0);
    const ORDER: ActOrder = Format::Q5_0.act_order();
    const PREFETCH: [usize; 3] = Format::Q5_0.group_bytes();
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: blocks of 22 bytes, 176 in all.
        unsafe {
            let ws = halves::<I>(p, 0, 22);
            Decoded { codes: five_bits::<I>(p, 2, 22), ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

pub(in crate::matmul) struct Q5_1;

impl<I: Isa> Decoder<I> for Q5_1 {
    const FACTS: CodeFacts = facts(Format::Q5_1);
    const ORDER: ActOrder = Format::Q5_1.act_order();
    const PREFETCH: [usize; 3] = Format::Q5_1.group_bytes();
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: blocks of 24 bytes, 192 in all.
        unsafe {
            let (ws, wb) = (halves::<I>(p, 0, 24), halves::<I>(p, 2, 24));
            Decoded { codes: five_bits::<I>(p, 4, 24), ws: [ws; 2], wb: [wb; 2] }
        }
    }
}
