//! Weights as f32, by the decoders of the integer kernel: what the float kernel multiplies. Not here: products.
#![cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]

use forebay_quant::dequant::decoded_to_f32;
use forebay_quant::group::{BLOCK, GROUP, LANES};
use forebay_quant::{ActOrder, Group};

use super::decode::{Decoded, Decoder};
use super::float::Dequantize;
use super::isa::Isa;
use super::kernel::{Features, groups_of};

/// Dequantises some columns of some features, `I::ROWS` at a time.
///
/// # Safety
/// The instruction set of `I` must be there; `out` has room as [`Dequantize`] says.
#[inline(always)]
pub(super) unsafe fn dequantize<I: Isa, D: Decoder<I>>(
    decoder: &D,
    rows: Dequantize<'_>,
    out: *mut f32,
) {
    let (weight, end) = (rows.weight, rows.features.end);
    let bytes = weight.format().group_bytes();
    let (whole, rest) = groups_of::<I, D>(weight.cols());
    let mut groups = [Group::EMPTY; 2];
    for f in rows.features.clone().step_by(I::ROWS) {
        let ptrs = Features::new::<I>(weight, f, end);
        for c in rows.columns.clone().step_by(GROUP) {
            let g = c / GROUP;
            // SAFETY: groups lie within the rows; `groups` has room for all codes and lanes.
            unsafe {
                let w = if !D::TAIL || g < whole {
                    decoder.decode(ptrs.group(g, bytes))
                } else {
                    ptrs.decode_tail(decoder, weight, bytes, rest)
                };
                unpack::<I, D>(&w, &mut groups);
                for r in 0..I::ROWS.min(end - f) {
                    let n = (rows.columns.end - c).min(GROUP);
                    let at = (f + r - rows.features.start) * rows.stride + c - rows.columns.start;
                    let out = out.add(at);
                    out.write_bytes(0, n);
                    let out = std::slice::from_raw_parts_mut(out, n);
                    decoded_to_f32(D::FACTS.bias, decoder.offset(), &groups[r], out);
                }
            }
        }
    }
}

/// From packed vectors to the order of the weights.
#[inline(always)]
unsafe fn unpack<I: Isa, D: Decoder<I>>(w: &Decoded<I>, groups: &mut [Group; 2]) {
    let [a, b] = groups;
    // SAFETY: a group has room for 256 codes and 8 lanes of each half.
    unsafe {
        let c = &w.codes;
        let first = I::transpose([c[0], c[1], c[2], c[3]]);
        let second = I::transpose([c[4], c[5], c[6], c[7]]);
        let codes = [a.codes.as_mut_ptr(), b.codes.as_mut_ptr()];
        for k in 0..4 {
            let [x, y] = match D::ORDER {
                ActOrder::Sequential => [first[k], second[k]],
                ActOrder::NibblePairs => I::zip(first[k], second[k]),
            };
            I::store(x, codes, k * BLOCK, (k + 4) * BLOCK);
            I::store(y, codes, k * BLOCK + 16, (k + 4) * BLOCK + 16);
        }
        let halves = if D::FACTS.halves { 2 } else { 1 };
        let mut lanes = [0.0f32; 2 * LANES];
        for half in 0..2 {
            I::store_acc(w.ws[half % halves], lanes.as_mut_ptr());
            a.ws[half].copy_from_slice(&lanes[..LANES]);
            b.ws[half].copy_from_slice(&lanes[LANES..]);
            if D::FACTS.bias {
                I::store_acc(w.wb[half % halves], lanes.as_mut_ptr());
                a.wb[half].copy_from_slice(&lanes[..LANES]);
                b.wb[half].copy_from_slice(&lanes[LANES..]);
            }
        }
    }
}
