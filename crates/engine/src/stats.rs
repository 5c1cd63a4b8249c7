//! Counters of a run.

use std::time::Duration;

use forebay_program::Profile;
use forebay_store::StoreStats;

/// Where the time of forward passes went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Phases {
    /// Embedding rows.
    pub embed: Duration,
    /// Operations outside of experts and routers.
    pub body: Duration,
    /// Routers, guesses included.
    pub router: Duration,
    /// Forming unions, finding slots, starting reads.
    pub plan: Duration,
    /// Waiting for experts' bytes.
    pub read_wait: Duration,
    /// Finding experts' matrices in their slots.
    pub bind: Duration,
    /// Computing experts.
    pub experts: Duration,
    /// Last norm and output head.
    pub head: Duration,
    /// What is done with logits: sampling.
    pub sampling: Duration,
    /// Drafting, and what the drafter keeps of rows.
    pub draft: Duration,
}

impl Phases {
    /// Names and seconds, in order.
    pub fn named(&self) -> [(&'static str, f64); 10] {
        [
            ("embed", self.embed.as_secs_f64()),
            ("body", self.body.as_secs_f64()),
            ("router", self.router.as_secs_f64()),
            ("plan", self.plan.as_secs_f64()),
            ("read_wait", self.read_wait.as_secs_f64()),
            ("bind", self.bind.as_secs_f64()),
            ("experts", self.experts.as_secs_f64()),
            ("head", self.head.as_secs_f64()),
            ("sampling", self.sampling.as_secs_f64()),
            ("draft", self.draft.as_secs_f64()),
        ]
    }

    /// Time since `earlier`, phase by phase.
    pub fn since(&self, earlier: &Phases) -> Phases {
        Phases {
            embed: self.embed - earlier.embed,
            body: self.body - earlier.body,
            router: self.router - earlier.router,
            plan: self.plan - earlier.plan,
            read_wait: self.read_wait - earlier.read_wait,
            bind: self.bind - earlier.bind,
            experts: self.experts - earlier.experts,
            head: self.head - earlier.head,
            sampling: self.sampling - earlier.sampling,
            draft: self.draft - earlier.draft,
        }
    }
}

/// A snapshot of all counters; differences of two describe what lies between.
#[derive(Clone, Debug, Default)]
pub struct Stats {
    /// Times.
    pub phases: Phases,
    /// Of the expert store; default where the model has no experts.
    pub store: StoreStats,
    /// Weight and KV bytes read from memory.
    pub memory_bytes: u64,
    /// Rows computed.
    pub rows: u64,
    /// Time per operation; empty unless [`crate::Engine::profile`] was called.
    pub profile: Profile,
}
