//! DFlash block drafters (arXiv 2602.06036): a small model that fills a block of masked tokens at once, for one larger model.
//!
//! It has neither embedding nor head, those of its target serve; what it knows of a text are hidden states from several layers of
//! the target. Published folders have the layout of z-lab; GGUF files that of llama.cpp (architecture `dflash`).
//!
//! What is read is checked against the target: a drafter for another model would only be slow, and nobody would know why. Kinds that
//! compute differently are refused by name. Not here: how it is run (`forebay-program` lowers it).

use forebay_files::{Catalog, FileAccess, Source};
use serde_json::Value;

use crate::config::{self, Config, Field};
use crate::error::ModelError;
use crate::families::decoder::{self, Branch, Shape};
use crate::rope::RopeConfig;
use crate::spec::{Activation, Layer, Linear, Mixer, ModelSpec, Norm, Rope, RopeId};
use crate::weights::{Name, Weights};

/// Most places of a block: those of published drafters.
const MAX_BLOCK: usize = 16;
/// Places of a block where a config does not say.
const DEFAULT_BLOCK: usize = 16;

const FC: Name = Name { hf: "fc", gguf: "fc" };
const HIDDEN_NORM: Name = Name { hf: "hidden_norm", gguf: "enc.output_norm" };

/// A block drafter, described.
#[derive(Clone, Debug, PartialEq)]
pub struct BlockDrafter {
    /// Places of a block, the token before the masks included.
    pub block_size: usize,
    /// Token of the target's vocabulary whose embedding stands for a mask.
    pub mask: u32,
    /// Layers of the target whose outputs are its input, in this order.
    pub taps: Vec<usize>,
    /// `[d, taps * d]`
    pub fc: Linear,
    /// Norm of what `fc` gives: the context that every layer sees.
    pub context_norm: Norm,
    /// Layers; all are attention and a dense feed-forward.
    pub layers: Vec<Layer>,
    /// Of each layer, whether the places of a block see only those before them.
    pub causal: Vec<bool>,
    /// Norm before the target's head.
    pub norm: Norm,
    /// Its own rotary table.
    pub rope: Rope,
}

/// Reads a drafter for `target`.
pub fn read(
    access: &dyn FileAccess,
    catalog: &Catalog,
    target: &ModelSpec,
) -> Result<BlockDrafter, ModelError> {
    refuse_kinds(catalog)?;
    let cfg = &Config::new(catalog, access)?;
    let own = Own { cfg, catalog };
    let d = cfg.count(config::HIDDEN)?;
    let same = |key: &str, found: usize, wanted: usize| match found == wanted {
        true => Ok(()),
        false => Err(ModelError::BadValue {
            key: format!("{key} of the drafter"),
            found: found.to_string(),
            expected: format!("{wanted}, as of the model that it is to draft for"),
        }),
    };
    same("hidden_size", d, target.hidden_size)?;
    if !cfg.is_gguf() {
        same("vocab_size", cfg.count(VOCAB)?, target.vocab_size)?;
    }
    if let Some(layers) = cfg.opt_count(TARGET_LAYERS)? {
        same("num_target_layers", layers, target.layers.len())?;
    }
    let n_heads = cfg.count(config::HEADS)?;
    let n_layers = cfg.count(config::LAYERS)?;
    if n_layers > 64 {
        return Err(bad("num_hidden_layers of the drafter", n_layers, "at most 64"));
    }
    let shape = Shape {
        layers: n_layers,
        d,
        vocab: target.vocab_size,
        context: target.context_length,
        n_heads,
        n_kv_heads: 1,
        head_dim: 2,
        eps: cfg.float(config::RMS_EPS)? as f32,
    };
    let n_kv_heads = cfg.opt_count(config::KV_HEADS)?.unwrap_or(n_heads);
    let head_dim = cfg.opt_count(config::HEAD_DIM)?.unwrap_or(d / n_heads);
    let s = &shape.with_heads(n_kv_heads, head_dim)?;
    let block_size = own.block_size()?;
    let mask = own.mask(target.vocab_size)?;
    let taps = own.taps(target.layers.len(), n_layers)?;
    let part = cfg.opt_float(ROTARY)?.unwrap_or(if cfg.is_gguf() { head_dim as f64 } else { 1.0 });
    let turned = if cfg.is_gguf() { part } else { part * head_dim as f64 };
    if !(2.0..=head_dim as f64).contains(&turned) || turned % 2.0 != 0.0 {
        return Err(bad("partial_rotary_factor of the drafter", part, "an even part of the head"));
    }
    let rope = RopeConfig::read(cfg, None)?.table(turned as usize);
    let windows = own.windows(n_layers)?;
    let causal = own.causal(&windows)?;
    let activation = decoder::activation(cfg, Activation::Silu)?;
    let inner = cfg.count(config::INTERMEDIATE)?;
    let biased = cfg.flag("attention_bias")? == Some(true);
    let w = Weights::new(catalog);
    let prefix = if catalog.tensors.contains_key("model.fc.weight") { "model." } else { "" };
    let (fc, context_norm, norm, layers) = w.within(prefix, |w| {
        let fc = w.linear(FC, 0, d, taps.len() * d)?;
        let context_norm = w.norm(HIDDEN_NORM, 0, d, s.eps)?;
        let norm = w.norm(decoder::FINAL_NORM, 0, d, s.eps)?;
        let layers = windows.iter().enumerate().map(|(l, window)| {
            let mut attention = decoder::attention(w, s, l)?;
            attention.rope = Some(RopeId(0));
            attention.window = *window;
            attention.q_norm = Some(w.norm(decoder::Q_NORM, l, s.head_dim, s.eps)?);
            attention.k_norm = Some(w.norm(decoder::K_NORM, l, s.head_dim, s.eps)?);
            if biased && attention.q.bias.is_none() {
                return Err(ModelError::MissingTensor {
                    name: attention.q.weight.name.replace(".weight", ".bias"),
                    hint: " (its config says attention_bias)".into(),
                });
            }
            let branch = Branch::Dense(decoder::mlp(w, s, l, inner, activation)?);
            decoder::pre_norm_layer(w, s, l, attention, branch)
        });
        let layers: Result<Vec<Layer>, ModelError> = layers.collect();
        Ok::<_, ModelError>((fc, context_norm, norm, layers?))
    })?;
    w.finish(&|name| name.ends_with("rotary_emb.inv_freq").then_some("rotary tables"))?;
    Ok(BlockDrafter { block_size, mask, taps, fc, context_norm, layers, causal, norm, rope })
}

const VOCAB: Field = Field { hf: &["vocab_size"], gguf: "" };
const TARGET_LAYERS: Field = Field { hf: &["num_target_layers"], gguf: "" };
const ROTARY: Field = Field { hf: &["partial_rotary_factor"], gguf: "rope.dimension_count" };
const BLOCK: Field = Field { hf: &["block_size"], gguf: "block_size" };

fn bad(key: &str, found: impl std::fmt::Display, expected: &str) -> ModelError {
    let (key, expected) = (key.into(), expected.into());
    ModelError::BadValue { key, found: found.to_string(), expected }
}

/// Keys of its own.
struct Own<'a> {
    cfg: &'a Config<'a>,
    catalog: &'a Catalog,
}

impl Own<'_> {
    /// A value of `dflash_config`.
    fn get(&self, key: &str) -> Option<&Value> {
        self.cfg.json("dflash_config").and_then(|c| c.get(key)).filter(|v| !v.is_null())
    }

    fn whole(&self, key: &str, value: &Value) -> Result<usize, ModelError> {
        let n = value.as_u64().filter(|n| *n < 1 << 31);
        n.map(|n| n as usize).ok_or_else(|| bad(key, value, "a whole number"))
    }

    fn block_size(&self) -> Result<usize, ModelError> {
        let inside = self.get("block_size").map(|v| self.whole("dflash_config.block_size", v));
        let size = match inside.transpose()? {
            Some(n) => n,
            None => self.cfg.opt_count(BLOCK)?.unwrap_or(DEFAULT_BLOCK),
        };
        match (2..=MAX_BLOCK).contains(&size) {
            true => Ok(size),
            false => Err(bad("block_size of the drafter", size, "2 to 16")),
        }
    }

    fn mask(&self, vocab: usize) -> Result<u32, ModelError> {
        let key = match &self.catalog.source {
            Source::Gguf { .. } => "tokenizer.ggml.mask_token_id",
            Source::Folder { .. } => "dflash_config.mask_token_id",
        };
        let missing = || ModelError::MissingKey { key: key.into() };
        let id = match &self.catalog.source {
            Source::Gguf { metadata } => {
                let id = metadata.get(key).and_then(|v| v.as_u64());
                id.ok_or_else(missing)? as usize
            }
            Source::Folder { .. } => {
                self.whole(key, self.get("mask_token_id").ok_or_else(missing)?)?
            }
        };
        match id < vocab {
            true => Ok(id as u32),
            false => Err(bad(key, id, &format!("a token of the vocabulary of {vocab}"))),
        }
    }

    /// Layers of the target, from 0.
    fn taps(&self, target: usize, own: usize) -> Result<Vec<usize>, ModelError> {
        let key = "dflash_config.target_layer_ids";
        let taps = if let Some(list) = self.cfg.gguf("target_layers") {
            // The input of a layer is the output of the one before it.
            let ids = list.as_array().into_iter().flatten().map(|v| v.as_u64());
            let ids: Option<Vec<usize>> =
                ids.map(|id| id?.checked_sub(1).map(|id| id as usize)).collect();
            ids.ok_or_else(|| bad("dflash.target_layers", format!("{list:?}"), "layers from 1"))?
        } else if let Some(list) = self.get("target_layer_ids") {
            let ids = list.as_array().ok_or_else(|| bad(key, list, "a list of layers"))?;
            ids.iter().map(|id| self.whole(key, id)).collect::<Result<_, _>>()?
        } else {
            default_taps(target, own)
        };
        let known = taps.iter().all(|tap| *tap < target);
        match known && !taps.is_empty() && taps.len() <= 64 {
            true => Ok(taps),
            false => Err(bad(key, format!("{taps:?}"), &format!("layers 0 to {}", target - 1))),
        }
    }

    /// Sliding window of each layer.
    fn windows(&self, layers: usize) -> Result<Vec<Option<usize>>, ModelError> {
        let asked = self.cfg.is_gguf() || self.cfg.flag("use_sliding_window")? == Some(true);
        let window = self.cfg.opt_count(config::WINDOW)?.filter(|_| asked);
        if window == Some(0) {
            return Err(bad("sliding_window of the drafter", 0, "at least 1, or null"));
        }
        let sliding = decoder::sliding(self.cfg, layers, |_| false)?;
        Ok(sliding.into_iter().map(|sliding| window.filter(|_| sliding)).collect())
    }

    /// Sliding layers are causal and full ones are not, unless the config says so for all.
    fn causal(&self, windows: &[Option<usize>]) -> Result<Vec<bool>, ModelError> {
        let told = match self.get("causal") {
            Some(value) => {
                let key = "dflash_config.causal";
                Some(value.as_bool().ok_or_else(|| bad(key, value, "true or false"))?)
            }
            None => self.cfg.flag("is_causal")?,
        };
        Ok(windows.iter().map(|window| told.unwrap_or(window.is_some())).collect())
    }
}

/// Layers of a target of `target` layers that a drafter of `own` layers was trained on where its config does not say.
fn default_taps(target: usize, own: usize) -> Vec<usize> {
    if own <= 1 {
        return vec![target / 2];
    }
    let step = target.saturating_sub(4) as f64 / (own - 1) as f64;
    (0..own).map(|i| (1.0 + i as f64 * step).round_ties_even() as usize).collect()
}

/// Settings in `dflash_config` that are understood.
const KNOWN: [&str; 4] = ["mask_token_id", "target_layer_ids", "block_size", "causal"];

/// Parts of tensor names that only other kinds have, and what they are.
const OTHER_KINDS: [(&str, &str); 7] = [
    ("d2t", "a reduced draft vocabulary"),
    ("t2d", "a reduced draft vocabulary"),
    ("markov", "a Markov head (DSpark)"),
    ("confidence", "a confidence head (DSpark)"),
    ("sink", "sink biases"),
    ("mask_embed", "a mask embedding of its own"),
    ("conv", "convolutions around its sublayers (DFlash2)"),
];

/// Refuses what is no DFlash drafter, or one of a kind that computes differently.
fn refuse_kinds(catalog: &Catalog) -> Result<(), ModelError> {
    let detail = "DFlash drafters of the first kind are (DFlashDraftModel); leave --draft-model out, or give one of these";
    let refused = |what: String| Err(ModelError::Unsupported { what, detail: detail.into() });
    match &catalog.source {
        Source::Gguf { metadata } => {
            let arch = metadata.get("general.architecture").and_then(|v| v.as_str());
            if arch != Some("dflash") {
                return refused(format!("a drafter of architecture {:?}", arch.unwrap_or("none")));
            }
        }
        Source::Folder { config, .. } => {
            let names = config.get("architectures").and_then(Value::as_array);
            let name = names.and_then(|list| list.first()).and_then(Value::as_str);
            let name: String = name.unwrap_or("none").chars().take(80).collect();
            if name != "DFlashDraftModel" {
                return refused(format!("a drafter of architecture {name:?}"));
            }
            let says = |value: &Value| match value {
                Value::Null => false,
                Value::Bool(b) => *b,
                Value::Number(n) => n.as_f64() != Some(1.0),
                _ => true,
            };
            let own = config.get("dflash_config").and_then(Value::as_object);
            let other = own.into_iter().flatten();
            let mut other = other.filter(|(key, v)| !KNOWN.contains(&key.as_str()) && says(v));
            if let Some((key, value)) = other.next() {
                return refused(format!("dflash_config.{key} = {value}"));
            }
            let count = |key: &str| config.get(key).and_then(Value::as_u64);
            if let Some(n) = count("draft_vocab_size").filter(|n| Some(*n) != count("vocab_size")) {
                return refused(format!("a draft vocabulary of {n} tokens"));
            }
        }
    }
    for name in catalog.tensors.keys() {
        if let Some((_, what)) = OTHER_KINDS.iter().find(|(part, _)| name.contains(part)) {
            return refused(format!("a drafter with {what} (tensor {name})"));
        }
    }
    Ok(())
}

impl BlockDrafter {
    /// Says that its files come `by` places later: behind those of its target.
    pub fn shift_files(&mut self, by: u32) {
        let linear = |l: &mut Linear| {
            l.weight.planes.iter_mut().for_each(|plane| plane.extent.file += by);
            l.bias.iter_mut().for_each(|bias| bias.extent.file += by);
        };
        let norm = |n: &mut Norm| n.weight.iter_mut().for_each(|v| v.extent.file += by);
        linear(&mut self.fc);
        norm(&mut self.context_norm);
        norm(&mut self.norm);
        for layer in &mut self.layers {
            norm(&mut layer.mixer_norm);
            if let Mixer::Attention(a) = &mut layer.mixer {
                [&mut a.q, &mut a.k, &mut a.o].into_iter().chain(&mut a.v).for_each(linear);
                a.q_norm.iter_mut().chain(&mut a.k_norm).for_each(norm);
            }
            if let Some(dense) = &mut layer.ffn.dense {
                norm(&mut dense.norm);
                let mlp = &mut dense.mlp;
                [&mut mlp.gate, &mut mlp.up, &mut mlp.down].into_iter().for_each(linear);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published formula: 1 to L - 3, evenly.
    #[test]
    fn taps_where_the_config_does_not_say() {
        assert_eq!(default_taps(36, 5), [1, 9, 17, 25, 33]);
        assert_eq!(default_taps(40, 1), [20]);
        assert_eq!(default_taps(8, 2), [1, 5]);
    }
}
