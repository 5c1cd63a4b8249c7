//! Reads in flight: submit now, complete later.
//!
//! [`ReadQueue`] is the shape of asynchronous reads: a request owns the memory it fills and gives it
//! back with its completion, so a queue may hand it to threads ([`crate::threads`]) or to the kernel.
//! Demanded reads go before those that may be wanted later ([`Backlog`]).

use std::collections::VecDeque;
use std::time::Instant;

use crate::error::StoreError;
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
    /// Starts a read; never blocks.
    fn submit(&mut self, request: ReadRequest);
    /// A read that is over already, if any.
    fn poll(&mut self) -> Option<Completion>;
    /// Blocks until a read is over; none when none is in flight.
    fn wait(&mut self) -> Option<Completion>;
    /// Reads submitted whose completions were not taken yet.
    fn in_flight(&self) -> usize;
    /// Reads of this tag that were not begun are demanded from now on.
    fn promote(&mut self, tag: u64);
    /// Forgets the reads of this tag that nobody demanded and that were not begun; they have no
    /// completion. Returns their memory.
    fn withdraw(&mut self, tag: u64) -> Vec<Piece>;
}

/// Requests that were not begun, and which of them is next.
#[derive(Debug, Default)]
pub(crate) struct Backlog {
    demanded: VecDeque<ReadRequest>,
    ahead: VecDeque<ReadRequest>,
    demanded_begun: usize,
}

impl Backlog {
    pub(crate) fn push(&mut self, request: ReadRequest) {
        match request.urgency {
            Urgency::Demanded => self.demanded.push_back(request),
            Urgency::Ahead => self.ahead.push_back(request),
        }
    }

    /// The request to begin now, if any.
    pub(crate) fn begin(&mut self) -> Option<ReadRequest> {
        if let Some(request) = self.demanded.pop_front() {
            self.demanded_begun += 1;
            return Some(request);
        }
        match self.demanded_begun {
            0 => self.ahead.pop_front(),
            _ => None,
        }
    }

    /// A request that was begun with this urgency is over. Returns whether others may begin that
    /// could not before.
    pub(crate) fn finish(&mut self, urgency: Urgency) -> bool {
        if urgency == Urgency::Ahead {
            return false;
        }
        self.demanded_begun -= 1;
        self.demanded_begun == 0 && !self.ahead.is_empty()
    }

    /// As [`ReadQueue::promote`]. Returns how many became demanded.
    pub(crate) fn promote(&mut self, tag: u64) -> usize {
        let requests = take_tag(&mut self.ahead, tag);
        let count = requests.len();
        self.demanded
            .extend(requests.into_iter().map(|r| ReadRequest { urgency: Urgency::Demanded, ..r }));
        count
    }

    /// As [`ReadQueue::withdraw`].
    pub(crate) fn withdraw(&mut self, tag: u64) -> Vec<Piece> {
        take_tag(&mut self.ahead, tag).into_iter().map(|request| request.dest).collect()
    }

    pub(crate) fn clear(&mut self) {
        self.demanded.clear();
        self.ahead.clear();
    }
}

fn take_tag(requests: &mut VecDeque<ReadRequest>, tag: u64) -> VecDeque<ReadRequest> {
    let (taken, left) = requests.drain(..).partition(|request| request.tag == tag);
    *requests = left;
    taken
}
