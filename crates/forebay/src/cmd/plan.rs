//! `plan`: what each memory budget would give on this machine, before a weight is loaded.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use forebay_cpu::probe::Probe;
use forebay_cpu::{Level, Pool};
use forebay_engine::engine::{Opened, budget_bytes};
use forebay_engine::predict::{Prediction, Predictor, Prior, Speeds};
use forebay_engine::{EngineError, MemoryPlan};
use forebay_program::Precision;
use forebay_program::ledger::human;
use forebay_store::{FileSet, IoOptions, Residency, bandwidth};
use serde_json::{Value, json};

use super::inspect::About;
use super::trace;
use crate::args::PlanArgs;
use crate::failure::usage;
use crate::model::{self, Found};
use crate::term::{note, say};

/// How often disk and products are measured, in turn.
const ROUNDS: usize = 3;
/// How long the disk is measured in a round.
const DISK_TIME: Duration = Duration::from_millis(800);

const GIB: u64 = 1 << 30;
/// Budgets that are planned for unless told, in GiB.
const LADDER: [u64; 14] = [2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256];

pub fn run(args: PlanArgs) -> anyhow::Result<ExitCode> {
    let is_here = matches!(model::find(&args.model.model)?, Found::Here(_));
    let (opened, tokenizer, template) = model::look(&args.model)?;
    let mut about = About::new(&opened, &tokenizer, template.as_ref());
    let prior = prior(&args.prior, &opened, is_here)?;
    let speeds = speeds(&opened, is_here);
    if is_here && speeds.disk.is_none() && !opened.store.layers.is_empty() {
        about.warnings.push("the disk could not be measured: no speeds are predicted".into());
    }
    if !is_here {
        about.warnings.push("not downloaded yet: the disk it will lie on is not measured".into());
    }
    let predictor = Predictor {
        spec: &opened.spec,
        program: &opened.program,
        store: &opened.store,
        policy: opened.options.policy,
        speeds: &speeds,
    };
    let passes = predictor.passes(&prior);
    let mut rows = Vec::new();
    for budget in budgets(&args, &opened, about.minimum())? {
        match opened.plan_input().plan(budget) {
            Ok(plan) => rows.push((predictor.predict(&plan, &passes)?, plan)),
            Err(EngineError::BudgetTooSmall { .. }) => {}
            Err(e) => return Err(e.into()),
        }
    }
    if args.json {
        let mut out = about.json();
        out.insert("prior".into(), json!(prior.name()));
        out.insert("policy".into(), json!(opened.options.policy.name()));
        out.insert("disk_bandwidth_bytes_per_s".into(), json!(speeds.disk));
        out.insert("memory_bandwidth_bytes_per_s".into(), json!(speeds.one_row));
        let layers = opened.store.layers.len();
        let budgets: Vec<Value> = rows.iter().map(|(p, plan)| row_json(p, plan, layers)).collect();
        out.insert("budgets".into(), json!(budgets));
        say!("{}", Value::Object(out))?;
    } else {
        about.print()?;
        if let Ok(p) = &about.plan {
            say!("\n{}\n{}", p.summary(), p.ledger)?;
        }
        say!("smallest workable budget: {} MiB\n", about.minimum().div_ceil(1 << 20))?;
        table(&rows, opened.store.layers.len())?;
        let rate =
            |r: Option<f64>| r.map_or("not measured".into(), |r| format!("{}/s", human(r as u64)));
        say!(
            "\nmeasured now: disk {}, products with one row {}",
            rate(speeds.disk),
            rate(speeds.one_row)
        )?;
        let from = match &prior {
            Prior::Trace(_) => "a trace".to_string(),
            Prior::Router(_) => {
                "draws from the model's routers, token by token (real text repeats itself more)"
                    .into()
            }
            Prior::Uniform => "uniform draws (real routers have favourites and hit more)".into(),
        };
        say!("hits: replayed with policy {} from {from}", opened.options.policy)?;
    }
    match about.plan {
        Ok(_) => Ok(ExitCode::SUCCESS),
        Err(e) => Ok(crate::failure::report(&e.into(), false)),
    }
}

fn row_json(p: &Prediction, plan: &MemoryPlan, layers: usize) -> Value {
    let slots = match plan.residency {
        Some(Residency::Stream { slots }) => json!(slots as f64 / layers.max(1) as f64),
        _ => Value::Null,
    };
    json!({
        "bytes": plan.budget,
        "residency": residency(plan),
        "slots": plan.slots,
        "slots_per_layer": slots,
        "chunk": plan.chunk,
        "context": plan.context,
        "hit_rate": p.hit_rate,
        "disk_bytes_per_token": p.disk_bytes_per_token,
        "decode_tokens_per_s": p.decode_tokens_per_s,
        "prefill_tokens_per_s": p.prefill_tokens_per_s,
    })
}

fn residency(plan: &MemoryPlan) -> &'static str {
    match plan.residency {
        Some(Residency::Stream { .. }) => "stream",
        Some(Residency::Mapped) => "mapped",
        _ => "resident",
    }
}

fn table(rows: &[(Prediction, MemoryPlan)], layers: usize) -> anyhow::Result<()> {
    say!(
        "  {:>10}  {:>9} {:>7} {:>7}  {:>6} {:>12}  {:>10} {:>11}",
        "budget",
        "slots/lay",
        "chunk",
        "context",
        "hits",
        "read/token",
        "decode t/s",
        "prefill t/s"
    )?;
    for (p, plan) in rows {
        let slots = match plan.residency {
            Some(Residency::Stream { slots }) => {
                format!("{:.1}", slots as f64 / layers.max(1) as f64)
            }
            _ => residency(plan).into(),
        };
        let speed = |s: Option<f64>| s.map_or("-".into(), |s| format!("{s:.1}"));
        say!(
            "  {:>10}  {slots:>9} {:>7} {:>7}  {:>6} {:>12}  {:>10} {:>11}",
            human(plan.budget),
            plan.chunk,
            plan.context,
            p.hit_rate.map_or("-".into(), |r| format!("{:.0}%", r * 100.0)),
            human(p.disk_bytes_per_token as u64),
            speed(p.decode_tokens_per_s),
            speed(p.prefill_tokens_per_s),
        )?;
    }
    Ok(())
}

/// The asked budget and a ladder up to the one that holds the whole model, ascending.
fn budgets(args: &PlanArgs, opened: &Opened, minimum: u64) -> anyhow::Result<Vec<u64>> {
    let mut all = vec![opened.budget()?];
    if args.budgets.is_empty() {
        all.push(minimum);
        for budget in LADDER.into_iter().map(|g| g * GIB).filter(|&b| b > minimum) {
            all.push(budget);
            let plan = opened.plan_input().plan(budget);
            if plan.is_ok_and(|p| !matches!(p.residency, Some(Residency::Stream { .. }))) {
                break;
            }
        }
    }
    for budget in &args.budgets {
        all.push(budget_bytes(budget.0)?);
    }
    all.sort_unstable();
    all.dedup();
    Ok(all)
}

fn prior(name: &str, opened: &Opened, is_here: bool) -> anyhow::Result<Prior> {
    let routers = || Prior::from_routers(&opened.catalog, &opened.spec);
    Ok(match name {
        "uniform" => Prior::Uniform,
        "router" if is_here => routers()?,
        "router" => return Err(usage("--prior router needs the weights, which are not here yet")),
        "auto" if is_here => routers()?,
        "auto" => Prior::Uniform,
        file => {
            let trace = trace::Trace::read(Path::new(file))?;
            trace.check(&opened.program)?;
            Prior::Trace(trace.passes)
        }
    })
}

/// Measures what the machine does, at several moments, for others may use it too.
fn speeds(opened: &Opened, is_here: bool) -> Speeds {
    let options = &opened.options;
    let pool = Pool::new(options.threads());
    let level = options.level.unwrap_or_else(Level::best);
    let q8 = options.precision() == Precision::Q8;
    let probe = Probe::new(&pool, level, q8);
    let mut rounds: Vec<Speeds> = Vec::with_capacity(ROUNDS);
    for _ in 0..ROUNDS {
        // a disk that cannot be measured is asked, and spoken of, once
        let can = is_here && rounds.last().is_none_or(|last| last.disk.is_some());
        let disk = if can { disk(opened) } else { None };
        rounds.push(Speeds { disk, ..Speeds::measure(&probe, &opened.program, &opened.store) });
    }
    Speeds::median(&rounds).expect("measured more than once")
}

/// Random reads of the model's files, as large as those of an expert are on average, as many at once as the store has.
fn disk(opened: &Opened) -> Option<f64> {
    let options = &opened.options;
    let io =
        IoOptions { engine: options.io_engine, depth: options.io_depth, ..IoOptions::default() };
    let (file, block) = opened.store.read_shape(io.max_read_bytes)?;
    let files = Arc::new(FileSet::open(&opened.catalog.files, options.io).ok()?);
    match bandwidth::measure_with(&files, file, block, &io, DISK_TIME) {
        Ok(measured) => Some(measured.bytes_per_second()),
        Err(error) => {
            note!("note: the disk could not be measured: {error}");
            None
        }
    }
}
