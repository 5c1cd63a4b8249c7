//! What is kept of earlier requests saves work and changes no bit, at every offset, for every kind of layer.

mod common;

use std::sync::Arc;

use common::{MODELS, engine, prompt};
use forebay_engine::prefix::Origin;
use forebay_engine::{Control, Engine, Sequence};

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
