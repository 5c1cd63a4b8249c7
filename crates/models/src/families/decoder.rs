//! What most decoder families share: names and shapes of embedding, head, attention projections and
//! stacked experts. A family calls these with its own choices; nothing here asks which family it is.

use crate::config::{self, Config};
use crate::error::ModelError;
use crate::spec::{
    Activation, Attention, DenseBranch, ExpertWeights, Experts, FeedForward, Layer, Mixer, Mlp,
    ModelSpec, Norm, Rope, RoutedBranch, Router, Score,
};
use crate::weights::{Name, Weights};

const fn name(hf: &'static str, gguf: &'static str) -> Name {
    Name { hf, gguf }
}

pub const EMBEDDING: Name = name("embed_tokens", "token_embd");
pub const HEAD: Name = name("/lm_head", "output");
pub const FINAL_NORM: Name = name("norm", "output_norm");
pub const MIXER_NORM: Name = name("layers.{l}.input_layernorm", "blk.{l}.attn_norm");
pub const FFN_NORM: Name = name("layers.{l}.post_attention_layernorm", "blk.{l}.ffn_norm");
pub const ROPE_FREQS: Name = name("-", "rope_freqs");
const Q: Name = name("layers.{l}.self_attn.q_proj", "blk.{l}.attn_q");
const K: Name = name("layers.{l}.self_attn.k_proj", "blk.{l}.attn_k");
pub const V: Name = name("layers.{l}.self_attn.v_proj", "blk.{l}.attn_v");
const O: Name = name("layers.{l}.self_attn.o_proj", "blk.{l}.attn_output");
pub const Q_NORM: Name = name("layers.{l}.self_attn.q_norm", "blk.{l}.attn_q_norm");
pub const K_NORM: Name = name("layers.{l}.self_attn.k_norm", "blk.{l}.attn_k_norm");
pub const MLP_GATE: Name = name("layers.{l}.mlp.gate_proj", "blk.{l}.ffn_gate");
pub const MLP_UP: Name = name("layers.{l}.mlp.up_proj", "blk.{l}.ffn_up");
pub const MLP_DOWN: Name = name("layers.{l}.mlp.down_proj", "blk.{l}.ffn_down");

/// Sizes that every decoder has.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    pub layers: usize,
    pub d: usize,
    pub vocab: usize,
    pub context: usize,
    pub n_heads: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
    pub eps: f32,
}

impl Shape {
    pub fn read(cfg: &Config<'_>, catalog: &forebay_files::Catalog) -> Result<Shape, ModelError> {
        let d = cfg.count(config::HIDDEN)?;
        let n_heads = cfg.count(config::HEADS)?;
        // A family whose layers differ asks for the others itself.
        let n_kv_heads = cfg.opt_count_at(config::KV_HEADS, Some(0))?.unwrap_or(n_heads);
        let bad = |key: &str, found: usize, expected: String| ModelError::BadValue {
            key: key.into(),
            found: found.to_string(),
            expected,
        };
        let head_dim = cfg.opt_count(config::HEAD_DIM)?.unwrap_or(d / n_heads);
        let layers = cfg.count(config::LAYERS)?;
        if layers > 1024 {
            return Err(bad("num_hidden_layers", layers, "at most 1024".into()));
        }
        let shape = Shape {
            layers,
            d,
            vocab: vocab_size(cfg, catalog)?,
            context: cfg.count(config::CONTEXT)?,
            n_heads,
            n_kv_heads: 1,
            head_dim: 2,
            eps: cfg.float(config::RMS_EPS)? as f32,
        };
        shape.with_heads(n_kv_heads, head_dim)
    }

    /// The same with other heads, for layers that differ.
    pub fn with_heads(self, n_kv_heads: usize, head_dim: usize) -> Result<Shape, ModelError> {
        let bad = |key: &str, found: usize, expected: String| ModelError::BadValue {
            key: key.into(),
            found: found.to_string(),
            expected,
        };
        if n_kv_heads == 0 || !self.n_heads.is_multiple_of(n_kv_heads) {
            let expected = format!("a divisor of {}", self.n_heads);
            return Err(bad("num_key_value_heads", n_kv_heads, expected));
        }
        if head_dim == 0 || !head_dim.is_multiple_of(2) || head_dim > 1024 {
            return Err(bad("head_dim", head_dim, "an even number up to 1024".into()));
        }
        Ok(Shape { n_kv_heads, head_dim, ..self })
    }
}

/// Rows of the embedding tensor: GGUF has no reliable key, so the tensor itself is asked there.
fn vocab_size(cfg: &Config<'_>, catalog: &forebay_files::Catalog) -> Result<usize, ModelError> {
    const VOCAB: config::Field = config::Field { hf: &["vocab_size"], gguf: "" };
    if !cfg.is_gguf() {
        return cfg.count(VOCAB);
    }
    let name = "token_embd.weight";
    match catalog.tensors.get(name).map(|t| t.shape.as_slice()) {
        Some([rows, _]) => Ok(*rows as usize),
        _ => Err(ModelError::MissingTensor { name: name.into(), hint: String::new() }),
    }
}

/// Attention with plain q, k, v, o projections (biases where the checkpoint has them).
pub fn attention(w: &Weights<'_>, s: &Shape, l: usize) -> Result<Attention, ModelError> {
    attention_of(w, s, l, true, false)
}

/// The same; without `values` a layer's values are its raw keys, and it has no v projection; with an
/// `output_gate` the q projection has a gate beside every head's query.
pub fn attention_of(
    w: &Weights<'_>,
    s: &Shape,
    l: usize,
    values: bool,
    output_gate: bool,
) -> Result<Attention, ModelError> {
    let q_rows = s.n_heads * s.head_dim * if output_gate { 2 } else { 1 };
    let (q_width, kv_width) = (s.n_heads * s.head_dim, s.n_kv_heads * s.head_dim);
    Ok(Attention {
        n_heads: s.n_heads,
        n_kv_heads: s.n_kv_heads,
        head_dim: s.head_dim,
        q: w.linear(Q, l, q_rows, s.d)?,
        k: w.linear(K, l, kv_width, s.d)?,
        v: values.then(|| w.linear(V, l, kv_width, s.d)).transpose()?,
        o: w.linear(O, l, s.d, q_width)?,
        q_norm: None,
        k_norm: None,
        v_norm: None,
        rope: None,
        window: None,
        sinks: None,
        scale: (1.0 / (s.head_dim as f64).sqrt()) as f32,
        output_gate,
    })
}

/// Names of a layer's routed experts in every dialect.
pub struct ExpertNames {
    /// Fused gate and up, `[E, 2 I, d]`, stacked; how rows are split is the family's choice.
    pub fused: Name,
    /// Stacked `[E, I, d]`, in any spelling (GGUF, MLX).
    pub gate: &'static [Name],
    pub up: &'static [Name],
    /// Stacked `[E, d, I]`.
    pub down: &'static [Name],
    /// One by one, `{e}`.
    pub single: [Name; 3],
}

pub const EXPERTS: ExpertNames = ExpertNames {
    fused: name("layers.{l}.mlp.experts.gate_up_proj", "blk.{l}.ffn_gate_up_exps"),
    gate: &[
        name("layers.{l}.mlp.switch_mlp.gate_proj", "blk.{l}.ffn_gate_exps"),
        name("layers.{l}.mlp.experts.gate_proj", "blk.{l}.ffn_gate_exps"),
    ],
    up: &[
        name("layers.{l}.mlp.switch_mlp.up_proj", "blk.{l}.ffn_up_exps"),
        name("layers.{l}.mlp.experts.up_proj", "blk.{l}.ffn_up_exps"),
    ],
    down: &[
        name("layers.{l}.mlp.switch_mlp.down_proj", "blk.{l}.ffn_down_exps"),
        name("layers.{l}.mlp.experts.down_proj", "blk.{l}.ffn_down_exps"),
    ],
    single: [
        name("layers.{l}.mlp.experts.{e}.gate_proj", ""),
        name("layers.{l}.mlp.experts.{e}.up_proj", ""),
        name("layers.{l}.mlp.experts.{e}.down_proj", ""),
    ],
};

/// How a fused gate-and-up tensor's rows divide.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum FusedRows {
    /// Even rows gate, odd rows up.
    Alternating,
    /// First half gate, second half up.
    Halves,
}

/// The routed experts of layer `l`: count `e`, inner width `i`, whatever way they are stored.
pub fn experts(
    w: &Weights<'_>,
    names: &ExpertNames,
    l: usize,
    [e, i, d]: [usize; 3],
    fused: FusedRows,
    activation: Activation,
) -> Result<Experts, ModelError> {
    let mut weights = Vec::with_capacity(e);
    if w.has(names.single[0], l) {
        for x in 0..e {
            let [gate, up, down] = names.single;
            weights.push(ExpertWeights {
                gate: w.stack(gate, l, x, [1, i, d])?.matrix(0),
                up: w.stack(up, l, x, [1, i, d])?.matrix(0),
                down: w.stack(down, l, x, [1, d, i])?.matrix(0),
            });
        }
    } else {
        let down = w.stack(w.any(names.down, l), l, 0, [e, d, i])?;
        if w.has(names.fused, l) {
            let gate_up = w.stack(names.fused, l, 0, [e, 2 * i, d])?;
            let (up_first, step) = match fused {
                FusedRows::Alternating => (1, 2),
                FusedRows::Halves => (i, 1),
            };
            weights.extend((0..e).map(|x| ExpertWeights {
                gate: gate_up.rows(x, 0, step, i),
                up: gate_up.rows(x, up_first, step, i),
                down: down.matrix(x),
            }));
        } else {
            let gate = w.stack(w.any(names.gate, l), l, 0, [e, i, d])?;
            let up = w.stack(w.any(names.up, l), l, 0, [e, i, d])?;
            weights.extend((0..e).map(|x| ExpertWeights {
                gate: gate.matrix(x),
                up: up.matrix(x),
                down: down.matrix(x),
            }));
        }
    }
    Ok(Experts { intermediate: i, activation, weights, biases: Vec::new() })
}

/// A dense gated MLP of width `inner` (biases where the checkpoint has them).
pub fn mlp(
    w: &Weights<'_>,
    s: &Shape,
    l: usize,
    inner: usize,
    activation: Activation,
) -> Result<Mlp, ModelError> {
    Ok(Mlp {
        gate: w.linear(MLP_GATE, l, inner, s.d)?,
        up: w.linear(MLP_UP, l, inner, s.d)?,
        down: w.linear(MLP_DOWN, l, s.d, inner)?,
        activation,
    })
}

/// A router without more than its weights (biases where the checkpoint has them).
pub fn router(
    cfg: &Config<'_>,
    w: &Weights<'_>,
    s: &Shape,
    (name, l): (Name, usize),
    n_experts: usize,
    score: Score,
) -> Result<Router, ModelError> {
    Ok(Router {
        weight: w.linear(name, l, n_experts, s.d)?,
        top_k: top_k(cfg, n_experts)?,
        score,
        input_norm: None,
        expert_scale: None,
    })
}

/// What a layer has behind its mixer, where it is one of these.
pub enum Branch {
    Dense(Mlp),
    Routed(Router, Experts),
}

/// A layer with a norm before the mixer, one before the feed-forward, and none behind them.
pub fn pre_norm_layer(
    w: &Weights<'_>,
    s: &Shape,
    l: usize,
    attention: Attention,
    branch: Branch,
) -> Result<Layer, ModelError> {
    let norm = w.norm(FFN_NORM, l, s.d, s.eps)?;
    let (dense, routed) = match branch {
        Branch::Dense(mlp) => (Some(DenseBranch { norm, mlp, gate: None, post_norm: None }), None),
        Branch::Routed(router, experts) => {
            (None, Some(RoutedBranch { norm, router, experts, post_norm: None }))
        }
    };
    Ok(Layer {
        mixer_norm: w.norm(MIXER_NORM, l, s.d, s.eps)?,
        mixer: Mixer::Attention(attention),
        mixer_post_norm: None,
        ffn: FeedForward { dense, routed, post_norm: None },
        output_scale: None,
    })
}

/// The activation that a folder's config names; `default` where it names none, and in GGUF files, which
/// have no key for it.
pub fn activation(cfg: &Config<'_>, default: Activation) -> Result<Activation, ModelError> {
    let named = cfg.json("hidden_activation").or_else(|| cfg.json("hidden_act"));
    match named.map(|v| v.as_str().unwrap_or_default()) {
        None => Ok(default),
        Some("silu" | "swish") => Ok(Activation::Silu),
        Some("gelu_pytorch_tanh" | "gelu_new") => Ok(Activation::GeluTanh),
        Some(other) => Err(ModelError::Unsupported {
            what: format!("activation {other:?}"),
            detail: "known are silu and gelu_pytorch_tanh".into(),
        }),
    }
}

/// Per layer, whether its attention slides: `layer_types`, GGUF's pattern key, or `default`.
pub fn sliding(
    cfg: &Config<'_>,
    layers: usize,
    default: impl Fn(usize) -> bool,
) -> Result<Vec<bool>, ModelError> {
    let bad = |key: String, found: String, expected: &str| ModelError::BadValue {
        key,
        found,
        expected: expected.into(),
    };
    let key = "attention.sliding_window_pattern";
    if let Some(v) = cfg.gguf(key) {
        let list = v.as_array().unwrap_or(std::slice::from_ref(v));
        return match list {
            [one] if v.as_array().is_none() && one.as_u64().is_some_and(|n| n > 0) => {
                let every = one.as_u64().expect("is a number") as usize;
                Ok((0..layers).map(|l| (l + 1) % every != 0).collect())
            }
            list if list.len() >= layers => (0..layers)
                .map(|l| {
                    list[l].as_bool().ok_or_else(|| bad(key.into(), "no flag".into(), "flags"))
                })
                .collect(),
            _ => Err(bad(key.into(), format!("{} values", list.len()), "one for each layer")),
        };
    }
    let Some(types) = cfg.json("layer_types") else {
        return Ok((0..layers).map(default).collect());
    };
    (0..layers)
        .map(|l| match types.get(l).and_then(|t| t.as_str()) {
            Some("sliding_attention") => Ok(true),
            Some("full_attention") => Ok(false),
            other => Err(bad(
                format!("layer_types[{l}]"),
                format!("{other:?}"),
                "sliding_attention or full_attention",
            )),
        })
        .collect()
}

/// Experts per token, checked against their number.
pub fn top_k(cfg: &Config<'_>, n_experts: usize) -> Result<usize, ModelError> {
    let k = cfg.count(config::TOP_K)?;
    if k > n_experts || n_experts > u16::MAX as usize {
        return Err(ModelError::BadValue {
            key: "experts per token / number of experts".into(),
            found: format!("{k} / {n_experts}"),
            expected: "no more than there are, and fewer than 65536 experts".into(),
        });
    }
    Ok(k)
}

/// Everything around the layers.
pub fn model(
    cfg: &Config<'_>,
    w: Weights<'_>,
    s: &Shape,
    layers: Vec<crate::spec::Layer>,
    ropes: Vec<Rope>,
) -> Result<ModelSpec, ModelError> {
    let embedding = w.matrix(EMBEDDING, 0, s.vocab, s.d)?;
    let final_norm: Norm = w.norm(FINAL_NORM, 0, s.d, s.eps)?;
    let head = w.head(HEAD, cfg.flag("tie_word_embeddings")?, s.vocab, s.d)?;
    let notes = w.finish(&crate::weights::skip_common)?;
    Ok(ModelSpec {
        family: "",
        hidden_size: s.d,
        vocab_size: s.vocab,
        context_length: s.context,
        embedding,
        embedding_scale: None,
        layers,
        final_norm,
        head,
        logit_softcap: None,
        ropes,
        multi_token: None,
        eos_ids: cfg.eos_ids(),
        notes,
    })
}
