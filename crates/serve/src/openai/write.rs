//! Answers to bodies of chat completions and completions, whole and in chunks.

use forebay_chat::{Call, Delta};
use forebay_schedule::Usage;
use serde_json::{Map, Value, json};

use super::error_body;
use super::read::Style;
use crate::service::{Answers, Event, Service, TokenInfo, Whole};
use crate::stream::Encode;

/// What every object of a response begins with.
pub(super) struct Head {
    id: String,
    calls: String,
    created: u64,
    model: String,
}

impl Head {
    pub fn new(service: &Service, answers: &Answers, legacy: bool) -> Head {
        let prefix = if legacy { "cmpl" } else { "chatcmpl" };
        Head {
            id: format!("{prefix}-{}", answers.id),
            calls: answers.id.clone(),
            created: answers.created,
            model: service.info.name.clone(),
        }
    }

    fn object(&self, object: &str, choices: Value) -> Value {
        json!({
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        })
    }

    fn call(&self, index: usize, number: usize, call: &Call) -> Value {
        json!({
            "id": format!("call_{}_{index}_{number}", self.calls),
            "type": "function",
            "function": { "name": call.name, "arguments": call.arguments },
        })
    }

    pub fn whole(&self, answers: &[Whole], prompt: usize, style: &Style) -> Value {
        let choices = answers.iter().enumerate().map(|(index, answer)| {
            let finish = answer.finished.reason;
            if style.legacy {
                let text = answer.parsed.content.as_deref().unwrap_or_default();
                let logprobs = style.logprobs.then(|| legacy_logprobs(&answer.tokens, 0));
                return json!({
                    "index": index, "text": text, "logprobs": logprobs, "finish_reason": finish,
                });
            }
            let calls = &answer.parsed.tool_calls;
            let content = match &answer.parsed.content {
                None if calls.is_empty() => Some(String::new()),
                content => content.clone(),
            };
            let mut message = json!({ "role": "assistant", "content": content, "refusal": null });
            if let Some(reasoning) = &answer.parsed.reasoning {
                message["reasoning_content"] = reasoning.as_str().into();
            }
            if !calls.is_empty() {
                let calls = calls.iter().enumerate().map(|(i, call)| self.call(index, i, call));
                message["tool_calls"] = calls.collect();
            }
            let logprobs = style.logprobs.then(|| logprobs(&answer.tokens));
            json!({
                "index": index, "message": message, "logprobs": logprobs, "finish_reason": finish,
            })
        });
        let object = if style.legacy { "text_completion" } else { "chat.completion" };
        let mut response = self.object(object, choices.collect());
        response["usage"] = usage(prompt, answers.iter().map(|answer| &answer.finished.usage));
        response
    }
}

fn usage<'u>(prompt: usize, of: impl Iterator<Item = &'u Usage>) -> Value {
    let (mut cached, mut generated) = (0, 0);
    for usage in of {
        cached = cached.max(usage.cached);
        generated += usage.generated;
    }
    json!({
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": { "cached_tokens": cached },
    })
}

fn logprobs(tokens: &[TokenInfo]) -> Value {
    let content = tokens.iter().map(|token| {
        let top = token.top.iter().map(|(text, bytes, logprob)| {
            json!({ "token": text, "logprob": finite(*logprob), "bytes": bytes })
        });
        json!({
            "token": token.text,
            "logprob": finite(token.logprob),
            "bytes": token.bytes,
            "top_logprobs": top.collect::<Vec<_>>(),
        })
    });
    json!({ "content": content.collect::<Vec<_>>(), "refusal": null })
}

/// JSON has no infinities.
fn finite(logprob: f32) -> f32 {
    logprob.max(-9999.0)
}

fn legacy_logprobs(tokens: &[TokenInfo], mut offset: usize) -> Value {
    let mut offsets = Vec::new();
    for token in tokens {
        offsets.push(offset);
        offset += token.text.chars().count();
    }
    let top = tokens.iter().map(|token| {
        let pairs =
            token.top.iter().map(|(text, _, logprob)| (text.clone(), finite(*logprob).into()));
        pairs.collect::<Map<String, Value>>()
    });
    json!({
        "tokens": tokens.iter().map(|token| token.text.as_str()).collect::<Vec<_>>(),
        "token_logprobs": tokens.iter().map(|token| finite(token.logprob)).collect::<Vec<_>>(),
        "top_logprobs": top.collect::<Vec<_>>(),
        "text_offset": offsets,
    })
}

/// One JSON object as an event.
fn data(value: &Value) -> String {
    format!("data: {value}\n\n")
}

/// A response in chunks.
pub(super) struct Chunks {
    head: Head,
    style: Style,
    prompt: usize,
    usages: Vec<Usage>,
    /// Calls and characters per answer, so far.
    calls: Vec<usize>,
    chars: Vec<usize>,
}

impl Chunks {
    pub fn new(head: Head, style: Style, n: usize, prompt: usize) -> Chunks {
        Chunks { head, style, prompt, usages: Vec::new(), calls: vec![0; n], chars: vec![0; n] }
    }

    fn chunk(&self, choices: Value) -> String {
        let object = if self.style.legacy { "text_completion" } else { "chat.completion.chunk" };
        let mut chunk = self.head.object(object, choices);
        if self.style.usage {
            chunk["usage"] = Value::Null;
        }
        data(&chunk)
    }

    fn choice(&self, index: usize, delta: Value, logprobs: Value, finish: Option<&str>) -> String {
        let mut choice = match self.style.legacy {
            true => json!({ "index": index, "text": delta }),
            false => json!({ "index": index, "delta": delta }),
        };
        choice["logprobs"] = logprobs;
        choice["finish_reason"] = finish.into();
        self.chunk(json!([choice]))
    }

    fn piece(&mut self, index: usize, deltas: Vec<Delta>, token: Option<TokenInfo>) -> String {
        let mut logprobs_left = token.map_or(Value::Null, |token| {
            let offset = self.chars[index];
            self.chars[index] += token.text.chars().count();
            match self.style.legacy {
                true => legacy_logprobs(std::slice::from_ref(&token), offset),
                false => logprobs(std::slice::from_ref(&token)),
            }
        });
        let mut out = String::new();
        for delta in deltas {
            let delta = match delta {
                Delta::Content(text) if self.style.legacy => text.into(),
                _ if self.style.legacy => continue,
                Delta::Content(text) => json!({ "content": text }),
                Delta::Reasoning(text) => json!({ "reasoning_content": text }),
                Delta::Call(call) => {
                    let number = self.calls[index];
                    self.calls[index] += 1;
                    let mut call = self.head.call(index, number, &call);
                    call["index"] = number.into();
                    json!({ "tool_calls": [call] })
                }
            };
            out.push_str(&self.choice(index, delta, logprobs_left.take(), None));
        }
        if !logprobs_left.is_null() {
            let nothing = if self.style.legacy { "".into() } else { json!({}) };
            out.push_str(&self.choice(index, nothing, logprobs_left, None));
        }
        out
    }
}

impl Encode for Chunks {
    fn start(&mut self) -> String {
        if self.style.legacy {
            return String::new();
        }
        let role = |index| {
            let delta = json!({ "role": "assistant", "content": "" });
            self.choice(index, delta, Value::Null, None)
        };
        (0..self.calls.len()).map(role).collect()
    }

    fn event(&mut self, index: usize, event: Event) -> String {
        match event {
            Event::Piece { deltas, token } => self.piece(index, deltas, token),
            Event::Done(finished) => {
                self.usages.push(finished.usage);
                let nothing = if self.style.legacy { "".into() } else { json!({}) };
                self.choice(index, nothing, Value::Null, Some(finished.reason))
            }
            Event::Failed(error) => data(&error_body(&error)),
        }
    }

    fn end(&mut self) -> String {
        let mut out = String::new();
        if self.style.usage {
            let object =
                if self.style.legacy { "text_completion" } else { "chat.completion.chunk" };
            let mut chunk = self.head.object(object, json!([]));
            chunk["usage"] = usage(self.prompt, self.usages.iter());
            out = data(&chunk);
        }
        out + "data: [DONE]\n\n"
    }
}
