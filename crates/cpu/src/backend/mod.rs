//! The interpreter of a program on the CPU.
//!
//! It owns the trunk image, resident vectors, one scratch arena, packed activations and the KV pages;
//! all are allocated when it is made, so that a pass allocates nothing that grows with the model. Each
//! [`Op`] is a few calls of kernels. Not here: kernels, scheduling, disks.

mod attend;
mod experts;
mod profile;
mod recurrent;
mod saved;
mod weights;

use std::ops::Range;

use forebay_models::WeightRef;
use forebay_program::{
    Backend, BackendError, Buffer, BufferId, ExpertMatrices, Factor, Head, KvLayer, LinearOp,
    MoeId, Op, Operand, Pass, Profile, Program, Routing, SequenceTables, Vector, Work,
};
use forebay_quant::Q8Rows;
use forebay_store::{FileSet, HugePages, Region, StoreError, TrunkImage};
use std::sync::Arc;

use attend::attention_rows;
use experts::{ByExpert, ExpertScratch};
use profile::Profiler;
use weights::{extents, trunk_extents, view_bytes, weight_view};
pub use weights::{load_vector, read_vector};

use crate::attention::{self, KvLayout, KvType};
use crate::matmul::{self, Input, Job, OutRows};
use crate::ops;
use crate::pool::Pool;
use crate::rows::{Rows, RowsMut};
use crate::simd::Level;

/// Rows that want logits are worked through this many at a time, so that `[rows, vocab]` stays small.
const LOGIT_ROWS: usize = 16;

/// Sizes that decide what a backend allocates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CpuShape {
    /// Most rows of a pass.
    pub max_rows: usize,
    /// Type of keys and values.
    pub kv_type: KvType,
    /// Pages of each KV class.
    pub kv_pages: Vec<usize>,
    /// Slots of recurrent state, the zero one included; 0 where no layer is recurrent.
    pub states: usize,
    /// Most rows of a taped pass; 0: none is.
    pub tape_rows: usize,
}

/// Bytes that a backend will own, for the ledger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CpuBytes {
    /// Resident matrices.
    pub trunk: u64,
    /// Resident vectors: norms, biases, sinks.
    pub vectors: u64,
    /// Keys and values.
    pub kv: u64,
    /// Recurrent state.
    pub state: u64,
    /// Scratch, packed activations, logits.
    pub scratch: u64,
    /// For drafting: tapes, and what is resident for the draft block alone. 0 where nothing drafts.
    pub draft: u64,
}

/// The CPU backend.
pub struct CpuBackend {
    program: Arc<Program>,
    pool: Arc<Pool>,
    level: Level,
    trunk: TrunkImage,
    vectors: Vec<Vec<f32>>,
    max_rows: usize,
    arena: Vec<f32>,
    packs: Vec<Q8Rows>,
    experts: ExpertScratch,
    head: HeadScratch,
    kv: Vec<LayerKv>,
    states: Vec<recurrent::States>,
    replay: recurrent::Replay,
    routings: Vec<Routing>,
    /// The last guess, whose memory is used by the next.
    guess: Routing,
    by_expert: ByExpert,
    bytes_moved: u64,
    profiler: Profiler,
}

/// KV of one layer.
struct LayerKv {
    layout: KvLayout,
    pages: Region,
}

struct HeadScratch {
    hidden: Vec<f32>,
    packed: Option<Q8Rows>,
}

impl CpuBackend {
    /// What [`CpuBackend::new`] will allocate.
    pub fn bytes(program: &Program, shape: &CpuShape) -> CpuBytes {
        let rows = shape.max_rows;
        let logit_rows = rows.min(LOGIT_ROWS);
        let head = &program.weights[program.head.weight.0];
        let mut scratch = (rows * program.scratch_width * 4) as u64;
        for p in &program.packs {
            scratch += Q8Rows::bytes_for(rows, p.cols) as u64;
        }
        scratch += ExpertScratch::bytes(program, rows);
        scratch += (logit_rows * (head.cols + head.rows) * 4) as u64;
        if program.head.pack.is_some() {
            scratch += Q8Rows::bytes_for(logit_rows, head.cols) as u64;
        }
        let kv_of = |layers: &[KvLayer]| -> u64 {
            let bytes = layers.iter().map(|l| {
                let layout = KvLayout::new(l.n_kv_heads, l.head_dim, shape.kv_type);
                layout.page_bytes() as u64 * shape.kv_pages[l.class] as u64
            });
            bytes.sum()
        };
        let vectors_of =
            |vectors: &[Vector]| vectors.iter().map(|v| v.source.len as u64 * 4).sum::<u64>();
        let trunk_of = |weights: &[WeightRef]| TrunkImage::plan_bytes(&extents(weights));
        // What is the draft block's alone comes after what is the body's.
        let all = (program.weights.len(), program.vectors.len(), program.kv_layers.len());
        let (weights, vectors, layers) = program.drafter_parts().unwrap_or(all);
        let trunk = trunk_of(&program.weights[..weights]);
        let tapes = program.recurrent.iter().map(|r| recurrent::tape_bytes(r, shape.tape_rows));
        let draft = trunk_of(&program.weights).saturating_sub(trunk)
            + vectors_of(&program.vectors[vectors..])
            + kv_of(&program.kv_layers[layers..])
            + tapes.sum::<u64>()
            + recurrent::Replay::bytes(program, shape.tape_rows);
        CpuBytes {
            trunk,
            vectors: vectors_of(&program.vectors[..vectors]),
            kv: kv_of(&program.kv_layers[..layers]),
            draft,
            state: program
                .recurrent
                .iter()
                .map(|r| recurrent::state_bytes(r) * shape.states as u64)
                .sum(),
            scratch,
        }
    }

    /// Loads the trunk and allocates everything. `progress` is told (bytes read, bytes in all).
    pub fn new(
        program: Arc<Program>,
        shape: &CpuShape,
        pool: Arc<Pool>,
        level: Level,
        files: &Arc<FileSet>,
        io: &forebay_store::IoOptions,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<CpuBackend, StoreError> {
        let trunk = TrunkImage::load(files, &trunk_extents(&program), io, progress)?;
        let vectors = program.vectors.iter();
        let vectors: Result<Vec<Vec<f32>>, StoreError> =
            vectors.map(|v| load_vector(files, v)).collect();
        let rows = shape.max_rows;
        let head = &program.weights[program.head.weight.0];
        let kv = program.kv_layers.iter().map(|l| {
            let layout = KvLayout::new(l.n_kv_heads, l.head_dim, shape.kv_type);
            let bytes = layout.page_bytes() * shape.kv_pages[l.class];
            Ok(LayerKv { layout, pages: Region::new(bytes, HugePages::Default)? })
        });
        let kv: Result<Vec<LayerKv>, StoreError> = kv.collect();
        let logit_rows = rows.min(LOGIT_ROWS);
        Ok(CpuBackend {
            pool,
            level,
            trunk,
            vectors: vectors?,
            max_rows: rows,
            arena: vec![0.0; rows * program.scratch_width],
            packs: program.packs.iter().map(|p| Q8Rows::new(rows, p.cols, p.order)).collect(),
            experts: ExpertScratch::new(&program, rows),
            head: HeadScratch {
                hidden: vec![0.0; logit_rows * head.cols],
                packed: program.head.pack.map(|o| Q8Rows::new(logit_rows, head.cols, o)),
            },
            kv: kv?,
            states: program
                .recurrent
                .iter()
                .map(|r| recurrent::States::new(r, shape.states, shape.tape_rows))
                .collect(),
            replay: recurrent::Replay::new(&program, shape.tape_rows),
            routings: vec![Routing::default(); program.moes.len()],
            guess: Routing::default(),
            by_expert: ByExpert::default(),
            bytes_moved: 0,
            profiler: Profiler::default(),
            program,
        })
    }

    /// The vector width in use.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Floats of a buffer in the arena: `[rows, width]` without gaps.
    fn range(&self, b: BufferId, rows: usize) -> Range<usize> {
        buffer_range(&self.program, self.max_rows, b, rows)
    }

    fn linears(&mut self, list: &[LinearOp], rows: usize) {
        let mut ranges: Vec<Range<usize>> = list.iter().map(|l| self.range(l.dst, rows)).collect();
        for l in list {
            if let Operand::F32(b) = l.src {
                let r = self.range(b, rows);
                if !ranges.contains(&r) {
                    ranges.push(r);
                }
            }
        }
        let starts: Vec<usize> = ranges.iter().map(|r| r.start).collect();
        let mut slices: Vec<Option<&mut [f32]>> =
            disjoint(&mut self.arena, &ranges).into_iter().map(Some).collect();
        let inputs: Vec<&[f32]> =
            slices.split_off(list.len()).into_iter().map(|s| &*s.expect("taken once")).collect();
        let mut jobs = Vec::with_capacity(list.len());
        for (l, dst) in list.iter().zip(&mut slices) {
            let w = &self.program.weights[l.weight.0];
            self.bytes_moved += w.format.matrix_bytes(w.rows, w.cols).unwrap_or(0);
            let input = match l.src {
                Operand::Packed(p) => Input::Q8(&self.packs[p.0]),
                Operand::F32(b) => {
                    let start = buffer_range(&self.program, self.max_rows, b, rows).start;
                    let at = starts[list.len()..].iter().position(|s| *s == start);
                    Input::F32 { data: inputs[at.expect("was listed")], stride: w.cols }
                }
            };
            jobs.push(Job {
                weight: weight_view(&self.trunk, w),
                input,
                rows: matmul::Rows::All(rows),
                out: OutRows::new(dst.take().expect("taken once"), w.rows),
                bias: l.bias.map(|b| self.vectors[b.0].as_slice()),
            });
        }
        matmul::run_jobs(&self.pool, self.level, &jobs);
    }

    /// Logits of rows of a stream by a head.
    fn head_logits(&mut self, head: Head, stream: BufferId, rows: &[u32], out: &mut [f32]) {
        let mark = self.profiler.begin(self.bytes_moved);
        let program = self.program.clone();
        let Head { norm, weight, pack, softcap, .. } = head;
        let w = &program.weights[weight.0];
        let d = w.cols;
        let hidden = self.range(stream, self.max_rows);
        let gathered = &mut self.head.hidden[..rows.len() * d];
        for (row, dst) in rows.iter().zip(gathered.chunks_exact_mut(d)) {
            dst.copy_from_slice(&self.arena[hidden.start + *row as usize * d..][..d]);
        }
        let norm_weight = norm.weight.map(|v| self.vectors[v.0].as_slice());
        let x = RowsMut::dense(gathered, d);
        ops::rms_norm_heads(&self.pool, self.level, x, d, norm_weight, norm.eps);
        let gathered = &self.head.hidden[..rows.len() * d];
        let input = match (&mut self.head.packed, pack) {
            (Some(packed), Some(_)) => {
                matmul::pack_rows(&self.pool, self.level, gathered, d, rows.len(), packed);
                Input::Q8(packed)
            }
            _ => Input::F32 { data: gathered, stride: d },
        };
        let job = Job {
            weight: weight_view(&self.trunk, w),
            input,
            rows: matmul::Rows::All(rows.len()),
            out: OutRows::new(&mut *out, w.rows),
            bias: None,
        };
        self.bytes_moved += view_bytes(&job.weight);
        matmul::run_jobs(&self.pool, self.level, &[job]);
        if let Some(cap) = softcap {
            ops::softcap(&self.pool, self.level, cap, out);
        }
        self.profiler.end(mark, self.bytes_moved, || {
            let macs = (rows.len() * w.rows * w.cols) as u64;
            let work = match pack {
                Some(_) => Work { integer_macs: macs, ..Work::default() },
                None => Work { float_macs: macs, ..Work::default() },
            };
            (format!("head ({})", w.format.name()), work)
        });
    }
}

impl Backend for CpuBackend {
    fn name(&self) -> &'static str {
        "cpu"
    }

    fn tied_embedding(&self, tokens: &[u32], out: &mut [f32]) {
        let w = &self.program.weights[self.program.head.weight.0];
        let view = weight_view(&self.trunk, w);
        for (&token, row) in tokens.iter().zip(out.chunks_exact_mut(w.cols)) {
            forebay_quant::dequantize_row(&view, token as usize, row);
        }
    }

    fn begin(&mut self, pass: &Pass<'_>, hidden: &[f32]) {
        assert!(pass.rows() <= self.max_rows);
        let range = self.range(self.program.hidden, pass.rows());
        self.arena[range].copy_from_slice(hidden);
    }

    fn run(&mut self, pass: &Pass<'_>, list: &[Op]) -> Result<(), BackendError> {
        let rows = pass.rows();
        for op in list {
            let mark = self.profiler.begin(self.bytes_moved);
            self.op(pass, op, rows)?;
            if mark.is_some() {
                let described = self.describe(pass, op);
                self.profiler.end(mark, self.bytes_moved, || described);
            }
        }
        Ok(())
    }

    fn buffer(&mut self, buf: BufferId, rows: usize) -> Option<&mut [f32]> {
        let range = self.range(buf, rows);
        Some(&mut self.arena[range])
    }

    fn routing(&self, moe: MoeId) -> &Routing {
        &self.routings[moe.0]
    }

    fn guessed(&self, _: MoeId) -> &[u16] {
        &self.guess.ids
    }

    fn experts(&mut self, id: MoeId, experts: &[ExpertMatrices<'_>]) {
        self.run_experts(id, experts);
    }

    fn logits(&mut self, rows: &[u32], out: &mut [f32]) -> Result<(), BackendError> {
        self.head_logits(self.program.head, self.program.hidden, rows, out);
        Ok(())
    }

    fn max_logit_rows(&self) -> usize {
        self.max_rows.min(LOGIT_ROWS)
    }

    fn set_profiling(&mut self, on: bool) -> bool {
        self.profiler.set(on);
        true
    }

    fn profile(&self) -> Profile {
        self.profiler.profile()
    }

    fn can_replay(&self) -> bool {
        true
    }

    fn replay(&mut self, sequence: &SequenceTables<'_>, rows: usize) {
        self.replay_states(sequence.state, rows);
    }

    fn read(&self, buffer: BufferId, rows: Range<usize>, out: &mut Vec<f32>) {
        let Buffer { width, offset } = self.program.buffers[buffer.0];
        let start = offset * self.max_rows;
        out.extend_from_slice(&self.arena[start + rows.start * width..start + rows.end * width]);
    }

    fn write(&mut self, buffer: BufferId, rows: &[f32]) {
        let width = self.program.buffers[buffer.0].width;
        assert_eq!(rows.len() % width, 0, "whole rows");
        let range = self.range(buffer, rows.len() / width);
        self.arena[range].copy_from_slice(rows);
    }

    fn draft_logits(&mut self, rows: &[u32], out: &mut [f32]) -> Result<(), BackendError> {
        let (head, stream) = self.program.drafter_head().expect("a program that drafts");
        self.head_logits(head, stream, rows, out);
        Ok(())
    }

    fn save_page(&self, class: usize, page: u32, out: &mut Vec<u8>) -> bool {
        self.page_to(class, page, out);
        true
    }

    fn load_page(&mut self, class: usize, page: u32, bytes: &[u8]) -> bool {
        self.page_from(class, page, bytes)
    }

    fn save_state(&self, slot: u32, out: &mut Vec<u8>) -> bool {
        self.state_to(slot, out);
        true
    }

    fn load_state(&mut self, slot: u32, bytes: &[u8]) -> bool {
        self.state_from(slot, bytes)
    }

    fn take_bytes_moved(&mut self) -> u64 {
        std::mem::take(&mut self.bytes_moved)
    }
}

impl CpuBackend {
    fn op(&mut self, pass: &Pass<'_>, op: &Op, rows: usize) -> Result<(), BackendError> {
        match op {
            Op::RopeAngles { rope, dst } => {
                let range = self.range(*dst, rows);
                let table = &self.program.ropes[*rope];
                let (cos, sin) = self.arena[range].split_at_mut(rows * table.inv_freq.len());
                let factor = table.attention_factor;
                ops::rope_angles(self.level, pass.positions, &table.inv_freq, factor, cos, sin);
            }
            Op::RmsNorm { src, dst, norm } => {
                let width = self.program.buffers[dst.0].width;
                let (src_range, dst_range) = (self.range(*src, rows), self.range(*dst, rows));
                if src_range == dst_range {
                    let x = RowsMut::dense(&mut self.arena[dst_range], width);
                    let w = norm.weight.map(|v| self.vectors[v.0].as_slice());
                    ops::rms_norm_heads(&self.pool, self.level, x, width, w, norm.eps);
                } else {
                    let w = norm.weight.map(|v| self.vectors[v.0].as_slice());
                    let [src, dst] =
                        self.arena.get_disjoint_mut([src_range, dst_range]).expect("apart");
                    let (src, dst) = (Rows::dense(src, width), RowsMut::dense(dst, width));
                    ops::rms_norm(&self.pool, self.level, src, w, norm.eps, dst);
                }
            }
            Op::HeadNorm { buf, head_dim, norm } => {
                let range = self.range(*buf, rows);
                let width = self.program.buffers[buf.0].width;
                let w = norm.weight.map(|v| self.vectors[v.0].as_slice());
                let x = RowsMut::dense(&mut self.arena[range], width);
                ops::rms_norm_heads(&self.pool, self.level, x, *head_dim, w, norm.eps);
            }
            Op::Pack { src, dst } => {
                let range = self.range(*src, rows);
                let packed = &mut self.packs[dst.0];
                let cols = packed.cols();
                matmul::pack_rows(&self.pool, self.level, &self.arena[range], cols, rows, packed);
            }
            Op::Linears(list) => self.linears(list, rows),
            Op::Rope { buf, head_dim, angles, rope } => {
                let table = &self.program.ropes[*rope];
                let (buf_range, angle_range) = (self.range(*buf, rows), self.range(*angles, rows));
                let width = self.program.buffers[buf.0].width;
                let [x, angles] =
                    self.arena.get_disjoint_mut([buf_range, angle_range]).expect("apart");
                let (cos, sin) = angles.split_at(rows * table.inv_freq.len());
                let x = RowsMut::dense(x, width);
                let turn = ops::Turn {
                    head_dim: *head_dim,
                    rotary_dim: table.rotary_dim,
                    pairs: table.pairs,
                };
                ops::apply_rope(&self.pool, self.level, x, turn, cos, sin);
            }
            Op::StoreKv { kv, k, v } => {
                let class = self.program.kv_layers[kv.0].class;
                let (k_range, v_range) = (self.range(*k, rows), self.range(*v, rows));
                let kv = &mut self.kv[kv.0];
                let width = kv.layout.n_kv_heads * kv.layout.head_dim;
                let page_bytes = kv.layout.page_bytes();
                let (k, v) = (&self.arena[k_range], &self.arena[v_range]);
                let pages = &mut kv.pages;
                for (r, row) in attention_rows(pass, class).iter().enumerate() {
                    let pos = row.pos as usize;
                    let page = row.table[pos / attention::BLOCK] as usize;
                    let page = &mut pages[page * page_bytes..][..page_bytes];
                    let row = r * width..(r + 1) * width;
                    let slot = pos % attention::BLOCK;
                    kv.layout.store(self.level, page, slot, &k[row.clone()], &v[row]);
                }
            }
            Op::Attention(a) => self.attention(pass, a),
            Op::SplitHeads { src, query, gate, head_dim } => {
                self.split_heads([*src, *query, *gate], *head_dim, rows);
            }
            Op::Join { a, b, dst } => self.join([*a, *b, *dst], rows),
            Op::Gate { gate, buf, function } => self.gate(*gate, *buf, *function, rows),
            Op::ConvSilu { layer, src, dst } => self.conv_silu(pass, *layer, *src, *dst),
            Op::DeltaRule { layer, qkv, a, b, dst } => {
                self.delta_rule(pass, *layer, [*qkv, *a, *b, *dst]);
            }
            Op::Copy { src, dst } => {
                let (src, dst) = (self.range(*src, rows), self.range(*dst, rows));
                self.arena.copy_within(src, dst.start);
            }
            Op::Scale { buf, factor } => {
                let factor = match factor {
                    Factor::Constant(x) => *x,
                    Factor::Learned(v) => self.vectors[v.0][0],
                };
                let range = self.range(*buf, rows);
                ops::scale(&self.pool, self.level, factor, &mut self.arena[range]);
            }
            Op::Add { src, dst } => {
                let (src, dst) = (self.range(*src, rows), self.range(*dst, rows));
                let [src, dst] = self.arena.get_disjoint_mut([src, dst]).expect("apart");
                ops::add_into(&self.pool, self.level, src, dst);
            }
            Op::Glu { gate, up, dst, activation } => {
                assert_eq!(gate, dst, "the activation is computed in place");
                let (gate, up) = (self.range(*gate, rows), self.range(*up, rows));
                let [gate, up] = self.arena.get_disjoint_mut([gate, up]).expect("apart");
                ops::glu(&self.pool, self.level, *activation, gate, up);
            }
            Op::Route { logits, moe } => self.route(*logits, *moe, rows)?,
            Op::Guess { logits, moe } => self.guess(*logits, *moe, rows),
            Op::Combine { moe, dst } => {
                let m = &self.program.moes[moe.0];
                let (out, dst) = (self.range(m.out, rows), self.range(*dst, rows));
                let [out, dst] = self.arena.get_disjoint_mut([out, dst]).expect("apart");
                let weights = &self.routings[moe.0].weights;
                let dst = RowsMut::dense(dst, m.hidden_size);
                ops::combine(&self.pool, self.level, out, weights, dst);
            }
            other => unreachable!("{other:?} is not lowered for the CPU"),
        }
        Ok(())
    }
}

fn buffer_range(program: &Program, max_rows: usize, b: BufferId, rows: usize) -> Range<usize> {
    let buffer = program.buffers[b.0];
    let start = buffer.offset * max_rows;
    start..start + buffer.width * rows
}

/// Splits an arena into the given ranges, which do not overlap.
fn disjoint<'a>(arena: &'a mut [f32], ranges: &[Range<usize>]) -> Vec<&'a mut [f32]> {
    let mut order: Vec<usize> = (0..ranges.len()).collect();
    order.sort_by_key(|&i| ranges[i].start);
    let mut parts: Vec<Option<&mut [f32]>> = ranges.iter().map(|_| None).collect();
    let (mut rest, mut at) = (arena, 0);
    for i in order {
        let (_, tail) = rest.split_at_mut(ranges[i].start - at);
        let (part, tail) = tail.split_at_mut(ranges[i].len());
        parts[i] = Some(part);
        (rest, at) = (tail, ranges[i].end);
    }
    parts.into_iter().map(|p| p.expect("every range was visited")).collect()
}
