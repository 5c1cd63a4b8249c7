//! `trace` and `trace replay`

use std::path::PathBuf;

use clap::builder::BoolishValueParser;
use clap::{Args, Subcommand};
use forebay_store::Policy;

use crate::args::options::Options;

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
