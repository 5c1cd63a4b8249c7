//! `org/name[:pattern]`: from the cache, or from a hub after a person has seen what it would cost.

use std::fmt;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use forebay_engine::EngineError;
use forebay_hub::{
    Control, Hub, HubConfig, HubError, Listing, RemoteModel, RepoId, Selection, select,
};
use forebay_program::ledger::human;

use crate::args::ModelArgs;
use crate::model;
use crate::term::{FileBars, interruption, note};

/// A model of a hub, as it was asked for.
pub struct Wanted {
    pub repo: RepoId,
    pub pattern: Option<String>,
}

impl fmt::Display for Wanted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.pattern {
            None => write!(f, "{}", self.repo),
            Some(pattern) => write!(f, "{}:{pattern}", self.repo),
        }
    }
}

impl Wanted {
    /// From `org/name[:pattern]`; `None` for what is no name of a repository.
    pub fn parse(text: &str) -> Option<Wanted> {
        let (repo, pattern) = RepoId::parse_with_pattern(text)?;
        Some(Wanted { repo, pattern })
    }

    /// Where it lies in the cache, if it is complete there.
    pub fn cached(&self) -> anyhow::Result<Option<PathBuf>> {
        let hub = Hub::new(&HubConfig::from_env())?;
        let found = hub.resolve_local(&self.repo, self.pattern.as_deref())?;
        Ok(found.map(|m| m.path))
    }

    /// What the hub has of it.
    pub fn offer(&self) -> anyhow::Result<Offer> {
        self.offer_at("main")
    }

    /// The same of a revision.
    pub fn offer_at(&self, revision: &str) -> anyhow::Result<Offer> {
        let hub = Hub::new(&HubConfig::from_env())?;
        let listing = hub.list(&self.repo, revision, &interruption())?;
        let selection = select(&self.repo, &listing.files, self.pattern.as_deref())?;
        Ok(Offer { hub, listing, selection })
    }

    /// Not without being asked for.
    pub fn refusal(&self, instead: &str) -> anyhow::Error {
        let what = format!("using {self}, which is neither a file here nor in the cache,");
        EngineError::Refused { what, instead: instead.into() }.into()
    }

    /// Shows what would be fetched and what this machine would make of it, asks, fetches.
    pub fn obtain(&self, args: &ModelArgs) -> anyhow::Result<PathBuf> {
        let asks = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
        if !args.yes && !asks {
            let instead = format!("`forebay pull {self}` fetches it, or --yes does without asking");
            return Err(self.refusal(&instead));
        }
        let offer = self.offer()?;
        offer.one_model()?;
        offer.show();
        // A model that cannot be run is not worth its download.
        match offer.prospect(args) {
            Ok(()) => {}
            Err(e) if !args.yes && is_budget(&e) => note!("{e:#}"),
            Err(e) if is_refusal(&e) => return Err(e),
            Err(e) => note!("note: what the budget would make of it is not known yet: {e:#}"),
        }
        if !args.yes && !agrees(&offer)? {
            return Err(self.refusal("nothing was downloaded"));
        }
        let snapshot = offer.fetch()?;
        Ok(offer.selection.model_paths(&snapshot).remove(0))
    }
}

/// A model on a hub.
pub struct Offer {
    pub hub: Hub,
    pub listing: Listing,
    pub selection: Selection,
}

impl Offer {
    /// Fails if a pattern with wildcards asked for several.
    pub fn one_model(&self) -> Result<(), HubError> {
        match self.selection.models.as_slice() {
            [_] => Ok(()),
            several => Err(HubError::Ambiguous {
                repo: self.listing.repo.to_string(),
                choices: several.to_vec(),
                example: several.first().cloned().unwrap_or_default(),
            }),
        }
    }

    /// Bytes still to come.
    pub fn missing_bytes(&self) -> u64 {
        self.hub.missing_bytes(&self.listing, &self.selection.files())
    }

    /// Says on stderr what would be fetched and what would not.
    pub fn show(&self) {
        let Offer { listing, selection, .. } = self;
        let (files, bytes) = (selection.files().len(), selection.bytes());
        eprint!("{} at {}: {files} files, {}", listing.repo, listing.commit, human(bytes));
        match self.missing_bytes() {
            missing if missing == bytes => note!(""),
            missing => note!(", {} of it to come", human(missing)),
        }
        let skipped = selection.skipped.iter();
        let skipped = skipped.map(|s| format!("{} ({}, {})", s.what, s.files, human(s.bytes)));
        let skipped: Vec<String> = skipped.collect();
        if !skipped.is_empty() {
            note!("not fetched: {}", skipped.join(", "));
        }
    }

    /// Its weights where they are; small files come to the cache.
    pub fn remote(&self) -> anyhow::Result<RemoteModel> {
        self.one_model()?;
        let cancel = interruption();
        let control = Control { progress: &|_, _, _| {}, cancel: &cancel };
        Ok(self.hub.remote(&self.listing, &self.selection, &control)?)
    }

    /// Says on stderr what this machine would make of it.
    fn prospect(&self, args: &ModelArgs) -> anyhow::Result<()> {
        let remote = self.remote()?;
        let options = args.options.engine()?;
        let (opened, ..) = model::describe(&remote, remote.catalog()?, options)?;
        let store = &opened.store;
        if let Some(layer) = store.layers.first() {
            note!(
                "experts: {} in each of {} layers, {} each, {} in all",
                layer.experts.len(),
                store.layers.len(),
                human(store.slot_bytes()),
                human(store.total_bytes())
            );
        }
        let plan = opened.plan()?;
        note!("{}", plan.summary());
        note!("smallest workable budget: {}", human(plan.minimum));
        Ok(())
    }

    /// Downloads, with a bar per file.
    pub fn fetch(&self) -> anyhow::Result<PathBuf> {
        let cancel = interruption();
        let bars = FileBars::new();
        let progress = |name: &str, done, total| bars.set(name, done, total);
        let control = Control { progress: &progress, cancel: &cancel };
        Ok(self.hub.fetch(&self.listing, &self.selection.files(), &control)?)
    }
}

fn agrees(offer: &Offer) -> anyhow::Result<bool> {
    let (bytes, cache) = (human(offer.missing_bytes()), offer.hub.cache().root().display());
    eprint!("download {bytes} to {cache}? [y/N] ");
    std::io::stderr().flush()?;
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(matches!(line.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

fn is_budget(e: &anyhow::Error) -> bool {
    let class = e.downcast_ref::<EngineError>().map(EngineError::class);
    matches!(class, Some("BudgetTooSmall" | "OutOfMemoryBudget"))
}

/// Whether the model would be refused here once it had come, or the person has interrupted.
fn is_refusal(e: &anyhow::Error) -> bool {
    matches!(crate::failure::classify(e).1, 3 | 130)
}
