//! From a path to a catalog: what kind of thing is it, and which files belong to it.

use std::io::{Cursor, ErrorKind, Read};
use std::path::Path;

use crate::access::{FileAccess, io_error};
use crate::catalog::{Catalog, FileEntry};
use crate::error::{FilesError, Hint, readable};
use crate::gguf;
use crate::gguf_split;
use crate::safetensors_set::{self, Offer};
use crate::shards;

pub(crate) fn open(access: &dyn FileAccess, path: &Path) -> Result<Catalog, FilesError> {
    if let Some(names) = access.list(path)? {
        return open_folder(access, path, &names);
    }
    match sniff(access, path)? {
        Kind::Gguf => gguf_split::open(access, path),
        Kind::Safetensors => {
            let dir = match path.parent() {
                Some(dir) if dir != Path::new("") => dir,
                _ => Path::new("."),
            };
            let siblings = access.list(dir)?.unwrap_or_default();
            safetensors_set::open_file(access, path, dir, &siblings)
        }
    }
}

fn open_folder(
    access: &dyn FileAccess,
    dir: &Path,
    names: &[String],
) -> Result<Catalog, FilesError> {
    let safetensors = safetensors_set::offer(access, dir, names)?;
    let ggufs = shards::first_files(model_ggufs(names).into_iter());
    match (safetensors, ggufs.as_slice()) {
        (Offer::One(layout), []) => safetensors_set::open_set(access, dir, layout),
        (Offer::None, [one]) => open_first(access, dir, one, names),
        (Offer::None, []) => Err(FilesError::UnknownFormat {
            file: dir.to_owned(),
            found: "no *.gguf and no *.safetensors in the folder".into(),
            hint: match names.iter().any(|n| n.ends_with(".bin") || n.ends_with(".pt")) {
                true => Hint::Pickle,
                false => Hint::None,
            },
        }),
        (offer, _) => {
            let mut found = match offer {
                Offer::None => Vec::new(),
                Offer::One(layout) => vec![layout.first_file()],
                Offer::Several(firsts) => firsts,
            };
            found.extend(ggufs);
            Err(FilesError::Ambiguous { dir: dir.to_owned(), found })
        }
    }
}

/// The GGUFs of a folder, without what is published beside a model: projectors of vision models and
/// importance matrices. If there is nothing else, these.
fn model_ggufs(names: &[String]) -> Vec<&str> {
    let is_companion = |name: &&str| {
        let name = name.to_ascii_lowercase();
        name.contains("mmproj") || name.contains("imatrix")
    };
    let ggufs = names.iter().map(String::as_str).filter(|n| shards::has_extension(n, "gguf"));
    let (companions, models): (Vec<&str>, Vec<&str>) = ggufs.partition(is_companion);
    if models.is_empty() { companions } else { models }
}

/// Opens the only GGUF of a folder, whose first shard may be missing.
fn open_first(
    access: &dyn FileAccess,
    dir: &Path,
    first: &str,
    names: &[String],
) -> Result<Catalog, FilesError> {
    if let Some(shard) = shards::ShardName::parse(first) {
        let all = (1..=shard.count).map(|n| shard.sibling(n));
        let missing: Vec<String> = all.filter(|n| !names.contains(n)).collect();
        if !missing.is_empty() {
            let (dir, count) = (dir.to_owned(), shard.count as usize);
            return Err(FilesError::MissingShard { dir, count, missing });
        }
    }
    open(access, &dir.join(first))
}

/// Up to a safetensors header's opening brace.
const SHORTEST_BYTES: usize = 9;

enum Kind {
    Gguf,
    Safetensors,
}

/// Judges by content; the extension only decides what to say about a file that is neither.
fn sniff(access: &dyn FileAccess, path: &Path) -> Result<Kind, FilesError> {
    let (mut file, entry) = access.open(path)?;
    let head = read_head(&mut file, path)?;
    let name = path.file_name().and_then(|n| n.to_str()).unwrap_or("");
    let hint = Hint::of(&head);

    if head.starts_with(gguf::MAGIC) {
        return Ok(Kind::Gguf);
    }
    if hint == Hint::None && head.get(8) == Some(&b'{') {
        return Ok(Kind::Safetensors);
    }

    let named_gguf = shards::has_extension(name, "gguf");
    let named_safetensors = shards::has_extension(name, "safetensors");
    let (file, found) = (path.to_owned(), readable(&head));
    if named_safetensors {
        return Ok(Kind::Safetensors); // its reader says what is wrong
    }
    if named_gguf && !gguf::MAGIC.starts_with(&head) {
        return Err(FilesError::BadMagic { file, expected: "\"GGUF\"", found, hint });
    }
    if head.len() < SHORTEST_BYTES {
        let expected = SHORTEST_BYTES as u64;
        let what = "header".into();
        return Err(FilesError::Truncated { file, what, expected, found: entry.len });
    }
    Err(FilesError::UnknownFormat { file, found, hint })
}

/// Which of the names do not lead to a file in `dir`.
pub(crate) fn absent<'a>(
    access: &dyn FileAccess,
    dir: &Path,
    names: impl Iterator<Item = &'a String>,
) -> Vec<String> {
    names.filter(|name| !access.is_file(&dir.join(name))).cloned().collect()
}

/// Opens a file that must hold weights in `format`: what stands in for one (a Git LFS pointer, a web
/// page) is told by its first bytes, before a reader takes them for a header.
pub(crate) fn open_weights(
    access: &dyn FileAccess,
    path: &Path,
    format: &'static str,
) -> Result<(impl Read, FileEntry), FilesError> {
    let (mut file, entry) = access.open(path)?;
    let head = read_head(&mut file, path)?;
    let hint = Hint::of(&head);
    if hint != Hint::None {
        let (file, found) = (path.to_owned(), readable(&head));
        return Err(FilesError::BadMagic { file, expected: format, found, hint });
    }
    Ok((Cursor::new(head).chain(file), entry))
}

fn read_head(file: &mut dyn Read, path: &Path) -> Result<Vec<u8>, FilesError> {
    const HEAD_BYTES: u64 = 64;
    let mut head = Vec::new();
    file.take(HEAD_BYTES).read_to_end(&mut head).map_err(|e| io_error(path, "read", e))?;
    Ok(head)
}

/// The bytes of a small text file; `None` if there is none.
pub(crate) fn read_text(
    access: &dyn FileAccess,
    path: &Path,
    limit: u64,
) -> Result<Option<Vec<u8>>, FilesError> {
    let (file, entry) = match access.open(path) {
        Ok(opened) => opened,
        Err(FilesError::Io { source, .. }) if source.kind() == ErrorKind::NotFound => {
            return Ok(None);
        }
        Err(e) => return Err(e),
    };
    if entry.len > limit {
        return Err(FilesError::LimitExceeded {
            file: path.to_owned(),
            what: "length".into(),
            limit,
            found: entry.len,
        });
    }
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes).map_err(|e| io_error(path, "read", e))?;
    Ok(Some(bytes))
}
