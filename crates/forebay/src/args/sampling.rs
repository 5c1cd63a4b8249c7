//! How tokens are chosen.

use clap::Args;
use forebay_engine::SamplerParams;

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling options")]
pub struct SamplingArgs {
    /// 0 always takes the most likely token; the model's generation_config.json or 0.8 unless told.
    #[arg(long, allow_negative_numbers = true, env = "FOREBAY_TEMP")]
    pub temp: Option<f32>,
    /// Keep the k most likely tokens, 0 keeps all; the model's or 40 unless told.
    #[arg(long, env = "FOREBAY_TOP_K")]
    pub top_k: Option<usize>,
    /// Keep the smallest set of tokens whose probability reaches this; the model's or 0.95 unless told.
    #[arg(long, allow_negative_numbers = true, env = "FOREBAY_TOP_P")]
    pub top_p: Option<f32>,
    /// Keep tokens with at least this part of the largest probability; the model's or 0.05 unless told.
    #[arg(long, allow_negative_numbers = true, env = "FOREBAY_MIN_P")]
    pub min_p: Option<f32>,
    /// Divides the logits of recent tokens, 1 is off; 1.1 unless told, and off with --temp 0.
    #[arg(long, allow_negative_numbers = true, env = "FOREBAY_REPEAT_PENALTY")]
    pub repeat_penalty: Option<f32>,
    /// Subtracted from the logits of recent tokens.
    #[arg(
        long,
        allow_negative_numbers = true,
        env = "FOREBAY_PRESENCE_PENALTY",
        default_value_t = 0.0
    )]
    pub presence_penalty: f32,
    /// Subtracted from the logits of recent tokens, per occurrence.
    #[arg(
        long,
        allow_negative_numbers = true,
        env = "FOREBAY_FREQUENCY_PENALTY",
        default_value_t = 0.0
    )]
    pub frequency_penalty: f32,
    /// How many last tokens are recent.
    #[arg(long, env = "FOREBAY_REPEAT_LAST_N", default_value_t = 64)]
    pub repeat_last_n: usize,
    /// Seed of the random draws.
    #[arg(long, allow_negative_numbers = true, env = "FOREBAY_SEED", default_value_t = 0)]
    pub seed: u64,
}

impl SamplingArgs {
    /// The sampler's parameters: as told, else what the model recommends, else common defaults.
    pub fn params(&self, recommended: Option<&serde_json::Value>) -> anyhow::Result<SamplerParams> {
        let common = SamplerParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.1,
            ..SamplerParams::default()
        };
        let params = self.over(recommended, common)?;
        // Greedy means the model's own most likely token.
        match params.temperature == 0.0 {
            true => self.over(recommended, SamplerParams { repeat_penalty: 1.0, ..params }),
            false => Ok(params),
        }
    }

    /// As told, else what the model recommends, else `usual`.
    pub fn over(
        &self,
        recommended: Option<&serde_json::Value>,
        usual: SamplerParams,
    ) -> anyhow::Result<SamplerParams> {
        // Temperatures of a model that is not meant to be sampled say nothing.
        let recommended = recommended.filter(|r| r["do_sample"].as_bool() == Some(true));
        let model = |key: &str| recommended.and_then(|r| r[key].as_f64());
        let float = |told: Option<f32>, key: &str, usual: f32| {
            told.unwrap_or_else(|| model(key).map_or(usual, |v| v as f32))
        };
        let top_k = || model("top_k").map_or(usual.top_k, |k| k as usize);
        let params = SamplerParams {
            temperature: float(self.temp, "temperature", usual.temperature),
            top_k: self.top_k.unwrap_or_else(top_k),
            top_p: float(self.top_p, "top_p", usual.top_p),
            min_p: float(self.min_p, "min_p", usual.min_p),
            repeat_penalty: float(self.repeat_penalty, "repetition_penalty", usual.repeat_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repeat_last: self.repeat_last_n,
            seed: self.seed,
        };
        let check = |ok: bool, name: &str, what: &str| match ok {
            true => Ok(()),
            false => Err(crate::failure::usage(format!("--{name} must be {what}"))),
        };
        let p = &params;
        check(p.temperature.is_finite() && p.temperature >= 0.0, "temp", "0 or more")?;
        check(p.top_p > 0.0 && p.top_p <= 1.0, "top-p", "above 0 and at most 1")?;
        check((0.0..=1.0).contains(&p.min_p), "min-p", "between 0 and 1")?;
        let positive = p.repeat_penalty.is_finite() && p.repeat_penalty > 0.0;
        check(positive, "repeat-penalty", "above 0")?;
        check(p.presence_penalty.is_finite(), "presence-penalty", "a number")?;
        check(p.frequency_penalty.is_finite(), "frequency-penalty", "a number")?;
        Ok(params)
    }
}
