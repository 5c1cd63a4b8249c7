//! Weight formats of published checkpoints.
//!
//! What is here: for each format its layout facts ([`Format`]), the decoding of its bytes ([`group`]), its
//! dequantisation ([`dequant`]), the quantisation of activations ([`q8`]), and the scalar oracle that *defines*
//! the arithmetic of a dot product in both precisions ([`oracle`]). Every other kernel in the tree reproduces
//! the oracle bit for bit.
//!
//! To add a format: a row in each table of [`mod@format`] and a decoder in [`group`]. Every kernel then runs it; a
//! hand-written SIMD decoder is an optimisation that comes later, if at all.
//!
//! What is not here: SIMD kernels (`forebay-cpu`), file readers (`forebay-files`).

#![forbid(unsafe_code)]

pub mod dequant;
pub mod format;
pub mod grid;
mod grid_points;
pub mod group;
pub mod matrix;
pub mod oracle;
pub mod q8;

pub use dequant::{BadScale, check_scales, decode_floats, dequantize_row};
pub use format::{ActOrder, CodeFacts, Format, ParamType, PlaneLayout};
pub use group::{Group, decode_group};
pub use matrix::{MatrixError, MatrixView, PlaneView};
pub use oracle::{dot_f32, dot_q8};
pub use q8::{Q8Group, Q8Rows};
