//! The server, through its routes: what clients get, and what they get when they ask wrongly.

mod common;
#[path = "common/server.rs"]
mod server;

use std::io::Read;
use std::sync::LazyLock;

use common::{GPT_OSS, model};
use serde_json::{Value, json};
use server::{Server, read};

/// One server for all tests that leave it as it was.
static SERVER: LazyLock<Server> =
    LazyLock::new(|| Server::start(&model(GPT_OSS), &["--temp", "0", "--context", "512"]));

fn user(text: &str) -> Value {
    json!([{ "role": "user", "content": text }])
}

fn chat(extra: Value) -> Value {
    let mut body = json!({ "messages": user("Tell me a story about a fox."), "max_tokens": 16 });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

fn text(response: &Value) -> &str {
    response["choices"][0]["message"]["content"].as_str().unwrap()
}

const CHAT: &str = "/v1/chat/completions";

#[test]
fn chat_whole_and_streamed_are_the_same() {
    let whole = SERVER.good(CHAT, &chat(json!({ "logprobs": true, "top_logprobs": 2 })));
    assert_eq!(whole["object"], "chat.completion");
    assert_eq!(whole["choices"][0]["finish_reason"], "length");
    assert_eq!(whole["usage"]["completion_tokens"], 16);
    let total = whole["usage"]["prompt_tokens"].as_u64().unwrap() + 16;
    assert_eq!(whole["usage"]["total_tokens"], total);
    let tokens = whole["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(tokens.len(), 16);
    let joined: String = tokens.iter().map(|t| t["token"].as_str().unwrap()).collect();
    assert_eq!(joined, text(&whole));
    for token in tokens {
        assert_eq!(token["top_logprobs"].as_array().unwrap().len(), 2);
        // Greedy: the most likely is the one that was taken.
        assert_eq!(token["top_logprobs"][0]["token"], token["token"]);
        assert!(token["logprob"].as_f64().unwrap() <= 0.0);
    }
    let options =
        json!({ "stream": true, "stream_options": { "include_usage": true }, "logprobs": true });
    let response = SERVER.post(CHAT, &chat(options));
    assert!(response.headers.contains("text/event-stream"));
    let events = response.events();
    assert_eq!(events.last().unwrap(), "[DONE]");
    assert_eq!(events[0]["choices"][0]["delta"]["role"], "assistant");
    let streamed: String =
        events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, text(&whole));
    let logged = events.iter().filter_map(|e| e["choices"][0]["logprobs"]["content"].as_array());
    let logged: Vec<&Value> = logged.flatten().collect();
    assert_eq!(logged.len(), 16);
    for (a, b) in logged.iter().zip(tokens) {
        assert_eq!((&a["token"], &a["logprob"]), (&b["token"], &b["logprob"]));
    }
    let usage = &events[events.len() - 2];
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 16);
    let finish = &events[events.len() - 3];
    assert_eq!(finish["choices"][0]["finish_reason"], "length");
}

#[test]
fn limits_stops_choices_and_seeds() {
    for (limit, name) in [(0, "max_tokens"), (1, "max_completion_tokens"), (5, "max_tokens")] {
        let mut body = chat(json!({}));
        body["max_tokens"] = Value::Null;
        body[name] = limit.into();
        let answer = SERVER.good(CHAT, &body);
        assert_eq!(answer["usage"]["completion_tokens"], limit);
        assert_eq!(answer["choices"][0]["finish_reason"], "length");
    }
    let whole = SERVER.good(CHAT, &chat(json!({})));
    let whole = text(&whole);
    // A stop inside: everything before it, whole and streamed.
    let stop: String = whole.chars().skip(12).take(5).collect();
    let before = whole.split(stop.as_str()).next().unwrap();
    let stopped = SERVER.good(CHAT, &chat(json!({ "stop": [stop, "never"] })));
    assert_eq!(text(&stopped), before);
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
    let events = SERVER.post(CHAT, &chat(json!({ "stop": stop, "stream": true }))).events();
    let streamed: String =
        events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(streamed, before);

    let sampled = |seed: i64, n: usize| {
        SERVER.good(CHAT, &chat(json!({ "temperature": 1.5, "seed": seed, "n": n })))
    };
    let three = sampled(7, 3);
    let texts: Vec<&Value> =
        three["choices"].as_array().unwrap().iter().map(|c| &c["message"]["content"]).collect();
    assert_eq!(texts.len(), 3);
    assert!(texts[0] != texts[1] || texts[1] != texts[2]);
    assert_eq!(three["usage"]["completion_tokens"], 48);
    // The same seed gives the same answer, among others or alone.
    assert_eq!(&sampled(7, 1)["choices"][0]["message"]["content"], texts[0]);
    assert_eq!(&sampled(8, 1)["choices"][0]["message"]["content"], texts[1]);
}

#[test]
fn completions_take_text_and_ids() {
    let body = json!({ "prompt": "Once upon a time", "max_tokens": 8, "logprobs": 2 });
    let answer = SERVER.good("/v1/completions", &body);
    assert_eq!(answer["object"], "text_completion");
    let logprobs = &answer["choices"][0]["logprobs"];
    let tokens = logprobs["tokens"].as_array().unwrap();
    let joined: String = tokens.iter().map(|t| t.as_str().unwrap()).collect();
    assert_eq!(answer["choices"][0]["text"], joined.as_str());
    assert_eq!(logprobs["top_logprobs"][3].as_object().unwrap().len(), 2);
    let events = SERVER
        .post(
            "/v1/completions",
            &json!({ "prompt": ["Once upon a time"], "max_tokens": 8, "stream": true }),
        )
        .events();
    let streamed: String = events.iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
    assert_eq!(streamed, joined);
    let ids = SERVER.good("/v1/completions", &json!({ "prompt": [30, 31, 32], "max_tokens": 2 }));
    assert_eq!(ids["usage"]["prompt_tokens"], 3);
    for (prompt, word) in [
        (json!(["a", "b"]), "prompt"),
        (json!([99999]), "vocabulary"),
        (json!(""), "empty"),
        (json!({}), "prompt"),
    ] {
        let response = SERVER.post("/v1/completions", &json!({ "prompt": prompt }));
        assert_eq!(response.status, 400);
        assert!(response.body.contains(word), "{}", response.body);
    }
}

fn tools() -> Value {
    json!([
        { "type": "function", "function": { "name": "get_tide", "description": "Tide times",
          "parameters": { "type": "object", "properties": {
            "port": { "type": "string", "enum": ["Oban", "Lerwick"] }, "days": { "type": "integer", "minimum": 0, "maximum": 9 } },
            "required": ["port", "days"], "additionalProperties": false } } },
        { "type": "function", "function": { "name": "ping", "parameters": { "type": "object", "properties": {}, "additionalProperties": false } } },
    ])
}

#[test]
fn forced_calls_follow_their_schema() {
    let forced = json!({ "type": "function", "function": { "name": "get_tide" } });
    for choice in [forced, json!("required")] {
        let body = chat(json!({
            "tools": tools(), "tool_choice": choice, "max_tokens": 120, "parallel_tool_calls": false,
            "temperature": 0.0,
        }));
        let answer = SERVER.good(CHAT, &body);
        assert_eq!(answer["choices"][0]["finish_reason"], "tool_calls", "{answer}");
        let calls = answer["choices"][0]["message"]["tool_calls"].as_array().unwrap();
        assert_eq!(calls.len(), 1);
        let arguments: Value =
            serde_json::from_str(calls[0]["function"]["arguments"].as_str().unwrap()).unwrap();
        if calls[0]["function"]["name"] == "get_tide" {
            assert!(["Oban", "Lerwick"].contains(&arguments["port"].as_str().unwrap()));
            assert!(arguments["days"].is_i64());
        }
        assert_eq!(answer["choices"][0]["message"]["content"], Value::Null);
        // Streamed, the same.
        let mut body = body;
        body["stream"] = true.into();
        let events = SERVER.post(CHAT, &body).events();
        let call =
            events.iter().find(|e| e["choices"][0]["delta"]["tool_calls"].is_array()).unwrap();
        let call = &call["choices"][0]["delta"]["tool_calls"][0];
        assert_eq!(call["function"], calls[0]["function"]);
        assert_eq!((&call["index"], &call["type"]), (&json!(0), &json!("function")));
    }
    // The result of a call goes back, in a conversation that the template knows nothing of.
    let history = json!([
        { "role": "user", "content": "How is the tide?" },
        { "role": "assistant", "content": null, "tool_calls": [
            { "id": "c1", "type": "function", "function": { "name": "get_tide", "arguments": "{\"port\": \"Oban\"}" } }] },
        { "role": "tool", "tool_call_id": "c1", "content": "high at 7" },
    ]);
    SERVER.good(CHAT, &chat(json!({ "messages": history, "tools": tools() })));
    let none = chat(
        json!({ "tools": tools(), "tool_choice": { "type": "function", "function": { "name": "x" } } }),
    );
    let response = SERVER.post(CHAT, &none);
    assert!(response.status == 400 && response.body.contains("no tool `x`"), "{}", response.body);
}

#[test]
fn structured_output_follows_its_schema() {
    let schema = json!({
        "type": "object",
        "properties": {
            "name": { "type": "string", "maxLength": 8 },
            "kind": { "enum": ["fox", "owl"] },
            "age": { "type": "integer", "minimum": 0, "maximum": 20 },
        },
        "required": ["name", "kind", "age"],
        "additionalProperties": false,
    });
    for temperature in [0.0, 1.0] {
        let format =
            json!({ "type": "json_schema", "json_schema": { "name": "animal", "schema": schema } });
        let body = chat(json!({
            "response_format": format, "max_tokens": 100, "temperature": temperature, "seed": 3,
        }));
        let answer = SERVER.good(CHAT, &body);
        assert_eq!(answer["choices"][0]["finish_reason"], "stop", "{answer}");
        let value: Value = serde_json::from_str(text(&answer)).unwrap();
        assert!(value["name"].as_str().unwrap().chars().count() <= 8);
        assert!(["fox", "owl"].contains(&value["kind"].as_str().unwrap()));
        assert!((0..=20).contains(&value["age"].as_i64().unwrap()));
        assert_eq!(value.as_object().unwrap().len(), 3);
    }
    let body = chat(json!({ "response_format": { "type": "json_object" }, "max_tokens": 200 }));
    let answer = SERVER.good(CHAT, &body);
    if answer["choices"][0]["finish_reason"] == "stop" {
        assert!(serde_json::from_str::<Value>(text(&answer)).unwrap().is_object());
    } else {
        assert!(text(&answer).starts_with('{'));
    }
    let bad = json!({ "type": "json_schema", "json_schema": { "name": "x", "schema": { "type": "martian" } } });
    let response = SERVER.post(CHAT, &chat(json!({ "response_format": bad })));
    assert!(
        response.status == 400 && response.body.contains("response_format"),
        "{}",
        response.body
    );
}

#[test]
fn anthropic_messages() {
    let body = json!({
        "model": "tiny-gpt-oss", "max_tokens": 12, "system": [{ "type": "text", "text": "Be brief." }],
        "messages": [
            { "role": "user", "content": [{ "type": "text", "text": "A story?" }] },
            { "role": "assistant", "content": [{ "type": "tool_use", "id": "t1", "name": "ping", "input": {} }] },
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "t1", "content": "pong" },
                                          { "type": "text", "text": "Go on." }] },
        ],
    });
    let whole = SERVER.good("/v1/messages", &body);
    assert_eq!((&whole["type"], &whole["role"]), (&json!("message"), &json!("assistant")));
    assert_eq!(whole["stop_reason"], "max_tokens");
    assert_eq!(whole["usage"]["output_tokens"], 12);
    let count = SERVER.good("/v1/messages/count_tokens", &body)["input_tokens"].as_u64().unwrap();
    let usage = &whole["usage"];
    let read = usage["cache_read_input_tokens"].as_u64().unwrap();
    assert_eq!(usage["input_tokens"].as_u64().unwrap() + read, count);
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = SERVER.post("/v1/messages", &streamed).events();
    let kinds: Vec<&str> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
    assert_eq!(&kinds[..3], ["message_start", "ping", "content_block_start"]);
    assert_eq!(&kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let text: String = events.iter().filter_map(|e| e["delta"]["text"].as_str()).collect();
    assert_eq!(whole["content"][0]["text"], text.as_str());

    let mut called = body.clone();
    called["max_tokens"] = 100.into();
    called["tools"] = json!([{ "name": "ping", "description": "p", "input_schema": {
        "type": "object", "properties": { "n": { "type": "integer", "maximum": 9 } }, "required": ["n"], "additionalProperties": false } }]);
    called["tool_choice"] = json!({ "type": "tool", "name": "ping" });
    let whole = SERVER.good("/v1/messages", &called);
    assert_eq!(whole["stop_reason"], "tool_use", "{whole}");
    let block = &whole["content"][0];
    assert_eq!((&block["type"], &block["name"]), (&json!("tool_use"), &json!("ping")));
    assert!(block["input"]["n"].is_i64());
    called["stream"] = true.into();
    let events = SERVER.post("/v1/messages", &called).events();
    let arguments: String =
        events.iter().filter_map(|e| e["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&arguments).unwrap(), block["input"]);
}

#[test]
fn responses_items_and_events() {
    let body = json!({
        "instructions": "Be brief.", "max_output_tokens": 10,
        "input": [
            { "role": "user", "content": [{ "type": "input_text", "text": "Call ping." }] },
            { "type": "function_call", "call_id": "c", "name": "ping", "arguments": "{}" },
            { "type": "function_call_output", "call_id": "c", "output": "pong" },
        ],
    });
    let whole = SERVER.good("/v1/responses", &body);
    assert_eq!(whole["status"], "incomplete");
    assert_eq!(whole["incomplete_details"]["reason"], "max_output_tokens");
    let text = whole["output"][0]["content"][0]["text"].as_str().unwrap();
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = SERVER.post("/v1/responses", &streamed).events();
    for (i, event) in events.iter().enumerate() {
        assert_eq!(event["sequence_number"], i);
    }
    let kinds: Vec<&str> = events.iter().map(|e| e["type"].as_str().unwrap()).collect();
    assert_eq!(
        &kinds[..4],
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added"
        ]
    );
    assert_eq!(kinds.last(), Some(&"response.incomplete"));
    let joined: String = events.iter().filter_map(|e| e["delta"].as_str()).collect();
    assert_eq!(joined, text);
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["output"][0]["content"], whole["output"][0]["content"]);
    let called = json!({
        "input": "Call it.", "max_output_tokens": 100, "tool_choice": { "type": "function", "name": "ping" },
        "tools": [{ "type": "function", "name": "ping", "parameters": {
            "type": "object", "properties": { "n": { "enum": [1, 2] } }, "required": ["n"], "additionalProperties": false } }],
    });
    let whole = SERVER.good("/v1/responses", &called);
    assert_eq!(whole["output"][0]["type"], "function_call", "{whole}");
    assert_eq!(whole["status"], "completed");
}

#[test]
fn ollama_chat_and_generate() {
    let tags = SERVER.get("/api/tags").json();
    let name = tags["models"][0]["name"].as_str().unwrap();
    assert_eq!(name, "tiny-gpt-oss");
    SERVER.good("/api/show", &json!({ "model": name }));
    let options = json!({ "num_predict": 9, "temperature": 0 });
    let body = json!({ "model": format!("{name}:latest"), "messages": user("A story?"), "options": options });
    let lines = SERVER.post("/api/chat", &body).body;
    let lines: Vec<Value> = lines.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let last = lines.last().unwrap();
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("length")));
    assert_eq!(last["eval_count"], 9);
    let joined: String = lines.iter().filter_map(|l| l["message"]["content"].as_str()).collect();
    let mut whole = body.clone();
    whole["stream"] = false.into();
    assert_eq!(SERVER.good("/api/chat", &whole)["message"]["content"], joined.as_str());
    let raw = json!({ "prompt": "Once", "raw": true, "stream": false, "options": options });
    let raw = SERVER.good("/api/generate", &raw);
    assert_eq!(raw["eval_count"], 9);
    let json = json!({ "prompt": "An animal.", "stream": false, "options": { "num_predict": 60 },
        "format": { "type": "object", "properties": { "a": { "enum": ["fox"] } }, "required": ["a"], "additionalProperties": false } });
    let answer = SERVER.good("/api/generate", &json);
    let value: Value = serde_json::from_str(answer["response"].as_str().unwrap()).unwrap();
    assert_eq!(value["a"], "fox");
}

#[test]
fn images_are_refused_by_name_in_each_shape() {
    let openai = json!([{ "type": "text", "text": "What is it?" },
                        { "type": "image_url", "image_url": { "url": "data:," } }]);
    let response =
        SERVER.post(CHAT, &json!({ "messages": [{ "role": "user", "content": openai }] }));
    assert_eq!(response.status, 400);
    let error = &response.json()["error"];
    assert!(error["message"].as_str().unwrap().contains("image_url"), "{error}");
    assert_eq!(
        (&error["type"], &error["param"]),
        (&json!("invalid_request_error"), &json!("messages[0].content[1]"))
    );
    let anthropic = json!([{ "type": "image", "source": {} }]);
    let body = json!({ "max_tokens": 5, "messages": [{ "role": "user", "content": anthropic }] });
    let response = SERVER.post("/v1/messages", &body);
    assert_eq!(response.status, 400);
    let error = response.json();
    assert_eq!(
        (&error["type"], &error["error"]["type"]),
        (&json!("error"), &json!("invalid_request_error"))
    );
    assert!(error["error"]["message"].as_str().unwrap().contains("image"));
    let body = json!({ "input": [{ "role": "user", "content": [{ "type": "input_image", "image_url": "" }] }] });
    let response = SERVER.post("/v1/responses", &body);
    assert!(response.status == 400 && response.body.contains("input_image"), "{}", response.body);
    let body = json!({ "messages": [{ "role": "user", "content": "x", "images": ["aa"] }] });
    let response = SERVER.post("/api/chat", &body);
    assert!(
        response.status == 400 && response.json()["error"].as_str().unwrap().contains("images")
    );
    // Lists of text parts are fine.
    let parts = json!([{ "type": "text", "text": "Hello" }]);
    SERVER.good(
        CHAT,
        &json!({ "messages": [{ "role": "user", "content": parts }], "max_tokens": 1 }),
    );
}

#[test]
fn what_is_wrong_is_named() {
    let schema = |schema: Value| json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": schema } } });
    let many: serde_json::Map<String, Value> =
        (0..3000).map(|i| (i.to_string(), json!({ "type": "string" }))).collect();
    let rows = [
        (json!({ "temperature": "hot" }), "temperature"),
        (json!({ "max_tokens": -1 }), "max_tokens"),
        (json!({ "max_tokens": 1.5 }), "max_tokens"),
        (json!({ "n": 0 }), "n"),
        (json!({ "n": 1000 }), "n"),
        (json!({ "messages": "hello" }), "messages"),
        (json!({ "messages": [] }), "messages"),
        (json!({ "messages": [{ "content": "x" }] }), "messages[0].role"),
        (json!({ "messages": [{ "role": "user", "content": 7 }] }), "messages[0].content"),
        (
            json!({ "messages": [{ "role": "assistant", "tool_calls": [{ "function": { "name": "f", "arguments": "[" } }] }] }),
            "messages[0].tool_calls[0]",
        ),
        (json!({ "top_p": 2 }), "top_p"),
        (json!({ "stop": [1] }), "stop"),
        (json!({ "stop": "" }), "stop"),
        (json!({ "stream": "yes" }), "stream"),
        (json!({ "stream_options": {} }), "stream_options"),
        (json!({ "top_logprobs": 3 }), "top_logprobs"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type"),
        (json!({ "tool_choice": "required" }), "tool_choice"),
        (json!({ "response_format": { "type": "xml" } }), "response_format.type"),
        // A schema that can be read and not be followed.
        (schema(json!({ "$ref": "#" })), "response_format"),
        (json!({ "reasoning_effort": "lots" }), "reasoning_effort"),
        (json!({ "functions": [{}] }), "functions"),
        (json!({ "logit_bias": { "5": 101 } }), "logit_bias"),
        (json!({ "logit_bias": { "999999": 1 } }), "logit_bias"),
        (json!({ "logit_bias": [1] }), "logit_bias"),
        (json!({ "modalities": ["audio"] }), "modalities"),
        (json!({ "seed": "x" }), "seed"),
    ];
    for (extra, param) in rows {
        let response = SERVER.post(CHAT, &chat(extra.clone()));
        assert_eq!(response.status, 400, "{extra}: {}", response.body);
        let error = &response.json()["error"];
        assert_eq!(error["param"], param, "{extra}: {error}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    // One that cannot be followed to its end is the request's fault as well.
    let response =
        SERVER.post(CHAT, &chat(schema(json!({ "type": "object", "properties": many }))));
    assert_eq!(response.status, 400, "{}", response.body);
    assert!(response.body.contains("cannot be followed"), "{}", response.body);
    // Fields that the API does not have are ignored, and those that say nothing.
    SERVER.good(
        CHAT,
        &chat(json!({ "frobnicate": 1, "logit_bias": null, "user": "u", "max_tokens": 1 })),
    );
    let response = SERVER.ask("POST", CHAT, &[], b"{\"messages\": [\xff\"");
    assert!(response.status == 400 && response.body.contains("no JSON"), "{}", response.body);
    let response = SERVER.post(CHAT, &chat(json!({ "model": "gpt-5" })));
    assert_eq!(response.status, 404);
    assert_eq!(response.json()["error"]["code"], "model_not_found");
    assert!(response.body.contains("tiny-gpt-oss"));
    let response = SERVER.post("/v1/messages", &json!({ "messages": user("x") }));
    assert!(response.status == 400 && response.body.contains("max_tokens"), "{}", response.body);
    for (method, path, status, word) in [
        ("GET", "/v1/nothing", 404, "no route"),
        ("GET", CHAT, 405, "does not take"),
        ("POST", "/v1/embeddings", 404, "embeddings"),
        ("GET", "/v1/models/other", 404, "other"),
        ("GET", "/v1/models/tiny-gpt-oss", 200, "tiny-gpt-oss"),
        ("GET", "/v1/models", 200, "tiny-gpt-oss"),
        ("GET", "/health", 200, "ok"),
        ("POST", "/api/nothing", 404, "no route"),
    ] {
        let response = SERVER.ask(method, path, &[], b"");
        assert_eq!(response.status, status, "{path}: {}", response.body);
        assert!(response.body.contains(word), "{path}: {}", response.body);
        response.json();
    }
}

/// What an API has and this server has not is never passed over.
#[test]
fn what_is_known_and_not_supported_is_refused_by_name() {
    let ask = json!({ "messages": user("x"), "max_tokens": 1 });
    let respond = json!({ "input": "x", "max_output_tokens": 1 });
    let generate = json!({ "prompt": "x", "stream": false, "options": { "num_predict": 1 } });
    let with = |body: &Value, extra: &Value| {
        let mut body = body.clone();
        for (key, value) in extra.as_object().unwrap() {
            body[key] = value.clone();
        }
        body
    };
    let rows = [
        (CHAT, &ask, json!({ "verbosity": "low" }), "verbosity"),
        (CHAT, &ask, json!({ "service_tier": "flex" }), "service_tier"),
        (CHAT, &ask, json!({ "store": true }), "store"),
        (CHAT, &ask, json!({ "web_search_options": {} }), "web_search_options"),
        (CHAT, &ask, json!({ "prediction": { "type": "content" } }), "prediction"),
        (CHAT, &ask, json!({ "audio": { "voice": "x" } }), "audio"),
        (
            CHAT,
            &ask,
            json!({ "stream": true, "stream_options": { "include_obfuscation": true } }),
            "stream_options.include_obfuscation",
        ),
        ("/v1/responses", &respond, json!({ "text": { "verbosity": "high" } }), "text.verbosity"),
        ("/v1/responses", &respond, json!({ "store": true }), "store"),
        ("/v1/responses", &respond, json!({ "top_logprobs": 2 }), "top_logprobs"),
        (
            "/v1/responses",
            &respond,
            json!({ "include": ["message.output_text.logprobs"] }),
            "include",
        ),
        ("/v1/responses", &respond, json!({ "background": true }), "background"),
        ("/v1/responses", &respond, json!({ "service_tier": "priority" }), "service_tier"),
        (
            "/v1/responses",
            &respond,
            json!({ "reasoning": { "summary": "detailed" } }),
            "reasoning.summary",
        ),
        ("/v1/messages", &ask, json!({ "speed": "fast" }), "speed"),
        ("/v1/messages", &ask, json!({ "inference_geo": "us" }), "inference_geo"),
        ("/v1/messages", &ask, json!({ "mcp_servers": [{}] }), "mcp_servers"),
        (
            "/v1/messages",
            &ask,
            json!({ "output_config": { "task_budget": { "total": 5 } } }),
            "output_config.task_budget",
        ),
        (
            "/v1/messages",
            &ask,
            json!({ "tools": [{ "name": "f", "input_schema": {}, "defer_loading": true }] }),
            "tools[0].defer_loading",
        ),
        ("/api/generate", &generate, json!({ "options": { "mirostat": 2 } }), "options.mirostat"),
        (
            "/api/generate",
            &generate,
            json!({ "options": { "typical_p": 0.5 } }),
            "options.typical_p",
        ),
        ("/api/generate", &generate, json!({ "options": { "num_ctx": 9999 } }), "options.num_ctx"),
        ("/api/generate", &generate, json!({ "logprobs": true }), "logprobs"),
        ("/api/generate", &generate, json!({ "context": [1, 2] }), "context"),
    ];
    for (path, body, extra, name) in rows {
        let response = SERVER.post(path, &with(body, &extra));
        assert_eq!(response.status, 400, "{path} {extra}: {}", response.body);
        assert!(response.body.contains(name), "{path} {extra}: {}", response.body);
    }
    // The same fields where they ask for what is done anyway, and labels for the provider's own books.
    for (path, body, extra) in [
        (
            CHAT,
            &ask,
            json!({ "verbosity": "medium", "service_tier": "auto", "store": false, "metadata": { "a": "b" },
                "prompt_cache_key": "k", "safety_identifier": "s", "audio": null }),
        ),
        (
            "/v1/responses",
            &respond,
            json!({ "text": { "verbosity": "medium" }, "include": ["reasoning.encrypted_content"],
                "reasoning": { "summary": "auto" }, "top_logprobs": 0, "metadata": {} }),
        ),
        (
            "/v1/messages",
            &ask,
            json!({ "service_tier": "standard_only", "metadata": { "user_id": "u" }, "speed": "standard" }),
        ),
        (
            "/api/generate",
            &generate,
            json!({ "options": { "num_predict": 1, "mirostat": 0, "num_ctx": 256, "typical_p": 1.0,
                "num_gpu": 99, "repeat_last_n": -1 }, "keep_alive": "5m" }),
        ),
    ] {
        SERVER.good(path, &with(body, &extra));
    }
}

/// An answer goes on over tokens that would end it.
#[test]
fn ends_are_ignored_when_asked() {
    let body = |ignores: bool| json!({ "prompt": "The end.", "max_tokens": 24, "ignore_eos": ignores, "logit_bias": { "2": 100 } });
    let usual = SERVER.good("/v1/completions", &body(false));
    assert_eq!(usual["choices"][0]["finish_reason"], "stop");
    let on = SERVER.good("/v1/completions", &body(true));
    assert_eq!(on["choices"][0]["finish_reason"], "length");
    assert_eq!(on["usage"]["completion_tokens"], 24);
}

/// As many connections as were asked for are served; who comes besides is told so in the API's shape, and finds a
/// place when one is free. A connection that says nothing does not keep its place for ever.
#[test]
fn connections_are_bounded() {
    let server = Server::start(&model(GPT_OSS), &["--connections", "3", "--context", "256"]);
    let idle: Vec<_> = (0..3).map(|_| server.send(b"")).collect();
    // They are accepted in their order, so the next one finds them there.
    let refused = server.post("/v1/messages", &json!({}));
    assert_eq!(refused.status, 503, "{}", refused.body);
    assert_eq!(refused.json()["error"]["type"], "overloaded_error");
    assert!(refused.headers.to_ascii_lowercase().contains("retry-after"), "{}", refused.headers);
    assert_eq!(server.get("/api/tags").status, 503);
    drop(idle);
    let began = std::time::Instant::now();
    while server.get("/health").status == 503 {
        assert!(began.elapsed() < std::time::Duration::from_secs(60), "no place becomes free");
    }
    // Headers that do not come.
    let mut slow = server.send(b"GET /health HTTP/1.1\r\nHost: x\r\n");
    let mut rest = Vec::new();
    let _ = slow.read_to_end(&mut rest);
    assert!(rest.is_empty() || rest.starts_with(b"HTTP/1.1 408"), "{rest:?}");
    assert_eq!(server.get("/health").status, 200);
}

/// Who asks and never reads does not keep a place for ever, and the log says why the connection ended.
#[test]
fn a_client_that_reads_nothing_loses_its_connection() {
    let args = ["--connections", "1", "--unread", "1", "--context", "256"];
    let server = Server::start(&model(GPT_OSS), &args);
    // More answers than the system keeps for a connection.
    let ask = "GET /forebay.js HTTP/1.1\r\nHost: x\r\n\r\n".repeat(4000);
    let deaf = server.send(b"");
    let mut sending = deaf.try_clone().unwrap();
    let sender = std::thread::spawn(move || {
        // Its end is the server's to choose.
        let _ = std::io::Write::write_all(&mut sending, ask.as_bytes());
    });
    let began = std::time::Instant::now();
    while server.get("/health").status != 200 {
        assert!(began.elapsed() < std::time::Duration::from_secs(100), "the place is still taken");
        std::thread::sleep(std::time::Duration::from_millis(50));
    }
    sender.join().unwrap();
    drop(deaf);
    server.interrupt();
    let (code, said) = server.wait();
    assert_eq!(code, Some(0));
    assert!(said.contains("a client read nothing"), "{said}");
}

/// A folder for sessions that cannot be written is told at the start, not when there is something to keep.
#[test]
fn a_folder_for_sessions_is_tried_at_the_start() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("file");
    std::fs::write(&file, "").unwrap();
    for folder in [file.clone(), file.join("below")] {
        let mut command = common::forebay();
        command.arg("serve").arg(model(GPT_OSS)).args(["--listen", "127.0.0.1:0", "--sessions"]);
        let got = common::output(command.arg(&folder));
        let said = String::from_utf8_lossy(&got.stderr).into_owned();
        assert_eq!(got.status.code(), Some(2), "{said}");
        assert!(said.contains("--sessions") && said.contains("file"), "{said}");
    }
}

/// A prompt that does not fit is refused before a stream opens, with both numbers; what fits ends at the
/// context.
#[test]
fn the_context_is_a_limit() {
    let server = Server::start(&model(GPT_OSS), &["--temp", "0", "--context", "64"]);
    let ask = |n: usize, max: usize, stream: bool| {
        let ids: Vec<usize> = (0..n).map(|i| 100 + i).collect();
        server
            .post("/v1/completions", &json!({ "prompt": ids, "max_tokens": max, "stream": stream }))
    };
    for n in [64, 65] {
        for stream in [false, true] {
            let response = ask(n, 5, stream);
            assert_eq!(response.status, 400);
            let error = &response.json()["error"];
            assert_eq!(error["code"], "context_length_exceeded");
            let text = error["message"].as_str().unwrap();
            assert!(text.contains(&n.to_string()) && text.contains("64"), "{text}");
        }
    }
    for (n, max, want) in [(63, 10, 1), (60, 10, 4), (60, 2, 2)] {
        let answer = ask(n, max, false).json();
        let generated = answer["usage"]["completion_tokens"].as_u64().unwrap();
        // An end token may come first.
        if answer["choices"][0]["finish_reason"] == "length" {
            assert_eq!(generated, want);
        }
        assert!(generated <= want);
    }
    let long = "word ".repeat(20_000);
    let response = server.post(CHAT, &json!({ "messages": user(&long) }));
    assert!(response.status == 400 && response.body.contains("context_length_exceeded"));
}

#[test]
fn keys_limits_and_origins() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "# keys\nfirst-key\nsecond-key\n").unwrap();
    let args = [
        "--api-keys",
        keys.to_str().unwrap(),
        "--max-body",
        "2000",
        "--cors",
        "https://good.example",
    ];
    let server = Server::start(&model(GPT_OSS), &args);
    let body = chat(json!({ "max_tokens": 1 })).to_string();
    let ask = |headers: &[&str]| server.ask("POST", CHAT, headers, body.as_bytes());
    for headers in [&["Authorization: Bearer first-key"][..], &["x-api-key: second-key"]] {
        assert_eq!(ask(headers).status, 200);
    }
    for headers in [
        &[][..],
        &["Authorization: Bearer first-ke"],
        &["Authorization: first-key"],
        &["x-api-key: "],
    ] {
        let response = ask(headers);
        assert_eq!(response.status, 401);
        assert_eq!(response.json()["error"]["code"], "invalid_api_key");
    }
    assert_eq!(server.get("/metrics").status, 401);
    assert_eq!(server.get("/health").status, 200);
    let key = "x-api-key: first-key";
    let response = server.ask("POST", "/v1/messages", &[key], &vec![b' '; 3000]);
    assert_eq!(response.status, 413);
    assert_eq!(response.json()["error"]["type"], "request_too_large");
    // Without a length, too.
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: x\r\n{key}\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    );
    let chunks = "400\r\n".to_owned() + &" ".repeat(0x400) + "\r\n";
    let response = read(server.send((head + &chunks.repeat(3) + "0\r\n\r\n").as_bytes()));
    assert_eq!(response.status, 413, "{}", response.body);
    let large = format!("X-Large: {}", "x".repeat(70_000));
    assert_eq!(server.ask("GET", "/health", &[&large], b"").status, 431);
    // Origins.
    let response = ask(&[key, "Origin: https://good.example"]);
    assert!(
        response.status == 200
            && response.headers.contains("access-control-allow-origin: https://good.example")
    );
    let response = ask(&[key, "Origin: https://bad.example"]);
    assert!(response.status == 403 && !response.headers.contains("access-control"));
    let own = format!("Origin: http://{}", server.address);
    assert_eq!(ask(&[key, &own]).status, 200);
    let preflight = server.ask("OPTIONS", CHAT, &["Origin: https://good.example"], b"");
    assert!(preflight.status == 204 && preflight.headers.contains("access-control-allow-headers"));
    let out = common::output(
        common::forebay().args(["serve"]).arg(model(GPT_OSS)).args(["--api-keys", "/nonexistent"]),
    );
    assert_eq!(out.status.code(), Some(2));
}

#[test]
fn a_full_queue_and_clients_that_leave() {
    let args = ["--parallel", "1", "--queue", "1", "--context", "4096", "--temp", "1"];
    let server = Server::start(&model(GPT_OSS), &args);
    let long = |stream: bool| {
        let body = json!({ "prompt": "Once", "max_tokens": 4000, "stream": stream, "seed": 1,
            "response_format": { "type": "json_schema", "json_schema": { "schema": {
                "type": "array", "items": { "type": "integer" }, "minItems": 3000 } } } });
        server.send(&server.request("POST", "/v1/completions", &[], body.to_string().as_bytes()))
    };
    let mut running = long(true);
    running.read_exact(&mut [0; 20]).unwrap();
    let waiting = long(false);
    server.wait_for("forebay_requests_waiting", 1.0);
    let refused = server.post(CHAT, &chat(json!({})));
    assert_eq!(refused.status, 429);
    assert!(refused.headers.to_ascii_lowercase().contains("retry-after: 1"), "{}", refused.headers);
    assert_eq!(refused.json()["error"]["code"], "rate_limit_exceeded");
    assert_eq!(
        server.post("/v1/messages", &json!({ "messages": user("x"), "max_tokens": 1 })).json()["error"]
            ["type"],
        "rate_limit_error"
    );
    // Who waits leaves; then who is answered.
    drop(waiting);
    server.wait_for("forebay_requests_waiting", 0.0);
    assert_eq!(server.metric("forebay_requests_running"), 1.0);
    drop(running);
    server.wait_for("forebay_requests_running", 0.0);
    // A whole answer that nobody waits for ends too.
    let waiting = long(false);
    server.wait_for("forebay_requests_running", 1.0);
    drop(waiting);
    server.wait_for("forebay_requests_running", 0.0);
    assert_eq!(server.post(CHAT, &chat(json!({ "max_tokens": 2 }))).status, 200);
    assert_eq!(server.metric("forebay_requests_total{end=\"failed\"}"), 0.0);
}

#[test]
fn it_ends_gracefully_and_remembers() {
    let dir = tempfile::tempdir().unwrap();
    let sessions = dir.path().join("sessions");
    let args = ["--temp", "0", "--sessions", sessions.to_str().unwrap()];
    let server = Server::start(&model(GPT_OSS), &args);
    let story = "Once there was a fox who lived by the sea and looked for shells. ".repeat(12);
    let body = json!({ "messages": user(&story), "max_tokens": 24 });
    let first = server.good(CHAT, &body);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let again = server.good(CHAT, &body);
    assert!(again["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() >= 96);
    assert_eq!(text(&again), text(&first));
    // A running answer is finished.
    let streamed = json!({ "messages": user("A story."), "max_tokens": 60, "stream": true });
    let mut running =
        server.send(&server.request("POST", CHAT, &[], streamed.to_string().as_bytes()));
    running.read_exact(&mut [0; 20]).unwrap();
    server.interrupt();
    let mut rest = String::new();
    running.read_to_string(&mut rest).unwrap();
    assert!(rest.contains("[DONE]"), "{rest}");
    let (code, said) = server.wait();
    assert_eq!(code, Some(0));
    assert!(said.contains("sessions are saved"), "{said}");
    let server = Server::start(&model(GPT_OSS), &args);
    let after = server.good(CHAT, &body);
    assert!(
        after["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() >= 96,
        "{after}"
    );
    assert_eq!(text(&after), text(&first));
}

#[test]
fn memory_of_requests_is_in_the_plan_and_bounded() {
    let args = ["--context", "128", "--max-body", "65536", "--parallel", "2"];
    let server = Server::start(&model(GPT_OSS), &args);
    let metrics = server.get("/metrics").body;
    let line = |what: &str| {
        let head = format!("forebay_ledger_bytes{{what=\"{what}\"}} ");
        let line = metrics.lines().find_map(|line| line.strip_prefix(&head));
        line.unwrap_or_else(|| panic!("no {what} in {metrics}")).parse::<u64>().unwrap()
    };
    assert_eq!(line("request bodies"), 4 * (256 << 10));
    assert!(line("texts being encoded") > 0 && line("grammars") > 0);
    assert!(line("threads of the server") > 0);
    // What only a server takes is not in the plans of others.
    let mut inspect = common::forebay();
    let report = common::json(inspect.args(["inspect", "--json"]).arg(model(GPT_OSS)));
    let lines = report["ledger"].as_array().unwrap();
    assert!(lines.iter().all(|l| l["what"] != "request bodies" && l["what"] != "grammars"));
    // Small as bytes and large in memory: refused before it is parsed.
    let numbers = format!("{{\"prompt\": [{}1]}}", "1,".repeat(30_000));
    let response = server.ask("POST", "/v1/completions", &[], numbers.as_bytes());
    assert_eq!(response.status, 413);
    assert!(response.body.contains("more values than there is memory for"), "{}", response.body);
}

#[test]
fn biases_and_echoes() {
    let ask = |extra: Value| {
        let mut body = json!({ "prompt": "Once upon a time", "max_tokens": 4, "temperature": 0 });
        extra.as_object().unwrap().iter().for_each(|(k, v)| body[k] = v.clone());
        SERVER.post("/v1/completions", &body)
    };
    let plain = ask(json!({})).json()["choices"][0]["text"].as_str().unwrap().to_owned();
    // A token that is wanted above all comes always; its log-probability is the model's own.
    let forced = ask(json!({ "logit_bias": { "300": 100 }, "logprobs": 0 })).json();
    let tokens = forced["choices"][0]["logprobs"]["tokens"].as_array().unwrap();
    assert!(tokens.len() == 4 && tokens.iter().all(|t| *t == tokens[0]), "{forced}");
    assert_ne!(forced["choices"][0]["text"], plain.as_str());
    let logprobs = forced["choices"][0]["logprobs"]["token_logprobs"].as_array().unwrap();
    assert!(logprobs.iter().all(|l| l.as_f64().unwrap() < -0.5), "{forced}");
    let echoed = ask(json!({ "echo": true }));
    let want = format!("Once upon a time{plain}");
    assert_eq!(echoed.json()["choices"][0]["text"], want.as_str());
    let events = ask(json!({ "echo": true, "stream": true, "n": 2 })).events();
    for index in 0..2 {
        let own = events.iter().filter(|e| e["choices"][0]["index"] == index);
        let text: String = own.filter_map(|e| e["choices"][0]["text"].as_str()).collect();
        assert_eq!(text, want);
    }
    for (extra, word) in [
        (json!({ "echo": true, "logprobs": 1 }), "echo"),
        (json!({ "suffix": "the end" }), "suffix"),
        (json!({ "echo": 1 }), "echo"),
    ] {
        let response = ask(extra);
        assert!(response.status == 400 && response.body.contains(word), "{}", response.body);
    }
}

/// Requests name vectors; what is steered in different ways runs side by side and shares no beginnings.
#[test]
fn requests_are_steered_by_name() {
    let file = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/taps/gpt_oss/directions.safetensors");
    let calm = format!("calm={}:mode=renormalise", file.display());
    let bold = format!("bold={}:strength=-1", file.display());
    let steer = ["--temp", "0", "--context", "512", "--steer", &calm, "--steer", &bold];
    let server = Server::start(&model(GPT_OSS), &steer);
    let plain = text(&SERVER.good(CHAT, &chat(json!({})))).to_owned();
    let kinds = [
        json!({}),
        json!({ "steer": {} }),
        json!({ "steer": { "calm": true } }),
        json!({ "steer": { "calm": 1.0 } }),
        json!({ "steer": { "bold": 1.5 } }),
        json!({ "steer": { "bold": 1.5, "calm": 0.7 } }),
    ];
    let ask = |kind: &Value| text(&server.good(CHAT, &chat(kind.clone()))).to_owned();
    let alone: Vec<String> = kinds.iter().map(ask).collect();
    assert!(alone[0] == plain && alone[1] == plain && alone[2] == alone[3]);
    for (i, one) in alone.iter().enumerate().skip(2).filter(|(i, _)| *i != 3) {
        assert!(alone.iter().take(i).filter(|other| *other == one).count() == 0, "{i}: {alone:?}");
    }
    // Again, all at once, with what is kept of the first time.
    let together: Vec<String> = std::thread::scope(|scope| {
        let asked: Vec<_> = kinds.iter().map(|kind| scope.spawn(|| ask(kind))).collect();
        asked.into_iter().map(|answer| answer.join().unwrap()).collect()
    });
    assert_eq!(together, alone);
    for (route, body) in [
        ("/v1/completions", json!({ "prompt": "Once", "steer": { "bold": 1.5 } })),
        (
            "/v1/responses",
            json!({ "input": "Once", "max_output_tokens": 4, "steer": { "bold": 1.5 } }),
        ),
        (
            "/v1/messages",
            json!({ "messages": user("Once"), "max_tokens": 4, "steer": { "bold": 1.5 } }),
        ),
        (
            "/api/generate",
            json!({ "prompt": "Once", "stream": false, "options": { "num_predict": 4 }, "steer": { "bold": 1.5 } }),
        ),
    ] {
        server.good(route, &body);
    }
    for (steer, word) in [
        (json!({ "wild": 1 }), "wild"),
        (json!({ "calm": "much" }), "numbers"),
        (json!([1]), "object"),
        (json!({ "calm": 1e300 }), "finite"),
    ] {
        let refused = server.post(CHAT, &chat(json!({ "steer": steer })));
        assert_eq!(refused.status, 400, "{}", refused.body);
        assert!(refused.body.contains(word) && refused.body.contains("steer"), "{}", refused.body);
    }
}
