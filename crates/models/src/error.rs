//! What can be wrong with a checkpoint once its container is sound.

/// Errors of reading a model out of a catalog.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// The architecture is not one of ours.
    #[error("architecture {name:?} is not supported; supported are: {known}")]
    UnknownArchitecture {
        /// As the checkpoint names it.
        name: String,
        /// Comma-separated names that are.
        known: String,
    },
    /// Well formed, but there is no code for it.
    #[error("{what} is not supported: {detail}")]
    Unsupported {
        /// The thing: a key, a tensor.
        what: String,
        /// What was found and what would work.
        detail: String,
    },
    /// A checkpoint that only proposes tokens for another one.
    #[error(
        "this is a drafter ({kind}): it proposes tokens to the model that it was trained for and cannot answer by itself; give that model as MODEL, and a DFlash drafter as --draft-model with --speculate dflash"
    )]
    Drafter {
        /// What the checkpoint calls itself.
        kind: String,
    },
    /// A key is missing.
    #[error(
        "the model's description lacks {key}; the checkpoint is incomplete or of an unknown dialect"
    )]
    MissingKey {
        /// All names under which it was looked for.
        key: String,
    },
    /// A key has a value that cannot be.
    #[error("{key} is {found}, expected {expected}")]
    BadValue {
        /// The key.
        key: String,
        /// The value.
        found: String,
        /// What would do.
        expected: String,
    },
    /// A tensor is missing.
    #[error("tensor {name} is missing{}", remedy(.hint))]
    MissingTensor {
        /// Its name.
        name: String,
        /// Empty, or ` (…)`.
        hint: String,
    },
    /// A tensor has another shape than the description says.
    #[error("tensor {name} has shape {found:?}, the description asks for {expected:?}")]
    ShapeMismatch {
        /// Its name.
        name: String,
        /// Found, outermost first.
        found: Vec<u64>,
        /// Expected.
        expected: Vec<u64>,
    },
    /// A tensor's type cannot be computed with.
    #[error(
        "tensor {name} is stored as {dtype}, which Forebay does not compute with; take a file quantised as one of: {known}"
    )]
    UnsupportedType {
        /// Its name.
        name: String,
        /// Its type.
        dtype: String,
        /// Comma-separated names of formats that work.
        known: String,
    },
    /// A small table that the description depends on could not be read.
    #[error("tensor {name} could not be read: {why}")]
    Unreadable {
        /// Its name.
        name: String,
        /// What the system said.
        why: String,
    },
    /// Tensors that nothing reads.
    #[error(
        "{count} tensors of the checkpoint are not understood, the first is {first}; computing without them would give wrong answers"
    )]
    UnreadTensors {
        /// How many.
        count: usize,
        /// The first by name.
        first: String,
    },
}

impl ModelError {
    /// Class name, stable for programs.
    pub fn class(&self) -> &'static str {
        match self {
            ModelError::UnknownArchitecture { .. }
            | ModelError::Unsupported { .. }
            | ModelError::Drafter { .. }
            | ModelError::UnsupportedType { .. }
            | ModelError::UnreadTensors { .. } => "Unsupported",
            ModelError::Unreadable { .. } => "Io",
            ModelError::MissingKey { .. } => "MissingKey",
            ModelError::BadValue { .. } => "BadValue",
            ModelError::MissingTensor { .. } => "MissingTensor",
            ModelError::ShapeMismatch { .. } => "SizeMismatch",
        }
    }
}

/// What to do about a missing tensor where nothing better is known.
fn remedy(hint: &str) -> &str {
    match hint {
        "" => ": the checkpoint is incomplete; download or convert it again",
        hint => hint,
    }
}
