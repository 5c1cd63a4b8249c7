//! `GET /v1/forebay/live`: the machine at work, for the page and for whoever wants to draw it.
//!
//! A look costs the engine nothing but a copy of which experts are in memory, between two steps. Rates and what
//! was read or hit since are differences of two looks, and the business of who looks.

use forebay_engine::own_bytes;
use serde_json::{Value, json};

use crate::service::Service;

/// Milliseconds between looks that a page should keep.
const EVERY_MS: u64 = 500;

/// The document. Counters only grow; `experts.layers` is as of the last look, and empty where nothing has to go
/// from memory.
pub(crate) fn live(service: &Service) -> Value {
    let load = service.scheduler.look();
    let store = &load.stats.store;
    let snapshot = &load.snapshot;
    let layers: Vec<Value> = snapshot
        .layers
        .iter()
        .map(|layer| json!({ "layer": layer.layer, "quota": layer.quota, "resident": layer.resident }))
        .collect();
    let ledger =
        service.info.ledger.iter().map(|(what, bytes)| json!({ "what": what, "bytes": bytes }));
    let phases = load.stats.phases.named().into_iter();
    json!({
        "model": service.info.name,
        "family": service.info.family,
        "file_bytes": service.info.bytes,
        "context": service.info.context,
        "every_ms": EVERY_MS,
        "uptime_s": service.began.elapsed().as_secs_f64(),
        "answers": {
            "running": load.running,
            "waiting": load.waiting,
            "ended": {
                "stop": load.ended[0], "length": load.ended[1], "gone": load.ended[2], "failed": load.ended[3],
            },
        },
        "tokens": {
            "prompt": load.prompt_tokens,
            "cached": load.cached_tokens,
            "generated": load.generated_tokens,
        },
        "steps": load.steps,
        "rows": load.stats.rows,
        "experts": {
            "per_layer": service.info.experts,
            "routed_layers": service.info.routed_layers,
            "hits": store.hits,
            "misses": store.misses,
            "bytes_read": store.bytes_read,
            "slots": snapshot.slots,
            "free": snapshot.free,
            "slot_bytes": snapshot.slot_bytes,
            "layers": layers,
        },
        "phases_s": phases.map(|(name, s)| (name.to_owned(), s.into())).collect::<serde_json::Map<_, _>>(),
        "memory": {
            "budget": service.info.budget,
            "own": own_bytes(),
            "ledger": ledger.collect::<Vec<_>>(),
        },
    })
}
