//! Ids equal those of the Python package, from a folder and from a GGUF file; decoding in pieces equals decoding
//! the whole.

mod common;

use std::collections::{BTreeMap, BTreeSet};

use forebay_files::MetaValue;
use forebay_text::{Markers, Specials, StreamDecoder, Tokenizer, TokenizerOptions};
use proptest::prelude::*;

fn folder() -> Tokenizer {
    Tokenizer::from_folder(&common::models().join("tiny-gpt-oss")).unwrap()
}

fn gguf() -> Tokenizer {
    let metadata = common::gguf(&common::models().join("tiny-qwen3-moe/qwen3_moe-Q4_K_M.gguf"));
    Tokenizer::from_gguf(&metadata, TokenizerOptions::default()).unwrap()
}

fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

#[test]
fn ids_equal_python() {
    let vectors: serde_json::Value =
        serde_json::from_str(include_str!("data/tokenizer_vectors.json")).unwrap();
    for tokenizer in [folder(), gguf()] {
        for row in vectors["rows"].as_array().unwrap() {
            let text = row["text"].as_str().unwrap();
            for (specials, want) in
                [(Specials::Parse, &row["parsed"]), (Specials::Ignore, &row["ignored"])]
            {
                let got = tokenizer.encode(text, specials).unwrap();
                assert_eq!(got, ids(want), "{text:?} {specials:?}");
                assert_eq!(tokenizer.decode(&got, Markers::Keep), text);
            }
        }
    }
}

#[test]
fn facts_of_the_bundled_models() {
    for tokenizer in [folder(), gguf()] {
        assert_eq!(tokenizer.vocab_size(), 4096);
        assert_eq!(tokenizer.eos_ids(), &BTreeSet::from([0, 2]));
        assert!(!tokenizer.adds_bos());
        assert_eq!(tokenizer.eos_text(), Some("<|im_end|>"));
        assert_eq!(tokenizer.token_id("<|im_start|>"), Some(1));
        assert_eq!((0..5000).filter(|id| tokenizer.is_marker(*id)).count(), 3);
        assert_eq!(tokenizer.token_bytes(1), b"<|im_start|>");
        assert_eq!(tokenizer.token_bytes(5000), b"");
        assert_eq!(tokenizer.decode(&[1, 2, 5000], Markers::Skip), "");
    }
}

#[test]
fn shared_models_agree() {
    let Some(shared) = common::shared("folder against GGUF of the shared models") else { return };
    let texts = ["The heron stood. 日本語 🦆\n\n  x<|im_end|>", "  a\tb  "];
    for (family, file) in [("gpt_oss", "gpt_oss-MXFP4"), ("gemma4", "gemma4-Q4_K_M")] {
        let dir = shared.join("models").join(family);
        let metadata = common::gguf(&dir.join(format!("gguf/{file}.gguf")));
        let by_gguf = Tokenizer::from_gguf(&metadata, TokenizerOptions::default()).unwrap();
        for name in ["hf", "pub", "mlx4"] {
            let by_folder = Tokenizer::from_folder(&dir.join(name)).unwrap();
            assert_eq!(by_folder.eos_ids(), by_gguf.eos_ids(), "{family} {name}");
            for (text, specials) in
                texts.iter().flat_map(|text| [(text, Specials::Parse), (text, Specials::Ignore)])
            {
                assert_eq!(
                    by_folder.encode(text, specials).unwrap(),
                    by_gguf.encode(text, specials).unwrap()
                );
            }
        }
    }
}

/// A small GGUF vocabulary of the given model.
fn metadata(
    model: &str,
    tokens: &[(&str, f32, i32)],
    more: &[(&str, MetaValue)],
) -> BTreeMap<String, MetaValue> {
    let mut metadata = BTreeMap::from([
        ("tokenizer.ggml.model".to_owned(), MetaValue::String(model.to_owned())),
        (
            "tokenizer.ggml.tokens".to_owned(),
            MetaValue::Array(tokens.iter().map(|t| MetaValue::String(t.0.to_owned())).collect()),
        ),
        (
            "tokenizer.ggml.scores".to_owned(),
            MetaValue::Array(tokens.iter().map(|t| MetaValue::F32(t.1)).collect()),
        ),
        (
            "tokenizer.ggml.token_type".to_owned(),
            MetaValue::Array(tokens.iter().map(|t| MetaValue::I32(t.2)).collect()),
        ),
    ]);
    metadata
        .extend(more.iter().map(|(key, value)| (format!("tokenizer.ggml.{key}"), value.clone())));
    metadata
}

const SENTENCEPIECE: [(&str, f32, i32); 16] = [
    ("<unk>", 0.0, 2),
    ("<s>", 0.0, 3),
    ("</s>", 0.0, 3),
    ("<0xF0>", 0.0, 6),
    ("<0x9F>", 0.0, 6),
    ("<0xA6>", 0.0, 6),
    ("<0x86>", 0.0, 6),
    ("▁", -3.0, 1),
    ("h", -4.0, 1),
    ("i", -5.0, 1),
    ("hi", -1.0, 1),
    ("▁hi", -2.0, 1),
    ("▁▁", -1.5, 1),
    ("<", -9.0, 1),
    ("s", -9.0, 1),
    (">", -9.0, 1),
];

#[test]
fn sentencepiece_by_scores() {
    let tokenizer =
        Tokenizer::from_gguf(&metadata("llama", &SENTENCEPIECE, &[]), TokenizerOptions::default())
            .unwrap();
    assert!(tokenizer.adds_bos());
    for (text, specials, want) in [
        ("hi hi", Specials::Ignore, vec![11, 11]),
        ("hi  hi", Specials::Ignore, vec![11, 12, 10]),
        ("🦆", Specials::Ignore, vec![7, 3, 4, 5, 6]),
        ("<s>hi", Specials::Parse, vec![1, 11]),
        ("<s>", Specials::Ignore, vec![7, 13, 14, 15]),
        ("", Specials::Ignore, vec![]),
        ("q", Specials::Ignore, vec![7, 0]),
    ] {
        let got = tokenizer.encode(text, specials).unwrap();
        assert_eq!(got, want, "{text}");
        if !want.contains(&0) && !want.contains(&1) {
            assert_eq!(tokenizer.decode(&got, Markers::Keep), text);
        }
    }
    let mut stream = StreamDecoder::new(tokenizer.clone(), Markers::Keep);
    let texts: Vec<String> =
        [11, 11, 3, 4, 5, 6, 3, 10].map(|id| stream.push(id).to_owned()).into();
    assert_eq!(texts, ["hi", " hi", "", "", "", "🦆", "", "\u{fffd}hi"]);
    stream.push(3);
    assert_eq!(stream.finish(), "\u{fffd}");

    let bare = metadata("llama", &SENTENCEPIECE, &[("add_space_prefix", MetaValue::Bool(false))]);
    let bare = Tokenizer::from_gguf(&bare, TokenizerOptions::default()).unwrap();
    assert_eq!(bare.encode("hi hi", Specials::Ignore).unwrap(), [10, 11]);
}

#[test]
fn gemma_style_merges() {
    let tokens = [
        ("<pad>", 0.0, 3),
        ("<eos>", 0.0, 3),
        ("<bos>", 0.0, 3),
        ("<unk>", 0.0, 2),
        ("▁", 0.0, 1),
        ("a", 0.0, 1),
        ("b", 0.0, 1),
        ("▁a", 0.0, 1),
        ("\n", 0.0, 1),
        ("\n\n", 0.0, 1),
        ("<0xC3>", 0.0, 6),
        ("<0xA9>", 0.0, 6),
        ("<|turn>", 0.0, 4),
        ("<turn|>", 0.0, 4),
        ("</s>", 0.0, 1),
    ];
    let merges = ["▁ a", "\n \n"].map(|merge| MetaValue::String(merge.to_owned()));
    let more = [
        ("merges", MetaValue::Array(merges.into())),
        ("bos_token_id", MetaValue::U32(2)),
        ("eos_token_id", MetaValue::U32(1)),
        ("add_bos_token", MetaValue::Bool(false)),
    ];
    let tokenizer =
        Tokenizer::from_gguf(&metadata("gemma4", &tokens, &more), TokenizerOptions::default())
            .unwrap();
    assert!(tokenizer.adds_bos());
    let text = "b a\n\né<turn|>";
    assert_eq!(tokenizer.encode(text, Specials::Parse).unwrap(), [6, 7, 9, 10, 11, 13]);
    let ignored = tokenizer.encode("<turn|>b", Specials::Ignore).unwrap();
    assert!(!ignored.contains(&13));
    assert!(tokenizer.is_marker(12));
    assert_eq!(tokenizer.decode(&[2, 6, 7, 9, 10, 11, 13], Markers::Skip), "b a\n\né");
    assert_eq!(tokenizer.eos_ids(), &BTreeSet::from([1, 13]));
}

#[test]
fn odd_files_are_refused_by_class() {
    let plain: [(&str, f32, i32); 2] = [("a", 0.0, 1), ("b", 0.0, 1)];
    let merges = || ("merges", MetaValue::Array(vec![]));
    let pre = |name: &str| ("pre", MetaValue::String(name.to_owned()));
    let rows = [
        (metadata("rwkv", &plain, &[]), "Unsupported", "rwkv"),
        (metadata("gpt2", &plain, &[merges(), pre("no-such-pre")]), "Unsupported", "no-such-pre"),
        (metadata("gpt2", &plain, &[]), "MissingKey", "merges"),
        (
            metadata("gpt2", &plain, &[("merges", MetaValue::Array(vec![MetaValue::U8(1)]))]),
            "BadValue",
            "merges",
        ),
        (metadata("gpt2", &plain, &[("tokens", MetaValue::U8(1)), merges()]), "BadValue", "tokens"),
        (metadata("gpt2", &[("a", 0.0, 1), ("a", 0.0, 1)], &[merges()]), "BadValue", "twice"),
        (metadata("llama", &plain, &[("scores", MetaValue::Array(vec![]))]), "BadValue", "scores"),
        (metadata("llama", &[("x", 0.0, 6)], &[]), "BadValue", "byte token"),
        (
            metadata("gpt2", &plain, &[merges(), ("token_type", MetaValue::Array(vec![]))]),
            "BadValue",
            "token_type",
        ),
        (BTreeMap::new(), "MissingKey", "tokens"),
    ];
    for (metadata, class, part) in rows {
        let error = Tokenizer::from_gguf(&metadata, TokenizerOptions::default()).unwrap_err();
        assert_eq!(error.class(), class, "{error}");
        assert!(error.to_string().contains(part), "{error}");
    }
    let odd = metadata("gpt2", &plain, &[merges(), pre("no-such-pre")]);
    let tokenizer = Tokenizer::from_gguf(&odd, TokenizerOptions { approximate: true }).unwrap();
    assert_eq!(tokenizer.approximated(), Some("no-such-pre"));

    let dir = tempfile::tempdir().unwrap();
    assert_eq!(Tokenizer::from_folder(dir.path()).unwrap_err().class(), "MissingKey");
    std::fs::write(dir.path().join("tokenizer.json"), "{").unwrap();
    assert_eq!(Tokenizer::from_folder(dir.path()).unwrap_err().class(), "BadJson");
}

#[test]
fn memory_is_known_beforehand() {
    let by_folder = Tokenizer::folder_memory_bytes(&common::models().join("tiny-gpt-oss")).unwrap();
    assert!((7 << 20..9 << 20).contains(&by_folder.resident_bytes), "{by_folder:?}");
    assert!(by_folder.peak_bytes > by_folder.resident_bytes);
    let metadata = common::gguf(&common::models().join("tiny-qwen3-moe/qwen3_moe-Q4_K_M.gguf"));
    let catalog = forebay_files::Catalog {
        files: Vec::new(),
        tensors: BTreeMap::new(),
        source: forebay_files::Source::Gguf { metadata },
        header_hash: [0; 32],
    };
    let by_gguf = Tokenizer::memory_bytes(&catalog).unwrap();
    assert_eq!(by_gguf.resident_bytes, by_folder.resident_bytes);
    assert_eq!(
        Tokenizer::from_catalog(&catalog, TokenizerOptions::default()).unwrap().vocab_size(),
        4096
    );
}

#[test]
fn end_ids_are_the_union() {
    let dir = tempfile::tempdir().unwrap();
    let copy = |name: &str| {
        std::fs::copy(common::models().join("tiny-gpt-oss").join(name), dir.path().join(name))
            .unwrap()
    };
    copy("tokenizer.json");
    std::fs::write(
        dir.path().join("tokenizer_config.json"),
        r#"{"eos_token": {"content": "<|im_end|>"}}"#,
    )
    .unwrap();
    std::fs::write(dir.path().join("generation_config.json"), r#"{"eos_token_id": [1, 6]}"#)
        .unwrap();
    std::fs::write(
        dir.path().join("config.json"),
        r#"{"eos_token_id": 1, "text_config": {"eos_token_id": 7}}"#,
    )
    .unwrap();
    let tokenizer = Tokenizer::from_folder(dir.path()).unwrap();
    assert_eq!(tokenizer.eos_ids(), &BTreeSet::from([1, 2, 6, 7]));
}

proptest! {
    #[test]
    fn streaming_equals_the_whole(ids in proptest::collection::vec(0u32..4100, 0..40), skip: bool) {
        let tokenizer = gguf_once();
        let markers = if skip { Markers::Skip } else { Markers::Keep };
        let mut stream = StreamDecoder::new(tokenizer.clone(), markers);
        let mut text = String::new();
        let mut bytes = Vec::new();
        for id in &ids {
            text.push_str(stream.push(*id));
            if !skip || !tokenizer.is_marker(*id) {
                bytes.extend(tokenizer.token_bytes(*id));
            }
        }
        text.push_str(&stream.finish());
        prop_assert_eq!(&text, &String::from_utf8_lossy(&bytes));
        prop_assert_eq!(&text, &tokenizer.decode(&ids, markers));
    }

    #[test]
    fn random_text_comes_back(text in "\\PC{0,40}|[\\x00-\\xff\u{300}-\u{3ff}\u{1f300}-\u{1f6ff}]{0,40}|(<\\|im_end\\|>|<\\|im|_end\\|>| ){0,6}") {
        let tokenizer = gguf_once();
        for specials in [Specials::Parse, Specials::Ignore] {
            let ids = tokenizer.encode(&text, specials).unwrap();
            prop_assert_eq!(tokenizer.decode(&ids, Markers::Keep), text.clone());
            if specials == Specials::Ignore {
                prop_assert!(!ids.iter().any(|id| tokenizer.is_marker(*id)));
            }
        }
    }
}

fn gguf_once() -> &'static Tokenizer {
    static TOKENIZER: std::sync::LazyLock<Tokenizer> = std::sync::LazyLock::new(gguf);
    &TOKENIZER
}
