//! A server of the command on a free port, and a client as plain as can be.
#![allow(dead_code, reason = "each test uses its part")]

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::common::{GPT_OSS, model};

pub const CHAT: &str = "/v1/chat/completions";

/// One server for all tests of a file that leave it as it was.
pub static SERVER: LazyLock<Server> =
    LazyLock::new(|| Server::start(&model(GPT_OSS), &["--temp", "0", "--context", "512"]));

/// A conversation of one message.
pub fn user(text: &str) -> Value {
    json!([{ "role": "user", "content": text }])
}

/// The body of a short chat request, with further fields.
pub fn chat(extra: Value) -> Value {
    let mut body = json!({ "messages": user("Tell me a story about a fox."), "max_tokens": 16 });
    for (key, value) in extra.as_object().unwrap() {
        body[key] = value.clone();
    }
    body
}

/// Text of a chat completion.
pub fn text(response: &Value) -> &str {
    response["choices"][0]["message"]["content"].as_str().unwrap()
}

pub struct Server {
    child: Child,
    /// Ends the server when this process ends, which drops no statics.
    guard: Child,
    pub address: SocketAddr,
    stderr: Option<std::thread::JoinHandle<String>>,
}

pub struct Response {
    pub status: u16,
    pub headers: String,
    pub body: String,
}

impl Response {
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|e| panic!("{e}: {}", self.body))
    }

    /// `data:` lines of an event stream, as JSON; `[DONE]` as a string.
    pub fn events(&self) -> Vec<Value> {
        let data = self.body.lines().filter_map(|line| line.strip_prefix("data: "));
        data.map(|d| serde_json::from_str(d).unwrap_or_else(|_| d.into())).collect()
    }
}

impl Server {
    /// Starts one and waits until it listens.
    pub fn start(model: &Path, args: &[&str]) -> Server {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forebay"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("FOREBAY_") {
                command.env_remove(name);
            }
        }
        command
            .env("XDG_CONFIG_HOME", "/nonexistent")
            .env("FOREBAY_THREADS", "2")
            .current_dir(env!("CARGO_TARGET_TMPDIR"))
            .arg("serve")
            .arg(model)
            .args(["--listen", "127.0.0.1:0"])
            .args(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut err = child.stderr.take().unwrap();
        let stderr = std::thread::spawn(move || {
            let mut text = String::new();
            let _ = err.read_to_string(&mut text);
            text
        });
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("listening on http");
        let Some(address) = address.and_then(|a| a.trim_start_matches('s').strip_prefix("://"))
        else {
            let _ = child.wait();
            panic!("no server: {line:?} {}", stderr.join().unwrap());
        };
        let script = format!("cat > /dev/null; kill -9 {}", child.id());
        let mut guard = Command::new("sh");
        guard
            .args(["-c", &script])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let guard = guard.spawn().unwrap();
        Server { child, guard, address: address.parse().unwrap(), stderr: Some(stderr) }
    }

    /// Sends bytes as they are and gives the connection.
    pub fn send(&self, bytes: &[u8]) -> TcpStream {
        let mut stream = TcpStream::connect(self.address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(120))).unwrap();
        // A server that refuses early may have closed.
        let _ = stream.write_all(bytes);
        stream
    }

    pub fn request(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Vec<u8> {
        let mut head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\nContent-Length: {}\r\n",
            self.address,
            body.len()
        );
        for header in headers {
            head.push_str(header);
            head.push_str("\r\n");
        }
        [head.as_bytes(), b"\r\n", body].concat()
    }

    pub fn ask(&self, method: &str, path: &str, headers: &[&str], body: &[u8]) -> Response {
        read(self.send(&self.request(method, path, headers, body)))
    }

    pub fn post(&self, path: &str, body: &Value) -> Response {
        self.ask("POST", path, &["Content-Type: application/json"], body.to_string().as_bytes())
    }

    pub fn get(&self, path: &str) -> Response {
        self.ask("GET", path, &[], b"")
    }

    /// A post that must succeed.
    pub fn good(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body);
        assert_eq!(response.status, 200, "{path} {body}: {}", response.body);
        response.json()
    }

    /// Value of a metric.
    pub fn metric(&self, name: &str) -> f64 {
        let text = self.get("/metrics").body;
        let line = text.lines().find(|l| l.strip_prefix(name).is_some_and(|r| r.starts_with(' ')));
        let line = line.unwrap_or_else(|| panic!("no metric {name} in {text}"));
        line.rsplit(' ').next().unwrap().parse().unwrap()
    }

    /// Waits until a metric has a value.
    pub fn wait_for(&self, name: &str, value: f64) {
        let began = Instant::now();
        while self.metric(name) != value {
            assert!(began.elapsed() < Duration::from_secs(60), "{name} is never {value}");
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Tells it to end, as Ctrl-C does.
    pub fn interrupt(&self) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    }

    /// Waits for its end; gives exit code and what it said.
    pub fn wait(mut self) -> (Option<i32>, String) {
        let code = self.child.wait().unwrap().code();
        let text = self.stderr.take().unwrap().join().unwrap();
        assert!(!text.contains("panicked"), "{text}");
        (code, text)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.guard.kill();
        let _ = self.guard.wait();
        let _ = self.child.kill();
        let _ = self.child.wait();
        if let Some(Ok(text)) = self.stderr.take().map(|t| t.join())
            && !std::thread::panicking()
        {
            assert!(!text.contains("panicked"), "{text}");
        }
    }
}

/// Reads a whole response.
pub fn read(mut stream: TcpStream) -> Response {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    parse(&bytes)
}

/// The parts of a whole response.
pub fn parse(bytes: &[u8]) -> Response {
    let at = bytes.windows(4).position(|w| w == b"\r\n\r\n").expect("a response has a head");
    let headers = String::from_utf8(bytes[..at].to_vec()).unwrap();
    let status = headers.split(' ').nth(1).unwrap().parse().unwrap();
    let rest = &bytes[at + 4..];
    let body = match headers.to_ascii_lowercase().contains("transfer-encoding: chunked") {
        true => unchunk(rest),
        false => rest.to_vec(),
    };
    Response { status, headers, body: String::from_utf8(body).unwrap() }
}

fn unchunk(mut rest: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some(at) = rest.windows(2).position(|w| w == b"\r\n") {
        let size = std::str::from_utf8(&rest[..at]).unwrap();
        let size = usize::from_str_radix(size, 16).unwrap();
        let chunk = &rest[at + 2..];
        if size == 0 || chunk.len() < size {
            break;
        }
        out.extend_from_slice(&chunk[..size]);
        rest = &chunk[size + 2..];
    }
    out
}
