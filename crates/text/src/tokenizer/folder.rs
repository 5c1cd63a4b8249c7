//! A tokenizer from a published folder: `tokenizer.json`, with `tokenizer_config.json` beside it.

use std::collections::BTreeSet;
use std::fmt;
use std::path::{Path, PathBuf};

use serde::de::{SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use serde_json::value::RawValue;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::{AddedToken, Model};

use super::components;
use super::model::AnyModel;
use super::pieces::PieceStyle;
use super::{Ends, Parts, Tokenizer};
use crate::error::{Result, TextError};

/// What is read of `tokenizer.json`. Truncation and padding have no business here.
#[derive(Deserialize)]
struct TokenizerJson<'a> {
    #[serde(borrow)]
    model: &'a RawValue,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
}

/// Tells which model it is.
#[derive(Deserialize)]
struct ModelKind {
    #[serde(rename = "type")]
    kind: Option<String>,
    merges: Option<serde::de::IgnoredAny>,
}

/// A BPE model, read straight into place: the library's own reader builds a tree of the whole file first, which
/// takes ten times the file in memory.
#[derive(Deserialize)]
struct BpeJson {
    vocab: Vocab,
    merges: Vec<Merge>,
    #[serde(default)]
    unk_token: Option<String>,
    #[serde(default)]
    continuing_subword_prefix: Option<String>,
    #[serde(default)]
    end_of_word_suffix: Option<String>,
    #[serde(default)]
    fuse_unk: bool,
    #[serde(default)]
    byte_fallback: bool,
    #[serde(default)]
    ignore_merges: bool,
}

/// Two tokens, written as `"a b"` or `["a", "b"]`.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Pair;

        impl<'de> Visitor<'de> for Pair {
            type Value = Merge;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a merge of two tokens")
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<Merge, E> {
                match text.split_once(' ') {
                    Some((left, right)) if !right.contains(' ') => {
                        Ok(Merge(left.to_owned(), right.to_owned()))
                    }
                    _ => Err(E::custom(format!("`{text}` is not two tokens"))),
                }
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut pair: A,
            ) -> std::result::Result<Merge, A::Error> {
                let mut next = |index| {
                    pair.next_element()?
                        .ok_or_else(|| serde::de::Error::invalid_length(index, &self))
                };
                let merge = Merge(next(0)?, next(1)?);
                match pair.next_element::<String>()? {
                    None => Ok(merge),
                    Some(_) => Err(serde::de::Error::invalid_length(3, &self)),
                }
            }
        }

        deserializer.deserialize_any(Pair)
    }
}

/// The model of a `tokenizer.json`.
fn model(json: &RawValue, path: &Path) -> Result<ModelWrapper> {
    let bad = |error: serde_json::Error| TextError::bad_json(path, format!("model: {error}"));
    let kind: ModelKind = serde_json::from_str(json.get()).map_err(bad)?;
    let is_bpe = match &kind.kind {
        Some(kind) => kind == "BPE",
        None => kind.merges.is_some(),
    };
    if !is_bpe {
        let name = kind.kind.unwrap_or_default();
        let remedy = "BPE is, which all supported families use";
        return Err(TextError::unsupported("tokenizer model", &name, remedy));
    }
    let json: BpeJson = serde_json::from_str(json.get()).map_err(bad)?;
    let merges: Merges = json.merges.into_iter().map(|Merge(left, right)| (left, right)).collect();
    let mut bpe = BPE::builder()
        .vocab_and_merges(json.vocab, merges)
        .fuse_unk(json.fuse_unk)
        .byte_fallback(json.byte_fallback)
        .ignore_merges(json.ignore_merges);
    if let Some(unknown) = json.unk_token {
        bpe = bpe.unk_token(unknown);
    }
    if json.continuing_subword_prefix.is_some_and(|prefix| !prefix.is_empty()) {
        let remedy = "vocabularies of the supported families have none";
        return Err(TextError::unsupported("BPE with", "continuing_subword_prefix", remedy));
    }
    if let Some(suffix) = json.end_of_word_suffix {
        bpe = bpe.end_of_word_suffix(suffix);
    }
    let bpe = bpe.build().map_err(|error| TextError::bad_json(path, format!("model: {error}")))?;
    Ok(ModelWrapper::BPE(bpe))
}

/// The files of a folder that say what its tokenizer is.
#[derive(Clone, Debug, Default)]
pub struct TokenizerFiles {
    /// Where `tokenizer.json` is, for messages.
    pub path: PathBuf,
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// `tokenizer_config.json`, as the others null where there is none.
    pub tokenizer_config: Value,
    /// `special_tokens_map.json`.
    pub special_tokens_map: Value,
    /// `generation_config.json`.
    pub generation_config: Value,
    /// `config.json`.
    pub config: Value,
}

impl TokenizerFiles {
    /// Reads them.
    pub fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        if !path.exists() {
            return Err(TextError::MissingKey { key: "tokenizer.json".to_owned() });
        }
        Ok(Self {
            tokenizer: read(&path)?,
            path,
            tokenizer_config: read_optional(&dir.join("tokenizer_config.json"))?,
            special_tokens_map: read_optional(&dir.join("special_tokens_map.json"))?,
            generation_config: read_optional(&dir.join("generation_config.json"))?,
            config: read_optional(&dir.join("config.json"))?,
        })
    }
}

impl Tokenizer {
    /// From a folder. End tokens are those of `tokenizer_config.json`, `generation_config.json` and
    /// `config.json` together.
    pub fn from_folder(dir: &Path) -> Result<Self> {
        Self::from_files(&TokenizerFiles::read(dir)?)
    }

    /// The same from files that are in memory.
    pub fn from_files(files: &TokenizerFiles) -> Result<Self> {
        let path = &files.path;
        let json: TokenizerJson = serde_json::from_slice(&files.tokenizer)
            .map_err(|error| TextError::bad_json(path, error))?;
        let model = model(json.model, path)?;
        let (config, names) = (&files.tokenizer_config, &files.special_tokens_map);
        let name = |key: &str| special_name(config, key).or_else(|| special_name(names, key));
        let (bos, eos) = (name("bos_token"), name("eos_token"));

        let mut added = json.added_tokens;
        add_declared(&mut added, config);
        let named = ["bos_token", "eos_token", "unk_token", "pad_token"].map(name);
        for text in named.into_iter().flatten() {
            let known = added.iter().any(|token| token.content == text);
            if !known && model.token_to_id(&text).is_some() {
                added.push(AddedToken::from(text, true));
            }
        }

        let mut eos_ids = BTreeSet::new();
        for value in [&files.generation_config, &files.config] {
            collect_ids(&value["eos_token_id"], &mut eos_ids);
            collect_ids(&value["text_config"]["eos_token_id"], &mut eos_ids);
        }
        let unknown = name("unk_token").or_else(|| match &model {
            ModelWrapper::BPE(bpe) => bpe.unk_token.clone(),
            _ => None,
        });
        let add_bos = match config["add_bos_token"].as_bool() {
            Some(add) => add,
            None => bos.as_deref().is_some_and(|bos| begins_with(&json.post_processor, bos)),
        };
        let parts = Parts {
            style: PieceStyle::of(&json.decoder)?,
            model: AnyModel::Library(Box::new(model)),
            normalizer: components::normalizer(&json.normalizer)?,
            pre_tokenizer: components::pre_tokenizer(&json.pre_tokenizer)?,
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
fn begins_with(processor: &Value, bos: &str) -> bool {
    let steps = match processor["processors"].as_array() {
        Some(steps) => steps.as_slice(),
        None => std::slice::from_ref(processor),
    };
    steps.iter().any(|step| step["single"][0]["SpecialToken"]["id"] == bos || step["cls"][0] == bos)
}

/// An id or a list of ids.
fn collect_ids(value: &Value, into: &mut BTreeSet<u32>) {
    let ids = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
    into.extend(ids.iter().filter_map(|id| u32::try_from(id.as_u64()?).ok()));
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|error| TextError::Io { path: path.to_owned(), error })
}

/// A JSON file that may be absent.
pub(crate) fn read_optional(path: &Path) -> Result<Value> {
    if !path.exists() {
        return Ok(Value::Null);
    }
    serde_json::from_slice(&read(path)?).map_err(|error| TextError::bad_json(path, error))
}
