//! The thread pool: persistent threads behind a spin-then-park barrier.
//!
//! A forward pass runs thousands of jobs of a few microseconds each, so starting a job must cost less
//! than that: idle threads spin for [`SPIN`] before they sleep on a condition variable. When the pool
//! has more threads than the machine has cores, spinning would steal the time of the threads that
//! work, so the spin is cut to [`SPIN_OVERSUBSCRIBED`].
//!
//! A job has one share per thread. A thread that the system has not woken yet, or has taken off its
//! core, does not hold up the rest: the caller, done with its own share, takes over those that nobody has
//! begun. So a job is never slower than the caller alone would be, but for shares already begun.
//!
//! Work is split by output rows, never by the terms of a sum: no result depends on the number of threads.
//!
//! Not here: what a job computes. Jobs must not wait for one another.

use std::any::Any;
use std::cell::Cell;
use std::hint::spin_loop;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Stack of a pool thread in bytes, for the memory ledger. The caller (thread 0) brings its own.
pub const STACK_BYTES: usize = 1 << 20;

/// How long a thread spins before it sleeps.
pub const SPIN: Duration = Duration::from_micros(50);

/// The same when there are more threads than cores.
pub const SPIN_OVERSUBSCRIBED: Duration = Duration::from_micros(2);

/// A job as the threads see it. The lifetime is a lie that [`Pool::run`] makes true.
type Job = &'static (dyn Fn(usize) + Sync);

/// A fixed set of threads; the caller is thread 0.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    /// Held while a job runs: one job at a time.
    turn: Mutex<()>,
}

struct Shared {
    /// Counts published jobs; a change wakes the threads.
    epoch: AtomicUsize,
    job: Mutex<Option<Job>>,
    /// Per share, the epoch in which it was last begun. Whoever raises it by one runs the share.
    claims: Box<[AtomicUsize]>,
    /// Shares of the current job, the caller's own excepted, that are not finished.
    unfinished: AtomicUsize,
    stop: AtomicBool,
    /// Threads asleep, waiting for `epoch`.
    sleepers: AtomicUsize,
    /// The caller sleeps, waiting for `unfinished` to reach 0.
    caller_sleeps: AtomicBool,
    /// Guards both condition variables.
    lock: Mutex<()>,
    wake: Condvar,
    done: Condvar,
    /// The first panic of the current job.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    spin: Duration,
}

thread_local! {
    /// Set while this thread executes a job of some pool.
    static IN_JOB: Cell<bool> = const { Cell::new(false) };
}

impl Pool {
    /// A pool of `threads` threads (at least 1), the caller included. Where the system gives fewer, those
    /// that there are, the caller first of all, run the shares of those that are missing.
    pub fn new(threads: usize) -> Pool {
        let threads = threads.max(1);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let shared = Arc::new(Shared {
            epoch: AtomicUsize::new(0),
            job: Mutex::new(None),
            claims: (0..threads).map(|_| AtomicUsize::new(0)).collect(),
            unfinished: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            caller_sleeps: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            done: Condvar::new(),
            panic: Mutex::new(None),
            spin: if threads > cores { SPIN_OVERSUBSCRIBED } else { SPIN },
        });
        let threads = (1..threads)
            .map_while(|index| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("forebay-cpu-{index}"))
                    .stack_size(STACK_BYTES)
                    .spawn(move || shared.work(index))
                    .ok()
            })
            .collect();
        Pool { shared, threads, turn: Mutex::new(()) }
    }

    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.shared.claims.len()
    }

    /// Runs `job(index)` once for every `index < threads()` and returns when all are done. No two run at
    /// once on one thread; usually each has a thread of its own.
    ///
    /// A panic in any of them is raised again here after the others have finished; the pool stays
    /// usable. Called from inside a job, it runs `job(0)`, `job(1)`, ... one after another on the
    /// calling thread. Calls from several threads take turns.
    pub fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        if self.threads.is_empty() || IN_JOB.get() {
            for index in 0..self.threads() {
                job(index);
            }
            return;
        }
        let turn = lock(&self.turn);
        // SAFETY: only the lifetime changes. `job` outlives this call, and no thread touches it after
        // this call: a thread reads the job only after it has claimed a share of this epoch, and `finish`
        // returns only once all shares are claimed and counted out of `unfinished`, which is the last
        // thing a thread does with a job, panic or not. Nothing between `publish` and `finish` can
        // unwind, since the caller's shares run inside `run_share`.
        let job: Job = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), Job>(job) };
        let shared = &*self.shared;
        let epoch = shared.publish(job);
        shared.run_share(job, 0);
        for index in 1..self.threads() {
            if shared.claim(index, epoch) {
                shared.run_share(job, index);
                shared.unfinished.fetch_sub(1, Ordering::SeqCst);
            }
        }
        shared.finish();
        let panic = lock(&self.shared.panic).take();
        drop(turn);
        if let Some(panic) = panic {
            resume_unwind(panic);
        }
    }

    /// Runs `job` on ranges that together cover `0..n_items` once, each of `chunk` items (the last
    /// may be shorter), handed out to whichever thread is free.
    pub fn run_chunks(&self, n_items: usize, chunk: usize, job: &(dyn Fn(Range<usize>) + Sync)) {
        let chunk = chunk.max(1);
        let chunks = n_items.div_ceil(chunk);
        let next = AtomicUsize::new(0);
        let share = |_thread: usize| {
            loop {
                let c = next.fetch_add(1, Ordering::Relaxed);
                if c >= chunks {
                    return;
                }
                job(c * chunk..n_items.min((c + 1) * chunk));
            }
        };
        match chunks {
            0 => {}
            1 => share(0),
            _ => self.run(&share),
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.announce();
        for thread in self.threads.drain(..) {
            thread.join().expect("a pool thread catches every panic of its jobs");
        }
    }
}

impl Shared {
    /// Life of thread `index`.
    fn work(&self, index: usize) {
        let mut seen = 0;
        loop {
            seen = self.wait_for_news(seen);
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            if !self.claim(index, seen) {
                continue;
            }
            let job = lock(&self.job).expect("a job stays until all its shares are finished");
            self.run_share(job, index);
            if self.unfinished.fetch_sub(1, Ordering::SeqCst) == 1
                && self.caller_sleeps.load(Ordering::SeqCst)
            {
                let _guard = lock(&self.lock);
                self.done.notify_one();
            }
        }
    }

    /// Whether the calling thread is the one to run share `index` in `epoch`. Fails for an epoch that has
    /// passed: all its shares were claimed.
    fn claim(&self, index: usize, epoch: usize) -> bool {
        let before = epoch.wrapping_sub(1);
        self.claims[index]
            .compare_exchange(before, epoch, Ordering::SeqCst, Ordering::SeqCst)
            .is_ok()
    }

    /// Waits until the epoch differs from `seen` and returns it.
    fn wait_for_news(&self, seen: usize) -> usize {
        let news = || {
            let epoch = self.epoch.load(Ordering::SeqCst);
            (epoch != seen).then_some(epoch)
        };
        if let Some(epoch) = spin_until(self.spin, news) {
            return epoch;
        }
        // Either `announce` sees this count, or this thread sees the new epoch below: both are
        // sequentially consistent, one comes first.
        let mut guard = lock(&self.lock);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let epoch = loop {
            if let Some(epoch) = news() {
                break epoch;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        epoch
    }

    /// Announces `job` and returns its epoch.
    fn publish(&self, job: Job) -> usize {
        *lock(&self.job) = Some(job);
        self.unfinished.store(self.claims.len() - 1, Ordering::SeqCst);
        self.announce()
    }

    /// Begins an epoch, wakes the threads and returns it.
    fn announce(&self) -> usize {
        let epoch = self.epoch.fetch_add(1, Ordering::SeqCst).wrapping_add(1);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _guard = lock(&self.lock);
            self.wake.notify_all();
        }
        epoch
    }

    /// Runs one thread's share; keeps a panic for the caller.
    fn run_share(&self, job: Job, index: usize) {
        IN_JOB.set(true);
        let result = catch_unwind(AssertUnwindSafe(|| job(index)));
        IN_JOB.set(false);
        if let Err(panic) = result {
            lock(&self.panic).get_or_insert(panic);
        }
    }

    /// Waits until every share is finished.
    fn finish(&self) {
        let done = || (self.unfinished.load(Ordering::SeqCst) == 0).then_some(());
        if spin_until(self.spin, done).is_none() {
            let mut guard = lock(&self.lock);
            self.caller_sleeps.store(true, Ordering::SeqCst);
            while done().is_none() {
                guard = self.done.wait(guard).unwrap_or_else(PoisonError::into_inner);
            }
            self.caller_sleeps.store(false, Ordering::SeqCst);
        }
        *lock(&self.job) = None;
    }
}

/// Polls `ready` for at most about `limit`.
fn spin_until<T>(limit: Duration, ready: impl Fn() -> Option<T>) -> Option<T> {
    let start = Instant::now();
    loop {
        for _ in 0..32 {
            if let Some(value) = ready() {
                return Some(value);
            }
            spin_loop();
        }
        if start.elapsed() > limit {
            return None;
        }
    }
}

/// No code panics while it holds one of the pool's locks in an inconsistent state.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_thread_runs_every_job_once() {
        for threads in 1..=4 {
            let pool = Pool::new(threads);
            assert_eq!(pool.threads(), threads);
            let counts: Vec<AtomicUsize> = (0..threads).map(|_| AtomicUsize::new(0)).collect();
            for run in 1..=10_000 {
                pool.run(&|t| {
                    counts[t].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == run));
            }
        }
    }

    #[test]
    fn sleeping_threads_wake_up() {
        let pool = Pool::new(3);
        let count = AtomicUsize::new(0);
        for _ in 0..20 {
            std::thread::sleep(Duration::from_millis(1));
            pool.run(&|t| {
                // Shares of unequal length put the caller to sleep as well.
                std::thread::sleep(Duration::from_micros(300 * t as u64));
                count.fetch_add(1, Ordering::Relaxed);
            });
        }
        assert_eq!(count.into_inner(), 60);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_goes_on() {
        for threads in 1..=4 {
            let pool = Pool::new(threads);
            for culprit in 0..threads {
                let result = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(&|t| {
                        if t == culprit {
                            std::panic::panic_any(culprit);
                        }
                    });
                }));
                let payload = result.expect_err("the panic must propagate");
                assert_eq!(payload.downcast_ref::<usize>(), Some(&culprit));
                let count = AtomicUsize::new(0);
                pool.run(&|_| {
                    count.fetch_add(1, Ordering::Relaxed);
                });
                assert_eq!(count.into_inner(), threads);
            }
        }
    }

    #[test]
    fn chunks_cover_every_item_once() {
        for threads in 1..=4 {
            let pool = Pool::new(threads);
            for (n, chunk) in
                [(0, 1), (1, 1), (7, 3), (8, 4), (1000, 1), (1000, 33), (5, 100), (5, 0)]
            {
                let hits: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
                pool.run_chunks(n, chunk, &|range| {
                    assert!(!range.is_empty() && range.len() <= chunk.max(1));
                    for i in range {
                        hits[i].fetch_add(1, Ordering::Relaxed);
                    }
                });
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 1), "{n} by {chunk}");
            }
        }
    }

    #[test]
    fn a_job_may_use_the_pool() {
        let pool = Pool::new(3);
        let count = AtomicUsize::new(0);
        pool.run(&|_| {
            pool.run(&|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 9);
    }

    #[test]
    fn callers_take_turns() {
        let pool = Pool::new(2);
        let count = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..3 {
                s.spawn(|| {
                    for _ in 0..200 {
                        pool.run(&|_| {
                            count.fetch_add(1, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), 1200);
    }
}
