//! `run` without a prompt: a chat in the terminal.
//!
//! Ctrl-C stops the answer and not the program; at the prompt, Ctrl-D or `/exit` ends it. A line that ends with
//! a backslash goes on in the next, and so does text between lines of `"""`; Ctrl-C drops what was begun so.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::Context;
use forebay_engine::{Contexts, SamplerParams};
use forebay_program::ledger::human;
use forebay_schedule::Pace;
use forebay_schedule::Usage;
use forebay_serve::room::Demand;
use forebay_serve::{Said, Service, TalkOptions};
use serde_json::{Value, json};

use crate::args::RunArgs;
use crate::cmd::serve;
use crate::failure::usage;
use crate::term::{interruption, note};

const HELP: &str = "\
/help            this list
/system TEXT     begin anew with a system message (none: without)
/clear           begin anew, the system message stays
/retry           answer the last message again
/save FILE       write the conversation
/load FILE       read a conversation
/think on|off    let the model reason, where it can
/hide, /show     hide or show its reasoning
/stats           speed of the last answer
/memory          the memory plan, and what experts do
/exit            end (or Ctrl-D)
A line that ends with \\ goes on; so does text between two lines of \"\"\".
Ctrl-C stops an answer, and drops a message of several lines that was begun.";

/// What somebody did at a prompt.
pub enum Line {
    /// Wrote a line, here without its newline.
    Text(String),
    /// Pressed Ctrl-C.
    Interrupted,
    /// Said that there are no more lines.
    End,
}

/// Where lines come from.
pub trait Input {
    /// What comes next.
    fn line(&mut self, prompt: &str) -> anyhow::Result<Line>;
}

/// One answer at a time, and no HTTP.
const ALONE: serve::Load = serve::Load {
    parallel: 1,
    contexts: Contexts::Each,
    needs: None,
    queue: 0,
    room: Demand { max_body: None, connections: 0, constrained: 0 },
    pace: Pace::Flowing,
    steers_all: true,
    quiet: false,
};

pub fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    let (service, _peak) = serve::service(&args.model, &args.sampling, ALONE, None)?;
    let service = Arc::new(service);
    let editor = Editor::new()?;
    let stdout = std::io::stdout();
    let colours = stdout.is_terminal() && std::env::var_os("NO_COLOR").is_none();
    let options = TalkOptions {
        sampling: SamplerParams { seed: args.sampling.seed, ..service.sampling_defaults().clone() },
        max_tokens: args.tokens,
        stops: args.stop.clone(),
        ..TalkOptions::default()
    };
    note!("a chat with {}; /help lists commands", service.info().name);
    let mut chat = Chat {
        service,
        options,
        messages: Vec::new(),
        shows_reasoning: true,
        last: None,
        cancel: interruption(),
        out: stdout,
        colours,
    };
    chat.begin(args.system);
    chat.talk(editor)?;
    Ok(ExitCode::SUCCESS)
}

/// Lines of a terminal, with history.
struct Editor {
    editor: rustyline::DefaultEditor,
    history: Option<PathBuf>,
}

impl Editor {
    fn new() -> anyhow::Result<Editor> {
        let mut editor = rustyline::DefaultEditor::new().context("the terminal")?;
        let state = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from);
        let home = || Some(PathBuf::from(std::env::var_os("HOME")?).join(".local/state"));
        let history = state.or_else(home).map(|dir| dir.join("forebay/history"));
        if let Some(path) = &history {
            // The first time there is none.
            let _ = editor.load_history(path);
        }
        Ok(Editor { editor, history })
    }
}

impl Drop for Editor {
    fn drop(&mut self) {
        if let Some(path) = &self.history {
            if let Some(dir) = path.parent() {
                let _ = std::fs::create_dir_all(dir);
            }
            // A history that cannot be kept is no reason to complain at the end.
            let _ = self.editor.save_history(path);
        }
    }
}

impl Input for Editor {
    fn line(&mut self, prompt: &str) -> anyhow::Result<Line> {
        use rustyline::error::ReadlineError;
        match self.editor.readline(prompt) {
            Ok(line) => {
                if !line.trim().is_empty() {
                    let _ = self.editor.add_history_entry(&line);
                }
                Ok(Line::Text(line))
            }
            Err(ReadlineError::Eof) => Ok(Line::End),
            Err(ReadlineError::Interrupted) => Ok(Line::Interrupted),
            Err(error) => Err(error).context("the terminal"),
        }
    }
}

/// A conversation.
pub struct Chat<W: Write> {
    service: Arc<Service>,
    options: TalkOptions,
    messages: Vec<Value>,
    shows_reasoning: bool,
    last: Option<Usage>,
    cancel: Arc<AtomicBool>,
    out: W,
    colours: bool,
}

impl<W: Write> Chat<W> {
    fn begin(&mut self, system: Option<String>) {
        self.messages = system
            .filter(|text| !text.is_empty())
            .map(|text| json!({ "role": "system", "content": text }))
            .into_iter()
            .collect();
    }

    /// Talks until there are no more lines.
    pub fn talk(&mut self, mut input: impl Input) -> anyhow::Result<()> {
        while let Some(text) = message(&mut input)? {
            let text = text.trim();
            if text.is_empty() {
                continue;
            }
            if let Some(command) = text.strip_prefix('/') {
                match self.command(command) {
                    Ok(true) => {}
                    Ok(false) => return Ok(()),
                    Err(error) => writeln!(self.out, "{error:#}")?,
                }
                continue;
            }
            self.messages.push(json!({ "role": "user", "content": text }));
            self.answer()?;
        }
        Ok(())
    }

    /// False: the end.
    fn command(&mut self, command: &str) -> anyhow::Result<bool> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match name {
            "help" | "?" => writeln!(self.out, "{HELP}")?,
            "exit" | "quit" | "bye" => return Ok(false),
            "system" => self.begin(Some(rest.to_owned())),
            "clear" => {
                let system = self.messages.first().filter(|m| m["role"] == "system");
                let system = system.and_then(|m| m["content"].as_str()).map(str::to_owned);
                self.begin(system);
            }
            "retry" => {
                while self.messages.last().is_some_and(|m| m["role"] == "assistant") {
                    self.messages.pop();
                }
                if self.messages.last().is_none_or(|m| m["role"] != "user") {
                    anyhow::bail!("there is nothing to answer");
                }
                self.options.sampling.seed = self.options.sampling.seed.wrapping_add(1);
                self.answer()?;
            }
            "save" => {
                let path = file(rest)?;
                let text = serde_json::to_string_pretty(&self.messages)?;
                std::fs::write(path, text).with_context(|| rest.to_owned())?;
                writeln!(self.out, "{} messages in {rest}", self.messages.len())?;
            }
            "load" => {
                let text = std::fs::read_to_string(file(rest)?).with_context(|| rest.to_owned())?;
                let messages: Vec<Value> =
                    serde_json::from_str(&text).with_context(|| rest.to_owned())?;
                if messages.iter().any(|m| !m["role"].is_string()) {
                    anyhow::bail!("{rest}: a message has no role");
                }
                self.messages = messages;
                writeln!(self.out, "{} messages", self.messages.len())?;
            }
            "think" => {
                let on = match rest {
                    "on" => true,
                    "off" => false,
                    _ => anyhow::bail!("/think on, or /think off"),
                };
                self.options.kwargs.insert("enable_thinking".into(), on.into());
            }
            "hide" => self.shows_reasoning = false,
            "show" => self.shows_reasoning = true,
            "stats" => self.stats()?,
            "memory" => self.memory()?,
            _ => anyhow::bail!("there is no /{name}; /help lists commands"),
        }
        Ok(true)
    }

    fn answer(&mut self) -> anyhow::Result<()> {
        self.cancel.store(false, Ordering::Relaxed);
        let mut talk = match self.service.talk(&self.messages, &self.options) {
            Ok(talk) => talk,
            Err(error) => {
                writeln!(self.out, "{}", error.message)?;
                self.messages.pop();
                return Ok(());
            }
        };
        let (mut content, mut reasoning) = (String::new(), String::new());
        loop {
            // Also while there is always more to say than was written: a terminal may be slow.
            if self.cancel.swap(false, Ordering::Relaxed) {
                write!(self.out, " (stopped)")?;
                break;
            }
            let said = match talk.heard() {
                Err(()) => break,
                Ok(None) => {
                    std::thread::sleep(Duration::from_millis(5));
                    continue;
                }
                Ok(Some(said)) => said,
            };
            match said {
                Said::Reasoning(text) => {
                    if self.shows_reasoning {
                        let (dim, plain) =
                            if self.colours { ("\x1b[2m", "\x1b[0m") } else { ("", "") };
                        write!(self.out, "{dim}{text}{plain}")?;
                    }
                    reasoning.push_str(&text);
                }
                Said::Content(text) => {
                    if content.is_empty() && !reasoning.is_empty() && self.shows_reasoning {
                        write!(self.out, "\n\n")?;
                    }
                    write!(self.out, "{text}")?;
                    content.push_str(&text);
                }
                Said::Call(call) => write!(self.out, "[{}({})]", call.name, call.arguments)?,
                Said::Done(reason, usage) => {
                    self.last = Some(usage);
                    if reason == "length" {
                        write!(self.out, " (the limit of tokens is reached)")?;
                    }
                }
                Said::Failed(error) => write!(self.out, "\n{}", error.message)?,
            }
            self.out.flush()?;
        }
        writeln!(self.out)?;
        // What was said counts, also where it was stopped.
        let mut message = json!({ "role": "assistant", "content": content });
        if !reasoning.is_empty() {
            message["reasoning_content"] = reasoning.into();
        }
        self.messages.push(message);
        Ok(())
    }

    fn stats(&mut self) -> anyhow::Result<()> {
        let Some(u) = self.last else { anyhow::bail!("there is no answer yet") };
        let prompt = u.prompt - u.cached;
        let per_second = |n: usize, s: f64| if s > 0.0 { n as f64 / s } else { 0.0 };
        writeln!(
            self.out,
            "prompt: {} tokens, {} of them kept from before; first token after {:.2} s ({:.1} tokens/s)",
            u.prompt,
            u.cached,
            u.first_token_s,
            per_second(prompt, u.first_token_s)
        )?;
        let rate = per_second(u.generated.saturating_sub(1), u.decode_s);
        writeln!(self.out, "answer: {} tokens, {rate:.1} tokens/s", u.generated)?;
        Ok(())
    }

    fn memory(&mut self) -> anyhow::Result<()> {
        for (what, bytes) in &self.service.info().ledger {
            writeln!(self.out, "  {what:<32} {:>12}", human(*bytes))?;
        }
        let load = self.service.scheduler().load();
        let store = &load.stats.store;
        let asked = store.hits + store.misses;
        if asked > 0 {
            let rate = 100.0 * store.hits as f64 / asked as f64;
            writeln!(
                self.out,
                "experts: {rate:.1}% found in memory, {} read",
                human(store.bytes_read)
            )?;
        }
        writeln!(self.out, "beginnings kept: {}", load.kept)?;
        Ok(())
    }
}

fn file(name: &str) -> anyhow::Result<&Path> {
    match name {
        "" => Err(usage("name a file")),
        name => Ok(Path::new(name)),
    }
}

/// A message of one line or several. Ctrl-C drops what was begun; the end of lines sends it.
fn message(input: &mut impl Input) -> anyhow::Result<Option<String>> {
    const QUOTES: &str = "\"\"\"";
    'begin: loop {
        let first = match input.line("> ")? {
            Line::Text(line) => line,
            Line::End => return Ok(None),
            Line::Interrupted => {
                note!("(Ctrl-D or /exit ends)");
                continue;
            }
        };
        let quoted = first.trim().strip_prefix(QUOTES).map(str::to_owned);
        let (is_quoted, mut text) = (quoted.is_some(), quoted.unwrap_or(first));
        loop {
            // What there is if it ends here, or what the next line follows.
            let begun = match is_quoted {
                true => match text.trim_end().strip_suffix(QUOTES) {
                    Some(whole) => return Ok(Some(whole.to_owned())),
                    None => text.as_str(),
                },
                false => match text.strip_suffix('\\') {
                    None => return Ok(Some(text)),
                    Some(begun) => begun,
                },
            };
            match input.line("... ")? {
                Line::Text(line) => text = format!("{begun}\n{line}"),
                Line::End => return Ok(Some(begun.to_owned())),
                Line::Interrupted => {
                    note!("(dropped)");
                    continue 'begin;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::collections::VecDeque;

    /// Lines; Ctrl-C is written as `^C`.
    struct Script(VecDeque<&'static str>);

    impl Input for Script {
        fn line(&mut self, _: &str) -> anyhow::Result<Line> {
            Ok(match self.0.pop_front() {
                None => Line::End,
                Some("^C") => Line::Interrupted,
                Some(line) => Line::Text(line.to_owned()),
            })
        }
    }

    fn script(lines: &[&'static str]) -> Script {
        Script(lines.iter().copied().collect())
    }

    #[test]
    fn messages_of_several_lines() {
        let mut input =
            script(&["one", "two\\", "lines", "\"\"\"a", "b", "c\"\"\"", "\"\"\"d\"\"\""]);
        let mut got = Vec::new();
        while let Some(text) = message(&mut input).unwrap() {
            got.push(text);
        }
        assert_eq!(got, ["one", "two\nlines", "a\nb\nc", "d"]);
    }

    /// Ctrl-C leaves a message of several lines, of either kind, and is no end at the prompt.
    #[test]
    fn an_interruption_drops_what_was_begun() {
        let block = ["\"\"\"", "never", "^C", "one", "two \\", "^C", "^C", "\"\"\"a", "b\"\"\""];
        let begun = ["\"\"\"c", "d"];
        let mut input = script(&[block.as_slice(), &begun].concat());
        let mut got = Vec::new();
        while let Some(text) = message(&mut input).unwrap() {
            got.push(text);
        }
        assert_eq!(got, ["one", "a\nb", "c\nd"]);
        assert_eq!(message(&mut script(&["one\\"])).unwrap().unwrap(), "one");
    }

    #[test]
    fn a_conversation_with_commands() {
        let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../../models/tiny-gpt-oss");
        let line = ["forebay", "run", model, "--temp", "0", "--tokens", "12", "--threads", "2"];
        let crate::args::Command::Run(args) = crate::args::Cli::parse_from(line).command else {
            panic!("run is run")
        };
        let dir = tempfile::tempdir().unwrap();
        let saved = dir.path().join("talk.json");
        let save: &'static str = format!("/save {}", saved.display()).leak();
        let load: &'static str = format!("/load {}", saved.display()).leak();
        let (service, _peak) = serve::service(&args.model, &args.sampling, ALONE, None).unwrap();
        let service = Arc::new(service);
        let mut chat = Chat {
            options: TalkOptions { max_tokens: Some(12), ..TalkOptions::default() },
            service,
            messages: Vec::new(),
            shows_reasoning: true,
            last: None,
            cancel: Arc::default(),
            out: Vec::new(),
            colours: false,
        };
        let lines = [
            "/stats",
            "/system Be brief.",
            "Tell me a story.",
            "/nonsense",
            save,
            "And then?",
            "/clear",
            load,
            "/stats",
            "/memory",
            "/retry",
            "/help",
            "/exit",
            "never read",
        ];
        chat.talk(script(&lines)).unwrap();
        let out = String::from_utf8(chat.out).unwrap();
        for word in [
            "no answer yet",
            "there is no /nonsense",
            "3 messages",
            "trunk",
            "tokens/s",
            "/system TEXT",
        ] {
            assert!(out.contains(word), "{word:?} is not in {out}");
        }
        let roles: Vec<&str> = chat.messages.iter().map(|m| m["role"].as_str().unwrap()).collect();
        assert_eq!(roles, ["system", "user", "assistant"]);
        // Greedy: the answer that was given again is the one that was saved.
        let before: Vec<Value> =
            serde_json::from_str(&std::fs::read_to_string(&saved).unwrap()).unwrap();
        assert_eq!(before, chat.messages);
        assert!(!out.contains("never"));
    }
}
