//! Reads made by the kernel on its own, one thread keeping them going.
//!
//! [`Ring`] is what such an engine must do; the real one is `io_uring` on Linux (`crate::uring`), and a
//! faulty one is in [`crate::faults`]. The thread hands over what the backlog lets begin, sleeps until
//! a read is over or there is something new, and applies the same rules to each outcome as any other
//! engine (`crate::progress`). It keeps the disk busy and notes when reads were over while the
//! caller computes.
//!
//! Memory that is read into again and again is announced to the kernel (registered), so that it does
//! not have to be looked up page by page for every read. Where that is refused, reads go on without.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::backlog::{Begun, Ticket};
use crate::depth::QueueDepth;
use crate::io::FileSet;
use crate::platform::Access;
use crate::progress::{Progress, Step};
use crate::queue::{Completion, ReadRequest, Shared, WorkerQueue, Workers};
use crate::region::{Piece, RegionId};

/// A file that a ring reads from.
pub struct RingFile<'a> {
    /// Where it is.
    pub path: &'a Path,
    /// How it was opened.
    pub access: Access,
    /// The open file.
    pub file: &'a File,
}

/// What a ring shall hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingSize {
    /// Reads in flight.
    pub reads: usize,
    /// Registered regions.
    pub buffers: usize,
}

/// One read for the kernel. It owns the memory until it is over.
#[derive(Debug)]
pub struct RingRead {
    /// Comes back; differs from those of all reads in flight.
    pub id: u64,
    /// Index of the file.
    pub file: usize,
    /// First byte in the file.
    pub offset: u64,
    /// Memory.
    pub piece: Piece,
    /// The part of it to fill.
    pub range: std::ops::Range<usize>,
    /// The registered region that the memory is part of.
    pub buffer: Option<u16>,
}

/// A read of a ring that is over.
#[derive(Debug)]
pub struct RingDone {
    /// The read's.
    pub id: u64,
    /// The read's.
    pub piece: Piece,
    /// Bytes that arrived.
    pub result: io::Result<usize>,
}

/// Makes reads without a thread for each. Used by one thread.
pub trait Ring {
    /// Something that ends [`Ring::wait`], from any thread and also beforehand.
    fn waker(&self) -> Box<dyn Fn() + Send>;
    /// Registers the region that a piece is part of.
    fn register(&mut self, buffer: u16, piece: &Piece) -> io::Result<()>;
    /// Takes a registration back. No read in flight uses it.
    fn unregister(&mut self, buffer: u16);
    /// Takes a read; it begins at the next [`Ring::wait`] at the latest.
    fn push(&mut self, read: RingRead);
    /// Begins what was pushed and blocks until a read is over or the waker was called.
    fn wait(&mut self) -> io::Result<()>;
    /// A read that is over, if any.
    fn next(&mut self) -> Option<RingDone>;
}

/// Starts the thread. Fails if there can be no ring.
pub(crate) fn open(
    files: &Arc<FileSet>,
    depth: QueueDepth,
    reused: usize,
) -> io::Result<WorkerQueue<RingThread>> {
    let shared = Arc::new(Shared::new(files, depth));
    let (done, completions) = mpsc::channel();
    let (told, opened) = mpsc::channel();
    let size =
        RingSize { reads: depth.most() * files.n_copies(), buffers: reused.min(MOST_BUFFERS) };
    let for_thread = shared.clone();
    let thread = std::thread::Builder::new().name("read-ring".into()).spawn(move || {
        let files = ring_files(&for_thread.files);
        match for_thread.files.platform().ring(&files, size) {
            Ok(ring) => {
                drop(files);
                if told.send(Ok(ring.waker())).is_ok() {
                    let buffers = Buffers::new(size.buffers);
                    let active = HashMap::new();
                    Worker { shared: for_thread, ring, done, active, next_id: 0, buffers }.run();
                }
            }
            Err(error) => {
                // Nobody listening would mean that the opener is gone.
                let _ = told.send(Err(error));
            }
        }
    })?;
    let opened = opened.recv().unwrap_or_else(|_| Err(io::Error::other("its thread ended")));
    match opened {
        Ok(waker) => {
            let workers = RingThread { waker, thread: Some(thread) };
            Ok(WorkerQueue::new(shared, completions, workers))
        }
        Err(error) => {
            // It has nothing more to say.
            let _ = thread.join();
            Err(error)
        }
    }
}

/// The kernel numbers registered regions in 14 bits.
const MOST_BUFFERS: usize = 1 << 14;

pub(crate) struct RingThread {
    waker: Box<dyn Fn() + Send>,
    thread: Option<JoinHandle<()>>,
}

impl Workers for RingThread {
    fn wake(&mut self) {
        (self.waker)();
    }

    fn hold_memory(&self) -> bool {
        true
    }

    fn take_threads(&mut self) -> Vec<JoinHandle<()>> {
        self.thread.take().into_iter().collect()
    }
}

/// Every file of every copy, buffered and direct. The order is [`file_index`]'s.
fn ring_files(files: &FileSet) -> Vec<RingFile<'_>> {
    let mut list = Vec::new();
    for copy in 0..files.n_copies() {
        for file in 0..files.len() as u32 {
            for access in [Access::Buffered, Access::Direct] {
                let handle = files.handle(file, copy, access).file();
                list.push(RingFile { path: files.path(file, copy), access, file: handle });
            }
        }
    }
    list
}

fn file_index(files: &FileSet, progress: &Progress) -> usize {
    let nth = progress.copy() * files.len() + progress.file() as usize;
    2 * nth + usize::from(progress.access() == Access::Direct)
}

struct Worker {
    shared: Arc<Shared>,
    ring: Box<dyn Ring>,
    done: Sender<Completion>,
    active: HashMap<u64, Active>,
    next_id: u64,
    buffers: Buffers,
}

struct Active {
    tag: u64,
    progress: Progress,
    ticket: Ticket,
}

impl Worker {
    /// Until the queue is closed; then the ring waits for what is in flight.
    fn run(mut self) {
        loop {
            let mut state = self.shared.lock();
            if state.closed {
                return;
            }
            let retired = std::mem::take(&mut state.retired);
            drop(state);
            for (memory, told) in retired {
                if let Some(buffer) = self.buffers.remove(&memory.id()) {
                    self.ring.unregister(buffer);
                }
                drop(memory);
                // Nobody listening would mean that the caller is gone.
                let _ = told.send(());
            }
            while let Some(begun) = self.begin() {
                self.start(begun);
            }
            if let Err(error) = self.ring.wait() {
                tracing::warn!(%error, "the ring cannot be waited for, trying again");
                std::thread::sleep(Duration::from_millis(10));
            }
            while let Some(read) = self.ring.next() {
                self.over(read);
            }
        }
    }

    fn begin(&self) -> Option<Begun> {
        let usable = |copy| self.shared.files.usable(copy);
        self.shared.lock().backlog.begin(usable, Instant::now())
    }

    fn start(&mut self, Begun { request, ticket }: Begun) {
        let ReadRequest { tag, file, offset, need, dest, .. } = request;
        let files = &self.shared.files;
        let progress = Progress::large(files, ticket.lane, file, offset, need, dest.len());
        let id = self.next_id;
        self.next_id += 1;
        if progress.need() == 0 {
            return self.complete(Active { tag, progress, ticket }, dest, Ok(()));
        }
        self.active.insert(id, Active { tag, progress, ticket });
        self.push(id, dest);
    }

    fn push(&mut self, id: u64, piece: Piece) {
        let progress = &self.active[&id].progress;
        let (file, offset) = (file_index(&self.shared.files, progress), progress.file_offset());
        let range = progress.range();
        let buffer = self.buffers.of(&piece, &mut *self.ring, &self.shared.files);
        self.ring.push(RingRead { id, file, offset, piece, range, buffer });
    }

    fn over(&mut self, RingDone { id, piece, result }: RingDone) {
        let active = self.active.get_mut(&id).expect("a read in flight is known");
        let result = match active.progress.after(&self.shared.files, result) {
            Step::Again => return self.push(id, piece),
            Step::Done => Ok(()),
            Step::Failed(error) => Err(error),
        };
        let active = self.active.remove(&id).expect("just seen");
        self.complete(active, piece, result);
    }

    fn complete(&mut self, active: Active, dest: Piece, result: Result<(), crate::StoreError>) {
        let finished = Instant::now();
        self.shared.lock().backlog.finish(active.ticket, finished);
        // Nobody listening would mean that the queue is closing.
        let _ = self.done.send(Completion { tag: active.tag, dest, result, finished });
    }
}

/// Which regions are registered.
struct Buffers {
    /// By first byte.
    known: HashMap<usize, (RegionId, u16)>,
    free: Vec<u16>,
    refused: bool,
}

impl Buffers {
    fn new(count: usize) -> Buffers {
        Buffers { known: HashMap::new(), free: (0..count as u16).rev().collect(), refused: false }
    }

    /// The registration of the region that a piece is part of, made now if there is none yet.
    fn of(&mut self, piece: &Piece, ring: &mut dyn Ring, files: &FileSet) -> Option<u16> {
        let region = piece.region();
        match self.known.get(&region.range().start) {
            Some((known, buffer)) if *known == region => return Some(*buffer),
            Some(_) => {
                // Memory that was given back without telling, and its address used again.
                let (_, buffer) = self.known.remove(&region.range().start).expect("just seen");
                ring.unregister(buffer);
                self.free.push(buffer);
            }
            None => {}
        }
        if self.refused {
            return None;
        }
        let buffer = self.free.pop()?;
        match ring.register(buffer, piece) {
            Ok(()) => {
                self.known.insert(region.range().start, (region, buffer));
                Some(buffer)
            }
            Err(error) => {
                self.refused = true;
                files.note_once(&format!(
                    "io_uring may not keep the experts' memory registered ({error}), reading without; \
                     `ulimit -l` is the limit"
                ));
                None
            }
        }
    }

    fn remove(&mut self, region: &RegionId) -> Option<u16> {
        if self.known.get(&region.range().start)?.0 != *region {
            return None;
        }
        let (_, buffer) = self.known.remove(&region.range().start)?;
        self.free.push(buffer);
        Some(buffer)
    }
}
