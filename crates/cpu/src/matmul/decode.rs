//! Decoders: from the bytes of a group to packed codes, scales and biases, for any [`Isa`].
//!
//! They give what `forebay_quant::decode_group` and `pack_codes` give. All read exactly the bytes of a whole
//! group; the kernel copies a shorter last group into a padded buffer.
//!
//! No closures around vector operations, here or in the kernels: a closure is a function of its own without the
//! caller's instruction set, and unless it happens to be inlined every operation in it becomes a call.

use forebay_quant::grid::{GridFormat, Signs};
use forebay_quant::group::{
    BLOCK, E2M1_CODES, GROUP, Group, IQ4_CODES, by_halves, decode_group, iq4_xs_scales,
    q3_k_scales, q4_k_scales,
};
use forebay_quant::{ActOrder, CodeFacts, Format, ParamType};

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
    /// Order of the codes.
    const ORDER: ActOrder;
    /// Bytes of a group in each plane, as far as they are worth prefetching.
    const PREFETCH: [usize; 3];

    /// Whether a row's last group may have fewer than 8 blocks: not in formats of super-blocks.
    const TAIL: bool = true;

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

/// Eight half words of a row at `at`, `at + stride`, ...
#[inline(always)]
unsafe fn half_words(p: *const u8, at: usize, stride: usize) -> [u16; 8] {
    let mut out = [0; 8];
    for (b, out) in out.iter_mut().enumerate() {
        // SAFETY: as `bytes`.
        *out = u16::from_le_bytes(unsafe { bytes(p, at + b * stride) });
    }
    out
}

/// Eight half floats at `at`, `at + stride`, ... of each row.
#[inline(always)]
unsafe fn halves<I: Isa>(rows: RowPtrs, at: usize, stride: usize) -> I::F {
    // SAFETY: as `bytes`.
    unsafe {
        let second = if I::ROWS == 2 { half_words(rows[1], at, stride) } else { [0; 8] };
        I::f16([half_words(rows[0], at, stride), second])
    }
}

/// One half float of each row.
#[inline(always)]
unsafe fn half<I: Isa>(rows: RowPtrs, at: usize) -> I::F {
    // SAFETY: as `bytes`.
    unsafe {
        let first = u16::from_le_bytes(bytes(rows[0], at));
        let second = if I::ROWS == 2 { u16::from_le_bytes(bytes(rows[1], at)) } else { 0 };
        I::f16_splat([first, second])
    }
}

/// 16 bytes of each of the eight blocks at `at`, `at + stride`, ...: words 0..4 of all blocks.
#[inline(always)]
unsafe fn words<I: Isa>(rows: RowPtrs, at: usize, stride: usize) -> [I::V; 4] {
    // SAFETY: as `bytes`.
    unsafe {
        I::transpose([
            I::load(rows, at, at + 4 * stride),
            I::load(rows, at + stride, at + 5 * stride),
            I::load(rows, at + 2 * stride, at + 6 * stride),
            I::load(rows, at + 3 * stride, at + 7 * stride),
        ])
    }
}

/// The low nibbles of all bytes.
#[inline(always)]
unsafe fn low<I: Isa>(v: I::V) -> I::V {
    // SAFETY: register operations.
    unsafe { I::and(v, I::splat(15)) }
}

/// The high nibbles of all bytes.
#[inline(always)]
unsafe fn high<I: Isa>(v: I::V) -> I::V {
    // SAFETY: register operations.
    unsafe { I::and(I::shr::<4>(v), I::splat(15)) }
}

/// Low nibbles to words 0..4, high ones to words 4..8.
#[inline(always)]
unsafe fn split_nibbles<I: Isa>([a, b, c, d]: [I::V; 4]) -> [I::V; 8] {
    // SAFETY: register operations.
    unsafe {
        [
            low::<I>(a),
            low::<I>(b),
            low::<I>(c),
            low::<I>(d),
            high::<I>(a),
            high::<I>(b),
            high::<I>(c),
            high::<I>(d),
        ]
    }
}

/// Nibbles to codes.
#[inline(always)]
unsafe fn look_up<I: Isa>(table: &[u8; 16], mut codes: [I::V; 8]) -> [I::V; 8] {
    // SAFETY: register operations.
    unsafe {
        let table = I::repeat(table);
        for code in &mut codes {
            *code = I::lookup(table, *code);
        }
    }
    codes
}

#[inline(always)]
fn concat<V: Copy>(a: [V; 4], b: [V; 4]) -> [V; 8] {
    [a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3]]
}

pub(super) struct Q8_0;

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

pub(super) struct Q4_0;

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

pub(super) struct Iq4Nl;

impl<I: Isa> Decoder<I> for Iq4Nl {
    const FACTS: CodeFacts = facts(Format::Iq4Nl);
    const ORDER: ActOrder = Format::Iq4Nl.act_order();
    const PREFETCH: [usize; 3] = Format::Iq4Nl.group_bytes();
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: blocks of 18 bytes, 144 in all.
        unsafe {
            let ws = halves::<I>(p, 0, 18);
            let codes = look_up::<I>(&IQ4_CODES, split_nibbles::<I>(words::<I>(p, 2, 18)));
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

pub(super) struct Iq4Xs;

impl<I: Isa> Decoder<I> for Iq4Xs {
    const FACTS: CodeFacts = facts(Format::Iq4Xs);
    const ORDER: ActOrder = Format::Iq4Xs.act_order();
    const PREFETCH: [usize; 3] = Format::Iq4Xs.group_bytes();
    const TAIL: bool = false;
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: one super-block of 136 bytes.
        unsafe {
            let first = iq4_xs_scales(&bytes(p[0], 2));
            let second = if I::ROWS == 2 { iq4_xs_scales(&bytes(p[1], 2)) } else { 0 };
            let ws = I::mul(half::<I>(p, 0), I::i8([first, second]));
            let codes = p.map(|row| row.wrapping_add(8));
            let codes = look_up::<I>(&IQ4_CODES, split_nibbles::<I>(I::load_packed(codes)));
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

pub(super) struct Q4_1;

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

/// For byte `i` of a 128-bit lane of word vector `j`: byte `j / 2` of the block's 32 bits ...
const SELECT: [[u8; 16]; 4] = [
    [0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8, 12, 12, 12, 12],
    [1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9, 13, 13, 13, 13],
    [2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 10, 10, 14, 14, 14, 14],
    [3, 3, 3, 3, 7, 7, 7, 7, 11, 11, 11, 11, 15, 15, 15, 15],
];
/// ... and the bit in it, by `j % 2`.
const BITS_OF: [[u8; 16]; 2] = [
    [1, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8],
    [16, 32, 64, 128, 16, 32, 64, 128, 16, 32, 64, 128, 16, 32, 64, 128],
];

/// `value` in the bytes of word vector `j` whose weight's bit is set in the 32 bits of its block.
#[inline(always)]
unsafe fn where_set<I: Isa>(bits: I::V, j: usize, value: u8) -> I::V {
    // SAFETY: register operations.
    unsafe {
        let spread = I::lookup(bits, I::repeat(&SELECT[j / 2]));
        I::where_bits(spread, I::repeat(&BITS_OF[j % 2]), value)
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

pub(super) struct Q5_0;

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

pub(super) struct Q5_1;

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

pub(super) struct Q2K;

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

pub(super) struct Q3K;

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

pub(super) struct Q4K;

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

pub(super) struct Q5K;

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

pub(super) struct Q6K;

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

/// A grid format: `IQ1`, `IQ2`, `IQ3`.
pub(super) struct Grid<G>(pub G);

impl<I: Isa, G: GridFormat> Decoder<I> for Grid<G> {
    const FACTS: CodeFacts = facts(G::FORMAT);
    const ORDER: ActOrder = G::FORMAT.act_order();
    const PREFETCH: [usize; 3] = G::FORMAT.group_bytes();
    const TAIL: bool = false;

    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: one super-block.
        unsafe {
            let size = G::FORMAT.group_bytes()[0];
            let a = std::slice::from_raw_parts(p[0], size);
            let b = if I::ROWS == 2 { std::slice::from_raw_parts(p[1], size) } else { a };
            let d = I::mul(I::f16_splat([G::d(a), G::d(b)]), I::f32([[G::UNIT; 8]; 2]));
            let mut signs = [[0; 8]; 2];
            for block in 0..8 {
                signs[0][block] = G::signs(a, block);
                signs[1][block] = G::signs(b, block);
            }
            let mut signs = I::words(signs);
            let scales = if G::SIGNS == Signs::SevensAndScale {
                [I::lanes(I::shr32(signs, 28)); 2]
            } else {
                let (a, b) = (G::scales(a), G::scales(b));
                [I::u8([a[0], b[0]]), I::u8([a[1], b[1]])]
            };
            let (one, two) = (I::f32([[1.0; 8]; 2]), I::f32([[2.0; 8]; 2]));
            let ws =
                [I::mul(d, I::fma(scales[0], two, one)), I::mul(d, I::fma(scales[1], two, one))];
            if G::SIGNS == Signs::SevensAndScale {
                let mut sevens = I::and(signs, I::splat32(0x7f));
                for l in 1..4 {
                    let moved = I::and(I::shl32(signs, l), I::splat32(0x7f << (8 * l)));
                    sevens = I::or(sevens, moved);
                }
                signs = sevens;
            }
            if G::SIGNS != Signs::All {
                let mut parity = signs;
                for n in [4, 2, 1] {
                    parity = I::xor(parity, I::shr32(parity, n));
                }
                signs = I::or(signs, I::shl32(I::and(parity, I::splat(1)), 7));
            }
            let first = I::transpose(grid_points::<I, G>([a, b], 0));
            let second = I::transpose(grid_points::<I, G>([a, b], 2));
            let mut codes = concat(first, second);
            for (j, code) in codes.iter_mut().enumerate() {
                *code = I::or(*code, where_set::<I>(signs, j, 8));
            }
            Decoded { codes: look_up::<I>(&G::CODES, codes), ws, wb: ws }
        }
    }
}

/// Coordinates of 16 weights from `8 l` on, of four blocks a lane.
#[inline(always)]
unsafe fn grid_points<I: Isa, G: GridFormat>([a, b]: [&[u8]; 2], l: usize) -> [I::V; 4] {
    // SAFETY: register operations.
    unsafe {
        [
            I::quads([grid_quad::<G>(a, 0, l), grid_quad::<G>(b, 0, l)]),
            I::quads([grid_quad::<G>(a, 1, l), grid_quad::<G>(b, 1, l)]),
            I::quads([grid_quad::<G>(a, 2, l), grid_quad::<G>(b, 2, l)]),
            I::quads([grid_quad::<G>(a, 3, l), grid_quad::<G>(b, 3, l)]),
        ]
    }
}

#[inline(always)]
fn grid_quad<G: GridFormat>(row: &[u8], b: usize, l: usize) -> [u64; 4] {
    [
        G::point(row, b, l),
        G::point(row, b, l + 1),
        G::point(row, b + 4, l),
        G::point(row, b + 4, l + 1),
    ]
}

pub(super) struct Mxfp4;

impl<I: Isa> Decoder<I> for Mxfp4 {
    const FACTS: CodeFacts = facts(Format::Mxfp4);
    const ORDER: ActOrder = Format::Mxfp4.act_order();
    const PREFETCH: [usize; 3] = Format::Mxfp4.group_bytes();
    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: blocks of 17 bytes, 136 in all.
        unsafe {
            let ws = I::e8m0_half::<17>(p, 0);
            let codes = look_up::<I>(&E2M1_CODES, split_nibbles::<I>(words::<I>(p, 1, 17)));
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

pub(super) struct Mxfp4Split;

impl<I: Isa> Decoder<I> for Mxfp4Split {
    const FACTS: CodeFacts = facts(Format::Mxfp4Split);
    const ORDER: ActOrder = Format::Mxfp4Split.act_order();
    const PREFETCH: [usize; 3] = Format::Mxfp4Split.group_bytes();
    #[inline(always)]
    unsafe fn decode(&self, [p, s, _]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: 128 bytes of codes, 8 of scales.
        unsafe {
            let ws = I::e8m0_half::<1>(s, 0);
            let codes = look_up::<I>(&E2M1_CODES, split_nibbles::<I>(I::load_packed(p)));
            Decoded { codes, ws: [ws; 2], wb: [ws; 2] }
        }
    }
}

/// MLX affine.
pub(super) struct Mlx<const BITS: u8> {
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

/// Any format whose activations are in sequential order, through the portable decoder.
pub(super) struct Portable<const HALVES: bool, const BIAS: bool> {
    pub format: Format,
    pub offset: i32,
}

/// Not inlined: it is large, and would be compiled once for every kernel.
#[inline(never)]
fn decode_any(format: Format, bytes: [&[u8]; 3], out: &mut Group) {
    decode_group(format, bytes, 8, out);
}

impl<I: Isa, const HALVES: bool, const BIAS: bool> Decoder<I> for Portable<HALVES, BIAS> {
    const FACTS: CodeFacts = CodeFacts { offset: 0, max_code: 255, halves: HALVES, bias: BIAS };
    const ORDER: ActOrder = ActOrder::Sequential;
    const PREFETCH: [usize; 3] = [0; 3];

    #[inline(always)]
    fn offset(&self) -> i32 {
        self.offset
    }

    #[inline(always)]
    unsafe fn decode(&self, planes: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: whole groups in every plane; 8 blocks of 32 codes.
        unsafe {
            let mut groups = [Group::EMPTY; 2];
            let size = self.format.group_bytes();
            for r in 0..I::ROWS {
                let bytes = std::array::from_fn(|p| match size[p] {
                    0 => &[][..],
                    n => std::slice::from_raw_parts(planes[p][r], n),
                });
                decode_any(self.format, bytes, &mut groups[r]);
            }
            let [a, b] = &groups;
            let rows = [a.codes.as_ptr(), b.codes.as_ptr()];
            Decoded {
                codes: concat(words::<I>(rows, 0, BLOCK), words::<I>(rows, 16, BLOCK)),
                ws: [I::f32([a.ws[0], b.ws[0]]), I::f32([a.ws[1], b.ws[1]])],
                wb: [I::f32([a.wb[0], b.wb[0]]), I::f32([a.wb[1], b.wb[1]])],
            }
        }
    }
}
