//! Llama and what is built like it: Mistral, Mixtral, Qwen2 and Qwen3 dense. References:
//! `models/{llama,mistral,mixtral,qwen2,qwen3}/modeling_*.py` of transformers.
//!
//! Pre-norm attention and gated MLP, or routed experts in its place. They differ in few things, which are
//! [`Traits`]. GGUF files of architecture `llama` hold q and k rows permuted, so that adjacent dimensions
//! turn together.

use forebay_files::Catalog;

use super::Family;
use super::decoder::{self, Branch, ExpertNames, FusedRows, Shape};
use crate::config::{self, Config, Field};
use crate::error::ModelError;
use crate::rope::RopeConfig;
use crate::spec::*;
use crate::weights::{Name, Weights};

/// What the members differ in.
struct Traits {
    /// Per-head norms of q and k.
    qk_norm: bool,
    /// q, k and v have biases, always.
    qkv_bias: bool,
    /// Pairs of the rotary embedding in GGUF files.
    gguf_pairs: RopePairs,
    /// When folders' configs mean their `sliding_window`.
    window: Windowed,
    /// Folders have routed experts.
    routed: bool,
}

/// When `sliding_window` counts.
#[derive(PartialEq, Eq)]
enum Windowed {
    Never,
    /// When it is not null.
    WhenGiven,
    /// When `use_sliding_window` says so.
    WhenAsked,
}

const PLAIN: Traits = Traits {
    qk_norm: false,
    qkv_bias: false,
    gguf_pairs: RopePairs::Halves,
    window: Windowed::Never,
    routed: false,
};

pub const LLAMA: Family = Family {
    name: "llama",
    model_types: &["llama"],
    gguf: &["llama"],
    read: |cfg, catalog| read(cfg, catalog, Traits { gguf_pairs: RopePairs::Adjacent, ..PLAIN }),
};

pub const MISTRAL: Family = Family {
    name: "mistral",
    model_types: &["mistral"],
    gguf: &[],
    read: |cfg, catalog| read(cfg, catalog, Traits { window: Windowed::WhenGiven, ..PLAIN }),
};

pub const MIXTRAL: Family = Family {
    name: "mixtral",
    model_types: &["mixtral"],
    gguf: &[],
    read: |cfg, catalog| {
        read(cfg, catalog, Traits { window: Windowed::WhenGiven, routed: true, ..PLAIN })
    },
};

pub const QWEN2: Family = Family {
    name: "qwen2",
    model_types: &["qwen2"],
    gguf: &["qwen2"],
    read: |cfg, catalog| {
        read(cfg, catalog, Traits { qkv_bias: true, window: Windowed::WhenAsked, ..PLAIN })
    },
};

pub const QWEN3: Family = Family {
    name: "qwen3",
    model_types: &["qwen3"],
    gguf: &["qwen3"],
    read: |cfg, catalog| {
        read(cfg, catalog, Traits { qk_norm: true, window: Windowed::WhenAsked, ..PLAIN })
    },
};

const fn name(hf: &'static str, gguf: &'static str) -> Name {
    Name { hf, gguf }
}

const ROUTERS: [Name; 2] = [
    name("layers.{l}.block_sparse_moe.gate", "blk.{l}.ffn_gate_inp"),
    name("layers.{l}.mlp.gate", "blk.{l}.ffn_gate_inp"),
];
/// How GGUF files of the first months named experts, one tensor each.
const OLD_EXPERT: Name = name("-", "blk.{l}.ffn_gate.0");

const EXPERTS: ExpertNames = ExpertNames {
    fused: name("layers.{l}.mlp.experts.gate_up_proj", "blk.{l}.ffn_gate_up_exps"),
    gate: &[
        name("layers.{l}.block_sparse_moe.switch_mlp.gate_proj", "blk.{l}.ffn_gate_exps"),
        name("layers.{l}.mlp.switch_mlp.gate_proj", "blk.{l}.ffn_gate_exps"),
    ],
    up: &[
        name("layers.{l}.block_sparse_moe.switch_mlp.up_proj", "blk.{l}.ffn_up_exps"),
        name("layers.{l}.mlp.switch_mlp.up_proj", "blk.{l}.ffn_up_exps"),
    ],
    down: &[
        name("layers.{l}.block_sparse_moe.switch_mlp.down_proj", "blk.{l}.ffn_down_exps"),
        name("layers.{l}.mlp.switch_mlp.down_proj", "blk.{l}.ffn_down_exps"),
        name("layers.{l}.mlp.experts.down_proj", "blk.{l}.ffn_down_exps"),
    ],
    single: [
        name("layers.{l}.block_sparse_moe.experts.{e}.w1", "-"),
        name("layers.{l}.block_sparse_moe.experts.{e}.w3", "-"),
        name("layers.{l}.block_sparse_moe.experts.{e}.w2", "-"),
    ],
};

const ROTARY: Field = Field { hf: &["partial_rotary_factor"], gguf: "rope.dimension_count" };
const MAX_WINDOW_LAYERS: Field = Field { hf: &["max_window_layers"], gguf: "" };
/// Llama 2 and the first Qwen2 configs leave it out.
const DEFAULTS: &[(&str, f64)] = &[("rope_theta", 10_000.0)];

fn read(cfg: &Config<'_>, catalog: &Catalog, traits: Traits) -> Result<ModelSpec, ModelError> {
    let cfg = &cfg.with_defaults(DEFAULTS);
    let s = Shape::read(cfg, catalog)?;
    let w = Weights::new(catalog);
    let windows = windows(cfg, &s, &traits)?;
    let activation = decoder::activation(cfg, Activation::Silu)?;
    let routed = match cfg.is_gguf() {
        true => cfg.opt_count(config::EXPERTS)?.unwrap_or(0) > 0,
        false => traits.routed,
    };
    let inner = cfg.count(config::INTERMEDIATE)?;
    let rope = rope(cfg, &w, &s, &traits)?;
    let needs_bias = traits.qkv_bias || cfg.flag("attention_bias")? == Some(true);
    let mut layers = Vec::with_capacity(s.layers);
    for (l, &window) in windows.iter().enumerate() {
        let mut attention = decoder::attention(&w, &s, l)?;
        attention.rope = Some(RopeId(0));
        attention.window = window;
        if traits.qk_norm {
            attention.q_norm = Some(w.norm(decoder::Q_NORM, l, s.head_dim, s.eps)?);
            attention.k_norm = Some(w.norm(decoder::K_NORM, l, s.head_dim, s.eps)?);
        }
        let qkv = [Some(&attention.q), Some(&attention.k), attention.v.as_ref()];
        if let Some(part) = qkv.into_iter().flatten().find(|p| needs_bias && p.bias.is_none()) {
            return Err(ModelError::MissingTensor {
                name: part.weight.name.replace(".weight", ".bias"),
                hint: " (this model's q, k and v have biases)".into(),
            });
        }
        let branch = match routed {
            true => routed_branch(cfg, &w, &s, l, activation)?,
            false => Branch::Dense(decoder::mlp(&w, &s, l, inner, activation)?),
        };
        layers.push(decoder::pre_norm_layer(&w, &s, l, attention, branch)?);
    }
    decoder::model(cfg, w, &s, layers, vec![rope])
}

fn routed_branch(
    cfg: &Config<'_>,
    w: &Weights<'_>,
    s: &Shape,
    l: usize,
    activation: Activation,
) -> Result<Branch, ModelError> {
    if w.has(OLD_EXPERT, l) {
        return Err(ModelError::Unsupported {
            what: format!("tensor blk.{l}.ffn_gate.0.weight, one tensor per expert"),
            detail: "such GGUF files are of 2023; take one with ffn_gate_exps tensors".into(),
        });
    }
    let n_experts = cfg.count(config::EXPERTS)?;
    let shape = [n_experts, cfg.count(config::INTERMEDIATE)?, s.d];
    let name = (w.any(&ROUTERS, l), l);
    let router = decoder::router(cfg, w, s, name, n_experts, Score::SoftmaxSelected)?;
    let experts = decoder::experts(w, &EXPERTS, l, shape, FusedRows::Halves, activation)?;
    Ok(Branch::Routed(router, experts))
}

/// Sliding window of each layer. Converters write none to GGUF files of these models.
fn windows(cfg: &Config<'_>, s: &Shape, traits: &Traits) -> Result<Vec<Option<usize>>, ModelError> {
    let means_it = match traits.window {
        Windowed::Never => false,
        Windowed::WhenGiven => true,
        Windowed::WhenAsked => cfg.flag("use_sliding_window")? == Some(true),
    };
    let window = match means_it && !cfg.is_gguf() {
        true => cfg.opt_count(config::WINDOW)?,
        false => None,
    };
    if window == Some(0) {
        return Err(ModelError::BadValue {
            key: "sliding_window".into(),
            found: "0".into(),
            expected: "at least 1, or null".into(),
        });
    }
    let first = cfg.opt_count(MAX_WINDOW_LAYERS)?.filter(|_| traits.window == Windowed::WhenAsked);
    let sliding = decoder::sliding(cfg, s.layers, |l| first.is_none_or(|first| l >= first))?;
    Ok(sliding.into_iter().map(|sliding| window.filter(|_| sliding)).collect())
}

fn rope(cfg: &Config<'_>, w: &Weights<'_>, s: &Shape, traits: &Traits) -> Result<Rope, ModelError> {
    let whole = if cfg.is_gguf() { s.head_dim as f64 } else { 1.0 };
    if let Some(part) = cfg.opt_float(ROTARY)?.filter(|part| *part != whole) {
        return Err(ModelError::Unsupported {
            what: format!("rotary embedding of a part of the head ({part})"),
            detail: format!("in models of this family all of it turns ({whole})"),
        });
    }
    let mut rope = RopeConfig::read(cfg, None)?;
    if let Some(divisors) = w.table(cfg.access(), decoder::ROPE_FREQS, s.head_dim / 2)? {
        rope = rope.with_divisors(divisors)?;
    }
    let pairs = if cfg.is_gguf() { traits.gguf_pairs } else { RopePairs::Halves };
    Ok(Rope { pairs, ..rope.table(s.head_dim) })
}
