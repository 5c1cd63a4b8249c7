//! Answers against those of other implementations. The expected values are never ours: `models/reference`
//! and the shared goldens were made by transformers and mlx-lm (`tools/golden_from_gguf.py`).

mod common;

use std::path::Path;

use common::*;
use serde_json::Value;

/// Largest logit difference in f32, where only the order of sums differs.
const TOLERANCE: f64 = 2e-3;

fn golden(model: &Path, reference: &Path) -> Value {
    let command = &mut forebay();
    let out = output(command.args(["eval", "golden"]).args([model, reference]).args([
        "--precision",
        "f32",
        "--json",
    ]));
    let text = String::from_utf8_lossy(&out.stdout);
    assert_eq!(out.status.code(), Some(0), "{}: {text}", model.display());
    serde_json::from_str(&text).unwrap()
}

/// All that a comparison says must say yes, and it must have compared something.
fn agrees(name: &str, report: &Value, greedy: u64) {
    let number = |key: &str| report[key].as_f64().unwrap();
    println!("{name}: largest logit difference {}", report["max_abs_logit_diff"]);
    assert_eq!(report["ok"], true, "{name}: {report}");
    assert_eq!(report["tolerance"], TOLERANCE, "{name}");
    assert!(number("max_abs_logit_diff") <= TOLERANCE, "{name}: {report}");
    assert!(number("max_abs_logit_diff") > 0.0, "{name}: nothing was compared");
    // The references are rounded to 5 digits: their own rounding makes up to some 1e-5.
    assert!(number("max_kl") < 1e-4, "{name}: {report}");
    assert_eq!(report["argmax_agree"], 16, "{name}: four positions of four prompts");
    assert_eq!(report["argmax_total"], 16, "{name}");
    assert_eq!(report["cases"].as_array().unwrap().len(), 4, "{name}");
    assert_eq!(report["greedy_agree"], report["greedy_total"], "{name}");
    let ties = report["cases"].as_array().unwrap().iter();
    if ties.clone().all(|c| c["near_tie_at"].is_null()) {
        assert_eq!(report["greedy_total"], greedy, "{name}");
    }
}

#[test]
fn bundled_models_give_the_answers_of_transformers() {
    for (name, reference) in [(GPT_OSS, "gpt_oss-hf"), (QWEN3_MOE, "qwen3_moe-Q4_K_M")] {
        let reference = model(&format!("reference/{reference}.json"));
        agrees(name, &golden(&model(name), &reference), 4 * 48);
    }
}

#[test]
fn a_wrong_answer_fails() {
    let dir = tempfile::tempdir().unwrap();
    let mut reference = read_json(&model("reference/gpt_oss-hf.json"));
    reference["cases"].as_array_mut().unwrap().truncate(1);
    let first = &mut reference["cases"][0];
    first["greedy"] = serde_json::json!([]);
    let logit = first["positions"][1]["top_logits"][3].as_f64().unwrap();
    first["positions"][1]["top_logits"][3] = (logit + 0.01).into();
    let path = dir.path().join("wrong.json");
    std::fs::write(&path, reference.to_string()).unwrap();
    let command = &mut forebay();
    let command = command.args(["eval", "golden", "--precision", "f32", "--json"]);
    let out = output(command.args([&model(GPT_OSS), &path]));
    assert_eq!(out.status.code(), Some(1));
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["ok"], false);
    let diff = report["max_abs_logit_diff"].as_f64().unwrap();
    assert!((diff - 0.01).abs() < 2e-3, "{report}");
    reference["cases"][0]["positions"][1]["position"] = 12.into();
    std::fs::write(&path, reference.to_string()).unwrap();
    let out = output(forebay().args(["eval", "golden"]).args([&model(GPT_OSS), &path]));
    assert_eq!(out.status.code(), Some(2), "position 12 of a prompt of 12");
}

#[test]
fn every_container_gives_the_reference_answers() {
    let Some(shared) = shared("goldens of hf, pub, mlx4 and GGUF") else { return };
    let rows = [
        ("gpt_oss/hf", "gpt_oss/golden.json"),
        ("gpt_oss/pub", "gpt_oss/golden.json"),
        ("gpt_oss/mlx4", "gpt_oss/golden_mlx4.json"),
        ("gpt_oss/gguf/gpt_oss-MXFP4.gguf", "gpt_oss/golden.json"),
        ("qwen3_moe/hf", "qwen3_moe/golden.json"),
        ("qwen3_moe/pub", "qwen3_moe/golden.json"),
        ("qwen3_moe/mlx4", "qwen3_moe/golden_mlx4.json"),
        ("qwen3_moe/gguf/qwen3_moe-BF16.gguf", "qwen3_moe/golden.json"),
    ];
    for (model, reference) in rows {
        agrees(model, &golden(&shared.join(model), &shared.join(reference)), 4 * 48);
    }
}

/// The default precision on Q4_K_M files, beside llama.cpp's answers with the same files. Both round activations; the
/// exact answer is llama.cpp's on the same weights written as F32 (`models/reference/q4_k_m`), and the largest difference
/// is over the same 20 log-probabilities after four prompts. What is measured, and why two roundings stand as far
/// apart as that, is in `docs/design/006-answers-of-llama-cpp.md`.
#[test]
fn default_precision_is_as_near_to_the_weights_as_llama_cpp() {
    let Some(shared) = shared("Q4_K_M beside llama.cpp") else { return };
    // Model; bounds for q8 to llama.cpp, q8 to the exact answer, f32 to the exact answer; measured: 0.0965, 0.0737,
    // 0.00002; 0.1294, 0.0859, 0.00003; 0.1589, 0.2659, 0.0016.
    let rows = [
        ("qwen3_moe", 0.098, 0.075, 1e-4),
        ("qwen3_5_moe", 0.131, 0.088, 1e-4),
        ("gemma4", 0.161, 0.268, 2e-3),
    ];
    for (name, to_llama, to_exact, of_f32) in rows {
        let file = shared.join(format!("{name}/gguf/{name}-Q4_K_M.gguf"));
        let stored = shared.join(format!("{name}/golden_llamacpp_Q4_K_M.json"));
        let exact = model(&format!("reference/q4_k_m/{name}.json"));
        let difference = |reference: &Path, precision: &str| {
            let command = &mut forebay();
            let command = command.args(["eval", "golden", "--json", "--precision", precision]);
            // What is beyond the tolerance of f32 ends with status 1.
            let out = output(command.args([&file, reference]));
            let report: Value = serde_json::from_slice(&out.stdout).unwrap();
            assert_eq!(report["cases"].as_array().unwrap().len(), 4, "{name}: {report}");
            assert_eq!(report["argmax_agree"], report["argmax_total"], "{name}: {report}");
            report["max_abs_logit_diff"].as_f64().unwrap()
        };
        let theirs = largest_difference(&read_json(&stored), &read_json(&exact));
        let (near, ours) = (difference(&stored, "q8"), difference(&exact, "q8"));
        let f32 = difference(&exact, "f32");
        println!(
            "{name}: q8 to llama.cpp {near}; to the exact answer: q8 {ours}, llama.cpp {theirs}, f32 {f32}"
        );
        assert!(near > 0.0 && near <= to_llama, "{name}: {near}");
        assert!(ours > 0.0 && ours <= to_exact, "{name}: {ours}");
        assert!(f32 > 0.0 && f32 <= of_f32, "{name}: {f32}");
        // On the third, whose last layers are the most sensitive, ours is 2% farther at the worst of 80 figures.
        if name != "gemma4" {
            assert!(ours <= theirs, "{name}: {ours}, llama.cpp {theirs}");
        }
    }
}

/// Over the log-probabilities of two files with the same prompts and tokens.
fn largest_difference(a: &Value, b: &Value) -> f64 {
    let mut largest = 0.0f64;
    let (a, b) = (a["cases"].as_array().unwrap(), b["cases"].as_array().unwrap());
    assert_eq!(a.len(), b.len());
    for (a, b) in a.iter().zip(b) {
        assert_eq!(a["prompt"], b["prompt"]);
        let (a, b) = (a["first"].as_array().unwrap(), b["first"].as_array().unwrap());
        assert_eq!((a.len(), b.len()), (20, 20));
        for (a, b) in a.iter().zip(b) {
            assert_eq!(a[0], b[0]);
            largest = largest.max((a[1].as_f64().unwrap() - b[1].as_f64().unwrap()).abs());
        }
    }
    largest
}

fn perplexity(model: &Path, ids: &Path, precision: &str) -> f64 {
    let command = &mut forebay();
    let command = command.args(["eval", "perplexity", "--precision", precision, "--json"]);
    let report = json(command.args([model, ids]));
    assert_eq!(report["window"], 256);
    assert!(report["tokens"].as_u64().unwrap() > 0);
    report["perplexity"].as_f64().unwrap()
}

#[test]
fn perplexity_is_that_of_transformers() {
    let Some(shared) = shared("perplexity of 10240 tokens") else { return };
    // Measured with transformers 5.24 in fp32 over 40 windows of 256.
    for (model, reference) in [("gpt_oss/hf", 5.721113), ("qwen3_moe/hf", 5.3657)] {
        let ours = perplexity(&shared.join(model), &shared.join("perplexity_ids.json"), "f32");
        println!("{model}: {ours}");
        assert!((ours / reference - 1.0).abs() < 5e-4, "{model}: {ours}, {reference}");
    }
}

/// Rounding activations to 8 bits (where weights are quantised), and keys and values to 16, costs little.
fn q8_is_near_f32(models: &[std::path::PathBuf], ids: &Path) {
    for model in models {
        let (q8, f32) = (perplexity(model, ids, "auto"), perplexity(model, ids, "f32"));
        println!("{}: {q8} and {f32}", model.display());
        assert_ne!(q8, f32, "{}: the precisions differ", model.display());
        assert!((q8 / f32 - 1.0).abs() < 5e-3, "{}: {q8}, {f32}", model.display());
    }
}

#[test]
fn default_precision_keeps_the_perplexity_of_bundled_models() {
    let dir = tempfile::tempdir().unwrap();
    // Held-out text of two windows.
    let ids = ids_file(dir.path(), "ids.json", &prompt_ids(3, 512));
    q8_is_near_f32(&BOTH.map(model), &ids);
}

#[test]
fn default_precision_keeps_the_perplexity_of_every_container() {
    let Some(shared) = shared("perplexity of all containers in both precisions") else { return };
    let dir = tempfile::tempdir().unwrap();
    let ids = read_json(&shared.join("perplexity_ids.json"));
    let ids: Vec<u64> =
        ids.as_array().unwrap().iter().take(8 * 256).map(|v| v.as_u64().unwrap()).collect();
    let ids = ids_file(dir.path(), "ids.json", &ids);
    let rows = [
        "gpt_oss/hf",
        "gpt_oss/mlx4",
        "gpt_oss/gguf/gpt_oss-MXFP4.gguf",
        "qwen3_moe/hf",
        "qwen3_moe/mlx4",
        "qwen3_moe/gguf/qwen3_moe-BF16.gguf",
        "qwen3_moe/gguf/qwen3_moe-Q4_K_M.gguf",
    ];
    q8_is_near_f32(&rows.map(|r| shared.join(r)), &ids);
}
