//! `cargo xtask peers MODEL --peer NAME=LLAMA_BENCH... [--prompts 128,512] [--gen 64] [--depth 0]
//! [--repeat 5] [--threads N] [--kv f16]`
//!
//! Forebay beside programs that have a `llama-bench` (llama.cpp, ik_llama.cpp), on the same file, everything
//! resident, in turn: one run of each, then the next round, so that a machine that changes its speed
//! changes it for all. Medians, least and largest; the ratio is to the better peer; the share is of the memory
//! bandwidth that the same run of `forebay bench` measured, for all bytes of a token.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use serde_json::Value;

/// Rates by what is measured ("prefill 128", "decode") and by who.
type Found = BTreeMap<String, BTreeMap<String, Vec<f64>>>;

const OURS: &str = "Forebay";

pub fn run(args: Vec<String>) -> anyhow::Result<()> {
    let bench = Peers::parse(args)?;
    let mut found = Found::new();
    let mut shares = Vec::new();
    for round in 0..bench.repeat {
        bench.ours(&mut found, &mut shares)?;
        for (name, binary) in &bench.peers {
            bench.theirs(name, binary, &mut found)?;
        }
        eprintln!("round {} of {}", round + 1, bench.repeat);
    }
    bench.print(&found, shares);
    Ok(())
}

struct Peers {
    binary: PathBuf,
    model: String,
    peers: Vec<(String, String)>,
    prompts: Vec<usize>,
    gen_tokens: usize,
    depth: usize,
    repeat: usize,
    threads: usize,
    kv: String,
}

impl Peers {
    fn parse(args: Vec<String>) -> anyhow::Result<Peers> {
        let mut args = args.into_iter();
        let model = args.next().context("usage: cargo xtask peers MODEL --peer NAME=BINARY...")?;
        let here = std::env::current_exe()?;
        let mut peers = Peers {
            binary: here.with_file_name("forebay"),
            model,
            peers: Vec::new(),
            prompts: vec![128, 512],
            gen_tokens: 64,
            depth: 0,
            repeat: 5,
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            kv: "f16".into(),
        };
        while let Some(flag) = args.next() {
            let value = args.next().with_context(|| format!("{flag} takes a value"))?;
            let number = || value.parse::<usize>().with_context(|| format!("{flag} {value}"));
            match flag.as_str() {
                "--peer" => {
                    let (name, binary) = value.split_once('=').context("--peer NAME=BINARY")?;
                    peers.peers.push((name.into(), binary.into()));
                }
                "--prompts" => {
                    let list: Result<_, _> = value.split(',').map(str::parse).collect();
                    peers.prompts = list.context("--prompts takes numbers")?;
                }
                "--gen" => peers.gen_tokens = number()?,
                "--depth" => peers.depth = number()?,
                "--repeat" => peers.repeat = number()?,
                "--threads" => peers.threads = number()?,
                "--kv" => peers.kv = value,
                "--binary" => peers.binary = value.into(),
                other => bail!("{other} is not known"),
            }
        }
        if !peers.binary.exists() {
            bail!("{} is missing: cargo build --release first", peers.binary.display());
        }
        Ok(peers)
    }

    /// One run for every prompt; decode is measured after the shortest.
    fn ours(&self, found: &mut Found, shares: &mut Vec<f64>) -> anyhow::Result<()> {
        let shortest = self.prompts.iter().min().copied();
        let context = self.depth + self.prompts.iter().max().unwrap_or(&1) + self.gen_tokens + 1;
        for &prompt in if self.prompts.is_empty() { &[1][..] } else { &self.prompts } {
            let decodes = shortest.is_none_or(|s| s == prompt);
            let gen_tokens = if decodes { self.gen_tokens } else { 1 };
            let mut command = Command::new(&self.binary);
            command.args(["bench", &self.model, "--json", "--residency", "resident"]);
            command.args(["--memory", "90%", "--repeat", "1", "--kv", &self.kv]);
            for (flag, n) in [
                ("--prompt-tokens", prompt),
                ("--gen-tokens", gen_tokens),
                ("--context", context),
                ("--depth", self.depth),
                ("--threads", self.threads),
            ] {
                command.args([flag, &n.to_string()]);
            }
            let r = json(&mut command)?;
            let rate = |key: &str| r[key]["median"].as_f64().context("no rate");
            if !self.prompts.is_empty() {
                add(found, &format!("prefill {prompt}"), OURS, rate("prefill_tokens_per_s")?);
            }
            if decodes {
                let decode = rate("decode_tokens_per_s")?;
                add(found, "decode", OURS, decode);
                let bytes = r["memory_bytes_per_token"].as_f64();
                let memory = r["memory_bandwidth_bytes_per_s"].as_f64();
                shares.extend(bytes.zip(memory).map(|(bytes, memory)| decode * bytes / memory));
            }
        }
        Ok(())
    }

    fn theirs(&self, name: &str, binary: &str, found: &mut Found) -> anyhow::Result<()> {
        let mut command = Command::new(binary);
        let prompts: Vec<String> = self.prompts.iter().map(usize::to_string).collect();
        let prompts = if prompts.is_empty() { "0".into() } else { prompts.join(",") };
        command.args(["-m", &self.model, "-r", "1", "-o", "json", "-p", &prompts]);
        command.args(["-n", &self.gen_tokens.to_string(), "-t", &self.threads.to_string()]);
        let kv = if self.kv == "q8" { "q8_0" } else { &self.kv };
        if self.depth > 0 || kv != "f16" {
            // Quantised values need flash attention there.
            command.args(["-fa", "1", "-ctk", kv, "-ctv", kv]);
        }
        if self.depth > 0 {
            command.args(["-d", &self.depth.to_string()]);
        }
        let rows = json(&mut command)?;
        for row in rows.as_array().context("no rows")? {
            let rate = row["avg_ts"].as_f64().context("no rate")?;
            match row["n_prompt"].as_u64() {
                Some(n) if n > 0 => add(found, &format!("prefill {n}"), name, rate),
                _ => add(found, "decode", name, rate),
            }
        }
        Ok(())
    }

    fn print(&self, found: &Found, mut shares: Vec<f64>) {
        let names: Vec<&str> =
            std::iter::once(OURS).chain(self.peers.iter().map(|(n, _)| n.as_str())).collect();
        println!("| tokens/s | {} | to the better peer |", names.join(" | "));
        println!("|---|{}---|", "---|".repeat(names.len()));
        for (what, rates) in found {
            let cells: Vec<String> = names.iter().map(|n| cell(rates.get(*n))).collect();
            let peers = names[1..].iter().filter_map(|n| rates.get(*n).map(|r| median(r)));
            let best = peers.reduce(f64::max);
            let ratio = rates.get(OURS).zip(best).map(|(ours, best)| median(ours) / best);
            let ratio = ratio.map_or("-".into(), |r| format!("{r:.2}"));
            println!("| {what} | {} | {ratio} |", cells.join(" | "));
        }
        if !shares.is_empty() {
            shares.sort_by(f64::total_cmp);
            println!(
                "\ndecode: {:.0}% of the memory bandwidth ({:.0} to {:.0}%)",
                median(&shares) * 100.0,
                shares[0] * 100.0,
                shares[shares.len() - 1] * 100.0,
            );
        }
    }
}

fn add(found: &mut Found, what: &str, who: &str, rate: f64) {
    found.entry(what.into()).or_default().entry(who.into()).or_default().push(rate);
}

fn cell(rates: Option<&Vec<f64>>) -> String {
    let Some(rates) = rates else { return "-".into() };
    let least = rates.iter().copied().fold(f64::INFINITY, f64::min);
    let most = rates.iter().copied().fold(0.0, f64::max);
    format!("{:.1} ({least:.1} to {most:.1})", median(rates))
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn json(command: &mut Command) -> anyhow::Result<Value> {
    let out = command.stderr(Stdio::piped()).output().with_context(|| format!("{command:?}"))?;
    if !out.status.success() {
        let text = String::from_utf8_lossy(&out.stderr);
        bail!("{command:?}: {}", text.lines().last().unwrap_or("failed"));
    }
    Ok(serde_json::from_slice(&out.stdout)?)
}
