//! `selftest`

use clap::Args;

#[derive(Debug, Args)]
pub struct SelftestArgs {
    /// Rounds with other numbers.
    #[arg(long, default_value_t = 1)]
    pub rounds: u64,
    #[arg(long)]
    pub json: bool,
}
