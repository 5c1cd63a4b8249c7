//! Gemma 4 (Google 2026), with routed experts or dense. Reference: `models/gemma4/modeling_gemma4.py` of
//! transformers.
//!
//! Sliding and full layers differ in head size, KV heads and rope; full layers may take their values from
//! the raw k projection; values are normed without weight; norms before and after every branch; a dense
//! and a routed branch read the same residual; the router has a norm of its own; a learned factor ends
//! each layer. Not here: per-layer embeddings and shared KV layers of the small models, which are refused.

use forebay_files::Catalog;

use super::Family;
use super::decoder::{self, ExpertNames, FusedRows, Shape};
use crate::config::{self, Config, Field};
use crate::error::ModelError;
use crate::rope::RopeConfig;
use crate::spec::*;
use crate::weights::{Name, Weights};

pub const FAMILY: Family =
    Family { name: "gemma4", model_types: &["gemma4", "gemma4_text"], gguf: &["gemma4"], read };

const fn name(hf: &'static str, gguf: &'static str) -> Name {
    Name { hf, gguf }
}

const MIXER_POST_NORM: Name =
    name("layers.{l}.post_attention_layernorm", "blk.{l}.post_attention_norm");
const FFN_NORM: Name = name("layers.{l}.pre_feedforward_layernorm", "blk.{l}.ffn_norm");
const FFN_POST_NORM: Name = name("layers.{l}.post_feedforward_layernorm", "blk.{l}.post_ffw_norm");
const DENSE_POST_NORM: Name =
    name("layers.{l}.post_feedforward_layernorm_1", "blk.{l}.post_ffw_norm_1");
const ROUTED_NORM: Name = name("layers.{l}.pre_feedforward_layernorm_2", "blk.{l}.pre_ffw_norm_2");
const ROUTED_POST_NORM: Name =
    name("layers.{l}.post_feedforward_layernorm_2", "blk.{l}.post_ffw_norm_2");
const ROUTER: Name = name("layers.{l}.router.proj", "blk.{l}.ffn_gate_inp");
const ROUTER_SCALE: Name = name("layers.{l}.router.scale", "blk.{l}.ffn_gate_inp.scale");
const EXPERT_SCALE: Name =
    name("layers.{l}.router.per_expert_scale", "blk.{l}.ffn_down_exps.scale");
const OUTPUT_SCALE: Name = name("layers.{l}.layer_scalar", "blk.{l}.layer_output_scale");

const EXPERTS: ExpertNames = ExpertNames {
    fused: name("layers.{l}.experts.gate_up_proj", "blk.{l}.ffn_gate_up_exps"),
    gate: &[name("layers.{l}.experts.switch_glu.gate_proj", "blk.{l}.ffn_gate_exps")],
    up: &[name("layers.{l}.experts.switch_glu.up_proj", "blk.{l}.ffn_up_exps")],
    down: &[
        name("layers.{l}.experts.down_proj", "blk.{l}.ffn_down_exps"),
        name("layers.{l}.experts.switch_glu.down_proj", "blk.{l}.ffn_down_exps"),
    ],
    single: [
        name("layers.{l}.experts.{e}.gate_proj", "-"),
        name("layers.{l}.experts.{e}.up_proj", "-"),
        name("layers.{l}.experts.{e}.down_proj", "-"),
    ],
};

const INNER: Field = Field { hf: &["moe_intermediate_size"], gguf: "expert_feed_forward_length" };
const SOFTCAP: Field = Field { hf: &["final_logit_softcapping"], gguf: "final_logit_softcapping" };
const GLOBAL_HEAD_DIM: Field = Field { hf: &["global_head_dim"], gguf: "attention.key_length" };
const GLOBAL_KV_HEADS: Field = Field { hf: &["num_global_key_value_heads"], gguf: "" };
const SWA_HEAD_DIM: Field = Field { hf: &["head_dim"], gguf: "attention.key_length_swa" };
const SWA_THETA: Field = Field { hf: &[], gguf: "rope.freq_base_swa" };
const PER_LAYER_INPUT: Field =
    Field { hf: &["hidden_size_per_layer_input"], gguf: "embedding_length_per_layer_input" };
const SHARED_KV: Field =
    Field { hf: &["num_kv_shared_layers"], gguf: "attention.shared_kv_layers" };

/// Head size of full layers where a config names neither it nor a `per_layer_config`.
const DEFAULT_GLOBAL_HEAD_DIM: usize = 512;

fn read(cfg: &Config<'_>, catalog: &Catalog) -> Result<ModelSpec, ModelError> {
    refuse_other_members(cfg)?;
    let s = Shape::read(cfg, catalog)?;
    let w = Weights::new(catalog);
    let window = cfg.count(config::WINDOW)?;
    // By default every sixth layer is full, and so is the last.
    let sliding = decoder::sliding(cfg, s.layers, |l| (l + 1) % 6 != 0 && l + 1 != s.layers)?;
    let activation = decoder::activation(cfg, Activation::GeluTanh)?;
    let values_from_keys = cfg.flag("attention_k_eq_v")?;
    let routed = match cfg.is_gguf() {
        true => cfg.opt_count(config::EXPERTS)?.unwrap_or(0) > 0,
        false => cfg.flag("enable_moe_block")?.unwrap_or(false),
    };
    let norm = |name, l| w.norm(name, l, s.d, s.eps);
    // One rope per kind of layer: full, sliding.
    let mut ropes: [Option<Rope>; 2] = [None, None];
    let mut layers = Vec::with_capacity(s.layers);
    for (l, &sliding) in sliding.iter().enumerate() {
        let heads = heads(cfg, &s, l, sliding)?;
        let from_keys =
            !sliding && values_from_keys.unwrap_or_else(|| cfg.is_gguf() && !w.has(decoder::V, l));
        let mut attention = decoder::attention_of(&w, &heads, l, !from_keys, false)?;
        attention.q_norm = Some(w.norm(decoder::Q_NORM, l, heads.head_dim, s.eps)?);
        attention.k_norm = Some(w.norm(decoder::K_NORM, l, heads.head_dim, s.eps)?);
        attention.v_norm = Some(Norm { weight: None, eps: s.eps, plus_one: false, factor: 1.0 });
        attention.rope = Some(RopeId(sliding as usize));
        attention.window = sliding.then_some(window);
        attention.scale = 1.0;
        let table = rope(cfg, &w, heads.head_dim, sliding)?;
        match &ropes[sliding as usize] {
            Some(known) if *known != table => {
                return Err(ModelError::Unsupported {
                    what: format!("the head size of layer {l}"),
                    detail: "layers of one kind must have one head size".into(),
                });
            }
            _ => ropes[sliding as usize] = Some(table),
        }
        let inner = match cfg.opt_count_at(config::INTERMEDIATE, Some(l))? {
            Some(n) => n,
            None => cfg.count(config::INTERMEDIATE)?,
        };
        let dense = DenseBranch {
            norm: norm(FFN_NORM, l)?,
            mlp: decoder::mlp(&w, &s, l, inner, activation)?,
            gate: None,
            post_norm: routed.then(|| norm(DENSE_POST_NORM, l)).transpose()?,
        };
        layers.push(Layer {
            mixer_norm: norm(decoder::MIXER_NORM, l)?,
            mixer: Mixer::Attention(attention),
            mixer_post_norm: Some(norm(MIXER_POST_NORM, l)?),
            ffn: FeedForward {
                dense: Some(dense),
                routed: routed.then(|| routed_branch(cfg, &w, &s, l, activation)).transpose()?,
                post_norm: Some(norm(FFN_POST_NORM, l)?),
            },
            output_scale: Some(w.vector(OUTPUT_SCALE, l, 1)?),
        });
    }
    // A model without layers of a kind has no use for its rope, but the indices stay.
    let plain = RopeConfig::plain(10_000.0)?.table(s.head_dim);
    let ropes = ropes.map(|r| r.unwrap_or_else(|| plain.clone())).to_vec();
    let mut spec = decoder::model(cfg, w, &s, layers, ropes)?;
    spec.embedding_scale = Some((s.d as f64).sqrt() as f32);
    spec.logit_softcap = cfg.opt_float(SOFTCAP)?.map(|c| c as f32);
    Ok(spec)
}

fn routed_branch(
    cfg: &Config<'_>,
    w: &Weights<'_>,
    s: &Shape,
    l: usize,
    activation: Activation,
) -> Result<RoutedBranch, ModelError> {
    let n_experts = cfg.count(config::EXPERTS)?;
    let shape = [n_experts, cfg.count(INNER)?, s.d];
    let factor = (1.0 / (s.d as f64).sqrt()) as f32;
    let input_norm = Norm { factor, ..w.norm(ROUTER_SCALE, l, s.d, s.eps)? };
    Ok(RoutedBranch {
        norm: w.norm(ROUTED_NORM, l, s.d, s.eps)?,
        router: Router {
            weight: w.linear(ROUTER, l, n_experts, s.d)?,
            top_k: decoder::top_k(cfg, n_experts)?,
            score: Score::SoftmaxSelected,
            input_norm: Some(input_norm),
            expert_scale: Some(w.vector(EXPERT_SCALE, l, n_experts)?),
        },
        experts: decoder::experts(w, &EXPERTS, l, shape, FusedRows::Halves, activation)?,
        post_norm: Some(w.norm(ROUTED_POST_NORM, l, s.d, s.eps)?),
    })
}

/// KV heads and head size of layer `l`: GGUF keys per layer and per kind; `per_layer_config` of newer
/// configs, `global_*` of published ones.
fn heads(cfg: &Config<'_>, s: &Shape, l: usize, sliding: bool) -> Result<Shape, ModelError> {
    if cfg.is_gguf() {
        let field = if sliding { SWA_HEAD_DIM } else { GLOBAL_HEAD_DIM };
        let head_dim = cfg.opt_count(field)?.unwrap_or(s.head_dim);
        let kv = cfg.opt_count_at(config::KV_HEADS, Some(l))?.unwrap_or(s.n_kv_heads);
        return s.with_heads(kv, head_dim);
    }
    let (mut kv, mut head_dim) = (s.n_kv_heads, s.head_dim);
    if let Some(overrides) = cfg.json("per_layer_config") {
        let of = |key: &str| {
            let v = overrides.get(l.to_string())?.get(key)?.as_u64()?;
            usize::try_from(v).ok()
        };
        kv = of("num_key_value_heads").unwrap_or(kv);
        head_dim = of("head_dim").unwrap_or(head_dim);
    } else if !sliding {
        head_dim = cfg.opt_count(GLOBAL_HEAD_DIM)?.unwrap_or(DEFAULT_GLOBAL_HEAD_DIM);
        if cfg.flag("attention_k_eq_v")? == Some(true) {
            kv = cfg.opt_count(GLOBAL_KV_HEADS)?.unwrap_or(kv);
        }
    }
    s.with_heads(kv, head_dim)
}

fn rope(
    cfg: &Config<'_>,
    w: &Weights<'_>,
    head_dim: usize,
    sliding: bool,
) -> Result<Rope, ModelError> {
    let rope = match (cfg.is_gguf(), sliding) {
        (false, true) => RopeConfig::read(cfg, Some("sliding_attention"))?,
        (false, false) => RopeConfig::read(cfg, Some("full_attention"))?,
        (true, true) => RopeConfig::plain(cfg.opt_float(SWA_THETA)?.unwrap_or(10_000.0))?,
        (true, false) => {
            let divisors = w.table(cfg.access(), decoder::ROPE_FREQS, head_dim / 2)?;
            let divisors = divisors.ok_or_else(|| ModelError::MissingTensor {
                name: "rope_freqs.weight".into(),
                hint: " (it says which part of a full layer's heads turns)".into(),
            })?;
            RopeConfig::read(cfg, None)?.with_divisors(divisors)?
        }
    };
    Ok(rope.table(head_dim))
}

/// What only the small members of the family have.
fn refuse_other_members(cfg: &Config<'_>) -> Result<(), ModelError> {
    let refuse = |what: &str, detail: &str| {
        Err(ModelError::Unsupported { what: what.into(), detail: detail.into() })
    };
    if cfg.opt_count(PER_LAYER_INPUT)?.unwrap_or(0) > 0 {
        return refuse("Gemma 4 with per-layer embeddings", "take a 26B-A4B or a 31B model");
    }
    if cfg.opt_count(SHARED_KV)?.unwrap_or(0) > 0 {
        return refuse("Gemma 4 with shared KV layers", "take a 26B-A4B or a 31B model");
    }
    if cfg.json("use_bidirectional_attention").and_then(|v| v.as_str()) == Some("all") {
        return refuse("bidirectional attention", "only causal models can generate");
    }
    Ok(())
}
