//! The cache folder, laid out as Hugging Face's tools do:
//!
//! ```text
//! models--org--name/blobs/<digest>                     content
//!                        /<digest>.incomplete          what has arrived of it
//!                  /snapshots/<commit>/<path>          relative symlink to the blob
//!                  /refs/<revision>                    commit
//! .locks/models--org--name/<digest>.lock               held while the blob is written
//! ```

use std::collections::BTreeSet;
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use forebay_files::shards::ShardName;

use crate::digest::Digest;
use crate::error::HubError;
use crate::http::pause;
use crate::id::{RepoId, is_revision};
use crate::listing::RepoFile;
use crate::select::{Container, Selection, select};

const MAX_DEPTH: usize = 16;
const MAX_INDEX_BYTES: u64 = 100_000_000;

/// A cache.
#[derive(Clone, Debug)]
pub struct Cache {
    root: PathBuf,
}

/// A model that is complete in the cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedModel {
    /// What to open: a GGUF or a folder.
    pub path: PathBuf,
    /// The commit it is of.
    pub commit: String,
}

impl Cache {
    /// The cache in a folder, which need not exist.
    pub fn new(root: &Path) -> Cache {
        Cache { root: root.to_owned() }
    }

    /// The folder.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// A complete model of the repository, as `main` was when it was last pulled (or of the only
    /// revision there is). Asks no network. `None` if there is none, or files of it are missing.
    pub fn resolve_local(
        &self,
        repo: &RepoId,
        pattern: Option<&str>,
    ) -> Result<Option<CachedModel>, HubError> {
        let Some(commit) = self.commit_of(repo, "main").or_else(|| self.only_commit(repo)) else {
            return Ok(None);
        };
        let snapshot = self.snapshot(repo, &commit);
        let mut files = Vec::new();
        walk(&snapshot, "", 0, &mut files);
        files.sort_by(|a, b| a.path.cmp(&b.path));
        let selection = match select(repo, &files, pattern) {
            Ok(selection) => selection,
            Err(HubError::NoMatch { .. } | HubError::NoModel { .. }) => return Ok(None),
            Err(e) => return Err(e),
        };
        if !is_complete(&snapshot, &selection) {
            return Ok(None);
        }
        let mut paths = selection.model_paths(&snapshot);
        match (paths.pop(), paths.is_empty()) {
            (Some(path), true) => Ok(Some(CachedModel { path, commit })),
            _ => Err(HubError::Ambiguous {
                repo: repo.to_string(),
                example: selection.models.first().cloned().unwrap_or_default(),
                choices: selection.models,
            }),
        }
    }

    pub(crate) fn folder(&self, repo: &RepoId) -> PathBuf {
        self.root.join(repo.folder())
    }

    /// Folder of a commit.
    pub fn snapshot(&self, repo: &RepoId, commit: &str) -> PathBuf {
        self.folder(repo).join("snapshots").join(commit)
    }

    pub(crate) fn blob(&self, repo: &RepoId, digest: Digest) -> PathBuf {
        self.folder(repo).join("blobs").join(digest.to_string())
    }

    fn commit_of(&self, repo: &RepoId, revision: &str) -> Option<String> {
        let text = fs::read_to_string(self.folder(repo).join("refs").join(revision)).ok()?;
        let commit = text.trim();
        let plain = is_revision(commit) && !commit.contains('/');
        (plain && self.snapshot(repo, commit).is_dir()).then(|| commit.to_owned())
    }

    fn only_commit(&self, repo: &RepoId) -> Option<String> {
        let mut entries = fs::read_dir(self.folder(repo).join("snapshots")).ok()?.flatten();
        let one = entries.next()?;
        entries.next().is_none().then(|| one.file_name().into_string().ok()).flatten()
    }

    /// Notes which commit a revision stands for.
    pub(crate) fn set_ref(
        &self,
        repo: &RepoId,
        revision: &str,
        commit: &str,
    ) -> Result<(), HubError> {
        if revision == commit {
            return Ok(());
        }
        let path = self.folder(repo).join("refs").join(revision);
        create_parent(&path)?;
        replace(&path, |new| fs::write(new, commit))
    }

    /// Whether a file's content is there: as a blob of its digest, or in the snapshot itself where
    /// another tool could not make symlinks.
    pub(crate) fn has(&self, repo: &RepoId, commit: &str, file: &RepoFile) -> bool {
        let is_whole =
            |path: &Path| fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() == file.size);
        let entry = self.snapshot(repo, commit).join(&file.path);
        let own = fs::symlink_metadata(&entry).is_ok_and(|m| m.is_file()) && is_whole(&entry);
        own || file.digest.is_some_and(|d| is_whole(&self.blob(repo, d)))
    }

    /// Puts a blob into a snapshot under its path.
    pub(crate) fn link(
        &self,
        repo: &RepoId,
        commit: &str,
        path: &str,
        digest: Digest,
    ) -> Result<(), HubError> {
        let entry = self.snapshot(repo, commit).join(path);
        let blob = self.blob(repo, digest);
        let is_file = |p: &Path| fs::symlink_metadata(p).is_ok_and(|m| m.is_file());
        if !blob.exists() && is_file(&entry) {
            return Ok(()); // the content lies in the snapshot itself
        }
        create_parent(&entry)?;
        let up = "../".repeat(path.split('/').count() + 1);
        let target = PathBuf::from(format!("{up}blobs/{digest}"));
        if fs::read_link(&entry).is_ok_and(|t| t == target) {
            return Ok(());
        }
        replace(&entry, |new| {
            symlink(&target, new)
                .or_else(|_| fs::hard_link(&blob, new))
                .or_else(|_| fs::copy(&blob, new).map(|_| ()))
        })
    }

    /// Waits for the right to write a blob. A lock ends with its process. Where the file system has no
    /// locks, there is none.
    pub(crate) fn lock(
        &self,
        repo: &RepoId,
        digest: Digest,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Option<File>, HubError> {
        let path = self.root.join(".locks").join(repo.folder()).join(format!("{digest}.lock"));
        create_parent(&path)?;
        let file = File::create(&path).map_err(HubError::io(&path, "create"))?;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Some(file)),
                Err(TryLockError::WouldBlock) => pause(Duration::from_millis(100), stopped)?,
                Err(TryLockError::Error(_)) => return Ok(None),
            }
        }
    }
}

/// Files below a folder whose content is there.
fn walk(dir: &Path, prefix: &str, depth: usize, files: &mut Vec<RepoFile>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries.flatten() {
        let Ok(name) = entry.file_name().into_string() else { continue };
        let path = format!("{prefix}{name}");
        let Ok(metadata) = fs::metadata(entry.path()) else { continue };
        if metadata.is_file() {
            files.push(RepoFile { path, size: metadata.len(), digest: None });
        } else if depth < MAX_DEPTH {
            walk(&entry.path(), &format!("{path}/"), depth + 1, files);
        }
    }
}

/// Whether nothing is missing that the chosen files themselves name.
fn is_complete(snapshot: &Path, selection: &Selection) -> bool {
    let there: BTreeSet<&str> = selection.weights.iter().map(|f| f.path.as_str()).collect();
    let whole = |path: &str| match ShardName::parse(path) {
        Some(shard) => (1..=shard.count).all(|n| there.contains(shard.sibling(n).as_str())),
        None => true,
    };
    if !there.iter().all(|path| whole(path)) {
        return false;
    }
    if selection.container == Container::Gguf {
        return true;
    }
    let has = |name: &str| selection.companions.iter().any(|f| f.path.ends_with(name));
    let indexes =
        selection.companions.iter().filter(|f| f.path.ends_with(".safetensors.index.json"));
    has("config.json")
        && indexes.filter_map(|f| shards_of(&snapshot.join(&f.path), f.size)).all(|shards| {
            let dir = selection.models.first().filter(|d| !d.is_empty());
            let path = |s: &String| dir.map_or(s.clone(), |d| format!("{d}/{s}"));
            shards.iter().all(|s| there.contains(path(s).as_str()))
        })
}

/// Files that an index names. One that cannot be read is left to whoever opens the model.
fn shards_of(index: &Path, size: u64) -> Option<BTreeSet<String>> {
    #[derive(serde::Deserialize)]
    struct Index {
        weight_map: std::collections::BTreeMap<String, String>,
    }
    let text = (size <= MAX_INDEX_BYTES).then(|| fs::read(index).ok()).flatten()?;
    let index: Index = serde_json::from_slice(&text).ok()?;
    Some(index.weight_map.into_values().collect())
}

pub(crate) fn create_parent(path: &Path) -> Result<(), HubError> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).map_err(HubError::io(parent, "create the folder"))
}

/// Makes a file under another name first, so that nobody sees half of it.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), HubError> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let name = format!(".new-{}-{count}", std::process::id());
    let new = path.with_file_name(name);
    let made = make(&new).and_then(|()| fs::rename(&new, path));
    made.map_err(|e| {
        let _ = fs::remove_file(&new);
        HubError::io(path, "create")(e)
    })
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &Path, link: &Path) -> io::Result<()> {
    std::os::windows::fs::symlink_file(target.to_string_lossy().replace('/', "\\"), link)
}
