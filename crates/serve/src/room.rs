//! Memory that requests may take before they are answers: bodies, what they are parsed to, and texts that are
//! encoded. It is bounded here and has lines in the memory plan.
//!
//! What a body will take is estimated from its bytes before it is parsed: a list of numbers grows forty times,
//! a long text twice. Who finds no room is told to come again. A long text is encoded when no other one is.

use std::cell::RefCell;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use axum::body::Bytes;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::{ApiError, Kind};

/// A parsed value, with the slack of the list that it is in.
const BYTES_PER_VALUE: usize = 160;
/// Bodies of the largest size that there is room for, so that one may be parsed.
const BODIES: usize = 4;
/// What encoding takes per byte of text, at most: a piece of text, its offsets, and its tokens.
const ENCODING: u64 = 240;
/// Texts above this many bytes are encoded one at a time.
const LONG: usize = 128 << 10;
/// A long text that the plan has room for, in bytes per position of the context.
const TYPICAL: u64 = 8;
/// Threads of the HTTP side: two that talk, two that render and encode, and the engine's own.
const THREADS: u64 = 5;
/// What a connection takes: its task and buffers, most of them nearly empty.
const CONNECTION: u64 = 16 << 10;
/// What such a thread touches of its stack.
const STACK: u64 = 512 << 10;
/// The trie of a vocabulary and those of its slices, per token.
const TRIE: u64 = 256;
/// State of one answer that follows a grammar.
const PARSER: u64 = 2 << 20;

/// What is asked at most.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Bytes of a body; none: there is no HTTP.
    pub max_body: Option<usize>,
    /// Connections at once.
    pub connections: usize,
    /// Answers at once that follow grammars.
    pub constrained: usize,
}

/// Lines of the memory plan: what a server takes besides the engine.
pub fn ledger(demand: &Demand, vocab: usize, context: usize) -> Vec<(&'static str, u64)> {
    let texts = ENCODING * (LONG as u64 + TYPICAL * context as u64);
    let grammars = match demand.constrained {
        0 => 0,
        n => TRIE * vocab as u64 + PARSER * n as u64,
    };
    let http = |bytes: u64| if demand.max_body.is_some() { bytes } else { 0 };
    vec![
        ("request bodies", demand.max_body.map_or(0, |most| bodies(most) as u64)),
        ("connections", http(CONNECTION * demand.connections as u64)),
        ("texts being encoded", texts),
        ("grammars", grammars),
        ("threads of the server", http(THREADS * STACK)),
    ]
}

/// Room for bodies.
pub(crate) struct Bodies {
    free: Arc<Semaphore>,
    all: usize,
}

/// A part of the room; it is free again when this is dropped.
pub(crate) type Held = OwnedSemaphorePermit;

tokio::task_local! {
    static HELD: RefCell<Option<Held>>;
}

impl Bodies {
    /// For bodies of at most so many bytes.
    pub fn new(max_body: usize) -> Bodies {
        let all = kib(bodies(max_body));
        Bodies { free: Arc::new(Semaphore::new(all)), all }
    }

    /// Room for `bytes` more.
    pub fn take(&self, bytes: usize) -> Result<Held, ApiError> {
        let wanted = kib(bytes).min(self.all);
        let held = self.free.clone().try_acquire_many_owned(wanted as u32);
        held.map_err(|_| {
            ApiError::new(Kind::Busy, "other large requests are being read; try again in a moment")
        })
    }

    /// Room for what a body is parsed to, the body included.
    pub fn take_parsed(&self, body: &Bytes) -> Result<Held, ApiError> {
        let values = body.iter().filter(|b| matches!(b, b',' | b':' | b'[' | b'{')).count();
        let need = 2 * body.len() + BYTES_PER_VALUE * values;
        if kib(need) > self.all {
            let what = "the body holds more values than there is memory for; send fewer, or serve with a larger \
                        --max-body";
            return Err(ApiError::new(Kind::TooLarge, what));
        }
        self.take(need)
    }
}

/// However small a body must be, there is room for many that are read at once.
fn bodies(max_body: usize) -> usize {
    BODIES * max_body.max(256 << 10)
}

fn kib(bytes: usize) -> usize {
    bytes.div_ceil(1 << 10).min(Semaphore::MAX_PERMITS).min(u32::MAX as usize)
}

/// Runs a request's handler, which holds its room until [`release`] takes it.
pub(crate) async fn holding<F: Future>(held: Held, handler: F) -> F::Output {
    HELD.scope(RefCell::new(Some(held)), handler).await
}

/// The room of the request that is handled: it is needed no longer than its text is not yet encoded.
pub(crate) fn release() -> Option<Held> {
    HELD.try_with(|held| held.borrow_mut().take()).ok().flatten()
}

/// Whose turn it is to encode a long text.
#[derive(Default)]
pub(crate) struct Encoding {
    long: Mutex<()>,
    /// A text was encoded that left holes in the heap.
    holes: AtomicBool,
}

impl Encoding {
    /// Whether there are holes in the heap since this was asked last.
    pub fn left_holes(&self) -> bool {
        self.holes.swap(false, Ordering::Relaxed)
    }

    /// Waits for it where the text is long.
    pub fn turn(&self, bytes: usize) -> Turn<'_> {
        // Nothing is guarded that a panic could leave half done.
        let lock = || self.long.lock().unwrap_or_else(|e| e.into_inner());
        Turn { holes: (bytes > LONG / 8).then_some(&self.holes), _alone: (bytes > LONG).then(lock) }
    }
}

/// The turn is over when this is dropped: only then is free what the encoding took.
pub(crate) struct Turn<'a> {
    holes: Option<&'a AtomicBool>,
    _alone: Option<MutexGuard<'a, ()>>,
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        if let Some(holes) = self.holes {
            holes.store(true, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn room_is_counted_and_given_back() {
        let bodies = Bodies::new(1 << 20);
        let text = Bytes::from(vec![b'x'; 1 << 20]);
        let first = bodies.take_parsed(&text).unwrap();
        let second = bodies.take_parsed(&text).unwrap();
        assert_eq!(bodies.take_parsed(&text).unwrap_err().kind, Kind::Busy);
        assert_eq!(bodies.take(1).unwrap_err().kind, Kind::Busy);
        drop(first);
        let third = bodies.take_parsed(&text).unwrap();
        drop((second, third));
        // Small in bytes, large in memory.
        let numbers = Bytes::from(b"1,".repeat(100 << 10));
        assert_eq!(bodies.take_parsed(&numbers).unwrap_err().kind, Kind::TooLarge);
        let some = Bytes::from(b"1,".repeat(20 << 10));
        let held = bodies.take_parsed(&some).unwrap();
        assert!(bodies.take(3 << 20).is_err());
        drop(held);
        assert!(bodies.take(3 << 20).is_ok());
    }
}
