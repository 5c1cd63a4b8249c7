//! The other APIs: Anthropic's messages, OpenAI's responses, Ollama's chat and generate.

mod common;
#[path = "common/server.rs"]
mod server;

use serde_json::{Value, json};
use server::{CHAT, SERVER, user};

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
    assert!(SERVER.get("/api/version").json()["version"].is_string());
    // What is loaded: all that the memory plan has lines for.
    let loaded = SERVER.get("/api/ps").json();
    let (loaded, metrics) = (&loaded["models"][0], SERVER.get("/metrics").body);
    let planned = metrics.lines().filter(|line| line.starts_with("forebay_ledger_bytes{"));
    let planned = planned.map(|line| line.rsplit(' ').next().unwrap().parse::<u64>().unwrap());
    assert_eq!((&loaded["name"], &loaded["size_vram"]), (&json!(name), &json!(0)));
    assert_eq!(loaded["size"], planned.sum::<u64>());
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
