//! The steps that a `tokenizer.json` puts around its model, looked at before the `tokenizers` crate gets them.
//!
//! That crate expects files of its own making: of some others it panics. So what reaches it is sound JSON of kinds
//! that vocabularies of language models use; another kind is refused by its name.

use serde::de::DeserializeOwned;
use serde_json::Value;
use tokenizers::{NormalizerWrapper, PreTokenizerWrapper};

use crate::error::{Result, TextError};

const NORMALIZERS: [&str; 11] = [
    "Sequence",
    "NFC",
    "NFD",
    "NFKC",
    "NFKD",
    "Lowercase",
    "Strip",
    "StripAccents",
    "Nmt",
    "Prepend",
    "Replace",
];
const PRE_TOKENIZERS: [&str; 9] = [
    "Sequence",
    "Split",
    "ByteLevel",
    "Metaspace",
    "Digits",
    "Punctuation",
    "Whitespace",
    "WhitespaceSplit",
    "UnicodeScripts",
];

/// What is done to a text before it is cut.
pub(crate) fn normalizer(json: &Value) -> Result<Option<NormalizerWrapper>> {
    step("normalizer", "normalizers", &NORMALIZERS, json)
}

/// How a text is cut into words.
pub(crate) fn pre_tokenizer(json: &Value) -> Result<Option<PreTokenizerWrapper>> {
    step("pre-tokenizer", "pretokenizers", &PRE_TOKENIZERS, json)
}

fn step<T: DeserializeOwned>(
    what: &'static str,
    list: &str,
    known: &[&str],
    json: &Value,
) -> Result<Option<T>> {
    if json.is_null() {
        return Ok(None);
    }
    check(what, list, known, json)?;
    let parsed = T::deserialize(json).map_err(|e| TextError::bad_value(what, e.to_string()))?;
    Ok(Some(parsed))
}

fn check(what: &'static str, list: &str, known: &[&str], json: &Value) -> Result<()> {
    let Some(kind) = json["type"].as_str() else {
        return Err(TextError::bad_value(what, "has no `type`"));
    };
    let unsupported = |name: &str| {
        TextError::unsupported(what, name, "vocabularies of the supported families do not use it")
    };
    if !known.contains(&kind) {
        return Err(unsupported(kind));
    }
    // A pattern may fail on a text, and the crate does not expect that of a normalizer.
    if kind == "Replace" && !json["pattern"]["String"].is_string() {
        return Err(unsupported("Replace with a regular expression"));
    }
    if kind != "Sequence" {
        return Ok(());
    }
    let steps = json[list].as_array();
    let steps =
        steps.ok_or_else(|| TextError::bad_value(what, format!("Sequence has no `{list}`")))?;
    steps.iter().try_for_each(|step| check(what, list, known, step))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn kinds() {
        let rows = [
            (json!(null), "ok"),
            (json!({"type": "NFC"}), "ok"),
            (
                json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x"}]}),
                "ok",
            ),
            (json!({"type": "Prepend"}), "BadValue"),
            (json!({"prepend": "x"}), "BadValue"),
            (json!({"type": "Sequence"}), "BadValue"),
            (json!([1]), "BadValue"),
            (json!({"type": "Precompiled", "precompiled_charsmap": "AAAA"}), "Unsupported"),
            (json!({"type": "Sequence", "normalizers": [{"type": "X"}]}), "Unsupported"),
            (json!({"type": "Replace", "pattern": {"Regex": "("}, "content": ""}), "Unsupported"),
        ];
        for (json, want) in rows {
            let got = normalizer(&json).map_or_else(|e| e.class(), |_| "ok");
            assert_eq!(got, want, "{json}");
        }
        let split = json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": false});
        assert_eq!(pre_tokenizer(&split).unwrap_err().class(), "BadValue");
        assert_eq!(
            pre_tokenizer(&json!({"type": "FixedLength", "length": 0})).unwrap_err().class(),
            "Unsupported"
        );
    }
}
