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

/// A line that is no request refuses the file before anything is computed: with the line, and what is wrong with it.
#[test]
fn what_is_wrong_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let input = dir.path().join("in");
    let out = dir.path().join("out");
    let good = |id: &str| format!(r#"{{"custom_id": "{id}", "body": {{}}}}"#);
    let deep = format!(r#"{{"custom_id": "b", "body": {}}}"#, "[".repeat(5000));
    let cases: Vec<(Vec<u8>, &str)> = vec![
        ("nonsense".into(), "no JSON"),
        (r#"{"custom_id": "b", "body": {"#.into(), "no JSON"),
        (r#"{"custom_id": "b", "body": {"max_tokens": NaN}}"#.into(), "no JSON"),
        (r#"{"custom_id": "b", "body": {"x": 1e999}}"#.into(), "no JSON"),
        (b"{\"custom_id\": \"b\", \"body\": {\"prompt\": \"\xff\"}}".to_vec(), "no JSON"),
        (b"\0\0\0".to_vec(), "no JSON"),
        (deep.into(), "recursion"),
        ("[]".into(), "object"),
        ("17".into(), "object"),
        ("null".into(), "object"),
        ("{}".into(), "custom_id"),
        (r#"{"custom_id": 7, "body": {}}"#.into(), "custom_id"),
        (r#"{"custom_id": ["b"], "body": {}}"#.into(), "custom_id"),
        (good("a").into(), "of line 1"),
        (r#"{"custom_id": "b"}"#.into(), "body"),
        (r#"{"custom_id": "b", "body": null}"#.into(), "body"),
        (r#"{"custom_id": "b", "body": 3}"#.into(), "body"),
        (r#"{"custom_id": "b", "body": []}"#.into(), "body"),
        (r#"{"custom_id": "b", "body": {}, "method": "GET"}"#.into(), "method"),
        (r#"{"custom_id": "b", "body": {}, "method": 1}"#.into(), "method"),
        (r#"{"custom_id": "b", "body": {}, "url": "/v1/embeddings"}"#.into(), "/v1/embeddings"),
        (r#"{"custom_id": "b", "body": {}, "url": 4}"#.into(), "url"),
    ];
    let refused = |text: &[u8], words: &[&str]| {
        std::fs::write(&input, text).unwrap();
        let mut command = forebay();
        let got = output(command.arg("batch").arg(model(GPT_OSS)).arg(&input).arg(&out));
        let (said, text) = (String::from_utf8_lossy(&got.stderr), String::from_utf8_lossy(text));
        assert_eq!(got.status.code(), Some(2), "{text}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{text}: {said}");
        assert!(said.len() < 1000 && !out.exists(), "{text}: {said}");
    };
    for (line, word) in cases {
        let text = [good("a").as_bytes(), b"\r\n\n", &line, b"\n", good("c").as_bytes()].concat();
        refused(&text, &["line 3", word]);
    }
    refused(b"", &["no request"]);
    refused(b"\n  \r\n\n", &["no request"]);
    std::fs::write(&input, "{\"custom_id\": \"a\", \"body\": {}}").unwrap();
    std::fs::write(&out, "{\"custom_id\": \"other\"}\n").unwrap();
    let mut command = forebay();
    let got = output(command.arg("batch").arg(model(GPT_OSS)).arg(&input).arg(&out));
    assert_eq!(got.status.code(), Some(2));
    assert_eq!(std::fs::read_to_string(&out).unwrap(), "{\"custom_id\": \"other\"}\n");
}

/// Whatever a request says, its line gets an answer; and odd line ends lose none.
#[test]
fn every_request_has_its_line() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in"), dir.path().join("out"));
    let schema = format!("{}1{}", "[".repeat(60), "]".repeat(60));
    let bodies: Vec<(String, u64)> = vec![
        (r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}"#.into(), 200),
        (r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "stream": true}"#.into(), 200),
        (r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "n": 9}"#.into(), 200),
        (r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 999999999999999999}"#.into(), 200),
        (r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 0}"#.into(), 200),
        ("{}".into(), 400),
        (r#"{"messages": null}"#.into(), 400),
        (r#"{"messages": [null]}"#.into(), 400),
        (r#"{"messages": {"role": "user"}}"#.into(), 400),
        (r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": -1}"#.into(), 400),
        (r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1e300}"#.into(), 400),
        (r#"{"messages": [{"role": "user", "content": "Hi"}], "max_tokens": "many"}"#.into(), 400),
        (r#"{"messages": [{"role": "user", "content": "Hi"}], "n": 100000}"#.into(), 400),
        (r#"{"messages": [{"role": "user", "content": "Hi"}], "temperature": "hot"}"#.into(), 400),
        (r#"{"messages": [{"role": "user", "content": "Hi"}], "model": "another"}"#.into(), 404),
        (format!(r#"{{"messages": [{{"role": "user", "content": {schema}}}]}}"#), 400),
        (format!(r#"{{"messages": [{{"role": "user", "content": "{}"}}]}}"#, "word ".repeat(300_000)), 400),
    ];
    let requests = bodies.iter().enumerate().map(|(i, (body, _))| {
        let end = ["\n", "\r\n", "\n\n \t\r\n"][i % 3];
        format!(r#" {{"custom_id": "r{i}", "method": "POST", "body": {body}}} {end}"#)
    });
    let text = requests.collect::<String>();
    let run = |text: &str| {
        std::fs::write(&input, text).unwrap();
        let mut command = forebay();
        command.arg("batch").arg(model(GPT_OSS)).arg(&input).arg(&out);
        succeeds(command.args(["--parallel", "2", "--context", "128", "--temp", "0"]));
        let found = lines(&out);
        std::fs::remove_file(&out).unwrap();
        found
    };
    let found = run(&format!("\u{feff}{}", text.trim_end()));
    assert_eq!(found.len(), bodies.len());
    for (i, (line, (body, status))) in found.iter().zip(&bodies).enumerate() {
        let shown = &body[..body.len().min(200)];
        assert_eq!(line["custom_id"], format!("r{i}"));
        assert!(line["error"].is_null() && line["response"]["request_id"].is_string());
        let response = &line["response"];
        assert_eq!(response["status_code"], *status, "{shown}: {response}");
        if *status == 200 {
            let n = if body.contains("\"n\": 9") { 9 } else { 1 };
            assert_eq!(response["body"]["choices"].as_array().unwrap().len(), n, "{shown}");
        } else {
            let error = &response["body"]["error"];
            assert!(error["message"].is_string() && error["type"].is_string(), "{shown}: {error}");
        }
    }
    // Very many.
    let many = (0..20_000).map(|i| format!("{{\"custom_id\": \"{i}\", \"body\": {{}}}}\n"));
    let found = run(&many.collect::<String>());
    assert_eq!(found.len(), 20_000);
    let in_order = |(i, line): (usize, &Value)| line["custom_id"].as_str() == Some(&i.to_string());
    assert!(found.iter().enumerate().all(in_order));
}

/// The journal is not written over somebody's file, nor over the input, and a kill may cut a line off anywhere.
#[test]
fn what_is_gone_on_with_is_the_batchs_own() {
    let dir = tempfile::tempdir().unwrap();
    let input = requests(dir.path(), 5);
    let run = |input: &Path, out: &Path| {
        let mut command = forebay();
        command.arg("batch").arg(model(GPT_OSS)).arg(input).arg(out);
        output(command.args(["--context", "256", "--temp", "0"]))
    };
    let refused = |input: &Path, out: &Path, word: &str| {
        let got = run(input, out);
        let said = String::from_utf8_lossy(&got.stderr).into_owned();
        assert_eq!(got.status.code(), Some(2), "{said}");
        assert!(said.contains(word), "{said}");
    };
    let kept = std::fs::read(&input).unwrap();
    // The input under the journal's name, under another name, and somebody's notes under the journal's name.
    let out = dir.path().join("out");
    let journal = dir.path().join("out.journal");
    std::fs::copy(&input, &journal).unwrap();
    refused(&journal, &out, "is the input");
    refused(&input, &out, "journal");
    assert_eq!(std::fs::read(&journal).unwrap(), kept);
    std::fs::write(&journal, "{\"my\": \"notes\"").unwrap();
    refused(&input, &out, "name another file");
    assert_eq!(std::fs::read(&journal).unwrap(), b"{\"my\": \"notes\"");
    std::fs::remove_file(&journal).unwrap();
    let other = dir.path().join("other");
    std::fs::hard_link(&input, &other).unwrap();
    refused(&input, &other, "is the input");
    assert_eq!(std::fs::read(&input).unwrap(), kept);

    assert!(run(&input, &out).status.success());
    let (whole, want) = (std::fs::read(&out).unwrap(), answers(&lines(&out)));
    let ends: Vec<usize> = (0..whole.len()).filter(|&i| whole[i] == b'\n').collect();
    for cut in [ends[1], ends[1] + 1, ends[1] + 2, ends[1] + 40, ends[4] - 1, whole.len() - 1] {
        std::fs::write(&out, &whole[..cut]).unwrap();
        assert!(run(&input, &out).status.success(), "cut at {cut}");
        assert!(std::fs::read(&out).unwrap().starts_with(&whole[..=ends[0]]), "cut at {cut}");
        assert_eq!(answers(&lines(&out)), want, "cut at {cut}");
    }
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

/// Ids are often just numbers: an output of other requests with the same ids is not taken for done, nor written to.
#[test]
fn an_answer_is_of_its_request_not_of_its_id() {
    let dir = tempfile::tempdir().unwrap();
    let (input, out) = (dir.path().join("in"), dir.path().join("out"));
    let write = |prompts: &[&str], blank: &str| {
        let line = |(i, prompt): (usize, &&str)| {
            format!(
                "{{\"custom_id\":{blank}\"{i}\",\"url\":\"/v1/completions\",\
                 \"body\":{{\"prompt\":{blank}\"{prompt}\",\"max_tokens\":2}}}}\n"
            )
        };
        std::fs::write(&input, prompts.iter().enumerate().map(line).collect::<String>()).unwrap();
    };
    let run = || {
        let mut command = forebay();
        command.arg("batch").arg(model(GPT_OSS)).arg(&input).arg(&out);
        output(command.args(["--context", "128", "--json"]))
    };
    write(&["a", "b"], "");
    assert!(run().status.success());
    let whole = std::fs::read(&out).unwrap();
    write(&["a", "c"], "");
    let got = run();
    let said = String::from_utf8_lossy(&got.stderr).into_owned();
    assert_eq!(got.status.code(), Some(2), "{said}");
    assert!(said.contains("line 2") && said.contains("another request"), "{said}");
    assert_eq!(std::fs::read(&out).unwrap(), whole);
    // The same requests written otherwise, and more of them.
    write(&["a", "b", "c"], " ");
    let got = run();
    assert!(got.status.success());
    let summary: Value = serde_json::from_slice(&got.stdout).unwrap();
    assert_eq!(summary["answered"], 1);
    assert!(std::fs::read(&out).unwrap().starts_with(&whole));
    // Where power was lost the file may end in zeros.
    for keep in [whole.len(), whole.len() - 30] {
        std::fs::write(&out, [&whole[..keep], &[0; 100]].concat()).unwrap();
        assert!(run().status.success(), "{keep}");
        assert_eq!(lines(&out).len(), 3);
    }
    // But a file of zeros is somebody's.
    std::fs::write(&out, [0; 100]).unwrap();
    assert_eq!(run().status.code(), Some(2));
}

/// What the engine fails at is tried once more, then written as a fault and told at the end; other lines of the same passes are
/// what they are anyway.
#[test]
fn a_fault_of_the_engine_is_one_lines_and_told() {
    let dir = tempfile::tempdir().unwrap();
    // A token whose embedding is no number.
    const BAD: usize = 300;
    let damaged = common::copy(GPT_OSS, dir.path());
    let path = damaged.join("model.safetensors");
    let mut bytes = std::fs::read(&path).unwrap();
    let tensor = "model.embed_tokens.weight";
    let (header, _) = common::safetensors_header(&bytes);
    let range = common::safetensors_range(&bytes, tensor);
    let row = 2 * header[tensor]["shape"][1].as_u64().unwrap() as usize;
    for value in bytes[range][BAD * row..][..row].chunks_exact_mut(2) {
        value.copy_from_slice(&0x7fc0u16.to_le_bytes());
    }
    std::fs::write(&path, bytes).unwrap();
    let run = |model: &Path, bad: bool, out: &str| {
        let line = |i: usize| {
            let mut ids = vec![12, 13, 14 + i];
            if bad && i % 4 == 1 {
                ids.push(BAD);
            }
            let body = json!({ "prompt": ids, "max_tokens": 6 + i, "seed": i, "temperature": 1,
                "logit_bias": { BAD.to_string(): -100 } });
            json!({ "custom_id": i.to_string(), "url": "/v1/completions", "body": body })
                .to_string()
        };
        let (input, out) = (dir.path().join("in"), dir.path().join(out));
        std::fs::write(&input, (0..13).map(line).collect::<Vec<_>>().join("\n")).unwrap();
        let mut command = forebay();
        command.arg("batch").arg(model).arg(&input).arg(&out);
        let got = output(command.args(["--context", "128", "--parallel", "6", "--json"]));
        let summary: Value = serde_json::from_slice(&got.stdout).unwrap();
        (got.status.code(), summary, answers(&lines(&out)))
    };
    let (code, _, want) = run(&damaged, false, "whole");
    assert_eq!(code, Some(0));
    let (code, summary, got) = run(&damaged, true, "out");
    assert_eq!(code, Some(1));
    assert_eq!((&summary["answered"], &summary["failed"]), (&json!(13), &json!(3)));
    assert_eq!((&summary["engine_faults"], &summary["tried_again"]), (&json!(3), &json!(3)));
    for (i, (got, want)) in got.iter().zip(&want).enumerate() {
        match i % 4 {
            1 => assert_eq!(got.1, 500, "{i}"),
            _ => assert_eq!(got, want, "{i}"),
        }
    }
    // All is written, and still not all is answered.
    let mut command = forebay();
    command.arg("batch").arg(&damaged).arg(dir.path().join("in")).arg(dir.path().join("out"));
    let again = output(command.args(["--context", "128"]));
    let said = String::from_utf8_lossy(&again.stderr).into_owned();
    assert_eq!(again.status.code(), Some(1), "{said}");
    assert!(said.contains("3 of them have no answer"), "{said}");
}
