//! What can be wrong with the files of a model.
//!
//! A failed check gives one [`FilesError`]: the file, the tensor or key at fault, what was expected and
//! what was found, and the remedy where there is one, on one line. Names that come out of a file are
//! quoted, escaped and shortened, so that a hostile file cannot forge lines of a log.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

/// Why a model cannot be opened.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FilesError {
    /// Fewer bytes than the file itself promises.
    #[error("{f}: {what} needs {expected} bytes, {found} are there; the file is cut short, download it again", f = shown(file))]
    Truncated {
        /// The file.
        file: PathBuf,
        /// What was being read: `header`, `key "x"`, `tensor "w"`.
        what: String,
        /// Bytes needed.
        expected: u64,
        /// Bytes left in the file.
        found: u64,
    },
    /// The first bytes are not those of the format.
    #[error("{f}: expected {expected}, found {found}{hint}", f = shown(file))]
    BadMagic {
        /// The file.
        file: PathBuf,
        /// The format expected.
        expected: &'static str,
        /// The first bytes, readable.
        found: String,
        /// What it probably is.
        hint: Hint,
    },
    /// A version of GGUF that is not known.
    #[error("{f}: GGUF version {found} is not supported, versions 2 and 3 are", f = shown(file))]
    BadVersion {
        /// The file.
        file: PathBuf,
        /// Version in the file.
        found: u32,
    },
    /// A big-endian GGUF.
    #[error("{f}: this GGUF is big-endian; convert it to little-endian first (gguf_convert_endian.py of llama.cpp)", f = shown(file))]
    WrongEndian {
        /// The file.
        file: PathBuf,
    },
    /// Neither GGUF nor safetensors.
    #[error("{f}: neither GGUF nor safetensors: {found}{hint}", f = shown(file))]
    UnknownFormat {
        /// The file or folder.
        file: PathBuf,
        /// What is there instead.
        found: String,
        /// What it probably is.
        hint: Hint,
    },
    /// A folder with more than one model.
    #[error("{f}: the folder holds several models, name one of them: {}", list(found), f = shown(dir))]
    Ambiguous {
        /// The folder.
        dir: PathBuf,
        /// First file of each model.
        found: Vec<String>,
    },
    /// A count, length or depth beyond any sane file.
    #[error("{f}: {what} is {found}, the limit is {limit}", f = shown(file))]
    LimitExceeded {
        /// The file.
        file: PathBuf,
        /// Which number, and of what.
        what: String,
        /// Largest value accepted.
        limit: u64,
        /// Value in the file.
        found: u64,
    },
    /// A product or sum does not fit 64 bits.
    #[error("{f}: tensor {t}: the size of shape {shape:?} does not fit 64 bits", f = shown(file), t = quoted(tensor))]
    Overflow {
        /// The file.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Its shape, outermost first.
        shape: Vec<u64>,
    },
    /// A shape that the format does not allow.
    #[error("{f}: tensor {t}: expected {expected}, found {found}", f = shown(file), t = quoted(tensor))]
    BadDimension {
        /// The file.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The rule.
        expected: String,
        /// What breaks it.
        found: String,
    },
    /// The alignment key is not a power of two.
    #[error("{f}: key {k}: expected a power of two, found {found}", f = shown(file), k = quoted(key))]
    BadAlignment {
        /// The file.
        file: PathBuf,
        /// Name of the key.
        key: String,
        /// Value in the file.
        found: u64,
    },
    /// A tensor does not start at a multiple of the alignment.
    #[error("{f}: tensor {t} starts at {offset} of the data, expected a multiple of {alignment}", f = shown(file), t = quoted(tensor))]
    Misaligned {
        /// The file.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Offset in the data section.
        offset: u64,
        /// Alignment of the file.
        alignment: u64,
    },
    /// The same key twice.
    #[error("{f}: key {k} appears twice", f = shown(file), k = quoted(key))]
    DuplicateKey {
        /// The file.
        file: PathBuf,
        /// Name of the key.
        key: String,
    },
    /// The same tensor twice.
    #[error("{f}: tensor {t} appears twice{o}", f = shown(file), t = quoted(tensor),
            o = other.as_deref().map(|p| format!(", also in {}", shown(p))).unwrap_or_default())]
    DuplicateName {
        /// The file that repeats it.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The file that had it first, if another.
        other: Option<PathBuf>,
    },
    /// A tensor type without a known layout.
    #[error("{f}: tensor {t} has unknown type {found}; a newer Forebay may know it", f = shown(file), t = quoted(tensor))]
    UnknownType {
        /// The file.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// The type's id or name.
        found: String,
    },
    /// A tensor's bytes leave the data.
    #[error("{f}: tensor {t} lies at {start}..{end} of the data, which has {available} bytes", f = shown(file), t = quoted(tensor))]
    OutOfBounds {
        /// The file.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// First byte, in the data section.
        start: u64,
        /// One past the last.
        end: u64,
        /// Bytes of the data section.
        available: u64,
    },
    /// Two tensors share bytes.
    #[error("{f}: tensors {a} and {b} overlap: {b} starts at {start} of the data, before {a} ends at {end}",
            f = shown(file), a = quoted(first), b = quoted(second))]
    Overlap {
        /// The file.
        file: PathBuf,
        /// The tensor that starts first.
        first: String,
        /// The tensor that starts inside it.
        second: String,
        /// Where the second starts.
        start: u64,
        /// Where the first ends.
        end: u64,
    },
    /// Bytes of a safetensors file that belong to no tensor.
    #[error("{f}: bytes {start}..{end} of the data belong to no tensor (before: {b}; after: {a})",
            f = shown(file), b = neighbour(before), a = neighbour(after))]
    Hole {
        /// The file.
        file: PathBuf,
        /// Tensor before the hole.
        before: Option<String>,
        /// Tensor after it.
        after: Option<String>,
        /// First byte of no tensor.
        start: u64,
        /// One past the last.
        end: u64,
    },
    /// A byte range disagrees with shape and type.
    #[error("{f}: tensor {t}: shape and type make {expected} bytes, its range has {found}", f = shown(file), t = quoted(tensor))]
    SizeMismatch {
        /// The file.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
        /// Bytes by shape and type.
        expected: u64,
        /// Bytes of the range.
        found: u64,
    },
    /// Text that is not UTF-8.
    #[error("{f}: {what} is not UTF-8 text: found {found}", f = shown(file))]
    BadUtf8 {
        /// The file.
        file: PathBuf,
        /// What was being read.
        what: String,
        /// The text, invalid parts replaced.
        found: String,
    },
    /// Text that is not JSON.
    #[error("{f}: {what}: not valid JSON: {detail}{hint}", f = shown(file))]
    BadJson {
        /// The file.
        file: PathBuf,
        /// What was being read.
        what: String,
        /// The parser's complaint, with line and column.
        detail: String,
        /// What it probably is.
        hint: Hint,
    },
    /// A value that cannot be what it claims.
    #[error("{f}: {what}: expected {expected}, found {found}", f = shown(file))]
    BadValue {
        /// The file.
        file: PathBuf,
        /// The key, field or tensor.
        what: String,
        /// The rule.
        expected: String,
        /// What breaks it.
        found: String,
    },
    /// A key or description that must be there is not.
    #[error("{f}: {k} is missing", f = shown(file), k = quoted(key))]
    MissingKey {
        /// The file or folder.
        file: PathBuf,
        /// The key.
        key: String,
    },
    /// A tensor that must be there is not.
    #[error("{f}: tensor {t} is missing", f = shown(file), t = quoted(tensor))]
    MissingTensor {
        /// The file or folder.
        file: PathBuf,
        /// Name of the tensor.
        tensor: String,
    },
    /// Files of a set are missing.
    #[error("{d}: {n} of {count} shards are missing, download them: {}", list(missing),
            d = shown(dir), n = missing.len())]
    MissingShard {
        /// Folder of the set.
        dir: PathBuf,
        /// Files of the whole set.
        count: usize,
        /// Every missing file.
        missing: Vec<String>,
    },
    /// Files of a set do not fit together.
    #[error("{f}: {fault}", f = shown(file))]
    ShardMismatch {
        /// The file at fault.
        file: PathBuf,
        /// How.
        fault: ShardFault,
    },
    /// A shard's name leads out of its folder.
    #[error("{f}: shard name {n} leads out of the folder; only plain relative names are read", f = shown(file), n = quoted(name))]
    UnsafePath {
        /// The index that names it.
        file: PathBuf,
        /// The name.
        name: String,
    },
    /// The system failed.
    #[error("{f}: cannot {action}: {source}", f = shown(file))]
    Io {
        /// The file.
        file: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A file is not the one that was opened.
    #[error("{f}: {change} since the model was opened; open it again", f = shown(file))]
    FileChanged {
        /// The file.
        file: PathBuf,
        /// What differs.
        change: ChangeKind,
    },
}

impl FilesError {
    /// The class of the failed check, a stable name for tests and clients.
    pub fn class(&self) -> &'static str {
        match self {
            FilesError::Truncated { .. } => "Truncated",
            FilesError::BadMagic { .. } => "BadMagic",
            FilesError::BadVersion { .. } => "BadVersion",
            FilesError::WrongEndian { .. } => "WrongEndian",
            FilesError::UnknownFormat { .. } | FilesError::Ambiguous { .. } => "UnknownFormat",
            FilesError::LimitExceeded { .. } => "LimitExceeded",
            FilesError::Overflow { .. } => "Overflow",
            FilesError::BadDimension { .. } => "BadDimension",
            FilesError::BadAlignment { .. } => "BadAlignment",
            FilesError::Misaligned { .. } => "Misaligned",
            FilesError::DuplicateKey { .. } => "DuplicateKey",
            FilesError::DuplicateName { .. } => "DuplicateName",
            FilesError::UnknownType { .. } => "UnknownType",
            FilesError::OutOfBounds { .. } => "OutOfBounds",
            FilesError::Overlap { .. } => "Overlap",
            FilesError::Hole { .. } => "Hole",
            FilesError::SizeMismatch { .. } => "SizeMismatch",
            FilesError::BadUtf8 { .. } => "BadUtf8",
            FilesError::BadJson { .. } => "BadJson",
            FilesError::BadValue { .. } => "BadValue",
            FilesError::MissingKey { .. } => "MissingKey",
            FilesError::MissingTensor { .. } => "MissingTensor",
            FilesError::MissingShard { .. } => "MissingShard",
            FilesError::ShardMismatch { .. } => "ShardMismatch",
            FilesError::UnsafePath { .. } => "UnsafePath",
            FilesError::Io { .. } => "IoError",
            FilesError::FileChanged { .. } => "FileChanged",
        }
    }
}

/// How the files of a set disagree.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShardFault {
    /// A later shard was opened.
    NotFirst {
        /// Number of the shard, from 1.
        number: u64,
        /// Shards of the set.
        count: u64,
        /// What to open instead.
        first: String,
    },
    /// One shard of an indexed set was opened.
    OpenFolder {
        /// Name of the index.
        index: String,
    },
    /// A set's first file does not follow the naming rule, so that the others cannot be found.
    Unnamed {
        /// Shards of the set.
        count: u64,
    },
    /// A split key has the wrong value.
    Key {
        /// Name of the key.
        key: &'static str,
        /// Value by the first shard or the file's name.
        expected: u64,
        /// Value in the file; `None` when the key is not there.
        found: Option<u64>,
    },
    /// The set has another number of tensors than it promises.
    TensorCount {
        /// Promised.
        expected: u64,
        /// There.
        found: u64,
    },
    /// The index places a tensor in this shard, which does not have it.
    AbsentFromShard {
        /// Name of the tensor.
        tensor: String,
        /// Name of the index.
        index: String,
    },
    /// The shard has a tensor that the index does not place there.
    AbsentFromIndex {
        /// Name of the tensor.
        tensor: String,
        /// Name of the index.
        index: String,
        /// Where the index places it, if anywhere.
        placed: Option<String>,
    },
    /// Two shards have the same tensor.
    InTwoShards {
        /// Name of the tensor.
        tensor: String,
        /// The other shard.
        other: String,
    },
}

impl fmt::Display for ShardFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ShardFault::NotFirst { number, count, first } => {
                write!(f, "this is shard {number} of {count}; open the first, {first}")
            }
            ShardFault::OpenFolder { index } => {
                write!(f, "this is one shard of the set in {index}; open the folder")
            }
            ShardFault::Unnamed { count } => write!(
                f,
                "this is the first of {count} shards, but its name does not end in -00001-of-{count:05}.gguf, \
                 so the others cannot be found; give the files their published names"
            ),
            ShardFault::Key { key, expected, found: Some(found) } => {
                write!(f, "{key} is {found}, expected {expected}: the shards are of different sets")
            }
            ShardFault::Key { key, expected, found: None } => {
                write!(f, "{key} is missing, expected {expected}: the shards are of different sets")
            }
            ShardFault::TensorCount { expected, found } => {
                write!(f, "the set has {found} tensors, split.tensors.count promises {expected}")
            }
            ShardFault::AbsentFromShard { tensor, index } => write!(
                f,
                "{index} places tensor {} in this shard, which does not have it",
                quoted(tensor)
            ),
            ShardFault::AbsentFromIndex { tensor, index, placed: Some(placed) } => write!(
                f,
                "tensor {} is in this shard, {index} places it in {}",
                quoted(tensor),
                quoted(placed)
            ),
            ShardFault::AbsentFromIndex { tensor, index, placed: None } => {
                write!(f, "tensor {} is in this shard, but not in {index}", quoted(tensor))
            }
            ShardFault::InTwoShards { tensor, other } => {
                write!(
                    f,
                    "tensor {} is in this shard and also in {}",
                    quoted(tensor),
                    quoted(other)
                )
            }
        }
    }
}

/// What differs in a file that changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ChangeKind {
    /// It is no longer there.
    Gone,
    /// Another length.
    Length {
        /// When opened.
        expected: u64,
        /// Now.
        found: u64,
    },
    /// Another modification time.
    Modified {
        /// When opened, in nanoseconds since the epoch.
        expected: i128,
        /// Now.
        found: i128,
    },
}

impl fmt::Display for ChangeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ChangeKind::Gone => write!(f, "the file disappeared"),
            ChangeKind::Length { expected, found } => {
                write!(f, "the length changed from {expected} to {found}")
            }
            ChangeKind::Modified { expected, found } => {
                write!(f, "the modification time changed from {expected} to {found} ns")
            }
        }
    }
}

/// What a file that is no model probably is, with the remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Hint {
    /// Nothing is known.
    None,
    /// A Git LFS (or Xet) pointer.
    LfsPointer,
    /// A web page that was saved in place of the file.
    WebPage,
    /// PyTorch weights.
    Pickle,
    /// A file of the time before GGUF.
    OldGgml,
}

impl Hint {
    /// Judges by the first bytes of a file.
    pub fn of(head: &[u8]) -> Hint {
        let text = head.trim_ascii_start().to_ascii_lowercase();
        if head.starts_with(b"version https://") {
            Hint::LfsPointer
        } else if text.starts_with(b"<!doctype") || text.starts_with(b"<html") {
            Hint::WebPage
        } else if head.starts_with(b"PK\x03\x04") || head.starts_with(b"\x80\x02") {
            Hint::Pickle
        } else if [b"lmgg", b"tjgg", b"fmgg", b"algg"].iter().any(|m| head.starts_with(*m)) {
            Hint::OldGgml
        } else {
            Hint::None
        }
    }
}

impl fmt::Display for Hint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Hint::None => "; the file is of another kind or damaged: check the path, or fetch it again",
            Hint::LfsPointer => {
                "; this is a Git LFS pointer, not the file: fetch the real one (git lfs pull, or hf download)"
            }
            Hint::WebPage => {
                "; this is a web page saved in place of the file: download the file itself"
            }
            Hint::Pickle => "; this looks like PyTorch weights: convert them to safetensors",
            Hint::OldGgml => "; this looks like a GGML file older than GGUF: convert it again",
        })
    }
}

/// A name from a file: quoted, control characters escaped, shortened.
pub(crate) fn quoted(name: &str) -> String {
    const LONGEST: usize = 160;
    match name.char_indices().nth(LONGEST) {
        None => format!("{name:?}"),
        Some((end, _)) => format!("{:?}...", &name[..end]),
    }
}

/// The first bytes of something, readable on one line.
pub(crate) fn readable(bytes: &[u8]) -> String {
    let head = &bytes[..bytes.len().min(16)];
    format!("\"{}\"", head.escape_ascii())
}

fn shown(path: &Path) -> String {
    if path.as_os_str().is_empty() {
        return ".".to_owned();
    }
    let text = path.display().to_string();
    if text.contains(char::is_control) { text.escape_debug().to_string() } else { text }
}

/// All of any real set's names, on one line.
fn list(names: &[String]) -> String {
    const MOST: usize = 1000;
    let shown = names.iter().take(MOST).map(|n| n.escape_debug().to_string());
    let shown = shown.collect::<Vec<_>>().join(", ");
    match names.len().saturating_sub(MOST) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

fn neighbour(name: &Option<String>) -> String {
    name.as_deref().map_or_else(|| "none".to_owned(), quoted)
}
