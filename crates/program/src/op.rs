//! The operations of a program. Shapes: `rows` are the rows of the batch, all buffers are f32
//! `[rows, width]` unless said otherwise.

use forebay_models::{Activation, Score, VectorRef, WeightRef};
use forebay_quant::ActOrder;

use crate::tap::Tap;

/// Compute precision of the matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Precision {
    /// Activations stay f32: the yardstick.
    F32,
    /// Activations of quantised weights are rounded to 8 bits per block of 32.
    Q8,
}

macro_rules! index {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub usize);
    };
}
index!(
    /// Index into [`Program::weights`].
    WeightId
);
index!(
    /// Index into [`Program::vectors`].
    VectorId
);
index!(
    /// Index into [`Program::buffers`].
    BufferId
);
index!(
    /// Index into [`Program::packs`].
    PackId
);
index!(
    /// Index into [`Program::kv_layers`].
    KvId
);
index!(
    /// Index into [`Program::moes`].
    MoeId
);
index!(
    /// Index into [`Program::recurrent`].
    RecurrentId
);

/// A norm with its weight resident.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NormParams {
    /// Weight, 1 already added where the family stores `w - 1`; none means 1.
    pub weight: Option<VectorId>,
    /// Added to the mean of squares.
    pub eps: f32,
}

/// A number that multiplies a whole buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Factor {
    /// Known from the description.
    Constant(f32),
    /// A vector of one element.
    Learned(VectorId),
}

/// Input of a matrix product.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operand {
    /// f32 rows.
    F32(BufferId),
    /// Rows packed to 8 bits by an [`Op::Pack`] before.
    Packed(PackId),
}

/// `dst[rows, out] = src[rows, in] * W^T (+ bias)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearOp {
    /// `[out, in]`
    pub weight: WeightId,
    /// `[out]`
    pub bias: Option<VectorId>,
    /// Input.
    pub src: Operand,
    /// Output.
    pub dst: BufferId,
}

/// Softmax attention of the batch's rows over their sequences' KV.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionOp {
    /// Which KV.
    pub kv: KvId,
    /// `[rows, n_heads * hd]`
    pub q: BufferId,
    /// `[rows, n_heads * hd]`
    pub dst: BufferId,
    /// Query heads.
    pub n_heads: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Sliding window in positions.
    pub window: Option<usize>,
    /// Rows see all rows of their sequence in the pass, those after them as well.
    pub two_way: bool,
    /// `[n_heads]`
    pub sinks: Option<VectorId>,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Op {
    /// cos of all rows `[rows, pairs]`, then sin of all rows `[rows, pairs]`.
    RopeAngles {
        /// Index into [`Program::ropes`].
        rope: usize,
        /// Angles.
        dst: BufferId,
    },
    /// `dst = rms_norm(src)`, widths equal.
    RmsNorm {
        /// Input.
        src: BufferId,
        /// Output, may be the input.
        dst: BufferId,
        /// Parameters.
        norm: NormParams,
    },
    /// RMSNorm of every head of a row, in place.
    HeadNorm {
        /// `[rows, n_heads * hd]`
        buf: BufferId,
        /// `hd`
        head_dim: usize,
        /// Weight `[hd]`.
        norm: NormParams,
    },
    /// Rounds rows to 8 bits for the products that follow.
    Pack {
        /// Input.
        src: BufferId,
        /// Output.
        dst: PackId,
    },
    /// Matrix products that do not depend on each other.
    Linears(Vec<LinearOp>),
    /// Rotates heads in place.
    Rope {
        /// `[rows, n_heads * hd]`
        buf: BufferId,
        /// `hd`
        head_dim: usize,
        /// From [`Op::RopeAngles`].
        angles: BufferId,
        /// Index into [`Program::ropes`].
        rope: usize,
    },
    /// Writes the rows' keys and values to their sequences' pages, rounded to the KV type.
    StoreKv {
        /// Which KV.
        kv: KvId,
        /// `[rows, n_kv_heads * hd]`
        k: BufferId,
        /// `[rows, n_kv_heads * hd]`
        v: BufferId,
    },
    /// Attention.
    Attention(AttentionOp),
    /// `dst = src`, widths equal.
    Copy {
        /// Input.
        src: BufferId,
        /// Output.
        dst: BufferId,
    },
    /// `buf *= factor`, every element.
    Scale {
        /// In place.
        buf: BufferId,
        /// The factor.
        factor: Factor,
    },
    /// `dst += src`
    Add {
        /// Summand.
        src: BufferId,
        /// Sum.
        dst: BufferId,
    },
    /// `dst = act(gate) * up`; `dst` may be `gate`.
    Glu {
        /// Gate.
        gate: BufferId,
        /// Up.
        up: BufferId,
        /// Output.
        dst: BufferId,
        /// Which activation.
        activation: Activation,
    },
    /// Takes `[query | gate]` per head apart: `src` `[rows, heads * 2 hd]`, the others `[rows, heads * hd]`.
    SplitHeads {
        /// Both.
        src: BufferId,
        /// Queries.
        query: BufferId,
        /// Gates.
        gate: BufferId,
        /// `hd`
        head_dim: usize,
    },
    /// `dst = [a | b]` per row: widths add up.
    Join {
        /// Left part.
        a: BufferId,
        /// Right part.
        b: BufferId,
        /// Both.
        dst: BufferId,
    },
    /// `buf *= act(gate)`, element by element, or row by row where the gate is one number wide.
    Gate {
        /// Gate.
        gate: BufferId,
        /// In place.
        buf: BufferId,
        /// Function of the gate.
        function: GateFunction,
    },
    /// Causal depthwise convolution over a sequence's rows, then silu: `[rows, channels]`.
    ConvSilu {
        /// Whose state and taps.
        layer: RecurrentId,
        /// Input.
        src: BufferId,
        /// Output.
        dst: BufferId,
    },
    /// The gated delta rule over a sequence's rows.
    DeltaRule {
        /// Whose state.
        layer: RecurrentId,
        /// `[rows, channels]`
        qkv: BufferId,
        /// `[rows, n_v_heads]`
        a: BufferId,
        /// `[rows, n_v_heads]`
        b: BufferId,
        /// `[rows, n_v_heads * v_dim]`
        dst: BufferId,
    },
    /// Chooses experts from router logits; the engine reads the choice back.
    Route {
        /// `[rows, E]`
        logits: BufferId,
        /// For which experts.
        moe: MoeId,
    },
    /// Notes which experts `moe` would choose from these logits: a guess, which decides nothing.
    Guess {
        /// `[rows, E]`
        logits: BufferId,
        /// For which experts.
        moe: MoeId,
    },
    /// A named point: whoever runs the program may look at the rows here, or change them. Computes nothing.
    Tap(Tap),
    /// `dst = sum over ranks of weight * expert output`, rank order.
    Combine {
        /// Of which experts.
        moe: MoeId,
        /// `[rows, d]`
        dst: BufferId,
    },
}

/// Routed experts of a layer, as the engine and a backend need them.
#[derive(Clone, Debug, PartialEq)]
pub struct Moe {
    /// Layer number in the model, for messages.
    pub layer: usize,
    /// Experts.
    pub n_experts: usize,
    /// Experts per row.
    pub top_k: usize,
    /// Score function.
    pub score: Score,
    /// Input of the experts `[rows, d]`.
    pub input: Operand,
    /// Inner width.
    pub intermediate: usize,
    /// `d`
    pub hidden_size: usize,
    /// Activation.
    pub activation: Activation,
    /// Whether the inner activations are packed to 8 bits before the down projection, and how.
    pub hidden_order: Option<ActOrder>,
    /// `[E]`: factor on an expert's routing weight.
    pub expert_scale: Option<VectorId>,
    /// Per expert: gate, up, down; or empty.
    pub biases: Vec<[VectorId; 3]>,
    /// Output of each chosen expert `[rows, top_k * d]`.
    pub out: BufferId,
}

/// A guess at the choice of a later layer: its router applied too early, to the stream before the
/// experts of this layer and the mixers between them have added to it.
#[derive(Clone, Debug, PartialEq)]
pub struct Pilot {
    /// Ends with [`Op::Guess`].
    pub ops: Vec<Op>,
    /// Whose choice is guessed.
    pub moe: MoeId,
}

/// Operations up to a router read-back.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Segment {
    /// Run first.
    pub ops: Vec<Op>,
    /// Where in `ops` the router begins; their end where there is none.
    pub router: usize,
    /// Then these experts are read back, and fetched.
    pub moe: Option<MoeId>,
    /// Run then, where guesses are wanted: the next routed layer's router on the stream as it is here.
    pub pilot: Option<Pilot>,
    /// Run while their reads are in flight.
    pub overlap: Vec<Op>,
}

/// A buffer: `width` floats per row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    /// Floats per row.
    pub width: usize,
    /// Floats per row before it in the scratch arena.
    pub offset: usize,
}

/// A packed activation buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Pack {
    /// Elements per row.
    pub cols: usize,
    /// Order inside blocks.
    pub order: ActOrder,
    /// Input of routed experts: must outlive the operations that overlap with their reads, so it is
    /// never shared with those.
    pub for_experts: bool,
}

/// KV of one attention layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvLayer {
    /// KV heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Layers of one class have the same window, and so share page tables: index into
    /// [`Program::kv_windows`].
    pub class: usize,
}

/// What a gate's number becomes before it multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateFunction {
    /// `1 / (1 + exp(-x))`
    Sigmoid,
    /// `x * sigmoid(x)`
    Silu,
}

/// A recurrent layer: a gated delta net.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Recurrent {
    /// Key heads.
    pub n_k_heads: usize,
    /// Value heads.
    pub n_v_heads: usize,
    /// Width of a key head.
    pub k_dim: usize,
    /// Width of a value head.
    pub v_dim: usize,
    /// Taps of the convolution.
    pub conv_width: usize,
    /// Value head `v` uses key head `v mod n_k_heads`.
    pub tiled: bool,
    /// `[conv_width, channels]`
    pub taps: VectorId,
    /// `-exp(A_log)`, `[n_v_heads]`
    pub neg_exp_a: VectorId,
    /// `[n_v_heads]`
    pub dt_bias: VectorId,
}

/// How a stored vector becomes the one that is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VectorForm {
    /// As it is.
    Plain,
    /// `-exp(x)`
    NegativeExp,
    /// Stored `[n, inner]`, used `[inner, n]`.
    Transposed {
        /// Columns as stored.
        inner: usize,
    },
}

/// A vector that is resident as f32.
#[derive(Clone, Debug, PartialEq)]
pub struct Vector {
    /// Where it lies.
    pub source: VectorRef,
    /// Add 1 to every element when loading.
    pub plus_one: bool,
    /// Then multiply by this.
    pub factor: f32,
    /// Then bring it into this form.
    pub form: VectorForm,
}

/// A lowered model.
#[derive(Clone, Debug, PartialEq)]
pub struct Program {
    /// Precision it was lowered for.
    pub precision: Precision,
    /// Resident matrices (the trunk).
    pub weights: Vec<WeightRef>,
    /// Resident vectors.
    pub vectors: Vec<Vector>,
    /// Rotary tables.
    pub ropes: Vec<forebay_models::Rope>,
    /// Scratch buffers of the body.
    pub buffers: Vec<Buffer>,
    /// Floats per row of the body's scratch arena.
    pub scratch_width: usize,
    /// Packed buffers, one of each kind.
    pub packs: Vec<Pack>,
    /// KV layers.
    pub kv_layers: Vec<KvLayer>,
    /// Sliding window of each class of KV layers, in positions; none: full attention.
    pub kv_windows: Vec<Option<usize>>,
    /// Recurrent layers.
    pub recurrent: Vec<Recurrent>,
    /// Routed layers.
    pub moes: Vec<Moe>,
    /// The body.
    pub segments: Vec<Segment>,
    /// The residual stream `[rows, d]`: filled from the embedding before, read by the head after.
    pub hidden: BufferId,
    /// The head: applied to the rows that want logits.
    pub head: Head,
    /// Layers whose output (the residual stream after all of the layer) is asked for, with the buffer `[rows, d]` that
    /// holds it when a pass is over.
    pub kept_layers: Vec<(usize, BufferId)>,
    /// The model's own block for drafting, where it is wanted.
    pub draft: Option<DraftBlock>,
    /// A block drafter beside the model, where one is given.
    pub block_draft: Option<BlockDraft>,
}

impl Program {
    /// What drafts, where something does: (first matrix, first vector, first KV layer) that are its alone.
    pub fn drafter_parts(&self) -> Option<(usize, usize, usize)> {
        let own = self.draft.as_ref().map(|b| (b.first_weight, b.first_vector, b.kv.0));
        own.or_else(|| {
            let beside = self.block_draft.as_ref();
            beside.map(|b| (b.first_weight, b.first_vector, b.kv.start))
        })
    }

    /// Head and stream of what drafts.
    pub fn drafter_head(&self) -> Option<(Head, BufferId)> {
        let own = self.draft.as_ref().map(|b| (b.head, b.stream));
        own.or_else(|| self.block_draft.as_ref().map(|b| (b.head, b.stream)))
    }
}

/// A block drafter: a small model of its own weights that fills a block of masks, given features of the target. It shares the
/// target's head, scratch and kernels, and has keys and values of its own: KV layers of a class behind those of
/// [`Program::kv_windows`].
#[derive(Clone, Debug, PartialEq)]
pub struct BlockDraft {
    /// Run right after a pass of the body: its rows of [`Program::kept_layers`] become keys and values of context.
    pub context: Vec<Op>,
    /// Run over the rows of a block.
    pub block: Vec<Op>,
    /// Residual stream of the block `[rows, d]`: embeddings before, what the head reads after.
    pub stream: BufferId,
    /// Its norm and the model's own head.
    pub head: Head,
    /// Matrices from here on are the drafter's alone.
    pub first_weight: usize,
    /// Vectors from here on are the drafter's alone.
    pub first_vector: usize,
    /// Its keys and values, layer by layer.
    pub kv: std::ops::Range<usize>,
}

/// A multi-token-prediction block: from the state of a position and the next token it drafts the token after that. It is run
/// by itself after passes of the body, shares the body's matrices, scratch and experts' store, and has keys and values of
/// its own: one KV layer, of a class behind those of [`Program::kv_windows`].
#[derive(Clone, Debug, PartialEq)]
pub struct DraftBlock {
    /// What the body leaves for it: the last layer's output after the last norm, `[rows, d]`.
    pub source: BufferId,
    /// Input: embedding of the next token, `[rows, d]`.
    pub embedding: BufferId,
    /// Input: rows of `source`, or of `next` when it goes on from its own draft, `[rows, d]`.
    pub hidden: BufferId,
    /// The block.
    pub segments: Vec<Segment>,
    /// Its residual stream, which its head reads.
    pub stream: BufferId,
    /// Its output as the input of another step, `[rows, d]`.
    pub next: BufferId,
    /// Its norm and the model's own head.
    pub head: Head,
    /// Matrices from here on are the block's alone.
    pub first_weight: usize,
    /// Vectors from here on are the block's alone.
    pub first_vector: usize,
    /// Its keys and values.
    pub kv: KvId,
    /// Its experts, where it is routed.
    pub moe: Option<MoeId>,
}

/// `logits = W norm(hidden)`, optionally soft-capped.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Head {
    /// Last norm.
    pub norm: NormParams,
    /// `[vocab, d]`
    pub weight: WeightId,
    /// Packed input, when the head is quantised and precision is q8.
    pub pack: Option<ActOrder>,
    /// The embedding, when it is resident because the head is tied to it.
    pub tied: bool,
    /// `cap * tanh(logit / cap)`.
    pub softcap: Option<f32>,
}
