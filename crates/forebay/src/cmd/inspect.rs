//! `inspect`: what a model is, and what the budget buys.

use std::collections::BTreeMap;
use std::process::ExitCode;

use forebay_engine::EngineError;
use forebay_engine::engine::Opened;
use forebay_program::ledger::human;
use serde_json::json;

use crate::args::InspectArgs;
use crate::model;
use crate::term::say;

pub fn run(args: InspectArgs) -> anyhow::Result<ExitCode> {
    let (opened, tokenizer, template) = model::look(&args.model)?;
    let formats = formats(&opened);
    let spec = &opened.spec;
    let mut warnings = spec.notes.clone();
    if template.is_none() {
        warnings.push("no chat template: prompts are taken as they are".into());
    }
    if let Some(name) = tokenizer.approximated() {
        warnings.push(format!("pre-tokenizer {name:?} is approximated"));
    }
    if tokenizer.vocab_size() > spec.vocab_size {
        warnings.push(format!(
            "the tokenizer has {} tokens and the embedding {} rows",
            tokenizer.vocab_size(),
            spec.vocab_size
        ));
    }
    let plan = opened.plan();
    let minimum = match &plan {
        Ok(p) => p.minimum,
        Err(EngineError::BudgetTooSmall { minimum, .. }) => *minimum,
        Err(_) => 0,
    };
    let experts = spec.layers.iter().find_map(|l| l.ffn.routed.as_ref()).map(|r| {
        json!({
            "count": r.experts.weights.len(),
            "per_token": r.router.top_k,
            "layers": opened.store.layers.len(),
            "bytes": opened.store.slot_bytes(),
            "total_bytes": opened.store.total_bytes(),
        })
    });
    let parameters = parameters(&opened);
    if args.json {
        let ledger: Vec<_> = plan.iter().flat_map(|p| &p.ledger.items).collect();
        let ledger: Vec<_> =
            ledger.iter().map(|i| json!({ "what": i.what, "bytes": i.bytes })).collect();
        let out = json!({
            "family": spec.family,
            "formats": formats,
            "parameters": parameters,
            "experts": experts,
            "layers": spec.layers.len(),
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "context_length": spec.context_length,
            "chat_template": template.is_some(),
            "eos_ids": spec.eos_ids,
            "file_bytes": opened.catalog.files.iter().map(|f| f.len).sum::<u64>(),
            "ledger": ledger,
            "minimum_bytes": minimum,
            "warnings": warnings,
        });
        say!("{out}")?;
    } else {
        say!("{}", opened.catalog.display_path())?;
        let line = |what: &str, text: String| say!("  {what:<16} {text}");
        line("family", spec.family.into())?;
        line("parameters", format!("{:.2} billion", parameters as f64 / 1e9))?;
        line(
            "shape",
            format!(
                "{} layers, hidden {}, vocabulary {}, context {}",
                spec.layers.len(),
                spec.hidden_size,
                spec.vocab_size,
                spec.context_length
            ),
        )?;
        if let Some(e) = &experts {
            line(
                "experts",
                format!(
                    "{} in {} layers, {} per token, {} each, {} in all",
                    e["count"],
                    e["layers"],
                    e["per_token"],
                    human(opened.store.slot_bytes()),
                    human(opened.store.total_bytes()),
                ),
            )?;
        }
        for (format, bytes) in &formats {
            line("weights", format!("{format}: {}", human(*bytes)))?;
        }
        line("chat template", if template.is_some() { "yes" } else { "no" }.into())?;
        for w in &warnings {
            line("note", w.clone())?;
        }
        if let Ok(p) = &plan {
            say!("\n{}\n{}", p.summary(), p.ledger)?;
        }
        say!("smallest workable budget: {} MiB", minimum.div_ceil(1 << 20))?;
    }
    match plan {
        Ok(_) => Ok(ExitCode::SUCCESS),
        // The document is on stdout already, and one is all that programs expect there.
        Err(e) => Ok(crate::failure::report(&e.into(), false)),
    }
}

/// Bytes per weight format.
fn formats(opened: &Opened) -> BTreeMap<String, u64> {
    let mut out = BTreeMap::new();
    let trunk = opened.program.weights.iter();
    let experts = opened.store.layers.iter().flat_map(|l| &l.experts);
    let experts = experts.flat_map(|e| [&e.gate, &e.up, &e.down]);
    let embedding = (!opened.program.head.tied).then_some(&opened.spec.embedding);
    for w in trunk.chain(experts).chain(embedding) {
        *out.entry(w.format.name()).or_default() +=
            w.format.matrix_bytes(w.rows, w.cols).unwrap_or(0);
    }
    out
}

/// Weights of all matrices and vectors.
fn parameters(opened: &Opened) -> u64 {
    let matrix = |w: &forebay_models::WeightRef| (w.rows * w.cols) as u64;
    let trunk: u64 = opened.program.weights.iter().map(matrix).sum();
    let experts = opened.store.layers.iter().flat_map(|l| &l.experts);
    let experts: u64 = experts.map(|e| matrix(&e.gate) + matrix(&e.up) + matrix(&e.down)).sum();
    let vectors: u64 = opened.program.vectors.iter().map(|v| v.source.len as u64).sum();
    let embedding = if opened.program.head.tied { 0 } else { matrix(&opened.spec.embedding) };
    trunk + experts + vectors + embedding
}
