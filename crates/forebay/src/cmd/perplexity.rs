//! `eval perplexity`: exp of the mean negative log-probability of tokens in separate windows.

use std::process::ExitCode;
use std::time::Instant;

use forebay_engine::{Batch, Control, EngineError};
use forebay_text::Specials;
use serde_json::json;

use crate::args::PerplexityArgs;
use crate::failure::usage;
use crate::model;
use crate::term::{Bar, interruption, say};

pub fn run(args: PerplexityArgs) -> anyhow::Result<ExitCode> {
    let shown = args.file.display();
    let text = std::fs::read_to_string(&args.file).map_err(|e| usage(format!("{shown}: {e}")))?;
    let window = args.window;
    if window < 2 || args.skip_first >= window {
        return Err(usage("--window must be at least 2 and larger than --skip-first"));
    }
    let mut loaded = model::load(&args.model, |o| {
        o.context.get_or_insert(window);
        o.speculate = Default::default();
    })?;
    let cancel = interruption();
    let (mut ids, begin) = match model::parse_ids(&text) {
        Some(ids) => (ids, None),
        None => {
            let tokenizer = &loaded.tokenizer;
            let begin = tokenizer.bos().filter(|_| tokenizer.adds_bos());
            (tokenizer.encode_prompt(&text, Specials::Ignore)?, begin)
        }
    };
    // A model that was trained with a begin token is lost without it: as in llama.cpp, it takes the place of each
    // window's first token.
    if let Some(begin) = begin {
        ids.chunks_mut(window).for_each(|w| w[0] = begin);
    }
    // As the reference tools do it: a last window that is not full is left out, unless it is the only one.
    let windows: Vec<&[u32]> = match ids.len() < window {
        true => vec![&ids],
        false => ids.chunks_exact(window).collect(),
    };
    let skip = args.skip_first.max(1);
    let (mut nll, mut count) = (0.0f64, 0u64);
    let clock = Instant::now();
    let bar = Bar::steps("perplexity");
    for (i, ids) in windows.iter().enumerate() {
        nll += window_nll(&mut loaded.engine, ids, skip, &cancel, &mut count)?;
        bar.set(i as u64 + 1, windows.len() as u64);
    }
    bar.clear();
    if count == 0 {
        return Err(usage(format!("{shown} holds too few tokens for a window")));
    }
    let perplexity = (nll / count as f64).exp();
    if !perplexity.is_finite() {
        return Err(anyhow::anyhow!("the perplexity is not a number"));
    }
    match args.json {
        true => {
            say!(
                "{}",
                json!({ "perplexity": perplexity, "tokens": windows.iter().map(|w| w.len()).sum::<usize>(), "scored": count, "window": window })
            )?;
        }
        false => say!(
            "perplexity {perplexity:.6} over {count} scored tokens in {} windows of {window} ({:.1} s)",
            windows.len(),
            clock.elapsed().as_secs_f64()
        )?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Sum of `-ln p` of the tokens from position `skip` on.
fn window_nll(
    engine: &mut forebay_engine::Engine,
    ids: &[u32],
    skip: usize,
    cancel: &std::sync::atomic::AtomicBool,
    count: &mut u64,
) -> Result<f64, EngineError> {
    let mut sequence = engine.new_sequence();
    let mut nll = 0.0;
    let mut start = 0;
    let mut result = Ok(());
    for chunk in ids.chunks(engine.plan.chunk) {
        // Row r predicts token start + r + 1.
        let wants = |r: &u32| {
            let target = start + *r as usize + 1;
            target >= skip && target < ids.len()
        };
        let rows = (0..chunk.len() as u32).filter(wants).collect();
        let batch = Batch::single(chunk, rows);
        let mut control = Control { cancel, progress: &mut |_, _| {} };
        result = engine.forward(&batch, &mut [&mut sequence], &mut control, &mut |row, logits| {
            let target = ids[start + row + 1] as usize;
            let (max, sum) = forebay_engine::sampler::log_sum_exp(logits)
                .ok_or(EngineError::LogitNan { position: start + row })?;
            let logit = logits
                .get(target)
                .ok_or(EngineError::BadToken { id: target as u32, vocab: logits.len() })?;
            nll += max as f64 + sum - *logit as f64;
            *count += 1;
            Ok(())
        });
        if result.is_err() {
            break;
        }
        start += chunk.len();
    }
    engine.release(&mut sequence);
    result.map(|()| nll)
}
