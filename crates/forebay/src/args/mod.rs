//! The command line, a file for each command. Fields are raw; their meaning is resolved in [`crate::model`] and the commands.

// Doc comments here are help texts: brackets in them are no links.
#![allow(rustdoc::broken_intra_doc_links)]

mod batch;
mod bench;
mod eval;
mod inspect;
mod memory;
mod options;
mod plan;
mod pull;
mod run;
mod sampling;
mod selftest;
mod serve;
mod text;
mod trace;

use clap::{Parser, Subcommand};

pub use batch::*;
pub use bench::*;
pub use eval::*;
pub use inspect::*;
pub use options::*;
pub use plan::*;
pub use pull::*;
pub use run::*;
pub use sampling::*;
pub use selftest::*;
pub use serve::*;
pub use text::*;
pub use trace::*;

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

/// An enum whose variants are the values of an option.
macro_rules! value_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$vdoc:meta])* $variant:ident),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
        pub enum $name { $($(#[$vdoc])* $variant),* }
    };
}
use value_enum;

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_sound() {
        use clap::CommandFactory;
        super::Cli::command().debug_assert();
    }
}
