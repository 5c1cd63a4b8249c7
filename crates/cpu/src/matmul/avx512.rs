//! AVX-512 with VNNI: two weight rows in a vector, `vpdpbusd` for the dot products.

use std::arch::x86_64::*;

use forebay_quant::{Format, Q8Group, Q8Rows};

use super::decode::Decoder;
use super::float::{self, FloatIsa};
use super::isa::{Folded, Isa, RowPtrs};
use super::job::Tile;
use super::kernel::{self, with_decoder};
use super::unpack;

/// A tile in precision `q8`.
pub(super) fn q8_tile(tile: &Tile<'_>, q: &Q8Rows) {
    // SAFETY: `Level::Avx512` is only chosen where all its instructions are there.
    unsafe { with_decoder!(tile.job.weight.format(), run::<_>(tile, q)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn run<D: Decoder<Avx512>>(decoder: &D, tile: &Tile<'_>, q: &Q8Rows) {
    // SAFETY: the instructions are enabled here; the rest was checked by `run_jobs`.
    unsafe { kernel::tile::<Avx512, D, 1, 2>(decoder, tile, q) }
}

/// A tile in precision `f32`.
pub(super) fn f32_tile(tile: &Tile<'_>, data: &[f32], stride: usize) {
    // SAFETY: as `q8_tile`.
    unsafe { run_f32(tile, data, stride) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn run_f32(tile: &Tile<'_>, data: &[f32], stride: usize) {
    // SAFETY: as `run`.
    unsafe { float::tile::<Avx512, 4>(tile, data, stride, dequantize) }
}

/// See [`float::Dequantize`].
unsafe fn dequantize(rows: float::Dequantize<'_>, out: *mut f32) {
    // SAFETY: only called by `run_f32`, where the instructions are there.
    unsafe { with_decoder!(rows.weight.format(), run_dequantize::<_>(rows, out)) }
}

#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
unsafe fn run_dequantize<D: Decoder<Avx512>>(d: &D, rows: float::Dequantize<'_>, out: *mut f32) {
    // SAFETY: as `run`; `out` is the caller's promise.
    unsafe { unpack::dequantize(d, rows, out) }
}

#[derive(Clone, Copy)]
pub(super) struct Avx512;

impl FloatIsa for Avx512 {
    type X = __m512;
    #[inline(always)]
    unsafe fn load(p: *const f32) -> __m512 {
        // SAFETY: the trait's contract, here and below.
        unsafe { _mm512_loadu_ps(p) }
    }
    // Into the second-level cache: the first one has too few requests under way for the rate of a server's memory, at least
    // on Zen 4, where it gave 60% of it and this 90%.
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: as above.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x))
        }
    }
    #[inline(always)]
    unsafe fn fma(a: __m512, b: __m512, c: __m512) -> __m512 {
        // SAFETY: as above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn store(x: __m512, p: *mut f32) {
        // SAFETY: as above.
        unsafe { _mm512_storeu_ps(p, x) }
    }
}

/// One function of [`Isa`] whose body is intrinsics.
macro_rules! ops {
    ($(fn $name:ident $(<const $c:ident: $ct:ty>)? ($($arg:ident: $t:ty),*) -> $r:ty $body:block)*) => {
        $(#[inline(always)]
        unsafe fn $name $(<const $c: $ct>)? ($($arg: $t),*) -> $r {
            // SAFETY: the trait's contract: the instructions are there, pointers are valid.
            unsafe { $body }
        })*
    };
}

impl Isa for Avx512 {
    const ROWS: usize = 2;
    type V = __m512i;
    type I = __m512i;
    type F = __m512;

    ops! {
        fn load(rows: RowPtrs, lo: usize, hi: usize) -> __m512i {
            let (a, b) = (rows[0], rows[1]);
            let a = _mm256_loadu2_m128i(a.add(hi).cast(), a.add(lo).cast());
            let b = _mm256_loadu2_m128i(b.add(hi).cast(), b.add(lo).cast());
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(a), b)
        }
        fn store(a: __m512i, rows: [*mut u8; 2], lo: usize, hi: usize) -> () {
            _mm_storeu_si128(rows[0].add(lo).cast(), _mm512_castsi512_si128(a));
            _mm_storeu_si128(rows[0].add(hi).cast(), _mm512_extracti32x4_epi32::<1>(a));
            _mm_storeu_si128(rows[1].add(lo).cast(), _mm512_extracti32x4_epi32::<2>(a));
            _mm_storeu_si128(rows[1].add(hi).cast(), _mm512_extracti32x4_epi32::<3>(a));
        }
        fn load_packed(rows: RowPtrs) -> [__m512i; 4] {
            let load = [rows[0], rows[0].add(64), rows[1], rows[1].add(64)];
            let (a0, a1) = (_mm512_loadu_si512(load[0].cast()), _mm512_loadu_si512(load[1].cast()));
            let (b0, b1) = (_mm512_loadu_si512(load[2].cast()), _mm512_loadu_si512(load[3].cast()));
            // Two words of eight blocks of one row, then one word of both rows.
            let w01 = _mm512_set_epi32(29, 25, 21, 17, 13, 9, 5, 1, 28, 24, 20, 16, 12, 8, 4, 0);
            let w23 = _mm512_set_epi32(31, 27, 23, 19, 15, 11, 7, 3, 30, 26, 22, 18, 14, 10, 6, 2);
            let (a01, b01) =
                (_mm512_permutex2var_epi32(a0, w01, a1), _mm512_permutex2var_epi32(b0, w01, b1));
            let (a23, b23) =
                (_mm512_permutex2var_epi32(a0, w23, a1), _mm512_permutex2var_epi32(b0, w23, b1));
            [
                _mm512_shuffle_i64x2::<0x44>(a01, b01),
                _mm512_shuffle_i64x2::<0xee>(a01, b01),
                _mm512_shuffle_i64x2::<0x44>(a23, b23),
                _mm512_shuffle_i64x2::<0xee>(a23, b23),
            ]
        }
        fn zip(a: __m512i, b: __m512i) -> [__m512i; 2] {
            [_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)]
        }
        fn words(rows: [[u32; 8]; 2]) -> __m512i { _mm512_loadu_si512(rows.as_ptr().cast()) }
        fn quads(rows: [[u64; 4]; 2]) -> __m512i {
            _mm512_inserti64x4::<1>(_mm512_castsi256_si512(quads(rows[0])), quads(rows[1]))
        }
        fn splat(b: u8) -> __m512i { _mm512_set1_epi8(b as i8) }
        fn splat32(w: u32) -> __m512i { _mm512_set1_epi32(w as i32) }
        fn shr32(a: __m512i, n: usize) -> __m512i {
            _mm512_srl_epi32(a, _mm_cvtsi32_si128(n as i32))
        }
        fn shl32(a: __m512i, n: usize) -> __m512i {
            _mm512_sll_epi32(a, _mm_cvtsi32_si128(n as i32))
        }
        fn and(a: __m512i, b: __m512i) -> __m512i { _mm512_and_si512(a, b) }
        fn or(a: __m512i, b: __m512i) -> __m512i { _mm512_or_si512(a, b) }
        fn xor(a: __m512i, b: __m512i) -> __m512i { _mm512_xor_si512(a, b) }
        fn lookup(table: __m512i, a: __m512i) -> __m512i { _mm512_shuffle_epi8(table, a) }
        fn repeat(bytes: &[u8; 16]) -> __m512i {
            _mm512_broadcast_i32x4(_mm_loadu_si128(bytes.as_ptr().cast()))
        }
        fn where_bits(a: __m512i, mask: __m512i, value: u8) -> __m512i {
            _mm512_maskz_set1_epi8(_mm512_test_epi8_mask(a, mask), value as i8)
        }
        fn transpose(v: [__m512i; 4]) -> [__m512i; 4] {
            let (a, b) = (_mm512_unpacklo_epi32(v[0], v[1]), _mm512_unpackhi_epi32(v[0], v[1]));
            let (c, d) = (_mm512_unpacklo_epi32(v[2], v[3]), _mm512_unpackhi_epi32(v[2], v[3]));
            [
                _mm512_unpacklo_epi64(a, c),
                _mm512_unpackhi_epi64(a, c),
                _mm512_unpacklo_epi64(b, d),
                _mm512_unpackhi_epi64(b, d),
            ]
        }
        fn rotate(a: __m512i, by: usize) -> __m512i {
            _mm512_permutexvar_epi32(rotation(by), a)
        }
        fn rotate_f32(a: __m512, by: usize) -> __m512 {
            _mm512_permutexvar_ps(rotation(by), a)
        }
        fn bf16(rows: [[u16; 8]; 2]) -> __m512 {
            let x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(rows.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(x))
        }
        fn f16(rows: [[u16; 8]; 2]) -> __m512 {
            _mm512_cvtph_ps(_mm256_loadu_si256(rows.as_ptr().cast()))
        }
        fn f32(rows: [[f32; 8]; 2]) -> __m512 { _mm512_loadu_ps(rows.as_ptr().cast()) }
        fn f16_splat(rows: [u16; 2]) -> __m512 {
            let both = _mm_cvtsi32_si128(rows[0] as i32 | (rows[1] as i32) << 16);
            let lanes = _mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0);
            _mm512_permutexvar_ps(lanes, _mm512_castps128_ps512(_mm_cvtph_ps(both)))
        }
        fn u8(rows: [u64; 2]) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_set_epi64x(rows[1] as i64, rows[0] as i64)))
        }
        fn i8(rows: [u64; 2]) -> __m512 {
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_set_epi64x(rows[1] as i64, rows[0] as i64)))
        }
        fn lanes(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        fn negate(a: __m512) -> __m512 { _mm512_xor_ps(a, _mm512_set1_ps(-0.0)) }
        fn mul(a: __m512, b: __m512) -> __m512 { _mm512_mul_ps(a, b) }
        fn fma(a: __m512, b: __m512, c: __m512) -> __m512 { _mm512_fmadd_ps(a, b, c) }
        fn zero() -> __m512 { _mm512_setzero_ps() }
        fn keep_blocks(a: __m512, blocks: usize) -> __m512 {
            let keep = ((1u32 << blocks) - 1) as u16;
            _mm512_mask_blend_ps(keep | keep << 8, _mm512_set1_ps(-0.0), a)
        }
        fn load_acc(p: *const f32) -> __m512 { _mm512_loadu_ps(p) }
        fn store_acc(a: __m512, p: *mut f32) -> () { _mm512_storeu_ps(p, a) }
        fn join(a: __m512) -> [f32; 2] {
            [join8(_mm512_castps512_ps256(a)), join8(_mm512_extractf32x8_ps::<1>(a))]
        }
        fn join16(acc: [*const f32; 16]) -> [f32; 16] {
            let (p, q) = (halves(acc[0], acc[1]), halves(acc[2], acc[3]));
            let (r, s) = (halves(acc[4], acc[5]), halves(acc[6], acc[7]));
            let (u, w) = (quarters(p, q), quarters(r, s));
            let even = _mm512_shuffle_ps::<0x88>(u, w);
            let odd = _mm512_shuffle_ps::<0xdd>(u, w);
            // Lane l holds rows l, 4 + l, 8 + l, 12 + l.
            let order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
            let mut dots = [0.0; 16];
            let joined = _mm512_permutexvar_ps(order, _mm512_add_ps(even, odd));
            _mm512_storeu_ps(dots.as_mut_ptr(), joined);
            dots
        }
        fn act_f32(p: *const [f32; 8]) -> __m512 {
            _mm512_broadcast_f32x8(_mm256_loadu_ps(p.cast()))
        }
        fn act_i32(p: *const [i32; 8]) -> __m512i {
            _mm512_broadcast_i64x4(_mm256_loadu_si256(p.cast()))
        }
        fn sub(a: __m512i, b: __m512i) -> __m512i { _mm512_sub_epi32(a, b) }
        fn to_f32(a: __m512i) -> __m512 { _mm512_cvtepi32_ps(a) }
        fn prefetch(p: *const u8) -> () { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }

    const FOLDS: bool = true;

    #[inline(always)]
    unsafe fn fold(codes: &[__m512i; 8]) -> [__m512i; 2] {
        // SAFETY: as above.
        unsafe {
            let mut folded = [_mm512_setzero_si512(); 2];
            // Of each row the quads of four words: two from `ab`, two from `cd`.
            let order = _mm512_set_epi64(13, 12, 5, 4, 9, 8, 1, 0);
            for half in 0..2 {
                let ab = _mm512_unpacklo_epi64(codes[half], codes[2 + half]);
                let cd = _mm512_unpacklo_epi64(codes[4 + half], codes[6 + half]);
                folded[half] = _mm512_permutex2var_epi64(ab, order, cd);
            }
            folded
        }
    }

    #[inline(always)]
    unsafe fn dot_folded(
        codes: &[__m512i; 2],
        blocks: usize,
        offset: i32,
        a: &Folded,
        sum: __m512i,
    ) -> __m512i {
        // SAFETY: as above.
        unsafe {
            let words = (&raw const *a).cast::<__m256i>();
            let first = _mm512_broadcast_i64x4(_mm256_load_si256(words));
            let second = _mm512_broadcast_i64x4(_mm256_load_si256(words.add(1)));
            let dot = _mm512_dpbusd_epi32(_mm512_setzero_si512(), codes[0], first);
            let dot = _mm512_dpbusd_epi32(dot, codes[1], second);
            let dot = _mm512_add_epi32(dot, _mm512_shuffle_epi32::<0x4e>(dot));
            let turned = _mm512_shuffle_i64x2::<0xb1>(dot, dot);
            let lanes = ((1u32 << blocks) - 1) as u16;
            let dot = _mm512_maskz_add_epi32(lanes | lanes << 8, dot, turned);
            match offset {
                0 => dot,
                _ => {
                    let less = _mm512_mullo_epi32(sum, _mm512_set1_epi32(offset));
                    _mm512_sub_epi32(dot, less)
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn e8m0_half<const STRIDE: usize>(rows: RowPtrs, at: usize) -> __m512 {
        // SAFETY: as above.
        unsafe {
            let a = gather8::<STRIDE>(rows[0].add(at));
            let b = gather8::<STRIDE>(rows[1].add(at));
            let s = _mm512_cvtepu8_epi32(_mm_set_epi64x(b as i64, a as i64));
            let normal = _mm512_slli_epi32::<23>(_mm512_sub_epi32(s, _mm512_set1_epi32(1)));
            let small = _mm512_cmplt_epi32_mask(s, _mm512_set1_epi32(2));
            let bits = _mm512_mask_sllv_epi32(normal, small, _mm512_set1_epi32(0x20_0000), s);
            let nan = _mm512_cmpeq_epi32_mask(s, _mm512_set1_epi32(255));
            _mm512_castsi512_ps(_mm512_mask_set1_epi32(bits, nan, 0x7fc0_0000))
        }
    }

    #[inline(always)]
    unsafe fn shr<const N: i32>(a: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_srl_epi16(a, _mm_cvtsi32_si128(N)) }
    }

    #[inline(always)]
    unsafe fn shl<const N: i32>(a: __m512i) -> __m512i {
        // SAFETY: as above.
        unsafe { _mm512_sll_epi16(a, _mm_cvtsi32_si128(N)) }
    }

    #[inline(always)]
    unsafe fn dot<const N: usize>(
        codes: &[__m512i; 8],
        from: usize,
        offset: i32,
        _max_code: u8,
        a: *const Q8Group,
        sum: __m512i,
    ) -> __m512i {
        // SAFETY: a points to a group of activations.
        unsafe {
            let words = (&raw const (*a).codes).cast::<__m256i>().add(from);
            let mut dot = match offset {
                0 => _mm512_setzero_si512(),
                _ => _mm512_mullo_epi32(sum, _mm512_set1_epi32(-offset)),
            };
            // Two chains, as one takes longer than the processor looks ahead.
            let mut other = _mm512_setzero_si512();
            for j in (0..N).step_by(2) {
                let word = _mm512_broadcast_i64x4(_mm256_loadu_si256(words.add(j)));
                dot = _mm512_dpbusd_epi32(dot, codes[from + j], word);
                let word = _mm512_broadcast_i64x4(_mm256_loadu_si256(words.add(j + 1)));
                other = _mm512_dpbusd_epi32(other, codes[from + j + 1], word);
            }
            _mm512_add_epi32(dot, other)
        }
    }
}

/// First level of the trees of four rows: 128-bit lane `l` holds the four sums of row `l`.
///
/// # Safety
/// Needs AVX-512; 16 floats lie at each pointer, two rows.
#[inline(always)]
unsafe fn halves(a: *const f32, b: *const f32) -> __m512 {
    // SAFETY: as the caller's.
    unsafe {
        let (a, b) = (_mm512_loadu_ps(a), _mm512_loadu_ps(b));
        let (low, high) = (_mm512_shuffle_f32x4::<0x88>(a, b), _mm512_shuffle_f32x4::<0xdd>(a, b));
        _mm512_add_ps(low, high)
    }
}

/// Second level: the two sums of each row of `p`, then those of `q`, lane by lane.
///
/// # Safety
/// Needs AVX-512.
#[inline(always)]
unsafe fn quarters(p: __m512, q: __m512) -> __m512 {
    // SAFETY: register operations.
    unsafe {
        let (p, q) = (_mm512_castps_pd(p), _mm512_castps_pd(q));
        let (low, high) = (_mm512_unpacklo_pd(p, q), _mm512_unpackhi_pd(p, q));
        _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high))
    }
}

/// Indices for `rotate`.
///
/// # Safety
/// Needs AVX-512.
#[inline(always)]
unsafe fn rotation(by: usize) -> __m512i {
    // SAFETY: register operations.
    unsafe {
        let lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
        let turned = _mm512_add_epi32(lane, _mm512_set1_epi32(by as i32));
        // Bit 3 says which row.
        _mm512_ternarylogic_epi32::<0xd8>(lane, turned, _mm512_set1_epi32(7))
    }
}

/// Eight bytes, `STRIDE` apart, the first one lowest.
///
/// # Safety
/// The bytes are there.
#[inline(always)]
pub(super) unsafe fn gather8<const STRIDE: usize>(p: *const u8) -> u64 {
    // SAFETY: as the caller's.
    unsafe {
        if STRIDE == 1 {
            return p.cast::<u64>().read_unaligned();
        }
        // Scalar units have nothing else to do; inserting bytes into a vector would take its shuffles.
        let mut x = 0;
        for i in 0..8 {
            x |= (*p.add(i * STRIDE) as u64) << (8 * i);
        }
        x
    }
}

/// Four times eight bytes.
///
/// # Safety
/// Needs AVX.
#[inline(always)]
pub(super) unsafe fn quads([a, b, c, d]: [u64; 4]) -> __m256i {
    // SAFETY: register operations.
    unsafe { _mm256_set_epi64x(d as i64, c as i64, b as i64, a as i64) }
}

/// The tree over eight lanes.
///
/// # Safety
/// Needs AVX.
#[inline(always)]
pub(super) unsafe fn join8(a: __m256) -> f32 {
    // SAFETY: register operations.
    unsafe {
        let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)))
    }
}
