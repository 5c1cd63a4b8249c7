//! Names and dimensions of the tensors of published models.
//!
//! Dimensions are those of the models' published configs; names those of llama.cpp's and mlx-lm's
//! converters. Which experts are chosen: gpt-oss has a random router bias of deviation 1; the others
//! have router rows of different lengths (log-normal), so that some experts are chosen more often.

use forebay_files::MetaValue;
use serde_json::{Map, Value, json};

use crate::noise::Fill;

/// Spread of the router rows' lengths: the deviation of their logarithm.
const ROUTER_SPREAD: f32 = 0.4;

/// Embeddings are so many times larger than other weights, but for gpt-oss: layers then add to a token
/// without drowning it, so that different tokens choose different experts.
const EMBEDDING_GAIN: f32 = 30.0;

/// Weights of Gemma's norms after a branch, for the same reason.
const POST_NORM: f32 = 0.15;

/// A tensor to be written.
#[derive(Clone, Debug, PartialEq)]
pub struct Tensor {
    /// Its name.
    pub name: String,
    /// Outermost first.
    pub dims: Vec<u64>,
    /// Its bytes.
    pub fill: Fill,
}

impl Tensor {
    /// Bytes in the file.
    pub fn bytes(&self) -> u64 {
        self.fill.bytes(self.dims.iter().product())
    }
}

/// A GGUF file.
#[derive(Clone, Debug)]
pub struct GgufShape {
    /// Keys but the tokenizer's.
    pub keys: Vec<(String, MetaValue)>,
    /// In file order.
    pub tensors: Vec<Tensor>,
    /// Small model with the tokenizer.
    pub tokenizer: &'static str,
    /// Tokens.
    pub vocab: u64,
}

/// An MLX folder.
#[derive(Clone, Debug)]
pub struct MlxShape {
    /// `config.json`
    pub config: Value,
    /// In file order.
    pub tensors: Vec<Tensor>,
    /// Small model with the tokenizer.
    pub tokenizer: &'static str,
}

const ONES: Fill = Fill::F32 { mean: 1.0, std: 0.0 };

struct GgufTensors(Vec<Tensor>);

impl GgufTensors {
    fn add(&mut self, name: impl Into<String>, dims: &[u64], fill: Fill) {
        self.0.push(Tensor { name: name.into(), dims: dims.to_vec(), fill });
    }
}

fn u32_key(key: String, value: u64) -> (String, MetaValue) {
    (key, MetaValue::U32(value as u32))
}

/// gpt-oss, MXFP4 experts and Q8_0 elsewhere, as llama.cpp's published files.
pub fn gpt_oss(all_layers: usize, experts: u64, layers: Option<usize>) -> GgufShape {
    let layers = layers.unwrap_or(all_layers);
    let (d, inner, vocab, heads, kv, hd) = (2880, 2880, 201_088, 64, 8, 64);
    let small = |std| Fill::F32 { mean: 0.0, std };
    let mut t = GgufTensors(Vec::new());
    t.add("token_embd.weight", &[vocab, d], Fill::Q8_0);
    for layer in 0..layers {
        let name = |part: &str| format!("blk.{layer}.{part}");
        t.add(name("attn_norm.weight"), &[d], ONES);
        t.add(name("post_attention_norm.weight"), &[d], ONES);
        for (part, rows, cols) in
            [("q", heads * hd, d), ("k", kv * hd, d), ("v", kv * hd, d), ("output", d, heads * hd)]
        {
            t.add(name(&format!("attn_{part}.weight")), &[rows, cols], Fill::Q8_0);
            t.add(name(&format!("attn_{part}.bias")), &[rows], small(0.01));
        }
        t.add(name("attn_sinks.weight"), &[heads], small(1.0));
        t.add(name("ffn_gate_inp.weight"), &[experts, d], small(0.02));
        t.add(name("ffn_gate_inp.bias"), &[experts], small(1.0));
        for (part, rows, cols) in [("gate", inner, d), ("up", inner, d), ("down", d, inner)] {
            let dims = [experts, rows, cols];
            t.add(name(&format!("ffn_{part}_exps.weight")), &dims, Fill::Mxfp4);
            t.add(name(&format!("ffn_{part}_exps.bias")), &[experts, rows], small(0.01));
        }
    }
    t.add("output_norm.weight", &[d], ONES);
    t.add("output.weight", &[vocab, d], Fill::Q8_0);
    let key = |name: &str| format!("gpt-oss.{name}");
    let mut keys = vec![
        ("general.architecture".into(), MetaValue::String("gpt-oss".into())),
        u32_key("general.file_type".into(), 38),
    ];
    for (name, value) in [
        ("block_count", layers as u64),
        ("context_length", 131_072),
        ("embedding_length", d),
        ("feed_forward_length", inner),
        ("attention.head_count", heads),
        ("attention.head_count_kv", kv),
        ("attention.key_length", hd),
        ("attention.value_length", hd),
        ("attention.sliding_window", 128),
        ("expert_count", experts),
        ("expert_used_count", 4),
        ("expert_feed_forward_length", inner),
        ("rope.scaling.original_context_length", 4096),
    ] {
        keys.push(u32_key(key(name), value));
    }
    keys.push((key("attention.layer_norm_rms_epsilon"), MetaValue::F32(1e-5)));
    keys.push((key("rope.freq_base"), MetaValue::F32(150_000.0)));
    keys.push((key("rope.scaling.type"), MetaValue::String("yarn".into())));
    keys.push((key("rope.scaling.factor"), MetaValue::F32(32.0)));
    let tokenizer = "tiny-qwen3-moe/qwen3_moe-Q4_K_M.gguf";
    GgufShape { keys, tensors: t.0, tokenizer, vocab }
}

/// Qwen3-30B-A3B: Q4_K, and Q6_K for the down projections and the head.
pub fn qwen3_30b(layers: Option<usize>) -> GgufShape {
    let layers = layers.unwrap_or(48);
    let (d, inner, vocab, heads, kv, hd, experts) = (2048u64, 768, 151_936, 32, 4, 128, 128);
    let mut t = GgufTensors(Vec::new());
    t.add("token_embd.weight", &[vocab, d], Fill::Q4K { gain: EMBEDDING_GAIN });
    for layer in 0..layers {
        let name = |part: &str| format!("blk.{layer}.{part}");
        t.add(name("attn_norm.weight"), &[d], ONES);
        t.add(name("ffn_norm.weight"), &[d], ONES);
        for (part, rows, cols) in
            [("q", heads * hd, d), ("k", kv * hd, d), ("v", kv * hd, d), ("output", d, heads * hd)]
        {
            t.add(name(&format!("attn_{part}.weight")), &[rows, cols], Fill::Q4K { gain: 1.0 });
        }
        t.add(name("attn_q_norm.weight"), &[hd], ONES);
        t.add(name("attn_k_norm.weight"), &[hd], ONES);
        let router = Fill::F32Rows { std: 0.02, spread: ROUTER_SPREAD, row: d };
        t.add(name("ffn_gate_inp.weight"), &[experts, d], router);
        for (part, rows, cols, fill) in [
            ("gate", inner, d, Fill::Q4K { gain: 1.0 }),
            ("up", inner, d, Fill::Q4K { gain: 1.0 }),
            ("down", d, inner, Fill::Q6K),
        ] {
            t.add(name(&format!("ffn_{part}_exps.weight")), &[experts, rows, cols], fill);
        }
    }
    t.add("output_norm.weight", &[d], ONES);
    t.add("output.weight", &[vocab, d], Fill::Q6K);
    let key = |name: &str| format!("qwen3moe.{name}");
    let mut keys = vec![
        ("general.architecture".into(), MetaValue::String("qwen3moe".into())),
        u32_key("general.file_type".into(), 15),
    ];
    for (name, value) in [
        ("block_count", layers as u64),
        ("context_length", 40_960),
        ("embedding_length", d),
        ("feed_forward_length", 6144),
        ("attention.head_count", heads),
        ("attention.head_count_kv", kv),
        ("attention.key_length", hd),
        ("attention.value_length", hd),
        ("expert_count", experts),
        ("expert_used_count", 8),
        ("expert_feed_forward_length", inner),
    ] {
        keys.push(u32_key(key(name), value));
    }
    keys.push((key("attention.layer_norm_rms_epsilon"), MetaValue::F32(1e-6)));
    keys.push((key("rope.freq_base"), MetaValue::F32(1e6)));
    let tokenizer = "tiny-qwen3-moe/qwen3_moe-Q4_K_M.gguf";
    GgufShape { keys, tensors: t.0, tokenizer, vocab }
}

/// Tensors of an MLX folder in groups of 64, with the exceptions of its config.
struct MlxTensors {
    tensors: Vec<Tensor>,
    quantization: Map<String, Value>,
}

const GROUP: u64 = 64;

impl MlxTensors {
    fn new() -> MlxTensors {
        let quantization = json!({ "group_size": GROUP, "bits": 4, "mode": "affine" });
        let Value::Object(quantization) = quantization else { unreachable!("just made") };
        MlxTensors { tensors: Vec::new(), quantization }
    }

    fn dense(&mut self, name: String, dims: &[u64], mean: f32, std: f32) {
        self.tensors.push(Tensor { name, dims: dims.to_vec(), fill: Fill::Bf16 { mean, std } });
    }

    /// A matrix, or a stack of them, in 4 bits.
    fn matrix(&mut self, name: &str, dims: &[u64]) {
        self.affine(name, dims, 4, 0.0, 1.0);
    }

    fn embedding(&mut self, dims: &[u64], gain: f32) {
        self.affine("language_model.model.embed_tokens", dims, 4, 0.0, gain);
    }

    /// A router or gate in 8 bits, its rows of different lengths.
    fn router(&mut self, name: &str, dims: &[u64]) {
        self.quantization.insert(name.into(), json!({ "group_size": GROUP, "bits": 8 }));
        self.affine(name, dims, 8, ROUTER_SPREAD, 1.0);
    }

    /// `w = scale * code + bias`, codes uniform: a deviation of about 0.015 times `gain`.
    fn affine(&mut self, name: &str, dims: &[u64], bits: u64, spread: f32, gain: f32) {
        let (outer, cols) = dims.split_at(dims.len() - 1);
        let with = |last: u64| outer.iter().copied().chain([last]).collect::<Vec<u64>>();
        let levels = ((1u64 << bits) - 1) as f32;
        let scale = gain * 0.015 * 12f32.sqrt() / levels;
        let groups = cols[0] / GROUP;
        let salt = self.tensors.len() as u64;
        let per_group = |value| Fill::Bf16Rows { value, spread, row: groups, salt };
        let mut add = |part: &str, last, fill| {
            let name = format!("{name}.{part}");
            self.tensors.push(Tensor { name, dims: with(last), fill });
        };
        add("weight", cols[0] * bits / 32, Fill::Codes);
        add("scales", groups, per_group(scale));
        add("biases", groups, per_group(-scale * levels / 2.0));
    }
}

/// Gemma-4-26B-A4B in MLX 4 bits.
pub fn gemma4_26b(layers: Option<usize>) -> MlxShape {
    let layers = layers.unwrap_or(30);
    let (d, dense, inner, vocab, heads, experts) = (2816, 2112, 704, 262_144, 16, 128);
    let mut t = MlxTensors::new();
    t.embedding(&[vocab, d], 1.0);
    let is_full = |layer: usize| layer % 6 == 5;
    for layer in 0..layers {
        let name = |part: &str| format!("language_model.model.layers.{layer}.{part}");
        let (hd, kv) = if is_full(layer) { (512, 2) } else { (256, 8) };
        for part in [
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "pre_feedforward_layernorm_2",
            "post_feedforward_layernorm",
            "post_feedforward_layernorm_1",
            "post_feedforward_layernorm_2",
        ] {
            let adds = ["post_attention_layernorm", "post_feedforward_layernorm"].contains(&part);
            let mean = if adds { POST_NORM } else { 1.0 };
            t.dense(name(&format!("{part}.weight")), &[d], mean, 0.0);
        }
        t.dense(name("layer_scalar"), &[1], 1.0, 0.0);
        t.matrix(&name("self_attn.q_proj"), &[heads * hd, d]);
        t.matrix(&name("self_attn.k_proj"), &[kv * hd, d]);
        if !is_full(layer) {
            t.matrix(&name("self_attn.v_proj"), &[kv * hd, d]);
        }
        t.matrix(&name("self_attn.o_proj"), &[d, heads * hd]);
        t.dense(name("self_attn.q_norm.weight"), &[hd], 1.0, 0.0);
        t.dense(name("self_attn.k_norm.weight"), &[hd], 1.0, 0.0);
        for (part, rows, cols) in [("gate", dense, d), ("up", dense, d), ("down", d, dense)] {
            t.matrix(&name(&format!("mlp.{part}_proj")), &[rows, cols]);
        }
        t.dense(name("router.scale"), &[d], 1.0, 0.0);
        t.dense(name("router.per_expert_scale"), &[experts], 1.0, 0.0);
        t.router(&name("router.proj"), &[experts, d]);
        for (part, rows, cols) in [("gate", inner, d), ("up", inner, d), ("down", d, inner)] {
            t.matrix(&name(&format!("experts.switch_glu.{part}_proj")), &[experts, rows, cols]);
        }
    }
    t.dense("language_model.model.norm.weight".into(), &[d], 1.0, 0.0);
    let kinds =
        (0..layers).map(|l| if is_full(l) { "full_attention" } else { "sliding_attention" });
    let config = json!({
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "eos_token_id": [0, 2],
        "quantization": t.quantization,
        "tie_word_embeddings": true,
        "text_config": {
            "model_type": "gemma4_text", "attention_bias": false, "attention_k_eq_v": true,
            "enable_moe_block": true, "final_logit_softcapping": 30.0, "head_dim": 256,
            "global_head_dim": 512, "num_global_key_value_heads": 2,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": d,
            "hidden_size_per_layer_input": 0, "intermediate_size": dense,
            "layer_types": kinds.collect::<Vec<_>>(), "max_position_embeddings": 262_144,
            "moe_intermediate_size": inner, "num_attention_heads": heads,
            "num_experts": experts, "num_hidden_layers": layers, "num_key_value_heads": 8,
            "num_kv_shared_layers": 0, "rms_norm_eps": 1e-6,
            "rope_parameters": {
                "full_attention": { "partial_rotary_factor": 0.25, "rope_theta": 1e6,
                                    "rope_type": "proportional" },
                "sliding_attention": { "rope_theta": 1e4, "rope_type": "default" }
            },
            "sliding_window": 1024, "tie_word_embeddings": true, "top_k_experts": 8,
            "use_double_wide_mlp": false, "vocab_size": vocab,
            "vocab_size_per_layer_input": vocab
        }
    });
    MlxShape { config, tensors: t.tensors, tokenizer: "tiny-gemma4-mlx4" }
}

/// Dimensions of a Qwen3.5 or 3.6 model.
struct Hybrid {
    layers: usize,
    d: u64,
    heads: u64,
    kv: u64,
    value_heads: u64,
    /// (experts, experts per token, their inner width), or the dense inner width.
    ffn: Result<(u64, u64, u64), u64>,
    tied: bool,
}

/// Qwen3.6-35B-A3B in MLX 4 bits.
pub fn qwen36_35b(layers: Option<usize>) -> MlxShape {
    hybrid(&Hybrid {
        layers: layers.unwrap_or(40),
        d: 2048,
        heads: 16,
        kv: 2,
        value_heads: 32,
        ffn: Ok((256, 8, 512)),
        tied: false,
    })
}

/// Qwen3.5-4B, dense, in MLX 4 bits.
pub fn qwen35_4b(layers: Option<usize>) -> MlxShape {
    hybrid(&Hybrid {
        layers: layers.unwrap_or(32),
        d: 2560,
        heads: 16,
        kv: 4,
        value_heads: 32,
        ffn: Err(9216),
        tied: true,
    })
}

fn hybrid(shape: &Hybrid) -> MlxShape {
    let &Hybrid { layers, d, heads, kv, value_heads, ffn, tied } = shape;
    let (vocab, hd, key_heads, dk) = (248_320, 256, 16, 128);
    let channels = 2 * key_heads * dk + value_heads * dk;
    let mut t = MlxTensors::new();
    t.embedding(&[vocab, d], if tied { 1.0 } else { EMBEDDING_GAIN });
    let is_full = |layer: usize| layer % 4 == 3;
    for layer in 0..layers {
        let name = |part: &str| format!("language_model.model.layers.{layer}.{part}");
        t.dense(name("input_layernorm.weight"), &[d], 1.0, 0.0);
        t.dense(name("post_attention_layernorm.weight"), &[d], 1.0, 0.0);
        if is_full(layer) {
            t.matrix(&name("self_attn.q_proj"), &[heads * 2 * hd, d]);
            t.matrix(&name("self_attn.k_proj"), &[kv * hd, d]);
            t.matrix(&name("self_attn.v_proj"), &[kv * hd, d]);
            t.matrix(&name("self_attn.o_proj"), &[d, heads * hd]);
            t.dense(name("self_attn.q_norm.weight"), &[hd], 1.0, 0.0);
            t.dense(name("self_attn.k_norm.weight"), &[hd], 1.0, 0.0);
        } else {
            t.dense(name("linear_attn.A_log"), &[value_heads], 0.0, 1.0);
            t.dense(name("linear_attn.dt_bias"), &[value_heads], 0.0, 1.0);
            t.dense(name("linear_attn.conv1d.weight"), &[channels, 4, 1], 0.0, 0.3);
            t.dense(name("linear_attn.norm.weight"), &[dk], 1.0, 0.0);
            t.matrix(&name("linear_attn.in_proj_qkv"), &[channels, d]);
            t.matrix(&name("linear_attn.in_proj_z"), &[value_heads * dk, d]);
            t.matrix(&name("linear_attn.in_proj_a"), &[value_heads, d]);
            t.matrix(&name("linear_attn.in_proj_b"), &[value_heads, d]);
            t.matrix(&name("linear_attn.out_proj"), &[d, value_heads * dk]);
        }
        let glu = |t: &mut MlxTensors, prefix: &str, inner: u64, stack: &[u64]| {
            for (part, rows, cols) in [("gate", inner, d), ("up", inner, d), ("down", d, inner)] {
                let dims: Vec<u64> = stack.iter().copied().chain([rows, cols]).collect();
                t.matrix(&name(&format!("mlp.{prefix}{part}_proj")), &dims);
            }
        };
        match ffn {
            Ok((experts, _, inner)) => {
                t.router(&name("mlp.gate"), &[experts, d]);
                t.router(&name("mlp.shared_expert_gate"), &[1, d]);
                glu(&mut t, "shared_expert.", inner, &[]);
                glu(&mut t, "switch_mlp.", inner, &[experts]);
            }
            Err(inner) => glu(&mut t, "", inner, &[]),
        }
    }
    t.dense("language_model.model.norm.weight".into(), &[d], 1.0, 0.0);
    if !tied {
        t.matrix("language_model.lm_head", &[vocab, d]);
    }
    let kinds = (0..layers).map(|l| if is_full(l) { "full_attention" } else { "linear_attention" });
    let mut text = json!({
        "attention_bias": false, "head_dim": hd, "hidden_act": "silu", "hidden_size": d,
        "layer_types": kinds.collect::<Vec<_>>(), "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": dk, "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads, "linear_value_head_dim": dk,
        "max_position_embeddings": 262_144, "num_attention_heads": heads,
        "num_hidden_layers": layers, "num_key_value_heads": kv, "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": { "mrope_interleaved": true, "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25, "rope_theta": 1e7, "rope_type": "default" },
        "tie_word_embeddings": tied, "vocab_size": vocab
    });
    let (kind, class) = match ffn {
        Ok((experts, per_token, inner)) => {
            text["num_experts"] = json!(experts);
            text["num_experts_per_tok"] = json!(per_token);
            text["moe_intermediate_size"] = json!(inner);
            text["shared_expert_intermediate_size"] = json!(inner);
            ("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")
        }
        Err(inner) => {
            text["intermediate_size"] = json!(inner);
            ("qwen3_5", "Qwen3_5ForConditionalGeneration")
        }
    };
    text["model_type"] = json!(format!("{kind}_text"));
    let config = json!({
        "architectures": [class], "model_type": kind, "eos_token_id": [0, 2],
        "quantization": t.quantization, "tie_word_embeddings": tied, "text_config": text
    });
    // The small Qwen3.5 model here is a GGUF file; any byte-level tokenizer folder will do.
    MlxShape { config, tensors: t.tensors, tokenizer: "tiny-gpt-oss" }
}
