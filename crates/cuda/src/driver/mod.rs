//! A GPU as this crate uses it: memory, copies, launches, graphs, behind one small trait.
//!
//! [`real`] is the driver API, loaded at run time. `emulated` runs the same kernels, compiled by a C++ compiler, on the CPU: for
//! tests on machines without a GPU. Addresses are plain numbers ([`Ptr`]); whoever allocated them keeps track.

#[cfg(feature = "emulator")]
pub(crate) mod emulated;
pub(crate) mod real;

use crate::args::Ptr;
use crate::error::CudaError;

/// Numbers without padding that may be handed to a kernel byte by byte.
///
/// # Safety
/// Every byte of a value is initialised.
#[allow(unsafe_code)]
pub(crate) unsafe trait Plain: Copy + 'static {}

// SAFETY: plain numbers.
#[allow(unsafe_code)]
unsafe impl Plain for u32 {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Plain for u64 {}
// SAFETY: as above.
#[allow(unsafe_code)]
unsafe impl Plain for f32 {}

/// The bytes of plain values.
#[allow(unsafe_code)]
pub(crate) fn bytes_of<T: Plain>(values: &[T]) -> &[u8] {
    // SAFETY: `Plain` promises initialised bytes; the length is that of the slice.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

/// The bytes of floats, to be written.
#[allow(unsafe_code)]
pub(crate) fn bytes_of_mut(values: &mut [f32]) -> &mut [u8] {
    // SAFETY: any bytes are floats; the length is that of the slice.
    unsafe { std::slice::from_raw_parts_mut(values.as_mut_ptr().cast(), size_of_val(values)) }
}

macro_rules! kernels {
    ($($name:ident = $text:literal: $args:ident,)*) => {
        /// A kernel of `kernels/`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub(crate) enum Kernel { $($name),* }

        impl Kernel {
            /// All of them, in the order of their numbers.
            pub(crate) const ALL: &[Kernel] = &[$(Kernel::$name),*];

            /// Name in the compiled image.
            pub(crate) fn name(self) -> &'static str {
                match self { $(Kernel::$name => $text),* }
            }

            /// Bytes of its arguments.
            #[cfg_attr(not(feature = "emulator"), allow(dead_code))]
            pub(crate) fn args_bytes(self) -> usize {
                match self { $(Kernel::$name => size_of::<crate::args::$args>()),* }
            }
        }
    };
}

kernels! {
    Gemv1 = "gemv_1": GemvArgs,
    Gemv2 = "gemv_2": GemvArgs,
    Router = "router": RouterArgs,
    ExpertUp = "expert_up": ExpertUpArgs,
    ExpertDown = "expert_down": ExpertDownArgs,
    Gemm = "gemm": GemmArgs,
    Float1 = "float_1": FloatJob,
    FloatRow = "float_row": FloatJob,
    Float8 = "float_8": FloatJob,
    Embed = "embed": EmbedArgs,
    NormPack = "norm_pack": NormArgs,
    HeadNorm = "head_norm": HeadNormArgs,
    RopeAngles = "rope_angles": AnglesArgs,
    Rope = "rope": RopeArgs,
    Element = "element": ElementArgs,
    SplitHeads = "split_heads": SplitArgs,
    Gather = "gather": GatherArgs,
    Heads = "heads": HeadsArgs,
    AttendBlocks = "attend_blocks": AttendArgs,
    AttendRow = "attend_row": AttendRowArgs,
    AttendMerge = "attend_merge": AttendArgs,
    AttendTile64 = "attend_tile_64": AttendArgs,
    AttendTile128 = "attend_tile_128": AttendArgs,
    AttendTile256 = "attend_tile_256": AttendArgs,
    AttendTile512 = "attend_tile_512": AttendArgs,
    Route = "route": RouteArgs,
    SortPairs = "sort_pairs": SortArgs,
    Combine = "combine": CombineArgs,
    ConvSilu = "conv_silu": ConvArgs,
    DeltaRule = "delta_rule": DeltaArgs,
    LineMax = "line_max": LinesArgs,
    LineSums = "line_sums": LinesArgs,
}

impl Kernel {
    /// Whether a decode step is made of it. These all ask for the same split between shared memory and first-level
    /// cache: a multiprocessor does not overlap kernels that want another one.
    pub(crate) fn of_decode(self) -> bool {
        use Kernel::*;
        matches!(
            self,
            Embed
                | RopeAngles
                | NormPack
                | Gemv1
                | AttendRow
                | AttendMerge
                | Router
                | ExpertUp
                | ExpertDown
        )
    }
}

/// How many threads run a kernel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    pub kernel: Kernel,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: u32,
}

/// What is known of a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GpuInfo {
    /// As the driver names it.
    pub name: String,
    /// Compute capability, 90 for 9.0.
    pub capability: u32,
    /// Bytes of memory.
    pub total_bytes: u64,
    /// Bytes that are free now.
    pub free_bytes: u64,
    /// Most bytes of shared memory of a block.
    pub shared_bytes: u32,
    /// Multiprocessors.
    pub multiprocessors: u32,
    /// `12040` for CUDA 12.4.
    pub driver_version: u32,
}

/// A captured sequence of launches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct GraphId(pub usize);

/// One GPU and one stream of work on it.
pub(crate) trait Driver: Send + Sync {
    fn info(&self) -> &GpuInfo;
    fn alloc(&self, bytes: u64) -> Result<Ptr, CudaError>;
    fn free(&self, ptr: Ptr);
    /// Writes at once, in no order with the stream: for weights, from any thread.
    fn write(&self, to: Ptr, bytes: &[u8]) -> Result<(), CudaError>;
    /// Writes in the order of the stream; `bytes` may be used again when this returns.
    fn enqueue_write(&self, to: Ptr, bytes: &[u8]) -> Result<(), CudaError>;
    fn enqueue_zero(&self, to: Ptr, bytes: u64) -> Result<(), CudaError>;
    fn launch(&self, launch: Launch, args: &[u8]) -> Result<(), CudaError>;
    /// Waits for the stream, and reads from several places.
    fn read_parts(&self, parts: &mut [(Ptr, &mut [u8])]) -> Result<(), CudaError>;
    /// Waits for the stream, and reads.
    fn read(&self, from: Ptr, bytes: &mut [u8]) -> Result<(), CudaError> {
        self.read_parts(&mut [(from, bytes)])
    }
    /// Whether kernels are timed one by one; prints what was timed, under the name of what ran.
    #[cfg(feature = "profile")]
    fn profiles(&self, _what: &str) -> bool {
        false
    }
    fn sync(&self) -> Result<(), CudaError>;
    /// What is launched from now on is recorded and not run.
    fn begin_capture(&self) -> Result<(), CudaError>;
    fn end_capture(&self) -> Result<GraphId, CudaError>;
    fn launch_graph(&self, graph: GraphId) -> Result<(), CudaError>;
    /// Bytes per second of a large copy, read and written bytes counted.
    fn copy_bandwidth(&self) -> Result<f64, CudaError>;
}
