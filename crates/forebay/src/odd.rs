//! What is odd about a model: nothing that keeps it from running, but what a person should know before blaming
//! the answers. `inspect` shows it.
//!
//! Not here: what is refused (the readers do that) and what the readers passed over (the spec's notes).

use std::collections::{BTreeMap, BTreeSet};

use forebay_engine::engine::Opened;
use forebay_files::Source;
use forebay_models::{ExpertWeights, WeightRef};
use forebay_text::{ChatRequest, ChatTemplate, Tokenizer};
use serde_json::json;

/// Direct reads begin and end at multiples of this.
const DISK_BLOCK: u64 = 4096;

/// One line for each odd thing.
pub fn warnings(
    opened: &Opened,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
) -> Vec<String> {
    let mut out = opened.spec.notes.clone();
    out.extend(text(opened, tokenizer, template));
    out.extend(mix(opened));
    out.extend(experts_between_blocks(opened));
    out
}

/// Tokenizer, template and what goes with them.
fn text(opened: &Opened, tokenizer: &Tokenizer, template: Option<&ChatTemplate>) -> Vec<String> {
    let mut out = Vec::new();
    match template {
        None => out.push("no chat template: prompts are taken as they are".into()),
        Some(template) if tokenizer.adds_bos() => {
            let bos = tokenizer.bos_text().unwrap_or_default();
            if opening(template, &bos).is_some_and(|text| text.starts_with(&*bos)) {
                out.push(format!(
                    "the chat template writes {bos} and the tokenizer adds it too: it is put in front once"
                ));
            }
        }
        Some(_) => {}
    }
    if let Some(name) = tokenizer.approximated() {
        out.push(format!("pre-tokenizer {name:?} is approximated"));
    }
    let rows = opened.spec.vocab_size;
    if tokenizer.vocab_size() > rows {
        let tokens = tokenizer.vocab_size();
        out.push(format!("the tokenizer has {tokens} tokens and the embedding {rows} rows"));
    }
    if tokenizer.eos_ids().is_empty() && opened.spec.eos_ids.is_empty() {
        out.push("no end token is named: answers end at the token limit only".into());
    }
    if let Source::Folder { generation_config: None, .. } = opened.catalog.source {
        out.push("no generation_config.json: sampling follows Forebay's defaults".into());
    }
    out
}

/// What the template writes for the shortest conversation.
fn opening(template: &ChatTemplate, bos: &str) -> Option<String> {
    let request = ChatRequest {
        messages: vec![json!({"role": "user", "content": "Hi"})],
        bos_token: Some(bos.to_owned()),
        ..ChatRequest::default()
    };
    template.render(&request).ok()
}

/// Unusual mixes of formats. Two formats in one place are the rule in files of llama.cpp, which give some layers more
/// bits; three are not, nor are routers that were rounded, nor experts with more bits than what every token uses.
fn mix(opened: &Opened) -> Vec<String> {
    let bits = |w: &WeightRef| {
        let bytes = w.format.matrix_bytes(w.rows, w.cols).unwrap_or(0) as f64;
        8.0 * bytes / (w.rows * w.cols) as f64
    };
    let mut places: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let mut coarse_routers = BTreeSet::new();
    let (mut trunk_bits, mut expert_bits) = (Average::default(), Average::default());
    for w in &opened.program.weights {
        places.entry(place(&w.name)).or_default().insert(w.format.name());
        trunk_bits.add(bits(w), w.rows * w.cols);
    }
    for layer in &opened.spec.layers {
        let Some(routed) = &layer.ffn.routed else { continue };
        let router = &routed.router.weight.weight;
        if bits(router) < 8.0 {
            coarse_routers.insert(router.format.name());
        }
        for ExpertWeights { gate, up, down } in &routed.experts.weights {
            for w in [gate, up, down] {
                places.entry(place(&w.name)).or_default().insert(w.format.name());
                expert_bits.add(bits(w), w.rows * w.cols);
            }
        }
    }
    let mut out = Vec::new();
    for (place, formats) in places.iter().filter(|(_, formats)| formats.len() > 2) {
        let formats: Vec<&str> = formats.iter().map(String::as_str).collect();
        out.push(format!("unusual mix: {place} is stored in {}", formats.join(", ")));
    }
    for format in coarse_routers {
        out.push(format!("unusual mix: routers are stored as {format}, which moves their choices"));
    }
    if let (Some(trunk), Some(experts)) = (trunk_bits.value(), expert_bits.value())
        && experts > trunk + 1.0
    {
        out.push(format!(
            "unusual mix: experts have {experts:.1} bits per weight and what every token uses only {trunk:.1}"
        ));
    }
    out
}

/// A tensor's name without the numbers of layer and expert.
fn place(name: &str) -> String {
    let part =
        |p: &str| if p.bytes().all(|b| b.is_ascii_digit()) { "*".into() } else { p.to_owned() };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

#[derive(Default)]
struct Average {
    sum: f64,
    weight: f64,
}

impl Average {
    fn add(&mut self, value: f64, weight: usize) {
        self.sum += value * weight as f64;
        self.weight += weight as f64;
    }

    fn value(&self) -> Option<f64> {
        (self.weight > 0.0).then(|| self.sum / self.weight)
    }
}

/// How much more than its bytes reading an expert takes, because it begins or ends inside a block of the disk.
fn experts_between_blocks(opened: &Opened) -> Option<String> {
    let (mut wanted, mut read, mut alignment) = (0u64, 0u64, DISK_BLOCK);
    for expert in opened.store.layers.iter().flat_map(|l| &l.experts) {
        for plane in [&expert.gate, &expert.up, &expert.down].into_iter().flat_map(|m| &m.planes) {
            let (start, end) = (plane.extent.offset, plane.extent.offset + plane.extent.len);
            wanted += end - start;
            read += end.next_multiple_of(DISK_BLOCK) - start / DISK_BLOCK * DISK_BLOCK;
            alignment = alignment.min(1 << start.trailing_zeros().min(63));
        }
    }
    (read > wanted).then(|| {
        let more = 100.0 * (read - wanted) as f64 / wanted as f64;
        format!(
            "experts are stored unaligned (to {alignment} bytes): direct reads take {more:.2}% more than their bytes"
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places() {
        assert_eq!(place("blk.12.ffn_up_exps.weight"), "blk.*.ffn_up_exps.weight");
        assert_eq!(place("model.layers.0.mlp.experts.7.w1"), "model.layers.*.mlp.experts.*.w1");
    }
}
