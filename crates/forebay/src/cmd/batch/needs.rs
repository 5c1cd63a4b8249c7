//! How many positions the answers of a batch will take: all requests are known before the memory plan is made, so keys and
//! values need no more room than these, and experts have the rest.
//!
//! Estimates are enough: an answer that was misjudged waits or pauses like others for which there is no room. So prompts
//! are measured in bytes, and tokens per byte in a sample; templates are rendered only when a line's turn comes.

use forebay_text::{Specials, Tokenizer};
use serde_json::Value;

/// Tokens that a template puts around the messages, and around each.
const TEMPLATE: usize = 128;
const AROUND: usize = 8;
/// Tokens of an answer to `/v1/completions` where nothing is told.
const COMPLETION: usize = 16;
/// Lines whose tokens are counted.
const SAMPLE: usize = 64;

/// What a request will take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Need {
    /// Bytes of its texts.
    bytes: usize,
    /// Tokens besides.
    tokens: usize,
    /// Tokens of an answer at most; none: as many as there is room for.
    max_tokens: Option<usize>,
    /// Answers.
    answers: usize,
}

impl Need {
    /// Of a request.
    pub fn of(body: &Value, is_chat: bool) -> Need {
        // Some clients write 5.0.
        let count = |key: &str| body.get(key).and_then(Value::as_f64).map(|n| n as usize);
        let mut need = Need { answers: count("n").unwrap_or(1).max(1), ..Need::default() };
        let asked = count("max_completion_tokens").or(count("max_tokens"));
        if is_chat {
            need.tokens = TEMPLATE;
            need.max_tokens = asked;
            ["messages", "tools", "response_format"].iter().for_each(|key| need.add(&body[key]));
        } else {
            need.max_tokens = Some(asked.unwrap_or(COMPLETION));
            match body["prompt"].as_array() {
                // Several prompts are several answers; the longest speaks for all.
                Some(prompts) if prompts.iter().any(|p| !p.is_number()) => {
                    let each = prompts.iter().map(|p| {
                        let mut need = Need::default();
                        need.add(p);
                        need
                    });
                    let longest = each.max_by_key(|need| need.bytes + need.tokens);
                    let longest = longest.unwrap_or_default();
                    (need.bytes, need.tokens) = (longest.bytes, longest.tokens);
                    need.answers *= prompts.len();
                }
                _ => need.add(&body["prompt"]),
            }
        }
        need
    }

    fn add(&mut self, value: &Value) {
        match value {
            Value::String(text) => self.bytes += text.len(),
            Value::Array(values) => values.iter().for_each(|value| self.add(value)),
            Value::Object(entries) => {
                self.tokens += AROUND;
                for (key, value) in entries {
                    self.bytes += key.len();
                    self.add(value);
                }
            }
            Value::Bool(_) | Value::Number(_) => self.tokens += 1,
            Value::Null => {}
        }
    }

    fn positions(&self, tokens_per_byte: f64) -> usize {
        let prompt = self.tokens + (self.bytes as f64 * tokens_per_byte).ceil() as usize;
        self.max_tokens.map_or(usize::MAX, |most| prompt.saturating_add(most))
    }
}

/// Positions of the answers that run at once in the worst case, `parallel` at most, longest first.
pub fn positions(needs: &[Need], parallel: usize, tokens_per_byte: f64) -> Vec<usize> {
    let mut positions: Vec<usize> = Vec::new();
    for need in needs {
        let same = need.answers.min(parallel);
        positions.extend(std::iter::repeat_n(need.positions(tokens_per_byte), same));
    }
    positions.sort_unstable_by(|a, b| b.cmp(a));
    positions.truncate(parallel);
    positions
}

/// A part of the lines, from all over the batch, as a sample for [`tokens_per_byte`].
pub fn sample(lines: usize) -> impl Iterator<Item = usize> {
    (0..lines).step_by(lines.div_ceil(SAMPLE).max(1))
}

/// The most tokens per byte that the texts of one of these requests have.
pub fn tokens_per_byte(tokenizer: &Tokenizer, bodies: &[Value]) -> f64 {
    let of = |body: &Value| {
        let mut all = String::new();
        ["messages", "prompt"].iter().for_each(|key| gather(&body[key], &mut all));
        let tokens = tokenizer.encode(&all, Specials::Ignore).ok()?;
        (!all.is_empty()).then(|| tokens.len() as f64 / all.len() as f64)
    };
    bodies.iter().filter_map(of).reduce(f64::max).unwrap_or(1.0)
}

/// Adds the texts in a value.
fn gather(value: &Value, to: &mut String) {
    match value {
        Value::String(text) => to.push_str(text),
        Value::Array(values) => values.iter().for_each(|value| gather(value, to)),
        Value::Object(entries) => entries.values().for_each(|value| gather(value, to)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn need(body: Value, is_chat: bool) -> usize {
        Need::of(&body, is_chat).positions(0.5)
    }

    #[test]
    fn what_a_request_takes() {
        assert_eq!(need(json!({ "prompt": "0123456789", "max_tokens": 90 }), false), 95);
        assert_eq!(need(json!({ "prompt": "0123456789" }), false), 5 + 16);
        assert_eq!(need(json!({ "prompt": [1, 2, 3], "max_tokens": 4.0 }), false), 7);
        let chat = |more: Value| {
            let mut body = json!({ "messages": [{ "role": "user", "content": "0123456789" }] });
            body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            need(body, true)
        };
        // role, user, content and ten bytes
        let prompt = TEMPLATE + AROUND + (4 + 4 + 7 + 10_usize).div_ceil(2);
        assert_eq!(chat(json!({ "max_tokens": 7 })), prompt + 7);
        assert_eq!(chat(json!({ "max_tokens": 7, "max_completion_tokens": 5 })), prompt + 5);
        assert_eq!(chat(json!({})), usize::MAX);
    }

    #[test]
    fn the_longest_that_run_at_once() {
        let of = |prompt: Value, n: usize| {
            Need::of(&json!({ "prompt": prompt, "max_tokens": 10, "n": n }), false)
        };
        let needs = [of(json!("ab"), 1), of(json!(["abcd", "ab"]), 1), of(json!("abcdef"), 3)];
        assert_eq!(positions(&needs, 4, 1.0), [16, 16, 16, 14]);
        assert_eq!(positions(&needs, 100, 1.0), [16, 16, 16, 14, 14, 12]);
        assert_eq!(sample(3).collect::<Vec<_>>(), [0, 1, 2]);
        assert_eq!(sample(1000).count(), 63);
    }
}
