//! AVX2, FMA and F16C: one weight row in a vector, dot products by `vpmaddubsw`.
//!
//! `vpmaddubsw` adds two products of an unsigned and a signed byte into 16 bits, saturating. Codes below 64 times
//! activations up to 127 stay exact, and several results may be added before they are widened. Codes of eight bits
//! are made signed and the sign moved over to the activation: 2 * 128 * 127 = 32512 fits.

use std::arch::x86_64::*;

use forebay_quant::{Format, Q8Group, Q8Rows};

use super::avx512::{gather8, join8, quads};
use super::decode::Decoder;
use super::float::{self, FloatIsa};
use super::isa::{Isa, RowPtrs};
use super::job::Tile;
use super::kernel::{self, with_decoder};
use super::unpack;

/// A tile in precision `q8`.
pub(super) fn q8_tile(tile: &Tile<'_>, q: &Q8Rows) {
    // SAFETY: `Level::Avx2` is only chosen where all its instructions are there.
    unsafe { with_decoder!(tile.job.weight.format(), run::<_>(tile, q)) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run<D: Decoder<Avx2>>(decoder: &D, tile: &Tile<'_>, q: &Q8Rows) {
    // SAFETY: the instructions are enabled here; the rest was checked by `run_jobs`.
    unsafe { kernel::tile::<Avx2, D, 1, 1>(decoder, tile, q) }
}

/// A tile in precision `f32`.
pub(super) fn f32_tile(tile: &Tile<'_>, data: &[f32], stride: usize) {
    // SAFETY: as `q8_tile`.
    unsafe { run_f32(tile, data, stride) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_f32(tile: &Tile<'_>, data: &[f32], stride: usize) {
    // SAFETY: as `run`.
    unsafe { float::tile::<Avx2, 1>(tile, data, stride, dequantize) }
}

/// See [`float::Dequantize`].
unsafe fn dequantize(rows: float::Dequantize<'_>, out: *mut f32) {
    // SAFETY: only called by `run_f32`, where the instructions are there.
    unsafe { with_decoder!(rows.weight.format(), run_dequantize::<_>(rows, out)) }
}

#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn run_dequantize<D: Decoder<Avx2>>(d: &D, rows: float::Dequantize<'_>, out: *mut f32) {
    // SAFETY: as `run`; `out` is the caller's promise.
    unsafe { unpack::dequantize(d, rows, out) }
}

#[derive(Clone, Copy)]
pub(super) struct Avx2;

impl FloatIsa for Avx2 {
    type X = [__m256; 2];
    #[inline(always)]
    unsafe fn load(p: *const f32) -> [__m256; 2] {
        // SAFETY: the trait's contract, here and below.
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe {
            let (a, b) = (_mm_loadu_si128(p.cast()), _mm_loadu_si128(p.add(16).cast()));
            [_mm256_cvtph_ps(a), _mm256_cvtph_ps(b)]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe {
            let a = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()));
            let b = _mm256_cvtepu16_epi32(_mm_loadu_si128(p.add(16).cast()));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(a)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(b)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn fma(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        // SAFETY: as above.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn store(x: [__m256; 2], p: *mut f32) {
        // SAFETY: as above.
        unsafe {
            _mm256_storeu_ps(p, x[0]);
            _mm256_storeu_ps(p.add(8), x[1]);
        }
    }
}

/// One function of [`Isa`] whose body is intrinsics.
macro_rules! ops {
    ($(fn $name:ident ($($arg:ident: $t:ty),*) -> $r:ty $body:block)*) => {
        $(#[inline(always)]
        unsafe fn $name ($($arg: $t),*) -> $r {
            // SAFETY: the trait's contract: the instructions are there, pointers are valid.
            unsafe { $body }
        })*
    };
}

impl Isa for Avx2 {
    const ROWS: usize = 1;
    type V = __m256i;
    type I = __m256i;
    type F = __m256;

    ops! {
        fn load(rows: RowPtrs, lo: usize, hi: usize) -> __m256i {
            _mm256_loadu2_m128i(rows[0].add(hi).cast(), rows[0].add(lo).cast())
        }
        fn store(a: __m256i, rows: [*mut u8; 2], lo: usize, hi: usize) -> () {
            _mm_storeu_si128(rows[0].add(lo).cast(), _mm256_castsi256_si128(a));
            _mm_storeu_si128(rows[0].add(hi).cast(), _mm256_extracti128_si256::<1>(a));
        }
        fn zip(a: __m256i, b: __m256i) -> [__m256i; 2] {
            [_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)]
        }
        fn words(rows: [[u32; 8]; 2]) -> __m256i { _mm256_loadu_si256(rows.as_ptr().cast()) }
        fn quads(rows: [[u64; 4]; 2]) -> __m256i { quads(rows[0]) }
        fn splat(b: u8) -> __m256i { _mm256_set1_epi8(b as i8) }
        fn splat32(w: u32) -> __m256i { _mm256_set1_epi32(w as i32) }
        fn shr32(a: __m256i, n: usize) -> __m256i {
            _mm256_srl_epi32(a, _mm_cvtsi32_si128(n as i32))
        }
        fn shl32(a: __m256i, n: usize) -> __m256i {
            _mm256_sll_epi32(a, _mm_cvtsi32_si128(n as i32))
        }
        fn and(a: __m256i, b: __m256i) -> __m256i { _mm256_and_si256(a, b) }
        fn or(a: __m256i, b: __m256i) -> __m256i { _mm256_or_si256(a, b) }
        fn xor(a: __m256i, b: __m256i) -> __m256i { _mm256_xor_si256(a, b) }
        fn lookup(table: __m256i, a: __m256i) -> __m256i { _mm256_shuffle_epi8(table, a) }
        fn repeat(bytes: &[u8; 16]) -> __m256i {
            _mm256_broadcastsi128_si256(_mm_loadu_si128(bytes.as_ptr().cast()))
        }
        fn where_bits(a: __m256i, mask: __m256i, value: u8) -> __m256i {
            let zero = _mm256_cmpeq_epi8(_mm256_and_si256(a, mask), _mm256_setzero_si256());
            _mm256_andnot_si256(zero, _mm256_set1_epi8(value as i8))
        }
        fn transpose(v: [__m256i; 4]) -> [__m256i; 4] {
            let (a, b) = (_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
            let (c, d) = (_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
            [
                _mm256_unpacklo_epi64(a, c),
                _mm256_unpackhi_epi64(a, c),
                _mm256_unpacklo_epi64(b, d),
                _mm256_unpackhi_epi64(b, d),
            ]
        }
        fn rotate(a: __m256i, by: usize) -> __m256i {
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let turned = _mm256_add_epi32(lane, _mm256_set1_epi32(by as i32));
            _mm256_permutevar8x32_epi32(a, turned)
        }
        fn rotate_f32(a: __m256, by: usize) -> __m256 {
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let turned = _mm256_add_epi32(lane, _mm256_set1_epi32(by as i32));
            _mm256_permutevar8x32_ps(a, turned)
        }
        fn bf16(rows: [[u16; 8]; 2]) -> __m256 {
            let x = _mm256_cvtepu16_epi32(_mm_loadu_si128(rows.as_ptr().cast()));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x))
        }
        fn f16(rows: [[u16; 8]; 2]) -> __m256 {
            _mm256_cvtph_ps(_mm_loadu_si128(rows.as_ptr().cast()))
        }
        fn f32(rows: [[f32; 8]; 2]) -> __m256 { _mm256_loadu_ps(rows.as_ptr().cast()) }
        fn f16_splat(rows: [u16; 2]) -> __m256 {
            _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(rows[0] as i32)))
        }
        fn u8(rows: [u64; 2]) -> __m256 {
            _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(rows[0] as i64)))
        }
        fn i8(rows: [u64; 2]) -> __m256 {
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_cvtsi64_si128(rows[0] as i64)))
        }
        fn lanes(a: __m256i) -> __m256 { _mm256_cvtepi32_ps(a) }
        fn negate(a: __m256) -> __m256 { _mm256_xor_ps(a, _mm256_set1_ps(-0.0)) }
        fn mul(a: __m256, b: __m256) -> __m256 { _mm256_mul_ps(a, b) }
        fn fma(a: __m256, b: __m256, c: __m256) -> __m256 { _mm256_fmadd_ps(a, b, c) }
        fn zero() -> __m256 { _mm256_setzero_ps() }
        fn keep_blocks(a: __m256, blocks: usize) -> __m256 {
            let lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
            let keep = _mm256_cmpgt_epi32(_mm256_set1_epi32(blocks as i32), lane);
            _mm256_blendv_ps(_mm256_set1_ps(-0.0), a, _mm256_castsi256_ps(keep))
        }
        fn load_acc(p: *const f32) -> __m256 { _mm256_loadu_ps(p) }
        fn store_acc(a: __m256, p: *mut f32) -> () { _mm256_storeu_ps(p, a) }
        fn join(a: __m256) -> [f32; 2] { [join8(a), 0.0] }
        fn act_f32(p: *const [f32; 8]) -> __m256 { _mm256_loadu_ps(p.cast()) }
        fn act_i32(p: *const [i32; 8]) -> __m256i { _mm256_loadu_si256(p.cast()) }
        fn sub(a: __m256i, b: __m256i) -> __m256i { _mm256_sub_epi32(a, b) }
        fn to_f32(a: __m256i) -> __m256 { _mm256_cvtepi32_ps(a) }
        fn prefetch(p: *const u8) -> () { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }

    #[inline(always)]
    unsafe fn e8m0_half<const STRIDE: usize>(rows: RowPtrs, at: usize) -> __m256 {
        // SAFETY: as above.
        unsafe {
            let s =
                _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(gather8::<STRIDE>(rows[0].add(at)) as i64));
            let normal = _mm256_slli_epi32::<23>(_mm256_sub_epi32(s, _mm256_set1_epi32(1)));
            let small = _mm256_sllv_epi32(_mm256_set1_epi32(0x20_0000), s);
            let is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(2), s);
            let bits = _mm256_blendv_epi8(normal, small, is_small);
            let nan = _mm256_cmpeq_epi32(s, _mm256_set1_epi32(255));
            _mm256_castsi256_ps(_mm256_or_si256(bits, nan))
        }
    }

    #[inline(always)]
    unsafe fn shr<const N: i32>(a: __m256i) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_srli_epi16::<N>(a) }
    }

    #[inline(always)]
    unsafe fn shl<const N: i32>(a: __m256i) -> __m256i {
        // SAFETY: as above.
        unsafe { _mm256_slli_epi16::<N>(a) }
    }

    #[inline(always)]
    unsafe fn dot<const N: usize>(
        codes: &[__m256i; 8],
        from: usize,
        offset: i32,
        max_code: u8,
        a: *const Q8Group,
        sum: __m256i,
    ) -> __m256i {
        // SAFETY: a points to a group of activations.
        unsafe {
            let words = (&raw const (*a).codes).cast::<__m256i>().add(from);
            let ones = _mm256_set1_epi16(1);
            // Signed codes are `code - 128`: that much of the offset is already in them.
            let signed = max_code > 63;
            let rest = if signed { offset - 128 } else { offset };
            let mut dot = match rest {
                0 => _mm256_setzero_si256(),
                _ => _mm256_mullo_epi32(sum, _mm256_set1_epi32(-rest)),
            };
            // So many 16-bit results can be added without overflow.
            let run = if signed { 1 } else { 32767 / (2 * 127 * max_code as usize) };
            let mut part = _mm256_setzero_si256();
            for j in 0..N {
                let code = codes[from + j];
                let word = _mm256_loadu_si256(words.add(j));
                let pairs = if signed {
                    let code = _mm256_xor_si256(code, _mm256_set1_epi8(-128));
                    _mm256_maddubs_epi16(_mm256_abs_epi8(code), _mm256_sign_epi8(word, code))
                } else {
                    _mm256_maddubs_epi16(code, word)
                };
                part = if j % run == 0 { pairs } else { _mm256_add_epi16(part, pairs) };
                if j % run == run - 1 || j == N - 1 {
                    dot = _mm256_add_epi32(dot, _mm256_madd_epi16(part, ones));
                }
            }
            dot
        }
    }
}
