//! MLX affine: codes of 2 to 8 bits in one plane, scales and biases in two others.

use forebay_quant::group::GROUP;
use forebay_quant::{ActOrder, CodeFacts, Format, ParamType};

use super::{Decoded, Decoder, bytes, concat, facts, split_nibbles, words};
use crate::matmul::isa::{Isa, RowPtrs};

/// MLX affine.
pub(in crate::matmul) struct Mlx<const BITS: u8> {
    pub group: usize,
    pub params: ParamType,
}

impl<const BITS: u8> Mlx<BITS> {
    #[inline(always)]
    unsafe fn params<I: Isa>(&self, rows: RowPtrs) -> I::F {
        let n = GROUP / self.group;
        // SAFETY: n numbers in each row of the plane.
        unsafe {
            if self.params == ParamType::F32 {
                let second = if I::ROWS == 2 { spread_f32(rows[1], n) } else { [0.0; 8] };
                return I::f32([spread_f32(rows[0], n), second]);
            }
            let second = if I::ROWS == 2 { spread_u16(rows[1], n) } else { [0; 8] };
            let values = [spread_u16(rows[0], n), second];
            if self.params == ParamType::Bf16 { I::bf16(values) } else { I::f16(values) }
        }
    }
}

/// `n` numbers (8, 4 or 2) for eight blocks.
#[inline(always)]
unsafe fn spread_u16(p: *const u8, n: usize) -> [u16; 8] {
    // SAFETY: the caller has n numbers there.
    unsafe {
        match n {
            8 => le_u16(p.cast::<[[u8; 2]; 8]>().read_unaligned()),
            4 => {
                let x = u64::from_le_bytes(bytes(p, 0));
                let [a, b, c, d] = [x as u16, (x >> 16) as u16, (x >> 32) as u16, (x >> 48) as u16];
                [a, a, b, b, c, c, d, d]
            }
            _ => {
                let x = u32::from_le_bytes(bytes(p, 0));
                let [a, b] = [x as u16, (x >> 16) as u16];
                [a, a, a, a, b, b, b, b]
            }
        }
    }
}

#[inline(always)]
fn le_u16(x: [[u8; 2]; 8]) -> [u16; 8] {
    x.map(u16::from_le_bytes)
}

/// As [`spread_u16`].
#[inline(always)]
unsafe fn spread_f32(p: *const u8, n: usize) -> [f32; 8] {
    let mut out = [0.0; 8];
    for (b, out) in out.iter_mut().enumerate() {
        // SAFETY: as `spread_u16`.
        *out = f32::from_le_bytes(unsafe { bytes(p, b * n / 8 * 4) });
    }
    out
}

/// Codes of 2, 3, 5 or 6 bits. In a block these are as many 32-bit words; four codes reach over two words at most.
#[inline(always)]
unsafe fn bit_stream<I: Isa, const BITS: u8>(p: RowPtrs) -> [I::V; 8] {
    let bits = BITS as usize;
    let size = 4 * bits;
    // SAFETY: eight blocks of `size` bytes; no load reaches over their end.
    unsafe {
        // Words 0..4, or for blocks below 16 bytes fewer; the last blocks are then read from before their start and
        // moved down.
        let w = if bits < 4 {
            let back = 16 - size;
            let mut down = [0; 16];
            for i in 0..size {
                down[i] = (i + back) as u8;
            }
            I::transpose([
                I::load(p, 0, 4 * size),
                I::load(p, size, 5 * size),
                I::load(p, 2 * size, 6 * size),
                I::lookup(I::load(p, 3 * size - back, 7 * size - back), I::repeat(&down)),
            ])
        } else {
            words::<I>(p, 0, size)
        };
        // Words from `bits - 4` on.
        let rest = if bits < 4 { w } else { words::<I>(p, size - 16, size) };
        let mut codes = w_of::<I::V>(w, rest, bits);
        let source = codes;
        let ones = (1u32 << bits) - 1;
        for (j, code) in codes.iter_mut().enumerate() {
            let (word, at) = (4 * bits * j / 32, 4 * bits * j % 32);
            let mut x = I::shr32(source[word], at);
            if at + 4 * bits > 32 {
                x = I::or(x, I::shl32(source[word + 1], 32 - at));
            }
            *code = I::and(x, I::splat32(ones));
            for k in 1..4 {
                let moved = I::shl32(x, (8 - bits) * k);
                *code = I::or(*code, I::and(moved, I::splat32(ones << (8 * k))));
            }
        }
        codes
    }
}

/// The words of a block from its first four and its last four.
#[inline(always)]
fn w_of<V: Copy>(first: [V; 4], last: [V; 4], bits: usize) -> [V; 8] {
    let mut w = concat(first, last);
    let mut i = 4;
    while i < bits {
        w[i] = last[i - (bits - 4)];
        i += 1;
    }
    w
}

impl<I: Isa, const BITS: u8> Decoder<I> for Mlx<BITS> {
    const FACTS: CodeFacts =
        facts(Format::MlxAffine { bits: BITS, group: 64, params: ParamType::Bf16 });
    const ORDER: ActOrder = if BITS == 4 { ActOrder::NibblePairs } else { ActOrder::Sequential };
    const PREFETCH: [usize; 3] = [32 * BITS as usize, 1, 1];
    #[inline(always)]
    unsafe fn decode(&self, [p, s, b]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: 32 * BITS bytes of codes, whole groups of parameters.
        unsafe {
            let (ws, wb) = (self.params::<I>(s), self.params::<I>(b));
            let codes = match BITS {
                4 => split_nibbles::<I>(I::load_packed(p)),
                8 => concat(words::<I>(p, 0, 32), words::<I>(p, 16, 32)),
                _ => bit_stream::<I, BITS>(p),
            };
            Decoded { codes, ws: [ws; 2], wb: [wb; 2] }
        }
    }
}
