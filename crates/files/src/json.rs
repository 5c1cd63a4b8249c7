//! JSON as this crate reads it: a key that appears twice is an error, not a silent choice.
//!
//! `serde_json` keeps the last of two equal keys. In a safetensors header that hides a tensor, in a
//! `config.json` a setting.

use std::cell::RefCell;
use std::fmt;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

use crate::error::{FilesError, Hint, readable};

/// Parses a JSON text. An object with the same key twice is refused, unless both values are equal.
/// `what` and `file` are only used in messages.
pub fn parse(bytes: &[u8], file: &Path, what: &str) -> Result<Value, FilesError> {
    let duplicate = RefCell::new(None);
    let parsed = parse_seed(bytes, file, what, ValueSeed { duplicate: &duplicate });
    parsed.map_err(|e| match duplicate.take() {
        Some(key) => FilesError::DuplicateKey { file: file.to_owned(), key },
        None => e,
    })
}

/// Parses a JSON text into `seed`'s value. Syntax faults are `BadJson`, sound JSON of a wrong kind is
/// `BadValue`.
pub(crate) fn parse_seed<'de, S: DeserializeSeed<'de>>(
    bytes: &'de [u8],
    file: &Path,
    what: &str,
    seed: S,
) -> Result<S::Value, FilesError> {
    let text = std::str::from_utf8(bytes).map_err(|e| FilesError::BadUtf8 {
        file: file.to_owned(),
        what: what.to_owned(),
        found: readable(&bytes[e.valid_up_to()..]),
    })?;
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let parsed = seed.deserialize(&mut deserializer);
    let ended = parsed.and_then(|value| deserializer.end().map(|()| value));
    ended.map_err(|e| fault(&e, bytes, file, what))
}

/// Depth at which `serde_json` stops.
const MAX_DEPTH: u64 = 127;

fn fault(e: &serde_json::Error, bytes: &[u8], file: &Path, what: &str) -> FilesError {
    let detail = one_line(&e.to_string());
    let (file, what) = (file.to_owned(), what.to_owned());
    if detail.starts_with("recursion limit exceeded") {
        let what = format!("nesting of {what}");
        return FilesError::LimitExceeded { file, what, limit: MAX_DEPTH, found: MAX_DEPTH + 1 };
    }
    if e.is_data() {
        // serde writes "invalid type: FOUND, expected EXPECTED".
        let (found, expected) = detail.split_once(", expected ").unwrap_or((&detail, "sound JSON"));
        let (expected, found) = (expected.to_owned(), found.to_owned());
        return FilesError::BadValue { file, what, expected, found };
    }
    FilesError::BadJson { file, what, detail, hint: Hint::of(bytes) }
}

/// serde's messages quote the text they complain about: keep them short and on one line.
fn one_line(detail: &str) -> String {
    const LONGEST: usize = 300;
    let head: String = detail.chars().take(LONGEST).collect();
    head.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

/// Builds a [`Value`]; the depth of nesting is bounded by `serde_json`.
#[derive(Clone, Copy)]
struct ValueSeed<'a> {
    /// Where a duplicate key is left, since a serde error carries nothing but text.
    duplicate: &'a RefCell<Option<String>>,
}

impl<'de> DeserializeSeed<'de> for ValueSeed<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for ValueSeed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("any JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_f64<E>(self, v: f64) -> Result<Value, E> {
        Ok(Number::from_f64(v).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::String(v.to_owned()))
    }

    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(Value::String(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = seq.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            let value = access.next_value_seed(self)?;
            if map.get(&key).is_some_and(|earlier| *earlier != value) {
                self.duplicate.replace(Some(key));
                return Err(A::Error::custom("duplicate key"));
            }
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes() {
        let rows: &[(&str, &[u8], &str)] = &[
            ("plain", b"{\"a\":[1,-2,3.5,null,true,\"x\"],\"b\":{}}", "ok"),
            ("equal twice", b"{\"a\":1,\"a\":1}", "ok"),
            ("twice", b"{\"a\":1,\"a\":2}", "DuplicateKey"),
            ("twice, nested", b"{\"x\":[{\"a\":1,\"a\":2}]}", "DuplicateKey"),
            ("cut", b"{\"a\":1", "BadJson"),
            ("trailing", b"{} x", "BadJson"),
            ("empty", b"", "BadJson"),
            ("not text", b"{\"a\":\"\xff\"}", "BadUtf8"),
        ];
        for (name, bytes, want) in rows {
            let got = parse(bytes, Path::new("f"), "text").map_or_else(|e| e.class(), |_| "ok");
            assert_eq!(got, *want, "{name}");
        }
        let deep = "[".repeat(100_000);
        let got = parse(deep.as_bytes(), Path::new("f"), "text").unwrap_err();
        assert_eq!(got.class(), "LimitExceeded");
        let got = parse(b"{\"k\":1,\"k\":2}", Path::new("f"), "text").unwrap_err();
        assert_eq!(got.to_string(), "f: key \"k\" appears twice");
    }

    #[test]
    fn equals_serde_json() {
        let text = r#"{"z":1,"a":{"c":[1e3,18446744073709551615,-9]},"é":"\n"}"#;
        let ours = parse(text.as_bytes(), Path::new("f"), "text").unwrap();
        assert_eq!(ours, serde_json::from_str::<Value>(text).unwrap());
        let keys: Vec<_> = ours.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["z", "a", "é"]);
    }
}
