//! A forward-only reader of a file's header that never asks for more than the file has.
//!
//! Every read is checked against the length of the file first, so that a length field cannot size an
//! allocation beyond it. The bytes consumed are hashed on the way: they are what tells one checkpoint
//! from another.

use std::fmt;
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use crate::error::{FilesError, quoted};

/// What is being read, for messages.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Place<'a> {
    Header,
    KeyName { index: u64 },
    Key(&'a str),
    TensorName { index: u64 },
    Tensor(&'a str),
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Header => write!(f, "header"),
            Place::KeyName { index } => write!(f, "name of key {index}"),
            Place::Key(key) => write!(f, "key {}", quoted(key)),
            Place::TensorName { index } => write!(f, "name of tensor {index}"),
            Place::Tensor(name) => write!(f, "tensor {}", quoted(name)),
        }
    }
}

const CHUNK_BYTES: usize = 64 << 10;

pub(crate) struct HeaderReader<R> {
    inner: R,
    file: PathBuf,
    file_len: u64,
    /// Bytes taken by callers so far.
    position: u64,
    buffer: Vec<u8>,
    next: usize,
    filled: usize,
    hasher: blake3::Hasher,
    /// `buffer[hashed..next]` was taken but is not hashed yet.
    hashed: usize,
}

impl<R: Read> HeaderReader<R> {
    pub fn new(inner: R, file_len: u64, file: &Path) -> Self {
        HeaderReader {
            inner,
            file: file.to_owned(),
            file_len,
            position: 0,
            buffer: vec![0; CHUNK_BYTES],
            next: 0,
            filled: 0,
            hasher: blake3::Hasher::new(),
            hashed: 0,
        }
    }

    pub fn file(&self) -> &Path {
        &self.file
    }

    pub fn position(&self) -> u64 {
        self.position
    }

    pub fn remaining(&self) -> u64 {
        self.file_len.saturating_sub(self.position)
    }

    /// Hash of the bytes taken, of their number and of the length of the file.
    pub fn finish(mut self) -> [u8; 32] {
        self.hasher.update(&self.buffer[self.hashed..self.next]);
        self.hasher.update(&self.position.to_le_bytes());
        self.hasher.update(&self.file_len.to_le_bytes());
        *self.hasher.finalize().as_bytes()
    }

    /// Fails unless the file still has `needed` bytes.
    pub fn require(&self, needed: u64, place: Place<'_>) -> Result<(), FilesError> {
        if needed <= self.remaining() {
            return Ok(());
        }
        Err(FilesError::Truncated {
            file: self.file.clone(),
            what: place.to_string(),
            expected: needed,
            found: self.remaining(),
        })
    }

    pub fn fill(&mut self, out: &mut [u8], place: Place<'_>) -> Result<(), FilesError> {
        self.require(out.len() as u64, place)?;
        let mut done = 0;
        while done < out.len() {
            if self.next == self.filled {
                self.refill((out.len() - done) as u64, place)?;
            }
            let n = (self.filled - self.next).min(out.len() - done);
            out[done..done + n].copy_from_slice(&self.buffer[self.next..self.next + n]);
            self.next += n;
            self.position += n as u64;
            done += n;
        }
        Ok(())
    }

    fn refill(&mut self, missing: u64, place: Place<'_>) -> Result<(), FilesError> {
        self.hasher.update(&self.buffer[self.hashed..self.next]);
        (self.next, self.filled, self.hashed) = (0, 0, 0);
        loop {
            match self.inner.read(&mut self.buffer) {
                // Shorter than its own length said: it shrank while being read.
                Ok(0) => {
                    return Err(FilesError::Truncated {
                        file: self.file.clone(),
                        what: place.to_string(),
                        expected: missing,
                        found: 0,
                    });
                }
                Ok(n) => {
                    self.filled = n;
                    return Ok(());
                }
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(source) => {
                    let file = self.file.clone();
                    return Err(FilesError::Io { file, action: "read", source });
                }
            }
        }
    }

    pub fn array<const N: usize>(&mut self, place: Place<'_>) -> Result<[u8; N], FilesError> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, place)?;
        Ok(bytes)
    }

    pub fn u32(&mut self, place: Place<'_>) -> Result<u32, FilesError> {
        Ok(u32::from_le_bytes(self.array(place)?))
    }

    pub fn u64(&mut self, place: Place<'_>) -> Result<u64, FilesError> {
        Ok(u64::from_le_bytes(self.array(place)?))
    }

    /// `len` bytes; `len` is compared with `limit` and with the file before anything is allocated.
    pub fn bytes(&mut self, len: u64, limit: u64, place: Place<'_>) -> Result<Vec<u8>, FilesError> {
        if len > limit {
            return Err(self.limit(format!("length of {place}"), limit, len));
        }
        self.require(len, place)?;
        let mut bytes = vec![0; len as usize];
        self.fill(&mut bytes, place)?;
        Ok(bytes)
    }

    pub fn limit(&self, what: String, limit: u64, found: u64) -> FilesError {
        FilesError::LimitExceeded { file: self.file.clone(), what, limit, found }
    }
}
