//! `batch`: works through lines of requests, many at once, so that each expert read from disk serves all of them.
//!
//! Answers come in the order of the requests. Each is written to a journal beside the output as soon as it is
//! there, and to the output when those before it are; after a kill, what is in either is not computed again.

mod input;
mod output;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use anyhow::Context;
use forebay_schedule::Pace;
use forebay_serve::room::Demand;
use forebay_serve::{ApiError, Kind};
use serde_json::{Map, Value, json};

use self::input::{Line, Requests};
use self::output::Output;
use crate::args::BatchArgs;
use crate::cmd::{bench, serve};
use crate::failure::usage;
use crate::term::{Bar, interruption, note, say};

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
    let lines = requests.lines();
    let mut output = Output::open(&args.output, &args.input, lines)?;
    let todo: Vec<usize> = (0..lines.len()).filter(|i| !output.has(*i)).collect();
    let before = lines.len() - todo.len();
    if before > 0 {
        note!("{before} of {} lines are done already", lines.len());
    }
    if todo.is_empty() {
        output.finish()?;
        return Ok(ExitCode::SUCCESS);
    }
    let parallel = args.parallel.unwrap_or(PARALLEL).min(todo.len());
    let load = serve::Load {
        parallel,
        contexts: serve::contexts(args.contexts, args.parallel),
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
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(1)
        .max_blocking_threads(2)
        .enable_all()
        .build()
        .context("starting a thread")?;
    let n_lines = lines.len();
    let began = Instant::now();
    let bar = Bar::steps("answering");
    let (send, mut receive) = tokio::sync::mpsc::unbounded_channel();
    let done = runtime.block_on(async {
        let mut next = todo.iter().copied();
        let mut open = 0;
        let mut done = 0;
        let mut failed = 0;
        loop {
            // As many as are computed at once, and as many that wait for a place.
            while open < 2 * parallel && !cancel.load(Ordering::Relaxed) {
                let Some(index) = next.next() else { break };
                let (service, send) = (service.clone(), send.clone());
                let (url, body) = (requests.lines()[index].url, requests.body(index)?);
                let answer = tokio::spawn(async move { service.answer(url, &body).await });
                tokio::spawn(async move {
                    // A panic there is that line's alone.
                    let answer = answer.await.unwrap_or_else(|fault| {
                        let what = format!("answering this line failed: {fault}");
                        Err(ApiError::new(Kind::Internal, what))
                    });
                    // The receiver lives until all are done.
                    let _ = send.send((index, answer));
                });
                open += 1;
            }
            if open == 0 {
                break;
            }
            let received = tokio::time::timeout(Duration::from_millis(100), receive.recv()).await;
            if cancel.load(Ordering::Relaxed) {
                service.scheduler().abort();
                break;
            }
            let Ok(Some((index, answer))) = received else { continue };
            open -= 1;
            if let Err(fault) = &answer {
                // What an engine that is gone says is no answer to the line: it comes again.
                let own = matches!(fault.kind, Kind::Internal | Kind::Closing);
                if own && service.scheduler().with_engine(|_| ()).is_err() {
                    let what = &fault.message;
                    anyhow::bail!(
                        "the engine has ended: {what} (the same command goes on from here)"
                    );
                }
            }
            failed += usize::from(answer.is_err());
            output.put(index, &line(index, &requests.lines()[index], answer))?;
            done += 1;
            bar.set((before + done) as u64, n_lines as u64);
        }
        anyhow::Ok((done, failed))
    });
    bar.clear();
    // An output that takes no more ends the answers that nobody will see.
    let (done, failed) = done.inspect_err(|_| service.scheduler().abort())?;
    let seconds = began.elapsed().as_secs_f64();
    let load = service.scheduler().load();
    let per_second = load.generated_tokens as f64 / seconds;
    let (stats, phases) = (&load.stats, load.stats.phases.named());
    let phases: Map<String, Value> =
        phases.into_iter().map(|(k, v)| (k.into(), json!(v))).collect();
    let disk = match args.json {
        true => service.scheduler().with_engine(|engine| bench::with_disk(engine, None).disk).ok(),
        false => None,
    };
    let summary = json!({
        "lines": n_lines,
        "answered": done,
        "failed": failed,
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
        "peak_bytes": peak.as_ref().map(|p| p.peak_bytes()),
    });
    match args.json {
        true => say!("{summary}")?,
        false => note!(
            "{done} answers ({failed} of them refusals), {} tokens, {per_second:.1} tokens/s, {} steps",
            load.generated_tokens,
            load.steps
        ),
    }
    if cancel.load(Ordering::Relaxed) {
        note!("interrupted: the same command goes on where this one ended");
        return Ok(ExitCode::from(130));
    }
    output.finish()?;
    Ok(ExitCode::SUCCESS)
}

/// A line of the output.
fn line(index: usize, line: &Line, answer: Result<Value, ApiError>) -> Value {
    let (status, body) = match answer {
        Ok(body) => (200, body),
        Err(error) => (error.status(), error.openai_body()),
    };
    json!({
        "id": format!("batch_req_{index}"),
        "custom_id": line.id,
        "response": { "status_code": status, "request_id": format!("req_{index}"), "body": body },
        "error": null,
    })
}
