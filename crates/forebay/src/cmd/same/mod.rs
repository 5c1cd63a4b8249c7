//! `eval same`: one prompt over residencies, slots, chunks, threads, vector widths, ways of streaming and drafters;
//! all logits of all positions must agree in every bit. With `--backend cuda`: once on the CPU, then on the GPU over
//! chunks. With `--answers`, whole answers as clients get them are compared as well: `answers`.

mod answers;

use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use forebay_cpu::Level;
use forebay_engine::engine::Opened;
use forebay_engine::sampler::argmax;
use forebay_engine::speculate::{Chosen, MOST_TOKENS, Script, Turn};
use forebay_engine::{
    BackendChoice, Batch, Control, DrafterChoice, Engine, EngineOptions, Prefetch, ResidencyChoice,
    SamplerParams, SpeculateOptions,
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
    drafts: Drafts,
}

/// What drafts, and how many tokens at most. Every combination takes the next in turn.
#[derive(Clone, Debug, PartialEq)]
struct Drafts {
    drafter: DrafterChoice,
    tokens: usize,
}

impl Drafts {
    const NONE: Drafts = Drafts { drafter: DrafterChoice::Off, tokens: 0 };
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
            "drafter": self.drafts.drafter.name(),
            "draft_tokens": self.drafts.tokens,
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
    let script = Arc::new(Script { wrong: 0.3, ..Script::default() });
    let combinations = combinations(&opened, &args.model.options, &script);
    let drafters = drafters(&opened, &args.model.options);
    drop(opened);
    let cancel = interruption();
    let mut reference = None;
    let mut different = Vec::new();
    let mut rounds = 0;
    let bar = Bar::steps("comparing");
    for (i, c) in combinations.iter().enumerate() {
        let found = logits_of(&args, c, &prompt, &cancel)?;
        rounds += found.rounds;
        match &reference {
            None => {
                // What comes out is what the scripted drafter drafts from now on.
                script.tokens.set(found.tokens).expect("there is one reference");
                reference = Some(found.hash);
            }
            Some(r) if *r != found.hash => different.push(c.json()),
            Some(_) => {}
        }
        bar.set(i as u64 + 1, combinations.len() as u64);
    }
    bar.clear();
    let answers = match args.answers {
        0 => answers::Compared::default(),
        _ => answers::compare(&args, &prompt, &drafters, &cancel)?,
    };
    different.extend(answers.different);
    let ok = different.is_empty();
    let hash = reference.map(|h| h.to_hex().to_string());
    if args.json {
        let out = json!({
            "ok": ok,
            "combinations": combinations.len(),
            "rounds": rounds,
            "answers": answers.answers,
            "answer_rounds": answers.rounds,
            "answer_drafts": { "right": answers.right, "wrong": answers.wrong },
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
        say!("  {rounds} passes with drafts in them")?;
        if args.answers > 0 {
            say!(
                "  {} answers of up to {} tokens: {} passes with drafts, {} right and {} wrong",
                answers.answers,
                args.answers,
                answers.rounds,
                answers.right,
                answers.wrong
            )?;
        }
        for d in &different {
            say!("  differs: {d}")?;
        }
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

/// All combinations; an option that was given is not varied.
fn combinations(opened: &Opened, given: &Options, script: &Arc<Script>) -> Vec<Combination> {
    if opened.options.backend == BackendChoice::Cuda {
        return on_gpu(opened, given);
    }
    let layers = opened.store.layers.len();
    let all = opened.store.n_experts_total();
    let mut places = vec![(ResidencyChoice::Auto, None)];
    if layers > 0 {
        let mut slots = match given.slots {
            Some(n) => vec![n.saturating_mul(layers).min(all)],
            None => vec![1, layers.max(2), all / 2, all],
        };
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
                        drafts: Drafts::NONE,
                    });
                }
            }
        }
    }
    // The first is what all others are compared with: nothing drafts there.
    let mut drafters = drafters(opened, given);
    if drafters.len() > 1 && given.speculate.is_none() {
        drafters.push(DrafterChoice::Scripted(script.clone()));
    }
    for (i, c) in out.iter_mut().enumerate().skip(1) {
        // All places meet all drafters.
        let drafter = drafters[(i + i / places.len()) % drafters.len()].clone();
        if drafter != DrafterChoice::Off {
            let tokens = given.draft_tokens.unwrap_or(1 + i % LENGTHS);
            c.drafts = Drafts { drafter, tokens };
        }
    }
    out
}

/// Lengths of drafts that are tried, from 1 on.
const LENGTHS: usize = 8;

/// What may draft: nothing, what was said before, the model's own block where it has one, a draft model that is given; only
/// what is asked for by name, where something is.
fn drafters(opened: &Opened, given: &Options) -> Vec<DrafterChoice> {
    let asked = &opened.options.speculate.drafter;
    let mut all = vec![DrafterChoice::Off];
    match (given.speculate, asked) {
        (None, asked) => {
            all.push(DrafterChoice::Ngram);
            all.extend(opened.spec.multi_token.is_some().then_some(DrafterChoice::Mtp));
            all.extend((*asked != DrafterChoice::Off).then(|| asked.clone()));
            all
        }
        (Some(_), DrafterChoice::Off) => all,
        (Some(_), asked) => vec![asked.clone()],
    }
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
        drafts: Drafts::NONE,
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

/// What a combination gives.
struct Found {
    /// Over the bits of all logits.
    hash: blake3::Hash,
    /// The prompt, and the tokens that followed.
    tokens: Vec<u32>,
    /// Passes with drafts in them.
    rounds: u64,
}

/// Logits of every position of the prompt, then of greedy tokens; of rows that are taken back none.
fn logits_of(
    args: &SameArgs,
    c: &Combination,
    prompt: &[u32],
    cancel: &AtomicBool,
) -> anyhow::Result<Found> {
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
        let tokens = (c.drafts.tokens > 0).then_some(c.drafts.tokens.min(MOST_TOKENS));
        o.speculate = SpeculateOptions { drafter: c.drafts.drafter.clone(), tokens, always: true };
    };
    let (opened, ..) = model::open(&args.model, adjust)?;
    let mut engine = Engine::load(opened, &mut |_, _| {})?;
    let mut sequence = engine.new_sequence();
    engine.follow(&sequence, &[]);
    let mut hasher = blake3::Hasher::new();
    let mut add = |logits: &[f32]| {
        for l in logits {
            hasher.update(&l.to_bits().to_le_bytes());
        }
        argmax(logits)
    };
    let mut tokens = prompt.to_vec();
    let end = prompt.len() + args.tokens;
    let mut pass = 0;
    while sequence.len() < end {
        if let (ResidencyChoice::Stream, Some(slots), true) =
            (c.residency, c.slots, c.manner.elastic)
        {
            engine.set_slots(slots_in_turn(slots, pass))?;
        }
        pass += 1;
        let done = sequence.len();
        let mut control = Control { cancel, progress: &mut |_, _| {} };
        if done < prompt.len() {
            let n = (prompt.len() - done).min(engine.plan.chunk);
            let batch = Batch::single(&tokens[done..done + n], (0..n as u32).collect());
            let mut last = 0;
            engine.forward(&batch, &mut [&mut sequence], &mut control, &mut |_, logits| {
                last = add(logits);
                Ok(())
            })?;
            if done + n == prompt.len() {
                tokens.push(last);
            }
            continue;
        }
        let greedy = SamplerParams::default();
        let token = tokens[done];
        let turn = Turn { token, params: &greedy, recent: &[], most: end - done, by_lines: false };
        let round = engine.round(&mut sequence, &turn, &mut control, &mut |logits, _| {
            let next = add(logits);
            tokens.push(next);
            Ok(Chosen::More(next))
        })?;
        let chosen = round.chosen();
        engine.settle(&mut sequence, round, chosen)?;
    }
    let rounds = engine.speculation().map_or(0, |(_, counts, _)| counts.rounds);
    Ok(Found { hash: hasher.finalize(), tokens, rounds })
}
