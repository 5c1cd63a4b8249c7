//! The one place that knows the operating system's file calls.
//!
//! [`Platform`] opens a file for buffered or for direct (page cache bypassing) reads, [`ReadAt`] is
//! the open file. [`System`] is the real one: `O_DIRECT` on Linux and the BSDs, `F_NOCACHE` on
//! macOS, `FILE_FLAG_NO_BUFFERING` on Windows. Retries, fallbacks and alignment are policy and live
//! in [`crate::io`] and `crate::progress`; a platform that fails on purpose, for tests, is in [`crate::faults`].
//!
//! macOS was read, not run: neither compiled nor tested here, as no Apple target could be had. Read in the
//! sources of `rustix` and what its documentation says of `F_NOCACHE`, not in Apple's own pages: `F_NOCACHE` is set after opening
//! and asks for no alignment, so ours is more than enough; pages that are in the cache already are still used, so a "direct" read of a file just written may come from memory; positioned reads are `pread`; there is no ring,
//! so threads read; there is no `fadvise`, so what buffered reads leave in the cache stays until the system wants it; a page is 16 KiB on Apple
//! silicon and `crate::region` asks for it. Known to be weaker there: `madvise` of a region that is given back does not free its pages, so a pool
//! that shrinks does not shrink the process; and nothing is known of free memory or pressure, so `--memory` has to be given.

use std::fs::{File, OpenOptions};
use std::io;
use std::path::Path;
use std::time::UNIX_EPOCH;

use crate::ring::{Ring, RingFile, RingSize};

/// How a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Through the page cache.
    Buffered,
    /// Past the page cache: offset, length and address are multiples of [`crate::region::ALIGN`].
    Direct,
}

/// What tells one state of a file from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileState {
    /// Bytes.
    pub len: u64,
    /// Nanoseconds since the epoch; 0 where unknown.
    pub mtime_ns: i128,
}

/// An open file.
pub trait ReadAt: Send + Sync {
    /// One attempt to read at `offset`: may return fewer bytes than asked for, 0 at the end.
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize>;
    /// Length and time now.
    fn state(&self) -> io::Result<FileState>;
    /// The range will not be read again soon: its page cache may go.
    fn forget(&self, offset: u64, len: u64);
    /// The file itself, for mapping it.
    fn file(&self) -> &File;
}

/// Opens files.
pub trait Platform: Send + Sync {
    /// Opens `path` for reading.
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn ReadAt>>;

    /// A ring that reads from these files, for the calling thread; an error where there is none.
    fn ring(&self, files: &[RingFile<'_>], size: RingSize) -> io::Result<Box<dyn Ring>> {
        let _ = (files, size);
        Err(io::Error::new(io::ErrorKind::Unsupported, "it is not part of this system"))
    }
}

/// What an error of a read means for what to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// A signal came; ask again.
    Interrupted,
    /// Arguments that direct reads of this file do not take.
    Invalid,
    /// The device failed; may pass.
    Device,
    /// Anything else.
    Other,
}

pub(crate) fn failure(error: &io::Error) -> Failure {
    if error.kind() == io::ErrorKind::Interrupted {
        return Failure::Interrupted;
    }
    #[cfg(unix)]
    return match rustix::io::Errno::from_io_error(error) {
        Some(rustix::io::Errno::INVAL | rustix::io::Errno::OPNOTSUPP) => Failure::Invalid,
        Some(rustix::io::Errno::IO) => Failure::Device,
        _ => Failure::Other,
    };
    #[cfg(not(unix))]
    // ERROR_INVALID_PARAMETER; ERROR_CRC, ERROR_IO_DEVICE
    match error.raw_os_error() {
        Some(87) => Failure::Invalid,
        Some(23 | 1117) => Failure::Device,
        _ => Failure::Other,
    }
}

/// The operating system.
#[derive(Clone, Copy, Debug, Default)]
pub struct System;

impl Platform for System {
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn ReadAt>> {
        let file = match access {
            Access::Buffered => OpenOptions::new().read(true).open(path)?,
            Access::Direct => sys::open_direct(path)?,
        };
        if access == Access::Buffered {
            sys::advise_random(&file);
        }
        Ok(Box::new(SystemFile(file)))
    }

    #[cfg(target_os = "linux")]
    fn ring(&self, files: &[RingFile<'_>], size: RingSize) -> io::Result<Box<dyn Ring>> {
        Ok(Box::new(crate::uring::KernelRing::open(files, size)?))
    }
}

struct SystemFile(File);

impl ReadAt for SystemFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        sys::read_at(&self.0, buf, offset)
    }
    fn state(&self) -> io::Result<FileState> {
        let meta = self.0.metadata()?;
        let mtime_ns = match meta.modified() {
            Err(_) => 0,
            Ok(time) => match time.duration_since(UNIX_EPOCH) {
                Ok(after) => after.as_nanos() as i128,
                Err(before) => -(before.duration().as_nanos() as i128),
            },
        };
        Ok(FileState { len: meta.len(), mtime_ns })
    }
    fn forget(&self, offset: u64, len: u64) {
        sys::forget(&self.0, offset, len);
    }
    fn file(&self) -> &File {
        &self.0
    }
}

#[cfg(unix)]
mod sys {
    use super::{File, OpenOptions, Path, io};
    use std::os::unix::fs::FileExt;

    pub(super) fn read_at(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        FileExt::read_at(file, buf, offset)
    }

    #[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd"))]
    pub(super) fn open_direct(path: &Path) -> io::Result<File> {
        use std::os::unix::fs::OpenOptionsExt;
        let flags = rustix::fs::OFlags::DIRECT.bits() as i32;
        OpenOptions::new().read(true).custom_flags(flags).open(path)
    }

    #[cfg(target_vendor = "apple")]
    pub(super) fn open_direct(path: &Path) -> io::Result<File> {
        let file = OpenOptions::new().read(true).open(path)?;
        rustix::fs::fcntl_nocache(&file, true)?;
        Ok(file)
    }

    #[cfg(not(any(
        target_os = "linux",
        target_os = "android",
        target_os = "freebsd",
        target_vendor = "apple"
    )))]
    pub(super) fn open_direct(_: &Path) -> io::Result<File> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Experts are read in whole: readahead beyond the range asked for would be waste.
    pub(super) fn advise_random(file: &File) {
        advise(file, 0, 0, Advise::Random);
    }

    pub(super) fn forget(file: &File, offset: u64, len: u64) {
        advise(file, offset, len, Advise::DontNeed);
    }

    enum Advise {
        Random,
        DontNeed,
    }

    #[cfg(any(target_os = "linux", target_os = "android", target_os = "freebsd"))]
    fn advise(file: &File, offset: u64, len: u64, advise: Advise) {
        let advice = match advise {
            Advise::Random => rustix::fs::Advice::Random,
            Advise::DontNeed => rustix::fs::Advice::DontNeed,
        };
        // Advice is only advice: a file system may refuse it.
        let _ = rustix::fs::fadvise(file, offset, std::num::NonZeroU64::new(len), advice);
    }

    #[cfg(not(any(target_os = "linux", target_os = "android", target_os = "freebsd")))]
    fn advise(_: &File, _: u64, _: u64, advise: Advise) {
        match advise {
            Advise::Random | Advise::DontNeed => {}
        }
    }
}

#[cfg(windows)]
mod sys {
    use super::{File, OpenOptions, Path, io};
    use std::os::windows::fs::{FileExt, OpenOptionsExt};

    const FILE_FLAG_NO_BUFFERING: u32 = 0x2000_0000;

    pub(super) fn read_at(file: &File, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        file.seek_read(buf, offset)
    }
    pub(super) fn open_direct(path: &Path) -> io::Result<File> {
        OpenOptions::new().read(true).custom_flags(FILE_FLAG_NO_BUFFERING).open(path)
    }
    pub(super) fn advise_random(_: &File) {}
    pub(super) fn forget(_: &File, _: u64, _: u64) {}
}
