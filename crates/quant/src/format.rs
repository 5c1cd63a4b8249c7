//! The table of weight formats: how logical weights of one row lie in bytes.
//!
//! A format stores a matrix in one to three *planes* (a GGUF block format has one; MXFP4 in
//! safetensors has blocks and scales; MLX affine has codes, scales and biases). Within a plane every
//! `elements` consecutive weights of a row take `bytes` bytes.

/// How the 32 codes of a block are ordered when activations are packed for it (see `oracle`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ActOrder {
    /// Dword `j` of a block holds elements `4j .. 4j+4`.
    Sequential,
    /// Nibble pairs: dword `j < 4` holds elements `8j, 8j+2, 8j+4, 8j+6`, dword `4 + j` the odd ones
    /// `8j+1, 8j+3, 8j+5, 8j+7`: what the low and the high nibbles of four bytes are when byte `i`
    /// holds elements `2i` and `2i+1`.
    NibblePairs,
}

/// Number type of the scales and biases of an MLX affine format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ParamType {
    /// bfloat16
    Bf16,
    /// IEEE half
    F16,
    /// IEEE single
    F32,
}

impl ParamType {
    /// Bytes of one value.
    pub const fn bytes(self) -> usize {
        match self {
            ParamType::Bf16 | ParamType::F16 => 2,
            ParamType::F32 => 4,
        }
    }
}

/// `bytes` bytes of a plane hold what belongs to `elements` consecutive weights of a row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneLayout {
    /// Weights covered by one unit.
    pub elements: usize,
    /// Bytes of one unit.
    pub bytes: usize,
}

impl PlaneLayout {
    /// Bytes of a row of `cols` weights; `None` if `cols` is not a multiple of `elements` or on overflow.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        if !cols.is_multiple_of(self.elements) {
            return None;
        }
        (cols / self.elements).checked_mul(self.bytes)
    }
}

/// How the codes of a quantised format become weights: `w = ws * (code - offset)`, plus `wb` where there is a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeFacts {
    /// Subtracted from the unsigned code.
    pub offset: i32,
    /// Largest unsigned code: says whether 16-bit partial sums can saturate.
    pub max_code: u8,
    /// One scale per 16 weights instead of one per 32.
    pub halves: bool,
    /// There is a bias `wb` beside the scale.
    pub bias: bool,
}

/// A weight format.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Format {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// GGUF `Q8_0`: f16 scale, 32 signed bytes.
    Q8_0,
    /// GGUF `Q4_0`: f16 scale, 32 nibbles (element j low nibble of byte j, j+16 high); code - 8.
    Q4_0,
    /// GGUF `Q4_1`: f16 scale, f16 minimum, 32 nibbles (element j low nibble of byte j, j+16 high).
    Q4_1,
    /// GGUF `Q5_0`: f16 scale, 32 high bits, 32 nibbles; code - 16.
    Q5_0,
    /// GGUF `Q5_1`: f16 scale, f16 minimum, 32 high bits, 32 nibbles.
    Q5_1,
    /// GGUF `Q2_K`: super-block of 256 = 16 x 16, 4-bit scales and minima, codes of 2 bits.
    Q2K,
    /// GGUF `Q3_K`: super-block of 256 = 16 x 16, 6-bit scales, 2 low bits and a high bit; code - 4.
    Q3K,
    /// GGUF `Q4_K`: super-block of 256 = 8 x 32, 6-bit scales and minima.
    Q4K,
    /// GGUF `Q5_K`: as `Q4_K`, and a fifth bit.
    Q5K,
    /// GGUF `Q6_K`: super-block of 256 = 16 x 16, 8-bit scales; code - 32.
    Q6K,
    /// GGUF `IQ1_S`: super-block of 256, points of a grid of -1, 0, 1 and one shift by 1/8 per 32, 3-bit scales.
    Iq1S,
    /// GGUF `IQ1_M`: as `IQ1_S` with a shift per 8 and a scale per 16; the f16 scale lies in pieces.
    Iq1M,
    /// GGUF `IQ2_XXS`: super-block of 256, a point of 8 coordinates and 7 signs per 8, the eighth makes their number
    /// even; 4-bit scales per 32.
    Iq2Xxs,
    /// GGUF `IQ2_XS`: as `IQ2_XXS` with a larger grid and scales per 16.
    Iq2Xs,
    /// GGUF `IQ2_S`: as `IQ2_XS` with a still larger grid and all signs.
    Iq2S,
    /// GGUF `IQ3_XXS`: super-block of 256, a point of 4 coordinates per 4, signs as `IQ2_XXS`, 4-bit scales per 32.
    Iq3Xxs,
    /// GGUF `IQ3_S`: as `IQ3_XXS` with a larger grid and all signs.
    Iq3S,
    /// GGUF `IQ4_NL`: as `Q4_0` with 16 uneven levels.
    Iq4Nl,
    /// GGUF `IQ4_XS`: super-block of 256 = 8 x 32, the levels of `IQ4_NL`, 6-bit scales.
    Iq4Xs,
    /// GGUF `MXFP4`: E8M0 scale byte, 32 nibbles (j low, j+16 high), E2M1 codes.
    Mxfp4,
    /// MXFP4 in two planes (safetensors `_blocks`/`_scales`, MLX `mode: mxfp4`): byte i holds elements
    /// 2i (low nibble) and 2i+1 (high); one E8M0 byte for 32 elements in the second plane.
    Mxfp4Split,
    /// MLX affine: `w = scale * code + bias`, codes in a little-endian bit stream.
    MlxAffine {
        /// Bits of a code: 2, 3, 4, 5, 6 or 8.
        bits: u8,
        /// Weights that share a scale and a bias: 32, 64 or 128.
        group: u16,
        /// Number type of scales and biases.
        params: ParamType,
    },
}

const fn mlx(bits: u8) -> Format {
    Format::MlxAffine { bits, group: 64, params: ParamType::Bf16 }
}

impl Format {
    /// Every format, MLX affine with each number of bits and one choice of group and parameters.
    pub const fn all() -> &'static [Format] {
        const ALL: &[Format] = &[
            Format::F32,
            Format::F16,
            Format::Bf16,
            Format::Q8_0,
            Format::Q4_0,
            Format::Q4_1,
            Format::Q5_0,
            Format::Q5_1,
            Format::Q2K,
            Format::Q3K,
            Format::Q4K,
            Format::Q5K,
            Format::Q6K,
            Format::Iq1S,
            Format::Iq1M,
            Format::Iq2Xxs,
            Format::Iq2Xs,
            Format::Iq2S,
            Format::Iq3Xxs,
            Format::Iq3S,
            Format::Iq4Nl,
            Format::Iq4Xs,
            Format::Mxfp4,
            Format::Mxfp4Split,
            mlx(2),
            mlx(3),
            mlx(4),
            mlx(5),
            mlx(6),
            mlx(8),
        ];
        ALL
    }

    /// Whether there is an MLX affine format of so many bits and weights that share a scale.
    pub const fn is_mlx_affine(bits: usize, group: usize) -> bool {
        matches!(bits, 2..=6 | 8) && matches!(group, 32 | 64 | 128)
    }

    /// Name as users know it.
    pub fn name(self) -> String {
        match self {
            Format::F32 => "F32".into(),
            Format::F16 => "F16".into(),
            Format::Bf16 => "BF16".into(),
            Format::Q8_0 => "Q8_0".into(),
            Format::Q4_0 => "Q4_0".into(),
            Format::Q4_1 => "Q4_1".into(),
            Format::Q5_0 => "Q5_0".into(),
            Format::Q5_1 => "Q5_1".into(),
            Format::Q2K => "Q2_K".into(),
            Format::Q3K => "Q3_K".into(),
            Format::Q4K => "Q4_K".into(),
            Format::Q5K => "Q5_K".into(),
            Format::Q6K => "Q6_K".into(),
            Format::Iq1S => "IQ1_S".into(),
            Format::Iq1M => "IQ1_M".into(),
            Format::Iq2Xxs => "IQ2_XXS".into(),
            Format::Iq2Xs => "IQ2_XS".into(),
            Format::Iq2S => "IQ2_S".into(),
            Format::Iq3Xxs => "IQ3_XXS".into(),
            Format::Iq3S => "IQ3_S".into(),
            Format::Iq4Nl => "IQ4_NL".into(),
            Format::Iq4Xs => "IQ4_XS".into(),
            Format::Mxfp4 | Format::Mxfp4Split => "MXFP4".into(),
            Format::MlxAffine { bits, group, .. } => format!("MLX {bits}-bit g{group}"),
        }
    }

    /// The planes of the format, one to three.
    pub fn planes(self) -> Vec<PlaneLayout> {
        let (layouts, n) = self.layouts();
        layouts[..n].to_vec()
    }

    /// As [`Format::planes`] without the allocation: the layouts and how many of them count.
    #[inline]
    pub const fn layouts(self) -> ([PlaneLayout; 3], usize) {
        const fn p(elements: usize, bytes: usize) -> PlaneLayout {
            PlaneLayout { elements, bytes }
        }
        const NONE: PlaneLayout = p(1, 0);
        match self {
            Format::F32 => ([p(1, 4), NONE, NONE], 1),
            Format::F16 | Format::Bf16 => ([p(1, 2), NONE, NONE], 1),
            Format::Q8_0 => ([p(32, 34), NONE, NONE], 1),
            Format::Q4_0 | Format::Iq4Nl => ([p(32, 18), NONE, NONE], 1),
            Format::Q4_1 => ([p(32, 20), NONE, NONE], 1),
            Format::Q5_0 => ([p(32, 22), NONE, NONE], 1),
            Format::Q5_1 => ([p(32, 24), NONE, NONE], 1),
            Format::Q2K => ([p(256, 84), NONE, NONE], 1),
            Format::Q3K | Format::Iq3S => ([p(256, 110), NONE, NONE], 1),
            Format::Q4K => ([p(256, 144), NONE, NONE], 1),
            Format::Q5K => ([p(256, 176), NONE, NONE], 1),
            Format::Q6K => ([p(256, 210), NONE, NONE], 1),
            Format::Iq1S => ([p(256, 50), NONE, NONE], 1),
            Format::Iq1M => ([p(256, 56), NONE, NONE], 1),
            Format::Iq2Xxs => ([p(256, 66), NONE, NONE], 1),
            Format::Iq2Xs => ([p(256, 74), NONE, NONE], 1),
            Format::Iq2S => ([p(256, 82), NONE, NONE], 1),
            Format::Iq3Xxs => ([p(256, 98), NONE, NONE], 1),
            Format::Iq4Xs => ([p(256, 136), NONE, NONE], 1),
            Format::Mxfp4 => ([p(32, 17), NONE, NONE], 1),
            Format::Mxfp4Split => ([p(32, 16), p(32, 1), NONE], 2),
            Format::MlxAffine { bits, group, params } => {
                let g = group as usize;
                ([p(g, g * bits as usize / 8), p(g, params.bytes()), p(g, params.bytes())], 3)
            }
        }
    }

    /// What the integer codes of a quantised format mean; `None` for float formats.
    pub const fn codes(self) -> Option<CodeFacts> {
        const fn c(offset: i32, max_code: u8, halves: bool, bias: bool) -> Option<CodeFacts> {
            Some(CodeFacts { offset, max_code, halves, bias })
        }
        match self {
            Format::F32 | Format::F16 | Format::Bf16 => None,
            Format::Q8_0 => c(128, 255, false, false),
            Format::Q4_0 => c(8, 15, false, false),
            Format::Q4_1 | Format::Q4K => c(0, 15, false, true),
            Format::Q5_0 => c(16, 31, false, false),
            Format::Q5_1 | Format::Q5K => c(0, 31, false, true),
            Format::Q2K => c(0, 3, true, true),
            Format::Q3K => c(4, 7, true, false),
            Format::Q6K => c(32, 63, true, false),
            // Eighths: 8 * (-1, 0, 1) plus or minus 1.
            Format::Iq1S => c(9, 18, false, false),
            Format::Iq1M => c(9, 18, true, false),
            Format::Iq2Xxs => c(43, 86, false, false),
            Format::Iq2Xs | Format::Iq2S => c(43, 86, true, false),
            Format::Iq3Xxs => c(62, 124, false, false),
            Format::Iq3S => c(15, 30, false, false),
            Format::Iq4Nl | Format::Iq4Xs => c(127, 240, false, false),
            Format::Mxfp4 | Format::Mxfp4Split => c(12, 24, false, false),
            Format::MlxAffine { bits, .. } => c(0, ((1u16 << bits) - 1) as u8, false, true),
        }
    }

    /// Bytes that a group of 256 weights takes in each plane.
    #[inline]
    pub const fn group_bytes(self) -> [usize; 3] {
        let (l, n) = self.layouts();
        let mut bytes = [0; 3];
        let mut i = 0;
        while i < n {
            bytes[i] = 256 / l[i].elements * l[i].bytes;
            i += 1;
        }
        bytes
    }

    /// Columns must be a multiple of this.
    pub fn block_elements(self) -> usize {
        let (l, n) = self.layouts();
        l[..n].iter().map(|p| p.elements).max().unwrap_or(1)
    }

    /// Whether the `q8` precision has integer arithmetic for this format; float formats compute with
    /// f32 activations in both precisions.
    pub fn is_quantized(self) -> bool {
        !matches!(self, Format::F32 | Format::F16 | Format::Bf16)
    }

    /// Order in which activations are packed for this format's integer kernels.
    pub const fn act_order(self) -> ActOrder {
        match self {
            Format::Mxfp4Split | Format::MlxAffine { bits: 4, .. } => ActOrder::NibblePairs,
            _ => ActOrder::Sequential,
        }
    }

    /// Bytes of a whole `rows` x `cols` matrix over all planes; `None` when `cols` does not fit or on overflow.
    pub fn matrix_bytes(self, rows: usize, cols: usize) -> Option<u64> {
        let mut total = 0u64;
        let (l, n) = self.layouts();
        for p in &l[..n] {
            let b = (p.row_bytes(cols)? as u64).checked_mul(rows as u64)?;
            total = total.checked_add(b)?;
        }
        Some(total)
    }
}
