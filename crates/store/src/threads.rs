//! A read queue of threads with positioned reads.
//!
//! A few threads take requests and sleep when there are none. It works wherever files can be read at
//! an offset, and is what other engines fall back to.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::error::{Reader, StoreError};
use crate::io::FileSet;
use crate::queue::{Backlog, Completion, ReadQueue, ReadRequest};
use crate::region::Piece;

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
    backlog: Backlog,
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
        self.shared.lock().backlog.push(request);
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

    fn promote(&mut self, tag: u64) {
        if self.shared.lock().backlog.promote(tag) > 0 {
            self.shared.wake.notify_all();
        }
    }

    fn withdraw(&mut self, tag: u64) -> Vec<Piece> {
        let pieces = self.shared.lock().backlog.withdraw(tag);
        self.in_flight -= pieces.len();
        pieces
    }
}

impl Drop for ThreadQueue {
    /// Forgets what has not begun and waits for what has.
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.closed = true;
        state.backlog.clear();
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
            if let Some(request) = state.backlog.begin() {
                return Some(request);
            }
            state = self.wake.wait(state).expect("no panic while holding the queue");
        }
    }

    fn work(&self, done: &Sender<Completion>) {
        while let Some(ReadRequest { tag, file, offset, need, mut dest, urgency }) = self.next() {
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
            if self.lock().backlog.finish(urgency) {
                self.wake.notify_all();
            }
            if done.send(Completion { tag, dest, result, finished: Instant::now() }).is_err() {
                return;
            }
        }
    }
}
