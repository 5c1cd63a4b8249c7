//! What the tests of the command share: models, the binary, files that are damaged on purpose.
#![allow(dead_code, reason = "each test uses its part")]

use std::path::{Path, PathBuf};
use std::process::Output;

use assert_cmd::Command;
use serde_json::Value;

/// The models of this repository that the main path runs.
pub const GPT_OSS: &str = "tiny-gpt-oss";
pub const QWEN3_MOE: &str = "tiny-qwen3-moe/qwen3_moe-Q4_K_M.gguf";
pub const BOTH: [&str; 2] = [GPT_OSS, QWEN3_MOE];

/// Path of a model, or of anything else in `models/`.
pub fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(name)
}

/// The shared folder with more models, or `None` with a line that says what is skipped.
pub fn shared(skipped: &str) -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let dir = std::env::var_os("FOREBAY_SHARED").map_or_else(beside, PathBuf::from);
    if !dir.join("models").is_dir() {
        println!("skipped, there is no shared folder at {}: {skipped}", dir.display());
        return None;
    }
    Some(dir.join("models"))
}

/// The command, in surroundings that do not leak in: no `FOREBAY_*` variable, no `forebay.toml`.
pub fn forebay() -> Command {
    let mut command = Command::cargo_bin("forebay").unwrap();
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FOREBAY_") {
            command.env_remove(name);
        }
    }
    command.env("XDG_CONFIG_HOME", "/nonexistent").current_dir(env!("CARGO_TARGET_TMPDIR"));
    // No test leaves this machine: nobody listens here.
    command.env("HF_ENDPOINT", "http://127.0.0.1:9").env("HF_HUB_CACHE", "/nonexistent");
    // Greedy unless a test says otherwise. Two threads: the suite runs several processes at once.
    command.env("FOREBAY_TEMP", "0").env("FOREBAY_THREADS", "2");
    command.timeout(std::time::Duration::from_secs(300));
    command
}

/// Runs to the end. Nothing may ever panic.
pub fn output(command: &mut Command) -> Output {
    let out = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert!(!stderr.contains("panicked"), "{command:?}\n{stderr}");
    out
}

/// Standard output of a run that must succeed.
pub fn succeeds(command: &mut Command) -> String {
    let out = output(command);
    let stderr = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(0), "{command:?}\n{stderr}");
    String::from_utf8(out.stdout).unwrap()
}

/// One JSON document of a run that must succeed.
pub fn json(command: &mut Command) -> Value {
    serde_json::from_str(&succeeds(command)).unwrap()
}

/// JSON lines of a `run --json`: those of tokens, and the last.
pub fn run_json(command: &mut Command) -> (Vec<Value>, Value) {
    let text = succeeds(command.arg("--json"));
    let mut lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
    let last = lines.pop().unwrap();
    (lines, last)
}

/// Token ids of the lines.
pub fn tokens(lines: &[Value]) -> Vec<u64> {
    lines.iter().map(|l| l["token"].as_u64().unwrap()).collect()
}

/// A JSON file.
pub fn read_json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// A file with token ids.
pub fn ids_file(dir: &Path, name: &str, ids: &[u64]) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, serde_json::to_string(ids).unwrap()).unwrap();
    path
}

/// The first tokens of the reference prompts.
pub fn prompt_ids(prompt: usize, n: usize) -> Vec<u64> {
    let prompts = read_json(&model("reference/prompts.json"));
    let ids = prompts[prompt].as_array().unwrap();
    ids.iter().take(n).map(|v| v.as_u64().unwrap()).collect()
}

/// A copy of a model whose bytes may be changed: a folder, or a file in the folder.
pub fn copy(name: &str, dir: &Path) -> PathBuf {
    let from = model(name);
    let to = dir.join(from.file_name().unwrap());
    if from.is_file() {
        copy_file(&from, &to);
        return to;
    }
    std::fs::create_dir(&to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        copy_file(&entry.path(), &to.join(entry.file_name()));
    }
    to
}

fn copy_file(from: &Path, to: &Path) {
    // Not fs::copy: a read-only checkout must not make a read-only copy.
    std::fs::write(to, std::fs::read(from).unwrap()).unwrap();
}

/// Header of a safetensors file, and where its data starts.
pub fn safetensors_header(bytes: &[u8]) -> (Value, usize) {
    let len = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    (serde_json::from_slice(&bytes[8..8 + len]).unwrap(), 8 + len)
}

/// A safetensors file from a header and data.
pub fn safetensors(header: &Value, data: &[u8]) -> Vec<u8> {
    let header = header.to_string();
    [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), data].concat()
}

/// Byte range of a tensor in a safetensors file.
pub fn safetensors_range(bytes: &[u8], tensor: &str) -> std::ops::Range<usize> {
    let (header, start) = safetensors_header(bytes);
    let offset = |i: usize| header[tensor]["data_offsets"][i].as_u64().unwrap() as usize;
    start + offset(0)..start + offset(1)
}

/// Where a needle lies.
pub fn find(bytes: &[u8], needle: &[u8]) -> usize {
    bytes.windows(needle.len()).position(|w| w == needle).expect("the needle is there")
}
