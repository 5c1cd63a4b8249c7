//! The closed vocabulary in which a family is described.
//!
//! Shapes use the glossary of `docs/ARCHITECTURE.md`: `d` hidden_size, `hd` head_dim, `E` experts.

use std::sync::Arc;

use forebay_quant::Format;

/// A byte range of one of the catalog's files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Extent {
    /// Index into `Catalog::files`.
    pub file: u32,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// Where one plane of a matrix lies: `extent` covers its first to its last row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaneRef {
    /// The bytes; with a stride larger than a row the last row ends the extent.
    pub extent: Extent,
    /// Distance between two rows in bytes.
    pub stride: u64,
}

/// A weight matrix `[rows, cols]` in the published files.
#[derive(Clone, Debug, PartialEq)]
pub struct WeightRef {
    /// Tensor name, for messages.
    pub name: Arc<str>,
    /// Format.
    pub format: Format,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
    /// One to three planes.
    pub planes: Vec<PlaneRef>,
}

/// A vector of `len` floats in the files (norm weight, bias, sinks).
#[derive(Clone, Debug, PartialEq)]
pub struct VectorRef {
    /// Tensor name, for messages.
    pub name: Arc<str>,
    /// F32, F16 or Bf16.
    pub format: Format,
    /// Elements.
    pub len: usize,
    /// First element's offset.
    pub extent: Extent,
    /// Distance between two elements, counted in elements (2 where gate and up alternate).
    pub stride: usize,
}

/// RMSNorm: `x / sqrt(mean(x^2) + eps) * w` (Zhang & Sennrich 2019).
#[derive(Clone, Debug, PartialEq)]
pub struct Norm {
    /// `w`; none means 1.
    pub weight: Option<VectorRef>,
    /// Added to the mean of squares.
    pub eps: f32,
    /// Weight is stored as `w - 1`.
    pub plus_one: bool,
    /// Constant that multiplies the weight (1 in most places); without a weight it must be 1.
    pub factor: f32,
}

/// `y = W x (+ b)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Linear {
    /// `[out, in]`
    pub weight: WeightRef,
    /// `[out]`
    pub bias: Option<VectorRef>,
}

/// Which two dimensions of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopePairs {
    /// `(i, i + rotary_dim / 2)`.
    Halves,
    /// `(2 i, 2 i + 1)`: GGUF files of Llama models hold q and k rows permuted for it.
    Adjacent,
}

/// How rotary angles are made.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Rotated dimensions of a head (even, at most head_dim).
    pub rotary_dim: usize,
    /// Inverse frequency per pair, `[rotary_dim / 2]`: all scaling is already in it.
    pub inv_freq: Vec<f32>,
    /// Factor on cos and sin (YaRN).
    pub attention_factor: f32,
    /// Which dimensions are a pair.
    pub pairs: RopePairs,
}

/// Index into [`ModelSpec::ropes`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RopeId(pub usize);

/// Softmax attention with grouped KV heads.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Query heads.
    pub n_heads: usize,
    /// KV heads.
    pub n_kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// `[n_heads * hd, d]`
    pub q: Linear,
    /// `[n_kv_heads * hd, d]`
    pub k: Linear,
    /// `[n_kv_heads * hd, d]`; none: the value is the raw k projection.
    pub v: Option<Linear>,
    /// `[d, n_heads * hd]`
    pub o: Linear,
    /// Per-head norm of q, weight `[hd]`.
    pub q_norm: Option<Norm>,
    /// Per-head norm of k, weight `[hd]`.
    pub k_norm: Option<Norm>,
    /// Per-head norm of v.
    pub v_norm: Option<Norm>,
    /// Rotary embedding.
    pub rope: Option<RopeId>,
    /// Sliding window: keys `j` with `0 <= i - j < window`.
    pub window: Option<usize>,
    /// One logit per query head in the softmax denominator, `[n_heads]`.
    pub sinks: Option<VectorRef>,
    /// Factor on `q . k`.
    pub scale: f32,
    /// The q projection gives per head `[query | gate]`, `[n_heads * 2 hd, d]`; the output is multiplied by
    /// `sigmoid(gate)` before o.
    pub output_gate: bool,
}

/// Gated delta net (Yang, Kautz, Hatamizadeh 2024): a recurrent state per value head.
#[derive(Clone, Debug, PartialEq)]
pub struct DeltaNet {
    /// Key heads.
    pub n_k_heads: usize,
    /// Value heads, a multiple of the key heads.
    pub n_v_heads: usize,
    /// Width of a key head.
    pub k_dim: usize,
    /// Width of a value head.
    pub v_dim: usize,
    /// Value head `v` uses key head `v mod n_k_heads`; otherwise `v / (n_v_heads / n_k_heads)`.
    pub tiled: bool,
    /// `[channels, d]` with `channels = 2 n_k_heads k_dim + n_v_heads v_dim`, ordered q, k, v.
    pub qkv: Linear,
    /// `[n_v_heads v_dim, d]`
    pub z: Linear,
    /// `[n_v_heads, d]`, with f32 activations.
    pub a: Linear,
    /// `[n_v_heads, d]`, with f32 activations.
    pub b: Linear,
    /// `[channels, conv_width]`, the last tap is the newest input.
    pub conv: VectorRef,
    /// Taps of the convolution.
    pub conv_width: usize,
    /// `[n_v_heads]`
    pub decay: Decay,
    /// `[n_v_heads]`
    pub dt_bias: VectorRef,
    /// Norm of every value head, weight `[v_dim]`, before the product with `silu(z)`.
    pub norm: Norm,
    /// `[d, n_v_heads v_dim]`
    pub out: Linear,
}

/// How a delta net's decay is stored.
#[derive(Clone, Debug, PartialEq)]
pub enum Decay {
    /// `A_log`
    Log(VectorRef),
    /// `-exp(A_log)`
    NegativeExp(VectorRef),
}

/// A multi-token-prediction block: drafts the token after next from the last hidden state and the next
/// token. Read, and not run yet.
#[derive(Clone, Debug, PartialEq)]
pub struct MultiToken {
    /// `[d, 2 d]` over `[embedding | hidden]`, each normed.
    pub fc: Linear,
    /// Norm of the embedding.
    pub embedding_norm: Norm,
    /// Norm of the hidden state.
    pub hidden_norm: Norm,
    /// The decoder layer.
    pub layer: Layer,
    /// Norm before the model's own head.
    pub norm: Norm,
}

/// What mixes positions in a layer.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Mixer {
    /// Softmax attention.
    Attention(Attention),
    /// Gated delta net.
    DeltaNet(DeltaNet),
}

/// Gated activation of a feed-forward.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Activation {
    /// `silu(gate) * up`
    Silu,
    /// `gelu_tanh(gate) * up`
    GeluTanh,
    /// gpt-oss: gate clamped to at most `limit`, up to `[-limit, limit]`; `(up + 1) * gate * sigmoid(alpha * gate)`.
    ClampedSwiglu {
        /// Factor in the sigmoid.
        alpha: f32,
        /// Clamp.
        limit: f32,
    },
}

/// A dense gated MLP.
#[derive(Clone, Debug, PartialEq)]
pub struct Mlp {
    /// `[inter, d]`
    pub gate: Linear,
    /// `[inter, d]`
    pub up: Linear,
    /// `[d, inter]`
    pub down: Linear,
    /// Activation.
    pub activation: Activation,
}

/// How router logits become weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Score {
    /// Top-k of the logits, softmax over the selected ones. Equals softmax over all, renormalised.
    SoftmaxSelected,
    /// Softmax over all, top-k, not renormalised.
    SoftmaxAll,
}

/// Chooses experts for a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Router {
    /// `[E, d]`, always computed with f32 activations.
    pub weight: Linear,
    /// Experts per token.
    pub top_k: usize,
    /// Score function.
    pub score: Score,
    /// Norm of the residual stream that makes the router's own input; none: the branch's normed input.
    pub input_norm: Option<Norm>,
    /// `[E]`: factor on the weight of each expert after the score function.
    pub expert_scale: Option<VectorRef>,
}

/// The three matrices of one expert.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertWeights {
    /// `[inter, d]`
    pub gate: WeightRef,
    /// `[inter, d]`
    pub up: WeightRef,
    /// `[d, inter]`
    pub down: WeightRef,
}

/// Biases of one expert; resident with the trunk.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertBias {
    /// `[inter]`
    pub gate: VectorRef,
    /// `[inter]`
    pub up: VectorRef,
    /// `[d]`
    pub down: VectorRef,
}

/// The routed experts of a layer.
#[derive(Clone, Debug, PartialEq)]
pub struct Experts {
    /// Width inside an expert.
    pub intermediate: usize,
    /// Activation.
    pub activation: Activation,
    /// One per expert; all of the same formats and shapes.
    pub weights: Vec<ExpertWeights>,
    /// One per expert, or empty.
    pub biases: Vec<ExpertBias>,
}

/// A dense branch of a feed-forward.
#[derive(Clone, Debug, PartialEq)]
pub struct DenseBranch {
    /// Norm of the branch's input.
    pub norm: Norm,
    /// The MLP.
    pub mlp: Mlp,
    /// `[1, d]`, with f32 activations: the branch's output is multiplied by `sigmoid(gate x)`.
    pub gate: Option<Linear>,
    /// Norm of the branch's output.
    pub post_norm: Option<Norm>,
}

/// A routed branch.
#[derive(Clone, Debug, PartialEq)]
pub struct RoutedBranch {
    /// Norm of the branch's input (experts, and the router unless it has a norm of its own).
    pub norm: Norm,
    /// Router.
    pub router: Router,
    /// Experts.
    pub experts: Experts,
    /// Norm of the branch's output.
    pub post_norm: Option<Norm>,
}

/// Feed-forward of a layer: one branch or the sum of both.
#[derive(Clone, Debug, PartialEq)]
pub struct FeedForward {
    /// Dense part (a dense layer, or the shared expert).
    pub dense: Option<DenseBranch>,
    /// Routed part.
    pub routed: Option<RoutedBranch>,
    /// Norm of the sum of the branches.
    pub post_norm: Option<Norm>,
}

/// One decoder layer: `x += post_norm(mixer(norm(x))); x += ffn(x); x *= output_scale`.
#[derive(Clone, Debug, PartialEq)]
pub struct Layer {
    /// Norm before the mixer.
    pub mixer_norm: Norm,
    /// Mixer.
    pub mixer: Mixer,
    /// Norm of the mixer's output.
    pub mixer_post_norm: Option<Norm>,
    /// Feed-forward.
    pub ffn: FeedForward,
    /// `[1]`: factor on the residual stream at the layer's end.
    pub output_scale: Option<VectorRef>,
}

/// A model, described.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelSpec {
    /// Family name as users know it (`gpt-oss`, `qwen3-moe`).
    pub family: &'static str,
    /// `d`
    pub hidden_size: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Longest context the model was made for, in tokens.
    pub context_length: usize,
    /// `[vocab, d]`
    pub embedding: WeightRef,
    /// Factor on embedding rows, in f32; none: 1.
    pub embedding_scale: Option<f32>,
    /// Layers.
    pub layers: Vec<Layer>,
    /// Last norm.
    pub final_norm: Norm,
    /// `[vocab, d]`; none: tied to the embedding.
    pub head: Option<WeightRef>,
    /// Logits become `cap * tanh(logit / cap)`.
    pub logit_softcap: Option<f32>,
    /// Rotary tables.
    pub ropes: Vec<Rope>,
    /// Multi-token-prediction block.
    pub multi_token: Option<Box<MultiToken>>,
    /// Ids that end generation: the union of all places that name some.
    pub eos_ids: Vec<u32>,
    /// Oddities and skipped parts, one sentence each.
    pub notes: Vec<String>,
}
