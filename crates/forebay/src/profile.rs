//! `bench --profile`: time of every operation, and how near it came to what this machine can do.
//!
//! The limit of an operation is the longer of two times: its bytes at the memory bandwidth, and its multiply-adds at
//! the arithmetic peak, both measured in the same run. What the caches hold can be quicker than memory: small models
//! may pass 100%. Operations that touch activations only have no limit here.

use forebay_cpu::peak::Peaks;
use forebay_program::ledger::human;
use forebay_program::{Profile, ProfileRow};
use serde_json::{Value, json};

use crate::measure::{Delta, Sample};
use crate::term::note;

/// What the machine can do at best.
#[derive(Clone, Copy, Debug, Default)]
pub struct Limits {
    /// Bytes per second.
    pub memory: Option<f64>,
    pub peaks: Option<Peaks>,
}

/// What bounds an operation, and in which time it could be done.
struct Bound {
    by: &'static str,
    seconds: f64,
}

impl Limits {
    fn bound(&self, row: &ProfileRow) -> Option<Bound> {
        let work = row.work;
        let memory = match work.bytes {
            0 => 0.0,
            bytes => bytes as f64 / self.memory?,
        };
        let (mut integer, mut float) = (0.0, 0.0);
        if work.integer_macs + work.float_macs > 0 {
            let peaks = self.peaks?;
            integer = work.integer_macs as f64 / peaks.integer;
            float = work.float_macs as f64 / peaks.float;
        }
        let by = match (memory >= integer + float, integer >= float) {
            (true, _) => "memory",
            (false, true) => "integer",
            (false, false) => "float",
        };
        let seconds = memory.max(integer + float);
        (seconds > 0.0).then_some(Bound { by, seconds })
    }

    fn percent(&self, row: &ProfileRow) -> Option<(&'static str, f64)> {
        let bound = self.bound(row)?;
        let seconds = row.time.as_secs_f64();
        (seconds > 0.0).then(|| (bound.by, 100.0 * bound.seconds / seconds))
    }

    fn row(&self, row: &ProfileRow) -> Value {
        let percent = self.percent(row);
        json!({
            "op": row.op,
            "calls": row.calls,
            "seconds": row.time.as_secs_f64(),
            "bytes": row.work.bytes,
            "integer_macs": row.work.integer_macs,
            "float_macs": row.work.float_macs,
            "limit": percent.map(|(by, _)| by),
            "percent_of_limit": percent.map(|(_, percent)| percent),
        })
    }
}

/// All samples' profiles in one.
fn sum(samples: &[Sample], part: fn(&Sample) -> &Delta) -> Profile {
    let mut all = Profile::default();
    for s in samples {
        all.add_all(&part(s).profile);
    }
    all
}

/// The field `profile`: operations in the order of the program, summed over all repetitions.
pub fn json(samples: &[Sample], limits: Limits) -> Value {
    let rows =
        |part| -> Vec<Value> { sum(samples, part).rows.iter().map(|r| limits.row(r)).collect() };
    json!({
        "prefill": rows(|s| &s.prefill),
        "decode": rows(|s| &s.decode),
        "memory_bytes_per_s": limits.memory,
        "integer_macs_per_s": limits.peaks.map(|p| p.integer),
        "float_macs_per_s": limits.peaks.map(|p| p.float),
    })
}

/// For people, on stderr: the longest first.
pub fn print(samples: &[Sample], limits: Limits) {
    let rate = |r: Option<f64>| r.map_or("-".into(), |r| format!("{:.0}", r / 1e9));
    note!(
        "  limits       memory {} GB/s, integer {} GMAC/s, f32 {} GMAC/s",
        rate(limits.memory),
        rate(limits.peaks.map(|p| p.integer)),
        rate(limits.peaks.map(|p| p.float)),
    );
    let prefill: usize = samples.iter().map(|s| s.prompt_tokens).sum();
    let decode: usize = samples.iter().map(|s| s.step_s.len()).sum();
    table("prefill", samples, |s| &s.prefill, prefill, limits);
    table("decode", samples, |s| &s.decode, decode, limits);
}

fn table(
    name: &str,
    samples: &[Sample],
    part: fn(&Sample) -> &Delta,
    tokens: usize,
    limits: Limits,
) {
    let mut rows = sum(samples, part).rows;
    if rows.is_empty() || tokens == 0 {
        return;
    }
    // What the engine does between operations.
    for (phase, text) in [
        ("embed", "(embedding)"),
        ("plan", "(finding slots, starting reads)"),
        ("read_wait", "(waiting for reads)"),
        ("bind", "(finding matrices)"),
        ("sampling", "(sampling)"),
    ] {
        let named = samples.iter().flat_map(|s| part(s).phases.named());
        let seconds: f64 = named.filter(|(n, _)| *n == phase).map(|(_, s)| s).sum();
        let time = std::time::Duration::from_secs_f64(seconds);
        rows.push(ProfileRow { op: text.into(), calls: 0, time, work: Default::default() });
    }
    rows.sort_by_key(|r| std::cmp::Reverse(r.time));
    let all: f64 = rows.iter().map(|r| r.time.as_secs_f64()).sum();
    note!("  {name}: {:.3} ms per token", all / tokens as f64 * 1e3);
    note!(
        "    {:>9} {:>6} {:>9} {:>12} {:>17}  operation",
        "ms/token",
        "time",
        "calls",
        "bytes/token",
        "of limit"
    );
    for row in &rows {
        let seconds = row.time.as_secs_f64();
        if seconds < all * 1e-4 {
            continue;
        }
        let bytes = match row.work.bytes {
            0 => String::new(),
            bytes => human(bytes / tokens as u64),
        };
        let calls = if row.calls > 0 { row.calls.to_string() } else { String::new() };
        let limit = limits.percent(row).map_or(String::new(), |(by, p)| format!("{p:.0}% {by:>8}"));
        note!(
            "    {:9.3} {:5.1}% {calls:>9} {bytes:>12} {limit:>17}  {}",
            seconds / tokens as f64 * 1e3,
            100.0 * seconds / all,
            row.op,
        );
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use forebay_program::Work;

    use super::*;

    const LIMITS: Limits =
        Limits { memory: Some(1e9), peaks: Some(Peaks { integer: 1e12, float: 1e11 }) };

    fn row(bytes: u64, integer_macs: u64, float_macs: u64) -> ProfileRow {
        let work = Work { bytes, integer_macs, float_macs };
        ProfileRow { op: "x".into(), calls: 1, time: Duration::from_secs(2), work }
    }

    #[test]
    fn the_slower_limit_counts() {
        for (row, expected) in [
            (row(1_000_000_000, 1, 1), Some(("memory", 50.0))),
            (row(1, 1_000_000_000_000, 0), Some(("integer", 50.0))),
            (row(0, 1_000_000_000_000, 200_000_000_000), Some(("float", 150.0))),
            (row(0, 0, 0), None),
        ] {
            assert_eq!(LIMITS.percent(&row), expected);
        }
        // A limit that was not measured is not taken for none.
        let unknown = Limits { memory: None, ..LIMITS };
        assert_eq!(unknown.percent(&row(1, 1_000_000_000_000, 0)), None);
        let unknown = Limits { peaks: None, ..LIMITS };
        assert_eq!(unknown.percent(&row(1_000_000_000, 1, 0)), None);
    }
}
