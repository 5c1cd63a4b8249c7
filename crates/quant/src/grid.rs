//! The grid formats, `IQ1`, `IQ2` and `IQ3`: super-blocks of 256 weights whose coordinates are looked up eight (or four) at a
//! time, with a sign for each.
//!
//! Coordinate and sign together are an index into 16 codes. The parts of a super-block are functions of their own, for vector
//! decoders that keep them in registers.

#![allow(clippy::needless_range_loop)]

use crate::format::Format;
use crate::grid_points as points;
use crate::group::{BLOCK, Group, LANES, array, even_bytes, f16_to_f32, spread_nibbles};

/// What [`GridFormat::signs`] gives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signs {
    /// 32 signs.
    All,
    /// Seven signs in each byte; the eighth, on top, makes the number of set bits even.
    Sevens,
    /// Four times seven signs without gaps, and in the top four bits the block's scale.
    SevensAndScale,
}

/// A grid format. All functions take a whole super-block and panic if it is shorter.
pub trait GridFormat {
    /// Its row in the table of formats.
    const FORMAT: Format;
    /// Codes of the coordinates; those of weights with a sign from index 8 on.
    const CODES: [u8; 16];
    /// A block's scale `s` stands for `2 s + 1` times this much of the super-block's.
    const UNIT: f32;
    /// How signs are stored.
    const SIGNS: Signs;

    /// Coordinates of weights `8 l .. 8 l + 8` of block `b`, a byte each.
    fn point(bytes: &[u8], b: usize, l: usize) -> u64;
    /// Signs of block `b`, lowest bit first.
    fn signs(bytes: &[u8], b: usize) -> u32;
    /// The super-block's scale, an f16.
    #[inline(always)]
    fn d(bytes: &[u8]) -> u16 {
        u16::from_le_bytes(*array(bytes, 0))
    }
    /// Scales of the first and of the second halves of the blocks, a byte each.
    fn scales(bytes: &[u8]) -> [u64; 2];
}

/// [`Signs::All`] from any.
#[inline(always)]
fn all_signs(kind: Signs, x: u32) -> u32 {
    let x = match kind {
        Signs::All => return x,
        Signs::Sevens => x,
        Signs::SevensAndScale => {
            (x & 0x7f) | (x << 1 & 0x7f00) | (x << 2 & 0x7f_0000) | (x << 3 & 0x7f00_0000)
        }
    };
    let p = x ^ x >> 4;
    let p = p ^ p >> 2;
    x | ((p ^ p >> 1) & 0x0101_0101) << 7
}

/// As `forebay_quant::decode_group`.
#[inline(always)]
pub fn decode<G: GridFormat>(bytes: &[u8], out: &mut Group) {
    let d = f16_to_f32(G::d(bytes)) * G::UNIT;
    let scales = G::scales(bytes).map(u64::to_le_bytes);
    for b in 0..LANES {
        for half in 0..2 {
            out.ws[half][b] = d * (2 * scales[half][b] + 1) as f32;
        }
        let signs = all_signs(G::SIGNS, G::signs(bytes, b));
        for l in 0..4 {
            let point = G::point(bytes, b, l).to_le_bytes();
            for i in 0..8 {
                let sign = (signs >> (8 * l + i)) as u8 & 1;
                out.codes[BLOCK * b + 8 * l + i] = G::CODES[(point[i] | sign << 3) as usize & 15];
            }
        }
    }
}

#[inline(always)]
fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*array(bytes, at))
}

#[inline(always)]
fn half_word(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(*array(bytes, at))
}

/// Bytes made of what `f` says of each block. Not through an array: that would be stored in bytes and read as a word.
#[inline(always)]
fn each_block(f: impl Fn(usize) -> u64) -> u64 {
    let mut all = 0;
    for b in 0..LANES {
        all |= f(b) << (8 * b);
    }
    all
}

/// Low nibbles of eight bytes, high nibbles of them.
#[inline(always)]
fn nibbles_by_halves(bytes: &[u8; 8]) -> [u64; 2] {
    let x = u64::from_le_bytes(*bytes);
    [x & 0x0f0f_0f0f_0f0f_0f0f, x >> 4 & 0x0f0f_0f0f_0f0f_0f0f]
}

#[inline(always)]
fn pair(low: u32, high: u32) -> u64 {
    low as u64 | (high as u64) << 32
}

const IQ1_CODES: [u8; 16] = [2, 10, 18, 0, 0, 0, 0, 0, 0, 8, 16, 0, 0, 0, 0, 0];
const IQ2_CODES: [u8; 16] = [51, 68, 86, 0, 0, 0, 0, 0, 35, 18, 0, 0, 0, 0, 0, 0];

/// `IQ2_XXS`
#[derive(Clone, Copy, Debug)]
pub struct Iq2Xxs;

impl GridFormat for Iq2Xxs {
    const FORMAT: Format = Format::Iq2Xxs;
    const CODES: [u8; 16] = IQ2_CODES;
    const UNIT: f32 = 0.125;
    const SIGNS: Signs = Signs::SevensAndScale;
    #[inline(always)]
    fn point(bytes: &[u8], b: usize, l: usize) -> u64 {
        points::IQ2_XXS[bytes[2 + 8 * b + l] as usize]
    }
    #[inline(always)]
    fn signs(bytes: &[u8], b: usize) -> u32 {
        word(bytes, 6 + 8 * b)
    }
    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        [each_block(|b| (word(bytes, 6 + 8 * b) >> 28) as u64); 2]
    }
}

/// `IQ2_XS`
#[derive(Clone, Copy, Debug)]
pub struct Iq2Xs;

impl GridFormat for Iq2Xs {
    const FORMAT: Format = Format::Iq2Xs;
    const CODES: [u8; 16] = IQ2_CODES;
    const UNIT: f32 = 0.125;
    const SIGNS: Signs = Signs::Sevens;
    #[inline(always)]
    fn point(bytes: &[u8], b: usize, l: usize) -> u64 {
        points::IQ2_XS[half_word(bytes, 2 + 8 * b + 2 * l) as usize & 511]
    }
    #[inline(always)]
    fn signs(bytes: &[u8], b: usize) -> u32 {
        let x = u64::from_le_bytes(*array(bytes, 2 + 8 * b));
        even_bytes(x >> 9 & 0x007f_007f_007f_007f) as u32
    }
    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        nibbles_by_halves(array(bytes, 66))
    }
}

/// `IQ2_S`
#[derive(Clone, Copy, Debug)]
pub struct Iq2S;

impl GridFormat for Iq2S {
    const FORMAT: Format = Format::Iq2S;
    const CODES: [u8; 16] = IQ2_CODES;
    const UNIT: f32 = 0.125;
    const SIGNS: Signs = Signs::All;
    #[inline(always)]
    fn point(bytes: &[u8], b: usize, l: usize) -> u64 {
        let high = (bytes[66 + b] as usize) << 8 >> (2 * l) & 0x300;
        points::IQ2_S[bytes[2 + 4 * b + l] as usize | high]
    }
    #[inline(always)]
    fn signs(bytes: &[u8], b: usize) -> u32 {
        word(bytes, 34 + 4 * b)
    }
    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        nibbles_by_halves(array(bytes, 74))
    }
}

/// `IQ3_XXS`
#[derive(Clone, Copy, Debug)]
pub struct Iq3Xxs;

impl GridFormat for Iq3Xxs {
    const FORMAT: Format = Format::Iq3Xxs;
    const CODES: [u8; 16] = [66, 74, 82, 90, 98, 106, 114, 124, 58, 50, 42, 34, 26, 18, 10, 0];
    const UNIT: f32 = 0.25;
    const SIGNS: Signs = Signs::SevensAndScale;
    #[inline(always)]
    fn point(bytes: &[u8], b: usize, l: usize) -> u64 {
        let at = 2 + 8 * b + 2 * l;
        pair(points::IQ3_XXS[bytes[at] as usize], points::IQ3_XXS[bytes[at + 1] as usize])
    }
    #[inline(always)]
    fn signs(bytes: &[u8], b: usize) -> u32 {
        word(bytes, 66 + 4 * b)
    }
    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        [each_block(|b| (word(bytes, 66 + 4 * b) >> 28) as u64); 2]
    }
}

/// `IQ3_S`
#[derive(Clone, Copy, Debug)]
pub struct Iq3S;

impl GridFormat for Iq3S {
    const FORMAT: Format = Format::Iq3S;
    const CODES: [u8; 16] = [16, 18, 20, 22, 24, 26, 28, 30, 14, 12, 10, 8, 6, 4, 2, 0];
    const UNIT: f32 = 1.0;
    const SIGNS: Signs = Signs::All;
    #[inline(always)]
    fn point(bytes: &[u8], b: usize, l: usize) -> u64 {
        let (at, ninth) = (2 + 8 * b + 2 * l, (bytes[66 + b] as usize) << 8);
        let low = bytes[at] as usize | (ninth >> (2 * l) & 0x100);
        let high = bytes[at + 1] as usize | (ninth >> (2 * l + 1) & 0x100);
        pair(points::IQ3_S[low], points::IQ3_S[high])
    }
    #[inline(always)]
    fn signs(bytes: &[u8], b: usize) -> u32 {
        word(bytes, 74 + 4 * b)
    }
    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        [spread_nibbles(word(bytes, 106)); 2]
    }
}

/// `IQ1_S`: weights with a sign are shifted down by an eighth, the others up.
#[derive(Clone, Copy, Debug)]
pub struct Iq1S;

impl GridFormat for Iq1S {
    const FORMAT: Format = Format::Iq1S;
    const CODES: [u8; 16] = IQ1_CODES;
    const UNIT: f32 = 0.125;
    const SIGNS: Signs = Signs::All;
    #[inline(always)]
    fn point(bytes: &[u8], b: usize, l: usize) -> u64 {
        let high = (half_word(bytes, 34 + 2 * b) as usize) >> (3 * l) & 7;
        points::IQ1[bytes[2 + 4 * b + l] as usize | high << 8]
    }
    #[inline(always)]
    fn signs(bytes: &[u8], b: usize) -> u32 {
        (half_word(bytes, 34 + 2 * b) as i16 >> 15) as i32 as u32
    }
    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        [each_block(|b| (half_word(bytes, 34 + 2 * b) >> 12 & 7) as u64); 2]
    }
}

/// `IQ1_M`: as `IQ1_S`.
#[derive(Clone, Copy, Debug)]
pub struct Iq1M;

impl GridFormat for Iq1M {
    const FORMAT: Format = Format::Iq1M;
    const CODES: [u8; 16] = IQ1_CODES;
    const UNIT: f32 = 0.125;
    const SIGNS: Signs = Signs::All;
    #[inline(always)]
    fn point(bytes: &[u8], b: usize, l: usize) -> u64 {
        let high = (half_word(bytes, 32 + 2 * b) as usize) >> (4 * l) & 7;
        points::IQ1[bytes[4 * b + l] as usize | high << 8]
    }
    #[inline(always)]
    fn signs(bytes: &[u8], b: usize) -> u32 {
        // Bits 3, 7, 11 and 15, each for eight weights.
        let x = (half_word(bytes, 32 + 2 * b) >> 3 & 0x1111) as u32;
        let x = (x | x << 8) & 0x0011_0011;
        ((x | x << 4) & 0x0101_0101) * 255
    }
    #[inline(always)]
    fn d(bytes: &[u8]) -> u16 {
        // The top nibbles of four words, lowest first.
        let packed = u64::from_le_bytes(*array(bytes, 48));
        let piece = |i: u32| (packed >> (16 * i + 12) & 15) << (4 * i);
        (piece(0) | piece(1) | piece(2) | piece(3)) as u16
    }
    #[inline(always)]
    fn scales(bytes: &[u8]) -> [u64; 2] {
        // Four times three bits in each word, by block and half.
        let packed = u64::from_le_bytes(*array(bytes, 48));
        let at = |b: usize, half: usize| packed >> (16 * (b / 2) + 6 * (b % 2) + 3 * half) & 7;
        [each_block(|b| at(b, 0)), each_block(|b| at(b, 1))]
    }
}
