//! `batch`: in order, as when asked alone, and never twice after a kill.

mod common;

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use common::{GPT_OSS, forebay, model, output, succeeds};
use serde_json::{Value, json};

fn requests(dir: &Path, n: usize) -> std::path::PathBuf {
    let line = |i: usize| {
        let body = match i % 3 {
            0 => {
                json!({ "messages": [{ "role": "user", "content": format!("Story {i}.") }], "max_tokens": 4 + i % 7 })
            }
            1 => {
                json!({ "prompt": "Once upon a time", "max_tokens": 9, "temperature": 1, "seed": i })
            }
            _ => json!({ "prompt": format!("Number {i}"), "max_tokens": 3 }),
        };
        let url = if i.is_multiple_of(3) { "/v1/chat/completions" } else { "/v1/completions" };
        json!({ "custom_id": format!("r{i}"), "method": "POST", "url": url, "body": body })
            .to_string()
    };
    let path = dir.join("in.jsonl");
    let mut lines: Vec<String> = (0..n).map(line).collect();
    lines.push(json!({ "custom_id": "bad", "body": { "messages": [] } }).to_string());
    std::fs::write(&path, lines.join("\n")).unwrap();
    path
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|l| serde_json::from_str(l).unwrap()).collect()
}

/// What counts of a line: which, and what was answered.
fn answers(lines: &[Value]) -> Vec<(String, u64, Value)> {
    let one = |line: &Value| {
        let response = &line["response"];
        let id = line["custom_id"].as_str().unwrap().to_owned();
        (id, response["status_code"].as_u64().unwrap(), response["body"]["choices"].clone())
    };
    lines.iter().map(one).collect()
}

#[test]
fn in_order_and_as_alone() {
    let dir = tempfile::tempdir().unwrap();
    let input = requests(dir.path(), 20);
    let run = |out: &str, parallel: &str| {
        let out = dir.path().join(out);
        let mut command = forebay();
        command.arg("batch").arg(model(GPT_OSS)).arg(&input).arg(&out);
        succeeds(command.args(["--parallel", parallel, "--context", "256", "--json"]));
        answers(&lines(&out))
    };
    let together = run("together", "8");
    assert_eq!(together.len(), 21);
    let ids: Vec<&str> = together.iter().map(|a| a.0.as_str()).collect();
    assert_eq!(ids[..3], ["r0", "r1", "r2"]);
    assert_eq!((ids[20], together[20].1), ("bad", 400));
    assert!(together[..20].iter().all(|a| a.1 == 200));
    assert_eq!(together, run("alone", "1"));
    assert!(!dir.path().join("together.journal").exists());
}

#[test]
fn after_a_kill_nothing_is_done_twice() {
    let dir = tempfile::tempdir().unwrap();
    let input = requests(dir.path(), 60);
    let out = dir.path().join("out");
    let start = |out: &Path| {
        let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
        command.arg("batch").arg(model(GPT_OSS)).arg(&input).arg(out);
        command.args([
            "--parallel",
            "6",
            "--context",
            "256",
            "--temp",
            "0",
            "--threads",
            "1",
            "--json",
        ]);
        command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
    };
    let mut computed = 0;
    let mut kills = 0;
    loop {
        let before = if out.exists() { std::fs::read(&out).unwrap() } else { Vec::new() };
        let mut child = start(&out);
        let enough = before.len() + 4000;
        let ended = loop {
            if let Some(status) = child.try_wait().unwrap() {
                break Some(status);
            }
            if kills < 3 && std::fs::metadata(&out).is_ok_and(|m| m.len() as usize > enough) {
                child.kill().unwrap();
                child.wait().unwrap();
                break None;
            }
            std::thread::sleep(Duration::from_millis(2));
        };
        let after = std::fs::read(&out).unwrap();
        let whole = before.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        assert!(after.starts_with(&before[..whole]), "what was written stays");
        match ended {
            Some(status) => {
                assert!(status.success());
                let mut text = String::new();
                std::io::Read::read_to_string(&mut child.stdout.take().unwrap(), &mut text)
                    .unwrap();
                if let Ok(summary) = serde_json::from_str::<Value>(&text) {
                    computed += summary["answered"].as_u64().unwrap();
                }
                break;
            }
            None => kills += 1,
        }
        // A line that the kill cut off.
        if kills == 1 {
            let mut cut = after.clone();
            cut.extend(b"{\"id\": \"half");
            std::fs::write(&out, cut).unwrap();
        }
    }
    assert!(kills == 0 || computed < 61, "the last run did not begin anew");
    let uninterrupted = dir.path().join("whole");
    assert!(start(&uninterrupted).wait().unwrap().success());
    assert_eq!(answers(&lines(&out)), answers(&lines(&uninterrupted)));
}

#[test]
fn what_is_wrong_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("in");
    let out = dir.path().join("out");
    for (text, word) in [
        ("", "no request"),
        ("{}", "custom_id"),
        ("{\"custom_id\": \"a\", \"body\": 3}", "body"),
        ("{\"custom_id\": \"a\", \"body\": {}, \"url\": \"/v1/embeddings\"}", "/v1/embeddings"),
        ("nonsense", "line 1"),
    ] {
        std::fs::write(&input, text).unwrap();
        let mut command = forebay();
        let got = output(command.arg("batch").arg(model(GPT_OSS)).arg(&input).arg(&out));
        assert_eq!(got.status.code(), Some(2), "{text}");
        assert!(String::from_utf8_lossy(&got.stderr).contains(word), "{text}");
    }
    std::fs::write(&input, "{\"custom_id\": \"a\", \"body\": {}}").unwrap();
    std::fs::write(&out, "{\"custom_id\": \"other\"}\n").unwrap();
    let mut command = forebay();
    let got = output(command.arg("batch").arg(model(GPT_OSS)).arg(&input).arg(&out));
    assert_eq!(got.status.code(), Some(2));
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "{\"custom_id\": \"other\"}\n");
}

/// What cannot be gone on with, or is somebody's, is not written to.
#[test]
fn outputs_that_cannot_do_are_refused_at_once() {
    let dir = tempfile::tempdir().unwrap();
    let input = requests(dir.path(), 3);
    let refused = |out: &Path, word: &str| {
        let mut command = forebay();
        let got = output(command.arg("batch").arg(model(GPT_OSS)).arg(&input).arg(out));
        let said = String::from_utf8_lossy(&got.stderr).into_owned();
        assert_eq!(got.status.code(), Some(2), "{}: {said}", out.display());
        assert!(said.contains(word), "{said}");
    };
    refused(&dir.path().join("missing/out"), "missing/out");
    refused(dir.path(), "no regular file");
    #[cfg(target_os = "linux")]
    for device in ["/dev/full", "/dev/zero", "/dev/null"] {
        refused(Path::new(device), "no regular file");
    }
    // A pipe as the journal: nobody will ever write to it.
    #[cfg(target_os = "linux")]
    {
        let pipe = dir.path().join("piped.journal");
        assert!(std::process::Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        refused(&dir.path().join("piped"), "no regular file");
    }
    // The input itself, and notes without an end of line.
    let before = std::fs::read(&input).unwrap();
    refused(&input, "name another file");
    assert_eq!(std::fs::read(&input).unwrap(), before);
    let notes = dir.path().join("notes");
    std::fs::write(&notes, "one line").unwrap();
    refused(&notes, "name another file");
    assert_eq!(std::fs::read(&notes).unwrap(), b"one line");
    // One that another batch is writing.
    let taken = dir.path().join("taken");
    let file = std::fs::File::create(&taken).unwrap();
    file.lock().unwrap();
    refused(&taken, "another batch");
}

/// A disk that fills ends the batch with an error; with room again the same command goes on.
#[cfg(unix)]
#[test]
fn a_full_disk_is_an_error_and_no_loss() {
    let dir = tempfile::tempdir().unwrap();
    let input = requests(dir.path(), 20);
    let out = dir.path().join("out");
    let run = |out: &Path, blocks: &str| {
        // The limit on a file's size stands for the disk: writes beyond it fail.
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", "trap '' XFSZ; ulimit -f $0; exec \"$@\"", blocks]);
        shell.arg(env!("CARGO_BIN_EXE_forebay")).arg("batch").arg(model(GPT_OSS));
        shell.arg(&input).arg(out).args(["--parallel", "4", "--context", "256", "--temp", "0"]);
        shell.env("XDG_CACHE_HOME", dir.path().join("cache")).output().unwrap()
    };
    let full = run(&out, "4");
    let said = String::from_utf8_lossy(&full.stderr).into_owned();
    assert_eq!(full.status.code(), Some(1), "{said}");
    assert!(said.contains("the same command goes on"), "{said}");
    let left = std::fs::read(&out).unwrap();
    assert!(run(&out, "unlimited").status.success());
    let whole = left.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
    assert!(whole > 0 && std::fs::read(&out).unwrap().starts_with(&left[..whole]));
    let other = dir.path().join("other");
    assert!(run(&other, "unlimited").status.success());
    assert_eq!(answers(&lines(&out)), answers(&lines(&other)));
}

/// Answers are not computed for a file that is gone.
#[cfg(unix)]
#[test]
fn an_output_that_vanishes_ends_the_batch() {
    let dir = tempfile::tempdir().unwrap();
    let input = requests(dir.path(), 400);
    let folder = dir.path().join("folder");
    std::fs::create_dir(&folder).unwrap();
    let out = folder.join("out");
    let mut command = std::process::Command::new(env!("CARGO_BIN_EXE_forebay"));
    command.arg("batch").arg(model(GPT_OSS)).arg(&input).arg(&out);
    command.args(["--parallel", "2", "--context", "256", "--threads", "1"]);
    let child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
    while !std::fs::metadata(&out).is_ok_and(|m| m.len() > 0) {
        std::thread::sleep(Duration::from_millis(1));
    }
    std::fs::remove_dir_all(&folder).unwrap();
    let got = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&got.stderr).into_owned();
    assert_eq!(got.status.code(), Some(1), "{said}");
    assert!(said.contains("removed or replaced"), "{said}");
}
