//! What comes from outside, each kind as one function from bytes: GGUF and safetensors files, descriptions of
//! models, tokenizers, chat templates.
//!
//! The fuzz targets in `fuzz/` call these functions with bytes of their invention, and `tests/replay.rs` with the
//! corpora that they left, in every run of the tests. An entry goes the way that `forebay inspect` and
//! `forebay template` go, as far as no weight is read, and checks what has to hold afterwards. Bytes that are no
//! sound input end in an error; a panic, a hang or memory out of proportion is a defect.
//!
//! Not here: requests to a server, and anything that the product itself needs.

#![forbid(unsafe_code)]

mod memory_files;
mod model;
mod text;

/// A kind of input.
#[derive(Clone, Copy)]
pub struct Target {
    /// As its fuzz target and the folder of its corpus are called.
    pub name: &'static str,
    /// What reading may take in memory besides a multiple of the files: tables of constant size, which are those of
    /// compiled patterns where text is cut into words.
    pub base_bytes: u64,
    /// Reads the input, and returns the bytes of the files it stands for: memory is measured against these.
    pub run: fn(&[u8]) -> u64,
}

/// All kinds.
pub const TARGETS: &[Target] = &[
    Target { name: "gguf", base_bytes: 256 << 10, run: model::gguf },
    Target { name: "safetensors", base_bytes: 256 << 10, run: model::safetensors },
    Target { name: "config", base_bytes: 256 << 10, run: model::config },
    Target { name: "tokenizer_folder", base_bytes: 6 << 20, run: text::tokenizer_folder },
    Target { name: "tokenizer_gguf", base_bytes: 6 << 20, run: text::tokenizer_gguf },
    Target { name: "template", base_bytes: 1 << 20, run: text::template },
];

/// The target of that name.
///
/// # Panics
/// If there is none: a fuzz target is called like its entry.
pub fn target(name: &str) -> Target {
    *TARGETS.iter().find(|t| t.name == name).expect("a fuzz target is called like its entry")
}

/// An input of several documents: they are apart by NUL bytes, and those that are not there are empty.
fn documents<const N: usize>(bytes: &[u8]) -> [&[u8]; N] {
    let mut parts = bytes.splitn(N, |b| *b == 0);
    std::array::from_fn(|_| parts.next().unwrap_or_default())
}

/// What every message of an error has to be: text on one line.
fn check_message(error: &dyn std::fmt::Display) {
    let message = error.to_string();
    assert!(!message.is_empty() && !message.contains('\n'), "{message:?}");
}
