//! What clients get when they ask wrongly, or for what is not there.

mod common;
#[path = "common/server.rs"]
mod server;

use common::{GPT_OSS, model};
use serde_json::{Value, json};
use server::{CHAT, SERVER, Server, chat, user};

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
        ("POST", "/v1/embeddings", 404, "no embeddings"),
        ("POST", "/api/embed", 404, "no embeddings"),
        ("POST", "/api/embeddings", 404, "no embeddings"),
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
