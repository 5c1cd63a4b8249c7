//! Qwen3-MoE (Qwen team 2025). Reference: `models/qwen3_moe/modeling_qwen3_moe.py` of transformers.
//!
//! Attention with per-head q and k norms before rope; routers without bias, softmax over all, top-k,
//! renormalised when `norm_topk_prob`; some layers may be dense (`mlp_only_layers`,
//! `decoder_sparse_step`).

use forebay_files::Catalog;

use super::Family;
use super::decoder::{self, Branch, EXPERTS, FusedRows, Shape};
use crate::config::{self, Config, Field};
use crate::error::ModelError;
use crate::rope::RopeConfig;
use crate::spec::*;
use crate::weights::{Name, Weights};

pub const FAMILY: Family =
    Family { name: "qwen3-moe", model_types: &["qwen3_moe"], gguf: &["qwen3moe"], read };

const ROUTER: Name = Name { hf: "layers.{l}.mlp.gate", gguf: "blk.{l}.ffn_gate_inp" };
const INNER: Field = Field { hf: &["moe_intermediate_size"], gguf: "expert_feed_forward_length" };
const SPARSE_STEP: Field = Field { hf: &["decoder_sparse_step"], gguf: "" };

fn read(cfg: &Config<'_>, catalog: &Catalog) -> Result<ModelSpec, ModelError> {
    let s = Shape::read(cfg, catalog)?;
    let w = Weights::new(catalog);
    if cfg.flag("use_sliding_window")? == Some(true) {
        return Err(ModelError::Unsupported {
            what: "use_sliding_window: true".into(),
            detail: "no published Qwen3-MoE model sets it".into(),
        });
    }
    let n_experts = cfg.count(config::EXPERTS)?;
    let shape = [n_experts, cfg.count(INNER)?, s.d];
    let score = match cfg.flag("norm_topk_prob")?.unwrap_or(cfg.is_gguf()) {
        true => Score::SoftmaxSelected,
        false => Score::SoftmaxAll,
    };
    let sparse_step = cfg.opt_count(SPARSE_STEP)?.unwrap_or(1).max(1);
    let dense_layers: Vec<u64> = match cfg.json("mlp_only_layers").and_then(|v| v.as_array()) {
        Some(list) => list.iter().filter_map(|v| v.as_u64()).collect(),
        None => Vec::new(),
    };
    let rope = RopeConfig::read(cfg, None)?.table(s.head_dim);
    let mut layers = Vec::with_capacity(s.layers);
    for l in 0..s.layers {
        let mut attention = decoder::attention(&w, &s, l)?;
        attention.q_norm = Some(w.norm(decoder::Q_NORM, l, s.head_dim, s.eps)?);
        attention.k_norm = Some(w.norm(decoder::K_NORM, l, s.head_dim, s.eps)?);
        attention.rope = Some(RopeId(0));
        let routed = match cfg.is_gguf() {
            true => w.has(ROUTER, l),
            false => !dense_layers.contains(&(l as u64)) && (l + 1) % sparse_step == 0,
        };
        let silu = Activation::Silu;
        let branch = match routed {
            true => Branch::Routed(
                decoder::router(cfg, &w, &s, (ROUTER, l), n_experts, score)?,
                decoder::experts(&w, &EXPERTS, l, shape, FusedRows::Halves, silu)?,
            ),
            false => {
                Branch::Dense(decoder::mlp(&w, &s, l, cfg.count(config::INTERMEDIATE)?, silu)?)
            }
        };
        layers.push(decoder::pre_norm_layer(&w, &s, l, attention, branch)?);
    }
    decoder::model(cfg, w, &s, layers, vec![rope])
}
