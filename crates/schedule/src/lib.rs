//! Many answers at once over one engine: continuous batching.
//!
//! Reading order: [`Job`] and [`Listener`] (one answer, and who hears of it), [`Scheduler`] (the handle: a
//! bounded queue, and a thread that owns the engine), `share` (how the rows of a step are divided), `room` (how
//! pages are), `running` (an answer that has begun), `worker` (the steps).
//!
//! What an answer says depends on its job alone: logits do not depend on the rows beside them, and random
//! numbers are a function of seed and position. So who else is served, and when, changes nothing in it.
//!
//! Not here: text, HTTP, and what a request looks like.
#![forbid(unsafe_code)]

mod job;
mod room;
mod running;
mod scheduler;
mod share;
mod worker;

pub use job::{Constraint, Flow, Job, Listener, Outcome, Token, Usage};
pub use scheduler::{Closed, Load, Pace, Refusal, Scheduler, SchedulerOptions};
