//! What fails for one fails for nobody else.

mod common;

use std::sync::mpsc::Receiver;
use std::time::Duration;

use common::{Ear, Heard, MODELS, job, prompt, steered};
use forebay_engine::SamplerParams;
use forebay_schedule::{Job, Outcome, Pace, Scheduler, SchedulerOptions};

const WAIT: Duration = Duration::from_secs(120);

/// A request whose steering overflows makes no number of its rows fail the passes that it shares: it is told so, again and
/// again, and the others hear what they hear alone.
#[test]
fn a_steering_that_overflows_fails_alone() {
    for model in MODELS {
        let dir = tempfile::tempdir().unwrap();
        let engine = steered(model, dir.path(), |o| {
            o.sequences = 5;
            o.chunk = Some(48);
        });
        let strong = engine.steer_vectors().choose([("a", Some(3e38))]).unwrap();
        let s = Scheduler::start(
            engine,
            SchedulerOptions { sequences: 5, queue: 64, pace: Pace::Flowing },
        )
        .unwrap();
        let ask = |i: usize, bad: bool| -> (Job, Receiver<Heard>) {
            let (ear, heard) = Ear::new();
            let sampling =
                SamplerParams { temperature: 0.9, seed: i as u64, ..SamplerParams::default() };
            let mut job = job(&prompt(i % 3, 12 + 30 * (i % 3)), 12 + i, sampling, ear);
            job.ends = [].into();
            job.steering = if bad { strong.clone() } else { None };
            (job, heard)
        };
        let hear = |heard: Receiver<Heard>| heard.recv_timeout(WAIT).unwrap();
        let want: Vec<Heard> = (0..9)
            .map(|i| {
                let (job, heard) = ask(i, false);
                s.submit(job).unwrap();
                hear(heard)
            })
            .collect();
        s.with_engine(|engine| engine.forget()).unwrap();
        // Every second is a bad one, so that passes begin with one, end with one, and have several.
        let (jobs, all): (Vec<_>, Vec<_>) = (0..9)
            .flat_map(|i| [(i, false), (i, true)])
            .map(|(i, bad)| {
                let (job, heard) = ask(i, bad);
                (job, (i, bad, heard))
            })
            .unzip();
        s.submit_all(jobs).unwrap();
        for (i, bad, heard) in all {
            let got = hear(heard);
            if bad {
                assert!(matches!(got.outcome, Outcome::Failed(_)), "{model} {i}: {got:?}");
            } else {
                assert_eq!(got.outcome, want[i].outcome, "{model} {i}");
                assert!(got.tokens == want[i].tokens, "{model} {i}");
            }
        }
        let load = s.load();
        assert_eq!((load.running, load.waiting, load.ended[3]), (0, 0, 9), "{model}");
    }
}
