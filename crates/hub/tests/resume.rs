//! Downloads that do not go through at once: whatever a server answers, the final file is byte-exact,
//! or it is not there and what has arrived is kept.

mod common;

use std::fs;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::*;
use forebay_hub::HubError;

const FILE: &str = "m.gguf";
const RESOLVE: &str = "/resolve/";

/// Serves 1000 bytes with `script` for their download, with the first 300 there already.
fn case(
    script: impl Fn(&Request, &[u8]) -> Option<Reply> + Send + Sync + 'static,
) -> (Server, Bench) {
    let content = bytes(1000);
    let repo = Repo::new(&[(FILE, &content)]);
    let server = repo.serve(move |request, repo| {
        request.path.contains(RESOLVE).then(|| script(request, &repo.files[FILE])).flatten()
    });
    let bench = Bench::new(&server);
    fs::create_dir_all(bench.blobs()).unwrap();
    fs::write(partial(&bench), &content[..300]).unwrap();
    (server, bench)
}

fn partial(bench: &Bench) -> std::path::PathBuf {
    bench.blobs().join(format!("{}.incomplete", sha256(&bytes(1000))))
}

fn exact(bench: &Bench) {
    let snapshot = bench.pull(None).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(fs::read(snapshot.join(FILE)).unwrap(), bytes(1000));
    assert_eq!(bench.blob_names(), [sha256(&bytes(1000))]);
}

/// It fails, nothing has the final name, and at least `kept` right bytes are there.
fn fails(bench: &Bench, kept: usize) -> HubError {
    let e = bench.pull(None).unwrap_err();
    let there = fs::read(partial(bench)).unwrap_or_default();
    assert!(there.len() >= kept, "{} bytes kept: {e}", there.len());
    assert_eq!(there, bytes(1000)[..there.len()], "{e}");
    assert_eq!(bench.blob_names().len(), 1, "{e}");
    assert!(!bench.dir.path().join("models--o--n/refs").exists());
    e
}

#[test]
fn a_the_rest_is_sent() {
    let (server, bench) = case(|_, _| None);
    exact(&bench);
    let requests = server.requests(RESOLVE);
    assert_eq!(requests.len(), 1);
    assert_eq!(requests[0].header("range"), Some("bytes=300-"));
}

#[test]
fn b_all_is_sent() {
    let (server, bench) = case(|_, content| Some(Reply::new(200, content)));
    exact(&bench);
    assert_eq!(server.requests(RESOLVE).len(), 1);
}

#[test]
fn c_the_range_starts_earlier() {
    let (server, bench) = case(|r, content| r.range().map(|_| part(content, 256, 1000)));
    exact(&bench);
    assert_eq!(server.requests(RESOLVE).len(), 1);
}

#[test]
fn c_the_range_starts_later() {
    let (server, bench) = case(|r, content| r.range().map(|_| part(content, 400, 1000)));
    exact(&bench);
    assert_eq!(server.requests(RESOLVE)[1].range(), None);
}

#[test]
fn d_the_status_says_all_and_the_range_says_rest() {
    let rest = |content: &[u8]| {
        Reply::new(200, &content[300..]).with("Content-Range", "bytes 300-999/1000")
    };
    let (_server, bench) = case(move |r, content| r.range().map(|_| rest(content)));
    exact(&bench);
    // Even if it never says anything else.
    let (_server, bench) = case(move |_, content| Some(rest(content)));
    let e = fails(&bench, 300);
    assert!(e.to_string().contains("bytes 300-999/1000"), "{e}");
    // Or does not say that it is the rest.
    let (_server, bench) = case(|_, content| Some(Reply::new(200, &content[300..])));
    fails(&bench, 300);
}

#[test]
fn e_the_range_is_refused() {
    let refusal = || Reply::new(416, "").with("Content-Range", "bytes */1000");
    let (_server, bench) = case(move |r, _| r.range().map(|_| refusal()));
    exact(&bench);
    let (_server, bench) = case(move |_, _| Some(refusal()));
    fails(&bench, 300);
}

#[test]
fn f_the_content_is_another() {
    // The endpoint says so.
    let other = sha256(b"other");
    let (server, bench) = case(move |r, content| {
        let other = format!("\"{other}\"");
        r.range().map(|_| part(content, 300, 1000).with("X-Linked-ETag", other))
    });
    exact(&bench);
    assert_eq!(server.requests(RESOLVE)[1].range(), None);
    // Only the digest says so.
    let (server, bench) = case(|r, content| {
        let changed: Vec<u8> = content.iter().map(|b| b ^ 1).collect();
        r.range().map(|_| part(&changed, 300, 1000).with("ETag", "\"v2\""))
    });
    exact(&bench);
    assert_eq!(server.requests(RESOLVE)[1].range(), None);
    // What was there is of something else.
    let (_server, bench) = case(|_, _| None);
    fs::write(partial(&bench), vec![9; 300]).unwrap();
    exact(&bench);
    // The range is one of a longer file.
    let (_server, bench) = case(|r, content| {
        let mut reply = part(content, 300, 1000);
        reply.headers[0].1 = "bytes 300-999/1300".into();
        r.range().map(|_| reply)
    });
    exact(&bench);
}

#[test]
fn g_the_connection_is_cut() {
    let (server, bench) = case(|r, content| {
        let (from, _) = r.range().unwrap();
        let to = (from + 100).min(1000);
        let cut = part(content, from, 1000).claiming(1000 - from);
        Some(Reply { body: content[from as usize..to as usize].to_vec(), ..cut })
    });
    // Three attempts bring 300 bytes more, and no fourth is made.
    let e = fails(&bench, 600);
    assert_eq!(e.class(), "ConnectionFailed");
    assert!(e.to_string().contains("600 bytes are kept"), "{e}");
    assert_eq!(server.requests(RESOLVE).len(), 3);
    // The next pull goes on from there, and the one after it.
    fails(&bench, 900);
    exact(&bench);
}

#[test]
fn the_length_is_a_lie() {
    // Less than the listing says, more, and more than is sent.
    let (_server, bench) = case(|_, content| Some(Reply::new(200, &content[..500])));
    fails(&bench, 300);
    let long = |content: &[u8]| [content, &[0; 300]].concat();
    let (_server, bench) = case(move |_, content| Some(Reply::new(200, long(content))));
    fails(&bench, 300);
    let (_server, bench) =
        case(|r, content| r.range().map(|_| part(content, 300, 1000).claiming(5000)));
    exact(&bench);
    let (_server, bench) = case(|_, content| Some(part(content, 300, 600).claiming(700)));
    fails(&bench, 300);
}

#[test]
fn the_digest_is_wrong() {
    let content = bytes(1000);
    let small = b"{}".to_vec();
    for (file, content) in [("m.gguf", content), ("config.json", small)] {
        let repo = Repo::new(&[(file, &content), ("model.safetensors", &bytes(600))]);
        let server = repo.serve(move |r, repo| {
            let changed: Vec<u8> = repo.files[file].iter().map(|b| b ^ 1).collect();
            r.path.ends_with(file).then(|| ranged(r, &changed))
        });
        let bench = Bench::new(&server);
        let pattern = (file == "m.gguf").then_some("m.gguf");
        let e = bench.pull(pattern).unwrap_err();
        assert_eq!(e.class(), "WrongDigest", "{e}");
        assert!(e.to_string().contains(file), "{e}");
        // What cannot become the file is gone.
        let digest = if content.len() > 500 { sha256(&content) } else { git_sha1(&content) };
        assert!(!bench.blob_names().iter().any(|n| n.starts_with(&digest)));
        assert_eq!(server.requests(&format!("/{file}")).len(), 1);
    }
}

#[test]
fn a_partial_that_is_too_long() {
    let (_server, bench) = case(|_, _| None);
    fs::write(partial(&bench), vec![1; 1300]).unwrap();
    exact(&bench);
    // Whole already, but never renamed.
    let (server, bench) = case(|_, _| None);
    fs::write(partial(&bench), bytes(1000)).unwrap();
    exact(&bench);
    assert_eq!(server.requests(RESOLVE).len(), 0);
}

#[test]
fn silence_is_given_up() {
    let silence = Duration::from_secs(60);
    let (server, mut bench) = case(move |r, content| {
        let silence = if r.nth == 0 { silence } else { Duration::ZERO };
        Some(Reply { silence, ..part(content, r.range()?.0, 1000) })
    });
    bench.config.retry.stall = Duration::from_millis(700);
    let start = std::time::Instant::now();
    exact(&bench);
    assert!(start.elapsed() < silence);
    assert!(server.requests(RESOLVE).len() >= 2);
}

#[test]
fn an_interruption_keeps_what_is_there() {
    let (_server, bench) = case(|_, _| None);
    let listing = bench.list().unwrap();
    bench.cancel.store(true, Ordering::Relaxed);
    let control = forebay_hub::Control { progress: &|_, _, _| {}, cancel: &bench.cancel };
    let e = bench.hub().fetch(&listing, &listing.files, &control).unwrap_err();
    assert_eq!(e.class(), "Cancelled");
    assert_eq!(fs::read(partial(&bench)).unwrap().len(), 300);
}

#[test]
fn long_files_earn_attempts_by_progress() {
    let content = bytes(6 << 20);
    let repo = Repo::new(&[(FILE, &content)]);
    let server = repo.serve(|r, repo| {
        let content = &repo.files[FILE];
        let from = r.range().map_or(0, |(from, _)| from) as usize;
        let to = (from + (3 << 19)).min(content.len());
        r.path.contains(RESOLVE).then(|| {
            let reply = match from {
                0 => Reply::new(200, ""),
                _ => part(content, from as u64, content.len() as u64),
            };
            let left = (content.len() - from) as u64;
            Reply { body: content[from..to].to_vec(), ..reply }.claiming(left)
        })
    });
    let bench = Bench::new(&server);
    let snapshot = bench.pull(None).unwrap();
    assert!(fs::read(snapshot.join(FILE)).unwrap() == content);
    assert_eq!(server.requests(RESOLVE).len(), 4);
}
