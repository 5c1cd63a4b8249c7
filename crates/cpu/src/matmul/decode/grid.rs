//! `IQ1`, `IQ2`, `IQ3`: codes are points of a grid.

use forebay_quant::grid::{GridFormat, Signs};
use forebay_quant::{ActOrder, CodeFacts};

use super::{Decoded, Decoder, concat, facts, look_up, where_set};
use crate::matmul::isa::{Isa, RowPtrs};

/// A grid format: `IQ1`, `IQ2`, `IQ3`.
pub(in crate::matmul) struct Grid<G>(pub G);

impl<I: Isa, G: GridFormat> Decoder<I> for Grid<G> {
    const FACTS: CodeFacts = facts(G::FORMAT);
    const ORDER: ActOrder = G::FORMAT.act_order();
    const PREFETCH: [usize; 3] = G::FORMAT.group_bytes();
    const TAIL: bool = false;

    #[inline(always)]
    unsafe fn decode(&self, [p, ..]: [RowPtrs; 3]) -> Decoded<I> {
        // SAFETY: one super-block.
        unsafe {
            let size = G::FORMAT.group_bytes()[0];
            let a = std::slice::from_raw_parts(p[0], size);
            let b = if I::ROWS == 2 { std::slice::from_raw_parts(p[1], size) } else { a };
            let d = I::mul(I::f16_splat([G::d(a), G::d(b)]), I::f32([[G::UNIT; 8]; 2]));
            let mut signs = [[0; 8]; 2];
            for block in 0..8 {
                signs[0][block] = G::signs(a, block);
                signs[1][block] = G::signs(b, block);
            }
            let mut signs = I::words(signs);
            let scales = if G::SIGNS == Signs::SevensAndScale {
                [I::lanes(I::shr32(signs, 28)); 2]
            } else {
                let (a, b) = (G::scales(a), G::scales(b));
                [I::u8([a[0], b[0]]), I::u8([a[1], b[1]])]
            };
            let (one, two) = (I::f32([[1.0; 8]; 2]), I::f32([[2.0; 8]; 2]));
            let ws =
                [I::mul(d, I::fma(scales[0], two, one)), I::mul(d, I::fma(scales[1], two, one))];
            if G::SIGNS == Signs::SevensAndScale {
                let mut sevens = I::and(signs, I::splat32(0x7f));
                for l in 1..4 {
                    let moved = I::and(I::shl32(signs, l), I::splat32(0x7f << (8 * l)));
                    sevens = I::or(sevens, moved);
                }
                signs = sevens;
            }
            if G::SIGNS != Signs::All {
                let mut parity = signs;
                for n in [4, 2, 1] {
                    parity = I::xor(parity, I::shr32(parity, n));
                }
                signs = I::or(signs, I::shl32(I::and(parity, I::splat(1)), 7));
            }
            let first = I::transpose(grid_points::<I, G>([a, b], 0));
            let second = I::transpose(grid_points::<I, G>([a, b], 2));
            let mut codes = concat(first, second);
            for (j, code) in codes.iter_mut().enumerate() {
                *code = I::or(*code, where_set::<I>(signs, j, 8));
            }
            Decoded { codes: look_up::<I>(&G::CODES, codes), ws, wb: ws }
        }
    }
}

/// Coordinates of 16 weights from `8 l` on, of four blocks a lane.
#[inline(always)]
unsafe fn grid_points<I: Isa, G: GridFormat>([a, b]: [&[u8]; 2], l: usize) -> [I::V; 4] {
    // SAFETY: register operations.
    unsafe {
        [
            I::quads([grid_quad::<G>(a, 0, l), grid_quad::<G>(b, 0, l)]),
            I::quads([grid_quad::<G>(a, 1, l), grid_quad::<G>(b, 1, l)]),
            I::quads([grid_quad::<G>(a, 2, l), grid_quad::<G>(b, 2, l)]),
            I::quads([grid_quad::<G>(a, 3, l), grid_quad::<G>(b, 3, l)]),
        ]
    }
}

#[inline(always)]
fn grid_quad<G: GridFormat>(row: &[u8], b: usize, l: usize) -> [u64; 4] {
    [
        G::point(row, b, l),
        G::point(row, b, l + 1),
        G::point(row, b + 4, l),
        G::point(row, b + 4, l + 1),
    ]
}
