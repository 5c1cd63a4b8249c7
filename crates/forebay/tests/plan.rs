//! `plan` and `trace`: what they say agrees with what happens.

mod common;

use common::*;
use serde_json::Value;

/// Records a trace of a streamed run and gives its hit rate and the file.
fn traced(dir: &std::path::Path, slots: &str) -> (std::path::PathBuf, Value) {
    let ids = ids_file(dir, "ids.json", &prompt_ids(0, 20));
    let file = dir.join("trace.txt");
    let mut command = forebay();
    command.args(["trace", "--json", "--tokens", "120", "--residency", "stream"]);
    command.args(["--slots", slots, "--prefetch", "on", "--prompt-ids"]).arg(ids);
    let report = json(command.arg("--out").arg(&file).arg(model(QWEN3_MOE)));
    (file, report)
}

/// The replay of a trace hits as often as the run it was taken from, for every policy.
#[test]
fn a_replay_hits_as_the_run_did() {
    let dir = tempfile::tempdir().unwrap();
    let ids = ids_file(dir.path(), "ids.json", &prompt_ids(0, 20));
    for policy in ["lru", "lfu", "adaptive", "lru-shared", "lfu-shared"] {
        let file = dir.path().join(policy);
        // One row a pass, so that every pass is settled before the next begins.
        let common = ["--residency", "stream", "--slots", "5", "--prefetch", "off", "--chunk", "1"];
        let mut command = forebay();
        command.args(["trace", "--tokens", "100", "--policy", policy, "--out"]).arg(&file);
        succeeds(command.args(common).arg("--prompt-ids").arg(&ids).arg(model(QWEN3_MOE)));
        let replay = json(
            forebay()
                .args(["trace", "replay", "--json", "--slots", "5"])
                .args(["--policy", policy])
                .arg(&file),
        );
        let replayed = replay["results"][0]["hit_rate"].as_f64().unwrap();
        let mut command = forebay();
        command.args([
            "run",
            "--ignore-eos",
            "--tokens",
            "100",
            "--policy",
            policy,
            "--warm",
            "off",
        ]);
        command.args([
            "--temp",
            "1",
            "--top-k",
            "0",
            "--top-p",
            "1",
            "--min-p",
            "0",
            "--repeat-penalty",
            "1",
        ]);
        command.args(common).arg("--prompt-ids").arg(&ids).arg(model(QWEN3_MOE));
        let (_, last) = run_json(&mut command);
        let ran = last["stats"]["expert_hit_rate"].as_f64().unwrap();
        // The run counts decoded tokens, the replay the prompt too, and their texts may part.
        assert!((replayed - ran).abs() < 0.08, "{policy}: replayed {replayed}, ran {ran}");
    }
}

#[test]
fn guesses_are_counted_and_histograms_drawn() {
    let dir = tempfile::tempdir().unwrap();
    let (file, report) = traced(dir.path(), "6");
    // The next router on the stream as it is guesses better than chance (4 of 16).
    let recall = report["pilot"]["recall"].as_f64().unwrap();
    assert!(recall > 0.5, "{recall}");
    let layers = report["layers"].as_array().unwrap();
    assert_eq!(layers.len(), 6);
    for layer in layers {
        let chosen: u64 =
            layer["counts"].as_array().unwrap().iter().map(|c| c.as_u64().unwrap()).sum();
        // The prompt and 119 steps, 4 experts each.
        assert_eq!(chosen, (report["prompt_tokens"].as_u64().unwrap() + 119) * 4);
        assert!(layer["entropy_bits"].as_f64().unwrap() <= 4.0);
    }
    let text = std::fs::read_to_string(file).unwrap();
    assert_eq!(text.lines().count(), 1 + 6 * 120);
    let svg = dir.path().join("experts.svg");
    let ids = dir.path().join("ids.json");
    let mut command = forebay();
    command.args(["trace", "--tokens", "3", "--histogram"]).arg(&svg);
    succeeds(command.arg("--prompt-ids").arg(ids).arg(model(GPT_OSS)));
    let svg = std::fs::read_to_string(svg).unwrap();
    assert!(svg.starts_with("<svg") && svg.matches("<title>").count() == 6 * 16);
}

/// Every prior gives a table whose hits grow with the budget, up to the whole model.
#[test]
fn plans_grow_with_the_budget() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, _) = traced(dir.path(), "6");
    let trace = trace.to_str().unwrap();
    for prior in ["router", "uniform", trace] {
        let mut command = forebay();
        command.args([
            "plan",
            "--json",
            "--memory",
            "1GiB",
            "--prior",
            prior,
            "--residency",
            "stream",
        ]);
        command.args(["--context", "256", "--chunk", "16", "--budgets", "91MiB,92MiB,93MiB,1GiB"]);
        let report = json(command.arg(model(QWEN3_MOE)));
        assert_eq!(report["family"], "qwen3-moe");
        assert_eq!(report["prior"], if prior == trace { "trace" } else { prior });
        let budgets = report["budgets"].as_array().unwrap();
        assert!(!budgets.is_empty(), "{report}");
        let of =
            |key: &str| -> Vec<f64> { budgets.iter().map(|b| b[key].as_f64().unwrap()).collect() };
        assert!(of("hit_rate").is_sorted(), "{prior}: {:?}", of("hit_rate"));
        assert!(of("bytes").is_sorted());
        assert!(of("disk_bytes_per_token").iter().rev().is_sorted());
        for b in budgets {
            assert!(b["decode_tokens_per_s"].as_f64().unwrap() > 0.0);
            assert!(b["prefill_tokens_per_s"].as_f64().unwrap() > 0.0);
        }
        // All experts fit: only the first use of each misses.
        assert!(of("hit_rate").last().unwrap() > &0.95, "{prior}: {:?}", of("hit_rate"));
    }
}

#[test]
fn what_is_no_trace_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("trace");
    let header = r#"# {"forebay_trace":1,"experts":[16],"top_k":[4]}"#;
    for (text, code) in [
        ("".to_string(), 2),
        ("hello".into(), 2),
        (format!("{header}\n0 1 16\n"), 2),
        (format!("{header}\n1 1 3\n"), 2),
        (format!("{header}\n0 1 x\n"), 2),
        (format!("{header}\n0 1 3 4 5 6\n"), 0),
    ] {
        std::fs::write(&path, &text).unwrap();
        let out = output(forebay().args(["trace", "replay", "--slots", "2"]).arg(&path));
        assert_eq!(out.status.code(), Some(code), "{text:?}");
    }
    // A trace of another model.
    let out = output(forebay().args(["plan", "--prior"]).arg(&path).arg(model(QWEN3_MOE)));
    assert_eq!(out.status.code(), Some(2));
    let out = output(forebay().args(["trace", "--slots", "2"]));
    assert_eq!(out.status.code(), Some(2));
}
