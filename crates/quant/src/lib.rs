//! Weight formats of published checkpoints.
//!
//! What is here: for each format its layout facts ([`Format`]), its dequantisation, and the scalar
//! oracle that *defines* the arithmetic of a dot product in both precisions ([`oracle`]). Every other
//! kernel in the tree reproduces the oracle bit for bit.
//!
//! What is not here: SIMD kernels (`forebay-cpu`), file readers (`forebay-files`).

pub mod format;
pub mod matrix;

pub use format::{ActOrder, Format, ParamType, PlaneLayout};
pub use matrix::{MatrixError, MatrixView, PlaneView};
