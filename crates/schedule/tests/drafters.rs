//! A drafter changes nothing that a listener hears: alone, among others, with rules, stops and shared beginnings.

mod common;

use std::sync::mpsc::Receiver;
use std::time::Duration;

use common::{Ear, Heard, MODELS, engine, job, prompt};
use forebay_engine::{DrafterChoice, SamplerParams, SpeculateOptions};
use forebay_schedule::{Constraint, Job, Outcome, Pace, Scheduler, SchedulerOptions};

const WAIT: Duration = Duration::from_secs(120);

fn scheduler(model: &str, speculate: SpeculateOptions) -> Scheduler {
    let engine = engine(model, |o| {
        o.sequences = 3;
        o.snapshots = 4;
        o.speculate = speculate;
    });
    Scheduler::start(engine, SchedulerOptions { sequences: 3, queue: 64, pace: Pace::Flowing })
        .unwrap()
}

/// Rules with a memory: which tokens may come depends on all before, and after some tokens nothing may.
#[derive(Clone, Default)]
struct Rules {
    seen: Vec<u32>,
}

impl Constraint for Rules {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let sum: u32 = self.seen.iter().sum();
        for (id, logit) in logits.iter_mut().enumerate() {
            if (id as u32 + sum).is_multiple_of(3) {
                *logit = f32::NEG_INFINITY;
            }
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<bool, String> {
        let sum: u32 = self.seen.iter().sum();
        if (token + sum).is_multiple_of(3) {
            return Err(format!("token {token} was not allowed"));
        }
        self.seen.push(token);
        Ok(self.seen.len() >= 57)
    }
}

/// Which prompt and how much of it, sampling, whether rules hold, when the listener says stop, ids that end it.
type Kind = (usize, usize, SamplerParams, bool, usize, &'static [u32]);

/// Jobs of all kinds, each with its listener's end.
fn jobs() -> Vec<(Job, Receiver<Heard>)> {
    let drawn = SamplerParams { temperature: 0.8, top_p: 0.95, seed: 3, ..Default::default() };
    let kinds: [Kind; 6] = [
        (1, 40, SamplerParams::default(), false, usize::MAX, &[]),
        (2, 150, drawn.clone(), false, usize::MAX, &[]),
        (2, 150, SamplerParams::default(), true, usize::MAX, &[]),
        (0, 12, drawn.clone(), true, usize::MAX, &[0, 2]),
        (1, 40, SamplerParams::default(), false, 33, &[]),
        (2, 200, drawn, false, 34, &[]),
    ];
    let make = kinds.into_iter().map(|(index, n, sampling, rules, stop_after, ends)| {
        let (mut ear, heard) = Ear::new();
        ear.stop_after = stop_after;
        let mut job = job(&prompt(index, n), 130, sampling, ear);
        job.ends = ends.into();
        job.checkpoints = vec![n / 2, n - 1];
        job.bias = [(5, 1.5), (300, -2.0)].into();
        if rules {
            job.constraint = Some(Box::new(Rules::default()));
        }
        (job, heard)
    });
    make.collect()
}

fn comparable(heard: &Heard) -> (Vec<forebay_schedule::Token>, Outcome, usize) {
    (heard.tokens.clone(), heard.outcome.clone(), heard.usage.generated)
}

#[test]
fn listeners_hear_the_same() {
    for model in MODELS {
        let mut drafters = vec![DrafterChoice::Ngram];
        if model.contains("qwen3.5") {
            drafters.push(DrafterChoice::Mtp);
        }
        let one_by_one = |s: &Scheduler| -> Vec<_> {
            let each = jobs().into_iter().map(|(job, heard)| {
                s.submit(job).unwrap();
                comparable(&heard.recv_timeout(WAIT).unwrap())
            });
            each.collect()
        };
        let want = one_by_one(&scheduler(model, SpeculateOptions::default()));
        assert!(want.iter().any(|(tokens, ..)| tokens.len() == 57), "rules ended an answer");
        assert!(want.iter().any(|(tokens, ..)| tokens.len() == 33), "a listener ended one");
        for drafter in drafters {
            let speculate =
                SpeculateOptions { drafter: drafter.clone(), tokens: Some(5), always: true };
            let s = scheduler(model, speculate.clone());
            // Twice: the second time from beginnings that were kept.
            for _ in 0..2 {
                let found = one_by_one(&s);
                for (found, want) in found.iter().zip(&want) {
                    assert_eq!(found, want, "{model} {}", drafter.name());
                }
            }
            let rounds = s.with_engine(|engine| engine.speculation().unwrap().1.rounds).unwrap();
            assert!(rounds > 0, "{model} {}", drafter.name());
            // Among others: then drafts rest, and come back when one is left.
            let all: Vec<_> = jobs()
                .into_iter()
                .map(|(job, heard)| {
                    s.submit(job).unwrap();
                    heard
                })
                .collect();
            for (heard, want) in all.into_iter().zip(&want) {
                let found = heard.recv_timeout(WAIT).unwrap();
                assert_eq!(&comparable(&found), want, "{model} {} together", drafter.name());
            }
        }
    }
}
