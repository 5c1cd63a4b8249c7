//! `eval same`: one prompt over residencies, slots, chunks, threads, vector widths and ways of streaming;
//! all logits of all positions must agree in every bit. With `--backend cuda`: once on the CPU, then on the GPU over
//! chunks.

use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use forebay_cpu::Level;
use forebay_engine::engine::Opened;
use forebay_engine::sampler::argmax;
use forebay_engine::{
    BackendChoice, Batch, Control, Engine, EngineOptions, Prefetch, ResidencyChoice,
};
use forebay_store::{IoMode, Policy};
use forebay_text::Specials;
use serde_json::json;

use crate::args::{IoArg, Options, PrefetchArg, SameArgs};
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
    level: Option<Level>,
    backend: BackendChoice,
    manner: Manner,
}

/// How experts are streamed. Every streamed combination takes the next one in turn.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Manner {
    policy: Policy,
    prefetch: Prefetch,
    io: IoMode,
    /// The pool grows and shrinks from pass to pass.
    elastic: bool,
}

impl Combination {
    fn json(&self) -> serde_json::Value {
        let Manner { policy, prefetch, io, elastic } = self.manner;
        json!({
            "policy": policy.name(),
            "prefetch": prefetch == Prefetch::On,
            "io": format!("{io:?}").to_lowercase(),
            "elastic": elastic,
            "residency": format!("{:?}", self.residency).to_lowercase(),
            "slots": self.slots,
            "chunk": self.chunk,
            "threads": self.threads,
            "simd": self.level.map(|l| l.to_string()),
            "backend": format!("{:?}", self.backend).to_lowercase(),
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
    if opened.options.backend == BackendChoice::Cuda {
        return on_gpu(opened, given);
    }
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
    let manners = manners(opened, given);
    let mut manners = manners.iter().copied().cycle();
    let threads = given.threads.map_or(vec![1, 2, 3], |n| vec![n]);
    let chunks = given.chunk.map_or(vec![64, 16, 3, 1], |n| vec![n]);
    let mut out = Vec::new();
    for level in levels {
        for &threads in &threads {
            for &chunk in &chunks {
                for &(residency, slots) in &places {
                    let manner = manners.next().expect("there is at least one");
                    let (level, backend) = (Some(level), BackendChoice::Cpu);
                    out.push(Combination {
                        residency,
                        slots,
                        chunk,
                        threads,
                        level,
                        backend,
                        manner,
                    });
                }
            }
        }
    }
    out
}

/// The CPU first, then the GPU: chunks on both sides of where its kernels change.
fn on_gpu(opened: &Opened, given: &Options) -> Vec<Combination> {
    let c = |backend, chunk| Combination {
        residency: ResidencyChoice::Auto,
        slots: None,
        chunk,
        threads: opened.options.threads(),
        level: None,
        backend,
        manner: manners(opened, given)[0],
    };
    let chunks = given.chunk.map_or(vec![64, 33, 5, 4, 3, 2, 1], |n| vec![n]);
    let gpu = chunks.into_iter().map(|n| c(BackendChoice::Cuda, n));
    std::iter::once(c(BackendChoice::Cpu, 64)).chain(gpu).collect()
}

/// All manners; an option that was given is not varied.
fn manners(opened: &Opened, given: &Options) -> Vec<Manner> {
    let policies = match given.policy == Policy::default() {
        true => Policy::ALL.to_vec(),
        false => vec![given.policy],
    };
    let guesses = match given.prefetch {
        PrefetchArg::Auto => vec![Prefetch::On, Prefetch::Off],
        _ => vec![opened.options.prefetch],
    };
    let ios = match given.io {
        IoArg::Auto => vec![IoMode::Auto, IoMode::Buffered],
        _ => vec![opened.options.io],
    };
    let mut out = Vec::new();
    for policy in policies {
        for &prefetch in &guesses {
            for &io in &ios {
                for elastic in [false, true] {
                    out.push(Manner { policy, prefetch, io, elastic });
                }
            }
        }
    }
    out
}

/// Slots of the pool for a pass: as many as asked for, more, fewer, one, in turn.
fn slots_in_turn(asked: usize, pass: usize) -> usize {
    [asked, asked.div_ceil(2), asked + 3, 1, asked * 2][pass % 5].max(1)
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
        o.level = c.level;
        o.backend = c.backend;
        o.policy = c.manner.policy;
        o.prefetch = c.manner.prefetch;
        o.io = c.manner.io;
    };
    let (opened, ..) = model::open(&args.model, adjust)?;
    let mut engine = Engine::load(opened, &mut |_, _| {})?;
    let mut sequence = engine.new_sequence();
    let mut hasher = blake3::Hasher::new();
    let mut last = 0;
    let mut tokens = prompt.to_vec();
    let (mut done, mut pass) = (0, 0);
    while done < prompt.len() + args.tokens {
        let n = (tokens.len() - done).min(engine.plan.chunk);
        let batch = Batch::single(&tokens[done..done + n], (0..n as u32).collect());
        let mut control = Control { cancel, progress: &mut |_, _| {} };
        if let (ResidencyChoice::Stream, Some(slots), true) =
            (c.residency, c.slots, c.manner.elastic)
        {
            engine.set_slots(slots_in_turn(slots, pass))?;
        }
        pass += 1;
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
