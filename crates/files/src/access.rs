//! Where the files of a checkpoint are: on a disk, or wherever someone else reads them from.
//!
//! Opening a model looks at names, lengths and first bytes only, so a model that is not here yet can
//! be described from a few ranges of its files.

use std::fs::{self, File};
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

use crate::catalog::FileEntry;
use crate::error::{FilesError, Hint};

/// Reads folders and files for [`crate::Catalog::open_with`].
pub trait FileAccess {
    /// Names of what lies in a folder, in order; `None` if the path leads to a file.
    fn list(&self, path: &Path) -> Result<Option<Vec<String>>, FilesError>;

    /// Opens a file at its first byte, and says how long it is.
    fn open(&self, path: &Path) -> Result<(Box<dyn Read>, FileEntry), FilesError>;

    /// `len` bytes of a file from `offset` on. For small tables that decide what a model is; weights are not
    /// read this way.
    fn read_at(&self, path: &Path, offset: u64, len: usize) -> Result<Vec<u8>, FilesError>;

    /// Whether the path leads to a file.
    fn is_file(&self, path: &Path) -> bool;
}

/// The file system of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct Disk;

impl FileAccess for Disk {
    fn list(&self, path: &Path) -> Result<Option<Vec<String>>, FilesError> {
        let metadata = fs::metadata(path).map_err(|e| io_error(path, "open", e))?;
        if !metadata.is_dir() {
            return Ok(None);
        }
        let mut names = Vec::new();
        for entry in fs::read_dir(path).map_err(|e| io_error(path, "list", e))? {
            let entry = entry.map_err(|e| io_error(path, "list", e))?;
            // Names that are not text cannot be those of a model's files.
            names.extend(entry.file_name().into_string());
        }
        names.sort();
        Ok(Some(names))
    }

    /// Only a regular file: a pipe would block.
    fn open(&self, path: &Path) -> Result<(Box<dyn Read>, FileEntry), FilesError> {
        let metadata = fs::metadata(path).map_err(|e| io_error(path, "open", e))?;
        if !metadata.is_file() {
            return Err(FilesError::UnknownFormat {
                file: path.to_owned(),
                found: "not a regular file".into(),
                hint: Hint::None,
            });
        }
        let file = File::open(path).map_err(|e| io_error(path, "open", e))?;
        // Of the file that is now open, whatever the path leads to by then.
        let metadata = file.metadata().map_err(|e| io_error(path, "examine", e))?;
        Ok((Box::new(file), FileEntry::new(path, &metadata)))
    }

    fn read_at(&self, path: &Path, offset: u64, len: usize) -> Result<Vec<u8>, FilesError> {
        let mut bytes = vec![0; len];
        let read = File::open(path).and_then(|mut file| {
            file.seek(SeekFrom::Start(offset))?;
            file.read_exact(&mut bytes)
        });
        read.map_err(|e| io_error(path, "read", e))?;
        Ok(bytes)
    }

    fn is_file(&self, path: &Path) -> bool {
        path.is_file()
    }
}

pub(crate) fn io_error(path: &Path, action: &'static str, source: io::Error) -> FilesError {
    FilesError::Io { file: path.to_owned(), action, source }
}
