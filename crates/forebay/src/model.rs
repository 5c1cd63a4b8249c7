//! From `MODEL` and options to an engine with its tokenizer and template.

use std::path::{Path, PathBuf};

use forebay_engine::engine::Opened;
use forebay_engine::{Engine, EngineError, EngineOptions};
use forebay_files::Catalog;
use forebay_store::memory::PeakSampler;
use forebay_text::{ChatTemplate, Tokenizer, TokenizerOptions};

use crate::args::ModelArgs;
use crate::failure::usage;
use crate::term::Bar;

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
}

/// The path of a model; says what to do with `org/name` and with what is not there.
pub fn resolve(model: &Path) -> anyhow::Result<PathBuf> {
    if model.exists() {
        return Ok(model.to_path_buf());
    }
    let text = model.to_string_lossy();
    let parts: Vec<&str> = text.split('/').collect();
    let looks_remote = parts.len() == 2
        && !model.is_absolute()
        && parts.iter().all(|p| !p.is_empty() && !p.starts_with('.'))
        && !Path::new(parts[0]).exists();
    if looks_remote {
        return Err(EngineError::Refused {
            what: format!("opening {text} from a hub"),
            instead: "this version opens local files; give the path of a GGUF file or of a model \
                      folder"
                .into(),
        }
        .into());
    }
    Err(usage(format!("{text}: no such file or folder")))
}

/// Opens headers, tokenizer and template; loads nothing yet.
pub fn open(
    args: &ModelArgs,
    adjust: impl FnOnce(&mut EngineOptions),
) -> anyhow::Result<(Opened, Tokenizer, Option<ChatTemplate>)> {
    let mut options = args.options.engine()?;
    adjust(&mut options);
    let mut catalog = Catalog::open(&resolve(&args.model)?)?;
    let (tokenizer, template, bytes) = text(&mut catalog)?;
    options.caller_bytes = bytes;
    let opened = Opened::from_catalog(catalog, options)?;
    Ok((opened, tokenizer, template))
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
    let start = std::time::Instant::now();
    let peak = PeakSampler::start();
    let (opened, tokenizer, template) = open(args, adjust)?;
    let recommended = opened.catalog.generation_config().cloned();
    let bar = Bar::bytes("loading");
    let engine = Engine::load(opened, &mut |done, total| bar.set(done, total))?;
    drop(bar);
    let load_s = start.elapsed().as_secs_f64();
    for note in engine.notes().iter().chain(&engine.spec.notes) {
        eprintln!("note: {note}");
    }
    Ok(Loaded { engine, tokenizer, template, recommended, load_s, peak })
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
    let words = text.split(|c: char| c == ',' || c.is_whitespace()).filter(|w| !w.is_empty());
    let ids: Option<Vec<u32>> = words.map(|w| w.parse().ok()).collect();
    ids.filter(|ids| !ids.is_empty())
}
