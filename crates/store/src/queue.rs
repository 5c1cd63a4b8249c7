//! Reads in flight: submit now, complete later.
//!
//! [`ReadQueue`] is the shape of asynchronous reads: a request owns the memory it fills and gives it
//! back with its completion, so a queue may hand it to threads (`crate::threads`) or to the kernel
//! ([`crate::ring`]). [`open`] picks the engine. Which read is next is decided in `crate::backlog`.

use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::backlog::Backlog;
use crate::depth::QueueDepth;
use crate::error::StoreError;
use crate::io::FileSet;
use crate::layout::PlannedRead;
use crate::platform::Access;
use crate::region::{HugePages, Piece, Region};
use crate::{ring, threads};

/// How weights are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoOptions {
    /// Who makes the reads.
    pub engine: IoEngine,
    /// Reads in flight at once, of each disk.
    pub depth: QueueDepth,
    /// Larger runs are split into reads of about this many bytes.
    pub max_read_bytes: u64,
    /// Whether weights in memory ask for huge pages.
    pub huge_pages: HugePages,
}

impl Default for IoOptions {
    fn default() -> Self {
        IoOptions {
            engine: IoEngine::Auto,
            depth: QueueDepth::Measured,
            max_read_bytes: 4 << 20,
            huge_pages: HugePages::Advise,
        }
    }
}

/// Who makes reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum IoEngine {
    /// The kernel's ring where it is allowed and files are read past the page cache; threads elsewhere,
    /// with a note if the ring was refused.
    #[default]
    Auto,
    /// The kernel's ring (io_uring), or an error.
    Uring,
    /// Threads with positioned reads.
    Threads,
}

/// One read on its way.
#[derive(Debug)]
pub struct ReadRequest {
    /// Comes back with the completion.
    pub tag: u64,
    /// File.
    pub file: u32,
    /// Aligned offset in the file.
    pub offset: u64,
    /// Bytes that must exist.
    pub need: usize,
    /// Aligned memory to fill.
    pub dest: Piece,
    /// Whether somebody waits for it.
    pub urgency: Urgency,
}

/// Which reads go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Urgency {
    /// Somebody waits, or will soon.
    Demanded,
    /// May be wanted later: begun only while nothing demanded is waiting or being read.
    Ahead,
}

impl ReadRequest {
    /// A planned read into its piece.
    pub fn new(tag: u64, plan: &PlannedRead, dest: Piece, urgency: Urgency) -> ReadRequest {
        assert_eq!(dest.len(), plan.range.len(), "a read and its piece differ in length");
        ReadRequest { tag, file: plan.file, offset: plan.offset, need: plan.need, dest, urgency }
    }
}

/// A read that is over.
#[derive(Debug)]
pub struct Completion {
    /// The request's.
    pub tag: u64,
    /// The request's: filled if the result is good, unspecified otherwise.
    pub dest: Piece,
    /// Whether every byte needed arrived.
    pub result: Result<(), StoreError>,
    /// When it was over.
    pub finished: Instant,
}

/// Asynchronous reads. Completions come in any order.
pub trait ReadQueue: Send {
    /// Takes a read; never blocks. It may not begin before [`ReadQueue::flush`].
    fn submit(&mut self, request: ReadRequest);
    /// Begins what was submitted: several reads are handed over at once.
    fn flush(&mut self);
    /// A read that is over already, if any.
    fn poll(&mut self) -> Option<Completion>;
    /// Blocks until a read is over; none when none is in flight.
    fn wait(&mut self) -> Option<Completion>;
    /// Reads submitted whose completions were not taken yet.
    fn in_flight(&self) -> usize;
    /// Reads of one disk that may be in flight at once now.
    fn depth(&self) -> usize;
    /// Reads of this tag that were not begun are demanded from now on.
    fn promote(&mut self, tag: u64);
    /// Forgets the reads of this tag that nobody demanded and that were not begun; they have no
    /// completion. Returns their memory.
    fn withdraw(&mut self, tag: u64) -> Vec<Piece>;
    /// Gives memory that reads were made into back to the system, also what the queue holds of it.
    fn retire(&mut self, memory: Region);
}

/// Opens a queue. `reused`: so many regions will be read into again and again, which may be worth
/// announcing them to the kernel.
pub fn open(
    files: &Arc<FileSet>,
    options: &IoOptions,
    reused: usize,
) -> Result<Box<dyn ReadQueue>, StoreError> {
    let direct = (0..files.len() as u32).any(|file| files.access(file, 0) == Access::Direct);
    // What is loaded once goes into memory that was never touched, and threads have it cleared in
    // parallel; the ring would in the one thread that submits.
    let again = reused > 0;
    if options.engine == IoEngine::Uring || (options.engine == IoEngine::Auto && direct && again) {
        match ring::open(files, options.depth, reused) {
            Ok(queue) => return Ok(Box::new(queue)),
            Err(source) if options.engine == IoEngine::Uring => {
                return Err(StoreError::NoRing { source });
            }
            // Where it was never to be expected there is nothing to tell.
            Err(error) if cfg!(target_os = "linux") => files.note_once(&format!(
                "io_uring is not available here ({error}), reading with threads"
            )),
            Err(_) => {}
        }
    }
    let queue = threads::open(files, options.depth);
    Ok(Box::new(queue.map_err(|source| StoreError::NoThread { source })?))
}

/// What a queue and its workers share.
pub(crate) struct Shared {
    pub(crate) files: Arc<FileSet>,
    state: Mutex<State>,
}

pub(crate) struct State {
    pub(crate) backlog: Backlog,
    /// Memory to be given back, with whom to tell.
    pub(crate) retired: Vec<(Region, Sender<()>)>,
    pub(crate) closed: bool,
}

impl Shared {
    pub(crate) fn new(files: &Arc<FileSet>, depth: QueueDepth) -> Shared {
        let backlog = Backlog::new(files.n_copies(), depth);
        let state = State { backlog, retired: Vec::new(), closed: false };
        Shared { files: files.clone(), state: Mutex::new(state) }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while holding the queue")
    }
}

/// Workers of an engine.
pub(crate) trait Workers: Send {
    /// There may be something to do.
    fn wake(&mut self);
    /// Whether memory must be retired by a worker.
    fn hold_memory(&self) -> bool;
    /// They end once the queue is closed.
    fn take_threads(&mut self) -> Vec<JoinHandle<()>>;
}

/// A queue whose reads are made by workers.
pub(crate) struct WorkerQueue<W: Workers> {
    shared: Arc<Shared>,
    completions: Receiver<Completion>,
    in_flight: usize,
    /// Something was submitted since the last flush.
    fresh: bool,
    workers: W,
}

impl<W: Workers> WorkerQueue<W> {
    pub(crate) fn new(
        shared: Arc<Shared>,
        completions: Receiver<Completion>,
        workers: W,
    ) -> WorkerQueue<W> {
        WorkerQueue { shared, completions, in_flight: 0, fresh: false, workers }
    }
}

impl<W: Workers> ReadQueue for WorkerQueue<W> {
    fn submit(&mut self, request: ReadRequest) {
        self.shared.lock().backlog.push(request);
        self.in_flight += 1;
        self.fresh = true;
    }

    fn flush(&mut self) {
        if std::mem::take(&mut self.fresh) {
            self.workers.wake();
        }
    }

    fn poll(&mut self) -> Option<Completion> {
        self.flush();
        let completion = self.completions.try_recv().ok()?;
        self.in_flight -= 1;
        Some(completion)
    }

    fn wait(&mut self) -> Option<Completion> {
        self.flush();
        if self.in_flight == 0 {
            return None;
        }
        let completion = self.completions.recv().expect("workers live as long as the queue");
        self.in_flight -= 1;
        Some(completion)
    }

    fn in_flight(&self) -> usize {
        self.in_flight
    }

    fn depth(&self) -> usize {
        self.shared.lock().backlog.first_depth()
    }

    fn promote(&mut self, tag: u64) {
        self.fresh |= self.shared.lock().backlog.promote(tag) > 0;
    }

    fn withdraw(&mut self, tag: u64) -> Vec<Piece> {
        let pieces = self.shared.lock().backlog.withdraw(tag);
        self.in_flight -= pieces.len();
        pieces
    }

    fn retire(&mut self, memory: Region) {
        if self.workers.hold_memory() {
            let (told, done) = mpsc::channel();
            self.shared.lock().retired.push((memory, told));
            self.workers.wake();
            // An error would mean that the workers are gone, and with them what they held.
            let _ = done.recv();
        }
    }
}

impl<W: Workers> Drop for WorkerQueue<W> {
    /// Forgets what has not begun and waits for what has.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        state.backlog.clear();
        drop(state);
        self.workers.wake();
        for worker in self.workers.take_threads() {
            // A panic inside a read was already reported as that read's result.
            let _ = worker.join();
        }
    }
}
