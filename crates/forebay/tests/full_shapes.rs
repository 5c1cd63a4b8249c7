//! Ledgers of published shapes: what a budget buys is a promise, so a change of it must be seen.
//!
//! The files are headers only; weights are a hole. `FOREBAY_BLESS=1` writes the ledgers anew.

mod common;

use std::fmt::Write;
use std::path::Path;

use common::*;
use serde_json::Value;

const LEDGERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/snapshots/full_shapes.txt");

fn inspect(path: &Path, options: &[&str]) -> Value {
    let mut command = forebay();
    command.args(["inspect", "--json", "--threads", "2"]).arg(path).args(options);
    json(&mut command)
}

fn shapes(dir: &Path) -> Vec<(&'static str, std::path::PathBuf)> {
    let options = forebay_synth::Options { sparse: true, layers: None };
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let written = forebay_synth::NAMES.iter().map(|&name| {
        let out = dir.join(name);
        forebay_synth::write(name, &models, &out, options, &mut |_, _| {}).unwrap();
        (name, out)
    });
    written.collect()
}

#[test]
fn ledgers() {
    let dir = tempfile::tempdir().unwrap();
    let mut text = String::new();
    for (name, path) in shapes(dir.path()) {
        for budget in ["2GiB", "4GiB", "8GiB", "64GiB"] {
            let mut command = forebay();
            command.args(["inspect", "--json", "--threads", "2", "--memory", budget]);
            let out = output(command.arg(&path));
            let report: Value = serde_json::from_slice(&out.stdout).unwrap();
            let minimum = report["minimum_bytes"].as_u64().unwrap() >> 20;
            writeln!(text, "{name} {budget} (at least {minimum} MiB)").unwrap();
            let mut total = 0;
            for item in report["ledger"].as_array().unwrap() {
                let bytes = item["bytes"].as_u64().unwrap();
                total += bytes;
                let what = item["what"].as_str().unwrap();
                writeln!(text, "  {what:<28} {:>9} KiB", bytes >> 10).unwrap();
            }
            let fits = total <= report["budget"].as_u64().unwrap_or(64 << 30);
            assert!(fits, "{name} {budget}");
        }
    }
    if std::env::var_os("FOREBAY_BLESS").is_some() {
        std::fs::write(LEDGERS, &text).unwrap();
    }
    let stored = std::fs::read_to_string(LEDGERS).unwrap();
    assert_eq!(text, stored, "ledgers changed; if that was meant, run with FOREBAY_BLESS=1");
}

/// What is switched off costs nothing, and what is on by default costs no memory of its own.
#[test]
fn features_that_are_off_take_no_memory() {
    let dir = tempfile::tempdir().unwrap();
    for (name, path) in shapes(dir.path()) {
        let ledger = |options: &[&str]| {
            let with = [&["--memory", "8GiB", "--context", "4096", "--chunk", "512"], options];
            inspect(&path, &with.concat())["ledger"].clone()
        };
        let usual = ledger(&[]);
        for off in [&["--prefetch", "off"][..], &["--elastic", "off"], &["--warm", "off"]] {
            assert_eq!(ledger(off), usual, "{name} {off:?}");
        }
    }
}
