//! Compiled kernels for a device: those of the build, those of an earlier run, or compiled now by NVRTC.
//!
//! A build embeds what `FOREBAY_CUDA_IMAGES` names when it is compiled: a folder with `sm_90.cubin` and the like
//! (`cargo xtask kernels` makes it). Without it, or on a device that it has nothing for, NVRTC is loaded at run time, and
//! what it makes is kept in the user's cache folder under a name that holds a hash of source and options.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::path::PathBuf;

use crate::error::CudaError;

/// The kernels, one translation unit.
pub const SOURCE: &str = concat!(
    include_str!("kernels/base.cuh"),
    include_str!("kernels/matrix.cuh"),
    include_str!("kernels/lanes.cuh"),
    include_str!("kernels/gemv.cu"),
    include_str!("kernels/gemm.cu"),
    include_str!("kernels/float.cu"),
    include_str!("kernels/experts.cu"),
    include_str!("kernels/rows.cu"),
    include_str!("kernels/heads.cu"),
    include_str!("kernels/attention.cu"),
    include_str!("kernels/attention_tile.cu"),
    include_str!("kernels/moe.cu"),
    include_str!("kernels/recurrent.cu"),
    include_str!("kernels/sample.cu"),
);

include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// The image for a compute capability.
pub(crate) fn for_device(capability: u32) -> Result<Vec<u8>, CudaError> {
    // Kernels under trial, such as those with FOREBAY_FREE_ORDER: never in a release.
    #[cfg(feature = "profile")]
    if let Some(image) = std::env::var_os("FOREBAY_CUDA_IMAGE").and_then(|p| std::fs::read(p).ok())
    {
        return Ok(image);
    }
    // Code of one capability runs on later ones of the same generation.
    let fits = |c: u32| c / 10 == capability / 10 && c <= capability;
    let built = EMBEDDED.iter().filter(|(c, _)| fits(*c)).max_by_key(|(c, _)| *c);
    if let Some((_, image)) = built {
        return Ok(image.to_vec());
    }
    let cached = cache_file(capability);
    if let Some(image) = cached.as_ref().and_then(|path| std::fs::read(path).ok()) {
        return Ok(image);
    }
    let image = compile(capability)?;
    if let Some(path) = cached {
        // A cache that cannot be written costs time the next time, nothing else.
        let written = path.parent().map(std::fs::create_dir_all).is_some_and(|r| r.is_ok())
            && std::fs::write(path.with_extension("tmp"), &image).is_ok()
            && std::fs::rename(path.with_extension("tmp"), &path).is_ok();
        if !written {
            tracing::info!(path = %path.display(), "compiled kernels could not be kept");
        }
    }
    Ok(image)
}

fn cache_file(capability: u32) -> Option<PathBuf> {
    let base = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache")))?;
    let mut hasher = DefaultHasher::new();
    (SOURCE, capability, env!("CARGO_PKG_VERSION")).hash(&mut hasher);
    Some(base.join("forebay").join(format!("kernels-{:016x}.cubin", hasher.finish())))
}

/// Compiles the kernels for a compute capability with the NVRTC of this machine.
pub fn compile(capability: u32) -> Result<Vec<u8>, CudaError> {
    nvrtc::compile(capability)
}

/// The few calls of NVRTC.
#[allow(unsafe_code)]
mod nvrtc {
    use std::ffi::{CStr, CString, c_char};

    use cudarc::nvrtc::sys;

    use super::{CudaError, SOURCE};

    pub(super) fn compile(capability: u32) -> Result<Vec<u8>, CudaError> {
        // SAFETY: looks for a library by name.
        if !unsafe { sys::is_culib_present() } {
            let reason = "libnvrtc is not in the library path".into();
            return Err(CudaError::NoKernels { capability, reason });
        }
        let source = CString::new(SOURCE).expect("the source has no NUL");
        let options = [
            CString::new(format!("--gpu-architecture=sm_{capability}")).expect("no NUL"),
            // Contraction would change roundings: the contract.
            c"-fmad=false".to_owned(),
            c"-std=c++17".to_owned(),
            c"-default-device".to_owned(),
        ];
        let options: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        let failed = |what: &str, r: sys::nvrtcResult| CudaError::Compile(format!("{what}: {r:?}"));
        let ok = sys::nvrtcResult::NVRTC_SUCCESS;
        // SAFETY: strings end in NUL and outlive the calls; buffers have the sizes that NVRTC asks for; the program
        // is destroyed on every path.
        unsafe {
            let mut program = std::ptr::null_mut();
            let none = std::ptr::null();
            let name = c"forebay.cu".as_ptr();
            let r = sys::nvrtcCreateProgram(&mut program, source.as_ptr(), name, 0, none, none);
            if r != ok {
                return Err(failed("creating", r));
            }
            let r = sys::nvrtcCompileProgram(program, options.len() as i32, options.as_ptr());
            let mut image = Vec::new();
            let result = if r == ok {
                let mut size = 0;
                let mut r = sys::nvrtcGetCUBINSize(program, &mut size);
                if r == ok {
                    image.resize(size, 0u8);
                    r = sys::nvrtcGetCUBIN(program, image.as_mut_ptr().cast());
                }
                if r == ok { Ok(image) } else { Err(failed("reading", r)) }
            } else {
                let mut size = 0;
                sys::nvrtcGetProgramLogSize(program, &mut size);
                let mut log = vec![0u8; size.max(1)];
                sys::nvrtcGetProgramLog(program, log.as_mut_ptr().cast());
                let log = CStr::from_bytes_until_nul(&log).unwrap_or_default().to_string_lossy();
                Err(CudaError::Compile(format!("{r:?}: {log}")))
            };
            sys::nvrtcDestroyProgram(&mut program);
            result
        }
    }
}
