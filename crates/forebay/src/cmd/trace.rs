//! `trace`: records which experts a model chooses; `trace replay` runs a recording through the cache.
//!
//! A trace is text: a line of JSON after `#` that says what it is of, then a line per pass and routed
//! layer: `layer rows expert expert ...`, the experts row by row in rank order.

use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex};

use anyhow::Context;
use forebay_engine::generate::Next;
use forebay_engine::predict::Routed;
use forebay_engine::tap::{Histogram, RoutingTap, TraceWriter};
use forebay_engine::{Control, Engine, GenerateParams, Sampler, SamplerParams, SpeculateOptions};
use forebay_program::{Program, Routing};
use forebay_store::{Policy, replay};
use forebay_text::Specials;
use serde_json::{Value, json};

use crate::args::{ModelArgs, ReplayArgs, TraceArgs, TraceCommand};
use crate::failure::usage;
use crate::model;
use crate::term::{interruption, note, say};

pub fn run(args: TraceArgs) -> anyhow::Result<ExitCode> {
    match args.command {
        Some(TraceCommand::Replay(args)) => replay_trace(args),
        None => record(args),
    }
}

/// Shares a tap with the engine.
struct Shared<T>(Arc<Mutex<T>>);

impl<T: RoutingTap> RoutingTap for Shared<T> {
    fn routed(&mut self, moe: usize, top_k: usize, routing: &Routing) {
        self.0.lock().expect("taps do not panic").routed(moe, top_k, routing);
    }
}

/// A trace that is being written.
pub struct Recording {
    path: PathBuf,
    writer: Arc<Mutex<TraceWriter<BufWriter<File>>>>,
}

impl Recording {
    /// Writes down what the engine chooses from now on.
    pub fn begin(engine: &mut Engine, path: &Path) -> anyhow::Result<Recording> {
        let file = File::create(path).with_context(|| format!("creating {}", path.display()))?;
        let mut out = BufWriter::new(file);
        writeln!(out, "# {}", header(&engine.program))?;
        let writer = Arc::new(Mutex::new(TraceWriter::new(out)));
        engine.tap(Box::new(Shared(writer.clone())));
        Ok(Recording { path: path.to_path_buf(), writer })
    }

    /// Fails if the file is not whole. Nothing is written after that.
    pub fn end(self) -> anyhow::Result<()> {
        let mut writer = self.writer.lock().expect("taps do not panic");
        writer.finish().with_context(|| format!("writing {}", self.path.display()))
    }
}

/// How measurements draw tokens: from all of them, since the most likely one again and again would choose the same
/// experts.
pub fn measured_sampling() -> SamplerParams {
    SamplerParams { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, ..Default::default() }
}

/// Distinct experts of a layer within so many tokens.
const WORKING_SETS: [usize; 6] = [1, 4, 16, 64, 256, 1024];

/// Keeps the choices of single rows.
#[derive(Default)]
struct Choices(Vec<Vec<Vec<u16>>>);

impl RoutingTap for Choices {
    fn routed(&mut self, moe: usize, top_k: usize, routing: &Routing) {
        if self.0.len() <= moe {
            self.0.resize(moe + 1, Vec::new());
        }
        self.0[moe].extend(routing.ids.chunks(top_k.max(1)).map(<[u16]>::to_vec));
    }
}

impl Choices {
    /// Mean distinct experts of a layer in windows of so many tokens; none for too short a recording.
    fn working_set(&self, tokens: usize) -> Option<f64> {
        let windows = self.0.iter().flat_map(|layer| layer.chunks_exact(tokens));
        let sizes: Vec<usize> = windows
            .map(|window| {
                let mut ids = window.concat();
                ids.sort_unstable();
                ids.dedup();
                ids.len()
            })
            .collect();
        let n = sizes.len();
        (n > 0).then(|| sizes.iter().sum::<usize>() as f64 / n as f64)
    }
}

fn record(args: TraceArgs) -> anyhow::Result<ExitCode> {
    let model = args.model.clone().expect("clap asks for it");
    let model = ModelArgs { model, yes: args.yes, options: args.options.clone() };
    let mut loaded = model::load(&model, |o| {
        // On a GPU nothing is read back; rows of drafts that are taken back would be counted.
        o.backend = forebay_engine::BackendChoice::Cpu;
        o.speculate = SpeculateOptions::default();
    })?;
    let program = loaded.engine.program.clone();
    if program.moes.is_empty() {
        return Err(forebay_engine::EngineError::Refused {
            what: "a trace of this model".into(),
            instead: "it has no routed experts".into(),
        }
        .into());
    }
    let prompt = match (&args.prompt, &args.prompt_ids) {
        (Some(text), _) => loaded.tokenizer.encode_prompt(text, Specials::Ignore)?,
        (None, Some(path)) => model::read_ids(path)?,
        (None, None) => return Err(usage("give --prompt or --prompt-ids")),
    };
    let writer = args.out.as_deref().map(|path| Recording::begin(&mut loaded.engine, path));
    let writer = writer.transpose()?;
    let histogram = Histogram::new(program.moes.iter().map(|m| m.n_experts));
    let histogram = Arc::new(Mutex::new(histogram));
    let choices = Arc::new(Mutex::new(Choices::default()));
    loaded.engine.tap(Box::new(Shared(histogram.clone())));
    loaded.engine.tap(Box::new(Shared(choices.clone())));
    let cancel = interruption();
    let mut sequence = loaded.engine.new_sequence();
    let params = GenerateParams { max_tokens: args.tokens, ignore_eos: true, eos_ids: Vec::new() };
    let mut sampler = Sampler::new(SamplerParams { seed: args.seed, ..measured_sampling() });
    let mut control = Control { cancel: &cancel, progress: &mut |_, _| {} };
    let generated = loaded.engine.generate(
        &mut sequence,
        &prompt,
        &params,
        &mut sampler,
        &mut control,
        &mut |_, _| Next::Continue,
    )?;
    if let Some(writer) = writer {
        writer.end()?;
    }
    let histogram = histogram.lock().expect("taps do not panic");
    let choices = choices.lock().expect("taps do not panic");
    if let Some(path) = &args.histogram {
        std::fs::write(path, picture(&histogram))
            .with_context(|| format!("writing {}", path.display()))?;
    }
    let sets: Vec<(usize, f64)> =
        WORKING_SETS.iter().filter_map(|&n| Some((n, choices.working_set(n)?))).collect();
    let layers: Vec<Value> = program
        .moes
        .iter()
        .enumerate()
        .map(|(i, moe)| {
            let entropy = histogram.entropy(i);
            json!({
                "layer": moe.layer,
                "entropy_bits": entropy,
                "uniform_bits": (moe.n_experts as f64).log2(),
                "share_of_top_quarter": histogram.share_of_top(i, moe.n_experts.div_ceil(4)),
                "counts": histogram.counts[i],
            })
        })
        .collect();
    if args.json {
        let sets: Vec<Value> =
            sets.iter().map(|(n, size)| json!({ "tokens": n, "experts": size })).collect();
        say!(
            "{}",
            json!({
                "prompt_tokens": prompt.len(),
                "generated_tokens": generated.tokens.len(),
                "layers": layers,
                "working_set_per_layer": sets,
                "pilot": pilot(&loaded.engine),
            })
        )?;
        return Ok(ExitCode::SUCCESS);
    }
    say!("{} tokens of prompt, {} generated", prompt.len(), generated.tokens.len())?;
    for layer in &layers {
        say!(
            "  layer {:>3}: entropy {:.2} of {:.2} bits, the top quarter gets {:.0}%",
            layer["layer"],
            layer["entropy_bits"].as_f64().unwrap_or(0.0),
            layer["uniform_bits"].as_f64().unwrap_or(0.0),
            layer["share_of_top_quarter"].as_f64().unwrap_or(0.0) * 100.0,
        )?;
    }
    for (tokens, size) in &sets {
        say!("  {tokens:>5} tokens use {size:.1} experts of a layer")?;
    }
    for path in [&args.out, &args.histogram].into_iter().flatten() {
        note!("written: {}", path.display());
    }
    Ok(ExitCode::SUCCESS)
}

/// How well the next layer's experts were guessed, per layer that was guessed for.
pub fn pilot(engine: &forebay_engine::Engine) -> Value {
    let (counts, verdict) = engine.pilot();
    let ratio = |a: u64, b: u64| (b > 0).then(|| a as f64 / b as f64);
    let sum = |f: fn(&forebay_engine::PilotCounts) -> u64| counts.iter().map(f).sum::<u64>();
    let (guessed, right, chosen) = (sum(|c| c.guessed), sum(|c| c.right), sum(|c| c.chosen));
    let layers: Vec<Value> = counts
        .iter()
        .map(|c| {
            json!({ "precision": ratio(c.right, c.guessed), "recall": ratio(c.right, c.chosen) })
        })
        .collect();
    json!({
        "verdict": verdict,
        "precision": ratio(right, guessed),
        "recall": ratio(right, chosen),
        "layers": if guessed > 0 { json!(layers) } else { json!([]) },
    })
}

fn header(program: &Program) -> Value {
    let experts: Vec<usize> = program.moes.iter().map(|m| m.n_experts).collect();
    let top_k: Vec<usize> = program.moes.iter().map(|m| m.top_k).collect();
    json!({ "forebay_trace": 1, "experts": experts, "top_k": top_k })
}

/// Layers from top to bottom, experts from left to right; the darker, the more often chosen.
fn picture(h: &Histogram) -> String {
    let (cell, left, top) = (8, 40, 20);
    let columns = h.counts.iter().map(Vec::len).max().unwrap_or(0);
    let (width, height) = (left + columns * cell + 10, top + h.counts.len() * cell + 10);
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" \
         font-family=\"sans-serif\" font-size=\"7\">\n<rect width=\"100%\" height=\"100%\" \
         fill=\"#fff\"/>\n<text x=\"{left}\" y=\"12\">experts (share of a layer's choices; \
         black: four times the average or more)</text>\n"
    );
    for (layer, counts) in h.counts.iter().enumerate() {
        let total: u64 = counts.iter().sum();
        let y = top + layer * cell;
        svg += &format!("<text x=\"4\" y=\"{}\">layer {layer}</text>\n", y + cell - 2);
        for (expert, &count) in counts.iter().enumerate() {
            let even = total as f64 / counts.len() as f64;
            let dark = if total == 0 { 0.0 } else { (count as f64 / even / 4.0).min(1.0) };
            let grey = 245 - (dark * 235.0) as u32;
            let x = left + expert * cell;
            svg += &format!(
                "<rect x=\"{x}\" y=\"{y}\" width=\"{w}\" height=\"{w}\" \
                 fill=\"rgb({grey},{grey},{grey})\"><title>layer {layer}, expert {expert}: \
                 {count}</title></rect>\n",
                w = cell - 1,
            );
        }
    }
    svg + "</svg>\n"
}

/// A recording.
pub struct Trace {
    experts: Vec<usize>,
    /// In the order of the run.
    pub passes: Vec<Routed>,
}

impl Trace {
    /// Reads one.
    pub fn read(path: &Path) -> anyhow::Result<Trace> {
        let shown = path.display();
        let file = File::open(path).map_err(|e| usage(format!("{shown}: {e}")))?;
        let mut lines = BufReader::new(file).lines();
        let first = lines.next().transpose()?.unwrap_or_default();
        let header: Option<Value> =
            first.strip_prefix("# ").and_then(|text| serde_json::from_str(text).ok());
        let header = header.filter(|h| h["forebay_trace"] == 1);
        let header = header.ok_or_else(|| usage(format!("{shown} is no trace of forebay")))?;
        let experts: Vec<usize> = serde_json::from_value(header["experts"].clone())
            .map_err(|e| usage(format!("{shown}: experts: {e}")))?;
        let mut passes = Vec::new();
        for (i, line) in lines.enumerate() {
            let line = line?;
            let bad = || usage(format!("{shown}: line {} is no pass", i + 2));
            let mut numbers = line.split(' ').map(|n| n.parse::<usize>().ok());
            let (Some(Some(layer)), Some(Some(rows))) = (numbers.next(), numbers.next()) else {
                return Err(bad());
            };
            let n = *experts.get(layer).ok_or_else(bad)?;
            let ids: Option<Vec<u16>> =
                numbers.map(|id| id.filter(|&id| id < n).map(|id| id as u16)).collect();
            let mut ids = ids.ok_or_else(bad)?;
            ids.sort_unstable();
            ids.dedup();
            passes.push(Routed { layer, rows, experts: ids });
        }
        Ok(Trace { experts, passes })
    }

    /// Fails if the trace is of another model.
    pub fn check(&self, program: &Program) -> anyhow::Result<()> {
        let experts: Vec<usize> = program.moes.iter().map(|m| m.n_experts).collect();
        match experts == self.experts {
            true => Ok(()),
            false => Err(usage("the trace is of a model with other layers or experts")),
        }
    }
}

fn replay_trace(args: ReplayArgs) -> anyhow::Result<ExitCode> {
    let trace = Trace::read(&args.file)?;
    let most = trace.experts.iter().copied().max().unwrap_or(0);
    let slots = match args.slots.is_empty() {
        true => (0..).map(|i| 1 << i).take_while(|&n| n < most).chain([most]).collect(),
        false => args.slots,
    };
    let policies = if args.policy.is_empty() { Policy::ALL.to_vec() } else { args.policy };
    let mut out = Vec::new();
    for &per_layer in &slots {
        for &policy in &policies {
            let passes = trace.passes.iter().map(|p| (p.layer, &p.experts));
            let pool = per_layer.saturating_mul(trace.experts.len());
            let layers = replay(&trace.experts, passes, policy, pool)?;
            let hits: u64 = layers.iter().map(|l| l.hits).sum();
            let all: u64 = layers.iter().map(|l| l.hits + l.misses).sum();
            out.push((per_layer, policy, hits as f64 / all.max(1) as f64));
        }
    }
    if args.json {
        let rows: Vec<Value> = out
            .iter()
            .map(|(slots, policy, rate)| {
                json!({ "slots_per_layer": slots, "policy": policy.name(), "hit_rate": rate })
            })
            .collect();
        say!("{}", json!({ "passes": trace.passes.len(), "results": rows }))?;
        return Ok(ExitCode::SUCCESS);
    }
    let names: String = policies.iter().map(|p| format!(" {:>11}", p.name())).collect();
    say!("  slots/layer{names}")?;
    for rows in out.chunks(policies.len()) {
        let rates: String = rows.iter().map(|(_, _, r)| format!(" {:>10.1}%", r * 100.0)).collect();
        say!("  {:>11}{rates}", rows[0].0)?;
    }
    Ok(ExitCode::SUCCESS)
}
