//! How a byte-level BPE vocabulary cuts text into words, by the name a GGUF file gives (`tokenizer.ggml.pre`).
//!
//! A GGUF file stores only this name. The rules are those of the `tokenizer.json` that the model was published
//! with. Adding a name is adding a row.

use tokenizers::normalizers::unicode::NFC;
use tokenizers::normalizers::{NormalizerWrapper, Replace};
use tokenizers::pre_tokenizers::PreTokenizerWrapper;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::normalizer::SplitDelimiterBehavior;

use crate::error::{Result, TextError};

/// Rules of one pre-tokenizer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PreRules {
    /// Applied one after another; both what a pattern matches and what lies between become words.
    pub(crate) patterns: &'static [&'static str],
    /// A word that is a token is taken whole, whatever the merges say.
    pub(crate) ignore_merges: bool,
    /// Text is brought to composed form first.
    pub(crate) nfc: bool,
    /// A beginning-of-text token is added unless the file says otherwise.
    pub(crate) add_bos: bool,
    /// Tokens are UTF-8 text with U+2581 for space, not byte-level characters.
    pub(crate) plain_text: bool,
}

const BASE: PreRules = PreRules {
    patterns: &[GPT2],
    ignore_merges: false,
    nfc: false,
    add_bos: false,
    plain_text: false,
};

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN35: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const KIMI_K2: &str = r"[\p{Han}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const BAILING: &str = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+";
const SEED_CODER: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const EXAONE_MOE: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+";
const DEEPSEEK3: &[&str] = &[
    r"\p{N}{1,3}",
    "[一-龥\u{3040}-ゟ゠-ヿ]+",
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
];
const DEEPSEEK_CODER: &[&str] =
    &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u{800}-一가-\u{d7ff}]+", r"\p{N}"];
/// The letters are those with case, as the published file spells out.
const DEEPSEEK_LLM: &[&str] = &[
    r"[\r\n]",
    "\\s?[A-Za-z\u{b5}\u{c0}-\u{d6}\u{d8}-\u{f6}\u{f8}-\u{1ba}\u{1bc}-\u{1bf}\u{1c4}-\u{293}\u{295}-\u{2af}\u{370}-\u{373}\u{376}\u{377}\u{37b}-\u{37d}\u{37f}\u{386}\u{388}-\u{38a}\u{38c}\u{38e}-\u{3a1}\u{3a3}-\u{3f5}\u{3f7}-\u{481}\u{48a}-\u{52f}\u{531}-\u{556}\u{10a0}-\u{10c5}\u{13a0}-\u{13f5}\u{13f8}-\u{13fd}\u{1c90}-\u{1cba}\u{1cbd}-\u{1cbf}\u{1d00}-\u{1d2b}\u{1d6b}-\u{1d77}\u{1d79}-\u{1d9a}\u{1e00}-\u{1f15}\u{1f18}-\u{1f1d}\u{1f20}-\u{1f45}\u{1f48}-\u{1f4d}\u{1f50}-\u{1f57}\u{1f59}\u{1f5b}\u{1f5d}\u{1f5f}-\u{1f7d}\u{1f80}-\u{1fb4}\u{1fb6}-\u{1fbc}\u{1fbe}\u{1fc2}-\u{1fc4}\u{1fc6}-\u{1fcc}\u{1fd0}-\u{1fd3}\u{1fd6}-\u{1fdb}\u{1fe0}-\u{1fec}\u{1ff2}-\u{1ff4}\u{1ff6}-\u{1ffc}\u{2102}\u{2107}\u{210a}-\u{2113}\u{2115}\u{2119}-\u{211d}\u{2124}\u{2126}\u{2128}\u{212a}-\u{212d}\u{212f}-\u{2134}\u{2139}\u{213c}-\u{213f}\u{2145}-\u{2149}\u{214e}\u{2183}\u{2184}\u{2c00}-\u{2c7b}\u{2c7e}-\u{2ce4}\u{2ceb}-\u{2cee}\u{2cf2}\u{2cf3}\u{a640}-\u{a66d}\u{a680}-\u{a69b}\u{a722}-\u{a76f}\u{a771}-\u{a787}\u{a78b}-\u{a78e}\u{ab70}-\u{abbf}\u{fb00}-\u{fb06}\u{fb13}-\u{fb17}\u{ff21}-\u{ff3a}\u{ff41}-\u{ff5a}\u{10400}-\u{1044f}\u{104b0}-\u{104d3}\u{104d8}-\u{104fb}\u{10c80}-\u{10cb2}\u{10cc0}-\u{10cf2}\u{118a0}-\u{118df}\u{1e900}-\u{1e943}]+",
    "\\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+",
    r"\s+$",
    "[一-龥\u{800}-一가-\u{d7ff}]+",
    r"\p{N}+",
];

/// Rules by name, or `None` where the name is not known.
#[rustfmt::skip] // one row a name reads as a table
pub(crate) fn rules(name: &str) -> Option<PreRules> {
    Some(match name {
        "default" | "" => PreRules { patterns: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"], ..BASE },
        "gpt-2" | "phi-2" | "mpt" | "olmo" | "jais" | "trillion" | "granite-docling" | "gigachat" | "a.x-4.0" | "mellum"
            | "modern-bert" | "exaone4" | "jina-es" | "jina-de" | "jina-v2-es" | "jina-v2-de" | "jina-v2-code" | "roberta-bpe" => BASE,
        "llama3" | "llama-v3" | "llama-bpe" | "falcon3" | "falcon-h1" | "pixtral" | "midm-2.0" | "lfm2" => PreRules { patterns: &[LLAMA3], ignore_merges: true, add_bos: true, ..BASE },
        "dbrx" | "smaug-bpe" | "glm4" | "chatglm-bpe" => PreRules { patterns: &[LLAMA3], ..BASE },
        "qwen2" | "megrez" => PreRules { patterns: &[QWEN2], nfc: true, ..BASE },
        "deepseek-r1-qwen" | "stablelm2" | "hunyuan" | "solar-open" | "grok-2" | "kormo" | "f2llmv2" => PreRules { patterns: &[QWEN2], ..BASE },
        "qwen35" => PreRules { patterns: &[QWEN35], nfc: true, ..BASE },
        "gpt-4o" | "llama4" | "kanana2" | "minimax-m2" | "talkie" => PreRules { patterns: &[GPT4O], ignore_merges: true, ..BASE },
        "tekken" => PreRules { patterns: &[TEKKEN], ignore_merges: true, add_bos: true, ..BASE },
        "deepseek-v3" | "hunyuan-dense" | "joyai-llm" | "hy_v4" => PreRules { patterns: DEEPSEEK3, ..BASE },
        "deepseek-coder" => PreRules { patterns: DEEPSEEK_CODER, ..BASE },
        "deepseek-llm" => PreRules { patterns: DEEPSEEK_LLM, ..BASE },
        "falcon" => PreRules { patterns: &[r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]"], ..BASE },
        "starcoder" | "refact" | "command-r" | "smollm" | "codeshell" | "exaone" | "minerva-7b" | "mellum2" => PreRules { patterns: &[r"\p{N}", GPT2], ..BASE },
        "kimi-k2" => PreRules { patterns: &[KIMI_K2], ignore_merges: true, ..BASE },
        "bailingmoe" | "bailingmoe2" | "llada-moe" => PreRules { patterns: &[BAILING], ..BASE },
        "seed-coder" => PreRules { patterns: &[SEED_CODER], ..BASE },
        "exaone-moe" => PreRules { patterns: &[EXAONE_MOE], ..BASE },
        "minicpm5" => PreRules { patterns: &[r"\p{N}{1,3}", LLAMA3], ignore_merges: true, ..BASE },
        "gemma4" => PreRules { patterns: &[], add_bos: true, plain_text: true, ..BASE },
        _ => return None,
    })
}

impl PreRules {
    /// What is done to text before it is cut.
    pub(crate) fn normalizer(&self) -> Result<Option<NormalizerWrapper>> {
        if self.plain_text {
            return Ok(Some(spaces_to_marks()?));
        }
        Ok(self.nfc.then_some(NormalizerWrapper::NFC(NFC)))
    }

    /// The cutting itself.
    pub(crate) fn pre_tokenizer(&self) -> Result<Option<PreTokenizerWrapper>> {
        let mut steps = Vec::with_capacity(self.patterns.len() + 1);
        for pattern in self.patterns {
            let split = Split::new(
                SplitPattern::Regex((*pattern).to_owned()),
                SplitDelimiterBehavior::Isolated,
                false,
            )
            .map_err(|error| TextError::bad_value("tokenizer.ggml.pre", error.to_string()))?;
            steps.push(PreTokenizerWrapper::Split(split));
        }
        if !self.plain_text {
            steps.push(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, false, false)));
        }
        Ok((!steps.is_empty()).then(|| PreTokenizerWrapper::Sequence(Sequence::new(steps))))
    }
}

/// SentencePiece writes a space as U+2581.
pub(crate) fn spaces_to_marks() -> Result<NormalizerWrapper> {
    let replace = Replace::new(" ", "\u{2581}")
        .map_err(|error| TextError::bad_value("tokenizer.ggml.pre", error.to_string()))?;
    Ok(NormalizerWrapper::Replace(replace))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

    fn words(name: &str, text: &str) -> Vec<String> {
        let mut cut = PreTokenizedString::from(text);
        rules(name).unwrap().pre_tokenizer().unwrap().unwrap().pre_tokenize(&mut cut).unwrap();
        let splits = cut.get_splits(OffsetReferential::Original, OffsetType::Byte);
        splits.iter().map(|(_, (start, end), _)| text[*start..*end].to_owned()).collect()
    }

    #[test]
    fn every_pattern_compiles_and_loses_nothing() {
        let text = "Hello, I'LL naïve 日本語ひら 12345  \n\n x\t\u{301}é don't ünï 가나 ½ €\r\n";
        for name in [
            "default",
            "gpt-2",
            "llama-bpe",
            "dbrx",
            "qwen2",
            "qwen35",
            "gpt-4o",
            "tekken",
            "deepseek-v3",
            "deepseek-coder",
            "deepseek-llm",
            "falcon",
            "smollm",
            "kimi-k2",
            "bailingmoe",
            "seed-coder",
            "exaone-moe",
            "minicpm5",
        ] {
            assert_eq!(words(name, text).concat(), text, "{name}");
        }
        assert!(rules("no-such").is_none());
    }

    #[test]
    fn known_cuts() {
        assert_eq!(words("gpt-2", "I'm  42 x"), ["I", "'m", " ", " 42", " x"]);
        assert_eq!(words("llama-bpe", "I'M 12345"), ["I", "'M", " ", "123", "45"]);
        assert_eq!(words("qwen2", "a 12"), ["a", " ", "1", "2"]);
        assert_eq!(words("qwen35", "e\u{301}x"), ["e\u{301}x"]);
        assert_eq!(words("gpt-4o", "HelloWorld's"), ["Hello", "World's"]);
        assert_eq!(words("kimi-k2", "ab日本cd"), ["ab", "日本", "cd"]);
        assert_eq!(words("deepseek-v3", "x日本1234"), ["x", "日本", "123", "4"]);
    }
}
