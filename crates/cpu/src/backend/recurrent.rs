//! Operations of hybrid models: gates, and the gated delta net over per-sequence state.
//!
//! Each recurrent layer holds `states` slots of convolution and recurrent state. A pass reads one slot of a
//! sequence and fills another, so that a pass that fails leaves the sequence as it was. Slot 0 is never
//! written: it is the zero state before a first token.
//!
//! A taped pass keeps the rows that went into each layer's state (`qkv` before the convolution, `a`, `b`). Taking back rows
//! is then to fill the slot again from the state before the pass with the first rows of the tape: states go row
//! by row, so these are the bits of a pass that had no more rows.

use std::ops::Range;

use forebay_program::{BufferId, GateFunction, Pass, Program, Recurrent, RecurrentId};

use super::CpuBackend;
use crate::delta::{self, DeltaInput, DeltaShape};
use crate::rows::{Rows, RowsMut};

/// State of one layer: `slots` times `[conv | recurrent]`.
pub(super) struct States {
    shape: DeltaShape,
    floats: Vec<f32>,
    tape: Tape,
}

/// Rows that a layer's state has consumed in the last taped pass.
struct Tape {
    /// `[tape_rows, channels]`, before the convolution.
    qkv: Vec<f32>,
    /// `[tape_rows, n_v_heads]`
    a: Vec<f32>,
    /// `[tape_rows, n_v_heads]`
    b: Vec<f32>,
}

impl Tape {
    fn new(shape: &DeltaShape, rows: usize) -> Tape {
        let zeros = |width: usize| vec![0.0; rows * width];
        let heads = shape.n_v_heads;
        Tape { qkv: zeros(shape.channels()), a: zeros(heads), b: zeros(heads) }
    }
}

/// Bytes of a layer's tape.
pub(super) fn tape_bytes(r: &Recurrent, rows: usize) -> u64 {
    let shape = delta_shape(r);
    (rows * (shape.channels() + 2 * shape.n_v_heads) * 4) as u64
}

/// Where a replay puts what nobody reads: outputs of the convolution and of the rule.
pub(super) struct Replay {
    /// `[tape_rows, channels]` of the widest layer.
    mixed: Vec<f32>,
    /// `[tape_rows, n_v_heads * v_dim]` of the widest layer.
    out: Vec<f32>,
}

impl Replay {
    fn floats(program: &Program, rows: usize) -> [usize; 2] {
        let widest = |width: fn(&DeltaShape) -> usize| {
            rows * program.recurrent.iter().map(|r| width(&delta_shape(r))).max().unwrap_or(0)
        };
        [widest(DeltaShape::channels), widest(|s| s.n_v_heads * s.v_dim)]
    }

    /// Bytes that [`Replay::new`] takes.
    pub(super) fn bytes(program: &Program, rows: usize) -> u64 {
        Replay::floats(program, rows).iter().sum::<usize>() as u64 * 4
    }

    pub(super) fn new(program: &Program, rows: usize) -> Replay {
        let [mixed, out] = Replay::floats(program, rows).map(|n| vec![0.0; n]);
        Replay { mixed, out }
    }
}

fn delta_shape(r: &Recurrent) -> DeltaShape {
    DeltaShape {
        n_k_heads: r.n_k_heads,
        n_v_heads: r.n_v_heads,
        k_dim: r.k_dim,
        v_dim: r.v_dim,
        conv_width: r.conv_width,
        tiled: r.tiled,
    }
}

/// Bytes of one slot.
pub(super) fn state_bytes(r: &Recurrent) -> u64 {
    let shape = delta_shape(r);
    (shape.conv_state() + shape.recurrent_state()) as u64 * 4
}

impl States {
    pub(super) fn new(r: &Recurrent, slots: usize, tape_rows: usize) -> States {
        let shape = delta_shape(r);
        let floats = vec![0.0; slots * state_bytes(r) as usize / 4];
        States { shape, floats, tape: Tape::new(&shape, tape_rows) }
    }

    /// The convolution's state before, and the one to fill.
    fn conv(&mut self, slots: [u32; 2]) -> [&mut [f32]; 2] {
        let len = self.shape.conv_state();
        self.parts(slots, 0..len)
    }

    /// The recurrent state before, and the one to fill.
    fn recurrent(&mut self, slots: [u32; 2]) -> [&mut [f32]; 2] {
        let start = self.shape.conv_state();
        self.parts(slots, start..start + self.shape.recurrent_state())
    }

    /// One slot, `[conv | recurrent]`.
    pub(super) fn slot(&self, slot: u32) -> &[f32] {
        let len = self.shape.conv_state() + self.shape.recurrent_state();
        &self.floats[slot as usize * len..][..len]
    }

    /// The same, to be filled.
    pub(super) fn slot_mut(&mut self, slot: u32) -> &mut [f32] {
        let len = self.shape.conv_state() + self.shape.recurrent_state();
        &mut self.floats[slot as usize * len..][..len]
    }

    fn parts(&mut self, slots: [u32; 2], part: Range<usize>) -> [&mut [f32]; 2] {
        parts(&self.shape, &mut self.floats, slots, part)
    }
}

/// Part of two slots of `floats`.
fn parts<'a>(
    shape: &DeltaShape,
    floats: &'a mut [f32],
    slots: [u32; 2],
    part: Range<usize>,
) -> [&'a mut [f32]; 2] {
    let slot = shape.conv_state() + shape.recurrent_state();
    let range = |s: u32| s as usize * slot + part.start..s as usize * slot + part.end;
    let ranges = slots.map(range);
    floats.get_disjoint_mut(ranges).expect("a pass writes another slot than it reads")
}

/// Rows of each sequence of a pass: (sequence, rows).
fn spans(pass: &Pass<'_>) -> Vec<(usize, Range<usize>)> {
    let mut start = 0;
    let runs = pass.row_sequence.chunk_by(|a, b| a == b);
    runs.map(|run| {
        let rows = start..start + run.len();
        start = rows.end;
        (run[0] as usize, rows)
    })
    .collect()
}

impl CpuBackend {
    pub(super) fn split_heads(&mut self, buffers: [BufferId; 3], head_dim: usize, rows: usize) {
        let ranges = buffers.map(|b| self.range(b, rows));
        let [src, query, gate] = self.arena.get_disjoint_mut(ranges).expect("buffers are apart");
        let heads = query.chunks_exact_mut(head_dim).zip(gate.chunks_exact_mut(head_dim));
        for (both, (query, gate)) in src.chunks_exact(2 * head_dim).zip(heads) {
            query.copy_from_slice(&both[..head_dim]);
            gate.copy_from_slice(&both[head_dim..]);
        }
    }

    pub(super) fn join(&mut self, buffers: [BufferId; 3], rows: usize) {
        let [left, right, _] = buffers.map(|b| self.program.buffers[b.0].width);
        let ranges = buffers.map(|b| self.range(b, rows));
        let [a, b, dst] = self.arena.get_disjoint_mut(ranges).expect("buffers are apart");
        let halves = a.chunks_exact(left).zip(b.chunks_exact(right));
        for (dst, (a, b)) in dst.chunks_exact_mut(left + right).zip(halves) {
            dst[..left].copy_from_slice(a);
            dst[left..].copy_from_slice(b);
        }
    }

    pub(super) fn gate(
        &mut self,
        gate: BufferId,
        buf: BufferId,
        function: GateFunction,
        rows: usize,
    ) {
        let by_row = self.program.buffers[gate.0].width == 1;
        let width = self.program.buffers[buf.0].width;
        let ranges = [self.range(gate, rows), self.range(buf, rows)];
        let [gate, x] = self.arena.get_disjoint_mut(ranges).expect("buffers are apart");
        match (by_row, function) {
            (true, GateFunction::Sigmoid) => {
                for (row, g) in x.chunks_exact_mut(width).zip(gate.iter()) {
                    let factor = crate::vecmath::sigmoid(*g);
                    crate::ops::scale(&self.pool, self.level, factor, row);
                }
            }
            (true, GateFunction::Silu) => unreachable!("no family gates rows by silu"),
            (false, GateFunction::Sigmoid) => delta::mul_sigmoid(&self.pool, self.level, gate, x),
            (false, GateFunction::Silu) => delta::mul_silu(&self.pool, self.level, gate, x),
        }
    }

    pub(super) fn conv_silu(
        &mut self,
        pass: &Pass<'_>,
        layer: RecurrentId,
        src: BufferId,
        dst: BufferId,
    ) {
        let ranges = [self.range(src, pass.rows()), self.range(dst, pass.rows())];
        let [src, dst] = self.arena.get_disjoint_mut(ranges).expect("buffers are apart");
        let states = &mut self.states[layer.0];
        let channels = states.shape.channels();
        let taps = &self.vectors[self.program.recurrent[layer.0].taps.0];
        if pass.tape {
            states.tape.qkv[..src.len()].copy_from_slice(src);
        }
        for (sequence, rows) in spans(pass) {
            let [before, after] = states.conv(pass.sequences[sequence].state);
            let part = rows.start * channels..rows.end * channels;
            let x = Rows::dense(&src[part.clone()], channels);
            let out = RowsMut::dense(&mut dst[part], channels);
            delta::conv_silu(&self.pool, self.level, taps, x, before, after, out);
        }
    }

    pub(super) fn delta_rule(
        &mut self,
        pass: &Pass<'_>,
        layer: RecurrentId,
        buffers: [BufferId; 4],
    ) {
        let ranges = buffers.map(|b| self.range(b, pass.rows()));
        let [qkv, a, b, dst] = self.arena.get_disjoint_mut(ranges).expect("buffers are apart");
        let r = &self.program.recurrent[layer.0];
        let states = &mut self.states[layer.0];
        let shape = states.shape;
        let (channels, heads) = (shape.channels(), shape.n_v_heads);
        let values = heads * shape.v_dim;
        if pass.tape {
            states.tape.a[..a.len()].copy_from_slice(a);
            states.tape.b[..b.len()].copy_from_slice(b);
        }
        for (sequence, rows) in spans(pass) {
            let part = |width: usize| rows.start * width..rows.end * width;
            let input = DeltaInput {
                qkv: Rows::dense(&qkv[part(channels)], channels),
                a: Rows::dense(&a[part(heads)], heads),
                b: Rows::dense(&b[part(heads)], heads),
                neg_exp_a: &self.vectors[r.neg_exp_a.0],
                dt_bias: &self.vectors[r.dt_bias.0],
            };
            let [before, after] = states.recurrent(pass.sequences[sequence].state);
            let out = RowsMut::dense(&mut dst[part(values)], values);
            delta::delta_rule(&self.pool, self.level, &shape, &input, before, after, out);
            self.bytes_moved += state_bytes(r);
        }
    }

    /// Fills a slot as if the last taped pass had had its first `rows` rows only.
    pub(super) fn replay_states(&mut self, slots: [u32; 2], rows: usize) {
        let Replay { mixed, out } = &mut self.replay;
        for (r, states) in self.program.recurrent.iter().zip(&mut self.states) {
            let States { shape, floats, tape } = states;
            let (channels, heads) = (shape.channels(), shape.n_v_heads);
            let values = heads * shape.v_dim;
            let conv = 0..shape.conv_state();
            let recurrent = conv.end..conv.end + shape.recurrent_state();
            let qkv = Rows::dense(&tape.qkv[..rows * channels], channels);
            let mixed = &mut mixed[..rows * channels];
            let [before, after] = parts(shape, floats, slots, conv);
            let taps = &self.vectors[r.taps.0];
            let dst = RowsMut::dense(mixed, channels);
            delta::conv_silu(&self.pool, self.level, taps, qkv, before, after, dst);
            let input = DeltaInput {
                qkv: Rows::dense(mixed, channels),
                a: Rows::dense(&tape.a[..rows * heads], heads),
                b: Rows::dense(&tape.b[..rows * heads], heads),
                neg_exp_a: &self.vectors[r.neg_exp_a.0],
                dt_bias: &self.vectors[r.dt_bias.0],
            };
            let [before, after] = parts(shape, floats, slots, recurrent);
            let dst = RowsMut::dense(&mut out[..rows * values], values);
            delta::delta_rule(&self.pool, self.level, shape, &input, before, after, dst);
        }
    }
}
