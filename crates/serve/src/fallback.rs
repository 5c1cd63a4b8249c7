//! Tools for models whose template knows none: described in the system message, in the form that most open
//! models have seen (`<tool_call>{"name": …, "arguments": …}</tool_call>`).

use forebay_chat::Tool;
use serde_json::{Value, json};

/// What a system message says of tools.
fn description(tools: &[Tool]) -> String {
    let mut text = String::from("You may call these functions:\n<tools>\n");
    for tool in tools {
        let function = json!({
            "name": tool.name,
            "description": tool.description,
            "parameters": tool.parameters,
        });
        text.push_str(&function.to_string());
        text.push('\n');
    }
    text.push_str(
        "</tools>\nTo call one, write its name and arguments as JSON:\n\
         <tool_call>\n{\"name\": NAME, \"arguments\": {...}}\n</tool_call>",
    );
    text
}

/// Messages without tools in them: the system message describes them, calls and results are text.
pub(crate) fn messages(messages: &[Value], tools: &[Tool]) -> Vec<Value> {
    let mut out: Vec<Value> = Vec::with_capacity(messages.len() + 1);
    for message in messages {
        let mut message = message.clone();
        if message["role"] == "tool" {
            let text = content_text(&message["content"]);
            let text = format!("<tool_response>\n{text}\n</tool_response>");
            // Results of one turn are one message.
            match out.last_mut().filter(|last| last["tool_results"] == true) {
                Some(last) => {
                    let joined =
                        format!("{}\n{text}", last["content"].as_str().unwrap_or_default());
                    last["content"] = joined.into();
                }
                None => out.push(json!({ "role": "user", "content": text, "tool_results": true })),
            }
            continue;
        }
        let calls = message.as_object_mut().and_then(|m| m.remove("tool_calls"));
        if let Some(Value::Array(calls)) = calls {
            let mut text = content_text(&message["content"]);
            for call in calls {
                let function = if call["function"].is_object() { &call["function"] } else { &call };
                let arguments = match &function["arguments"] {
                    Value::String(text) => serde_json::from_str(text).unwrap_or(json!({})),
                    other => other.clone(),
                };
                let call = json!({ "name": function["name"], "arguments": arguments });
                if !text.is_empty() {
                    text.push('\n');
                }
                text.push_str(&format!("<tool_call>\n{call}\n</tool_call>"));
            }
            message["content"] = text.into();
        }
        out.push(message);
    }
    for message in &mut out {
        if let Some(message) = message.as_object_mut() {
            message.remove("tool_results");
        }
    }
    if !tools.is_empty() {
        let told = description(tools);
        match out.first_mut().filter(|m| m["role"] == "system" || m["role"] == "developer") {
            Some(system) => {
                let text = content_text(&system["content"]);
                system["content"] = format!("{text}\n\n{told}").into();
            }
            None => out.insert(0, json!({ "role": "system", "content": told })),
        }
    }
    out
}

/// Text of a content, parts joined.
pub(crate) fn content_text(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            texts.join("\n")
        }
        _ => String::new(),
    }
}
