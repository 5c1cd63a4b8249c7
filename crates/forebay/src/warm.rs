//! Which experts were hot, remembered per model and read first the next time.
//!
//! Beside the caches of other programs and never in the model's folder:
//! `$XDG_CACHE_HOME/forebay/hot/<hash of the headers>.json` (or `~/.cache/...`). Losing the file costs a
//! cold start and nothing else, so failures are no errors.

use std::path::PathBuf;

use forebay_engine::Engine;
use serde_json::json;

use crate::args::SwitchArg;

/// No more than this is remembered.
const MOST: usize = 1 << 16;

/// Where the hot experts of a model are remembered; none: nowhere.
pub struct Memory(Option<PathBuf>);

impl Memory {
    /// For the model with these headers.
    pub fn new(header_hash: &[u8; 32], switch: SwitchArg) -> Memory {
        let set = |name: &str| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let caches = set("XDG_CACHE_HOME")
            .or_else(|| set("HOME").map(|home| home.join(".cache")))
            .or_else(|| set("LOCALAPPDATA"));
        let name: String = header_hash[..16].iter().map(|b| format!("{b:02x}")).collect();
        let path = caches.map(|c| c.join("forebay/hot").join(format!("{name}.json")));
        Memory(path.filter(|_| switch == SwitchArg::Auto))
    }

    /// Begins to read what was hot.
    pub fn recall(&self, engine: &mut Engine) {
        let read = |path: &PathBuf| {
            let text = std::fs::read(path).ok()?;
            let value: serde_json::Value = serde_json::from_slice(&text).ok()?;
            serde_json::from_value::<Vec<(usize, u16)>>(value["hot"].clone()).ok()
        };
        if let Some(hot) = self.0.as_ref().and_then(read) {
            engine.warm(&hot);
        }
    }

    /// Remembers what is hot now.
    pub fn remember(&self, engine: &Engine) {
        let Some(path) = &self.0 else { return };
        let mut hot = engine.hot_experts();
        if hot.is_empty() {
            return;
        }
        hot.truncate(MOST);
        let write = || {
            std::fs::create_dir_all(path.parent()?).ok()?;
            let part = path.with_extension("part");
            std::fs::write(&part, json!({ "hot": hot }).to_string()).ok()?;
            std::fs::rename(&part, path).ok()
        };
        // Not being able to costs a cold start, which is no reason to trouble anybody.
        let _ = write();
    }
}
