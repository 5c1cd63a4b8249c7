//! What every command that opens a model begins with: the model, and the options of the engine.

use std::path::PathBuf;

use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};
use forebay_cpu::Level;
use forebay_engine::{
    BackendChoice, DrafterChoice, EngineOptions, Prefetch, ResidencyChoice, SpeculateOptions,
};
use forebay_store::Policy;

use crate::args::memory::MemoryArg;
use crate::args::value_enum;
use crate::taps::SteerArg;

/// A model: what every command begins with.
#[derive(Clone, Debug, Args)]
pub struct ModelArgs {
    /// A GGUF file (the first of a split set), a safetensors or MLX folder, or org/name[:file] of a hub.
    pub model: PathBuf,
    /// Download a model that is not in the cache without asking.
    #[arg(long, short, env = "FOREBAY_YES", value_parser = BoolishValueParser::new())]
    pub yes: bool,
    #[command(flatten)]
    pub options: Options,
}

/// Options of every command that opens a model.
#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Model options")]
pub struct Options {
    /// Total memory of the process: a size (4GiB), a percentage (75%) of the smaller of the container's
    /// limit and RAM, or auto.
    #[arg(long, env = "FOREBAY_MEMORY", default_value = "auto", value_name = "SIZE|PERCENT|auto")]
    pub memory: MemoryArg,
    /// Where experts live.
    #[arg(long, env = "FOREBAY_RESIDENCY", value_enum, default_value = "auto")]
    pub residency: ResidencyArg,
    /// Expert slots per routed layer; the pool is this times the layers.
    #[arg(long, env = "FOREBAY_SLOTS", value_name = "N")]
    pub slots: Option<usize>,
    /// Which expert has to go when a slot is needed.
    #[arg(long, env = "FOREBAY_POLICY", default_value_t, value_name = POLICIES)]
    pub policy: Policy,
    /// Reading experts ahead that the next layer will probably want.
    #[arg(long, env = "FOREBAY_PREFETCH", value_enum, default_value = "auto")]
    pub prefetch: PrefetchArg,
    /// Drafting tokens that one pass then checks; answers are the same. auto: by the model's own block where it has one,
    /// else by what was said before; and only while it is measured to be quicker.
    #[arg(long, env = "FOREBAY_SPECULATE", value_enum)]
    pub speculate: Option<SpeculateArg>,
    /// A small model with the same tokenizer, for --speculate draft, or the folder of a DFlash drafter, for --speculate dflash.
    #[arg(long, env = "FOREBAY_DRAFT_MODEL", value_name = "PATH")]
    pub draft_model: Option<PathBuf>,
    /// Most tokens of a draft, up to 15; the drafter's own number unless told.
    #[arg(long, env = "FOREBAY_DRAFT_TOKENS", value_name = "N")]
    pub draft_tokens: Option<usize>,
    /// Draft whatever it costs, and always as many tokens as may be: for measuring.
    #[arg(long, hide = true)]
    pub speculate_always: bool,
    /// Whether the memory budget gives way while running, when the system is short of memory or the
    /// container's limit is lowered.
    #[arg(long, env = "FOREBAY_ELASTIC", value_enum, default_value = "auto")]
    pub elastic: SwitchArg,
    /// Whether experts that were hot in earlier runs are read first.
    #[arg(long, env = "FOREBAY_WARM", value_enum, default_value = "auto")]
    pub warm: SwitchArg,
    /// How files are read.
    #[arg(long, env = "FOREBAY_IO", value_enum, default_value = "auto")]
    pub io: IoArg,
    /// Expert reads in flight at once; what turns out to be enough unless told.
    #[arg(long, env = "FOREBAY_IO_DEPTH", value_name = "N", alias = "io-threads")]
    pub io_depth: Option<usize>,
    /// A second copy of the model, on another disk: both are read.
    #[arg(long, env = "FOREBAY_ALSO", value_name = "PATH")]
    pub also: Option<PathBuf>,
    /// Compute threads; one per core unless told.
    #[arg(long, env = "FOREBAY_THREADS", value_name = "N")]
    pub threads: Option<usize>,
    /// Most prompt tokens worked through at once; what the budget allows unless told.
    #[arg(long, env = "FOREBAY_CHUNK", value_name = "N")]
    pub chunk: Option<usize>,
    /// f32 keeps activations exact; q8 (auto) rounds them to 8 bits where weights are quantised.
    #[arg(long, env = "FOREBAY_PRECISION", value_enum, default_value = "auto")]
    pub precision: PrecisionArg,
    /// Type of keys and values; f32 under --precision f32, else f16.
    #[arg(long, env = "FOREBAY_KV", value_enum)]
    pub kv: Option<KvArg>,
    /// Positions that the KV cache holds; the smaller of the model's and 4096 unless told.
    #[arg(long, env = "FOREBAY_CONTEXT", value_name = "N")]
    pub context: Option<usize>,
    /// Where to compute.
    #[arg(long, env = "FOREBAY_BACKEND", value_enum, default_value = "auto")]
    pub backend: BackendArg,
    /// Steer with the directions of a file (safetensors, or a control vector in GGUF), [NAME=]FILE[:KEY=VALUE,...]; may be given
    /// several times. Keys: point (feed-forward, attention), mode (add, ablate, clamp with min and max, renormalise), strength,
    /// layers (a-b). In serve and batch, vectors with a name act on requests that name them in `steer`.
    #[arg(long, env = "FOREBAY_STEER", value_name = "FILE")]
    pub steer: Vec<SteerArg>,
    /// Vector instructions; the widest unless told. Results do not depend on it.
    #[arg(long, env = "FOREBAY_SIMD", value_name = "scalar|avx2|avx512|neon|neon-dot|neon-i8mm")]
    pub simd: Option<Level>,
}

const POLICIES: &str = "lru|lfu|adaptive|lru-shared|lfu-shared";

/// More compute threads than any machine has cores for.
const MAX_THREADS: usize = 1024;

value_enum!(
    /// `--residency`
    ResidencyArg {
        /// Resident if all fits the budget, else streamed
        Auto,
        /// Bounded slots, read on demand
        Stream,
        /// Mapped files, paged by the system
        Mapped,
        /// All in memory
        Resident,
    }
);
value_enum!(
    /// `--io`
    IoArg {
        /// Direct reads where the file system allows them
        Auto,
        /// io_uring (not in this version)
        Uring,
        /// Threads with direct positioned reads
        Threads,
        /// Through the page cache
        Buffered,
    }
);
value_enum!(
    /// `--prefetch`
    PrefetchArg {
        /// While it is measured to pay
        Auto,
        /// Never
        Off,
        /// Always, to measure it
        On,
    }
);
value_enum!(
    /// `--speculate`
    SpeculateArg {
        /// The model's own block, else ngram; never where a GPU computes
        Auto,
        /// Nothing drafts
        Off,
        /// What followed when the last tokens were there before
        Ngram,
        /// The model's multi-token-prediction block
        Mtp,
        /// The model of --draft-model
        Draft,
        /// The DFlash block drafter of --draft-model
        Dflash,
    }
);
value_enum!(
    /// `--elastic`, `--warm`
    SwitchArg {
        /// Yes, where it can be done
        Auto,
        /// Never
        Off,
    }
);
value_enum!(
    /// `--precision`
    PrecisionArg { Auto, F32, Q8 }
);
value_enum!(
    /// `--kv`
    KvArg { F32, F16, Q8 }
);
value_enum!(
    /// `--backend`
    BackendArg { Auto, Cpu, Cuda }
);

impl Options {
    /// The engine's options; refuses what this version does not have.
    pub fn engine(&self) -> anyhow::Result<EngineOptions> {
        use forebay_cpu::attention::KvType;
        use forebay_engine::EngineError;
        use forebay_program::Precision;
        use forebay_store::{IoEngine, IoMode, QueueDepth};
        let refuse = |what: &str, instead: &str| EngineError::Refused {
            what: what.into(),
            instead: instead.into(),
        };
        if let Some(level) = self.simd.filter(|l| !Level::available().contains(l)) {
            let have: Vec<String> = Level::available().iter().map(|l| l.to_string()).collect();
            let instead = format!("this processor has {}", have.join(", "));
            return Err(refuse(&format!("--simd {level}"), &instead).into());
        }
        let positive = |name: &str, v: Option<usize>| match v {
            Some(0) => Err(crate::failure::usage(format!("--{name} must be at least 1"))),
            _ => Ok(()),
        };
        positive("slots", self.slots)?;
        positive("threads", self.threads)?;
        positive("chunk", self.chunk)?;
        positive("context", self.context)?;
        positive("io-depth", self.io_depth)?;
        if self.threads.is_some_and(|n| n > MAX_THREADS) {
            return Err(crate::failure::usage(format!("--threads must be at most {MAX_THREADS}")));
        }
        Ok(EngineOptions {
            memory: self.memory.0,
            residency: match self.residency {
                ResidencyArg::Auto => ResidencyChoice::Auto,
                ResidencyArg::Stream => ResidencyChoice::Stream,
                ResidencyArg::Mapped => ResidencyChoice::Mapped,
                ResidencyArg::Resident => ResidencyChoice::Resident,
            },
            slots_per_layer: self.slots,
            threads: self.threads,
            chunk: self.chunk,
            precision: match self.precision {
                PrecisionArg::Auto => None,
                PrecisionArg::F32 => Some(Precision::F32),
                PrecisionArg::Q8 => Some(Precision::Q8),
            },
            kv: self.kv.map(|k| match k {
                KvArg::F32 => KvType::F32,
                KvArg::F16 => KvType::F16,
                KvArg::Q8 => KvType::Q8,
            }),
            context: self.context,
            io: match self.io {
                IoArg::Buffered => IoMode::Buffered,
                IoArg::Auto | IoArg::Uring | IoArg::Threads => IoMode::Auto,
            },
            io_engine: match self.io {
                IoArg::Auto | IoArg::Buffered => IoEngine::Auto,
                IoArg::Uring => IoEngine::Uring,
                IoArg::Threads => IoEngine::Threads,
            },
            io_depth: match self.io_depth {
                Some(depth) => QueueDepth::Fixed(depth.min(256)),
                None => QueueDepth::Measured,
            },
            also: self.also.clone(),
            policy: self.policy,
            prefetch: match self.prefetch {
                PrefetchArg::Auto => Prefetch::Auto,
                PrefetchArg::Off => Prefetch::Off,
                PrefetchArg::On => Prefetch::On,
            },
            speculate: SpeculateOptions {
                drafter: self.drafter()?,
                tokens: self.draft_tokens,
                always: self.speculate_always,
            },
            elastic: self.elastic == SwitchArg::Auto,
            backend: match self.backend {
                BackendArg::Auto => BackendChoice::Auto,
                BackendArg::Cpu => BackendChoice::Cpu,
                BackendArg::Cuda => BackendChoice::Cuda,
            },
            level: self.simd,
            steer: self.steer.iter().map(|arg| arg.0.clone()).collect(),
            ..EngineOptions::default()
        })
    }

    fn drafter(&self) -> anyhow::Result<DrafterChoice> {
        use crate::failure::usage;
        Ok(match (self.speculate, &self.draft_model) {
            (None | Some(SpeculateArg::Draft), Some(path)) => DrafterChoice::Model(path.clone()),
            (Some(SpeculateArg::Dflash), Some(path)) => DrafterChoice::Dflash(path.clone()),
            (Some(SpeculateArg::Dflash), None) => {
                return Err(usage("--speculate dflash needs --draft-model PATH"));
            }
            (Some(SpeculateArg::Draft), None) => {
                return Err(usage("--speculate draft needs --draft-model PATH"));
            }
            (Some(_), Some(_)) => {
                return Err(usage("--draft-model is for --speculate draft and dflash"));
            }
            (None | Some(SpeculateArg::Off), None) => DrafterChoice::Off,
            (Some(SpeculateArg::Auto), None) => DrafterChoice::Auto,
            (Some(SpeculateArg::Ngram), None) => DrafterChoice::Ngram,
            (Some(SpeculateArg::Mtp), None) => DrafterChoice::Mtp,
        })
    }
}
