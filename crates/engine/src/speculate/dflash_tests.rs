//! The block drafter against the answers that came with a trained one, and answers with it against answers without.

use std::path::{Path, PathBuf};

use rstest::rstest;
use serde_json::Value;

use super::*;
use crate::EngineOptions;
use crate::engine::Opened;
use crate::forward::{Batch, Control};
use crate::options::ResidencyChoice;

/// Differences of logits in f32.
const TOLERANCE: f64 = 2e-3;
/// Choices whose first and second are closer than this may rightly differ.
const NEAR_TIE: f64 = 0.005;

fn here(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(name)
}

fn load(model: &Path, drafter: &Path, adjust: impl FnOnce(&mut EngineOptions)) -> Engine {
    let mut options = EngineOptions {
        residency: ResidencyChoice::Resident,
        threads: Some(2),
        context: Some(1024),
        speculate: SpeculateOptions {
            drafter: DrafterChoice::Dflash(drafter.to_owned()),
            tokens: None,
            always: true,
        },
        ..EngineOptions::default()
    };
    adjust(&mut options);
    Engine::load(Opened::open(model, options).unwrap(), &mut |_, _| {}).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// Drafts of a whole block after the computed tokens and `anchor`.
fn drafts(engine: &mut Engine, anchor: u32, position: u64) -> Vec<u32> {
    let mut s = engine.speculation.take().unwrap();
    s.tokens.push(anchor);
    let params = SamplerParams { temperature: 0.0, repeat_penalty: 1.0, ..Default::default() };
    let mut sampler = Sampler::new(params);
    let mut request = DraftRequest {
        tokens: &s.tokens,
        most: MOST_TOKENS,
        drafts: Vec::new(),
        sampler: &mut sampler,
        recent: Vec::new(),
        position,
    };
    Control::none(|c| s.drafter.draft(engine, &mut request, c)).unwrap();
    let drafts = request.drafts;
    s.tokens.pop();
    engine.speculation = Some(s);
    drafts
}

/// Logits of a block's places, drafted blocks and accepted lengths are the reference's, whatever the chunk.
#[rstest]
fn blocks_are_the_references(#[values(1024, 48)] chunk: usize) {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let dir = std::env::var_os("FOREBAY_SHARED").map_or_else(beside, PathBuf::from);
    let dir = dir.join("models/qwen3_5_moe");
    let Ok(text) = std::fs::read(dir.join("dflash/dflash.json")) else {
        println!("skipped, there is no {}", dir.display());
        return;
    };
    let answers: Value = serde_json::from_slice(&text).unwrap();
    let mut engine = load(&dir.join("hf"), &dir.join("dflash"), |o| {
        o.precision = Some(forebay_program::Precision::F32);
        o.chunk = Some(chunk);
    });
    let vocab = engine.spec.vocab_size;
    let mut largest: f64 = 0.0;
    for case in answers["cases"].as_array().unwrap() {
        let prompt = ids(&case["prompt"]);
        let mut sequence = engine.new_sequence();
        engine.follow(&sequence, &[]);
        Control::none(|c| engine.prefill(&mut sequence, &prompt, c)).unwrap();
        let greedy = ids(&case["greedy"]);
        let mut known = 0;
        for (round, want) in case["drafts"].as_array().unwrap().iter().enumerate() {
            let got = drafts(&mut engine, greedy[known], sequence.len() as u64 + 1);
            let want = ids(want);
            if round == 0 {
                let logits = engine.logits.clone();
                for (place, logits) in
                    case["places"].as_array().unwrap().iter().zip(logits.chunks_exact(vocab))
                {
                    let top = ids(&place["top_ids"]);
                    for (id, value) in top.iter().zip(place["top_logits"].as_array().unwrap()) {
                        largest = largest
                            .max((f64::from(logits[*id as usize]) - value.as_f64().unwrap()).abs());
                    }
                    let sum = log_sum_exp(logits) - place["logsumexp"].as_f64().unwrap();
                    largest = largest.max(sum.abs());
                }
            }
            if case["draft_margins"][round].as_f64().unwrap() >= NEAR_TIE {
                assert_eq!(got, want, "prompt of {}, round {round}", prompt.len());
            }
            let accepted = case["accepted"][round].as_u64().unwrap() as usize;
            let rest = &greedy[(known + 1).min(greedy.len())..];
            let right = got.iter().zip(rest).take_while(|(a, b)| a == b).count();
            if rest.len() >= want.len() {
                assert_eq!(right, accepted, "prompt of {}, round {round}", prompt.len());
            }
            // The rows that hold.
            let rows: Vec<u32> = greedy[known..].iter().take(accepted + 1).copied().collect();
            if rows.len() <= accepted {
                break;
            }
            let batch = Batch::single(&rows, Vec::new());
            Control::none(|c| engine.forward(&batch, &mut [&mut sequence], c, &mut |_, _| Ok(())))
                .unwrap();
            known += accepted + 1;
            if known >= greedy.len() {
                break;
            }
        }
        engine.release(&mut sequence);
    }
    println!("largest logit difference {largest}");
    assert!(largest > 0.0 && largest <= TOLERANCE, "{largest}");
}

/// The trained drafter with changes to its config.
fn changed(change: &Value) -> tempfile::TempDir {
    let from = here("tiny-qwen3.5-moe-dflash");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(from.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let text = std::fs::read(from.join("config.json")).unwrap();
    let mut config: Value = serde_json::from_slice(&text).unwrap();
    for (key, value) in change.as_object().unwrap() {
        match value.as_object() {
            Some(inner) => {
                inner.iter().for_each(|(key2, value)| config[key][key2] = value.clone());
            }
            None => config[key] = value.clone(),
        }
    }
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    dir
}

/// Sliding and causal layers, against transformers' parts of the same layers (`tools/make_dflash_reference.py`).
#[test]
fn windows_and_causal_layers_are_the_references() {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let dir = std::env::var_os("FOREBAY_SHARED").map_or_else(beside, PathBuf::from);
    let target = dir.join("models/qwen3_5_moe/hf");
    if !target.is_dir() {
        println!("skipped, there is no {}", target.display());
        return;
    }
    let text = std::fs::read(here("reference/dflash-windows.json")).unwrap();
    let answers: Value = serde_json::from_slice(&text).unwrap();
    for case in answers["cases"].as_array().unwrap() {
        let drafter = changed(&case["change"]);
        let mut engine = load(&target, drafter.path(), |o| {
            o.precision = Some(forebay_program::Precision::F32);
        });
        let prompt = ids(&case["prompt"]);
        let mut sequence = engine.new_sequence();
        engine.follow(&sequence, &[]);
        Control::none(|c| engine.prefill(&mut sequence, &prompt, c)).unwrap();
        let anchor = case["anchor"].as_u64().unwrap() as u32;
        drafts(&mut engine, anchor, prompt.len() as u64 + 1);
        let places = case["places"].as_array().unwrap();
        let logits = engine.logits.clone();
        let mut largest: f64 = 0.0;
        for (place, logits) in places.iter().zip(logits.chunks_exact(engine.spec.vocab_size)) {
            let top = ids(&place["top_ids"]);
            for (id, value) in top.iter().zip(place["top_logits"].as_array().unwrap()) {
                let difference = f64::from(logits[*id as usize]) - value.as_f64().unwrap();
                largest = largest.max(difference.abs());
            }
            let sum = log_sum_exp(logits) - place["logsumexp"].as_f64().unwrap();
            largest = largest.max(sum.abs());
        }
        println!("{} {}: largest logit difference {largest}", prompt.len(), case["change"]);
        assert!(places.len() == 7 && largest > 0.0 && largest <= TOLERANCE, "{largest}");
    }
}

/// The drafter's name of a tensor in llama.cpp's files.
fn gguf_name(name: &str) -> String {
    let parts = [
        ("model.", ""),
        ("layers.", "blk."),
        ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
        ("self_attn.o_proj", "attn_output"),
        ("self_attn.", "attn_"),
        ("mlp.", "ffn_"),
        ("_proj", ""),
        ("hidden_norm", "enc.output_norm"),
    ];
    let name = parts.iter().fold(name.to_owned(), |n, (from, to)| n.replace(from, to));
    if name == "norm.weight" { "output_norm.weight".into() } else { name }
}

/// The trained drafter as llama.cpp's converter would write it.
fn as_gguf(path: &Path) {
    let from = std::fs::read(here("tiny-qwen3.5-moe-dflash/model.safetensors")).unwrap();
    let header =
        forebay_files::safetensors::read_header(&from[..], from.len() as u64, path).unwrap();
    let text = |out: &mut Vec<u8>, s: &str| {
        out.extend((s.len() as u64).to_le_bytes());
        out.extend(s.as_bytes());
    };
    let mut keys = Vec::new();
    let mut n_keys = 0u64;
    let mut key = |name: &str, kind: u32, value: &[u8]| {
        text(&mut keys, name);
        keys.extend(kind.to_le_bytes());
        keys.extend(value);
        n_keys += 1;
    };
    let mut arch = Vec::new();
    text(&mut arch, "dflash");
    key("general.architecture", 8, &arch);
    for (name, value) in [
        ("dflash.block_count", 2u32),
        ("dflash.embedding_length", 256),
        ("dflash.attention.head_count", 4),
        ("dflash.attention.head_count_kv", 2),
        ("dflash.attention.key_length", 64),
        ("dflash.feed_forward_length", 512),
        ("dflash.block_size", 8),
        ("tokenizer.ggml.mask_token_id", 190),
    ] {
        key(name, 4, &value.to_le_bytes());
    }
    key("dflash.attention.layer_norm_rms_epsilon", 6, &1e-6f32.to_le_bytes());
    key("dflash.rope.freq_base", 6, &1e7f32.to_le_bytes());
    // Its numbers are those of the layers that come next.
    let layers = [4u32, 3, 0, 2, 4, 6].map(u32::to_le_bytes).concat();
    key("dflash.target_layers", 9, &layers);
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend((header.tensors.len() as u64).to_le_bytes());
    out.extend(n_keys.to_le_bytes());
    out.extend(keys);
    let mut data: Vec<u8> = Vec::new();
    for tensor in header.tensors.values() {
        text(&mut out, &gguf_name(&tensor.name));
        out.extend((tensor.shape.len() as u32).to_le_bytes());
        tensor.shape.iter().rev().for_each(|d| out.extend(d.to_le_bytes()));
        const BF16: u32 = 30;
        out.extend(BF16.to_le_bytes());
        out.extend((data.len() as u64).to_le_bytes());
        data.extend(&from[tensor.offset as usize..tensor.end() as usize]);
        data.resize(data.len().next_multiple_of(32), 0);
    }
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend(data);
    std::fs::write(path, out).unwrap();
}

/// The same drafter from a GGUF file gives the same bits.
#[test]
fn gguf_files_give_the_same_bits() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = dir.path().join("drafter.gguf");
    as_gguf(&gguf);
    let block = |drafter: &Path| {
        let mut engine = load(&here("tiny-qwen3.5-moe/qwen3_5_moe-Q4_K_M.gguf"), drafter, |_| {});
        let prompt: Vec<u32> = (0..40).map(|i| (i * 37 % 900) + 5).collect();
        let mut sequence = engine.new_sequence();
        engine.follow(&sequence, &[]);
        Control::none(|c| engine.prefill(&mut sequence, &prompt, c)).unwrap();
        let drafts = drafts(&mut engine, 7, 41);
        let bits: Vec<u32> = engine.logits.iter().map(|l| l.to_bits()).collect();
        (drafts, bits)
    };
    let folder = block(&here("tiny-qwen3.5-moe-dflash"));
    assert_eq!(folder.0.len(), 7);
    assert!(block(&gguf) == folder);
}

fn log_sum_exp(logits: &[f32]) -> f64 {
    let max = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    max + logits.iter().map(|l| (f64::from(*l) - max).exp()).sum::<f64>().ln()
}

/// Greedy and sampled, with every chunk and place of experts: the tokens are those of a model that drafts nothing.
#[rstest]
fn answers_do_not_depend_on_it(
    #[values(0.0, 0.8)] temperature: f32,
    #[values(64, 16, 5)] chunk: usize,
) {
    let model = here("tiny-qwen3.5-moe/qwen3_5_moe-Q4_K_M.gguf");
    let drafter = here("tiny-qwen3.5-moe-dflash");
    let answer = |adjust: &dyn Fn(&mut EngineOptions)| {
        let mut engine = load(&model, &drafter, |o| {
            o.chunk = Some(chunk);
            adjust(o);
        });
        let prompt: Vec<u32> = (0..40).map(|i| (i * 37 % 900) + 5).collect();
        let mut sequence = engine.new_sequence();
        engine.follow(&sequence, &[]);
        let params =
            crate::GenerateParams { max_tokens: 300, ignore_eos: true, eos_ids: Vec::new() };
        let sampling = SamplerParams { temperature, seed: 11, ..SamplerParams::default() };
        let generated = Control::none(|c| {
            engine.generate(
                &mut sequence,
                &prompt,
                &params,
                &mut Sampler::new(sampling),
                c,
                &mut |_, _| crate::generate::Next::Continue,
            )
        })
        .unwrap();
        let counts = engine.speculation().map(|(_, counts, _)| counts);
        (generated.tokens, counts)
    };
    let (plain, none) = answer(&|o| o.speculate = SpeculateOptions::default());
    assert!(none.is_none() && plain.len() == 300);
    let (drafted, counts) = answer(&|_| {});
    assert_eq!(drafted, plain);
    let counts = counts.unwrap();
    assert!(counts.rounds > 0 && counts.accepted > 0, "{counts:?}");
    let (streamed, _) = answer(&|o| {
        o.residency = ResidencyChoice::Stream;
        o.slots_total = Some(9);
    });
    assert_eq!(streamed, plain);
}

/// Without a drafter nothing is there for one.
#[test]
fn nothing_is_paid_without_it() {
    let model = here("tiny-qwen3.5-moe/qwen3_5_moe-Q4_K_M.gguf");
    let ledger = |speculate: SpeculateOptions| {
        let options = EngineOptions { threads: Some(2), speculate, ..EngineOptions::default() };
        let opened = Opened::open(&model, options).unwrap();
        let plan = opened.plan().unwrap();
        (plan.ledger.get(crate::plan::DRAFTER_LINE), opened.program.kept_layers.len())
    };
    assert_eq!(ledger(SpeculateOptions::default()), (0, 0));
    let drafter = DrafterChoice::Dflash(here("tiny-qwen3.5-moe-dflash"));
    let (bytes, kept) = ledger(SpeculateOptions { drafter, ..Default::default() });
    assert!(bytes > 2_700_000 && kept == 3, "{bytes} {kept}");
}

/// What is no drafter for this model is refused by name.
#[rstest]
#[case(&["num_target_layers"], "9", &["num_target_layers", "8"])]
#[case(&["hidden_size"], "512", &["hidden_size", "256"])]
#[case(&["vocab_size"], "5000", &["vocab_size", "4096"])]
#[case(&["block_size"], "64", &["block_size", "2 to 16"])]
#[case(&["architectures"], "[\"DFlash2DraftModel\"]", &["DFlash2DraftModel"])]
#[case(&["draft_vocab_size"], "1000", &["1000"])]
#[case(&["dflash_config", "mask_token_id"], "5000", &["mask_token_id", "4096"])]
#[case(&["dflash_config", "mask_token_id"], "null", &["mask_token_id"])]
#[case(&["dflash_config", "target_layer_ids"], "[1, 3, 8]", &["target_layer_ids", "0 to 7"])]
#[case(&["dflash_config", "target_layer_ids"], "[1, 3]", &["fc.weight", "512"])]
#[case(&["dflash_config", "output_multiplier"], "2.0", &["output_multiplier"])]
#[case(&["dflash_config", "logit_softcap"], "30.0", &["logit_softcap"])]
#[case(&["num_hidden_layers"], "3", &["layer_types[2]"])]
#[case(&["num_hidden_layers"], "1", &["layers.1"])]
fn others_are_refused_by_name(#[case] path: &[&str], #[case] value: &str, #[case] words: &[&str]) {
    let value: Value = serde_json::from_str(value).unwrap();
    let change = match path {
        [key] => serde_json::json!({ *key: value }),
        [outer, key] => serde_json::json!({ *outer: { *key: value } }),
        _ => unreachable!("no deeper keys"),
    };
    let dir = changed(&change);
    let drafter = DrafterChoice::Dflash(dir.path().to_owned());
    let speculate = SpeculateOptions { drafter, ..Default::default() };
    let options = EngineOptions { speculate, ..EngineOptions::default() };
    let model = here("tiny-qwen3.5-moe/qwen3_5_moe-Q4_K_M.gguf");
    let error = Opened::open(&model, options).err().expect("it is refused").to_string();
    assert!(words.iter().all(|word| error.contains(word)), "{error}");
}
