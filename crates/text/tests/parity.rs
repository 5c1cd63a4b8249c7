//! Published vocabularies give the ids that the Python package gives, from `tokenizer.json` and from the keys of a
//! GGUF file, and decode to the text again, in pieces and whole.
//!
//! The vocabularies are too large for this repository: `tools/tokenizer_parity.py` fetches them into a folder that
//! `FOREBAY_TOKENIZERS` names. Without it these tests say that they are skipped; `tokenizers.rs` checks the same of
//! the vocabularies that are bundled.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

use forebay_files::MetaValue;
use forebay_text::{Markers, Specials, StreamDecoder, Tokenizer, TokenizerOptions};
use serde_json::Value;

fn folder(name: &str) -> Option<PathBuf> {
    let folder = std::env::var_os("FOREBAY_TOKENIZERS").map(|dir| PathBuf::from(dir).join(name));
    let folder = folder.filter(|f| f.join("expected.json").is_file());
    if folder.is_none() {
        println!(
            "skipped: no {name}/expected.json in the folder FOREBAY_TOKENIZERS (tools/tokenizer_parity.py)"
        );
    }
    folder
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// What comes back of a text.
#[derive(Clone, Copy, PartialEq)]
enum Back {
    /// All of it.
    Same,
    /// U+2581 is the vocabulary's own sign for a space.
    SpacesOfMarks,
    /// The normaliser composed it.
    Composed,
}

/// Checks every row.
fn check(name: &str, source: &str, tokenizer: &Tokenizer, back: Back) {
    let expected = json(&folder(name).unwrap().join("expected.json"));
    let rows = expected["rows"].as_array().unwrap();
    assert!(rows.len() > 500);
    for row in rows {
        let text = row["text"].as_str().unwrap();
        for (specials, want) in
            [(Specials::Parse, &row["parsed"]), (Specials::Ignore, &row["ignored"])]
        {
            let got = tokenizer.encode(text, specials).unwrap();
            assert_eq!(got, ids(want), "{name} {source}: {text:?} {specials:?}");
            let whole = tokenizer.decode(&got, Markers::Keep);
            match back {
                Back::Same => assert_eq!(whole, text, "{name} {source}"),
                Back::SpacesOfMarks => {
                    assert_eq!(whole, text.replace('\u{2581}', " "), "{name} {source}")
                }
                Back::Composed => {}
            }
            let mut stream = StreamDecoder::new(tokenizer.clone(), Markers::Keep);
            let mut pieces: String = got.iter().map(|id| stream.push(*id).to_owned()).collect();
            pieces.push_str(&stream.finish());
            assert_eq!(pieces, whole, "{name} {source}");
        }
    }
}

/// The keys that llama.cpp's converter would write for this `tokenizer.json`.
fn gguf_keys(name: &str, model: &str, pre: &str) -> BTreeMap<String, MetaValue> {
    let json = json(&folder(name).unwrap().join("tokenizer.json"));
    let mut tokens: BTreeMap<u32, (String, i32)> = BTreeMap::new();
    for (text, id) in json["model"]["vocab"].as_object().unwrap() {
        let byte = model == "llama" && text.len() == 6 && text.starts_with("<0x");
        tokens.insert(id.as_u64().unwrap() as u32, (text.clone(), if byte { 6 } else { 1 }));
    }
    for token in json["added_tokens"].as_array().unwrap() {
        let kind = if token["special"] == true { 3 } else { 4 };
        let text = token["content"].as_str().unwrap().to_owned();
        tokens.insert(token["id"].as_u64().unwrap() as u32, (text, kind));
    }
    let pair = |merge: &Value| match merge.as_str() {
        Some(text) => text.to_owned(),
        None => format!("{} {}", merge[0].as_str().unwrap(), merge[1].as_str().unwrap()),
    };
    let merges: Vec<String> =
        json["model"]["merges"].as_array().unwrap().iter().map(pair).collect();
    let len = *tokens.keys().max().unwrap() + 1;
    let row = |id| tokens.get(&id).cloned().unwrap_or((format!("[PAD{id}]"), 5));
    let list = |values: Vec<MetaValue>| MetaValue::Array(values);
    let text = |text: &str| MetaValue::String(text.to_owned());
    let mut keys = BTreeMap::from([
        ("tokenizer.ggml.model".to_owned(), text(model)),
        ("tokenizer.ggml.pre".to_owned(), text(pre)),
        (
            "tokenizer.ggml.tokens".to_owned(),
            list((0..len).map(|id| MetaValue::String(row(id).0)).collect()),
        ),
        (
            "tokenizer.ggml.token_type".to_owned(),
            list((0..len).map(|id| MetaValue::I32(row(id).1)).collect()),
        ),
    ]);
    if model == "llama" {
        // SentencePiece's scores are the ranks of the merges that make a token, best first.
        let ids: HashMap<&str, u32> = tokens.iter().map(|(id, (t, _))| (t.as_str(), *id)).collect();
        let mut scores = vec![-1e9f32; len as usize];
        for (rank, merge) in merges.iter().enumerate().rev() {
            if let Some(id) = ids.get(merge.replacen(' ', "", 1).as_str()) {
                scores[*id as usize] = -(rank as f32);
            }
        }
        keys.insert(
            "tokenizer.ggml.scores".to_owned(),
            list(scores.into_iter().map(MetaValue::F32).collect()),
        );
        keys.insert("tokenizer.ggml.add_space_prefix".to_owned(), MetaValue::Bool(false));
    } else {
        keys.insert(
            "tokenizer.ggml.merges".to_owned(),
            list(merges.into_iter().map(MetaValue::String).collect()),
        );
    }
    keys
}

fn parity(name: &str, model: &str, pre: &str, back: Back) {
    let Some(folder) = folder(name) else { return };
    check(name, "folder", &Tokenizer::from_folder(&folder).unwrap(), back);
    let keys = gguf_keys(name, model, pre);
    let tokenizer = Tokenizer::from_gguf(&keys, TokenizerOptions::default()).unwrap();
    check(name, "GGUF", &tokenizer, back);
}

#[test]
fn gptoss() {
    parity("gptoss", "gpt2", "gpt-4o", Back::Same);
}

#[test]
fn qwen3() {
    parity("qwen3", "gpt2", "qwen2", Back::Composed);
}

#[test]
fn gemma3() {
    parity("gemma3", "llama", "", Back::SpacesOfMarks);
}

#[test]
fn llama3() {
    parity("llama3", "gpt2", "llama-bpe", Back::Same);
}
