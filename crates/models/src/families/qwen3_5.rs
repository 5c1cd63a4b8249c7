//! Qwen3.5 and 3.6 hybrids (Qwen team 2026), routed and dense. Reference:
//! `models/qwen3_5_moe/modeling_qwen3_5_moe.py` of transformers.
//!
//! Three of four layers are gated delta nets, the others attention with an output gate and partial rotary
//! embedding; norms are `1 + w` (GGUF and MLX files store the sum); routed models have a shared expert with
//! a gate; a multi-token-prediction block may follow, which drafts where it is asked to.

use forebay_files::Catalog;

use super::Family;
use super::decoder::{self, EXPERTS, FusedRows, Shape};
use crate::config::{self, Config, Field};
use crate::error::ModelError;
use crate::rope::RopeConfig;
use crate::spec::*;
use crate::weights::{Name, Weights};

pub const ROUTED: Family = Family {
    name: "qwen3.5-moe",
    model_types: &["qwen3_5_moe", "qwen3_5_moe_text"],
    gguf: &["qwen35moe"],
    read: |cfg, catalog| read(cfg, catalog, true),
};
pub const DENSE: Family = Family {
    name: "qwen3.5",
    model_types: &["qwen3_5", "qwen3_5_text"],
    gguf: &["qwen35"],
    read: |cfg, catalog| read(cfg, catalog, false),
};

const fn name(hf: &'static str, gguf: &'static str) -> Name {
    Name { hf, gguf }
}

const FFN_NORM: Name = name("layers.{l}.post_attention_layernorm", "blk.{l}.post_attention_norm");
const ROUTER: Name = name("layers.{l}.mlp.gate", "blk.{l}.ffn_gate_inp");
const SHARED_GATE: Name = name("layers.{l}.mlp.shared_expert.gate_proj", "blk.{l}.ffn_gate_shexp");
const SHARED_UP: Name = name("layers.{l}.mlp.shared_expert.up_proj", "blk.{l}.ffn_up_shexp");
const SHARED_DOWN: Name = name("layers.{l}.mlp.shared_expert.down_proj", "blk.{l}.ffn_down_shexp");
const SHARED_SCALE: Name = name("layers.{l}.mlp.shared_expert_gate", "blk.{l}.ffn_gate_inp_shexp");
const QKV: Name = name("layers.{l}.linear_attn.in_proj_qkv", "blk.{l}.attn_qkv");
const Z: Name = name("layers.{l}.linear_attn.in_proj_z", "blk.{l}.attn_gate");
const A: Name = name("layers.{l}.linear_attn.in_proj_a", "blk.{l}.ssm_alpha");
const B: Name = name("layers.{l}.linear_attn.in_proj_b", "blk.{l}.ssm_beta");
const CONV: Name = name("layers.{l}.linear_attn.conv1d", "blk.{l}.ssm_conv1d");
const A_LOG: Name = name("layers.{l}.linear_attn.A_log", "blk.{l}.ssm_a");
const DT_BIAS: Name = name("layers.{l}.linear_attn.dt_bias", "blk.{l}.ssm_dt.bias");
const DELTA_NORM: Name = name("layers.{l}.linear_attn.norm", "blk.{l}.ssm_norm");
const DELTA_OUT: Name = name("layers.{l}.linear_attn.out_proj", "blk.{l}.ssm_out");
const MTP_FC: Name = name("fc", "blk.{l}.nextn.eh_proj");
const MTP_EMBEDDING_NORM: Name = name("pre_fc_norm_embedding", "blk.{l}.nextn.enorm");
const MTP_HIDDEN_NORM: Name = name("pre_fc_norm_hidden", "blk.{l}.nextn.hnorm");
const MTP_NORM: Name = name("norm", "blk.{l}.nextn.shared_head_norm");

const INNER: Field = Field { hf: &["moe_intermediate_size"], gguf: "expert_feed_forward_length" };
const SHARED_INNER: Field =
    Field { hf: &["shared_expert_intermediate_size"], gguf: "expert_shared_feed_forward_length" };
const MTP_LAYERS: Field = Field { hf: &["mtp_num_hidden_layers"], gguf: "nextn_predict_layers" };
const K_HEADS: Field = Field { hf: &["linear_num_key_heads"], gguf: "ssm.group_count" };
const V_HEADS: Field = Field { hf: &["linear_num_value_heads"], gguf: "ssm.time_step_rank" };
const K_DIM: Field = Field { hf: &["linear_key_head_dim"], gguf: "ssm.state_size" };
const V_DIM: Field = Field { hf: &["linear_value_head_dim"], gguf: "" };
const INNER_SIZE: Field = Field { hf: &[], gguf: "ssm.inner_size" };
const CONV_WIDTH: Field = Field { hf: &["linear_conv_kernel_dim"], gguf: "ssm.conv_kernel" };
const ROTARY: Field = Field { hf: &["partial_rotary_factor"], gguf: "rope.dimension_count" };
const INTERVAL: Field = Field { hf: &["full_attention_interval"], gguf: "full_attention_interval" };

/// What the layers are made with.
struct Reader<'a, 'b> {
    cfg: &'a Config<'b>,
    w: Weights<'b>,
    s: Shape,
    delta: DeltaSizes,
    routed: bool,
    /// Norm weights are stored without their 1.
    plus_one: bool,
}

#[derive(Clone, Copy)]
struct DeltaSizes {
    n_k_heads: usize,
    n_v_heads: usize,
    k_dim: usize,
    v_dim: usize,
    conv_width: usize,
}

fn read(cfg: &Config<'_>, catalog: &Catalog, routed: bool) -> Result<ModelSpec, ModelError> {
    let mut s = Shape::read(cfg, catalog)?;
    let w = Weights::new(catalog);
    let mtp_layers = cfg.opt_count(MTP_LAYERS)?.unwrap_or(0);
    if cfg.is_gguf() {
        // The count includes the multi-token-prediction blocks.
        s.layers = s.layers.saturating_sub(mtp_layers);
    }
    let delta = delta_sizes(cfg)?;
    let linear = linear_layers(cfg, s.layers)?;
    // Converters to GGUF and MLX store 1 + w, and MLX turns the convolution around.
    let channels = 2 * delta.n_k_heads * delta.k_dim + delta.n_v_heads * delta.v_dim;
    let first = linear.iter().position(|l| *l).unwrap_or(0);
    let mlx = w.has_shape(CONV, first, &[channels, delta.conv_width, 1]);
    let plus_one = !cfg.is_gguf() && !mlx;
    let rope = RopeConfig::read(cfg, None)?.table(rotary_dim(cfg, s.head_dim)?);
    let reader = Reader { cfg, w, s, delta, routed, plus_one };
    let layers: Result<Vec<Layer>, ModelError> =
        linear.iter().enumerate().map(|(l, linear)| reader.layer(l, *linear)).collect();
    let multi_token = reader.multi_token()?;
    let Reader { w, .. } = reader;
    let mut spec = decoder::model(cfg, w, &s, layers?, vec![rope])?;
    spec.final_norm.plus_one = plus_one;
    spec.multi_token = multi_token.map(Box::new);
    if mtp_layers > 0 && spec.multi_token.is_none() {
        spec.notes.push(
            "the multi-token-prediction weights were dropped by a converter: no drafting with them"
                .into(),
        );
    }
    Ok(spec)
}

impl Reader<'_, '_> {
    fn norm(&self, n: Name, l: usize, len: usize) -> Result<Norm, ModelError> {
        let norm = self.w.norm(n, l, len, self.s.eps)?;
        Ok(Norm { plus_one: self.plus_one, ..norm })
    }

    fn layer(&self, l: usize, linear: bool) -> Result<Layer, ModelError> {
        let mixer = match linear {
            true => Mixer::DeltaNet(self.delta_net(l)?),
            false => Mixer::Attention(self.attention(l)?),
        };
        Ok(Layer {
            mixer_norm: self.norm(decoder::MIXER_NORM, l, self.s.d)?,
            mixer,
            mixer_post_norm: None,
            ffn: self.feed_forward(l)?,
            output_scale: None,
        })
    }

    fn attention(&self, l: usize) -> Result<Attention, ModelError> {
        let mut attention = decoder::attention_of(&self.w, &self.s, l, true, true)?;
        attention.q_norm = Some(self.norm(decoder::Q_NORM, l, self.s.head_dim)?);
        attention.k_norm = Some(self.norm(decoder::K_NORM, l, self.s.head_dim)?);
        attention.rope = Some(RopeId(0));
        Ok(attention)
    }

    fn delta_net(&self, l: usize) -> Result<DeltaNet, ModelError> {
        let DeltaSizes { n_k_heads, n_v_heads, k_dim, v_dim, conv_width } = self.delta;
        let (w, d) = (&self.w, self.s.d);
        let values = n_v_heads * v_dim;
        let channels = 2 * n_k_heads * k_dim + values;
        let a = w.vector(A_LOG, l, n_v_heads)?;
        let gguf = self.cfg.is_gguf();
        Ok(DeltaNet {
            n_k_heads,
            n_v_heads,
            k_dim,
            v_dim,
            // GGUF files hold value heads in an order of their own.
            tiled: gguf,
            qkv: w.linear(QKV, l, channels, d)?,
            z: w.linear(Z, l, values, d)?,
            a: w.linear(A, l, n_v_heads, d)?,
            b: w.linear(B, l, n_v_heads, d)?,
            conv: w.flat(
                CONV,
                l,
                &[&[channels, 1, conv_width], &[channels, conv_width, 1], &[channels, conv_width]],
            )?,
            conv_width,
            decay: if gguf { Decay::NegativeExp(a) } else { Decay::Log(a) },
            dt_bias: w.vector(DT_BIAS, l, n_v_heads)?,
            norm: w.norm(DELTA_NORM, l, v_dim, self.s.eps)?,
            out: w.linear(DELTA_OUT, l, d, values)?,
        })
    }

    fn feed_forward(&self, l: usize) -> Result<FeedForward, ModelError> {
        let (w, d) = (&self.w, self.s.d);
        let norm = self.norm(FFN_NORM, l, d)?;
        if !self.routed {
            let inner = self.cfg.count(config::INTERMEDIATE)?;
            let mlp = decoder::mlp(w, &self.s, l, inner, Activation::Silu)?;
            let dense = DenseBranch { norm, mlp, gate: None, post_norm: None };
            return Ok(FeedForward { dense: Some(dense), routed: None, post_norm: None });
        }
        let n_experts = self.cfg.count(config::EXPERTS)?;
        let shape = [n_experts, self.cfg.count(INNER)?, d];
        let inner = self.cfg.count(SHARED_INNER)?;
        let shared = DenseBranch {
            norm: norm.clone(),
            mlp: Mlp {
                gate: w.linear(SHARED_GATE, l, inner, d)?,
                up: w.linear(SHARED_UP, l, inner, d)?,
                down: w.linear(SHARED_DOWN, l, d, inner)?,
                activation: Activation::Silu,
            },
            gate: Some(w.linear(SHARED_SCALE, l, 1, d)?),
            post_norm: None,
        };
        let routed = RoutedBranch {
            norm,
            router: Router {
                weight: w.linear(ROUTER, l, n_experts, d)?,
                top_k: decoder::top_k(self.cfg, n_experts)?,
                score: Score::SoftmaxSelected,
                input_norm: None,
                expert_scale: None,
            },
            experts: decoder::experts(w, &EXPERTS, l, shape, FusedRows::Halves, Activation::Silu)?,
            post_norm: None,
        };
        Ok(FeedForward { dense: Some(shared), routed: Some(routed), post_norm: None })
    }

    /// The block after the last layer in a GGUF, under `mtp.` in a folder, or under `language_model.mtp.` as converters to MLX keep it.
    fn multi_token(&self) -> Result<Option<MultiToken>, ModelError> {
        let l = if self.cfg.is_gguf() { self.s.layers } else { 0 };
        let d = self.s.d;
        let prefixes = ["mtp.", "language_model.mtp."];
        let there = prefixes.into_iter().find(|prefix| self.w.within(prefix, |w| w.has(MTP_FC, l)));
        let Some(prefix) = there else { return Ok(None) };
        self.w.within(prefix, |w| {
            Ok(Some(MultiToken {
                fc: w.linear(MTP_FC, l, d, 2 * d)?,
                embedding_norm: self.norm(MTP_EMBEDDING_NORM, l, d)?,
                hidden_norm: self.norm(MTP_HIDDEN_NORM, l, d)?,
                layer: self.layer(l, false)?,
                norm: self.norm(MTP_NORM, l, d)?,
            }))
        })
    }
}

fn delta_sizes(cfg: &Config<'_>) -> Result<DeltaSizes, ModelError> {
    let (n_k_heads, n_v_heads) = (cfg.count(K_HEADS)?, cfg.count(V_HEADS)?);
    if n_v_heads % n_k_heads != 0 {
        return Err(ModelError::BadValue {
            key: "value heads of a delta net".into(),
            found: n_v_heads.to_string(),
            expected: format!("a multiple of {n_k_heads}"),
        });
    }
    let v_dim = match cfg.is_gguf() {
        true => cfg.count(INNER_SIZE)? / n_v_heads,
        false => cfg.count(V_DIM)?,
    };
    let conv_width = cfg.count(CONV_WIDTH)?;
    Ok(DeltaSizes { n_k_heads, n_v_heads, k_dim: cfg.count(K_DIM)?, v_dim, conv_width })
}

/// Which layers are delta nets.
fn linear_layers(cfg: &Config<'_>, layers: usize) -> Result<Vec<bool>, ModelError> {
    let bad = |key: &str, found: String| ModelError::BadValue {
        key: key.into(),
        found,
        expected: "linear_attention or full_attention for each layer".into(),
    };
    if let Some(types) = cfg.strings("layer_types") {
        return (0..layers)
            .map(|l| match types.get(l).copied() {
                Some("linear_attention") => Ok(true),
                Some("full_attention") => Ok(false),
                other => Err(bad("layer_types", format!("{other:?} at {l}"))),
            })
            .collect();
    }
    let key = "attention.recurrent_layers";
    if let Some(list) = cfg.gguf(key).and_then(|v| v.as_array()) {
        let flag = |l: usize| list.get(l).and_then(|v| v.as_bool());
        return (0..layers).map(|l| flag(l).ok_or_else(|| bad(key, "too few".into()))).collect();
    }
    let interval = cfg.opt_count(INTERVAL)?.unwrap_or(4).max(1);
    Ok((0..layers).map(|l| (l + 1) % interval != 0).collect())
}

/// Dimensions of a head that turn.
fn rotary_dim(cfg: &Config<'_>, head_dim: usize) -> Result<usize, ModelError> {
    let nested = cfg.json("rope_parameters").and_then(|p| p.get("partial_rotary_factor"));
    let factor = match nested.and_then(|v| v.as_f64()) {
        Some(f) => Some(f),
        None => cfg.opt_float(ROTARY)?,
    };
    let dims = match (factor, cfg.is_gguf()) {
        (Some(dims), true) => dims as usize,
        (Some(factor), false) => (head_dim as f64 * factor) as usize,
        (None, _) => head_dim / 4,
    };
    match dims > 0 && dims % 2 == 0 && dims <= head_dim {
        true => Ok(dims),
        false => Err(ModelError::BadValue {
            key: "rotary dimensions".into(),
            found: dims.to_string(),
            expected: format!("an even number up to {head_dim}"),
        }),
    }
}
