//! What is said about a model before it runs: what is odd about it, what is refused and by which name, what its
//! tokenizer and its chat template make of a text.

mod common;
#[path = "../../hub/tests/common/mod.rs"]
mod server;

use std::fs;
use std::path::{Path, PathBuf};

use common::*;
use rstest::rstest;
use serde_json::{Value, json};
use server::Repo;
use tempfile::tempdir;

fn family(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families").join(name)
}

/// Exit code and stderr.
fn complaint(command: &mut assert_cmd::Command) -> (Option<i32>, String) {
    let out = output(command);
    (out.status.code(), String::from_utf8(out.stderr).unwrap())
}

fn warnings(model: &Path) -> Vec<String> {
    let about: Value =
        serde_json::from_str(&succeeds(forebay().args(["inspect", "--json"]).arg(model))).unwrap();
    about["warnings"].as_array().unwrap().iter().map(|w| w.as_str().unwrap().to_owned()).collect()
}

fn one_of(warnings: &[String], says: &str) -> bool {
    warnings.iter().any(|w| w.contains(says))
}

#[test]
fn what_is_odd() {
    let folder = warnings(&family("mixtral"));
    for says in ["no chat template", "no generation_config.json", "unaligned"] {
        assert!(one_of(&folder, says), "{says}: {folder:?}");
    }
    let bundled = warnings(&model(GPT_OSS));
    for says in ["generation_config", "mix", "begin"] {
        assert!(!one_of(&bundled, says), "{says}: {bundled:?}");
    }

    // A template that begins with the token that the tokenizer puts in front as well.
    let dir = tempdir().unwrap();
    let path = copy(GPT_OSS, dir.path());
    let config = path.join("tokenizer_config.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    tokenizer["bos_token"] = "<|endoftext|>".into();
    tokenizer["add_bos_token"] = true.into();
    tokenizer["chat_template"] = "{{ bos_token }}{{ messages[0].content }}".into();
    fs::write(&config, tokenizer.to_string()).unwrap();
    let twice = warnings(&path);
    assert!(one_of(&twice, "<|endoftext|> and the tokenizer adds it too"), "{twice:?}");
    tokenizer["chat_template"] = "{{ messages[0].content }}".into();
    fs::write(&config, tokenizer.to_string()).unwrap();
    assert!(!one_of(&warnings(&path), "adds it too"));
}

#[test]
fn a_mix_that_is_unusual() {
    // Routers that somebody rounded: their F32 rows are called Q4_0, which takes less room.
    let dir = tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, retyped("ffn_gate_inp.weight", 2)).unwrap();
    let got = warnings(&path);
    assert!(one_of(&got, "routers are stored as Q4_0"), "{got:?}");
    assert!(!one_of(&warnings(&model(QWEN3_MOE)), "unusual"));
}

/// The bundled GGUF file, with another type for the tensors of that name.
fn retyped(suffix: &str, id: u32) -> Vec<u8> {
    let mut bytes = fs::read(model(QWEN3_MOE)).unwrap();
    let name = suffix.as_bytes();
    let mut at = 0;
    let mut found = 0;
    while let Some(next) = bytes[at..].windows(name.len()).position(|w| w == name) {
        at += next + name.len();
        let dims = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        if dims > 4 {
            continue;
        }
        let kind = at + 4 + 8 * dims;
        assert_eq!(bytes[kind..kind + 4], 0u32.to_le_bytes(), "was F32");
        bytes[kind..kind + 4].copy_from_slice(&id.to_le_bytes());
        found += 1;
    }
    assert!(found > 0);
    bytes
}

/// ggml's own formats that are not for weights, or that Forebay does not compute with.
#[rstest]
#[case(9, "Q8_1")]
#[case(15, "Q8_K")]
#[case(34, "TQ1_0")]
#[case(35, "TQ2_0")]
#[case(40, "NVFP4")]
fn formats_that_are_refused(#[case] id: u32, #[case] name: &str) {
    let dir = tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, retyped("blk.0.ffn_gate_inp.weight", id)).unwrap();
    let (code, says) = complaint(forebay().arg("inspect").arg(&path));
    assert_eq!(code, Some(3), "{says}");
    assert!(
        says.contains(name) && says.contains("blk.0.ffn_gate_inp") && says.contains("Q4_K"),
        "{says}"
    );
}

#[rstest]
#[case("fp8")]
#[case("awq")]
#[case("compressed-tensors")]
fn folders_quantised_in_other_ways(#[case] method: &str) {
    let dir = tempdir().unwrap();
    let path = copy(GPT_OSS, dir.path());
    let config = path.join("config.json");
    let mut value: Value = serde_json::from_slice(&fs::read(&config).unwrap()).unwrap();
    value["quantization_config"] = json!({ "quant_method": method });
    fs::write(&config, value.to_string()).unwrap();
    let (code, says) = complaint(forebay().arg("inspect").arg(&path));
    assert_eq!(code, Some(3), "{says}");
    assert!(says.contains(method) && says.contains("GGUF"), "{says}");
}

#[rstest]
#[case(&["inspect"], &[])]
#[case(&["run"], &["Hi"])]
fn a_drafter_is_no_model(#[case] command: &[&str], #[case] more: &[&str]) {
    let drafter = model("tiny-qwen3.5-moe-dflash");
    let (code, says) = complaint(forebay().args(command).arg(drafter).args(more));
    assert_eq!(code, Some(3), "{says}");
    assert!(says.contains("a drafter (DFlashDraftModel)") && says.contains("as MODEL"), "{says}");
}

/// The table is read by a range of its own, and decides the description: Llama 3's rope.
#[test]
fn a_rope_table_on_a_hub() {
    let bytes = fs::read(family("llama/gguf/model.gguf")).unwrap();
    let server = Repo::new(&[("m.gguf", &bytes)]).serve(|_, _| None);
    let home = tempdir().unwrap();
    let inspect = |model: &Path| {
        let mut command = forebay();
        command.env("HF_ENDPOINT", &server.url).env("HF_HOME", home.path()).env_remove("HF_TOKEN");
        command.args(["inspect", "--json", "--memory", "400MiB"]).arg(model);
        serde_json::from_str::<Value>(&succeeds(&mut command)).unwrap()
    };
    let here = inspect(&family("llama/gguf/model.gguf"));
    assert_eq!(inspect(Path::new("o/n")), here);
}

#[test]
fn ids_that_are_no_tokens() {
    let decode = |ids: &str| {
        let mut command = forebay();
        command.arg("tokenize").arg(model(GPT_OSS)).args(["--decode", ids]);
        command
    };
    assert_eq!(succeeds(&mut decode("1")).trim(), "<|im_start|>");
    let (code, says) = complaint(&mut decode("1,5000"));
    assert_eq!(code, Some(2), "{says}");
    assert!(says.contains("no token 5000") && says.contains("4096"), "{says}");
}

#[test]
fn templates_by_themselves_and_of_models() {
    let dir = tempdir().unwrap();
    let jinja = dir.path().join("chat.jinja");
    fs::write(&jinja, "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ strftime_now('%Y') }}").unwrap();
    let request = dir.path().join("request.json");
    let write = |value: Value| fs::write(&request, value.to_string()).unwrap();
    write(
        json!({"messages": [{"role": "user", "content": "é <|im_end|>"}], "bos_token": "<s>", "now": "2026-01-02T03:04:05"}),
    );
    let template = |model: &Path, more: &[&str]| {
        let mut command = forebay();
        command.arg("template").arg(model).arg("--request").arg(&request).args(more);
        command
    };
    assert_eq!(succeeds(&mut template(&jinja, &[])), "<s>[user]é <|im_end|>2026\n");
    let text: Value = serde_json::from_str(&succeeds(&mut template(&jinja, &["--json"]))).unwrap();
    assert_eq!(text, json!({"text": "<s>[user]é <|im_end|>2026"}));

    // With a model, ids: two markers of the template's, none of the user's.
    let of_model = succeeds(&mut template(&model(GPT_OSS), &["--json"]));
    let of_model: Value = serde_json::from_str(&of_model).unwrap();
    assert!(of_model["text"].as_str().unwrap().contains("é <|im_end|>"), "{of_model}");
    let ids = of_model["ids"].as_array().unwrap();
    assert_eq!(ids.iter().filter(|id| **id == 2).count(), 1, "{of_model}");

    write(json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}));
    let (code, says) = complaint(&mut template(&jinja, &[]));
    assert_eq!(code, Some(3), "{says}");
    assert!(says.contains("image_url"), "{says}");
    fs::write(&request, "nonsense").unwrap();
    assert_eq!(complaint(&mut template(&jinja, &[])).0, Some(2));
    let (code, says) = complaint(&mut template(&family("mixtral"), &[]));
    assert_eq!(code, Some(2), "{says}");
}
