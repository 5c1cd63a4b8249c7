//! Ids to text, one at a time, never half a character.

use crate::tokenizer::{Markers, Tokenizer};

/// Turns ids into text as they come. What it gives, joined, equals decoding the whole.
#[derive(Clone, Debug)]
pub struct StreamDecoder {
    tokenizer: Tokenizer,
    markers: Markers,
    /// Bytes of a character that is not complete yet: at most three, unless nothing else came.
    pending: Vec<u8>,
    text: String,
    at_start: bool,
}

impl StreamDecoder {
    /// At the start of a text.
    pub fn new(tokenizer: Tokenizer, markers: Markers) -> Self {
        Self { tokenizer, markers, pending: Vec::new(), text: String::new(), at_start: true }
    }

    /// Takes the next id and gives the text that is certain by now, possibly empty. Bytes that cannot be UTF-8
    /// any more show as U+FFFD.
    pub fn push(&mut self, id: u32) -> &str {
        self.text.clear();
        if self.markers == Markers::Skip && self.tokenizer.is_marker(id) {
            return &self.text;
        }
        let bytes = self.tokenizer.token_bytes(id);
        let mut bytes = bytes.as_slice();
        if self.at_start && !bytes.is_empty() {
            self.at_start = false;
            if self.tokenizer.strips_first_space() {
                bytes = bytes.strip_prefix(b" ").unwrap_or(bytes);
            }
        }
        self.pending.extend_from_slice(bytes);
        let mut done = 0;
        for chunk in self.pending.utf8_chunks() {
            self.text.push_str(chunk.valid());
            done += chunk.valid().len();
            let invalid = chunk.invalid();
            if invalid.is_empty()
                || (done + invalid.len() == self.pending.len() && is_open(invalid))
            {
                break;
            }
            self.text.push('\u{fffd}');
            done += invalid.len();
        }
        self.pending.drain(..done);
        &self.text
    }

    /// The end: an incomplete character shows as U+FFFD.
    pub fn finish(&mut self) -> String {
        self.at_start = true;
        String::from_utf8_lossy(&std::mem::take(&mut self.pending)).into_owned()
    }
}

/// Whether more bytes could complete this to a character. It is known to be a character's valid beginning or a
/// byte that begins none.
fn is_open(bytes: &[u8]) -> bool {
    std::str::from_utf8(bytes).is_err_and(|error| error.error_len().is_none())
}
