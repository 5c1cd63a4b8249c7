//! Memory of empty slots, touched before it is read into.
//!
//! The first touch of a page makes the system find and clear it. On a virtual machine whose host gives
//! memory out late that was measured at 0.3 GB/s, less than the disk: a first prompt waited for cleared
//! pages, in the one thread that submits reads. So slots that will be filled next are touched by threads
//! of their own, in parallel, from the moment that the pool is made.
//!
//! A region travels to a thread and back by value, so nobody else can reach it meanwhile. The store
//! takes it back when a slot is filled: at once if nobody works on it, else once that is over. Only as
//! much as [`AHEAD_BYTES`] is touched and not yet used, so that a short run does not take memory that
//! it never fills.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;

use crate::cache::SlotId;
use crate::region::Region;

/// Memory touched ahead of use.
pub(super) const AHEAD_BYTES: u64 = 1 << 30;
/// Clearing pages is bound by memory or by the host: more gain little.
const MOST_THREADS: usize = 2;
const STACK_BYTES: usize = 128 << 10;

#[derive(Default)]
pub(super) struct Toucher {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// A region came back.
    back: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<(SlotId, Region)>,
    working: HashSet<SlotId>,
    done: HashMap<SlotId, Region>,
    /// Threads that will look for work again.
    threads: usize,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic while holding the state")
    }

    /// Works until nothing waits.
    fn work(&self) {
        loop {
            let mut state = self.lock();
            let Some((id, mut region)) = state.waiting.pop_front() else {
                state.threads -= 1;
                return;
            };
            state.working.insert(id);
            drop(state);
            region.populate();
            let mut state = self.lock();
            state.working.remove(&id);
            state.done.insert(id, region);
            drop(state);
            self.back.notify_all();
        }
    }
}

impl Toucher {
    /// Takes the memory of an empty slot. Gives it back where no thread can be had.
    pub(super) fn give(&mut self, id: SlotId, region: Region) -> Option<Region> {
        let mut state = self.shared.lock();
        if state.threads == 0 {
            self.threads.drain(..).for_each(|thread| _ = thread.join());
        }
        if state.threads < MOST_THREADS {
            let shared = self.shared.clone();
            let thread = std::thread::Builder::new()
                .name("touch".into())
                .stack_size(STACK_BYTES)
                .spawn(move || shared.work());
            match thread {
                Ok(thread) => {
                    self.threads.push(thread);
                    state.threads += 1;
                }
                Err(_) if state.threads == 0 => return Some(region),
                Err(_) => {}
            }
        }
        state.waiting.push_back((id, region));
        None
    }

    /// Gives the memory of a slot back, touched or not; none if it is not here.
    pub(super) fn take(&mut self, id: SlotId) -> Option<Region> {
        let mut state = self.shared.lock();
        if let Some(at) = state.waiting.iter().position(|&(waiting, _)| waiting == id) {
            return state.waiting.remove(at).map(|(_, region)| region);
        }
        while state.working.contains(&id) {
            state = self.shared.back.wait(state).expect("no panic while holding the state");
        }
        state.done.remove(&id)
    }

    /// Slots whose memory is here.
    pub(super) fn len(&self) -> usize {
        let state = self.shared.lock();
        state.waiting.len() + state.working.len() + state.done.len()
    }

    #[cfg(test)]
    pub(super) fn has(&self, id: SlotId) -> bool {
        let state = self.shared.lock();
        state.working.contains(&id)
            || state.done.contains_key(&id)
            || state.waiting.iter().any(|&(waiting, _)| waiting == id)
    }
}

impl Drop for Toucher {
    fn drop(&mut self) {
        self.shared.lock().waiting.clear();
        self.threads.drain(..).for_each(|thread| _ = thread.join());
    }
}
