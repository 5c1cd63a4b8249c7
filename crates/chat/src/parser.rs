//! Pieces of text in, deltas out.

use serde_json::{Value, json};

use crate::calls::{Call, Tool};
use crate::format::Format;
use crate::harmony::Harmony;
use crate::sink::{Delta, Lane, Sink};
use crate::tagged::Tagged;

/// Why there is no more text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The model ended its turn.
    Eos,
    /// A limit was reached.
    Length,
}

/// Takes an answer apart while it comes. How it was cut into pieces changes nothing in the whole.
#[derive(Debug)]
pub struct Parser {
    machine: Machine,
    sink: Sink,
    /// Text that is not decided.
    held: String,
    /// Bytes of a character that is not complete.
    bytes: Vec<u8>,
    ended: bool,
}

#[derive(Debug)]
enum Machine {
    Plain,
    Tagged(Tagged),
    Harmony(Harmony),
}

impl Machine {
    /// Decides as much of `text` as it can, and says how many bytes. With `end` all of it is decided in the
    /// end, by one call or several. 0 asks for more text.
    fn step(&mut self, text: &str, end: Option<End>, sink: &mut Sink) -> usize {
        match self {
            Machine::Plain => {
                sink.text(Lane::Content, text);
                text.len()
            }
            Machine::Tagged(m) => m.step(text, end, sink),
            Machine::Harmony(m) => m.step(text, end, sink),
        }
    }
}

impl Parser {
    /// A parser for one answer. `prompt_tail` is what the template wrote last: where it opened reasoning, the
    /// answer begins inside. `stops` end the content.
    pub fn new(format: Format, tools: &[Tool], prompt_tail: &str, stops: &[String]) -> Parser {
        let machine = match format {
            Format::Plain => Machine::Plain,
            Format::Harmony => Machine::Harmony(Harmony::new(tools, prompt_tail)),
            _ => Machine::Tagged(Tagged::new(format, tools, prompt_tail)),
        };
        let sink = Sink::new(stops, format != Format::Plain);
        Parser { machine, sink, held: String::new(), bytes: Vec::new(), ended: false }
    }

    /// Takes the next piece. After a stop string or the end it is dropped.
    pub fn push(&mut self, piece: &str) -> Vec<Delta> {
        if !self.is_over() {
            self.held.push_str(piece);
            self.steps(None);
        }
        self.sink.take()
    }

    /// The same for bytes that may end inside a character.
    pub fn push_bytes(&mut self, piece: &[u8]) -> Vec<Delta> {
        self.bytes.extend_from_slice(piece);
        let mut text = String::new();
        let mut done = 0;
        for chunk in self.bytes.utf8_chunks() {
            text.push_str(chunk.valid());
            done += chunk.valid().len();
            let bad = chunk.invalid();
            if bad.is_empty() || (done + bad.len() == self.bytes.len() && bad.len() < 4) {
                break;
            }
            text.push('\u{fffd}');
            done += bad.len();
        }
        self.bytes.drain(..done);
        self.push(&text)
    }

    /// The end of the text.
    pub fn finish(&mut self, end: End) -> Vec<Delta> {
        if !self.is_over() {
            let rest = std::mem::take(&mut self.bytes);
            self.held.push_str(&String::from_utf8_lossy(&rest));
            self.steps(Some(end));
            self.ended = true;
            self.sink.finish();
        }
        self.sink.take()
    }

    /// The stop string that was reached, as an index into those given.
    pub fn stopped(&self) -> Option<usize> {
        self.sink.stopped()
    }

    /// Whether a call has gone out.
    pub fn has_calls(&self) -> bool {
        self.sink.calls() > 0
    }

    /// Why the answer is over, in the words of the OpenAI API.
    pub fn finish_reason(&self, end: End) -> &'static str {
        match (self.stopped(), end) {
            (Some(_), _) => "stop",
            (None, End::Length) => "length",
            (None, End::Eos) if self.has_calls() => "tool_calls",
            (None, End::Eos) => "stop",
        }
    }

    fn is_over(&self) -> bool {
        self.ended || self.sink.stopped().is_some()
    }

    fn steps(&mut self, end: Option<End>) {
        let mut at = 0;
        while at < self.held.len() && self.sink.stopped().is_none() {
            match self.machine.step(&self.held[at..], end, &mut self.sink) {
                0 => break,
                n => at += n,
            }
        }
        debug_assert!(
            end.is_none() || at == self.held.len() || self.sink.stopped().is_some(),
            "all is decided in the end"
        );
        self.held.drain(..at);
    }
}

/// A whole answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Parsed {
    /// Reasoning, where there is any.
    pub reasoning: Option<String>,
    /// Text for the user, where there is any.
    pub content: Option<String>,
    /// Calls in order.
    pub tool_calls: Vec<Call>,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: &'static str,
}

impl Parsed {
    /// Adds a delta.
    pub fn add(&mut self, delta: Delta) {
        match delta {
            Delta::Reasoning(text) => self.reasoning.get_or_insert_default().push_str(&text),
            Delta::Content(text) => self.content.get_or_insert_default().push_str(&text),
            Delta::Call(call) => self.tool_calls.push(call),
        }
    }

    /// As `{reasoning, content, tool_calls, finish_reason}`, arguments as objects.
    pub fn json(&self) -> Value {
        let calls: Vec<Value> = self.tool_calls.iter().map(Call::json).collect();
        json!({
            "reasoning": self.reasoning,
            "content": self.content,
            "tool_calls": calls,
            "finish_reason": self.finish_reason,
        })
    }
}
