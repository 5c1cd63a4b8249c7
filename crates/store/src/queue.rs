//! Reads in flight: submit now, complete later.
//!
//! [`ReadQueue`] is the shape of asynchronous reads: a request owns the memory it fills and gives it
//! back with its completion, so a queue may hand it to threads or to the kernel. [`ThreadQueue`] does
//! it with a few threads that take requests first in, first out, and sleep when there are none.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::error::{Reader, StoreError};
use crate::io::FileSet;
use crate::layout::PlannedRead;
use crate::region::{HugePages, Piece};

/// How weights are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoOptions {
    /// Reads in flight at once.
    pub threads: usize,
    /// Larger runs are split into reads of about this many bytes.
    pub max_read_bytes: u64,
    /// Whether weights in memory ask for huge pages.
    pub huge_pages: HugePages,
}

impl Default for IoOptions {
    fn default() -> Self {
        IoOptions { threads: 4, max_read_bytes: 4 << 20, huge_pages: HugePages::Advise }
    }
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
}

impl ReadRequest {
    /// A planned read into its piece.
    pub fn new(tag: u64, plan: &PlannedRead, dest: Piece) -> ReadRequest {
        assert_eq!(dest.len(), plan.range.len(), "a read and its piece differ in length");
        ReadRequest { tag, file: plan.file, offset: plan.offset, need: plan.need, dest }
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
    /// Starts a read; never blocks.
    fn submit(&mut self, request: ReadRequest);
    /// A read that is over already, if any.
    fn poll(&mut self) -> Option<Completion>;
    /// Blocks until a read is over; none when none is in flight.
    fn wait(&mut self) -> Option<Completion>;
    /// Reads submitted whose completions were not taken yet.
    fn in_flight(&self) -> usize;
}

/// A [`ReadQueue`] of threads with positioned reads.
pub struct ThreadQueue {
    shared: Arc<Shared>,
    completions: Receiver<Completion>,
    in_flight: usize,
    workers: Vec<JoinHandle<()>>,
}

struct Shared {
    files: Arc<FileSet>,
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    requests: VecDeque<ReadRequest>,
    closed: bool,
}

impl ThreadQueue {
    /// Starts `threads` workers (at least one).
    pub fn new(files: Arc<FileSet>, threads: usize) -> ThreadQueue {
        let shared = Arc::new(Shared { files, state: Mutex::default(), wake: Condvar::new() });
        let (done, completions) = mpsc::channel();
        let workers = (0..threads.max(1))
            .map(|i| {
                let (shared, done) = (shared.clone(), done.clone());
                std::thread::Builder::new()
                    .name(format!("read-{i}"))
                    .spawn(move || shared.work(&done))
                    .expect("the system starts a thread")
            })
            .collect();
        ThreadQueue { shared, completions, in_flight: 0, workers }
    }
}

impl ReadQueue for ThreadQueue {
    fn submit(&mut self, request: ReadRequest) {
        self.shared.lock().requests.push_back(request);
        self.shared.wake.notify_one();
        self.in_flight += 1;
    }

    fn poll(&mut self) -> Option<Completion> {
        let completion = self.completions.try_recv().ok()?;
        self.in_flight -= 1;
        Some(completion)
    }

    fn wait(&mut self) -> Option<Completion> {
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
}

impl Drop for ThreadQueue {
    /// Forgets what has not begun and waits for what has.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        state.requests.clear();
        drop(state);
        self.shared.wake.notify_all();
        for worker in self.workers.drain(..) {
            // A panic inside a read was already reported as that read's result.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while holding the queue")
    }

    fn next(&self) -> Option<ReadRequest> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(request) = state.requests.pop_front() {
                return Some(request);
            }
            state = self.wake.wait(state).expect("no panic while holding the queue");
        }
    }

    fn work(&self, done: &Sender<Completion>) {
        while let Some(ReadRequest { tag, file, offset, need, mut dest }) = self.next() {
            // A request without a completion would be waited for for ever.
            let read = AssertUnwindSafe(|| self.files.read_aligned(file, offset, need, &mut dest));
            let result = catch_unwind(read).unwrap_or_else(|_| {
                Err(StoreError::Io {
                    path: self.files.entry(file).path.clone(),
                    reader: Reader::Range,
                    offset,
                    len: need as u64,
                    source: std::io::Error::other("the read panicked"),
                })
            });
            if done.send(Completion { tag, dest, result, finished: Instant::now() }).is_err() {
                return;
            }
        }
    }
}
