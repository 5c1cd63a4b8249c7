//! Decoders: from the bytes of a group to packed codes, scales and biases, for any [`Isa`].
//!
//! They give what `forebay_quant::decode_group` and `pack_codes` give. All read exactly the bytes of a whole
//! group; the kernel copies a shorter last group into a padded buffer.
//!
//! No closures around vector operations, here or in the kernels: a closure is a function of its own without the
//! caller's instruction set, and unless it happens to be inlined every operation in it becomes a call.

mod grid;
mod k;
mod legacy;
mod mlx;
mod tables;

use forebay_quant::group::{BLOCK, Group, decode_group};
use forebay_quant::{ActOrder, CodeFacts, Format};

pub(super) use grid::*;
pub(super) use k::*;
pub(super) use legacy::*;
pub(super) use mlx::*;
pub(super) use tables::*;

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
