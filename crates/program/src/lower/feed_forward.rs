//! The second half of a layer: dense branches, routed ones, and guesses at what the next routed layer wants.

use forebay_models::{DenseBranch, Layer, RoutedBranch};

use super::{Into, Lowering};
use crate::op::*;
use crate::tap::Point;

impl Lowering<'_> {
    pub(super) fn feed_forward(&mut self, layer: usize, l: &Layer, hidden: BufferId) {
        match (&l.ffn.routed, &l.ffn.dense) {
            (Some(routed), dense) => {
                let out = self.routed(layer, routed, dense.as_ref(), hidden);
                self.norm_in_place(out, &l.ffn.post_norm);
                self.push(Op::Add { src: out, dst: hidden });
            }
            (None, Some(dense)) => {
                let x = self.normed(hidden, &dense.norm);
                let out = self.dense(dense, x);
                self.norm_in_place(out, &l.ffn.post_norm);
                self.push(Op::Add { src: out, dst: hidden });
            }
            (None, None) => {}
        }
    }

    /// The branch's output from its normed input.
    fn dense(&mut self, branch: &DenseBranch, x: BufferId) -> BufferId {
        let [gate, up] = self.linears(x, [&branch.mlp.gate, &branch.mlp.up]);
        self.push(Op::Glu { gate, up, dst: gate, activation: branch.mlp.activation });
        let [out] = self.linears(gate, [&branch.mlp.down]);
        if let Some(g) = &branch.gate {
            let [gate] = self.f32_linears(x, [g]);
            self.push(Op::Gate { gate, buf: out, function: GateFunction::Sigmoid });
        }
        self.norm_in_place(out, &branch.post_norm);
        out
    }

    fn routed(
        &mut self,
        layer: usize,
        r: &RoutedBranch,
        dense: Option<&DenseBranch>,
        hidden: BufferId,
    ) -> BufferId {
        let first = &r.experts.weights[0];
        let segment = self.segments.last_mut().expect("there is always one");
        segment.router = segment.ops.len();
        let (x, logits) = self.router(r, hidden);
        self.tap(layer, Point::Router, logits);
        // Gate and up of an expert share one input; a mixture of formats with different orders in
        // one expert would need two packs, which no published model has.
        let input = match self.order(first.gate.format) {
            Some(order) => Operand::Packed(self.pack(x, order, true)),
            None => Operand::F32(x),
        };
        let moe = MoeId(self.moes.len());
        self.push(Op::Route { logits, moe });
        // Before `out` comes to life, so that the guess takes no memory of its own.
        self.guess_after(layer, MoeId(moe.0 + 1), hidden);
        let out = self.buffer(r.router.top_k * self.spec.hidden_size);
        let expert_scale = r.router.expert_scale.as_ref().map(|s| self.vector(s, false, 1.0));
        let biases = r.experts.biases.iter();
        let biases =
            biases.map(|b| [&b.gate, &b.up, &b.down].map(|v| self.vector(v, false, 1.0))).collect();
        self.moes.push(Moe {
            layer,
            n_experts: r.experts.weights.len(),
            top_k: r.router.top_k,
            score: r.router.score,
            input,
            intermediate: r.experts.intermediate,
            hidden_size: self.spec.hidden_size,
            activation: r.experts.activation,
            hidden_order: self.order(first.down.format),
            expert_scale,
            biases,
            out,
        });
        self.segments.last_mut().expect("there is always one").moe = Some(moe);
        self.into = Into::Overlap;
        let dense_out = dense.map(|d| {
            let x = if d.norm == r.norm { x } else { self.normed(hidden, &d.norm) };
            self.dense(d, x)
        });
        self.into = Into::Ops;
        // The experts read their input and write `out` after everything that overlaps.
        self.clock += 1;
        self.touch(x);
        self.touch(out);
        self.segments.push(Segment::default());
        let sum = self.buffer(self.spec.hidden_size);
        self.push(Op::Combine { moe, dst: sum });
        self.touch(out);
        self.norm_in_place(sum, &r.post_norm);
        if let Some(src) = dense_out {
            self.push(Op::Add { src, dst: sum });
        }
        sum
    }

    /// The normed stream and the router's logits.
    fn router(&mut self, r: &RoutedBranch, hidden: BufferId) -> (BufferId, BufferId) {
        let x = self.normed(hidden, &r.norm);
        let router_x = match &r.router.input_norm {
            Some(n) => self.normed(hidden, n),
            None => x,
        };
        let [logits] = self.f32_linears(router_x, [&r.router.weight]);
        (x, logits)
    }

    /// The pilot of `moe`, the routed layer after `layer`.
    fn guess_after(&mut self, layer: usize, moe: MoeId, hidden: BufferId) {
        let spec = self.spec;
        let next = spec.layers.iter().skip(layer + 1).find_map(|l| l.ffn.routed.as_ref());
        let Some(next) = next.filter(|_| self.extras.pilot) else { return };
        let segment = self.segments.last_mut().expect("there is always one");
        segment.pilot = Some(Pilot { ops: Vec::new(), moe });
        self.into = Into::Pilot;
        let (_, logits) = self.router(next, hidden);
        self.push(Op::Guess { logits, moe });
        self.into = Into::Ops;
    }
}
