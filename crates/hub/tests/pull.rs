//! Listing, selection, download and cache against a hub on this machine.

mod common;

use std::fs;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use common::*;
use forebay_hub::{Cache, Control, HubError, select};

fn folder() -> Repo {
    Repo::new(&[
        ("README.md", b"hello"),
        ("config.json", b"{}"),
        ("tokenizer.json", &bytes(700)),
        ("model-00001-of-00002.safetensors", &bytes(5000)),
        ("model-00002-of-00002.safetensors", &bytes(6000)),
        ("model.safetensors.index.json",
         br#"{"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#),
        ("original/x.safetensors", &bytes(900)),
    ])
}

#[test]
#[cfg(unix)] // symlinks
fn a_folder_comes_whole() {
    let repo_files = folder();
    let server = repo_files.clone().serve(|_, _| None);
    let bench = Bench::new(&server);
    let seen = Mutex::new(Vec::new());
    let listing = bench.list().unwrap();
    assert_eq!((listing.commit.as_str(), listing.files.len()), (COMMIT, 7));
    let selection = select(&repo(), &listing.files, None).unwrap();
    let files = selection.files();
    assert_eq!(bench.hub().missing_bytes(&listing, &files), selection.bytes());
    assert_eq!(bench.hub().resolve_local(&repo(), None).unwrap(), None);

    let progress =
        |name: &str, done, total| seen.lock().unwrap().push((name.to_owned(), done, total));
    let control = Control { progress: &progress, cancel: &bench.cancel };
    let snapshot = bench.hub().fetch(&listing, &files, &control).unwrap();
    assert_eq!(snapshot, bench.dir.path().join("models--o--n/snapshots").join(COMMIT));
    let seen = seen.into_inner().unwrap();
    for file in &files {
        assert_eq!(fs::read(snapshot.join(&file.path)).unwrap(), repo_files.files[&file.path]);
        assert!(seen.contains(&(file.path.clone(), file.size, file.size)));
        let target = fs::read_link(snapshot.join(&file.path)).unwrap();
        assert_eq!(
            target.to_str().unwrap(),
            format!("../../blobs/{}", repo_files.digest(&file.path))
        );
    }
    assert!(!snapshot.join("README.md").exists() && !snapshot.join("original").exists());
    let reference = fs::read_to_string(bench.dir.path().join("models--o--n/refs/main")).unwrap();
    assert_eq!(reference, COMMIT);

    // All is there now: found without the network, and not fetched again.
    let cached = bench.hub().resolve_local(&repo(), None).unwrap().unwrap();
    assert_eq!((cached.path, cached.commit.as_str()), (snapshot.clone(), COMMIT));
    assert_eq!(bench.hub().missing_bytes(&listing, &files), 0);
    let before = server.requests("/resolve/").len();
    bench.pull(None).unwrap();
    assert_eq!(server.requests("/resolve/").len(), before);

    // A shard or the description is missing: not there.
    for gone in ["model-00002-of-00002.safetensors", "config.json"] {
        let entry = snapshot.join(gone);
        let target = fs::read_link(&entry).unwrap();
        fs::remove_file(&entry).unwrap();
        assert_eq!(bench.hub().resolve_local(&repo(), None).unwrap(), None, "{gone}");
        std::os::unix::fs::symlink(target, entry).unwrap();
    }
    assert!(Cache::new(bench.dir.path()).resolve_local(&repo(), None).unwrap().is_some());
}

#[test]
#[cfg(unix)] // symlinks
fn a_split_set_in_a_subfolder() {
    let repo_files = Repo::new(&[
        ("Q4/m-Q4-00001-of-00002.gguf", &bytes(800)),
        ("Q4/m-Q4-00002-of-00002.gguf", &bytes(801)),
        ("Q8/m-Q8.gguf", &bytes(802)),
    ]);
    let server = repo_files.serve(|_, _| None);
    let bench = Bench::new(&server);
    let e = bench.pull(None).unwrap_err();
    assert!(e.to_string().contains("o/n:Q4") && e.to_string().contains("Q8/m-Q8.gguf"), "{e}");
    let snapshot = bench.pull(Some("q4")).unwrap();
    let first = snapshot.join("Q4/m-Q4-00001-of-00002.gguf");
    assert_eq!(fs::read(&first).unwrap(), bytes(800));
    let target = fs::read_link(&first).unwrap();
    assert!(target.starts_with("../../../blobs"), "{target:?}");
    let local = |pattern| bench.hub().resolve_local(&repo(), pattern).unwrap().map(|c| c.path);
    assert_eq!(local(None), Some(first.clone()));
    assert_eq!(local(Some("Q4")), Some(first.clone()));
    assert_eq!(local(Some("Q8")), None);
    fs::remove_file(snapshot.join("Q4/m-Q4-00002-of-00002.gguf")).unwrap();
    assert_eq!(local(None), None);
    // Two of them: only a person can say.
    bench.pull(Some("*Q*")).unwrap();
    let e = bench.hub().resolve_local(&repo(), None).unwrap_err();
    assert_eq!(e.class(), "Ambiguous");
}

#[test]
fn pages() {
    let names: Vec<String> = (0..25).map(|i| format!("f{i:02}.txt")).collect();
    let files: Vec<(&str, &[u8])> = names.iter().map(|n| (n.as_str(), n.as_bytes())).collect();
    let server = Repo { page: 10, ..Repo::new(&files) }.serve(|_, _| None);
    let bench = Bench::new(&server);
    let listing = bench.list().unwrap();
    assert_eq!(listing.files.iter().map(|f| f.path.clone()).collect::<Vec<_>>(), names);
    assert_eq!(server.requests("/tree/").len(), 3);
    // Pages without an end have one.
    let endless = Repo::new(&[]).serve(|r, _| {
        let link = format!("<{}>; rel=\"next\"", r.path);
        r.path.contains("/tree/").then(|| Reply::new(200, "[]").with("Link", link))
    });
    let e = Bench::new(&endless).list().unwrap_err();
    assert!(e.to_string().contains("200 pages"), "{e}");
}

#[test]
fn the_token_goes_to_the_endpoint_only() {
    let content = bytes(3000);
    let storage = {
        let content = content.clone();
        Server::start(move |r| ranged(r, &content).with("ETag", "\"of-the-storage\""))
    };
    let to = format!("{}/signed?secret=1", storage.url);
    let repo_files = Repo::new(&[("m.gguf", &content)]);
    let digest = repo_files.digest("m.gguf");
    let server = repo_files.serve(move |r, _| {
        if r.path == "/moved" {
            return Some(Reply::new(302, "").with("Location", &to));
        }
        let reply =
            || Reply::new(307, "").with("Location", "/moved").with("X-Linked-ETag", &digest);
        r.path.contains("/resolve/").then(reply)
    });
    let mut bench = Bench::new(&server);
    bench.config.token = Some("hf_secret".into());
    let snapshot = bench.pull(None).unwrap();
    assert_eq!(fs::read(snapshot.join("m.gguf")).unwrap(), content);
    for request in server.requests("") {
        assert_eq!(request.header("authorization"), Some("Bearer hf_secret"), "{}", request.path);
    }
    let stored = storage.requests("");
    assert_eq!(stored.len(), 1);
    assert_eq!(stored[0].header("authorization"), None);
}

#[test]
fn redirects_end() {
    let server = folder().serve(|r, _| {
        r.path.contains("/resolve/").then(|| Reply::new(302, "").with("Location", &r.path))
    });
    let e = Bench::new(&server).pull(None).unwrap_err();
    assert!(e.to_string().contains("redirects"), "{e}");
}

#[test]
fn a_signed_address_that_expired_is_asked_for_again() {
    let content = bytes(2000);
    let storage = {
        let content = content.clone();
        Server::start(move |r| match r.path.as_str() {
            "/0" => Reply::new(403, "expired"),
            _ => ranged(r, &content),
        })
    };
    let to = storage.url.clone();
    let server = Repo::new(&[("m.gguf", &content)]).serve(move |r, _| {
        let location = format!("{to}/{}", r.nth);
        r.path.contains("/resolve/").then(|| Reply::new(302, "").with("Location", location))
    });
    let snapshot = Bench::new(&server).pull(None);
    assert!(snapshot.is_ok(), "{snapshot:?}");
}

#[test]
fn refusals() {
    type Row<'a> = (&'a str, &'a str, Reply, &'a str, &'a [&'a str], usize);
    let coded = |status, code: &str| Reply::new(status, "no").with("X-Error-Code", code);
    let rows: &[Row<'_>] = &[
        (
            "no token",
            "/revision/",
            coded(401, "GatedRepo"),
            "Unauthorized",
            &["token missing or rejected", "HF_TOKEN"],
            1,
        ),
        (
            "gated",
            "/resolve/",
            coded(403, "GatedRepo"),
            "Gated",
            &["accept the licence", "/o/n"],
            1,
        ),
        (
            "no repository",
            "/revision/",
            coded(404, "RepoNotFound"),
            "NotFound",
            &["no such repository"],
            1,
        ),
        (
            "no revision",
            "/revision/",
            coded(404, "RevisionNotFound"),
            "NotFound",
            &["no revision \"main\""],
            1,
        ),
        (
            "no file",
            "/resolve/",
            coded(404, "EntryNotFound"),
            "NotFound",
            &["no file \"m.gguf\""],
            1,
        ),
        (
            "for too long",
            "/revision/",
            Reply::new(429, "").with("Retry-After", 3600),
            "RateLimited",
            &["slow down for 3600 s"],
            1,
        ),
        ("always", "/revision/", Reply::new(429, ""), "RateLimited", &["slow down"], 3),
        (
            "down",
            "/resolve/",
            Reply::new(503, "").with("Content-Type", "text/plain"),
            "ServerError",
            &["503"],
            3,
        ),
        (
            "odd",
            "/revision/",
            Reply::new(418, "tea\x1b[31m\n").with("Content-Type", "text/plain"),
            "ServerError",
            &["418", "tea"],
            1,
        ),
        (
            "no JSON",
            "/revision/",
            Reply::new(200, "<html>"),
            "ServerError",
            &["unusable answer"],
            1,
        ),
        (
            "no commit",
            "/revision/",
            Reply::new(200, r#"{"sha":"../../x"}"#),
            "ServerError",
            &["id of a commit"],
            1,
        ),
        (
            "no digest",
            "/tree/",
            Reply::new(200, r#"[{"type":"file","path":"a.gguf","size":1,"oid":"zz"}]"#),
            "ServerError",
            &["digest of a.gguf"],
            1,
        ),
        (
            "twice",
            "/tree/",
            Reply::new(
                200,
                format!(
                    "[{0},{0}]",
                    r#"{"type":"file","path":"a","size":1,"oid":"0123456789abcdef0123456789abcdef01234567"}"#
                ),
            ),
            "ServerError",
            &["each path once"],
            1,
        ),
    ];
    for (row, at, reply, class, mentions, attempts) in rows {
        let (at, reply) = (at.to_string(), reply.clone());
        let path = at.clone();
        let server = Repo::new(&[("m.gguf", &bytes(900))])
            .serve(move |r, _| r.path.contains(&path).then(|| reply.clone()));
        let e = Bench::new(&server).pull(None).unwrap_err();
        let text = e.to_string();
        assert_eq!(e.class(), *class, "{row}: {text}");
        assert!(mentions.iter().all(|m| text.contains(m)), "{row}: {text}");
        assert!(!text.contains('\n') && !text.contains('\x1b'), "{row}: {text:?}");
        assert_eq!(server.requests(&at).len(), *attempts, "{row}");
    }
}

#[test]
fn a_token_that_is_rejected() {
    let server = Repo::default().serve(|_, _| Some(Reply::new(401, "")));
    let mut bench = Bench::new(&server);
    bench.config.token = Some("hf_old".into());
    let text = bench.list().unwrap_err().to_string();
    assert!(text.contains("token that was sent") && !text.contains("hf_old"), "{text}");
}

#[test]
fn a_wait_that_is_asked_for() {
    let server = folder().serve(|r, _| {
        let first = r.path.contains("/revision/") && r.nth == 0;
        first.then(|| Reply::new(429, "").with("Retry-After", 1))
    });
    let start = Instant::now();
    Bench::new(&server).list().unwrap();
    assert!(start.elapsed() >= Duration::from_secs(1));
}

#[test]
fn paths_that_lead_out() {
    for path in ["../x", "/etc/x", "a/../../x", "a\\\\b", "C:x", "a\\u0000b", ""] {
        let entry =
            format!(r#"[{{"type":"file","path":"{path}","size":1,"oid":"{}"}}]"#, git_sha1(b"x"));
        let server = Repo::default()
            .serve(move |r, _| r.path.contains("/tree/").then(|| Reply::new(200, entry.clone())));
        let e = Bench::new(&server).list().unwrap_err();
        assert_eq!(e.class(), "UnsafePath", "{path}: {e}");
    }
    let server = Repo::default().serve(|_, _| None);
    let bench = Bench::new(&server);
    let e = bench.hub().list(&repo(), "../main", &bench.cancel).unwrap_err();
    assert!(matches!(e, HubError::BadSetting { .. }));
    assert!(server.requests("").is_empty());
}

#[test]
fn two_at_a_time_fetch_once() {
    let server = folder().serve(|r, repo| {
        let slow = r.path.ends_with("00002-of-00002.safetensors");
        slow.then(|| Reply { silence: Duration::from_millis(200), ..repo.reply(r) })
    });
    let bench = Bench::new(&server);
    let results: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..3).map(|_| scope.spawn(|| bench.pull(None))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    for result in results {
        let snapshot = result.unwrap();
        assert_eq!(
            fs::read(snapshot.join("model-00002-of-00002.safetensors")).unwrap(),
            bytes(6000)
        );
    }
    assert_eq!(server.requests("/resolve/").len(), 5);
    assert!(bench.blob_names().iter().all(|n| !n.ends_with(".incomplete")));
}

#[test]
fn offline() {
    let server = folder().serve(|_, _| None);
    let mut bench = Bench::new(&server);
    bench.pull(None).unwrap();
    let before = server.requests("").len();
    bench.config.offline = true;
    assert!(bench.hub().resolve_local(&repo(), None).unwrap().is_some());
    assert_eq!(bench.list().unwrap_err().class(), "Offline");
    assert_eq!(server.requests("").len(), before);
}

#[test]
fn nobody_answers() {
    let gone = Server::start(|_| Reply::default());
    let bench = Bench::new(&gone);
    drop(gone);
    std::thread::sleep(Duration::from_millis(50));
    let e = bench.list().unwrap_err();
    assert_eq!(e.class(), "ConnectionFailed", "{e}");
}
