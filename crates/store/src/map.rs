//! A file mapped read-only.
//!
//! This is one of the crate's four unsafe modules, and its promise is weaker than one would wish: a
//! file that another process truncates while it is mapped makes the kernel send SIGBUS on the next
//! touch of a lost page, and one that is rewritten in place changes under our references. No program
//! can prevent that; we check length and time when the file is opened and again at each pass
//! ([`crate::FileSet::check_unchanged`]), which catches a changed file before its pages are used but
//! leaves a race. Whoever replaces model files should write a new file and rename it. Streamed
//! experts have no such risk.

use std::fs::File;
use std::ops::{Deref, Range};

/// A mapped file. Dereferences to its bytes.
#[derive(Debug)]
pub struct FileMap {
    map: memmap2::Mmap,
}

impl FileMap {
    /// Maps the whole file.
    pub fn new(file: &File) -> std::io::Result<FileMap> {
        // SAFETY: the mapping is private to us and read-only. That nobody changes the file meanwhile
        // cannot be had; the header says what is done about it and what remains.
        let map = unsafe { memmap2::Mmap::map(file)? };
        Ok(FileMap { map })
    }

    /// Asks the system to read the range ahead.
    pub fn will_need(&self, range: Range<usize>) {
        assert!(range.start <= range.end && range.end <= self.map.len());
        #[cfg(unix)]
        if !range.is_empty() {
            // Advice is only advice.
            let _ = self.map.advise_range(memmap2::Advice::WillNeed, range.start, range.len());
        }
    }
}

impl Deref for FileMap {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        &self.map
    }
}
