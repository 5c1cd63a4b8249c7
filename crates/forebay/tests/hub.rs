//! Models of a hub, from the command line. The hub is one on this machine.

mod common;
#[path = "../../hub/tests/common/mod.rs"]
mod server;

use std::fs;
use std::path::Path;
use std::sync::atomic::Ordering;

use assert_cmd::Command;
use common::*;
use serde_json::Value;
use server::{COMMIT, Reply, Repo, Server};
use tempfile::tempdir;

fn hub(server: &Server, home: &Path) -> Command {
    let mut command = forebay();
    for name in
        ["HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HUB_CACHE", "HF_HUB_OFFLINE"]
    {
        command.env_remove(name);
    }
    command.env("HF_ENDPOINT", &server.url).env("HF_HOME", home);
    command
}

fn folder(name: &str) -> Repo {
    let files = fs::read_dir(model(name)).unwrap().map(|e| e.unwrap());
    let files = files.filter(|e| e.file_type().unwrap().is_file());
    let files = files.map(|e| (e.file_name().into_string().unwrap(), fs::read(e.path()).unwrap()));
    Repo { files: files.collect(), page: 1000 }
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

fn fails(command: &mut Command, code: i32, says: &[&str]) {
    let out = output(command);
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(code), "{command:?}\n{stderr}");
    assert!(says.iter().all(|s| stderr.contains(s)), "{says:?}: {stderr}");
}

#[test]
fn a_model_is_looked_at_then_pulled_then_run() {
    let repo = folder(GPT_OSS);
    let weights = repo.files["model.safetensors"].len() as u64;
    let server = repo.serve(|_, _| None);
    let home = tempdir().unwrap();
    let budget = ["--json", "--memory", "400MiB"];
    let here = json(&succeeds(forebay().arg("inspect").arg(model(GPT_OSS)).args(budget)));
    let there = succeeds(hub(&server, home.path()).args(["inspect", "o/n"]).args(budget));
    let there = json(&there);
    assert_eq!(here, there);
    let others = server.requests("/resolve/").len();
    let of_weights = server.requests("model.safetensors");
    assert_eq!(
        of_weights.iter().filter_map(|r| r.header("range")).collect::<Vec<_>>(),
        ["bytes=0-262143"]
    );
    assert!(weights > 262_144 && others > 1);

    // Not without being asked for.
    let run = ["run", "o/n", "Once upon a time", "--tokens", "8", "--context", "256"];
    fails(hub(&server, home.path()).args(run), 3, &["forebay pull o/n", "--yes"]);
    fails(hub(&server, home.path()).args(["tokenize", "o/n", "x"]), 3, &["forebay pull"]);

    let pulled = json(&succeeds(hub(&server, home.path()).args(["pull", "o/n", "--json"])));
    let snapshot = home.path().join("hub/models--o--n/snapshots").join(COMMIT);
    assert_eq!(pulled["snapshot"], snapshot.to_str().unwrap());
    assert_eq!(pulled["models"][0], snapshot.to_str().unwrap());
    assert_eq!(pulled["commit"], COMMIT);
    let again = succeeds(hub(&server, home.path()).args(["pull", "o/n"]));
    assert_eq!(again.trim(), snapshot.to_str().unwrap());

    let before = server.requests("").len();
    let from_cache = succeeds(hub(&server, home.path()).args(run));
    let from_path = succeeds(forebay().arg("run").arg(model(GPT_OSS)).args(&run[2..]));
    assert_eq!(from_cache, from_path);
    succeeds(hub(&server, home.path()).args(["tokenize", "o/n", "x"]));
    assert_eq!(server.requests("").len(), before);
}

#[test]
fn yes_fetches() {
    let bytes = fs::read(model(QWEN3_MOE)).unwrap();
    let server =
        Repo::new(&[("m-Q4_K_M.gguf", &bytes), ("m-Q8_0.gguf", &[0; 900])]).serve(|_, _| None);
    let home = tempdir().unwrap();
    let ask = |args: &[&str]| {
        let mut command = hub(&server, home.path());
        command.args(["run", "--context", "256", "--tokens", "4"]).args(args).arg("Once");
        command
    };
    fails(&mut ask(&["o/n", "--yes"]), 3, &["o/n:Q4_K_M", "m-Q8_0.gguf"]);
    // What the budget cannot hold is not fetched.
    fails(&mut ask(&["o/n:Q4_K_M", "--yes", "--memory", "1MiB"]), 3, &["experts: "]);
    let served = server.served.load(Ordering::Relaxed);
    assert!(served < bytes.len() as u64, "{served}");
    let out = output(&mut ask(&["o/n:q4_k_m", "--yes"]));
    let stderr = String::from_utf8_lossy(&out.stderr).into_owned();
    assert!(out.status.success(), "{stderr}");
    for says in ["1 files", "experts: ", "smallest workable budget", "not fetched: *.gguf (1, "] {
        assert!(stderr.contains(says), "{says}: {stderr}");
    }
    succeeds(&mut ask(&["o/n"]));
    let snapshot = home.path().join("hub/models--o--n/snapshots").join(COMMIT);
    assert_eq!(fs::read(snapshot.join("m-Q4_K_M.gguf")).unwrap(), bytes);
}

#[test]
fn exit_codes() {
    let server = Repo::new(&[("a-Q4.gguf", &[1; 900]), ("a-Q8.gguf", &[1; 901])]).serve(|r, _| {
        r.path.contains("/gated").then(|| Reply::new(403, "").with("X-Error-Code", "GatedRepo"))
    });
    let home = tempdir().unwrap();
    let pull = |what: &str| {
        let mut command = hub(&server, home.path());
        command.args(["pull", what]);
        command
    };
    fails(&mut pull("nonsense"), 2, &["org/name"]);
    fails(&mut pull("o/n:Q2"), 2, &["\"Q2\"", "a-Q4.gguf"]);
    fails(&mut pull("o/n"), 3, &["o/n:Q4", "a-Q8.gguf"]);
    fails(&mut pull("o/none"), 1, &["no such repository"]);
    fails(&mut pull("o/gated"), 1, &["accept the licence"]);
    fails(pull("o/n").args(["--revision", "../x"]), 2, &["revision"]);
    fails(pull("o/n").env("HF_HUB_OFFLINE", "1"), 3, &["HF_HUB_OFFLINE"]);
    fails(pull("o/n").env("HF_ENDPOINT", "nonsense"), 2, &["HF_ENDPOINT"]);
    succeeds(&mut pull("o/n:Q4"));
    succeeds(pull("o/n:Q4").env("HF_HUB_OFFLINE", "1"));
}
