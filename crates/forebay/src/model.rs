//! From `MODEL` and options to an engine with its tokenizer and template.

use std::path::{Path, PathBuf};

use forebay_engine::engine::Opened;
use forebay_engine::{Engine, EngineOptions};
use forebay_files::{Catalog, Disk, FileAccess};
use forebay_program::ledger::human;
use forebay_store::memory::PeakSampler;
use forebay_text::{ChatTemplate, Tokenizer, TokenizerOptions};

use crate::args::ModelArgs;
use crate::failure::usage;
use crate::hub::Wanted;
use crate::term::{Bar, note};
use crate::warm;

/// A loaded model with what a command needs around it.
pub struct Loaded {
    pub engine: Engine,
    pub tokenizer: Tokenizer,
    pub template: Option<ChatTemplate>,
    /// `generation_config.json`, where the checkpoint has one.
    pub recommended: Option<serde_json::Value>,
    /// Seconds from the start to ready.
    pub load_s: f64,
    /// Samples own memory from the start on.
    pub peak: Option<PeakSampler>,
    /// What was hot in earlier runs.
    pub warm: warm::Memory,
}

impl Loaded {
    /// Says so if the process takes more of its own memory than the budget allows.
    pub fn check_budget(&self) {
        let peak = self.peak.as_ref().map_or(0, |p| p.peak_bytes());
        let budget = self.engine.plan.budget;
        if peak > budget {
            note!(
                "warning: the process took {} of its own memory, more than the budget of {}: \
                 please report this with the output of forebay inspect",
                human(peak),
                human(budget)
            );
        }
    }
}

/// The path of a model. One of a hub is looked for in the cache, and else fetched after asking.
pub fn resolve(args: &ModelArgs) -> anyhow::Result<PathBuf> {
    match find(&args.model)? {
        Found::Here(path) => Ok(path),
        Found::OnHub(wanted) => wanted.obtain(args),
    }
}

/// Where a model is.
pub enum Found {
    /// On this machine.
    Here(PathBuf),
    /// On a hub, if there.
    OnHub(Wanted),
}

/// Looks for a model on this machine.
pub fn find(model: &Path) -> anyhow::Result<Found> {
    if model.exists() {
        return Ok(Found::Here(model.to_path_buf()));
    }
    let Some(wanted) = Wanted::parse(&model.to_string_lossy()) else {
        return Err(usage(format!("{}: no such file or folder", model.display())));
    };
    Ok(match wanted.cached()? {
        Some(path) => Found::Here(path),
        None => Found::OnHub(wanted),
    })
}

/// A model with its tokenizer and template; nothing is loaded yet.
pub type Headers = (Opened, Tokenizer, Option<ChatTemplate>);

/// Opens headers, tokenizer and template; loads nothing yet.
pub fn open(args: &ModelArgs, adjust: impl FnOnce(&mut EngineOptions)) -> anyhow::Result<Headers> {
    let options = args.options.engine()?;
    describe_with(&Disk, Catalog::open(&resolve(args)?)?, options, |options, _| adjust(options))
}

/// The same for looking only: of a model that is not here, headers are read from the hub.
pub fn look(args: &ModelArgs) -> anyhow::Result<Headers> {
    let options = args.options.engine()?;
    match find(&args.model)? {
        Found::Here(path) => describe(&Disk, Catalog::open(&path)?, options),
        Found::OnHub(wanted) => {
            note!("note: {wanted} is not in the cache; its headers are read from the hub");
            let remote = wanted.offer()?.remote()?;
            describe(&remote, remote.catalog()?, options)
        }
    }
}

/// What a catalog is of, whose files are where `access` says.
pub fn describe(
    access: &dyn FileAccess,
    catalog: Catalog,
    options: EngineOptions,
) -> anyhow::Result<Headers> {
    describe_with(access, catalog, options, |_, _| {})
}

/// The same, with options that may depend on the tokenizer.
fn describe_with(
    access: &dyn FileAccess,
    mut catalog: Catalog,
    mut options: EngineOptions,
    adjust: impl FnOnce(&mut EngineOptions, &Tokenizer),
) -> anyhow::Result<Headers> {
    forebay_models::refuse_others(&catalog)?;
    let (tokenizer, template, bytes) = text(&mut catalog)?;
    options.caller_bytes = bytes;
    adjust(&mut options, &tokenizer);
    let opened = Opened::from_catalog_with(access, catalog, options)?;
    if let Some(draft) = &opened.draft {
        same_tokens(&tokenizer, &draft.catalog)?;
    }
    Ok((opened, tokenizer, template))
}

/// Refuses a draft model whose tokens stand for other texts.
fn same_tokens(tokenizer: &Tokenizer, draft: &Catalog) -> anyhow::Result<()> {
    let other = Tokenizer::from_catalog(draft, TokenizerOptions::default())?;
    // Vocabularies are padded, and not always alike.
    let both = tokenizer.vocab_size().min(other.vocab_size()) as u32;
    match (0..both).find(|&id| tokenizer.token_bytes(id) != other.token_bytes(id)) {
        None => Ok(()),
        Some(id) => Err(forebay_engine::EngineError::Refused {
            what: "drafting with this model".into(),
            instead: format!(
                "token {id} is {:?} there and {:?} here: a draft model needs the same tokenizer",
                other.token_name(id).unwrap_or_default(),
                tokenizer.token_name(id).unwrap_or_default(),
            ),
        }
        .into()),
    }
}

/// Tokenizer and template of a catalog, and the bytes that they take. The vocabulary's arrays leave
/// the catalog: the tokenizer has them now.
fn text(catalog: &mut Catalog) -> anyhow::Result<(Tokenizer, Option<ChatTemplate>, u64)> {
    let bytes = Tokenizer::memory_bytes(catalog)?.peak_bytes;
    let tokenizer = Tokenizer::from_catalog(catalog, TokenizerOptions::default())?;
    let template = ChatTemplate::from_catalog(catalog)?;
    for key in ["tokens", "merges", "scores", "token_type"] {
        catalog.take_meta(&format!("tokenizer.ggml.{key}"));
    }
    Ok((tokenizer, template, bytes))
}

/// Opens and loads, with a progress bar.
pub fn load(args: &ModelArgs, adjust: impl FnOnce(&mut EngineOptions)) -> anyhow::Result<Loaded> {
    load_with(args, |options, _| adjust(options))
}

/// The same, with options that may depend on the tokenizer.
pub fn load_with(
    args: &ModelArgs,
    adjust: impl FnOnce(&mut EngineOptions, &Tokenizer),
) -> anyhow::Result<Loaded> {
    let start = std::time::Instant::now();
    let cancel = crate::term::interruption();
    let peak = PeakSampler::start();
    let options = args.options.engine()?;
    let catalog = Catalog::open(&resolve(args)?)?;
    let (opened, tokenizer, template) = describe_with(&Disk, catalog, options, adjust)?;
    let recommended = opened.catalog.generation_config().cloned();
    let warm = warm::Memory::new(&opened.catalog.header_hash, args.options.warm);
    let bar = Bar::bytes("loading");
    let engine = Engine::load(opened, &mut |done, total| {
        bar.set(done, total);
        if cancel.load(std::sync::atomic::Ordering::Relaxed) {
            // Nothing is begun yet that would have to be ended.
            bar.clear();
            note!("forebay: interrupted");
            std::process::exit(130);
        }
    })?;
    drop(bar);
    let load_s = start.elapsed().as_secs_f64();
    for vector in engine.steer_vectors().describe() {
        note!("note: steering: {vector}");
    }
    for note in engine.notes().iter().chain(&engine.spec.notes) {
        note!("note: {note}");
    }
    let loaded = Loaded { engine, tokenizer, template, recommended, load_s, peak, warm };
    loaded.check_budget();
    Ok(loaded)
}

/// Token ids from a file: a JSON array (or an object with one), or numbers apart by blanks or commas.
pub fn read_ids(path: &Path) -> anyhow::Result<Vec<u32>> {
    let shown = path.display();
    let text = std::fs::read_to_string(path).map_err(|e| usage(format!("{shown}: {e}")))?;
    let ids = parse_ids(&text).filter(|ids| !ids.is_empty());
    ids.ok_or_else(|| usage(format!("{shown} holds no list of token ids")))
}

/// The same from a text.
pub fn parse_ids(text: &str) -> Option<Vec<u32>> {
    if let Ok(ids) = serde_json::from_str::<Vec<u32>>(text) {
        return Some(ids);
    }
    if let Ok(serde_json::Value::Object(object)) = serde_json::from_str(text) {
        let list = ["ids", "tokens", "prompt"].into_iter().find_map(|key| object.get(key))?;
        return serde_json::from_value(list.clone()).ok();
    }
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|w| !w.is_empty());
    let ids: Option<Vec<u32>> = words.map(|w| w.parse().ok()).collect();
    ids.filter(|ids| !ids.is_empty())
}
