//! Runs a model: memory plan, sequences, batches, sampling, generation.
//!
//! Reading order: [`engine`] (opening a model), [`plan`] (what the budget buys), [`device`] (whether it
//! goes to a GPU), [`state`] (sequences and their KV pages), [`prefix`] (beginnings that requests share)
//! and [`session`] (the same on disk), [`forward`] (one batch through the program: the driver),
//! [`sampler`], [`speculate`] (drafting tokens ahead), [`generate`]. Beside them: [`pilot`] (guessing
//! experts), `elastic` (the budget while running), [`tap`] (seeing choices), [`steer`] and [`capture`]
//! (changing and keeping what passes), [`predict`] (what a budget would give).
//!
//! What is not here: kernels (`forebay-cpu`), reads and the expert cache (`forebay-store`), text
//! (`forebay-text`).

#![forbid(unsafe_code)]

pub mod capture;
pub mod device;
mod elastic;
pub mod engine;
pub mod error;
pub mod forward;
pub mod generate;
mod lend;
pub mod options;
pub mod pilot;
pub mod plan;
pub mod predict;
pub mod prefix;
mod rows;
pub mod sampler;
pub mod session;
pub mod speculate;
pub mod state;
pub mod stats;
pub mod steer;
pub mod tap;

pub use capture::{CapturePoint, CaptureRows, Captured};
pub use engine::Engine;
pub use error::EngineError;
pub use forward::{Batch, Control, Logits};
pub use generate::{Finish, GenerateParams, Generated, TokenEvent};
pub use options::{BackendChoice, Contexts, EngineOptions, MemoryLimit, ResidencyChoice};
pub use pilot::{PilotCounts, Prefetch};
pub use plan::MemoryPlan;
pub use sampler::{Sampler, SamplerParams};
pub use session::SessionError;
pub use speculate::{DrafterChoice, SpeculateOptions, SpeculationStats};
pub use state::Sequence;
pub use stats::{Phases, Stats};
pub use steer::{Mode, SteerError, SteerSource, SteerVectors, Steering};

pub use forebay_store::{StoreSnapshot, heap, memory::own_bytes};
