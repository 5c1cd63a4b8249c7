//! A tokenizer from a published folder: `tokenizer.json`, with `tokenizer_config.json` beside it.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::models::ModelWrapper;
use tokenizers::{
    AddedToken, DecoderWrapper, Model, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper,
};

use super::model::AnyModel;
use super::pieces::PieceStyle;
use super::{Ends, Parts, Tokenizer};
use crate::error::{Result, TextError};

/// What is read of `tokenizer.json`. Truncation and padding have no business here.
#[derive(Deserialize)]
struct TokenizerJson {
    model: ModelWrapper,
    #[serde(default)]
    normalizer: Option<NormalizerWrapper>,
    #[serde(default)]
    pre_tokenizer: Option<PreTokenizerWrapper>,
    #[serde(default)]
    post_processor: Option<PostProcessorWrapper>,
    #[serde(default)]
    decoder: Option<DecoderWrapper>,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

impl Tokenizer {
    /// From a folder. End tokens are those of `tokenizer_config.json`, `generation_config.json` and
    /// `config.json` together.
    pub fn from_folder(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Err(TextError::MissingKey { key: "tokenizer.json".to_owned() });
        }
        let json: TokenizerJson = read_json(&path)?;
        let config = read_optional(&dir.join("tokenizer_config.json"))?;
        let names = read_optional(&dir.join("special_tokens_map.json"))?;
        let name = |key: &str| special_name(&config, key).or_else(|| special_name(&names, key));
        let (bos, eos) = (name("bos_token"), name("eos_token"));

        let mut added = json.added_tokens;
        add_declared(&mut added, &config);
        let named = ["bos_token", "eos_token", "unk_token", "pad_token"].map(name);
        for text in named.into_iter().flatten() {
            let known = added.iter().any(|token| token.content == text);
            if !known && json.model.token_to_id(&text).is_some() {
                added.push(AddedToken::from(text, true));
            }
        }

        let mut eos_ids = std::collections::BTreeSet::new();
        for file in ["generation_config.json", "config.json"] {
            let value = read_optional(&dir.join(file))?;
            collect_ids(&value["eos_token_id"], &mut eos_ids);
            collect_ids(&value["text_config"]["eos_token_id"], &mut eos_ids);
        }
        let unknown = name("unk_token").or_else(|| match &json.model {
            ModelWrapper::BPE(bpe) => bpe.unk_token.clone(),
            _ => None,
        });
        let add_bos = match config["add_bos_token"].as_bool() {
            Some(add) => add,
            None => {
                bos.as_deref().is_some_and(|bos| begins_with(json.post_processor.as_ref(), bos))
            }
        };
        let parts = Parts {
            style: PieceStyle::of(json.decoder.as_ref())?,
            model: AnyModel::Library(Box::new(json.model)),
            normalizer: json.normalizer,
            pre_tokenizer: json.pre_tokenizer,
            added,
        };
        Self::assemble(parts, |id_of| {
            eos_ids.extend(eos.as_deref().and_then(id_of));
            Ends {
                bos: bos.as_deref().and_then(id_of),
                add_bos,
                eos: eos_ids,
                unknown: unknown.as_deref().and_then(id_of),
                eos_text: eos,
            }
        })
    }
}

/// Tokens that only `tokenizer_config.json` declares, in id order.
fn add_declared(added: &mut Vec<AddedToken>, config: &Value) {
    let Some(declared) = config["added_tokens_decoder"].as_object() else {
        return;
    };
    let mut declared: Vec<(u32, AddedToken)> = declared
        .iter()
        .filter_map(|(id, token)| Some((id.parse().ok()?, AddedToken::deserialize(token).ok()?)))
        .collect();
    declared.sort_by_key(|(id, _)| *id);
    for (_, token) in declared {
        if !added.iter().any(|known| known.content == token.content) {
            added.push(token);
        }
    }
}

/// A special token's text, which is a string or an object with `content`.
fn special_name(config: &Value, key: &str) -> Option<String> {
    let value = &config[key];
    let text = value.as_str().or_else(|| value["content"].as_str())?;
    Some(text.to_owned())
}

/// Whether the published post-processor puts this token before a text.
fn begins_with(processor: Option<&PostProcessorWrapper>, bos: &str) -> bool {
    let Some(Ok(json)) = processor.map(serde_json::to_value) else {
        return false;
    };
    let steps = match json["processors"].as_array() {
        Some(steps) => steps.clone(),
        None => vec![json],
    };
    steps.iter().any(|step| step["single"][0]["SpecialToken"]["id"] == bos || step["cls"][0] == bos)
}

/// An id or a list of ids.
fn collect_ids(value: &Value, into: &mut std::collections::BTreeSet<u32>) {
    let ids = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    into.extend(ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()));
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let file = File::open(path).map_err(|error| TextError::Io { path: path.to_owned(), error })?;
    serde_json::from_reader(BufReader::with_capacity(1 << 16, file))
        .map_err(|error| TextError::bad_json(path, error))
}

/// A JSON file that may be absent.
pub(crate) fn read_optional(path: &Path) -> Result<Value> {
    if path.exists() { read_json(path) } else { Ok(Value::Null) }
}
