//! Names and descriptions that differ from the tiny checkpoints of `forebay/tests/families`: what is read
//! anyway, what is passed over, and what is refused by name. Catalogs are changed in memory.

use std::path::Path;

use forebay_files::{Catalog, Dtype, Source, TensorInfo};
use forebay_models::{ModelError, ModelSpec, Norm, read};
use forebay_quant::{Format, ParamType};
use serde_json::{Value, json};

fn open(name: &str) -> Catalog {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../forebay/tests/families").join(name);
    Catalog::open(&path).expect("the tiny models are sound")
}

fn config(catalog: &mut Catalog) -> &mut Value {
    match &mut catalog.source {
        Source::Folder { config, .. } => config,
        Source::Gguf { .. } => panic!("a folder was asked for"),
    }
}

/// Adds a tensor that shares the bytes of another.
fn add(catalog: &mut Catalog, like: &str, name: &str, shape: Option<&[u64]>) {
    let mut t: TensorInfo = catalog.tensors[like].clone();
    t.name = name.into();
    if let Some(shape) = shape {
        let elements: u64 = shape.iter().product();
        t.len = t.len / t.elements() * elements;
        t.shape = shape.to_vec();
    }
    catalog.tensors.insert(name.into(), t);
}

fn refused(catalog: &Catalog) -> String {
    read(catalog).expect_err("is refused").to_string()
}

fn gates(spec: &ModelSpec, layer: usize) -> Vec<(u64, usize)> {
    let routed = spec.layers[layer].ffn.routed.as_ref().expect("is routed");
    let gate = routed.experts.weights.iter().map(|e| &e.gate);
    gate.map(|w| (w.planes[0].extent.offset, w.rows)).collect()
}

#[test]
fn every_tiny_model_has_its_name() {
    for (file, family) in [
        ("llama", "llama"),
        ("mistral", "mistral"),
        ("mixtral", "mixtral"),
        ("mixtral/gguf/model.gguf", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3", "qwen3"),
        ("gemma3", "gemma3"),
        ("gemma4", "gemma4"),
    ] {
        let spec = read(&open(file)).expect(file);
        assert_eq!(spec.family, family);
        assert!(spec.notes.is_empty(), "{:?}", spec.notes);
    }
}

#[test]
fn stacked_mixtral() {
    let mut c = open("mixtral");
    let old: Vec<String> =
        c.tensors.keys().filter(|n| n.contains("block_sparse_moe")).cloned().collect();
    for l in 0..2 {
        let moe = format!("model.layers.{l}.block_sparse_moe");
        let mlp = format!("model.layers.{l}.mlp");
        let w1 = format!("{moe}.experts.0.w1.weight");
        add(&mut c, &w1, &format!("{mlp}.experts.gate_up_proj"), Some(&[4, 32, 32]));
        add(&mut c, &w1, &format!("{mlp}.experts.down_proj"), Some(&[4, 32, 16]));
        add(&mut c, &format!("{moe}.gate.weight"), &format!("{mlp}.gate.weight"), None);
    }
    for name in old {
        c.tensors.remove(&name);
    }
    let gates = gates(&read(&c).expect("stacked experts are read"), 1);
    let matrix = 2 * 16 * 32;
    assert!(gates.iter().all(|(_, rows)| *rows == 16));
    assert_eq!(gates[1].0 - gates[0].0, 2 * matrix);
}

#[test]
fn experts_one_by_one_in_gguf_are_refused_by_name() {
    let mut c = open("mixtral/gguf/model.gguf");
    add(&mut c, "blk.0.attn_q.weight", "blk.0.ffn_gate.0.weight", None);
    let message = refused(&c);
    assert!(message.contains("blk.0.ffn_gate.0.weight"), "{message}");
}

#[test]
fn towers_are_passed_over_and_said_so() {
    let mut c = open("gemma3");
    let norm = "model.norm.weight";
    add(&mut c, norm, "vision_tower.vision_model.post_layernorm.weight", None);
    add(&mut c, norm, "model.audio_tower.norm.weight", None);
    let spec = read(&c).expect("towers are passed over");
    assert_eq!(spec.notes, ["audio weights skipped", "vision weights skipped"]);
}

#[test]
fn unread_and_missing_tensors() {
    let mut c = open("gemma4");
    add(&mut c, "model.norm.weight", "model.layers.0.surprise.weight", None);
    assert!(matches!(read(&c), Err(ModelError::UnreadTensors { count: 1, .. })));
    for (model, tensor) in [
        ("gemma4", "model.layers.1.layer_scalar"),
        ("gemma4", "model.layers.0.self_attn.v_proj.weight"),
        ("gemma4", "model.layers.0.router.per_expert_scale"),
        ("gemma4/gguf/model.gguf", "rope_freqs.weight"),
        ("gemma4/gguf/model.gguf", "blk.1.ffn_gate_inp.scale"),
        ("gemma3", "model.layers.2.post_feedforward_layernorm.weight"),
        ("qwen2", "model.layers.1.self_attn.k_proj.bias"),
        ("mixtral", "model.layers.1.block_sparse_moe.experts.3.w2.weight"),
    ] {
        let mut c = open(model);
        c.tensors.remove(tensor).expect(tensor);
        let message = refused(&c);
        let stem = tensor.trim_end_matches(".weight");
        assert!(message.contains(stem) && message.contains("missing"), "{message}");
    }
}

#[test]
fn what_cannot_be_computed_is_refused() {
    for (model, key, value, named) in [
        (
            "llama",
            "rope_parameters",
            json!({"rope_type": "longrope", "rope_theta": 1e4}),
            "longrope",
        ),
        ("gemma4", "hidden_size_per_layer_input", json!(8), "per-layer embeddings"),
        ("gemma4", "num_kv_shared_layers", json!(1), "shared KV"),
        ("gemma4", "use_bidirectional_attention", json!("all"), "bidirectional"),
        ("gemma3", "hidden_activation", json!("relu"), "relu"),
        ("gemma3", "attn_logit_softcapping", json!(50.0), "attn_logit_softcapping"),
        ("mistral", "sliding_window", json!(0), "sliding_window"),
        ("gemma4", "layer_types", json!(["linear_attention", "x"]), "layer_types[0]"),
    ] {
        let mut c = open(model);
        config(&mut c)[key] = value;
        let message = refused(&c);
        assert!(message.contains(named), "{message}");
    }
}

/// Published Gemma 3 folders spell ropes in the old way and leave out what equals the defaults.
#[test]
fn old_gemma3_configs() {
    let new = read(&open("gemma3")).expect("is read");
    let mut c = open("gemma3");
    let text = config(&mut c);
    text["rope_theta"] = json!(5000.0);
    text["rope_local_base_freq"] = json!(100.0);
    text["rope_scaling"] = json!({"rope_type": "linear", "factor": 2.0});
    text["sliding_window_pattern"] = json!(6);
    for key in ["rope_parameters", "layer_types"] {
        text.as_object_mut().expect("is an object").remove(key);
    }
    let inner = text.take();
    *config(&mut c) = json!({"model_type": "gemma3", "text_config": inner});
    let old = read(&c).expect("is read");
    assert_eq!(old.ropes, new.ropes);
    assert_eq!(old.layers, new.layers);
}

#[test]
fn one_is_added_to_norms_once() {
    let plus_one = |n: &Norm| n.plus_one;
    for (file, expected) in [("gemma3", true), ("gemma3/gguf/model.gguf", false)] {
        let spec = read(&open(file)).expect(file);
        assert_eq!(plus_one(&spec.final_norm), expected);
        assert!(spec.layers.iter().all(|l| plus_one(&l.mixer_norm) == expected));
    }
}

#[test]
fn mlx_affine_of_all_widths() {
    // lm_head.weight is [96, 32]: one group of 32 in a row, as many words as bits.
    let quantised = |bits: u64, group: u64| {
        let mut c = open("llama");
        config(&mut c)["quantization"] = json!({"bits": bits, "group_size": group});
        for plane in ["scales", "biases"] {
            add(&mut c, "lm_head.weight", &format!("lm_head.{plane}"), Some(&[96, 1]));
        }
        let weight = c.tensors.get_mut("lm_head.weight").expect("is there");
        (weight.dtype, weight.shape, weight.len) = (Dtype::U32, vec![96, bits], 96 * bits * 4);
        c
    };
    for bits in [2, 3, 4, 5, 6, 8] {
        let spec = read(&quantised(bits, 32)).expect("is read");
        let head = spec.head.expect("is not tied");
        let (bits, group, params) = (bits as u8, 32, ParamType::Bf16);
        assert_eq!(head.format, Format::MlxAffine { bits, group, params });
        let rows: Vec<u64> = head.planes.iter().map(|p| p.stride).collect();
        assert_eq!((head.rows, head.cols, rows), (96, 32, vec![4 * bits as u64, 2, 2]));
    }
    for (bits, group) in [(7, 32), (1, 32), (16, 32), (4, 16)] {
        let message = refused(&quantised(bits, group));
        assert!(message.contains(&format!("{bits} bits, groups of {group}")), "{message}");
    }
}
