//! Checkpoints of published models' exact shapes with random weights.
//!
//! Speed, memory and ledgers depend on shapes and formats, not on what the weights say, so they can be
//! measured where no weights can be had. What the files are *not*: models. Answers are noise, and
//! which experts are chosen follows from a random router (see [`shapes`]), so hit rates belong to the
//! file and not to the model it is shaped like.
//!
//! [`shapes`] names the tensors, [`gguf`] and [`mlx`] write them, [`noise`] makes their bytes. With
//! [`Options::sparse`] only headers are written and the rest of the files is a hole: enough for ledgers.

#![forbid(unsafe_code)]

pub mod gguf;
pub mod mlx;
pub mod noise;
pub mod shapes;

use std::path::Path;

use anyhow::Context;

/// How to write.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Write only so many layers; all when none.
    pub layers: Option<usize>,
    /// Headers only; weights are a hole in the file.
    pub sparse: bool,
}

/// Names that [`write()`] knows.
pub const NAMES: [&str; 6] = [
    "gpt-oss-20b",
    "gpt-oss-120b",
    "qwen3-30b-a3b",
    "gemma-4-26b-a4b",
    "qwen3.6-35b-a3b",
    "qwen3.5-4b",
];

/// Writes the shape `name` to `out`: a file for GGUF shapes, a folder for MLX shapes.
///
/// `models` is the folder with the small models whose tokenizers are taken. `progress` is told
/// (bytes written, bytes in all).
///
/// # Errors
/// An unknown name, files that cannot be read or written.
pub fn write(
    name: &str,
    models: &Path,
    out: &Path,
    options: Options,
    progress: &mut dyn FnMut(u64, u64),
) -> anyhow::Result<()> {
    let what = || format!("writing {}", out.display());
    match name {
        "gpt-oss-20b" => {
            gguf::write(&shapes::gpt_oss(24, 32, options.layers), models, out, options, progress)
        }
        "gpt-oss-120b" => {
            gguf::write(&shapes::gpt_oss(36, 128, options.layers), models, out, options, progress)
        }
        "qwen3-30b-a3b" => {
            gguf::write(&shapes::qwen3_30b(options.layers), models, out, options, progress)
        }
        "gemma-4-26b-a4b" => {
            mlx::write(&shapes::gemma4_26b(options.layers), models, out, options, progress)
        }
        "qwen3.6-35b-a3b" => {
            mlx::write(&shapes::qwen36_35b(options.layers), models, out, options, progress)
        }
        "qwen3.5-4b" => {
            mlx::write(&shapes::qwen35_4b(options.layers), models, out, options, progress)
        }
        other => anyhow::bail!("no shape {other:?}; there are {}", NAMES.join(", ")),
    }
    .with_context(what)
}
