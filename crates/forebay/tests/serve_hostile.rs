//! Clients that ask for what makes no sense, in every API: a 400 that names the field, in the API's own words, and a
//! server that goes on. What is checked for all: no 5xx, no panic (the server's end is watched), no field passed over.

mod common;
#[path = "common/server.rs"]
mod server;

use std::io::Read;

use serde_json::{Value, json};
use server::{CHAT, SERVER, chat, read, user};

/// The body with other fields.
fn with(body: &Value, extra: &Value) -> Value {
    let mut body = body.clone();
    extra.as_object().unwrap().iter().for_each(|(key, value)| body[key] = value.clone());
    body
}

/// Asks with each of the rows' fields; each is refused with 400 and a message with its word.
fn refused(path: &str, body: &Value, rows: &[(Value, &str)]) {
    for (extra, word) in rows {
        let response = SERVER.post(path, &with(body, extra));
        assert_eq!(response.status, 400, "{path} {extra}: {}", response.body);
        let body = response.json();
        let message = match &body["error"] {
            Value::String(message) => message,
            error => error["message"].as_str().unwrap(),
        };
        assert!(message.contains(word), "{path} {extra}: {message}");
    }
}

/// Functions that an API offers, by what stands around their parts: name, description and schema.
fn functions(wrap: impl Fn(Value) -> Value, at: &str, schema: &str) -> Vec<(Value, String)> {
    let rows = [
        (json!([{ "description": "x" }]), format!("tools[0]{at}.name: is missing")),
        (json!([{ "name": 5 }]), format!("tools[0]{at}.name: must be a string")),
        (json!([{ "name": "" }]), format!("tools[0]{at}.name: must not be empty")),
        (json!([{ "name": "a b<|end|>" }]), format!("tools[0]{at}.name: must be letters")),
        (json!([{ "name": "f".repeat(129) }]), format!("tools[0]{at}.name: must have at most")),
        (
            json!([{ "name": "f" }, { "name": "f" }]),
            format!("tools[1]{at}.name: `f` is there twice"),
        ),
        (json!([{ "name": "f", "description": 5 }]), format!("tools[0]{at}.description")),
        (json!([{ "name": "f", schema: "x" }]), format!("tools[0]{at}.{schema}: must be")),
        (json!([{ "name": "f", schema: [] }]), format!("tools[0]{at}.{schema}: must be")),
        (json!([{ "name": "f", schema: true }]), format!("tools[0]{at}.{schema}: must be")),
    ];
    let wrapped = rows.into_iter().map(|(tools, word)| {
        let tools = tools.as_array().unwrap().iter().cloned().map(&wrap).collect::<Value>();
        (json!({ "tools": tools }), word)
    });
    let plain = [
        (json!({ "tools": 5 }), "tools: must be a list".to_owned()),
        (json!({ "tools": [null] }), "tools[0]: must be an object".to_owned()),
        (json!({ "tools": ["f"] }), "tools[0]: must be an object".to_owned()),
    ];
    wrapped.chain(plain).collect()
}

#[test]
fn functions_are_checked_in_every_api() {
    let nested = |f: Value| json!({ "type": "function", "function": f });
    let flat = |mut f: Value| {
        f["type"] = "function".into();
        f
    };
    let ask = |rows: Vec<(Value, String)>, path: &str, body: &Value| {
        let rows: Vec<(Value, &str)> = rows.iter().map(|(v, w)| (v.clone(), w.as_str())).collect();
        refused(path, body, &rows);
    };
    let messages = json!({ "messages": user("x"), "max_tokens": 1 });
    ask(functions(nested, ".function", "parameters"), CHAT, &messages);
    ask(functions(nested, ".function", "parameters"), "/api/chat", &messages);
    ask(functions(flat, "", "parameters"), "/v1/responses", &json!({ "input": "x" }));
    ask(functions(|f| f, "", "input_schema"), "/v1/messages", &messages);
    // What cannot be followed is named with its place.
    let schema = json!({ "type": "object", "properties": { "a": { "type": "martian" } } });
    let good = json!({ "name": "g", "parameters": {} });
    let bad = json!({ "name": "f", "parameters": schema });
    let tools = json!([nested(good.clone()), nested(bad.clone())]);
    let rows =
        [(json!({ "tools": tools, "tool_choice": "required" }), "tools[1].function.parameters")];
    refused(CHAT, &messages, &rows);
    let tools = json!([flat(good), flat(bad)]);
    let rows = [(json!({ "tools": tools, "tool_choice": "required" }), "tools[1].parameters")];
    refused("/v1/responses", &json!({ "input": "x" }), &rows);
    let tools = json!([{ "name": "f", "input_schema": schema }]);
    let rows =
        [(json!({ "tools": tools, "tool_choice": { "type": "any" } }), "tools[0].input_schema")];
    refused("/v1/messages", &messages, &rows);
}

#[test]
fn odd_messages_are_named() {
    let messages = |last: Value| json!({ "messages": [{ "role": "user", "content": "hi" }, last] });
    let call = |function: Value| {
        messages(json!({ "role": "assistant", "tool_calls": [{ "function": function }] }))
    };
    let body = json!({ "max_tokens": 1 });
    let rows = [
        (messages(json!("x")), "messages[1]: must be an object"),
        (messages(json!({ "role": "alien", "content": "x" })), "messages[1].role: must be system"),
        (messages(json!({ "role": "", "content": "x" })), "messages[1].role"),
        (
            messages(json!({ "role": "function", "name": "f", "content": "x" })),
            "use the role `tool`",
        ),
        (messages(json!({ "role": "user" })), "messages[1].content: is missing"),
        (messages(json!({ "role": "system", "content": null })), "messages[1].content: is missing"),
        (messages(json!({ "role": "user", "content": ["x"] })), "messages[1].content[0]"),
        (messages(json!({ "role": "user", "content": [{ "text": 5 }] })), "messages[1].content[0]"),
        (messages(json!({ "role": "user", "content": "x", "name": {} })), "messages[1].name"),
        (
            messages(json!({ "role": "assistant", "content": "x", "reasoning_content": 7 })),
            "reasoning_content",
        ),
        (
            messages(json!({ "role": "assistant", "function_call": { "name": "f" } })),
            "use `tool_calls`",
        ),
        (
            messages(json!({ "role": "user", "content": "x", "tool_calls": [{}] })),
            "messages[1].tool_calls",
        ),
        (call(json!({ "arguments": "{}" })), "messages[1].tool_calls[0]"),
        (call(json!({ "name": "f", "arguments": "[1]" })), "messages[1].tool_calls[0]"),
    ];
    refused(CHAT, &body, &rows);
    // A refusal is what the assistant said.
    let said = |message: Value| {
        let messages = json!([{ "role": "user", "content": "hi" }, message, { "role": "user", "content": "so?" }]);
        SERVER.good(CHAT, &json!({ "messages": messages, "max_tokens": 1 }))["usage"]["prompt_tokens"].clone()
    };
    let refusal = said(json!({ "role": "assistant", "content": null, "refusal": "I will not." }));
    assert_eq!(refusal, said(json!({ "role": "assistant", "content": "I will not." })));
}

#[test]
fn anthropic_blocks_are_named_where_they_stand() {
    let body = json!({ "messages": user("x"), "max_tokens": 1 });
    let one = |role: &str, block: Value| json!({ "system": "s", "messages": [{ "role": role, "content": [block] }] });
    let rows = [
        (one("user", json!({ "type": "text" })), "messages[0].content[0].text"),
        (one("user", json!({ "type": "text", "text": 5 })), "messages[0].content[0].text"),
        (one("user", json!("x")), "messages[0].content[0]: must be an object"),
        (one("assistant", json!({ "type": "thinking", "thinking": 5 })), "content[0].thinking"),
        // The system message in front moves nothing.
        (
            one("assistant", json!({ "type": "tool_use", "id": "a", "input": {} })),
            "messages[0].content[0].name",
        ),
        (
            one("assistant", json!({ "type": "tool_use", "name": "f", "input": "x" })),
            "messages[0].content[0].input",
        ),
        (
            one("user", json!({ "type": "tool_result", "content": [{ "type": "text" }] })),
            "content[0].content[0].text",
        ),
        (json!({ "system": [{ "type": "text", "text": 5 }] }), "system[0].text"),
        (json!({ "system": [{}] }), "system[0]"),
        (json!({ "thinking": {} }), "thinking.type"),
        (json!({ "tools": [{ "type": 5, "name": "f" }] }), "tools[0].type"),
        (
            json!({ "output_config": { "format": { "type": "json_schema" } } }),
            "output_config.format.schema",
        ),
        (
            json!({ "output_config": { "format": { "type": "json_schema", "schema": { "type": "martian" } } } }),
            "output_config.format: ",
        ),
    ];
    refused("/v1/messages", &body, &rows);
    // An empty system message is none.
    let count = |extra: Value| {
        SERVER.good("/v1/messages/count_tokens", &with(&body, &extra))["input_tokens"].clone()
    };
    for empty in [json!({ "system": "" }), json!({ "system": [] })] {
        assert_eq!(count(empty), count(json!({})));
    }
}

#[test]
fn items_of_responses_are_named_where_they_stand() {
    let body = json!({ "max_output_tokens": 1 });
    let rows = [
        (json!({ "input": [] }), "input: must not be empty"),
        (json!({ "input": [null] }), "input[0]: must be an object"),
        (
            json!({ "input": [{ "role": "alien", "content": "x" }] }),
            "input[0].role: must be system",
        ),
        (json!({ "input": [{ "role": "user" }] }), "input[0].content"),
        (
            json!({ "input": [{ "role": "user", "content": [{ "type": "input_text" }] }] }),
            "input[0].content[0].text: must be a string",
        ),
        (json!({ "input": [{ "type": "function_call", "arguments": "{}" }] }), "input[0].name"),
        (
            json!({ "input": [{ "type": "function_call", "name": "f", "arguments": "{" }] }),
            "input[0].arguments",
        ),
        (json!({ "input": [{ "type": "function_call_output", "output": {} }] }), "input[0].output"),
        (json!({ "input": [{ "type": "reasoning", "summary": "x" }] }), "input[0].summary"),
        (json!({ "input": "word ".repeat(4000) }), "context holds"),
        (
            json!({ "input": "x", "text": { "format": { "type": "json_schema", "schema": { "type": "martian" } } } }),
            "text.format: ",
        ),
    ];
    refused("/v1/responses", &body, &rows);
    let long = SERVER.post("/v1/responses", &json!({ "input": "word ".repeat(4000) })).json();
    assert_eq!(long["error"]["param"], "input");
    let long = SERVER.post("/v1/completions", &json!({ "prompt": "word ".repeat(4000) })).json();
    assert_eq!(long["error"]["param"], "prompt");
}

#[test]
fn choices_and_formats_are_named() {
    let tools = json!([{ "type": "function", "function": { "name": "f" } }]);
    let choice = |choice: Value| json!({ "tools": tools, "tool_choice": choice });
    let format = |format: Value| json!({ "response_format": format });
    let rows = [
        (choice(json!(5)), "tool_choice: must be auto"),
        (choice(json!({})), "tool_choice.type: must be `function`"),
        (choice(json!({ "type": "function" })), "tool_choice.function: is missing"),
        (
            choice(json!({ "type": "function", "function": { "name": 5 } })),
            "tool_choice.function.name: must be",
        ),
        (choice(json!({ "type": "allowed_tools" })), "offer only the tools"),
        (format(json!("json_object")), "response_format: must be an object"),
        (format(json!({ "type": "json_schema" })), "response_format.json_schema: is missing"),
        (
            format(json!({ "type": "json_schema", "json_schema": {} })),
            "json_schema.schema: is missing",
        ),
        (
            format(json!({ "type": "json_schema", "json_schema": { "schema": [] } })),
            "json_schema.schema: must be",
        ),
        (
            format(
                json!({ "type": "json_schema", "json_schema": { "schema": { "type": "string", "pattern": "((" } } }),
            ),
            "unclosed group",
        ),
    ];
    refused(CHAT, &chat(json!({})), &rows);
    // As other servers and clients write it.
    SERVER.good(CHAT, &chat(json!({ "max_tokens": 1, "top_k": -1, "seed": 5.0 })));
    // A call that the limit cut off at its first tokens leaves no trace in the text.
    for limit in 1..6 {
        let body = chat(json!({ "tools": tools, "tool_choice": "required", "max_tokens": limit }));
        let answer = SERVER.good(CHAT, &body);
        assert_eq!(answer["choices"][0]["message"]["content"], "", "{answer}");
        let events = SERVER.post(CHAT, &with(&body, &json!({ "stream": true }))).events();
        let mut said = events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str());
        assert!(said.all(str::is_empty), "{events:?}");
    }
}

#[test]
fn ollama_loads_and_refuses() {
    for (path, body) in [("/api/generate", json!({})), ("/api/chat", json!({ "messages": [] }))] {
        let loaded =
            SERVER.good(path, &with(&body, &json!({ "model": "tiny-gpt-oss", "keep_alive": 0 })));
        assert_eq!(
            (&loaded["done"], &loaded["done_reason"]),
            (&json!(true), &json!("load")),
            "{path}"
        );
        assert_eq!(SERVER.post(path, &json!({ "model": "other" })).status, 404);
    }
    let rows = [
        (
            json!({ "messages": [{ "role": "user", "content": "x", "images": "aa" }] }),
            "messages[0].images",
        ),
        (json!({ "messages": [{ "role": "alien", "content": "x" }] }), "messages[0].role"),
        (json!({ "tools": [{ "type": "zz", "function": { "name": "f" } }] }), "tools[0].type"),
        (json!({ "format": { "type": "martian" } }), "format: "),
        (json!({ "options": { "num_predict": 1.5 } }), "options.num_predict"),
    ];
    refused("/api/chat", &json!({ "messages": user("x"), "stream": false }), &rows);
}

/// Bodies and lines that are no requests.
#[test]
fn bytes_that_are_no_request() {
    let post = |headers: &[&str], body: &[u8]| SERVER.ask("POST", CHAT, headers, body);
    let good = chat(json!({ "max_tokens": 1 })).to_string();
    for (headers, body, status, word) in [
        (&["Content-Encoding: gzip"][..], &b"\x1f\x8b\x08"[..], 415, "`gzip` is not read"),
        (&[], b"", 400, "the body is empty"),
        (
            &["Content-Type: application/x-www-form-urlencoded"],
            b"messages=hi",
            400,
            "send a JSON object",
        ),
        (&[], b"[1]", 400, "must be a JSON object"),
        (&[], b"{\"messages\": \"\\ud800\"}", 400, "no JSON"),
        (&[], b"{\"temperature\": 1e999}", 400, "no JSON"),
        (&[], b"{\"temperature\": NaN}", 400, "no JSON"),
    ] {
        let response = post(headers, body);
        assert_eq!(response.status, status, "{word}: {}", response.body);
        assert!(response.body.contains(word), "{}", response.body);
    }
    let deep = format!("{{\"messages\": {}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(post(&[], deep.as_bytes()).status, 400);
    // A mark in front, as some shells write it, is no fault.
    assert_eq!(post(&[], &[b"\xef\xbb\xbf", good.as_bytes()].concat()).status, 200);
    for (path, word) in [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/models/%ff", "not served"),
    ] {
        let response = SERVER.get(path);
        assert_eq!(response.status, 404, "{path}");
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(word), "{message}");
    }
    // Several requests at once on one connection are answered in their order, also after a bad one.
    let line = |body: &str| {
        format!("POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    };
    let last = "GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let mut stream = SERVER.send((line("bad") + &line(&good) + last).as_bytes());
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    let statuses: Vec<&str> =
        text.match_indices("HTTP/1.1 ").map(|(at, _)| &text[at + 9..at + 12]).collect();
    assert_eq!(statuses, ["400", "200", "200"], "{text}");
    // A length that is none, and one that lies.
    for length in ["-1", "99999999999999999999999", "x"] {
        let head = format!(
            "POST {CHAT} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n{{}}"
        );
        assert_eq!(read(SERVER.send(head.as_bytes())).status, 400, "{length}");
    }
    assert_eq!(SERVER.get("/health").status, 200);
}
