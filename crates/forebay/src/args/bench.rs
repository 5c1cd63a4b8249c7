//! `bench`

use std::path::PathBuf;

use clap::Args;

use crate::args::options::ModelArgs;

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
