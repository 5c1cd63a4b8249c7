//! What goes wrong, and what is said about it: one line that names the thing and the remedy, and the exit
//! code of the command line's description. Damaged files are made from the bundled models.

mod common;

use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};

use assert_cmd::Command;
use common::*;
use forebay_files::Catalog;
use rstest::rstest;
use tempfile::{TempDir, tempdir};

/// Runs a command that must fail with `code`; its only complaint must contain all of `says`.
fn fails(command: &mut Command, code: i32, says: &[&str]) -> String {
    let out = output(command);
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(code), "{command:?}\n{stderr}");
    let complaints: Vec<&str> = stderr.lines().filter(|l| !l.starts_with("note: ")).collect();
    let [complaint] = complaints[..] else { panic!("{command:?}: one line wanted:\n{stderr}") };
    let complaint = complaint.strip_prefix("forebay: ").unwrap_or_else(|| panic!("{complaint}"));
    for word in says {
        assert!(complaint.contains(word), "{word:?} is not in: {complaint}");
    }
    complaint.to_string()
}

/// `run MODEL "Once upon a time"` for few tokens.
fn run(model: &Path) -> Command {
    let mut command = forebay();
    command.args(["run", "--tokens", "4", "--context", "256"]).arg(model).arg("Once upon a time");
    command
}

/// A damaged copy of a model. `damage` sees the bytes of its one file of weights.
fn damaged(name: &str, damage: impl FnOnce(&mut Vec<u8>)) -> (TempDir, PathBuf) {
    let dir = tempdir().unwrap();
    let path = copy(name, dir.path());
    let weights = weights_of(&path);
    let mut bytes = std::fs::read(&weights).unwrap();
    damage(&mut bytes);
    std::fs::write(&weights, bytes).unwrap();
    (dir, path)
}

fn weights_of(path: &Path) -> PathBuf {
    if path.is_dir() { path.join("model.safetensors") } else { path.to_path_buf() }
}

/// Byte range of a tensor in the file of weights.
fn range_of(name: &str, tensor: &str) -> std::ops::Range<usize> {
    let catalog = Catalog::open(&model(name)).unwrap();
    let t = catalog.tensor(tensor).unwrap_or_else(|| panic!("{tensor}"));
    t.offset as usize..(t.offset + t.len) as usize
}

#[rstest]
#[case::gguf(QWEN3_MOE, "blk.")]
#[case::safetensors(GPT_OSS, "model.safetensors")]
fn truncated(#[case] name: &str, #[case] says: &str) {
    let (_dir, path) = damaged(name, |b| b.truncate(b.len() - 100_000));
    fails(&mut run(&path), 1, &[says]);
    // In the header, and next to nothing.
    for len in [9000, 100, 5] {
        let (_dir, path) = damaged(name, |b| b.truncate(len));
        fails(&mut run(&path), 1, &[]);
    }
    let (_dir, path) = damaged(name, |b| b.clear());
    fails(&mut run(&path), 1, &[]);
}

#[rstest]
#[case::gguf(QWEN3_MOE, &["GGUF", "GGXX"])]
#[case::safetensors(GPT_OSS, &["model.safetensors"])]
fn wrong_magic(#[case] name: &str, #[case] says: &[&str]) {
    let (_dir, path) = damaged(name, |b| b[..8].copy_from_slice(b"GGXX\xff\xff\xff\xff"));
    fails(&mut run(&path), 1, says);
}

#[rstest]
#[case(QWEN3_MOE)]
#[case(GPT_OSS)]
fn pointer_file_of_git_lfs(#[case] name: &str) {
    let (_dir, path) = damaged(name, |b| {
        *b = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 4718752\n"
            .to_vec();
    });
    fails(&mut run(&path), 1, &["git lfs pull"]);
}

#[test]
fn unknown_architectures_list_the_known_ones() {
    let (_dir, path) = damaged(QWEN3_MOE, |b| {
        let at = find(b, b"general.architecture");
        let at = at + find(&b[at..], b"qwen3moe");
        b[at..at + 8].copy_from_slice(b"qwen9moe");
    });
    fails(&mut run(&path), 3, &["\"qwen9moe\"", "gpt-oss", "qwen3-moe"]);
    let dir = tempdir().unwrap();
    let path = copy(GPT_OSS, dir.path());
    edit(&path.join("config.json"), "\"gpt_oss\"", "\"gpt_iss\"");
    fails(&mut run(&path), 3, &["\"gpt_iss\"", "gpt-oss", "qwen3-moe"]);
}

/// Replaces a text in a file.
fn edit(path: &Path, from: &str, to: &str) {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.contains(from), "{from}");
    std::fs::write(path, text.replace(from, to)).unwrap();
}

#[rstest]
#[case(QWEN3_MOE, "output_norm.weight")]
#[case(QWEN3_MOE, "blk.3.attn_k.weight")]
#[case(QWEN3_MOE, "blk.5.ffn_down_exps.weight")]
#[case(GPT_OSS, "model.norm.weight")]
#[case(GPT_OSS, "model.layers.4.self_attn.sinks")]
#[case(GPT_OSS, "lm_head.weight")]
fn missing_tensor(#[case] name: &str, #[case] tensor: &str) {
    // Another name of the same length: the container stays sound.
    let (_dir, path) = damaged(name, |b| {
        let at = find(b, tensor.as_bytes());
        b[at + tensor.len() - 1] = b'_';
    });
    fails(&mut run(&path), 1, &[tensor, "missing"]);
}

#[test]
fn missing_files_of_a_folder() {
    let dir = tempdir().unwrap();
    let path = copy(GPT_OSS, dir.path());
    let shard = "model-00001-of-00002.safetensors";
    std::fs::rename(path.join("model.safetensors"), path.join(shard)).unwrap();
    let index = serde_json::json!({
        "weight_map": {
            "model.norm.weight": shard,
            "lm_head.weight": "model-00002-of-00002.safetensors",
        }
    });
    std::fs::write(path.join("model.safetensors.index.json"), index.to_string()).unwrap();
    fails(&mut run(&path), 1, &["model-00002-of-00002.safetensors", "download"]);

    let dir = tempdir().unwrap();
    let path = copy(GPT_OSS, dir.path());
    std::fs::remove_file(path.join("config.json")).unwrap();
    fails(&mut run(&path), 1, &["config.json"]);

    let dir = tempdir().unwrap();
    let path = copy(GPT_OSS, dir.path());
    std::fs::remove_file(path.join("tokenizer.json")).unwrap();
    fails(&mut run(&path), 1, &["tokenizer"]);

    let dir = tempdir().unwrap();
    let path = copy(GPT_OSS, dir.path());
    std::fs::write(path.join("config.json"), "{\"model_type\": ").unwrap();
    fails(&mut run(&path), 1, &["config.json", "JSON"]);

    fails(&mut run(tempdir().unwrap().path()), 1, &["no *.gguf"]);
}

/// NaN in the weights of one router: the error names the layer, wherever experts live.
#[rstest]
#[case(QWEN3_MOE, "blk.3.ffn_gate_inp.weight", &f32::NAN.to_le_bytes(), "layer 3")]
#[case(GPT_OSS, "model.layers.2.mlp.router.weight", &[0xc0, 0x7f], "layer 2")]
#[case(GPT_OSS, "model.layers.4.mlp.router.bias", &[0xc0, 0x7f], "layer 4")]
fn nan_in_a_router(
    #[case] name: &str,
    #[case] tensor: &str,
    #[case] nan: &[u8],
    #[case] says: &str,
) {
    let start = range_of(name, tensor).start;
    let (_dir, path) = damaged(name, |b| b[start..start + nan.len()].copy_from_slice(nan));
    for residency in ["stream", "resident"] {
        for precision in ["q8", "f32"] {
            let command = &mut run(&path);
            let options = ["--residency", residency, "--precision", precision];
            fails(command.args(options), 1, &["NaN", says, "damaged"]);
        }
    }
}

#[test]
fn nan_in_the_last_norm_reaches_the_logits() {
    let start = range_of(QWEN3_MOE, "output_norm.weight").start;
    let (_dir, path) =
        damaged(QWEN3_MOE, |b| b[start..start + 4].copy_from_slice(&f32::NAN.to_le_bytes()));
    for precision in ["q8", "f32"] {
        fails(run(&path).args(["--precision", precision]), 1, &["NaN", "logits", "damaged"]);
    }
    // No perplexity either.
    let dir = tempdir().unwrap();
    let ids = ids_file(dir.path(), "ids.json", &prompt_ids(1, 40));
    let mut command = forebay();
    command.args(["eval", "perplexity", "--window", "40"]).args([&path, &ids]);
    fails(&mut command, 1, &["NaN"]);
}

#[test]
fn nan_scales_of_mxfp4() {
    let tensor = "model.layers.2.mlp.experts.down_proj_scales";
    let range = range_of(GPT_OSS, tensor);
    // All of a layer: whichever expert is read first.
    let (_dir, path) = damaged(GPT_OSS, |b| b[range.clone()].fill(255));
    for residency in ["stream", "mapped", "resident"] {
        let says = ["model.layers.2.mlp.experts.down_proj", "layer 2", "255"];
        fails(run(&path).args(["--residency", residency]), 1, &says);
    }
    // One scale of expert 7: found without being routed to.
    let at = range.start + 7 * (range.len() / 16) + 5 * 3 + 1;
    let (_dir, path) = damaged(GPT_OSS, |b| b[at] = 255);
    let says = ["expert 7", "row 5", "block 1"];
    fails(run(&path).args(["--residency", "resident"]), 1, &says);
}

#[rstest]
#[case::path(&["run", "no/such/place/model.gguf", "x"], 2, &["no/such/place/model.gguf", "no such file"])]
#[case::absolute(&["run", "/no/such", "x"], 2, &["/no/such"])]
#[case::remote(&["run", "somebody/some-model", "x"], 3, &["somebody/some-model", "forebay pull"])]
#[case::remote(&["inspect", "somebody/some-model"], 1, &["somebody/some-model", "127.0.0.1"])]
fn places(#[case] args: &[&str], #[case] code: i32, #[case] says: &[&str]) {
    fails(forebay().args(args), code, says);
}

#[rstest]
#[case(&["--slots", "0"], 2, &["--slots", "at least 1"])]
#[case(&["--threads", "0"], 2, &["--threads", "at least 1"])]
#[case(&["--threads", "1000000"], 2, &["--threads", "at most"])]
#[case(&["--chunk", "0"], 2, &["--chunk", "at least 1"])]
#[case(&["--context", "0"], 2, &["--context", "at least 1"])]
#[case(&["--io-depth", "0"], 2, &["--io-depth", "at least 1"])]
#[case(&["--temp=-1"], 2, &["--temp"])]
#[case(&["--temp", "nan"], 2, &["--temp"])]
#[case(&["--top-p", "0"], 2, &["--top-p"])]
#[case(&["--min-p", "1.5"], 2, &["--min-p"])]
#[case(&["--repeat-penalty", "0"], 2, &["--repeat-penalty"])]
#[case(&["--context", "5000"], 3, &["5000", "4096"])]
fn options(#[case] args: &[&str], #[case] code: i32, #[case] says: &[&str]) {
    let mut command = forebay();
    command.arg("run").arg(model(GPT_OSS)).arg("Once").args(args);
    fails(&mut command, code, says);
}

/// An option that means nothing without another is refused, and the other named.
#[rstest]
#[case("run", &["--draft-tokens", "4"], &["--draft-tokens", "--speculate"])]
#[case("run", &["--draft-tokens", "4", "--speculate", "off"], &["--draft-tokens", "--speculate"])]
#[case("run", &["--speculate-always"], &["--speculate-always", "--speculate"])]
#[case("run", &["--slots", "4", "--residency", "mapped"], &["--slots", "--residency stream"])]
#[case("run", &["--slots", "4", "--residency", "resident"], &["--slots", "--residency stream"])]
#[case("run", &["--policy", "lru", "--residency", "resident"], &["--policy", "--residency stream"])]
#[case("run", &["--io-depth", "4", "--residency", "mapped"], &["--io-depth", "--residency stream"])]
#[case("run", &["--repeat-last-n", "9", "--temp", "0"], &["--repeat-last-n", "--repeat-penalty"])]
#[case("inspect", &["--draft-tokens", "4"], &["--draft-tokens", "--speculate"])]
#[case("plan", &["--draft-tokens", "4"], &["--draft-tokens", "--speculate"])]
#[case("bench", &["--draft-tokens", "4"], &["--draft-tokens", "--speculate"])]
#[case("bench", &["--scripted", "0.5", "--speculate", "ngram"], &["--speculate", "--scripted"])]
#[case("bench", &["--scripted", "0.5", "--draft-model", "x"], &["--draft-model", "--scripted"])]
#[case("serve", &["--draft-tokens", "4"], &["--draft-tokens", "--speculate"])]
#[case("serve", &["--log-prompts", "--log-format", "off"], &["--log-prompts", "--log-format off"])]
#[case("trace", &["--prompt", "x", "--speculate", "ngram"], &["--speculate", "trace"])]
#[case("trace", &["--prompt", "x", "--backend", "cuda"], &["--backend", "GPU"])]
#[case("tokenize", &["1,2", "--decode", "--special"], &["--special", "--decode"])]
fn options_without_their_partner(
    #[case] command: &str,
    #[case] args: &[&str],
    #[case] says: &[&str],
) {
    let with = |args: &[&str]| {
        let mut all = forebay();
        all.arg(command).arg(model(GPT_OSS)).args(args);
        all
    };
    fails(&mut with(args), 2, &[says, &["does nothing"]].concat());
}

/// The same of `eval`, and what is told once for all commands is no fault of those that have no use for it.
#[test]
fn standing_settings_are_no_faults() {
    let dir = tempdir().unwrap();
    let ids = ids_file(dir.path(), "ids.json", &prompt_ids(0, 12));
    let perplexity = || {
        let mut command = forebay();
        command.args(["eval", "perplexity", "--window", "12"]).args([&model(QWEN3_MOE), &ids]);
        command
    };
    let says = ["--speculate", "nothing drafts"];
    fails(perplexity().args(["--speculate", "ngram"]), 2, &says);
    succeeds(perplexity().env("FOREBAY_SPECULATE", "ngram").env("FOREBAY_DRAFT_TOKENS", "3"));
    let settings = dir.path().join("settings.toml");
    std::fs::write(&settings, "draft-tokens = 3\nslots = 2\n").unwrap();
    let standing = |more: &[&str]| {
        let mut command = run(&model(QWEN3_MOE));
        succeeds(command.env("FOREBAY_CONFIG", &settings).args(more))
    };
    assert_eq!(standing(&[]), standing(&["--residency", "mapped"]));
}

/// The parser's own complaints have several lines, the first of which names the option.
#[rstest]
#[case(&["run"], "<MODEL>")]
#[case(&["fly", "model.gguf"], "fly")]
#[case(&["run", "m", "x", "--no-such-option"], "--no-such-option")]
#[case(&["run", "m", "x", "--memory", "lots"], "--memory")]
#[case(&["run", "m", "x", "--memory", "-5GiB"], "-5")]
#[case(&["run", "m", "x", "--slots", "many"], "--slots")]
#[case(&["run", "m", "x", "--residency", "cloud"], "--residency")]
#[case(&["run", "m", "x", "--simd", "mmx"], "--simd")]
#[case(&["run", "m", "x", "--prompt-ids", "f"], "--prompt-ids")]
#[case(&["eval", "same", "m"], "--prompt")]
fn wrong_usage(#[case] args: &[&str], #[case] says: &str) {
    let out = output(forebay().args(args));
    let stderr = String::from_utf8(out.stderr).unwrap();
    assert_eq!(out.status.code(), Some(2), "{stderr}");
    assert!(stderr.starts_with("error: ") && stderr.contains(says), "{stderr}");
    assert!(out.stdout.is_empty());
}

#[test]
fn help_and_version_are_no_errors() {
    for args in [&["--version"][..], &["--help"], &["run", "--help"], &["eval", "same", "--help"]] {
        assert!(!succeeds(forebay().args(args)).is_empty());
    }
}

/// A number beyond all bounds is clamped or refused, and never wraps.
#[test]
fn numbers_without_sense() {
    let huge = usize::MAX.to_string();
    for option in ["--slots", "--chunk", "--tokens", "--top-k", "--repeat-last-n", "--seed"] {
        let mut command = run(&model(QWEN3_MOE));
        command.args(["--repeat-penalty", "1.2"]);
        // `--tokens` twice is an error of its own.
        if option == "--tokens" {
            command = forebay();
            command.arg("run").arg(model(QWEN3_MOE)).args(["Once", "--context", "20"]);
        }
        succeeds(command.args([option, &huge]));
    }
    for option in ["--depth", "--prompt-tokens", "--gen-tokens"] {
        let command = &mut forebay();
        command.arg("bench").arg(model(QWEN3_MOE)).args([option, &huge]);
        fails(command, 3, &["context"]);
        let command = &mut forebay();
        command.arg("bench").arg(model(QWEN3_MOE)).args([option, &huge, "--context", "64"]);
        fails(command, 2, &["context", "64"]);
    }
}

#[test]
fn prompts() {
    let dir = tempdir().unwrap();
    let base = || {
        let mut command = forebay();
        command.args(["run", "--context", "64"]).arg(model(GPT_OSS));
        command
    };
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let ids = |path: &Path| {
        let mut command = base();
        command.arg("--prompt-ids").arg(path);
        command
    };
    fails(&mut ids(&dir.path().join("none.json")), 2, &["none.json"]);
    fails(&mut ids(&file("words.json", "[1, \"two\"]")), 2, &["words.json", "token ids"]);
    fails(&mut ids(&file("negative.json", "[-1]")), 2, &["negative.json", "token ids"]);
    fails(&mut ids(&file("empty.json", "[]")), 2, &["empty.json"]);
    fails(&mut ids(&file("blank.json", "  ")), 2, &["blank.json"]);
    fails(&mut ids(dir.path()), 2, &[dir.path().to_str().unwrap()]);
    fails(&mut ids(&file("outside.json", "[5, 4096]")), 2, &["4096", "vocabulary"]);
    // Context 64: a prompt of 63 leaves room for one token, 64 for none.
    for (n, works) in [(63, true), (64, false), (65, false)] {
        let path = ids_file(dir.path(), "n.json", &prompt_ids(2, n));
        match works {
            true => {
                let (lines, last) = run_json(ids(&path).arg("--ignore-eos"));
                assert_eq!((lines.len(), last["done"].as_str()), (1, Some("length")));
            }
            false => _ = fails(&mut ids(&path), 2, &[&n.to_string(), "64", "--context"]),
        }
    }
    fails(base().arg(""), 2, &["empty"]);
    fails(base().args(["--raw", ""]), 2, &["empty"]);
    fails(base().arg("-").write_stdin(""), 2, &["empty"]);
    fails(base().arg("-").write_stdin("  \n"), 2, &["empty"]);
    fails(base().arg("-").write_stdin(&b"\xff\xfe"[..]), 2, &["standard input"]);
    let from_stdin = succeeds(base().args(["--tokens", "5", "-"]).write_stdin("Once upon\n"));
    assert_eq!(from_stdin, succeeds(base().args(["--tokens", "5", "Once upon"])));
}

#[test]
fn references() {
    let dir = tempdir().unwrap();
    let file = dir.path().join("wrong.json");
    for text in ["", "{}", "{\"cases\": []}", "[1, 2]", "{\"cases\": [{\"prompt\": []}]}"] {
        std::fs::write(&file, text).unwrap();
        let mut command = forebay();
        command.args(["eval", "golden"]).args([&model(QWEN3_MOE), &file]);
        fails(&mut command, 2, &["wrong.json"]);
    }
    std::fs::write(&file, "[5]").unwrap();
    let mut command = forebay();
    command.args(["eval", "perplexity"]).args([&model(QWEN3_MOE), &file]);
    fails(&mut command, 2, &["wrong.json"]);
}

/// The smallest budget that a refusal names works, and a MiB less does not.
#[rstest]
#[case(GPT_OSS, &[])]
#[case(QWEN3_MOE, &[])]
#[case(QWEN3_MOE, &["--slots", "8", "--chunk", "64"])]
#[case(GPT_OSS, &["--kv", "f32", "--context", "4096"])]
#[case(GPT_OSS, &["--residency", "resident"])]
#[case(GPT_OSS, &["--residency", "mapped"])]
fn a_budget_too_small_names_the_smallest(#[case] name: &str, #[case] options: &[&str]) {
    let with = |memory: &str| {
        let mut command = forebay();
        command.arg("run").arg(model(name)).args(["Once upon", "--tokens", "3"]);
        command.args(options).args(["--memory", memory]);
        command
    };
    let says = ["1.0 MiB", "smallest", "--context"];
    let complaint = fails(&mut with("1MiB"), 3, &says);
    let number = complaint.split("the smallest that works is ").nth(1).unwrap();
    let mib: u64 = number.split(" MiB").next().unwrap().parse().unwrap();
    succeeds(&mut with(&format!("{mib}MiB")));
    fails(&mut with(&format!("{}MiB", mib - 1)), 3, &[&format!("{mib} MiB")]);
}

#[test]
fn errors_are_json_as_well() {
    let mut command = forebay();
    command.arg("run").arg(model(GPT_OSS)).args(["Once", "--json", "--memory", "1MiB"]);
    let out = output(&mut command);
    assert_eq!(out.status.code(), Some(3));
    let report: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    assert_eq!(report["error"]["class"], "BudgetTooSmall");
    let message = report["error"]["message"].as_str().unwrap();
    assert_eq!(String::from_utf8(out.stderr).unwrap(), format!("forebay: {message}\n"));
}

/// Every command ends quietly when nobody reads its output.
#[test]
fn closed_output() {
    let dir = tempdir().unwrap();
    let ids = ids_file(dir.path(), "ids.json", &prompt_ids(0, 12));
    let golden = model("reference/qwen3_moe-Q4_K_M.json");
    let m = model(QWEN3_MOE);
    let (m, ids, golden) = (m.to_str().unwrap(), ids.to_str().unwrap(), golden.to_str().unwrap());
    let commands: [&[&str]; 10] = [
        &["run", m, "Once", "--tokens", "5"],
        &["run", m, "Once", "--tokens", "5", "--json"],
        &["run", m, "Once", "--tokens", "0"],
        &["inspect", m],
        &["inspect", m, "--json"],
        &["tokenize", m, "Once"],
        &["bench", m, "--prompt-tokens", "4", "--gen-tokens", "2", "--repeat", "1", "--json"],
        &["eval", "golden", m, golden, "--tolerance", "9"],
        &["eval", "perplexity", m, ids, "--window", "12"],
        &["run", m, "Once", "--json", "--memory", "1MiB"],
    ];
    for args in commands {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let out = plain().args(args).stdout(writer).stderr(Stdio::piped()).output().unwrap();
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert!(!stderr.contains("panicked"), "{args:?}: {stderr}");
        let refused = args.contains(&"--memory");
        assert_eq!(out.status.code(), Some(if refused { 3 } else { 0 }), "{args:?}: {stderr}");
    }
    // After the first line of many.
    let (mut child, mut lines) = long_run(&model(QWEN3_MOE), &[]);
    assert!(lines.next().unwrap().unwrap().contains("token"));
    drop(lines);
    let (code, stderr) = end(&mut child);
    assert_eq!(code, Some(0), "{stderr}");
}

fn plain() -> std::process::Command {
    let mut command = std::process::Command::new(assert_cmd::cargo::cargo_bin("forebay"));
    command.env("XDG_CONFIG_HOME", "/nonexistent").env("FOREBAY_THREADS", "2");
    command.current_dir(env!("CARGO_TARGET_TMPDIR")).stdin(Stdio::null());
    command
}

type Lines = std::io::Lines<BufReader<std::process::ChildStdout>>;

/// Starts a run that takes long, and gives its lines.
fn long_run(model: &Path, options: &[&str]) -> (Child, Lines) {
    let mut command = plain();
    command.args(["run", "--json", "--ignore-eos", "--precision", "f32"]).arg(model).arg("Once");
    command.args(options).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines();
    (child, lines)
}

/// Exit code and stderr.
fn end(child: &mut Child) -> (Option<i32>, String) {
    let mut stderr = String::new();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    assert!(!stderr.contains("panicked"), "{stderr}");
    (child.wait().unwrap().code(), stderr)
}

/// Bytes of another file must never become an answer.
#[rstest]
#[case(QWEN3_MOE, &["--residency", "stream", "--slots", "1"])]
#[case(GPT_OSS, &["--residency", "stream", "--slots", "1"])]
#[case(GPT_OSS, &["--residency", "mapped"])]
// All experts are in memory: rows of the embedding still come from the file.
#[case(GPT_OSS, &["--residency", "resident"])]
fn a_file_that_changes_under_way(#[case] name: &str, #[case] options: &[&str]) {
    let dir = tempdir().unwrap();
    let path = copy(name, dir.path());
    let (mut child, mut lines) = long_run(&path, options);
    assert!(lines.next().unwrap().unwrap().contains("token"));
    let file = std::fs::File::options().append(true).open(weights_of(&path)).unwrap();
    std::io::Write::write_all(&mut &file, b"more").unwrap();
    let rest: Vec<String> = lines.map(|l| l.unwrap()).collect();
    let (code, stderr) = end(&mut child);
    assert_eq!(code, Some(1), "{stderr}");
    assert!(stderr.contains("changed"), "{stderr}");
    assert!(rest.last().unwrap().contains("FileChanged"));
}
