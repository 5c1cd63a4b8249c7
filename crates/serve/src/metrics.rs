//! Counters for Prometheus, and the state of health.

use std::fmt::Write;

use serde_json::{Value, json};

use crate::service::Service;

/// `GET /health`
pub(crate) fn health(service: &Service) -> (bool, Value) {
    let load = service.scheduler.load();
    let open = service.scheduler.is_open();
    let health = json!({
        "status": if open { "ok" } else { "closing" },
        "model": service.info.name,
        "running": load.running,
        "waiting": load.waiting,
    });
    (open, health)
}

struct Text(String);

impl Text {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP forebay_{name} {help}\n# TYPE forebay_{name} {kind}");
    }

    fn value(&mut self, name: &str, labels: &str, value: impl std::fmt::Display) {
        // A string takes everything.
        let _ = writeln!(self.0, "forebay_{name}{labels} {value}");
    }

    fn one(&mut self, name: &str, kind: &str, help: &str, value: impl std::fmt::Display) {
        self.head(name, kind, help);
        self.value(name, "", value);
    }
}

/// `GET /metrics`
pub(crate) fn metrics(service: &Service) -> String {
    let load = service.scheduler.load();
    let mut t = Text(String::new());
    t.one("requests_running", "gauge", "Answers that have begun.", load.running);
    t.one("requests_paused", "gauge", "Of these, those that wait for room.", load.paused);
    t.one("pauses_total", "counter", "Answers that gave their room to older ones.", load.pauses);
    t.one("requests_waiting", "gauge", "Answers in the queue.", load.waiting);
    t.head("requests_total", "counter", "Answers that are over, by how they ended.");
    for (how, n) in ["stop", "length", "gone", "failed"].iter().zip(load.ended) {
        t.value("requests_total", &format!("{{end=\"{how}\"}}"), n);
    }
    t.head("tokens_total", "counter", "Tokens: of prompts computed, of prompts reused, generated.");
    for (kind, n) in [
        ("prompt", load.prompt_tokens),
        ("cached", load.cached_tokens),
        ("generated", load.generated_tokens),
    ] {
        t.value("tokens_total", &format!("{{kind=\"{kind}\"}}"), n);
    }
    t.one("steps_total", "counter", "Batches computed.", load.steps);
    t.one("rows_total", "counter", "Rows computed, of all batches.", load.stats.rows);
    t.one("prefixes_kept", "gauge", "Beginnings kept for later requests.", load.kept);
    let drafts = load.speculation.unwrap_or_default();
    t.one("speculation_rounds_total", "counter", "Passes that checked drafts.", drafts.rounds);
    t.head("speculation_tokens_total", "counter", "Tokens drafted, and of these right.");
    for (kind, n) in [("drafted", drafts.drafted), ("accepted", drafts.accepted)] {
        t.value("speculation_tokens_total", &format!("{{kind=\"{kind}\"}}"), n);
    }
    let store = &load.stats.store;
    t.one("expert_hits_total", "counter", "Experts found in memory.", store.hits);
    t.one("expert_misses_total", "counter", "Experts that were waited for.", store.misses);
    t.one("disk_bytes_total", "counter", "Bytes of experts read.", store.bytes_read);
    t.one("memory_bytes_total", "counter", "Weight and KV bytes read.", load.stats.memory_bytes);
    t.head("phase_seconds_total", "counter", "Where the time of steps went.");
    for (phase, seconds) in load.stats.phases.named() {
        t.value("phase_seconds_total", &format!("{{phase=\"{phase}\"}}"), seconds);
    }
    t.head("ledger_bytes", "gauge", "The memory plan, line by line.");
    for (what, bytes) in &service.info.ledger {
        t.value("ledger_bytes", &format!("{{what=\"{what}\"}}"), bytes);
    }
    t.0
}
