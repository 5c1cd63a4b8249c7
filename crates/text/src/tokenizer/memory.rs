//! What a tokenizer takes in memory, for the ledger, before it is built.

use std::collections::BTreeMap;
use std::path::Path;

use forebay_files::MetaValue;

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
    let both_ways = 2 * (buckets(tokens) * 33 + tokens * 24 + text_bytes);
    let merge_table = buckets(merges) * 17;
    let resident_bytes = both_ways + merge_table + CACHES;
    // Two strings a merge, while the table is made.
    let merge_list = merges * (2 * 24 + 2 * 32);
    MemoryEstimate { resident_bytes, peak_bytes: resident_bytes + merge_list }
}

pub(super) fn of_gguf(metadata: &BTreeMap<String, MetaValue>) -> Result<MemoryEstimate> {
    let list = |key: &str| metadata.get(key).and_then(MetaValue::as_array).unwrap_or_default();
    let tokens = list("tokenizer.ggml.tokens");
    let text_bytes =
        tokens.iter().filter_map(MetaValue::as_str).map(|text| text.len() as u64).sum();
    let merges = list("tokenizer.ggml.merges").len() as u64;
    Ok(of_counts(tokens.len() as u64, text_bytes, merges))
}

/// By the file's size: nothing is parsed.
pub(super) fn of_folder(dir: &Path) -> Result<MemoryEstimate> {
    let path = dir.join("tokenizer.json");
    let len = std::fs::metadata(&path).map_err(|error| TextError::Io { path, error })?.len();
    Ok(MemoryEstimate { resident_bytes: 3 * len + CACHES, peak_bytes: 10 * len + CACHES })
}
