//! `eval same`: one prompt over residencies, slots, chunks, threads and vector widths; all logits of all
//! positions must agree in every bit.

use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use forebay_cpu::Level;
use forebay_engine::engine::Opened;
use forebay_engine::sampler::argmax;
use forebay_engine::{Batch, Control, Engine, EngineOptions, ResidencyChoice};
use forebay_text::Specials;
use serde_json::json;

use crate::args::{Options, SameArgs};
use crate::failure::usage;
use crate::model;
use crate::term::{Bar, interruption, say};

/// One way to run.
#[derive(Clone, Debug, PartialEq)]
struct Combination {
    residency: ResidencyChoice,
    slots: Option<usize>,
    chunk: usize,
    threads: usize,
    level: Level,
}

impl Combination {
    fn json(&self) -> serde_json::Value {
        json!({
            "residency": format!("{:?}", self.residency).to_lowercase(),
            "slots": self.slots,
            "chunk": self.chunk,
            "threads": self.threads,
            "simd": self.level.to_string(),
        })
    }
}

pub fn run(args: SameArgs) -> anyhow::Result<ExitCode> {
    let (opened, tokenizer, _) = model::open(&args.model, |_| {})?;
    let prompt = match (&args.prompt, &args.prompt_ids) {
        (Some(text), _) => tokenizer.encode_prompt(text, Specials::Ignore)?,
        (None, Some(path)) => model::read_ids(path)?,
        (None, None) => unreachable!("clap asks for one"),
    };
    if prompt.is_empty() {
        return Err(usage("the prompt is empty"));
    }
    let combinations = combinations(&opened, &args.model.options);
    drop(opened);
    let cancel = interruption();
    let mut reference = None;
    let mut different = Vec::new();
    let bar = Bar::steps("comparing");
    for (i, c) in combinations.iter().enumerate() {
        let hash = hash_of(&args, c, &prompt, &cancel)?;
        match &reference {
            None => reference = Some(hash),
            Some(r) if *r != hash => different.push(c.json()),
            Some(_) => {}
        }
        bar.set(i as u64 + 1, combinations.len() as u64);
    }
    bar.clear();
    let ok = different.is_empty();
    let hash = reference.map(|h| h.to_hex().to_string());
    if args.json {
        let out = json!({
            "ok": ok,
            "combinations": combinations.len(),
            "different": different,
            "hash": hash,
        });
        say!("{out}")?;
    } else {
        say!(
            "{}: {} combinations, {} different, logits {}",
            if ok { "ok" } else { "FAILED" },
            combinations.len(),
            different.len(),
            hash.unwrap_or_default()
        )?;
        for d in &different {
            say!("  differs: {d}")?;
        }
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// All combinations; an option that was given is not varied.
fn combinations(opened: &Opened, given: &Options) -> Vec<Combination> {
    let layers = opened.store.layers.len();
    let all = opened.store.n_experts_total();
    let mut places = vec![(ResidencyChoice::Auto, None)];
    if layers > 0 {
        let mut slots = vec![1, layers.max(2), all / 2, all];
        slots.retain(|s| *s >= 1);
        slots.dedup();
        places = slots.into_iter().map(|s| (ResidencyChoice::Stream, Some(s))).collect();
        places.push((ResidencyChoice::Mapped, None));
        places.push((ResidencyChoice::Resident, None));
        places.retain(|p| match opened.options.residency {
            ResidencyChoice::Auto => true,
            one => p.0 == one,
        });
    }
    let levels = match given.simd {
        Some(level) => vec![level],
        None => Level::available().into_iter().rev().collect(),
    };
    let threads = given.threads.map_or(vec![1, 2, 3], |n| vec![n]);
    let chunks = given.chunk.map_or(vec![64, 16, 3, 1], |n| vec![n]);
    let mut out = Vec::new();
    for level in levels {
        for &threads in &threads {
            for &chunk in &chunks {
                for &(residency, slots) in &places {
                    out.push(Combination { residency, slots, chunk, threads, level });
                }
            }
        }
    }
    out
}

/// Hash over the bits of all logits: of every position of the prompt, then of greedy tokens.
fn hash_of(
    args: &SameArgs,
    c: &Combination,
    prompt: &[u32],
    cancel: &AtomicBool,
) -> anyhow::Result<blake3::Hash> {
    let adjust = |o: &mut EngineOptions| {
        o.residency = c.residency;
        o.slots_total = c.slots;
        o.slots_per_layer = None;
        o.chunk = Some(c.chunk);
        o.threads = Some(c.threads);
        o.level = Some(c.level);
    };
    let (opened, ..) = model::open(&args.model, adjust)?;
    let mut engine = Engine::load(opened, &mut |_, _| {})?;
    let mut sequence = engine.new_sequence();
    let mut hasher = blake3::Hasher::new();
    let mut last = 0;
    let mut tokens = prompt.to_vec();
    let mut done = 0;
    while done < prompt.len() + args.tokens {
        let n = (tokens.len() - done).min(engine.plan.chunk);
        let batch = Batch::single(&tokens[done..done + n], (0..n as u32).collect());
        let mut control = Control { cancel, progress: &mut |_, _| {} };
        engine.forward(&batch, &mut [&mut sequence], &mut control, &mut |_, logits| {
            for l in logits {
                hasher.update(&l.to_bits().to_le_bytes());
            }
            last = argmax(logits);
            Ok(())
        })?;
        done += n;
        if done == tokens.len() {
            tokens.push(last);
        }
    }
    Ok(hasher.finalize())
}
