//! Decoding the bytes of a *group* (8 blocks of 32 weights) into unsigned codes, scales and biases.
//!
//! This is the one place that knows what the bytes of a format mean; dequantisation, the oracle and the portable
//! kernels are all built on it, and the SIMD decoders of `forebay-cpu` are tested against it. The functions are
//! plain loops over fixed sizes and always inlined, so that a caller compiled for a wider vector
//! unit gets them vectorised for it.

#![allow(clippy::needless_range_loop)]

use crate::format::{ActOrder, Format, ParamType};
use crate::grid;

/// Weights of a block.
pub const BLOCK: usize = 32;
/// Blocks of a group, which is also the number of lanes of a `q8` dot product.
pub const LANES: usize = 8;
/// Weights of a group.
pub const GROUP: usize = BLOCK * LANES;

/// A decoded group. Weight `e` of block `b` is `ws[e / 16][b] * (codes[32 b + e] - offset) + wb[e / 16][b]`.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub struct Group {
    /// Unsigned codes in the order of the weights.
    pub codes: [u8; GROUP],
    /// Scales `[half][block]`; both halves are the same in formats with one scale per 32.
    pub ws: [[f32; LANES]; 2],
    /// Biases `[half][block]`, signed as they are added; only meaningful in formats that have one.
    pub wb: [[f32; LANES]; 2],
}

impl Group {
    /// A group whose blocks contribute nothing to any sum: scales and biases are -0, and adding -0 changes no
    /// number.
    pub const EMPTY: Group =
        Group { codes: [0; GROUP], ws: [[-0.0; LANES]; 2], wb: [[-0.0; LANES]; 2] };
}

/// Where dword `j`, byte `k` of a block's packed codes comes from: `ELEMENT[order][j * 4 + k]`.
const SEQUENTIAL: [u8; BLOCK] = {
    let mut t = [0; BLOCK];
    let mut i = 0;
    while i < BLOCK {
        t[i] = i as u8;
        i += 1;
    }
    t
};
const NIBBLE_PAIRS: [u8; BLOCK] = {
    let mut t = [0; BLOCK];
    let mut i = 0;
    while i < 16 {
        t[i] = 2 * i as u8;
        t[16 + i] = 2 * i as u8 + 1;
        i += 1;
    }
    t
};

impl ActOrder {
    /// The element of a block at each of the 32 packed places (dword `i / 4`, byte `i % 4`).
    #[inline(always)]
    pub const fn elements(self) -> &'static [u8; BLOCK] {
        match self {
            ActOrder::Sequential => &SEQUENTIAL,
            ActOrder::NibblePairs => &NIBBLE_PAIRS,
        }
    }
}

/// Reorders codes from weight order into packed order: `[dword j][block][byte]`, so that in a vector of one `j`
/// the 32-bit lane is the block.
#[inline(always)]
pub fn pack_codes(order: ActOrder, codes: &[u8; GROUP], packed: &mut [u8; GROUP]) {
    let elements = order.elements();
    for b in 0..LANES {
        for (i, &e) in elements.iter().enumerate() {
            packed[(i / 4) * 32 + b * 4 + i % 4] = codes[b * BLOCK + e as usize];
        }
    }
}

/// Decodes one group. `planes` are the group's bytes, `blocks` how many of the 8 blocks exist; what is said of
/// the others in [`Group::EMPTY`] holds for the missing ones.
///
/// # Panics
/// If a plane has fewer bytes than the blocks need, or the format is not quantised.
#[inline(always)]
pub fn decode_group(format: Format, planes: [&[u8]; 3], blocks: usize, out: &mut Group) {
    if blocks < LANES {
        *out = Group::EMPTY;
    }
    match format {
        Format::Q8_0 => q8_0(planes[0], blocks, out),
        Format::Q4_0 => q4_0(planes[0], blocks, out),
        Format::Q4_1 => q4_1(planes[0], blocks, out),
        Format::Q5_0 => q5_0(planes[0], blocks, out),
        Format::Q5_1 => q5_1(planes[0], blocks, out),
        Format::Q2K => q2_k(planes[0], out),
        Format::Q3K => q3_k(planes[0], out),
        Format::Q4K => q4_k(planes[0], out),
        Format::Q5K => q5_k(planes[0], out),
        Format::Q6K => q6_k(planes[0], out),
        Format::Iq1S => grid::decode::<grid::Iq1S>(planes[0], out),
        Format::Iq1M => grid::decode::<grid::Iq1M>(planes[0], out),
        Format::Iq2Xxs => grid::decode::<grid::Iq2Xxs>(planes[0], out),
        Format::Iq2Xs => grid::decode::<grid::Iq2Xs>(planes[0], out),
        Format::Iq2S => grid::decode::<grid::Iq2S>(planes[0], out),
        Format::Iq3Xxs => grid::decode::<grid::Iq3Xxs>(planes[0], out),
        Format::Iq3S => grid::decode::<grid::Iq3S>(planes[0], out),
        Format::Iq4Nl => iq4_nl(planes[0], blocks, out),
        Format::Iq4Xs => iq4_xs(planes[0], out),
        Format::Mxfp4 => mxfp4(planes[0], blocks, out),
        Format::Mxfp4Split => mxfp4_split(planes, blocks, out),
        Format::MlxAffine { bits, group, params } => {
            mlx_affine(bits, group as usize, params, planes, blocks, out)
        }
        Format::F32 | Format::F16 | Format::Bf16 => panic!("float formats have no codes"),
    }
}

/// Half to single, as the hardware converts: denormals exact, NaNs quieted. Branch-free, so it vectorises.
#[inline(always)]
pub fn f16_to_f32(h: u16) -> f32 {
    let em = (h & 0x7fff) as u32;
    let finite = f32::from_bits(em << 13) * f32::from_bits(0x7780_0000); // 2^112 moves the exponent's bias
    let special = (em << 13) | 0x7f80_0000 | if em > 0x7c00 { 0x40_0000 } else { 0 };
    let bits = if em >= 0x7c00 { special } else { finite.to_bits() };
    f32::from_bits(bits | ((h & 0x8000) as u32) << 16)
}

/// bfloat16 to single.
#[inline(always)]
pub fn bf16_to_f32(h: u16) -> f32 {
    f32::from_bits((h as u32) << 16)
}

/// Half of an E8M0 scale, `2^(s - 128)`, exactly; NaN for 255. Half, because E2M1 codes are kept as integers of
/// twice their value.
#[inline(always)]
pub fn e8m0_half(s: u8) -> f32 {
    f32::from_bits(match s {
        0 | 1 => 0x0020_0000 << s,
        255 => 0x7fc0_0000,
        _ => (s as u32 - 1) << 23,
    })
}

#[inline(always)]
fn f16_at(bytes: &[u8], i: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([bytes[i], bytes[i + 1]]))
}

#[inline(always)]
fn set_ws(out: &mut Group, b: usize, ws: f32) {
    out.ws[0][b] = ws;
    out.ws[1][b] = ws;
}

#[inline(always)]
fn set_wb(out: &mut Group, b: usize, wb: f32) {
    out.wb[0][b] = wb;
    out.wb[1][b] = wb;
}

/// Low nibbles to the first 16 codes of a block, high ones to the last 16.
#[inline(always)]
fn split_nibbles(bytes: &[u8; 16], codes: &mut [u8; BLOCK]) {
    for i in 0..16 {
        codes[i] = bytes[i] & 15;
        codes[16 + i] = bytes[i] >> 4;
    }
}

#[inline(always)]
fn block_codes(out: &mut Group, b: usize) -> &mut [u8; BLOCK] {
    (&mut out.codes[b * BLOCK..][..BLOCK]).try_into().expect("32 codes")
}

#[inline(always)]
pub(crate) fn array<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    bytes[at..][..N].try_into().expect("a slice of N")
}

#[inline(always)]
fn q8_0(bytes: &[u8], blocks: usize, out: &mut Group) {
    for b in 0..blocks {
        let block: &[u8; 34] = array(bytes, b * 34);
        set_ws(out, b, f16_at(block, 0));
        let codes = block_codes(out, b);
        for i in 0..BLOCK {
            codes[i] = block[2 + i] ^ 0x80;
        }
    }
}

#[inline(always)]
fn q4_0(bytes: &[u8], blocks: usize, out: &mut Group) {
    for b in 0..blocks {
        let block: &[u8; 18] = array(bytes, b * 18);
        set_ws(out, b, f16_at(block, 0));
        split_nibbles(array(block, 2), block_codes(out, b));
    }
}

#[inline(always)]
fn q4_1(bytes: &[u8], blocks: usize, out: &mut Group) {
    for b in 0..blocks {
        let block: &[u8; 20] = array(bytes, b * 20);
        set_ws(out, b, f16_at(block, 0));
        set_wb(out, b, f16_at(block, 2));
        split_nibbles(array(block, 4), block_codes(out, b));
    }
}

/// Nibbles behind 32 high bits.
#[inline(always)]
fn five_bits(bytes: &[u8; 20], codes: &mut [u8; BLOCK]) {
    let high = u32::from_le_bytes(*array(bytes, 0));
    split_nibbles(array(bytes, 4), codes);
    for (i, code) in codes.iter_mut().enumerate() {
        *code |= ((high >> i) as u8 & 1) << 4;
    }
}

#[inline(always)]
fn q5_0(bytes: &[u8], blocks: usize, out: &mut Group) {
    for b in 0..blocks {
        let block: &[u8; 22] = array(bytes, b * 22);
        set_ws(out, b, f16_at(block, 0));
        five_bits(array(block, 2), block_codes(out, b));
    }
}

#[inline(always)]
fn q5_1(bytes: &[u8], blocks: usize, out: &mut Group) {
    for b in 0..blocks {
        let block: &[u8; 24] = array(bytes, b * 24);
        set_ws(out, b, f16_at(block, 0));
        set_wb(out, b, f16_at(block, 2));
        five_bits(array(block, 4), block_codes(out, b));
    }
}

#[inline(always)]
fn q2_k(bytes: &[u8], out: &mut Group) {
    let block: &[u8; 84] = array(bytes, 0);
    let (d, dmin) = (f16_at(block, 80), f16_at(block, 82));
    for b in 0..LANES {
        for half in 0..2 {
            let packed = block[2 * b + half];
            out.ws[half][b] = d * (packed & 15) as f32;
            out.wb[half][b] = -(dmin * (packed >> 4) as f32);
        }
    }
    for b in 0..LANES {
        let bits: &[u8; 32] = array(block, 16 + 32 * (b / 4));
        let codes = block_codes(out, b);
        for i in 0..BLOCK {
            codes[i] = bits[i] >> (2 * (b % 4)) & 3;
        }
    }
}

/// Bytes 0, 2, 4 and 6.
#[inline(always)]
pub fn even_bytes(x: u64) -> u64 {
    let x = x & 0x00ff_00ff_00ff_00ff;
    let x = (x | x >> 8) & 0x0000_ffff_0000_ffff;
    (x | x >> 16) & 0xffff_ffff
}

/// Sixteen bytes, one per 16 weights: those of the first halves of the blocks and those of the second.
#[inline(always)]
pub fn by_halves([a, b]: [u64; 2]) -> [u64; 2] {
    [even_bytes(a) | even_bytes(b) << 32, even_bytes(a >> 8) | even_bytes(b >> 8) << 32]
}

/// The signed scales of a `Q3_K` super-block, of first and second halves, one byte each.
#[inline(always)]
pub fn q3_k_scales(packed: &[u8; 12]) -> [u64; 2] {
    let low = u64::from_le_bytes(*array(packed, 0));
    let high = u32::from_le_bytes(*array(packed, 8)) as u64;
    let two = |shift: u32| high >> shift & 0x0303_0303;
    let spread = |low: u64, shift: u32| {
        let six = (low & 0x0f0f_0f0f_0f0f_0f0f) | (two(shift) | two(shift + 2) << 32) << 4;
        // Minus 32: plus 96, then minus 128 by turning the top bit.
        (six + 0x6060_6060_6060_6060) ^ 0x8080_8080_8080_8080
    };
    by_halves([spread(low, 0), spread(low >> 4, 4)])
}

#[inline(always)]
fn q3_k(bytes: &[u8], out: &mut Group) {
    let block: &[u8; 110] = array(bytes, 0);
    let d = f16_at(block, 108);
    let scales = q3_k_scales(array(block, 96));
    for half in 0..2 {
        for b in 0..LANES {
            out.ws[half][b] = d * (scales[half].to_le_bytes()[b] as i8) as f32;
        }
    }
    let high: &[u8; 32] = array(block, 0);
    for b in 0..LANES {
        let low: &[u8; 32] = array(block, 32 + 32 * (b / 4));
        let codes = block_codes(out, b);
        for i in 0..BLOCK {
            codes[i] = (low[i] >> (2 * (b % 4)) & 3) | (high[i] >> b & 1) << 2;
        }
    }
}

/// The eight 6-bit scales and eight 6-bit minima of a `Q4_K` super-block, one byte each.
#[inline(always)]
pub fn q4_k_scales(packed: &[u8; 12]) -> (u64, u64) {
    let word = |i: usize| u32::from_le_bytes(*array(packed, i)) as u64;
    let (a, b, c) = (word(0), word(4), word(8));
    let low6 = 0x3f3f_3f3f;
    let scales = (a & low6) | ((c & 0x0f0f_0f0f) | (a >> 6 & 0x0303_0303) << 4) << 32;
    let minima = (b & low6) | ((c >> 4 & 0x0f0f_0f0f) | (b >> 6 & 0x0303_0303) << 4) << 32;
    (scales, minima)
}

/// Scales and minima as `Q4_K` has them, and the nibbles behind.
#[inline(always)]
fn k_nibbles(header: &[u8; 16], nibbles: &[u8; 128], out: &mut Group) {
    let (d, dmin) = (f16_at(header, 0), f16_at(header, 2));
    let (scales, minima) = q4_k_scales(array(header, 4));
    for b in 0..LANES {
        set_ws(out, b, d * scales.to_le_bytes()[b] as f32);
        set_wb(out, b, -(dmin * minima.to_le_bytes()[b] as f32));
    }
    for pair in 0..4 {
        let nibbles: &[u8; 32] = array(nibbles, 32 * pair);
        for i in 0..32 {
            out.codes[pair * 64 + i] = nibbles[i] & 15;
            out.codes[pair * 64 + 32 + i] = nibbles[i] >> 4;
        }
    }
}

#[inline(always)]
fn q4_k(bytes: &[u8], out: &mut Group) {
    k_nibbles(array(bytes, 0), array(bytes, 16), out);
}

#[inline(always)]
fn q5_k(bytes: &[u8], out: &mut Group) {
    k_nibbles(array(bytes, 0), array(bytes, 48), out);
    let high: &[u8; 32] = array(bytes, 16);
    for b in 0..LANES {
        let codes = block_codes(out, b);
        for i in 0..BLOCK {
            codes[i] |= (high[i] >> b & 1) << 4;
        }
    }
}

#[inline(always)]
fn q6_k(bytes: &[u8], out: &mut Group) {
    let block: &[u8; 210] = array(bytes, 0);
    let d = f16_at(block, 208);
    for b in 0..LANES {
        for half in 0..2 {
            out.ws[half][b] = d * (block[192 + 2 * b + half] as i8) as f32;
        }
    }
    for n in 0..2 {
        let low: &[u8; 64] = array(block, 64 * n);
        let high: &[u8; 32] = array(block, 128 + 32 * n);
        for i in 0..32 {
            let codes = &mut out.codes[128 * n..];
            codes[i] = (low[i] & 15) | (high[i] & 3) << 4;
            codes[32 + i] = (low[32 + i] & 15) | (high[i] >> 2 & 3) << 4;
            codes[64 + i] = (low[i] >> 4) | (high[i] >> 4 & 3) << 4;
            codes[96 + i] = (low[32 + i] >> 4) | (high[i] >> 6) << 4;
        }
    }
}

/// The levels of `IQ4_NL` and `IQ4_XS`, plus 127.
pub const IQ4_CODES: [u8; 16] =
    [0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240];

#[inline(always)]
fn iq4_nl(bytes: &[u8], blocks: usize, out: &mut Group) {
    for b in 0..blocks {
        let block: &[u8; 18] = array(bytes, b * 18);
        set_ws(out, b, f16_at(block, 0));
        let codes = block_codes(out, b);
        split_nibbles(array(block, 2), codes);
        codes.iter_mut().for_each(|c| *c = IQ4_CODES[*c as usize]);
    }
}

/// Eight nibbles, lowest first, as bytes.
#[inline(always)]
pub fn spread_nibbles(x: u32) -> u64 {
    let x = x as u64;
    let x = (x | x << 16) & 0x0000_ffff_0000_ffff;
    let x = (x | x << 8) & 0x00ff_00ff_00ff_00ff;
    (x | x << 4) & 0x0f0f_0f0f_0f0f_0f0f
}

/// The signed scales of an `IQ4_XS` super-block, one byte each: two high bits of each, then four low ones.
#[inline(always)]
pub fn iq4_xs_scales(packed: &[u8; 6]) -> u64 {
    let high = u16::from_le_bytes(*array(packed, 0)) as u64;
    let high = (high | high << 24) & 0x0000_00ff_0000_00ff;
    let high = (high | high << 12) & 0x000f_000f_000f_000f;
    let high = (high | high << 6) & 0x0303_0303_0303_0303;
    let six = spread_nibbles(u32::from_le_bytes(*array(packed, 2))) | high << 4;
    // Minus 32: plus 96, then minus 128 by turning the top bit.
    (six + 0x6060_6060_6060_6060) ^ 0x8080_8080_8080_8080
}

#[inline(always)]
fn iq4_xs(bytes: &[u8], out: &mut Group) {
    let block: &[u8; 136] = array(bytes, 0);
    let d = f16_at(block, 0);
    let scales = iq4_xs_scales(array(block, 2));
    for b in 0..LANES {
        set_ws(out, b, d * (scales.to_le_bytes()[b] as i8) as f32);
        let codes = block_codes(out, b);
        split_nibbles(array(block, 8 + 16 * b), codes);
        codes.iter_mut().for_each(|c| *c = IQ4_CODES[*c as usize]);
    }
}

/// Twice the E2M1 values, plus 12.
pub const E2M1_CODES: [u8; 16] = [12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0];

#[inline(always)]
fn mxfp4(bytes: &[u8], blocks: usize, out: &mut Group) {
    for b in 0..blocks {
        let block: &[u8; 17] = array(bytes, b * 17);
        set_ws(out, b, e8m0_half(block[0]));
        let codes = block_codes(out, b);
        split_nibbles(array(block, 1), codes);
        codes.iter_mut().for_each(|c| *c = E2M1_CODES[*c as usize]);
    }
}

#[inline(always)]
fn mxfp4_split(planes: [&[u8]; 3], blocks: usize, out: &mut Group) {
    for b in 0..blocks {
        let block: &[u8; 16] = array(planes[0], b * 16);
        set_ws(out, b, e8m0_half(planes[1][b]));
        let codes = block_codes(out, b);
        for i in 0..16 {
            codes[2 * i] = E2M1_CODES[(block[i] & 15) as usize];
            codes[2 * i + 1] = E2M1_CODES[(block[i] >> 4) as usize];
        }
    }
}

/// One number of an MLX parameter plane.
#[inline(always)]
pub fn param_at(params: ParamType, bytes: &[u8], i: usize) -> f32 {
    match params {
        ParamType::Bf16 => bf16_to_f32(u16::from_le_bytes(*array(bytes, 2 * i))),
        ParamType::F16 => f16_at(bytes, 2 * i),
        ParamType::F32 => f32::from_le_bytes(*array(bytes, 4 * i)),
    }
}

#[inline(always)]
fn mlx_affine(
    bits: u8,
    group: usize,
    params: ParamType,
    planes: [&[u8]; 3],
    blocks: usize,
    out: &mut Group,
) {
    for b in 0..blocks {
        let i = b * BLOCK / group;
        set_ws(out, b, param_at(params, planes[1], i));
        set_wb(out, b, param_at(params, planes[2], i));
        let block = &planes[0][b * 4 * bits as usize..][..4 * bits as usize];
        unpack_bits(bits, block, block_codes(out, b));
    }
}

/// 32 codes of `bits` bits from a little-endian bit stream, lowest first.
#[inline(always)]
fn unpack_bits(bits: u8, bytes: &[u8], codes: &mut [u8; BLOCK]) {
    match bits {
        4 => {
            for i in 0..16 {
                codes[2 * i] = bytes[i] & 15;
                codes[2 * i + 1] = bytes[i] >> 4;
            }
        }
        8 => codes.copy_from_slice(bytes),
        2 => unpack_eights::<2>(bytes, codes),
        3 => unpack_eights::<3>(bytes, codes),
        5 => unpack_eights::<5>(bytes, codes),
        6 => unpack_eights::<6>(bytes, codes),
        _ => panic!("codes of {bits} bits"),
    }
}

/// Eight codes of `BITS` bits are `BITS` bytes.
#[inline(always)]
fn unpack_eights<const BITS: usize>(bytes: &[u8], codes: &mut [u8; BLOCK]) {
    let bytes = bytes.as_chunks::<BITS>().0;
    for (bytes, codes) in bytes.iter().zip(codes.as_chunks_mut::<8>().0) {
        let mut word = [0; 8];
        word[..BITS].copy_from_slice(bytes);
        let word = u64::from_le_bytes(word);
        for (i, code) in codes.iter_mut().enumerate() {
            *code = (word >> (i * BITS)) as u8 & ((1 << BITS) - 1);
        }
    }
}
