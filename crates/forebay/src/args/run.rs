//! `run`

use std::io::IsTerminal;
use std::path::PathBuf;

use clap::Args;
use clap::builder::BoolishValueParser;

use crate::args::options::ModelArgs;
use crate::args::sampling::SamplingArgs;
use crate::taps::{CaptureArg, CaptureRowsArg};

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
