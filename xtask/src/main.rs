//! Development chores: `cargo xtask check | arrows | matrix | synth | bench | peers | kernels`.

mod bench;
mod kernels;
mod matrix;
mod peers;
mod synth;

use std::collections::BTreeMap;
use std::process::{Command, ExitCode};

use anyhow::{Context, bail};

/// Crates from left to right: a crate may depend on those before it only.
const ORDER: [&str; 16] = [
    "forebay-quant",
    "forebay-files",
    "forebay-synth",
    "forebay-hub",
    "forebay-models",
    "forebay-program",
    "forebay-store",
    "forebay-cpu",
    "forebay-cuda",
    "forebay-engine",
    "forebay-text",
    "forebay-inputs",
    "forebay-chat",
    "forebay-schedule",
    "forebay-serve",
    "forebay",
];

/// Pairs that are apart although the order would allow them: (crate, what it must not know).
const APART: [(&str, &str); 12] = [
    ("forebay", "forebay-inputs"),
    ("forebay-store", "forebay-program"),
    ("forebay-cpu", "forebay-files"),
    ("forebay-text", "forebay-engine"),
    ("forebay-text", "forebay-models"),
    ("forebay-text", "forebay-hub"),
    ("forebay-engine", "forebay-hub"),
    ("forebay-models", "forebay-hub"),
    ("forebay-chat", "forebay-engine"),
    ("forebay-chat", "forebay-models"),
    ("forebay-schedule", "forebay-text"),
    ("forebay-schedule", "forebay-chat"),
];

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let verb = args.next().unwrap_or_default();
    let result = match verb.as_str() {
        "check" => check(),
        "arrows" => arrows(),
        "matrix" => {
            print!("{}", matrix::matrix());
            Ok(())
        }
        "synth" => synth::run(args.collect()),
        "bench" => bench::run(args.collect()),
        "peers" => peers::run(args.collect()),
        "kernels" => kernels::run(args.collect()),
        _ => {
            eprintln!(
                "usage: cargo xtask check | arrows | matrix | synth NAME OUT | bench MODEL | peers MODEL | kernels OUT"
            );
            return ExitCode::from(2);
        }
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("xtask: {e:#}");
            ExitCode::from(1)
        }
    }
}

/// The same stages as CI.
fn check() -> anyhow::Result<()> {
    let status = Command::new("bash").arg(".ci/run").status().context("bash .ci/run")?;
    if !status.success() {
        bail!("{status}");
    }
    Ok(())
}

/// Checks the direction of dependencies between the workspace's crates.
fn arrows() -> anyhow::Result<()> {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let out = Command::new(cargo)
        .args(["metadata", "--format-version=1", "--no-deps"])
        .output()
        .context("cargo metadata")?;
    let metadata: serde_json::Value = serde_json::from_slice(&out.stdout)?;
    let place: BTreeMap<&str, usize> = ORDER.iter().enumerate().map(|(i, n)| (*n, i)).collect();
    let mut faults = Vec::new();
    for package in metadata["packages"].as_array().context("packages")? {
        let name = package["name"].as_str().context("name")?;
        let Some(&at) = place.get(name) else {
            if name != "xtask" {
                faults.push(format!("{name} has no place in the order: add it to xtask"));
            }
            continue;
        };
        for dependency in package["dependencies"].as_array().context("dependencies")? {
            let target = dependency["name"].as_str().context("name")?;
            if !dependency["kind"].is_null() {
                continue;
            }
            if place.get(target).is_some_and(|&t| t >= at) {
                faults.push(format!("{name} depends on {target}, which is not to its left"));
            }
            if APART.contains(&(name, target)) {
                faults.push(format!("{name} must not depend on {target}"));
            }
        }
    }
    if !faults.is_empty() {
        bail!("{}", faults.join("; "));
    }
    println!("arrows: {} crates, all point left", ORDER.len());
    Ok(())
}
