//! The kernels on the CPU: `kernels/*` compiled by a C++ compiler into a library that is loaded here. Memory is the process's
//! own, launches run at once, graphs are lists of launches. For tests; nothing in a released program reaches it.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::path::Path;
use std::sync::Mutex;

use super::{Driver, GpuInfo, GraphId, Kernel, Launch};
use crate::args::Ptr;
use crate::error::CudaError;

type Function = unsafe extern "C" fn(*const c_void, *const u32, *const u32);

/// The emulator.
pub(crate) struct Emulated {
    info: GpuInfo,
    functions: Vec<Function>,
    state: Mutex<State>,
    _library: libloading::Library,
}

#[derive(Default)]
struct State {
    memory: Vec<(Ptr, Box<[u64]>)>,
    recording: Option<Vec<(Launch, Vec<u8>)>>,
    graphs: Vec<Vec<(Launch, Vec<u8>)>>,
}

impl Emulated {
    /// Loads a library made of `kernels/`.
    pub(crate) fn load(path: &Path) -> Result<Emulated, CudaError> {
        let failed = |e: libloading::Error| CudaError::Call {
            what: "loading the emulator",
            message: e.to_string(),
        };
        // SAFETY: the library is our own and runs no code when it is loaded.
        let library = unsafe { libloading::Library::new(path) }.map_err(failed)?;
        let mut functions = Vec::new();
        for kernel in Kernel::ALL {
            let name = kernel.name();
            // SAFETY: the emulator declares these with exactly these types.
            unsafe {
                let size: libloading::Symbol<'_, unsafe extern "C" fn() -> u32> =
                    library.get(format!("emulated_size_{name}").as_bytes()).map_err(failed)?;
                assert_eq!(size() as usize, kernel.args_bytes(), "arguments of {name}");
                let f: libloading::Symbol<'_, Function> =
                    library.get(format!("emulated_{name}").as_bytes()).map_err(failed)?;
                functions.push(*f);
            }
        }
        let info = GpuInfo {
            name: "emulator".into(),
            capability: 90,
            total_bytes: 8 << 30,
            free_bytes: 8 << 30,
            shared_bytes: 227 << 10,
            multiprocessors: 132,
            driver_version: 13000,
        };
        Ok(Emulated { info, functions, state: Mutex::default(), _library: library })
    }

    fn run(&self, launch: &Launch, args: &[u8]) {
        assert!(launch.shared <= self.info.shared_bytes, "{launch:?}");
        // Arguments hold addresses: aligned to 8.
        let mut aligned = vec![0u64; args.len().div_ceil(8)];
        // SAFETY: the buffer is as long as the arguments, whose size was compared when the library was loaded.
        unsafe {
            std::ptr::copy_nonoverlapping(args.as_ptr(), aligned.as_mut_ptr().cast(), args.len());
            let block = [launch.threads, 1, 1];
            self.functions[launch.kernel as usize](
                aligned.as_ptr().cast(),
                launch.grid.as_ptr(),
                block.as_ptr(),
            );
        }
    }
}

impl Driver for Emulated {
    fn info(&self) -> &GpuInfo {
        &self.info
    }

    fn launch(&self, launch: Launch, args: &[u8]) -> Result<(), CudaError> {
        assert_eq!(args.len(), launch.kernel.args_bytes());
        let mut state = self.state.lock().expect("no panic holds it");
        if let Some(recording) = &mut state.recording {
            recording.push((launch, args.to_vec()));
            return Ok(());
        }
        self.run(&launch, args);
        Ok(())
    }

    fn alloc(&self, bytes: u64) -> Result<Ptr, CudaError> {
        let words = bytes.div_ceil(8) as usize + 32;
        // Poisoned: what nobody wrote is NaN.
        let mut memory = vec![u64::MAX; words].into_boxed_slice();
        let at = (memory.as_mut_ptr() as u64).next_multiple_of(256);
        self.state.lock().expect("no panic holds it").memory.push((at, memory));
        Ok(at)
    }

    fn free(&self, ptr: Ptr) {
        self.state.lock().expect("no panic holds it").memory.retain(|m| m.0 != ptr);
    }

    fn write(&self, to: Ptr, bytes: &[u8]) -> Result<(), CudaError> {
        // SAFETY: addresses come from `alloc` and are used within what was asked for.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to as *mut u8, bytes.len()) }
        Ok(())
    }

    fn enqueue_write(&self, to: Ptr, bytes: &[u8]) -> Result<(), CudaError> {
        self.write(to, bytes)
    }

    fn enqueue_zero(&self, to: Ptr, bytes: u64) -> Result<(), CudaError> {
        // SAFETY: as in `write`.
        unsafe { std::ptr::write_bytes(to as *mut u8, 0, bytes as usize) }
        Ok(())
    }

    fn read_parts(&self, parts: &mut [(Ptr, &mut [u8])]) -> Result<(), CudaError> {
        for (from, bytes) in parts {
            // SAFETY: as in `write`.
            unsafe {
                std::ptr::copy_nonoverlapping(*from as *const u8, bytes.as_mut_ptr(), bytes.len());
            }
        }
        Ok(())
    }

    fn sync(&self) -> Result<(), CudaError> {
        Ok(())
    }

    fn begin_capture(&self) -> Result<(), CudaError> {
        self.state.lock().expect("no panic holds it").recording = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self) -> Result<GraphId, CudaError> {
        let mut state = self.state.lock().expect("no panic holds it");
        let recorded = state.recording.take().expect("a capture was begun");
        state.graphs.push(recorded);
        Ok(GraphId(state.graphs.len() - 1))
    }

    fn launch_graph(&self, graph: GraphId) -> Result<(), CudaError> {
        let state = self.state.lock().expect("no panic holds it");
        for (launch, args) in &state.graphs[graph.0] {
            self.run(launch, args);
        }
        Ok(())
    }

    fn copy_bandwidth(&self) -> Result<f64, CudaError> {
        Ok(1e9)
    }
}
