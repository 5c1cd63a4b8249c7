//! Embeds compiled kernels where the build is given some: `FOREBAY_CUDA_IMAGES` names a folder of `sm_NN.cubin`.

use std::fmt::Write as _;
use std::path::PathBuf;

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-env-changed=FOREBAY_CUDA_IMAGES");
    let mut entries = String::new();
    if let Some(folder) = std::env::var_os("FOREBAY_CUDA_IMAGES").map(PathBuf::from) {
        println!("cargo:rerun-if-changed={}", folder.display());
        let mut files: Vec<PathBuf> = std::fs::read_dir(&folder)
            .unwrap_or_else(|e| panic!("FOREBAY_CUDA_IMAGES={}: {e}", folder.display()))
            .map(|f| f.expect("a readable folder").path())
            .collect();
        files.sort();
        for path in files {
            let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            let capability = name.strip_prefix("sm_").and_then(|c| c.parse::<u32>().ok());
            if let (Some(capability), Some("cubin")) =
                (capability, path.extension().and_then(|e| e.to_str()))
            {
                writeln!(entries, "    ({capability}, include_bytes!({path:?}).as_slice()),")
                    .expect("a String");
            }
        }
    }
    let text = format!(
        "/// Compiled kernels of this build: (compute capability, cubin).\n\
         static EMBEDDED: &[(u32, &[u8])] = &[\n{entries}];\n"
    );
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets it")).join("images.rs");
    std::fs::write(out, text).expect("cargo's own folder");
}
