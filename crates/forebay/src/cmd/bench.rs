//! `bench`: prefill and decode, measured, with the bandwidths of the same run beside them.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use forebay_cpu::{Level, Pool, peak};
use forebay_engine::generate::Next;
use forebay_engine::speculate::Script;
use forebay_engine::{
    Control, DrafterChoice, Engine, EngineError, GenerateParams, Sampler, SamplerParams, Stats,
};
use forebay_store::Residency;

use super::trace::{Recording, measured_sampling};
use crate::args::{BenchArgs, Options, SpeculateArg};
use crate::failure::usage;
use crate::measure::{Bandwidths, Report, Sample};
use crate::model::{self, Loaded};
use crate::profile::{self, Limits};
use crate::term::{Bar, interruption, note, say};

/// How long the disk is measured.
const DISK_TIME: Duration = Duration::from_millis(1500);

pub fn run(args: BenchArgs) -> anyhow::Result<ExitCode> {
    if args.prompt_tokens == 0 || args.repeat == 0 {
        return Err(usage("--prompt-tokens and --repeat must be at least 1"));
    }
    if args.scripted.is_some_and(|rate| !(0.0..=1.0).contains(&rate)) {
        return Err(usage("--scripted must be between 0 and 1"));
    }
    let memory = memory_bandwidth(&args.model.options);
    let peaks = if args.profile { peaks(&args.model.options) } else { None };
    let own = args.prompt_ids.as_deref().map(model::read_ids).transpose()?;
    let prompt_tokens = own.as_ref().map_or(args.prompt_tokens, Vec::len);
    let needed = [args.depth, prompt_tokens, args.gen_tokens, 1];
    let needed = needed.into_iter().fold(0, usize::saturating_add);
    let script = args.scripted.map(|right| {
        let with_block = args.model.options.speculate == Some(SpeculateArg::Mtp);
        Arc::new(Script { wrong: 1.0 - right, with_block, ..Script::default() })
    });
    let mut loaded = model::load(&args.model, |o| {
        o.context.get_or_insert(needed);
        if let Some(script) = &script {
            o.speculate.drafter = DrafterChoice::Scripted(script.clone());
        }
    })?;
    let context = loaded.engine.plan.context;
    if needed > context {
        return Err(usage(format!(
            "--depth, --prompt-tokens and --gen-tokens need a context of {needed} tokens, --context is {context}"
        )));
    }
    if args.trace.is_some() {
        can_be_traced(&loaded.engine)?;
    }
    if args.profile {
        loaded.engine.profile()?;
    }
    let cancel = interruption();
    let vocab = loaded.engine.spec.vocab_size as u64;
    let sampling = match own {
        Some(_) => SamplerParams::default(),
        None => measured_sampling(),
    };
    let prompt = own.unwrap_or_else(|| random_ids(args.depth + prompt_tokens, vocab));
    let (depth, prompt) = prompt.split_at(args.depth);
    let mut samples = Vec::new();
    if let Some(script) = &script {
        let (sample, generated) =
            sample(&mut loaded.engine, depth, prompt, &sampling, args.gen_tokens, &cancel)?;
        let rate = sample.step_s.len() as f64 / sample.step_s.iter().sum::<f64>();
        note!("  recorded     {rate:.2} tokens/s without drafts");
        let all = [depth, prompt, &generated].concat();
        script.tokens.set(all).expect("recorded once");
    }
    let bar = Bar::steps("measuring");
    let trace = args.trace.as_deref().map(|path| Recording::begin(&mut loaded.engine, path));
    let mut trace = trace.transpose()?;
    for i in 0..args.repeat {
        samples.push(
            sample(&mut loaded.engine, depth, prompt, &sampling, args.gen_tokens, &cancel)?.0,
        );
        // All repetitions choose the same.
        if let Some(trace) = trace.take() {
            trace.end()?;
        }
        bar.set(i as u64 + 1, args.repeat as u64);
    }
    bar.clear();
    loaded.check_budget();
    let report = Report {
        samples: &samples,
        load_s: loaded.load_s,
        peak_bytes: peak(&loaded),
        bandwidths: with_disk(&loaded.engine, memory),
        engine: &loaded.engine,
    };
    let limits = Limits { memory: report.bandwidths.memory, peaks };
    match args.json {
        true => {
            let mut out = report.json();
            if args.profile {
                out["profile"] = profile::json(&samples, limits);
            }
            say!("{out}")?;
        }
        false => {
            note!("{}", loaded.engine.plan.summary());
            report.print();
            if args.profile {
                profile::print(&samples, limits);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn sample(
    engine: &mut Engine,
    depth: &[u32],
    prompt: &[u32],
    sampling: &SamplerParams,
    gen_tokens: usize,
    cancel: &std::sync::atomic::AtomicBool,
) -> anyhow::Result<(Sample, Vec<u32>)> {
    let mut sequence = engine.new_sequence();
    let mut control = Control { cancel, progress: &mut |_, _| {} };
    if !depth.is_empty() {
        engine.prefill(&mut sequence, depth, &mut control)?;
    }
    let before = engine.stats();
    let mut after_prompt: Option<Stats> = None;
    // The first token comes from the prompt's logits: one more gives `gen_tokens` decode steps.
    let params = GenerateParams { max_tokens: gen_tokens + 1, ignore_eos: true, eos_ids: vec![] };
    let mut sampler = Sampler::new(sampling.clone());
    let generated = engine.generate(
        &mut sequence,
        prompt,
        &params,
        &mut sampler,
        &mut control,
        &mut |engine, _| {
            after_prompt.get_or_insert_with(|| engine.stats());
            Next::Continue
        },
    )?;
    if generated.finish == forebay_engine::Finish::Cancelled {
        return Err(forebay_engine::EngineError::Cancelled.into());
    }
    engine.release(&mut sequence);
    let after = engine.stats();
    let middle = after_prompt.unwrap_or_else(|| after.clone());
    let sample = Sample::new(prompt.len(), &generated, [&before, &middle, &after]);
    Ok((sample, generated.tokens))
}

/// Refuses a trace that would hold nothing.
fn can_be_traced(engine: &Engine) -> anyhow::Result<()> {
    let instead = match (engine.program.moes.is_empty(), &engine.plan.device) {
        (true, _) => "this model has no routed experts; leave it out",
        (_, Some(_)) => "on a GPU choices of experts are not read back; give --backend cpu",
        _ => return Ok(()),
    };
    Err(EngineError::Refused { what: "bench --trace".into(), instead: instead.into() }.into())
}

/// Ids without meaning, the same in every run.
fn random_ids(n: usize, vocab: u64) -> Vec<u32> {
    let id = |i| (forebay_engine::sampler::uniform(1, i as u64, 0) * vocab as f64) as u32;
    (0..n).map(id).collect()
}

/// Memory bandwidth of the compute threads, measured before weights are loaded; none when the buffer
/// would not fit the budget.
pub fn memory_bandwidth(options: &Options) -> Option<f64> {
    let threads = options.engine().ok()?.threads();
    let budget = forebay_engine::engine::budget_bytes(options.memory.0).ok()?;
    let bytes = (budget / 8).min(256 << 20);
    (bytes >= 32 << 20)
        .then(|| forebay_cpu::bandwidth::measure(&Pool::new(threads), bytes as usize))
}

/// What the compute threads' arithmetic can do.
fn peaks(options: &Options) -> Option<peak::Peaks> {
    let engine = options.engine().ok()?;
    peak::measure(&Pool::new(engine.threads()), engine.level.unwrap_or_else(Level::best))
}

/// Adds the disk's bandwidth at the size and depth at which experts are read, when they are streamed.
pub fn with_disk(engine: &Engine, memory: Option<f64>) -> Bandwidths {
    let streams = matches!(engine.plan.residency, Some(Residency::Stream { .. }));
    let disk = streams.then(|| {
        let (block, depth) = engine.read_shape();
        let measured =
            forebay_store::bandwidth::measure(engine.files(), 0, block, depth, DISK_TIME);
        measured.ok().map(|b| b.bytes_per_second())
    });
    let memory = match engine.plan.device {
        Some(_) => engine.device_bandwidth(),
        None => memory,
    };
    Bandwidths { disk: disk.flatten(), memory }
}

/// Most own memory so far.
pub fn peak(loaded: &Loaded) -> u64 {
    loaded.peak.as_ref().map_or(0, |p| p.peak_bytes())
}
