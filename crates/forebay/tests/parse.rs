//! `parse` on the command line: the library's cases, through the binary.

mod common;

use common::{forebay, output, succeeds};
use serde_json::Value;
use std::path::Path;

#[test]
fn lines_in_lines_out_whole_and_in_pieces() {
    let cases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../chat/tests/tool_calls.jsonl");
    let text = std::fs::read_to_string(cases).unwrap();
    let dir = tempfile::tempdir().unwrap();
    for family in ["harmony", "qwen3_json", "qwen_xml", "gemma4", "mistral", "llama3"] {
        let rows: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
        let rows: Vec<&Value> = rows.iter().filter(|r| r["family"] == family).collect();
        let lines: Vec<String> = rows.iter().map(|r| r.to_string()).collect();
        let file = dir.path().join(family);
        std::fs::write(&file, lines.join("\n")).unwrap();
        for pieces in ["0", "1", "3"] {
            let mut command = forebay();
            command.args(["parse", family, "--pieces", pieces, "--request"]).arg(&file);
            let out = succeeds(&mut command);
            let got: Vec<Value> = out.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
            let want: Vec<Value> = rows.iter().map(|r| r["expect"].clone()).collect();
            assert_eq!(got, want, "{family}, {pieces}");
        }
    }
}

#[test]
fn what_is_wrong_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("lines");
    std::fs::write(&file, "{\"raw\": \"a\"}\n{\"raw\": 7}\n").unwrap();
    let out = output(forebay().args(["parse", "harmony", "--request"]).arg(&file));
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).contains("line 2: `raw`"));
    let out = output(forebay().args(["parse", "klingon", "--request"]).arg(&file));
    assert_eq!(out.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&out.stderr).contains("qwen3_json"));
}
