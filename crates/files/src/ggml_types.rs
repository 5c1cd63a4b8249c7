//! The tensor types of ggml: id, name and block layout.
//!
//! Ids are those of `enum ggml_type` in ggml's `ggml.h`; block sizes follow from the block structs in
//! `ggml-common.h`. Ids that ggml withdrew (4, 5, 31 to 33, 36 to 38) and ids of forks are unknown.

use forebay_quant::Format;

use crate::catalog::Dtype;

/// A ggml type: `elements` consecutive weights of a row take `bytes` bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GgmlType {
    /// Number in the file.
    pub id: u32,
    /// Name as ggml writes it.
    pub name: &'static str,
    /// Weights of a block.
    pub elements: u16,
    /// Bytes of a block.
    pub bytes: u16,
    /// The weight format that computes with it, if any.
    pub format: Option<Format>,
}

impl GgmlType {
    /// The type as the catalog gives it.
    pub fn dtype(self) -> Dtype {
        match self.format {
            Some(Format::F32) => Dtype::F32,
            Some(Format::F16) => Dtype::F16,
            Some(Format::Bf16) => Dtype::Bf16,
            Some(format) => Dtype::Ggml(format),
            None => {
                Dtype::GgmlOther { name: self.name, elements: self.elements, bytes: self.bytes }
            }
        }
    }
}

/// Looks a type up by its number.
pub fn by_id(id: u32) -> Option<GgmlType> {
    GGML_TYPES.iter().copied().find(|t| t.id == id)
}

const fn t(
    id: u32,
    name: &'static str,
    elements: u16,
    bytes: u16,
    format: Option<Format>,
) -> GgmlType {
    GgmlType { id, name, elements, bytes, format }
}

/// Every type with a known layout.
pub const GGML_TYPES: &[GgmlType] = &[
    t(0, "F32", 1, 4, Some(Format::F32)),
    t(1, "F16", 1, 2, Some(Format::F16)),
    t(2, "Q4_0", 32, 18, Some(Format::Q4_0)),
    t(3, "Q4_1", 32, 20, Some(Format::Q4_1)),
    t(6, "Q5_0", 32, 22, Some(Format::Q5_0)),
    t(7, "Q5_1", 32, 24, Some(Format::Q5_1)),
    t(8, "Q8_0", 32, 34, Some(Format::Q8_0)),
    t(9, "Q8_1", 32, 36, None),
    t(10, "Q2_K", 256, 84, Some(Format::Q2K)),
    t(11, "Q3_K", 256, 110, Some(Format::Q3K)),
    t(12, "Q4_K", 256, 144, Some(Format::Q4K)),
    t(13, "Q5_K", 256, 176, Some(Format::Q5K)),
    t(14, "Q6_K", 256, 210, Some(Format::Q6K)),
    t(15, "Q8_K", 256, 292, None),
    t(16, "IQ2_XXS", 256, 66, Some(Format::Iq2Xxs)),
    t(17, "IQ2_XS", 256, 74, Some(Format::Iq2Xs)),
    t(18, "IQ3_XXS", 256, 98, Some(Format::Iq3Xxs)),
    t(19, "IQ1_S", 256, 50, Some(Format::Iq1S)),
    t(20, "IQ4_NL", 32, 18, Some(Format::Iq4Nl)),
    t(21, "IQ3_S", 256, 110, Some(Format::Iq3S)),
    t(22, "IQ2_S", 256, 82, Some(Format::Iq2S)),
    t(23, "IQ4_XS", 256, 136, Some(Format::Iq4Xs)),
    t(24, "I8", 1, 1, None),
    t(25, "I16", 1, 2, None),
    t(26, "I32", 1, 4, None),
    t(27, "I64", 1, 8, None),
    t(28, "F64", 1, 8, None),
    t(29, "IQ1_M", 256, 56, Some(Format::Iq1M)),
    t(30, "BF16", 1, 2, Some(Format::Bf16)),
    t(34, "TQ1_0", 256, 54, None),
    t(35, "TQ2_0", 256, 66, None),
    t(39, "MXFP4", 32, 17, Some(Format::Mxfp4)),
    t(40, "NVFP4", 64, 36, None),
];

#[cfg(test)]
mod tests {
    use super::*;

    /// A row of the table that names a format has that format's layout.
    #[test]
    fn layouts_agree_with_the_formats() {
        for t in GGML_TYPES {
            let Some(format) = t.format else { continue };
            let planes = format.planes();
            assert_eq!(planes.len(), 1, "{}", t.name);
            assert_eq!(
                (planes[0].elements, planes[0].bytes),
                (t.elements as usize, t.bytes as usize),
                "{}",
                t.name
            );
            assert_eq!(format.name(), t.name);
        }
    }

    #[test]
    fn ids_ascend() {
        assert!(GGML_TYPES.windows(2).all(|w| w[0].id < w[1].id));
    }
}
