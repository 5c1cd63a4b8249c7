//! Every family against answers of another implementation.
//!
//! `families/` holds tiny models with random weights and transformers' answers in fp32, made by
//! `tools/make_tiny_reference.py`; the same weights as GGUF come from llama.cpp's converter. Trained models
//! in all dialects are in the shared folder (`FOREBAY_SHARED`, or `shared` beside the repository); without
//! it those tests print why they are skipped.

use std::path::{Path, PathBuf};
use std::process::Command;

use rstest::rstest;
use serde_json::Value;

/// Largest logit difference to the reference in f32.
const TOLERANCE: f64 = 2e-3;

fn here() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families")
}

fn shared(path: &str) -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let root = std::env::var_os("FOREBAY_SHARED").map_or_else(beside, PathBuf::from);
    let path = root.join(path);
    if !path.exists() {
        eprintln!("skipped: {} is not there; set FOREBAY_SHARED", path.display());
        return None;
    }
    Some(path)
}

fn forebay(args: &[&str]) -> Value {
    let out = Command::new(env!("CARGO_BIN_EXE_forebay")).args(args).output().expect("runs");
    let text = String::from_utf8_lossy(&out.stdout);
    serde_json::from_str(&text)
        .unwrap_or_else(|e| panic!("{args:?}: {e}: {text}{}", String::from_utf8_lossy(&out.stderr)))
}

fn golden(model: &Path, answers: &Path, more: &[&str]) -> Value {
    let (model, answers) = (model.to_str().unwrap(), answers.to_str().unwrap());
    forebay(&[&["eval", "golden", model, answers, "--json"], more].concat())
}

#[track_caller]
fn agrees(model: &Path, answers: &Path) {
    let report = golden(model, answers, &["--precision", "f32"]);
    let diff = report["max_abs_logit_diff"].as_f64().expect("is a number");
    assert!(report["ok"] == true && diff <= TOLERANCE, "{}: {report}", model.display());
    assert!(report["argmax_total"].as_u64() > Some(0) && report["greedy_total"].as_u64() > Some(0));
}

#[rstest]
fn folders_agree_with_the_reference(
    #[values("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma3", "gemma4")] family: &str,
) {
    let folder = here().join(family);
    agrees(&folder, &folder.join("golden.json"));
}

#[rstest]
fn gguf_files_agree_with_the_reference(
    #[values("llama", "mixtral", "qwen2", "qwen3", "gemma3", "gemma4")] family: &str,
) {
    let folder = here().join(family);
    agrees(&folder.join("gguf/model.gguf"), &folder.join("golden.json"));
}

/// Residency, slots, chunk, threads and vector width decide no bit, dense models and routed ones.
#[rstest]
fn the_same_bits(#[values("gemma4", "mixtral", "gemma3", "llama/gguf/model.gguf")] model: &str) {
    let model = here().join(model);
    let folder = tempfile::tempdir().expect("a temporary folder");
    let ids = folder.path().join("ids.json");
    std::fs::write(&ids, format!("{:?}", (1..40).collect::<Vec<u32>>())).expect("is written");
    let report = forebay(&[
        "eval",
        "same",
        model.to_str().unwrap(),
        "--prompt-ids",
        ids.to_str().unwrap(),
        "--tokens",
        "3",
        "--json",
    ]);
    assert_eq!(report["ok"], true, "{report}");
}

#[test]
fn bundled_gemma4_agrees_with_mlx() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tiny-gemma4-mlx4");
    agrees(&model, &here().join("tiny-gemma4-mlx4.json"));
}

#[rstest]
#[case("hf", "golden.json")]
#[case("pub", "golden.json")]
#[case("mlx4", "golden_mlx4.json")]
#[case("gguf/gemma4-BF16.gguf", "golden.json")]
fn trained_gemma4(#[case] model: &str, #[case] answers: &str) {
    let Some(root) = shared("models/gemma4") else { return };
    agrees(&root.join(model), &root.join(answers));
}

/// llama.cpp rounds activations too, in other blocks: log-probabilities differ from ours by up to 0.16, and from
/// exact activations by up to 0.26; greedy answers do not differ.
#[test]
fn trained_gemma4_in_four_bits() {
    let Some(root) = shared("models/gemma4") else { return };
    let model = root.join("gguf/gemma4-Q4_K_M.gguf");
    let answers = root.join("golden_llamacpp_Q4_K_M.json");
    let report = golden(&model, &answers, &["--tolerance", "0.2"]);
    assert_eq!(report["ok"], true, "{report}");
}
