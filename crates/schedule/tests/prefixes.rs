//! What is kept of earlier requests saves work and changes no bit, at every offset, for every kind of layer.

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Ear, MODELS, engine, job, prompt};
use forebay_engine::prefix::Origin;
use forebay_engine::{Control, Engine, SamplerParams, Sequence};
use forebay_schedule::{Pace, Scheduler, SchedulerOptions};

/// Logits after `tokens`, of which `sequence` has the beginning.
fn logits(engine: &mut Engine, sequence: &mut Sequence, tokens: &[u32]) -> Vec<u32> {
    let rest = &tokens[sequence.len()..];
    let logits = Control::none(|control| engine.prefill(sequence, rest, control)).unwrap();
    logits.iter().map(|l| l.to_bits()).collect()
}

fn cold(engine: &mut Engine, tokens: &[u32]) -> Vec<u32> {
    let mut sequence = engine.new_sequence();
    let bits = logits(engine, &mut sequence, tokens);
    engine.release(&mut sequence);
    bits
}

/// The prompt, with something else from `at` on.
fn parted(tokens: &[u32], at: usize) -> Vec<u32> {
    let other = tokens[at..].iter().map(|t| (t + 7) % 4000 + 5).take(6);
    tokens[..at].iter().copied().chain(other).chain([11, 12]).collect()
}

#[test]
fn every_offset_has_the_bits_of_a_cold_run() {
    for model in MODELS {
        let mut engine = engine(model, |o| {
            o.snapshots = 8;
            o.sequences = 2;
        });
        let block = engine.block();
        let first: Arc<[u32]> = prompt(2, 170).into();
        // Kept wherever a pass ends at a block.
        let mut sequence = engine.new_sequence();
        for end in (block..=first.len()).step_by(block) {
            logits(&mut engine, &mut sequence, &first[..end]);
            assert!(engine.keep(&sequence, &first, end, Origin::Prompt), "{model}: {end}");
        }
        for at in 0..=first.len() {
            let tokens = parted(&first, at);
            let want = cold(&mut engine, &tokens);
            let mut warm = engine.begin(&tokens);
            // At least what both have in common, in whole blocks.
            assert!(warm.len() >= at / block * block, "{model}: {} of {at}", warm.len());
            assert!(warm.len() < tokens.len());
            let got = logits(&mut engine, &mut warm, &tokens);
            engine.release(&mut warm);
            assert!(got == want, "{model}: other bits when parting at {at}");
        }
        engine.release(&mut sequence);
    }
}

/// Where no layer is recurrent, one long prompt serves all shorter beginnings that its windows still cover.
#[test]
fn attention_begins_anywhere() {
    let mut engine = engine(MODELS[1], |o| o.sequences = 2);
    let first: Arc<[u32]> = prompt(2, 170).into();
    let mut sequence = engine.new_sequence();
    logits(&mut engine, &mut sequence, &first);
    assert!(engine.keep(&sequence, &first, first.len(), Origin::Prompt));
    engine.release(&mut sequence);
    for at in [31, 32, 33, 100, 169] {
        let mut warm = engine.begin(&parted(&first, at));
        assert_eq!(warm.len(), at / 32 * 32);
        engine.release(&mut warm);
    }
    // The very same prompt: the last token is computed.
    let mut warm = engine.begin(&first[..160]);
    assert_eq!(warm.len(), 128);
    engine.release(&mut warm);
}

/// A template that drops the reasoning of earlier turns writes other tokens from the end of the prompt on, whether it
/// opens reasoning or not: the next turn goes on from there, and answers as if nothing was kept.
#[test]
fn history_without_its_reasoning_goes_on_from_the_prompt() {
    let submit = |s: &Scheduler, ids: &[u32], tokens: usize, checkpoint: usize| {
        let (ear, heard) = Ear::new();
        let mut job = job(ids, tokens, SamplerParams::default(), ear);
        job.ends = [].into();
        job.checkpoints = vec![checkpoint];
        s.submit(job).unwrap();
        heard.recv_timeout(Duration::from_secs(120)).unwrap()
    };
    // What opens an answer: with thinking, and without.
    let (on, off): (&[u32], &[u32]) = (&[40, 41, 42], &[40, 41, 43, 44, 45]);
    let header: &[u32] = &[40, 41];
    for model in MODELS {
        let engine = || engine(model, |o| o.snapshots = 4);
        let block = engine().block();
        for (first, second) in [(on, on), (off, off), (on, off), (off, on)] {
            let options = SchedulerOptions { sequences: 1, queue: 4, pace: Pace::Flowing };
            let s = Scheduler::start(engine(), options).unwrap();
            let history = prompt(2, 196);
            // 50 of reasoning, 20 of the answer.
            let turn = [&history[..], first].concat();
            let heard = submit(&s, &turn, 70, history.len());
            let answer: Vec<u32> = heard.tokens[50..].iter().map(|t| t.id).collect();
            assert_eq!(answer.len(), 20);
            // The answer without its reasoning, 10 more, and the opener.
            let next = [&history[..], header, &answer, &prompt(1, 10), second].concat();
            let checkpoint = next.len() - second.len();
            let heard = submit(&s, &next, 12, checkpoint);
            let kept = history.len() / block * block;
            assert!(heard.usage.cached >= kept, "{model}: {} of {kept}", heard.usage.cached);
            let computed = next.len() - heard.usage.cached;
            let beside = header.len() + second.len() + (history.len() - kept);
            assert!(computed <= 20 + 10 + beside, "{model}: {computed}");
            s.with_engine(|engine| engine.forget()).unwrap();
            let cold = submit(&s, &next, 12, checkpoint);
            assert_eq!(cold.usage.cached, 0);
            // Logarithms of probabilities included, bit for bit.
            assert_eq!(heard.tokens, cold.tokens, "{model}");
        }
    }
}

/// Kept beginnings never cost a running sequence its pages.
#[test]
fn what_is_kept_makes_room() {
    for model in MODELS {
        let mut engine = engine(model, |o| {
            o.context = Some(256);
            o.snapshots = 1;
        });
        let mut want = Vec::new();
        for round in 0..3 {
            for n in 0..6 {
                let tokens: Arc<[u32]> =
                    prompt(2, 192).iter().map(|t| (t + 3 * n) % 4000).collect();
                let mut sequence = engine.begin(&tokens);
                let bits = logits(&mut engine, &mut sequence, &tokens);
                engine.keep(&sequence, &tokens, tokens.len(), Origin::Prompt);
                engine.release(&mut sequence);
                if round == 0 {
                    want.push(bits);
                } else {
                    assert!(bits == want[n as usize], "{model}");
                }
            }
        }
    }
}
