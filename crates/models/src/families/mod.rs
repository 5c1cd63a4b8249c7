//! The families. Adding one is one file here and one line in [`FAMILIES`].

use forebay_files::{Catalog, Disk, FileAccess, Source};
use serde_json::Value;

use crate::config::Config;
use crate::error::ModelError;
use crate::spec::ModelSpec;

pub(crate) mod decoder;
mod gemma3;
mod gemma4;
mod gpt_oss;
mod llama;
mod qwen3_5;
mod qwen3_moe;

/// One family: its names and its reader.
pub struct Family {
    /// Name as users know it.
    pub name: &'static str,
    /// `model_type` values of config.json.
    pub model_types: &'static [&'static str],
    /// `general.architecture` values of GGUF.
    pub gguf: &'static [&'static str],
    /// Reads the model.
    pub read: fn(&Config<'_>, &Catalog) -> Result<ModelSpec, ModelError>,
}

/// All families, in the order in which they are listed to users.
pub const FAMILIES: &[Family] = &[
    gpt_oss::FAMILY,
    qwen3_moe::FAMILY,
    qwen3_5::ROUTED,
    qwen3_5::DENSE,
    gemma4::FAMILY,
    llama::MIXTRAL,
    llama::LLAMA,
    llama::MISTRAL,
    llama::QWEN2,
    llama::QWEN3,
    gemma3::FAMILY,
];

/// Finds the family of a checkpoint on this machine's disk and reads it.
pub fn read(catalog: &Catalog) -> Result<ModelSpec, ModelError> {
    read_with(&Disk, catalog)
}

/// The same for a checkpoint whose files are elsewhere.
pub fn read_with(access: &dyn FileAccess, catalog: &Catalog) -> Result<ModelSpec, ModelError> {
    refuse_others(catalog)?;
    let config = Config::new(catalog, access)?;
    let matches = |f: &&Family| {
        let names = if config.is_gguf() { f.gguf } else { f.model_types };
        names.contains(&config.arch())
    };
    let Some(family) = FAMILIES.iter().find(matches) else {
        let known: Vec<_> = FAMILIES.iter().map(|f| f.name).collect();
        return Err(ModelError::UnknownArchitecture {
            name: config.arch().chars().take(80).collect(),
            known: known.join(", "),
        });
    };
    let mut spec = (family.read)(&config, catalog)?;
    spec.family = family.name;
    Ok(spec)
}

/// How a drafter names itself: the beginnings of its architecture in `config.json` and in GGUF, lower case.
const DRAFTERS: [&str; 4] = ["dflash", "eagle", "medusa", "dspark"];

/// Ways to quantise a folder that the readers know: MLX's are not named here, its `quantization` is read.
const QUANT_METHODS: [&str; 1] = ["mxfp4"];

/// Refuses what has the container and perhaps the config of a model but is none that could be read: drafters, and
/// folders quantised in a way of their own. Looks at names only, so that it can be asked before anything else is.
pub fn refuse_others(catalog: &Catalog) -> Result<(), ModelError> {
    let (names, config): (Vec<&str>, _) = match &catalog.source {
        Source::Gguf { metadata } => (
            metadata.get("general.architecture").and_then(|v| v.as_str()).into_iter().collect(),
            None,
        ),
        Source::Folder { config, .. } => {
            let list = config.get("architectures").and_then(Value::as_array);
            (list.into_iter().flatten().filter_map(Value::as_str).collect(), Some(config))
        }
    };
    let is_drafter = |name: &&&str| {
        let name = name.to_ascii_lowercase();
        DRAFTERS.iter().any(|d| name.starts_with(d)) || name.contains("eagle")
    };
    if let Some(kind) = names.iter().find(is_drafter) {
        return Err(ModelError::Drafter { kind: kind.chars().take(80).collect() });
    }
    let Some(config) = config else { return Ok(()) };
    if config.get("dflash_config").is_some() {
        return Err(ModelError::Drafter { kind: "dflash_config".into() });
    }
    let method = [Some(config), config.get("text_config")].into_iter().flatten();
    let method = method.filter_map(|c| c.get("quantization_config")?.get("quant_method")?.as_str());
    match method.into_iter().find(|m| !QUANT_METHODS.contains(m)) {
        None => Ok(()),
        Some(method) => Err(ModelError::Unsupported {
            what: format!("a folder quantised with {:?}", method.chars().take(40).collect::<String>()),
            detail: "folders in BF16, F16, F32, MXFP4 and of MLX are read; or take a GGUF file of the model".into(),
        }),
    }
}
