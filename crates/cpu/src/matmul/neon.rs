//! AArch64: one weight row in a vector, which is two registers. The levels differ in the dot product alone (`neon_dot`).
//!
//! What the standard library's intrinsics do not have in the oldest compiler that is supported is inline assembly:
//! half floats, prefetching, and the products of `neon_dot`.

use std::arch::aarch64::*;
use std::arch::asm;
use std::marker::PhantomData;

use forebay_quant::{Format, Q8Group, Q8Rows};

use super::decode::{self, Decoder};
use super::float::{self, FloatIsa};
use super::isa::{Isa, RowPtrs};
use super::job::Tile;
use super::kernel::{self, with_decoder};
use super::neon_dot::{Dot, Plain, Product, Usdot};
use super::unpack;
use crate::half_float::arm::widen;

/// A tile in precision `q8` with 16-bit products.
pub(super) fn q8_tile(tile: &Tile<'_>, q: &Q8Rows) {
    // SAFETY: NEON is part of AArch64.
    unsafe { with_decoder!(tile.job.weight.format(), run::<_>(tile, q)) }
}

#[target_feature(enable = "neon")]
unsafe fn run<D: Decoder<Neon<Plain>>>(decoder: &D, tile: &Tile<'_>, q: &Q8Rows) {
    // SAFETY: the instructions are enabled here; the rest was checked by `run_jobs`.
    unsafe { kernel::tile::<Neon<Plain>, D, 1, 1>(decoder, tile, q) }
}

/// A tile in precision `q8` with `sdot`.
pub(super) fn q8_tile_dot(tile: &Tile<'_>, q: &Q8Rows) {
    // SAFETY: `Level::NeonDot` is only chosen where its instructions are there.
    unsafe { with_decoder!(tile.job.weight.format(), run_dot::<_>(tile, q)) }
}

#[target_feature(enable = "neon,dotprod")]
unsafe fn run_dot<D: Decoder<Neon<Dot>>>(decoder: &D, tile: &Tile<'_>, q: &Q8Rows) {
    // SAFETY: as `run`.
    unsafe { kernel::tile::<Neon<Dot>, D, 1, 1>(decoder, tile, q) }
}

/// A tile in precision `q8` with `usdot` where codes do not fit signed bytes, else with `sdot`: no slower there, and each
/// kernel of each format takes time to compile.
pub(super) fn q8_tile_i8mm(tile: &Tile<'_>, q: &Q8Rows) {
    // SAFETY: `Level::NeonI8mm` is only chosen where its instructions are there.
    unsafe {
        match tile.job.weight.format() {
            Format::Q8_0 => run_i8mm(&decode::Q8_0, tile, q),
            Format::Iq4Nl => run_i8mm(&decode::Iq4Nl, tile, q),
            Format::Iq4Xs => run_i8mm(&decode::Iq4Xs, tile, q),
            Format::MlxAffine { bits: 8, group, params } => {
                run_i8mm(&decode::Mlx::<8> { group: group as usize, params }, tile, q)
            }
            _ => q8_tile_dot(tile, q),
        }
    }
}

#[target_feature(enable = "neon,dotprod,i8mm")]
unsafe fn run_i8mm<D: Decoder<Neon<Usdot>>>(decoder: &D, tile: &Tile<'_>, q: &Q8Rows) {
    // SAFETY: as `run`.
    unsafe { kernel::tile::<Neon<Usdot>, D, 1, 1>(decoder, tile, q) }
}

/// A tile in precision `f32`, the same at every level.
pub(super) fn f32_tile(tile: &Tile<'_>, data: &[f32], stride: usize) {
    // SAFETY: NEON is part of AArch64.
    unsafe { float::tile::<Neon<Plain>, 1>(tile, data, stride, dequantize) }
}

/// See [`float::Dequantize`].
unsafe fn dequantize(rows: float::Dequantize<'_>, out: *mut f32) {
    // SAFETY: NEON is part of AArch64.
    unsafe { with_decoder!(rows.weight.format(), run_dequantize::<_>(rows, out)) }
}

#[target_feature(enable = "neon")]
unsafe fn run_dequantize<D: Decoder<Neon<Plain>>>(
    d: &D,
    rows: float::Dequantize<'_>,
    out: *mut f32,
) {
    // SAFETY: as `run`; `out` is the caller's promise.
    unsafe { unpack::dequantize(d, rows, out) }
}

/// NEON with the dot product `P`.
#[derive(Clone, Copy)]
pub(super) struct Neon<P>(PhantomData<P>);

/// 32 bytes.
pub(super) type Bytes = [uint8x16_t; 2];
/// Eight integers.
pub(super) type Ints = [int32x4_t; 2];
/// Eight floats.
pub(super) type Floats = [float32x4_t; 2];

/// Asks for a cache line.
#[inline(always)]
pub(crate) fn prefetch_line(p: *const u8) {
    // SAFETY: prefetching reads nothing.
    unsafe {
        asm!("prfm pldl1keep, [{0}]", in(reg) p, options(readonly, nostack, preserves_flags));
    }
}

impl<P: Product> FloatIsa for Neon<P> {
    type X = [float32x4_t; 4];
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::X {
        // SAFETY: the trait's contract, here and below.
        unsafe { [vld1q_f32(p), vld1q_f32(p.add(4)), vld1q_f32(p.add(8)), vld1q_f32(p.add(12))] }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        prefetch_line(p);
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::X {
        // SAFETY: as above.
        unsafe {
            let (a, b) = (vld1q_u8(p), vld1q_u8(p.add(16)));
            let (a, b) = (vreinterpretq_u16_u8(a), vreinterpretq_u16_u8(b));
            [
                widen(vget_low_u16(a)),
                widen(vget_high_u16(a)),
                widen(vget_low_u16(b)),
                widen(vget_high_u16(b)),
            ]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::X {
        // SAFETY: as above.
        unsafe {
            let [a, b] = top_halves(vreinterpretq_u16_u8(vld1q_u8(p)));
            let [c, d] = top_halves(vreinterpretq_u16_u8(vld1q_u8(p.add(16))));
            [a, b, c, d]
        }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::X, b: Self::X, c: Self::X) -> Self::X {
        // SAFETY: as above.
        unsafe {
            [
                vfmaq_f32(c[0], a[0], b[0]),
                vfmaq_f32(c[1], a[1], b[1]),
                vfmaq_f32(c[2], a[2], b[2]),
                vfmaq_f32(c[3], a[3], b[3]),
            ]
        }
    }
    #[inline(always)]
    unsafe fn store(x: Self::X, p: *mut f32) {
        for i in 0..4 {
            // SAFETY: as above.
            unsafe { vst1q_f32(p.add(4 * i), x[i]) }
        }
    }
}

/// One function of [`Isa`] whose body is intrinsics.
macro_rules! ops {
    ($(fn $name:ident $(<const $c:ident: $ct:ty>)? ($($arg:ident: $t:ty),*) -> $r:ty $body:block)*) => {
        $(#[inline(always)]
        // Some intrinsics are safe in newer compilers.
        #[allow(unused_unsafe)]
        unsafe fn $name $(<const $c: $ct>)? ($($arg: $t),*) -> $r {
            // SAFETY: the trait's contract: the instructions are there, pointers are valid.
            unsafe { $body }
        })*
    };
}

impl<P: Product> Isa for Neon<P> {
    const ROWS: usize = 1;
    type V = Bytes;
    type I = Ints;
    type F = Floats;

    ops! {
        fn load(rows: RowPtrs, lo: usize, hi: usize) -> Bytes {
            [vld1q_u8(rows[0].add(lo)), vld1q_u8(rows[0].add(hi))]
        }
        fn store(a: Bytes, rows: [*mut u8; 2], lo: usize, hi: usize) -> () {
            vst1q_u8(rows[0].add(lo), a[0]);
            vst1q_u8(rows[0].add(hi), a[1]);
        }
        fn words(rows: [[u32; 8]; 2]) -> Bytes {
            let p = rows.as_ptr().cast::<u32>();
            [vreinterpretq_u8_u32(vld1q_u32(p)), vreinterpretq_u8_u32(vld1q_u32(p.add(4)))]
        }
        fn quads(rows: [[u64; 4]; 2]) -> Bytes {
            let [a, b, c, d] = rows[0];
            [
                vcombine_u8(vcreate_u8(a), vcreate_u8(b)),
                vcombine_u8(vcreate_u8(c), vcreate_u8(d)),
            ]
        }
        fn splat(b: u8) -> Bytes { [vdupq_n_u8(b); 2] }
        fn splat32(w: u32) -> Bytes { [vreinterpretq_u8_u32(vdupq_n_u32(w)); 2] }
        fn and(a: Bytes, b: Bytes) -> Bytes { [vandq_u8(a[0], b[0]), vandq_u8(a[1], b[1])] }
        fn or(a: Bytes, b: Bytes) -> Bytes { [vorrq_u8(a[0], b[0]), vorrq_u8(a[1], b[1])] }
        fn xor(a: Bytes, b: Bytes) -> Bytes { [veorq_u8(a[0], b[0]), veorq_u8(a[1], b[1])] }
        // Of bytes, which is as good: what reaches over in words of 16 bits is masked off.
        fn shr<const N: i32>(a: Bytes) -> Bytes {
            [vshrq_n_u8::<N>(a[0]), vshrq_n_u8::<N>(a[1])]
        }
        fn shl<const N: i32>(a: Bytes) -> Bytes {
            [vshlq_n_u8::<N>(a[0]), vshlq_n_u8::<N>(a[1])]
        }
        fn shr32(a: Bytes, n: usize) -> Bytes { shift32(a, -(n as i32)) }
        fn shl32(a: Bytes, n: usize) -> Bytes { shift32(a, n as i32) }
        fn lookup(table: Bytes, a: Bytes) -> Bytes {
            [vqtbl1q_u8(table[0], a[0]), vqtbl1q_u8(table[1], a[1])]
        }
        fn repeat(bytes: &[u8; 16]) -> Bytes { [vld1q_u8(bytes.as_ptr()); 2] }
        fn where_bits(a: Bytes, mask: Bytes, value: u8) -> Bytes {
            let value = vdupq_n_u8(value);
            [vandq_u8(vtstq_u8(a[0], mask[0]), value), vandq_u8(vtstq_u8(a[1], mask[1]), value)]
        }
        fn zip(a: Bytes, b: Bytes) -> [Bytes; 2] {
            [
                [vzip1q_u8(a[0], b[0]), vzip1q_u8(a[1], b[1])],
                [vzip2q_u8(a[0], b[0]), vzip2q_u8(a[1], b[1])],
            ]
        }
        fn transpose(v: [Bytes; 4]) -> [Bytes; 4] {
            let low = transpose4([v[0][0], v[1][0], v[2][0], v[3][0]]);
            let high = transpose4([v[0][1], v[1][1], v[2][1], v[3][1]]);
            [[low[0], high[0]], [low[1], high[1]], [low[2], high[2]], [low[3], high[3]]]
        }
        fn rotate(a: Bytes, by: usize) -> Bytes { turn(a, by) }
        fn rotate_f32(a: Floats, by: usize) -> Floats {
            let [a, b] = turn([vreinterpretq_u8_f32(a[0]), vreinterpretq_u8_f32(a[1])], by);
            [vreinterpretq_f32_u8(a), vreinterpretq_f32_u8(b)]
        }
        fn bf16(rows: [[u16; 8]; 2]) -> Floats { top_halves(vld1q_u16(rows.as_ptr().cast())) }
        fn f16(rows: [[u16; 8]; 2]) -> Floats {
            let p = rows.as_ptr().cast::<u16>();
            [widen(vld1_u16(p)), widen(vld1_u16(p.add(4)))]
        }
        fn f32(rows: [[f32; 8]; 2]) -> Floats { Self::load_acc(rows.as_ptr().cast()) }
        fn f16_splat(rows: [u16; 2]) -> Floats { [widen(vdup_n_u16(rows[0])); 2] }
        fn u8(rows: [u64; 2]) -> Floats {
            let x = vmovl_u8(vcreate_u8(rows[0]));
            [
                vcvtq_f32_u32(vmovl_u16(vget_low_u16(x))),
                vcvtq_f32_u32(vmovl_u16(vget_high_u16(x))),
            ]
        }
        fn i8(rows: [u64; 2]) -> Floats {
            let x = vmovl_s8(vcreate_s8(rows[0]));
            [
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))),
                vcvtq_f32_s32(vmovl_s16(vget_high_s16(x))),
            ]
        }
        fn lanes(a: Bytes) -> Floats {
            [vcvtq_f32_s32(vreinterpretq_s32_u8(a[0])), vcvtq_f32_s32(vreinterpretq_s32_u8(a[1]))]
        }
        fn negate(a: Floats) -> Floats { [vnegq_f32(a[0]), vnegq_f32(a[1])] }
        fn mul(a: Floats, b: Floats) -> Floats { [vmulq_f32(a[0], b[0]), vmulq_f32(a[1], b[1])] }
        fn fma(a: Floats, b: Floats, c: Floats) -> Floats {
            [vfmaq_f32(c[0], a[0], b[0]), vfmaq_f32(c[1], a[1], b[1])]
        }
        fn zero() -> Floats { [vdupq_n_f32(0.0); 2] }
        fn keep_blocks(a: Floats, blocks: usize) -> Floats {
            let (n, zero) = (vdupq_n_u32(blocks as u32), vdupq_n_f32(-0.0));
            let lane = vld1q_u32([0, 1, 2, 3].as_ptr());
            let (low, high) = (vcltq_u32(lane, n), vcltq_u32(vaddq_u32(lane, vdupq_n_u32(4)), n));
            [vbslq_f32(low, a[0], zero), vbslq_f32(high, a[1], zero)]
        }
        fn load_acc(p: *const f32) -> Floats { [vld1q_f32(p), vld1q_f32(p.add(4))] }
        fn store_acc(a: Floats, p: *mut f32) -> () {
            vst1q_f32(p, a[0]);
            vst1q_f32(p.add(4), a[1]);
        }
        fn join(a: Floats) -> [f32; 2] {
            let a = vaddq_f32(a[0], a[1]);
            [vpadds_f32(vadd_f32(vget_low_f32(a), vget_high_f32(a))), 0.0]
        }
        fn join16(acc: [*const f32; 16]) -> [f32; 16] {
            let mut dots = [0.0; 16];
            for i in 0..4 {
                let [p, q] = [pair(acc[4 * i], acc[4 * i + 1]), pair(acc[4 * i + 2], acc[4 * i + 3])];
                vst1q_f32(dots.as_mut_ptr().add(4 * i), vpaddq_f32(p, q));
            }
            dots
        }
        fn act_f32(p: *const [f32; 8]) -> Floats { Self::load_acc(p.cast()) }
        fn act_i32(p: *const [i32; 8]) -> Ints {
            [vld1q_s32(p.cast()), vld1q_s32(p.cast::<i32>().add(4))]
        }
        fn sub(a: Ints, b: Ints) -> Ints { [vsubq_s32(a[0], b[0]), vsubq_s32(a[1], b[1])] }
        fn to_f32(a: Ints) -> Floats { [vcvtq_f32_s32(a[0]), vcvtq_f32_s32(a[1])] }
    }

    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        prefetch_line(p);
    }

    #[inline(always)]
    #[allow(unused_unsafe)]
    unsafe fn e8m0_half<const STRIDE: usize>(rows: RowPtrs, at: usize) -> Floats {
        // SAFETY: the trait's contract: the bytes are there.
        unsafe {
            let mut bytes = [0u8; 8];
            for (i, byte) in bytes.iter_mut().enumerate() {
                *byte = *rows[0].add(at + i * STRIDE);
            }
            let s = vmovl_u8(vcreate_u8(u64::from_le_bytes(bytes)));
            [e8m0(vmovl_u16(vget_low_u16(s))), e8m0(vmovl_u16(vget_high_u16(s)))]
        }
    }

    #[inline(always)]
    #[allow(unused_unsafe)]
    unsafe fn dot<const N: usize>(
        codes: &[Bytes; 8],
        from: usize,
        offset: i32,
        max_code: u8,
        a: *const Q8Group,
        sum: Ints,
    ) -> Ints {
        // SAFETY: a points to a group of activations.
        unsafe {
            let words = (&raw const (*a).codes).cast::<[i8; 32]>().add(from);
            // That much of the offset is already in signed codes.
            let rest = if max_code > P::MAX_CODE { offset - 128 } else { offset };
            let start = match rest {
                0 => [vdupq_n_s32(0); 2],
                _ => [vmulq_n_s32(sum[0], -rest), vmulq_n_s32(sum[1], -rest)],
            };
            P::dot::<N>(codes, from, max_code, words, start)
        }
    }
}

/// 16-bit halves become the upper halves of floats: bfloat16.
#[inline(always)]
#[allow(unused_unsafe)]
fn top_halves(x: uint16x8_t) -> Floats {
    // SAFETY: register operations of every AArch64 processor, here and below.
    unsafe {
        [
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(x))),
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_high_u16(x))),
        ]
    }
}

/// Words to the left by `n`, to the right where that is negative.
#[inline(always)]
#[allow(unused_unsafe)]
fn shift32(a: Bytes, n: i32) -> Bytes {
    // SAFETY: as above.
    unsafe {
        let n = vdupq_n_s32(n);
        [
            vreinterpretq_u8_u32(vshlq_u32(vreinterpretq_u32_u8(a[0]), n)),
            vreinterpretq_u8_u32(vshlq_u32(vreinterpretq_u32_u8(a[1]), n)),
        ]
    }
}

/// 4 x 4 words.
#[inline(always)]
#[allow(unused_unsafe)]
fn transpose4(v: [uint8x16_t; 4]) -> [uint8x16_t; 4] {
    // SAFETY: as above.
    unsafe {
        let (x, y) = (vreinterpretq_u32_u8(v[0]), vreinterpretq_u32_u8(v[1]));
        let (z, w) = (vreinterpretq_u32_u8(v[2]), vreinterpretq_u32_u8(v[3]));
        let (a, b) = (vzip1q_u32(x, y), vzip2q_u32(x, y));
        let (c, d) = (vzip1q_u32(z, w), vzip2q_u32(z, w));
        let (a, b) = (vreinterpretq_u64_u32(a), vreinterpretq_u64_u32(b));
        let (c, d) = (vreinterpretq_u64_u32(c), vreinterpretq_u64_u32(d));
        [
            vreinterpretq_u8_u64(vzip1q_u64(a, c)),
            vreinterpretq_u8_u64(vzip2q_u64(a, c)),
            vreinterpretq_u8_u64(vzip1q_u64(b, d)),
            vreinterpretq_u8_u64(vzip2q_u64(b, d)),
        ]
    }
}

/// Word `b` becomes word `(b + by) mod 8`.
#[inline(always)]
#[allow(unused_unsafe)]
fn turn(a: Bytes, by: usize) -> Bytes {
    const BYTES: [u8; 16] = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    // SAFETY: as above; 16 bytes are read.
    unsafe {
        let low = vaddq_u8(vld1q_u8(BYTES.as_ptr()), vdupq_n_u8(4 * by as u8));
        let (high, mask) = (vaddq_u8(low, vdupq_n_u8(16)), vdupq_n_u8(31));
        let table = uint8x16x2_t(a[0], a[1]);
        [vqtbl2q_u8(table, vandq_u8(low, mask)), vqtbl2q_u8(table, vandq_u8(high, mask))]
    }
}

/// The first two levels of the trees of two rows: two sums of `p`, two of `q`.
///
/// # Safety
/// Eight floats lie at each pointer.
#[inline(always)]
#[allow(unused_unsafe)]
unsafe fn pair(p: *const f32, q: *const f32) -> float32x4_t {
    // SAFETY: as the caller's.
    unsafe {
        let p = vreinterpretq_f64_f32(vaddq_f32(vld1q_f32(p), vld1q_f32(p.add(4))));
        let q = vreinterpretq_f64_f32(vaddq_f32(vld1q_f32(q), vld1q_f32(q.add(4))));
        let (low, high) = (vzip1q_f64(p, q), vzip2q_f64(p, q));
        vaddq_f32(vreinterpretq_f32_f64(low), vreinterpretq_f32_f64(high))
    }
}

/// `2^(s - 128)`, NaN for 255.
#[inline(always)]
#[allow(unused_unsafe)]
fn e8m0(s: uint32x4_t) -> float32x4_t {
    // SAFETY: as above.
    unsafe {
        let normal = vshlq_n_u32::<23>(vsubq_u32(s, vdupq_n_u32(1)));
        let small = vshlq_u32(vdupq_n_u32(0x20_0000), vreinterpretq_s32_u32(s));
        let bits = vbslq_u32(vcltq_u32(s, vdupq_n_u32(2)), small, normal);
        vreinterpretq_f32_u32(vorrq_u32(bits, vceqq_u32(s, vdupq_n_u32(255))))
    }
}
