//! Routed layers: the choice, the chosen experts' products, and their weighted sum.

use forebay_models::spec::Score;
use forebay_program::{BufferId, Moe, MoeId, Operand};

use super::{NormRows, Run, kind_of};
use crate::args::*;
use crate::driver::Kernel;
use crate::error::CudaError;
use crate::layout::Width;
use crate::load::Placed;
use crate::map::{FEW_ROWS, PackMem, TILE_N};

impl Run<'_> {
    pub(super) fn route(&self, logits: BufferId, id: MoeId) -> Result<(), CudaError> {
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

    /// The chosen experts; with a route their first kernel makes the choice, which only those for few rows do,
    /// and the last one asks for weights that come next.
    pub(crate) fn experts(
        &self,
        id: MoeId,
        dst: BufferId,
        add: bool,
        route: Option<(RouteArgs, Ahead)>,
    ) -> Result<(), CudaError> {
        let moe = &self.program.moes[id.0];
        let (route, ahead) = route.unzip();
        let few = self.rows <= FEW_ROWS && moe.top_k <= 8;
        assert!(route.is_none() || few, "the choice is made by kernels for few rows");
        let packed = moe.hidden_order.is_some();
        if !few && (packed || matches!(moe.input, Operand::Packed(_))) {
            self.sort(moe)?;
        }
        let inner = moe.intermediate;
        let hidden =
            PackMem { row_codes: inner as u64, row_meta: inner as u64 / 2, ..self.map.hidden };
        match moe.input {
            Operand::Packed(p) if few => {
                let acts = self.acts(&self.map.packs[p.0]);
                self.few_up(id, acts, &hidden, route)?;
            }
            _ => {
                self.gate_and_up(id)?;
                if packed {
                    let pairs = self.rows * moe.top_k;
                    let (src, packs) = (self.map.gate, std::slice::from_ref(&hidden));
                    let (add, norm, dst) = (0, None, 0);
                    self.norm_rows(NormRows {
                        rows: pairs,
                        src,
                        width: inner,
                        add,
                        norm,
                        dst,
                        packs,
                    })?;
                }
            }
        }
        match packed && few {
            true => self.few_down(id, &hidden, dst, add, ahead.unwrap_or_default()),
            false => self.down_and_sum(id, &hidden, dst, add),
        }
    }

    /// Sorts pairs of rows and ranks by expert.
    fn sort(&self, moe: &Moe) -> Result<(), CudaError> {
        let args = SortArgs {
            ids: self.map.ids,
            sorted: self.map.sorted,
            tiles: self.map.tiles,
            n_tiles: self.map.n_tiles,
            pairs: (self.rows * moe.top_k) as u32,
            experts: moe.n_experts as u32,
            tile: TILE_N as u32,
            pad: 0,
        };
        self.launch(Kernel::SortPairs, [1, 1, 1], 1024, 4 * (2 * moe.n_experts + 1), args)
    }

    /// Gate, up and activation of few rows: into `hidden`, or as floats where the down product takes those.
    fn few_up(
        &self,
        id: MoeId,
        acts: Acts,
        hidden: &PackMem,
        route: Option<RouteArgs>,
    ) -> Result<(), CudaError> {
        let moe = &self.program.moes[id.0];
        let [gate, up, down] = &self.map.experts[id.0];
        let biases = self.map.expert_biases[id.0];
        let (kind, alpha, limit) = kind_of(moe.activation)?;
        let mut args = ExpertUpArgs {
            gate: gate.args,
            up: up.args,
            acts,
            gate_bias: biases[0],
            up_bias: biases[1],
            ids: self.map.ids,
            row_codes: hidden.row_codes,
            row_meta: hidden.row_meta,
            inter: moe.intermediate as u32,
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
            let halves = if down.args.width == Width::Eight as u32 { 2 } else { 1 };
            args.down_bytes = (moe.hidden_size * down.args.blocks as usize * 16 * halves) as u32;
            args.down_share = args
                .down_bytes
                .div_ceil(moe.intermediate.div_ceil(32) as u32)
                .next_multiple_of(128);
        }
        match moe.hidden_order {
            Some(_) => (args.codes, args.meta) = (hidden.codes, hidden.meta),
            None => args.hidden = self.map.gate,
        }
        let shared = up_shared(gate.args.blocks as usize, moe.n_experts);
        let grid = [moe.intermediate.div_ceil(32), self.rows * moe.top_k, 1];
        self.launch(Kernel::ExpertUp, grid, 512, shared, args)
    }

    /// Gate, up and activation of many rows or of rows of floats, into the gate's place.
    fn gate_and_up(&self, id: MoeId) -> Result<(), CudaError> {
        let moe = &self.program.moes[id.0];
        let [gate, up, _] = &self.map.experts[id.0];
        let biases = self.map.expert_biases[id.0];
        let (pairs, inner) = (self.rows * moe.top_k, moe.intermediate);
        for (w, bias, out) in [(gate, biases[0], self.map.gate), (up, biases[1], self.map.up)] {
            match moe.input {
                Operand::Packed(p) => {
                    let acts = self.acts(&self.map.packs[p.0]);
                    self.expert_gemm(id, w, acts, bias, out, moe.top_k)?;
                }
                Operand::F32(x) => self.float(FloatJob {
                    w: w.args,
                    x: self.buffer(x),
                    bias,
                    out,
                    ids: self.map.ids,
                    x_stride: moe.hidden_size as u32,
                    stride: inner as u32,
                    divisor: moe.top_k as u32,
                    rows: pairs as u32,
                    features: inner as u32,
                    ..Default::default()
                })?,
            }
        }
        self.glu(moe.activation, self.map.gate, self.map.up, pairs * inner)
    }

    /// The down product of few rows, summed where it is made.
    fn few_down(
        &self,
        id: MoeId,
        hidden: &PackMem,
        dst: BufferId,
        add: bool,
        ahead: Ahead,
    ) -> Result<(), CudaError> {
        let moe = &self.program.moes[id.0];
        let down = &self.map.experts[id.0][2];
        let (d, inner) = (moe.hidden_size, moe.intermediate);
        // Of 16 warps, a power of two for each of the chosen experts, four outputs to a warp.
        let shift = 4 - moe.top_k.next_power_of_two().ilog2();
        let shared = 48 * (inner / 32) * (16 >> shift) + 128;
        let args = ExpertDownArgs {
            down: down.args,
            acts: self.acts(hidden),
            bias: self.map.expert_biases[id.0][2],
            ids: self.map.ids,
            weights: self.map.weights,
            out: self.buffer(dst),
            ahead,
            d: d as u32,
            top_k: moe.top_k as u32,
            add: add as u32,
            variant: down.variant,
            shift,
            pad: 0,
        };
        self.launch(Kernel::ExpertDown, [d.div_ceil(4 << shift), self.rows, 1], 512, shared, args)
    }

    /// The down product of every pair, then the weighted sum of each row's.
    fn down_and_sum(
        &self,
        id: MoeId,
        hidden: &PackMem,
        dst: BufferId,
        add: bool,
    ) -> Result<(), CudaError> {
        let moe = &self.program.moes[id.0];
        let down = &self.map.experts[id.0][2];
        let bias = self.map.expert_biases[id.0][2];
        let (d, inner, parts) = (moe.hidden_size, moe.intermediate, self.buffer(moe.out));
        match moe.hidden_order {
            Some(_) => self.expert_gemm(id, down, self.acts(hidden), bias, parts, 1)?,
            None => self.float(FloatJob {
                w: down.args,
                x: self.map.gate,
                bias,
                out: parts,
                ids: self.map.ids,
                x_stride: inner as u32,
                stride: d as u32,
                divisor: 1,
                rows: (self.rows * moe.top_k) as u32,
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

/// Shared memory of the experts' first product: a row's planes, logits, ranks and keys.
pub(crate) fn up_shared(blocks: usize, experts: usize) -> usize {
    48 * blocks + 128 + 12 * experts.next_multiple_of(4)
}
