//! The handle on the thread that owns the engine.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::Instant;

use forebay_engine::speculate::SpeculationStats;
use forebay_engine::{Engine, Stats, StoreSnapshot};

use crate::job::{Job, Outcome, Usage};
use crate::worker::Worker;

/// Why answers fail that are not over when the scheduler ends.
pub(crate) const CLOSING: &str = "the server is shutting down";

/// Choices.
#[derive(Clone, Copy, Debug)]
pub struct SchedulerOptions {
    /// Answers that are computed at once; not more than the engine's plan has sequences for.
    pub sequences: usize,
    /// Jobs that may wait besides.
    pub queue: usize,
    /// How steps are filled.
    pub pace: Pace,
}

/// How steps are filled while answers run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pace {
    /// Somebody reads along: prompts take a part of a step, so that answers keep flowing.
    #[default]
    Flowing,
    /// Nobody does: steps are as full as they can be, so that what is read for one serves many.
    Full,
}

/// Why a job was not taken. The job is dropped; its listener hears nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// As many wait as may.
    QueueFull,
    /// The scheduler is shutting down, or its thread is gone.
    Closed,
}

/// The thread is gone, or does not take work any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

/// What goes on, as of the last step.
#[derive(Clone, Debug, Default)]
pub struct Load {
    /// Jobs that wait.
    pub waiting: usize,
    /// Answers that have begun and are not over, those that pause included.
    pub running: usize,
    /// Of these, how many pause until there is room for them.
    pub paused: usize,
    /// How often one has paused so far.
    pub pauses: u64,
    /// Steps so far.
    pub steps: u64,
    /// Jobs that are over, by how they ended: stop, length, gone, failed.
    pub ended: [u64; 4],
    /// Prompt tokens computed.
    pub prompt_tokens: u64,
    /// Prompt tokens taken from earlier requests.
    pub cached_tokens: u64,
    /// Tokens chosen.
    pub generated_tokens: u64,
    /// Beginnings that are kept.
    pub kept: usize,
    /// The engine's counters.
    pub stats: Stats,
    /// What became of drafts; none: nothing drafts.
    pub speculation: Option<SpeculationStats>,
    /// Which experts were in memory when somebody last looked: see [`Scheduler::look`].
    pub snapshot: Arc<StoreSnapshot>,
}

/// Something to do between two steps.
pub(crate) type Call = Box<dyn FnOnce(&mut Engine) + Send>;

pub(crate) struct Waiting {
    pub job: Job,
    pub since: Instant,
}

#[derive(Default)]
pub(crate) struct Queue {
    pub jobs: VecDeque<Waiting>,
    pub calls: VecDeque<Call>,
    /// What to do when the thread ends.
    pub last: Vec<Call>,
    /// No new jobs; end when all are done.
    pub closing: bool,
    /// The thread is gone.
    pub dead: bool,
}

pub(crate) struct Shared {
    pub queue: Mutex<Queue>,
    pub bell: Condvar,
    pub load: Mutex<Load>,
    /// Ends the pass that runs, and everything.
    pub abort: AtomicBool,
    /// Somebody looks at the experts: the next time that counters are published, they are too.
    pub watched: AtomicBool,
}

impl Shared {
    pub fn queue(&self) -> MutexGuard<'_, Queue> {
        // A panic while it was held leaves a queue that is as good as any.
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    pub fn load(&self) -> MutexGuard<'_, Load> {
        self.load.lock().unwrap_or_else(|e| e.into_inner())
    }
}

/// Takes jobs for an engine that runs on a thread of its own. Dropping it ends all answers.
pub struct Scheduler {
    shared: Arc<Shared>,
    options: SchedulerOptions,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// Marks the thread's end, also by a panic, and answers whoever still waits.
struct Farewell(Arc<Shared>);

impl Drop for Farewell {
    fn drop(&mut self) {
        let mut queue = self.0.queue();
        queue.dead = true;
        let jobs: Vec<Waiting> = queue.jobs.drain(..).collect();
        queue.calls.clear();
        drop(queue);
        for waiting in jobs {
            let outcome = Outcome::Failed(CLOSING.into());
            waiting.job.listener.done(outcome, Usage::default());
        }
        self.0.bell.notify_all();
    }
}

impl Scheduler {
    /// Starts the thread.
    pub fn start(engine: Engine, options: SchedulerOptions) -> std::io::Result<Scheduler> {
        let shared = Arc::new(Shared {
            queue: Mutex::default(),
            bell: Condvar::new(),
            load: Mutex::default(),
            abort: AtomicBool::new(false),
            watched: AtomicBool::new(false),
        });
        let theirs = shared.clone();
        let thread = std::thread::Builder::new().name("engine".into()).spawn(move || {
            let _farewell = Farewell(theirs.clone());
            Worker::new(engine, theirs, options).run();
        })?;
        Ok(Scheduler { shared, options, thread: Mutex::new(Some(thread)) })
    }

    /// Takes a job, or says why not.
    pub fn submit(&self, job: Job) -> Result<(), Refusal> {
        self.submit_all(vec![job])
    }

    /// Takes all of these jobs or none.
    pub fn submit_all(&self, jobs: Vec<Job>) -> Result<(), Refusal> {
        let running = self.shared.load().running;
        let mut queue = self.shared.queue();
        if queue.closing || queue.dead {
            return Err(Refusal::Closed);
        }
        // Who finds a free place does not wait in the queue.
        let free = self.options.sequences.saturating_sub(running);
        if queue.jobs.len() + jobs.len() > self.options.queue.saturating_add(free) {
            return Err(Refusal::QueueFull);
        }
        let since = Instant::now();
        queue.jobs.extend(jobs.into_iter().map(|job| Waiting { job, since }));
        drop(queue);
        self.shared.bell.notify_all();
        Ok(())
    }

    /// Runs `f` on the engine's thread between two steps and gives what it gives.
    pub fn with_engine<R: Send + 'static>(
        &self,
        f: impl FnOnce(&mut Engine) -> R + Send + 'static,
    ) -> Result<R, Closed> {
        let (send, receive) = std::sync::mpsc::channel();
        let mut queue = self.shared.queue();
        if queue.dead {
            return Err(Closed);
        }
        queue.calls.push_back(Box::new(move |engine| {
            // Who asked may have given up.
            let _ = send.send(f(engine));
        }));
        drop(queue);
        self.shared.bell.notify_all();
        receive.recv().map_err(|_| Closed)
    }

    /// Runs `f` on the engine's thread when it ends, all answers being over.
    pub fn at_end(&self, f: impl FnOnce(&mut Engine) + Send + 'static) {
        self.shared.queue().last.push(Box::new(f));
    }

    /// What goes on.
    pub fn load(&self) -> Load {
        let mut load = self.shared.load().clone();
        load.waiting = self.shared.queue().jobs.len();
        load
    }

    /// As [`load`](Self::load), and asks for which experts are in memory: the next look has them. Costs the
    /// engine a copy of that list between two steps, once for each look.
    pub fn look(&self) -> Load {
        self.shared.watched.store(true, Ordering::Relaxed);
        // An idle engine looks up; one at work is between steps soon.
        self.shared.bell.notify_all();
        self.load()
    }

    /// Whether jobs are taken.
    pub fn is_open(&self) -> bool {
        let queue = self.shared.queue();
        !queue.closing && !queue.dead
    }

    /// Takes no more jobs; those that are here are finished.
    pub fn close(&self) {
        self.shared.queue().closing = true;
        self.shared.bell.notify_all();
    }

    /// Ends all answers within the layer that is computed.
    pub fn abort(&self) {
        self.shared.abort.store(true, Ordering::Relaxed);
        self.close();
    }

    /// Waits until the thread is gone, after [`close`](Self::close) or [`abort`](Self::abort).
    pub fn join(&self) {
        let thread = self.thread.lock().unwrap_or_else(|e| e.into_inner()).take();
        if let Some(thread) = thread {
            // A panic has been printed, and everybody has been told.
            let _ = thread.join();
        }
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        self.abort();
        self.join();
    }
}
