//! How much a template may make while it renders one prompt.
//!
//! A template is somebody else's program, and its values cannot be counted when they are dropped: what is bounded is
//! all that is made in one rendering, whether it lives on or not. A rendering belongs to one thread, and so do its
//! allowances.
//!
//! Not here: which operation costs what ([`super::costs`]), and the number of steps, which is minijinja's fuel.

use std::cell::Cell;

use minijinja::value::ValueKind;
use minijinja::{Error, ErrorKind, Value};
use serde_json::Value as Json;

/// Bytes that every template may make, whatever the conversation.
pub(crate) const BASE_BYTES: u64 = 16 << 20;
/// Bytes that it may make for each byte of the request: templates cut, trim, join and write a message several times.
pub(crate) const PER_INPUT_BYTE: u64 = 32;
/// Bytes that comparing and searching may look at, in the same two parts.
const BASE_SCAN: u64 = 1 << 30;
const SCAN_PER_INPUT_BYTE: u64 = 1024;
/// Values that hold values: as many may lie in one another, and dropping them recurses.
const NESTINGS: u64 = 4096;
/// Depth to which a value is printed or compared, as both recurse.
const MAX_DEPTH: usize = 200;
/// What a step of a walk over values counts as looked at: as long as it takes to look at so many bytes.
const STEP: u64 = 256;
/// A value, besides the text or the items that it holds.
pub(crate) const VALUE_BYTES: u64 = 32;

#[derive(Clone, Copy)]
struct Left {
    bytes: u64,
    scan: u64,
    nestings: u64,
    exceeded: Option<&'static str>,
}

thread_local! {
    static LEFT: Cell<Left> =
        const { Cell::new(Left { bytes: 0, scan: 0, nestings: 0, exceeded: None }) };
}

/// Starts a rendering on this thread, of a request of so many bytes.
pub(crate) fn start(input_bytes: u64) {
    LEFT.set(Left {
        bytes: BASE_BYTES.saturating_add(input_bytes.saturating_mul(PER_INPUT_BYTE)),
        scan: BASE_SCAN.saturating_add(input_bytes.saturating_mul(SCAN_PER_INPUT_BYTE)),
        nestings: NESTINGS,
        exceeded: None,
    });
}

/// The limit that this thread's rendering ran into, if it did: a template cannot go on from there.
pub(crate) fn exceeded() -> Option<&'static str> {
    LEFT.get().exceeded
}

/// What the limits are, for a message.
pub(crate) fn limits() -> String {
    let mib = BASE_BYTES >> 20;
    format!(
        "{mib} MiB made in all and {PER_INPUT_BYTE} bytes for each of the request, {NESTINGS} values of values"
    )
}

fn take(of: impl FnOnce(&mut Left) -> (&mut u64, &'static str), amount: u64) -> Result<(), Error> {
    let mut left = LEFT.get();
    let (store, name) = of(&mut left);
    let rest = store.checked_sub(amount);
    *store = rest.unwrap_or(0);
    if rest.is_none() {
        left.exceeded.get_or_insert(name);
    }
    let exceeded = left.exceeded;
    LEFT.set(left);
    match exceeded {
        None => Ok(()),
        Some(name) => Err(Error::new(ErrorKind::InvalidOperation, name)),
    }
}

/// So many bytes are about to be made.
pub(crate) fn make(bytes: u64) -> Result<(), Error> {
    take(|left| (&mut left.bytes, "the memory it may take"), bytes)
}

/// So many bytes are about to be looked at.
pub(crate) fn scan(bytes: u64) -> Result<(), Error> {
    take(|left| (&mut left.scan, "the data it may go through"), bytes)
}

/// A value is about to hold others that may hold others.
pub(crate) fn nest() -> Result<(), Error> {
    take(|left| (&mut left.nestings, "the nesting of values"), 1)
}

/// What a value is as a tree, one that is in it twice counted twice.
#[derive(Clone, Copy, Default)]
pub(crate) struct Weight {
    /// Of all texts.
    pub(crate) text_bytes: u64,
    /// Values.
    pub(crate) nodes: u64,
    /// Values in one another.
    pub(crate) depth: u64,
}

impl Weight {
    /// About what it is when it is written.
    pub(crate) fn bytes(self) -> u64 {
        self.text_bytes.saturating_add(self.nodes.saturating_mul(VALUE_BYTES))
    }
}

/// Weighs a value. The walk itself counts as looked at, so that one that never ends is an error.
pub(crate) fn weigh(value: &Value) -> Result<Weight, Error> {
    let mut weight = Weight::default();
    walk(value, 1, &mut weight)?;
    Ok(weight)
}

fn walk(value: &Value, depth: usize, weight: &mut Weight) -> Result<(), Error> {
    weight.nodes += 1;
    weight.depth = weight.depth.max(depth as u64);
    if let Some(text) = value.as_str() {
        weight.text_bytes += text.len() as u64;
        return scan(STEP + text.len() as u64);
    }
    scan(STEP)?;
    if !holds(value) {
        return Ok(());
    }
    if depth >= MAX_DEPTH {
        return take(|left| (&mut left.nestings, "the nesting of values"), u64::MAX);
    }
    let is_map = value.kind() == ValueKind::Map;
    for item in value.try_iter().into_iter().flatten() {
        walk(&item, depth + 1, weight)?;
        if is_map && let Ok(held) = value.get_item(&item) {
            walk(&held, depth + 1, weight)?;
        }
    }
    Ok(())
}

/// Whether the value may hold others.
pub(crate) fn holds(value: &Value) -> bool {
    matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::Iterable | ValueKind::Plain)
}

/// Items of a value, letters of a text.
pub(crate) fn len(value: &Value) -> u64 {
    match value.as_str() {
        Some(text) => text.len() as u64,
        None => value.len().unwrap_or(0) as u64,
    }
}

/// Bytes of a request's JSON.
pub(crate) fn json_bytes(json: &Json) -> u64 {
    match json {
        Json::String(text) => 8 + text.len() as u64,
        Json::Array(items) => 8 + items.iter().map(json_bytes).sum::<u64>(),
        Json::Object(map) => map.iter().map(|(key, v)| 8 + key.len() as u64 + json_bytes(v)).sum(),
        _ => 8,
    }
}

/// Whether so many bytes could still be made; none are taken.
pub(crate) fn fits(bytes: u64) -> Result<(), Error> {
    if bytes <= LEFT.get().bytes { Ok(()) } else { make(bytes) }
}
