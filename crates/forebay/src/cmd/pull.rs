//! `pull`: download a model into the cache that other tools share.

use std::process::ExitCode;

use forebay_hub::{Hub, HubConfig, HubError};
use serde_json::json;

use crate::args::PullArgs;
use crate::failure::usage;
use crate::hub::Wanted;
use crate::term::say;

pub fn run(args: PullArgs) -> anyhow::Result<ExitCode> {
    let wanted = Wanted::parse(&args.model).ok_or_else(|| {
        let text = format!("{:?} is no name of a repository; write org/name", args.model);
        usage(format!("{text} or org/name:PATTERN"))
    })?;
    let offer = match wanted.offer_at(&args.revision) {
        Ok(offer) => offer,
        Err(e) if is_offline(&e) && args.revision == "main" => {
            return from_cache(&wanted, &args, e);
        }
        Err(e) => return Err(e),
    };
    let to_come = offer.missing_bytes();
    offer.show();
    let snapshot = offer.fetch()?;
    if !args.json {
        say!("{}", snapshot.display())?;
        return Ok(ExitCode::SUCCESS);
    }
    let files = offer.selection.files();
    let files = files.iter().map(|f| json!({ "path": f.path, "bytes": f.size }));
    let skipped = offer.selection.skipped.iter();
    let skipped = skipped.map(|s| json!({ "what": s.what, "files": s.files, "bytes": s.bytes }));
    let out = json!({
        "repo": offer.listing.repo.to_string(),
        "revision": args.revision,
        "commit": offer.listing.commit,
        "snapshot": snapshot,
        "models": offer.selection.model_paths(&snapshot),
        "files": files.collect::<Vec<_>>(),
        "bytes": offer.selection.bytes(),
        "downloaded_bytes": to_come,
        "skipped": skipped.collect::<Vec<_>>(),
    });
    say!("{out}")?;
    Ok(ExitCode::SUCCESS)
}

fn is_offline(e: &anyhow::Error) -> bool {
    matches!(e.downcast_ref(), Some(HubError::Offline { .. }))
}

/// Without a network, what is there is all there is.
fn from_cache(wanted: &Wanted, args: &PullArgs, e: anyhow::Error) -> anyhow::Result<ExitCode> {
    let hub = Hub::new(&HubConfig::from_env())?;
    let found = hub.resolve_local(&wanted.repo, wanted.pattern.as_deref())?;
    let Some(found) = found else { return Err(e) };
    let snapshot = hub.cache().snapshot(&wanted.repo, &found.commit);
    match args.json {
        false => say!("{}", snapshot.display())?,
        true => say!(
            "{}",
            json!({
                "repo": wanted.repo.to_string(),
                "revision": args.revision,
                "commit": found.commit,
                "snapshot": snapshot,
                "models": [found.path],
                "downloaded_bytes": 0,
            })
        )?,
    }
    Ok(ExitCode::SUCCESS)
}
