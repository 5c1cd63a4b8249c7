//! gpt-oss: an answer is messages, `<|start|>assistant<|channel|>analysis<|message|>…<|end|>`.
//!
//! Headers come in many orders; what matters in one is the channel, and a recipient wherever it stands. A
//! header that is broken costs nothing but itself, and text without any header is content.

use crate::calls::{Call, Tool, first_marker, json, open_tail};
use crate::parser::End;
use crate::sink::{Lane, Sink};

/// Control tokens of the format.
pub(crate) const MARKERS: [&str; 7] = [
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|constrain|>",
    "<|end|>",
    "<|call|>",
    "<|return|>",
];
const START: usize = 0;
const CHANNEL: usize = 1;
const MESSAGE: usize = 2;
const CONSTRAIN: usize = 3;
const RETURN: usize = 6;

/// A header as far as it is read.
#[derive(Clone, Debug, Default)]
struct Header {
    /// Role, recipient and the like, before the channel.
    role: String,
    /// What follows the channel's marker.
    channel: Option<String>,
}

#[derive(Clone, Debug)]
enum State {
    /// Between messages, or at the beginning.
    Between,
    Header(Header),
    /// Text of a message.
    Text(Lane),
    /// Arguments of a call; the text waits until they are whole.
    Call(String),
    /// Text of a role that is not the assistant's.
    Foreign,
    Over,
}

/// The machine.
#[derive(Debug)]
pub(crate) struct Harmony {
    tools: Vec<Tool>,
    state: State,
}

impl Harmony {
    pub(crate) fn new(tools: &[Tool], prompt_tail: &str) -> Harmony {
        let mut machine = Harmony { tools: tools.to_vec(), state: State::Between };
        // The last message that the prompt opened.
        let mut tail = prompt_tail.rfind(MARKERS[START]).map_or("", |at| &prompt_tail[at..]);
        let mut nowhere = Sink::new(&[], true);
        while !tail.is_empty() {
            match machine.step(tail, None, &mut nowhere) {
                0 => break,
                n => tail = &tail[n..],
            }
        }
        if let State::Header(header) = &mut machine.state {
            header.role.push_str(tail);
        }
        machine
    }

    /// See [`crate::parser::Parser`].
    pub(crate) fn step(&mut self, text: &str, end: Option<End>, sink: &mut Sink) -> usize {
        let marker = first_marker(text, &MARKERS);
        match &self.state {
            State::Over => text.len(),
            State::Between => self.between(text, end, sink, marker),
            State::Header(_) => self.header(text, end, sink, marker),
            State::Foreign => match marker {
                Some((at, index)) => self.enter(at, index, sink),
                None => text.len() - kept(text, end),
            },
            State::Text(lane) => {
                let lane = *lane;
                match marker {
                    Some((at, index)) => {
                        sink.text(lane, &text[..at]);
                        match index {
                            // Means nothing here.
                            MESSAGE | CONSTRAIN => at + MARKERS[index].len(),
                            _ => self.enter(at, index, sink),
                        }
                    }
                    None => {
                        let out = &text[..text.len() - kept(text, end)];
                        sink.text(lane, out);
                        out.len()
                    }
                }
            }
            State::Call(name) => {
                let name = name.clone();
                self.call(name, text, end, sink, marker)
            }
        }
    }

    fn between(
        &mut self,
        text: &str,
        end: Option<End>,
        sink: &mut Sink,
        marker: Option<(usize, usize)>,
    ) -> usize {
        let blanks = text.len() - text.trim_start().len();
        match marker {
            Some((at, index)) if at == blanks => self.enter(at, index, sink),
            _ if blanks > 0 => blanks,
            _ if kept(text, end) == text.len() => 0,
            // No header at all: content.
            _ => {
                self.begin_text(Lane::Content, sink);
                self.step(text, end, sink)
            }
        }
    }

    fn header(
        &mut self,
        text: &str,
        end: Option<End>,
        sink: &mut Sink,
        marker: Option<(usize, usize)>,
    ) -> usize {
        let State::Header(header) = &mut self.state else { unreachable!("asked in a header only") };
        let piece = marker.map_or(text, |(at, _)| &text[..at]);
        if header.channel.is_none() {
            // What stands before a marker is all there is.
            let all = format!("{}{piece}", header.role);
            if is_no_header(&all, end.or(marker.map(|_| End::Eos))) {
                let words = all.trim_start();
                let words = words.strip_prefix("assistant").unwrap_or(words);
                let keep = if marker.is_some() { 0 } else { kept(words, end) };
                self.begin_text(Lane::Content, sink);
                sink.text(Lane::Content, &words[..words.len() - keep]);
                return match marker {
                    Some((at, index)) if at == 0 => self.enter(at, index, sink),
                    _ => piece.len() - keep,
                };
            }
        }
        let Some((at, index)) = marker else {
            return if end.is_some() { text.len() } else { 0 };
        };
        match index {
            CHANNEL => {
                match &mut header.channel {
                    // Two channels in one header: the later counts.
                    Some(channel) => *channel = String::new(),
                    None => {
                        header.role.push_str(piece);
                        header.channel = Some(String::new());
                    }
                }
                at + MARKERS[CHANNEL].len()
            }
            CONSTRAIN => {
                let part = header.channel.as_mut().unwrap_or(&mut header.role);
                part.push_str(piece);
                part.push(' ');
                at + MARKERS[CONSTRAIN].len()
            }
            MESSAGE => {
                header.channel.as_mut().unwrap_or(&mut header.role).push_str(piece);
                let header = std::mem::take(header);
                self.open(&header, sink);
                at + MARKERS[MESSAGE].len()
            }
            // The message ends without a body, and its header with it.
            _ => self.enter(at, index, sink),
        }
    }

    fn call(
        &mut self,
        name: String,
        text: &str,
        end: Option<End>,
        sink: &mut Sink,
        marker: Option<(usize, usize)>,
    ) -> usize {
        let body = match (marker, end) {
            (Some((at, _)), _) => &text[..at],
            (None, Some(_)) => text,
            (None, None) => return 0,
        };
        match json::object(body) {
            // Without an end, only what is an object counts as whole.
            Some(arguments) if marker.is_some() || !body.trim().is_empty() => {
                sink.call(Call { name, arguments });
            }
            _ if marker.is_none() && end == Some(End::Length) => {}
            _ => {
                self.begin_text(Lane::Content, sink);
                sink.text(Lane::Content, body);
            }
        }
        match marker {
            Some((at, index)) => self.enter(at, index, sink),
            None => {
                self.state = State::Over;
                text.len()
            }
        }
    }

    /// Goes on behind marker `index` at `at`, between or in messages. Gives the bytes taken.
    fn enter(&mut self, at: usize, index: usize, sink: &mut Sink) -> usize {
        self.state = match index {
            START => State::Header(Header::default()),
            CHANNEL | CONSTRAIN => {
                State::Header(Header { role: String::new(), channel: Some(String::new()) })
            }
            MESSAGE => {
                sink.separate(Lane::Content);
                State::Text(Lane::Content)
            }
            RETURN => State::Over,
            _ => State::Between,
        };
        at + MARKERS[index].len()
    }

    fn begin_text(&mut self, lane: Lane, sink: &mut Sink) {
        sink.separate(lane);
        self.state = State::Text(lane);
    }

    /// What a message with this header is.
    fn open(&mut self, header: &Header, sink: &mut Sink) {
        let whole = format!("{} {}", header.role, header.channel.as_deref().unwrap_or_default());
        let role = header.role.split_whitespace().next().unwrap_or("assistant");
        let channel = header.channel.as_deref().unwrap_or_default();
        let channel = channel.split_whitespace().next().unwrap_or_default();
        let recipient = whole.split_whitespace().find_map(|word| word.strip_prefix("to="));
        let name = recipient.and_then(|to| match to.strip_prefix("functions.") {
            Some(name) => Some(name).filter(|name| !name.is_empty()),
            None => self.tools.iter().any(|tool| tool.name == to).then_some(to),
        });
        if let Some(name) = name {
            self.state = State::Call(name.to_owned());
        } else if !(role == "assistant" || role.starts_with("to=")) {
            self.state = State::Foreign;
        } else if channel == "analysis" {
            self.begin_text(Lane::Reasoning, sink);
        } else {
            self.begin_text(Lane::Content, sink);
        }
    }
}

/// Bytes at the end that may still become a marker.
fn kept(text: &str, end: Option<End>) -> usize {
    if end.is_some() { 0 } else { open_tail(text, MARKERS) }
}

/// Whether what stands where a role and a recipient should stand is neither.
fn is_no_header(text: &str, end: Option<End>) -> bool {
    let text = text.trim_start();
    let rest = match text.strip_prefix("assistant") {
        Some(rest) => rest.trim_start(),
        None if end.is_none() && "assistant".starts_with(text) => return false,
        None => text,
    };
    let foreign = ["user", "system", "developer", "tool", "functions."];
    if rest.is_empty() || rest.starts_with("to=") || foreign.iter().any(|f| text.starts_with(f)) {
        return false;
    }
    // Whether it may still become one of these, or the marker behind it.
    let may = |word: &&str| word.starts_with(rest) || word.starts_with(text);
    let open = ["to="].iter().chain(&foreign).any(&may) || MARKERS.iter().any(may);
    end.is_some() || !open
}
