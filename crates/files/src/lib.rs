//! Readers of published model files: GGUF (single and split) and safetensors folders (single and
//! sharded; Hugging Face and MLX layouts). Both give one [`Catalog`].
//!
//! What is here: parsing and checking of headers. Every count, offset and length is verified against
//! the file before it is used, and opening costs time and memory in proportion to the headers, never
//! to the weights. What is not here: the meaning of tensors (`forebay-models`), reading weight bytes
//! (`forebay-store`).
//!
//! The formats: GGUF, <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>; safetensors,
//! <https://github.com/huggingface/safetensors#format>.

#![forbid(unsafe_code)]

pub mod access;
pub mod catalog;
pub mod error;
mod open;

mod extents;
mod reader;
pub mod shards;

pub mod ggml_types;
pub mod gguf;
mod gguf_split;

pub mod json;
pub mod safetensors;
mod safetensors_set;

pub use access::{Disk, FileAccess};
pub use catalog::{Catalog, Dtype, FileEntry, MetaValue, Source, TensorInfo};
pub use error::{ChangeKind, FilesError, Hint, ShardFault};
