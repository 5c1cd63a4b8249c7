//! The open files of a checkpoint and how their bytes are read: whole, or with an error.
//!
//! [`FileSet`] holds every file twice: for direct reads (past the page cache; large streamed weights)
//! and for buffered ones (small scattered reads, and whatever direct reads cannot do). All policy on
//! single reads is here: interrupted reads go on, short reads are completed, device errors are tried
//! again [`DEVICE_RETRIES`] times, a file that refuses direct reads falls back to buffered ones once
//! and for all with one note, and the page cache that streamed buffered reads leave behind is dropped.
//!
//! What is not here: several reads at once ([`crate::queue`]), the system's calls
//! ([`crate::platform`]).

use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_files::FileEntry;
use forebay_models::Extent;

use crate::error::{Reader, StoreError};
use crate::platform::{Access, Failure, FileState, Platform, ReadAt, System, failure};
use crate::region::ALIGN;

/// How often a read that the device failed is tried again.
pub const DEVICE_RETRIES: usize = 2;

/// How large weights are read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoMode {
    /// Direct where the file system can, buffered elsewhere.
    #[default]
    Auto,
    /// Direct, or an error.
    Direct,
    /// Through the page cache, which is dropped after use.
    Buffered,
}

/// The open files of a checkpoint, in the catalog's order.
pub struct FileSet {
    files: Vec<OpenFile>,
    mode: IoMode,
    notes: Mutex<Vec<String>>,
}

struct OpenFile {
    entry: FileEntry,
    buffered: Box<dyn ReadAt>,
    direct: Option<Box<dyn ReadAt>>,
    /// Direct reads were refused by an earlier read.
    direct_refused: AtomicBool,
}

impl FileSet {
    /// Opens all files and checks that they are those of the catalog.
    pub fn open(entries: &[FileEntry], mode: IoMode) -> Result<FileSet, StoreError> {
        FileSet::open_on(&System, entries, mode)
    }

    /// The same on a given platform.
    pub fn open_on(
        platform: &dyn Platform,
        entries: &[FileEntry],
        mode: IoMode,
    ) -> Result<FileSet, StoreError> {
        let mut set = FileSet { files: Vec::new(), mode, notes: Mutex::default() };
        for entry in entries {
            let failed = |source| StoreError::Open { path: entry.path.clone(), source };
            let buffered = platform.open(&entry.path, Access::Buffered).map_err(failed)?;
            let direct = match mode {
                IoMode::Buffered => None,
                IoMode::Auto | IoMode::Direct => match platform.open(&entry.path, Access::Direct) {
                    Ok(file) => Some(file),
                    Err(_) if mode == IoMode::Direct => {
                        return Err(StoreError::DirectUnsupported { path: entry.path.clone() });
                    }
                    Err(error) => {
                        set.note_fallback(&entry.path, &error);
                        None
                    }
                },
            };
            let direct_refused = AtomicBool::new(false);
            set.files.push(OpenFile { entry: entry.clone(), buffered, direct, direct_refused });
            set.check_unchanged(set.files.len() as u32 - 1)?;
        }
        Ok(set)
    }

    /// Number of files.
    pub fn len(&self) -> usize {
        self.files.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// The catalog's entry of a file.
    pub fn entry(&self, file: u32) -> &FileEntry {
        &self.files[file as usize].entry
    }

    /// Whether large reads of the file go past the page cache.
    pub fn is_direct(&self, file: u32) -> bool {
        self.files[file as usize].direct().is_some()
    }

    /// What the user may want to know: one sentence for each file that is read differently from what was asked.
    pub fn notes(&self) -> Vec<String> {
        self.notes.lock().expect("no panic while holding notes").clone()
    }

    /// Fails if the file's length or time differs from the catalog's.
    pub fn check_unchanged(&self, file: u32) -> Result<(), StoreError> {
        let OpenFile { entry, buffered, .. } = &self.files[file as usize];
        let FileState { len, mtime_ns } = buffered
            .state()
            .map_err(|source| StoreError::Open { path: entry.path.clone(), source })?;
        let times_known = mtime_ns != 0 && entry.mtime_ns != 0;
        if len != entry.len || (times_known && mtime_ns != entry.mtime_ns) {
            return Err(StoreError::FileChanged {
                path: entry.path.clone(),
                expected_len: entry.len,
                found_len: len,
                expected_mtime_ns: entry.mtime_ns,
                found_mtime_ns: mtime_ns,
            });
        }
        Ok(())
    }

    /// Reads exactly one extent through the page cache: for small reads such as rows of the embedding.
    pub fn read_exact_at(&self, extent: Extent, buf: &mut [u8]) -> Result<(), StoreError> {
        assert_eq!(extent.len, buf.len() as u64, "buffer and extent differ in length");
        let file = &self.files[extent.file as usize];
        file.finish_buffered(extent.offset, 0, buf.len(), buf)
    }

    /// Reads an aligned range whose first `need` bytes must exist (the file may end after them).
    /// `offset`, `buf.len()` and the address of `buf` are multiples of [`ALIGN`].
    pub fn read_aligned(
        &self,
        file: u32,
        offset: u64,
        need: usize,
        buf: &mut [u8],
    ) -> Result<(), StoreError> {
        assert!(
            offset.is_multiple_of(ALIGN as u64)
                && buf.len().is_multiple_of(ALIGN)
                && (buf.as_ptr() as usize).is_multiple_of(ALIGN)
                && need <= buf.len(),
            "direct reads are aligned"
        );
        let file = &self.files[file as usize];
        let mut done = 0;
        if let Some(direct) = file.direct() {
            match attempt(direct, buf, offset) {
                Ok(got) => done = got,
                Err(error) if failure(&error) == Failure::Invalid => {
                    self.leave_direct(file, &error)?
                }
                Err(source) => return Err(file.io_error(offset, need, source)),
            }
        }
        if done >= need {
            return Ok(());
        }
        // No direct handle, or a short read: what is missing starts anywhere, so it is read buffered.
        let whole = buf.len() as u64;
        let result = file.finish_buffered(offset, done, need, buf);
        file.buffered.forget(offset, whole);
        result
    }

    /// The buffered handle of a file, for mapping it.
    pub(crate) fn handle(&self, file: u32) -> &dyn ReadAt {
        &*self.files[file as usize].buffered
    }

    fn leave_direct(&self, file: &OpenFile, error: &io::Error) -> Result<(), StoreError> {
        if self.mode == IoMode::Direct {
            return Err(StoreError::DirectUnsupported { path: file.entry.path.clone() });
        }
        if !file.direct_refused.swap(true, Ordering::Relaxed) {
            self.note_fallback(&file.entry.path, error);
        }
        Ok(())
    }

    fn note_fallback(&self, path: &Path, error: &io::Error) {
        tracing::info!(path = %path.display(), %error, "no direct reads here, reading through the page cache");
        let note = format!(
            "{}: no direct reads here ({error}), reading through the page cache",
            path.display()
        );
        self.notes.lock().expect("no panic while holding notes").push(note);
    }
}

impl OpenFile {
    fn direct(&self) -> Option<&dyn ReadAt> {
        match self.direct_refused.load(Ordering::Relaxed) {
            true => None,
            false => self.direct.as_deref(),
        }
    }

    /// Reads `buf[done..need]`, `buf[0]` being the byte at `offset`.
    fn finish_buffered(
        &self,
        offset: u64,
        mut done: usize,
        need: usize,
        buf: &mut [u8],
    ) -> Result<(), StoreError> {
        while done < need {
            let got = attempt(&*self.buffered, &mut buf[done..need], offset + done as u64)
                .map_err(|source| self.io_error(offset, need, source))?;
            if got == 0 {
                return Err(StoreError::Truncated {
                    path: self.entry.path.clone(),
                    reader: Reader::Range,
                    offset,
                    wanted: need as u64,
                    got: done as u64,
                });
            }
            done += got;
        }
        Ok(())
    }

    fn io_error(&self, offset: u64, len: usize, source: io::Error) -> StoreError {
        let path = self.entry.path.clone();
        StoreError::Io { path, reader: Reader::Range, offset, len: len as u64, source }
    }
}

/// One read, which may be short, with the retries that need no thought.
fn attempt(file: &dyn ReadAt, buf: &mut [u8], offset: u64) -> io::Result<usize> {
    let mut device_failures = 0;
    loop {
        match file.read_at(buf, offset) {
            Ok(got) => return Ok(got),
            Err(error) => match failure(&error) {
                Failure::Interrupted => {}
                Failure::Device if device_failures < DEVICE_RETRIES => device_failures += 1,
                _ => return Err(error),
            },
        }
    }
}

/// The entry of a file as it is now: for files that no catalog describes (benches, tests).
pub fn entry_of(path: &Path) -> Result<FileEntry, StoreError> {
    let state = System
        .open(path, Access::Buffered)
        .and_then(|file| file.state())
        .map_err(|source| StoreError::Open { path: path.into(), source })?;
    Ok(FileEntry { path: path.into(), len: state.len, mtime_ns: state.mtime_ns })
}
