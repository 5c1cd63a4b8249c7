//! `cargo xtask kernels OUT [CAPABILITY..]`: the GPU kernels, compiled by the NVRTC in the library path. What it writes can be
//! embedded in a build: `FOREBAY_CUDA_IMAGES=OUT cargo build --release`.

use std::path::Path;

use anyhow::{Context, bail};

/// Compute capabilities that a release embeds.
const ALL: [u32; 5] = [80, 86, 89, 90, 120];

pub fn run(args: Vec<String>) -> anyhow::Result<()> {
    let [out, capabilities @ ..] = args.as_slice() else {
        bail!("usage: cargo xtask kernels OUT [CAPABILITY..], such as 90");
    };
    let parse = |c: &String| c.parse().with_context(|| format!("{c} is no compute capability"));
    let mut capabilities: Vec<u32> = capabilities.iter().map(parse).collect::<Result<_, _>>()?;
    if capabilities.is_empty() {
        capabilities = ALL.to_vec();
    }
    std::fs::create_dir_all(out).with_context(|| out.clone())?;
    for capability in capabilities {
        let image = forebay_cuda::images::compile(capability)?;
        let path = Path::new(out).join(format!("sm_{capability}.cubin"));
        std::fs::write(&path, &image).with_context(|| path.display().to_string())?;
        println!("{}: {} bytes", path.display(), image.len());
    }
    Ok(())
}
