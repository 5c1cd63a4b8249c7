//! Files in memory, of which the end may be left out.

use std::collections::BTreeMap;
use std::io::{Cursor, Error, ErrorKind, Read};
use std::path::{Path, PathBuf};

use forebay_files::{FileAccess, FileEntry, FilesError};

/// The bytes of a file's beginning, and how long the file says that it is.
struct MemoryFile {
    head: Vec<u8>,
    len: u64,
}

/// The files of one folder, called [`MemoryFiles::DIR`].
#[derive(Default)]
pub struct MemoryFiles(BTreeMap<PathBuf, MemoryFile>);

impl MemoryFiles {
    /// The folder that all files are in.
    pub const DIR: &str = "model";

    /// Adds a file that is whole.
    pub fn add(&mut self, name: &str, bytes: &[u8]) -> PathBuf {
        self.add_head(name, bytes, bytes.len() as u64)
    }

    /// Adds a file of `len` bytes that is known up to somewhere behind its header; what follows reads as zeros.
    pub fn add_head(&mut self, name: &str, head: &[u8], len: u64) -> PathBuf {
        let path = Path::new(Self::DIR).join(name);
        self.0.insert(path.clone(), MemoryFile { head: head.to_vec(), len });
        path
    }
}

fn absent(path: &Path) -> FilesError {
    let source = Error::from(ErrorKind::NotFound);
    FilesError::Io { file: path.to_owned(), action: "open", source }
}

impl FileAccess for MemoryFiles {
    fn list(&self, path: &Path) -> Result<Option<Vec<String>>, FilesError> {
        if path != Path::new(Self::DIR) {
            return if self.0.contains_key(path) { Ok(None) } else { Err(absent(path)) };
        }
        let names = self.0.keys().filter_map(|p| p.file_name()?.to_str());
        Ok(Some(names.map(str::to_owned).collect()))
    }

    fn open(&self, path: &Path) -> Result<(Box<dyn Read>, FileEntry), FilesError> {
        let file = self.0.get(path).ok_or_else(|| absent(path))?;
        let entry = FileEntry { path: path.to_owned(), len: file.len, mtime_ns: 0 };
        Ok((Box::new(Cursor::new(file.head.clone())), entry))
    }

    fn read_at(&self, path: &Path, offset: u64, len: usize) -> Result<Vec<u8>, FilesError> {
        let file = self.0.get(path).ok_or_else(|| absent(path))?;
        assert!(offset + len as u64 <= file.len, "read beyond the end of {}", path.display());
        let known = usize::try_from(offset).ok().and_then(|o| file.head.get(o..));
        let known = known.unwrap_or_default();
        let mut bytes = known[..known.len().min(len)].to_vec();
        bytes.resize(len, 0);
        Ok(bytes)
    }

    fn is_file(&self, path: &Path) -> bool {
        self.0.contains_key(path)
    }
}
