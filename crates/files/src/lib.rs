//! Readers of published model files: GGUF (single and split) and safetensors folders (single and
//! sharded; Hugging Face and MLX layouts). Both give one [`Catalog`].
//!
//! What is here: parsing and checking of headers; every count, offset and length is verified against
//! the file before it is used. What is not here: the meaning of tensors (`forebay-models`), reading
//! weight bytes (`forebay-store`).

pub mod catalog;

pub use catalog::{Catalog, Dtype, FileEntry, MetaValue, Source, TensorInfo};
