//! Answers given among others are those given alone, in every bit; queues are bounded; who leaves is let go.

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use common::{Ear, Heard, MODELS, engine, job, prompt};
use forebay_engine::{EngineOptions, SamplerParams};
use forebay_schedule::{
    Flow, Job, Listener, Outcome, Pace, Refusal, Scheduler, SchedulerOptions, Token, Usage,
};

const WAIT: Duration = Duration::from_secs(120);

fn scheduler(model: &str, sequences: usize, adjust: impl FnOnce(&mut EngineOptions)) -> Scheduler {
    let engine = engine(model, |o| {
        o.sequences = sequences;
        o.snapshots = 4;
        adjust(o);
    });
    Scheduler::start(engine, SchedulerOptions { sequences, queue: 64, pace: Pace::Flowing })
        .unwrap()
}

/// Requests of all kinds: (prompt, tokens, sampling).
fn requests() -> Vec<(Vec<u32>, usize, SamplerParams)> {
    let sampled = |seed| SamplerParams {
        temperature: 1.0,
        top_p: 0.95,
        repeat_penalty: 1.1,
        seed,
        ..SamplerParams::default()
    };
    let mut all = Vec::new();
    for i in 0..4u64 {
        let long = prompt(2, 150 + 9 * i as usize);
        all.push((prompt(0, 5 + i as usize), 20, SamplerParams::default()));
        all.push((prompt(1, 40), 12 + i as usize, sampled(i)));
        all.push((long.clone(), 8, sampled(9)));
        all.push((long, 1, SamplerParams::default()));
    }
    all
}

fn submit(
    s: &Scheduler,
    (ids, tokens, sampling): &(Vec<u32>, usize, SamplerParams),
) -> Receiver<Heard> {
    let (ear, heard) = Ear::new();
    s.submit(job(ids, *tokens, sampling.clone(), ear)).unwrap();
    heard
}

#[test]
fn together_as_alone() {
    for model in MODELS {
        let requests = requests();
        // Alone: one after the other, nothing kept.
        let alone = scheduler(model, 1, |_| {});
        let want: Vec<Heard> = requests
            .iter()
            .map(|request| {
                alone.with_engine(|engine| engine.forget()).unwrap();
                let heard = submit(&alone, request).recv_timeout(WAIT).unwrap();
                assert_eq!(heard.usage.cached, 0);
                heard
            })
            .collect();
        // Together, with chunks, places and budgets of many kinds.
        for (sequences, chunk, slots) in [(3, 16, Some(20)), (16, 64, None), (5, 4, Some(1))] {
            let together = scheduler(model, sequences, |o| {
                o.chunk = Some(chunk);
                o.slots_total = slots;
            });
            let heard: Vec<_> = requests.iter().map(|request| submit(&together, request)).collect();
            for ((receiver, want), request) in heard.iter().zip(&want).zip(&requests) {
                let got = receiver.recv_timeout(WAIT).unwrap();
                assert_eq!(got.outcome, want.outcome, "{model}");
                assert_eq!(got.tokens, want.tokens, "{model}: {request:?}");
            }
            let load = together.load();
            assert_eq!((load.running, load.waiting, load.ended[3]), (0, 0, 0));
        }
    }
}

/// With room for one or two whole contexts, many short answers run at once, long ones wait for their room, and
/// nobody lacks a page in the middle.
#[test]
fn short_answers_share_the_room_of_long_ones() {
    for model in MODELS {
        let short: Vec<_> =
            (0..8).map(|i| (prompt(0, 5 + i), 20, SamplerParams::default())).collect();
        // A whole context, as far as anybody knows: it is ended by its listener.
        let long = (prompt(1, 40), usize::MAX, SamplerParams::default());
        let alone = scheduler(model, 1, |_| {});
        let want: Vec<Heard> = short
            .iter()
            .map(|request| submit(&alone, request).recv_timeout(WAIT).unwrap())
            .collect();
        for contexts in [1, 2] {
            let s =
                scheduler(model, 8, |o| o.contexts = forebay_engine::Contexts::Exactly(contexts));
            let room = s.with_engine(|engine| engine.pages_for_all()).unwrap();
            let whole = s.with_engine(|engine| engine.pages_for(512)).unwrap();
            assert!(room.iter().zip(&whole).all(|(room, whole)| *room == whole * contexts));
            // Eight answers of one page each at once: as many steps as one takes, or a few more.
            let (jobs, heard): (Vec<_>, Vec<_>) = short
                .iter()
                .map(|(ids, tokens, sampling)| {
                    let (ear, heard) = Ear::new();
                    (job(ids, *tokens, sampling.clone(), ear), heard)
                })
                .unzip();
            s.submit_all(jobs).unwrap();
            for (heard, want) in heard.iter().zip(&want) {
                assert_eq!(heard.recv_timeout(WAIT).unwrap().tokens, want.tokens, "{model}");
            }
            let steps = s.load().steps;
            assert!(steps < 50, "{model}, {contexts}: {steps} steps");
            // As many long ones as there are contexts, more that wait, and short ones behind them.
            let long: Vec<_> = (0..contexts + 2)
                .map(|_| {
                    let (mut ear, heard) = Ear::new();
                    ear.stop_after = 30;
                    s.submit(job(&long.0, long.1, long.2.clone(), ear)).unwrap();
                    heard
                })
                .collect();
            let heard: Vec<_> = short.iter().map(|request| submit(&s, request)).collect();
            let first = long[0].recv_timeout(WAIT).unwrap();
            assert!(matches!(first.outcome, Outcome::Stop), "{model}: {:?}", first.outcome);
            for other in &long[1..] {
                assert_eq!(other.recv_timeout(WAIT).unwrap().tokens, first.tokens, "{model}");
            }
            for (heard, want) in heard.iter().zip(&want) {
                assert_eq!(heard.recv_timeout(WAIT).unwrap().tokens, want.tokens, "{model}");
            }
            assert_eq!(s.load().ended[3], 0);
        }
    }
}

/// The scheduler and the plain loop of the engine agree.
#[test]
fn alone_as_the_engine_answers() {
    use forebay_engine::generate::Next;
    use forebay_engine::{Control, GenerateParams, Sampler};
    let (ids, tokens, sampling) = requests().swap_remove(5);
    let s = scheduler(MODELS[1], 1, |_| {});
    let got = submit(&s, &(ids.clone(), tokens, sampling.clone())).recv_timeout(WAIT).unwrap();
    let want = s
        .with_engine(move |engine| {
            let mut sequence = engine.new_sequence();
            let params =
                GenerateParams { max_tokens: tokens, ignore_eos: false, eos_ids: vec![0, 2] };
            let sampler = &mut Sampler::new(sampling);
            let mut out = Vec::new();
            Control::none(|control| {
                engine.generate(&mut sequence, &ids, &params, sampler, control, &mut |_, event| {
                    out.push((event.token, event.logprob.to_bits()));
                    Next::Continue
                })
            })
            .unwrap();
            engine.release(&mut sequence);
            out
        })
        .unwrap();
    let got: Vec<_> = got.tokens.iter().map(|t| (t.id, t.logprob.to_bits())).collect();
    assert_eq!(got, want);
}

#[test]
fn limits_and_ends() {
    let s = scheduler(MODELS[0], 2, |o| o.context = Some(64));
    let greedy = SamplerParams::default;
    let run = |n: usize, tokens: usize| {
        let (ear, heard) = Ear::new();
        let mut job = job(&prompt(2, n), tokens, greedy(), ear);
        job.ends = [].into();
        s.submit(job).unwrap();
        heard.recv_timeout(WAIT).unwrap()
    };
    // 63 tokens of 64 leave room for one, 60 for four, whatever was asked for.
    assert_eq!((run(63, 10).tokens.len(), run(63, 10).outcome), (1, Outcome::Length));
    assert_eq!((run(60, 10).tokens.len(), run(60, 2).tokens.len()), (4, 2));
    assert_eq!((run(20, 0).tokens.len(), run(20, 0).outcome), (0, Outcome::Length));
    for n in [64, 65, 0] {
        assert!(matches!(run(n, 5).outcome, Outcome::Failed(_)), "{n}");
    }
    let (mut ear, heard) = Ear::new();
    ear.stop_after = 3;
    s.submit(job(&prompt(0, 12), 50, greedy(), ear)).unwrap();
    let heard = heard.recv_timeout(WAIT).unwrap();
    assert_eq!((heard.tokens.len(), heard.outcome), (3, Outcome::Stop));
}

#[test]
fn who_leaves_is_let_go() {
    let s = scheduler(MODELS[0], 1, |_| {});
    let greedy = SamplerParams::default;
    let long = |ear| {
        let mut job = job(&prompt(0, 12), 400, greedy(), ear);
        job.ends = [].into();
        job
    };
    let (a, a_heard) = Ear::new();
    let (a_gone, a_count) = (a.gone.clone(), a.heard.clone());
    let (b, b_heard) = Ear::new();
    let b_gone = b.gone.clone();
    let (c, c_heard) = Ear::new();
    for ear in [a, b, c] {
        s.submit(long(ear)).unwrap();
    }
    while a_count.load(Ordering::SeqCst) < 3 {
        std::thread::yield_now();
    }
    // Leaving the queue stops nobody else.
    b_gone.store(true, Ordering::SeqCst);
    let b = b_heard.recv_timeout(WAIT).unwrap();
    assert_eq!((b.outcome, b.tokens.len()), (Outcome::Gone, 0));
    let before = a_count.load(Ordering::SeqCst);
    while a_count.load(Ordering::SeqCst) < before + 3 {
        std::thread::yield_now();
    }
    a_gone.store(true, Ordering::SeqCst);
    let at = a_count.load(Ordering::SeqCst);
    let a = a_heard.recv_timeout(WAIT).unwrap();
    assert_eq!(a.outcome, Outcome::Gone);
    // The step that ran, and perhaps the one that had begun.
    assert!(a.tokens.len() <= at + 2, "{} after {at}", a.tokens.len());
    let c = c_heard.recv_timeout(WAIT).unwrap();
    assert_eq!((c.outcome, c.tokens.len()), (Outcome::Length, 400));
    assert_eq!(s.load().running, 0);
    s.with_engine(|engine| {
        engine.forget();
        assert_eq!(engine.kept(), 0);
    })
    .unwrap();
}

/// Goes after it was asked so many times whether it is gone: once before each step.
struct Leaves {
    left: AtomicUsize,
    send: std::sync::mpsc::Sender<(usize, Outcome)>,
    tokens: usize,
}

impl Listener for Leaves {
    fn token(&mut self, _: &Token) -> Flow {
        self.tokens += 1;
        Flow::Continue
    }

    fn done(self: Box<Self>, outcome: Outcome, _: Usage) {
        let _ = self.send.send((self.tokens, outcome));
    }

    fn is_gone(&self) -> bool {
        let left = self.left.load(Ordering::SeqCst);
        self.left.store(left.saturating_sub(1), Ordering::SeqCst);
        left == 0
    }
}

/// Who leaves while its prompt is worked through is let go within a chunk, and the next begins.
#[test]
fn who_leaves_in_its_prompt_is_let_go() {
    for model in MODELS {
        let s = scheduler(model, 1, |o| o.chunk = Some(16));
        let want = submit(&s, &(prompt(0, 12), 8, SamplerParams::default()));
        let want = want.recv_timeout(WAIT).unwrap();
        s.with_engine(|engine| engine.forget()).unwrap();
        let (send, heard) = std::sync::mpsc::channel();
        let (ear, _) = Ear::new();
        let leaves = Leaves { left: AtomicUsize::new(6), send, tokens: 0 };
        let long = Job {
            listener: Box::new(leaves),
            ..job(&prompt(3, 480), 20, SamplerParams::default(), ear)
        };
        let before = s.load().steps;
        s.submit(long).unwrap();
        let next = submit(&s, &(prompt(0, 12), 8, SamplerParams::default()));
        assert_eq!(heard.recv_timeout(WAIT).unwrap(), (0, Outcome::Gone), "{model}");
        assert_eq!(next.recv_timeout(WAIT).unwrap().tokens, want.tokens, "{model}");
        // Of 30 steps of the long prompt at most as many as it was asked for, and those of the short answer.
        assert!(s.load().steps - before <= 6 + 9, "{model}");
        s.with_engine(|engine| {
            engine.forget();
            assert_eq!(engine.kept(), 0);
        })
        .unwrap();
    }
}

#[test]
fn the_queue_is_bounded_and_closes() {
    let engine = engine(MODELS[0], |o| o.sequences = 1);
    let s =
        Scheduler::start(engine, SchedulerOptions { sequences: 1, queue: 2, pace: Pace::Flowing })
            .unwrap();
    let mut heard = Vec::new();
    let refused = loop {
        let (ear, receiver) = Ear::new();
        let mut job = job(&prompt(0, 12), 200, SamplerParams::default(), ear);
        job.ends = [].into();
        match s.submit(job) {
            Ok(()) => heard.push(receiver),
            Err(refusal) => break refusal,
        }
        assert!(heard.len() < 10, "a bounded queue refuses some time");
    };
    assert_eq!(refused, Refusal::QueueFull);
    let (send, ended) = std::sync::mpsc::channel();
    s.at_end(move |engine| send.send(engine.stats().rows).unwrap());
    s.close();
    let (ear, _) = Ear::new();
    assert_eq!(s.submit(job(&[1], 1, SamplerParams::default(), ear)), Err(Refusal::Closed));
    // What was taken is finished.
    for receiver in heard {
        assert_eq!(receiver.recv_timeout(WAIT).unwrap().outcome, Outcome::Length);
    }
    s.join();
    assert!(ended.recv().unwrap() > 0);
    assert!(s.with_engine(|_| ()).is_err());
}

#[test]
fn abort_ends_everything_at_once() {
    let s = scheduler(MODELS[0], 2, |_| {});
    let mut heard = Vec::new();
    for _ in 0..5 {
        let (ear, receiver) = Ear::new();
        let mut job = job(&prompt(0, 12), 450, SamplerParams::default(), ear);
        job.ends = [].into();
        s.submit(job).unwrap();
        heard.push(receiver);
    }
    let began = Instant::now();
    s.abort();
    s.join();
    for receiver in heard {
        let heard = receiver.recv_timeout(WAIT).unwrap();
        assert!(matches!(heard.outcome, Outcome::Failed(_)), "{:?}", heard.outcome);
    }
    assert!(began.elapsed() < WAIT);
}
