//! Rotary embedding: from any spelling in a config to inverse frequencies.
//!
//! Sources: Su et al. 2021 (RoPE); Peng et al. 2023 (YaRN); `modeling_rope_utils.py` of transformers for
//! the config dialects and the rounding switch `truncate`. Logarithms and powers are written out in f64
//! so that the tables are the same on every machine. Not here: angles and rotation (backends).

use serde_json::Value;

use crate::config::{Config, Field};
use crate::error::ModelError;
use crate::spec::{Rope, RopePairs};

const THETA: Field = Field { hf: &["rope_theta"], gguf: "rope.freq_base" };

/// How inverse frequencies are scaled.
#[derive(Clone, Debug, PartialEq)]
pub enum Scaling {
    /// Not at all.
    None,
    /// All divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// YaRN.
    Yarn {
        /// Stretch of the context.
        factor: f64,
        /// Context before stretching, in tokens.
        original_context: f64,
        /// Rotations above which nothing is interpolated.
        beta_fast: f64,
        /// Rotations below which all is.
        beta_slow: f64,
        /// Round the range to whole dimensions.
        truncate: bool,
        /// Factor on cos and sin; none: `0.1 ln(factor) + 1`.
        attention_factor: Option<f64>,
    },
    /// Gemma 4: the first `fraction` of the pairs turn with frequencies of the whole head's width, the rest
    /// stands still.
    Proportional {
        /// Part of the pairs that turns.
        fraction: f64,
        /// The divisor.
        factor: f64,
    },
    /// Divisors of the frequencies that a converter computed, one per pair (`rope_freqs` of GGUF files).
    Divisors(Vec<f32>),
    /// Llama 3.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are low.
        low_freq_factor: f64,
        /// Wavelengths below `original / high` are high.
        high_freq_factor: f64,
        /// Context before stretching, in tokens.
        original_context: f64,
    },
}

/// What a config says about rope.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeConfig {
    /// Base of the frequencies.
    pub theta: f64,
    /// Scaling.
    pub scaling: Scaling,
}

impl RopeConfig {
    /// Reads any spelling. `layer_type` picks among per-layer-type parameters where a config has them.
    pub fn read(cfg: &Config<'_>, layer_type: Option<&str>) -> Result<RopeConfig, ModelError> {
        match cfg.is_gguf() {
            true => Self::from_gguf(cfg),
            false => Self::from_json(cfg, layer_type),
        }
    }

    fn from_json(cfg: &Config<'_>, layer_type: Option<&str>) -> Result<RopeConfig, ModelError> {
        let mut params = cfg.json("rope_parameters");
        if let (Some(p), Some(kind)) = (params, layer_type) {
            params = p.get(kind).or(params);
        }
        let params = params.or_else(|| cfg.json("rope_scaling"));
        let get = |key: &str| params.and_then(|p| p.get(key)).and_then(Value::as_f64);
        let theta = match get("rope_theta") {
            Some(t) => t,
            None => cfg.float(THETA)?,
        };
        let need = |key: &str| {
            get(key).ok_or_else(|| ModelError::MissingKey { key: format!("rope_parameters.{key}") })
        };
        let kind = params
            .and_then(|p| p.get("rope_type").or_else(|| p.get("type")))
            .and_then(Value::as_str)
            .unwrap_or("default");
        let original = || {
            get("original_max_position_embeddings")
                .or_else(|| cfg.json("initial_context_length").and_then(Value::as_f64))
                .or_else(|| cfg.json("original_max_position_embeddings").and_then(Value::as_f64))
                .ok_or_else(|| ModelError::MissingKey {
                    key: "rope_parameters.original_max_position_embeddings".into(),
                })
        };
        let scaling = match kind {
            "default" | "mrope" => Scaling::None,
            "linear" => Scaling::Linear { factor: need("factor")? },
            "yarn" => Scaling::Yarn {
                factor: need("factor")?,
                original_context: original()?,
                beta_fast: get("beta_fast").unwrap_or(32.0),
                beta_slow: get("beta_slow").unwrap_or(1.0),
                truncate: params
                    .and_then(|p| p.get("truncate"))
                    .and_then(Value::as_bool)
                    .unwrap_or(true),
                attention_factor: get("attention_factor"),
            },
            "proportional" => Scaling::Proportional {
                fraction: get("partial_rotary_factor").unwrap_or(1.0),
                factor: get("factor").unwrap_or(1.0),
            },
            "llama3" => Scaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_context: original()?,
            },
            other => return Err(unsupported_kind(other)),
        };
        RopeConfig { theta, scaling }.checked()
    }

    /// Plain rope of base `theta`.
    pub fn plain(theta: f64) -> Result<RopeConfig, ModelError> {
        RopeConfig { theta, scaling: Scaling::None }.checked()
    }

    /// Takes the divisors of a converter's table, which hold all scaling.
    pub fn with_divisors(mut self, divisors: Vec<f32>) -> Result<RopeConfig, ModelError> {
        self.scaling = Scaling::Divisors(divisors);
        self.checked()
    }

    fn from_gguf(cfg: &Config<'_>) -> Result<RopeConfig, ModelError> {
        // Converters leave the key out where it is 10,000.
        let theta = cfg.opt_float(THETA)?.unwrap_or(10_000.0);
        let get = |gguf: &'static str| cfg.opt_float(Field { hf: &[], gguf });
        let need = |gguf: &'static str| cfg.float(Field { hf: &[], gguf });
        let kind = cfg.gguf("rope.scaling.type").and_then(|v| v.as_str()).unwrap_or("none");
        let scaling = match kind {
            "none" => Scaling::None,
            "linear" => Scaling::Linear { factor: need("rope.scaling.factor")? },
            "yarn" => Scaling::Yarn {
                factor: need("rope.scaling.factor")?,
                original_context: need("rope.scaling.original_context_length")?,
                beta_fast: get("rope.scaling.yarn_beta_fast")?.unwrap_or(32.0),
                beta_slow: get("rope.scaling.yarn_beta_slow")?.unwrap_or(1.0),
                // GGUF has no key for it; gpt-oss was trained without rounding.
                truncate: cfg.arch() != "gpt-oss",
                attention_factor: get("rope.scaling.attn_factor")?,
            },
            other => return Err(unsupported_kind(other)),
        };
        RopeConfig { theta, scaling }.checked()
    }

    fn checked(self) -> Result<RopeConfig, ModelError> {
        let positive = |key: &str, x: f64| match x.is_finite() && x > 0.0 {
            true => Ok(()),
            false => Err(ModelError::BadValue {
                key: key.into(),
                found: x.to_string(),
                expected: "a positive number".into(),
            }),
        };
        positive("rope_theta", self.theta)?;
        match &self.scaling {
            Scaling::None => {}
            Scaling::Linear { factor } => positive("rope factor", *factor)?,
            Scaling::Proportional { fraction, factor } => {
                positive("rope factor", *factor)?;
                positive("partial_rotary_factor", *fraction)?;
            }
            Scaling::Divisors(list) => {
                for d in list {
                    positive("rope_freqs.weight", *d as f64)?;
                }
            }
            Scaling::Yarn { factor, original_context, beta_fast, beta_slow, .. } => {
                positive("rope factor", *factor)?;
                positive("rope original context", *original_context)?;
                positive("rope beta_fast", *beta_fast)?;
                positive("rope beta_slow", *beta_slow)?;
            }
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("rope factor", *factor)?;
                positive("rope low_freq_factor", *low_freq_factor)?;
                positive("rope high_freq_factor", high_freq_factor - low_freq_factor)?;
                positive("rope original context", *original_context)?;
            }
        }
        Ok(self)
    }

    /// Inverse frequencies for the first `rotary_dim` dimensions of a head.
    pub fn table(&self, rotary_dim: usize) -> Rope {
        let dim = rotary_dim as f64;
        let ln_theta = ln(self.theta);
        let plain = |i: usize| exp(-ln_theta * (2 * i) as f64 / dim);
        let n = rotary_dim / 2;
        let (inv_freq, attention_factor): (Vec<f64>, f64) = match &self.scaling {
            Scaling::None => ((0..n).map(plain).collect(), 1.0),
            Scaling::Linear { factor } => ((0..n).map(|i| plain(i) / factor).collect(), 1.0),
            Scaling::Proportional { fraction, factor } => {
                let turning = (fraction * dim / 2.0).floor() as usize;
                let f = (0..n).map(|i| if i < turning { plain(i) / factor } else { 0.0 });
                (f.collect(), 1.0)
            }
            Scaling::Divisors(list) => ((0..n).map(|i| plain(i) / list[i] as f64).collect(), 1.0),
            Scaling::Yarn { factor, attention_factor, .. } => {
                let (low, high) = self.yarn_ramp(rotary_dim).expect("scaling is YaRN");
                let f = (0..n).map(|i| {
                    let ramp = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                    plain(i) / factor * ramp + plain(i) * (1.0 - ramp)
                });
                let default = if *factor <= 1.0 { 1.0 } else { 0.1 * ln(*factor) + 1.0 };
                (f.collect(), attention_factor.unwrap_or(default))
            }
            Scaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let f = (0..n).map(|i| {
                    let freq = plain(i);
                    let wavelength = 2.0 * std::f64::consts::PI / freq;
                    if wavelength < original_context / high_freq_factor {
                        freq
                    } else if wavelength > original_context / low_freq_factor {
                        freq / factor
                    } else {
                        let smooth = (original_context / wavelength - low_freq_factor)
                            / (high_freq_factor - low_freq_factor);
                        (1.0 - smooth) * freq / factor + smooth * freq
                    }
                });
                (f.collect(), 1.0)
            }
        };
        Rope {
            rotary_dim,
            inv_freq: inv_freq.into_iter().map(|f| f as f32).collect(),
            attention_factor: attention_factor as f32,
            pairs: RopePairs::Halves,
        }
    }

    /// First and last dimension of YaRN's ramp.
    fn yarn_ramp(&self, rotary_dim: usize) -> Option<(f64, f64)> {
        let Scaling::Yarn { original_context, beta_fast, beta_slow, truncate, .. } = self.scaling
        else {
            return None;
        };
        let dim = rotary_dim as f64;
        let at = |rotations: f64| {
            dim * ln(original_context / (rotations * 2.0 * std::f64::consts::PI))
                / (2.0 * ln(self.theta))
        };
        let (mut low, mut high) = (at(beta_fast), at(beta_slow));
        if truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        (low, high) = (low.max(0.0), high.min(dim - 1.0));
        if low == high {
            high += 0.001;
        }
        Some((low, high))
    }
}

fn unsupported_kind(kind: &str) -> ModelError {
    ModelError::Unsupported {
        what: format!("rope kind {kind:?}"),
        detail: "known kinds are default, linear, yarn, llama3, proportional".into(),
    }
}

/// Natural logarithm of a positive finite number, by range reduction and the atanh series.
fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut e = ((bits >> 52) & 0x7ff) as i64 - 1023;
    let mut m = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        e += 1;
    }
    let t = (m - 1.0) / (m + 1.0);
    let t2 = t * t;
    let mut sum = 0.0;
    for k in (0..20).rev() {
        sum = sum * t2 + 1.0 / (2 * k + 1) as f64;
    }
    e as f64 * std::f64::consts::LN_2 + 2.0 * t * sum
}

/// `e^x` for `|x| < 700`, by range reduction and Taylor's series.
fn exp(x: f64) -> f64 {
    let n = (x * std::f64::consts::LOG2_E).round();
    let r = x - n * std::f64::consts::LN_2;
    let mut sum = 1.0;
    for k in (1..22).rev() {
        sum = sum * r / k as f64 + 1.0;
    }
    sum * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn yarn(truncate: bool) -> RopeConfig {
        RopeConfig {
            theta: 150000.0,
            scaling: Scaling::Yarn {
                factor: 32.0,
                original_context: 4096.0,
                beta_fast: 32.0,
                beta_slow: 1.0,
                truncate,
                attention_factor: None,
            },
        }
    }

    fn close(a: f64, b: f64, rel: f64) {
        assert!((a - b).abs() <= rel * b.abs(), "{a} != {b}");
    }

    /// Values computed with transformers for gpt-oss's published rope settings.
    #[test]
    fn yarn_follows_the_reference() {
        let (low, high) = yarn(false).yarn_ramp(64).unwrap();
        close(low, 8.092779115512402, 1e-13);
        close(high, 17.39802450158856, 1e-13);
        let t = yarn(false).table(64);
        close(t.attention_factor as f64, 1.3465735902799727, 1e-7);
        for (i, want) in
            [(9, 3.170569618e-2), (12, 6.794959490e-3), (17, 1.293187012e-4), (31, 3.023511428e-7)]
        {
            close(t.inv_freq[i] as f64, want, 2e-6);
        }
        let t = yarn(true).table(64);
        assert_eq!(yarn(true).yarn_ramp(64), Some((8.0, 18.0)));
        close(t.inv_freq[9] as f64, 3.162075228e-2, 2e-6);
        close(t.inv_freq[17] as f64, 2.279477958e-4, 2e-6);
    }

    #[test]
    fn written_out_functions_match_the_library() {
        for i in 1..2000 {
            let x = 1.0009f64.powi(i * 10 - 8000);
            close(ln(x).abs().max(1e-300), x.ln().abs().max(1e-300), 1e-14);
            let y = -(i as f64) / 100.0;
            close(exp(y), y.exp(), 1e-14);
        }
    }
}
