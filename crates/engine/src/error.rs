//! What can go wrong between opening a model and its last token.

use forebay_cuda::CudaError;
use forebay_program::BackendError;
use forebay_program::ledger::human;

use crate::steer::SteerError;

/// Errors of the engine.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EngineError {
    /// The container is damaged or unknown.
    #[error(transparent)]
    Files(#[from] forebay_files::FilesError),
    /// The model is incomplete or unknown.
    #[error(transparent)]
    Model(#[from] forebay_models::ModelError),
    /// Weights could not be read.
    #[error(transparent)]
    Store(#[from] forebay_store::StoreError),
    /// The numbers went bad.
    #[error(transparent)]
    Backend(#[from] forebay_program::BackendError),
    /// The GPU cannot be used, or cannot hold the model.
    #[error(transparent)]
    Cuda(#[from] forebay_cuda::LoadError),
    /// The budget cannot hold the model.
    #[error(
        "a budget of {} is too small for this model: the smallest that works is {} MiB with {advice}",
        human(*.budget),
        // Not `human`, which rounds: what is named here must work when it is given.
        .minimum.div_ceil(1 << 20)
    )]
    BudgetTooSmall {
        /// Bytes given.
        budget: u64,
        /// Smallest workable total, rounded up to a MiB.
        minimum: u64,
        /// What it was computed with and what could be traded.
        advice: String,
    },
    /// Two choices that do not go together.
    #[error("{what} is not possible: {instead}")]
    Refused {
        /// The combination.
        what: String,
        /// Why, and what to choose instead.
        instead: String,
    },
    /// A steering vector cannot be used.
    #[error(transparent)]
    Steer(Box<SteerError>),
    /// What is captured could not be written.
    #[error("writing what is captured: {}: {error}", path.display())]
    Capture {
        /// The file.
        path: std::path::PathBuf,
        /// What the system said.
        error: std::io::Error,
    },
    /// More tokens than the context holds.
    #[error(
        "the prompt has {prompt} tokens and the context holds {context}: shorten it, or raise --context"
    )]
    ContextExceeded {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens that fit.
        context: usize,
    },
    /// A token id that the model does not have.
    #[error("token id {id} is outside of the vocabulary of {vocab}")]
    BadToken {
        /// The id.
        id: u32,
        /// Rows of the embedding.
        vocab: usize,
    },
    /// NaN where a number must be.
    #[error(
        "NaN in the logits at position {position}: the weights are damaged, or steering is too strong"
    )]
    LogitNan {
        /// Position in the sequence.
        position: usize,
    },
    /// Stopped on request.
    #[error("interrupted")]
    Cancelled,
}

impl From<SteerError> for EngineError {
    fn from(e: SteerError) -> EngineError {
        EngineError::Steer(Box::new(e))
    }
}

impl From<CudaError> for EngineError {
    fn from(e: CudaError) -> EngineError {
        EngineError::Cuda(e.into())
    }
}

impl EngineError {
    /// Class name, stable for programs.
    pub fn class(&self) -> &'static str {
        match self {
            EngineError::Files(e) => e.class(),
            EngineError::Model(e) => e.class(),
            EngineError::Store(e) => e.class(),
            EngineError::Cuda(forebay_cuda::LoadError::Store(e)) => e.class(),
            EngineError::Cuda(forebay_cuda::LoadError::Cuda(e)) => match e {
                CudaError::Memory { .. } => "OutOfMemoryBudget",
                CudaError::Call { .. } | CudaError::Compile(_) => "DeviceFault",
                _ => "Unsupported",
            },
            EngineError::Cuda(_) => "DeviceFault",
            EngineError::Backend(BackendError::Device { .. }) => "DeviceFault",
            EngineError::Backend(_) | EngineError::LogitNan { .. } => "NumericFault",
            EngineError::BudgetTooSmall { .. } => "BudgetTooSmall",
            EngineError::Refused { .. } => "Unsupported",
            EngineError::ContextExceeded { .. } | EngineError::BadToken { .. } => "BadValue",
            EngineError::Steer(e) => match e.as_ref() {
                SteerError::Files(e) => e.class(),
                SteerError::Io { .. } => "Io",
                _ => "BadValue",
            },
            EngineError::Capture { .. } => "Io",
            EngineError::Cancelled => "Cancelled",
        }
    }

    /// Exit code of a command that ends with this error.
    pub fn exit_code(&self) -> i32 {
        match self.class() {
            "BudgetTooSmall" | "OutOfMemoryBudget" | "Unsupported" => 3,
            "Cancelled" => 130,
            _ => match self {
                EngineError::ContextExceeded { .. } | EngineError::BadToken { .. } => 2,
                _ => 1,
            },
        }
    }
}
