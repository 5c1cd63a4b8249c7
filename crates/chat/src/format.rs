//! The languages that models write answers in.

use std::str::FromStr;

/// How a model writes reasoning and calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// Text and nothing else.
    Plain,
    /// gpt-oss: messages on channels, `<|channel|>analysis<|message|>…<|end|>`.
    Harmony,
    /// Qwen3 and others: `<think>…</think>`, `<tool_call>{"name": …, "arguments": …}</tool_call>`.
    Qwen3Json,
    /// Qwen3-Coder and Qwen3.5: `<tool_call><function=NAME><parameter=KEY>…`.
    QwenXml,
    /// Gemma 4: `<|channel>thought…<channel|>`, `<|tool_call>call:NAME{key:value}<tool_call|>`.
    Gemma4,
    /// Mistral: `[THINK]…[/THINK]`, `[TOOL_CALLS]`.
    Mistral,
    /// Llama 3: a JSON object alone, or after `<|python_tag|>`.
    Llama3,
}

impl Format {
    /// Formats with their names on the command line.
    pub const NAMED: [(&str, Format); 7] = [
        ("plain", Format::Plain),
        ("harmony", Format::Harmony),
        ("qwen3_json", Format::Qwen3Json),
        ("qwen_xml", Format::QwenXml),
        ("gemma4", Format::Gemma4),
        ("mistral", Format::Mistral),
        ("llama3", Format::Llama3),
    ];

    /// The format that a chat template teaches its model, by the markers that the template writes.
    pub fn of_template(source: &str) -> Format {
        let has = |marker: &str| source.contains(marker);
        if has("<|channel|>") && has("<|message|>") {
            Format::Harmony
        } else if has("<|tool_call>") || has("<|channel>") {
            Format::Gemma4
        } else if has("<function=") {
            Format::QwenXml
        } else if has("<tool_call>") || has("<think>") {
            Format::Qwen3Json
        } else if has("[TOOL_CALLS]") || has("[THINK]") {
            Format::Mistral
        } else if has("<|python_tag|>") || has("<|start_header_id|>") {
            Format::Llama3
        } else {
            Format::Plain
        }
    }

    /// Name on the command line.
    pub fn name(self) -> &'static str {
        let named = Format::NAMED.iter().find(|(_, format)| *format == self);
        named.expect("every format has a name").0
    }

    /// Control tokens that mean something to the parser; all others are no text of an answer.
    pub fn markers(self) -> &'static [&'static str] {
        match self {
            Format::Plain => &[],
            Format::Harmony => &crate::harmony::MARKERS,
            Format::Qwen3Json | Format::QwenXml => {
                &["<think>", "</think>", "<tool_call>", "</tool_call>"]
            }
            Format::Gemma4 => {
                &["<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|\"|>"]
            }
            Format::Mistral => &["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"],
            Format::Llama3 => &["<|python_tag|>"],
        }
    }
}

impl FromStr for Format {
    type Err = String;

    fn from_str(name: &str) -> Result<Format, String> {
        let named = Format::NAMED.iter().find(|(n, _)| *n == name);
        named.map(|(_, format)| *format).ok_or_else(|| {
            let names: Vec<&str> = Format::NAMED.iter().map(|(name, _)| *name).collect();
            format!("{name:?} is no answer format; there are {}", names.join(", "))
        })
    }
}
