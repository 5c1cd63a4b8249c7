//! `template`, `tokenize` and `parse`: what needs no weights.

use std::path::PathBuf;

use clap::Args;

#[derive(Debug, Args)]
pub struct TemplateArgs {
    /// A model (a path, or org/name[:file] from the cache), or the source of a template (*.jinja).
    #[arg(value_name = "MODEL_OR_JINJA")]
    pub model: PathBuf,
    /// A JSON file with the request, - for standard input: messages, and where wanted tools,
    /// add_generation_prompt, kwargs, bos_token, eos_token, now.
    #[arg(long, value_name = "FILE")]
    pub request: PathBuf,
    /// One JSON document on stdout: the text, and with a model the ids.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct TokenizeArgs {
    /// A model: a path, or org/name[:file] from the cache.
    pub model: PathBuf,
    /// A text, or ids with --decode.
    pub text: String,
    /// Markers in the text count as special tokens.
    #[arg(long)]
    pub special: bool,
    /// The other way: ids (apart by commas or blanks) to text.
    #[arg(long)]
    pub decode: bool,
    /// One JSON document on stdout.
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Args)]
pub struct ParseArgs {
    /// harmony, qwen3_json, qwen_xml, gemma4, mistral, llama3 or plain.
    pub format: forebay_chat::Format,
    /// Lines of JSON: {raw, end, tools, prompt_tail}.
    #[arg(long, value_name = "FILE")]
    pub request: PathBuf,
    /// Feed the parser so many characters at a time; 0 is all at once.
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub pieces: usize,
    /// Accepted for likeness with other commands: the output is always JSON lines.
    #[arg(long)]
    pub json: bool,
}
