//! One blob: resumed from what has arrived, renamed to its digest when its content has that digest.
//!
//! A server may answer a request for the rest of a file in many ways. What is written at an offset is
//! what the answer says lies at that offset; an answer that contradicts itself is asked again without a
//! range; and nothing but the digest decides whether the file is done.

use std::fs::{self, File};
use std::io::{ErrorKind, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use crate::digest::{Digest, Hasher};
use crate::error::HubError;
use crate::http::{Answer, Client, Fault, Subject, Tries, content_range, cut};

/// Less than this is no progress that earns further attempts: it bounds their number by the length.
const PROGRESS_BYTES: u64 = 1 << 20;
/// Times that a file is begun again because what had arrived does not fit what comes.
const MAX_RESTARTS: u32 = 2;
const BUFFER_BYTES: usize = 256 << 10;

/// A blob to get.
pub(crate) struct Job<'a> {
    pub client: &'a Client,
    pub url: String,
    pub subject: Subject,
    pub size: u64,
    pub digest: Digest,
    /// Where it goes; beside it, what has arrived.
    pub blob: PathBuf,
    pub stopped: &'a dyn Fn() -> bool,
    /// Told how many bytes are there.
    pub progress: &'a dyn Fn(u64),
}

/// Where what has arrived of a blob lies.
pub(crate) fn incomplete(blob: &Path) -> PathBuf {
    let mut name = blob.as_os_str().to_owned();
    name.push(".incomplete");
    name.into()
}

impl Job<'_> {
    /// Downloads. The caller holds the blob's lock.
    pub fn run(&self) -> Result<(), HubError> {
        let mut part = Part::open(incomplete(&self.blob), self.digest, self.size, self.stopped)?;
        let mut tries = Tries::new(self.client.retry, self.stopped);
        let mut restarts = 0;
        // Whether what is there came in more than one answer: then it is worth another try from the
        // start when the digest is wrong.
        let mut mixed = part.len > 0;
        // Whether to ask for all of it although something is there.
        let mut whole = false;
        let mut counted = part.len;
        let mut clears = part.clears;
        loop {
            (self.progress)(part.len);
            if part.len == self.size {
                match part.finish(&self.blob)? {
                    Ok(()) => return Ok(()),
                    Err(_) if mixed && restarts < MAX_RESTARTS => {
                        restarts += 1;
                        part.clear()?;
                        mixed = false;
                        continue;
                    }
                    Err(found) => {
                        part.discard()?;
                        let file = self.subject.file.clone().unwrap_or_default();
                        return Err(HubError::WrongDigest { file, expected: self.digest, found });
                    }
                }
            }
            let from = if whole { 0 } else { part.len };
            let range = (from > 0).then_some((from, None));
            let outcome = match self.client.get(&self.url, range, &self.subject) {
                Err(fault) => Err(fault),
                Ok(answer) => match self.judge(&answer, from) {
                    Place::At(offset) => self.receive(answer, offset, &mut part),
                    Place::AskWhole if restarts < MAX_RESTARTS => {
                        restarts += 1;
                        whole = true;
                        continue;
                    }
                    Place::AskWhole => {
                        let found = describe(&answer);
                        Err(Fault::Final(self.unusable(found)))
                    }
                    Place::Unusable(found) => Err(Fault::Final(self.unusable(found))),
                },
            };
            if part.clears != clears {
                // A fresh start; what came of it can be resumed again.
                (mixed, whole, counted, clears) = (false, false, 0, part.clears);
            }
            if let Err(fault) = outcome {
                mixed = part.len > 0;
                if part.len >= counted.saturating_add(PROGRESS_BYTES) {
                    counted = part.len;
                    tries.progressed();
                }
                tries.failed(fault).map_err(|e| e.keeping(part.len))?;
            }
        }
    }

    fn unusable(&self, found: String) -> HubError {
        let expected = format!("{} bytes of this file, or the range asked for", self.size);
        Fault::bad_answer(&self.url, &expected, found)
    }

    /// Which offset of the file an answer's first byte has. `from` is what was asked for.
    fn judge(&self, answer: &Answer, from: u64) -> Place {
        let other_content = answer.validator.as_deref().and_then(Digest::from_etag);
        if from > 0 && other_content.is_some_and(|d| same_kind(d, self.digest) && d != self.digest)
        {
            return Place::AskWhole;
        }
        let range = content_range(&answer.headers);
        match (answer.status, range) {
            (200, None) => match answer.len {
                Some(len) if len != self.size => Place::Unusable(format!("a file of {len} bytes")),
                _ => Place::At(0),
            },
            (206, Some((_, _, Some(total)))) if total != self.size => match from {
                0 => Place::Unusable(format!("a part of a file of {total} bytes")),
                _ => Place::AskWhole,
            },
            (206, Some((first, end, _))) if first <= from && end > from => Place::At(first),
            _ if from > 0 => Place::AskWhole,
            _ => Place::Unusable(describe(answer)),
        }
    }

    /// Writes an answer's body, whose first byte belongs at `offset`, not past what is there.
    fn receive(&self, mut answer: Answer, offset: u64, part: &mut Part) -> Result<(), Fault> {
        let mut skip = part.len.saturating_sub(offset);
        if offset == 0 && skip > 0 {
            // All of it comes again: what had arrived is of no use.
            part.clear().map_err(Fault::Final)?;
            skip = 0;
        }
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            if (self.stopped)() {
                return Err(Fault::Final(HubError::Cancelled));
            }
            let wanted = (skip + self.size - part.len).min(BUFFER_BYTES as u64) as usize;
            if wanted == 0 {
                return Ok(());
            }
            match answer.body.read(&mut buffer[..wanted]) {
                Ok(0) => {
                    let early = std::io::Error::from(ErrorKind::UnexpectedEof);
                    return Err(cut(&self.url, &early));
                }
                Ok(n) => {
                    let known = skip.min(n as u64);
                    skip -= known;
                    part.append(&buffer[known as usize..n]).map_err(Fault::Final)?;
                    (self.progress)(part.len);
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(cut(&self.url, &e)),
            }
        }
    }
}

enum Place {
    /// The body begins at this offset.
    At(u64),
    /// Nothing can be done with it, but perhaps with an answer to a request without a range.
    AskWhole,
    /// Nothing can be done with it.
    Unusable(String),
}

fn describe(answer: &Answer) -> String {
    let range = answer.headers.get("content-range").and_then(|v| v.to_str().ok());
    match range {
        Some(range) => format!("status {} with range {range:?}", answer.status),
        None => format!("status {} without a range", answer.status),
    }
}

fn same_kind(a: Digest, b: Digest) -> bool {
    std::mem::discriminant(&a) == std::mem::discriminant(&b)
}

/// What has arrived, hashed.
struct Part {
    path: PathBuf,
    file: File,
    len: u64,
    /// Times that it was emptied.
    clears: u32,
    hasher: Hasher,
    digest: Digest,
    size: u64,
}

impl Part {
    /// Opens or creates the file, and hashes what it has.
    fn open(
        path: PathBuf,
        digest: Digest,
        size: u64,
        stopped: &dyn Fn() -> bool,
    ) -> Result<Part, HubError> {
        let options = File::options().read(true).write(true).create(true).truncate(false).clone();
        let file = options.open(&path).map_err(HubError::io(&path, "open"))?;
        let mut part =
            Part { path, file, len: 0, clears: 0, hasher: digest.hasher(size), digest, size };
        let mut buffer = vec![0; BUFFER_BYTES];
        loop {
            if stopped() {
                return Err(HubError::Cancelled);
            }
            let n = part.file.read(&mut buffer).map_err(HubError::io(&part.path, "read"))?;
            part.len += n as u64;
            part.hasher.update(&buffer[..n]);
            if part.len > size {
                part.clear()?;
                return Ok(part);
            }
            if n == 0 {
                return Ok(part);
            }
        }
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(HubError::io(&self.path, "write"))?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    fn clear(&mut self) -> Result<(), HubError> {
        let cleared = self.file.set_len(0).and_then(|()| self.file.seek(SeekFrom::Start(0)));
        cleared.map_err(HubError::io(&self.path, "empty"))?;
        self.len = 0;
        self.clears += 1;
        self.hasher = self.digest.hasher(self.size);
        Ok(())
    }

    /// Gives the file its final name, or says what its digest is.
    fn finish(&mut self, blob: &Path) -> Result<Result<(), Digest>, HubError> {
        let hasher = std::mem::replace(&mut self.hasher, self.digest.hasher(self.size));
        let found = hasher.finish();
        if found != self.digest {
            return Ok(Err(found));
        }
        self.file.sync_all().map_err(HubError::io(&self.path, "write"))?;
        fs::rename(&self.path, blob).map_err(HubError::io(blob, "create"))?;
        Ok(Ok(()))
    }

    fn discard(&mut self) -> Result<(), HubError> {
        fs::remove_file(&self.path).map_err(HubError::io(&self.path, "remove"))
    }
}

impl HubError {
    /// Says how much is kept for the next try.
    fn keeping(self, len: u64) -> HubError {
        match self {
            HubError::Connection { url, detail, .. } => {
                HubError::Connection { url, detail, received: len }
            }
            other => other,
        }
    }
}
