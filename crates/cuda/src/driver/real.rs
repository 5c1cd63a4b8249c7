//! The CUDA driver API through `cudarc`, which loads it at run time.
//!
//! Invariants: the library is touched only after [`sys::is_culib_present`] said yes; every call happens with the primary
//! context of device 0 current on the calling thread ([`Real::enter`]); handles live as long as [`Real`].
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_void};
use std::mem::MaybeUninit;
use std::sync::Mutex;
use std::time::Instant;

use cudarc::driver::sys;

use super::{Driver, GpuInfo, GraphId, Kernel, Launch};
use crate::args::Ptr;
use crate::error::CudaError;
use crate::images;

/// CUDA 12.0: what launches with attributes need.
const NEEDED_DRIVER: u32 = 12000;

/// Results are read through a page-locked buffer, in pieces of so many bytes, so many at a time.
const PIECE: usize = 128 << 10;
const PIECES: usize = 16;

/// Device 0 with its primary context, a stream, and the kernels.
pub(crate) struct Real {
    info: GpuInfo,
    context: sys::CUcontext,
    stream: sys::CUstream,
    functions: Vec<sys::CUfunction>,
    staging: Mutex<Staging>,
    graphs: Mutex<Vec<sys::CUgraphExec>>,
    /// Kernels may start while the one before ends.
    overlap: bool,
    #[cfg(feature = "profile")]
    profile: Option<Mutex<Vec<(Kernel, sys::CUevent)>>>,
}

struct Staging {
    buffer: *mut c_void,
    events: [sys::CUevent; PIECES],
}

// SAFETY: handles and the page-locked buffer are plain addresses, usable from any thread that has the context current; what
// is not thread-safe is behind a mutex.
unsafe impl Send for Real {}
// SAFETY: as above.
unsafe impl Sync for Real {}
// SAFETY: as above.
unsafe impl Send for Staging {}

fn check(result: sys::CUresult, what: &'static str) -> Result<(), CudaError> {
    if result == sys::CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: gives a static string, or leaves null.
    let message = unsafe {
        sys::cuGetErrorString(result, &mut text);
        match text.is_null() {
            true => format!("{result:?}"),
            false => CStr::from_ptr(text).to_string_lossy().into_owned(),
        }
    };
    Err(CudaError::Call { what, message })
}

/// Starts the driver and looks at device 0.
fn find() -> Result<(sys::CUdevice, GpuInfo), CudaError> {
    // SAFETY: looks for the library by name; `cuInit` and `cuDriverGetVersion` are in every version of it.
    unsafe {
        if !sys::is_culib_present() {
            return Err(CudaError::NoDriver("libcuda is not installed".into()));
        }
        check(sys::cuInit(0), "starting the driver").map_err(|e| match e {
            CudaError::Call { message, .. } => CudaError::NoDriver(message),
            other => other,
        })?;
        let mut version = 0;
        check(sys::cuDriverGetVersion(&mut version), "asking for the driver's version")?;
        if (version as u32) < NEEDED_DRIVER {
            return Err(CudaError::OldDriver { found: version as u32, needed: NEEDED_DRIVER });
        }
        let mut count = 0;
        check(sys::cuDeviceGetCount(&mut count), "counting devices")?;
        if count == 0 {
            return Err(CudaError::NoDevice);
        }
        let mut device = 0;
        check(sys::cuDeviceGet(&mut device, 0), "opening device 0")?;
        let mut name = [0u8; 128];
        check(sys::cuDeviceGetName(name.as_mut_ptr().cast(), 127, device), "naming device 0")?;
        let name =
            CStr::from_bytes_until_nul(&name).unwrap_or_default().to_string_lossy().into_owned();
        let attribute = |which| {
            let mut value = 0;
            check(sys::cuDeviceGetAttribute(&mut value, which, device), "asking device 0")?;
            Ok(value as u32)
        };
        use sys::CUdevice_attribute_enum as A;
        let capability = attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        if capability < 80 {
            return Err(CudaError::OldDevice { name, capability });
        }
        let shared_bytes = attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let multiprocessors = attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let mut total = 0;
        check(sys::cuDeviceTotalMem_v2(&mut total, device), "asking device 0")?;
        let info = GpuInfo {
            name,
            capability,
            total_bytes: total as u64,
            free_bytes: total as u64,
            shared_bytes,
            multiprocessors,
            driver_version: version as u32,
        };
        Ok((device, info))
    }
}

impl Real {
    /// Opens device 0; the kernels are those of the build, of the cache, or compiled now.
    pub(crate) fn open() -> Result<Real, CudaError> {
        let (device, mut info) = find()?;
        let image = images::for_device(info.capability)?;
        // SAFETY: `find` has started the driver; out-pointers are to locals; the image is a whole cubin or PTX
        // text with its NUL (`images`).
        unsafe {
            let mut context = std::ptr::null_mut();
            check(sys::cuDevicePrimaryCtxRetain(&mut context, device), "making a context")?;
            check(sys::cuCtxSetCurrent(context), "entering the context")?;
            let mut stream = std::ptr::null_mut();
            let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
            check(sys::cuStreamCreate(&mut stream, flags), "making a stream")?;
            let mut module = std::ptr::null_mut();
            check(
                sys::cuModuleLoadData(&mut module, image.as_ptr().cast()),
                "loading the kernels",
            )?;
            let mut functions = Vec::new();
            for kernel in Kernel::ALL {
                let name = CString::new(kernel.name()).expect("names have no NUL");
                let mut f = std::ptr::null_mut();
                check(sys::cuModuleGetFunction(&mut f, module, name.as_ptr()), "finding a kernel")?;
                let most =
                    sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
                let mut own = 0;
                let size = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
                check(sys::cuFuncGetAttribute(&mut own, size, f), "asking a kernel")?;
                let rest = info.shared_bytes as i32 - own;
                check(sys::cuFuncSetAttribute(f, most, rest), "giving a kernel shared memory")?;
                if kernel.of_decode() {
                    let split =
                        sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
                    check(sys::cuFuncSetAttribute(f, split, 100), "splitting a kernel's memory")?;
                }
                functions.push(f);
            }
            let (mut free, mut total) = (0, 0);
            check(sys::cuMemGetInfo_v2(&mut free, &mut total), "asking for free memory")?;
            info.free_bytes = free as u64;
            let mut staging = std::ptr::null_mut();
            check(sys::cuMemHostAlloc(&mut staging, PIECES * PIECE, 0), "locking host memory")?;
            let mut events = [std::ptr::null_mut(); PIECES];
            let plain = sys::CUevent_flags_enum::CU_EVENT_DISABLE_TIMING as u32;
            for event in &mut events {
                check(sys::cuEventCreate(event, plain), "making an event")?;
            }
            let overlap = info.capability >= 90 && info.driver_version >= 12030;
            #[cfg(feature = "profile")]
            let profile = std::env::var_os("FOREBAY_CUDA_PROFILE").map(|_| Mutex::default());
            Ok(Real {
                info,
                context,
                stream,
                functions,
                staging: Mutex::new(Staging { buffer: staging, events }),
                graphs: Mutex::default(),
                #[cfg(feature = "profile")]
                overlap: overlap && profile.is_none(),
                #[cfg(not(feature = "profile"))]
                overlap,
                #[cfg(feature = "profile")]
                profile,
            })
        }
    }

    /// Whether there is a GPU that could be used; makes no context.
    pub(crate) fn probe() -> Result<GpuInfo, CudaError> {
        find().map(|(_, info)| info)
    }

    fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        check(unsafe { sys::cuCtxSetCurrent(self.context) }, "entering the context")
    }
}

#[cfg(feature = "profile")]
impl Real {
    /// Notes when a kernel may start.
    fn mark(&self, kernel: Kernel) {
        let Some(profile) = &self.profile else { return };
        let mut event = std::ptr::null_mut();
        // SAFETY: an event of our stream; destroyed never, for profiles are short.
        unsafe {
            sys::cuEventCreate(&mut event, 0);
            sys::cuEventRecord(event, self.stream);
        }
        profile.lock().expect("no panic holds it").push((kernel, event));
    }

    /// Forgets what was noted, after printing it.
    fn report(&self, what: &str) {
        let Some(profile) = &self.profile else { return };
        let mut events = profile.lock().expect("no panic holds it");
        let mut sums = vec![(0usize, 0f32); Kernel::ALL.len()];
        for pair in events.windows(2) {
            let mut ms = 0.0;
            // SAFETY: both events were recorded and the stream was waited for.
            unsafe { sys::cuEventElapsedTime(&mut ms, pair[0].1, pair[1].1) };
            let sum = &mut sums[pair[0].0 as usize];
            (sum.0, sum.1) = (sum.0 + 1, sum.1 + ms);
        }
        eprintln!("profile of {what}: {:.3} ms", sums.iter().map(|s| s.1).sum::<f32>());
        let mut order: Vec<usize> = (0..sums.len()).filter(|i| sums[*i].0 > 0).collect();
        order.sort_by(|a, b| sums[*b].1.total_cmp(&sums[*a].1));
        for i in order {
            let (n, ms) = sums[i];
            eprintln!(
                "  {:<16} {n:>5} x {:>8.2} us = {ms:>8.3} ms",
                Kernel::ALL[i].name(),
                ms * 1e3 / n as f32
            );
        }
        events.clear();
    }
}

impl Drop for Real {
    fn drop(&mut self) {
        // SAFETY: made in `open`, used by nobody any more. Failures leave nothing to do.
        unsafe {
            sys::cuCtxSetCurrent(self.context);
            sys::cuStreamSynchronize(self.stream);
            for graph in self.graphs.lock().expect("no panic holds it").drain(..) {
                sys::cuGraphExecDestroy(graph);
            }
            let staging = self.staging.lock().expect("no panic holds it");
            for event in staging.events {
                sys::cuEventDestroy_v2(event);
            }
            sys::cuMemFreeHost(staging.buffer);
            sys::cuStreamDestroy_v2(self.stream);
            sys::cuDevicePrimaryCtxRelease_v2(0);
        }
    }
}

impl Driver for Real {
    fn info(&self) -> &GpuInfo {
        &self.info
    }

    fn launch(&self, launch: Launch, args: &[u8]) -> Result<(), CudaError> {
        let mut attributes: [sys::CUlaunchAttribute; 1] =
            // SAFETY: zero is a valid value of every field: numbers and unions of numbers.
            [unsafe { MaybeUninit::zeroed().assume_init() }];
        attributes[0].id =
            sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attributes[0].value.programmaticStreamSerializationAllowed = 1;
        let [x, y, z] = launch.grid;
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: launch.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: launch.shared,
            hStream: self.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: self.overlap as u32,
        };
        #[cfg(feature = "profile")]
        self.mark(launch.kernel);
        let mut params = [args.as_ptr() as *mut c_void];
        let function = self.functions[launch.kernel as usize];
        // SAFETY: the kernel takes one structure of exactly these bytes (`args.rs`), which are copied by the call.
        let result = unsafe {
            sys::cuLaunchKernelEx(&config, function, params.as_mut_ptr(), std::ptr::null_mut())
        };
        check(result, launch.kernel.name())
    }

    fn alloc(&self, bytes: u64) -> Result<Ptr, CudaError> {
        self.enter()?;
        let mut ptr = 0;
        // SAFETY: `ptr` is a local.
        check(unsafe { sys::cuMemAlloc_v2(&mut ptr, bytes.max(1) as usize) }, "allocating memory")?;
        Ok(ptr)
    }

    fn free(&self, ptr: Ptr) {
        if self.enter().is_ok() {
            // SAFETY: came from `alloc`; the stream is idle when owners are dropped, and the driver waits besides.
            unsafe { sys::cuMemFree_v2(ptr) };
        }
    }

    fn write(&self, to: Ptr, bytes: &[u8]) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: `to` is within an allocation; the copy is done when this returns.
        let result = unsafe { sys::cuMemcpyHtoD_v2(to, bytes.as_ptr().cast(), bytes.len()) };
        check(result, "writing to the GPU")
    }

    fn enqueue_write(&self, to: Ptr, bytes: &[u8]) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: pageable memory is staged before the call returns.
        let result = unsafe {
            sys::cuMemcpyHtoDAsync_v2(to, bytes.as_ptr().cast(), bytes.len(), self.stream)
        };
        check(result, "writing to the GPU")
    }

    fn enqueue_zero(&self, to: Ptr, bytes: u64) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: within an allocation.
        check(
            unsafe { sys::cuMemsetD8Async(to, 0, bytes as usize, self.stream) },
            "clearing memory",
        )
    }

    fn read_parts(&self, parts: &mut [(Ptr, &mut [u8])]) -> Result<(), CudaError> {
        self.enter()?;
        let staging = self.staging.lock().expect("no panic holds it");
        let mut pieces: Vec<(Ptr, &mut [u8])> = Vec::new();
        for (from, bytes) in parts {
            let pieces_of = bytes.chunks_mut(PIECE).enumerate();
            pieces.extend(pieces_of.map(|(i, piece)| (*from + (i * PIECE) as u64, piece)));
        }
        // While one piece is on its way, the one before is taken out of the page-locked buffer.
        for round in pieces.chunks_mut(PIECES) {
            for (i, (from, piece)) in round.iter().enumerate() {
                // SAFETY: the staging buffer holds PIECES times PIECE bytes and is ours while locked; events live as long
                // as `self`.
                unsafe {
                    let to = staging.buffer.byte_add(i * PIECE);
                    let result = sys::cuMemcpyDtoHAsync_v2(to, *from, piece.len(), self.stream);
                    check(result, "reading from the GPU")?;
                    check(sys::cuEventRecord(staging.events[i], self.stream), "computing")?;
                }
            }
            for (i, (_, piece)) in round.iter_mut().enumerate() {
                // SAFETY: as above; the copy is waited for.
                unsafe {
                    check(sys::cuEventSynchronize(staging.events[i]), "computing")?;
                    let from = staging.buffer.byte_add(i * PIECE);
                    std::ptr::copy_nonoverlapping(from.cast(), piece.as_mut_ptr(), piece.len());
                }
            }
        }
        Ok(())
    }

    #[cfg(feature = "profile")]
    fn profiles(&self, what: &str) -> bool {
        if self.profile.is_some() && !what.is_empty() && self.sync().is_ok() {
            self.report(what);
        }
        self.profile.is_some()
    }

    fn sync(&self) -> Result<(), CudaError> {
        self.enter()?;
        // SAFETY: the stream lives as long as `self`.
        check(unsafe { sys::cuStreamSynchronize(self.stream) }, "computing")
    }

    fn begin_capture(&self) -> Result<(), CudaError> {
        self.enter()?;
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives as long as `self`.
        check(unsafe { sys::cuStreamBeginCapture_v2(self.stream, mode) }, "beginning a graph")
    }

    fn end_capture(&self) -> Result<GraphId, CudaError> {
        // SAFETY: out-pointers are locals; the graph is not used after it was instantiated.
        unsafe {
            let mut graph = std::ptr::null_mut();
            check(sys::cuStreamEndCapture(self.stream, &mut graph), "ending a graph")?;
            let mut exec = std::ptr::null_mut();
            let result = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0);
            sys::cuGraphDestroy(graph);
            check(result, "making a graph")?;
            let mut graphs = self.graphs.lock().expect("no panic holds it");
            graphs.push(exec);
            Ok(GraphId(graphs.len() - 1))
        }
    }

    fn launch_graph(&self, graph: GraphId) -> Result<(), CudaError> {
        self.enter()?;
        let exec = self.graphs.lock().expect("no panic holds it")[graph.0];
        // SAFETY: destroyed in `drop` only.
        check(unsafe { sys::cuGraphLaunch(exec, self.stream) }, "running a graph")
    }

    fn copy_bandwidth(&self) -> Result<f64, CudaError> {
        const BYTES: usize = 1 << 30;
        let (a, b) = (self.alloc(BYTES as u64)?, self.alloc(BYTES as u64)?);
        let mut best = f64::INFINITY;
        for _ in 0..6 {
            self.sync()?;
            let clock = Instant::now();
            for _ in 0..4 {
                // SAFETY: both allocations hold BYTES.
                let result = unsafe { sys::cuMemcpyDtoDAsync_v2(a, b, BYTES, self.stream) };
                check(result, "copying")?;
            }
            self.sync()?;
            best = best.min(clock.elapsed().as_secs_f64() / 4.0);
        }
        self.free(a);
        self.free(b);
        Ok(2.0 * BYTES as f64 / best)
    }
}
