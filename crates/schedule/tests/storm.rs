//! Many clients at once on an engine that drafts, steered differently, some held by rules, some that leave in the middle, as many
//! as there are places and more: every one hears what it would hear alone, of an engine without a drafter.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use common::{Ear, Heard, MODELS, Rules, kinds, prompt, steered};
use forebay_engine::{DrafterChoice, Engine, SamplerParams, SpeculateOptions, Steering};
use forebay_schedule::{Job, Outcome, Pace, Scheduler, SchedulerOptions};

const WAIT: Duration = Duration::from_secs(120);
const JOBS: usize = 30;
const MOST: usize = 48;

/// The `i`-th client: what it asks, and after how many tokens it leaves.
fn client(
    i: usize,
    steering: &[Option<Arc<Steering>>],
    leaves: bool,
) -> (Job, Receiver<Heard>, Arc<AtomicUsize>) {
    let (mut ear, heard) = Ear::new();
    if leaves && i % 4 == 1 {
        ear.gone_after = 1 + i * 7 % (MOST - 1);
    }
    if i % 5 == 3 {
        ear.stop_after = 17 + i;
    }
    let progress = ear.heard.clone();
    // Several ask the same with other seeds: choices of one request.
    let (index, n) = [(0, 12), (1, 40), (2, 150), (2, 90)][i / 3 % 4];
    let sampling = match i % 3 {
        0 => SamplerParams::default(),
        seed => {
            SamplerParams { temperature: 0.8, top_p: 0.95, seed: seed as u64, ..Default::default() }
        }
    };
    let mut job = common::job(&prompt(index, n), MOST, sampling, ear);
    job.checkpoints = vec![n / 2, n - 1];
    job.steering = steering[i / 2 % steering.len()].clone();
    job.ends = [].into();
    if i % 7 == 2 {
        job.constraint = Some(Box::new(Rules::default()));
    }
    (job, heard, progress)
}

fn start(engine: Engine, sequences: usize) -> Scheduler {
    Scheduler::start(engine, SchedulerOptions { sequences, queue: JOBS, pace: Pace::Flowing })
        .unwrap()
}

#[test]
fn every_client_hears_what_it_would_alone() {
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let engine = steered(model, dir.path(), |_| {});
        let steering = kinds(&engine);
        let alone = start(engine, 1);
        let want: Vec<Heard> = (0..JOBS)
            .map(|i| {
                let (job, heard, _) = client(i, &steering, false);
                alone.submit(job).unwrap();
                heard.recv_timeout(WAIT).unwrap()
            })
            .collect();
        let mut drafters = vec![DrafterChoice::Ngram];
        drafters.push(match model.contains("qwen3.5") {
            true => DrafterChoice::Mtp,
            false => DrafterChoice::Model(
                std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
                    .join("../../models")
                    .join(MODELS[1]),
            ),
        });
        let mut wrong = 0;
        for drafter in drafters {
            let name = drafter.name();
            let engine = steered(model, dir.path(), |o| {
                o.sequences = 3;
                // Less room than they might take.
                o.contexts = forebay_engine::Contexts::Exactly(2);
                o.snapshots = 3;
                o.speculate = SpeculateOptions { drafter, tokens: Some(5), always: true };
            });
            let s = start(engine, 3);
            let mut waiting = Vec::new();
            let mut all = Vec::new();
            for i in 0..JOBS {
                // Every sixth begins alone, and has said something when the next come, all at once.
                let alone = i % 6 == 0;
                if alone {
                    all.extend(
                        waiting.drain(..).map(|h: Receiver<_>| h.recv_timeout(WAIT).unwrap()),
                    );
                }
                let (job, heard, progress) = client(i, &steering, true);
                s.submit(job).unwrap();
                waiting.push(heard);
                if alone {
                    let clock = Instant::now();
                    while progress.load(Ordering::SeqCst) < 30 && clock.elapsed() < WAIT / 12 {
                        std::thread::yield_now();
                    }
                }
            }
            all.extend(waiting.into_iter().map(|h| h.recv_timeout(WAIT).unwrap()));
            for (i, (heard, want)) in all.into_iter().zip(&want).enumerate() {
                let n = heard.tokens.len();
                if heard.outcome == Outcome::Gone {
                    assert!(i % 4 == 1 && heard.tokens == want.tokens[..n], "{model} {name} {i}");
                    continue;
                }
                assert_eq!(heard.outcome, want.outcome, "{model} {name} {i}");
                assert!(heard.tokens == want.tokens, "{model} {name} {i}");
            }
            let counts = s.with_engine(|engine| engine.speculation().unwrap().1).unwrap();
            assert!(counts.rounds > 5, "{model} {name}: {counts:?}");
            wrong += counts.drafted - counts.accepted;
            // All that they had is given back: there is room for two whole contexts.
            let whole: Vec<_> = (0..2)
                .map(|seed| {
                    let (ear, heard) = Ear::new();
                    let sampling = SamplerParams { temperature: 1.0, seed, ..Default::default() };
                    let mut job = common::job(&prompt(2, 150), usize::MAX, sampling, ear);
                    job.ends = [].into();
                    s.submit(job).unwrap();
                    heard
                })
                .collect();
            for heard in whole {
                let heard = heard.recv_timeout(WAIT).unwrap();
                assert_eq!((heard.outcome, heard.tokens.len()), (Outcome::Length, 512 - 150));
            }
        }
        assert!(wrong > 0, "{model}: no draft was taken back");
    }
}
