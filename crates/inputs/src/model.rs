//! Model files: what a container holds, and what its description makes of it.

use std::path::Path;

use forebay_engine::engine::Opened;
use forebay_engine::{EngineOptions, MemoryLimit};
use forebay_files::{Catalog, FileAccess};
use forebay_text::{ChatTemplate, Tokenizer};

use crate::memory_files::MemoryFiles;
use crate::{check_message, documents};

/// One GGUF file, whole.
pub fn gguf(bytes: &[u8]) -> u64 {
    let mut files = MemoryFiles::default();
    let path = files.add("model.gguf", bytes);
    open(&files, &path);
    bytes.len() as u64
}

/// One safetensors file, whole, without a description.
pub fn safetensors(bytes: &[u8]) -> u64 {
    let mut files = MemoryFiles::default();
    let path = files.add("model.safetensors", bytes);
    open(&files, &path);
    bytes.len() as u64
}

/// A description of a model with the tensors it is about, whose bytes are left out: the header of a GGUF file, or
/// `config.json`, NUL and the JSON header of a safetensors file.
pub fn config(bytes: &[u8]) -> u64 {
    /// As much as the tensors of a header may claim.
    const DATA_BYTES: u64 = 1 << 40;
    let mut files = MemoryFiles::default();
    if bytes.starts_with(b"GGUF") {
        let path = files.add_head("model.gguf", bytes, bytes.len() as u64 + DATA_BYTES);
        return bytes.len() as u64 + open(&files, &path).unwrap_or(0);
    }
    let [config, header] = documents(bytes);
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header);
    let data_bytes = end_of_tensors(header).unwrap_or(0);
    let len = file.len() as u64 + data_bytes.min(DATA_BYTES);
    files.add_head("model.safetensors", &file, len);
    files.add("config.json", config);
    bytes.len() as u64 + open(&files, Path::new(MemoryFiles::DIR)).unwrap_or(0)
}

/// Where the data of a safetensors header ends.
fn end_of_tensors(header: &[u8]) -> Option<u64> {
    let header: serde_json::Value = serde_json::from_slice(header).ok()?;
    header.as_object()?.values().filter_map(|t| t["data_offsets"][1].as_u64()).max()
}

/// Opens a model as `inspect` does; returns the bytes of its tensors if it is one.
fn open(files: &MemoryFiles, path: &Path) -> Option<u64> {
    let catalog = match Catalog::open_with(files, path) {
        Ok(catalog) => catalog,
        Err(error) => {
            check_message(&error);
            return None;
        }
    };
    check_catalog(files, &catalog);
    let weight_bytes = catalog.weight_bytes();
    if catalog.is_gguf() {
        let text = Tokenizer::memory_bytes(&catalog);
        assert!(text.is_ok_and(|estimate| estimate.peak_bytes >= estimate.resident_bytes));
        if let Err(error) = ChatTemplate::from_catalog(&catalog) {
            check_message(&error);
        }
    }
    let options = EngineOptions {
        memory: MemoryLimit::Bytes(8 << 30),
        threads: Some(2),
        ..EngineOptions::default()
    };
    match Opened::from_catalog_with(files, catalog, options) {
        Ok(opened) => match opened.plan() {
            Ok(plan) => assert!(plan.ledger.total() <= plan.budget, "{}", plan.ledger),
            Err(error) => check_message(&error),
        },
        Err(error) => check_message(&error),
    }
    Some(weight_bytes)
}

/// Tensors lie inside their files and apart from one another.
fn check_catalog(files: &MemoryFiles, catalog: &Catalog) {
    let mut ranges: Vec<(u32, u64, u64)> = catalog
        .tensors
        .values()
        .map(|t| (t.file, t.offset, t.offset.checked_add(t.len).expect("the end fits")))
        .collect();
    ranges.sort_unstable();
    let mut covered = (0, 0);
    for (file, start, end) in ranges {
        let path = &catalog.files[file as usize].path;
        let (_, entry) = files.open(path).expect("was open");
        let before = if covered.0 == file { covered.1 } else { 0 };
        assert!(before <= start && start <= end && end <= entry.len, "{start}..{end}");
        covered = (file, end);
    }
}
