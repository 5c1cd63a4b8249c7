//! What can go wrong below the expert store, and for whom the bytes were.

use std::fmt;
use std::io;
use std::path::PathBuf;

use forebay_quant::MatrixError;

/// For whom a range of a file was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reader {
    /// A caller of [`crate::FileSet`] that gave only the range.
    Range,
    /// The trunk image.
    Trunk,
    /// One expert.
    Expert {
        /// Layer of the model.
        layer: usize,
        /// Expert of the layer.
        expert: u16,
    },
}

impl fmt::Display for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reader::Range => f.write_str("weights"),
            Reader::Trunk => f.write_str("trunk"),
            Reader::Expert { layer, expert } => write!(f, "layer {layer} expert {expert}"),
        }
    }
}

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StoreError {
    /// A file could not be opened or asked for its size.
    #[error("{}: cannot be opened: {source}", path.display())]
    Open {
        /// File.
        path: PathBuf,
        /// System's reason.
        source: io::Error,
    },
    /// Direct reads were demanded and the file system has none.
    #[error("{}: the file system does not support direct reads; use buffered or automatic I/O", path.display())]
    DirectUnsupported {
        /// File.
        path: PathBuf,
    },
    /// The ring was demanded and cannot be had.
    #[error(
        "io_uring is not available here ({source}); read with threads, or leave the choice automatic"
    )]
    NoRing {
        /// System's reason.
        source: io::Error,
    },
    /// The system starts no thread.
    #[error("no thread that reads could be started: {source}")]
    NoThread {
        /// System's reason.
        source: io::Error,
    },
    /// What was given as a second copy of the model is something else.
    #[error("{}: not a copy of the model: {what}", path.display())]
    CopyDiffers {
        /// File of the copy.
        path: PathBuf,
        /// What differs.
        what: String,
    },
    /// A read failed, retries included.
    #[error("{}: {reader}: reading {len} bytes at offset {offset} failed: {source}", path.display())]
    Io {
        /// File.
        path: PathBuf,
        /// For whom.
        reader: Reader,
        /// First byte.
        offset: u64,
        /// Bytes wanted.
        len: u64,
        /// System's reason.
        source: io::Error,
    },
    /// The file ends before the last byte wanted.
    #[error("{}: {reader}: wanted {wanted} bytes at offset {offset}, got {got}: the file is truncated", path.display())]
    Truncated {
        /// File.
        path: PathBuf,
        /// For whom.
        reader: Reader,
        /// First byte.
        offset: u64,
        /// Bytes wanted.
        wanted: u64,
        /// Bytes there were.
        got: u64,
    },
    /// The file is not the one that the catalog was read from.
    #[error(
        "{}: {reader}: the file changed: {expected_len} bytes and time {expected_mtime_ns} ns when its header was read, \
         now {found_len} bytes and {found_mtime_ns} ns", path.display()
    )]
    FileChanged {
        /// File.
        path: PathBuf,
        /// For whom it is read.
        reader: Reader,
        /// Length in the catalog.
        expected_len: u64,
        /// Length now.
        found_len: u64,
        /// Modification time in the catalog.
        expected_mtime_ns: i128,
        /// Modification time now.
        found_mtime_ns: i128,
    },
    /// A weight's bytes would lie outside its file.
    #[error("{tensor}: bytes {offset}..{end} lie outside file {file} of {file_len} bytes")]
    OutOfBounds {
        /// Tensor.
        tensor: String,
        /// Index of the file.
        file: u32,
        /// First byte.
        offset: u64,
        /// End of the range.
        end: u64,
        /// Length of the file, 0 if there is no such file.
        file_len: u64,
    },
    /// A weight's bytes do not make the matrix they should.
    #[error("{tensor}: {source}")]
    Matrix {
        /// Tensor.
        tensor: String,
        /// What is wrong.
        source: MatrixError,
    },
    /// An MXFP4 scale is the code for NaN.
    #[error(
        "{tensor}: layer {layer} expert {expert}: MXFP4 scale of row {row} block {block} is NaN (255)"
    )]
    NanScale {
        /// Tensor.
        tensor: String,
        /// Layer of the model.
        layer: usize,
        /// Expert of the layer.
        expert: u16,
        /// Row of the matrix.
        row: usize,
        /// Block of the row.
        block: usize,
    },
    /// A store needs at least one slot.
    #[error("the expert store was given no slot; it needs at least one of {slot_bytes} bytes")]
    NoSlots {
        /// Bytes of a slot.
        slot_bytes: u64,
    },
    /// The next expert was asked for while the caller holds leases on every slot it may use.
    #[error(
        "layer {layer}: {waiting} experts wait for a slot while {leased} are leased; release some first"
    )]
    AllLeased {
        /// Layer of the model.
        layer: usize,
        /// Experts without a slot.
        waiting: usize,
        /// Leases out.
        leased: usize,
    },
    /// No cache policy has this name.
    #[error(
        "no cache policy is called {name:?}; there are lru, lfu, adaptive, lru-shared and lfu-shared"
    )]
    UnknownPolicy {
        /// As given.
        name: String,
    },
    /// A routing trace does not belong to the model.
    #[error("pass {pass} of the trace: {what}")]
    BadTrace {
        /// Number of the pass, from 0.
        pass: u64,
        /// What is wrong.
        what: String,
    },
    /// The system refused memory.
    #[error("{bytes} bytes of memory were refused: {source}")]
    Memory {
        /// Bytes asked for.
        bytes: u64,
        /// System's reason.
        source: io::Error,
    },
}

impl StoreError {
    /// The error class, as all of Forebay's crates name them.
    pub fn class(&self) -> &'static str {
        match self {
            StoreError::Open { .. } | StoreError::Io { .. } | StoreError::NoThread { .. } => {
                "IoError"
            }
            StoreError::DirectUnsupported { .. } | StoreError::NoRing { .. } => "Unsupported",
            StoreError::CopyDiffers { .. } => "SizeMismatch",
            StoreError::Truncated { .. } => "Truncated",
            StoreError::FileChanged { .. } => "FileChanged",
            StoreError::OutOfBounds { .. } => "OutOfBounds",
            StoreError::Matrix { .. } => "SizeMismatch",
            StoreError::NanScale { .. } => "NumericFault",
            StoreError::UnknownPolicy { .. } | StoreError::BadTrace { .. } => "BadValue",
            StoreError::NoSlots { .. } => "BudgetTooSmall",
            StoreError::AllLeased { .. } | StoreError::Memory { .. } => "OutOfMemoryBudget",
        }
    }

    /// The same error, told for whom the read was.
    pub(crate) fn read_for(mut self, who: Reader) -> StoreError {
        if let StoreError::Io { reader, .. }
        | StoreError::Truncated { reader, .. }
        | StoreError::FileChanged { reader, .. } = &mut self
        {
            *reader = who;
        }
        self
    }
}
