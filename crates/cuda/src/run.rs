//! Steps to launches: addresses, grid sizes, and which kernel for how many rows.

use forebay_cpu::attention::KvLayout;
use forebay_models::spec::{RopePairs, Score};
use forebay_program::{
    AttentionOp, BufferId, Factor, GateFunction, KvId, MoeId, NormParams, Operand, PackId, Program,
    RecurrentId, VectorId,
};

use crate::args::*;
use crate::driver::{Driver, Kernel, Launch, Plain, bytes_of};
use crate::error::CudaError;
use crate::inputs::{Counts, InputsMap};
use crate::layout::Width;
use crate::load::Placed;
use crate::map::{
    CudaShape, FEW_ROWS, Map, PackMem, TILE_N, rows_of_tile, state_floats, tile_queries,
    window_blocks,
};
use crate::steps::{Linear, Part, Step};

/// Output features of a tile of the matrix kernel for many rows.
const TILE_M: usize = 64;

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
            Step::Norm { src, add, norm, dst, packs } => {
                self.norm(self.buffer(*src), self.width(*src), *add, *norm, *dst, packs)
            }
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

    /// Rows at `src`, `[rows, width]`.
    fn norm(
        &self,
        src: Ptr,
        width: usize,
        add: Option<BufferId>,
        norm: Option<NormParams>,
        dst: Option<BufferId>,
        packs: &[PackId],
    ) -> Result<(), CudaError> {
        let packs: Vec<PackMem> = packs.iter().map(|p| self.map.packs[p.0]).collect();
        let dst = dst.map_or(0, |b| self.buffer(b));
        self.norm_at(self.rows, src, width, add.map_or(0, |b| self.buffer(b)), norm, dst, &packs)
    }

    #[allow(clippy::too_many_arguments)]
    pub(crate) fn norm_at(
        &self,
        rows: usize,
        src: Ptr,
        width: usize,
        add: Ptr,
        norm: Option<NormParams>,
        dst: Ptr,
        packs: &[PackMem],
    ) -> Result<(), CudaError> {
        let mut args = NormArgs {
            src,
            add,
            sum: src,
            weight: self.vector(norm.and_then(|n| n.weight)),
            dst,
            width: width as u32,
            norm: norm.is_some() as u32,
            eps: norm.map_or(0.0, |n| n.eps),
            ..Default::default()
        };
        for (i, p) in packs.iter().enumerate() {
            (args.codes[i], args.meta[i]) = (p.codes, p.meta);
            (args.row_codes[i], args.row_meta[i]) = (p.row_codes, p.row_meta);
        }
        let threads = if rows <= FEW_ROWS { 1024 } else { 256 };
        self.launch(Kernel::NormPack, [rows, 1, 1], threads, 4 * width, args)
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

    pub(crate) fn linears(&self, list: &[Linear]) -> Result<(), CudaError> {
        let mut packed: Vec<(PackId, Vec<&Linear>)> = Vec::new();
        for linear in list {
            match linear.op.src {
                Operand::F32(src) => self.float_linear(linear, src)?,
                Operand::Packed(p) => {
                    match packed.iter_mut().find(|(id, l)| *id == p && l.len() < 4) {
                        Some((_, list)) => list.push(linear),
                        None => packed.push((p, vec![linear])),
                    }
                }
            }
        }
        for (pack, list) in packed {
            let acts = self.acts(&self.map.packs[pack.0]);
            let jobs: Vec<GemvJob> = list.iter().map(|l| self.job(l)).collect();
            self.products(&jobs, acts, self.rows)?;
        }
        Ok(())
    }

    pub(crate) fn job(&self, l: &Linear) -> GemvJob {
        let w = &self.map.trunk[l.op.weight.0];
        let dst = l.add_into.unwrap_or(l.op.dst);
        GemvJob {
            w: w.args,
            bias: self.vector(l.op.bias),
            out: self.buffer(dst),
            stride: w.args.rows,
            add: l.add_into.is_some() as u32,
            variant: w.variant,
            first_block: 0,
        }
    }

    /// Products of packed rows with up to four matrices.
    pub(crate) fn products(
        &self,
        jobs: &[GemvJob],
        acts: Acts,
        rows: usize,
    ) -> Result<(), CudaError> {
        if rows > FEW_ROWS {
            for job in jobs {
                let args = GemmArgs {
                    w: job.w,
                    acts,
                    bias: job.bias,
                    out: job.out,
                    rows: rows as u32,
                    features: job.w.rows,
                    stride: job.stride,
                    divisor: 1,
                    add: job.add,
                    variant: job.variant,
                    ..Default::default()
                };
                self.gemm(args, rows.div_ceil(TILE_N))?;
            }
            return Ok(());
        }
        if rows == 1 {
            return self.one_row(jobs, GemvArgs { acts, ..Default::default() });
        }
        let mut args =
            GemvArgs { acts, n_jobs: jobs.len() as u32, rows: rows as u32, ..Default::default() };
        let mut blocks = 0;
        for (to, job) in args.jobs.iter_mut().zip(jobs) {
            *to = GemvJob { first_block: blocks, ..*job };
            blocks += job.w.rows.div_ceil(8);
        }
        self.launch(Kernel::Gemv2, [blocks as usize, rows.div_ceil(2), 1], 256, 0, args)
    }

    fn gemm(&self, args: GemmArgs, tiles: usize) -> Result<(), CudaError> {
        let grid = [(args.features as usize).div_ceil(TILE_M), tiles, 1];
        self.launch(Kernel::Gemm, grid, 256, 8 * TILE_M * TILE_N * 4, args)
    }

    fn float_linear(&self, l: &Linear, src: BufferId) -> Result<(), CudaError> {
        let w = &self.map.trunk[l.op.weight.0];
        let args = FloatJob {
            w: w.args,
            x: self.buffer(src),
            bias: self.vector(l.op.bias),
            out: self.buffer(l.add_into.unwrap_or(l.op.dst)),
            x_stride: w.args.cols,
            stride: w.args.rows,
            add: l.add_into.is_some() as u32,
            divisor: 1,
            rows: self.rows as u32,
            features: w.args.rows,
            ..Default::default()
        };
        self.float(args)
    }

    pub(crate) fn float(&self, args: FloatJob) -> Result<(), CudaError> {
        let (rows, blocks) = (args.rows as usize, (args.features as usize).div_ceil(8));
        let cols = args.w.cols as usize;
        let few = rows <= FEW_ROWS && args.ids == 0 && args.divisor == 1 && args.features <= 1024;
        let whole = args.w.width == Width::F32 as u32 && cols.is_multiple_of(4) && cols <= 5120;
        if few && whole {
            let grid = [args.features as usize, rows, 1];
            return self.launch(Kernel::FloatRow, grid, 256, 8 * cols, args);
        }
        match rows == 1 || args.ids != 0 {
            true => self.launch(Kernel::Float1, [blocks, rows, 1], 128, 0, args),
            false => self.launch(Kernel::Float8, [blocks, rows.div_ceil(8), 1], 128, 0, args),
        }
    }

    fn attention(
        &self,
        op: &AttentionOp,
        gate: Option<BufferId>,
        pack: Option<PackId>,
    ) -> Result<(), CudaError> {
        let args = self.attend_args(op)?;
        let (dim, blocks) = (args.dim as usize, args.max_blocks as usize);
        let shared = self.attend_shared(&args);
        if self.rows <= FEW_ROWS && shared <= self.driver.info().shared_bytes as usize {
            let grid = [blocks, args.n_kv_heads as usize, self.rows];
            self.launch(Kernel::AttendBlocks, grid, 256, shared, args)?;
            return self.merge(op, args, gate, pack);
        }
        let kernel = match dim {
            ..=64 => Kernel::AttendTile64,
            65..=128 => Kernel::AttendTile128,
            129..=256 => Kernel::AttendTile256,
            _ => Kernel::AttendTile512,
        };
        let rows_of_tile = rows_of_tile(self.program, op);
        let tiles =
            self.counts.tiles.iter().find(|t| t.0 == rows_of_tile).expect("of every attention").1;
        let queries = tile_queries(dim);
        let floats = 64 * dim + queries * dim + 32 * queries + 4 * queries + 64;
        let grid = [tiles, args.n_kv_heads as usize, 1];
        self.launch(kernel, grid, 256, 4 * floats, args)?;
        if let Some(gate) = gate {
            let y = self.buffer(gate);
            self.element(ElementOp::Sigmoid, op.dst, ElementArgs { y, ..Default::default() })?;
        }
        match pack {
            Some(p) => self.pack(op.dst, p),
            None => Ok(()),
        }
    }

    pub(crate) fn attend_args(&self, op: &AttentionOp) -> Result<AttendArgs, CudaError> {
        let layer = &self.program.kv_layers[op.kv.0];
        let dim = layer.head_dim;
        if !dim.is_multiple_of(16) {
            return Err(CudaError::Unsupported(format!(
                "heads {dim} wide, which is no multiple of 16"
            )));
        }
        let layout = KvLayout::new(layer.n_kv_heads, dim, self.shape.kv_type);
        Ok(AttendArgs {
            q: self.buffer(op.q),
            out: self.buffer(op.dst),
            sinks: self.vector(op.sinks),
            pages: self.map.kv[op.kv.0],
            tables: self.inputs.table(layer.class),
            positions: self.inputs.positions(),
            row_sequence: self.inputs.row_sequence(),
            tiles: self.inputs.tiles(rows_of_tile(self.program, op)),
            parts: self.map.parts,
            part_ml: self.map.part_ml,
            page_bytes: layout.page_bytes() as u64,
            rows: self.rows as u32,
            n_heads: op.n_heads as u32,
            n_kv_heads: layer.n_kv_heads as u32,
            dim: dim as u32,
            table_len: self.inputs.table_len as u32,
            kv_type: self.shape.kv_type as u32,
            window: op.window.unwrap_or(0) as u32,
            max_blocks: window_blocks(op.window, self.blocks) as u32,
            scale: op.scale,
            ..Default::default()
        })
    }

    /// Shared memory of attention over blocks, as `waiting` in `attention.cu` lays it out: queries and room for a key and
    /// a value, probabilities, and a head of a page.
    pub(crate) fn attend_shared(&self, args: &AttendArgs) -> usize {
        let (dim, group) = (args.dim as usize, (args.n_heads / args.n_kv_heads) as usize);
        4 * (group + 2) * (dim + 4) + 128 * group + 64 * dim * self.shape.kv_type.bytes() + 256
    }

    /// The second half of attention for few rows.
    pub(crate) fn merge(
        &self,
        op: &AttentionOp,
        mut args: AttendArgs,
        gate: Option<BufferId>,
        pack: Option<PackId>,
    ) -> Result<(), CudaError> {
        let (dim, blocks) = (args.dim as usize, args.max_blocks as usize);
        // A block of 32 outputs is one head's: packed where it is made.
        let packs_here = dim.is_multiple_of(32);
        if let (Some(p), true) = (pack, packs_here) {
            let p = &self.map.packs[p.0];
            (args.codes, args.meta) = (p.codes, p.meta);
            (args.row_codes, args.row_meta) = (p.row_codes, p.row_meta);
        }
        args.gate = gate.map_or(0, |g| self.buffer(g));
        let grid = [op.n_heads, self.rows, 1];
        let shared = 4 * 4 * blocks.next_multiple_of(16);
        self.launch(Kernel::AttendMerge, grid, dim.next_multiple_of(32), shared, args)?;
        match (pack, packs_here) {
            (Some(p), false) => self.pack(op.dst, p),
            _ => Ok(()),
        }
    }

    pub(crate) fn pack(&self, src: BufferId, pack: PackId) -> Result<(), CudaError> {
        self.norm(self.buffer(src), self.width(src), None, None, None, &[pack])
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

    fn route(&self, logits: BufferId, id: MoeId) -> Result<(), CudaError> {
        let args = self.route_args(logits, id)?;
        self.launch(Kernel::Route, [self.rows, 1, 1], 32, 0, args)
    }

    pub(crate) fn route_args(&self, logits: BufferId, id: MoeId) -> Result<RouteArgs, CudaError> {
        let moe = &self.program.moes[id.0];
        let all = match moe.score {
            Score::SoftmaxSelected => 0,
            Score::SoftmaxAll => 1,
            other => return Err(CudaError::Unsupported(format!("router score {other:?}"))),
        };
        Ok(RouteArgs {
            logits: self.buffer(logits),
            expert_scale: self.vector(moe.expert_scale),
            ids: self.map.ids,
            weights: self.map.weights,
            fault: self.map.fault,
            rows: self.rows as u32,
            experts: moe.n_experts as u32,
            top_k: moe.top_k as u32,
            all,
            layer: moe.layer as u32,
            pad: 0,
        })
    }

    /// The chosen experts; with a route their first kernel makes the choice, which [`Run::chooses`] must allow.
    pub(crate) fn experts(
        &self,
        id: MoeId,
        dst: BufferId,
        add: bool,
        route: Option<RouteArgs>,
    ) -> Result<(), CudaError> {
        let moe = &self.program.moes[id.0];
        let pairs = self.rows * moe.top_k;
        let (d, inner) = (moe.hidden_size, moe.intermediate);
        let [gate, up, down] = &self.map.experts[id.0];
        let biases = self.map.expert_biases[id.0];
        let few = self.rows <= FEW_ROWS && moe.top_k <= 8;
        assert!(route.is_none() || few, "the choice is made by kernels for few rows");
        let (kind, alpha, limit) = kind_of(moe.activation)?;
        let packed = moe.hidden_order.is_some();
        let hidden =
            PackMem { row_codes: inner as u64, row_meta: inner as u64 / 2, ..self.map.hidden };
        if !few && (packed || matches!(moe.input, Operand::Packed(_))) {
            let args = SortArgs {
                ids: self.map.ids,
                sorted: self.map.sorted,
                tiles: self.map.tiles,
                n_tiles: self.map.n_tiles,
                pairs: pairs as u32,
                experts: moe.n_experts as u32,
                tile: TILE_N as u32,
                pad: 0,
            };
            self.launch(Kernel::SortPairs, [1, 1, 1], 1024, 4 * (2 * moe.n_experts + 1), args)?;
        }
        let mut is_packed = false;
        match moe.input {
            Operand::Packed(p) if few => {
                let mut args = ExpertUpArgs {
                    gate: gate.args,
                    up: up.args,
                    acts: self.acts(&self.map.packs[p.0]),
                    gate_bias: biases[0],
                    up_bias: biases[1],
                    ids: self.map.ids,
                    row_codes: hidden.row_codes,
                    row_meta: hidden.row_meta,
                    inter: inner as u32,
                    top_k: moe.top_k as u32,
                    activation: kind,
                    variant_gate: gate.variant,
                    variant_up: up.variant,
                    alpha,
                    limit,
                    ..Default::default()
                };
                if let Some(route) = route {
                    args.logits = route.logits;
                    args.expert_scale = route.expert_scale;
                    args.weights = route.weights;
                    args.fault = route.fault;
                    (args.experts, args.all, args.layer) = (route.experts, route.all, route.layer);
                    args.down = down.args;
                }
                is_packed = packed;
                match packed {
                    true => (args.codes, args.meta) = (hidden.codes, hidden.meta),
                    false => args.hidden = self.map.gate,
                }
                let shared = up_shared(gate.args.blocks as usize, moe.n_experts);
                let grid = [inner.div_ceil(32), pairs, 1];
                self.launch(Kernel::ExpertUp, grid, 256, shared, args)?;
            }
            Operand::Packed(p) => {
                let acts = self.acts(&self.map.packs[p.0]);
                for (w, bias, out) in
                    [(gate, biases[0], self.map.gate), (up, biases[1], self.map.up)]
                {
                    self.expert_gemm(id, w, acts, bias, out, moe.top_k)?;
                }
                self.glu(moe.activation, self.map.gate, self.map.up, pairs * inner)?;
            }
            Operand::F32(x) => {
                for (w, bias, out) in
                    [(gate, biases[0], self.map.gate), (up, biases[1], self.map.up)]
                {
                    self.float(FloatJob {
                        w: w.args,
                        x: self.buffer(x),
                        bias,
                        out,
                        ids: self.map.ids,
                        x_stride: d as u32,
                        stride: inner as u32,
                        divisor: moe.top_k as u32,
                        rows: pairs as u32,
                        features: inner as u32,
                        ..Default::default()
                    })?;
                }
                self.glu(moe.activation, self.map.gate, self.map.up, pairs * inner)?;
            }
        }
        if packed && !is_packed {
            self.norm_at(pairs, self.map.gate, inner, 0, None, 0, &[hidden])?;
        }
        let parts = self.buffer(moe.out);
        match (packed, few) {
            (true, true) => {
                // Rows of few columns are too short to keep memory busy: two at a time.
                let passes = if inner <= 1024 { 2 } else { 1 };
                let groups = 8 / moe.top_k;
                let outs = 4 * passes * groups;
                let shared = 48 * (inner / 32) * (8 / groups) + 128;
                let args = ExpertDownArgs {
                    down: down.args,
                    acts: self.acts(&hidden),
                    bias: biases[2],
                    ids: self.map.ids,
                    weights: self.map.weights,
                    out: self.buffer(dst),
                    d: d as u32,
                    top_k: moe.top_k as u32,
                    add: add as u32,
                    variant: down.variant,
                    passes: passes as u32,
                    pad: 0,
                };
                let grid = [d.div_ceil(outs), self.rows, 1];
                return self.launch(Kernel::ExpertDown, grid, 256, shared, args);
            }
            (true, false) => self.expert_gemm(id, down, self.acts(&hidden), biases[2], parts, 1)?,
            (false, _) => self.float(FloatJob {
                w: down.args,
                x: self.map.gate,
                bias: biases[2],
                out: parts,
                ids: self.map.ids,
                x_stride: inner as u32,
                stride: d as u32,
                divisor: 1,
                rows: pairs as u32,
                features: d as u32,
                ..Default::default()
            })?,
        }
        let args = CombineArgs {
            parts,
            weights: self.map.weights,
            out: self.buffer(dst),
            d: d as u32,
            top_k: moe.top_k as u32,
            add: add as u32,
            pad: 0,
        };
        self.launch(Kernel::Combine, [d.div_ceil(256), self.rows, 1], 256, 0, args)
    }

    /// Products of the rows of all experts, sorted by expert; output row = pair.
    fn expert_gemm(
        &self,
        id: MoeId,
        w: &Placed,
        acts: Acts,
        bias: Ptr,
        out: Ptr,
        divisor: usize,
    ) -> Result<(), CudaError> {
        let moe = &self.program.moes[id.0];
        let pairs = self.rows * moe.top_k;
        let features = w.args.rows as usize / moe.n_experts;
        // Every expert has at most one tile that is not full.
        let tiles = pairs / TILE_N + moe.n_experts.min(pairs);
        let args = GemmArgs {
            w: w.args,
            acts,
            bias,
            out,
            tiles: self.map.tiles,
            n_tiles: self.map.n_tiles,
            pairs: self.map.sorted,
            rows: pairs as u32,
            features: features as u32,
            stride: features as u32,
            divisor: divisor as u32,
            add: 0,
            variant: w.variant,
        };
        self.gemm(args, tiles)
    }
}

fn kind_of(a: forebay_models::Activation) -> Result<(u32, f32, f32), CudaError> {
    activation(a).ok_or_else(|| CudaError::Unsupported(format!("activation {a:?}")))
}

/// Shared memory of the experts' first product: a row's planes, logits and ranks.
pub(crate) fn up_shared(blocks: usize, experts: usize) -> usize {
    48 * blocks + 128 + 8 * experts.next_multiple_of(4)
}
