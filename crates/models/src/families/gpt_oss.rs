//! gpt-oss (OpenAI 2025). Reference: `models/gpt_oss/modeling_gpt_oss.py` of transformers.
//!
//! Attention with sinks, every other layer sliding; biases on q, k, v, o, router and experts; YaRN whose
//! range is not rounded; router bias before top-k, softmax over the selected; clamped SwiGLU; in
//! safetensors gate and up rows alternate.

use forebay_files::Catalog;

use super::Family;
use super::decoder::{self, EXPERTS, FusedRows, Shape};
use crate::config::{self, Config, Field};
use crate::error::ModelError;
use crate::rope::RopeConfig;
use crate::spec::*;
use crate::weights::{Name, VectorPart, Weights};

pub const FAMILY: Family =
    Family { name: "gpt-oss", model_types: &["gpt_oss"], gguf: &["gpt-oss"], read };

const SINKS: Name = Name { hf: "layers.{l}.self_attn.sinks", gguf: "blk.{l}.attn_sinks" };
const FFN_NORM: Name =
    Name { hf: "layers.{l}.post_attention_layernorm", gguf: "blk.{l}.post_attention_norm" };
const ROUTER: Name = Name { hf: "layers.{l}.mlp.router", gguf: "blk.{l}.ffn_gate_inp" };
const FUSED_BIAS: Name = Name { hf: "layers.{l}.mlp.experts.gate_up_proj_bias", gguf: "-" };
const GATE_BIAS: Name =
    Name { hf: "layers.{l}.mlp.experts.gate_proj.bias", gguf: "blk.{l}.ffn_gate_exps.bias" };
const UP_BIAS: Name =
    Name { hf: "layers.{l}.mlp.experts.up_proj.bias", gguf: "blk.{l}.ffn_up_exps.bias" };
const DOWN_BIAS: [Name; 2] = [
    Name { hf: "layers.{l}.mlp.experts.down_proj_bias", gguf: "blk.{l}.ffn_down_exps.bias" },
    Name { hf: "layers.{l}.mlp.experts.down_proj.bias", gguf: "blk.{l}.ffn_down_exps.bias" },
];

const INNER: Field = Field { hf: &["intermediate_size"], gguf: "expert_feed_forward_length" };
const LIMIT: Field = Field { hf: &["swiglu_limit"], gguf: "swiglu_limit" };

fn read(cfg: &Config<'_>, catalog: &Catalog) -> Result<ModelSpec, ModelError> {
    let s = Shape::read(cfg, catalog)?;
    let w = Weights::new(catalog);
    let n_experts = cfg.count(config::EXPERTS)?;
    let inner = match cfg.opt_count(INNER)? {
        Some(i) => i,
        None => cfg.count(config::INTERMEDIATE)?,
    };
    let window = cfg.count(config::WINDOW)?;
    let sliding = decoder::sliding(cfg, s.layers, |l| l % 2 == 0)?;
    let activation = Activation::ClampedSwiglu {
        alpha: 1.702,
        limit: cfg.opt_float(LIMIT)?.unwrap_or(7.0) as f32,
    };
    let rope = RopeConfig::read(cfg, None)?.table(s.head_dim);
    let mut layers = Vec::with_capacity(s.layers);
    for (l, &sliding) in sliding.iter().enumerate() {
        let mut attention = decoder::attention(&w, &s, l)?;
        attention.rope = Some(RopeId(0));
        attention.window = sliding.then_some(window);
        attention.sinks = Some(w.vector(SINKS, l, s.n_heads)?);
        let shape = [n_experts, inner, s.d];
        let mut experts =
            decoder::experts(&w, &EXPERTS, l, shape, FusedRows::Alternating, activation)?;
        experts.biases = biases(&w, l, shape)?;
        layers.push(Layer {
            mixer_norm: w.norm(decoder::MIXER_NORM, l, s.d, s.eps)?,
            mixer: Mixer::Attention(attention),
            mixer_post_norm: None,
            ffn: FeedForward {
                dense: None,
                post_norm: None,
                routed: Some(RoutedBranch {
                    norm: w.norm(FFN_NORM, l, s.d, s.eps)?,
                    router: Router {
                        weight: w.linear(ROUTER, l, n_experts, s.d)?,
                        top_k: decoder::top_k(cfg, n_experts)?,
                        score: Score::SoftmaxSelected,
                        input_norm: None,
                        expert_scale: None,
                    },
                    experts,
                    post_norm: None,
                }),
            },
            output_scale: None,
        });
    }
    decoder::model(cfg, w, &s, layers, vec![rope])
}

/// Biases per expert: fused and alternating `[E, 2 I]`, or separate `[E, I]`; down `[E, d]`.
fn biases(w: &Weights<'_>, l: usize, [e, i, d]: [usize; 3]) -> Result<Vec<ExpertBias>, ModelError> {
    let fused = w.has_tensor(FUSED_BIAS, l);
    let down = if w.has_tensor(DOWN_BIAS[0], l) { DOWN_BIAS[0] } else { DOWN_BIAS[1] };
    let part = |row, first, step, len| VectorPart { row, first, step, len };
    (0..e)
        .map(|x| {
            let (gate, up) = match fused {
                true => (
                    w.vector_row(FUSED_BIAS, l, [e, 2 * i], part(x, 0, 2, i))?,
                    w.vector_row(FUSED_BIAS, l, [e, 2 * i], part(x, 1, 2, i))?,
                ),
                false => (
                    w.vector_row(GATE_BIAS, l, [e, i], part(x, 0, 1, i))?,
                    w.vector_row(UP_BIAS, l, [e, i], part(x, 0, 1, i))?,
                ),
            };
            let down = w.vector_row(down, l, [e, d], part(x, 0, 1, d))?;
            Ok(ExpertBias { gate, up, down })
        })
        .collect()
}
