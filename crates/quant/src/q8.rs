//! Quantised activation rows: the other side of every `q8` dot product.
//!
//! A row is cut into blocks of 32 and these into groups of 8. A [`Q8Group`] is laid out for integer
//! multiply-accumulate over groups of four bytes: vector `j` holds dword `j` of each of the eight blocks, so that after
//! eight steps the 32-bit lanes *are* the eight block sums, with no horizontal adds.

use crate::format::ActOrder;
use crate::group::{BLOCK, GROUP, LANES};

/// Eight quantised blocks of an activation row. Missing blocks of a row's last group are all zero.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
pub struct Q8Group {
    /// Codes `[dword j][block][byte]`, within a block in the order of the [`ActOrder`].
    pub codes: [[[i8; 4]; LANES]; 8],
    /// Scale of each block.
    pub scale: [f32; LANES],
    /// `scale * sum` of each block: what a weight bias is multiplied with.
    pub asum: [f32; LANES],
    /// Sum of a block's 32 codes.
    pub sum: [i32; LANES],
    /// Sum of a block's first 16 codes; that of its last 16 is `sum - sum_first`.
    pub sum_first: [i32; LANES],
}

impl Q8Group {
    /// No activation at all.
    pub const ZERO: Q8Group = Q8Group {
        codes: [[[0; 4]; LANES]; 8],
        scale: [0.0; LANES],
        asum: [0.0; LANES],
        sum: [0; LANES],
        sum_first: [0; LANES],
    };

    /// Quantises up to 256 values (a multiple of 32) into this group.
    ///
    /// Always inlined: compiled for a wider vector unit this is the SIMD packing, with the same bits, as every
    /// step is exact or correctly rounded.
    #[inline(always)]
    pub fn pack(&mut self, order: ActOrder, x: &[f32]) {
        assert!(x.len() <= GROUP && x.len().is_multiple_of(BLOCK));
        if x.len() < GROUP {
            *self = Q8Group::ZERO;
        }
        for (b, block) in x.chunks_exact(BLOCK).enumerate() {
            let block: &[f32; BLOCK] = block.try_into().expect("32 values");
            let q = Q8Block::quantize(block);
            let (mut first, mut second) = (0i32, 0i32);
            for i in 0..16 {
                first += q.codes[i] as i32;
                second += q.codes[16 + i] as i32;
            }
            self.scale[b] = q.scale;
            self.sum[b] = first + second;
            self.sum_first[b] = first;
            self.asum[b] = q.scale * (first + second) as f32;
            match order {
                ActOrder::Sequential => {
                    for j in 0..8 {
                        for k in 0..4 {
                            self.codes[j][b][k] = q.codes[4 * j + k];
                        }
                    }
                }
                ActOrder::NibblePairs => {
                    for j in 0..4 {
                        for k in 0..4 {
                            self.codes[j][b][k] = q.codes[8 * j + 2 * k];
                            self.codes[4 + j][b][k] = q.codes[8 * j + 2 * k + 1];
                        }
                    }
                }
            }
        }
    }
}

/// One quantised block, codes in the order of the elements.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Q8Block {
    /// Codes from -127 to 127.
    pub codes: [i8; BLOCK],
    /// `max|x| / 127`; NaN if a value is not finite.
    pub scale: f32,
}

impl Q8Block {
    /// `scale = amax / 127`, `code = round_ties_even(x * (127 / amax))`. If `127 / amax` is not finite (`amax` is
    /// zero or below 127 / f32::MAX) all codes are 0. If a value is infinite or NaN, the codes are 0 and the scale is NaN,
    /// so that every output the block has a part in becomes NaN.
    #[inline(always)]
    pub fn quantize(x: &[f32; BLOCK]) -> Q8Block {
        // As integers, magnitudes order like floats do, with NaN above infinity.
        let mut amax_bits = 0u32;
        for &v in x {
            amax_bits = amax_bits.max(v.to_bits() & 0x7fff_ffff);
        }
        let amax = f32::from_bits(amax_bits);
        let inverse = 127.0 / amax;
        let mut codes = [0; BLOCK];
        if amax_bits >= 0x7f80_0000 {
            return Q8Block { codes, scale: f32::NAN };
        }
        if inverse < f32::INFINITY {
            // Adding 1.5 * 2^23 rounds to an integer, ties to even, and leaves it in the low bits.
            // |x * inverse| < 127.5, so that clamping has nothing to do.
            for i in 0..BLOCK {
                codes[i] = (x[i] * inverse + 12_582_912.0).to_bits() as i8;
            }
        }
        Q8Block { codes, scale: amax / 127.0 }
    }
}

/// Quantised activation rows `[rows, cols]`; allocated once and packed anew for each use.
#[derive(Clone, Debug)]
pub struct Q8Rows {
    groups: Vec<Q8Group>,
    max_rows: usize,
    cols: usize,
    order: ActOrder,
}

impl Q8Rows {
    /// Room for `max_rows` rows of `cols` values.
    ///
    /// # Panics
    /// If `cols` is not a multiple of 32.
    pub fn new(max_rows: usize, cols: usize, order: ActOrder) -> Q8Rows {
        assert!(cols.is_multiple_of(BLOCK), "rows of {cols} are not made of blocks of {BLOCK}");
        let groups = vec![Q8Group::ZERO; max_rows * stride(cols)];
        Q8Rows { groups, max_rows, cols, order }
    }

    /// Bytes that [`Q8Rows::new`] takes for this shape.
    pub fn bytes_for(max_rows: usize, cols: usize) -> usize {
        max_rows * stride(cols) * size_of::<Q8Group>()
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.groups.capacity() * size_of::<Q8Group>()
    }

    /// Gives the same memory another shape; allocates only if that is larger than any before. What was packed
    /// is lost.
    pub fn reshape(&mut self, max_rows: usize, cols: usize, order: ActOrder) {
        assert!(cols.is_multiple_of(BLOCK), "rows of {cols} are not made of blocks of {BLOCK}");
        self.groups.resize(max_rows * stride(cols), Q8Group::ZERO);
        (self.max_rows, self.cols, self.order) = (max_rows, cols, order);
    }

    /// Rows there is room for.
    pub fn max_rows(&self) -> usize {
        self.max_rows
    }

    /// Values of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Groups of a row.
    pub fn groups_per_row(&self) -> usize {
        self.cols.div_ceil(GROUP)
    }

    /// Order of the codes within a block.
    pub fn order(&self) -> ActOrder {
        self.order
    }

    /// The groups of row `row`.
    #[inline]
    pub fn row(&self, row: usize) -> &[Q8Group] {
        assert!(row < self.max_rows);
        &self.groups[row * stride(self.cols)..][..self.groups_per_row()]
    }

    /// Groups from the start of a row to that of the next.
    pub fn stride(&self) -> usize {
        stride(self.cols)
    }

    /// All groups, row after row with [`Q8Rows::stride`]: for packing in parallel.
    pub fn groups_mut(&mut self) -> &mut [Q8Group] {
        &mut self.groups
    }

    /// Quantises `x` into row `row`.
    pub fn pack(&mut self, row: usize, x: &[f32]) {
        assert!(row < self.max_rows && x.len() == self.cols);
        let (n, order) = (self.groups_per_row(), self.order);
        for (group, x) in
            self.groups[row * stride(self.cols)..][..n].iter_mut().zip(x.chunks(GROUP))
        {
            group.pack(order, x);
        }
    }
}

/// Rows are an odd number of groups apart, so that the same group of many rows does not fall into the few same sets
/// of a cache.
fn stride(cols: usize) -> usize {
    match cols.div_ceil(GROUP) {
        0 => 0,
        n => n | 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn block(f: impl Fn(usize) -> f32) -> [f32; BLOCK] {
        std::array::from_fn(f)
    }

    #[test]
    fn rounding_is_to_nearest_even_within_127() {
        for amax in [127.0f32, 1.0, 3.7e-30, 1e38, f32::MAX] {
            let x = block(|i| if i == 0 { amax } else { amax / 127.0 * (i as f32 * 7.75 - 120.0) });
            let q = Q8Block::quantize(&x);
            for (i, &x) in x.iter().enumerate() {
                let expected = (x * (127.0 / amax)).round_ties_even().clamp(-127.0, 127.0);
                assert_eq!(q.codes[i] as f32, expected, "amax {amax} element {i}");
            }
        }
    }

    #[test]
    fn zero_tiny_and_not_finite() {
        assert_eq!(Q8Block::quantize(&[0.0; BLOCK]), Q8Block { codes: [0; BLOCK], scale: 0.0 });
        assert_eq!(Q8Block::quantize(&[1e-38; BLOCK]).codes, [0; BLOCK]);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let q = Q8Block::quantize(&block(|i| if i == 31 { bad } else { 1.0 }));
            assert!(q.scale.is_nan() && q.codes == [0; BLOCK]);
        }
    }

    #[test]
    fn packed_places_follow_the_order() {
        let x: Vec<f32> = (0..96).map(|i| (i * 37 % 255) as f32 - 127.0).collect();
        for order in [ActOrder::Sequential, ActOrder::NibblePairs] {
            let mut rows = Q8Rows::new(2, 96, order);
            rows.pack(1, &x);
            let g = rows.row(1)[0];
            for b in 0..LANES {
                if b >= 3 {
                    assert_eq!((g.scale[b], g.sum[b]), (0.0, 0));
                    continue;
                }
                let q = Q8Block::quantize(x[32 * b..][..32].try_into().unwrap());
                for (i, &e) in order.elements().iter().enumerate() {
                    assert_eq!(g.codes[i / 4][b][i % 4], q.codes[e as usize]);
                }
                assert_eq!(g.sum[b], q.codes.iter().map(|&c| c as i32).sum::<i32>());
                assert_eq!(g.sum_first[b], q.codes[..16].iter().map(|&c| c as i32).sum::<i32>());
            }
        }
    }
}
