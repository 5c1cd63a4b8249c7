//! The CUDA backend: the same program and the same bits on an NVIDIA GPU, with trunk, experts, embedding and keys and values
//! all in its memory.
//!
//! The driver is loaded at run time: one binary runs with and without a GPU, and building needs no CUDA. Reading order:
//! [`error`] (why not), `layout` (how weights lie there), `map` (what lies where), `load` (how it gets there), `steps` (a
//! program as few launches), `run` (launches), `decode` (fewer
//! still, for one row), [`backend`] (passes and graphs), `driver` (the API), [`images`] (compiled
//! kernels), and `kernels/`, whose orders of sums are those of `forebay_quant::oracle` and `forebay-cpu`.
//!
//! Not here: experts that are not all on the GPU, several GPUs.

#![deny(unsafe_code)]

#[allow(unsafe_code)]
mod args;
pub mod backend;
mod decode;
mod driver;
pub mod error;
pub mod images;
mod inputs;
mod layout;
mod lines;
mod load;
mod map;
mod run;
pub mod selftest;
mod steps;
#[cfg(test)]
mod tests;

pub use backend::{CudaBackend, Gpu};
pub use driver::GpuInfo;
pub use error::CudaError;
pub use load::LoadError;
pub use map::{CudaShape, Model};
