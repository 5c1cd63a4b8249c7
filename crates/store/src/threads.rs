//! Reads made by threads, one positioned read each.
//!
//! It works wherever files can be read at an offset, and is what the ring falls back to. Threads sleep
//! when there is nothing to do, and are started as the depth calls for them.

use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Condvar};
use std::thread::JoinHandle;
use std::time::Instant;

use crate::backlog::{Begun, Ticket};
use crate::depth::QueueDepth;
use crate::error::{Reader, StoreError};
use crate::io::FileSet;
use crate::queue::{Completion, ReadRequest, Shared, WorkerQueue, Workers};

/// A depth that calls for more is not worth it with threads.
const MOST_THREADS: usize = 64;
/// Reading needs little.
const STACK_BYTES: usize = 256 << 10;

pub(crate) fn open(files: &Arc<FileSet>, depth: QueueDepth) -> io::Result<WorkerQueue<Threads>> {
    let shared = Arc::new(Shared::new(files, depth));
    let (done, completions) = mpsc::channel();
    let pool = Arc::new(Pool { shared: shared.clone(), wake: Condvar::new() });
    let mut threads = Threads { pool, done, threads: Vec::new() };
    threads.start()?;
    Ok(WorkerQueue::new(shared, completions, threads))
}

pub(crate) struct Threads {
    pool: Arc<Pool>,
    done: Sender<Completion>,
    threads: Vec<JoinHandle<()>>,
}

struct Pool {
    shared: Arc<Shared>,
    wake: Condvar,
}

impl Threads {
    /// Starts as many threads as may be reading at once; at least one, or there is an error.
    fn start(&mut self) -> io::Result<()> {
        let wanted = self.pool.shared.lock().backlog.depth().min(MOST_THREADS);
        while self.threads.len() < wanted {
            let (pool, done) = (self.pool.clone(), self.done.clone());
            let thread = std::thread::Builder::new()
                .name(format!("read-{}", self.threads.len()))
                .stack_size(STACK_BYTES)
                .spawn(move || pool.work(&done));
            match thread {
                Ok(thread) => self.threads.push(thread),
                // Fewer do as well.
                Err(_) if !self.threads.is_empty() => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Workers for Threads {
    fn wake(&mut self) {
        // There are some already.
        let _ = self.start();
        self.pool.wake.notify_all();
    }

    fn hold_memory(&self) -> bool {
        false
    }

    fn take_threads(&mut self) -> Vec<JoinHandle<()>> {
        std::mem::take(&mut self.threads)
    }
}

impl Pool {
    fn next(&self) -> Option<Begun> {
        let mut state = self.shared.lock();
        loop {
            if state.closed {
                return None;
            }
            let usable = |copy| self.shared.files.usable(copy);
            if let Some(begun) = state.backlog.begin(usable, Instant::now()) {
                return Some(begun);
            }
            state = self.wake.wait(state).expect("no panic while holding the queue");
        }
    }

    fn finish(&self, ticket: Ticket, finished: Instant) {
        let mut state = self.shared.lock();
        state.backlog.finish(ticket, finished);
        let others = !state.backlog.is_empty();
        drop(state);
        if others {
            self.wake.notify_all();
        }
    }

    fn work(&self, done: &Sender<Completion>) {
        let files = &self.shared.files;
        while let Some(Begun { request, ticket }) = self.next() {
            let ReadRequest { tag, file, offset, need, mut dest, .. } = request;
            // A request without a completion would be waited for for ever.
            let read = AssertUnwindSafe(|| {
                files.read_aligned_from(ticket.lane, file, offset, need, &mut dest)
            });
            let result = catch_unwind(read).unwrap_or_else(|_| {
                Err(StoreError::Io {
                    path: files.entry(file).path.clone(),
                    reader: Reader::Range,
                    offset,
                    len: need as u64,
                    source: io::Error::other("the read panicked"),
                })
            });
            let finished = Instant::now();
            self.finish(ticket, finished);
            if done.send(Completion { tag, dest, result, finished }).is_err() {
                return;
            }
        }
    }
}
