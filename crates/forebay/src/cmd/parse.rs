//! `parse`: what a model wrote, taken apart.

use std::io::{BufRead, BufReader};
use std::process::ExitCode;

use forebay_chat::{End, Parsed, Parser, Tool};
use serde_json::Value;

use crate::args::ParseArgs;
use crate::failure::usage;
use crate::term::say;

pub fn run(args: ParseArgs) -> anyhow::Result<ExitCode> {
    let shown = args.request.display();
    let file = std::fs::File::open(&args.request).map_err(|e| usage(format!("{shown}: {e}")))?;
    for (index, line) in BufReader::new(file).lines().enumerate() {
        let line = line.map_err(|e| usage(format!("{shown}: line {}: {e}", index + 1)))?;
        if line.trim().is_empty() {
            continue;
        }
        let bad = |what: &str| usage(format!("{shown}: line {}: {what}", index + 1));
        let request: Value = serde_json::from_str(&line).map_err(|e| bad(&e.to_string()))?;
        let raw = request["raw"].as_str().ok_or_else(|| bad("`raw` must be the text to parse"))?;
        let end = match request["end"].as_str() {
            Some("eos") | None => End::Eos,
            Some("length") => End::Length,
            Some(other) => return Err(bad(&format!("`end` is `eos` or `length`, not {other:?}"))),
        };
        let tools = request["tools"].as_array().into_iter().flatten();
        let tools: Vec<Tool> = tools.filter_map(Tool::from_json).collect();
        let tail = request["prompt_tail"].as_str().unwrap_or_default();
        let mut parser = Parser::new(args.format, &tools, tail, &[]);
        let mut parsed = Parsed::default();
        for piece in pieces(raw, args.pieces) {
            parser.push(piece).into_iter().for_each(|delta| parsed.add(delta));
        }
        parser.finish(end).into_iter().for_each(|delta| parsed.add(delta));
        parsed.finish_reason = parser.finish_reason(end);
        say!("{}", parsed.json())?;
    }
    Ok(ExitCode::SUCCESS)
}

/// The text in pieces of so many characters; 0 is all at once.
fn pieces(text: &str, chars: usize) -> Vec<&str> {
    if chars == 0 {
        return vec![text];
    }
    let starts: Vec<usize> = text.char_indices().map(|(at, _)| at).step_by(chars).collect();
    let ends = starts.iter().skip(1).copied().chain([text.len()]);
    starts.iter().zip(ends).map(|(&from, to)| &text[from..to]).collect()
}
