//! `eval golden`: logits and greedy answers against those of another implementation.
//!
//! The file's `cases[]` have `prompt` and `positions[] {position, logsumexp, top_ids, top_logits}`,
//! optionally `last_logits`, `greedy` and `margin`; llama.cpp's files have `first: [[id, logprob]]`
//! instead of positions.

use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use forebay_engine::sampler::{argmax, log_sum_exp};
use forebay_engine::{Batch, Control, Engine, EngineError};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::args::GoldenArgs;
use crate::failure::usage;
use crate::model;
use crate::term::{Bar, interruption, say};

#[derive(Deserialize)]
struct Golden {
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    prompt: Vec<u32>,
    #[serde(default)]
    positions: Vec<Position>,
    #[serde(default)]
    last_logits: Vec<f32>,
    #[serde(default)]
    first: Vec<(u32, f64)>,
    #[serde(default)]
    greedy: Vec<u32>,
    #[serde(default)]
    margin: Vec<f64>,
}

#[derive(Deserialize)]
struct Position {
    position: usize,
    logsumexp: f64,
    top_ids: Vec<u32>,
    top_logits: Vec<f64>,
}

#[derive(Default)]
struct Outcome {
    max_abs: f64,
    max_kl: f64,
    argmax_agree: usize,
    argmax_total: usize,
    greedy_agree: usize,
    greedy_total: usize,
    greedy_failed: bool,
    near_tie_at: Option<usize>,
}

pub fn run(args: GoldenArgs) -> anyhow::Result<ExitCode> {
    let shown = args.file.display();
    let text = std::fs::read_to_string(&args.file).map_err(|e| usage(format!("{shown}: {e}")))?;
    let golden: Golden = serde_json::from_str(&text)
        .map_err(|e| usage(format!("{shown} holds no reference answers: {e}")))?;
    let longest = golden.cases.iter().map(|c| c.prompt.len() + c.greedy.len()).max();
    let longest =
        longest.filter(|n| *n > 0).ok_or_else(|| usage(format!("{shown} has no cases")))?;
    let mut loaded = model::load(&args.model, |o| {
        o.context.get_or_insert(longest);
        o.speculate = Default::default();
    })?;
    let cancel = interruption();
    let bar = Bar::steps("comparing");
    let mut outcomes = Vec::new();
    for (i, case) in golden.cases.iter().enumerate() {
        if case.prompt.is_empty() {
            return Err(usage(format!("{shown}: case {i} has an empty prompt")));
        }
        outcomes.push(compare(&mut loaded.engine, case, args.near_tie, &cancel)?);
        bar.set(i as u64 + 1, golden.cases.len() as u64);
    }
    bar.clear();
    let max_abs = outcomes.iter().map(|o| o.max_abs).fold(0.0, f64::max);
    let max_kl = outcomes.iter().map(|o| o.max_kl).fold(0.0, f64::max);
    let sum = |f: fn(&Outcome) -> usize| outcomes.iter().map(f).sum::<usize>();
    // NaN must not pass.
    let within = max_abs <= args.tolerance && outcomes.iter().all(|o| o.max_abs.is_finite());
    let ok = within && outcomes.iter().all(|o| !o.greedy_failed);
    let cases: Vec<Value> = outcomes.iter().zip(&golden.cases).map(|(o, c)| o.json(c)).collect();
    if args.json {
        let report = json!({
            "ok": ok,
            "tolerance": args.tolerance,
            "max_abs_logit_diff": max_abs,
            "max_kl": max_kl,
            "argmax_agree": sum(|o| o.argmax_agree),
            "argmax_total": sum(|o| o.argmax_total),
            "greedy_agree": sum(|o| o.greedy_agree),
            "greedy_total": sum(|o| o.greedy_total),
            "cases": cases,
        });
        say!("{report}")?;
    } else {
        for (o, case) in outcomes.iter().zip(&golden.cases) {
            o.print(case)?;
        }
        say!(
            "{}: largest logit difference {max_abs:.6} (tolerance {}), largest KL {max_kl:.2e}, \
             argmax {}/{}, greedy {}/{}",
            if ok { "ok" } else { "FAILED" },
            args.tolerance,
            sum(|o| o.argmax_agree),
            sum(|o| o.argmax_total),
            sum(|o| o.greedy_agree),
            sum(|o| o.greedy_total),
        )?;
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::from(1) })
}

impl Outcome {
    fn json(&self, case: &Case) -> Value {
        json!({
            "prompt_tokens": case.prompt.len(),
            "max_abs_logit_diff": self.max_abs,
            "max_kl": self.max_kl,
            "argmax_agree": self.argmax_agree,
            "argmax_total": self.argmax_total,
            "greedy_agree": self.greedy_agree,
            "greedy_total": self.greedy_total,
            "near_tie_at": self.near_tie_at,
        })
    }

    fn print(&self, case: &Case) -> std::io::Result<()> {
        let tie = match self.near_tie_at {
            Some(step) => format!(" (near tie at step {step})"),
            None => String::new(),
        };
        say!(
            "prompt of {:>5}: logit difference {:.6}, KL {:.2e}, argmax {}/{}, greedy {}/{}{tie}",
            case.prompt.len(),
            self.max_abs,
            self.max_kl,
            self.argmax_agree,
            self.argmax_total,
            self.greedy_agree,
            self.greedy_total,
        )
    }

    fn difference(&mut self, ours: f64, theirs: f64) {
        let diff = (ours - theirs).abs();
        // A NaN stays.
        if diff > self.max_abs || diff.is_nan() {
            self.max_abs = diff;
        }
    }

    fn argmax(&mut self, ours: u32, theirs: u32) {
        self.argmax_total += 1;
        self.argmax_agree += (ours == theirs) as usize;
    }
}

/// Refuses reference answers that this model cannot be compared with.
fn check_case(case: &Case, vocab: usize) -> anyhow::Result<()> {
    let nothing = case.positions.is_empty() && case.first.is_empty() && case.last_logits.is_empty();
    if nothing && case.greedy.is_empty() {
        return Err(usage(
            "a case holds nothing to compare: no positions, first, last_logits, greedy",
        ));
    }
    if case.positions.iter().any(|p| p.top_ids.is_empty() || p.top_ids.len() != p.top_logits.len())
    {
        return Err(usage(
            "a position's top_ids and top_logits must be of one length, and not empty",
        ));
    }
    let ids =
        case.positions.iter().flat_map(|p| &p.top_ids).chain(case.first.iter().map(|(id, _)| id));
    let outside = ids.chain(&case.greedy).find(|id| **id as usize >= vocab);
    if let Some(id) = outside {
        return Err(usage(format!(
            "the reference names token {id}, this model has {vocab} tokens"
        )));
    }
    if case.last_logits.len() > vocab {
        let n = case.last_logits.len();
        return Err(usage(format!("last_logits has {n} numbers, this model has {vocab} tokens")));
    }
    Ok(())
}

fn compare(
    engine: &mut Engine,
    case: &Case,
    near_tie: f64,
    cancel: &AtomicBool,
) -> anyhow::Result<Outcome> {
    check_case(case, engine.spec.vocab_size)?;
    let mut out = Outcome::default();
    let mut sequence = engine.new_sequence();
    let mut wanted: Vec<usize> = case.positions.iter().map(|p| p.position).collect();
    wanted.push(case.prompt.len() - 1);
    if let Some(p) = wanted.iter().find(|p| **p >= case.prompt.len()) {
        return Err(usage(format!(
            "a case asks for position {p} of a prompt of {}",
            case.prompt.len()
        )));
    }
    let mut last = Vec::new();
    let mut start = 0;
    for chunk in case.prompt.chunks(engine.plan.chunk) {
        let rows = (0..chunk.len() as u32).filter(|r| wanted.contains(&(start + *r as usize)));
        let batch = Batch::single(chunk, rows.collect());
        let mut control = Control { cancel, progress: &mut |_, _| {} };
        engine.forward(&batch, &mut [&mut sequence], &mut control, &mut |row, logits| {
            let position = start + row;
            for p in case.positions.iter().filter(|p| p.position == position) {
                position_difference(&mut out, p, logits)
                    .ok_or(EngineError::LogitNan { position })?;
            }
            if position + 1 == case.prompt.len() {
                last = logits.to_vec();
            }
            Ok(())
        })?;
        start += chunk.len();
    }
    for (ours, theirs) in last.iter().zip(&case.last_logits) {
        out.difference(*ours as f64, *theirs as f64);
    }
    if !case.first.is_empty() {
        let (max, sum) = log_sum_exp(&last).ok_or(EngineError::LogitNan { position: start - 1 })?;
        for (id, logprob) in &case.first {
            let ours = last.get(*id as usize).map_or(f64::NAN, |l| *l as f64);
            out.difference(ours - max as f64 - sum, *logprob);
        }
        out.argmax(argmax(&last), case.first[0].0);
    }
    greedy(engine, &mut sequence, case, near_tie, last, cancel, &mut out)?;
    engine.release(&mut sequence);
    Ok(out)
}

/// Logits, log-sum-exp, argmax and KL of one position. KL is over the stored top tokens and the rest as
/// one event. `None` when ours are not numbers.
fn position_difference(out: &mut Outcome, p: &Position, logits: &[f32]) -> Option<()> {
    let (max, sum) = log_sum_exp(logits)?;
    let lse = max as f64 + sum;
    out.difference(lse, p.logsumexp);
    let (mut kl, mut rest_p, mut rest_q) = (0.0, 1.0, 1.0);
    for (&id, &theirs) in p.top_ids.iter().zip(&p.top_logits) {
        let ours = *logits.get(id as usize)? as f64;
        out.difference(ours, theirs);
        let (log_p, log_q) = (theirs - p.logsumexp, ours - lse);
        kl += log_p.exp() * (log_p - log_q);
        rest_p -= log_p.exp();
        rest_q -= log_q.exp();
    }
    if rest_p > 1e-12 && rest_q > 1e-12 {
        kl += rest_p * (rest_p / rest_q).ln();
    }
    out.max_kl = out.max_kl.max(kl);
    out.argmax(argmax(logits), *p.top_ids.first()?);
    Some(())
}

/// Follows the reference's greedy tokens and compares our choice at every step. A different choice where
/// the reference's margin is small is a near tie and ends the comparison.
fn greedy(
    engine: &mut Engine,
    sequence: &mut forebay_engine::Sequence,
    case: &Case,
    near_tie: f64,
    mut logits: Vec<f32>,
    cancel: &AtomicBool,
    out: &mut Outcome,
) -> anyhow::Result<()> {
    for (step, &theirs) in case.greedy.iter().enumerate() {
        if argmax(&logits) != theirs {
            match case.margin.get(step).is_some_and(|m| *m < near_tie) {
                true => out.near_tie_at = Some(step),
                false => {
                    out.greedy_total += 1;
                    out.greedy_failed = true;
                }
            }
            return Ok(());
        }
        out.greedy_total += 1;
        out.greedy_agree += 1;
        if step + 1 < case.greedy.len() {
            logits.clear();
            let batch = Batch::single(&[theirs], vec![0]);
            let mut control = Control { cancel, progress: &mut |_, _| {} };
            engine.forward(&batch, &mut [&mut *sequence], &mut control, &mut |_, l| {
                logits.extend_from_slice(l);
                Ok(())
            })?;
        }
    }
    Ok(())
}
