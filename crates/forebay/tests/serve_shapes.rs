//! Answers in a shape: forced calls and structured output.

mod common;
#[path = "common/server.rs"]
mod server;

use serde_json::{Value, json};
use server::{CHAT, SERVER, chat, text};

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
