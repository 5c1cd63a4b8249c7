//! OpenAI's chat completions and completions: what clients get.

mod common;
#[path = "common/server.rs"]
mod server;

use common::{GPT_OSS, model};
use serde_json::{Value, json};
use server::{CHAT, SERVER, Server, chat, text, user};

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
