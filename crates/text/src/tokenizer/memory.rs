//! What a tokenizer takes in memory, for the ledger, before it is built.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use forebay_files::MetaValue;
use serde::de::{DeserializeSeed, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::error::{Result, TextError};

/// Bytes of a tokenizer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryEstimate {
    /// Held while the model is open.
    pub resident_bytes: u64,
    /// The most while it is being built, the above included.
    pub peak_bytes: u64,
}

/// Words that the BPE model remembers, and the regular expressions' own caches.
const CACHES: u64 = 6 << 20;

/// A hash table's buckets: a power of two, at most 7/8 full.
fn buckets(entries: u64) -> u64 {
    (entries * 8 / 7 + 1).next_power_of_two()
}

/// From counts: tokens, bytes of their text, merges.
fn of_counts(tokens: u64, text_bytes: u64, merges: u64) -> MemoryEstimate {
    // From text to id and back: two tables with a string of their own each.
    let vocabulary = 2 * (buckets(tokens) * 33 + tokens * 24 + text_bytes);
    let merge_table = buckets(merges) * 17;
    // Each merge is two short strings while the table is made. They are freed one by one, and the allocator keeps
    // their room; only the list that held them goes back to the system.
    let merge_texts = merges * 2 * 32;
    let merge_list = merges * 2 * 24;
    let resident_bytes = vocabulary + merge_table + merge_texts + CACHES;
    MemoryEstimate { resident_bytes, peak_bytes: resident_bytes + merge_list + tokens * 64 }
}

pub(super) fn of_gguf(metadata: &BTreeMap<String, MetaValue>) -> Result<MemoryEstimate> {
    let list = |key: &str| metadata.get(key).and_then(MetaValue::as_array).unwrap_or_default();
    let tokens = list("tokenizer.ggml.tokens");
    let text_bytes =
        tokens.iter().filter_map(MetaValue::as_str).map(|text| text.len() as u64).sum();
    let merges = list("tokenizer.ggml.merges").len() as u64;
    Ok(of_counts(tokens.len() as u64, text_bytes, merges))
}

/// Reads through `tokenizer.json` and counts; keeps nothing of it.
pub(super) fn of_folder(dir: &Path) -> Result<MemoryEstimate> {
    #[derive(Deserialize)]
    struct Json {
        model: Model,
    }
    #[derive(Deserialize)]
    struct Model {
        vocab: Count,
        #[serde(default)]
        merges: Count,
    }

    let path = dir.join("tokenizer.json");
    let open = || -> std::io::Result<(u64, File)> {
        let file = File::open(&path)?;
        Ok((file.metadata()?.len(), file))
    };
    let (len, file) = open().map_err(|error| TextError::Io { path: path.clone(), error })?;
    let json: Json = serde_json::from_reader(BufReader::with_capacity(1 << 16, file))
        .map_err(|error| TextError::bad_json(&path, error))?;
    let mut estimate =
        of_counts(json.model.vocab.entries, json.model.vocab.text_bytes, json.model.merges.entries);
    estimate.peak_bytes += len; // the file is read whole
    Ok(estimate)
}

/// Entries of a list or a map.
#[derive(Default)]
struct Count {
    entries: u64,
    /// Of a map's keys.
    text_bytes: u64,
}

impl<'de> Deserialize<'de> for Count {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        struct Counting;

        impl<'de> Visitor<'de> for Counting {
            type Value = Count;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list or a map")
            }

            fn visit_seq<A: SeqAccess<'de>>(
                self,
                mut list: A,
            ) -> std::result::Result<Count, A::Error> {
                let mut count = Count::default();
                while list.next_element::<IgnoredAny>()?.is_some() {
                    count.entries += 1;
                }
                count.text_bytes = count.entries * 8; // of a list of pieces with their scores
                Ok(count)
            }

            fn visit_map<A: MapAccess<'de>>(
                self,
                mut map: A,
            ) -> std::result::Result<Count, A::Error> {
                let mut count = Count::default();
                while let Some(len) = map.next_key_seed(KeyLen)? {
                    map.next_value::<IgnoredAny>()?;
                    count.entries += 1;
                    count.text_bytes += len;
                }
                Ok(count)
            }
        }

        deserializer.deserialize_any(Counting)
    }
}

/// The length of a key, without a copy of it.
struct KeyLen;

impl<'de> DeserializeSeed<'de> for KeyLen {
    type Value = u64;

    fn deserialize<D: Deserializer<'de>>(
        self,
        deserializer: D,
    ) -> std::result::Result<u64, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeyLen {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a key")
    }

    fn visit_str<E: serde::de::Error>(self, key: &str) -> std::result::Result<u64, E> {
        Ok(key.len() as u64)
    }
}
