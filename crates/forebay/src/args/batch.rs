//! `batch`

use std::path::PathBuf;

use clap::Args;

use crate::args::options::ModelArgs;
use crate::args::sampling::SamplingArgs;

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
    /// Whole contexts that the memory plan has room for. Unless told, there is room for what the lines' prompts and
    /// max_tokens need with --parallel at once; without --parallel, for as many of them as cost experts little memory.
    #[arg(long, env = "FOREBAY_CONTEXTS", value_name = "N")]
    pub contexts: Option<usize>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    /// One JSON document on stdout when all is done.
    #[arg(long)]
    pub json: bool,
}
