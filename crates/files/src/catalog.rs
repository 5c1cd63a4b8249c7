//! The one view of a checkpoint that everything above works with.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{self, Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_quant::Format;
use serde_json::Value;

use crate::access::{Disk, FileAccess};
use crate::error::{ChangeKind, FilesError};

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
    /// A safetensors type narrower than a byte (F4, F6_*), known by size but not used for weights.
    SubByte {
        /// Bits of an element.
        bits: u8,
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

impl Dtype {
    /// The weight format that a tensor of this type has by itself; `None` for parts of a format (codes
    /// and scales in planes of their own) and for types that Forebay does not compute with.
    pub fn format(self) -> Option<Format> {
        match self {
            Dtype::F32 => Some(Format::F32),
            Dtype::F16 => Some(Format::F16),
            Dtype::Bf16 => Some(Format::Bf16),
            Dtype::Ggml(format) => Some(format),
            _ => None,
        }
    }

    /// Name for messages.
    pub fn name(self) -> String {
        match self {
            Dtype::F32 => "F32".into(),
            Dtype::F16 => "F16".into(),
            Dtype::Bf16 => "BF16".into(),
            Dtype::U8 => "U8".into(),
            Dtype::U32 => "U32".into(),
            Dtype::Other { bytes } => format!("{}-bit other", u32::from(bytes) * 8),
            Dtype::SubByte { bits } => format!("{bits}-bit other"),
            Dtype::Ggml(format) => format.name(),
            Dtype::GgmlOther { name, .. } => name.into(),
        }
    }
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

impl TensorInfo {
    /// Number of elements; the reader checked that it fits.
    pub fn elements(&self) -> u64 {
        self.shape.iter().product()
    }

    /// Absolute offset one past the last byte.
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }
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

impl FileEntry {
    /// The entry of a file as `metadata` describes it now.
    pub(crate) fn new(path: &Path, metadata: &fs::Metadata) -> FileEntry {
        FileEntry { path: path.to_owned(), len: metadata.len(), mtime_ns: mtime_ns(metadata) }
    }

    /// Fails if the file's length or modification time is no longer what it was.
    pub fn check_unchanged(&self) -> Result<(), FilesError> {
        let changed = |change| FilesError::FileChanged { file: self.path.clone(), change };
        let now = match fs::metadata(&self.path) {
            Ok(now) => FileEntry::new(&self.path, &now),
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Err(changed(ChangeKind::Gone)),
            Err(source) => {
                let file = self.path.clone();
                return Err(FilesError::Io { file, action: "examine", source });
            }
        };
        if now.len != self.len {
            return Err(changed(ChangeKind::Length { expected: self.len, found: now.len }));
        }
        if now.mtime_ns != self.mtime_ns {
            let (expected, found) = (self.mtime_ns, now.mtime_ns);
            return Err(changed(ChangeKind::Modified { expected, found }));
        }
        Ok(())
    }
}

fn mtime_ns(metadata: &fs::Metadata) -> i128 {
    let Ok(modified): Result<SystemTime, _> = metadata.modified() else { return 0 };
    match modified.duration_since(UNIX_EPOCH) {
        Ok(after) => after.as_nanos() as i128,
        Err(before) => -(before.duration().as_nanos() as i128),
    }
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
            MetaValue::I8(v) => Some(v as f64),
            MetaValue::I16(v) => Some(v as f64),
            MetaValue::I32(v) => Some(v as f64),
            MetaValue::I64(v) => Some(v as f64),
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
        /// `config.json`; `Null` when the folder has none.
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
    /// blake3 over the headers and lengths of all files and `config.json`: tells one checkpoint from another.
    pub header_hash: [u8; 32],
}

impl Catalog {
    /// Opens a model and checks the headers of all its files. `path` is
    /// - a GGUF file, or the first file of a split set (`-00001-of-00003.gguf`);
    /// - a folder with `model.safetensors`, with shards and their index, or with one other set of
    ///   safetensors files; or else with exactly one GGUF or split set (`mmproj` and `imatrix` files
    ///   apart);
    /// - one safetensors file; the `config.json` beside it belongs to it.
    ///
    /// What a file is is told by its content. No weight is read.
    pub fn open(path: &Path) -> Result<Catalog, FilesError> {
        Catalog::open_with(&Disk, path)
    }

    /// The same for files that are not on this machine's disk.
    pub fn open_with(access: &dyn FileAccess, path: &Path) -> Result<Catalog, FilesError> {
        crate::open::open(access, path)
    }

    /// A tensor by its name in the file.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.get(name)
    }

    /// A tensor by its name in the file, or the error that names it.
    pub fn require_tensor(&self, name: &str) -> Result<&TensorInfo, FilesError> {
        self.tensor(name).ok_or_else(|| FilesError::MissingTensor {
            file: self.path().to_owned(),
            tensor: name.to_owned(),
        })
    }

    /// A GGUF metadata value.
    pub fn meta(&self, key: &str) -> Option<&MetaValue> {
        match &self.source {
            Source::Gguf { metadata } => metadata.get(key),
            Source::Folder { .. } => None,
        }
    }

    /// Takes a GGUF metadata value out, so that a large one (the vocabulary) need not stay in memory.
    pub fn take_meta(&mut self, key: &str) -> Option<MetaValue> {
        match &mut self.source {
            Source::Gguf { metadata } => metadata.remove(key),
            Source::Folder { .. } => None,
        }
    }

    /// `config.json` of a folder that has one.
    pub fn config(&self) -> Option<&Value> {
        match &self.source {
            Source::Folder { config, .. } if !config.is_null() => Some(config),
            _ => None,
        }
    }

    /// `config.json`, or the error that names it.
    pub fn require_config(&self) -> Result<&Value, FilesError> {
        self.config().ok_or_else(|| FilesError::MissingKey {
            file: self.path().to_owned(),
            key: "config.json".into(),
        })
    }

    /// `generation_config.json` of a folder that has one.
    pub fn generation_config(&self) -> Option<&Value> {
        match &self.source {
            Source::Folder { generation_config, .. } => generation_config.as_ref(),
            Source::Gguf { .. } => None,
        }
    }

    /// Whether this is a GGUF.
    pub fn is_gguf(&self) -> bool {
        matches!(self.source, Source::Gguf { .. })
    }

    /// The GGUF (of a split set, its first file) or the folder.
    pub fn path(&self) -> &Path {
        match &self.source {
            Source::Folder { dir, .. } => dir,
            Source::Gguf { .. } => self.files.first().map_or(Path::new(""), |f| &f.path),
        }
    }

    /// [`Catalog::path`] for messages.
    pub fn display_path(&self) -> path::Display<'_> {
        self.path().display()
    }

    /// The path of the file a tensor lies in.
    pub fn file_of(&self, tensor: &TensorInfo) -> &Path {
        &self.files[tensor.file as usize].path
    }

    /// Bytes of all tensors.
    pub fn weight_bytes(&self) -> u64 {
        self.tensors.values().map(|t| t.len).sum()
    }

    /// Fails if a file's length or modification time is no longer what it was when opened.
    pub fn check_unchanged(&self) -> Result<(), FilesError> {
        self.files.iter().try_for_each(FileEntry::check_unchanged)
    }
}
