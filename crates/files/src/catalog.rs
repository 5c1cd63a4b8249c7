//! The one view of a checkpoint that everything above works with.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde_json::Value;

/// Storage type of a tensor as its container names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Dtype {
    /// IEEE single.
    F32,
    /// IEEE half.
    F16,
    /// bfloat16.
    Bf16,
    /// Unsigned byte (safetensors).
    U8,
    /// Unsigned 32-bit word (safetensors; MLX packs codes in it).
    U32,
    /// Any other safetensors type, known by size but not used for weights (I8, I16, I32, I64, U16, U64, F64, BOOL, F8_*).
    Other {
        /// Bytes of an element.
        bytes: u8,
    },
    /// A GGUF (ggml) type that Forebay computes with, F32, F16 and BF16 excepted.
    Ggml(forebay_quant::Format),
    /// A ggml type whose layout is known (block elements, block bytes) but that Forebay does not compute with yet.
    GgmlOther {
        /// Name as ggml writes it.
        name: &'static str,
        /// Elements of a block.
        elements: u16,
        /// Bytes of a block.
        bytes: u16,
    },
}

/// One tensor and where its bytes lie. The range is checked against the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Outermost dimension first (GGUF's order reversed): `[experts, rows, cols]`.
    pub shape: Vec<u64>,
    /// Storage type.
    pub dtype: Dtype,
    /// Index into [`Catalog::files`].
    pub file: u32,
    /// Absolute offset of the first byte in that file.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// One file of the checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileEntry {
    /// Path as opened.
    pub path: PathBuf,
    /// Length in bytes when opened.
    pub len: u64,
    /// Modification time in nanoseconds since the epoch when opened (0 where unknown).
    pub mtime_ns: i128,
}

/// A GGUF metadata value.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)]
pub enum MetaValue {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    U64(u64),
    I64(i64),
    F32(f32),
    F64(f64),
    Bool(bool),
    String(String),
    Array(Vec<MetaValue>),
}

impl MetaValue {
    /// Any non-negative integer type (and bool) as u64.
    pub fn as_u64(&self) -> Option<u64> {
        Some(match *self {
            MetaValue::U8(v) => v as u64,
            MetaValue::U16(v) => v as u64,
            MetaValue::U32(v) => v as u64,
            MetaValue::U64(v) => v,
            MetaValue::I8(v) => u64::try_from(v).ok()?,
            MetaValue::I16(v) => u64::try_from(v).ok()?,
            MetaValue::I32(v) => u64::try_from(v).ok()?,
            MetaValue::I64(v) => u64::try_from(v).ok()?,
            MetaValue::Bool(v) => v as u64,
            _ => return None,
        })
    }
    /// Any number as f64.
    pub fn as_f64(&self) -> Option<f64> {
        match *self {
            MetaValue::F32(v) => Some(v as f64),
            MetaValue::F64(v) => Some(v),
            _ => self.as_u64().map(|v| v as f64),
        }
    }
    /// A bool, or 0/1.
    pub fn as_bool(&self) -> Option<bool> {
        match *self {
            MetaValue::Bool(v) => Some(v),
            _ => self.as_u64().map(|v| v != 0),
        }
    }
    /// A string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            MetaValue::String(s) => Some(s),
            _ => None,
        }
    }
    /// An array.
    pub fn as_array(&self) -> Option<&[MetaValue]> {
        match self {
            MetaValue::Array(a) => Some(a),
            _ => None,
        }
    }
}

/// What describes the tensors: GGUF keys, or the JSON files of a folder.
#[derive(Clone, Debug)]
pub enum Source {
    /// GGUF metadata, of the first shard.
    Gguf {
        /// All keys.
        metadata: BTreeMap<String, MetaValue>,
    },
    /// A folder with `config.json`.
    Folder {
        /// The folder.
        dir: PathBuf,
        /// `config.json`.
        config: Value,
        /// `generation_config.json`, if there.
        generation_config: Option<Value>,
    },
}

/// An opened checkpoint: every tensor by name, and the description.
#[derive(Clone, Debug)]
pub struct Catalog {
    /// Files, in shard order.
    pub files: Vec<FileEntry>,
    /// Tensors by name.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// Keys or config.
    pub source: Source,
    /// blake3 over the headers of all files: tells one checkpoint from another.
    pub header_hash: [u8; 32],
}
