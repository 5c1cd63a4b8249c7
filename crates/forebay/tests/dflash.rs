//! `--speculate dflash`: the answer is that of the model alone, drafts are accepted, and what cannot be is refused by name.

mod common;

use std::path::Path;

use common::*;
use serde_json::Value;

const TARGET: &str = "tiny-qwen3.5-moe/qwen3_5_moe-Q4_K_M.gguf";
const DRAFTER: &str = "tiny-qwen3.5-moe-dflash";

fn answer(more: &[&str]) -> (Vec<u64>, Value) {
    let mut command = forebay();
    command.arg("run").arg(model(TARGET)).args(["--raw", "Once upon a time there was a"]);
    let (lines, last) = run_json(command.args(["--tokens", "120", "--ignore-eos"]).args(more));
    (tokens(&lines), last)
}

#[test]
fn answers_are_the_models_own() {
    let drafter = model(DRAFTER);
    let dflash = ["--speculate", "dflash", "--draft-model", drafter.to_str().unwrap()];
    let steer = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/taps/gpt_oss/directions.safetensors:strength=0.2,point=attention");
    let steer = steer.display().to_string();
    let (plain, _) = answer(&[]);
    for more in [
        &[][..],
        &["--residency", "stream", "--slots", "4", "--chunk", "9"],
        &["--chunk", "1"],
        &["--temp", "0.9", "--seed", "5"],
        &["--kv", "q8"],
        &["--steer", &steer],
    ] {
        let (alone, _) = answer(more);
        let few = ["--draft-tokens", "3"];
        let few = if more.contains(&"--kv") { &few[..] } else { &[] };
        let (drafted, last) = answer(&[&dflash[..], few, more].concat());
        assert_eq!(drafted, alone, "{more:?}");
        let counts = &last["stats"]["speculation"];
        assert_eq!(counts["drafter"], "dflash", "{counts}");
        assert!(counts["rounds"].as_u64() > Some(0), "{more:?}: {counts}");
        if more.is_empty() {
            assert_eq!(alone, plain);
        }
    }
}

#[test]
fn what_cannot_be_is_refused_by_name() {
    let (drafter, other) = (model(DRAFTER), model(GPT_OSS));
    let drafter = drafter.to_str().unwrap();
    for (model_of, options, code, words) in [
        (TARGET, vec!["--speculate", "dflash"], 2, &["--draft-model"][..]),
        (
            GPT_OSS,
            vec!["--speculate", "dflash", "--draft-model", drafter],
            1,
            &["num_target_layers", "6"],
        ),
        (
            TARGET,
            vec!["--speculate", "dflash", "--draft-model", other.to_str().unwrap()],
            3,
            &["GptOssForCausalLM"],
        ),
        (TARGET, vec!["--speculate", "mtp", "--draft-model", drafter], 2, &["--draft-model"]),
        (DRAFTER, vec![], 3, &["drafter"]),
    ] {
        let mut command = forebay();
        let out =
            output(command.arg("run").arg(model(model_of)).args(["--raw", "Once"]).args(&options));
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{options:?}: {stderr}");
        assert!(words.iter().all(|word| stderr.contains(word)), "{options:?}: {stderr}");
    }
}
