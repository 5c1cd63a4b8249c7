//! One way to ask for a configuration value, whatever dialect the checkpoint speaks: GGUF keys,
//! `config.json` at the top level or under `text_config`, and several names for one thing.
//!
//! Not here: which values a family needs (its own file), rope scaling ([`crate::rope`]).

use forebay_files::{Catalog, FileAccess, Source};
use serde_json::Value;

use crate::error::ModelError;

/// A value's names: in `config.json` (any of several) and in GGUF (after `<arch>.`).
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// Names in `config.json`, tried in order.
    pub hf: &'static [&'static str],
    /// GGUF key without its architecture prefix; empty when GGUF has none.
    pub gguf: &'static str,
}

const fn field(hf: &'static [&'static str], gguf: &'static str) -> Field {
    Field { hf, gguf }
}

/// `L`
pub const LAYERS: Field = field(&["num_hidden_layers"], "block_count");
/// `d`
pub const HIDDEN: Field = field(&["hidden_size"], "embedding_length");
/// Longest context.
pub const CONTEXT: Field = field(&["max_position_embeddings"], "context_length");
/// Query heads.
pub const HEADS: Field = field(&["num_attention_heads"], "attention.head_count");
/// KV heads.
pub const KV_HEADS: Field = field(&["num_key_value_heads"], "attention.head_count_kv");
/// Width of a head.
pub const HEAD_DIM: Field = field(&["head_dim"], "attention.key_length");
/// Width of a dense MLP.
pub const INTERMEDIATE: Field = field(&["intermediate_size"], "feed_forward_length");
/// Epsilon of the norms.
pub const RMS_EPS: Field = field(&["rms_norm_eps"], "attention.layer_norm_rms_epsilon");
/// Sliding window in tokens.
pub const WINDOW: Field = field(&["sliding_window"], "attention.sliding_window");
/// `E`
pub const EXPERTS: Field = field(&["num_local_experts", "num_experts"], "expert_count");
/// Experts per token.
pub const TOP_K: Field =
    field(&["num_experts_per_tok", "experts_per_token", "top_k_experts"], "expert_used_count");

/// The description of a model, asked by [`Field`].
#[derive(Clone, Copy)]
pub struct Config<'a> {
    catalog: &'a Catalog,
    access: &'a dyn FileAccess,
    arch: &'a str,
    defaults: &'static [(&'static str, f64)],
}

impl<'a> Config<'a> {
    /// Reads the architecture's name: `general.architecture`, or `model_type` (of `text_config` too).
    /// `access` is where the catalog's files are.
    pub fn new(catalog: &'a Catalog, access: &'a dyn FileAccess) -> Result<Config<'a>, ModelError> {
        let (arch, key) = match &catalog.source {
            Source::Gguf { metadata } => {
                let key = "general.architecture";
                (metadata.get(key).and_then(|v| v.as_str()), key)
            }
            Source::Folder { config, .. } if config.is_null() => (None, "config.json"),
            Source::Folder { config, .. } => {
                (config.get("model_type").and_then(Value::as_str), "model_type in config.json")
            }
        };
        let arch = arch.ok_or_else(|| ModelError::MissingKey { key: key.into() })?;
        Ok(Config { catalog, access, arch, defaults: &[] })
    }

    /// The same with values for keys that a family's published `config.json` files leave out.
    pub fn with_defaults(self, defaults: &'static [(&'static str, f64)]) -> Config<'a> {
        Config { defaults, ..self }
    }

    /// The architecture as the checkpoint names it.
    pub fn arch(&self) -> &'a str {
        self.arch
    }

    /// Where the checkpoint's files are.
    pub fn access(&self) -> &'a dyn FileAccess {
        self.access
    }

    /// Whether the checkpoint is a GGUF.
    pub fn is_gguf(&self) -> bool {
        matches!(self.catalog.source, Source::Gguf { .. })
    }

    /// A raw value of `config.json`, top level or `text_config`.
    pub fn json(&self, key: &str) -> Option<&'a Value> {
        let Source::Folder { config, .. } = &self.catalog.source else { return None };
        let nested = config.get("text_config").and_then(|t| t.get(key));
        nested.or_else(|| config.get(key)).filter(|v| !v.is_null())
    }

    /// A raw GGUF value, key without its architecture prefix.
    pub fn gguf(&self, key: &str) -> Option<&'a forebay_files::MetaValue> {
        let Source::Gguf { metadata } = &self.catalog.source else { return None };
        metadata.get(&format!("{}.{key}", self.arch))
    }

    /// `layer` picks from a GGUF array of one value per layer; without one all of them must agree.
    fn number(&self, f: Field, layer: Option<usize>) -> Result<Option<(String, f64)>, ModelError> {
        let bad = |key: &str, found: String| ModelError::BadValue {
            key: key.into(),
            found,
            expected: "a number".into(),
        };
        if self.is_gguf() {
            if f.gguf.is_empty() {
                return Ok(None);
            }
            let Some(value) = self.gguf(f.gguf) else { return Ok(None) };
            let one = match (value.as_array(), layer) {
                (None, _) => Some(value),
                (Some(list), Some(l)) => list.get(l),
                (Some(list), None) => list.first().filter(|v| list.iter().all(|w| w == *v)),
            };
            return match one.and_then(|v| v.as_f64()) {
                Some(x) => Ok(Some((f.gguf.to_string(), x))),
                None => Err(bad(f.gguf, format!("{value:?}").chars().take(60).collect())),
            };
        }
        for key in f.hf {
            if let Some(v) = self.json(key) {
                let x = v.as_f64().ok_or_else(|| bad(key, v.to_string()))?;
                return Ok(Some((key.to_string(), x)));
            }
        }
        let default = self.defaults.iter().find(|(key, _)| f.hf.contains(key));
        Ok(default.map(|(key, x)| (key.to_string(), *x)))
    }

    fn missing(&self, f: Field) -> ModelError {
        let key = match self.is_gguf() {
            true => format!("{}.{}", self.arch, f.gguf),
            false => f.hf.join(" / "),
        };
        ModelError::MissingKey { key }
    }

    /// An optional count: a whole number from 0 to 2^31.
    pub fn opt_count(&self, f: Field) -> Result<Option<usize>, ModelError> {
        self.opt_count_at(f, None)
    }

    /// The same; `layer` picks from a GGUF array of one value per layer.
    pub fn opt_count_at(
        &self,
        f: Field,
        layer: Option<usize>,
    ) -> Result<Option<usize>, ModelError> {
        let Some((key, x)) = self.number(f, layer)? else { return Ok(None) };
        if x.fract() != 0.0 || !(0.0..=2147483648.0).contains(&x) {
            return Err(ModelError::BadValue {
                key,
                found: x.to_string(),
                expected: "a whole number from 0 to 2^31".into(),
            });
        }
        Ok(Some(x as usize))
    }

    /// A count of at least 1.
    pub fn count(&self, f: Field) -> Result<usize, ModelError> {
        match self.opt_count(f)? {
            Some(0) => Err(ModelError::BadValue {
                key: f.hf.first().unwrap_or(&f.gguf).to_string(),
                found: "0".into(),
                expected: "at least 1".into(),
            }),
            Some(n) => Ok(n),
            None => Err(self.missing(f)),
        }
    }

    /// An optional number.
    pub fn opt_float(&self, f: Field) -> Result<Option<f64>, ModelError> {
        Ok(self.number(f, None)?.map(|(_, x)| x))
    }

    /// A number.
    pub fn float(&self, f: Field) -> Result<f64, ModelError> {
        self.opt_float(f)?.ok_or_else(|| self.missing(f))
    }

    /// An optional flag of `config.json`.
    pub fn flag(&self, key: &str) -> Result<Option<bool>, ModelError> {
        match self.json(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(v) => Err(ModelError::BadValue {
                key: key.into(),
                found: v.to_string(),
                expected: "true or false".into(),
            }),
        }
    }

    /// A list of strings of `config.json`, such as `layer_types`.
    pub fn strings(&self, key: &str) -> Option<Vec<&'a str>> {
        self.json(key)?.as_array()?.iter().map(Value::as_str).collect()
    }

    /// End ids: the union of every place of the checkpoint that names some.
    pub fn eos_ids(&self) -> Vec<u32> {
        let mut ids = Vec::new();
        let mut add = |v: &Value| match v {
            Value::Array(a) => ids.extend(a.iter().filter_map(Value::as_u64).map(|x| x as u32)),
            v => ids.extend(v.as_u64().map(|x| x as u32)),
        };
        match &self.catalog.source {
            Source::Folder { config, generation_config, .. } => {
                let places = [Some(config), config.get("text_config"), generation_config.as_ref()];
                for v in places.into_iter().flatten().filter_map(|c| c.get("eos_token_id")) {
                    add(v);
                }
            }
            Source::Gguf { metadata } => {
                for key in ["eos_token_id", "eot_token_id", "eom_token_id"] {
                    let v = metadata.get(&format!("tokenizer.ggml.{key}")).and_then(|v| v.as_u64());
                    ids.extend(v.map(|x| x as u32));
                }
            }
        }
        ids.sort_unstable();
        ids.dedup();
        ids
    }
}
