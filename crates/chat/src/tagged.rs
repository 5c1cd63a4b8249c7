//! Formats that put tags around reasoning and calls; what is outside is content.
//!
//! A tag of a call inside open reasoning ends the reasoning only if a whole call follows before the reasoning's
//! closer, or if no closer comes at all. So such a tag is held until one of both is there.

use crate::calls::{Attempt, Site, Tool, first_marker, gemma, json, mistral, open_tail, xml};
use crate::format::Format;
use crate::parser::End;
use crate::sink::{BLANKS, Lane, Sink};

/// A reader of calls.
type Reader = fn(Site<'_>) -> Attempt;

/// What a format's tags are.
#[derive(Debug)]
struct Syntax {
    think: Option<[&'static str; 2]>,
    /// Whether a label stands behind the opener, up to a newline.
    labelled: bool,
    calls: &'static [(&'static str, Reader)],
    /// Where the turn ends, if a tokenizer left that in the text.
    ends: &'static [&'static str],
    /// A JSON object that the content begins with may be a call.
    bare_json: bool,
}

fn qwen_json(site: Site<'_>) -> Attempt {
    json::tagged(site, "<tool_call>", "</tool_call>")
}

/// A call after `<|python_tag|>`; several are apart by semicolons.
fn python_tag(site: Site<'_>) -> Attempt {
    json::tagged(site, "<|python_tag|>", ";")
}

/// A JSON object at the beginning; a call only if it names a tool.
fn bare_json(site: Site<'_>) -> Attempt {
    match json::tagged(site, "", ";") {
        Attempt::Done(_, calls) if !site.knows(&calls[0].name) => Attempt::No,
        other => other,
    }
}

const QWEN_ENDS: &[&str] = &["<|im_end|>", "<|endoftext|>"];

fn syntax(format: Format) -> Syntax {
    let qwen = Syntax {
        think: Some(["<think>", "</think>"]),
        labelled: false,
        calls: &[("<tool_call>", qwen_json)],
        ends: QWEN_ENDS,
        bare_json: false,
    };
    match format {
        Format::QwenXml => {
            Syntax { calls: &[("<tool_call>", xml::tagged), ("<function=", xml::bare)], ..qwen }
        }
        Format::Gemma4 => Syntax {
            think: Some(["<|channel>", "<channel|>"]),
            labelled: true,
            calls: &[("<|tool_call>", gemma::tagged)],
            ends: &["<turn|>", "<|tool_response>", "<eos>"],
            bare_json: false,
        },
        Format::Mistral => Syntax {
            think: Some(["[THINK]", "[/THINK]"]),
            calls: &[("[TOOL_CALLS]", mistral::tagged)],
            ends: &["</s>"],
            ..qwen
        },
        Format::Llama3 => Syntax {
            think: None,
            calls: &[("<|python_tag|>", python_tag)],
            ends: &["<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"],
            bare_json: true,
            ..qwen
        },
        _ => qwen,
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Nothing but blanks yet.
    Start,
    /// Behind the opener of reasoning, where a label may stand.
    Label,
    Reasoning,
    Content,
    /// Nothing counts any more.
    Over,
}

/// The machine.
#[derive(Debug)]
pub(crate) struct Tagged {
    syntax: Syntax,
    tools: Vec<Tool>,
    state: State,
    /// A call just ended, so one more closer is no text.
    after_call: bool,
    /// Length of a text that was read in vain: a reader is asked again when what it waits for may be there.
    tried: usize,
}

impl Tagged {
    pub(crate) fn new(format: Format, tools: &[Tool], prompt_tail: &str) -> Tagged {
        let syntax = syntax(format);
        let state = match syntax.think {
            Some([open, close]) => match (prompt_tail.rfind(open), prompt_tail.rfind(close)) {
                (Some(o), Some(c)) if o < c => State::Content,
                (Some(o), _) => match syntax.labelled && !prompt_tail[o..].contains('\n') {
                    true => State::Label,
                    false => State::Reasoning,
                },
                (None, Some(_)) => State::Content,
                (None, None) => State::Start,
            },
            None => State::Start,
        };
        Tagged { syntax, tools: tools.to_vec(), state, after_call: false, tried: 0 }
    }

    /// See [`crate::parser::Parser`].
    pub(crate) fn step(&mut self, text: &str, end: Option<End>, sink: &mut Sink) -> usize {
        match self.state {
            State::Start => self.start(text, end, sink),
            State::Label => self.label(text, end),
            State::Reasoning => self.reasoning(text, end, sink),
            State::Content => self.content(text, end, sink),
            State::Over => text.len(),
        }
    }

    fn start(&mut self, text: &str, end: Option<End>, sink: &mut Sink) -> usize {
        let blanks = text.len() - text.trim_start_matches(BLANKS).len();
        if blanks > 0 {
            return blanks;
        }
        let site = Site { text, end, tools: &self.tools };
        if let Some([open, _]) = self.syntax.think {
            match site.has(0, open) {
                None => return 0,
                Some(true) => {
                    self.state = if self.syntax.labelled { State::Label } else { State::Reasoning };
                    return open.len();
                }
                Some(false) => {}
            }
        }
        if self.syntax.bare_json && !self.tools.is_empty() && text.starts_with('{') {
            if self.waits(text, end) {
                return 0;
            }
            match bare_json(site) {
                Attempt::Incomplete => {
                    self.tried = text.len();
                    return 0;
                }
                // Stays at the start: another one may follow.
                Attempt::Done(n, calls) => {
                    calls.into_iter().for_each(|call| sink.call(call));
                    self.tried = 0;
                    return n;
                }
                Attempt::No if end == Some(End::Length) && is_open_json(text) => return text.len(),
                Attempt::No => {}
            }
        }
        self.tried = 0;
        self.state = State::Content;
        // A state that only changes may not ask for more text.
        self.content(text, end, sink)
    }

    fn label(&mut self, text: &str, end: Option<End>) -> usize {
        let [_, close] = self.syntax.think.expect("only reasoning has a label");
        let closed = text.find(close);
        match (text.find('\n'), closed) {
            (Some(n), c) if c.is_none_or(|c| n < c) => {
                self.state = State::Reasoning;
                n + 1
            }
            (_, Some(c)) => {
                self.state = State::Content;
                c + close.len()
            }
            _ if end.is_some() => text.len(),
            _ => 0,
        }
    }

    fn reasoning(&mut self, text: &str, end: Option<End>, sink: &mut Sink) -> usize {
        let [_, close] = self.syntax.think.expect("only formats with reasoning come here");
        let closed = text.find(close);
        let before = &text[..closed.unwrap_or(text.len())];
        let openers: Vec<&str> = self.syntax.calls.iter().map(|(opener, _)| *opener).collect();
        let over = first_marker(before, self.syntax.ends);
        if let Some((at, index)) = first_marker(before, &openers)
            && over.is_none_or(|(end, _)| at < end)
        {
            if at > 0 {
                sink.text(Lane::Reasoning, &text[..at]);
                return at;
            }
            // Undecided: a call that is whole before the closer, or text of the reasoning.
            if closed.is_none() && self.waits(text, end) {
                return 0;
            }
            let site =
                Site { text: before, end: end.or(closed.map(|_| End::Eos)), tools: &self.tools };
            match (self.syntax.calls[index].1)(site) {
                Attempt::Done(..) => self.state = State::Content,
                Attempt::Incomplete => {
                    self.tried = text.len();
                    return 0;
                }
                Attempt::No if closed.is_none() && end.is_none() => {
                    // No call, and no closer yet: still open whether this is reasoning.
                    self.tried = text.len();
                    return 0;
                }
                Attempt::No if closed.is_none() => self.state = State::Content,
                Attempt::No => {
                    self.tried = 0;
                    sink.text(Lane::Reasoning, openers[index]);
                    return openers[index].len();
                }
            }
            self.tried = 0;
            return self.content(text, end, sink);
        }
        if let Some((at, _)) = over {
            sink.text(Lane::Reasoning, &text[..at]);
            self.state = State::Over;
            return text.len();
        }
        if let Some(at) = closed {
            sink.text(Lane::Reasoning, &text[..at]);
            self.state = State::Content;
            return at + close.len();
        }
        let markers = openers.into_iter().chain([close]).chain(self.syntax.ends.iter().copied());
        let keep = if end.is_some() { 0 } else { open_tail(text, markers) };
        sink.text(Lane::Reasoning, &text[..text.len() - keep]);
        text.len() - keep
    }

    fn content(&mut self, text: &str, end: Option<End>, sink: &mut Sink) -> usize {
        if self.after_call && self.syntax.calls[0].0 == "<tool_call>" {
            let site = Site { text, end, tools: &self.tools };
            match site.skip_closer(0, "</tool_call>") {
                None => return 0,
                Some(n) if n > 0 => {
                    self.after_call = false;
                    return n;
                }
                Some(_) => {}
            }
            if text.trim_start().is_empty() && end.is_none() {
                return 0;
            }
        }
        let openers: Vec<&str> = self.syntax.calls.iter().map(|(opener, _)| *opener).collect();
        let found = first_marker(text, &openers);
        let over = first_marker(text, self.syntax.ends);
        if let Some((at, _)) = over
            && found.is_none_or(|(call, _)| at < call)
        {
            sink.text(Lane::Content, &text[..at]);
            self.state = State::Over;
            return text.len();
        }
        let Some((at, index)) = found else {
            let markers = openers.into_iter().chain(self.syntax.ends.iter().copied());
            let keep = if end.is_some() { 0 } else { open_tail(text, markers) };
            let out = &text[..text.len() - keep];
            self.after_call &= out.trim_start().is_empty();
            sink.text(Lane::Content, out);
            return out.len();
        };
        if at > 0 {
            self.after_call &= text[..at].trim_start().is_empty();
            sink.text(Lane::Content, &text[..at]);
            return at;
        }
        if self.waits(text, end) {
            return 0;
        }
        let site = Site { text, end, tools: &self.tools };
        match (self.syntax.calls[index].1)(site) {
            Attempt::Incomplete => {
                self.tried = text.len();
                0
            }
            Attempt::Done(n, calls) => {
                self.tried = 0;
                self.after_call = true;
                calls.into_iter().for_each(|call| sink.call(call));
                n
            }
            // Cut off: neither a call nor text.
            Attempt::No if end == Some(End::Length) && self.is_cut_off(text, index) => text.len(),
            Attempt::No => {
                self.tried = 0;
                self.after_call = false;
                // A tag that means nothing to people goes; the text behind it stays.
                let opener = openers[index];
                if opener != "<|python_tag|>" {
                    sink.text(Lane::Content, opener);
                }
                opener.len()
            }
        }
    }

    /// Whether a reader that asked for more text need not be asked yet.
    fn waits(&self, text: &str, end: Option<End>) -> bool {
        let new = text.get(self.tried..).unwrap_or(text);
        self.tried > 0 && end.is_none() && !new.contains(['>', '}', ']', '<', '"', '|', ';'])
    }

    /// Whether the call at the beginning of `text` failed because the text ends.
    fn is_cut_off(&self, text: &str, index: usize) -> bool {
        let site = Site { text, end: None, tools: &self.tools };
        (self.syntax.calls[index].1)(site) == Attempt::Incomplete
    }
}

fn is_open_json(text: &str) -> bool {
    json::extent(text) == json::Extent::Open
}
