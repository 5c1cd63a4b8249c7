//! From a program to the launches of a pass: operations that depend on each other become one kernel where they can.
//!
//! A decode step is a chain of some hundred small kernels, and each costs a few microseconds whatever it does. So a norm packs
//! its result, heads are normed, turned and stored at once, a product adds into the residual stream, the experts' down
//! products are summed where they are made. Only what happens to one row is put together, in the order in which the
//! program has it: fusing changes no sum. Not here: addresses and sizes ([`crate::run`]).

use std::collections::HashMap;

use forebay_program::{
    AttentionOp, BufferId, Factor, GateFunction, KvId, LinearOp, MoeId, NormParams, Op, Operand,
    PackId, Program, RecurrentId,
};

/// One product of [`Step::Linears`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Linear {
    pub op: LinearOp,
    /// The product is added to this buffer instead of being written.
    pub add_into: Option<BufferId>,
}

/// What happens to the heads of one buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Part {
    pub buf: BufferId,
    pub norm: Option<NormParams>,
    /// Index of a rotary table and its angles.
    pub rope: Option<(usize, BufferId)>,
}

/// One or a few launches.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    Angles {
        rope: usize,
        dst: BufferId,
    },
    /// `src += add`, norm, packing: each optional but one.
    Norm {
        src: BufferId,
        add: Option<BufferId>,
        norm: Option<NormParams>,
        dst: Option<BufferId>,
        packs: Vec<PackId>,
    },
    HeadNorm {
        buf: BufferId,
        head_dim: usize,
        norm: NormParams,
    },
    Rope {
        buf: BufferId,
        head_dim: usize,
        rope: usize,
        angles: BufferId,
    },
    /// Queries (none: only stored), keys, values on their way to attention.
    Heads {
        kv: KvId,
        parts: [Option<Part>; 3],
    },
    Linears(Vec<Linear>),
    Attention {
        op: AttentionOp,
        gate: Option<BufferId>,
        pack: Option<PackId>,
    },
    Copy {
        src: BufferId,
        dst: BufferId,
    },
    Scale {
        buf: BufferId,
        factor: Factor,
    },
    Add {
        src: BufferId,
        dst: BufferId,
    },
    Glu {
        gate: BufferId,
        up: BufferId,
        activation: forebay_models::Activation,
    },
    SplitHeads {
        src: BufferId,
        query: BufferId,
        gate: BufferId,
        head_dim: usize,
    },
    Gate {
        gate: BufferId,
        buf: BufferId,
        function: GateFunction,
    },
    ConvSilu {
        layer: RecurrentId,
        src: BufferId,
        dst: BufferId,
    },
    DeltaRule {
        layer: RecurrentId,
        qkv: BufferId,
        a: BufferId,
        b: BufferId,
        dst: BufferId,
    },
    Route {
        logits: BufferId,
        moe: MoeId,
    },
    /// The chosen experts and their weighted sum, which is written to `dst` or added to it.
    Experts {
        moe: MoeId,
        dst: BufferId,
        add: bool,
    },
}

/// All steps of a program's body.
pub(crate) fn steps(program: &Program) -> Vec<Step> {
    let mut items: Vec<Item<'_>> = Vec::new();
    for segment in &program.segments {
        items.extend(segment.ops.iter().chain(&segment.overlap).map(Item::Op));
        if let Some(moe) = segment.moe {
            items.push(Item::Experts(moe));
        }
    }
    let uses = count_uses(program, &items);
    let mut f = Fuser { items, uses, at: 0, out: Vec::new() };
    while f.at < f.items.len() {
        f.next();
    }
    f.out
}

#[derive(Clone, Copy)]
enum Item<'a> {
    Op(&'a Op),
    Experts(MoeId),
}

/// How often each buffer is named.
fn count_uses(program: &Program, items: &[Item<'_>]) -> HashMap<BufferId, usize> {
    let mut uses = HashMap::new();
    let mut count = |b: BufferId| *uses.entry(b).or_insert(0) += 1;
    count(program.hidden);
    for item in items {
        match item {
            Item::Op(op) => op.buffers().into_iter().for_each(&mut count),
            Item::Experts(moe) => {
                let moe = &program.moes[moe.0];
                count(moe.out);
                if let Operand::F32(b) = moe.input {
                    count(b);
                }
            }
        }
    }
    uses
}

struct Fuser<'a> {
    items: Vec<Item<'a>>,
    uses: HashMap<BufferId, usize>,
    at: usize,
    out: Vec<Step>,
}

impl<'a> Fuser<'a> {
    fn op(&self, at: usize) -> Option<&'a Op> {
        match self.items.get(at) {
            Some(Item::Op(op)) => Some(op),
            _ => None,
        }
    }

    /// Whether a buffer is named exactly so often in the whole program.
    fn used(&self, b: BufferId, times: usize) -> bool {
        self.uses.get(&b) == Some(&times)
    }

    fn next(&mut self) {
        let at = self.at;
        let op = match self.items[at] {
            Item::Experts(moe) => return self.experts(moe),
            Item::Op(op) => op,
        };
        self.at += 1;
        let step = match op {
            Op::RopeAngles { rope, dst } => Step::Angles { rope: *rope, dst: *dst },
            Op::RmsNorm { src, dst, norm } => return self.norm(None, *src, *dst, *norm, at),
            Op::HeadNorm { .. } | Op::Rope { .. } | Op::StoreKv { .. } => {
                if self.heads(at) {
                    return;
                }
                match op {
                    Op::HeadNorm { buf, head_dim, norm } => {
                        Step::HeadNorm { buf: *buf, head_dim: *head_dim, norm: *norm }
                    }
                    Op::Rope { buf, head_dim, angles, rope } => {
                        let (head_dim, rope) = (*head_dim, *rope);
                        Step::Rope { buf: *buf, head_dim, rope, angles: *angles }
                    }
                    _ => unreachable!("storing is always part of a heads step"),
                }
            }
            Op::Pack { src, dst } => {
                Step::Norm { src: *src, add: None, norm: None, dst: None, packs: vec![*dst] }
            }
            Op::Linears(list) => return self.linears(list),
            Op::Attention(a) => return self.attention(*a),
            Op::Copy { src, dst } => Step::Copy { src: *src, dst: *dst },
            Op::Scale { buf, factor } => Step::Scale { buf: *buf, factor: *factor },
            Op::Add { src, dst } => {
                if let Some(Op::RmsNorm { src: s, dst: d, norm }) = self.op(self.at)
                    && s == dst
                    && d != s
                {
                    self.at += 1;
                    return self.norm(Some(*src), *dst, *d, *norm, at + 1);
                }
                Step::Add { src: *src, dst: *dst }
            }
            Op::Glu { gate, up, dst, activation } => {
                assert_eq!(gate, dst, "the activation is computed in place");
                Step::Glu { gate: *gate, up: *up, activation: *activation }
            }
            Op::SplitHeads { src, query, gate, head_dim } => {
                let (query, gate) = (*query, *gate);
                Step::SplitHeads { src: *src, query, gate, head_dim: *head_dim }
            }
            Op::Gate { gate, buf, function } => {
                Step::Gate { gate: *gate, buf: *buf, function: *function }
            }
            Op::ConvSilu { layer, src, dst } => {
                Step::ConvSilu { layer: *layer, src: *src, dst: *dst }
            }
            Op::DeltaRule { layer, qkv, a, b, dst } => {
                Step::DeltaRule { layer: *layer, qkv: *qkv, a: *a, b: *b, dst: *dst }
            }
            Op::Route { logits, moe } => Step::Route { logits: *logits, moe: *moe },
            other => unreachable!("{other:?} is run with what comes before it"),
        };
        self.out.push(step);
    }

    /// A norm, and the packing of its result by the operations after it (at most two, and a router's product may lie
    /// between).
    fn norm(
        &mut self,
        add: Option<BufferId>,
        src: BufferId,
        dst: BufferId,
        norm: NormParams,
        at: usize,
    ) {
        let mut packs = Vec::new();
        let mut taken = Vec::new();
        let mut read = Vec::new();
        for ahead in at + 1..at + 5 {
            match self.op(ahead) {
                Some(Op::Pack { src, dst: pack }) if *src == dst && packs.len() < 2 => {
                    if read.contains(pack) || packs.contains(pack) {
                        break;
                    }
                    packs.push(*pack);
                    taken.push(ahead);
                }
                Some(Op::Linears(list)) => {
                    if list.iter().any(|l| l.dst == dst) {
                        break;
                    }
                    read.extend(list.iter().filter_map(|l| match l.src {
                        Operand::Packed(p) => Some(p),
                        Operand::F32(_) => None,
                    }));
                }
                Some(Op::Route { .. }) => {}
                _ => break,
            }
        }
        // Named by the norm and the packs only: nobody wants the floats. In place they always stay.
        let floats = src == dst || !self.used(dst, 1 + packs.len());
        self.out.push(Step::Norm { src, add, norm: Some(norm), dst: floats.then_some(dst), packs });
        for i in taken.into_iter().rev() {
            self.items.remove(i);
        }
    }

    /// Norms and turns that end in storing keys and values. False if these operations are something else.
    fn heads(&mut self, at: usize) -> bool {
        let mut parts: Vec<Part> = Vec::new();
        let mut i = at;
        let (kv, k, v) = loop {
            let (buf, norm, rope) = match self.op(i) {
                Some(Op::HeadNorm { buf, norm, .. }) => (*buf, Some(*norm), None),
                Some(Op::Rope { buf, angles, rope, .. }) => (*buf, None, Some((*rope, *angles))),
                Some(Op::StoreKv { kv, k, v }) => break (*kv, *k, *v),
                _ => return false,
            };
            match parts.iter_mut().find(|p| p.buf == buf) {
                // A norm after a turn, or two of a kind, is not what the kernel does.
                Some(p) if norm.is_some() || p.rope.is_some() => return false,
                Some(p) => p.rope = rope,
                None => parts.push(Part { buf, norm, rope }),
            }
            i += 1;
        };
        let mut take = |buf: BufferId| match parts.iter().position(|p| p.buf == buf) {
            Some(i) => parts.remove(i),
            None => Part { buf, norm: None, rope: None },
        };
        let (k, v) = (take(k), take(v));
        if parts.len() > 1 {
            return false;
        }
        self.out.push(Step::Heads { kv, parts: [parts.pop(), Some(k), Some(v)] });
        self.at = i + 1;
        true
    }

    fn linears(&mut self, list: &[LinearOp]) {
        let mut linears: Vec<Linear> =
            list.iter().map(|op| Linear { op: *op, add_into: None }).collect();
        if let ([one], Some(Op::Add { src, dst })) = (&mut linears[..], self.op(self.at))
            && *src == one.op.dst
            && self.used(*src, 2)
        {
            one.add_into = Some(*dst);
            self.at += 1;
        }
        self.out.push(Step::Linears(linears));
    }

    fn attention(&mut self, op: AttentionOp) {
        let mut gate = None;
        if let Some(Op::Gate { gate: g, buf, function: GateFunction::Sigmoid }) = self.op(self.at)
            && *buf == op.dst
        {
            gate = Some(*g);
            self.at += 1;
        }
        let mut pack = None;
        if let Some(Op::Pack { src, dst }) = self.op(self.at)
            && *src == op.dst
        {
            pack = Some(*dst);
            self.at += 1;
        }
        self.out.push(Step::Attention { op, gate, pack });
    }

    /// Experts, with the sum that follows them.
    fn experts(&mut self, moe: MoeId) {
        let Some(Op::Combine { moe: of, dst }) = self.op(self.at + 1) else {
            unreachable!("experts are combined at once");
        };
        assert_eq!(*of, moe);
        self.at += 2;
        let (mut into, mut add) = (*dst, false);
        if let Some(Op::Add { src, dst: sum }) = self.op(self.at)
            && src == dst
            && self.used(*src, 2)
        {
            (into, add) = (*sum, true);
            self.at += 1;
        }
        self.out.push(Step::Experts { moe, dst: into, add });
    }
}
