//! Arguments of the kernels: each takes one structure by value, declared here and in `kernels/*.cu(h)` alike.
//!
//! Only integers, floats and device addresses, largest first, with explicit padding: the same bytes on both sides.
//! Sizes are compared in the tests.

use forebay_models::Activation;

/// A device address; 0 is none.
pub(crate) type Ptr = u64;

macro_rules! args {
    ($($(#[$doc:meta])* $name:ident { $($field:ident: $ty:ty),* $(,)? })*) => {$(
        $(#[$doc])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default)]
        pub(crate) struct $name { $(pub $field: $ty),* }

        // SAFETY: plain numbers without padding (`no_padding` checks it when this is compiled), so every byte is initialised.
        unsafe impl crate::driver::Plain for $name {}

        const _: () = assert!(size_of::<$name>() == 0 $(+ size_of::<$ty>())*, "padding in kernel arguments");
    )*};
}

args! {
    /// A weight matrix in device memory; see `matrix.cuh`.
    Matrix {
        codes: Ptr, high: Ptr, scales: Ptr, supers: Ptr,
        rows: u32, cols: u32, blocks: u32, width: u32, kind: u32, shift: u32,
        plus: i32, unit: f32, table: [u32; 4],
    }
    Acts { codes: Ptr, meta: Ptr, row_codes: u64, row_meta: u64 }
    GemvJob { w: Matrix, bias: Ptr, out: Ptr, stride: u32, add: u32, variant: u32, first_block: u32 }
    GemvArgs {
        jobs: [GemvJob; 4], acts: Acts, x: Ptr, weight: Ptr, n_jobs: u32, rows: u32, eps: f32, passes: u32,
    }
    RouterArgs {
        w: Matrix, x: Ptr, weight: Ptr, bias: Ptr, out: Ptr, dst: Ptr, codes: [Ptr; 2], meta: [Ptr; 2],
        width: u32, features: u32, eps: f32, pad: u32,
    }
    ExpertUpArgs {
        gate: Matrix, up: Matrix, acts: Acts, gate_bias: Ptr, up_bias: Ptr, ids: Ptr, codes: Ptr, meta: Ptr,
        hidden: Ptr, logits: Ptr, expert_scale: Ptr, weights: Ptr, fault: Ptr, down: Matrix,
        row_codes: u64, row_meta: u64, inter: u32, top_k: u32, activation: u32, variant_gate: u32,
        variant_up: u32, experts: u32, all: u32, layer: u32, alpha: f32, limit: f32,
        down_bytes: u32, down_share: u32,
    }
    /// Weights that a later kernel reads.
    Ahead { at: [Ptr; 3], bytes: [u32; 3], pad: u32 }
    ExpertDownArgs {
        down: Matrix, acts: Acts, bias: Ptr, ids: Ptr, weights: Ptr, out: Ptr, ahead: Ahead,
        d: u32, top_k: u32, add: u32, variant: u32, shift: u32, pad: u32,
    }
    GemmArgs {
        w: Matrix, acts: Acts, bias: Ptr, out: Ptr, tiles: Ptr, n_tiles: Ptr, pairs: Ptr,
        rows: u32, features: u32, stride: u32, divisor: u32, add: u32, variant: u32,
    }
    FloatJob {
        w: Matrix, x: Ptr, bias: Ptr, out: Ptr, ids: Ptr, x_stride: u32, stride: u32, add: u32, divisor: u32,
        rows: u32, features: u32, pad: [u32; 2],
    }
    EmbedArgs { w: Matrix, tokens: Ptr, out: Ptr, d: u32, pad: u32 }
    NormArgs {
        src: Ptr, add: Ptr, sum: Ptr, weight: Ptr, dst: Ptr, codes: [Ptr; 2], meta: [Ptr; 2],
        row_codes: [u64; 2], row_meta: [u64; 2], width: u32, norm: u32, eps: f32, pad: u32,
    }
    HeadNormArgs { x: Ptr, weight: Ptr, dim: u32, segments: u32, eps: f32, pad: u32 }
    AnglesArgs { positions: Ptr, inv_freq: Ptr, out: Ptr, rows: u32, pairs: u32, factor: f32, pad: u32 }
    RopeArgs {
        x: Ptr, angles: Ptr, rows: u32, heads: u32, head_dim: u32, half: u32, adjacent: u32, pad: u32,
    }
    ElementArgs {
        x: Ptr, y: Ptr, factor: Ptr, n: u64, op: u32, width: u32, kind: u32, constant: f32, alpha: f32, limit: f32,
    }
    SplitArgs { src: Ptr, query: Ptr, gate: Ptr, n: u64, dim: u32, pad: u32 }
    GatherArgs { src: Ptr, rows: Ptr, dst: Ptr, width: u32, pad: u32 }
    HeadPart { x: Ptr, weight: Ptr, heads: u32, norm: u32, eps: f32, rope: u32 }
    HeadsArgs {
        parts: [HeadPart; 3], angles: Ptr, pages: Ptr, tables: Ptr, positions: Ptr, row_sequence: Ptr,
        page_bytes: u64, rows: u32, dim: u32, half: u32, adjacent: u32, table_len: u32, kv_type: u32,
        store: u32, pad: u32,
    }
    AttendArgs {
        q: Ptr, out: Ptr, sinks: Ptr, pages: Ptr, tables: Ptr, positions: Ptr, row_sequence: Ptr, tiles: Ptr,
        parts: Ptr, part_ml: Ptr, gate: Ptr, codes: Ptr, meta: Ptr, page_bytes: u64, row_codes: u64, row_meta: u64,
        rows: u32, n_heads: u32, n_kv_heads: u32, dim: u32, table_len: u32, kv_type: u32, window: u32,
        max_blocks: u32, scale: f32, group: u32,
    }
    AttendRowArgs { a: AttendArgs, parts: [HeadPart; 3], angles: Ptr, ahead: Ahead, half: u32, adjacent: u32 }
    RouteArgs {
        logits: Ptr, expert_scale: Ptr, ids: Ptr, weights: Ptr, fault: Ptr,
        rows: u32, experts: u32, top_k: u32, all: u32, layer: u32, pad: u32,
    }
    SortArgs { ids: Ptr, sorted: Ptr, tiles: Ptr, n_tiles: Ptr, pairs: u32, experts: u32, tile: u32, pad: u32 }
    CombineArgs { parts: Ptr, weights: Ptr, out: Ptr, d: u32, top_k: u32, add: u32, pad: u32 }
    ConvArgs {
        x: Ptr, taps: Ptr, state: Ptr, out: Ptr, spans: Ptr, slot_floats: u64, channels: u32, width: u32,
    }
    DeltaArgs {
        qkv: Ptr, a: Ptr, b: Ptr, neg_exp_a: Ptr, dt_bias: Ptr, state: Ptr, out: Ptr, spans: Ptr,
        slot_floats: u64, offset: u64, k_heads: u32, v_heads: u32, k_dim: u32, v_dim: u32, tiled: u32,
        channels: u32, inv_sqrt_k: f32, pad: u32,
    }
    LinesArgs {
        logits: Ptr, largest: Ptr, sums: Ptr, own_sums: Ptr, n: u32, lines: u32, t: f32, pad: u32,
    }
}

/// `op` of [`ElementArgs`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ElementOp {
    Copy,
    Scale,
    Add,
    Glu,
    Softcap,
    Sigmoid,
    Silu,
    SigmoidRow,
}

/// Kind, alpha and limit of an activation, as `glu_` takes them; none for one that has no kernel.
pub(crate) fn activation(a: Activation) -> Option<(u32, f32, f32)> {
    match a {
        Activation::Silu => Some((0, 0.0, 0.0)),
        Activation::GeluTanh => Some((1, 0.0, 0.0)),
        Activation::ClampedSwiglu { alpha, limit } => Some((2, alpha, limit)),
        _ => None,
    }
}
