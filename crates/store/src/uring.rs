//! `io_uring`: reads made by the Linux kernel on its own.
//!
//! This is one of the crate's four unsafe modules. While a read is in flight the kernel writes into
//! memory behind the compiler's back. Its invariants:
//! - U1: a read that was handed over is in `in_flight`, with the piece whose memory it fills, until its
//!   completion was taken from the ring; so the memory exists and nobody else can reach it (a piece is
//!   exclusive, see [`crate::region`], R3).
//! - U2: dropping the ring cancels what can be cancelled and waits for every read in flight. If the
//!   kernel will not be waited for, their pieces are leaked.
//! - U3: a registered region is read into only through pieces of it (U1). Its registration may outlive
//!   it: the kernel then holds pages that nobody can see.
//!
//! What a completion means is not decided here but in [`crate::progress`].

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use io_uring::{IoUring, Probe, opcode, squeue, types};

use crate::region::Piece;
use crate::ring::{Ring, RingDone, RingFile, RingRead, RingSize};

/// The kernel's ring.
pub(crate) struct KernelRing {
    ring: IoUring,
    /// By id (U1).
    in_flight: HashMap<u64, RingRead>,
    /// Over, not yet handed out.
    over: VecDeque<(u64, i32)>,
    files: Files,
    /// Becomes readable when [`Ring::wait`] shall end.
    wake: Arc<OwnedFd>,
    /// The kernel looks at `wake`.
    armed: bool,
}

enum Files {
    /// With the kernel, by index.
    Registered,
    Open(Vec<File>),
}

/// Marks of completions that are no reads.
const WAKE: u64 = u64::MAX;
const CANCEL: u64 = u64::MAX - 1;
/// The kernel reads no more at once.
const MOST_BYTES: usize = 0x7fff_f000;

impl KernelRing {
    pub(crate) fn open(files: &[RingFile<'_>], size: RingSize) -> io::Result<KernelRing> {
        // Beside reads: the wake-up, and the cancellations at the end.
        let entries = (size.reads as u32 + 2).next_power_of_two().clamp(8, 4096);
        let mut builder = IoUring::builder();
        // Completions are processed when this thread asks for them, not by interrupting it. Linux 6.1.
        builder.setup_single_issuer().setup_defer_taskrun();
        let ring = builder.build(entries).or_else(|_| IoUring::new(entries))?;
        let mut probe = Probe::new();
        ring.submitter().register_probe(&mut probe)?;
        let needed = [opcode::Read::CODE, opcode::PollAdd::CODE, opcode::AsyncCancel::CODE];
        if !needed.into_iter().all(|code| probe.is_supported(code)) {
            return Err(io::Error::new(io::ErrorKind::Unsupported, "this kernel is too old"));
        }
        let fds: Vec<i32> = files.iter().map(|file| file.file.as_raw_fd()).collect();
        let files = match ring.submitter().register_files(&fds) {
            Ok(()) => Files::Registered,
            Err(_) => Files::Open(
                files.iter().map(|file| file.file.try_clone()).collect::<io::Result<_>>()?,
            ),
        };
        if size.buffers > 0 {
            // If there can be no table, each registration will be refused.
            let _ = ring.submitter().register_buffers_sparse(size.buffers as u32);
        }
        let flags = rustix::event::EventfdFlags::CLOEXEC | rustix::event::EventfdFlags::NONBLOCK;
        let wake = Arc::new(rustix::event::eventfd(0, flags)?);
        let (in_flight, over) = (HashMap::new(), VecDeque::new());
        Ok(KernelRing { ring, in_flight, over, files, wake, armed: false })
    }

    /// Hands an entry over.
    ///
    /// # Safety
    /// It makes the kernel write into no memory, or into that of a read in `in_flight`.
    unsafe fn enqueue(&mut self, entry: squeue::Entry) {
        loop {
            // SAFETY: U1, by the function's contract.
            let pushed = unsafe { self.ring.submission().push(&entry) };
            if pushed.is_ok() {
                return;
            }
            // Full: the kernel takes what is there. If it will not now, it will soon.
            if self.ring.submit().is_err() {
                self.reap();
                std::thread::yield_now();
            }
        }
    }

    fn reap(&mut self) {
        for completion in self.ring.completion() {
            match completion.user_data() {
                WAKE => {
                    self.armed = false;
                    // Empty already: then it was cancelled.
                    let _ = rustix::io::read(&*self.wake, &mut [0; 8]);
                }
                CANCEL => {}
                id => self.over.push_back((id, completion.result())),
            }
        }
    }

    fn arm(&mut self) {
        if !self.armed {
            let fd = types::Fd(self.wake.as_raw_fd());
            let events = rustix::event::PollFlags::IN.bits().into();
            let entry = opcode::PollAdd::new(fd, events).build().user_data(WAKE);
            // SAFETY: it writes nothing.
            unsafe { self.enqueue(entry) };
            self.armed = true;
        }
    }

    fn register_at(&self, buffer: u16, memory: libc::iovec) -> io::Result<()> {
        // SAFETY: U3; the memory of the one caller that passes any is a live region.
        unsafe { self.ring.submitter().register_buffers_update(buffer.into(), &[memory], None) }
    }
}

impl Ring for KernelRing {
    fn waker(&self) -> Box<dyn Fn() + Send> {
        let wake = self.wake.clone();
        Box::new(move || {
            // It can only fail when it was written 2^64 times without being read.
            let _ = rustix::io::write(&*wake, &1u64.to_ne_bytes());
        })
    }

    fn register(&mut self, buffer: u16, piece: &Piece) -> io::Result<()> {
        let range = piece.region().range();
        let iov_base = std::ptr::without_provenance_mut(range.start);
        self.register_at(buffer, libc::iovec { iov_base, iov_len: range.len() })
    }

    fn unregister(&mut self, buffer: u16) {
        // A failure would keep pages, nothing more.
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let _ = self.register_at(buffer, nothing);
    }

    fn push(&mut self, mut read: RingRead) {
        let memory = &mut read.piece[read.range.clone()];
        let (start, len) = (memory.as_mut_ptr(), memory.len().min(MOST_BYTES) as u32);
        let (id, offset, buffer) = (read.id, read.offset, read.buffer);
        let (file, flags) = match &self.files {
            Files::Registered => (read.file as i32, squeue::Flags::FIXED_FILE),
            Files::Open(files) => (files[read.file].as_raw_fd(), squeue::Flags::empty()),
        };
        let file = types::Fd(file);
        let entry = match buffer {
            Some(buffer) => opcode::ReadFixed::new(file, start, len, buffer).offset(offset).build(),
            None => opcode::Read::new(file, start, len).offset(offset).build(),
        };
        assert!(id < CANCEL && !self.in_flight.contains_key(&id), "ids differ");
        self.in_flight.insert(id, read);
        // SAFETY: the memory is that of the read just put into `in_flight`.
        unsafe { self.enqueue(entry.flags(flags).user_data(id)) };
    }

    fn wait(&mut self) -> io::Result<()> {
        self.reap();
        if !self.over.is_empty() {
            self.ring.submit()?;
            return Ok(());
        }
        self.arm();
        match self.ring.submit_and_wait(1) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => {
                self.reap();
                return Err(error);
            }
        }
        self.reap();
        Ok(())
    }

    fn next(&mut self) -> Option<RingDone> {
        let (id, result) = self.over.pop_front()?;
        let RingRead { piece, .. } = self.in_flight.remove(&id).expect("it was in flight");
        let result = match usize::try_from(result) {
            Ok(got) => Ok(got),
            Err(_) => Err(io::Error::from_raw_os_error(-result)),
        };
        Some(RingDone { id, piece, result })
    }
}

impl Drop for KernelRing {
    /// U2.
    fn drop(&mut self) {
        let ids: Vec<u64> = self.in_flight.keys().copied().collect();
        for id in ids {
            let entry = opcode::AsyncCancel::new(id).build().user_data(CANCEL);
            // SAFETY: it writes nothing.
            unsafe { self.enqueue(entry) };
        }
        while !self.in_flight.is_empty() {
            while let Some((id, _)) = self.over.pop_front() {
                self.in_flight.remove(&id);
            }
            if self.in_flight.is_empty() {
                break;
            }
            match self.ring.submit_and_wait(1) {
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::warn!(%error, "reads in flight cannot be waited for; their memory is lost");
                    self.in_flight.drain().for_each(|(_, read)| std::mem::forget(read));
                }
            }
            self.reap();
        }
        // Closing the ring would give the pages back as well, but at leisure.
        let _ = self.ring.submitter().unregister_buffers();
    }
}
