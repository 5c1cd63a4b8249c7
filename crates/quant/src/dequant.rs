//! Weights as f32: what the `gguf` Python package and MLX make of the same bytes, to the bit.

use crate::format::Format;
use crate::group::{BLOCK, GROUP, Group, bf16_to_f32, decode_group, f16_to_f32};
use crate::matrix::MatrixView;

/// Row `row` of a matrix of any format, as f32.
///
/// # Panics
/// If `out` is not as long as a row.
pub fn dequantize_row(weight: &MatrixView<'_>, row: usize, out: &mut [f32]) {
    assert_eq!(out.len(), weight.cols());
    if weight.format().is_quantized() {
        for (g, out) in out.chunks_mut(GROUP).enumerate() {
            dequantize_group(weight, row, g, out);
        }
    } else {
        decode_floats(weight.format(), weight.row(0, row), out);
    }
}

/// Group `g` of row `row` of a quantised matrix; `out` holds its up to 256 weights.
#[inline(always)]
pub fn dequantize_group(weight: &MatrixView<'_>, row: usize, g: usize, out: &mut [f32]) {
    let format = weight.format();
    let facts = format.codes().expect("a quantised format");
    let mut group = Group::EMPTY;
    decode_group(format, weight.group(row, g), out.len() / BLOCK, &mut group);
    decoded_to_f32(facts.bias, facts.offset, &group, out);
}

/// The weights of a decoded group; `out` holds the up to 256 there are.
#[inline(always)]
pub fn decoded_to_f32(bias: bool, offset: i32, group: &Group, out: &mut [f32]) {
    for (i, out) in out.chunks_exact_mut(16).enumerate() {
        let (ws, wb) = (group.ws[i % 2][i / 2], group.wb[i % 2][i / 2]);
        let codes: &[u8; 16] = group.codes[16 * i..][..16].try_into().expect("16 codes");
        if bias {
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = ws * (code as i32 - offset) as f32 + wb;
            }
        } else {
            for (out, &code) in out.iter_mut().zip(codes) {
                *out = ws * (code as i32 - offset) as f32;
            }
        }
    }
}

/// Numbers of a float format; `bytes` holds exactly `out.len()` of them, at any address.
///
/// # Panics
/// If the lengths do not match or the format is quantised.
#[inline(always)]
pub fn decode_floats(format: Format, bytes: &[u8], out: &mut [f32]) {
    match format {
        Format::F32 => {
            let (bytes, []) = bytes.as_chunks::<4>() else { panic!("ragged f32 bytes") };
            assert_eq!(bytes.len(), out.len());
            for (out, &b) in out.iter_mut().zip(bytes) {
                *out = f32::from_le_bytes(b);
            }
        }
        Format::F16 | Format::Bf16 => {
            let (bytes, []) = bytes.as_chunks::<2>() else { panic!("ragged half bytes") };
            assert_eq!(bytes.len(), out.len());
            if format == Format::F16 {
                for (out, &b) in out.iter_mut().zip(bytes) {
                    *out = f16_to_f32(u16::from_le_bytes(b));
                }
            } else {
                for (out, &b) in out.iter_mut().zip(bytes) {
                    *out = bf16_to_f32(u16::from_le_bytes(b));
                }
            }
        }
        _ => panic!("{} is not a float format", format.name()),
    }
}

/// A scale that is not a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the scale of block {block} of row {row} is NaN (E8M0 byte 255)")]
pub struct BadScale {
    /// Row of the matrix.
    pub row: usize,
    /// Block of 32 within the row.
    pub block: usize,
}

/// Looks for E8M0 scales of 255, which mean NaN; other formats always pass. Reads every scale: for use when a
/// matrix is loaded.
pub fn check_scales(weight: &MatrixView<'_>) -> Result<(), BadScale> {
    let (plane, unit) = match weight.format() {
        Format::Mxfp4 => (0, 17),
        Format::Mxfp4Split => (1, 1),
        _ => return Ok(()),
    };
    for row in 0..weight.rows() {
        let scales = weight.row(plane, row).iter().step_by(unit);
        if let Some(block) = scales.into_iter().position(|&s| s == 255) {
            return Err(BadScale { row, block });
        }
    }
    Ok(())
}
