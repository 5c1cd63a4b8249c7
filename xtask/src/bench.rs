//! `cargo xtask bench MODEL [--budgets 2,3,4,6,8] [--cap CMD] [--keep FILE] [OPTIONS OF forebay bench]`
//!
//! One run of `forebay bench` per budget (GiB), as a row of a Markdown table. `--cap` is a command that
//! limits memory, `{bytes}` in it being the budget: `systemd-run --scope -q -p MemoryMax={bytes} -p
//! MemorySwapMax=0`. A model's own plan for the same budgets, with the routing that was recorded in the
//! first run, stands beside what was measured.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, bail};
use serde_json::Value;

const GIB: f64 = (1u64 << 30) as f64;

pub fn run(args: Vec<String>) -> anyhow::Result<()> {
    let mut args = args.into_iter();
    let model =
        args.next().context("usage: cargo xtask bench MODEL [--budgets 2,3,4] [--cap CMD]")?;
    let (mut budgets, mut cap, mut keep) = (vec![2.0, 3.0, 4.0, 6.0, 8.0], None, None);
    let mut rest = Vec::new();
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--budgets" => {
                let list = args.next().context("--budgets takes a list")?;
                let numbers: Result<Vec<f64>, _> = list.split(',').map(str::parse).collect();
                budgets = numbers.context("--budgets takes numbers of GiB")?;
            }
            "--cap" => cap = Some(args.next().context("--cap takes a command")?),
            "--keep" => keep = Some(PathBuf::from(args.next().context("--keep takes a file")?)),
            _ => rest.push(arg),
        }
    }
    let bench = Bench { binary: binary()?, model, cap, rest };
    let trace = std::env::temp_dir().join(format!("forebay-trace-{}", std::process::id()));
    let plan = bench.plan(&budgets, &trace);
    println!(
        "| budget | slots a layer | prefill t/s | decode t/s (min to max) | predicted | hits | read a token | \
         while reading | overall | disk | memory | peak | container |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    let mut kept = Vec::new();
    for &budget in &budgets {
        match bench.measure(budget) {
            Ok(report) => {
                println!("{}", row(budget, &report, &plan));
                kept.push(report);
            }
            Err(e) => println!("| {budget} GiB | {e} |"),
        }
    }
    let _ = std::fs::remove_file(trace);
    if let Some(path) = keep {
        std::fs::write(path, serde_json::to_string_pretty(&kept)?)?;
    }
    Ok(())
}

fn binary() -> anyhow::Result<PathBuf> {
    let here = std::env::current_exe()?;
    let binary = here.with_file_name("forebay");
    if !binary.exists() {
        bail!("{} is missing: cargo build --release first", binary.display());
    }
    Ok(binary)
}

struct Bench {
    binary: PathBuf,
    model: String,
    cap: Option<String>,
    rest: Vec<String>,
}

impl Bench {
    fn command(&self, bytes: u64) -> Command {
        let Some(cap) = &self.cap else { return Command::new(&self.binary) };
        let cap = cap.replace("{bytes}", &bytes.to_string());
        let mut words = cap.split_whitespace();
        let mut command = Command::new(words.next().unwrap_or("env"));
        command.args(words).arg(&self.binary);
        command
    }

    fn json(command: &mut Command) -> anyhow::Result<Value> {
        let out = command.stderr(Stdio::piped()).output()?;
        if !out.status.success() {
            let text = String::from_utf8_lossy(&out.stderr);
            bail!("{}", text.lines().last().unwrap_or("failed"));
        }
        Ok(serde_json::from_slice(&out.stdout)?)
    }

    fn measure(&self, budget: f64) -> anyhow::Result<Value> {
        let bytes = (budget * GIB) as u64;
        let mut command = self.command(bytes);
        command.args(["bench", &self.model, "--json", "--memory", &bytes.to_string()]);
        Self::json(command.args(&self.rest))
    }

    /// What `forebay plan` says for the budgets, from choices recorded just before.
    fn plan(&self, budgets: &[f64], trace: &Path) -> Value {
        let most = budgets.iter().copied().fold(0.0, f64::max);
        let bytes = (most * GIB) as u64;
        let ids = trace.with_extension("ids");
        // The same tokens as those of the measurement.
        let options: Vec<&str> = self.rest.iter().map(String::as_str).collect();
        let value = |name: &str, default: &str| {
            let at = options.iter().position(|o| *o == name);
            at.and_then(|at| options.get(at + 1)).map_or(default.to_string(), |v| v.to_string())
        };
        let planned = || -> anyhow::Result<Value> {
            std::fs::write(&ids, "[1,2,3,4]")?;
            let mut command = self.command(bytes);
            command.args(["trace", &self.model, "--memory", &bytes.to_string(), "--prompt-ids"]);
            command.arg(&ids).args(["--tokens", &value("--gen-tokens", "64"), "--json", "--out"]);
            Self::json(command.arg(trace))?;
            let list: Vec<String> =
                budgets.iter().map(|b| ((b * GIB) as u64).to_string()).collect();
            let mut command = self.command(bytes);
            command.args(["plan", &self.model, "--json", "--memory", &bytes.to_string()]);
            command.arg("--budgets").arg(list.join(",")).arg("--prior").arg(trace);
            Self::json(&mut command)
        };
        let plan = planned();
        let _ = std::fs::remove_file(ids);
        plan.unwrap_or_else(|e| {
            eprintln!("no plan: {e}");
            Value::Null
        })
    }
}

fn row(budget: f64, r: &Value, plan: &Value) -> String {
    let number = |v: &Value, digits: usize| match v.as_f64() {
        Some(x) => format!("{x:.digits$}"),
        None => "-".into(),
    };
    let percent = |v: &Value| v.as_f64().map_or("-".into(), |x| format!("{:.0}%", x * 100.0));
    let mib = |v: &Value| v.as_f64().map_or("-".into(), |x| format!("{:.0} MiB", x / 1048576.0));
    let gib = |v: &Value| v.as_f64().map_or("-".into(), |x| format!("{:.2} GiB", x / GIB));
    let gb = |v: &Value| v.as_f64().map_or("-".into(), |x| format!("{:.2} GB/s", x / 1e9));
    let bytes = (budget * GIB) as u64;
    let planned = plan["budgets"]
        .as_array()
        .and_then(|all| all.iter().find(|b| b["bytes"].as_u64() == Some(bytes)).cloned());
    let planned = planned.unwrap_or(Value::Null);
    let decode = &r["decode_tokens_per_s"];
    format!(
        "| {budget} GiB | {} | {} | {} ({} to {}) | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
        number(&planned["slots_per_layer"], 1),
        number(&r["prefill_tokens_per_s"]["median"], 1),
        number(&decode["median"], 2),
        number(&decode["min"], 2),
        number(&decode["max"], 2),
        number(&planned["decode_tokens_per_s"], 2),
        percent(&r["expert_hit_rate"]),
        mib(&r["disk_bytes_per_token"]),
        percent(&r["disk_fraction"]),
        percent(&r["overall_fraction"]),
        gb(&r["disk_bandwidth_bytes_per_s"]),
        gb(&r["memory_bandwidth_bytes_per_s"]),
        gib(&r["peak_bytes"]),
        gib(&r["container_peak_bytes"]),
    )
}
