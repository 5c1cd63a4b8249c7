//! A hub on 127.0.0.1: one thread per connection, one request per connection, every answer can be
//! replaced by a test.

#![allow(dead_code)]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forebay_hub::{Control, Hub, HubConfig, HubError, Listing, RepoId, Retry, select};
use sha1::Digest as _;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

#[derive(Clone, Debug)]
pub struct Request {
    /// With the query.
    pub path: String,
    /// Names in lower case.
    pub headers: BTreeMap<String, String>,
    /// How many requests to this path came before.
    pub nth: usize,
}

impl Request {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(String::as_str)
    }

    /// First and last byte of `Range`.
    pub fn range(&self) -> Option<(u64, Option<u64>)> {
        let (from, to) = self.header("range")?.strip_prefix("bytes=")?.split_once('-')?;
        Some((from.parse().unwrap(), to.parse().ok()))
    }
}

#[derive(Clone, Debug, Default)]
pub struct Reply {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
    /// What `Content-Length` says if it is not the body's.
    pub claims: Option<u64>,
    /// Say nothing for so long before the body.
    pub silence: Duration,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Reply {
        Reply { status, body: body.into(), ..Reply::default() }
    }

    pub fn with(mut self, name: &str, value: impl ToString) -> Reply {
        self.headers.push((name.into(), value.to_string()));
        self
    }

    pub fn claiming(mut self, len: u64) -> Reply {
        self.claims = Some(len);
        self
    }
}

/// The bytes that were asked for.
pub fn ranged(request: &Request, content: &[u8]) -> Reply {
    let len = content.len() as u64;
    match request.range() {
        None => Reply::new(200, content),
        Some((from, _)) if from >= len => {
            Reply::new(416, "").with("Content-Range", format!("bytes */{len}"))
        }
        Some((from, to)) => part(content, from, to.map_or(len, |t| (t + 1).min(len))),
    }
}

/// 206 with the bytes `from..to`.
pub fn part(content: &[u8], from: u64, to: u64) -> Reply {
    let range = format!("bytes {from}-{}/{}", to - 1, content.len());
    Reply::new(206, &content[from as usize..to as usize]).with("Content-Range", range)
}

type Handler = dyn Fn(&Request) -> Reply + Send + Sync;

pub struct Server {
    pub url: String,
    pub log: Arc<Mutex<Vec<Request>>>,
    /// Bytes of bodies.
    pub served: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Server {
    pub fn start(handler: impl Fn(&Request) -> Reply + Send + Sync + 'static) -> Server {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let handler: Arc<Handler> = Arc::new(handler);
        let (log, served, stop) =
            <(Arc<Mutex<Vec<Request>>>, Arc<AtomicU64>, Arc<AtomicBool>)>::default();
        let server = Server { url, log: log.clone(), served: served.clone(), stop: stop.clone() };
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                let (handler, log, served) = (handler.clone(), log.clone(), served.clone());
                std::thread::spawn(move || answer(stream, &*handler, &log, &served));
            }
        });
        server
    }

    pub fn requests(&self, part: &str) -> Vec<Request> {
        let log = self.log.lock().unwrap();
        log.iter().filter(|r| r.path.contains(part)).cloned().collect()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect(self.url.trim_start_matches("http://"));
    }
}

fn answer(mut stream: TcpStream, handler: &Handler, log: &Mutex<Vec<Request>>, served: &AtomicU64) {
    let mut reader = BufReader::new(stream.try_clone().unwrap());
    let mut line = String::new();
    if reader.read_line(&mut line).unwrap_or(0) == 0 {
        return;
    }
    let path = line.split(' ').nth(1).unwrap_or("").to_owned();
    let mut headers = BTreeMap::new();
    loop {
        line.clear();
        if reader.read_line(&mut line).unwrap_or(0) == 0 || line.trim().is_empty() {
            break;
        }
        let (name, value) = line.split_once(':').unwrap();
        headers.insert(name.to_lowercase(), value.trim().to_owned());
    }
    let request = {
        let mut log = log.lock().unwrap();
        let nth = log.iter().filter(|r| r.path == path).count();
        log.push(Request { path, headers, nth });
        log.last().unwrap().clone()
    };
    let reply = handler(&request);
    let mut head = format!("HTTP/1.1 {} X\r\nConnection: close\r\n", reply.status);
    for (name, value) in &reply.headers {
        head.push_str(&format!("{name}: {value}\r\n"));
    }
    let len = reply.claims.unwrap_or(reply.body.len() as u64);
    head.push_str(&format!("Content-Length: {len}\r\n\r\n"));
    let _ = stream.write_all(head.as_bytes());
    std::thread::sleep(reply.silence);
    for chunk in reply.body.chunks(4096) {
        if stream.write_all(chunk).is_err() {
            break;
        }
        served.fetch_add(chunk.len() as u64, Ordering::Relaxed);
    }
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let _ = stream.read(&mut [0]);
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub fn sha256(content: &[u8]) -> String {
    hex(&sha2::Sha256::digest(content))
}

pub fn git_sha1(content: &[u8]) -> String {
    let mut hasher = sha1::Sha1::new_with_prefix(format!("blob {}\0", content.len()));
    hasher.update(content);
    hex(&hasher.finalize())
}

pub fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

/// A repository `o/n`: what is longer than 500 bytes is large-file storage.
#[derive(Clone, Default)]
pub struct Repo {
    pub files: BTreeMap<String, Vec<u8>>,
    pub page: usize,
}

impl Repo {
    pub fn new(files: &[(&str, &[u8])]) -> Repo {
        let files = files.iter().map(|(p, c)| (p.to_string(), c.to_vec())).collect();
        Repo { files, page: 1000 }
    }

    pub fn digest(&self, path: &str) -> String {
        let content = &self.files[path];
        if content.len() > 500 { sha256(content) } else { git_sha1(content) }
    }

    /// What a hub answers.
    pub fn reply(&self, request: &Request) -> Reply {
        let (path, query) = request.path.split_once('?').unwrap_or((&request.path, ""));
        if path == "/api/models/o/n/revision/main" || path.ends_with(&format!("/revision/{COMMIT}"))
        {
            return Reply::new(200, format!("{{\"id\":\"o/n\",\"sha\":\"{COMMIT}\"}}"));
        }
        if path == format!("/api/models/o/n/tree/{COMMIT}") {
            return self.tree(path, query);
        }
        if let Some(file) = path.strip_prefix(&format!("/o/n/resolve/{COMMIT}/"))
            && let Some(content) = self.files.get(file)
        {
            let reply = ranged(request, content);
            return reply
                .with("ETag", format!("\"{}\"", self.digest(file)))
                .with("X-Repo-Commit", COMMIT);
        }
        Reply::new(404, "not here")
    }

    fn tree(&self, path: &str, query: &str) -> Reply {
        let start = query.split('&').find_map(|p| p.strip_prefix("cursor=")?.parse().ok());
        let start: usize = start.unwrap_or(0);
        let entry = |(path, content): (&String, &Vec<u8>)| {
            let len = content.len();
            let mut entry = serde_json::json!({
                "type": "file", "path": path, "size": len, "oid": git_sha1(content),
            });
            if len > 500 {
                let lfs =
                    serde_json::json!({ "oid": sha256(content), "size": len, "pointerSize": 130 });
                entry["lfs"] = lfs;
            }
            entry
        };
        let mut entries: Vec<_> =
            self.files.iter().skip(start).take(self.page).map(entry).collect();
        entries
            .push(serde_json::json!({ "type": "directory", "path": "d", "oid": "x", "size": 0 }));
        let reply = Reply::new(200, serde_json::to_vec(&entries).unwrap());
        match start + self.page < self.files.len() {
            true => {
                // As a mirror passes on what its origin said.
                let next = format!(
                    "https://huggingface.co{path}?recursive=1&cursor={}",
                    start + self.page
                );
                reply.with("Link", format!("<{next}>; rel=\"next\""))
            }
            false => reply,
        }
    }

    /// Serves the repository; `script` may answer first.
    pub fn serve(
        self,
        script: impl Fn(&Request, &Repo) -> Option<Reply> + Send + Sync + 'static,
    ) -> Server {
        Server::start(move |r| script(r, &self).unwrap_or_else(|| self.reply(r)))
    }
}

pub struct Bench {
    pub dir: tempfile::TempDir,
    pub config: HubConfig,
    pub cancel: AtomicBool,
}

impl Bench {
    pub fn new(server: &Server) -> Bench {
        let dir = tempfile::tempdir().unwrap();
        let mut config = HubConfig::new(&server.url, dir.path());
        config.retry = Retry {
            attempts: 3,
            first_delay: Duration::from_millis(5),
            max_delay: Duration::from_millis(20),
            max_server_delay: Duration::from_secs(1),
            stall: Duration::from_secs(10),
            connect: Duration::from_secs(10),
        };
        Bench { dir, config, cancel: AtomicBool::new(false) }
    }

    pub fn hub(&self) -> Hub {
        Hub::new(&self.config).unwrap()
    }

    pub fn list(&self) -> Result<Listing, HubError> {
        self.hub().list(&repo(), "main", &self.cancel)
    }

    /// Lists, selects and downloads.
    pub fn pull(&self, pattern: Option<&str>) -> Result<PathBuf, HubError> {
        let listing = self.list()?;
        let selection = select(&repo(), &listing.files, pattern)?;
        let control = Control { progress: &|_, _, _| {}, cancel: &self.cancel };
        self.hub().fetch(&listing, &selection.files(), &control)
    }

    pub fn blobs(&self) -> PathBuf {
        self.dir.path().join("models--o--n/blobs")
    }

    /// Names in the blobs' folder.
    pub fn blob_names(&self) -> Vec<String> {
        names(&self.blobs())
    }
}

pub fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

pub fn repo() -> RepoId {
    RepoId::parse("o/n").unwrap()
}
