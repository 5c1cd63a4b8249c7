//! `batch`: works through lines of requests, many at once, so that each expert read from disk serves all of them.
//!
//! Answers come in the order of the requests. Each is written to a journal beside the output as soon as it is
//! there, and to the output when those before it are; after a kill, what is in either is not computed again.

mod input;
mod needs;
mod output;
mod work;

use std::collections::VecDeque;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use forebay_schedule::Pace;
use forebay_serve::Service;
use forebay_serve::room::Demand;
use forebay_store::memory::PeakSampler;
use serde_json::{Map, Value, json};

use self::input::Requests;
use self::needs::{Need, positions, tokens_per_byte};
use self::output::Output;
use self::work::{Done, Work};
use crate::args::BatchArgs;
use crate::cmd::{bench, serve};
use crate::failure::usage;
use crate::term::{interruption, note, say};

/// Answers at once where nothing is told.
const PARALLEL: usize = 16;

pub fn run(args: BatchArgs) -> anyhow::Result<ExitCode> {
    forebay_store::heap::settle();
    args.sampling.params(None)?;
    if args.parallel == Some(0) {
        return Err(usage("--parallel must be at least 1"));
    }
    if args.contexts == Some(0) {
        return Err(usage("--contexts must be at least 1"));
    }
    let mut requests = Requests::open(&args.input)?;
    let output = Output::open(&args.output, &args.input, requests.lines())?;
    let n_lines = requests.lines().len();
    let todo: VecDeque<usize> = (0..n_lines).filter(|i| !output.has(*i)).collect();
    let before = n_lines - todo.len();
    if before > 0 {
        note!("{before} of {} lines are done already", n_lines);
    }
    let faults = output.faults();
    if faults > 0 {
        note!("{faults} of them have no answer: the engine failed; another output asks them again");
    }
    if todo.is_empty() {
        output.finish()?;
        return Ok(end(faults));
    }
    let parallel = args.parallel.unwrap_or(PARALLEL).min(todo.len());
    let bodies = needs::sample(todo.len()).map(|i| requests.body(todo[i]));
    let bodies = bodies.collect::<anyhow::Result<Vec<Value>>>()?;
    let lines = requests.lines();
    let needs: Vec<Need> = todo.iter().map(|&i| lines[i].need).collect();
    let needs: serve::Needs =
        Box::new(move |tokenizer| positions(&needs, parallel, tokens_per_byte(tokenizer, &bodies)));
    let load = serve::Load {
        parallel,
        contexts: serve::contexts(args.contexts, args.parallel),
        needs: args.contexts.is_none().then_some(needs),
        // One line may ask for several answers; how many lines are open is counted here.
        queue: usize::MAX,
        room: Demand {
            max_body: None,
            connections: 0,
            constrained: todo.iter().filter(|&&i| lines[i].is_constrained).count().min(parallel),
        },
        pace: Pace::Full,
        steers_all: false,
        quiet: false,
    };
    let (service, peak) = serve::service(&args.model, &args.sampling, load, None)?;
    let service = Arc::new(service);
    let cancel = interruption();
    let began = Instant::now();
    let work = Work::new(service.clone(), requests, output, todo);
    // An output that takes no more ends the answers that nobody will see.
    let (done, output) =
        work.run(parallel, &cancel).inspect_err(|_| service.scheduler().abort())?;
    let seconds = began.elapsed().as_secs_f64();
    summary(&service, &done, n_lines, seconds, args.json, peak.as_ref())?;
    if cancel.load(Ordering::Relaxed) {
        note!("interrupted: the same command goes on where this one ended");
        return Ok(ExitCode::from(130));
    }
    output.finish()?;
    Ok(end(faults + done.faults))
}

/// How the command ends with so many lines that the engine failed at.
fn end(faults: usize) -> ExitCode {
    if faults == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Says what was done: one JSON document, or lines for people.
fn summary(
    service: &Service,
    done: &Done,
    lines: usize,
    seconds: f64,
    as_json: bool,
    peak: Option<&PeakSampler>,
) -> anyhow::Result<()> {
    let load = service.scheduler().load();
    let per_second = load.generated_tokens as f64 / seconds;
    let &Done { answered, refused, faults, again } = done;
    if !as_json {
        note!(
            "{answered} answers ({refused} of them refusals), {} tokens, {per_second:.1} tokens/s, {} steps",
            load.generated_tokens,
            load.steps
        );
        if faults > 0 {
            note!("{faults} lines have no answer: the engine failed twice at each of them");
        }
        return Ok(());
    }
    let (stats, phases) = (&load.stats, load.stats.phases.named());
    let phases: Map<String, Value> =
        phases.into_iter().map(|(k, v)| (k.into(), json!(v))).collect();
    let disk = service.scheduler().with_engine(|engine| bench::with_disk(engine, None).disk).ok();
    let summary = json!({
        "lines": lines,
        "answered": answered,
        "failed": refused + faults,
        "engine_faults": faults,
        "tried_again": again,
        "generated_tokens": load.generated_tokens,
        "prompt_tokens": load.prompt_tokens,
        "cached_tokens": load.cached_tokens,
        "steps": load.steps,
        "seconds": seconds,
        "generated_tokens_per_s": per_second,
        "rows": stats.rows,
        "expert_hits": stats.store.hits,
        "expert_misses": stats.store.misses,
        "disk_bytes": stats.store.bytes_read,
        "disk_bandwidth_bytes_per_s": disk.flatten(),
        "phases_s": phases,
        "peak_bytes": peak.map(|p| p.peak_bytes()),
    });
    Ok(say!("{summary}")?)
}
