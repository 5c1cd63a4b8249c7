//! `Q2_K` to `Q6_K`: super-blocks of 256, scales of their own for parts of them.

use forebay_quant::group::{by_halves, q3_k_scales, q4_k_scales};
use forebay_quant::{ActOrder, CodeFacts, Format};

use super::{Decoded, Decoder, bytes, concat, facts, half, high, low};
use crate::matmul::isa::{Isa, RowPtrs};

pub(in crate::matmul) struct Q2K;

impl<I: Isa> Decoder<I> for Q2K {
    const FACTS: CodeFacts = facts(Format::Q2K);
    const ORDER: ActOrder = Format::Q2K.act_order();
    const PREFETCH: [usize; 3] = Format::Q2K.group_bytes();
    const TAIL: bool = false;
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: one super-block of 84 bytes.
        unsafe {
            let (d, dmin) = (half::<I>(p, 80), I::negate(half::<I>(p, 82)));
            let a = q2_k_scales(p[0]);
            let b = if I::ROWS == 2 { q2_k_scales(p[1]) } else { [[0; 2]; 2] };
            let ws = [I::mul(d, I::u8([a[0][0], b[0][0]])), I::mul(d, I::u8([a[0][1], b[0][1]]))];
            let wb =
                [I::mul(dmin, I::u8([a[1][0], b[1][0]])), I::mul(dmin, I::u8([a[1][1], b[1][1]]))];
            let first = I::transpose(two_bits::<I>(I::load(p, 16, 48)));
            let second = I::transpose(two_bits::<I>(I::load(p, 32, 64)));
            Decoded { codes: concat(first, second), ws, wb }
        }
    }
}

/// Scales and minima, each of first and second halves.
#[inline(always)]
unsafe fn q2_k_scales(p: *const u8) -> [[u64; 2]; 2] {
    const LOW: u64 = 0x0f0f_0f0f_0f0f_0f0f;
    // SAFETY: as `bytes`.
    let (a, b) = unsafe { (u64::from_le_bytes(bytes(p, 0)), u64::from_le_bytes(bytes(p, 8))) };
    [by_halves([a & LOW, b & LOW]), by_halves([a >> 4 & LOW, b >> 4 & LOW])]
}

/// The four codes of two bits in each byte: of four blocks.
#[inline(always)]
unsafe fn two_bits<I: Isa>(v: I::V) -> [I::V; 4] {
    // SAFETY: register operations.
    unsafe {
        let mask = I::splat(3);
        [
            I::and(v, mask),
            I::and(I::shr::<2>(v), mask),
            I::and(I::shr::<4>(v), mask),
            I::and(I::shr::<6>(v), mask),
        ]
    }
}

/// Sets `value` in the codes whose bit is set: in byte `e` of `h`, the same for both lanes of a row, bit `b` belongs to
/// weight `e` of block `b`.
#[inline(always)]
unsafe fn or_bits<I: Isa>(mut blocks: [I::V; 4], h: I::V, value: u8) -> [I::V; 4] {
    // SAFETY: register operations.
    unsafe {
        for (b, v) in blocks.iter_mut().enumerate() {
            let (lo, hi) = (0x0101_0101 << b, 0x1010_1010 << b);
            let mask = I::words([[lo, lo, lo, lo, hi, hi, hi, hi]; 2]);
            *v = I::or(*v, I::where_bits(h, mask, value));
        }
        blocks
    }
}

pub(in crate::matmul) struct Q3K;

impl<I: Isa> Decoder<I> for Q3K {
    const FACTS: CodeFacts = facts(Format::Q3K);
    const ORDER: ActOrder = Format::Q3K.act_order();
    const PREFETCH: [usize; 3] = Format::Q3K.group_bytes();
    const TAIL: bool = false;
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: one super-block of 110 bytes.
        unsafe {
            let d = half::<I>(p, 108);
            let a = q3_k_scales(&bytes(p[0], 96));
            let b = if I::ROWS == 2 { q3_k_scales(&bytes(p[1], 96)) } else { [0; 2] };
            let ws = [I::mul(d, I::i8([a[0], b[0]])), I::mul(d, I::i8([a[1], b[1]]))];
            let first = two_bits::<I>(I::load(p, 32, 64));
            let first = or_bits::<I>(first, I::load(p, 0, 0), 4);
            let second = two_bits::<I>(I::load(p, 48, 80));
            let second = or_bits::<I>(second, I::load(p, 16, 16), 4);
            let codes = concat(I::transpose(first), I::transpose(second));
            Decoded { codes, ws, wb: ws }
        }
    }
}

pub(in crate::matmul) struct Q4K;

impl<I: Isa> Decoder<I> for Q4K {
    const FACTS: CodeFacts = facts(Format::Q4K);
    const ORDER: ActOrder = Format::Q4K.act_order();
    const PREFETCH: [usize; 3] = Format::Q4K.group_bytes();
    const TAIL: bool = false;
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: one super-block of 144 bytes.
        unsafe {
            let (ws, wb) = k_scales::<I>(p);
            let first = I::transpose(k_nibbles::<I>(p, 16));
            let second = I::transpose(k_nibbles::<I>(p, 32));
            Decoded { codes: concat(first, second), ws: [ws; 2], wb: [wb; 2] }
        }
    }
}

pub(in crate::matmul) struct Q5K;

impl<I: Isa> Decoder<I> for Q5K {
    const FACTS: CodeFacts = facts(Format::Q5K);
    const ORDER: ActOrder = Format::Q5K.act_order();
    const PREFETCH: [usize; 3] = Format::Q5K.group_bytes();
    const TAIL: bool = false;
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: one super-block of 176 bytes.
        unsafe {
            let (ws, wb) = k_scales::<I>(p);
            let first = or_bits::<I>(k_nibbles::<I>(p, 48), I::load(p, 16, 16), 16);
            let second = or_bits::<I>(k_nibbles::<I>(p, 64), I::load(p, 32, 32), 16);
            let codes = concat(I::transpose(first), I::transpose(second));
            Decoded { codes, ws: [ws; 2], wb: [wb; 2] }
        }
    }
}

/// Scales and minima of `Q4_K` and `Q5_K`.
#[inline(always)]
unsafe fn k_scales<I: Isa>(p: RowPtrs) -> (I::F, I::F) {
    // SAFETY: as `bytes`.
    unsafe {
        let (s0, m0) = q4_k_scales(&bytes(p[0], 4));
        let (s1, m1) = if I::ROWS == 2 { q4_k_scales(&bytes(p[1], 4)) } else { (0, 0) };
        let ws = I::mul(half::<I>(p, 0), I::u8([s0, s1]));
        (ws, I::negate(I::mul(half::<I>(p, 2), I::u8([m0, m1]))))
    }
}

/// 16 weights of four blocks: 32 bytes hold a pair of blocks, low nibbles the even one, high nibbles the odd one.
#[inline(always)]
unsafe fn k_nibbles<I: Isa>(p: RowPtrs, at: usize) -> [I::V; 4] {
    // SAFETY: as `bytes`.
    unsafe {
        let (even, odd) = (I::load(p, at, at + 64), I::load(p, at + 32, at + 96));
        [low::<I>(even), high::<I>(even), low::<I>(odd), high::<I>(odd)]
    }
}

pub(in crate::matmul) struct Q6K;

impl<I: Isa> Decoder<I> for Q6K {
    const FACTS: CodeFacts = facts(Format::Q6K);
    const ORDER: ActOrder = Format::Q6K.act_order();
    const PREFETCH: [usize; 3] = Format::Q6K.group_bytes();
    const TAIL: bool = false;
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: one super-block of 210 bytes.
        unsafe {
            let d = half::<I>(p, 208);
            let first = q6_k_scales(p[0]);
            let second = if I::ROWS == 2 { q6_k_scales(p[1]) } else { [0; 2] };
            let ws =
                [I::mul(d, I::i8([first[0], second[0]])), I::mul(d, I::i8([first[1], second[1]]))];
            let codes = concat(q6_k_words::<I>(p, 0), q6_k_words::<I>(p, 16));
            Decoded { codes, ws, wb: ws }
        }
    }
}

/// Words 0..4 or 4..8 of all blocks: 4 low bits of two blocks in a byte, 2 high bits of four.
#[inline(always)]
unsafe fn q6_k_words<I: Isa>(p: RowPtrs, at: usize) -> [I::V; 4] {
    // SAFETY: as `bytes`.
    unsafe {
        let a = I::load(p, at, at + 64);
        let b = I::load(p, at + 32, at + 96);
        let h = I::load(p, at + 128, at + 160);
        let mask = I::splat(0x30);
        I::transpose([
            I::or(low::<I>(a), I::and(I::shl::<4>(h), mask)),
            I::or(low::<I>(b), I::and(I::shl::<2>(h), mask)),
            I::or(high::<I>(a), I::and(h, mask)),
            I::or(high::<I>(b), I::and(I::shr::<2>(h), mask)),
        ])
    }
}

/// The scales of the first halves of the blocks and those of the second.
#[inline(always)]
unsafe fn q6_k_scales(p: *const u8) -> [u64; 2] {
    // SAFETY: as `bytes`.
    let (a, b) = unsafe { (u64::from_le_bytes(bytes(p, 192)), u64::from_le_bytes(bytes(p, 200))) };
    by_halves([a, b])
}
