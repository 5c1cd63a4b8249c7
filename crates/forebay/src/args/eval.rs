//! `eval golden`, `eval perplexity` and `eval same`

use std::path::PathBuf;

use clap::{Args, Subcommand};

use crate::args::options::ModelArgs;

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
