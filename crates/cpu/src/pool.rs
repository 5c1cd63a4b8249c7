//! The thread pool.

/// A fixed set of threads; the caller is thread 0.
pub struct Pool {
    threads: usize,
}

impl Pool {
    /// A pool of `threads` threads (at least 1), the caller included.
    pub fn new(threads: usize) -> Pool {
        Pool { threads: threads.max(1) }
    }
    /// Threads, the caller included.
    pub fn threads(&self) -> usize {
        self.threads
    }
    /// Runs `job(thread_index)` on every thread and returns when all are done.
    pub fn run(&self, job: &(dyn Fn(usize) + Sync)) {
        std::thread::scope(|s| {
            for t in 1..self.threads {
                s.spawn(move || job(t));
            }
            job(0);
        });
    }
}
