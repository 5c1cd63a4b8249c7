//! What a run cost: one sample per repetition, and the report that `run --stats` and `bench` share.

use crate::term::note;
use std::path::Path;
use std::time::Duration;

use forebay_engine::{Engine, Generated, Phases, Stats};
use forebay_program::Profile;
use forebay_program::ledger::human;
use forebay_store::{StoreStats, memory};
use serde_json::{Map, Value, json};

/// One generation, measured.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    pub prompt_tokens: usize,
    pub prefill_s: f64,
    pub step_s: Vec<f64>,
    pub prefill: Delta,
    pub decode: Delta,
}

/// Difference of two snapshots of the counters.
#[derive(Clone, Debug, Default)]
pub struct Delta {
    pub phases: Phases,
    pub hits: u64,
    pub misses: u64,
    /// Of the hits, those in passes with misses.
    pub beside: u64,
    pub disk_bytes: u64,
    pub busy: Duration,
    pub memory_bytes: u64,
    pub profile: Profile,
}

impl Delta {
    /// What happened from `a` to `b`.
    pub fn between(a: &Stats, b: &Stats) -> Delta {
        Delta {
            phases: b.phases.since(&a.phases),
            hits: b.store.hits.saturating_sub(a.store.hits),
            misses: b.store.misses.saturating_sub(a.store.misses),
            beside: b.store.hits_beside_misses.saturating_sub(a.store.hits_beside_misses),
            disk_bytes: b.store.bytes_read.saturating_sub(a.store.bytes_read),
            busy: b.store.read_busy.saturating_sub(a.store.read_busy),
            memory_bytes: b.memory_bytes - a.memory_bytes,
            profile: b.profile.since(&a.profile),
        }
    }
}

impl Sample {
    /// From snapshots before, after the prompt and at the end.
    pub fn new(prompt_tokens: usize, g: &Generated, stats: [&Stats; 3]) -> Sample {
        Sample {
            prompt_tokens,
            prefill_s: g.prefill_s,
            step_s: g.step_s.clone(),
            prefill: Delta::between(stats[0], stats[1]),
            decode: Delta::between(stats[1], stats[2]),
        }
    }
}

/// Bandwidths measured in the same run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Bandwidths {
    pub disk: Option<f64>,
    pub memory: Option<f64>,
}

/// What the report is made from.
pub struct Report<'a> {
    pub engine: &'a Engine,
    pub samples: &'a [Sample],
    pub load_s: f64,
    pub peak_bytes: u64,
    pub bandwidths: Bandwidths,
}

impl Report<'_> {
    /// The fields that programs rely on.
    pub fn json(&self) -> Value {
        let samples = self.samples;
        let per = |f: fn(&Sample) -> Option<f64>| spread(samples.iter().filter_map(f).collect());
        let steps: usize = samples.iter().map(|s| s.step_s.len()).sum();
        let decode: Vec<&Delta> = samples.iter().map(|s| &s.decode).collect();
        let sum = |f: fn(&Delta) -> u64| decode.iter().map(|d| f(d)).sum::<u64>();
        let (hits, misses) = (sum(|d| d.hits), sum(|d| d.misses));
        let step_s: f64 = samples.iter().flat_map(|s| &s.step_s).sum();
        let busy: f64 = decode.iter().map(|d| d.busy.as_secs_f64()).sum();
        let disk = sum(|d| d.disk_bytes) as f64;
        let memory = sum(|d| d.memory_bytes) as f64;
        let ratio = |a: f64, b: f64| if b > 0.0 { json!(a / b) } else { Value::Null };
        let per_step = |bytes: f64| ratio(bytes, steps as f64);
        let fraction = |bytes: f64, seconds: f64, bandwidth: Option<f64>| match bandwidth {
            Some(b) if seconds > 0.0 && b > 0.0 && bytes > 0.0 => json!(bytes / seconds / b),
            _ => Value::Null,
        };
        let b = self.bandwidths;
        let mut out = Map::new();
        let mut put = |key: &str, v: Value| _ = out.insert(key.into(), v);
        put("prefill_tokens_per_s", per(|s| rate(s.prompt_tokens as f64, s.prefill_s)));
        put(
            "decode_tokens_per_s",
            per(|s| rate(s.step_s.len() as f64, s.step_s.iter().sum::<f64>())),
        );
        put("first_token_s", per(|s| Some(s.prefill_s)));
        put("load_s", spread(vec![self.load_s]));
        put("expert_hit_rate", ratio(hits as f64, (hits + misses) as f64));
        put("disk_bytes_per_token", per_step(disk));
        put("memory_bytes_per_token", per_step(memory));
        put("disk_bandwidth_bytes_per_s", json!(b.disk));
        put("memory_bandwidth_bytes_per_s", json!(b.memory));
        put("disk_fraction", fraction(disk, busy, b.disk));
        put("overall_fraction", fraction(disk, step_s, b.disk));
        put("phase_model_fraction", json!(self.phase_model()));
        put("memory_fraction", fraction(memory, step_s, b.memory));
        put("prefill_disk_bytes", json!(samples.last().map(|s| s.prefill.disk_bytes)));
        put("prefill_union_bytes", json!(self.union_bytes()));
        put("budget_bytes", json!(self.engine.plan.budget));
        put("peak_bytes", json!(self.peak_bytes));
        put("mapped_bytes", json!(memory::mapped_bytes()));
        put("container_peak_bytes", json!(memory::container_peak(Path::new("/"))));
        put("bytes_written", json!(0));
        put("phases_s", self.phases());
        put("policy", json!(self.engine.policy().name()));
        put("pilot", crate::cmd::trace::pilot(self.engine));
        put("guesses", guesses(&self.engine.stats().store));
        put("speculation", speculation(self.engine));
        put("budget_adjustments", json!(self.engine.budget_adjustments()));
        put("slots", json!(self.engine.plan.slots));
        put("chunk", json!(self.engine.plan.chunk));
        put("context", json!(self.engine.plan.context));
        put("backend", json!(self.engine.backend_name()));
        put("simd", json!(self.engine.level().to_string()));
        Value::Object(out)
    }

    /// What the phases of decode would have taken with the disk at its raw speed, over what they took.
    /// A pass's missing experts can be read while those that are there are computed; the rest of the
    /// reads has to be waited for. Null where nothing was read.
    fn phase_model(&self) -> Option<f64> {
        let disk = self.bandwidths.disk?;
        let sum =
            |f: &dyn Fn(&Delta) -> f64| self.samples.iter().map(|s| f(&s.decode)).sum::<f64>();
        let all = sum(&|d| d.phases.named().iter().map(|(_, s)| s).sum());
        let compute = all - sum(&|d| d.phases.read_wait.as_secs_f64());
        let experts = sum(&|d| d.phases.experts.as_secs_f64());
        let beside = sum(&|d| d.beside as f64) / sum(&|d| (d.hits + d.misses) as f64).max(1.0);
        let reads = sum(&|d| d.disk_bytes as f64) / disk;
        (reads > 0.0 && all > 0.0).then(|| (compute + (reads - experts * beside).max(0.0)) / all)
    }

    /// Bytes of all experts that the last prompt's chunks wanted, each once a chunk.
    fn union_bytes(&self) -> Option<u64> {
        let experts = self.samples.last().map(|s| s.prefill.hits + s.prefill.misses)?;
        Some(experts * self.engine.expert_bytes())
    }

    fn phases(&self) -> Value {
        let Some(last) = self.samples.last() else { return Value::Null };
        let map = |d: &Delta| -> Map<String, Value> {
            d.phases.named().into_iter().map(|(k, v)| (k.into(), json!(v))).collect()
        };
        json!({ "prefill": map(&last.prefill), "decode": map(&last.decode) })
    }

    /// For people, on stderr.
    pub fn print(&self) {
        let j = self.json();
        let number = |v: &Value| v.as_f64();
        let bytes = |v: &Value| v.as_f64().map_or("-".into(), |b| human(b as u64));
        let speed = |key: &str| match number(&j[key]["median"]) {
            Some(m) if self.samples.len() > 1 => {
                let side = |s: &str| number(&j[key][s]).unwrap_or(m);
                format!("{m:.2} tokens/s ({:.2} to {:.2})", side("min"), side("max"))
            }
            Some(m) => format!("{m:.2} tokens/s"),
            None => "-".into(),
        };
        let percent =
            |v: &Value| number(v).map_or(String::new(), |f| format!(" ({:.0}%)", f * 100.0));
        let line = |what: &str, text: String| note!("  {what:<12} {text}");
        line("prefill", speed("prefill_tokens_per_s"));
        line("decode", speed("decode_tokens_per_s"));
        let first = number(&j["first_token_s"]["median"]).unwrap_or(0.0);
        line("first token", format!("{first:.2} s after {:.2} s of loading", self.load_s));
        if let Some(rate) = number(&j["expert_hit_rate"]) {
            line("expert hits", format!("{:.1}%", rate * 100.0));
        }
        let disk = match number(&j["disk_bandwidth_bytes_per_s"]) {
            Some(b) => format!(
                " of {}/s{} while reading{} overall",
                human(b as u64),
                percent(&j["disk_fraction"]),
                percent(&j["overall_fraction"]),
            ),
            None => String::new(),
        };
        line("disk", format!("{} per token{disk}", bytes(&j["disk_bytes_per_token"])));
        if let Some(recall) = number(&j["pilot"]["recall"]) {
            let precision = number(&j["pilot"]["precision"]).unwrap_or(0.0);
            line(
                "guesses",
                format!(
                    "{}; recall {:.0}%, precision {:.0}%, {} read ahead, {} of them used",
                    j["pilot"]["verdict"].as_str().unwrap_or(""),
                    recall * 100.0,
                    precision * 100.0,
                    j["guesses"]["guessed"],
                    j["guesses"]["used"],
                ),
            );
        }
        if let Some(text) = drafts(self.engine) {
            line("drafter", text);
        }
        let memory = match number(&j["memory_bandwidth_bytes_per_s"]) {
            Some(b) => format!(" of {}/s{}", human(b as u64), percent(&j["memory_fraction"])),
            None => String::new(),
        };
        line("memory", format!("{} per token{memory}", bytes(&j["memory_bytes_per_token"])));
        let container = match j["container_peak_bytes"].as_u64() {
            Some(b) => format!(", container {}", human(b)),
            None => String::new(),
        };
        line(
            "peak",
            format!(
                "{} of a budget of {}{container}",
                human(self.peak_bytes),
                human(self.engine.plan.budget)
            ),
        );
    }
}

/// What became of drafts since opening; null where nothing drafts.
fn speculation(engine: &Engine) -> Value {
    let Some((name, c, controller)) = engine.speculation() else { return Value::Null };
    let ratio = |a: u64, b: u64| (b > 0).then(|| a as f64 / b as f64);
    json!({
        "drafter": name, "verdict": controller.verdict(), "gain": controller.gain(),
        "rounds": c.rounds, "plain": c.plain, "drafted": c.drafted, "accepted": c.accepted,
        "tokens": c.tokens, "tokens_per_round": ratio(c.tokens, c.rounds),
        "acceptance": ratio(c.accepted, c.drafted),
        "first_acceptance": ratio(c.first_accepted, c.rounds), "draft_s": c.time.as_secs_f64(),
    })
}

/// The same for people.
fn drafts(engine: &Engine) -> Option<String> {
    let (name, c, controller) = engine.speculation()?;
    let mut text = format!("{name}: {}", controller.verdict());
    if let Some(gain) = controller.gain() {
        text += &format!(", gain {gain:.2}");
    }
    if c.rounds > 0 {
        text += &format!(
            "; {:.2} tokens a round, {:.0}% of drafts right, {} rounds beside {} plain passes",
            c.tokens as f64 / c.rounds as f64,
            c.accepted as f64 / c.drafted as f64 * 100.0,
            c.rounds,
            c.plain,
        );
    }
    Some(text)
}

/// What became of reads ahead, since opening.
fn guesses(store: &StoreStats) -> Value {
    let g = &store.guesses;
    json!({
        "guessed": g.guessed, "used": g.used, "wasted": g.wasted, "withdrawn": g.withdrawn,
        "bytes": g.bytes, "warmed": store.warmed, "warmed_bytes": store.warmed_bytes,
    })
}

fn rate(tokens: f64, seconds: f64) -> Option<f64> {
    (tokens > 0.0 && seconds > 0.0).then(|| tokens / seconds)
}

/// `{median, min, max}`; null when there is nothing.
fn spread(mut values: Vec<f64>) -> Value {
    values.sort_by(f64::total_cmp);
    let n = values.len();
    match n {
        0 => Value::Null,
        _ => {
            let median = (values[(n - 1) / 2] + values[n / 2]) / 2.0;
            json!({ "median": median, "min": values[0], "max": values[n - 1] })
        }
    }
}
