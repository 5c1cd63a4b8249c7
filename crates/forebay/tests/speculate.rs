//! Drafting changes when tokens come, and nothing else.

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use common::*;
use forebay_engine::engine::Opened;
use forebay_engine::generate::Next;
use forebay_engine::prefix::Origin;
use forebay_engine::speculate::Script;
use forebay_engine::{
    Control, DrafterChoice, Engine, EngineError, EngineOptions, Finish, GenerateParams, Generated,
    ResidencyChoice, Sampler, SamplerParams, SpeculateOptions,
};

const QWEN3_5: &str = "tiny-qwen3.5-moe/qwen3_5_moe-Q4_K_M.gguf";
const GEMMA4: &str = "tiny-gemma4-mlx4";
const FAMILIES: [&str; 4] = [GPT_OSS, QWEN3_MOE, GEMMA4, QWEN3_5];

fn off() -> SpeculateOptions {
    SpeculateOptions::default()
}

fn always(drafter: DrafterChoice, tokens: usize) -> SpeculateOptions {
    SpeculateOptions { drafter, tokens: Some(tokens), always: true }
}

/// The right tokens, three of ten made wrong.
fn scripted(tokens: &[u32]) -> DrafterChoice {
    let script = Script { wrong: 0.3, ..Script::default() };
    script.tokens.set(tokens.to_vec()).unwrap();
    DrafterChoice::Scripted(Arc::new(script))
}

fn load(name: &str, streamed: bool, speculate: SpeculateOptions) -> Engine {
    load_with(name, streamed, speculate, |_| {})
}

fn load_with(
    name: &str,
    streamed: bool,
    speculate: SpeculateOptions,
    adjust: impl FnOnce(&mut EngineOptions),
) -> Engine {
    let mut options = EngineOptions {
        residency: if streamed { ResidencyChoice::Stream } else { ResidencyChoice::Resident },
        slots_total: streamed.then_some(9),
        threads: Some(2),
        chunk: Some(32),
        context: Some(640),
        speculate,
        ..EngineOptions::default()
    };
    adjust(&mut options);
    Engine::load(Opened::open(&model(name), options).unwrap(), &mut |_, _| {}).unwrap()
}

fn prompt(index: usize, n: usize) -> Vec<u32> {
    prompt_ids(index, n).into_iter().map(|id| id as u32).collect()
}

fn drawn() -> SamplerParams {
    SamplerParams {
        temperature: 0.9,
        top_k: 40,
        top_p: 0.95,
        repeat_penalty: 1.1,
        presence_penalty: 0.1,
        seed: 5,
        ..SamplerParams::default()
    }
}

/// Tokens with the bits of their log-probabilities.
type Answer = Vec<(u32, u32)>;

/// Goes on with `sequence`. `each` sees the number of every token.
fn go_on(
    engine: &mut Engine,
    sequence: &mut forebay_engine::Sequence,
    prompt: &[u32],
    params: &GenerateParams,
    sampling: &SamplerParams,
    each: &mut dyn FnMut(&mut Engine, usize) -> Next,
) -> (Answer, Generated) {
    let mut answer = Vec::new();
    let generated = Control::none(|control| {
        let mut sampler = Sampler::new(sampling.clone());
        engine.generate(sequence, prompt, params, &mut sampler, control, &mut |engine, event| {
            answer.push((event.token, event.logprob.to_bits()));
            each(engine, answer.len())
        })
    })
    .unwrap();
    (answer, generated)
}

fn answer(engine: &mut Engine, prompt: &[u32], n: usize, sampling: &SamplerParams) -> Answer {
    let params = GenerateParams { max_tokens: n, ignore_eos: true, eos_ids: vec![] };
    let mut sequence = engine.new_sequence();
    let (answer, _) =
        go_on(engine, &mut sequence, prompt, &params, sampling, &mut |_, _| Next::Continue);
    assert_eq!(sequence.len(), prompt.len() + n - 1);
    engine.release(&mut sequence);
    answer
}

fn tokens(answer: &Answer) -> Vec<u32> {
    answer.iter().map(|(token, _)| *token).collect()
}

/// Rounds must have been run, and drafts accepted and refused, or nothing was tested.
fn has_drafted(engine: &Engine, what: &str) {
    let (_, counts, _) = engine.speculation().unwrap();
    assert!(counts.rounds > 0 && counts.accepted > 0, "{what}: {counts:?}");
    assert!(counts.accepted < counts.drafted, "{what}: {counts:?}");
}

/// Drafters that a model can have, with whether they need the recorded tokens.
fn drafters(name: &str, recorded: &[u32]) -> Vec<DrafterChoice> {
    let mut all = vec![scripted(recorded), DrafterChoice::Ngram];
    match name {
        QWEN3_5 => {
            all.push(DrafterChoice::Mtp);
            all.push(DrafterChoice::Dflash(model("tiny-qwen3.5-moe-dflash")));
        }
        // The tiny models share a tokenizer.
        GPT_OSS | GEMMA4 => all.push(DrafterChoice::Model(model(QWEN3_MOE))),
        // A draft model with recurrent layers.
        QWEN3_MOE => all.push(DrafterChoice::Model(model(QWEN3_5))),
        _ => unreachable!("a family of this file"),
    }
    all
}

/// 500 tokens of every family with every drafter: greedily with drafts of 1 to 8 tokens, sampled with some lengths.
#[test]
fn resident_answers_are_those_without_a_drafter() {
    let prompt = prompt(1, 40);
    for name in FAMILIES {
        for (sampling, lengths) in [(SamplerParams::default(), 1..=8), (drawn(), 3..=4)] {
            let plain = answer(&mut load(name, false, off()), &prompt, 500, &sampling);
            let recorded = [prompt.clone(), tokens(&plain)].concat();
            for drafter in drafters(name, &recorded) {
                for length in lengths.clone() {
                    // Another model takes its time: two lengths tell.
                    let has_model =
                        matches!(drafter, DrafterChoice::Dflash(_) | DrafterChoice::Model(_));
                    if has_model && length % 4 != 0 {
                        continue;
                    }
                    let what = format!("{name} {} {length} {sampling:?}", drafter.name());
                    let mut engine = load(name, false, always(drafter.clone(), length));
                    let found = answer(&mut engine, &prompt, 500, &sampling);
                    assert!(found == plain, "{what}");
                    // Sampled, an answer of 500 tokens may repeat nothing.
                    if !matches!(drafter, DrafterChoice::Ngram) {
                        has_drafted(&engine, &what);
                    }
                }
            }
        }
    }
}

/// The same with few slots, and one expert's worth of them less than a pass of many rows wants.
#[test]
fn streamed_answers_are_those_without_a_drafter() {
    let prompt = prompt(2, 90);
    for name in FAMILIES {
        for sampling in [SamplerParams::default(), drawn()] {
            let plain = answer(&mut load(name, false, off()), &prompt, 120, &sampling);
            let recorded = [prompt.clone(), tokens(&plain)].concat();
            for drafter in drafters(name, &recorded) {
                let what = format!("{name} {} {sampling:?}", drafter.name());
                let mut engine = load(name, true, always(drafter, 5));
                assert!(answer(&mut engine, &prompt, 120, &sampling) == plain, "{what}");
            }
        }
    }
}

/// Chunks of a prompt may be smaller than a draft, or than a block of masks: it drafts all the same, and as much.
#[test]
fn chunks_smaller_than_drafts() {
    let prompt = prompt(1, 40);
    for name in FAMILIES {
        let plain = answer(&mut load(name, false, off()), &prompt, 60, &drawn());
        let recorded = [prompt.clone(), tokens(&plain)].concat();
        for drafter in drafters(name, &recorded) {
            let mut counts = Vec::new();
            for (chunk, streamed) in [(32, false), (3, true), (1, false)] {
                let what = format!("{name} {} {chunk}", drafter.name());
                let mut engine = load_with(name, streamed, always(drafter.clone(), 5), |o| {
                    o.chunk = Some(chunk);
                });
                assert_eq!(engine.plan.chunk, chunk);
                assert!(answer(&mut engine, &prompt, 60, &drawn()) == plain, "{what}");
                let (_, found, _) = engine.speculation().unwrap();
                counts.push((found.rounds, found.drafted, found.accepted));
            }
            assert!(counts[0].0 > 0, "{name} {}", drafter.name());
            assert!(
                counts.iter().all(|c| *c == counts[0]),
                "{name} {}: {counts:?}",
                drafter.name()
            );
        }
    }
}

/// With the controller at work, whatever it decides.
#[test]
fn answers_do_not_depend_on_what_the_controller_decides() {
    let prompt = prompt(1, 40);
    for (name, streamed) in [(QWEN3_5, false), (QWEN3_5, true), (GPT_OSS, false)] {
        let plain = answer(&mut load(name, false, off()), &prompt, 300, &drawn());
        let auto = SpeculateOptions { drafter: DrafterChoice::Auto, ..off() };
        let mut engine = load(name, streamed, auto);
        let is_mtp = engine.speculation().unwrap().0 == "mtp";
        assert_eq!(is_mtp, name == QWEN3_5);
        assert!(answer(&mut engine, &prompt, 300, &drawn()) == plain, "{name} {streamed}");
    }
}

/// An answer that ends in the middle of a round, by an end token or by the caller, leaves what it would have left without a
/// drafter: what follows it is the same.
#[test]
fn stops_within_a_round_and_what_follows() {
    let first = prompt(1, 40);
    let second = prompt(0, 12);
    for name in FAMILIES {
        let plain = answer(&mut load(name, false, off()), &first, 120, &drawn());
        let recorded = [first.clone(), tokens(&plain)].concat();
        // An end token that comes for the first time somewhere in the middle.
        let end = (60..120).find(|&i| !tokens(&plain)[..i].contains(&plain[i].0)).unwrap();
        let conversation = |speculate: SpeculateOptions, stop: usize, eos_ids: Vec<u32>| {
            let mut engine = load(name, false, speculate);
            let mut sequence = engine.new_sequence();
            let params = GenerateParams { max_tokens: 200, ignore_eos: false, eos_ids };
            let (one, done) =
                go_on(&mut engine, &mut sequence, &first, &params, &drawn(), &mut |_, n| {
                    if n == stop { Next::Stop } else { Next::Continue }
                });
            let len = sequence.len();
            let params = GenerateParams { max_tokens: 60, ignore_eos: true, eos_ids: vec![] };
            let (two, _) =
                go_on(&mut engine, &mut sequence, &second, &params, &drawn(), &mut |_, _| {
                    Next::Continue
                });
            (one, done.finish, len, two)
        };
        for (stop, eos) in
            [(usize::MAX, vec![plain[end].0]), (50, vec![]), (51, vec![]), (52, vec![])]
        {
            let wanted = conversation(off(), stop, eos.clone());
            let finish = if stop == usize::MAX { Finish::Stop } else { Finish::Callback };
            assert_eq!(wanted.1, finish);
            for drafter in drafters(name, &recorded) {
                let what = format!("{name} {} {stop}", drafter.name());
                let found = conversation(always(drafter, 6), stop, eos.clone());
                assert!(found == wanted, "{what}");
            }
        }
    }
}

/// Cancelled at any token, and with budgets that change while it runs.
#[test]
fn cancelled_and_squeezed() {
    let prompt = prompt(1, 40);
    for name in [GPT_OSS, QWEN3_5] {
        let plain = answer(&mut load(name, false, off()), &prompt, 90, &drawn());
        let recorded = [prompt.clone(), tokens(&plain)].concat();
        for drafter in drafters(name, &recorded) {
            let mut engine = load(name, true, always(drafter, 4));
            let slot = engine.expert_bytes();
            let params = GenerateParams { max_tokens: 90, ignore_eos: true, eos_ids: vec![] };
            for stop in [7, 8, 9] {
                let cancel = AtomicBool::new(false);
                let mut control = Control { cancel: &cancel, progress: &mut |_, _| {} };
                let mut sequence = engine.new_sequence();
                let mut sampler = Sampler::new(drawn());
                let mut n = 0;
                let done = engine
                    .generate(
                        &mut sequence,
                        &prompt,
                        &params,
                        &mut sampler,
                        &mut control,
                        &mut |_, _| {
                            n += 1;
                            cancel.store(n >= stop, Ordering::Relaxed);
                            Next::Continue
                        },
                    )
                    .unwrap();
                assert_eq!(done.finish, Finish::Cancelled);
                assert_eq!(done.tokens, tokens(&plain)[..done.tokens.len()]);
                assert!(sequence.len() < prompt.len() + done.tokens.len());
                engine.release(&mut sequence);
            }
            let mut sequence = engine.new_sequence();
            let budget = engine.plan.budget;
            let (found, _) =
                go_on(&mut engine, &mut sequence, &prompt, &params, &drawn(), &mut |engine, n| {
                    let less = (n % 6) as u64 * slot;
                    engine.set_budget(budget - less).unwrap();
                    Next::Continue
                });
            assert!(found == plain, "{name}");
            engine.release(&mut sequence);
        }
    }
}

/// Sessions do not know of drafters: what one engine saved another goes on with, whichever drafts.
#[test]
fn sessions_with_and_without_a_drafter() {
    let prompt = prompt(2, 96);
    let drafter = || always(DrafterChoice::Mtp, 4);
    for (saves, loads) in [(drafter(), off()), (off(), drafter()), (drafter(), drafter())] {
        let dir = tempfile::tempdir().unwrap();
        let keeping = |speculate: SpeculateOptions| {
            let options = EngineOptions {
                threads: Some(2),
                chunk: Some(32),
                context: Some(640),
                snapshots: 2,
                speculate,
                ..EngineOptions::default()
            };
            Engine::load(Opened::open(&model(QWEN3_5), options).unwrap(), &mut |_, _| {}).unwrap()
        };
        let mut engine = keeping(saves);
        let mut sequence = engine.new_sequence();
        engine.follow(&sequence, &[]);
        Control::none(|c| engine.prefill(&mut sequence, &prompt[..64], c)).unwrap();
        assert!(engine.keep(&sequence, &prompt.clone().into(), 64, Origin::Prompt));
        assert_eq!(engine.save_sessions(dir.path(), 4).unwrap(), 1);
        let mut engine = keeping(loads);
        let (loaded, faults) = engine.load_sessions(dir.path()).unwrap();
        assert_eq!((loaded, faults.len()), (1, 0));
        let mut sequence = engine.begin(&prompt);
        assert_eq!(sequence.len(), 64);
        let params = GenerateParams { max_tokens: 60, ignore_eos: true, eos_ids: vec![] };
        let rest = &prompt[64..];
        let (found, _) =
            go_on(&mut engine, &mut sequence, rest, &params, &drawn(), &mut |_, _| Next::Continue);
        let mut alone = load(QWEN3_5, false, off());
        let mut sequence = alone.new_sequence();
        Control::none(|c| alone.prefill(&mut sequence, &prompt[..64], c)).unwrap();
        let (wanted, _) =
            go_on(&mut alone, &mut sequence, rest, &params, &drawn(), &mut |_, _| Next::Continue);
        assert!(found == wanted);
    }
}

/// On the text that the model was held out from, most first drafts of its own block are right.
#[test]
fn the_block_of_the_model_drafts_well() {
    let mut engine = load(QWEN3_5, false, always(DrafterChoice::Mtp, 3));
    for (index, n) in [(0, 12), (1, 40), (2, 200), (3, 320)] {
        answer(&mut engine, &prompt(index, n), 150, &SamplerParams::default());
    }
    let (_, counts, _) = engine.speculation().unwrap();
    let share = counts.first_accepted as f64 / counts.rounds as f64;
    println!("first drafts right: {share:.3}, {counts:?}");
    assert!(share >= 0.65, "{share}");
}

/// Nothing is allocated where nothing drafts, and what a drafter takes is in the ledger.
#[test]
fn the_ledger_knows() {
    let opened = |name: &str, speculate: SpeculateOptions| {
        let options = EngineOptions { speculate, ..EngineOptions::default() };
        Opened::open(&model(name), options)
    };
    for name in FAMILIES {
        let plan = opened(name, off()).unwrap().plan().unwrap();
        assert!(plan.ledger.items.iter().all(|item| item.what != "drafter"), "{name}");
        assert_eq!(plan.shape.tape_rows, 0);
        let line = |drafter: DrafterChoice, tokens: usize| {
            let opened = opened(name, always(drafter, tokens)).unwrap();
            let plan = opened.plan().unwrap();
            assert_eq!(plan.shape.tape_rows, tokens + 1);
            plan.ledger.get("drafter")
        };
        assert!(line(DrafterChoice::Ngram, 4) > 0, "{name}");
        let small = line(DrafterChoice::Model(model(QWEN3_MOE)), 4);
        assert!(small > std::fs::metadata(model(QWEN3_MOE)).unwrap().len() / 2);
        if name == QWEN3_5 {
            // Rows of tapes: channels, and two numbers for each value head, of each recurrent layer.
            let tape = |tokens| line(DrafterChoice::Ngram, tokens);
            let row = (tape(8) - tape(7)) as usize;
            let one_layer = (2 * 4 * 32 + 8 * 32 + 2 * 8) * 4;
            let shared = (2 * 4 * 32 + 8 * 32 + 8 * 32) * 4;
            assert_eq!(row, 6 * one_layer + shared);
            assert!(line(DrafterChoice::Mtp, 4) > tape(4) + 200_000);
        } else {
            let refused = opened(name, always(DrafterChoice::Mtp, 4));
            assert!(matches!(refused, Err(EngineError::Refused { .. })), "{name}");
        }
    }
}

/// The smallest budget with a drafter works, and what the process takes stays within it.
#[test]
fn the_smallest_budget_with_a_drafter() {
    let cases: [(&str, &[&str]); 3] = [
        (QWEN3_5, &["--speculate", "mtp", "--draft-tokens", "3"]),
        (QWEN3_5, &["--speculate", "ngram"]),
        (GPT_OSS, &["--speculate", "draft", "--draft-model"]),
    ];
    for (name, options) in cases {
        let mut options: Vec<String> = options.iter().map(|s| s.to_string()).collect();
        if options.last().unwrap() == "--draft-model" {
            options.push(model(QWEN3_MOE).to_str().unwrap().into());
        }
        let mut inspect = forebay();
        inspect.args(["inspect", "--json", "--context", "300"]).arg(model(name)).args(&options);
        let minimum = json(&mut inspect)["minimum_bytes"].as_u64().unwrap();
        let mut run = forebay();
        run.args(["run", "--raw", "--tokens", "120", "--ignore-eos", "--speculate-always"]);
        run.args(["--memory", &minimum.to_string(), "--context", "300"]).args(&options);
        let (lines, last) = run_json(run.arg(model(name)).arg("Once upon a time there was a fox."));
        assert_eq!(lines.len(), 120);
        let stats = &last["stats"];
        let (peak, budget) = (stats["peak_bytes"].as_u64(), stats["budget_bytes"].as_u64());
        assert_eq!(budget, Some(minimum));
        assert!(peak <= budget, "{name} {options:?}: {peak:?} of {budget:?}");
        let drafter = &options[1];
        assert_eq!(stats["speculation"]["drafter"], drafter.as_str());
        assert!(stats["speculation"]["rounds"].as_u64() > Some(0), "{}", stats["speculation"]);
    }
}

/// What cannot be is refused by name.
#[test]
fn refusals() {
    let refused = |options: &[&str], code: i32, words: &[&str]| {
        let mut command = forebay();
        command.args(["run", "--raw"]).arg(model(GPT_OSS)).arg("Hi").args(options);
        let out = output(&mut command);
        let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
        assert_eq!(out.status.code(), Some(code), "{options:?}: {stderr}");
        words.iter().for_each(|word| assert!(stderr.contains(word), "{options:?}: {stderr}"));
    };
    refused(&["--speculate", "mtp"], 3, &["--speculate mtp", "multi-token-prediction", "ngram"]);
    refused(&["--speculate", "ngram", "--draft-tokens", "0"], 3, &["0 tokens", "1 to 15"]);
    refused(&["--speculate", "ngram", "--draft-tokens", "16"], 3, &["16 tokens"]);
    refused(&["--speculate", "draft"], 2, &["--draft-model"]);
    let other = model(QWEN3_MOE);
    let other = other.to_str().unwrap();
    refused(&["--speculate", "ngram", "--draft-model", other], 2, &["--speculate draft"]);
    refused(&["--draft-model", "/nonexistent"], 1, &["/nonexistent"]);
}
