//! The vocabulary behind a tokenizer: one of the `tokenizers` crate's models, or SentencePiece by scores.
//!
//! It is shared, so that the variants of a tokenizer (markers parsed or not) cost one vocabulary.

use std::collections::{BinaryHeap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tokenizers::models::{ModelWrapper, TrainerWrapper};
use tokenizers::{Model, Token};

/// A vocabulary that several tokenizers hold together.
#[derive(Clone)]
pub(crate) struct SharedModel(pub(crate) Arc<AnyModel>);

/// The two kinds of vocabulary.
pub(crate) enum AnyModel {
    /// As `tokenizer.json` describes it, or BPE by merges from a GGUF file.
    Library(Box<ModelWrapper>),
    /// SentencePiece BPE by scores from a GGUF file.
    Scores(ScoreModel),
}

impl Model for SharedModel {
    type Trainer = TrainerWrapper;

    fn tokenize(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        match &*self.0 {
            AnyModel::Library(model) => model.tokenize(text),
            AnyModel::Scores(model) => model.tokenize(text),
        }
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match &*self.0 {
            AnyModel::Library(model) => model.token_to_id(token),
            AnyModel::Scores(model) => model.ids.get(token).copied(),
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        match &*self.0 {
            AnyModel::Library(model) => model.id_to_token(id),
            AnyModel::Scores(model) => {
                model.pieces.get(id as usize).map(|piece| piece.text.to_string())
            }
        }
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match &*self.0 {
            AnyModel::Library(model) => model.get_vocab(),
            AnyModel::Scores(model) => {
                model.ids.iter().map(|(text, id)| (text.to_string(), *id)).collect()
            }
        }
    }

    fn get_vocab_size(&self) -> usize {
        match &*self.0 {
            AnyModel::Library(model) => model.get_vocab_size(),
            AnyModel::Scores(model) => model.pieces.len(),
        }
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("a shared vocabulary is not saved".into())
    }

    fn get_trainer(&self) -> TrainerWrapper {
        TrainerWrapper::BpeTrainer(Default::default())
    }
}

/// What a SentencePiece token is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PieceKind {
    /// May come out of merging characters.
    Text,
    /// `<0xAB>`: stands for one byte.
    Byte(u8),
    /// Never comes out of text.
    Marker,
}

pub(crate) struct ScorePiece {
    pub(crate) text: Arc<str>,
    pub(crate) score: f32,
    pub(crate) kind: PieceKind,
}

/// SentencePiece BPE: the adjacent pair whose joined token scores highest is joined first, the leftmost of equals.
pub(crate) struct ScoreModel {
    pieces: Vec<ScorePiece>,
    ids: HashMap<Arc<str>, u32>,
    bytes: Box<[Option<u32>; 256]>,
    unknown: Option<u32>,
}

/// A pair that could be joined. Ordered by score, then leftmost first.
#[derive(PartialEq)]
struct Pair {
    score: f32,
    left: usize,
    right: usize,
    len: usize,
}

impl Eq for Pair {}
impl Ord for Pair {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.score.total_cmp(&other.score).then(other.left.cmp(&self.left))
    }
}
impl PartialOrd for Pair {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// A run of the text that is one symbol by now; `len` 0 once it was joined to its left neighbour.
struct Symbol {
    start: usize,
    len: usize,
    prev: Option<usize>,
    next: Option<usize>,
}

impl ScoreModel {
    /// From the tokens in id order.
    pub(crate) fn new(pieces: Vec<ScorePiece>, unknown: Option<u32>) -> Self {
        let mut bytes = Box::new([None; 256]);
        let mut ids = HashMap::with_capacity(pieces.len());
        for (id, piece) in pieces.iter().enumerate() {
            ids.insert(piece.text.clone(), id as u32);
            if let PieceKind::Byte(byte) = piece.kind {
                bytes[byte as usize] = Some(id as u32);
            }
        }
        Self { pieces, ids, bytes, unknown }
    }

    fn text_id(&self, text: &str) -> Option<u32> {
        let id = *self.ids.get(text)?;
        (self.pieces[id as usize].kind == PieceKind::Text).then_some(id)
    }

    fn tokenize(&self, text: &str) -> tokenizers::Result<Vec<Token>> {
        let mut symbols: Vec<Symbol> = text
            .char_indices()
            .enumerate()
            .map(|(index, (start, c))| Symbol {
                start,
                len: c.len_utf8(),
                prev: index.checked_sub(1),
                next: Some(index + 1),
            })
            .collect();
        let Some(last) = symbols.last_mut() else {
            return Ok(Vec::new());
        };
        last.next = None;

        let mut queue = BinaryHeap::new();
        for left in 0..symbols.len() - 1 {
            self.offer(text, &symbols, left, left + 1, &mut queue);
        }
        while let Some(pair) = queue.pop() {
            let (left, right) = (&symbols[pair.left], &symbols[pair.right]);
            if left.len == 0 || right.len == 0 || left.len + right.len != pair.len {
                continue; // one of them was joined elsewhere since
            }
            let (prev, next) = (left.prev, right.next);
            symbols[pair.left].len = pair.len;
            symbols[pair.left].next = next;
            symbols[pair.right].len = 0;
            if let Some(next) = next {
                symbols[next].prev = Some(pair.left);
                self.offer(text, &symbols, pair.left, next, &mut queue);
            }
            if let Some(prev) = prev {
                self.offer(text, &symbols, prev, pair.left, &mut queue);
            }
        }

        let mut tokens = Vec::with_capacity(symbols.iter().filter(|s| s.len > 0).count());
        for symbol in symbols.iter().filter(|s| s.len > 0) {
            let range = (symbol.start, symbol.start + symbol.len);
            let piece = &text[range.0..range.1];
            match self.text_id(piece) {
                Some(id) => tokens.push(Token::new(id, piece.to_owned(), range)),
                None => self.bytes_of(piece, range, &mut tokens),
            }
        }
        Ok(tokens)
    }

    fn offer(
        &self,
        text: &str,
        symbols: &[Symbol],
        left: usize,
        right: usize,
        queue: &mut BinaryHeap<Pair>,
    ) {
        let start = symbols[left].start;
        let len = symbols[left].len + symbols[right].len;
        if let Some(id) = self.text_id(&text[start..start + len]) {
            queue.push(Pair { score: self.pieces[id as usize].score, left, right, len });
        }
    }

    /// A character without a token: its bytes, or the unknown token where a byte has none.
    fn bytes_of(&self, piece: &str, range: (usize, usize), tokens: &mut Vec<Token>) {
        let ids: Option<Vec<u32>> = piece.bytes().map(|b| self.bytes[b as usize]).collect();
        match ids {
            Some(ids) => {
                tokens.extend(ids.into_iter().map(|id| Token::new(id, String::new(), range)))
            }
            None => tokens.extend(self.unknown.map(|id| Token::new(id, piece.to_owned(), range))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn joins_by_score_leftmost_first() {
        let rows = [
            ("<unk>", 0.0, PieceKind::Marker),
            ("<s>", 0.0, PieceKind::Marker),
            ("<0xC3>", 0.0, PieceKind::Byte(0xc3)),
            ("<0xA9>", 0.0, PieceKind::Byte(0xa9)),
            ("a", -9.0, PieceKind::Text),
            ("b", -9.0, PieceKind::Text),
            ("ab", -1.0, PieceKind::Text),
            ("aa", -1.0, PieceKind::Text),
            ("aab", -0.5, PieceKind::Text),
            ("<", -9.0, PieceKind::Text),
            ("s", -9.0, PieceKind::Text),
            (">", -9.0, PieceKind::Text),
            ("<s", -2.0, PieceKind::Text),
        ];
        let pieces = rows.map(|(text, score, kind)| ScorePiece { text: text.into(), score, kind });
        let model = ScoreModel::new(pieces.into(), Some(0));
        for (text, want) in [
            ("", vec![]),
            ("aab", vec![8]),
            ("aaab", vec![7, 6]),
            ("é", vec![2, 3]),
            ("日", vec![0]),
            ("<s>", vec![12, 11]),
        ] {
            let got: Vec<u32> = model.tokenize(text).unwrap().iter().map(|t| t.id).collect();
            assert_eq!(got, want, "{text}");
        }
    }
}
