//! Forced calls in every dialect: the bundled model under templates and control tokens of other families.
//!
//! The model knows none of these languages, so whatever it writes, it writes because a grammar holds it; what
//! comes back was written in the dialect and read by its own reader.

mod common;
#[path = "common/server.rs"]
mod server;

use std::path::Path;

use common::{GPT_OSS, model};
use serde_json::{Value, json};
use server::Server;

/// A dialect: a template as its models have it, cut to what decides the format, and its control tokens.
struct Dialect {
    name: &'static str,
    template: &'static str,
    markers: &'static [&'static str],
    /// What raw text of a call contains.
    written: &'static [&'static str],
}

const TURNS: &str =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}";

const DIALECTS: [Dialect; 7] = [
    Dialect {
        name: "harmony",
        template: "{# <|channel|> <|message|> #}{{ tools | length }}TURNS<|start|>assistant",
        markers: &[
            "<|start|>",
            "<|channel|>",
            "<|message|>",
            "<|constrain|>",
            "<|end|>",
            "<|call|>",
        ],
        written: &["<|channel|>commentary to=functions.get_tide", "<|constrain|>json<|message|>{"],
    },
    Dialect {
        name: "qwen3_json",
        template: "{# <tool_call> #}{{ tools | length }}TURNS<|im_start|>assistant\n",
        markers: &["<tool_call>", "</tool_call>"],
        written: &["<tool_call>\n{\"name\":", "\n</tool_call>"],
    },
    Dialect {
        name: "qwen_xml",
        template: "{# <tool_call><function= #}{{ tools | length }}TURNS<|im_start|>assistant\n",
        markers: &["<tool_call>", "</tool_call>"],
        written: &[
            "<function=get_tide>\n<parameter=port>\n",
            "\n</parameter>",
            "</function>\n</tool_call>",
        ],
    },
    Dialect {
        name: "gemma4",
        template: "{# <|tool_call> #}{{ tools | length }}TURNS<|im_start|>model\n",
        markers: &["<|tool_call>", "<tool_call|>", "<|\"|>"],
        written: &["<|tool_call>call:get_tide{port:<|\"|>", "days:", "}<tool_call|>"],
    },
    Dialect {
        name: "mistral",
        template: "{# [TOOL_CALLS][ARGS] #}{{ tools | length }}TURNS",
        markers: &["[TOOL_CALLS]", "[ARGS]"],
        written: &["[TOOL_CALLS]get_tide[ARGS]{"],
    },
    Dialect {
        name: "mistral with lists",
        template: "{# [TOOL_CALLS] #}{{ tools | length }}TURNS",
        markers: &["[TOOL_CALLS]"],
        written: &["[TOOL_CALLS][{\"name\":", "}]"],
    },
    Dialect {
        name: "llama3",
        template: "{# <|python_tag|> #}{{ tools | length }}TURNS",
        markers: &["<|python_tag|>"],
        written: &["{\"name\":", "\"parameters\":"],
    },
];

/// The bundled model with another template; its last tokens are the dialect's markers, if they shall be tokens.
fn dressed(dialect: &Dialect, tokens: bool, dir: &Path) {
    let from = model(GPT_OSS);
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        std::fs::copy(from.join(name), dir.join(name)).unwrap();
    }
    let read = |name: &str| -> Value {
        serde_json::from_str(&std::fs::read_to_string(from.join(name)).unwrap()).unwrap()
    };
    let write = |name: &str, value: &Value| {
        std::fs::write(dir.join(name), value.to_string()).unwrap();
    };
    let mut config = read("tokenizer_config.json");
    config["chat_template"] = dialect.template.replace("TURNS", TURNS).into();
    write("tokenizer_config.json", &config);
    let mut tokenizer = read("tokenizer.json");
    if tokens {
        let vocab = tokenizer["model"]["vocab"].as_object_mut().unwrap();
        let mut words: Vec<(String, u64)> =
            vocab.iter().map(|(word, id)| (word.clone(), id.as_u64().unwrap())).collect();
        words.sort_by_key(|(_, id)| std::cmp::Reverse(*id));
        let mut gone = Vec::new();
        let mut added = Vec::new();
        for (marker, (word, id)) in dialect.markers.iter().zip(words) {
            vocab.remove(&word);
            vocab.insert((*marker).to_owned(), id.into());
            added.push(json!({ "id": id, "content": marker, "special": true, "normalized": false,
                "single_word": false, "lstrip": false, "rstrip": false }));
            gone.push(word);
        }
        tokenizer["model"]["merges"].as_array_mut().unwrap().retain(|merge| {
            let whole = match merge {
                Value::Array(pair) => pair.iter().map(|p| p.as_str().unwrap()).collect::<String>(),
                text => text.as_str().unwrap().replacen(' ', "", 1),
            };
            !gone.contains(&whole)
        });
        tokenizer["added_tokens"].as_array_mut().unwrap().extend(added);
    }
    write("tokenizer.json", &tokenizer);
}

fn tools() -> Value {
    json!([
        { "type": "function", "function": { "name": "get_tide", "parameters": {
            "type": "object",
            "properties": {
                "port": { "type": "string", "enum": ["Oban", "Lerwick"] },
                "days": { "type": "integer", "minimum": 1, "maximum": 3 },
                "metric": { "type": "boolean" },
                "marks": { "type": "array", "items": { "type": "string", "enum": ["high", "low"] }, "maxItems": 2 },
                "place": { "type": "object", "properties": {
                    "x": { "type": "integer", "minimum": 0, "maximum": 9 }, "y": { "type": "null" } },
                    "required": ["x"], "additionalProperties": false },
            },
            "required": ["port", "days", "place"], "additionalProperties": false } } },
        { "type": "function", "function": { "name": "ping", "parameters": {
            "type": "object", "properties": {}, "additionalProperties": false } } },
    ])
}

/// Whether arguments are as the schema of `get_tide` has it.
fn check(arguments: &Value) {
    let object = arguments.as_object().unwrap();
    assert!(["Oban", "Lerwick"].contains(&object["port"].as_str().unwrap()), "{arguments}");
    assert!((1..=3).contains(&object["days"].as_i64().unwrap()), "{arguments}");
    let place = object["place"].as_object().unwrap();
    assert!((0..=9).contains(&place["x"].as_i64().unwrap()), "{arguments}");
    assert!(
        place.get("y").is_none_or(Value::is_null) && place.keys().all(|k| k == "x" || k == "y")
    );
    assert!(object.get("metric").is_none_or(Value::is_boolean), "{arguments}");
    if let Some(marks) = object.get("marks") {
        let marks = marks.as_array().unwrap();
        assert!(marks.len() <= 2 && marks.iter().all(|m| m == "high" || m == "low"), "{arguments}");
    }
    let known = ["port", "days", "metric", "marks", "place"];
    assert!(object.keys().all(|key| known.contains(&key.as_str())), "{arguments}");
}

#[test]
fn forced_calls_are_calls_in_every_dialect() {
    for (dialect, tokens) in DIALECTS.iter().flat_map(|d| [(d, true), (d, false)]) {
        let name =
            format!("{}, markers are {}", dialect.name, if tokens { "tokens" } else { "text" });
        let dir = tempfile::tempdir().unwrap();
        dressed(dialect, tokens, dir.path());
        let server = Server::start(dir.path(), &["--context", "1024"]);
        for seed in 0..6 {
            let choice = match seed % 2 {
                0 => json!({ "type": "function", "function": { "name": "get_tide" } }),
                _ => json!("required"),
            };
            let body = json!({
                "messages": [{ "role": "user", "content": "How is the tide?" }], "tools": tools(),
                "tool_choice": choice, "parallel_tool_calls": false, "max_tokens": 300, "seed": seed,
                "reasoning_effort": if seed < 4 { "none" } else { "low" },
                "temperature": if seed < 2 { 0.0 } else { 1.0 },
            });
            let answer = server.good("/v1/chat/completions", &body);
            let choice = &answer["choices"][0];
            if choice["finish_reason"] == "length" {
                // Reasoning takes half of the tokens; spelt letter by letter, the markers take most of the others.
                assert!(dialect.name == "harmony" && !tokens && seed >= 4, "{name}: {answer}");
                assert!(choice["message"]["tool_calls"].is_null(), "{name}: {answer}");
                continue;
            }
            assert_eq!(choice["finish_reason"], "tool_calls", "{name}: {answer}");
            assert_eq!(choice["message"]["content"], Value::Null, "{name}: {answer}");
            let calls = choice["message"]["tool_calls"].as_array().unwrap();
            assert_eq!(calls.len(), 1, "{name}: {answer}");
            let arguments = calls[0]["function"]["arguments"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            match calls[0]["function"]["name"].as_str().unwrap() {
                "get_tide" => check(&arguments),
                other => {
                    assert_eq!((other, &arguments), ("ping", &json!({})), "{name}");
                    assert_eq!(seed % 2, 1, "{name}");
                }
            }
            // The same, streamed.
            let mut body = body;
            body["stream"] = true.into();
            let events = server.post("/v1/chat/completions", &body).events();
            let call = events.iter().find_map(|e| e["choices"][0]["delta"]["tool_calls"].get(0));
            assert_eq!(call.unwrap()["function"], calls[0]["function"], "{name}");
        }
        written(dialect, tokens, &server, &name);
    }
}

/// What the model writes is the dialect: the log-probabilities' tokens are the raw text.
fn written(dialect: &Dialect, tokens: bool, server: &Server, name: &str) {
    for seed in 0..20 {
        let body = json!({
            "messages": [{ "role": "user", "content": "How is the tide?" }], "tools": tools(),
            "tool_choice": { "type": "function", "function": { "name": "get_tide" } },
            "max_tokens": 300, "seed": seed, "temperature": 1.0, "logprobs": true,
            "reasoning_effort": "none",
        });
        let answer = server.good("/v1/chat/completions", &body);
        let choice = &answer["choices"][0];
        if choice["finish_reason"] != "tool_calls" {
            continue;
        }
        let list = choice["logprobs"]["content"].as_array().unwrap();
        let raw: String = list.iter().map(|t| t["token"].as_str().unwrap()).collect();
        for part in dialect.written {
            assert!(raw.contains(part), "{name}: {part:?} is not in {raw:?}");
        }
        if tokens && dialect.name != "llama3" {
            let first = dialect.markers.iter().any(|m| list.iter().any(|t| t["token"] == *m));
            assert!(first, "{name}: no marker is a token of {raw:?}");
        }
        return;
    }
    panic!("{name}: no answer came to its call");
}
