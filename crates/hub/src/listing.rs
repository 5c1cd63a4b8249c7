//! What a repository holds.
//!
//! Two requests: `/api/models/{id}/revision/{revision}` gives the commit that a branch or tag points to
//! now; `/api/models/{id}/tree/{commit}?recursive=1` gives that commit's files with sizes and digests,
//! page by page. The first one's own list of files is not used: it is cut off in large repositories.

use serde::Deserialize;

use forebay_files::shards::is_plain;

use crate::digest::Digest;
use crate::error::{HubError, tame};
use crate::http::{Client, Fault, Subject, encode};
use crate::id::{RepoId, is_revision};

const MAX_DOCUMENT_BYTES: u64 = 32 << 20;
/// A page has up to a thousand files.
const MAX_PAGES: usize = 200;
const MAX_PATH_BYTES: usize = 1024;

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoFile {
    /// Path in the repository: relative and plain.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// What its content hashes to; not known of files found in the cache.
    pub digest: Option<Digest>,
}

/// The files of one commit.
#[derive(Clone, Debug)]
pub struct Listing {
    /// The repository.
    pub repo: RepoId,
    /// As asked for.
    pub revision: String,
    /// What it stood for.
    pub commit: String,
    /// All files, in order of their paths.
    pub files: Vec<RepoFile>,
}

impl Listing {
    pub(crate) fn subject(&self, file: &RepoFile) -> Subject {
        Subject {
            repo: self.repo.to_string(),
            revision: self.revision.clone(),
            file: Some(file.path.clone()),
        }
    }

    pub(crate) fn url(&self, client: &Client, file: &RepoFile) -> String {
        let (repo, path) = (&self.repo, encode(&file.path, b"/"));
        format!("{}/{repo}/resolve/{}/{path}", client.endpoint, self.commit)
    }
}

#[derive(Deserialize)]
struct Revision {
    sha: String,
}

#[derive(Deserialize)]
struct Entry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    #[serde(default)]
    oid: String,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    oid: String,
    size: u64,
}

pub(crate) fn list(
    client: &Client,
    repo: &RepoId,
    revision: &str,
    stopped: &dyn Fn() -> bool,
) -> Result<Listing, HubError> {
    if !is_revision(revision) {
        return Err(HubError::BadSetting {
            what: "revision",
            value: revision.to_owned(),
            reason: "it is no name of a branch, a tag or a commit",
        });
    }
    let subject = Subject { repo: repo.to_string(), revision: revision.to_owned(), file: None };
    let api = format!("{}/api/models/{repo}", client.endpoint);
    let url = format!("{api}/revision/{}", encode(revision, b""));
    let (bytes, _) = client.document(&url, MAX_DOCUMENT_BYTES, &subject, stopped)?;
    let Revision { sha: commit } = parse(&bytes, &url)?;
    if !is_commit(&commit) {
        return Err(Fault::bad_answer(&url, "the id of a commit", commit));
    }

    let mut files = Vec::new();
    let mut next = Some(format!("{api}/tree/{commit}?recursive=1"));
    let mut pages = 0;
    while let Some(url) = next {
        pages += 1;
        if pages > MAX_PAGES {
            let expected = format!("at most {MAX_PAGES} pages of files");
            return Err(Fault::bad_answer(&url, &expected, "one more"));
        }
        let (bytes, link) = client.document(&url, MAX_DOCUMENT_BYTES, &subject, stopped)?;
        for entry in parse::<Vec<Entry>>(&bytes, &url)? {
            if entry.kind == "file" {
                files.push(entry.check(repo, &url)?);
            }
        }
        next = link;
    }
    files.sort_by(|a, b| a.path.cmp(&b.path));
    if let Some(twice) = files.windows(2).find(|w| w[0].path == w[1].path) {
        return Err(Fault::bad_answer(&api, "each path once", twice[0].path.clone()));
    }
    let repo = repo.clone();
    Ok(Listing { repo, revision: revision.to_owned(), commit, files })
}

impl Entry {
    fn check(self, repo: &RepoId, url: &str) -> Result<RepoFile, HubError> {
        let Entry { path, size, oid, lfs, .. } = self;
        if !is_plain(&path) || path.len() > MAX_PATH_BYTES {
            return Err(HubError::UnsafePath { repo: repo.to_string(), path: tame(&path) });
        }
        let (hex, size) = match lfs {
            Some(lfs) => (lfs.oid, lfs.size),
            None => (oid, size),
        };
        let hex = hex.strip_prefix("sha256:").unwrap_or(&hex);
        let digest = Digest::parse(hex)
            .ok_or_else(|| Fault::bad_answer(url, &format!("a digest of {path}"), hex))?;
        Ok(RepoFile { path, size, digest: Some(digest) })
    }
}

/// It becomes the name of a folder.
fn is_commit(text: &str) -> bool {
    (7..=64).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_hexdigit())
}

fn parse<T: for<'a> Deserialize<'a>>(bytes: &[u8], url: &str) -> Result<T, HubError> {
    serde_json::from_slice(bytes)
        .map_err(|e| Fault::bad_answer(url, "a document of the hub's kind", e.to_string()))
}
