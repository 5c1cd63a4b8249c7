//! Routing and routed experts.
//!
//! Rows are grouped by expert. The rows of all experts that are ready are worked through in tiles: gate and
//! up of all experts of a tile are one parallel run, then the activation, then down. Each chosen expert of
//! a row writes its own place in `[rows, top_k, d]`, so neither tiles nor the order of experts show.

use std::ops::Range;

use forebay_program::{
    BackendError, BufferId, ExpertMatrices, Moe, MoeId, Operand, Program, Routing, Work,
};
use forebay_quant::Q8Rows;

use super::{CpuBackend, buffer_range, view_bytes};
use crate::matmul::{self, Input, Job, OutRows};
use crate::ops;

/// Chosen experts' rows are worked through this many at a time: bounds the scratch of a chunk.
const TILE_ROWS: usize = 512;

/// Rows of the chosen experts in one tile.
pub(super) struct ExpertScratch {
    rows: usize,
    gate: Vec<f32>,
    up: Vec<f32>,
    packed: Option<Q8Rows>,
    maps: Vec<PartMaps>,
}

/// Where one expert's rows of a tile come from and go to.
#[derive(Default)]
struct PartMaps {
    /// (token row, tile row)
    into: Vec<(u32, u32)>,
    /// (tile row, row of the output)
    out_of: Vec<(u32, u32)>,
}

impl ExpertScratch {
    /// Bytes that [`ExpertScratch::new`] takes.
    pub(super) fn bytes(program: &Program, max_rows: usize) -> u64 {
        let (tile, inner) = sizes(program, max_rows);
        let packed = match program.moes.iter().any(|m| m.hidden_order.is_some()) {
            true => Q8Rows::bytes_for(tile, inner),
            false => 0,
        };
        (2 * tile * inner * 4 + packed) as u64
    }

    pub(super) fn new(program: &Program, max_rows: usize) -> ExpertScratch {
        let (rows, inner) = sizes(program, max_rows);
        let order = program.moes.iter().find_map(|m| m.hidden_order);
        ExpertScratch {
            rows,
            gate: vec![0.0; rows * inner],
            up: vec![0.0; rows * inner],
            packed: order.map(|o| Q8Rows::new(rows, inner, o)),
            maps: Vec::new(),
        }
    }
}

/// Rows of a tile, and the widest inner width.
fn sizes(program: &Program, max_rows: usize) -> (usize, usize) {
    let top_k = program.moes.iter().map(|m| m.top_k).max().unwrap_or(0);
    let inner = program.moes.iter().map(|m| m.intermediate).max().unwrap_or(0);
    ((max_rows * top_k).min(TILE_ROWS), inner)
}

/// Output rows (`row * top_k + rank`) of the current layer, grouped by expert.
#[derive(Default)]
pub(super) struct ByExpert {
    starts: Vec<u32>,
    outputs: Vec<u32>,
}

impl ByExpert {
    /// Counting sort of output rows by expert.
    fn group(&mut self, ids: &[u16], n_experts: usize) {
        self.starts.clear();
        self.starts.resize(n_experts + 1, 0);
        for &e in ids {
            self.starts[e as usize + 1] += 1;
        }
        for e in 0..n_experts {
            self.starts[e + 1] += self.starts[e];
        }
        let mut next = self.starts.clone();
        self.outputs.resize(ids.len(), 0);
        for (i, &e) in ids.iter().enumerate() {
            self.outputs[next[e as usize] as usize] = i as u32;
            next[e as usize] += 1;
        }
    }

    /// Which of `outputs` are of expert `e`.
    fn of(&self, e: u16) -> Range<usize> {
        self.starts[e as usize] as usize..self.starts[e as usize + 1] as usize
    }
}

impl CpuBackend {
    pub(super) fn route(
        &mut self,
        logits: BufferId,
        id: MoeId,
        rows: usize,
    ) -> Result<(), BackendError> {
        let range = self.range(logits, rows);
        let moe = &self.program.moes[id.0];
        let (e, k) = (moe.n_experts, moe.top_k);
        let routing = &mut self.routings[id.0];
        routing.ids.resize(rows * k, 0);
        routing.weights.resize(rows * k, 0.0);
        let outputs = routing.ids.chunks_exact_mut(k).zip(routing.weights.chunks_exact_mut(k));
        for (logits, (ids, weights)) in self.arena[range].chunks_exact(e).zip(outputs) {
            ops::route(self.level, logits, moe.score, ids, weights)
                .map_err(|_| BackendError::RouterNan { layer: moe.layer })?;
            if let Some(scale) = moe.expert_scale {
                let scale = &self.vectors[scale.0];
                for (weight, id) in weights.iter_mut().zip(ids) {
                    *weight *= scale[*id as usize];
                }
            }
        }
        self.by_expert.group(&routing.ids, e);
        Ok(())
    }

    /// As [`Self::route`], but nothing follows from it: damaged logits guess nothing.
    pub(super) fn guess(&mut self, logits: BufferId, id: MoeId, rows: usize) {
        let range = self.range(logits, rows);
        let moe = &self.program.moes[id.0];
        let (e, k) = (moe.n_experts, moe.top_k);
        let Routing { ids, weights } = &mut self.guess;
        ids.resize(rows * k, 0);
        weights.resize(k, 0.0);
        for (logits, ids) in self.arena[range].chunks_exact(e).zip(ids.chunks_exact_mut(k)) {
            if ops::route(self.level, logits, moe.score, ids, weights).is_err() {
                ids.fill(0);
            }
        }
    }

    /// Computes experts for every row that chose them, tile by tile.
    pub(super) fn run_experts(&mut self, id: MoeId, experts: &[ExpertMatrices<'_>]) {
        let program = self.program.clone();
        let moe = &program.moes[id.0];
        let mut parts: Vec<(ExpertMatrices<'_>, Range<usize>)> = Vec::new();
        let mut used = 0;
        for m in experts {
            let mut left = self.by_expert.of(m.expert);
            while !left.is_empty() {
                let n = left.len().min(self.experts.rows - used);
                parts.push((*m, left.start..left.start + n));
                left.start += n;
                used += n;
                if used == self.experts.rows {
                    self.expert_tile(moe, &parts);
                    parts.clear();
                    used = 0;
                }
            }
        }
        if !parts.is_empty() {
            self.expert_tile(moe, &parts);
        }
    }

    fn expert_tile(&mut self, moe: &Moe, parts: &[(ExpertMatrices<'_>, Range<usize>)]) {
        let mark = self.profiler.begin(self.bytes_moved);
        let k = moe.top_k as u32;
        let (inner, d) = (moe.intermediate, moe.hidden_size);
        while self.experts.maps.len() < parts.len() {
            self.experts.maps.push(Default::default());
        }
        let mut tile_row = 0;
        for ((_, outputs), PartMaps { into, out_of }) in parts.iter().zip(&mut self.experts.maps) {
            into.clear();
            out_of.clear();
            for &output in &self.by_expert.outputs[outputs.clone()] {
                into.push((output / k, tile_row));
                out_of.push((tile_row, output));
                tile_row += 1;
            }
        }
        let rows = tile_row as usize;
        let max_rows = self.max_rows;
        let out_range = buffer_range(&self.program, max_rows, moe.out, max_rows);
        let (x, out) = match moe.input {
            Operand::Packed(_) => (None, &mut self.arena[out_range]),
            Operand::F32(b) => {
                let x = buffer_range(&self.program, max_rows, b, max_rows);
                let [x, out] = self
                    .arena
                    .get_disjoint_mut([x, out_range])
                    .expect("input and output of experts are apart");
                (Some(&*x), out)
            }
        };
        let gate_out = OutRows::new(&mut self.experts.gate[..rows * inner], inner);
        let up_out = OutRows::new(&mut self.experts.up[..rows * inner], inner);
        let bias = |e: u16, which: usize| {
            moe.biases.get(e as usize).map(|b| self.vectors[b[which].0].as_slice())
        };
        let mut jobs = Vec::with_capacity(parts.len() * 2);
        for ((m, _), PartMaps { into, .. }) in parts.iter().zip(&self.experts.maps) {
            let input = || match (moe.input, x) {
                (Operand::Packed(p), _) => Input::Q8(&self.packs[p.0]),
                (_, Some(x)) => Input::F32 { data: x, stride: d },
                _ => unreachable!("f32 input was taken above"),
            };
            for (which, (weight, out)) in [(m.gate, &gate_out), (m.up, &up_out)].iter().enumerate()
            {
                jobs.push(Job {
                    weight: *weight,
                    input: input(),
                    rows: matmul::Rows::Map(into),
                    // SAFETY: every job of a matrix writes its own tile rows: `tile_row` above
                    // never repeats, and gate and up have buffers of their own.
                    out: unsafe { out.alias() },
                    bias: bias(m.expert, which),
                });
            }
            self.bytes_moved += view_bytes(&m.gate) + view_bytes(&m.up);
        }
        matmul::run_jobs(&self.pool, self.level, &jobs);
        drop(jobs);
        let macs = (rows * inner * d) as u64;
        let first = &parts[0].0;
        self.profiler.end(mark, self.bytes_moved, || {
            let packed = matches!(moe.input, Operand::Packed(_));
            (format!("experts gate up ({})", first.gate.format().name()), work(packed, 2 * macs))
        });
        let mark = self.profiler.begin(self.bytes_moved);
        let n = rows * inner;
        ops::glu(
            &self.pool,
            self.level,
            moe.activation,
            &mut self.experts.gate[..n],
            &self.experts.up[..n],
        );
        let hidden = &self.experts.gate[..n];
        if let (Some(packed), Some(order)) = (&mut self.experts.packed, moe.hidden_order) {
            packed.reshape(rows, inner, order);
            matmul::pack_rows(&self.pool, self.level, hidden, inner, rows, packed);
        }
        self.profiler
            .end(mark, self.bytes_moved, || ("experts activation".into(), Work::default()));
        let mark = self.profiler.begin(self.bytes_moved);
        let out = OutRows::new(out, d);
        let mut jobs = Vec::with_capacity(parts.len());
        for ((m, _), PartMaps { out_of, .. }) in parts.iter().zip(&self.experts.maps) {
            let input = match (&self.experts.packed, moe.hidden_order) {
                (Some(packed), Some(_)) => Input::Q8(packed),
                _ => Input::F32 { data: hidden, stride: inner },
            };
            jobs.push(Job {
                weight: m.down,
                input,
                rows: matmul::Rows::Map(out_of),
                // SAFETY: an output row is `row * top_k + rank`, and each is in the list of one
                // expert only.
                out: unsafe { out.alias() },
                bias: bias(m.expert, 2),
            });
            self.bytes_moved += view_bytes(&m.down);
        }
        matmul::run_jobs(&self.pool, self.level, &jobs);
        drop(jobs);
        self.profiler.end(mark, self.bytes_moved, || {
            let packed = moe.hidden_order.is_some();
            (format!("experts down ({})", first.down.format().name()), work(packed, macs))
        });
    }
}

/// Multiply-adds of a product whose input is packed to 8 bits, or is not.
fn work(packed: bool, macs: u64) -> Work {
    match packed {
        true => Work { integer_macs: macs, ..Work::default() },
        false => Work { float_macs: macs, ..Work::default() },
    }
}
