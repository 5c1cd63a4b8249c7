//! How keys and values lie in a page, and writing them there.
//!
//! A page holds [`BLOCK`] consecutive positions, aligned to their absolute position, of all KV heads of
//! one layer. Heads follow one another; of a head come, without padding:
//!
//! | part     | shape               | type                                    |
//! |----------|---------------------|-----------------------------------------|
//! | keys     | `[head_dim][BLOCK]` | f32, f16 or i8: transposed, so that 32 scores are computed side by side |
//! | values   | `[BLOCK][v_head_dim]` | the same                              |
//! | k scales | `[BLOCK]`           | f32, `Q8` only                          |
//! | v scales | `[BLOCK]`           | f32, `Q8` only                          |
//!
//! Numbers are little endian and may start at any address.

use crate::dispatch::per_level;
use crate::half_float::{f16_to_f32, f32_to_f16};
use crate::simd::Level;

/// Positions of a page.
pub const BLOCK: usize = 32;

/// Number type of the KV cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KvType {
    /// IEEE single.
    F32,
    /// IEEE half, rounded to nearest, ties to even.
    F16,
    /// 8-bit codes with one f32 scale per position and head, keys and values apart:
    /// `amax / 127`, codes rounded to nearest, ties to even.
    Q8,
}

impl KvType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::F16 => 2,
            KvType::Q8 => 1,
        }
    }
}

/// Shape of one layer's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayout {
    /// KV heads.
    pub n_kv_heads: usize,
    /// Width of a query or key head.
    pub head_dim: usize,
    /// Width of a value head.
    pub v_head_dim: usize,
    /// Number type.
    pub kv_type: KvType,
}

impl KvLayout {
    /// A layout whose values are as wide as its keys.
    pub fn new(n_kv_heads: usize, head_dim: usize, kv_type: KvType) -> KvLayout {
        KvLayout { n_kv_heads, head_dim, v_head_dim: head_dim, kv_type }
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.n_kv_heads * self.head_bytes()
    }

    /// Bytes of one head's part of a page.
    fn head_bytes(&self) -> usize {
        let scales = if self.kv_type == KvType::Q8 { 2 * BLOCK * 4 } else { 0 };
        (self.head_dim + self.v_head_dim) * BLOCK * self.kv_type.bytes() + scales
    }

    /// Width of a value row in [`Block`]: a multiple of [`BLOCK`].
    pub(super) fn padded_v(&self) -> usize {
        self.v_head_dim.next_multiple_of(BLOCK)
    }

    /// Writes the key `[n_kv_heads * head_dim]` and the value `[n_kv_heads * v_head_dim]` of one position
    /// into a page: `slot` is the position modulo [`BLOCK`].
    pub fn store(&self, level: Level, page: &mut [u8], slot: usize, k: &[f32], v: &[f32]) {
        assert!(slot < BLOCK && page.len() >= self.page_bytes());
        assert!(k.len() == self.n_kv_heads * self.head_dim);
        assert!(v.len() == self.n_kv_heads * self.v_head_dim);
        let size = self.kv_type.bytes();
        for h in 0..self.n_kv_heads {
            let k = &k[h * self.head_dim..][..self.head_dim];
            let v = &v[h * self.v_head_dim..][..self.v_head_dim];
            let head = &mut page[h * self.head_bytes()..][..self.head_bytes()];
            let (keys, rest) = head.split_at_mut(self.head_dim * BLOCK * size);
            let (values, scales) = rest.split_at_mut(self.v_head_dim * BLOCK * size);
            let value = &mut values[slot * self.v_head_dim * size..][..self.v_head_dim * size];
            match self.kv_type {
                KvType::F32 => {
                    store_column(keys, slot, k.iter().map(|x| x.to_le_bytes()));
                    store_row(value, v.iter().map(|x| x.to_le_bytes()));
                }
                KvType::F16 => {
                    half_pieces(level, k, |d, halves| {
                        let bytes = halves.iter().map(|x| x.to_le_bytes());
                        store_column(&mut keys[d * BLOCK * size..], slot, bytes);
                    });
                    half_pieces(level, v, |d, halves| {
                        store_row(&mut value[d * size..], halves.iter().map(|x| x.to_le_bytes()));
                    });
                }
                KvType::Q8 => {
                    let (k_scales, v_scales) = scales.split_at_mut(BLOCK * 4);
                    let (k_scale, k_factor) = quantize(k);
                    let (v_scale, v_factor) = quantize(v);
                    store_column(keys, slot, k.iter().map(|&x| [code(x, k_factor) as u8]));
                    store_row(value, v.iter().map(|&x| [code(x, v_factor) as u8]));
                    k_scales[slot * 4..][..4].copy_from_slice(&k_scale.to_le_bytes());
                    v_scales[slot * 4..][..4].copy_from_slice(&v_scale.to_le_bytes());
                }
            }
        }
    }

    /// Head `h` of a page.
    pub(super) fn head<'a>(&self, page: &'a [u8], h: usize) -> HeadParts<'a> {
        let size = self.kv_type.bytes();
        let head = &page[h * self.head_bytes()..][..self.head_bytes()];
        let (keys, rest) = head.split_at(self.head_dim * BLOCK * size);
        let (values, scales) = rest.split_at(self.v_head_dim * BLOCK * size);
        HeadParts { keys, values, scales }
    }

    /// Elements as f32; codes of `Q8` stay codes.
    pub(super) fn widen(&self, level: Level, bytes: &[u8], out: &mut [f32]) {
        match self.kv_type {
            KvType::F32 => f32_from_bytes(level, bytes, out),
            KvType::F16 => f16_to_f32(level, bytes, out),
            KvType::Q8 => f32_from_codes(level, bytes, out),
        }
    }
}

/// One head's part of a page, as it is stored: see the module's header.
#[derive(Clone, Copy)]
pub(super) struct HeadParts<'a> {
    pub keys: &'a [u8],
    pub values: &'a [u8],
    scales: &'a [u8],
}

impl HeadParts<'_> {
    /// Scales of keys and values, `[BLOCK]` each; `Q8` only.
    pub(super) fn scales(&self, k_scales: &mut [f32], v_scales: &mut [f32]) {
        let (k, v) = self.scales.split_at(BLOCK * 4);
        for (bytes, out) in [(k, k_scales), (v, v_scales)] {
            for (b, o) in bytes.as_chunks::<4>().0.iter().zip(out) {
                *o = f32::from_le_bytes(*b);
            }
        }
    }
}

/// Scale and factor of a `Q8` row: with `a` the largest magnitude, the scale is `a / 127`, and a code is
/// `x * (127 / a)` rounded to nearest, ties to even. Rows of magnitude below 1e-30 become zero; NaN and
/// infinity make the scale NaN or infinite, so that they are not lost.
fn quantize(x: &[f32]) -> (f32, f32) {
    // As integers, magnitudes are ordered and NaN is the largest.
    let largest = x.iter().fold(0, |m, v| m.max(v.to_bits() & 0x7fff_ffff));
    let a = f32::from_bits(largest);
    if a < 1e-30 { (0.0, 0.0) } else { (a / 127.0, 127.0 / a) }
}

fn code(x: f32, factor: f32) -> i8 {
    (x * factor).round_ties_even() as i8
}

/// Calls `f(start, halves)` for pieces of `x` in half precision.
fn half_pieces(level: Level, x: &[f32], mut f: impl FnMut(usize, &[u16])) {
    let mut halves = [0u16; 64];
    for (i, piece) in x.chunks(halves.len()).enumerate() {
        let halves = &mut halves[..piece.len()];
        f32_to_f16(level, piece, halves);
        f(i * 64, halves);
    }
}

/// Element `d` goes to `keys[d][slot]`.
fn store_column<const N: usize>(
    keys: &mut [u8],
    slot: usize,
    elements: impl Iterator<Item = [u8; N]>,
) {
    for (column, bytes) in keys.chunks_exact_mut(BLOCK * N).zip(elements) {
        column[slot * N..][..N].copy_from_slice(&bytes);
    }
}

fn store_row<const N: usize>(row: &mut [u8], elements: impl Iterator<Item = [u8; N]>) {
    for (to, bytes) in row.chunks_exact_mut(N).zip(elements) {
        to.copy_from_slice(&bytes);
    }
}

per_level! {
    fn f32_from_bytes(bytes: &[u8], out: &mut [f32]) = {
        #[inline(always)]
        fn body(bytes: &[u8], out: &mut [f32]) {
            for (b, o) in bytes.as_chunks::<4>().0.iter().zip(out) {
                *o = f32::from_le_bytes(*b);
            }
        }
        body
    }
}

per_level! {
    fn f32_from_codes(bytes: &[u8], out: &mut [f32]) = {
        #[inline(always)]
        fn body(bytes: &[u8], out: &mut [f32]) {
            for (b, o) in bytes.iter().zip(out) {
                *o = *b as i8 as f32;
            }
        }
        body
    }
}
