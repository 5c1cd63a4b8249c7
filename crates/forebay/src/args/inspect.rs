//! `inspect`

use clap::Args;

use crate::args::options::ModelArgs;

#[derive(Debug, Args)]
pub struct InspectArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// One JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}
