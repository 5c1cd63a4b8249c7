//! Decoders: from the bytes of a group to packed codes, scales and biases, for any [`Isa`].
//!
//! They give what `forebay_quant::decode_group` and `pack_codes` give. All read exactly the bytes of a whole
//! group; the kernel copies a shorter last group into a padded buffer.

use forebay_quant::group::{
    E2M1_CODES, GROUP, Group, decode_group, pack_codes, param_at, q4_k_scales,
};
use forebay_quant::{CodeFacts, Format, ParamType};

use super::isa::{Isa, RowPtrs};

/// A group of each row of a vector.
#[derive(Clone, Copy)]
pub(super) struct Decoded<I: Isa> {
    /// Codes of words `j = 0..8`.
    pub codes: [I::V; 8],
    /// Scales of each half; the first is that of the block where halves share one.
    pub ws: [I::F; 2],
    /// Biases likewise, where there are any.
    pub wb: [I::F; 2],
}

/// Decodes one format.
pub(super) trait Decoder<I: Isa> {
    /// Static facts; `offset` is a hint that [`Decoder::offset`] may replace.
    const FACTS: CodeFacts;

    /// What is subtracted from a code.
    #[inline(always)]
    fn offset(&self) -> i32 {
        Self::FACTS.offset
    }

    /// # Safety
    /// The instruction set must be there; `planes[p][r]` points to a whole group in plane `p` of row `r`.
    unsafe fn decode(&self, planes: [RowPtrs; 3]) -> Decoded<I>;
}

const fn facts(format: Format) -> CodeFacts {
    match format.codes() {
        Some(facts) => facts,
        None => panic!("not a quantised format"),
    }
}

/// `N` bytes of a row.
#[inline(always)]
unsafe fn bytes<const N: usize>(p: *const u8, at: usize) -> [u8; N] {
    // SAFETY: within the group, by the contract of `decode`.
    unsafe { p.add(at).cast::<[u8; N]>().read_unaligned() }
}

/// Eight half words at `at`, `at + stride`, ... of each row.
#[inline(always)]
unsafe fn halves<I: Isa>(rows: RowPtrs, at: usize, stride: usize) -> I::F {
    // SAFETY: as `bytes`.
    unsafe {
        let row = |r: usize| -> [u16; 8] {
            std::array::from_fn(|b| u16::from_le_bytes(bytes(rows[r], at + b * stride)))
        };
        I::f16([row(0), if I::ROWS == 2 { row(1) } else { [0; 8] }])
    }
}

/// Eight bytes at `at`, `at + stride`, ... of each row.
#[inline(always)]
unsafe fn strided(rows: RowPtrs, at: usize, stride: usize) -> [u64; 2] {
    // SAFETY: as `bytes`.
    unsafe {
        let row =
            |p| u64::from_le_bytes(std::array::from_fn(|b| bytes::<1>(p, at + b * stride)[0]));
        [row(rows[0]), row(rows[1])]
    }
}

/// 16 bytes of each of the eight blocks at `at`, `at + stride`, ...: words 0..4 of all blocks.
#[inline(always)]
unsafe fn words<I: Isa>(rows: RowPtrs, at: usize, stride: usize) -> [I::V; 4] {
    // SAFETY: as `bytes`.
    unsafe {
        I::transpose(std::array::from_fn(|k| I::load(rows, at + k * stride, at + (k + 4) * stride)))
    }
}

/// Low nibbles to words 0..4, high ones to words 4..8.
#[inline(always)]
unsafe fn split_nibbles<I: Isa>(v: [I::V; 4]) -> [I::V; 8] {
    // SAFETY: register operations.
    unsafe {
        let mask = I::splat(15);
        let low = |i: usize| I::and(v[i], mask);
        let high = |i: usize| I::and(I::shr::<4>(v[i]), mask);
        [low(0), low(1), low(2), low(3), high(0), high(1), high(2), high(3)]
    }
}

#[inline(always)]
fn concat<V: Copy>(a: [V; 4], b: [V; 4]) -> [V; 8] {
    [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
}

pub(super) struct Q8_0;

impl<I: Isa> Decoder<I> for Q8_0 {
    const FACTS: CodeFacts = facts(Format::Q8_0);
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: blocks of 34 bytes, 272 in all.
        unsafe {
            let ws = halves::<I>(p, 0, 34);
            let sign = I::splat(0x80);
            let codes = concat(words::<I>(p, 2, 34), words::<I>(p, 18, 34));
            Decoded { codes: codes.map(|c| I::xor(c, sign)), ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

pub(super) struct Q4_1;

impl<I: Isa> Decoder<I> for Q4_1 {
    const FACTS: CodeFacts = facts(Format::Q4_1);
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

pub(super) struct Q5_0;

impl<I: Isa> Decoder<I> for Q5_0 {
    const FACTS: CodeFacts = facts(Format::Q5_0);
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: blocks of 22 bytes, 176 in all.
        unsafe {
            let ws = halves::<I>(p, 0, 22);
            let row = |r: usize| -> [u32; 8] {
                std::array::from_fn(|b| u32::from_le_bytes(bytes(p[r], 2 + b * 22)))
            };
            let high = I::words([row(0), if I::ROWS == 2 { row(1) } else { [0; 8] }]);
            let mut codes = split_nibbles::<I>(words::<I>(p, 6, 22));
            for (j, code) in codes.iter_mut().enumerate() {
                // Elements 4j..4j+4 have their high bits in one half of byte j / 2 of their block's word.
                let select: [u8; 16] = std::array::from_fn(|i| (i / 4 * 4 + j / 2) as u8);
                let bit: [u8; 16] = std::array::from_fn(|i| 1 << (i % 4 + j % 2 * 4));
                let spread = I::lookup(high, I::repeat(&select));
                *code = I::or(*code, I::where_bits(spread, I::repeat(&bit), 16));
            }
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

pub(super) struct Q4K;

impl<I: Isa> Decoder<I> for Q4K {
    const FACTS: CodeFacts = facts(Format::Q4K);
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: one super-block of 144 bytes.
        unsafe {
            let half = |at| [0, 1].map(|r: usize| u16::from_le_bytes(bytes(p[r], at)));
            let (s0, m0) = q4_k_scales(&bytes(p[0], 4));
            let (s1, m1) = if I::ROWS == 2 { q4_k_scales(&bytes(p[1], 4)) } else { (0, 0) };
            let ws = I::mul(I::f16_splat(half(0)), I::u8([s0, s1]));
            let wb = I::negate(I::mul(I::f16_splat(half(2)), I::u8([m0, m1])));
            // 32 bytes hold a pair of blocks: low nibbles the even one, high nibbles the odd one.
            let mask = I::splat(15);
            let quarter = |at: usize| {
                let (even, odd) = (I::load(p, at, at + 64), I::load(p, at + 32, at + 96));
                I::transpose([
                    I::and(even, mask),
                    I::and(I::shr::<4>(even), mask),
                    I::and(odd, mask),
                    I::and(I::shr::<4>(odd), mask),
                ])
            };
            Decoded { codes: concat(quarter(16), quarter(32)), ws: [ws; 2], wb: [wb; 2] }
        }
    }
}

pub(super) struct Q6K;

impl<I: Isa> Decoder<I> for Q6K {
    const FACTS: CodeFacts = facts(Format::Q6K);
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: one super-block of 210 bytes.
        unsafe {
            let d = I::f16_splat([0, 1].map(|r: usize| u16::from_le_bytes(bytes(p[r], 208))));
            let scales = [0, 1].map(|r: usize| u128::from_le_bytes(bytes(p[r], 192)));
            let ws = [0, 8].map(|shift| I::mul(d, I::i8(scales.map(|s| even_bytes(s >> shift)))));
            let (mask, mask2) = (I::splat(15), I::splat(0x30));
            let quarter = |at: usize| {
                let a = I::load(p, at, at + 64);
                let b = I::load(p, at + 32, at + 96);
                let h = I::load(p, at + 128, at + 160);
                let low = |v| I::and(v, mask);
                let high = |v| I::and(I::shr::<4>(v), mask);
                I::transpose([
                    I::or(low(a), I::and(I::shl::<4>(h), mask2)),
                    I::or(low(b), I::and(I::shl::<2>(h), mask2)),
                    I::or(high(a), I::and(h, mask2)),
                    I::or(high(b), I::and(I::shr::<2>(h), mask2)),
                ])
            };
            Decoded { codes: concat(quarter(0), quarter(16)), ws, wb: ws }
        }
    }
}

/// Bytes 0, 2, 4, ... of 16.
#[inline(always)]
fn even_bytes(x: u128) -> u64 {
    let squeeze = |x: u64| {
        let x = x & 0x00ff_00ff_00ff_00ff;
        let x = (x | x >> 8) & 0x0000_ffff_0000_ffff;
        (x | x >> 16) & 0xffff_ffff
    };
    squeeze(x as u64) | squeeze((x >> 64) as u64) << 32
}

pub(super) struct Mxfp4;

impl<I: Isa> Decoder<I> for Mxfp4 {
    const FACTS: CodeFacts = facts(Format::Mxfp4);
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: blocks of 17 bytes, 136 in all.
        unsafe {
            let ws = I::e8m0_half(strided(p, 0, 17));
            let table = I::repeat(&E2M1_CODES);
            let codes = split_nibbles::<I>(words::<I>(p, 1, 17)).map(|c| I::lookup(table, c));
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

pub(super) struct Mxfp4Split;

impl<I: Isa> Decoder<I> for Mxfp4Split {
    const FACTS: CodeFacts = facts(Format::Mxfp4Split);
    #[inline(always)]
    unsafe fn decode(&self, [p, s, _]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: 128 bytes of codes, 8 of scales.
        unsafe {
            let ws = I::e8m0_half([0, 1].map(|r: usize| u64::from_le_bytes(bytes(s[r], 0))));
            let table = I::repeat(&E2M1_CODES);
            let codes = split_nibbles::<I>(words::<I>(p, 0, 16)).map(|c| I::lookup(table, c));
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

/// MLX affine of 4 or 8 bits.
pub(super) struct Mlx<const BITS: u8> {
    pub group: usize,
    pub params: ParamType,
}

impl<const BITS: u8> Mlx<BITS> {
    #[inline(always)]
    unsafe fn params<I: Isa>(&self, rows: RowPtrs) -> I::F {
        // SAFETY: 256 / group numbers in each row of the plane.
        unsafe {
            let n = GROUP / self.group;
            let row = |r: usize| -> [f32; 8] {
                let bytes = std::slice::from_raw_parts(rows[r], n * self.params.bytes());
                std::array::from_fn(|b| param_at(self.params, bytes, b * n / 8))
            };
            I::f32([row(0), if I::ROWS == 2 { row(1) } else { [0.0; 8] }])
        }
    }
}

impl<I: Isa, const BITS: u8> Decoder<I> for Mlx<BITS> {
    const FACTS: CodeFacts =
        facts(Format::MlxAffine { bits: BITS, group: 64, params: ParamType::Bf16 });
    #[inline(always)]
    unsafe fn decode(&self, [p, s, b]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: 32 * BITS bytes of codes, whole groups of parameters.
        unsafe {
            let (ws, wb) = (self.params::<I>(s), self.params::<I>(b));
            let codes = if BITS == 4 {
                split_nibbles::<I>(words::<I>(p, 0, 16))
            } else {
                concat(words::<I>(p, 0, 32), words::<I>(p, 16, 32))
            };
            Decoded { codes, ws: [ws; 2], wb: [wb; 2] }
        }
    }
}

/// Any format, through the portable decoder.
pub(super) struct Portable<const HALVES: bool, const BIAS: bool> {
    pub format: Format,
    pub offset: i32,
}

impl<I: Isa, const HALVES: bool, const BIAS: bool> Decoder<I> for Portable<HALVES, BIAS> {
    const FACTS: CodeFacts = CodeFacts { offset: 0, max_code: 255, halves: HALVES, bias: BIAS };

    #[inline(always)]
    fn offset(&self) -> i32 {
        self.offset
    }

    #[inline(always)]
    unsafe fn decode(&self, planes: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: whole groups in every plane; the packed buffers hold 8 words of 32 bytes.
        unsafe {
            let mut groups = [Group::EMPTY; 2];
            let mut packed = [[0; GROUP]; 2];
            let size = self.format.group_bytes();
            for r in 0..I::ROWS {
                let bytes = std::array::from_fn(|p| match size[p] {
                    0 => &[][..],
                    n => std::slice::from_raw_parts(planes[p][r], n),
                });
                decode_group(self.format, bytes, 8, &mut groups[r]);
                pack_codes(self.format.act_order(), &groups[r].codes, &mut packed[r]);
            }
            let rows = [packed[0].as_ptr(), packed[1].as_ptr()];
            let [a, b] = &groups;
            Decoded {
                codes: std::array::from_fn(|j| I::load(rows, 32 * j, 32 * j + 16)),
                ws: [0, 1].map(|h: usize| I::f32([a.ws[h], b.ws[h]])),
                wb: [0, 1].map(|h: usize| I::f32([a.wb[h], b.wb[h]])),
            }
        }
    }
}
