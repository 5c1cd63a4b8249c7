//! `pull`

use clap::Args;

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
