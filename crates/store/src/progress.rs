//! What becomes of one read, whichever engine makes it: the same rules for threads and for the ring.
//!
//! A [`Progress`] says which bytes to ask the system for next and is told the outcome. Interrupted
//! reads go on; device errors are tried again [`DEVICE_RETRIES`] times; direct reads that the file
//! refuses are made through the page cache, once and for all, with one note; short reads are completed
//! through the page cache, as what is missing starts anywhere; the page cache that large buffered
//! reads leave behind is dropped. What fails all the same is read from another copy of the file, if
//! there is one.

use std::io;
use std::ops::Range;

use forebay_models::Extent;

use crate::error::{Reader, StoreError};
use crate::io::FileSet;
use crate::platform::{Access, Failure, failure};
use crate::region::ALIGN;

/// How often a read that the device failed is tried again.
pub const DEVICE_RETRIES: usize = 2;

#[derive(Debug)]
pub(crate) struct Progress {
    file: u32,
    copy: usize,
    offset: u64,
    /// Bytes that must arrive.
    need: usize,
    /// Bytes of the buffer; direct reads ask for all of them.
    len: usize,
    access: Access,
    done: usize,
    device_failures: usize,
    /// Its page cache is of no use afterwards.
    large: bool,
}

/// What to do after an attempt.
#[derive(Debug)]
pub(crate) enum Step {
    /// Another attempt, as the progress says now.
    Again,
    Done,
    Failed(StoreError),
}

impl Progress {
    /// Of an aligned read.
    pub(crate) fn large(
        files: &FileSet,
        copy: usize,
        file: u32,
        offset: u64,
        need: usize,
        len: usize,
    ) -> Progress {
        assert!(
            offset.is_multiple_of(ALIGN as u64) && len.is_multiple_of(ALIGN) && need <= len,
            "direct reads are aligned"
        );
        let access = files.access(file, copy);
        Progress { file, copy, offset, need, len, access, done: 0, device_failures: 0, large: true }
    }

    /// Of a read of any range, through the page cache.
    pub(crate) fn small(files: &FileSet, extent: Extent) -> Progress {
        let len = extent.len as usize;
        let copy = (0..files.n_copies()).find(|&copy| files.usable(copy)).unwrap_or(0);
        Progress {
            file: extent.file,
            copy,
            offset: extent.offset,
            need: len,
            len,
            access: Access::Buffered,
            done: 0,
            device_failures: 0,
            large: false,
        }
    }

    pub(crate) fn file(&self) -> u32 {
        self.file
    }

    pub(crate) fn copy(&self) -> usize {
        self.copy
    }

    pub(crate) fn access(&self) -> Access {
        self.access
    }

    pub(crate) fn need(&self) -> usize {
        self.need
    }

    /// Where in the buffer the next attempt puts its bytes.
    pub(crate) fn range(&self) -> Range<usize> {
        match self.access {
            Access::Direct => 0..self.len,
            Access::Buffered => self.done..self.need,
        }
    }

    /// Where in the file it reads them.
    pub(crate) fn file_offset(&self) -> u64 {
        self.offset + self.range().start as u64
    }

    /// An attempt is over.
    pub(crate) fn after(&mut self, files: &FileSet, result: io::Result<usize>) -> Step {
        match result {
            Ok(got) => self.arrived(files, got),
            Err(error) => match (failure(&error), self.access) {
                (Failure::Interrupted, _) => Step::Again,
                (Failure::Device, _) if self.device_failures < DEVICE_RETRIES => {
                    self.device_failures += 1;
                    Step::Again
                }
                (Failure::Invalid, Access::Direct) => {
                    match files.leave_direct(self.file, self.copy, &error) {
                        Ok(()) => {
                            self.access = Access::Buffered;
                            Step::Again
                        }
                        Err(error) => self.failed(files, error),
                    }
                }
                _ => {
                    let error = StoreError::Io {
                        path: files.path(self.file, self.copy).into(),
                        reader: Reader::Range,
                        offset: self.offset,
                        len: self.need as u64,
                        source: error,
                    };
                    self.failed(files, error)
                }
            },
        }
    }

    fn arrived(&mut self, files: &FileSet, got: usize) -> Step {
        self.device_failures = 0;
        let end_of_file = got == 0 && self.access == Access::Buffered;
        self.done += got;
        if self.done >= self.need {
            if self.access == Access::Buffered && self.large {
                let file = files.handle(self.file, self.copy, Access::Buffered);
                file.forget(self.offset, self.len as u64);
            }
            return Step::Done;
        }
        if end_of_file {
            let error = StoreError::Truncated {
                path: files.path(self.file, self.copy).into(),
                reader: Reader::Range,
                offset: self.offset,
                wanted: self.need as u64,
                got: self.done as u64,
            };
            return self.failed(files, error);
        }
        self.access = Access::Buffered;
        Step::Again
    }

    fn failed(&mut self, files: &FileSet, error: StoreError) -> Step {
        let Some(copy) = files.instead_of(self.copy, &error) else { return Step::Failed(error) };
        self.copy = copy;
        self.done = 0;
        self.device_failures = 0;
        self.access = match self.large {
            true => files.access(self.file, copy),
            false => Access::Buffered,
        };
        Step::Again
    }
}
