//! `plan`

use clap::Args;

use crate::args::memory::MemoryArg;
use crate::args::options::ModelArgs;

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
