//! Whole answers, as clients get them: free ones, ones that a stop ends, and ones that a grammar holds, greedy and drawn. What a
//! client gets must not depend on who drafts, how many tokens, and where experts lie.
//!
//! Answers go through the scheduler, with beginnings that are kept from one to the next. Every byte of text, every reason for the
//! end and every bit of the log-probabilities is compared with those of resident experts and no drafter.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use forebay_engine::{DrafterChoice, EngineError};
use forebay_schedule::Pace;
use forebay_serve::Service;
use forebay_serve::room::Demand;
use serde_json::{Value, json};

use crate::args::{
    ModelArgs, Options, ResidencyArg, SameArgs, SamplingArgs, SpeculateArg, SwitchArg,
};
use crate::cmd::serve;
use crate::term::Bar;

/// Most tokens of drafts that are tried: the shortest, the usual, and more than a group of rows.
const LENGTHS: [usize; 5] = [1, 2, 3, 5, 8];

/// Characters of a stop.
const STOP: usize = 6;

/// What came of comparing.
#[derive(Debug, Default)]
pub struct Compared {
    /// Answers that were compared.
    pub answers: usize,
    /// Passes with drafts in them.
    pub rounds: u64,
    /// Drafts that were right.
    pub right: u64,
    /// Drafts that were taken back.
    pub wrong: u64,
    /// What differs.
    pub different: Vec<Value>,
}

/// One way to answer.
struct Way {
    residency: ResidencyArg,
    /// Per layer.
    slots: Option<usize>,
    drafter: DrafterChoice,
    tokens: usize,
}

/// A request, without its prompt.
struct Kind {
    name: &'static str,
    fields: Value,
}

/// Compares answers over drafters, lengths of drafts and places of experts.
pub fn compare(
    args: &SameArgs,
    prompt: &[u32],
    drafters: &[DrafterChoice],
    cancel: &AtomicBool,
) -> anyhow::Result<Compared> {
    let given = &args.model.options;
    let plain = Way {
        residency: ResidencyArg::Resident,
        slots: None,
        drafter: DrafterChoice::Off,
        tokens: 0,
    };
    let free = free(args.answers);
    let asking = Asking { args, prompt, cancel };
    let (free_answers, _) = asking.all(&plain, &free)?;
    let kinds: Vec<Kind> = free.into_iter().chain(held(args.answers, &free_answers)).collect();
    let (wanted, _) = asking.all(&plain, &kinds)?;
    let ways = ways(given, drafters, experts(args)?);
    let mut out = Compared::default();
    let bar = Bar::steps("answering");
    for (i, way) in ways.iter().enumerate() {
        let (found, drafts) = asking.all(way, &kinds)?;
        for ((kind, found), wanted) in kinds.iter().zip(&found).zip(&wanted) {
            out.answers += 1;
            if found != wanted {
                out.different.push(json!({
                    "answer": kind.name,
                    "residency": format!("{:?}", way.residency).to_lowercase(),
                    "slots_per_layer": way.slots,
                    "drafter": way.drafter.name(),
                    "draft_tokens": way.tokens,
                }));
            }
        }
        out.rounds += drafts.rounds;
        out.right += drafts.accepted;
        out.wrong += drafts.drafted - drafts.accepted;
        bar.set(i as u64 + 1, ways.len() as u64);
    }
    bar.clear();
    Ok(out)
}

/// Where a request says nothing; all say what decides a choice.
fn sampling() -> SamplingArgs {
    SamplingArgs {
        temp: Some(0.0),
        top_k: Some(0),
        top_p: Some(1.0),
        min_p: Some(0.0),
        repeat_penalty: Some(1.0),
        presence_penalty: 0.0,
        frequency_penalty: 0.0,
        repeat_last_n: 64,
        seed: 0,
    }
}

/// Free answers: greedy and drawn, with all that decides a choice.
fn free(tokens: usize) -> Vec<Kind> {
    let greedy =
        json!({ "max_tokens": tokens, "logprobs": 3, "temperature": 0, "ignore_eos": true });
    let drawn = json!({
        "max_tokens": tokens, "logprobs": 3, "temperature": 0.9, "top_p": 0.95, "top_k": 40, "seed": 5,
        "repeat_penalty": 1.1, "presence_penalty": 0.1, "ignore_eos": true,
        "logit_bias": { "5": 1.5, "300": -2.0 },
    });
    vec![Kind { name: "greedy", fields: greedy }, Kind { name: "drawn", fields: drawn }]
}

/// The same ended by a stop, and held by a grammar.
fn held(tokens: usize, answers: &[Value]) -> Vec<Kind> {
    let schema = json!({
        "type": "object",
        "properties": {
            "title": { "type": "string", "maxLength": 60 },
            "pages": { "type": "integer" },
            "parts": { "type": "array", "minItems": 4, "items": {
                "type": "object",
                "properties": { "name": { "type": "string", "maxLength": 40 }, "old": { "type": "boolean" } },
                "required": ["name", "old"], "additionalProperties": false,
            } },
        },
        "required": ["title", "pages", "parts"], "additionalProperties": false,
    });
    let mut all = Vec::new();
    let names = [["greedy, stop", "greedy, grammar"], ["drawn, stop", "drawn, grammar"]];
    for ((Kind { fields, .. }, answer), [stop, grammar]) in
        free(tokens).into_iter().zip(answers).zip(names)
    {
        if let Some(text) = latest(answer["choices"][0]["text"].as_str().unwrap_or_default()) {
            let mut fields = fields.clone();
            fields["stop"] = json!([text, "never said"]);
            all.push(Kind { name: stop, fields });
        }
        let mut fields = fields;
        fields["ignore_eos"] = false.into();
        fields["response_format"] =
            json!({ "type": "json_schema", "json_schema": { "name": "book", "schema": schema } });
        all.push(Kind { name: grammar, fields });
    }
    all
}

/// The piece of a text that comes for the first time as late as any.
fn latest(text: &str) -> Option<&str> {
    let starts = text.char_indices().map(|(at, _)| at);
    let ends: Vec<usize> = starts.chain([text.len()]).collect();
    let pieces = ends.windows(STOP + 1).map(|w| &text[w[0]..w[STOP]]);
    let firsts = pieces.filter(|piece| !piece.trim().is_empty());
    firsts.max_by_key(|piece| text.find(piece))
}

/// All ways. What was given is not varied.
fn ways(given: &Options, drafters: &[DrafterChoice], experts: usize) -> Vec<Way> {
    let all = [
        (ResidencyArg::Resident, None),
        (ResidencyArg::Stream, Some(1)),
        (ResidencyArg::Stream, Some((experts / 2).max(1))),
        (ResidencyArg::Mapped, None),
    ];
    let places = all.into_iter().filter(|(residency, _)| match given.residency {
        ResidencyArg::Auto => experts > 0 || *residency == ResidencyArg::Resident,
        one => *residency == one,
    });
    let mut out = Vec::new();
    for (residency, slots) in places {
        for drafter in drafters {
            let lengths = match (drafter, given.draft_tokens) {
                (DrafterChoice::Off, _) => vec![0],
                (_, Some(n)) => vec![n],
                // The widest matrix where it is quickest.
                _ if residency == ResidencyArg::Resident => LENGTHS.to_vec(),
                _ => vec![LENGTHS[0], LENGTHS[3]],
            };
            let way = |tokens| Way {
                residency,
                slots: slots.or(given.slots),
                drafter: drafter.clone(),
                tokens,
            };
            out.extend(lengths.into_iter().map(way));
        }
    }
    out
}

/// Experts of the routed layer that has most; 0: none is routed.
fn experts(args: &SameArgs) -> anyhow::Result<usize> {
    let (opened, ..) = crate::model::open(&args.model, |_| {})?;
    Ok(opened.program.moes.iter().map(|moe| moe.n_experts).max().unwrap_or(0))
}

/// What all answers have in common.
struct Asking<'a> {
    args: &'a SameArgs,
    prompt: &'a [u32],
    cancel: &'a AtomicBool,
}

impl Asking<'_> {
    /// All kinds of answers in one way, and what became of drafts.
    fn all(
        &self,
        way: &Way,
        kinds: &[Kind],
    ) -> anyhow::Result<(Vec<Value>, forebay_engine::SpeculationStats)> {
        let service = Arc::new(self.service(way)?);
        let runtime = tokio::runtime::Builder::new_current_thread().build()?;
        let mut answers = Vec::with_capacity(kinds.len());
        for kind in kinds {
            if self.cancel.load(Ordering::Relaxed) {
                return Err(EngineError::Cancelled.into());
            }
            let mut body = kind.fields.clone();
            body["prompt"] = json!(self.prompt);
            let answer = runtime.block_on(service.answer("/v1/completions", &body));
            let answer = answer.map_err(|e| anyhow::anyhow!("{}: {}", kind.name, e.message))?;
            // What says when and by whom it was answered is left out.
            answers.push(json!({ "choices": answer["choices"], "usage": answer["usage"]["completion_tokens"] }));
        }
        let scheduler = service.scheduler();
        let drafts =
            scheduler.with_engine(|engine| engine.speculation().map(|(_, counts, _)| counts));
        scheduler.close();
        scheduler.join();
        Ok((answers, drafts.ok().flatten().unwrap_or_default()))
    }

    fn service(&self, way: &Way) -> anyhow::Result<Service> {
        let mut model: ModelArgs = self.args.model.clone();
        let o = &mut model.options;
        o.residency = way.residency;
        o.slots = way.slots;
        o.warm = SwitchArg::Off;
        o.context.get_or_insert(self.prompt.len() + self.args.answers + 1);
        o.speculate_always = true;
        o.draft_tokens = (way.tokens > 0).then_some(way.tokens);
        let (speculate, draft_model) = match &way.drafter {
            DrafterChoice::Off | DrafterChoice::Scripted(_) => (SpeculateArg::Off, None),
            DrafterChoice::Auto => (SpeculateArg::Auto, None),
            DrafterChoice::Ngram => (SpeculateArg::Ngram, None),
            DrafterChoice::Mtp => (SpeculateArg::Mtp, None),
            DrafterChoice::Model(path) => (SpeculateArg::Draft, Some(path.clone())),
            DrafterChoice::Dflash(path) => (SpeculateArg::Dflash, Some(path.clone())),
        };
        o.speculate = Some(speculate);
        o.draft_model = draft_model;
        let load = serve::Load {
            parallel: 1,
            contexts: forebay_engine::Contexts::Each,
            needs: None,
            queue: 1,
            room: Demand { max_body: None, connections: 0, constrained: 1 },
            pace: Pace::Flowing,
            steers_all: true,
            quiet: true,
        };
        Ok(serve::service(&model, &sampling(), load, None)?.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_comes_late() {
        assert_eq!(latest("abc"), None);
        assert_eq!(latest("abcdef"), Some("abcdef"));
        assert_eq!(latest("aaaaaaaaaaaaaaaaaaaabcdefg"), Some("bcdefg"));
        // What repeats itself to the end stops where it came first.
        assert_eq!(latest("xyzxyzxyzxyzxyz"), Some("zxyzxy"));
        assert_eq!(latest("éééééü"), Some("éééééü"));
    }
}
