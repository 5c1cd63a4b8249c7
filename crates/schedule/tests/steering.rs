//! Every row is steered by its own sequence's vectors, whoever is beside it; what is kept is never taken for what was steered
//! otherwise; counting choices of experts sees every row of every batch.

mod common;

use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Ear, Heard, MODELS, job, kinds, prompt, steered};
use forebay_engine::prefix::Origin;
use forebay_engine::tap::{Histogram, RoutingTap};
use forebay_engine::{
    Batch, Control, DrafterChoice, Engine, Prefetch, ResidencyChoice, SamplerParams, Sequence,
    SpeculateOptions, Steering,
};
use forebay_schedule::{Pace, Scheduler, SchedulerOptions};

const WAIT: Duration = Duration::from_secs(120);
fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|l| l.to_bits()).collect()
}

fn logits(engine: &mut Engine, sequence: &mut Sequence, tokens: &[u32]) -> Vec<u32> {
    let rest = &tokens[sequence.len()..];
    bits(&Control::none(|control| engine.prefill(sequence, rest, control)).unwrap())
}

#[test]
fn rows_of_one_batch_are_steered_by_themselves() {
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = steered(model, dir.path(), |o| o.sequences = 4);
        let kinds = kinds(&engine);
        let prompts: Vec<Vec<u32>> = (0..4).map(|i| prompt(1, 9 + 3 * i)).collect();
        // Alone: [kind][step].
        let mut want: Vec<Vec<Vec<u32>>> = Vec::new();
        for (tokens, steering) in prompts.iter().zip(&kinds) {
            let mut sequence = engine.begin_steered(tokens, steering.clone());
            let mut tokens = tokens.clone();
            let mut steps = vec![logits(&mut engine, &mut sequence, &tokens)];
            for next in [5, 6, 7] {
                tokens.push(next);
                steps.push(logits(&mut engine, &mut sequence, &tokens));
            }
            engine.release(&mut sequence);
            want.push(steps);
        }
        assert!((1..4).all(|i| want[i] != want[0]), "{model}");
        // Together: prompts in one pass, then one row each.
        let mut sequences: Vec<Sequence> =
            kinds.iter().map(|k| engine.begin_steered(&[1, 2], k.clone())).collect();
        for step in 0..4 {
            let mut batch = Batch::default();
            for (i, tokens) in prompts.iter().enumerate() {
                let rows = if step == 0 { tokens.clone() } else { vec![4 + step as u32] };
                batch.row_sequence.extend(std::iter::repeat_n(i as u32, rows.len()));
                batch.tokens.extend(rows);
                batch.logit_rows.push(batch.tokens.len() as u32 - 1);
            }
            let mut lent: Vec<&mut Sequence> = sequences.iter_mut().collect();
            let mut got = Vec::new();
            Control::none(|control| {
                engine.forward(&batch, &mut lent, control, &mut |_, l| {
                    got.push(bits(l));
                    Ok(())
                })
            })
            .unwrap();
            for (i, (got, want)) in got.iter().zip(&want).enumerate() {
                assert!(*got == want[step], "{model}: kind {i}, step {step}");
            }
        }
        sequences.iter_mut().for_each(|s| engine.release(s));
    }
}

#[test]
fn what_is_kept_is_not_mixed() {
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let sessions = tempfile::tempdir().unwrap();
        let tokens: Arc<[u32]> = prompt(2, 96).into();
        let longer: Vec<u32> = tokens.iter().copied().chain([7, 8, 9]).collect();
        let fresh = || steered(model, dir.path(), |o| o.snapshots = 4);
        let mut engine = fresh();
        let kinds = kinds(&engine);
        let mut want = Vec::new();
        for kind in &kinds {
            let mut sequence = engine.begin_steered(&longer, kind.clone());
            assert!(sequence.is_empty(), "{model}: what is steered otherwise is not taken");
            logits(&mut engine, &mut sequence, &tokens);
            assert!(engine.keep(&sequence, &tokens, 96, Origin::Prompt));
            want.push(logits(&mut engine, &mut sequence, &longer));
            engine.release(&mut sequence);
        }
        assert_eq!(engine.kept(), kinds.len());
        let check = |engine: &mut Engine, kinds: &[Option<Arc<Steering>>]| {
            for (kind, want) in kinds.iter().zip(&want) {
                let mut sequence = engine.begin_steered(&longer, kind.clone());
                assert_eq!(sequence.len(), 96, "{model}");
                assert!(logits(engine, &mut sequence, &longer) == *want, "{model}");
                engine.release(&mut sequence);
            }
        };
        check(&mut engine, &kinds);
        // The same over a restart.
        assert_eq!(engine.save_sessions(sessions.path(), 10).unwrap(), kinds.len());
        drop(engine);
        let mut engine = fresh();
        let (loaded, faults) = engine.load_sessions(sessions.path()).unwrap();
        assert!(loaded == kinds.len() && faults.is_empty(), "{faults:?}");
        check(&mut engine, &kinds);
        // A strength that nobody had yet.
        let other = engine.steer_vectors().choose([("a", Some(1.25))]).unwrap();
        assert!(engine.begin_steered(&longer, other).is_empty());
        // Strength 0 is no steering, whatever name it is given to.
        let none = engine.steer_vectors().choose([("a", Some(0.0))]).unwrap();
        assert_eq!(none, None);
    }
}

/// Shares a tap with the engine.
struct Shared(Arc<Mutex<Histogram>>);

impl RoutingTap for Shared {
    fn routed(&mut self, moe: usize, top_k: usize, routing: &forebay_program::Routing) {
        self.0.lock().unwrap().routed(moe, top_k, routing);
    }
}

#[test]
fn jobs_together_as_alone_and_all_their_choices_counted() {
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let run = |sequences: usize, chunk: usize, slots: Option<usize>| {
            let mut engine = steered(model, dir.path(), |o| {
                o.sequences = sequences;
                o.chunk = Some(chunk);
                o.slots_total = slots;
            });
            let kinds = kinds(&engine);
            let histogram = Histogram::new(engine.program.moes.iter().map(|m| m.n_experts));
            let histogram = Arc::new(Mutex::new(histogram));
            engine.tap(Box::new(Shared(histogram.clone())));
            let options = SchedulerOptions { sequences, queue: 64, pace: Pace::Flowing };
            let scheduler = Scheduler::start(engine, options).unwrap();
            let answers: Vec<_> = (0..8)
                .map(|i| {
                    let (ear, heard) = Ear::new();
                    let sampling =
                        SamplerParams { temperature: 0.7, seed: i, ..Default::default() };
                    // No two begin alike, so that nothing is taken from another and every row is counted.
                    let mut ids = prompt(2, 20 + 7 * i as usize);
                    ids[0] = 100 + i as u32;
                    let mut job = job(&ids, 10, sampling, ear);
                    job.steering = kinds[i as usize % 4].clone();
                    scheduler.submit(job).unwrap();
                    if sequences == 1 {
                        let heard: Heard = heard.recv_timeout(WAIT).unwrap();
                        return Err(heard);
                    }
                    Ok(heard)
                })
                .collect();
            let heard: Vec<Heard> = answers
                .into_iter()
                .map(|answer| match answer {
                    Ok(receiver) => receiver.recv_timeout(WAIT).unwrap(),
                    Err(heard) => heard,
                })
                .collect();
            let cached: usize = heard.iter().map(|h| h.usage.cached).sum();
            let tokens: Vec<_> = heard.into_iter().map(|h| (h.tokens, h.outcome)).collect();
            let counts = histogram.lock().unwrap().counts.clone();
            (tokens, counts, cached)
        };
        let (want, counts, _) = run(1, 64, None);
        let (got, together, cached) = run(8, 16, Some(9));
        assert_eq!(got, want, "{model}");
        assert_eq!(cached, 0);
        assert_eq!(together, counts, "{model}");
        let rows: u64 = counts[0].iter().sum();
        assert!(rows > 0);
    }
}

/// A histogram and the router's guesses beside every mode: alone and in batches, resident, streamed and mapped, steered, and with
/// drafters. Answers are the same, and every row of every pass is counted, those that are taken back among them.
#[test]
fn histogram_and_pilot_beside_every_mode() {
    let drafts = |drafter| SpeculateOptions { drafter, tokens: Some(5), always: true };
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let run = |sequences: usize, residency: ResidencyChoice, speculate: SpeculateOptions| {
            let mut engine = steered(model, dir.path(), |o| {
                o.sequences = sequences;
                o.residency = residency;
                o.slots_total = (residency == ResidencyChoice::Stream).then_some(40);
                o.prefetch = Prefetch::On;
                o.speculate = speculate.clone();
            });
            let what = format!("{model} {sequences} {residency:?} {}", speculate.drafter.name());
            let kinds = kinds(&engine);
            let moes: Vec<(usize, usize)> =
                engine.program.moes.iter().map(|m| (m.n_experts, m.top_k)).collect();
            let histogram = Histogram::new(moes.iter().map(|m| m.0));
            let histogram = Arc::new(Mutex::new(histogram));
            engine.tap(Box::new(Shared(histogram.clone())));
            let options = SchedulerOptions { sequences, queue: 64, pace: Pace::Flowing };
            let scheduler = Scheduler::start(engine, options).unwrap();
            let mut waiting = Vec::new();
            let mut heard = Vec::new();
            for (i, steering) in kinds.iter().enumerate() {
                let (ear, receiver) = Ear::new();
                let mut ids = prompt(2, 40 + 9 * i);
                ids[0] = 100 + i as u32;
                let mut job = job(&ids, 60, SamplerParams::default(), ear);
                job.steering = steering.clone();
                scheduler.submit(job).unwrap();
                match sequences {
                    1 => heard.push(receiver.recv_timeout(WAIT).unwrap()),
                    _ => waiting.push(receiver),
                }
            }
            heard.extend(waiting.into_iter().map(|w| w.recv_timeout(WAIT).unwrap()));
            let stats = scheduler.with_engine(|engine| {
                (engine.stats(), engine.speculation().map_or(0, |(_, counts, _)| counts.rounds))
            });
            let (stats, rounds) = stats.unwrap();
            let counts = histogram.lock().unwrap().counts.clone();
            // The draft block's experts are no layer's: of them nothing is counted.
            let block = usize::from(speculate.drafter == DrafterChoice::Mtp);
            for (counts, (_, top_k)) in counts.iter().zip(&moes).take(moes.len() - block) {
                assert_eq!(counts.iter().sum::<u64>(), stats.rows * *top_k as u64, "{what}");
            }
            assert!(counts[moes.len() - block..].iter().flatten().all(|&n| n == 0), "{what}");
            if residency == ResidencyChoice::Stream {
                assert!(stats.store.guesses.guessed > 0, "{what}: nothing was guessed");
            }
            if speculate.drafter != DrafterChoice::Off {
                assert!(rounds > 0, "{what}: nothing was drafted");
            }
            heard.into_iter().map(|h| (h.tokens, h.outcome)).collect::<Vec<_>>()
        };
        let want = run(1, ResidencyChoice::Resident, SpeculateOptions::default());
        let mut modes = vec![
            (4, ResidencyChoice::Resident, SpeculateOptions::default()),
            (4, ResidencyChoice::Stream, SpeculateOptions::default()),
            (4, ResidencyChoice::Mapped, SpeculateOptions::default()),
            (1, ResidencyChoice::Stream, drafts(DrafterChoice::Ngram)),
        ];
        if model.contains("qwen3.5") {
            modes.push((1, ResidencyChoice::Stream, drafts(DrafterChoice::Mtp)));
        }
        for (sequences, residency, speculate) in modes {
            assert_eq!(run(sequences, residency, speculate), want, "{model} {residency:?}");
        }
    }
}
