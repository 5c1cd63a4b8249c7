//! `run`: answer one prompt, streaming. Without a prompt: [`crate::cmd::chat`].

use std::io::{IsTerminal, Read, Write};
use std::process::ExitCode;

use forebay_engine::generate::Next;
use forebay_engine::{Control, Finish, GenerateParams, Sampler, Stats};
use forebay_program::ledger::human;
use forebay_text::{ChatRequest, Markers, Specials, StopMatcher, StreamDecoder, render_prompt};
use serde_json::json;

use crate::args::RunArgs;
use crate::cmd::bench;
use crate::failure::usage;
use crate::measure::{Bandwidths, Report, Sample};
use crate::model::{self, Loaded};
use crate::term::{Bar, interruption, note, say};

/// Most of standard input that is read.
const MAX_STDIN_BYTES: u64 = 16 << 20;

/// Shorter texts are encoded without a look at whether they can fit.
const LONG_TEXT_BYTES: usize = 32 << 10;

pub fn run(args: RunArgs) -> anyhow::Result<ExitCode> {
    args.sampling.params(None)?;
    if args.is_chat() {
        return crate::cmd::chat::run(args);
    }
    let text = prompt_text(&args)?;
    let wants_report = args.stats || args.json;
    let bandwidth = wants_report.then(|| bench::memory_bandwidth(&args.model.options));
    let mut loaded = model::load(&args.model, |o| {
        o.capture = args.capture.iter().map(|arg| arg.0.clone()).collect();
    })?;
    if let Some(out) = &args.capture_out {
        loaded.engine.capture(out, args.capture_rows.into())?;
    }
    let prompt = match (&args.prompt_ids, text) {
        (Some(path), _) => model::read_ids(path)?,
        (None, Some(text)) => encode(&loaded, &args, &text)?,
        (None, None) => unreachable!("prompt_text asks for one of both"),
    };
    let sampling = args.sampling.params(loaded.recommended.as_ref())?;
    let cancel = interruption();
    let mut eos_ids = loaded.engine.spec.eos_ids.clone();
    eos_ids.extend(loaded.tokenizer.eos_ids());
    let params = GenerateParams {
        max_tokens: args.tokens.unwrap_or(usize::MAX),
        ignore_eos: args.ignore_eos,
        eos_ids,
    };
    let mut out = Output::new(&loaded, &args);
    loaded.warm.recall(&mut loaded.engine);
    let before = loaded.engine.stats();
    let mut after_prompt: Option<Stats> = None;
    let mut write_error = None;
    let mut sequence = loaded.engine.new_sequence();
    let bar = Bar::steps("reading the prompt");
    let generated = loaded.engine.generate(
        &mut sequence,
        &prompt,
        &params,
        &mut Sampler::new(sampling),
        &mut Control {
            cancel: &cancel,
            progress: &mut |done, total| bar.set(done as u64, total as u64),
        },
        &mut |engine, event| {
            if after_prompt.is_none() {
                bar.clear();
                after_prompt = Some(engine.stats());
            }
            match out.token(event) {
                Ok(next) => next,
                Err(e) => {
                    write_error = Some(e);
                    Next::Stop
                }
            }
        },
    );
    bar.clear();
    let generated = generated?;
    if let Some(e) = write_error {
        return Err(e.into());
    }
    if let (Some(captured), Some(out)) = (loaded.engine.finish_capture()?, &args.capture_out) {
        let (rows, bytes, out) = (captured.rows, human(captured.bytes), out.display());
        note!("note: captured {rows} rows, {bytes} in {out}");
    }
    loaded.warm.remember(&loaded.engine);
    loaded.check_budget();
    let after = loaded.engine.stats();
    let middle = after_prompt.unwrap_or_else(|| after.clone());
    let sample = Sample::new(prompt.len(), &generated, [&before, &middle, &after]);
    out.finish(generated.finish)?;
    if let Some(memory) = bandwidth {
        // Who interrupts does not wait for a measurement of the disk.
        let bandwidths = match generated.finish {
            Finish::Cancelled => Bandwidths { disk: None, memory },
            _ => bench::with_disk(&loaded.engine, memory),
        };
        let report = Report {
            engine: &loaded.engine,
            samples: &[sample],
            load_s: loaded.load_s,
            peak_bytes: bench::peak(&loaded),
            bandwidths,
        };
        match args.json {
            true => say!(
                "{}",
                json!({
                    "done": generated.finish.name(),
                    "text": out.whole,
                    "prompt_tokens": prompt.len(),
                    "generated_tokens": generated.tokens.len(),
                    "stats": report.json(),
                })
            )?,
            false => {
                note!("\n{}", loaded.engine.plan.summary());
                report.print();
            }
        }
    }
    Ok(match generated.finish {
        Finish::Cancelled => ExitCode::from(130),
        _ => ExitCode::SUCCESS,
    })
}

/// The prompt's text; none when ids are given instead.
fn prompt_text(args: &RunArgs) -> anyhow::Result<Option<String>> {
    if args.prompt_ids.is_some() {
        return Ok(None);
    }
    let from_stdin = match args.prompt.as_deref() {
        Some("-") => true,
        Some("") => return Err(usage("the prompt is empty")),
        Some(text) => return Ok(Some(text.to_string())),
        None => !std::io::stdin().is_terminal(),
    };
    if !from_stdin {
        return Err(usage("give a prompt, - to read standard input, or --prompt-ids FILE"));
    }
    let mut text = String::new();
    std::io::stdin()
        .take(MAX_STDIN_BYTES + 1)
        .read_to_string(&mut text)
        .map_err(|e| usage(format!("standard input: {e}")))?;
    if text.len() as u64 > MAX_STDIN_BYTES {
        let mib = MAX_STDIN_BYTES >> 20;
        return Err(usage(format!(
            "standard input holds more than {mib} MiB: no context is so long"
        )));
    }
    match text.trim().is_empty() {
        true => Err(usage("the prompt is empty")),
        false => Ok(Some(text.trim_end_matches('\n').to_string())),
    }
}

/// Refuses a text that cannot fit the context before it is encoded: encoding takes many times a text's
/// size in memory, and the budget has room for what fits only.
fn check_length(loaded: &Loaded, text: &str) -> anyhow::Result<()> {
    if text.len() < LONG_TEXT_BYTES {
        return Ok(());
    }
    let tokenizer = &loaded.tokenizer;
    let ids = 0..tokenizer.vocab_size() as u32;
    let longest = ids.map(|id| tokenizer.token_bytes(id).len()).max().unwrap_or(1).max(1);
    let at_least = text.len() / longest;
    let context = loaded.engine.plan.context;
    match at_least >= context {
        true => Err(usage(format!(
            "the prompt has {} bytes, at least {at_least} tokens, and the context holds {context}: \
             shorten it, or raise --context",
            text.len()
        ))),
        false => Ok(()),
    }
}

fn encode(loaded: &Loaded, args: &RunArgs, text: &str) -> anyhow::Result<Vec<u32>> {
    check_length(loaded, text)?;
    let template = match (&loaded.template, args.raw) {
        (Some(t), false) => t,
        (None, false) if args.system.is_some() => {
            return Err(usage("the model has no chat template, so --system has no place"));
        }
        _ => {
            if loaded.template.is_none() && !args.raw {
                note!("note: the model has no chat template; the prompt is taken as it is");
            }
            return Ok(loaded.tokenizer.encode_prompt(text, Specials::Ignore)?);
        }
    };
    let mut messages = Vec::new();
    if let Some(system) = &args.system {
        messages.push(json!({ "role": "system", "content": system }));
    }
    messages.push(json!({ "role": "user", "content": text }));
    let request = ChatRequest { messages, add_generation_prompt: true, ..Default::default() };
    Ok(render_prompt(template, &loaded.tokenizer, &request)?.ids)
}

/// Writes tokens as they come.
struct Output {
    decoder: StreamDecoder,
    stops: StopMatcher,
    json: bool,
    ignore_eos: bool,
    whole: String,
}

impl Output {
    fn new(loaded: &Loaded, args: &RunArgs) -> Output {
        Output {
            decoder: StreamDecoder::new(loaded.tokenizer.clone(), Markers::Skip),
            stops: StopMatcher::new(args.stop.iter().cloned()),
            json: args.json,
            ignore_eos: args.ignore_eos,
            whole: String::new(),
        }
    }

    fn token(&mut self, event: forebay_engine::TokenEvent) -> std::io::Result<Next> {
        let content = !event.is_eos || self.ignore_eos;
        let mut piece =
            if content { self.decoder.push(event.token).to_string() } else { String::new() };
        if event.is_last {
            piece.push_str(&self.decoder.finish());
        }
        let stopped = self.stops.push(&piece);
        let mut text = stopped.text;
        if event.is_last && stopped.stop.is_none() {
            text.push_str(&self.stops.finish());
        }
        self.whole.push_str(&text);
        self.write(&text, Some(event))?;
        Ok(if stopped.stop.is_some() { Next::Stop } else { Next::Continue })
    }

    fn write(&self, text: &str, event: Option<forebay_engine::TokenEvent>) -> std::io::Result<()> {
        let mut stdout = std::io::stdout().lock();
        match (self.json, event) {
            (true, Some(e)) => writeln!(
                stdout,
                "{}",
                json!({ "token": e.token, "text": text, "logprob": e.logprob })
            )?,
            (true, None) => {}
            (false, _) => stdout.write_all(text.as_bytes())?,
        }
        stdout.flush()
    }

    /// Ends the output. Only an interruption leaves text that was held back for more to come.
    fn finish(&mut self, finish: Finish) -> std::io::Result<()> {
        if finish == Finish::Cancelled {
            let rest = self.decoder.finish();
            let mut text = self.stops.push(&rest).text;
            text.push_str(&self.stops.finish());
            self.whole.push_str(&text);
            self.write(&text, None)?;
        }
        if !self.json {
            say!("")?;
        }
        Ok(())
    }
}
