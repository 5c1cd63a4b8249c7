//! `cargo xtask bench MODEL [--budgets 2,3,4,6,8] [--cap CMD] [--keep FILE] [OPTIONS OF forebay bench]`
//!
//! One run of `forebay bench` per budget (GiB), as a row of a Markdown table. `--cap` is a command that
//! limits memory, `{bytes}` in it being the budget: `systemd-run --scope -q -p MemoryMax={bytes} -p
//! MemorySwapMax=0`. Beside what was measured stands what `plan` says just before; its prior are the choices
//! of experts of the same tokens, recorded in a run before all others.

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
    let recorded = bench.record(&budgets, &trace);
    if let Err(e) = &recorded {
        eprintln!("no trace, so no prediction: {e}");
    }
    println!(
        "| budget | slots a layer | prefill t/s (min to max) | read of union | decode t/s (min to max) | \
         predicted | hits | read a token | while reading | phase model | disk | memory | peak | container |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    let mut kept = Vec::new();
    for &budget in &budgets {
        let planned = recorded.as_ref().ok().map(|()| bench.plan(budget, &trace));
        let planned = planned.and_then(|p| p.map_err(|e| eprintln!("no prediction: {e}")).ok());
        match bench.measure(budget) {
            Ok(mut report) => {
                report["planned"] = planned.unwrap_or(Value::Null);
                println!("{}", row(budget, &report));
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

    /// Records the experts that the measurement chooses, whatever the budget.
    fn record(&self, budgets: &[f64], trace: &Path) -> anyhow::Result<()> {
        let bytes = (budgets.iter().copied().fold(0.0, f64::max) * GIB) as u64;
        let mut command = self.command(bytes);
        command.args(["bench", &self.model, "--json", "--memory", &bytes.to_string()]);
        Self::json(command.args(&self.rest).arg("--trace").arg(trace)).map(|_| ())
    }

    /// What `forebay plan` says for a budget.
    fn plan(&self, budget: f64, trace: &Path) -> anyhow::Result<Value> {
        let bytes = ((budget * GIB) as u64).to_string();
        let mut command = self.command((budget * GIB) as u64);
        command.args(["plan", &self.model, "--json", "--memory", &bytes, "--budgets", &bytes]);
        let at = self.rest.iter().position(|o| o == "--context");
        if let Some(context) = at.and_then(|at| self.rest.get(at + 1)) {
            command.args(["--context", context]);
        }
        let plan = Self::json(command.arg("--prior").arg(trace))?;
        Ok(plan["budgets"][0].clone())
    }
}

fn row(budget: f64, r: &Value) -> String {
    let number = |v: &Value, digits: usize| match v.as_f64() {
        Some(x) => format!("{x:.digits$}"),
        None => "-".into(),
    };
    let percent = |v: &Value| v.as_f64().map_or("-".into(), |x| format!("{:.0}%", x * 100.0));
    let mib = |v: &Value| v.as_f64().map_or("-".into(), |x| format!("{:.0} MiB", x / 1048576.0));
    let gib = |v: &Value| v.as_f64().map_or("-".into(), |x| format!("{:.2} GiB", x / GIB));
    let gb = |v: &Value| v.as_f64().map_or("-".into(), |x| format!("{:.2} GB/s", x / 1e9));
    let planned = &r["planned"];
    let spread = |v: &Value, digits: usize| {
        let [median, min, max] = ["median", "min", "max"].map(|key| number(&v[key], digits));
        format!("{median} ({min} to {max})")
    };
    let of_union = match (r["prefill_disk_bytes"].as_f64(), r["prefill_union_bytes"].as_f64()) {
        (Some(read), Some(union)) if union > 0.0 => Value::from(read / union),
        _ => Value::Null,
    };
    format!(
        "| {budget} GiB | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
        number(&planned["slots_per_layer"], 1),
        spread(&r["prefill_tokens_per_s"], 1),
        percent(&of_union),
        spread(&r["decode_tokens_per_s"], 2),
        number(&planned["decode_tokens_per_s"], 2),
        percent(&r["expert_hit_rate"]),
        mib(&r["disk_bytes_per_token"]),
        percent(&r["disk_fraction"]),
        percent(&r["phase_model_fraction"]),
        gb(&r["disk_bandwidth_bytes_per_s"]),
        gb(&r["memory_bandwidth_bytes_per_s"]),
        gib(&r["peak_bytes"]),
        gib(&r["container_peak_bytes"]),
    )
}
