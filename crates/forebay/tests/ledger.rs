//! The memory ledger: lines that follow from the model's shape by hand, and that a process keeps to it.

mod common;

use common::*;
use rstest::rstest;
use serde_json::Value;

fn inspect(name: &str, options: &[&str]) -> Value {
    let mut command = forebay();
    json(command.args(["inspect", "--json"]).arg(model(name)).args(options))
}

fn line(report: &Value, what: &str) -> u64 {
    let items = report["ledger"].as_array().unwrap().iter();
    items.filter(|i| i["what"] == what).map(|i| i["bytes"].as_u64().unwrap()).sum()
}

fn total(report: &Value) -> u64 {
    report["ledger"].as_array().unwrap().iter().map(|i| i["bytes"].as_u64().unwrap()).sum()
}

/// Both models have 6 layers with 2 KV heads of width 32. A page holds 32 positions: keys and values of
/// 2 x 32 x 32 elements each, and under q8 a 4-byte scale for each key and each value. gpt-oss has 3 layers
/// with a window of 64: they need pages for the window, a chunk and one that is begun.
#[rstest]
#[case("f32", 2 * 2 * 32 * 32 * 4)]
#[case("f16", 2 * 2 * 32 * 32 * 2)]
#[case("q8", 2 * 2 * (32 * 32 + 32 * 4))]
fn keys_and_values(#[case] kv: &str, #[case] page: u64) {
    // (context, chunk, pages of a full layer, pages of a layer with the window)
    for (context, chunk, full, window) in [(1000, 16, 32, 4), (4096, 64, 128, 5), (40, 1, 2, 2)] {
        let (c, k) = (context.to_string(), chunk.to_string());
        let options = ["--kv", kv, "--context", &c, "--chunk", &k, "--memory", "1GiB"];
        let report = inspect(GPT_OSS, &options);
        assert_eq!(line(&report, "keys and values"), 3 * (full + window) * page, "{options:?}");
        let report = inspect(QWEN3_MOE, &options);
        assert_eq!(line(&report, "keys and values"), 6 * full * page, "{options:?}");
    }
}

/// gpt-oss keeps bf16 attention, routers and the head, not the embedding; vectors become f32.
#[test]
fn trunk_and_experts() {
    let report = inspect(GPT_OSS, &["--memory", "100MiB", "--residency", "stream"]);
    let attention = 6 * (2 * 256 * 256 + 2 * 64 * 256) * 2;
    let routers = 6 * 16 * 256 * 2;
    let head = 4096 * 256 * 2;
    // Per layer: two norms, biases of q, k, v, o and router, sinks, biases of 16 experts. One norm at the end.
    let vectors = (6 * (2 * 256 + 2 * 256 + 2 * 64 + 16 + 8 + 16 * (2 * 96 + 256)) + 256) * 4;
    let exact = attention + routers + head + vectors;
    let trunk = line(&report, "trunk");
    // Matrices are read in whole blocks of 4096 bytes.
    assert!((exact..exact + 6 * 5 * 8192).contains(&trunk), "{trunk}, {exact}");
    // An expert: 2 x 96 rows of 256 and 256 rows of 96 codes, 17 bytes per 32 of them.
    let expert = (2 * 96 * 256 + 256 * 96) / 32 * 17;
    let experts = &report["experts"];
    assert_eq!(experts["count"], 16);
    assert_eq!(experts["per_token"], 4);
    assert_eq!(experts["layers"], 6);
    let slot = experts["bytes"].as_u64().unwrap();
    assert!(
        slot.is_multiple_of(4096) && (expert..expert + 4 * 8192).contains(&slot),
        "{slot}, {expert}"
    );
    assert_eq!(line(&report, "expert slots") % slot, 0);
    assert_eq!(report["formats"]["MXFP4"], 96 * expert, "{}", report["formats"]);
}

/// Whatever the budget, the lines fit it; more memory never means fewer slots.
#[test]
fn lines_fit_the_budget() {
    for name in BOTH {
        let minimum = inspect(name, &[])["minimum_bytes"].as_u64().unwrap();
        assert_eq!(minimum % (1 << 20), 0);
        let mut slots = 0;
        for more in [0, 1, 2, 3, 4, 8, 16, 64, 1024] {
            let budget = minimum + (more << 20);
            let options = ["--memory", &budget.to_string(), "--residency", "stream"];
            let report = inspect(name, &options);
            assert!(total(&report) <= budget, "{name} {more}");
            assert_eq!(report["minimum_bytes"], minimum);
            let now = line(&report, "expert slots");
            assert!(now >= slots, "{name}: {now} after {slots} bytes of slots");
            slots = now;
        }
        let all = inspect(name, &["--memory", "2GiB"]);
        assert!(line(&all, "experts") > 0 && line(&all, "expert slots") == 0);
    }
}

/// Own memory of a run stays under its lines, the reserve for kernel and cache not counted.
#[rstest]
#[case::least(0)]
#[case::more(16)]
fn a_run_keeps_to_the_ledger(#[case] more: u64) {
    for name in BOTH {
        let minimum = inspect(name, &[])["minimum_bytes"].as_u64().unwrap();
        let budget = (minimum + (more << 20)).to_string();
        let options = ["--memory", &budget];
        let report = inspect(name, &options);
        let reserve = line(&report, "kernel and cache reserve");
        assert!(reserve >= 64 << 20);
        let dir = tempfile::tempdir().unwrap();
        let ids = ids_file(dir.path(), "ids.json", &prompt_ids(3, 400));
        let mut command = forebay();
        command.arg("run").arg(model(name)).args(options).arg("--prompt-ids").arg(ids);
        let (lines, last) = run_json(command.args(["--tokens", "16", "--ignore-eos"]));
        assert_eq!(lines.len(), 16);
        let stats = &last["stats"];
        assert_eq!(stats["budget_bytes"].to_string(), budget);
        let peak = stats["peak_bytes"].as_u64().unwrap();
        let lines = total(&report) - reserve;
        println!("{name}: peak {peak} of {lines}");
        assert!(peak > 0 && peak <= lines, "{name}: peak {peak}, ledger {}", report["ledger"]);
        assert_eq!(stats["bytes_written"], 0);
    }
}
