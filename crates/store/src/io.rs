//! The open files of a checkpoint and how their bytes are read: whole, or with an error.
//!
//! [`FileSet`] holds every file twice: for direct reads (past the page cache; large streamed weights)
//! and for buffered ones (small scattered reads, and whatever direct reads cannot do). A checkpoint
//! may have a second copy on another disk; then every file is held twice again, and what one copy
//! fails to give is read from the other. What becomes of a single read is decided in
//! `crate::progress`, for every engine.
//!
//! What is not here: several reads at once ([`crate::queue`]), the system's calls
//! ([`crate::platform`]).

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use forebay_files::{Catalog, FileEntry};
use forebay_models::Extent;

use crate::error::{Reader, StoreError};
use crate::platform::{Access, FileState, Platform, ReadAt, System};
use crate::progress::{Progress, Step};
use crate::region::ALIGN;

pub use crate::progress::DEVICE_RETRIES;

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
    platform: Arc<dyn Platform>,
    copies: Vec<CopyOfAll>,
    mode: IoMode,
    notes: Mutex<Vec<String>>,
}

/// All files of a checkpoint, on one disk.
struct CopyOfAll {
    files: Vec<OpenFile>,
    /// Not used any more: something could not be read from it.
    broken: AtomicBool,
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
        FileSet::open_on(Arc::new(System), entries, mode)
    }

    /// The same on a given platform.
    pub fn open_on(
        platform: Arc<dyn Platform>,
        entries: &[FileEntry],
        mode: IoMode,
    ) -> Result<FileSet, StoreError> {
        let mut set = FileSet { platform, copies: Vec::new(), mode, notes: Mutex::default() };
        set.copies.push(set.open_copy(entries)?);
        (0..entries.len() as u32).try_for_each(|file| set.check_unchanged(file))?;
        Ok(set)
    }

    /// Reads from a second copy of the checkpoint as well, on another disk: large reads are shared
    /// between the two by how fast each turns out to be.
    pub fn add_copy(&mut self, of: &Catalog, copy: &Catalog) -> Result<(), StoreError> {
        if of.header_hash != copy.header_hash {
            let path = copy.files.first().map(|file| file.path.clone()).unwrap_or_default();
            return Err(StoreError::CopyDiffers { path, what: "its header is another".into() });
        }
        self.add_copy_of_files(&copy.files)
    }

    /// The same for files that no catalog describes: that their bytes are the same is the caller's
    /// word.
    pub fn add_copy_of_files(&mut self, entries: &[FileEntry]) -> Result<(), StoreError> {
        let ours = &self.copies[0].files;
        let differs = |path: &Path, what: String| {
            Err(StoreError::CopyDiffers { path: path.to_path_buf(), what })
        };
        if ours.len() != entries.len() {
            let path = entries.first().map(|entry| entry.path.clone()).unwrap_or_default();
            return differs(&path, format!("{} files instead of {}", entries.len(), ours.len()));
        }
        for (ours, entry) in ours.iter().zip(entries) {
            if ours.entry.len != entry.len {
                let what = format!("{} bytes instead of {}", entry.len, ours.entry.len);
                return differs(&entry.path, what);
            }
        }
        let copy = self.open_copy(entries)?;
        copy.files.iter().try_for_each(|file| file.check_unchanged())?;
        self.copies.push(copy);
        Ok(())
    }

    fn open_copy(&self, entries: &[FileEntry]) -> Result<CopyOfAll, StoreError> {
        let files = entries.iter().map(|entry| self.open_file(entry)).collect::<Result<_, _>>()?;
        Ok(CopyOfAll { files, broken: AtomicBool::new(false) })
    }

    fn open_file(&self, entry: &FileEntry) -> Result<OpenFile, StoreError> {
        let failed = |source| StoreError::Open { path: entry.path.clone(), source };
        let buffered = self.platform.open(&entry.path, Access::Buffered).map_err(failed)?;
        let direct = match self.mode {
            IoMode::Buffered => None,
            IoMode::Auto | IoMode::Direct => {
                match self.platform.open(&entry.path, Access::Direct) {
                    Ok(file) => Some(file),
                    Err(_) if self.mode == IoMode::Direct => {
                        return Err(StoreError::DirectUnsupported { path: entry.path.clone() });
                    }
                    Err(error) => {
                        self.note_buffered(&entry.path, &error);
                        None
                    }
                }
            }
        };
        let direct_refused = AtomicBool::new(false);
        Ok(OpenFile { entry: entry.clone(), buffered, direct, direct_refused })
    }

    /// Number of files.
    pub fn len(&self) -> usize {
        self.copies[0].files.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The catalog's entry of a file.
    pub fn entry(&self, file: u32) -> &FileEntry {
        &self.file(file, 0).entry
    }

    /// Whether large reads of the file go past the page cache.
    pub fn is_direct(&self, file: u32) -> bool {
        self.file(file, 0).direct().is_some()
    }

    /// What the user may want to know: one sentence for each thing that is not done as asked for.
    pub fn notes(&self) -> Vec<String> {
        self.notes.lock().expect("no panic while holding notes").clone()
    }

    /// Fails if the file's length or time differs from the catalog's. A second copy that changed is
    /// not used any more.
    pub fn check_unchanged(&self, file: u32) -> Result<(), StoreError> {
        for copy in 1..self.copies.len() {
            if self.usable(copy)
                && let Err(error) = self.file(file, copy).check_unchanged()
            {
                self.give_up(copy, &error);
            }
        }
        self.file(file, 0).check_unchanged()
    }

    /// Reads exactly one extent through the page cache: for small reads such as rows of the embedding.
    pub fn read_exact_at(&self, extent: Extent, buf: &mut [u8]) -> Result<(), StoreError> {
        assert_eq!(extent.len, buf.len() as u64, "buffer and extent differ in length");
        self.read(Progress::small(self, extent), buf)
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
        self.read_aligned_from(0, file, offset, need, buf)
    }

    /// The same from one of the copies, or from another one if that fails.
    pub(crate) fn read_aligned_from(
        &self,
        copy: usize,
        file: u32,
        offset: u64,
        need: usize,
        buf: &mut [u8],
    ) -> Result<(), StoreError> {
        assert!((buf.as_ptr() as usize).is_multiple_of(ALIGN), "direct reads are aligned");
        self.read(Progress::large(self, copy, file, offset, need, buf.len()), buf)
    }

    fn read(&self, mut progress: Progress, buf: &mut [u8]) -> Result<(), StoreError> {
        if progress.need() == 0 {
            return Ok(());
        }
        loop {
            let file = self.handle(progress.file(), progress.copy(), progress.access());
            let result = file.read_at(&mut buf[progress.range()], progress.file_offset());
            match progress.after(self, result) {
                Step::Again => {}
                Step::Done => return Ok(()),
                Step::Failed(error) => return Err(error),
            }
        }
    }

    pub(crate) fn n_copies(&self) -> usize {
        self.copies.len()
    }

    pub(crate) fn usable(&self, copy: usize) -> bool {
        !self.copies[copy].broken.load(Ordering::Relaxed)
    }

    pub(crate) fn platform(&self) -> &dyn Platform {
        &*self.platform
    }

    pub(crate) fn path(&self, file: u32, copy: usize) -> &Path {
        &self.file(file, copy).entry.path
    }

    /// How large reads of this copy are made now.
    pub(crate) fn access(&self, file: u32, copy: usize) -> Access {
        match self.file(file, copy).direct() {
            Some(_) => Access::Direct,
            None => Access::Buffered,
        }
    }

    /// An open file. There is a direct one if [`FileSet::access`] said so.
    pub(crate) fn handle(&self, file: u32, copy: usize, access: Access) -> &dyn ReadAt {
        let file = self.file(file, copy);
        match (access, &file.direct) {
            (Access::Direct, Some(direct)) => &**direct,
            (Access::Direct, None) | (Access::Buffered, _) => &*file.buffered,
        }
    }

    /// From now on the file is read through the page cache; an error if that was not wanted.
    pub(crate) fn leave_direct(
        &self,
        file: u32,
        copy: usize,
        error: &io::Error,
    ) -> Result<(), StoreError> {
        let file = self.file(file, copy);
        if self.mode == IoMode::Direct {
            return Err(StoreError::DirectUnsupported { path: file.entry.path.clone() });
        }
        if !file.direct_refused.swap(true, Ordering::Relaxed) {
            self.note_buffered(&file.entry.path, error);
        }
        Ok(())
    }

    /// A copy to read from instead of one that failed, if there is any.
    pub(crate) fn instead_of(&self, copy: usize, error: &StoreError) -> Option<usize> {
        let other = (0..self.copies.len()).find(|&other| other != copy && self.usable(other))?;
        self.give_up(copy, error);
        Some(other)
    }

    fn give_up(&self, copy: usize, error: &StoreError) {
        if !self.copies[copy].broken.swap(true, Ordering::Relaxed) {
            self.note_once(&format!("{error}; reading from the other copy only"));
        }
    }

    /// Tells the user, unless he was told just that.
    pub(crate) fn note_once(&self, note: &str) {
        let mut notes = self.notes.lock().expect("no panic while holding notes");
        if !notes.iter().any(|known| known == note) {
            tracing::info!("{note}");
            notes.push(note.into());
        }
    }

    fn note_buffered(&self, path: &Path, error: &io::Error) {
        self.note_once(&format!(
            "{}: no direct reads here ({error}), reading through the page cache",
            path.display()
        ));
    }

    fn file(&self, file: u32, copy: usize) -> &OpenFile {
        &self.copies[copy].files[file as usize]
    }
}

impl OpenFile {
    fn direct(&self) -> Option<&dyn ReadAt> {
        match self.direct_refused.load(Ordering::Relaxed) {
            true => None,
            false => self.direct.as_deref(),
        }
    }

    fn check_unchanged(&self) -> Result<(), StoreError> {
        let OpenFile { entry, buffered, .. } = self;
        let FileState { len, mtime_ns } = buffered
            .state()
            .map_err(|source| StoreError::Open { path: entry.path.clone(), source })?;
        let times_known = mtime_ns != 0 && entry.mtime_ns != 0;
        if len != entry.len || (times_known && mtime_ns != entry.mtime_ns) {
            return Err(StoreError::FileChanged {
                path: entry.path.clone(),
                reader: Reader::Range,
                expected_len: entry.len,
                found_len: len,
                expected_mtime_ns: entry.mtime_ns,
                found_mtime_ns: mtime_ns,
            });
        }
        Ok(())
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
