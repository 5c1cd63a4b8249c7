//! What a caller chooses when opening a model.

use std::path::PathBuf;

use forebay_cpu::Level;
use forebay_cpu::attention::KvType;
use forebay_program::Precision;
use forebay_store::{IoEngine, IoMode, Policy, QueueDepth};

use crate::capture::CapturePoint;
use crate::pilot::Prefetch;
use crate::speculate::SpeculateOptions;
use crate::steer::SteerSource;

/// Total memory of the process.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum MemoryLimit {
    /// Most of what the container or the machine has free.
    Auto,
    /// This many bytes.
    Bytes(u64),
    /// This part (0..1] of the smaller of the container's limit and RAM.
    Fraction(f64),
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BackendChoice {
    /// A GPU that can run all of the model, else the CPU.
    Auto,
    /// The CPU.
    Cpu,
    /// The first NVIDIA GPU.
    Cuda,
}

/// Where experts live.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ResidencyChoice {
    /// Resident when everything fits the budget, streamed otherwise.
    Auto,
    /// Bounded slots, read on demand.
    Stream,
    /// Mapped; the system pages them.
    Mapped,
    /// All loaded.
    Resident,
}

/// Room for whole contexts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Contexts {
    /// One for each sequence.
    #[default]
    Each,
    /// So many, at most one for each sequence.
    Exactly(usize),
    /// As many as cost little of what experts have, at least one and at most one for each sequence. On a GPU, as
    /// [`Contexts::Each`].
    Fitting,
}

/// Options of a model to be opened.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Budget.
    pub memory: MemoryLimit,
    /// Residency of experts.
    pub residency: ResidencyChoice,
    /// Slots per routed layer (the pool is this times the layers); none: what the budget leaves.
    pub slots_per_layer: Option<usize>,
    /// Slots of the whole pool; wins over `slots_per_layer`. For tests of the minimum.
    pub slots_total: Option<usize>,
    /// Compute threads; none: one per core.
    pub threads: Option<usize>,
    /// Rows of a prefill chunk; none: what the ledger allows.
    pub chunk: Option<usize>,
    /// Precision; none: q8.
    pub precision: Option<Precision>,
    /// KV type; none: f32 under f32, else f16.
    pub kv: Option<KvType>,
    /// Context in tokens; none: the smaller of the model's and 4096.
    pub context: Option<usize>,
    /// Sequences at once.
    pub sequences: usize,
    /// Whole contexts that they have room for together. With fewer than sequences, it is for the caller to begin no
    /// more than fit: see [`crate::Engine::pages_for`].
    pub contexts: Contexts,
    /// Positions of each sequence that will run at once, longest first, where they are known (a batch): contexts are
    /// planned no larger, but for the first, which is whole, so that one that was misjudged runs alone. Fewer than
    /// sequences mean that no more will run; none, that nothing is known.
    pub needs: Vec<usize>,
    /// Beginnings kept for later requests that the memory plan has room for in any case.
    pub snapshots: usize,
    /// How files are read.
    pub io: IoMode,
    /// Who makes large reads.
    pub io_engine: IoEngine,
    /// Large reads in flight at once.
    pub io_depth: QueueDepth,
    /// A second copy of the model on another disk.
    pub also: Option<PathBuf>,
    /// Which expert has to go when a slot is needed.
    pub policy: Policy,
    /// Guessing experts ahead.
    pub prefetch: Prefetch,
    /// Drafting tokens ahead.
    pub speculate: SpeculateOptions,
    /// Whether the budget follows the system's pressure and limits while running.
    pub elastic: bool,
    /// Vector width; none: the widest.
    pub level: Option<Level>,
    /// What computes.
    pub backend: BackendChoice,
    /// Vectors that steer the residual stream.
    pub steer: Vec<SteerSource>,
    /// Points that can be captured: see [`crate::Engine::capture`].
    pub capture: Vec<CapturePoint>,
    /// Bytes that the caller owns besides: tokenizer and the like.
    pub caller_bytes: u64,
    /// Further lines of the caller in the ledger: what for, and bytes.
    pub caller_lines: Vec<(&'static str, u64)>,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            memory: MemoryLimit::Auto,
            residency: ResidencyChoice::Auto,
            slots_per_layer: None,
            slots_total: None,
            threads: None,
            chunk: None,
            precision: None,
            kv: None,
            context: None,
            sequences: 1,
            contexts: Contexts::Each,
            needs: Vec::new(),
            snapshots: 0,
            io: IoMode::Auto,
            io_engine: IoEngine::Auto,
            io_depth: QueueDepth::Measured,
            also: None,
            policy: Policy::default(),
            prefetch: Prefetch::Auto,
            speculate: SpeculateOptions::default(),
            elastic: true,
            level: None,
            backend: BackendChoice::Cpu,
            steer: Vec::new(),
            capture: Vec::new(),
            caller_bytes: 0,
            caller_lines: Vec::new(),
        }
    }
}

impl EngineOptions {
    /// Whole contexts that there is room for, default filled in.
    pub fn contexts(&self) -> usize {
        match self.contexts {
            Contexts::Exactly(n) => n.clamp(1, self.sequences.max(1)),
            Contexts::Each | Contexts::Fitting => self.sequences,
        }
    }

    /// Positions that each of these contexts has room for, `context` at most.
    pub fn positions(&self, context: usize) -> Vec<usize> {
        let mut positions = vec![context; self.contexts()];
        if !self.needs.is_empty() {
            positions.truncate(self.needs.len());
            let needs = positions.iter_mut().zip(&self.needs).skip(1);
            needs.for_each(|(positions, need)| *positions = (*need).min(context));
        }
        positions
    }

    /// The precision, default filled in.
    pub fn precision(&self) -> Precision {
        self.precision.unwrap_or(Precision::Q8)
    }

    /// The KV type, default filled in.
    pub fn kv(&self) -> KvType {
        self.kv.unwrap_or(match self.precision() {
            Precision::F32 => KvType::F32,
            Precision::Q8 => KvType::F16,
        })
    }

    /// Compute threads, default filled in.
    pub fn threads(&self) -> usize {
        let cores = || std::thread::available_parallelism().map_or(1, |n| n.get());
        self.threads.unwrap_or_else(cores).max(1)
    }
}
