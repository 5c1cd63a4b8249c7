//! The portable path: the oracle's steps on packed activations, written so that a compiler may vectorise them.

use forebay_quant::group::{
    BLOCK, GROUP, Group, LANES, bf16_to_f32, decode_group, f16_to_f32, pack_codes,
};
use forebay_quant::oracle::join;
use forebay_quant::{CodeFacts, Q8Group, Q8Rows};

use super::float::{self, FloatIsa};
use super::job::Tile;

/// Rows whose lane sums are kept while a weight row is walked once.
const ROWS: usize = 32;

/// A tile in precision `q8`.
pub(super) fn q8_tile(tile: &Tile<'_>, q: &Q8Rows) {
    let weight = &tile.job.weight;
    let (format, rows) = (weight.format(), tile.job.rows);
    let facts = format.codes().expect("checked: quantised");
    let mut group = Group::EMPTY;
    let mut packed = [0; GROUP];
    for feature in tile.features.clone() {
        for start in (0..rows.len()).step_by(ROWS) {
            let n = (rows.len() - start).min(ROWS);
            let mut acc = [[0.0; LANES]; ROWS];
            for g in 0..weight.groups() {
                let blocks = (weight.cols() / BLOCK - g * LANES).min(LANES);
                decode_group(format, weight.group(feature, g), blocks, &mut group);
                pack_codes(q.order(), &group.codes, &mut packed);
                for (i, acc) in acc[..n].iter_mut().enumerate() {
                    let a = &q.row(rows.get(start + i).0)[g];
                    add_group(facts, &group, &packed, a, acc);
                }
            }
            for (i, acc) in acc[..n].iter_mut().enumerate() {
                // SAFETY: the feature is of this tile, the row of this job.
                unsafe { tile.write(rows.get(start + i).1, feature, join(acc)) }
            }
        }
    }
}

fn add_group(
    facts: CodeFacts,
    w: &Group,
    packed: &[u8; GROUP],
    a: &Q8Group,
    acc: &mut [f32; LANES],
) {
    let mut half_dots = [[0i32; LANES]; 2];
    for j in 0..8 {
        for b in 0..LANES {
            for k in 0..4 {
                half_dots[j / 4][b] += packed[j * 32 + b * 4 + k] as i32 * a.codes[j][b][k] as i32;
            }
        }
    }
    for b in 0..LANES {
        let mut term = |half: usize, dot: i32, sum: i32, asum: f32| {
            let i = dot - facts.offset * sum;
            acc[b] = (i as f32).mul_add(w.ws[half][b] * a.scale[b], acc[b]);
            if facts.bias {
                acc[b] = w.wb[half][b].mul_add(asum, acc[b]);
            }
        };
        if facts.halves {
            let sums = [a.sum_first[b], a.sum[b] - a.sum_first[b]];
            for half in 0..2 {
                term(half, half_dots[half][b], sums[half], a.scale[b] * sums[half] as f32);
            }
        } else {
            term(0, half_dots[0][b] + half_dots[1][b], a.sum[b], a.asum[b]);
        }
    }
}

/// A tile in precision `f32`.
pub(super) fn f32_tile(tile: &Tile<'_>, data: &[f32], stride: usize) {
    // SAFETY: the portable lanes need no instructions beyond the target's own.
    unsafe { float::tile::<Portable, 1>(tile, data, stride, float::dequantize) }
}

#[derive(Clone, Copy)]
struct Portable;

impl FloatIsa for Portable {
    type X = [f32; 16];

    #[inline(always)]
    unsafe fn load(p: *const f32) -> [f32; 16] {
        // SAFETY: the caller says that 16 floats lie there.
        unsafe { p.cast::<[f32; 16]>().read_unaligned() }
    }

    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> [f32; 16] {
        // SAFETY: the caller says that 32 bytes lie there.
        let halves = unsafe { p.cast::<[u16; 16]>().read_unaligned() };
        halves.map(|h| f16_to_f32(u16::from_le(h)))
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> [f32; 16] {
        // SAFETY: the caller says that 32 bytes lie there.
        let halves = unsafe { p.cast::<[u16; 16]>().read_unaligned() };
        halves.map(|h| bf16_to_f32(u16::from_le(h)))
    }

    #[inline(always)]
    unsafe fn fma(a: [f32; 16], b: [f32; 16], c: [f32; 16]) -> [f32; 16] {
        std::array::from_fn(|i| a[i].mul_add(b[i], c[i]))
    }

    #[inline(always)]
    unsafe fn store(x: [f32; 16], p: *mut f32) {
        // SAFETY: the caller says that 16 floats fit there.
        unsafe { p.cast::<[f32; 16]>().write_unaligned(x) }
    }
}
