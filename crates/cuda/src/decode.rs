//! One row: steps that depend on each other become one kernel where every block can afford to repeat what the step in front does.
//!
//! With one row, a norm, the turning of heads and the choice of experts are some thousand operations each, less than the
//! two or three microseconds that a dependent kernel costs. So every block of a product norms and packs the row for itself, every
//! block of attention turns the heads that it reads, every block of the experts makes the choice. Sums keep their order,
//! whoever makes them. Steps that fit no pattern run one by one ([`Run::step`]).
//! Not here: fusing that holds for any number of rows ([`crate::steps`]).

use forebay_program::{AttentionOp, BufferId, KvId, NormParams, Operand, PackId};

use crate::args::*;
use crate::driver::Kernel;
use crate::error::CudaError;
use crate::layout::Width;
use crate::run::{Run, up_shared};
use crate::steps::{Linear, Part, Step};

/// Most bytes of weights that are brought into the second-level cache two kernels before they are read.
const AHEAD_BYTES: u64 = 8 << 20;
/// Outputs from which on a warp takes several, so that a block brings its activations less often.
const MANY_OUTPUTS: usize = 32768;

impl Run<'_> {
    /// Runs the first few of `steps` together; says how many, or 0 where they fit no pattern.
    pub(crate) fn together(&self, steps: &[Step]) -> Result<usize, CudaError> {
        if self.rows != 1 {
            return Ok(0);
        }
        match steps {
            [
                Step::Norm { src, add: None, norm: Some(norm), dst: None, packs },
                Step::Linears(list),
                rest @ ..,
            ] if packs.len() == 1 && self.only_read_by(packs[0], list, rest) => {
                self.norm_and_products(*src, *norm, list)
            }
            [
                Step::Norm { src, add: None, norm: Some(norm), dst: Some(dst), packs },
                Step::Linears(list),
                ..,
            ] if src != dst => match list.as_slice() {
                [router] if router.op.src == Operand::F32(*dst) => {
                    self.norm_and_router(*src, *norm, *dst, packs, router)
                }
                _ => Ok(0),
            },
            [Step::Heads { kv, parts }, Step::Attention { op, gate, pack }, rest @ ..]
                if op.kv == *kv
                    && parts[0].is_some_and(|q| q.buf == op.q)
                    && overwritten(op.q, rest) =>
            {
                self.heads_and_attention(*kv, parts, op, *gate, *pack, self.ahead(rest))
            }
            [Step::Route { logits, moe }, Step::Experts { moe: of, dst, add }, rest @ ..]
                if moe == of =>
            {
                let m = &self.program.moes[moe.0];
                let packed = matches!(m.input, Operand::Packed(_)) && m.hidden_order.is_some();
                let blocks = self.map.experts[moe.0][0].args.blocks as usize;
                // Every block compares all pairs of experts.
                if !packed
                    || m.top_k > 8
                    || m.n_experts > 512
                    || !self.fits(up_shared(blocks, m.n_experts))
                {
                    return Ok(0);
                }
                let route = self.route_args(*logits, *moe)?;
                self.experts(*moe, *dst, *add, Some((route, self.ahead(rest))))?;
                Ok(2)
            }
            _ => Ok(0),
        }
    }

    /// Whether all products of `list` read `pack`, and nothing after them does before it is written again.
    fn only_read_by(&self, pack: PackId, list: &[Linear], rest: &[Step]) -> bool {
        let reads = |list: &[Linear]| list.iter().any(|l| l.op.src == Operand::Packed(pack));
        if !list.iter().all(|l| l.op.src == Operand::Packed(pack)) {
            return false;
        }
        for step in rest {
            match step {
                Step::Linears(list) if reads(list) => return false,
                Step::Experts { moe, .. }
                    if self.program.moes[moe.0].input == Operand::Packed(pack) =>
                {
                    return false;
                }
                Step::Norm { packs, .. } if packs.contains(&pack) => return true,
                Step::Attention { pack: Some(p), .. } if *p == pack => return true,
                _ => {}
            }
        }
        true
    }

    /// Weights that the next products of `rest` read, to be brought into the second-level cache before; none where they are
    /// many: then they come too early.
    fn ahead(&self, rest: &[Step]) -> Ahead {
        let (mut ahead, mut left) = (Ahead::default(), AHEAD_BYTES);
        let next = rest.iter().take(3).find_map(|s| match s {
            Step::Linears(list) => Some(list),
            _ => None,
        });
        for (i, linear) in next.into_iter().flatten().take(3).enumerate() {
            let w = &self.map.trunk[linear.op.weight.0];
            let bytes = w.row_bytes * u64::from(w.args.rows);
            left = match left.checked_sub(bytes) {
                Some(left) => left,
                None => return Ahead::default(),
            };
            (ahead.at[i], ahead.bytes[i]) = (w.args.codes, bytes as u32);
        }
        ahead
    }

    fn fits(&self, shared: usize) -> bool {
        // Some hundred bytes are the kernels' own.
        shared + 1024 <= self.driver.info().shared_bytes as usize
    }

    /// Products with one row: of `args.acts`, or of `args.x` after its norm.
    pub(crate) fn one_row(&self, jobs: &[GemvJob], mut args: GemvArgs) -> Result<(), CudaError> {
        let outputs: usize = jobs.iter().map(|j| j.w.rows as usize).sum();
        // A norm is repeated by every block, so there are fewer of them.
        let (threads, passes) = match args.x {
            _ if outputs > MANY_OUTPUTS => (256, 4),
            0 => (128, 1),
            _ => (256, 2),
        };
        args.rows = 1;
        args.passes = passes;
        args.n_jobs = jobs.len() as u32;
        let mut blocks = 0;
        for (to, job) in args.jobs.iter_mut().zip(jobs) {
            *to = GemvJob { first_block: blocks, ..*job };
            blocks += job.w.rows.div_ceil(threads as u32 / 32 * passes);
        }
        let most = jobs.iter().map(|j| j.w.blocks as usize).max().unwrap_or(0);
        let shared = 128 + if args.x == 0 { 48 * most } else { 304 * most };
        self.launch(Kernel::Gemv1, [blocks as usize, 1, 1], threads, shared, args)
    }

    fn norm_and_products(
        &self,
        src: BufferId,
        norm: NormParams,
        list: &[Linear],
    ) -> Result<usize, CudaError> {
        let width = self.width(src);
        if !width.is_multiple_of(32) || list.len() > 4 || !self.fits(304 * width / 32) {
            return Ok(0);
        }
        let jobs: Vec<GemvJob> = list.iter().map(|l| self.job(l)).collect();
        let args = GemvArgs {
            x: self.buffer(src),
            weight: self.vector(norm.weight),
            eps: norm.eps,
            ..Default::default()
        };
        self.one_row(&jobs, args)?;
        Ok(2)
    }

    fn norm_and_router(
        &self,
        src: BufferId,
        norm: NormParams,
        dst: BufferId,
        packs: &[PackId],
        router: &Linear,
    ) -> Result<usize, CudaError> {
        let (width, w) = (self.width(src), &self.map.trunk[router.op.weight.0].args);
        let plain = w.width == Width::F32 as u32 && width.is_multiple_of(32) && w.rows <= 1024;
        if !plain || router.add_into.is_some() || !self.fits(12 * width) {
            return Ok(0);
        }
        let mut args = RouterArgs {
            w: *w,
            x: self.buffer(src),
            weight: self.vector(norm.weight),
            bias: self.vector(router.op.bias),
            out: self.buffer(router.op.dst),
            dst: self.buffer(dst),
            width: width as u32,
            features: w.rows,
            eps: norm.eps,
            ..Default::default()
        };
        for (i, p) in packs.iter().enumerate() {
            let p = &self.map.packs[p.0];
            (args.codes[i], args.meta[i]) = (p.codes, p.meta);
        }
        self.launch(Kernel::Router, [w.rows as usize + 1, 1, 1], 256, 12 * width, args)?;
        Ok(2)
    }

    fn heads_and_attention(
        &self,
        kv: KvId,
        parts: &[Option<Part>; 3],
        op: &AttentionOp,
        gate: Option<BufferId>,
        pack: Option<PackId>,
        ahead: Ahead,
    ) -> Result<usize, CudaError> {
        let a = self.attend_args(op)?;
        let shared = self.attend_shared(&a);
        if !self.fits(shared) {
            return Ok(0);
        }
        let heads = self.heads_args(kv, parts);
        let args = AttendRowArgs {
            a,
            parts: heads.parts,
            angles: heads.angles,
            ahead,
            half: heads.half,
            adjacent: heads.adjacent,
        };
        let grid = [a.max_blocks as usize, a.n_kv_heads as usize, 1];
        self.launch(Kernel::AttendRow, grid, 256, shared, args)?;
        self.merge(op, a, gate, pack)?;
        Ok(2)
    }
}

/// Whether nothing reads `buf` before it is written again.
fn overwritten(buf: BufferId, rest: &[Step]) -> bool {
    for step in rest {
        match step {
            Step::Linears(list) => {
                if list.iter().any(|l| l.op.src == Operand::F32(buf) || l.add_into == Some(buf)) {
                    return false;
                }
                if list.iter().any(|l| l.add_into.is_none() && l.op.dst == buf) {
                    return true;
                }
            }
            Step::SplitHeads { src, query, .. } if *query == buf && *src != buf => return true,
            other if names(other, buf) => return false,
            _ => {}
        }
    }
    true
}

/// Whether a step other than products names a buffer.
fn names(step: &Step, buf: BufferId) -> bool {
    let any = |list: &[BufferId]| list.contains(&buf);
    match step {
        Step::Angles { dst, .. } => any(&[*dst]),
        Step::Norm { src, add, dst, .. } => any(&[*src]) || *add == Some(buf) || *dst == Some(buf),
        Step::HeadNorm { buf: b, .. } | Step::Scale { buf: b, .. } => any(&[*b]),
        Step::Rope { buf: b, angles, .. } => any(&[*b, *angles]),
        Step::Heads { parts, .. } => parts.iter().flatten().any(|p| p.buf == buf),
        Step::Linears(_) => true,
        Step::Attention { op, gate, .. } => any(&[op.q, op.dst]) || *gate == Some(buf),
        Step::Copy { src, dst } | Step::Add { src, dst } => any(&[*src, *dst]),
        Step::Glu { gate, up, .. } => any(&[*gate, *up]),
        Step::SplitHeads { src, query, gate, .. } => any(&[*src, *query, *gate]),
        Step::Gate { gate, buf: b, .. } => any(&[*gate, *b]),
        Step::ConvSilu { src, dst, .. } => any(&[*src, *dst]),
        Step::DeltaRule { qkv, a, b, dst, .. } => any(&[*qkv, *a, *b, *dst]),
        Step::Route { logits, .. } => any(&[*logits]),
        Step::Experts { dst, .. } => any(&[*dst]),
    }
}
