//! The command line. Fields are raw; their meaning is resolved in [`crate::model`] and the commands.

// Doc comments here are help texts: brackets in them are no links.
#![allow(rustdoc::broken_intra_doc_links)]

use std::io::IsTerminal;
use std::path::PathBuf;
use std::str::FromStr;

use clap::builder::BoolishValueParser;
use clap::{Args, Parser, Subcommand, ValueEnum};
use forebay_cpu::Level;
use forebay_engine::{
    BackendChoice, DrafterChoice, EngineOptions, MemoryLimit, Prefetch, ResidencyChoice,
    SamplerParams, SpeculateOptions,
};
use forebay_store::Policy;

use crate::taps::{CaptureArg, CaptureRowsArg, SteerArg};

/// Runs Mixture-of-Experts language models that are larger than memory.
#[derive(Debug, Parser)]
#[command(
    name = "forebay",
    version,
    arg_required_else_help = true,
    after_help = "Examples:\n  forebay run models/tiny-gpt-oss \"Tell me a story about a brave fox.\"\n  \
    forebay run big.gguf --memory 4GiB --stats \"Why is the sky blue?\"\n  \
    forebay inspect big.gguf --memory 4GiB\n\n\
    Options can also be given as FOREBAY_* variables and in forebay.toml.\n\
    Exit codes: 0 done, 1 failed, 2 wrong usage, 3 refused, 130 interrupted."
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Answer one prompt, streaming; without a prompt, chat in the terminal.
    #[command(
        after_help = "Examples:\n  forebay run models/tiny-gpt-oss \"Tell me a story.\" --stats\n  \
        forebay run model.gguf\n  \
        echo \"Summarise this.\" | forebay run model.gguf -\n  \
        forebay run model.gguf --raw \"Once upon a time\" --tokens 64 --temp 0.8 --seed 7"
    )]
    Run(RunArgs),
    /// Serve the APIs of OpenAI, Anthropic and Ollama over HTTP.
    #[command(after_help = "Examples:\n  forebay serve model.gguf --memory 4GiB\n  \
        forebay serve model.gguf --listen 0.0.0.0:8080 --api-keys keys.txt --parallel 8\n  \
        curl http://127.0.0.1:8080/v1/chat/completions -d '{\"messages\":[{\"role\":\"user\",\"content\":\"Hi\"}]}'")]
    Serve(ServeArgs),
    /// Work through lines of requests, many at once.
    #[command(
        after_help = "Example:\n  forebay batch model.gguf requests.jsonl answers.jsonl --memory 4GiB \
        --parallel 64 --context 1024\n\n\
        A line is as OpenAI's batches have it: {custom_id, url, body}. After an interruption, the same command \
        goes on where it ended."
    )]
    Batch(BatchArgs),
    /// Say what a model file is, and what a budget buys.
    #[command(after_help = "Examples:\n  forebay inspect model.gguf --memory 4GiB\n  \
        forebay inspect folder/ --json")]
    Inspect(InspectArgs),
    /// Say what each memory budget would give: hits, bytes read and tokens per second.
    #[command(after_help = "Examples:\n  forebay plan model.gguf --memory 4GiB\n  \
        forebay plan model.gguf --budgets 2GiB,4GiB,8GiB --json\n  \
        forebay plan model.gguf --prior trace.txt\n  forebay plan openai/gpt-oss-20b\n\n\
        A model of a hub that is not here yet is planned from its headers. Hits are predicted by \
        replaying choices of experts: of a trace (see `forebay trace`), drawn from the model's routers, \
        or uniform.")]
    Plan(PlanArgs),
    /// Record which experts a model chooses; replay a recording over policies and slot counts.
    #[command(after_help = "Examples:\n  \
        forebay trace model.gguf --prompt \"Why is the sky blue?\" --tokens 256 --out trace.txt\n  \
        forebay trace model.gguf --prompt-ids ids.json --histogram experts.svg --json\n  \
        forebay trace replay trace.txt --slots 4,8,16")]
    Trace(TraceArgs),
    /// Download a model from a Hugging Face hub into the cache that other tools share.
    #[command(after_help = "Examples:\n  forebay pull openai/gpt-oss-20b\n  \
        forebay pull unsloth/gpt-oss-20b-GGUF:Q4_K_M\n  \
        forebay pull 'org/name:*Q8_0*' --revision v1.0 --json\n\n\
        What was interrupted goes on where it ended. Variables: HF_TOKEN, HF_ENDPOINT, HF_HOME, \
        HF_HUB_CACHE, HF_HUB_OFFLINE.")]
    Pull(PullArgs),
    /// Measure prefill and decode, with bytes and bandwidths.
    #[command(after_help = "Example:\n  forebay bench model.gguf --memory 4GiB \
        --prompt-tokens 512 --gen-tokens 64 --repeat 5 --json")]
    Bench(BenchArgs),
    /// Compare with references, measure perplexity, prove that nothing changes the bits.
    Eval(EvalArgs),
    /// Render a chat request with a model's chat template.
    #[command(
        after_help = "Examples:\n  forebay template model.gguf --request request.json --json\n  \
        echo '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}]}' | forebay template chat.jinja --request -"
    )]
    Template(TemplateArgs),
    /// Compare the GPU's kernels with the scalar definitions, for every weight format.
    #[command(hide = true)]
    Selftest(SelftestArgs),
    /// Show the token ids of a text.
    #[command(after_help = "Examples:\n  forebay tokenize model.gguf \"Hello\"\n  \
        forebay tokenize model.gguf --decode 1,2,3")]
    Tokenize(TokenizeArgs),
    /// Take apart what a model wrote: reasoning, content, tool calls.
    #[command(
        after_help = "Example:\n  forebay parse harmony --request outputs.jsonl --pieces 1\n\n\
        A line is {raw, end, tools, prompt_tail}; all but raw may be absent."
    )]
    Parse(ParseArgs),
}

#[derive(Debug, Args)]
pub struct EvalArgs {
    #[command(subcommand)]
    pub command: EvalCommand,
}

#[derive(Debug, Subcommand)]
pub enum EvalCommand {
    /// Compare logits and greedy answers with those of another implementation.
    #[command(after_help = "Example:\n  forebay eval golden model/ golden.json --precision f32")]
    Golden(GoldenArgs),
    /// Perplexity over a text or over token ids.
    #[command(after_help = "Example:\n  forebay eval perplexity model/ ids.json --window 256")]
    Perplexity(PerplexityArgs),
    /// Run one prompt over residencies, slots, chunks, threads and vector widths and compare all bits.
    ///
    /// --residency, --slots, --chunk, --threads or --simd, when given, are not varied.
    #[command(after_help = "Example:\n  forebay eval same model/ --prompt \"Once upon a time\"")]
    Same(SameArgs),
}

impl Cli {
    /// Whether the command was asked for JSON.
    pub fn json(&self) -> bool {
        match &self.command {
            Command::Run(a) => a.json,
            Command::Inspect(a) => a.json,
            Command::Plan(a) => a.json,
            Command::Trace(a) => match &a.command {
                Some(TraceCommand::Replay(r)) => r.json,
                None => a.json,
            },
            Command::Pull(a) => a.json,
            Command::Bench(a) => a.json,
            Command::Template(a) => a.json,
            Command::Tokenize(a) => a.json,
            Command::Selftest(a) => a.json,
            Command::Parse(_) => true,
            Command::Serve(_) => false,
            Command::Batch(a) => a.json,
            Command::Eval(e) => match &e.command {
                EvalCommand::Golden(a) => a.json,
                EvalCommand::Perplexity(a) => a.json,
                EvalCommand::Same(a) => a.json,
            },
        }
    }
}

#[derive(Debug, Args)]
pub struct SelftestArgs {
    /// Rounds with other numbers.
    #[arg(long, default_value_t = 1)]
    pub rounds: u64,
    #[arg(long)]
    pub json: bool,
}

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

/// `--memory`
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryArg(pub MemoryLimit);

impl FromStr for MemoryArg {
    type Err = String;
    fn from_str(s: &str) -> Result<MemoryArg, String> {
        let text = s.trim();
        if text == "auto" {
            return Ok(MemoryArg(MemoryLimit::Auto));
        }
        let bad = || format!("{s:?} is no size; write 4GiB, 3500MB, 75% or auto");
        if let Some(percent) = text.strip_suffix('%') {
            let p: f64 = percent.trim().parse().map_err(|_| bad())?;
            return match p > 0.0 && p <= 100.0 {
                true => Ok(MemoryArg(MemoryLimit::Fraction(p / 100.0))),
                false => Err(format!("{s:?}: a percentage lies between 0 and 100")),
            };
        }
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let number: f64 = number.parse().map_err(|_| bad())?;
        let factor = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "k" | "kib" => 1024.0,
            "m" | "mib" => 1048576.0,
            "g" | "gib" => 1073741824.0,
            "t" | "tib" => 1099511627776.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "tb" => 1e12,
            _ => return Err(bad()),
        };
        let bytes = number * factor;
        match bytes.is_finite() && (1.0..1e18).contains(&bytes) {
            true => Ok(MemoryArg(MemoryLimit::Bytes(bytes as u64))),
            false => Err(bad()),
        }
    }
}

macro_rules! value_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
        pub enum $name { $($(#[$vdoc])* $variant),* }
    };
}
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
    /// `--log-format`
    LogArg {
        /// For people
        Text,
        /// One JSON object a line
        Json,
        /// Not at all
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

#[derive(Clone, Debug, Args)]
#[command(next_help_heading = "Sampling options")]
pub struct SamplingArgs {
    /// 0 always takes the most likely token; the model's generation_config.json or 0.8 unless told.
    #[arg(long, allow_negative_numbers = true, env = "FOREBAY_TEMP")]
    pub temp: Option<f32>,
    /// Keep the k most likely tokens, 0 keeps all; the model's or 40 unless told.
    #[arg(long, env = "FOREBAY_TOP_K")]
    pub top_k: Option<usize>,
    /// Keep the smallest set of tokens whose probability reaches this; the model's or 0.95 unless told.
    #[arg(long, allow_negative_numbers = true, env = "FOREBAY_TOP_P")]
    pub top_p: Option<f32>,
    /// Keep tokens with at least this part of the largest probability; the model's or 0.05 unless told.
    #[arg(long, allow_negative_numbers = true, env = "FOREBAY_MIN_P")]
    pub min_p: Option<f32>,
    /// Divides the logits of recent tokens, 1 is off; 1.1 unless told, and off with --temp 0.
    #[arg(long, allow_negative_numbers = true, env = "FOREBAY_REPEAT_PENALTY")]
    pub repeat_penalty: Option<f32>,
    /// Subtracted from the logits of recent tokens.
    #[arg(
        long,
        allow_negative_numbers = true,
        env = "FOREBAY_PRESENCE_PENALTY",
        default_value_t = 0.0
    )]
    pub presence_penalty: f32,
    /// Subtracted from the logits of recent tokens, per occurrence.
    #[arg(
        long,
        allow_negative_numbers = true,
        env = "FOREBAY_FREQUENCY_PENALTY",
        default_value_t = 0.0
    )]
    pub frequency_penalty: f32,
    /// How many last tokens are recent.
    #[arg(long, env = "FOREBAY_REPEAT_LAST_N", default_value_t = 64)]
    pub repeat_last_n: usize,
    /// Seed of the random draws.
    #[arg(long, allow_negative_numbers = true, env = "FOREBAY_SEED", default_value_t = 0)]
    pub seed: u64,
}

impl SamplingArgs {
    /// The sampler's parameters: as told, else what the model recommends, else common defaults.
    pub fn params(&self, recommended: Option<&serde_json::Value>) -> anyhow::Result<SamplerParams> {
        let common = SamplerParams {
            temperature: 0.8,
            top_k: 40,
            top_p: 0.95,
            min_p: 0.05,
            repeat_penalty: 1.1,
            ..SamplerParams::default()
        };
        let params = self.over(recommended, common)?;
        // Greedy means the model's own most likely token.
        match params.temperature == 0.0 {
            true => self.over(recommended, SamplerParams { repeat_penalty: 1.0, ..params }),
            false => Ok(params),
        }
    }

    /// As told, else what the model recommends, else `usual`.
    pub fn over(
        &self,
        recommended: Option<&serde_json::Value>,
        usual: SamplerParams,
    ) -> anyhow::Result<SamplerParams> {
        // Temperatures of a model that is not meant to be sampled say nothing.
        let recommended = recommended.filter(|r| r["do_sample"].as_bool() == Some(true));
        let model = |key: &str| recommended.and_then(|r| r[key].as_f64());
        let float = |told: Option<f32>, key: &str, usual: f32| {
            told.unwrap_or_else(|| model(key).map_or(usual, |v| v as f32))
        };
        let top_k = || model("top_k").map_or(usual.top_k, |k| k as usize);
        let params = SamplerParams {
            temperature: float(self.temp, "temperature", usual.temperature),
            top_k: self.top_k.unwrap_or_else(top_k),
            top_p: float(self.top_p, "top_p", usual.top_p),
            min_p: float(self.min_p, "min_p", usual.min_p),
            repeat_penalty: float(self.repeat_penalty, "repetition_penalty", usual.repeat_penalty),
            presence_penalty: self.presence_penalty,
            frequency_penalty: self.frequency_penalty,
            repeat_last: self.repeat_last_n,
            seed: self.seed,
        };
        let check = |ok: bool, name: &str, what: &str| match ok {
            true => Ok(()),
            false => Err(crate::failure::usage(format!("--{name} must be {what}"))),
        };
        let p = &params;
        check(p.temperature.is_finite() && p.temperature >= 0.0, "temp", "0 or more")?;
        check(p.top_p > 0.0 && p.top_p <= 1.0, "top-p", "above 0 and at most 1")?;
        check((0.0..=1.0).contains(&p.min_p), "min-p", "between 0 and 1")?;
        let positive = p.repeat_penalty.is_finite() && p.repeat_penalty > 0.0;
        check(positive, "repeat-penalty", "above 0")?;
        check(p.presence_penalty.is_finite(), "presence-penalty", "a number")?;
        check(p.frequency_penalty.is_finite(), "frequency-penalty", "a number")?;
        Ok(params)
    }
}

#[derive(Debug, Args)]
pub struct RunArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// What to answer; `-` reads standard input. None, in a terminal: a chat.
    pub prompt: Option<String>,
    /// Take the prompt as it is, without the chat template.
    #[arg(long, env = "FOREBAY_RAW", value_parser = BoolishValueParser::new())]
    pub raw: bool,
    /// A system message before the prompt.
    #[arg(long, env = "FOREBAY_SYSTEM", conflicts_with = "raw")]
    pub system: Option<String>,
    /// Token ids instead of text: a JSON array, or numbers apart by blanks or commas.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "raw", "system"])]
    pub prompt_ids: Option<PathBuf>,
    /// At most this many tokens; to the context's end unless told.
    #[arg(long, env = "FOREBAY_TOKENS", value_name = "N")]
    pub tokens: Option<usize>,
    /// Go on after an end token.
    #[arg(long, env = "FOREBAY_IGNORE_EOS", value_parser = BoolishValueParser::new())]
    pub ignore_eos: bool,
    /// End the answer before this text; may be given several times.
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Capture what passes these points into a safetensors file, POINT[@a-b] with layers a to b: attention, feed-forward (the
    /// residual stream after each), router (logits), choice (experts and weights).
    #[arg(long, value_delimiter = ',', value_name = "POINT,...", requires = "capture_out")]
    pub capture: Vec<CaptureArg>,
    /// Which rows are captured.
    #[arg(long, value_enum, default_value = "all", requires = "capture")]
    pub capture_rows: CaptureRowsArg,
    /// Where what is captured goes.
    #[arg(long, value_name = "FILE", requires = "capture")]
    pub capture_out: Option<PathBuf>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// End with speed, hit rate, bytes and memory.
    #[arg(long, env = "FOREBAY_STATS", value_parser = BoolishValueParser::new())]
    pub stats: bool,
    /// JSON lines on stdout: one per token, the last with statistics.
    #[arg(long)]
    pub json: bool,
}

impl RunArgs {
    /// Whether it is a chat in the terminal: there is one, and nothing to answer is given.
    pub fn is_chat(&self) -> bool {
        let nothing_given = self.prompt.is_none() && self.prompt_ids.is_none();
        let plain = self.capture.is_empty() && !self.json && !self.raw;
        nothing_given && plain && std::io::stdin().is_terminal()
    }
}

#[derive(Debug, Args)]
pub struct InspectArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// One JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Where choices of experts come from: auto (router where the weights are here, else uniform),
    /// router, uniform, or the file of a trace.
    #[arg(
        long,
        env = "FOREBAY_PRIOR",
        default_value = "auto",
        value_name = "auto|router|uniform|FILE"
    )]
    pub prior: String,
    /// Budgets to plan for besides --memory; a ladder up to the whole model unless told.
    #[arg(long, value_delimiter = ',', value_name = "SIZE,...")]
    pub budgets: Vec<MemoryArg>,
    /// One JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct TraceArgs {
    #[command(subcommand)]
    pub command: Option<TraceCommand>,
    /// A model, as of the other commands.
    #[arg(required = true)]
    pub model: Option<PathBuf>,
    /// Download a model that is not in the cache without asking.
    #[arg(long, short, env = "FOREBAY_YES", value_parser = BoolishValueParser::new())]
    pub yes: bool,
    #[command(flatten)]
    pub options: Options,
    /// Prompt, taken as it is.
    #[arg(long, conflicts_with = "prompt_ids")]
    pub prompt: Option<String>,
    /// Token ids instead of text.
    #[arg(long, value_name = "FILE")]
    pub prompt_ids: Option<PathBuf>,
    /// Tokens to generate after the prompt.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub tokens: usize,
    /// Seed of the random draws.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Where to write the trace: lines of `layer rows expert expert ...`.
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Where to draw layers x experts, as SVG.
    #[arg(long, value_name = "FILE")]
    pub histogram: Option<PathBuf>,
    /// One JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Subcommand)]
pub enum TraceCommand {
    /// Hits of a recording for cache policies and slots per layer.
    Replay(ReplayArgs),
}

#[derive(Debug, Args)]
pub struct ReplayArgs {
    /// The trace.
    pub file: PathBuf,
    /// Slots per layer to evaluate; powers of two up to all experts unless told.
    #[arg(long, value_delimiter = ',', value_name = "N,...")]
    pub slots: Vec<usize>,
    /// Policies to evaluate; all unless told.
    #[arg(long, value_delimiter = ',', value_name = "NAME,...")]
    pub policy: Vec<Policy>,
    /// One JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct PullArgs {
    /// org/name, or org/name:PATTERN with a part of a file's name, or with * and ?.
    pub model: String,
    /// A branch, a tag or a commit.
    #[arg(long, env = "FOREBAY_REVISION", default_value = "main", value_name = "NAME")]
    pub revision: String,
    /// One JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct BenchArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Tokens of the prompt.
    #[arg(long, default_value_t = 512, value_name = "N")]
    pub prompt_tokens: usize,
    /// Tokens to generate.
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub gen_tokens: usize,
    /// Measured repetitions.
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub repeat: usize,
    /// Decode from this position on, after that many more tokens of prompt.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub depth: usize,
    /// Where to write which experts the first repetition chooses, as `trace --out` does: a prior for `plan`.
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
    /// Time every operation, and say how near each comes to what memory and arithmetic of this machine can do.
    #[arg(long)]
    pub profile: bool,
    /// A prompt of one's own, as token ids, in place of random ones; then the most likely tokens are generated.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt_tokens", "depth"])]
    pub prompt_ids: Option<PathBuf>,
    /// Draft the very tokens that come, this part of them right (0 to 1): what a drafter as good would give. They are recorded
    /// first, without drafts. Beside --speculate mtp the block is run as well, and its drafts thrown away.
    #[arg(long, value_name = "RATE")]
    pub scripted: Option<f64>,
    /// One JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct GoldenArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Reference answers.
    pub file: PathBuf,
    /// Largest logit difference that passes.
    #[arg(long, default_value_t = 2e-3)]
    pub tolerance: f64,
    /// A greedy difference where the reference's margin is below this is a near tie, no failure.
    #[arg(long, default_value_t = 0.005)]
    pub near_tie: f64,
    /// One JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct PerplexityArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Token ids (JSON array) or text.
    pub file: PathBuf,
    /// Tokens of a window; windows do not overlap.
    #[arg(long, default_value_t = 256, value_name = "N")]
    pub window: usize,
    /// Score only what follows the first N tokens of a window.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub skip_first: usize,
    /// One JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct SameArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Prompt.
    #[arg(long, required_unless_present = "prompt_ids")]
    pub prompt: Option<String>,
    /// Token ids instead of text.
    #[arg(long, value_name = "FILE", conflicts_with = "prompt")]
    pub prompt_ids: Option<PathBuf>,
    /// Tokens to generate after the prompt.
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub tokens: usize,
    /// Compare whole answers of up to N tokens as well, as clients get them: with each drafter, over draft lengths and places of
    /// experts, greedy and drawn, free, ended by a stop and held by a grammar.
    #[arg(long, default_value_t = 0, value_name = "N")]
    pub answers: usize,
    /// One JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct TemplateArgs {
    /// A model (a path, or org/name[:file] from the cache), or the source of a template (*.jinja).
    #[arg(value_name = "MODEL_OR_JINJA")]
    pub model: PathBuf,
    /// A JSON file with the request, - for standard input: messages, and where wanted tools,
    /// add_generation_prompt, kwargs, bos_token, eos_token, now.
    #[arg(long, value_name = "FILE")]
    pub request: PathBuf,
    /// One JSON document on stdout: the text, and with a model the ids.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct TokenizeArgs {
    /// A model: a path, or org/name[:file] from the cache.
    pub model: PathBuf,
    /// A text, or ids with --decode.
    pub text: String,
    /// Markers in the text count as special tokens.
    #[arg(long)]
    pub special: bool,
    /// The other way: ids (apart by commas or blanks) to text.
    #[arg(long)]
    pub decode: bool,
    /// One JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Address and port; port 0 takes a free one.
    #[arg(long, env = "FOREBAY_LISTEN", default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    pub listen: std::net::SocketAddr,
    /// Name of the model; that of its file unless told.
    #[arg(long, env = "FOREBAY_NAME")]
    pub name: Option<String>,
    /// Answers that are computed at once; 4 unless told.
    #[arg(long, env = "FOREBAY_PARALLEL", value_name = "N")]
    pub parallel: Option<usize>,
    /// Whole contexts that the memory plan has room for; as many as --parallel, and if neither is told, as many as cost
    /// experts little memory. Each answer takes room for its prompt and the tokens that it asks for, so with fewer,
    /// many short ones still run at once.
    #[arg(long, env = "FOREBAY_CONTEXTS", value_name = "N")]
    pub contexts: Option<usize>,
    /// Requests that may wait; more are told to come again.
    #[arg(long, env = "FOREBAY_QUEUE", value_name = "N", default_value_t = 64)]
    pub queue: usize,
    /// Connections that may be open; more are turned away with 503.
    #[arg(long, env = "FOREBAY_CONNECTIONS", value_name = "N", default_value_t = 256)]
    pub connections: usize,
    /// Seconds that a client may take nothing of what is sent to it, before its connection is closed.
    #[arg(
        long,
        env = "FOREBAY_UNREAD",
        value_name = "SECONDS",
        default_value_t = 60,
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    pub unread: u64,
    /// A file with API keys, one a line; everybody may ask unless told.
    #[arg(long, env = "FOREBAY_API_KEYS", value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
    /// An origin whose pages may ask, or *; may be given several times.
    #[arg(long, value_name = "ORIGIN")]
    pub cors: Vec<String>,
    /// Largest body of a request, in bytes.
    #[arg(long, env = "FOREBAY_MAX_BODY", value_name = "BYTES", default_value_t = 8 << 20)]
    pub max_body: usize,
    /// Seconds that running answers may go on after Ctrl-C.
    #[arg(long, env = "FOREBAY_GRACE", value_name = "SECONDS", default_value_t = 30)]
    pub grace: u64,
    /// Certificate chain in PEM form, the server's own first: serves https.
    #[arg(long, env = "FOREBAY_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate, in PEM form.
    #[arg(long, env = "FOREBAY_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// How requests are logged, on stderr: one line each, without texts.
    #[arg(long, env = "FOREBAY_LOG_FORMAT", value_enum, default_value = "text")]
    pub log_format: LogArg,
    /// Log the texts of prompts, too.
    #[arg(long, env = "FOREBAY_LOG_PROMPTS", value_parser = BoolishValueParser::new())]
    pub log_prompts: bool,
    /// A folder where what was computed of prompts is kept over a restart.
    #[arg(long, env = "FOREBAY_SESSIONS", value_name = "DIR")]
    pub sessions: Option<PathBuf>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

#[derive(Debug, Args)]
pub struct BatchArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Lines of requests.
    pub input: PathBuf,
    /// Where the answers go, in the order of the requests.
    pub output: PathBuf,
    /// Answers that are computed at once; 16 unless told.
    #[arg(long, env = "FOREBAY_PARALLEL", value_name = "N")]
    pub parallel: Option<usize>,
    /// Whole contexts that the memory plan has room for; as many as --parallel, and if neither is told, as many as cost
    /// experts little memory. With short requests, few make room for many answers.
    #[arg(long, env = "FOREBAY_CONTEXTS", value_name = "N")]
    pub contexts: Option<usize>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// One JSON document on stdout when all is done.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ParseArgs {
    /// harmony, qwen3_json, qwen_xml, gemma4, mistral, llama3 or plain.
    pub format: forebay_chat::Format,
    /// Lines of JSON: {raw, end, tools, prompt_tail}.
    #[arg(long, value_name = "FILE")]
    pub request: PathBuf,
    /// Feed the parser so many characters at a time; 0 is all at once.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub pieces: usize,
    /// Accepted for likeness with other commands: the output is always JSON lines.
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("4GiB", 4 << 30)]
    #[case("4g", 4 << 30)]
    #[case("1.5 MiB", 3 << 19)]
    #[case("3500MB", 3_500_000_000)]
    #[case("1000", 1000)]
    fn sizes(#[case] text: &str, #[case] bytes: u64) {
        assert_eq!(text.parse(), Ok(MemoryArg(MemoryLimit::Bytes(bytes))));
    }

    #[rstest]
    #[case("")]
    #[case("4X")]
    #[case("-1GiB")]
    #[case("0")]
    #[case("0%")]
    #[case("101%")]
    #[case("1e99GiB")]
    fn no_sizes(#[case] text: &str) {
        assert!(text.parse::<MemoryArg>().is_err());
    }

    #[test]
    fn the_command_line_is_sound() {
        use clap::CommandFactory;
        Cli::command().debug_assert();
    }
}
