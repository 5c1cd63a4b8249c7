//! Weights times activations: `y[o] = dot(w[o], x) + bias[o]` for many rows at once.
//!
//! The arithmetic is defined by [`forebay_quant::oracle`]; every [`crate::Level`] gives its bits. How it is made fast:
//!
//! * `kernel` walks tiles of output rows for integer (`q8`) dot products. It is generic over an instruction set
//!   (`isa`, `avx512`, `avx2`, `neon`) and over a decoder of one weight format (`decode`): a format needs one decoder for all
//!   instruction sets, and formats without one go through `forebay_quant::decode_group`.
//! * `unpack` makes f32 weights with the same decoders.
//! * `float` does the same for f32 activations.
//! * `scalar` is the portable path of both.
//! * `pack` quantises activation rows.
//!
//! Work is split by output rows only, so no sum depends on it. One activation row (decode) streams the weights
//! once; several rows decode a tile of weights once per 32 of them.

// Kernels step through several small arrays at once; zipped iterators would hide that, and their closures cost
// (see `decode`).
#![allow(clippy::needless_range_loop)]

mod float;
mod job;
mod kernel;
mod pack;
mod scalar;
mod unpack;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod decode;
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod isa;
#[cfg(target_arch = "aarch64")]
pub(crate) mod neon;
#[cfg(target_arch = "aarch64")]
mod neon_dot;
#[cfg(target_arch = "x86_64")]
mod pack_avx2;

pub use job::{Input, Job, OutRows, Rows, run_jobs};
pub use pack::pack_rows;

/// Panics if this machine lacks the instructions of `level`: what makes the kernels behind it safe to call.
fn require(level: crate::Level) {
    let there = match level {
        crate::Level::Scalar => true,
        #[cfg(target_arch = "x86_64")]
        crate::Level::Avx2 => avx2(),
        #[cfg(target_arch = "x86_64")]
        crate::Level::Avx512 => {
            avx2()
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
        }
        #[cfg(target_arch = "aarch64")]
        crate::Level::Neon => true,
        #[cfg(target_arch = "aarch64")]
        crate::Level::NeonDot => std::arch::is_aarch64_feature_detected!("dotprod"),
        #[cfg(target_arch = "aarch64")]
        crate::Level::NeonI8mm => {
            std::arch::is_aarch64_feature_detected!("dotprod")
                && std::arch::is_aarch64_feature_detected!("i8mm")
        }
        _ => false,
    };
    assert!(there, "this machine cannot run {level} kernels");
}

#[cfg(target_arch = "x86_64")]
fn avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}
