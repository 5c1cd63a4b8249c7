//! Folders of safetensors: one file, or shards with the index that Hugging Face writes
//! (`model.safetensors.index.json`: `weight_map` gives each tensor's file).

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::access::FileAccess;
use crate::catalog::{Catalog, FileEntry, Source, TensorInfo};
use crate::error::{FilesError, ShardFault, quoted};
use crate::json;
use crate::open::{absent, open_weights, read_text};
use crate::safetensors;
use crate::shards::{self, ShardName};

const SINGLE_NAME: &str = "model.safetensors";
const INDEX_NAME: &str = "model.safetensors.index.json";
const INDEX_SUFFIX: &str = ".safetensors.index.json";
const MAX_INDEX_BYTES: u64 = 100_000_000;
const MAX_CONFIG_BYTES: u64 = 16 << 20;

/// What a folder offers.
pub(crate) enum Offer {
    /// Nothing of this format.
    None,
    /// One set.
    One(Layout),
    /// Several, by the name of each one's first file.
    Several(Vec<String>),
}

/// Where a folder's tensors are.
pub(crate) enum Layout {
    Index(Index),
    /// Names in shard order; the set has no index.
    Files(Vec<String>),
}

impl Layout {
    /// The name that stands for the set.
    pub fn first_file(&self) -> String {
        match self {
            Layout::Index(index) => index.name.clone(),
            Layout::Files(names) => names.first().cloned().unwrap_or_default(),
        }
    }
}

/// An index, checked by itself.
pub(crate) struct Index {
    name: String,
    /// Tensor to shard.
    weight_map: BTreeMap<String, String>,
    /// All shards, in order of their names.
    shards: Vec<String>,
}

/// Looks for a set among the names of a folder. `model.safetensors` goes before an index of other
/// files, as in transformers.
pub(crate) fn offer(
    access: &dyn FileAccess,
    dir: &Path,
    names: &[String],
) -> Result<Offer, FilesError> {
    let single = names.iter().any(|n| n == SINGLE_NAME);
    if let Some(name) = index_name(names) {
        let index = read_index(access, dir, name)?;
        if !single || index.shards.iter().any(|s| s == SINGLE_NAME) {
            return Ok(Offer::One(Layout::Index(index)));
        }
    }
    if single {
        return Ok(Offer::One(Layout::Files(vec![SINGLE_NAME.to_owned()])));
    }
    let files = names.iter().filter(|n| shards::has_extension(n, "safetensors"));
    let mut firsts = shards::first_files(files.map(String::as_str));
    Ok(match firsts.len() {
        0 => Offer::None,
        1 => Offer::One(Layout::Files(set_of(&firsts.remove(0)))),
        _ => Offer::Several(firsts),
    })
}

/// The index of a folder: the usual name, or the only other one.
fn index_name(names: &[String]) -> Option<&str> {
    if names.iter().any(|n| n == INDEX_NAME) {
        return Some(INDEX_NAME);
    }
    let mut others = names.iter().filter(|n| n.ends_with(INDEX_SUFFIX) && !n.starts_with('.'));
    others.next().filter(|_| others.next().is_none()).map(String::as_str)
}

fn set_of(first: &str) -> Vec<String> {
    match ShardName::parse(first) {
        Some(shard) => (1..=shard.count).map(|n| shard.sibling(n)).collect(),
        None => vec![first.to_owned()],
    }
}

/// Opens one safetensors file in `dir`, which must not be a mere part of a set.
pub(crate) fn open_file(
    access: &dyn FileAccess,
    path: &Path,
    dir: &Path,
    siblings: &[String],
) -> Result<Catalog, FilesError> {
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
    let fail = |fault| Err(FilesError::ShardMismatch { file: path.to_owned(), fault });
    if let Some(index) = index_name(siblings) {
        let index = read_index(access, dir, index)?;
        if index.shards.iter().any(|s| s == name) {
            return match index.shards.len() {
                1 => open_set(access, dir, Layout::Index(index)),
                _ => fail(ShardFault::OpenFolder { index: index.name }),
            };
        }
    }
    match ShardName::parse(name) {
        Some(s) if s.number > 1 => {
            fail(ShardFault::NotFirst { number: s.number, count: s.count, first: s.sibling(1) })
        }
        Some(_) => open_set(access, dir, Layout::Files(set_of(name))),
        None => open_paths(access, dir, vec![path.to_owned()], None),
    }
}

/// Opens a set whose files lie in `dir`.
pub(crate) fn open_set(
    access: &dyn FileAccess,
    dir: &Path,
    layout: Layout,
) -> Result<Catalog, FilesError> {
    let (names, index) = match layout {
        Layout::Index(index) => (index.shards.clone(), Some(index)),
        Layout::Files(names) => (names, None),
    };
    let missing = absent(access, dir, names.iter());
    if !missing.is_empty() {
        let (dir, count) = (dir.to_owned(), names.len());
        return Err(FilesError::MissingShard { dir, count, missing });
    }
    open_paths(access, dir, names.iter().map(|n| dir.join(n)).collect(), index.as_ref())
}

fn open_paths(
    access: &dyn FileAccess,
    dir: &Path,
    paths: Vec<PathBuf>,
    index: Option<&Index>,
) -> Result<Catalog, FilesError> {
    let mut files: Vec<FileEntry> = Vec::new();
    let mut tensors: BTreeMap<String, TensorInfo> = BTreeMap::new();
    let mut hasher = blake3::Hasher::new();
    for path in paths {
        let mismatch = |fault| FilesError::ShardMismatch { file: path.clone(), fault };
        let (file, entry) = open_weights(access, &path, "a safetensors header")?;
        let header = safetensors::read_header(file, entry.len, &path)?;
        for (name, mut tensor) in header.tensors {
            if let Some(earlier) = tensors.get(&name) {
                let other = files[earlier.file as usize].path.display().to_string();
                return Err(mismatch(ShardFault::InTwoShards { tensor: name, other }));
            }
            tensor.file = files.len() as u32;
            tensors.insert(name, tensor);
        }
        hasher.update(&header.hash);
        files.push(entry);
    }
    if let Some(index) = index {
        index.compare(dir, &files, &tensors)?;
    }

    let (config, config_bytes) =
        match read_text(access, &dir.join("config.json"), MAX_CONFIG_BYTES)? {
            Some(bytes) => (json::parse(&bytes, &dir.join("config.json"), "text")?, bytes),
            None => (Value::Null, Vec::new()),
        };
    hasher.update(&config_bytes);
    let generation = dir.join("generation_config.json");
    let generation_config = match read_text(access, &generation, MAX_CONFIG_BYTES)? {
        Some(bytes) => Some(json::parse(&bytes, &generation, "text")?),
        None => None,
    };
    Ok(Catalog {
        files,
        tensors,
        source: Source::Folder { dir: dir.to_owned(), config, generation_config },
        header_hash: *hasher.finalize().as_bytes(),
    })
}

fn read_index(access: &dyn FileAccess, dir: &Path, name: &str) -> Result<Index, FilesError> {
    let path = dir.join(name);
    let missing = |key: &str| FilesError::MissingKey { file: path.clone(), key: key.into() };
    let bytes = read_text(access, &path, MAX_INDEX_BYTES)?.ok_or_else(|| missing(name))?;
    let json = json::parse(&bytes, &path, "text")?;
    let bad = |what: String, expected: &str, found: &Value| FilesError::BadValue {
        file: path.clone(),
        what,
        expected: expected.into(),
        found: quoted(&found.to_string()),
    };
    let map = json.get("weight_map").ok_or_else(|| missing("weight_map"))?;
    let map = map
        .as_object()
        .ok_or_else(|| bad("weight_map".into(), "an object of tensors and their files", map))?;
    let mut weight_map = BTreeMap::new();
    let mut shards = BTreeSet::new();
    for (tensor, shard) in map {
        let shard = shard.as_str().ok_or_else(|| {
            bad(format!("weight_map of tensor {}", quoted(tensor)), "a file name", shard)
        })?;
        if !shards::is_plain(shard) {
            return Err(FilesError::UnsafePath { file: path, name: shard.to_owned() });
        }
        shards.insert(shard.to_owned());
        weight_map.insert(tensor.clone(), shard.to_owned());
    }
    if shards.is_empty() {
        return Err(bad("weight_map".into(), "at least one tensor", &Value::Object(map.clone())));
    }
    Ok(Index { name: name.to_owned(), weight_map, shards: shards.into_iter().collect() })
}

impl Index {
    /// The index and the shards must tell the same tensors.
    fn compare(
        &self,
        dir: &Path,
        files: &[FileEntry],
        tensors: &BTreeMap<String, TensorInfo>,
    ) -> Result<(), FilesError> {
        let index = || self.name.clone();
        for (name, tensor) in tensors {
            let placed = self.weight_map.get(name);
            let shard = &self.shards[tensor.file as usize];
            if placed != Some(shard) {
                return Err(FilesError::ShardMismatch {
                    file: files[tensor.file as usize].path.clone(),
                    fault: ShardFault::AbsentFromIndex {
                        tensor: name.clone(),
                        index: index(),
                        placed: placed.cloned(),
                    },
                });
            }
        }
        for (name, shard) in &self.weight_map {
            if !tensors.contains_key(name) {
                return Err(FilesError::ShardMismatch {
                    file: dir.join(shard),
                    fault: ShardFault::AbsentFromShard { tensor: name.clone(), index: index() },
                });
            }
        }
        Ok(())
    }
}
