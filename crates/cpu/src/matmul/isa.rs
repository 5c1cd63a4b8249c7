//! What an instruction set must offer so that the decoders and the kernel run on it.
//!
//! A byte vector is made of 128-bit lanes, two for each of `ROWS` weight rows: lane 0 of a row holds blocks 0
//! to 3 of a group, lane 1 blocks 4 to 7. In a vector of packed codes the 32-bit lane is the block. A float vector has
//! eight lanes for each row, again one per block.

use forebay_quant::Q8Group;

/// Pointers into the rows of a vector; an instruction set with one row looks at the first only.
pub(super) type RowPtrs = [*const u8; 2];

/// Codes of the first two blocks of a group of activations, folded as [`Isa::fold`] says: `[half][word][block]`.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Folded([[[[i8; 4]; 2]; 4]; 2]);

impl Folded {
    /// Of a group.
    #[inline(always)]
    pub fn of(group: &Q8Group) -> Folded {
        let mut folded = [[[[0; 4]; 2]; 4]; 2];
        for j in 0..8 {
            folded[j % 2][j / 2] = [group.codes[j][0], group.codes[j][1]];
        }
        Folded(folded)
    }
}

/// See the module.
///
/// # Safety
/// Every function needs the instruction set that the implementing type stands for. Pointers are read as far as the
/// function says, at any alignment.
pub(super) trait Isa: Copy {
    /// Weight rows in a vector: 1 or 2.
    const ROWS: usize;
    /// Bytes.
    type V: Copy;
    /// 32-bit integers.
    type I: Copy;
    /// Floats.
    type F: Copy;

    /// 16 bytes at `row + lo` to lane 0 and at `row + hi` to lane 1, for each row.
    unsafe fn load(rows: RowPtrs, lo: usize, hi: usize) -> Self::V;
    /// The reverse of `load`.
    unsafe fn store(a: Self::V, rows: [*mut u8; 2], lo: usize, hi: usize);
    /// Words 0..4 of eight blocks of 16 bytes without gaps.
    #[inline(always)]
    unsafe fn load_packed(rows: RowPtrs) -> [Self::V; 4] {
        // SAFETY: as the caller's.
        unsafe {
            Self::transpose([
                Self::load(rows, 0, 64),
                Self::load(rows, 16, 80),
                Self::load(rows, 32, 96),
                Self::load(rows, 48, 112),
            ])
        }
    }
    /// One 32-bit word per block.
    unsafe fn words(rows: [[u32; 8]; 2]) -> Self::V;
    /// Four times eight bytes per row: lanes 0 and 1, low halves first.
    unsafe fn quads(rows: [[u64; 4]; 2]) -> Self::V;
    unsafe fn splat(b: u8) -> Self::V;
    /// The same word in every 32-bit lane.
    unsafe fn splat32(w: u32) -> Self::V;
    unsafe fn and(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn or(a: Self::V, b: Self::V) -> Self::V;
    unsafe fn xor(a: Self::V, b: Self::V) -> Self::V;
    /// Shifts of 16-bit words: bits of one byte reach into its neighbour and must be masked off.
    unsafe fn shr<const N: i32>(a: Self::V) -> Self::V;
    unsafe fn shl<const N: i32>(a: Self::V) -> Self::V;
    /// Shifts of 32-bit words by a count that is constant wherever loops are unrolled.
    unsafe fn shr32(a: Self::V, n: usize) -> Self::V;
    unsafe fn shl32(a: Self::V, n: usize) -> Self::V;
    /// `table[i]` for the low nibbles `i` of `a`; the high ones must be zero. Within 128-bit lanes if the table is a vector.
    unsafe fn lookup(table: Self::V, a: Self::V) -> Self::V;
    /// The same 16 bytes in every lane.
    unsafe fn repeat(bytes: &[u8; 16]) -> Self::V;
    /// `value` in the bytes where `a & mask` is not zero, else 0.
    unsafe fn where_bits(a: Self::V, mask: Self::V, value: u8) -> Self::V;
    /// Interleaves bytes within 128-bit lanes: from the low halves, from the high halves.
    unsafe fn zip(a: Self::V, b: Self::V) -> [Self::V; 2];
    /// Transposes the 4 x 4 words of each 128-bit lane: from 16 bytes of each of four blocks to words `j` of them.
    unsafe fn transpose(v: [Self::V; 4]) -> [Self::V; 4];

    /// Lane `b` takes word `(b + by) mod 8` of its row.
    unsafe fn rotate(a: Self::V, by: usize) -> Self::V;
    unsafe fn rotate_f32(a: Self::F, by: usize) -> Self::F;

    /// bfloat16 to floats.
    unsafe fn bf16(rows: [[u16; 8]; 2]) -> Self::F;
    /// Half floats to floats.
    unsafe fn f16(rows: [[u16; 8]; 2]) -> Self::F;
    unsafe fn f32(rows: [[f32; 8]; 2]) -> Self::F;
    /// One half float per row, in all its lanes.
    unsafe fn f16_splat(rows: [u16; 2]) -> Self::F;
    /// Bytes, lowest first, as numbers.
    unsafe fn u8(rows: [u64; 2]) -> Self::F;
    unsafe fn i8(rows: [u64; 2]) -> Self::F;
    /// Eight bytes at `at`, `at + STRIDE`, ... of each row as `2^(s - 128)`, NaN for 255
    /// (`forebay_quant::group::e8m0_half`).
    unsafe fn e8m0_half<const STRIDE: usize>(rows: RowPtrs, at: usize) -> Self::F;
    /// 32-bit lanes as numbers.
    unsafe fn lanes(a: Self::V) -> Self::F;
    unsafe fn negate(a: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    unsafe fn zero() -> Self::F;
    /// `a` in the first `blocks` lanes of each row, -0 in the others.
    unsafe fn keep_blocks(a: Self::F, blocks: usize) -> Self::F;
    /// 8 floats for each row, from memory.
    unsafe fn load_acc(p: *const f32) -> Self::F;
    unsafe fn store_acc(a: Self::F, p: *mut f32);
    /// The tree over the lanes of each row.
    unsafe fn join(a: Self::F) -> [f32; 2];
    /// The same for 16 rows, whose lanes lie at the first `16 / ROWS` of the pointers.
    #[inline(always)]
    unsafe fn join16(acc: [*const f32; 16]) -> [f32; 16] {
        let mut dots = [0.0; 16];
        for (acc, dots) in acc.into_iter().zip(dots.chunks_exact_mut(Self::ROWS)) {
            // SAFETY: as the caller's.
            let joined = unsafe { Self::join(Self::load_acc(acc)) };
            dots.copy_from_slice(&joined[..Self::ROWS]);
        }
        dots
    }

    /// Eight floats of the activations, for each row.
    unsafe fn act_f32(p: *const [f32; 8]) -> Self::F;
    unsafe fn act_i32(p: *const [i32; 8]) -> Self::I;
    unsafe fn sub(a: Self::I, b: Self::I) -> Self::I;
    unsafe fn to_f32(a: Self::I) -> Self::F;
    /// Sum over the words `from..from + N` of `(code - offset) * activation`; `sum` is that of the activation's codes.
    unsafe fn dot<const N: usize>(
        codes: &[Self::V; 8],
        from: usize,
        offset: i32,
        max_code: u8,
        a: *const Q8Group,
        sum: Self::I,
    ) -> Self::I;
    /// Whether there is a shorter way for a last group of one or two blocks: [`Isa::fold`] and
    /// [`Isa::dot_folded`], which are called only then.
    const FOLDS: bool = false;
    /// Words 0, 2, 4, 6 of the first two blocks of each row, then words 1, 3, 5, 7.
    #[inline(always)]
    unsafe fn fold(_codes: &[Self::V; 8]) -> [Self::V; 2] {
        unreachable!("this instruction set does not fold")
    }
    /// As `dot::<8>`, of weights and activations that are folded; lanes from `blocks` on are zero.
    #[inline(always)]
    unsafe fn dot_folded(
        _codes: &[Self::V; 2],
        _blocks: usize,
        _offset: i32,
        _a: &Folded,
        _sum: Self::I,
    ) -> Self::I {
        unreachable!("this instruction set does not fold")
    }
    /// Asks for the cache line at `p`, which need not be valid.
    unsafe fn prefetch(p: *const u8);
}
