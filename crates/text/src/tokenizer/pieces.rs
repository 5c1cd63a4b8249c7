//! From token text in the vocabulary to the bytes it stands for.

use serde_json::Value;

use crate::error::{Result, TextError};

/// How a vocabulary writes bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PieceStyle {
    /// Each byte is one printable character, as in GPT-2.
    ByteLevel,
    /// UTF-8 with U+2581 for a space and `<0xAB>` for single bytes.
    Marks {
        /// `<0xAB>` stands for a byte.
        byte_fallback: bool,
        /// A text's first space is not part of the text.
        strip_first: bool,
    },
    /// The text as it is.
    Plain,
}

impl PieceStyle {
    /// Reads it off a `tokenizer.json` decoder.
    pub(crate) fn of(decoder: &Value) -> Result<Self> {
        if decoder.is_null() {
            return Ok(Self::Plain);
        }
        let steps = match decoder["decoders"].as_array() {
            Some(steps) => steps.as_slice(),
            None => std::slice::from_ref(decoder),
        };
        let (mut byte_level, mut marks, mut byte_fallback, mut strip_first) =
            (false, false, false, false);
        for step in steps {
            match step["type"].as_str().unwrap_or_default() {
                "ByteLevel" => byte_level = true,
                "ByteFallback" => byte_fallback = true,
                "Fuse" => {}
                "Replace" if is_mark_to_space(step) => marks = true,
                "Strip" if step["content"] == " " => {
                    strip_first = step["start"].as_u64().unwrap_or(0) > 0
                }
                "Metaspace" if step["replacement"] == "\u{2581}" => {
                    marks = true;
                    // Older files have a flag in the scheme's place.
                    strip_first = match step["prepend_scheme"].as_str() {
                        Some(scheme) => scheme != "never",
                        None => step["add_prefix_space"] != false,
                    };
                }
                name => {
                    let remedy = "only byte-level and SentencePiece vocabularies are";
                    return Err(TextError::unsupported("decoder", name, remedy));
                }
            }
        }
        Ok(match (byte_level, marks || byte_fallback) {
            (true, _) => Self::ByteLevel,
            (false, true) => Self::Marks { byte_fallback, strip_first },
            (false, false) => Self::Plain,
        })
    }

    /// The bytes of a vocabulary entry.
    pub(crate) fn bytes(self, token: &str) -> Vec<u8> {
        match self {
            Self::Plain => token.as_bytes().to_vec(),
            Self::ByteLevel => {
                let bytes: Option<Vec<u8>> = token.chars().map(byte_of_char).collect();
                bytes.unwrap_or_else(|| token.as_bytes().to_vec())
            }
            Self::Marks { byte_fallback, .. } => {
                match byte_token(token).filter(|_| byte_fallback) {
                    Some(byte) => vec![byte],
                    None => token.replace('\u{2581}', " ").into_bytes(),
                }
            }
        }
    }

    /// Whether U+2581 stands for a space.
    pub(crate) fn has_marks(self) -> bool {
        matches!(self, Self::Marks { .. })
    }

    /// Whether the first space of a decoded text is dropped.
    pub(crate) fn strips_first_space(self) -> bool {
        matches!(self, Self::Marks { strip_first: true, .. })
    }
}

fn is_mark_to_space(step: &Value) -> bool {
    step["pattern"]["String"] == "\u{2581}" && step["content"] == " "
}

/// The byte that `<0xAB>` stands for.
pub(crate) fn byte_token(token: &str) -> Option<u8> {
    let hex = token.strip_prefix("<0x")?.strip_suffix('>')?;
    let two_digits = hex.len() == 2 && hex.bytes().all(|b| b.is_ascii_hexdigit());
    two_digits.then(|| u8::from_str_radix(hex, 16).ok()).flatten()
}

/// GPT-2's byte alphabet: printable Latin-1 stands for itself, the other 68 bytes are U+0100 onwards in order.
fn byte_of_char(c: char) -> Option<u8> {
    let code = c as u32;
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8), // 0x00..=0x20
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8), // 0x7f..=0xa0
        0x143 => Some(0xad),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_is_a_bijection() {
        let mut seen = [false; 256];
        for c in (0u32..0x200).filter_map(char::from_u32) {
            if let Some(byte) = byte_of_char(c) {
                assert!(!std::mem::replace(&mut seen[byte as usize], true));
            }
        }
        assert!(seen.iter().all(|s| *s));
        assert_eq!(byte_of_char('Ġ'), Some(b' '));
        assert_eq!(byte_of_char('Ċ'), Some(b'\n'));
    }

    #[test]
    fn byte_tokens() {
        for (text, want) in [
            ("<0x0A>", Some(10)),
            ("<0xFF>", Some(255)),
            ("<0xF>", None),
            ("<0x+F>", None),
            ("<s>", None),
        ] {
            assert_eq!(byte_token(text), want, "{text}");
        }
    }
}
