//! A tokenizer from GGUF keys (`tokenizer.ggml.*`).

use std::collections::{BTreeMap, BTreeSet, HashSet};

use forebay_files::MetaValue;
use tokenizers::AddedToken;
use tokenizers::models::ModelWrapper;
use tokenizers::models::bpe::{BPE, Merges, Vocab};
use tokenizers::normalizers::{NormalizerWrapper, Prepend, Sequence};

use super::model::{AnyModel, PieceKind, ScoreModel, ScorePiece};
use super::pieces::{PieceStyle, byte_token};
use super::pretokenizer::{PreRules, rules, spaces_to_marks};
use super::{Ends, Parts, Tokenizer, TokenizerOptions, looks_like_marker};
use crate::error::{Result, TextError};

const MODEL: &str = "tokenizer.ggml.model";
const PRE: &str = "tokenizer.ggml.pre";
const TOKENS: &str = "tokenizer.ggml.tokens";
const MERGES: &str = "tokenizer.ggml.merges";
const SCORES: &str = "tokenizer.ggml.scores";
const TYPES: &str = "tokenizer.ggml.token_type";

/// Tokens that end a turn wherever they exist: GGUF files name one end token, models stop at several.
const TURN_ENDS: [&str; 17] = [
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<eos>",
    "</s>",
    "<turn|>",
    "<|tool_response>",
    "<EOT>",
    "[EOT]",
    "[EOS]",
    "<｜end▁of▁sentence｜>",
];

/// The file's token types.
#[derive(Clone, Copy, PartialEq, Eq)]
enum TokenType {
    Normal,
    Unknown,
    Control,
    UserDefined,
    Unused,
    Byte,
}

impl TokenType {
    fn of(value: u64) -> Self {
        match value {
            2 => Self::Unknown,
            3 => Self::Control,
            4 => Self::UserDefined,
            5 => Self::Unused,
            6 => Self::Byte,
            _ => Self::Normal,
        }
    }
}

type Metadata = BTreeMap<String, MetaValue>;

impl Tokenizer {
    /// From GGUF metadata.
    pub fn from_gguf(metadata: &Metadata, options: TokenizerOptions) -> Result<Self> {
        let file = GgufVocabulary::read(metadata)?;
        let model = text_key(metadata, MODEL)?.ok_or_else(|| missing(MODEL))?;
        match model {
            "gpt2" | "gemma4" => {
                let name = if model == "gemma4" {
                    "gemma4"
                } else {
                    text_key(metadata, PRE)?.unwrap_or("default")
                };
                let (rules, guessed) = match rules(name) {
                    Some(rules) => (rules, false),
                    None if options.approximate => (nearest_rules()?, true),
                    None => {
                        let remedy =
                            "open the published folder instead, or allow approximate tokens";
                        return Err(TextError::unsupported("pre-tokenizer", name, remedy));
                    }
                };
                let mut tokenizer = file.merged(metadata, rules)?;
                if guessed && let Some(shared) = std::sync::Arc::get_mut(&mut tokenizer.0) {
                    shared.approximated = Some(name.to_owned());
                }
                Ok(tokenizer)
            }
            "llama" => file.scored(metadata),
            name => Err(TextError::unsupported(
                "tokenizer model",
                name,
                "byte-level BPE (`gpt2`) and SentencePiece (`llama`) are",
            )),
        }
    }
}

/// What most current vocabularies use.
fn nearest_rules() -> Result<PreRules> {
    let rules = rules("llama-bpe").ok_or_else(|| missing(PRE))?;
    Ok(PreRules { ignore_merges: false, add_bos: false, ..rules })
}

/// The part that every kind of vocabulary has.
struct GgufVocabulary<'a> {
    tokens: Vec<std::borrow::Cow<'a, str>>,
    types: Vec<TokenType>,
    turn_ends: BTreeSet<u32>,
}

impl<'a> GgufVocabulary<'a> {
    fn read(metadata: &'a Metadata) -> Result<Self> {
        let list = array_key(metadata, TOKENS)?.ok_or_else(|| missing(TOKENS))?;
        let mut tokens = Vec::with_capacity(list.len());
        let mut seen = HashSet::with_capacity(list.len());
        for (id, value) in list.iter().enumerate() {
            let text = value.as_str().ok_or_else(|| {
                TextError::bad_value(TOKENS, format!("token {id} is not a string"))
            })?;
            let text = match text {
                "" => format!("[EMPTY_{id}]").into(),
                text => std::borrow::Cow::Borrowed(text),
            };
            if !seen.insert(text.clone()) {
                return Err(TextError::bad_value(
                    TOKENS,
                    format!("token {id} `{text}` is there twice; convert the model again"),
                ));
            }
            tokens.push(text);
        }
        let types = match array_key(metadata, TYPES)? {
            Some(types) if types.len() < tokens.len() => {
                return Err(TextError::bad_value(
                    TYPES,
                    format!("{} types for {} tokens", types.len(), tokens.len()),
                ));
            }
            Some(types) => types.iter().map(|t| TokenType::of(t.as_u64().unwrap_or(1))).collect(),
            None => tokens.iter().map(|text| guess_type(text)).collect(),
        };
        let mut file = Self { tokens, types, turn_ends: BTreeSet::new() };
        file.find_turn_ends();
        Ok(file)
    }

    /// Finds the ends of turns by their text and makes sure that they count as control tokens. A token that the
    /// file calls ordinary is one only if it looks the part: some vocabularies have learnt `</s>` as a word.
    fn find_turn_ends(&mut self) {
        let ordinary = |id: usize, text: &str| match self.types[id] {
            TokenType::Control => false,
            TokenType::UserDefined => text == "</s>", // Gemma's is the HTML tag
            _ => true,
        };
        let found: Vec<(u32, &str)> = self
            .tokens
            .iter()
            .enumerate()
            .filter(|(id, text)| !ordinary(*id, text) || looks_like_marker(text))
            .filter_map(|(id, text)| Some((id as u32, *TURN_ENDS.iter().find(|end| *end == text)?)))
            .collect();
        let has = |text: &str| found.iter().any(|(_, end)| *end == text);
        // In harmony `<|end|>` ends a message, not the turn.
        let harmony = has("<|return|>") && has("<|call|>");
        self.turn_ends = found
            .iter()
            .filter(|(_, text)| !(harmony && *text == "<|end|>"))
            .map(|(id, _)| *id)
            .collect();
        for (id, _) in found {
            self.types[id as usize] = TokenType::Control;
        }
    }

    fn added(&self) -> Vec<AddedToken> {
        self.tokens
            .iter()
            .zip(&self.types)
            .filter_map(|(text, kind)| {
                let special = match kind {
                    TokenType::Control | TokenType::Unknown => true,
                    TokenType::UserDefined => false,
                    _ => return None,
                };
                Some(AddedToken::from(text.as_ref(), special).normalized(false))
            })
            .collect()
    }

    /// Begin and end tokens. `default_*` hold where the file says nothing.
    fn ends(
        &self,
        metadata: &Metadata,
        default_add_bos: bool,
        default_ids: [Option<u32>; 3],
    ) -> Ends {
        let id = |key: &str| {
            let id =
                u32::try_from(metadata.get(&format!("tokenizer.ggml.{key}"))?.as_u64()?).ok()?;
            ((id as usize) < self.tokens.len()).then_some(id)
        };
        let [bos, eos, unknown] = default_ids;
        let last = id("eos_token_id").or(eos);
        let mut all = self.turn_ends.clone();
        all.extend(["eot_token_id", "eom_token_id"].into_iter().filter_map(id).chain(last));
        let stated = metadata.get("tokenizer.ggml.add_bos_token").and_then(MetaValue::as_bool);
        Ends {
            bos: id("bos_token_id").or(bos),
            add_bos: stated.unwrap_or(default_add_bos),
            eos_text: last.map(|id| self.tokens[id as usize].to_string()),
            eos: all,
            unknown: id("unknown_token_id").or(unknown),
        }
    }

    /// Byte pair encoding by a list of merges.
    fn merged(self, metadata: &Metadata, rules: PreRules) -> Result<Tokenizer> {
        let vocab: Vocab = self
            .tokens
            .iter()
            .enumerate()
            .map(|(id, text)| (text.to_string(), id as u32))
            .collect();
        let list = array_key(metadata, MERGES)?.ok_or_else(|| missing(MERGES))?;
        let mut merges: Merges = Vec::with_capacity(list.len());
        for (index, value) in list.iter().enumerate() {
            let pair = value.as_str().and_then(split_merge);
            let (left, right) = pair.ok_or_else(|| {
                TextError::bad_value(MERGES, format!("merge {index} is not two tokens"))
            })?;
            let usable = |text: &str| vocab.contains_key(text);
            if usable(left) && usable(right) && usable(&format!("{left}{right}")) {
                merges.push((left.to_owned(), right.to_owned()));
            }
        }
        let mut bpe =
            BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(rules.ignore_merges);
        if rules.plain_text {
            bpe = bpe.byte_fallback(true).fuse_unk(true);
            if self.tokens.iter().any(|text| text == "<unk>") {
                bpe = bpe.unk_token("<unk>".to_owned());
            }
        }
        let bpe = bpe.build().map_err(|error| TextError::bad_value(MERGES, error.to_string()))?;
        // Gemma's converter writes the flag as false, and the model is lost without its begin token.
        let mut ends = self.ends(metadata, rules.add_bos, [None; 3]);
        ends.add_bos |= rules.plain_text;
        let style = match rules.plain_text {
            true => PieceStyle::Marks { byte_fallback: true, strip_first: false },
            false => PieceStyle::ByteLevel,
        };
        let parts = Parts {
            model: AnyModel::Library(Box::new(ModelWrapper::BPE(bpe))),
            normalizer: rules.normalizer()?,
            pre_tokenizer: rules.pre_tokenizer()?,
            style,
            added: self.added(),
        };
        Tokenizer::assemble(parts, |_| ends)
    }

    /// SentencePiece by scores.
    fn scored(self, metadata: &Metadata) -> Result<Tokenizer> {
        let scores = array_key(metadata, SCORES)?.ok_or_else(|| missing(SCORES))?;
        if scores.len() < self.tokens.len() {
            return Err(TextError::bad_value(
                SCORES,
                format!("{} scores for {} tokens", scores.len(), self.tokens.len()),
            ));
        }
        let mut pieces = Vec::with_capacity(self.tokens.len());
        for (id, (text, kind)) in self.tokens.iter().zip(&self.types).enumerate() {
            let kind = match kind {
                TokenType::Byte => match byte_token(text) {
                    Some(byte) => PieceKind::Byte(byte),
                    None => {
                        return Err(TextError::bad_value(
                            TOKENS,
                            format!("byte token {id} reads `{text}`, not `<0xAB>`"),
                        ));
                    }
                },
                TokenType::Control | TokenType::Unknown => PieceKind::Marker,
                TokenType::Normal | TokenType::UserDefined | TokenType::Unused => PieceKind::Text,
            };
            let score = scores[id]
                .as_f64()
                .or(match scores[id] {
                    MetaValue::I32(score) => Some(score as f64),
                    _ => None,
                })
                .ok_or_else(|| {
                    TextError::bad_value(SCORES, format!("score {id} is not a number"))
                })?;
            pieces.push(ScorePiece { text: text.as_ref().into(), score: score as f32, kind });
        }
        let space_prefix = metadata
            .get("tokenizer.ggml.add_space_prefix")
            .and_then(MetaValue::as_bool)
            .unwrap_or(true);
        let mut steps = Vec::with_capacity(2);
        if space_prefix {
            steps.push(NormalizerWrapper::Prepend(Prepend::new("\u{2581}".to_owned())));
        }
        steps.push(spaces_to_marks()?);
        let in_range = |id: u32| ((id as usize) < self.tokens.len()).then_some(id);
        let ends = self.ends(metadata, true, [in_range(1), in_range(2), in_range(0)]);
        let parts = Parts {
            model: AnyModel::Scores(ScoreModel::new(pieces, ends.unknown)),
            normalizer: Some(NormalizerWrapper::Sequence(Sequence::new(steps))),
            pre_tokenizer: None,
            style: PieceStyle::Marks { byte_fallback: true, strip_first: space_prefix },
            added: self.added(),
        };
        Tokenizer::assemble(parts, |_| ends)
    }
}

/// A merge is two tokens with a space between; the first may begin with one.
fn split_merge(text: &str) -> Option<(&str, &str)> {
    let first = text.chars().next()?.len_utf8();
    let at = first + text[first..].find(' ')?;
    Some((&text[..at], &text[at + 1..]))
}

/// For files without types.
fn guess_type(text: &str) -> TokenType {
    match text {
        "<unk>" => TokenType::Unknown,
        "<s>" | "</s>" => TokenType::Control,
        _ if looks_like_marker(text) => TokenType::Control,
        _ if byte_token(text).is_some() => TokenType::Byte,
        _ => TokenType::Normal,
    }
}

fn missing(key: &str) -> TextError {
    TextError::MissingKey { key: key.to_owned() }
}

fn text_key<'a>(metadata: &'a Metadata, key: &str) -> Result<Option<&'a str>> {
    let Some(value) = metadata.get(key) else { return Ok(None) };
    value.as_str().map(Some).ok_or_else(|| TextError::bad_value(key, "is not a string"))
}

fn array_key<'a>(metadata: &'a Metadata, key: &str) -> Result<Option<&'a [MetaValue]>> {
    let Some(value) = metadata.get(key) else { return Ok(None) };
    value.as_array().map(Some).ok_or_else(|| TextError::bad_value(key, "is not an array"))
}
