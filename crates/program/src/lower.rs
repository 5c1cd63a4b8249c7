//! From a spec to a program: one walk over the layers, straight down.

mod block;
mod feed_forward;

use std::collections::HashMap;

use forebay_models::{
    Attention, BlockDrafter, Decay, DeltaNet, Layer, Linear, Mixer, ModelSpec, MultiToken, Norm,
    VectorRef, WeightRef,
};
use forebay_quant::{ActOrder, Format};

use crate::op::*;
use crate::scratch::{self, Life};
use crate::tap::{Point, Tap, TapSet};

/// What a program has besides the model's own operations.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extras {
    /// A [`Pilot`] at every routed layer but the last.
    pub pilot: bool,
    /// Where rows are looked at or changed; places that the model does not have are left out.
    pub taps: TapSet,
    /// Layers whose outputs are kept: [`Program::kept_layers`].
    pub kept_layers: Vec<usize>,
    /// The multi-token-prediction block, which the model has: [`Program::draft`].
    pub multi_token: bool,
    /// A block drafter, which looks at kept layers: [`Program::block_draft`].
    pub block: Option<BlockDrafter>,
}

/// Lowers a model for one precision.
pub fn lower(spec: &ModelSpec, precision: Precision) -> Program {
    lower_with(spec, precision, Extras::default())
}

/// The same, with extras.
pub fn lower_with(spec: &ModelSpec, precision: Precision, extras: Extras) -> Program {
    let mut l = Lowering::new(spec, precision);
    l.extras = extras;
    let hidden = l.buffer(spec.hidden_size);
    let angles = l.angles();
    l.touch(hidden);
    let mut kept_layers = Vec::new();
    if let Some(scale) = spec.embedding_scale {
        l.push(Op::Scale { buf: hidden, factor: Factor::Constant(scale) });
    }
    for (index, layer) in spec.layers.iter().enumerate() {
        match &layer.mixer {
            Mixer::Attention(a) => l.attention(a, layer, hidden, &angles),
            Mixer::DeltaNet(n) => l.delta_net(n, layer, hidden),
            other => unreachable!("lowering of {other:?} is not written"),
        }
        l.tap(index, Point::Attention, hidden);
        l.feed_forward(index, layer, hidden);
        if let Some(scale) = &layer.output_scale {
            let scale = l.vector(scale, false, 1.0);
            l.push(Op::Scale { buf: hidden, factor: Factor::Learned(scale) });
        }
        l.tap(index, Point::FeedForward, hidden);
        if l.extras.kept_layers.contains(&index) {
            let dst = l.buffer(spec.hidden_size);
            l.push(Op::Copy { src: hidden, dst });
            kept_layers.push((index, dst));
        }
    }
    for buffer in angles.iter().chain([&hidden]) {
        l.touch(*buffer);
    }
    let block = spec.multi_token.as_deref().filter(|_| l.extras.multi_token);
    let draft = block.map(|block| l.draft_block(block, hidden));
    let drafter = l.extras.block.take();
    let block_draft = drafter.as_ref().map(|drafter| l.block_drafter(drafter, &kept_layers));
    // What others read when a pass is over is not overwritten by a pass of the draft block.
    for (_, kept) in &kept_layers {
        l.touch(*kept);
    }
    let mut program = Program { kept_layers, draft, block_draft, ..l.finish(hidden) };
    program.ropes.extend(drafter.map(|drafter| drafter.rope));
    program
}

struct Lowering<'a> {
    spec: &'a ModelSpec,
    precision: Precision,
    weights: Vec<WeightRef>,
    vectors: Vec<Vector>,
    lives: Vec<Life>,
    packs: Vec<Pack>,
    kv_layers: Vec<KvLayer>,
    kv_windows: Vec<Option<usize>>,
    recurrent: Vec<Recurrent>,
    moes: Vec<Moe>,
    segments: Vec<Segment>,
    clock: usize,
    into: Into,
    extras: Extras,
}

/// Which list of the last segment operations go to.
#[derive(Clone, Copy, PartialEq)]
enum Into {
    Ops,
    Pilot,
    Overlap,
}

impl<'a> Lowering<'a> {
    fn new(spec: &'a ModelSpec, precision: Precision) -> Self {
        Lowering {
            spec,
            precision,
            weights: Vec::new(),
            vectors: Vec::new(),
            lives: Vec::new(),
            packs: Vec::new(),
            kv_layers: Vec::new(),
            kv_windows: Vec::new(),
            recurrent: Vec::new(),
            moes: Vec::new(),
            segments: vec![Segment::default()],
            clock: 0,
            into: Into::Ops,
            extras: Extras::default(),
        }
    }

    fn push(&mut self, op: Op) {
        self.clock += 1;
        for b in op.buffers() {
            self.touch(b);
        }
        let segment = self.segments.last_mut().expect("there is always one");
        match (self.into, &mut segment.pilot) {
            (Into::Ops, _) => segment.ops.push(op),
            (Into::Overlap, _) => segment.overlap.push(op),
            (Into::Pilot, pilot) => pilot.as_mut().expect("made before").ops.push(op),
        }
    }

    fn tap(&mut self, layer: usize, point: Point, buf: BufferId) {
        if self.extras.taps.contains(layer, point) {
            self.push(Op::Tap(Tap { layer, point, buf }));
        }
    }

    fn touch(&mut self, b: BufferId) {
        self.lives[b.0].last = self.clock;
    }

    fn buffer(&mut self, width: usize) -> BufferId {
        // The next operation is the first that writes it.
        let first = self.clock + 1;
        self.lives.push(Life { width, first, last: first });
        BufferId(self.lives.len() - 1)
    }

    /// Angles of all ropes for the rows of a pass.
    fn angles(&mut self) -> Vec<BufferId> {
        let ropes = 0..self.spec.ropes.len();
        ropes
            .map(|rope| {
                let dst = self.buffer(self.spec.ropes[rope].inv_freq.len() * 2);
                self.push(Op::RopeAngles { rope, dst });
                dst
            })
            .collect()
    }

    /// The multi-token-prediction block, as segments of its own: `fc([norm(embedding) | norm(hidden)])`, a decoder layer,
    /// and a norm before the head.
    fn draft_block(&mut self, block: &MultiToken, hidden: BufferId) -> DraftBlock {
        let d = self.spec.hidden_size;
        // [rows, d]
        let source = self.normed(hidden, &self.spec.final_norm);
        let body = std::mem::replace(&mut self.segments, vec![Segment::default()]);
        // The output head and the last norm are the body's, also where the block is the first to name them.
        self.norm(&self.spec.final_norm);
        let head = self.weight(self.spec.head.as_ref().unwrap_or(&self.spec.embedding));
        let (first_weight, first_vector) = (self.weights.len(), self.vectors.len());
        let (embedding, input) = (self.buffer(d), self.buffer(d));
        let angles = self.angles();
        let parts = [
            self.normed(embedding, &block.embedding_norm), // [rows, d]
            self.normed(input, &block.hidden_norm),        // [rows, d]
        ];
        let both = self.buffer(2 * d);
        self.push(Op::Join { a: parts[0], b: parts[1], dst: both });
        let [stream] = self.linears(both, [&block.fc]); // [rows, d]
        let windows = self.kv_windows.clone();
        let moes = self.moes.len();
        match &block.layer.mixer {
            Mixer::Attention(a) => self.attention(a, &block.layer, stream, &angles),
            other => unreachable!("no published block mixes with {other:?}"),
        }
        self.kv_windows = windows;
        let kv = KvId(self.kv_layers.len() - 1);
        self.kv_layers[kv.0].class = self.kv_windows.len();
        self.feed_forward(self.spec.layers.len(), &block.layer, stream);
        let next = self.normed(stream, &block.norm); // [rows, d]
        let head = Head {
            norm: self.norm(&block.norm),
            weight: head,
            pack: self.order(self.weights[head.0].format),
            tied: self.spec.head.is_none(),
            softcap: self.spec.logit_softcap,
        };
        for buffer in [source, embedding, input, stream, next] {
            self.touch(buffer);
        }
        let mut segments = std::mem::replace(&mut self.segments, body);
        end_routers(&mut segments);
        let moe = (self.moes.len() > moes).then_some(MoeId(moes));
        DraftBlock {
            source,
            embedding,
            hidden: input,
            segments,
            stream,
            next,
            head,
            first_weight,
            first_vector,
            kv,
            moe,
        }
    }

    /// A matrix is resident once, however often it is used.
    fn weight(&mut self, w: &WeightRef) -> WeightId {
        let known = self.weights.iter().rposition(|known| known == w);
        WeightId(known.unwrap_or_else(|| {
            self.weights.push(w.clone());
            self.weights.len() - 1
        }))
    }

    fn vector(&mut self, source: &VectorRef, plus_one: bool, factor: f32) -> VectorId {
        self.resident(Vector { source: source.clone(), plus_one, factor, form: VectorForm::Plain })
    }

    fn vector_as(&mut self, source: &VectorRef, form: VectorForm) -> VectorId {
        self.resident(Vector { source: source.clone(), plus_one: false, factor: 1.0, form })
    }

    fn resident(&mut self, vector: Vector) -> VectorId {
        let known = self.vectors.iter().rposition(|known| *known == vector);
        VectorId(known.unwrap_or_else(|| {
            self.vectors.push(vector);
            self.vectors.len() - 1
        }))
    }

    fn norm(&mut self, n: &Norm) -> NormParams {
        let weight = n.weight.as_ref().map(|w| self.vector(w, n.plus_one, n.factor));
        NormParams { weight, eps: n.eps }
    }

    fn normed(&mut self, src: BufferId, n: &Norm) -> BufferId {
        let norm = self.norm(n);
        let dst = self.buffer(self.lives[src.0].width);
        self.push(Op::RmsNorm { src, dst, norm });
        dst
    }

    fn norm_in_place(&mut self, buf: BufferId, n: &Option<Norm>) {
        if let Some(n) = n {
            let norm = self.norm(n);
            self.push(Op::RmsNorm { src: buf, dst: buf, norm });
        }
    }

    /// Order of packing for products with `format`, or none when they take f32 rows.
    fn order(&self, format: Format) -> Option<ActOrder> {
        (self.precision == Precision::Q8 && format.is_quantized()).then(|| format.act_order())
    }

    /// The operand for products with `format`, packing `src` unless `made` has it already.
    fn operand(
        &mut self,
        src: BufferId,
        format: Format,
        made: &mut HashMap<ActOrder, PackId>,
    ) -> Operand {
        let Some(order) = self.order(format) else { return Operand::F32(src) };
        if let Some(&id) = made.get(&order) {
            return Operand::Packed(id);
        }
        let id = self.pack(src, order, false);
        made.insert(order, id);
        Operand::Packed(id)
    }

    fn pack(&mut self, src: BufferId, order: ActOrder, for_experts: bool) -> PackId {
        let pack = Pack { cols: self.lives[src.0].width, order, for_experts };
        let dst = match self.packs.iter().position(|p| *p == pack) {
            Some(i) => PackId(i),
            None => {
                self.packs.push(pack);
                PackId(self.packs.len() - 1)
            }
        };
        self.push(Op::Pack { src, dst });
        dst
    }

    /// Products that share an input: packed once per order, run together.
    fn linears<const N: usize>(&mut self, src: BufferId, parts: [&Linear; N]) -> [BufferId; N] {
        let mut made = HashMap::new();
        let operands = parts.map(|p| self.operand(src, p.weight.format, &mut made));
        self.products(parts, operands)
    }

    /// Products whose activations stay f32 in every precision: routers, gates, decays.
    fn f32_linears<const N: usize>(&mut self, src: BufferId, parts: [&Linear; N]) -> [BufferId; N] {
        self.products(parts, [Operand::F32(src); N])
    }

    fn products<const N: usize>(
        &mut self,
        parts: [&Linear; N],
        operands: [Operand; N],
    ) -> [BufferId; N] {
        let dst = parts.map(|p| self.buffer(p.weight.rows));
        let ops = (0..N).map(|i| LinearOp {
            weight: self.weight(&parts[i].weight),
            bias: parts[i].bias.as_ref().map(|b| self.vector(b, false, 1.0)),
            src: operands[i],
            dst: dst[i],
        });
        let ops = ops.collect();
        self.push(Op::Linears(ops));
        dst
    }

    fn attention(&mut self, a: &Attention, layer: &Layer, hidden: BufferId, angles: &[BufferId]) {
        let x = self.normed(hidden, &layer.mixer_norm);
        let (q, k, v) = match &a.v {
            Some(v) => {
                let [q, k, v] = self.linears(x, [&a.q, &a.k, v]);
                (q, k, v)
            }
            None => {
                let [q, k] = self.linears(x, [&a.q, &a.k]);
                let v = self.buffer(self.lives[k.0].width);
                self.push(Op::Copy { src: k, dst: v });
                (q, k, v)
            }
        };
        let head_dim = a.head_dim;
        let (q, gate) = match a.output_gate {
            true => {
                let width = a.n_heads * head_dim;
                let (query, gate) = (self.buffer(width), self.buffer(width));
                self.push(Op::SplitHeads { src: q, query, gate, head_dim });
                (query, Some(gate))
            }
            false => (q, None),
        };
        for (buf, norm) in [(q, &a.q_norm), (k, &a.k_norm), (v, &a.v_norm)] {
            if let Some(n) = norm {
                let norm = self.norm(n);
                self.push(Op::HeadNorm { buf, head_dim, norm });
            }
        }
        if let Some(rope) = a.rope {
            for buf in [q, k] {
                self.push(Op::Rope { buf, head_dim, angles: angles[rope.0], rope: rope.0 });
            }
        }
        let kv = KvId(self.kv_layers.len());
        let class = match self.kv_windows.iter().position(|w| *w == a.window) {
            Some(class) => class,
            None => {
                self.kv_windows.push(a.window);
                self.kv_windows.len() - 1
            }
        };
        self.kv_layers.push(KvLayer { n_kv_heads: a.n_kv_heads, head_dim: a.head_dim, class });
        self.push(Op::StoreKv { kv, k, v });
        let dst = self.buffer(a.n_heads * a.head_dim);
        let sinks = a.sinks.as_ref().map(|s| self.vector(s, false, 1.0));
        self.push(Op::Attention(AttentionOp {
            kv,
            q,
            dst,
            n_heads: a.n_heads,
            scale: a.scale,
            window: a.window,
            two_way: false,
            sinks,
        }));
        if let Some(gate) = gate {
            self.push(Op::Gate { gate, buf: dst, function: GateFunction::Sigmoid });
        }
        let [out] = self.linears(dst, [&a.o]);
        self.norm_in_place(out, &layer.mixer_post_norm);
        self.push(Op::Add { src: out, dst: hidden });
    }

    fn delta_net(&mut self, n: &DeltaNet, layer: &Layer, hidden: BufferId) {
        let x = self.normed(hidden, &layer.mixer_norm);
        let [a, b] = self.f32_linears(x, [&n.a, &n.b]);
        let [qkv, z] = self.linears(x, [&n.qkv, &n.z]);
        let taps = self.vector_as(&n.conv, VectorForm::Transposed { inner: n.conv_width });
        let neg_exp_a = match &n.decay {
            Decay::Log(v) => self.vector_as(v, VectorForm::NegativeExp),
            Decay::NegativeExp(v) => self.vector(v, false, 1.0),
        };
        let dt_bias = self.vector(&n.dt_bias, false, 1.0);
        let id = RecurrentId(self.recurrent.len());
        self.recurrent.push(Recurrent {
            n_k_heads: n.n_k_heads,
            n_v_heads: n.n_v_heads,
            k_dim: n.k_dim,
            v_dim: n.v_dim,
            conv_width: n.conv_width,
            tiled: n.tiled,
            taps,
            neg_exp_a,
            dt_bias,
        });
        let mixed = self.buffer(n.qkv.weight.rows);
        self.push(Op::ConvSilu { layer: id, src: qkv, dst: mixed });
        let dst = self.buffer(n.n_v_heads * n.v_dim);
        self.push(Op::DeltaRule { layer: id, qkv: mixed, a, b, dst });
        let norm = self.norm(&n.norm);
        self.push(Op::HeadNorm { buf: dst, head_dim: n.v_dim, norm });
        self.push(Op::Gate { gate: z, buf: dst, function: GateFunction::Silu });
        let [out] = self.linears(dst, [&n.out]);
        self.norm_in_place(out, &layer.mixer_post_norm);
        self.push(Op::Add { src: out, dst: hidden });
    }

    fn finish(mut self, hidden: BufferId) -> Program {
        let spec = self.spec;
        let norm = self.norm(&spec.final_norm);
        let head = spec.head.as_ref().unwrap_or(&spec.embedding);
        let weight = self.weight(head);
        let head = Head {
            norm,
            weight,
            pack: self.order(head.format),
            tied: spec.head.is_none(),
            softcap: spec.logit_softcap,
        };
        end_routers(&mut self.segments);
        let (offsets, scratch_width) = scratch::plan(&self.lives);
        let buffers = self.lives.iter().zip(offsets);
        Program {
            precision: self.precision,
            weights: self.weights,
            vectors: self.vectors,
            ropes: spec.ropes.clone(),
            buffers: buffers.map(|(l, offset)| Buffer { width: l.width, offset }).collect(),
            scratch_width,
            packs: self.packs,
            kv_layers: self.kv_layers,
            kv_windows: self.kv_windows,
            recurrent: self.recurrent,
            moes: self.moes,
            segments: self.segments,
            hidden,
            head,
            kept_layers: Vec::new(),
            draft: None,
            block_draft: None,
        }
    }
}

/// Segments without experts have no router.
fn end_routers(segments: &mut [Segment]) {
    for segment in segments.iter_mut().filter(|s| s.moe.is_none()) {
        segment.router = segment.ops.len();
    }
}

impl Op {
    /// Buffers that the operation reads or writes.
    pub fn buffers(&self) -> Vec<BufferId> {
        match self {
            Op::RopeAngles { dst, .. } => vec![*dst],
            Op::RmsNorm { src, dst, .. } | Op::Add { src, dst } | Op::Copy { src, dst } => {
                vec![*src, *dst]
            }
            Op::HeadNorm { buf, .. } | Op::Scale { buf, .. } => vec![*buf],
            Op::Pack { src, .. } => vec![*src],
            Op::Linears(list) => list
                .iter()
                .flat_map(|l| match l.src {
                    Operand::F32(b) => vec![b, l.dst],
                    Operand::Packed(_) => vec![l.dst],
                })
                .collect(),
            Op::Rope { buf, angles, .. } => vec![*buf, *angles],
            Op::StoreKv { k, v, .. } => vec![*k, *v],
            Op::Attention(a) => vec![a.q, a.dst],
            Op::Glu { gate, up, dst, .. } => vec![*gate, *up, *dst],
            Op::SplitHeads { src, query, gate, .. } => vec![*src, *query, *gate],
            Op::Join { a, b, dst } => vec![*a, *b, *dst],
            Op::Gate { gate, buf, .. } => vec![*gate, *buf],
            Op::ConvSilu { src, dst, .. } => vec![*src, *dst],
            Op::DeltaRule { qkv, a, b, dst, .. } => vec![*qkv, *a, *b, *dst],
            Op::Route { logits, .. } | Op::Guess { logits, .. } => vec![*logits],
            Op::Combine { dst, .. } => vec![*dst],
            Op::Tap(tap) => vec![tap.buf],
        }
    }
}
