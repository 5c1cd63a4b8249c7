//! The server as a process: connections, keys, limits, the queue, its memory, its end.

mod common;
#[path = "common/server.rs"]
mod server;

use std::io::Read;

use common::{GPT_OSS, model};
use serde_json::{Value, json};
use server::{CHAT, Server, chat, read, text, user};

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

/// Who reads slowly and steadily stays, however long it takes, although more waits for it all the time than it takes in
/// the time that the deaf have.
#[test]
fn a_client_that_reads_slowly_stays() {
    let args = ["--connections", "2", "--unread", "1", "--context", "256"];
    let server = Server::start(&model(GPT_OSS), &args);
    let files = 400;
    let ask = "GET /forebay.js HTTP/1.1\r\nHost: x\r\n\r\n".repeat(files - 1)
        + "GET /forebay.js HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    let mut slow = server.send(b"");
    let mut sending = slow.try_clone().unwrap();
    let sender =
        std::thread::spawn(move || std::io::Write::write_all(&mut sending, ask.as_bytes()));
    let one = server.get("/forebay.js").body;
    let began = std::time::Instant::now();
    let (mut all, mut piece) = (Vec::new(), vec![0; 64 << 10]);
    loop {
        match slow.read(&mut piece).unwrap() {
            0 => break,
            n => all.extend_from_slice(&piece[..n]),
        }
        // For five times as long as a deaf one stays; then as fast as it goes.
        if began.elapsed() < std::time::Duration::from_secs(5) {
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
    }
    sender.join().unwrap().unwrap();
    let all = String::from_utf8(all).unwrap();
    assert_eq!(all.matches("HTTP/1.1 200").count(), files);
    assert!(all.len() > files * one.len() && all.ends_with(&one));
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

/// Who leaves the queue changes no byte of the answer that runs, drafted or not; when that one leaves too, nothing is
/// left of either.
#[test]
fn leaving_the_queue_changes_no_byte() {
    for speculate in ["off", "ngram"] {
        let args = ["--parallel", "1", "--context", "1024", "--speculate", speculate];
        let server = Server::start(&model(GPT_OSS), &args);
        let ask = |tokens: usize, seed: usize| {
            let body = json!({ "prompt": "Once upon a time", "max_tokens": tokens, "seed": seed,
                "stream": true, "ignore_eos": true, "temperature": 0.3 });
            let body = body.to_string();
            server.send(&server.request("POST", "/v1/completions", &[], body.as_bytes()))
        };
        let said = |response: &server::Response| -> Vec<Value> {
            let choices = response.events().into_iter().map(|e| e["choices"].clone());
            choices.filter(|choice| choice.is_array()).collect()
        };
        let alone = read(ask(600, 1));
        // Tokens that end inside a character have no event of their own.
        assert!(said(&alone).len() > 400, "{speculate}");
        let mut running = ask(600, 1);
        let mut head = [0; 20];
        running.read_exact(&mut head).unwrap();
        for seed in 2..5 {
            let waiting = ask(600, seed);
            server.wait_for("forebay_requests_waiting", 1.0);
            drop(waiting);
            server.wait_for("forebay_requests_waiting", 0.0);
        }
        let mut rest = Vec::new();
        running.read_to_end(&mut rest).unwrap();
        let beside = server::parse(&[&head[..], &rest].concat());
        assert_eq!(said(&beside), said(&alone), "{speculate}");
        // The one that runs leaves: the next begins at once, and is what it is alone.
        let mut running = ask(900, 7);
        running.read_exact(&mut head).unwrap();
        let next = ask(600, 1);
        server.wait_for("forebay_requests_waiting", 1.0);
        drop(running);
        assert_eq!(said(&read(next)), said(&alone), "{speculate}");
        server.wait_for("forebay_requests_running", 0.0);
        assert_eq!(server.metric("forebay_requests_total{end=\"failed\"}"), 0.0);
    }
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

/// Answers that the end cuts off, whether they run, pause or wait: each client is told so, in its API's shape, as the server's end and not
/// as a fault.
#[test]
fn who_is_cut_off_at_the_end_is_told() {
    let args =
        ["--grace", "0", "--parallel", "8", "--contexts", "1", "--context", "1024", "--temp", "1"];
    let server = Server::start(&model(GPT_OSS), &args);
    let asked: Vec<_> = (0..24)
        .map(|i| {
            let body = json!({ "prompt": "Once", "max_tokens": 1000, "seed": i, "ignore_eos": true,
                "stream": i % 3 == 0 });
            let body = body.to_string();
            (i, server.send(&server.request("POST", "/v1/completions", &[], body.as_bytes())))
        })
        .collect();
    let began = std::time::Instant::now();
    while server.metric("forebay_requests_waiting") < 12.0 {
        assert!(began.elapsed() < std::time::Duration::from_secs(60), "they do not arrive");
    }
    server.interrupt();
    for (i, stream) in asked {
        let got = read(stream);
        let said = match i % 3 {
            0 if got.body.contains("[DONE]") => continue,
            0 => got.events().pop().unwrap(),
            _ if got.status == 200 => continue,
            _ => {
                assert_eq!(got.status, 503, "{i}: {}", got.body);
                got.json()
            }
        };
        assert_eq!(said["error"]["message"], "the server is shutting down", "{i}: {said}");
    }
    assert_eq!(server.wait().0, Some(0));
}

/// Without a word about it, a server takes as much room for contexts as leaves experts most of theirs; what is asked for
/// is given. A context that does not fit is refused with the bytes that it takes.
#[test]
fn room_for_contexts_fits_the_budget() {
    let room = |args: &[&str]| {
        let usual = [
            "--memory",
            "155MiB",
            "--context",
            "4096",
            "--residency",
            "stream",
            "--max-body",
            "1000",
            "--connections",
            "1",
        ];
        let server = Server::start(&model(GPT_OSS), &[&usual, args].concat());
        let metrics = server.get("/metrics").body;
        let line = |what: &str| {
            let head = format!("forebay_ledger_bytes{{what=\"{what}\"}} ");
            let line = metrics.lines().find_map(|line| line.strip_prefix(&head));
            line.unwrap().parse::<u64>().unwrap()
        };
        (line("keys and values"), line("expert slots"))
    };
    let (one, most) = room(&["--contexts", "1"]);
    let (each, least) = room(&["--parallel", "4"]);
    let (fitting, slots) = room(&[]);
    assert!(each > 3 * one && least * 5 < most * 4, "{each} {one} {least} {most}");
    assert!(fitting >= one && fitting < each, "{fitting} {one} {each}");
    assert!(slots * 5 >= most * 4, "{slots} {most}");

    // 48 layers of 4 heads, 128 wide, over 32768 tokens in 16 bits.
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("shape.gguf");
    let models = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let options = forebay_synth::Options { sparse: true, layers: None };
    forebay_synth::write("qwen3-30b-a3b", &models, &file, options, &mut |_, _| {}).unwrap();
    let mut command = common::forebay();
    command.arg("serve").arg(&file).args(["--listen", "127.0.0.1:0", "--context", "32768"]);
    let got = common::output(command.args(["--parallel", "1", "--memory", "3GiB"]));
    let said = String::from_utf8_lossy(&got.stderr).into_owned();
    assert_eq!(got.status.code(), Some(3), "{said}");
    assert!(said.contains("3221225472 bytes") && said.contains("--context"), "{said}");
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
