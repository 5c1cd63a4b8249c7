//! Token ids in, deltas out.

use forebay_text::{Markers, StreamDecoder, Tokenizer};

use crate::calls::Tool;
use crate::format::Format;
use crate::parser::{End, Parser};
use crate::sink::Delta;

/// Decodes and parses one answer.
#[derive(Debug)]
pub struct Answer {
    tokenizer: Tokenizer,
    format: Format,
    decoder: StreamDecoder,
    parser: Parser,
}

impl Answer {
    /// For an answer in this format; see [`Parser::new`].
    pub fn new(
        tokenizer: &Tokenizer,
        format: Format,
        tools: &[Tool],
        prompt_tail: &str,
        stops: &[String],
    ) -> Answer {
        Answer {
            tokenizer: tokenizer.clone(),
            format,
            decoder: StreamDecoder::new(tokenizer.clone(), Markers::Keep),
            parser: Parser::new(format, tools, prompt_tail, stops),
        }
    }

    /// Takes the next id. Control tokens that mean nothing in this format are no text.
    pub fn push(&mut self, id: u32) -> Vec<Delta> {
        if self.tokenizer.is_marker(id) {
            let known = self.tokenizer.token_name(id);
            if !known.is_some_and(|text| self.format.markers().contains(&text.as_ref())) {
                return Vec::new();
            }
        }
        let text = self.decoder.push(id);
        self.parser.push(text)
    }

    /// The end.
    pub fn finish(&mut self, end: End) -> Vec<Delta> {
        let rest = self.decoder.finish();
        let mut deltas = self.parser.push(&rest);
        deltas.extend(self.parser.finish(end));
        deltas
    }

    /// The parser, for what it knows.
    pub fn parser(&self) -> &Parser {
        &self.parser
    }
}
