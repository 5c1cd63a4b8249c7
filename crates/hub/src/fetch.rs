//! Whole models: room on the disk, several files at a time, the snapshot.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use crate::cache::{Cache, CachedModel, create_parent};
use crate::config::HubConfig;
use crate::download::{Job, incomplete};
use crate::error::HubError;
use crate::http::{Client, Fault};
use crate::id::RepoId;
use crate::listing::{self, Listing, RepoFile};
use crate::remote::RemoteModel;
use crate::select::Selection;

/// Who looks on while files arrive.
pub struct Control<'a> {
    /// Told a file's path, its bytes that are there, and its size. Called from several threads.
    pub progress: &'a (dyn Fn(&str, u64, u64) + Sync),
    /// Set to stop; what has arrived is kept.
    pub cancel: &'a AtomicBool,
}

/// A hub and the cache beside it.
pub struct Hub {
    client: Arc<Client>,
    cache: Cache,
    offline: bool,
    jobs: usize,
}

impl Hub {
    /// Connects to nothing yet.
    pub fn new(config: &HubConfig) -> Result<Hub, HubError> {
        Ok(Hub {
            client: Arc::new(Client::new(config)?),
            cache: Cache::new(&config.cache),
            offline: config.offline,
            jobs: config.jobs.clamp(1, 16),
        })
    }

    /// The cache.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }

    /// [`Cache::resolve_local`].
    pub fn resolve_local(
        &self,
        repo: &RepoId,
        pattern: Option<&str>,
    ) -> Result<Option<CachedModel>, HubError> {
        self.cache.resolve_local(repo, pattern)
    }

    /// The files of a revision: a branch, a tag or a commit.
    pub fn list(
        &self,
        repo: &RepoId,
        revision: &str,
        cancel: &AtomicBool,
    ) -> Result<Listing, HubError> {
        if self.offline {
            return Err(HubError::Offline { repo: repo.to_string() });
        }
        listing::list(&self.client, repo, revision, &|| cancel.load(Ordering::Relaxed))
    }

    /// Bytes of these files that are still to come.
    pub fn missing_bytes(&self, listing: &Listing, files: &[RepoFile]) -> u64 {
        let missing = |f: &&RepoFile| !self.cache.has(&listing.repo, &listing.commit, f);
        let left = |f: &RepoFile| {
            let part = f.digest.map(|d| incomplete(&self.cache.blob(&listing.repo, d)));
            let part = part.and_then(|p| std::fs::metadata(p).ok()).map_or(0, |m| m.len());
            f.size.saturating_sub(part)
        };
        files.iter().filter(missing).map(left).sum()
    }

    /// Downloads what is missing of these files and gives the snapshot's folder. Each file appears there
    /// once its digest matched; the revision points there once all have.
    pub fn fetch(
        &self,
        listing: &Listing,
        files: &[RepoFile],
        control: &Control<'_>,
    ) -> Result<PathBuf, HubError> {
        let snapshot = self.fetch_files(listing, files, control)?;
        self.cache.set_ref(&listing.repo, &listing.revision, &listing.commit)?;
        Ok(snapshot)
    }

    /// A model whose weights stay where they are: small files come to the cache, of weights only what
    /// is read. `selection` is of one model.
    pub fn remote(
        &self,
        listing: &Listing,
        selection: &Selection,
        control: &Control<'_>,
    ) -> Result<RemoteModel, HubError> {
        let dir = self.fetch_files(listing, &selection.companions, control)?;
        let weights = selection.weights.iter();
        let weights =
            weights.map(|f| (f.clone(), listing.url(&self.client, f), listing.subject(f)));
        let companions = selection.companions.iter().map(|f| f.path.clone()).collect();
        let main = selection.model_paths(&dir).into_iter().next().unwrap_or_else(|| dir.clone());
        Ok(RemoteModel::new(self.client.clone(), dir, main, companions, weights.collect()))
    }

    fn fetch_files(
        &self,
        listing: &Listing,
        files: &[RepoFile],
        control: &Control<'_>,
    ) -> Result<PathBuf, HubError> {
        let snapshot = self.cache.snapshot(&listing.repo, &listing.commit);
        create_parent(&snapshot.join("x"))?;
        check_space(self.cache.root(), self.missing_bytes(listing, files))?;
        let next = AtomicUsize::new(0);
        let failed = AtomicBool::new(false);
        let first_error: Mutex<Option<HubError>> = Mutex::new(None);
        let stopped = || control.cancel.load(Ordering::Relaxed) || failed.load(Ordering::Relaxed);
        let work = || {
            while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(e) = self.fetch_file(listing, file, control, &stopped) {
                    // Those that stop because of the first error have nothing to add.
                    let mut first = first_error.lock().expect("no holder of the lock panics");
                    first.get_or_insert(e);
                    failed.store(true, Ordering::Relaxed);
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 1..self.jobs.min(files.len()) {
                scope.spawn(work);
            }
            work();
        });
        match first_error.into_inner().expect("no holder of the lock panics") {
            Some(error) => Err(error),
            None => Ok(snapshot),
        }
    }

    fn fetch_file(
        &self,
        listing: &Listing,
        file: &RepoFile,
        control: &Control<'_>,
        stopped: &dyn Fn() -> bool,
    ) -> Result<(), HubError> {
        let (repo, commit) = (&listing.repo, &listing.commit);
        let url = listing.url(&self.client, file);
        let digest = file
            .digest
            .ok_or_else(|| Fault::bad_answer(&url, "a digest in the listing", "none"))?;
        if !self.cache.has(repo, commit, file) {
            let blob = self.cache.blob(repo, digest);
            create_parent(&blob)?;
            let _lock = self.cache.lock(repo, digest, stopped)?;
            // Another process may have finished it while this one waited.
            if !self.cache.has(repo, commit, file) {
                let job = Job {
                    client: &self.client,
                    url,
                    subject: listing.subject(file),
                    size: file.size,
                    digest,
                    blob,
                    stopped,
                    progress: &|done| (control.progress)(&file.path, done, file.size),
                };
                job.run()?;
            }
        }
        (control.progress)(&file.path, file.size, file.size);
        self.cache.link(repo, commit, &file.path, digest)
    }
}

/// Refuses what the disk has no room for, before the first byte.
fn check_space(dir: &Path, needed: u64) -> Result<(), HubError> {
    match available(dir) {
        Some(available) if available < needed => {
            Err(HubError::NoSpace { dir: dir.to_owned(), needed, available })
        }
        _ => Ok(()),
    }
}

#[cfg(unix)]
fn available(dir: &Path) -> Option<u64> {
    let stat = rustix::fs::statvfs(dir).ok()?;
    stat.f_bavail.checked_mul(stat.f_frsize)
}

/// Not known here: the system says so when it happens.
#[cfg(not(unix))]
fn available(_: &Path) -> Option<u64> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(unix)]
    fn a_disk_that_is_too_small() {
        let dir = tempfile::tempdir().unwrap();
        check_space(dir.path(), 1).unwrap();
        let e = check_space(dir.path(), u64::MAX).unwrap_err();
        assert_eq!(e.class(), "NoSpace");
        assert!(e.to_string().contains("HF_HUB_CACHE"), "{e}");
    }
}
