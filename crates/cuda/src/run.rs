//! Steps to launches: addresses, grid sizes, and which kernel for how many rows. Products, attention and experts have files of
//! their own.

mod attend;
mod experts;
mod products;

use forebay_cpu::attention::KvLayout;
use forebay_models::spec::RopePairs;
use forebay_program::{
    BufferId, Factor, GateFunction, KvId, NormParams, PackId, Program, RecurrentId, VectorId,
};

use crate::args::*;
use crate::driver::{Driver, Kernel, Launch, Plain, bytes_of};
use crate::error::CudaError;
use crate::inputs::{Counts, InputsMap};
use crate::map::{CudaShape, FEW_ROWS, Map, PackMem, state_floats};
use crate::steps::{Part, Step};

pub(crate) use experts::up_shared;
pub(crate) use products::GEMM_SHARED;

/// Rows that are normed, packed or both, and where the results go; addresses may be 0.
pub(crate) struct NormRows<'a> {
    pub rows: usize,
    /// `[rows, width]`
    pub src: Ptr,
    pub width: usize,
    /// Added to `src` first, in place.
    pub add: Ptr,
    pub norm: Option<NormParams>,
    pub dst: Ptr,
    /// At most two.
    pub packs: &'a [PackMem],
}

/// One pass, or what is captured of one.
pub(crate) struct Run<'a> {
    pub driver: &'a dyn Driver,
    pub program: &'a Program,
    pub shape: &'a CudaShape,
    pub map: &'a Map,
    pub inputs: &'a InputsMap,
    pub rows: usize,
    pub counts: &'a Counts,
    /// Blocks of positions that launches for few rows allow for.
    pub blocks: usize,
}

impl Run<'_> {
    pub(crate) fn step(&self, step: &Step) -> Result<(), CudaError> {
        match step {
            Step::Angles { rope, dst } => self.angles(*rope, *dst),
            Step::Norm { src, add, norm, dst, packs } => self.norm(*src, *add, *norm, *dst, packs),
            Step::HeadNorm { buf, head_dim, norm } => self.head_norm(*buf, *head_dim, *norm),
            Step::Rope { buf, head_dim, rope, angles } => {
                self.rope(*buf, *head_dim, *rope, *angles)
            }
            Step::Heads { kv, parts } => self.heads(*kv, parts),
            Step::Linears(list) => self.linears(list),
            Step::Attention { op, gate, pack } => self.attention(op, *gate, *pack),
            Step::Copy { src, dst } => self.element(
                ElementOp::Copy,
                *dst,
                ElementArgs { y: self.buffer(*src), ..Default::default() },
            ),
            Step::Scale { buf, factor } => {
                let (factor, constant) = match factor {
                    Factor::Constant(x) => (0, *x),
                    Factor::Learned(v) => (self.map.vectors[v.0], 0.0),
                };
                self.element(
                    ElementOp::Scale,
                    *buf,
                    ElementArgs { factor, constant, ..Default::default() },
                )
            }
            Step::Add { src, dst } => self.element(
                ElementOp::Add,
                *dst,
                ElementArgs { y: self.buffer(*src), ..Default::default() },
            ),
            Step::Glu { gate, up, activation } => {
                let n = self.rows * self.width(*gate);
                self.glu(*activation, self.buffer(*gate), self.buffer(*up), n)
            }
            Step::SplitHeads { src, query, gate, head_dim } => {
                let n = self.rows * self.width(*query);
                let args = SplitArgs {
                    src: self.buffer(*src),
                    query: self.buffer(*query),
                    gate: self.buffer(*gate),
                    n: n as u64,
                    dim: *head_dim as u32,
                    pad: 0,
                };
                self.launch(Kernel::SplitHeads, [n.div_ceil(256), 1, 1], 256, 0, args)
            }
            Step::Gate { gate, buf, function } => {
                let op = match (self.width(*gate), function) {
                    (1, _) if self.width(*buf) > 1 => ElementOp::SigmoidRow,
                    (_, GateFunction::Sigmoid) => ElementOp::Sigmoid,
                    (_, GateFunction::Silu) => ElementOp::Silu,
                };
                self.element(op, *buf, ElementArgs { y: self.buffer(*gate), ..Default::default() })
            }
            Step::ConvSilu { layer, src, dst } => self.conv(*layer, *src, *dst),
            Step::DeltaRule { layer, qkv, a, b, dst } => self.delta(*layer, [*qkv, *a, *b, *dst]),
            Step::Route { logits, moe } => self.route(*logits, *moe),
            Step::Experts { moe, dst, add } => self.experts(*moe, *dst, *add, None),
        }
    }

    pub(crate) fn launch<T: Plain>(
        &self,
        kernel: Kernel,
        grid: [usize; 3],
        threads: usize,
        shared: usize,
        args: T,
    ) -> Result<(), CudaError> {
        if grid.contains(&0) {
            return Ok(());
        }
        let grid = grid.map(|n| n as u32);
        let launch = Launch { kernel, grid, threads: threads as u32, shared: shared as u32 };
        self.driver.launch(launch, bytes_of(std::slice::from_ref(&args)))
    }

    pub(crate) fn buffer(&self, b: BufferId) -> Ptr {
        self.map.arena + (self.program.buffers[b.0].offset * self.shape.max_rows * 4) as u64
    }

    pub(crate) fn width(&self, b: BufferId) -> usize {
        self.program.buffers[b.0].width
    }

    pub(crate) fn vector(&self, v: Option<VectorId>) -> Ptr {
        v.map_or(0, |v| self.map.vectors[v.0])
    }

    pub(crate) fn acts(&self, pack: &PackMem) -> Acts {
        let PackMem { codes, meta, row_codes, row_meta } = *pack;
        Acts { codes, meta, row_codes, row_meta }
    }

    fn angles(&self, rope: usize, dst: BufferId) -> Result<(), CudaError> {
        let table = &self.program.ropes[rope];
        let pairs = table.inv_freq.len();
        let args = AnglesArgs {
            positions: self.inputs.positions(),
            inv_freq: self.map.inv_freq[rope],
            out: self.buffer(dst),
            rows: self.rows as u32,
            pairs: pairs as u32,
            factor: table.attention_factor,
            pad: 0,
        };
        self.launch(Kernel::RopeAngles, [(self.rows * pairs).div_ceil(256), 1, 1], 256, 0, args)
    }

    fn norm(
        &self,
        src: BufferId,
        add: Option<BufferId>,
        norm: Option<NormParams>,
        dst: Option<BufferId>,
        packs: &[PackId],
    ) -> Result<(), CudaError> {
        let packs: Vec<PackMem> = packs.iter().map(|p| self.map.packs[p.0]).collect();
        let at = |b: Option<BufferId>| b.map_or(0, |b| self.buffer(b));
        let (rows, width) = (self.rows, self.width(src));
        let (src, add, dst) = (self.buffer(src), at(add), at(dst));
        self.norm_rows(NormRows { rows, src, width, add, norm, dst, packs: &packs })
    }

    pub(crate) fn norm_rows(&self, of: NormRows<'_>) -> Result<(), CudaError> {
        let mut args = NormArgs {
            src: of.src,
            add: of.add,
            sum: of.src,
            weight: self.vector(of.norm.and_then(|n| n.weight)),
            dst: of.dst,
            width: of.width as u32,
            norm: of.norm.is_some() as u32,
            eps: of.norm.map_or(0.0, |n| n.eps),
            ..Default::default()
        };
        for (i, p) in of.packs.iter().enumerate() {
            (args.codes[i], args.meta[i]) = (p.codes, p.meta);
            (args.row_codes[i], args.row_meta[i]) = (p.row_codes, p.row_meta);
        }
        let threads = if of.rows <= FEW_ROWS { 1024 } else { 256 };
        self.launch(Kernel::NormPack, [of.rows, 1, 1], threads, 4 * of.width, args)
    }

    fn head_norm(&self, buf: BufferId, dim: usize, norm: NormParams) -> Result<(), CudaError> {
        let segments = self.rows * self.width(buf) / dim;
        let args = HeadNormArgs {
            x: self.buffer(buf),
            weight: self.vector(norm.weight),
            dim: dim as u32,
            segments: segments as u32,
            eps: norm.eps,
            pad: 0,
        };
        self.launch(Kernel::HeadNorm, [segments.div_ceil(4), 1, 1], 128, 0, args)
    }

    fn rope(
        &self,
        buf: BufferId,
        dim: usize,
        rope: usize,
        angles: BufferId,
    ) -> Result<(), CudaError> {
        let table = &self.program.ropes[rope];
        let (heads, half) = (self.width(buf) / dim, table.inv_freq.len());
        let args = RopeArgs {
            x: self.buffer(buf),
            angles: self.buffer(angles),
            rows: self.rows as u32,
            heads: heads as u32,
            head_dim: dim as u32,
            half: half as u32,
            adjacent: (table.pairs == RopePairs::Adjacent) as u32,
            pad: 0,
        };
        self.launch(Kernel::Rope, [(self.rows * heads * half).div_ceil(256), 1, 1], 256, 0, args)
    }

    fn heads(&self, kv: KvId, parts: &[Option<Part>; 3]) -> Result<(), CudaError> {
        let args = self.heads_args(kv, parts);
        let heads: u32 = args.parts.iter().map(|p| p.heads).sum();
        let grid = [(heads as usize * self.rows).div_ceil(4), 1, 1];
        self.launch(Kernel::Heads, grid, 128, 4 * 4 * args.dim as usize, args)
    }

    pub(crate) fn heads_args(&self, kv: KvId, parts: &[Option<Part>; 3]) -> HeadsArgs {
        let layer = &self.program.kv_layers[kv.0];
        let dim = layer.head_dim;
        let layout = KvLayout::new(layer.n_kv_heads, dim, self.shape.kv_type);
        let mut args = HeadsArgs {
            pages: self.map.kv[kv.0],
            tables: self.inputs.table(layer.class),
            positions: self.inputs.positions(),
            row_sequence: self.inputs.row_sequence(),
            page_bytes: layout.page_bytes() as u64,
            rows: self.rows as u32,
            dim: dim as u32,
            table_len: self.inputs.table_len as u32,
            kv_type: self.shape.kv_type as u32,
            store: 1,
            ..Default::default()
        };
        for (to, part) in args.parts.iter_mut().zip(parts) {
            let Some(part) = part else { continue };
            let n = self.width(part.buf) / dim;
            *to = HeadPart {
                x: self.buffer(part.buf),
                weight: self.vector(part.norm.and_then(|n| n.weight)),
                heads: n as u32,
                norm: part.norm.is_some() as u32,
                eps: part.norm.map_or(0.0, |n| n.eps),
                rope: part.rope.is_some() as u32,
            };
            if let Some((rope, angles)) = part.rope {
                let table = &self.program.ropes[rope];
                args.angles = self.buffer(angles);
                args.half = table.inv_freq.len() as u32;
                args.adjacent = (table.pairs == RopePairs::Adjacent) as u32;
            }
        }
        args
    }

    fn pack(&self, src: BufferId, pack: PackId) -> Result<(), CudaError> {
        self.norm(src, None, None, None, &[pack])
    }

    fn element(&self, op: ElementOp, buf: BufferId, args: ElementArgs) -> Result<(), CudaError> {
        let width = self.width(buf);
        let (x, n) = (self.buffer(buf), self.rows * width);
        self.element_at(op, n, ElementArgs { x, width: width as u32, ..args })
    }

    pub(crate) fn element_at(
        &self,
        op: ElementOp,
        n: usize,
        args: ElementArgs,
    ) -> Result<(), CudaError> {
        let args = ElementArgs { op: op as u32, n: n as u64, ..args };
        self.launch(Kernel::Element, [n.div_ceil(256), 1, 1], 256, 0, args)
    }

    fn glu(
        &self,
        activation: forebay_models::Activation,
        gate: Ptr,
        up: Ptr,
        n: usize,
    ) -> Result<(), CudaError> {
        let (kind, alpha, limit) = kind_of(activation)?;
        let args = ElementArgs { x: gate, y: up, kind, alpha, limit, ..Default::default() };
        self.element_at(ElementOp::Glu, n, args)
    }

    fn conv(&self, layer: RecurrentId, src: BufferId, dst: BufferId) -> Result<(), CudaError> {
        let r = &self.program.recurrent[layer.0];
        let channels = self.width(src);
        let args = ConvArgs {
            x: self.buffer(src),
            taps: self.map.vectors[r.taps.0],
            state: self.map.states[layer.0],
            out: self.buffer(dst),
            spans: self.inputs.spans(),
            slot_floats: state_floats(r).iter().sum::<usize>() as u64,
            channels: channels as u32,
            width: r.conv_width as u32,
        };
        self.launch(Kernel::ConvSilu, [channels.div_ceil(256), self.counts.spans, 1], 256, 0, args)
    }

    fn delta(&self, layer: RecurrentId, buffers: [BufferId; 4]) -> Result<(), CudaError> {
        let r = &self.program.recurrent[layer.0];
        let [qkv, a, b, out] = buffers.map(|b| self.buffer(b));
        let floats = state_floats(r);
        let args = DeltaArgs {
            qkv,
            a,
            b,
            neg_exp_a: self.map.vectors[r.neg_exp_a.0],
            dt_bias: self.map.vectors[r.dt_bias.0],
            state: self.map.states[layer.0],
            out,
            spans: self.inputs.spans(),
            slot_floats: floats.iter().sum::<usize>() as u64,
            offset: floats[0] as u64,
            k_heads: r.n_k_heads as u32,
            v_heads: r.n_v_heads as u32,
            k_dim: r.k_dim as u32,
            v_dim: r.v_dim as u32,
            tiled: r.tiled as u32,
            channels: self.width(buffers[0]) as u32,
            inv_sqrt_k: 1.0 / (r.k_dim as f32).sqrt(),
            pad: 0,
        };
        self.launch(Kernel::DeltaRule, [r.n_v_heads, self.counts.spans, 1], 128, 8 * r.k_dim, args)
    }
}

fn kind_of(a: forebay_models::Activation) -> Result<(u32, f32, f32), CudaError> {
    activation(a).ok_or_else(|| CudaError::Unsupported(format!("activation {a:?}")))
}
