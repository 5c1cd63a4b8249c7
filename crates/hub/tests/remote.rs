//! Headers are read where they are; weights are not.

mod common;

use std::sync::atomic::Ordering;

use common::*;
use forebay_files::Catalog;
use forebay_hub::{Control, select};

fn safetensors(tensor: &str, len: usize) -> Vec<u8> {
    let header =
        format!(r#"{{"{tensor}":{{"dtype":"U8","shape":[{len}],"data_offsets":[0,{len}]}}}}"#);
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &bytes(len)].concat()
}

/// With one key, so long that the header takes several requests.
fn gguf(key_bytes: usize, len: usize) -> Vec<u8> {
    let mut out = b"GGUF".to_vec();
    out.extend(3u32.to_le_bytes());
    out.extend(1u64.to_le_bytes());
    out.extend(1u64.to_le_bytes());
    out.extend(3u64.to_le_bytes());
    out.extend(b"k.v");
    out.extend(8u32.to_le_bytes());
    out.extend((key_bytes as u64).to_le_bytes());
    out.extend(vec![b'x'; key_bytes]);
    out.extend(1u64.to_le_bytes());
    out.extend(b"w");
    out.extend(1u32.to_le_bytes());
    out.extend((len as u64 / 4).to_le_bytes());
    out.extend(0u32.to_le_bytes());
    out.extend(0u64.to_le_bytes());
    out.resize(out.len().next_multiple_of(32), 0);
    out.extend(bytes(len));
    out
}

fn catalog(bench: &Bench, pattern: Option<&str>) -> Result<Catalog, forebay_files::FilesError> {
    let listing = bench.list().unwrap();
    let selection = select(&repo(), &listing.files, pattern).unwrap();
    let control = Control { progress: &|_, _, _| {}, cancel: &bench.cancel };
    bench.hub().remote(&listing, &selection, &control).unwrap().catalog()
}

#[test]
fn a_folder() {
    let index = br#"{"weight_map":{"a":"model-00001-of-00002.safetensors","b":"model-00002-of-00002.safetensors"}}"#;
    let size = 8 << 20;
    let server = Repo::new(&[
        ("config.json", br#"{"model_type":"x"}"#),
        ("model.safetensors.index.json", index),
        ("model-00001-of-00002.safetensors", &safetensors("a", size)),
        ("model-00002-of-00002.safetensors", &safetensors("b", size)),
    ])
    .serve(|_, _| None);
    let bench = Bench::new(&server);
    let remote = catalog(&bench, None).unwrap();
    let served = server.served.load(Ordering::Relaxed);
    assert!(served < (512 << 10) + 8192, "{served} bytes for 16 MiB of weights");
    assert_eq!(remote.config().unwrap()["model_type"], "x");
    assert!(bench.hub().resolve_local(&repo(), None).unwrap().is_none());
    assert!(!bench.dir.path().join("models--o--n/refs").exists());

    // The same as the model itself, and where it will be.
    let local = Catalog::open(&bench.pull(None).unwrap()).unwrap();
    assert_eq!(local.tensors, remote.tensors);
    assert_eq!(local.header_hash, remote.header_hash);
    assert_eq!(local.path(), remote.path());
    assert_eq!(local.files[1].path, remote.files[1].path);
}

#[test]
fn a_gguf_with_a_long_header() {
    let server =
        Repo::new(&[("m-Q8.gguf", &gguf(1 << 20, 12 << 20)), ("m-Q4.gguf", &gguf(10, 1 << 20))])
            .serve(|_, _| None);
    let bench = Bench::new(&server);
    let remote = catalog(&bench, Some("Q8")).unwrap();
    let served = server.served.load(Ordering::Relaxed);
    assert!(served < 2 << 20, "{served} bytes");
    let ranges = server.requests("/resolve/");
    let ranges: Vec<&str> = ranges.iter().filter_map(|r| r.header("range")).collect();
    assert_eq!(ranges, ["bytes=0-262143", "bytes=262144-786431", "bytes=786432-1835007"]);
    let snapshot = bench.pull(Some("Q8")).unwrap();
    let local = Catalog::open(&snapshot.join("m-Q8.gguf")).unwrap();
    assert_eq!((local.tensors, local.header_hash), (remote.tensors.clone(), remote.header_hash));
}

#[test]
fn connections_that_are_cut_and_servers_without_ranges() {
    let content = gguf(10, 4 << 20);
    let server = Repo::new(&[("m.gguf", &content)]).serve(|r, repo| {
        let cut = r.path.contains("/resolve/") && r.nth == 0;
        cut.then(|| {
            let reply = repo.reply(r);
            Reply { body: reply.body[..1000].to_vec(), ..reply }.claiming(256 << 10)
        })
    });
    assert_eq!(catalog(&Bench::new(&server), None).unwrap().tensors.len(), 1);

    let server = Repo::new(&[("m.gguf", &content)]).serve(|r, repo| {
        r.path.contains("/resolve/").then(|| Reply::new(200, &repo.files["m.gguf"][..]))
    });
    assert_eq!(catalog(&Bench::new(&server), None).unwrap().tensors.len(), 1);

    let long = gguf(1 << 20, 1 << 20);
    let server = Repo::new(&[("m.gguf", &long)]).serve(|r, repo| {
        r.path.contains("/resolve/").then(|| Reply::new(200, &repo.files["m.gguf"][..]))
    });
    let e = catalog(&Bench::new(&server), None).unwrap_err();
    assert_eq!(e.class(), "IoError");
    assert!(e.to_string().contains("unusable answer"), "{e}");
}
