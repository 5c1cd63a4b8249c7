//! Operations of hybrid models: gates, and the gated delta net over per-sequence state.
//!
//! Each recurrent layer holds `states` slots of convolution and recurrent state. A pass reads one slot of a
//! sequence and fills another, so that a pass that fails leaves the sequence as it was. Slot 0 is never
//! written: it is the zero state before a first token.

use std::ops::Range;

use forebay_program::{BufferId, GateFunction, Pass, Recurrent, RecurrentId};

use super::CpuBackend;
use crate::delta::{self, DeltaInput, DeltaShape};
use crate::rows::{Rows, RowsMut};

/// State of one layer: `slots` times `[conv | recurrent]`.
pub(super) struct States {
    shape: DeltaShape,
    floats: Vec<f32>,
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
    pub(super) fn new(r: &Recurrent, slots: usize) -> States {
        States { shape: delta_shape(r), floats: vec![0.0; slots * state_bytes(r) as usize / 4] }
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
        let slot = self.shape.conv_state() + self.shape.recurrent_state();
        let range = |s: u32| s as usize * slot + part.start..s as usize * slot + part.end;
        let ranges = slots.map(range);
        self.floats.get_disjoint_mut(ranges).expect("a pass writes another slot than it reads")
    }
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
}
