//! Text to ids and back, the same path for a `tokenizer.json` and for a GGUF file.
//!
//! A *marker* is a control token such as `<|im_end|>`: everything the vocabulary flags as special, and every
//! added token of the form `<|x|>`. With [`Specials::Ignore`] no text, whatever it says, becomes a marker.

mod components;
mod folder;
mod gguf;
mod memory;
mod model;
mod pieces;
mod pretokenizer;

use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;

use aho_corasick::{AhoCorasick, MatchKind};
use forebay_files::{Catalog, Source};
use tokenizers::pre_tokenizers::metaspace::PrependScheme;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::{
    AddedToken, AddedVocabulary, DecoderWrapper, Model, NormalizerWrapper, PostProcessorWrapper,
    PreTokenizerWrapper, TokenizerBuilder, TokenizerImpl,
};

pub use folder::TokenizerFiles;
pub(crate) use folder::read_optional;

use crate::error::{Result, TextError, one_line};
use crate::stream::StreamDecoder;
pub use memory::MemoryEstimate;
use model::{AnyModel, SharedModel};
use pieces::PieceStyle;

/// What marker text inside a text counts as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Specials {
    /// Ordinary text. The only choice for what a user wrote.
    Ignore,
    /// The marker.
    Parse,
}

/// Whether markers show in decoded text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Markers {
    /// By their text.
    Keep,
    /// Left out.
    Skip,
}

/// Choices when opening a tokenizer.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokenizerOptions {
    /// Take the nearest rules where the file's pre-tokenizer is not known, instead of refusing it. Ids may
    /// then differ from those the model was trained with.
    pub approximate: bool,
}

type Inner = TokenizerImpl<
    SharedModel,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// A tokenizer. Clones share everything.
#[derive(Clone)]
pub struct Tokenizer(Arc<Shared>);

struct Shared {
    /// Matches every added token.
    parsing: Inner,
    /// Matches no marker.
    ignoring: Inner,
    /// As `ignoring`, for a text that follows a marker, where these differ.
    following: Option<Inner>,
    style: PieceStyle,
    /// Text of added tokens, which is never written in the vocabulary's alphabet.
    added: HashMap<u32, String>,
    marker_ids: HashSet<u32>,
    markers: Vec<(String, u32)>,
    /// Finds `markers` by index.
    marker_search: AhoCorasick,
    vocab_size: usize,
    ends: Ends,
    approximated: Option<String>,
}

/// Tokens that begin and end a text.
#[derive(Clone, Debug, Default)]
struct Ends {
    bos: Option<u32>,
    add_bos: bool,
    eos_text: Option<String>,
    eos: BTreeSet<u32>,
    unknown: Option<u32>,
}

/// A tokenizer's parts as a file gives them.
struct Parts {
    model: AnyModel,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    style: PieceStyle,
    added: Vec<AddedToken>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("vocab_size", &self.0.vocab_size)
            .field("style", &self.0.style)
            .field("markers", &self.0.markers.len())
            .field("ends", &self.0.ends)
            .finish()
    }
}

impl Tokenizer {
    /// Of an opened checkpoint.
    pub fn from_catalog(catalog: &Catalog, options: TokenizerOptions) -> Result<Self> {
        match &catalog.source {
            Source::Gguf { metadata } => Self::from_gguf(metadata, options),
            Source::Folder { dir, .. } => Self::from_folder(dir),
        }
    }

    /// What building and holding it takes, known before it is built.
    pub fn memory_bytes(catalog: &Catalog) -> Result<MemoryEstimate> {
        match &catalog.source {
            Source::Gguf { metadata } => memory::of_gguf(metadata),
            Source::Folder { dir, .. } => Self::folder_memory_bytes(dir),
        }
    }

    /// The same for a folder with `tokenizer.json`.
    pub fn folder_memory_bytes(dir: &Path) -> Result<MemoryEstimate> {
        memory::of_folder(dir)
    }

    fn assemble(
        parts: Parts,
        ends: impl FnOnce(&dyn Fn(&str) -> Option<u32>) -> Ends,
    ) -> Result<Self> {
        let model = SharedModel(Arc::new(parts.model));
        let normalizer = parts.normalizer.as_ref();
        let mut parsed = AddedVocabulary::new();
        parsed.add_tokens(&parts.added, &model, normalizer);
        let mut ignored = AddedVocabulary::new();
        let flagged: Vec<AddedToken> =
            parts.added.iter().map(|token| token.clone().special(is_marker(token))).collect();
        ignored.add_tokens(&flagged, &model, normalizer);
        ignored.set_encode_special_tokens(true);

        let mut added = HashMap::with_capacity(flagged.len());
        let mut markers = Vec::new();
        for token in flagged.into_iter().filter(|token| !token.content.is_empty()) {
            let Some(id) = parsed.token_to_id(&token.content, &model) else { continue };
            if token.special {
                markers.push((token.content.clone(), id));
            }
            added.insert(id, token.content);
        }
        let past_added = added.keys().max().map_or(0, |id| *id as usize + 1);
        let ends = ends(&|text| parsed.token_to_id(text, &model));

        let build = |vocabulary: AddedVocabulary,
                     pre_tokenizer: Option<PreTokenizerWrapper>|
         -> Result<Inner> {
            TokenizerBuilder::new()
                .with_model(model.clone())
                .with_normalizer(parts.normalizer.clone())
                .with_pre_tokenizer(pre_tokenizer)
                .with_added_vocabulary(vocabulary)
                .build()
                .map_err(|error| TextError::bad_value("tokenizer", error.to_string()))
        };
        let following = match parts.pre_tokenizer.clone().map(without_first_prefix) {
            Some((pre_tokenizer, true)) => Some(build(ignored.clone(), Some(pre_tokenizer))?),
            _ => None,
        };
        let marker_search = AhoCorasick::builder()
            .match_kind(MatchKind::LeftmostLongest)
            .build(markers.iter().map(|(text, _)| text))
            .map_err(|error| TextError::bad_value("added tokens", error.to_string()))?;
        Ok(Self(Arc::new(Shared {
            parsing: build(parsed, parts.pre_tokenizer.clone())?,
            ignoring: build(ignored, parts.pre_tokenizer)?,
            following,
            style: parts.style,
            added,
            marker_ids: markers.iter().map(|(_, id)| *id).collect(),
            marker_search,
            markers,
            vocab_size: model.get_vocab_size().max(past_added),
            ends,
            approximated: None,
        })))
    }

    /// Ids of a text, without any begin or end token.
    pub fn encode(&self, text: &str, specials: Specials) -> Result<Vec<u32>> {
        match specials {
            Specials::Parse => run(&self.0.parsing, text),
            Specials::Ignore => self.encode_ordinary(text, true),
        }
    }

    /// Ids of a raw prompt: as [`encode`](Self::encode), with the begin token in front where the model wants
    /// one and the text does not start with it already.
    pub fn encode_prompt(&self, text: &str, specials: Specials) -> Result<Vec<u32>> {
        let mut ids = self.encode(text, specials)?;
        self.begin(&mut ids);
        Ok(ids)
    }

    /// Puts the begin token in front where the model wants one and there is none. Never removes any.
    pub(crate) fn begin(&self, ids: &mut Vec<u32>) {
        if let (true, Some(bos)) = (self.0.ends.add_bos, self.0.ends.bos)
            && ids.first() != Some(&bos)
        {
            ids.insert(0, bos);
        }
    }

    /// Ids of text of which nothing is a marker. `at_start` is false for text that follows a marker.
    pub(crate) fn encode_ordinary(&self, text: &str, at_start: bool) -> Result<Vec<u32>> {
        let inner = match &self.0.following {
            Some(following) if !at_start => following,
            _ => &self.0.ignoring,
        };
        let ids = run(inner, text)?;
        let is_marker =
            |id: &u32| self.0.marker_ids.contains(id) && Some(*id) != self.0.ends.unknown;
        if !ids.iter().any(is_marker) {
            return Ok(ids);
        }
        // A vocabulary that lists its markers may reach one from a whole word: cut each after its first character.
        let mut ids = Vec::with_capacity(ids.len() + 1);
        let mut from = 0;
        while let Some((start, _)) = self.find_marker(&text[from..]) {
            let first = text[from + start..].chars().next().map_or(1, char::len_utf8);
            let to = from + start + first;
            ids.extend(run(inner, &text[from..to])?);
            from = to;
        }
        ids.extend(run(inner, &text[from..])?);
        ids.retain(|id| !is_marker(id));
        Ok(ids)
    }

    /// The leftmost marker in the text, the longest of those that start there: its start and index in
    /// [`markers`](Self::markers).
    pub(crate) fn find_marker(&self, text: &str) -> Option<(usize, usize)> {
        let found = self.0.marker_search.find(text)?;
        Some((found.start(), found.pattern().as_usize()))
    }

    /// Text of ids, the whole at once. Bytes that are no UTF-8 show as U+FFFD.
    pub fn decode(&self, ids: &[u32], markers: Markers) -> String {
        let mut decoder = StreamDecoder::new(self.clone(), markers);
        let mut text = String::new();
        for id in ids {
            text.push_str(decoder.push(*id));
        }
        text.push_str(&decoder.finish());
        text
    }

    /// The bytes a token stands for; none for an id outside the vocabulary.
    pub fn token_bytes(&self, id: u32) -> Vec<u8> {
        match self.0.added.get(&id) {
            // Some SentencePiece vocabularies list runs of spaces as added tokens.
            Some(text) if !self.is_marker(id) && self.0.style.has_marks() => {
                self.0.style.bytes(text)
            }
            Some(text) => text.as_bytes().to_vec(),
            None => self.token_name(id).map_or_else(Vec::new, |token| self.0.style.bytes(&token)),
        }
    }

    /// A token as the vocabulary writes it.
    pub fn token_name(&self, id: u32) -> Option<Cow<'_, str>> {
        match self.0.added.get(&id) {
            Some(text) => Some(Cow::Borrowed(text)),
            None => self.0.parsing.get_model().id_to_token(id).map(Cow::Owned),
        }
    }

    /// Id of a token as the vocabulary writes it.
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.0.parsing.token_to_id(token)
    }

    /// Number of ids, added tokens included.
    pub fn vocab_size(&self) -> usize {
        self.0.vocab_size
    }

    /// Whether the id is a marker.
    pub fn is_marker(&self, id: u32) -> bool {
        self.0.marker_ids.contains(&id)
    }

    /// All markers with their ids.
    pub fn markers(&self) -> &[(String, u32)] {
        &self.0.markers
    }

    /// The begin token.
    pub fn bos(&self) -> Option<u32> {
        self.0.ends.bos
    }

    /// Whether a prompt gets the begin token.
    pub fn adds_bos(&self) -> bool {
        self.0.ends.add_bos && self.0.ends.bos.is_some()
    }

    /// Text of the begin token, which templates call `bos_token`.
    pub fn bos_text(&self) -> Option<Cow<'_, str>> {
        self.token_name(self.0.ends.bos?)
    }

    /// Text of the end token, which templates call `eos_token`.
    pub fn eos_text(&self) -> Option<&str> {
        self.0.ends.eos_text.as_deref()
    }

    /// Every id that ends an answer, by all that the model's files say.
    pub fn eos_ids(&self) -> &BTreeSet<u32> {
        &self.0.ends.eos
    }

    /// The pre-tokenizer's name where its rules had to be guessed.
    pub fn approximated(&self) -> Option<&str> {
        self.0.approximated.as_deref()
    }

    pub(crate) fn strips_first_space(&self) -> bool {
        self.0.style.strips_first_space()
    }
}

fn run(inner: &Inner, text: &str) -> Result<Vec<u32>> {
    let encoding = inner
        .encode_fast(text, false)
        .map_err(|error| TextError::Tokenize { detail: one_line(&error.to_string()) })?;
    Ok(encoding.get_ids().to_vec())
}

fn is_marker(token: &AddedToken) -> bool {
    token.special || looks_like_marker(&token.content)
}

/// `<|x|>`, `<|x>`, `<x|>` and the same with a full-width bar.
fn looks_like_marker(text: &str) -> bool {
    let Some(inner) = text.strip_prefix('<').and_then(|text| text.strip_suffix('>')) else {
        return false;
    };
    let bar = ['|', '｜'];
    inner.starts_with(bar) || inner.ends_with(bar)
}

/// The same rules without the space that some put before the first word of a text, and whether that differs.
fn without_first_prefix(pre_tokenizer: PreTokenizerWrapper) -> (PreTokenizerWrapper, bool) {
    match pre_tokenizer {
        PreTokenizerWrapper::Metaspace(mut metaspace)
            if metaspace.prepend_scheme == PrependScheme::First =>
        {
            metaspace.prepend_scheme = PrependScheme::Never;
            (PreTokenizerWrapper::Metaspace(metaspace), true)
        }
        PreTokenizerWrapper::Sequence(sequence) => {
            let steps: Vec<_> = sequence.into_iter().map(without_first_prefix).collect();
            let differs = steps.iter().any(|(_, differs)| *differs);
            let steps = steps.into_iter().map(|(step, _)| step).collect();
            (PreTokenizerWrapper::Sequence(Sequence::new(steps)), differs)
        }
        other => (other, false),
    }
}
