//! Why a GPU cannot be used, or stopped working.

use forebay_program::ledger::human;

/// Errors of the CUDA backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver library, or none that starts.
    #[error("no NVIDIA driver was found ({0}): compute with --backend cpu")]
    NoDriver(String),
    /// The driver is older than the functions used.
    #[error("the NVIDIA driver speaks CUDA {}.{}, at least {}.{} is needed: update the driver",
        .found / 1000, .found % 1000 / 10, .needed / 1000, .needed % 1000 / 10)]
    OldDriver {
        /// Version found, `12040` for 12.4.
        found: u32,
        /// Version needed.
        needed: u32,
    },
    /// The driver sees no GPU.
    #[error("the NVIDIA driver sees no GPU")]
    NoDevice,
    /// The GPU is too old.
    #[error("{name} has compute capability {}.{}, at least 8.0 is needed", .capability / 10, .capability % 10)]
    OldDevice {
        /// As the driver names it.
        name: String,
        /// 75 for 7.5.
        capability: u32,
    },
    /// No compiled kernels for this GPU, and no compiler to make them.
    #[error("this build has no kernels for compute capability {}.{} and NVRTC was not found ({reason}): \
        install CUDA's NVRTC library (pip install nvidia-cuda-nvrtc-cu12, its folder in LD_LIBRARY_PATH)",
        .capability / 10, .capability % 10)]
    NoKernels {
        /// 90 for 9.0.
        capability: u32,
        /// What was tried.
        reason: String,
    },
    /// NVRTC refused the kernels.
    #[error("NVRTC could not compile the kernels: {0}")]
    Compile(String),
    /// The model does not fit.
    #[error("the model needs {} of GPU memory and {name} has {} free: a smaller --context or --chunk lowers it",
        human(*.needed), human(*.free))]
    Memory {
        /// As the driver names it.
        name: String,
        /// Bytes needed.
        needed: u64,
        /// Bytes free.
        free: u64,
    },
    /// A weight format without kernels.
    #[error("{tensor} is {format}, for which the CUDA backend has no kernels")]
    Format {
        /// Tensor name.
        tensor: String,
        /// Format name.
        format: String,
    },
    /// Something else the backend does not have.
    #[error("the CUDA backend has no kernel for {0}")]
    Unsupported(String),
    /// The driver refused a call.
    #[error("{what} failed on the GPU: {message}")]
    Call {
        /// What was done.
        what: &'static str,
        /// As the driver says it.
        message: String,
    },
}
