//! The files of a GGUF split set, as `gguf-split` of llama.cpp writes them: names count from 1,
//! `split.no` from 0, `split.tensors.count` is the total of the set, and the description of the model
//! is in the first file.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::access::FileAccess;
use crate::catalog::{Catalog, FileEntry, MetaValue, Source, TensorInfo};
use crate::error::{FilesError, ShardFault};
use crate::gguf::{self, Header};
use crate::open::{absent, open_weights};
use crate::shards::ShardName;

const NUMBER_KEY: &str = "split.no";
const COUNT_KEY: &str = "split.count";
const TENSORS_KEY: &str = "split.tensors.count";

/// Opens a GGUF file, and the others of its set.
pub(crate) fn open(access: &dyn FileAccess, path: &Path) -> Result<Catalog, FilesError> {
    let (first, entry) = read(access, path)?;
    let count = split_value(&first, COUNT_KEY).unwrap_or(1);
    let mut set = Set::new();
    if count <= 1 {
        let metadata = set.add(path, entry, first)?;
        return Ok(set.into_catalog(metadata));
    }

    let number = split_value(&first, NUMBER_KEY).unwrap_or(0);
    let names = names(access, path, number, count)?;
    let promised = split_value(&first, TENSORS_KEY);
    let metadata = set.add(path, entry, first)?;
    for (index, shard) in names.iter().enumerate().skip(1) {
        let (header, entry) = read(access, shard)?;
        expect(shard, &header, NUMBER_KEY, index as u64)?;
        expect(shard, &header, COUNT_KEY, count)?;
        set.add(shard, entry, header)?;
    }
    let found = set.tensors.len() as u64;
    if let Some(expected) = promised.filter(|&n| n != found) {
        let fault = ShardFault::TensorCount { expected, found };
        return Err(FilesError::ShardMismatch { file: path.to_owned(), fault });
    }
    Ok(set.into_catalog(metadata))
}

fn read(access: &dyn FileAccess, path: &Path) -> Result<(Header, FileEntry), FilesError> {
    let (file, entry) = open_weights(access, path, "\"GGUF\"")?;
    Ok((gguf::read_header(file, entry.len, path)?, entry))
}

fn split_value(header: &Header, key: &str) -> Option<u64> {
    header.metadata.get(key).and_then(MetaValue::as_u64)
}

fn expect(
    shard: &Path,
    header: &Header,
    key: &'static str,
    expected: u64,
) -> Result<(), FilesError> {
    let found = split_value(header, key);
    if found == Some(expected) {
        return Ok(());
    }
    let fault = ShardFault::Key { key, expected, found };
    Err(FilesError::ShardMismatch { file: shard.to_owned(), fault })
}

/// Paths of all files of the set whose shard `number` (from 0) of `count` is `path`; all are there.
fn names(
    access: &dyn FileAccess,
    path: &Path,
    number: u64,
    count: u64,
) -> Result<Vec<PathBuf>, FilesError> {
    let fail = |fault| Err(FilesError::ShardMismatch { file: path.to_owned(), fault });
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
    let Some(shard) = ShardName::parse(name) else {
        return match number {
            0 => fail(ShardFault::Unnamed { count }),
            _ => {
                let first = "the file that ends in -00001".to_owned();
                fail(ShardFault::NotFirst { number: number + 1, count, first })
            }
        };
    };
    if shard.count != count {
        return fail(ShardFault::Key { key: COUNT_KEY, expected: shard.count, found: Some(count) });
    }
    if number + 1 != shard.number {
        let expected = shard.number - 1;
        return fail(ShardFault::Key { key: NUMBER_KEY, expected, found: Some(number) });
    }
    if number != 0 {
        return fail(ShardFault::NotFirst { number: number + 1, count, first: shard.sibling(1) });
    }
    // `count` is the file name's: at most six digits.
    let names: Vec<String> = (1..=count).map(|n| shard.sibling(n)).collect();
    let dir = path.parent().unwrap_or(Path::new(""));
    let missing = absent(access, dir, names.iter());
    if !missing.is_empty() {
        let (dir, count) = (dir.to_owned(), names.len());
        return Err(FilesError::MissingShard { dir, count, missing });
    }
    Ok(names.into_iter().map(|n| dir.join(n)).collect())
}

struct Set {
    files: Vec<FileEntry>,
    tensors: BTreeMap<String, TensorInfo>,
    hasher: blake3::Hasher,
}

impl Set {
    fn new() -> Set {
        Set { files: Vec::new(), tensors: BTreeMap::new(), hasher: blake3::Hasher::new() }
    }

    /// Takes a file's tensors in; gives its keys back.
    fn add(
        &mut self,
        path: &Path,
        entry: FileEntry,
        header: Header,
    ) -> Result<BTreeMap<String, MetaValue>, FilesError> {
        let file = self.files.len() as u32;
        for (name, mut tensor) in header.tensors {
            if let Some(other) = self.tensors.get(&name) {
                let other = Some(self.files[other.file as usize].path.clone());
                return Err(FilesError::DuplicateName {
                    file: path.to_owned(),
                    tensor: name,
                    other,
                });
            }
            tensor.file = file;
            self.tensors.insert(name, tensor);
        }
        self.hasher.update(&header.hash);
        self.files.push(entry);
        Ok(header.metadata)
    }

    fn into_catalog(self, metadata: BTreeMap<String, MetaValue>) -> Catalog {
        Catalog {
            files: self.files,
            tensors: self.tensors,
            source: Source::Gguf { metadata },
            header_hash: *self.hasher.finalize().as_bytes(),
        }
    }
}
