//! Gemma 3 (Google 2025), dense. Reference: `models/gemma3/modeling_gemma3.py` of transformers.
//!
//! Norm weights stored as `w - 1` in folders and as `w` in GGUF files; norms before and after attention
//! and feed-forward, and of q and k; five sliding layers to one full, each kind with its own rope;
//! attention scale `query_pre_attn_scalar^-0.5`; embedding times `sqrt(d)`. Not here: its vision tower.

use forebay_files::Catalog;

use super::Family;
use super::decoder::{self, Shape};
use crate::config::{self, Config, Field};
use crate::error::ModelError;
use crate::rope::RopeConfig;
use crate::spec::*;
use crate::weights::{Name, Weights};

pub const FAMILY: Family =
    Family { name: "gemma3", model_types: &["gemma3", "gemma3_text"], gguf: &["gemma3"], read };

const MIXER_POST_NORM: Name =
    Name { hf: "layers.{l}.post_attention_layernorm", gguf: "blk.{l}.post_attention_norm" };
const FFN_NORM: Name =
    Name { hf: "layers.{l}.pre_feedforward_layernorm", gguf: "blk.{l}.ffn_norm" };
const FFN_POST_NORM: Name =
    Name { hf: "layers.{l}.post_feedforward_layernorm", gguf: "blk.{l}.post_ffw_norm" };

const QUERY_SCALAR: Field = Field { hf: &["query_pre_attn_scalar"], gguf: "" };
const ATTENTION_SCALE: Field = Field { hf: &[], gguf: "attention.scale" };
const PATTERN: Field =
    Field { hf: &["sliding_window_pattern", "_sliding_window_pattern"], gguf: "" };
const LOCAL_THETA: Field = Field { hf: &["rope_local_base_freq"], gguf: "rope.freq_base_swa" };
const SOFTCAP: Field = Field { hf: &["final_logit_softcapping"], gguf: "final_logit_softcapping" };
const SCORE_SOFTCAP: Field =
    Field { hf: &["attn_logit_softcapping"], gguf: "attn_logit_softcapping" };

/// Multimodal checkpoints leave out what equals the reference's defaults.
const DEFAULTS: &[(&str, f64)] = &[
    ("vocab_size", 262_208.0),
    ("num_attention_heads", 8.0),
    ("num_key_value_heads", 4.0),
    ("head_dim", 256.0),
    ("max_position_embeddings", 131_072.0),
    ("rms_norm_eps", 1e-6),
    ("rope_theta", 1e6),
    ("query_pre_attn_scalar", 256.0),
    ("sliding_window", 4096.0),
];

/// Layers of the 27B model, whose attention scale is `(d / n_heads)^-0.5`; GGUF files do not say so.
const LAYERS_27B: usize = 62;

fn read(cfg: &Config<'_>, catalog: &Catalog) -> Result<ModelSpec, ModelError> {
    let cfg = &cfg.with_defaults(DEFAULTS);
    if cfg.flag("use_bidirectional_attention")? == Some(true) {
        return Err(ModelError::Unsupported {
            what: "bidirectional attention".into(),
            detail: "only causal models can generate".into(),
        });
    }
    if cfg.opt_float(SCORE_SOFTCAP)?.is_some_and(|c| c != 0.0) {
        return Err(ModelError::Unsupported {
            what: "attn_logit_softcapping".into(),
            detail: "no published Gemma 3 model sets it".into(),
        });
    }
    let s = Shape::read(cfg, catalog)?;
    let w = Weights::new(catalog);
    // A GGUF file without a window has full layers only.
    let window = cfg.opt_count(config::WINDOW)?.filter(|w| *w > 0);
    let every = cfg.opt_count(PATTERN)?.unwrap_or(6).max(1);
    let sliding = decoder::sliding(cfg, s.layers, |l| window.is_some() && (l + 1) % every != 0)?;
    let activation = decoder::activation(cfg, Activation::GeluTanh)?;
    let inner = cfg.count(config::INTERMEDIATE)?;
    let norm = |name, l, len| -> Result<Norm, ModelError> {
        Ok(Norm { plus_one: !cfg.is_gguf(), ..w.norm(name, l, len, s.eps)? })
    };
    let scale = attention_scale(cfg, &s)?;
    let mut layers = Vec::with_capacity(s.layers);
    for (l, &sliding) in sliding.iter().enumerate() {
        let mut attention = decoder::attention(&w, &s, l)?;
        attention.q_norm = Some(norm(decoder::Q_NORM, l, s.head_dim)?);
        attention.k_norm = Some(norm(decoder::K_NORM, l, s.head_dim)?);
        attention.rope = Some(RopeId(sliding as usize));
        attention.window = window.filter(|_| sliding);
        attention.scale = scale;
        let dense = DenseBranch {
            norm: norm(FFN_NORM, l, s.d)?,
            mlp: decoder::mlp(&w, &s, l, inner, activation)?,
            gate: None,
            post_norm: None,
        };
        layers.push(Layer {
            mixer_norm: norm(decoder::MIXER_NORM, l, s.d)?,
            mixer: Mixer::Attention(attention),
            mixer_post_norm: Some(norm(MIXER_POST_NORM, l, s.d)?),
            ffn: FeedForward {
                dense: Some(dense),
                routed: None,
                post_norm: Some(norm(FFN_POST_NORM, l, s.d)?),
            },
            output_scale: None,
        });
    }
    let full = RopeConfig::read(cfg, Some("full_attention"))?;
    let per_kind =
        cfg.json("rope_parameters").is_some_and(|p| p.get("sliding_attention").is_some());
    let local = match per_kind {
        true => RopeConfig::read(cfg, Some("sliding_attention"))?,
        false => RopeConfig::plain(cfg.opt_float(LOCAL_THETA)?.unwrap_or(10_000.0))?,
    };
    let ropes = vec![full.table(s.head_dim), local.table(s.head_dim)];
    let mut spec = decoder::model(cfg, w, &s, layers, ropes)?;
    spec.final_norm.plus_one = !cfg.is_gguf();
    spec.embedding_scale = Some((s.d as f64).sqrt() as f32);
    spec.logit_softcap = cfg.opt_float(SOFTCAP)?.filter(|c| *c != 0.0).map(|c| c as f32);
    Ok(spec)
}

fn attention_scale(cfg: &Config<'_>, s: &Shape) -> Result<f32, ModelError> {
    if let Some(scale) = cfg.opt_float(ATTENTION_SCALE)? {
        return Ok(scale as f32);
    }
    let scalar = match cfg.is_gguf() {
        false => cfg.float(QUERY_SCALAR)?,
        true if s.layers == LAYERS_27B => (s.d / s.n_heads) as f64,
        true => s.head_dim as f64,
    };
    Ok((1.0 / scalar.sqrt()) as f32)
}
