//! `selftest`: the GPU's kernels against the scalar definitions, on the machine at hand.

use std::process::ExitCode;

use forebay_cuda::{Gpu, selftest};
use forebay_engine::EngineError;
use serde_json::json;

use crate::args::SelftestArgs;
use crate::term::say;

pub fn run(args: SelftestArgs) -> anyhow::Result<ExitCode> {
    let gpu = Gpu::open().map_err(EngineError::from)?;
    let mut total = selftest::Report::default();
    for seed in 1..=args.rounds {
        let report = selftest::products(&gpu, seed).map_err(EngineError::from)?;
        total.cases += report.cases;
        total.numbers += report.numbers;
        total.finite += report.finite;
        total.different.extend(report.different);
    }
    let ok = total.different.is_empty();
    if args.json {
        let out = json!({
            "ok": ok,
            "device": gpu.info().name,
            "cases": total.cases,
            "numbers": total.numbers,
            "finite": total.finite,
            "different": total.different,
        });
        say!("{out}")?;
    } else {
        let verdict = if ok { "ok" } else { "FAILED" };
        let (cases, numbers) = (total.cases, total.numbers);
        say!("{verdict}: {}: {cases} comparisons, {numbers} numbers", gpu.info().name)?;
        for line in &total.different {
            say!("  {line}")?;
        }
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::from(1) })
}
