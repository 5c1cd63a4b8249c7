//! The one promise: nothing but the model, the tokens, the precision and the KV type decides a bit.

mod common;

use std::sync::atomic::AtomicBool;

use common::*;
use forebay_engine::engine::Opened;
use forebay_engine::{
    Batch, Control, Engine, EngineError, EngineOptions, ResidencyChoice, Sequence,
};

use forebay_cpu::Level;
use forebay_cpu::attention::KvType;

/// Runs `eval same` and gives (combinations, hash of all logits).
fn same(model_name: &str, prompt: usize, n: usize, options: &[&str]) -> (u64, String) {
    let dir = tempfile::tempdir().unwrap();
    let ids = ids_file(dir.path(), "ids.json", &prompt_ids(prompt, n));
    let mut command = forebay();
    command.env_remove("FOREBAY_THREADS").args(["eval", "same", "--json", "--tokens", "2"]);
    command.arg(model(model_name)).arg("--prompt-ids").arg(ids).args(options);
    let out = output(&mut command);
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["ok"], true, "{model_name} {options:?}: {}", report["different"]);
    assert_eq!(report["different"].as_array().unwrap().len(), 0);
    assert_eq!(out.status.code(), Some(0));
    (report["combinations"].as_u64().unwrap(), report["hash"].as_str().unwrap().to_string())
}

/// Answers as clients get them, with every drafter that a model can have: free ones, ones that a stop ends and ones that a grammar
/// holds, greedy and drawn, resident, streamed through few slots, mapped.
#[test]
fn answers_with_drafters() {
    let dflash = model("tiny-qwen3.5-moe-dflash");
    let small = model(QWEN3_MOE);
    let gemma4 = "tiny-gemma4-mlx4";
    let qwen3_5 = "tiny-qwen3.5-moe/qwen3_5_moe-Q4_K_M.gguf";
    // Drafters: none, ngram, mtp, and what is given.
    for (name, options, drafters) in [
        (GPT_OSS, &["--draft-model", small.to_str().unwrap()][..], 3),
        (gemma4, &["--draft-model", small.to_str().unwrap()], 3),
        (qwen3_5, &[], 3),
        (qwen3_5, &["--speculate", "dflash", "--draft-model", dflash.to_str().unwrap()], 1),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let ids = ids_file(dir.path(), "ids.json", &prompt_ids(1, 40));
        let best = Level::best().to_string();
        let mut command = forebay();
        command.args(["eval", "same", "--json", "--answers", "48", "--draft-tokens", "5"]);
        command.args(["--chunk", "16", "--threads", "2", "--simd", &best]);
        command.arg(model(name)).arg("--prompt-ids").arg(ids).args(options);
        let report = json(&mut command);
        assert_eq!(report["ok"], true, "{name} {options:?}: {}", report["different"]);
        assert_eq!(report["answers"], drafters * ANSWERS * PLACES, "{name} {options:?}: {report}");
        let drafts = &report["answer_drafts"];
        assert!(drafts["right"].as_u64() > Some(30), "{name} {options:?}: {drafts}");
        assert!(drafts["wrong"].as_u64() > Some(30), "{name} {options:?}: {drafts}");
        assert!(report["rounds"].as_u64() > Some(0), "{report}");
    }
}

const ANSWERS: u64 = 6;
const PLACES: u64 = 4;
const SLOTS_AND_RESIDENCIES: u64 = 6;
const CHUNKS: u64 = 4;
const THREADS: u64 = 3;

/// All slots, residencies, chunks and threads at every vector width, on a short prompt.
#[test]
fn the_whole_matrix() {
    let levels = Level::available().len() as u64;
    for name in BOTH {
        for precision in ["f32", "q8"] {
            let (combinations, _) = same(name, 0, 5, &["--precision", precision]);
            assert_eq!(combinations, levels * THREADS * CHUNKS * SLOTS_AND_RESIDENCIES);
        }
    }
}

/// A prompt beyond the window of 64 and a few blocks of 32: the widest level with every chunk and
/// place, then the other levels and thread counts against the same hash.
#[test]
fn long_prompts() {
    for name in BOTH {
        for precision in ["f32", "q8"] {
            let run = |options: &[&str]| {
                same(name, 2, 110, &[&["--precision", precision], options].concat())
            };
            let best = Level::best().to_string();
            let (combinations, hash) = run(&["--simd", &best, "--threads", "2"]);
            assert_eq!(combinations, CHUNKS * SLOTS_AND_RESIDENCIES);
            for level in Level::available() {
                let level = level.to_string();
                let narrow = ["--simd", &level, "--residency", "resident", "--chunk", "16"];
                let (combinations, other) = run(&narrow);
                assert_eq!(combinations, THREADS);
                assert_eq!(other, hash, "{name} {precision} {level}");
            }
        }
    }
}

/// Each type of keys and values agrees with itself, and the types do differ.
#[test]
fn types_of_keys_and_values() {
    for name in BOTH {
        let hashes = ["f32", "f16", "q8"].map(|kv| {
            let options = ["--kv", kv, "--threads", "2", "--residency", "resident"];
            let (combinations, hash) = same(name, 1, 36, &options);
            assert_eq!(combinations, CHUNKS * Level::available().len() as u64);
            hash
        });
        assert!(hashes[0] != hashes[1] && hashes[1] != hashes[2] && hashes[0] != hashes[2]);
    }
}

/// Room for three sequences, experts streamed through few slots.
fn engine(name: &str, precision: forebay_program::Precision, sequences: usize) -> Engine {
    let options = EngineOptions {
        residency: ResidencyChoice::Stream,
        slots_total: Some(5),
        threads: Some(2),
        chunk: Some(16),
        context: Some(160),
        precision: Some(precision),
        kv: Some(KvType::F16),
        sequences,
        ..EngineOptions::default()
    };
    let opened = Opened::open(&model(name), options).unwrap();
    Engine::load(opened, &mut |_, _| {}).unwrap()
}

/// Three texts of different lengths: shorter than a block, longer than the window, longer still.
fn texts() -> [Vec<u32>; 3] {
    [(0, 12), (2, 77), (3, 131)]
        .map(|(prompt, n)| prompt_ids(prompt, n).into_iter().map(|id| id as u32).collect())
}

type Bits = Vec<Vec<u32>>;

fn bits(logits: &[f32]) -> Vec<u32> {
    logits.iter().map(|l| l.to_bits()).collect()
}

/// Logits of every position of one text, computed alone in chunks.
fn alone(engine: &mut Engine, text: &[u32], chunk: usize) -> Bits {
    let mut sequence = engine.new_sequence();
    let out = extend(engine, &mut sequence, text, chunk);
    engine.release(&mut sequence);
    out
}

fn extend(engine: &mut Engine, sequence: &mut Sequence, text: &[u32], chunk: usize) -> Bits {
    let mut out = Vec::new();
    for tokens in text.chunks(chunk) {
        let batch = Batch::single(tokens, (0..tokens.len() as u32).collect());
        Control::none(|control| {
            engine.forward(&batch, &mut [&mut *sequence], control, &mut |_, logits| {
                out.push(bits(logits));
                Ok(())
            })
        })
        .unwrap();
    }
    out
}

#[test]
fn sequences_in_one_batch_do_not_see_each_other() {
    for name in BOTH {
        for precision in [forebay_program::Precision::F32, forebay_program::Precision::Q8] {
            let mut engine = engine(name, precision, 3);
            let texts = texts();
            let wanted: Vec<Bits> = texts.iter().map(|t| alone(&mut engine, t, 16)).collect();
            let mut sequences = [0; 3].map(|_| engine.new_sequence());
            let mut got: [Bits; 3] = Default::default();
            // Rows per step and sequence vary: decode beside prefill, sequences that pause or have ended.
            for step in 0.. {
                let mut batch = Batch::default();
                let mut owner = Vec::new();
                for (i, text) in texts.iter().enumerate() {
                    let done = sequences[i].len();
                    let rows = [1, 7, 3, 0, 5][(step + 2 * i) % 5].min(text.len() - done);
                    batch.tokens.extend(&text[done..done + rows]);
                    batch.row_sequence.extend(vec![i as u32; rows]);
                    owner.extend(vec![i; rows]);
                }
                if batch.tokens.is_empty() {
                    if texts.iter().zip(&sequences).all(|(t, s)| t.len() == s.len()) {
                        break;
                    }
                    continue;
                }
                batch.logit_rows = (0..batch.tokens.len() as u32).collect();
                let [a, b, c] = &mut sequences;
                Control::none(|control| {
                    engine.forward(&batch, &mut [a, b, c], control, &mut |row, logits| {
                        got[owner[row]].push(bits(logits));
                        Ok(())
                    })
                })
                .unwrap();
            }
            for (i, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                assert_eq!(got.len(), wanted.len());
                let differs = got.iter().zip(wanted).position(|(g, w)| g != w);
                assert_eq!(differs, None, "{name} {precision:?} sequence {i}: first position");
            }
        }
    }
}

#[test]
fn pages_that_are_used_again_give_the_same_bits() {
    for name in BOTH {
        let mut engine = engine(name, forebay_program::Precision::Q8, 1);
        let [short, middle, long] = texts();
        let wanted = [alone(&mut engine, &short, 16), alone(&mut engine, &middle, 16)];
        for _ in 0..4 {
            // The pool holds one context: were a page lost, the second long text would find none.
            alone(&mut engine, &long, 7);
            assert!(alone(&mut engine, &short, 16) == wanted[0], "{name}");
            assert!(alone(&mut engine, &middle, 5) == wanted[1], "{name}");
        }
    }
}

/// After an error a sequence is as before: going on gives the bits of an undisturbed run.
#[test]
fn a_failed_pass_leaves_no_trace() {
    for name in BOTH {
        let mut engine = engine(name, forebay_program::Precision::Q8, 1);
        let text = &texts()[1];
        let wanted = alone(&mut engine, text, 16);
        let mut sequence = engine.new_sequence();
        let mut got = extend(&mut engine, &mut sequence, &text[..40], 16);
        let batch = Batch::single(&text[50..60], vec![9]);
        for _ in 0..3 {
            let stop = AtomicBool::new(false);
            // Cancelled in the middle of the layers.
            let mut progress = |done: usize, _: usize| {
                if done == 3 {
                    stop.store(true, std::sync::atomic::Ordering::Relaxed);
                }
            };
            let mut control = Control { cancel: &stop, progress: &mut progress };
            let sequences = &mut [&mut sequence];
            let result = engine.forward(&batch, sequences, &mut control, &mut |_, _| Ok(()));
            assert!(matches!(result, Err(EngineError::Cancelled)), "{result:?}");
            let outside = Batch::single(&[1, u32::MAX], vec![1]);
            let result = Control::none(|control| {
                engine.forward(&outside, &mut [&mut sequence], control, &mut |_, _| Ok(()))
            });
            assert!(matches!(result, Err(EngineError::BadToken { id: u32::MAX, .. })));
        }
        assert_eq!(sequence.len(), 40);
        got.extend(extend(&mut engine, &mut sequence, &text[40..], 16));
        assert!(got == wanted, "{name}");
    }
}

#[test]
fn a_full_context_is_refused_and_what_is_there_stays() {
    let mut engine = engine(QWEN3_MOE, forebay_program::Precision::Q8, 1);
    let mut sequence = engine.new_sequence();
    let tokens: Vec<u32> = (0..160).map(|i| 10 + i % 50).collect();
    extend(&mut engine, &mut sequence, &tokens, 16);
    let one_more = Batch::single(&[3], vec![0]);
    let result = Control::none(|control| {
        engine.forward(&one_more, &mut [&mut sequence], control, &mut |_, _| Ok(()))
    });
    assert!(matches!(result, Err(EngineError::ContextExceeded { prompt: 161, context: 160 })));
    assert_eq!(sequence.len(), 160);
}

/// The budget goes down to the smallest and up again while sequences run; resident experts give way to a
/// pool. No bit changes, and a budget that is too small changes nothing.
#[test]
fn budgets_that_change_while_running() {
    for name in [GPT_OSS, QWEN3_MOE, "tiny-gemma4-mlx4", "tiny-qwen3.5-moe/qwen3_5_moe-Q4_K_M.gguf"]
    {
        for residency in [ResidencyChoice::Stream, ResidencyChoice::Resident] {
            let options = EngineOptions {
                residency,
                threads: Some(2),
                chunk: Some(16),
                context: Some(160),
                memory: forebay_engine::MemoryLimit::Bytes(1 << 30),
                ..EngineOptions::default()
            };
            let opened = Opened::open(&model(name), options).unwrap();
            let mut engine = Engine::load(opened, &mut |_, _| {}).unwrap();
            let text = &texts()[1];
            let wanted = alone(&mut engine, text, 16);
            let fixed = {
                let items = engine.plan.ledger.items.iter();
                let fixed = items
                    .filter(|i| !i.what.starts_with("expert") && !i.what.starts_with("kernel"));
                fixed.map(|i| i.bytes).sum::<u64>() + (64 << 20)
            };
            let (mut sequence, mut got) = (engine.new_sequence(), Vec::new());
            for (i, part) in text.chunks(9).enumerate() {
                let more = [1 << 20, 3 << 20, 500_000, 900 << 20][i % 4];
                let slots = engine.set_budget(fixed + more).unwrap();
                assert_eq!(engine.plan.budget, fixed + more);
                let pool = engine.plan.ledger.total() - fixed;
                assert!(slots >= 1 && pool <= more, "{name}: {slots} slots, {pool} of {more}");
                got.extend(extend(&mut engine, &mut sequence, part, 4));
                let (before, plan) = (engine.snapshot().slots, engine.plan.slots);
                let refused = engine.set_budget(fixed).unwrap_err();
                assert!(matches!(refused, EngineError::BudgetTooSmall { .. }), "{refused}");
                assert_eq!((engine.snapshot().slots, engine.plan.slots), (before, plan));
            }
            assert!(got == wanted, "{name} {residency:?}");
        }
    }
}
