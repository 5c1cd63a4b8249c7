//! A block drafter as operations of its target's program.
//!
//! It shares the target's matrices for embedding and head, its arena and its kernels. What it computes of the target's features
//! (`context`) goes to keys and values of its own, row by row; a block's own rows come behind them for one pass and are
//! overwritten by the next rows of context.

use forebay_models::{BlockDrafter, Mixer, RopeId};

use super::Lowering;
use crate::op::*;

impl Lowering<'_> {
    /// Lowers `drafter`; `kept` are the outputs of the target's layers.
    pub(super) fn block_drafter(
        &mut self,
        drafter: &BlockDrafter,
        kept: &[(usize, BufferId)],
    ) -> BlockDraft {
        let d = self.spec.hidden_size;
        let rope = self.spec.ropes.len();
        let body = std::mem::replace(&mut self.segments, vec![Segment::default()]);
        // The head is the target's, also where the drafter is the first to name it.
        self.norm(&self.spec.final_norm);
        let head = self.weight(self.spec.head.as_ref().unwrap_or(&self.spec.embedding));
        let (first_weight, first_vector) = (self.weights.len(), self.vectors.len());
        let first_kv = self.kv_layers.len();
        let windows = self.kv_windows.clone();
        let stream = self.buffer(d); // [rows, d]
        let angles = self.angles_of(rope, drafter.rope.inv_freq.len());
        self.touch(stream);
        let all_angles = vec![angles; rope + 1];
        for (layer, causal) in drafter.layers.iter().zip(&drafter.causal) {
            let Mixer::Attention(a) = &layer.mixer else {
                unreachable!("a block drafter has attention only")
            };
            let a = forebay_models::Attention { rope: Some(RopeId(rope)), ..a.clone() };
            self.attention(&a, layer, stream, &all_angles);
            let ops = &mut self.segments.last_mut().expect("there is always one").ops;
            let attention = ops.iter_mut().rev().find_map(|op| match op {
                Op::Attention(a) => Some(a),
                _ => None,
            });
            attention.expect("one was just lowered").two_way = !causal;
            self.feed_forward(usize::MAX, layer, stream);
        }
        // All its layers share one table of pages, behind those of the target.
        self.kv_windows = windows;
        let kv = first_kv..self.kv_layers.len();
        let class = self.kv_windows.len();
        self.kv_layers[kv.clone()].iter_mut().for_each(|layer| layer.class = class);
        let norm = self.norm(&drafter.norm);
        self.touch(stream);
        let block = self.take_ops();
        let angles = self.angles_of(rope, drafter.rope.inv_freq.len());
        let mut taps = drafter.taps.iter().map(|tap| {
            let kept = kept.iter().find(|(layer, _)| layer == tap);
            kept.expect("the program keeps what the drafter looks at").1
        });
        // [rows, taps * d]
        let first = taps.next().expect("a drafter looks at one layer at least");
        let features = taps.fold(first, |joined, tap| {
            let dst = self.buffer(self.lives[joined.0].width + d);
            self.push(Op::Join { a: joined, b: tap, dst });
            dst
        });
        let [fused] = self.linears(features, [&drafter.fc]); // [rows, d]
        let context = self.normed(fused, &drafter.context_norm); // [rows, d]
        for (layer, kv) in drafter.layers.iter().zip(kv.clone()) {
            let Mixer::Attention(a) = &layer.mixer else {
                unreachable!("a block drafter has attention only")
            };
            let v = a.v.as_ref().expect("a block drafter has values of its own");
            let [k, v] = self.linears(context, [&a.k, v]); // [rows, n_kv_heads * hd]
            if let Some(n) = &a.k_norm {
                let norm = self.norm(n);
                self.push(Op::HeadNorm { buf: k, head_dim: a.head_dim, norm });
            }
            self.push(Op::Rope { buf: k, head_dim: a.head_dim, angles, rope });
            self.push(Op::StoreKv { kv: KvId(kv), k, v });
        }
        let context = self.take_ops();
        self.segments = body;
        let head = Head {
            norm,
            weight: head,
            pack: self.order(self.weights[head.0].format),
            tied: self.spec.head.is_none(),
            softcap: self.spec.logit_softcap,
        };
        BlockDraft { context, block, stream, head, first_weight, first_vector, kv }
    }

    fn angles_of(&mut self, rope: usize, pairs: usize) -> BufferId {
        let dst = self.buffer(pairs * 2);
        self.push(Op::RopeAngles { rope, dst });
        dst
    }

    fn take_ops(&mut self) -> Vec<Op> {
        let segments = std::mem::replace(&mut self.segments, vec![Segment::default()]);
        segments.into_iter().next().map(|segment| segment.ops).unwrap_or_default()
    }
}
