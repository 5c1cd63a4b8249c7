//! The CPU backend: kernels, thread pool, attention over paged KV, and the interpreter of a program.
//!
//! Reading order: [`simd`] (which kernels this machine runs), [`pool`] (threads), [`matmul`] (weights
//! times activations), [`vecmath`] (exp and friends, written out once), [`rows`] (matrices of
//! activations), [`ops`] (norms, rope, activations, routing), [`attention`] (paged KV and softmax
//! attention), [`backend`] (the interpreter), [`steer`] (rows moved along directions).
//!
//! Numeric contract: every function here gives the same bits at every [`simd::Level`], for every
//! number of threads, and for a row whatever rows are beside it.

pub mod attention;
pub mod backend;
pub mod bandwidth;
pub mod delta;
mod dispatch;
mod half_float;
pub mod matmul;
pub mod ops;
pub mod peak;
pub mod pool;
pub mod probe;
pub mod rows;
pub mod simd;
pub mod steer;
pub mod vecmath;

pub use backend::CpuBackend;
pub use pool::Pool;
pub use rows::{Rows, RowsMut};
pub use simd::Level;
