//! A platform that fails on purpose, for the tests of this crate and of those above.
//!
//! [`Faulty`] opens real files and asks a script what to do at each call: short reads, errors, an
//! early end. Slow reads are scripts that sleep.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::platform::{Access, FileState, Platform, ReadAt, System};

/// A call that is about to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Call {
    /// Opening.
    Open,
    /// One attempt to read.
    Read {
        /// First byte.
        offset: u64,
        /// Bytes asked for.
        len: usize,
    },
    /// Page cache to be dropped; the action is ignored.
    Forget {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
    },
}

/// What becomes of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It is made.
    Pass,
    /// At most so many bytes are read; 0 looks like the end of the file.
    Short(usize),
    /// It fails with this error of the system.
    Fail(i32),
}

/// Decides what becomes of a call.
pub type Script = dyn Fn(&Path, Access, Call) -> Action + Send + Sync;

/// The real system with faults.
pub struct Faulty {
    script: Arc<Script>,
}

impl Faulty {
    /// Faults by script.
    pub fn new(script: impl Fn(&Path, Access, Call) -> Action + Send + Sync + 'static) -> Faulty {
        Faulty { script: Arc::new(script) }
    }
}

impl Platform for Faulty {
    fn open(&self, path: &Path, access: Access) -> io::Result<Box<dyn ReadAt>> {
        if let Action::Fail(code) = (self.script)(path, access, Call::Open) {
            return Err(io::Error::from_raw_os_error(code));
        }
        let inner = System.open(path, access)?;
        Ok(Box::new(FaultyFile { inner, path: path.into(), access, script: self.script.clone() }))
    }
}

struct FaultyFile {
    inner: Box<dyn ReadAt>,
    path: PathBuf,
    access: Access,
    script: Arc<Script>,
}

impl ReadAt for FaultyFile {
    fn read_at(&self, buf: &mut [u8], offset: u64) -> io::Result<usize> {
        let call = Call::Read { offset, len: buf.len() };
        match (self.script)(&self.path, self.access, call) {
            Action::Pass => self.inner.read_at(buf, offset),
            Action::Fail(code) => Err(io::Error::from_raw_os_error(code)),
            Action::Short(len) => {
                // A direct read cannot be shortened below a block, so the rest is wiped instead.
                let got = self.inner.read_at(buf, offset)?;
                let short = got.min(len);
                buf[short..].fill(0xEE);
                Ok(short)
            }
        }
    }
    fn state(&self) -> io::Result<FileState> {
        self.inner.state()
    }
    fn forget(&self, offset: u64, len: u64) {
        (self.script)(&self.path, self.access, Call::Forget { offset, len });
        self.inner.forget(offset, len);
    }
    fn file(&self) -> &File {
        self.inner.file()
    }
}
