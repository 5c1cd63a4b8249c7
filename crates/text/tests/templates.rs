//! Published chat templates render as transformers renders them, byte for byte.

mod common;

use std::path::Path;

use forebay_text::{ChatRequest, ChatTemplate, TextError};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn request(value: Value) -> ChatRequest {
    serde_json::from_value(value).unwrap()
}

#[test]
fn published_templates_equal_transformers() {
    let Some(shared) = common::shared("published templates against transformers' renderings")
    else {
        return;
    };
    let dir = shared.join("templates");
    let expected = common::json(&dir.join("expected.json"));
    let conversations = common::json(&dir.join("conversations.json"));
    let mut wrong = Vec::new();
    for (name, renderings) in expected["renderings"].as_object().unwrap() {
        let source = std::fs::read_to_string(dir.join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::new(&source).unwrap();
        for conversation in conversations.as_array().unwrap() {
            let id = conversation["id"].as_str().unwrap();
            let mut conversation = conversation.clone();
            conversation["now"] = expected["now"].clone();
            for key in ["bos_token", "eos_token"] {
                conversation[key] = expected["special"][name][key].clone();
            }
            let want = &renderings[id];
            let got = template.render(&request(conversation));
            let right = match (&got, want["text"].as_str(), want["error"].as_str()) {
                (Ok(got), Some(want), _) => got == want,
                (Err(TextError::Refused { message }), None, Some(want)) => {
                    want.ends_with(message.as_str())
                }
                _ => false,
            };
            if !right {
                wrong.push(format!("{name} / {id}\n got: {got:?}\nwant: {want}"));
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Renders every conversation of `tests/data` with a template and compares it with what transformers wrote.
fn compare(name: &str, source: &str, expected: &Value, rows: &Value, wrong: &mut Vec<String>) {
    let template = ChatTemplate::new(source).unwrap();
    for conversation in data("template_conversations.json").as_array().unwrap() {
        let id = conversation["id"].as_str().unwrap();
        let mut conversation = conversation.clone();
        conversation["now"] = expected["now"].clone();
        let special = &expected["special"][name];
        for (key, default) in [("bos_token", "<s>"), ("eos_token", "</s>")] {
            conversation[key] = special[key].as_str().unwrap_or(default).into();
        }
        let got = template.render(&request(conversation));
        let want = &rows[id];
        let right = match &got {
            Ok(got) => match want["sha256"].as_str() {
                Some(sha256) => hex(&Sha256::digest(got)) == sha256,
                None => want.as_str() == Some(got),
            },
            Err(TextError::Refused { message }) => {
                want["error"].as_str().map(str::trim) == Some(message.trim())
            }
            Err(_) => false,
        };
        if !right {
            wrong.push(format!("{name} / {id}\n got: {got:?}\nwant: {want}"));
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn data(name: &str) -> Value {
    common::json(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name))
}

/// `tools/make_template_cases.py` made conversations and renderings.
#[test]
fn many_conversations_equal_transformers() {
    let expected = data("template_expected.json");
    let sources = data("template_sources.json");
    let mut wrong = Vec::new();
    for (name, source) in sources.as_object().unwrap() {
        let source = source.as_str().unwrap();
        compare(name, source, &expected, &expected["bundled"][name], &mut wrong);
    }
    if let Some(shared) = common::shared("published templates with more conversations") {
        for (name, rows) in expected["published"].as_object().unwrap() {
            let path = shared.join(format!("templates/{name}.jinja"));
            let source = std::fs::read_to_string(path).unwrap();
            compare(name, &source, &expected, rows, &mut wrong);
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// The history of case B06 in its four spellings.
fn spellings() -> Vec<Value> {
    let call = |arguments: Value| json!([{"id": "call_123a", "type": "function", "function": {"name": "get_tide", "arguments": arguments}}]);
    let text = json!("{\"port\": \"Oban\"}");
    let object = json!({"port": "Oban"});
    vec![
        json!({"role": "assistant", "content": null, "tool_calls": call(text)}),
        json!({"role": "assistant", "content": null, "tool_calls": call(object.clone())}),
        json!({"role": "assistant", "tool_calls": call(object.clone())}),
        json!({"role": "assistant", "content": "", "tool_calls": call(object)}),
    ]
}

#[test]
fn spellings_of_a_call_render_alike() {
    let Some(shared) = common::shared("B06 on the published templates") else { return };
    let dir = shared.join("templates");
    for name in common::json(&dir.join("expected.json"))["renderings"].as_object().unwrap().keys() {
        let template =
            ChatTemplate::new(&std::fs::read_to_string(dir.join(format!("{name}.jinja"))).unwrap())
                .unwrap();
        let texts: Vec<String> = spellings()
            .into_iter()
            .map(|message| {
                let messages = json!([{"role": "user", "content": "Tide?"}, message, {"role": "tool", "tool_call_id": "call_123a", "name": "get_tide", "content": "06:12"}]);
                template.render(&request(json!({"messages": messages}))).unwrap()
            })
            .collect();
        assert!(texts.windows(2).all(|pair| pair[0] == pair[1]), "{name}: {texts:?}");
        for bad in ["None", "null", "\\"] {
            assert!(!texts[0].contains(bad), "{name}: {bad} in {}", texts[0]);
        }
        if name.starts_with("Qwen3-Coder") || name.starts_with("Qwen3.5") {
            let want = "<tool_call>\n<function=get_tide>\n<parameter=port>\nOban\n</parameter>\n</function>\n</tool_call>";
            assert!(texts[0].contains(want), "{name}");
        }
    }
}

#[test]
fn bad_requests_name_the_field() {
    let template = ChatTemplate::new(CHATML).unwrap();
    let call = |arguments: Value| json!([{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}, {"function": {"name": "f", "arguments": arguments}}]}]);
    let rows = [
        (call(json!("[1]")), "messages[1].tool_calls[1]", "BadRequest"),
        (call(json!("{")), "messages[1].tool_calls[1]", "BadRequest"),
        (call(json!(3)), "messages[1].tool_calls[1]", "BadRequest"),
        (
            json!([{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}]),
            "image_url",
            "Unsupported",
        ),
        (json!([{"role": "user", "content": 3}]), "messages[0].content", "BadRequest"),
        (json!([{"content": "a"}]), "messages[0].role", "BadRequest"),
        (json!(["a"]), "messages[0]", "BadRequest"),
    ];
    let lines = "a\n".repeat(1000);
    let of_kind = json!([{"role": "user", "content": [{"type": lines}]}]);
    let rows = rows
        .into_iter()
        .map(|(messages, part, class)| (json!({"messages": messages}), part, class));
    for (value, part, class) in rows.chain([
        (json!({"messages": of_kind}), "messages[0].content[0]", "Unsupported"),
        (json!({"now": lines}), "now", "BadRequest"),
    ]) {
        let error = template.render(&request(value)).unwrap_err();
        assert!(error.to_string().len() < 200, "{error}");
        assert!(error.to_string().contains(part), "{error}");
        assert!(!error.to_string().contains('\n'));
        assert_eq!(error.class(), class, "{error}");
        assert!(error.is_request_fault());
    }
}

#[test]
fn text_parts_are_taken() {
    let parts = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}], "add_generation_prompt": false});
    let plain = ChatTemplate::new("{% for m in messages %}{{ m.content }}{% endfor %}").unwrap();
    assert_eq!(plain.render(&request(parts.clone())).unwrap(), "a\nb");
    let own = ChatTemplate::new("{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endif %}{% endfor %}").unwrap();
    assert_eq!(own.render(&request(parts)).unwrap(), "[a][b]");
}

#[test]
fn python_in_templates() {
    let rows = [
        ("{{ x | tojson }}", r#"{"b": "<é'&/>", "a": [1, 2.0, null, true]}"#),
        ("{{ x | tojson(ensure_ascii=false) }}", r#"{"b": "<é'&/>", "a": [1, 2.0, null, true]}"#),
        (
            "{{ x | tojson(ensure_ascii=true, sort_keys=true) }}",
            r#"{"a": [1, 2.0, null, true], "b": "<\u00e9'&/>"}"#,
        ),
        ("{{ x | tojson(separators=(',', ':')) }}", r#"{"b":"<é'&/>","a":[1,2.0,null,true]}"#),
        ("{{ x.a | tojson(indent=2) }}", "[\n  1,\n  2.0,\n  null,\n  true\n]"),
        ("{{ [] | tojson(indent=2) }}{{ {} | tojson(indent=2) }}", "[]{}"),
        ("{{ x }}", "{'b': \"<é'&/>\", 'a': [1, 2.0, None, True]}"),
        ("{{ none }} {{ true }} {{ x.a[1] }} {{ missing }}", "None True 2.0 "),
        ("{{ [none, 1.5] | string }}{{ [1, none] | join('-') }}", "[None, 1.5]1-None"),
        (
            "{% for k, v in y.items() %}{{ k }}={{ v }};{% endfor %}{{ y.get('q', 'd') }}",
            "items=1;get=2;d",
        ),
        (
            "{% for i in range(5) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "02",
        ),
        (
            "{% set ns = namespace(n=0) %}{% for i in [1,2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "3",
        ),
        ("a{%- generation -%} b {%- endgeneration %} c", "ab c"),
        (
            "{{ none is iterable }}{{ 'a' is sequence }}{{ {} is sequence }}{{ missing is iterable }}",
            "FalseTrueTrueTrue",
        ),
        (
            "{{ 'a</think>b</think>c'.split('</think>', 1)[1] }}{{ '  x '.strip() }}{{ 'xxa'.lstrip('x') }}",
            "b</think>cxa",
        ),
        ("{{ strftime_now('%d %b %Y') }}", "02 Jan 2026"),
        ("  {% if true %}\nx\n  {% endif %}\ny\n", "x\ny"),
        ("{{ tools is defined }}{{ tools is none }}{{ documents is none }}", "TrueTrueTrue"),
        (
            "{{ 'abc'[1:] }}{{ [1,2,3][::-1] }}{{ 'b' in 'abc' }}{{ 'q' in y }}",
            "bc[3, 2, 1]TrueFalse",
        ),
        ("{{ 7 // 2 }}{{ 7 / 2 }}{{ 2 ** 3 }}{{ 'ab' * 2 }}", "33.58abab"),
    ];
    for (source, want) in rows {
        let value = json!({"now": "2026-01-02T03:04:05", "kwargs": {"x": {"b": "<é'&/>", "a": [1, 2.0, null, true]}, "y": {"items": 1, "get": 2}}});
        let got = ChatTemplate::new(source).and_then(|template| template.render(&request(value)));
        assert_eq!(got.as_deref().map_err(|e| e.to_string()), Ok(want), "{source}");
    }
}

#[test]
fn faults_of_a_template() {
    let refuse =
        ChatTemplate::new("{% macro m() %}{{ raise_exception('No\nway') }}{% endmacro %}{{ m() }}")
            .unwrap();
    let error = refuse.render(&ChatRequest::default()).unwrap_err();
    assert_eq!(
        (error.class(), error.to_string().as_str()),
        ("TemplateRefused", "the chat template refuses this conversation: No way")
    );
    let rows = ["{{ x", "{% for %}"];
    for source in rows {
        assert_eq!(ChatTemplate::new(source).unwrap_err().class(), "TemplateError");
    }
    for source in ["a\n{{ none.x.y }}", "{{ missing | tojson }}"] {
        let error = ChatTemplate::new(source).unwrap().render(&ChatRequest::default()).unwrap_err();
        assert_eq!(error.class(), "TemplateError", "{error}");
    }
}

#[test]
fn templates_of_the_bundled_models() {
    let gguf = common::gguf(&common::models().join("tiny-qwen3-moe/qwen3_moe-Q4_K_M.gguf"));
    let templates = [
        ChatTemplate::from_folder(&common::models().join("tiny-gpt-oss")).unwrap().unwrap(),
        ChatTemplate::from_folder(&common::models().join("tiny-gemma4-mlx4")).unwrap().unwrap(),
        ChatTemplate::from_gguf(&gguf).unwrap().unwrap(),
    ];
    for template in templates {
        let value = json!({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "Hi"}]});
        let want = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n";
        assert_eq!(template.render(&request(value)).unwrap(), want);
    }
}

#[test]
fn named_templates() {
    let dir = tempfile::tempdir().unwrap();
    assert!(ChatTemplate::from_folder(dir.path()).unwrap().is_none());
    let config = json!({"bos_token": {"content": "<s>"}, "chat_template": [{"name": "tool_use", "template": "{{ bos_token }}T"}, {"name": "default", "template": "D"}]});
    std::fs::write(dir.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    let template = ChatTemplate::from_folder(dir.path()).unwrap().unwrap();
    assert_eq!(template.source(), "D");
    assert_eq!(template.render(&ChatRequest::default()).unwrap(), "D");
    assert_eq!(template.render(&request(json!({"tools": [{}]}))).unwrap(), "<s>T");
    std::fs::write(dir.path().join("chat_template.jinja"), "F").unwrap();
    assert_eq!(ChatTemplate::from_folder(dir.path()).unwrap().unwrap().source(), "F");
}

#[test]
fn string_arguments_where_a_template_wants_them() {
    let template = ChatTemplate::new("{% for m in messages %}{% for c in m.tool_calls %}{{ '[' + c.function.arguments + ']' }}{% endfor %}{% endfor %}").unwrap();
    for message in spellings() {
        assert_eq!(
            template.render(&request(json!({"messages": [message]}))).unwrap(),
            "[{\"port\": \"Oban\"}]"
        );
    }
}
