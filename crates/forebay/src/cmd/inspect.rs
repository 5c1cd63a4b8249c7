//! `inspect`: what a model is, and what the budget buys.

use std::collections::BTreeMap;
use std::process::ExitCode;

use forebay_engine::engine::Opened;
use forebay_engine::{EngineError, MemoryPlan};
use forebay_program::ledger::human;
use forebay_text::{ChatTemplate, Tokenizer};
use serde_json::{Map, Value, json};

use crate::args::InspectArgs;
use crate::model;
use crate::odd;
use crate::term::say;

pub fn run(args: InspectArgs) -> anyhow::Result<ExitCode> {
    let (opened, tokenizer, template) = model::look(&args.model)?;
    let about = About::new(&opened, &tokenizer, template.as_ref());
    match args.json {
        true => say!("{}", Value::Object(about.json()))?,
        false => {
            about.print()?;
            if let Ok(p) = &about.plan {
                say!("\n{}", p.summary())?;
                if let Some(device) = &p.device {
                    say!("{}\nof the process:", device.ledger)?;
                }
                say!("{}", p.ledger)?;
            }
            say!("smallest workable budget: {} MiB", about.minimum().div_ceil(1 << 20))?;
        }
    }
    match about.plan {
        Ok(_) => Ok(ExitCode::SUCCESS),
        // The document is on stdout already, and one is all that programs expect there.
        Err(e) => Ok(crate::failure::report(&e.into(), false)),
    }
}

/// What is known of a model before it is loaded.
pub struct About<'a> {
    opened: &'a Opened,
    /// What the budget buys, or why it does not do.
    pub plan: Result<MemoryPlan, EngineError>,
    has_template: bool,
    /// Everything odd.
    pub warnings: Vec<String>,
}

impl<'a> About<'a> {
    pub fn new(
        opened: &'a Opened,
        tokenizer: &Tokenizer,
        template: Option<&ChatTemplate>,
    ) -> About<'a> {
        let warnings = odd::warnings(opened, tokenizer, template);
        About { opened, plan: opened.plan(), has_template: template.is_some(), warnings }
    }

    /// Smallest workable budget; 0 where that is not what is wrong.
    pub fn minimum(&self) -> u64 {
        match &self.plan {
            Ok(p) => p.minimum,
            Err(EngineError::BudgetTooSmall { minimum, .. }) => *minimum,
            Err(_) => 0,
        }
    }

    /// What lies on a GPU.
    fn device(&self) -> Option<Value> {
        let device = self.plan.as_ref().ok()?.device.as_ref()?;
        let lines = device.ledger.items.iter();
        let lines: Vec<_> = lines.map(|i| json!({ "what": i.what, "bytes": i.bytes })).collect();
        Some(json!({ "name": device.name, "free_bytes": device.free_bytes, "ledger": lines }))
    }

    fn experts(&self) -> Option<Value> {
        let store = &self.opened.store;
        let mut layers = self.opened.spec.layers.iter();
        let routed = layers.find_map(|l| l.ffn.routed.as_ref())?;
        Some(json!({
            "count": routed.experts.weights.len(),
            "per_token": routed.router.top_k,
            "layers": store.layers.len(),
            "bytes": store.slot_bytes(),
            "total_bytes": store.total_bytes(),
        }))
    }

    /// The fields that programs rely on.
    pub fn json(&self) -> Map<String, Value> {
        let spec = &self.opened.spec;
        let ledger = self.plan.iter().flat_map(|p| &p.ledger.items);
        let ledger: Vec<_> = ledger.map(|i| json!({ "what": i.what, "bytes": i.bytes })).collect();
        let out = json!({
            "family": spec.family,
            "formats": formats(self.opened),
            "parameters": parameters(self.opened),
            "experts": self.experts(),
            "layers": spec.layers.len(),
            "hidden_size": spec.hidden_size,
            "vocab_size": spec.vocab_size,
            "context_length": spec.context_length,
            "chat_template": self.has_template,
            "eos_ids": spec.eos_ids,
            "file_bytes": self.opened.catalog.files.iter().map(|f| f.len).sum::<u64>(),
            "ledger": ledger,
            "device": self.device(),
            "minimum_bytes": self.minimum(),
            "warnings": self.warnings,
        });
        let Value::Object(out) = out else { unreachable!("just made") };
        out
    }

    /// For people: what the model is.
    pub fn print(&self) -> anyhow::Result<()> {
        let Opened { spec, store, catalog, .. } = self.opened;
        say!("{}", catalog.display_path())?;
        let line = |what: &str, text: String| say!("  {what:<16} {text}");
        line("family", spec.family.into())?;
        line("parameters", format!("{:.2} billion", parameters(self.opened) as f64 / 1e9))?;
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
        if let Some(e) = self.experts() {
            line(
                "experts",
                format!(
                    "{} in {} layers, {} per token, {} each, {} in all",
                    e["count"],
                    e["layers"],
                    e["per_token"],
                    human(store.slot_bytes()),
                    human(store.total_bytes()),
                ),
            )?;
        }
        for (format, bytes) in formats(self.opened) {
            line("weights", format!("{format}: {}", human(bytes)))?;
        }
        line("chat template", if self.has_template { "yes" } else { "no" }.into())?;
        for w in &self.warnings {
            line("note", w.clone())?;
        }
        Ok(())
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
