//! What people see of the server: the page, the live view, the log, and TLS.

mod common;
#[path = "common/server.rs"]
mod server;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::PathBuf;
use std::sync::Arc;

use common::{GPT_OSS, model};
use serde_json::{Value, json};
use server::Server;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto};

const STREAMED: [&str; 6] = ["--residency", "stream", "--slots", "4", "--context", "256"];

#[test]
fn the_page_is_whole_and_asks_nobody_else() {
    let dir = tempfile::tempdir().unwrap();
    let keys = dir.path().join("keys");
    std::fs::write(&keys, "secret\n").unwrap();
    let server = Server::start(&model(GPT_OSS), &["--api-keys", keys.to_str().unwrap()]);
    let page = server.get("/");
    assert_eq!(page.status, 200);
    assert!(page.headers.contains("text/html"));
    let policy = page.headers.lines().find(|l| l.starts_with("content-security-policy: ")).unwrap();
    assert!(policy.contains("default-src 'none'") && !policy.contains("unsafe"), "{policy}");
    // What the page names is there, without a key; nothing is elsewhere.
    let mut named = 0;
    for part in page.body.split(['"', '\'']).filter(|p| p.starts_with("/forebay.")) {
        let file = server.get(part);
        assert_eq!(file.status, 200, "{part}");
        assert!(
            file.headers.contains("nosniff") && file.headers.contains("content-security-policy")
        );
        assert!(!file.body.contains("http://") && !file.body.contains("https://"), "{part}");
        named += 1;
    }
    assert_eq!(named, 2);
    assert!(
        !page.body.contains("style=") && !page.body.contains("onclick"),
        "the policy forbids it"
    );
    // Its data are behind the key.
    assert_eq!(server.get("/v1/forebay/live").status, 401);
    assert_eq!(server.ask("GET", "/v1/forebay/live", &["x-api-key: secret"], b"").status, 200);
}

#[test]
fn the_live_view_counts_what_happens() {
    let server = Server::start(&model(GPT_OSS), &STREAMED);
    let look = || {
        // The first look asks for the experts, the next has them.
        server.get("/v1/forebay/live");
        std::thread::sleep(std::time::Duration::from_millis(200));
        server.get("/v1/forebay/live").json()
    };
    let before = look();
    let slots = before["experts"]["slots"].as_u64().unwrap();
    assert_eq!(slots, 4 * 6);
    assert_eq!(before["experts"]["per_layer"], 16);
    assert_eq!(before["experts"]["routed_layers"].as_array().unwrap().len(), 6);
    let answer = server
        .good("/v1/completions", &json!({ "prompt": "Once", "max_tokens": 20, "temperature": 0 }));
    let after = look();
    let grew = |path: &str| {
        let of = |live: &Value| live.pointer(path).unwrap().as_u64().unwrap();
        of(&after) - of(&before)
    };
    assert_eq!(grew("/tokens/generated"), 20);
    assert_eq!(grew("/tokens/prompt"), answer["usage"]["prompt_tokens"].as_u64().unwrap());
    // Every row asks 4 experts of each of 6 layers, once for all rows of a step.
    let asked = grew("/experts/hits") + grew("/experts/misses");
    assert!((19 * 4 * 6..=(20 * 16 * 6)).contains(&asked), "{asked}");
    let resident: Vec<(u64, usize)> = after["experts"]["layers"]
        .as_array()
        .unwrap()
        .iter()
        .map(|l| (l["layer"].as_u64().unwrap(), l["resident"].as_array().unwrap().len()))
        .collect();
    assert_eq!(resident.len(), 6);
    let in_memory: usize = resident.iter().map(|(_, n)| n).sum();
    assert_eq!(in_memory as u64, slots - after["experts"]["free"].as_u64().unwrap());
    let ledger = after["memory"]["ledger"].as_array().unwrap();
    let total: u64 = ledger.iter().map(|l| l["bytes"].as_u64().unwrap()).sum();
    assert!(total <= after["memory"]["budget"].as_u64().unwrap());
}

#[test]
fn requests_are_logged_without_their_texts() {
    let prompt = "A very secret fox";
    let ask = |args: &[&str]| -> (Vec<Value>, String) {
        let server = Server::start(&model(GPT_OSS), &[args, &["--context", "256"]].concat());
        let body = json!({ "prompt": prompt, "max_tokens": 3, "n": 2, "temperature": 0 });
        server.good("/v1/completions", &body);
        server.post("/v1/completions", &json!({ "prompt": 3 }));
        let mut body = body;
        body["stream"] = true.into();
        assert_eq!(server.post("/v1/completions", &body).status, 200);
        server.get("/nowhere");
        server.interrupt();
        let (code, text) = server.wait();
        assert_eq!(code, Some(0));
        let lines = text.lines().filter(|l| l.starts_with('{'));
        (lines.map(|l| serde_json::from_str(l).unwrap()).collect(), text)
    };
    let (lines, text) = ask(&["--log-format", "json"]);
    assert!(!text.contains("secret"), "{text}");
    let about: Vec<&Value> = lines.iter().filter(|l| l["target"] == "forebay::request").collect();
    assert_eq!(about.len(), 4, "{text}");
    for line in &about {
        assert!(line["duration_ms"].as_f64().unwrap() >= 0.0 && line["left"] == false, "{line}");
    }
    let answers: Vec<_> = about.iter().filter(|l| l["message"] == "answer").collect();
    assert_eq!(answers.len(), 2);
    for answer in &answers {
        assert_eq!(
            (&answer["method"], &answer["path"]),
            (&"POST".into(), &"/v1/completions".into())
        );
        assert_eq!((&answer["status"], &answer["answers"]), (&200.into(), &2.into()));
        assert_eq!(answer["generated_tokens"], 6);
        assert!(answer["prompt_tokens"].as_u64().unwrap() > 2);
        assert_eq!(answer["id"].as_str().unwrap().len(), 24);
    }
    let status =
        |path: &str, status: u16| about.iter().any(|l| l["path"] == path && l["status"] == status);
    assert!(status("/v1/completions", 400) && status("/nowhere", 404));
    let (lines, text) = ask(&["--log-format", "json", "--log-prompts"]);
    assert!(lines.iter().any(|l| l["prompt"] == prompt), "{text}");
    let (lines, text) = ask(&["--log-format", "off"]);
    assert!(lines.is_empty() && !text.contains("/nowhere"), "{text}");
    let (lines, text) = ask(&[]);
    assert!(lines.is_empty() && text.contains("/nowhere") && !text.contains("secret"), "{text}");
}

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/tls").join(name)
}

#[test]
fn tls_serves_the_same_and_a_stuck_handshake_holds_nobody_up() {
    let (cert, key) = (fixture("cert.pem"), fixture("key.pem"));
    let args = ["--tls-cert", cert.to_str().unwrap(), "--tls-key", key.to_str().unwrap()];
    let server = Server::start(&model(GPT_OSS), &args);
    // Connects and says nothing.
    let _stuck = TcpStream::connect(server.address).unwrap();
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(&cert).unwrap()).unwrap();
    let config = ClientConfig::builder_with_provider(Arc::new(crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    let name = ServerName::try_from("localhost").unwrap();
    let client = ClientConnection::new(Arc::new(config), name).unwrap();
    let tcp = TcpStream::connect(server.address).unwrap();
    let mut stream = StreamOwned::new(client, tcp);
    let body = json!({ "prompt": "Once", "max_tokens": 4, "stream": true }).to_string();
    stream.write_all(&server.request("POST", "/v1/completions", &[], body.as_bytes())).unwrap();
    let mut answer = Vec::new();
    // The end may come without a goodbye.
    let _ = stream.read_to_end(&mut answer);
    let text = String::from_utf8_lossy(&answer);
    assert!(text.starts_with("HTTP/1.1 200") && text.contains("[DONE]"), "{text}");
    // Plain HTTP is no handshake.
    let mut plain = Vec::new();
    let request = server.request("GET", "/health", &[], b"");
    let _ = server.send(&request).read_to_end(&mut plain);
    assert!(!plain.starts_with(b"HTTP"));
    server.interrupt();
    assert_eq!(server.wait().0, Some(0));
    // Half of a pair, and files that are none.
    for args in [
        &["--tls-cert", cert.to_str().unwrap()][..],
        &["--tls-cert", cert.to_str().unwrap(), "--tls-key", "/nonexistent"],
        &["--tls-cert", key.to_str().unwrap(), "--tls-key", key.to_str().unwrap()],
    ] {
        let out = common::output(common::forebay().arg("serve").arg(model(GPT_OSS)).args(args));
        assert_eq!(out.status.code(), Some(2), "{args:?}");
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(
            text.contains("tls-key") || text.contains("nonexistent") || text.contains("key.pem"),
            "{text}"
        );
    }
}
