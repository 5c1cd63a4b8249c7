//! Files that are read where they are, by ranges: enough to tell what a model is before it is fetched.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_files::{Catalog, Disk, FileAccess, FileEntry, FilesError};

use crate::error::HubError;
use crate::http::{Answer, Client, Fault, Subject, Tries, content_range, cut};
use crate::listing::RepoFile;

/// The first request; most safetensors headers fit.
const FIRST_BYTES: u64 = 256 << 10;
/// Later ones double up to this.
const MOST_BYTES: u64 = 1 << 20;

/// One file, read forward from its start, a piece per request.
pub struct RemoteFile {
    client: Arc<Client>,
    url: String,
    subject: Subject,
    len: u64,
    /// Offset in the file of the piece's end.
    position: u64,
    piece: Arc<Vec<u8>>,
    /// Bytes of the piece that were read.
    taken: usize,
    step: u64,
}

impl RemoteFile {
    fn new(client: Arc<Client>, url: String, subject: Subject, len: u64) -> RemoteFile {
        let piece = Arc::new(Vec::new());
        RemoteFile { client, url, subject, len, position: 0, piece, taken: 0, step: FIRST_BYTES }
    }

    fn fetch(&mut self) -> Result<(), HubError> {
        let (from, to) = (self.position, (self.position + self.step).min(self.len));
        let mut tries = Tries::new(self.client.retry, &|| false);
        let piece = loop {
            let answer = self.client.get(&self.url, Some((from, Some(to))), &self.subject);
            match answer.and_then(|a| self.receive(a, from, to)) {
                Ok(piece) => break piece,
                Err(fault) => tries.failed(fault)?,
            }
        };
        self.piece = Arc::new(piece);
        self.taken = 0;
        self.position = to;
        self.step = (self.step * 2).min(MOST_BYTES);
        Ok(())
    }

    fn receive(&self, answer: Answer, from: u64, to: u64) -> Result<Vec<u8>, Fault> {
        let found = match (answer.status, content_range(&answer.headers)) {
            (206, Some((first, _, total)))
                if first == from && total.is_none_or(|t| t == self.len) =>
            {
                None
            }
            // A server without ranges sends all of it; the start is all that can be used.
            (200, None) if from == 0 && answer.len.is_none_or(|l| l == self.len) => None,
            (status, range) => {
                Some(format!("status {status}, range {range:?}, length {:?}", answer.len))
            }
        };
        if let Some(found) = found {
            let expected = format!("bytes {from} to {to} of {}", self.len);
            return Err(Fault::Final(Fault::bad_answer(&self.url, &expected, found)));
        }
        let mut piece = Vec::new();
        match answer.body.take(to - from).read_to_end(&mut piece) {
            Ok(n) if n as u64 == to - from => Ok(piece),
            Ok(_) => Err(cut(&self.url, &ErrorKind::UnexpectedEof.into())),
            Err(e) => Err(cut(&self.url, &e)),
        }
    }
}

impl Read for RemoteFile {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if self.taken == self.piece.len() {
            if self.position == self.len || out.is_empty() {
                return Ok(0);
            }
            self.fetch().map_err(io::Error::other)?;
        }
        let n = (self.piece.len() - self.taken).min(out.len());
        out[..n].copy_from_slice(&self.piece[self.taken..self.taken + n]);
        self.taken += n;
        Ok(n)
    }
}

/// A model whose weights are on the hub and whose small files are in the cache.
pub struct RemoteModel {
    client: Arc<Client>,
    /// Folder of the snapshot.
    dir: PathBuf,
    main: PathBuf,
    companions: Vec<PathBuf>,
    weights: BTreeMap<PathBuf, Weights>,
}

struct Weights {
    url: String,
    subject: Subject,
    len: u64,
    /// The first piece: a file's kind is looked at before its header is read.
    head: RefCell<Option<Arc<Vec<u8>>>>,
}

impl RemoteModel {
    pub(crate) fn new(
        client: Arc<Client>,
        dir: PathBuf,
        main: PathBuf,
        companions: Vec<String>,
        weights: Vec<(RepoFile, String, Subject)>,
    ) -> RemoteModel {
        let weights = weights.into_iter().map(|(file, url, subject)| {
            let head = RefCell::new(None);
            (dir.join(&file.path), Weights { url, subject, len: file.size, head })
        });
        RemoteModel {
            client,
            main,
            companions: companions.iter().map(|c| dir.join(c)).collect(),
            weights: weights.collect(),
            dir,
        }
    }

    /// Reads the headers of all weights. The catalog's paths are those that the files will have in the
    /// cache.
    pub fn catalog(&self) -> Result<Catalog, FilesError> {
        Catalog::open_with(self, &self.main)
    }

    /// Opens a file of weights by its path in the cache.
    fn remote(&self, path: &Path, weights: &Weights) -> Result<RemoteFile, FilesError> {
        let (client, len) = (self.client.clone(), weights.len);
        let mut file = RemoteFile::new(client, weights.url.clone(), weights.subject.clone(), len);
        let mut head = weights.head.borrow_mut();
        match &*head {
            Some(head) => {
                file.piece = head.clone();
                file.position = head.len() as u64;
                file.step = (FIRST_BYTES * 2).min(MOST_BYTES);
            }
            None if len > 0 => {
                file.fetch().map_err(|e| FilesError::Io {
                    file: path.to_owned(),
                    action: "read",
                    source: io::Error::other(e),
                })?;
                *head = Some(file.piece.clone());
            }
            None => {}
        }
        Ok(file)
    }
}

impl FileAccess for RemoteModel {
    fn list(&self, path: &Path) -> Result<Option<Vec<String>>, FilesError> {
        if self.weights.contains_key(path) || !path.starts_with(&self.dir) {
            return Ok(None);
        }
        let all = self.weights.keys().chain(&self.companions);
        let inside = all.filter(|p| p.parent() == Some(path));
        let names = inside.filter_map(|p| p.file_name()?.to_str().map(str::to_owned));
        let mut names: Vec<String> = names.collect();
        names.sort();
        Ok(Some(names))
    }

    fn open(&self, path: &Path) -> Result<(Box<dyn Read>, FileEntry), FilesError> {
        match self.weights.get(path) {
            None => Disk.open(path),
            Some(weights) => {
                let entry = FileEntry { path: path.to_owned(), len: weights.len, mtime_ns: 0 };
                Ok((Box::new(self.remote(path, weights)?), entry))
            }
        }
    }

    fn read_at(&self, path: &Path, offset: u64, len: usize) -> Result<Vec<u8>, FilesError> {
        let Some(weights) = self.weights.get(path) else { return Disk.read_at(path, offset, len) };
        let read = |source| FilesError::Io { file: path.to_owned(), action: "read", source };
        let end = offset + len as u64;
        let head = weights.head.borrow().clone();
        if let Some(head) = head.filter(|head| end <= head.len() as u64) {
            return Ok(head[offset as usize..end as usize].to_vec());
        }
        let (client, url) = (self.client.clone(), weights.url.clone());
        let mut file = RemoteFile::new(client, url, weights.subject.clone(), weights.len);
        (file.position, file.step) = (offset, len as u64);
        let mut bytes = vec![0; len];
        file.read_exact(&mut bytes).map_err(read)?;
        Ok(bytes)
    }

    fn is_file(&self, path: &Path) -> bool {
        self.weights.contains_key(path) || Disk.is_file(path)
    }
}
