//! Tokenizers and chat templates.

use std::path::PathBuf;

use forebay_files::{Catalog, Source};
use forebay_text::{
    ChatRequest, ChatTemplate, Markers, Specials, StreamDecoder, Tokenizer, TokenizerFiles,
    TokenizerOptions,
};
use serde_json::{Value, json};

use crate::memory_files::MemoryFiles;
use crate::{check_message, documents};

/// `tokenizer.json`, NUL, `tokenizer_config.json`.
pub fn tokenizer_folder(bytes: &[u8]) -> u64 {
    let [tokenizer, config] = documents(bytes);
    let files = TokenizerFiles {
        path: PathBuf::from("tokenizer.json"),
        tokenizer: tokenizer.to_vec(),
        tokenizer_config: serde_json::from_slice(config).unwrap_or(Value::Null),
        ..TokenizerFiles::default()
    };
    match Tokenizer::from_files(&files) {
        Ok(tokenizer) => round_trips(&tokenizer),
        Err(error) => check_message(&error),
    }
    bytes.len() as u64
}

/// A GGUF file whose keys hold a vocabulary.
pub fn tokenizer_gguf(bytes: &[u8]) -> u64 {
    let mut files = MemoryFiles::default();
    let path = files.add("model.gguf", bytes);
    match Catalog::open_with(&files, &path) {
        Ok(Catalog { source: Source::Gguf { metadata }, .. }) => {
            match Tokenizer::from_gguf(&metadata, TokenizerOptions { approximate: true }) {
                Ok(tokenizer) => round_trips(&tokenizer),
                Err(error) => check_message(&error),
            }
        }
        Ok(_) => {}
        Err(error) => check_message(&error),
    }
    bytes.len() as u64
}

/// Texts of the kinds that tokenizers treat apart.
const TEXTS: [&str; 4] = [
    "",
    "Hello, I'LL  naïve 日本語ひら 12345 \n\n\t don't e\u{301} ½ 🦆\u{200d} \r\n\u{0}",
    "<|im_end|><s></s><unk>[INST]<0x0A>▁▁ <｜x｜>",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
];

/// Ids are in range, ordinary text holds no marker, and decoding in pieces equals decoding the whole.
fn round_trips(tokenizer: &Tokenizer) {
    for text in TEXTS {
        for specials in [Specials::Ignore, Specials::Parse] {
            let ids = match tokenizer.encode(text, specials) {
                Ok(ids) => ids,
                Err(error) => {
                    check_message(&error);
                    continue;
                }
            };
            if specials == Specials::Ignore {
                let unknown = ids.iter().filter(|id| tokenizer.is_marker(**id)).collect::<Vec<_>>();
                assert!(unknown.windows(2).all(|w| w[0] == w[1]), "markers {unknown:?}");
            }
            for markers in [Markers::Keep, Markers::Skip] {
                let whole = tokenizer.decode(&ids, markers);
                let mut stream = StreamDecoder::new(tokenizer.clone(), markers);
                let mut pieces: String = ids.iter().map(|id| stream.push(*id).to_owned()).collect();
                pieces.push_str(&stream.finish());
                assert_eq!(whole, pieces);
            }
        }
    }
    for id in [0, 1, tokenizer.vocab_size() as u32, u32::MAX] {
        tokenizer.token_bytes(id);
    }
}

/// The source of a chat template, NUL, a request for it.
pub fn template(bytes: &[u8]) -> u64 {
    let [source, request] = documents(bytes);
    let Ok(source) = std::str::from_utf8(source) else { return bytes.len() as u64 };
    let request: ChatRequest = serde_json::from_slice(request).unwrap_or_else(|_| usual_request());
    match ChatTemplate::new(source) {
        Ok(template) => {
            if let Err(error) = template.render(&request) {
                check_message(&error);
            }
        }
        Err(error) => check_message(&error),
    }
    bytes.len() as u64
}

/// A conversation with everything that templates look at.
fn usual_request() -> ChatRequest {
    let tool = json!({"type": "function", "function": {"name": "f", "description": "Does.",
        "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}}});
    let call =
        json!({"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "x"}}});
    ChatRequest {
        messages: vec![
            json!({"role": "system", "content": "Be brief."}),
            json!({"role": "user", "content": "Hi <|im_end|>"}),
            json!({"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [call]}),
            json!({"role": "tool", "tool_call_id": "1", "name": "f", "content": "é"}),
            json!({"role": "user", "content": [{"type": "text", "text": "And?"}]}),
        ],
        tools: Some(vec![tool]),
        now: Some("2026-01-02T03:04:05".to_owned()),
        ..ChatRequest::default()
    }
}
