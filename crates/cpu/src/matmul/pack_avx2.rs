//! Quantising activation rows with 256-bit vectors: the bits of [`Q8Group::pack`].
//!
//! A block's codes stay in one register until eight blocks are there; then a transposition of words puts them
//! in their places. Scales are computed for eight blocks at once.
#![cfg(target_arch = "x86_64")]

use std::arch::x86_64::*;

use forebay_quant::group::{BLOCK, GROUP, LANES};
use forebay_quant::{ActOrder, Q8Group};

/// Quantises a row, a multiple of 32 values, into its groups.
///
/// # Safety
/// Needs AVX2.
#[target_feature(enable = "avx2")]
pub(super) unsafe fn pack_row(order: ActOrder, x: &[f32], out: &mut [Q8Group]) {
    assert!(x.len().is_multiple_of(BLOCK));
    for (group, x) in out.iter_mut().zip(x.chunks(GROUP)) {
        // SAFETY: AVX2 is there, and whole blocks.
        unsafe { pack_group(order, x, group) }
    }
}

/// # Safety
/// Needs AVX2; `x` is 1 to 8 blocks.
#[inline(always)]
unsafe fn pack_group(order: ActOrder, x: &[f32], out: &mut Q8Group) {
    let blocks = x.len() / BLOCK;
    // Bits of the largest magnitude: as integers, magnitudes order like floats do, with NaN above infinity.
    let mut amax = [0u32; LANES];
    // SAFETY: 32 floats are read of each of the blocks; stores go to arrays of eight words.
    unsafe {
        for b in 0..blocks {
            amax[b] = largest(x.as_ptr().add(b * BLOCK));
        }
        let bits = _mm256_loadu_si256(amax.as_ptr().cast());
        let largest = _mm256_castsi256_ps(bits);
        let inverse = _mm256_div_ps(_mm256_set1_ps(127.0), largest);
        // Codes are zero where the inverse is not finite, and where a value is not.
        let usable = _mm256_cmp_ps::<_CMP_LT_OQ>(inverse, _mm256_set1_ps(f32::INFINITY));
        let broken = _mm256_cmpgt_epi32(bits, _mm256_set1_epi32(0x7f7f_ffff));
        let usable = _mm256_andnot_ps(_mm256_castsi256_ps(broken), usable);
        let scale = _mm256_div_ps(largest, _mm256_set1_ps(127.0));
        let nan = _mm256_set1_ps(f32::NAN);
        let scale = _mm256_blendv_ps(scale, nan, _mm256_castsi256_ps(broken));
        let mut inverses = [0.0f32; LANES];
        let mut masks = [0u32; LANES];
        _mm256_storeu_ps(inverses.as_mut_ptr(), _mm256_and_ps(inverse, usable));
        _mm256_storeu_ps(masks.as_mut_ptr().cast(), usable);

        let mut codes = [_mm256_setzero_si256(); LANES];
        let (mut first, mut second) = ([0i32; LANES], [0i32; LANES]);
        for b in 0..blocks {
            let block = quantize(x.as_ptr().add(b * BLOCK), inverses[b], masks[b]);
            // Sums of eight bytes each, 128 too much for every byte.
            let biased = _mm256_xor_si256(block, _mm256_set1_epi8(-128));
            let sums = _mm256_sad_epu8(biased, _mm256_setzero_si256());
            let sums = _mm256_add_epi64(sums, _mm256_unpackhi_epi64(sums, sums));
            first[b] = _mm256_cvtsi256_si32(sums) - 16 * 128;
            second[b] = _mm_cvtsi128_si32(_mm256_extracti128_si256::<1>(sums)) - 16 * 128;
            codes[b] = match order {
                ActOrder::Sequential => block,
                ActOrder::NibblePairs => even_then_odd(block),
            };
        }
        let first = _mm256_loadu_si256(first.as_ptr().cast());
        let sum = _mm256_add_epi32(first, _mm256_loadu_si256(second.as_ptr().cast()));
        let mut asum = _mm256_mul_ps(scale, _mm256_cvtepi32_ps(sum));
        let mut scale = scale;
        if blocks < LANES {
            // What is missing is +0, also where 0 / 127 or a product would have given something else.
            let lane = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
            let there = _mm256_cmpgt_epi32(_mm256_set1_epi32(blocks as i32), lane);
            scale = _mm256_and_ps(scale, _mm256_castsi256_ps(there));
            asum = _mm256_and_ps(asum, _mm256_castsi256_ps(there));
        }
        _mm256_storeu_ps(out.scale.as_mut_ptr(), scale);
        _mm256_storeu_ps(out.asum.as_mut_ptr(), asum);
        _mm256_storeu_si256(out.sum.as_mut_ptr().cast(), sum);
        _mm256_storeu_si256(out.sum_first.as_mut_ptr().cast(), first);
        for (word, to) in transpose(codes).into_iter().zip(&mut out.codes) {
            _mm256_storeu_si256(to.as_mut_ptr().cast(), word);
        }
    }
}

/// # Safety
/// Needs AVX2; 32 floats.
#[inline(always)]
unsafe fn largest(x: *const f32) -> u32 {
    // SAFETY: as the caller's.
    unsafe {
        let magnitude = _mm256_set1_epi32(0x7fff_ffff);
        let mut max = _mm256_setzero_si256();
        for i in 0..4 {
            let v = _mm256_loadu_si256(x.add(8 * i).cast());
            max = _mm256_max_epu32(max, _mm256_and_si256(v, magnitude));
        }
        let max = _mm_max_epu32(_mm256_castsi256_si128(max), _mm256_extracti128_si256::<1>(max));
        let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0x4e>(max));
        let max = _mm_max_epu32(max, _mm_shuffle_epi32::<0xb1>(max));
        _mm_cvtsi128_si32(max) as u32
    }
}

/// A block's codes in the order of the elements; zero where the mask is.
///
/// # Safety
/// Needs AVX2; 32 floats.
#[inline(always)]
unsafe fn quantize(x: *const f32, inverse: f32, mask: u32) -> __m256i {
    // SAFETY: as the caller's.
    unsafe {
        let inverse = _mm256_set1_ps(inverse);
        let mut words = [_mm256_setzero_si256(); 4];
        for i in 0..4 {
            // Rounds to nearest, ties to even; magnitudes are below 127.5.
            let scaled = _mm256_mul_ps(_mm256_loadu_ps(x.add(8 * i)), inverse);
            words[i] = _mm256_cvtps_epi32(scaled);
        }
        let low = _mm256_packs_epi32(words[0], words[1]);
        let high = _mm256_packs_epi32(words[2], words[3]);
        // Words of four codes, of the low lanes first.
        let packed = _mm256_packs_epi16(low, high);
        let order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
        let codes = _mm256_permutevar8x32_epi32(packed, order);
        _mm256_and_si256(codes, _mm256_set1_epi32(mask as i32))
    }
}

/// Codes of even elements, then those of odd ones.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn even_then_odd(block: __m256i) -> __m256i {
    // SAFETY: register operations.
    unsafe {
        let within = _mm256_broadcastsi128_si256(_mm_set_epi8(
            15, 13, 11, 9, 7, 5, 3, 1, 14, 12, 10, 8, 6, 4, 2, 0,
        ));
        _mm256_permute4x64_epi64::<0xd8>(_mm256_shuffle_epi8(block, within))
    }
}

/// From words of blocks to blocks of words.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
unsafe fn transpose(rows: [__m256i; 8]) -> [__m256i; 8] {
    // SAFETY: register operations.
    unsafe {
        let mut pairs = [_mm256_setzero_si256(); 8];
        for i in 0..4 {
            pairs[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
            pairs[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
        }
        let mut quads = [_mm256_setzero_si256(); 8];
        for half in 0..2 {
            for hi in 0..2 {
                let (a, b) = (pairs[4 * half + hi], pairs[4 * half + 2 + hi]);
                quads[4 * half + 2 * hi] = _mm256_unpacklo_epi64(a, b);
                quads[4 * half + 2 * hi + 1] = _mm256_unpackhi_epi64(a, b);
            }
        }
        let mut columns = [_mm256_setzero_si256(); 8];
        for i in 0..4 {
            columns[i] = _mm256_permute2x128_si256::<0x20>(quads[i], quads[4 + i]);
            columns[4 + i] = _mm256_permute2x128_si256::<0x31>(quads[i], quads[4 + i]);
        }
        columns
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn value() -> impl Strategy<Value = f32> {
        prop_oneof![
            20 => -4.0f32..4.0,
            4 => any::<f32>(),
            2 => prop::sample::select(vec![0.0, -0.0, 1e-38, 1e-45, f32::MAX, 3.4e36, 0.5, 127.0]),
            1 => prop::sample::select(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY]),
        ]
    }

    fn bits(group: &Q8Group) -> Vec<u32> {
        let codes =
            group.codes.as_flattened().iter().map(|c| i32::from_le_bytes(c.map(|c| c as u8)));
        let floats = group.scale.iter().chain(&group.asum);
        // Which NaN it is does not matter.
        let floats = floats.map(|x| if x.is_nan() { u32::MAX } else { x.to_bits() });
        let sums = group.sum.iter().chain(&group.sum_first).map(|s| *s as u32);
        codes.map(|c| c as u32).chain(floats).chain(sums).collect()
    }

    proptest! {
        #[test]
        fn the_bits_of_the_portable_packing(
            blocks in 1usize..=19,
            pairs in any::<bool>(),
            values in prop::collection::vec(value(), 19 * BLOCK),
            scale in prop::sample::select(vec![1.0f32, 1e-30, 1e30]),
        ) {
            if !is_x86_feature_detected!("avx2") {
                return Ok(());
            }
            let order = if pairs { ActOrder::NibblePairs } else { ActOrder::Sequential };
            let x: Vec<f32> = values[..blocks * BLOCK].iter().map(|v| v * scale).collect();
            let mut ours = vec![Q8Group::ZERO; blocks.div_ceil(LANES)];
            // SAFETY: AVX2 was found.
            unsafe { pack_row(order, &x, &mut ours) };
            for (ours, x) in ours.iter().zip(x.chunks(GROUP)) {
                let mut want = Q8Group::ZERO;
                want.pack(order, x);
                prop_assert_eq!(bits(ours), bits(&want));
            }
        }
    }
}
