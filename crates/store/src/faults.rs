//! A platform that fails on purpose, for the tests of this crate and of those above.
//!
//! [`Faulty`] opens real files and asks a script what to do at each call: short reads, errors, an
//! early end, late answers. It does so for threads and for the ring.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::platform::{Access, FileState, Platform, ReadAt, System};
use crate::region::Piece;
use crate::ring::{Ring, RingDone, RingFile, RingRead, RingSize};

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
    /// A ring is to be set up; there is no path.
    Ring,
    /// A region is to be registered with the ring; there is no path.
    Register,
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
    /// It is made, and a read is over only after this time.
    Late(Duration),
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

    fn ring(&self, files: &[RingFile<'_>], size: RingSize) -> io::Result<Box<dyn Ring>> {
        if let Action::Fail(code) = (self.script)(Path::new(""), Access::Direct, Call::Ring) {
            return Err(io::Error::from_raw_os_error(code));
        }
        Ok(Box::new(FaultyRing {
            inner: System.ring(files, size)?,
            files: files.iter().map(|file| (file.path.into(), file.access)).collect(),
            script: self.script.clone(),
            actions: HashMap::new(),
            late: VecDeque::new(),
        }))
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
                let got = self.inner.read_at(buf, offset)?;
                Ok(shorten(buf, got, len))
            }
            Action::Late(time) => {
                std::thread::sleep(time);
                self.inner.read_at(buf, offset)
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

/// A direct read cannot be shortened below a block, so what came too much is wiped instead.
fn shorten(buf: &mut [u8], got: usize, len: usize) -> usize {
    let short = got.min(len);
    buf[short..].fill(0xEE);
    short
}

struct FaultyRing {
    inner: Box<dyn Ring>,
    files: Vec<(PathBuf, Access)>,
    script: Arc<Script>,
    /// What becomes of reads in flight, by id, and which part of the piece they fill.
    actions: HashMap<u64, (Action, std::ops::Range<usize>)>,
    late: VecDeque<(Instant, RingDone)>,
}

impl FaultyRing {
    fn apply(&mut self, mut done: RingDone) -> Option<RingDone> {
        let (action, range) = self.actions.remove(&done.id).expect("it was pushed");
        match action {
            Action::Pass => {}
            Action::Fail(code) => done.result = Err(io::Error::from_raw_os_error(code)),
            Action::Short(len) => {
                let buf = &mut done.piece[range];
                done.result = done.result.map(|got| shorten(buf, got, len));
            }
            Action::Late(time) => {
                self.late.push_back((Instant::now() + time, done));
                return None;
            }
        }
        Some(done)
    }
}

impl Ring for FaultyRing {
    fn waker(&self) -> Box<dyn Fn() + Send> {
        self.inner.waker()
    }

    fn register(&mut self, buffer: u16, piece: &Piece) -> io::Result<()> {
        match (self.script)(Path::new(""), Access::Direct, Call::Register) {
            Action::Fail(code) => Err(io::Error::from_raw_os_error(code)),
            _ => self.inner.register(buffer, piece),
        }
    }

    fn unregister(&mut self, buffer: u16) {
        self.inner.unregister(buffer);
    }

    fn push(&mut self, read: RingRead) {
        let (path, access) = &self.files[read.file];
        let call = Call::Read { offset: read.offset, len: read.range.len() };
        let action = (self.script)(path, *access, call);
        self.actions.insert(read.id, (action, read.range.clone()));
        self.inner.push(read);
    }

    fn wait(&mut self) -> io::Result<()> {
        if self.late.is_empty() {
            return self.inner.wait();
        }
        // Something is due soon; meanwhile the others are asked for. The waker is called so that the
        // real ring comes back at once.
        (self.inner.waker())();
        self.inner.wait()?;
        std::thread::sleep(Duration::from_millis(1));
        Ok(())
    }

    fn next(&mut self) -> Option<RingDone> {
        let now = Instant::now();
        if let Some(at) = self.late.iter().position(|(due, _)| *due <= now) {
            return self.late.remove(at).map(|(_, done)| done);
        }
        loop {
            let done = self.inner.next()?;
            if let Some(done) = self.apply(done) {
                return Some(done);
            }
        }
    }
}
