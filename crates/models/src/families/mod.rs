//! The families. Adding one is one file here and one line in [`FAMILIES`].

use forebay_files::{Catalog, Disk, FileAccess};

use crate::config::Config;
use crate::error::ModelError;
use crate::spec::ModelSpec;

mod decoder;
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
