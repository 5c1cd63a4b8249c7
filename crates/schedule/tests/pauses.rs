//! Answers that grow into room that is less than all of them may ask for: some pause and go on, and every one is what it is
//! alone, in every bit, whatever the layers of the model, who drafts, and who leaves meanwhile.

mod common;

use std::sync::atomic::Ordering;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use common::{Ear, GEMMA, Heard, MODELS, Rules, engine, job, prompt};
use forebay_engine::{Contexts, DrafterChoice, EngineOptions, SamplerParams, SpeculateOptions};
use forebay_schedule::{Job, Outcome, Pace, Scheduler, SchedulerOptions};

const WAIT: Duration = Duration::from_secs(120);
/// Answers at once, and positions of each.
const N: usize = 7;
const CONTEXT: usize = 336;

fn start(model: &str, sequences: usize, adjust: impl FnOnce(&mut EngineOptions)) -> Scheduler {
    let engine = engine(model, |o| {
        o.context = Some(CONTEXT);
        o.sequences = sequences;
        o.snapshots = 4;
        adjust(o);
    });
    Scheduler::start(engine, SchedulerOptions { sequences, queue: 64, pace: Pace::Flowing })
        .unwrap()
}

/// Answers without a limit, or with one that is not reached soon, of all kinds: what decides the next token has to outlast a pause.
fn jobs() -> (Vec<Job>, Vec<Receiver<Heard>>) {
    (0..N)
        .map(|i| {
            let (mut ear, heard) = Ear::new();
            if i == 2 {
                ear.stop_after = 250;
            }
            let sampling = SamplerParams {
                temperature: 0.9,
                seed: i as u64,
                repeat_penalty: if i % 2 == 0 { 1.1 } else { 1.0 },
                repeat_last: 200,
                frequency_penalty: if i == 4 { 0.2 } else { 0.0 },
                ..SamplerParams::default()
            };
            let limit = if i == 3 { 280 } else { usize::MAX };
            let mut job = job(&prompt(i % 3, 12 + 7 * i), limit, sampling, ear);
            job.ends = [].into();
            job.checkpoints = vec![12];
            match i {
                1 => job.constraint = Some(Box::new(Rules::default())),
                5 => job.bias = [(7, 2.0), (300, -4.0)].into(),
                _ => {}
            }
            (job, heard)
        })
        .unzip()
}

/// Room for so many contexts, in passes of so many rows. Of a layer with a window an answer needs the pages of the window and of
/// a pass, which is most of its pages unless a pass is long.
fn rooms(model: &str) -> [(usize, usize); 2] {
    match model {
        "tiny-gpt-oss" | GEMMA => [(1, CONTEXT), (2, 180)],
        _ => [(1, 64), (2, 7)],
    }
}

/// They run at once all the same: as they grow the youngest pause, each at most once, and what they say is what they say alone.
#[test]
fn who_may_ask_for_a_whole_context_begins_before_there_is_room_for_it() {
    for model in MODELS.into_iter().chain([GEMMA]) {
        let alone = start(model, 1, |_| {});
        let (jobs, heard) = jobs();
        jobs.into_iter().for_each(|job| alone.submit(job).unwrap());
        let want: Vec<Heard> = heard.iter().map(|h| h.recv_timeout(WAIT).unwrap()).collect();
        assert_eq!(alone.load().pauses, 0);
        let ngram =
            SpeculateOptions { drafter: DrafterChoice::Ngram, tokens: Some(5), always: true };
        for ((contexts, chunk), speculate) in
            rooms(model).into_iter().zip([SpeculateOptions::default(), ngram])
        {
            let s = start(model, N, |o| {
                o.contexts = Contexts::Exactly(contexts);
                o.chunk = Some(chunk);
                o.speculate = speculate;
            });
            let (jobs, heard) = self::jobs();
            s.submit_all(jobs).unwrap();
            for (i, (heard, want)) in heard.iter().zip(&want).enumerate() {
                let got = heard.recv_timeout(WAIT).unwrap();
                assert_eq!(got.outcome, want.outcome, "{model} {i}");
                assert!(got.tokens == want.tokens, "{model} {i}");
                assert_eq!(got.usage.generated, want.usage.generated);
            }
            let load = s.load();
            assert_eq!((load.running, load.paused, load.ended[3]), (0, 0, 0), "{model}");
            assert!((1..N as u64).contains(&load.pauses), "{model}: {} pauses", load.pauses);
            let tokens = want.iter().map(|w| w.tokens.len() as u64).sum::<u64>();
            assert!(load.steps < tokens, "{model}: {} steps for {tokens} tokens", load.steps);
        }
    }
}

/// Who leaves while others have taken its room is let go, and the rest go on.
#[test]
fn a_paused_answer_may_leave() {
    let s = start(MODELS[1], 4, |o| o.contexts = Contexts::Exactly(1));
    let (ears, heard): (Vec<_>, Vec<_>) = (0..4).map(|_| Ear::new()).unzip();
    let gone: Vec<_> = ears.iter().map(|ear| ear.gone.clone()).collect();
    for ear in ears {
        let mut job = job(&prompt(0, 12), usize::MAX, SamplerParams::default(), ear);
        job.ends = [].into();
        s.submit(job).unwrap();
    }
    let clock = Instant::now();
    while s.load().pauses == 0 && clock.elapsed() < WAIT {
        std::thread::yield_now();
    }
    // The youngest of those that began.
    gone[1..].iter().for_each(|gone| gone.store(true, Ordering::SeqCst));
    let first = heard[0].recv_timeout(WAIT).unwrap();
    assert_eq!((first.outcome, first.tokens.len()), (Outcome::Length, CONTEXT - 12));
    for heard in &heard[1..] {
        let got = heard.recv_timeout(WAIT).unwrap();
        assert!(matches!(got.outcome, Outcome::Gone | Outcome::Length));
        assert!(got.tokens[..] == first.tokens[..got.tokens.len()]);
    }
    assert_eq!((s.load().running, s.load().paused), (0, 0));
}

/// The end of the server is heard by those that run and those that pause, and by nobody as a fault of the engine.
#[test]
fn the_end_is_heard_by_whoever_pauses() {
    for model in MODELS.into_iter().chain([GEMMA]) {
        let (contexts, chunk) = rooms(model)[0];
        let s = start(model, N, |o| {
            o.contexts = Contexts::Exactly(contexts);
            o.chunk = Some(chunk);
        });
        let (jobs, heard) = jobs();
        s.submit_all(jobs).unwrap();
        let clock = Instant::now();
        while s.load().paused == 0 && clock.elapsed() < WAIT {
            std::thread::yield_now();
        }
        s.abort();
        let mut failed = 0;
        for heard in &heard {
            match heard.recv_timeout(WAIT).unwrap().outcome {
                Outcome::Failed(why) => {
                    assert_eq!(why, "the server is shutting down", "{model}");
                    failed += 1;
                }
                other => assert!(matches!(other, Outcome::Length | Outcome::Stop), "{model}"),
            }
        }
        assert!(failed > 0, "{model}");
    }
}
