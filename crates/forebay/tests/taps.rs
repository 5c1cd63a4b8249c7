//! Steering and capture against forward hooks in transformers on the same checkpoints, and that neither costs bits or memory.
//!
//! `taps/` holds directions and answers of four families, made by `tools/make_tap_reference.py`.

mod common;

use std::path::{Path, PathBuf};

use common::*;
use forebay_files::Catalog;
use forebay_program::{Extras, Op, Point, Precision, TapSet, lower, lower_with};
use rstest::rstest;
use serde_json::{Value, json};

/// Largest difference to the reference in f32.
const TOLERANCE: f64 = 2e-3;

fn here(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests").join(name)
}

/// A family's checkpoint.
fn checkpoint(family: &str) -> PathBuf {
    match family {
        "gpt_oss" => model(GPT_OSS),
        other => here("families").join(other),
    }
}

fn directions(family: &str) -> String {
    here("taps").join(family).join("directions.safetensors").display().to_string()
}

/// The options of an answer's file, which name files beside it.
fn steer_options(family: &str, answers: &Value) -> Vec<String> {
    let dir = here("taps").join(family);
    let options = answers["steer"].as_array().unwrap().iter();
    options
        .flat_map(|o| ["--steer".into(), dir.join(o.as_str().unwrap()).display().to_string()])
        .collect()
}

#[rstest]
fn steered_answers_agree_with_hooks(
    #[values("gpt_oss", "mixtral", "gemma4", "qwen3_5")] family: &str,
    #[values(0, 1, 2, 3, 4)] way: usize,
) {
    let file = here("taps").join(family).join(format!("steered-{way}.json"));
    let options = steer_options(family, &read_json(&file));
    let golden = |options: &[String]| {
        let mut command = forebay();
        let command = command.args(["eval", "golden", "--json", "--precision", "f32"]);
        let out = output(command.args([&checkpoint(family), &file]).args(options));
        serde_json::from_slice::<Value>(&out.stdout).unwrap()
    };
    let report = golden(&options);
    let diff = report["max_abs_logit_diff"].as_f64().unwrap();
    println!("{family} {way}: largest logit difference {diff}");
    assert!(report["ok"] == true && diff <= TOLERANCE, "{report}");
    assert!(report["argmax_total"].as_u64() > Some(0) && report["greedy_total"].as_u64() > Some(0));
    // The answers are not those of the model as it is.
    let report = golden(&[]);
    assert!(report["max_abs_logit_diff"].as_f64() > Some(10.0 * TOLERANCE), "{report}");
}

/// A captured file: tensors by name, with their shapes.
struct Captured {
    bytes: Vec<u8>,
    header: Value,
}

impl Captured {
    fn read(path: &Path) -> Captured {
        let bytes = std::fs::read(path).unwrap();
        let (header, _) = safetensors_header(&bytes);
        Captured { bytes, header }
    }

    fn shape(&self, tensor: &str) -> Vec<usize> {
        serde_json::from_value(self.header[tensor]["shape"].clone()).unwrap()
    }

    fn words(&self, tensor: &str) -> Vec<u32> {
        let (words, []) = self.bytes[safetensors_range(&self.bytes, tensor)].as_chunks::<4>()
        else {
            panic!("{tensor} is ragged")
        };
        words.iter().map(|w| u32::from_le_bytes(*w)).collect()
    }

    /// `[layer, row]` of a tensor, as numbers.
    fn row(&self, tensor: &str, layer: usize, row: usize) -> Vec<f64> {
        let layers = self.words(&format!("{}.layers", tensor.split('.').next().unwrap()));
        let at = layers.iter().position(|l| *l as usize == layer).unwrap();
        let shape = self.shape(tensor);
        let start = (at * shape[1] + row) * shape[2];
        let words = &self.words(tensor)[start..start + shape[2]];
        let is_float = self.header[tensor]["dtype"] == "F32";
        let number = |w: &u32| if is_float { f64::from(f32::from_bits(*w)) } else { f64::from(*w) };
        words.iter().map(number).collect()
    }
}

/// Captures a run of so many tokens after the prompt.
fn capture(model: &Path, ids: &[u64], dir: &Path, tokens: usize, options: &[&str]) -> Captured {
    let prompt = ids_file(dir, "ids.json", ids);
    let out = dir.join("captured.safetensors");
    let mut command = forebay();
    command.arg("run").arg(model).arg("--prompt-ids").arg(prompt).arg("--capture-out").arg(&out);
    command.args(["--tokens", &tokens.to_string(), "--ignore-eos"]).args(options);
    succeeds(&mut command);
    let left: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "only the file stays: {left:?}");
    Captured::read(&out)
}

#[rstest]
fn captured_rows_agree_with_hooks(
    #[values("gpt_oss", "mixtral", "gemma4", "qwen3_5")] family: &str,
) {
    for case in read_json(&here("taps").join(family).join("captured.json")).as_array().unwrap() {
        let dir = tempfile::tempdir().unwrap();
        let ids: Vec<u64> = serde_json::from_value(case["prompt"].clone()).unwrap();
        let points = case["points"].as_object().unwrap();
        let mut wanted = "attention,feed-forward".to_owned();
        if points.contains_key("router") {
            wanted += ",router,choice";
        }
        let steer = steer_options(family, case);
        let mut options = vec!["--precision", "f32", "--capture", &wanted];
        options.extend(steer.iter().map(String::as_str));
        let captured = capture(&checkpoint(family), &ids, dir.path(), 1, &options);
        assert_eq!(captured.words("rows"), (0..ids.len() as u32).collect::<Vec<_>>());
        assert_eq!(captured.words("tokens"), ids.iter().map(|t| *t as u32).collect::<Vec<_>>());
        let mut largest: f64 = 0.0;
        for (point, layers) in points {
            for (layer, rows) in layers.as_object().unwrap() {
                for (row, want) in
                    case["rows"].as_array().unwrap().iter().zip(rows.as_array().unwrap())
                {
                    let row = row.as_u64().unwrap() as usize;
                    let got = captured.row(point, layer.parse().unwrap(), row);
                    let want: Vec<f64> = serde_json::from_value(want.clone()).unwrap();
                    assert_eq!(got.len(), want.len(), "{point} {layer}");
                    for (got, want) in got.iter().zip(&want) {
                        largest = largest.max((got - want).abs());
                    }
                }
            }
        }
        println!("{family}, steered by {}: largest difference {largest}", steer.len() / 2);
        assert!(largest <= TOLERANCE);
    }
}

/// Chunks, threads, slots and vector width decide no byte of a captured file; `last` rows are those of `all`.
#[rstest]
fn captured_bytes_are_the_same(#[values(GPT_OSS, QWEN3_MOE)] name: &str) {
    let ids = prompt_ids(2, 70);
    let steer = format!("{}:strength=0.4,layers=2", directions("gpt_oss"));
    let run = |more: &[&str], rows: &str| {
        let dir = tempfile::tempdir().unwrap();
        let points = "feed-forward@1-3,attention@2,router,choice";
        let mut options = vec!["--capture", points, "--capture-rows", rows];
        if name == GPT_OSS {
            options.extend(["--steer", &steer]);
        }
        options.extend(more);
        capture(&model(name), &ids, dir.path(), 5, &options)
    };
    let all = run(&[], "all");
    for more in [
        &["--chunk", "7", "--threads", "1"][..],
        &["--chunk", "64", "--residency", "stream", "--slots", "5", "--simd", "scalar"],
        &["--residency", "mapped", "--prefetch", "on"],
    ] {
        assert!(run(more, "all").bytes == all.bytes, "{more:?}");
    }
    let last = run(&["--chunk", "9"], "last");
    let rows: Vec<u32> = (69..74).collect();
    assert_eq!(last.words("rows"), rows);
    assert_eq!(all.words("rows"), (0..74).collect::<Vec<u32>>());
    for tensor in ["feed_forward", "attention", "router", "choice", "choice.weights"] {
        let layers = last.words(&format!("{}.layers", tensor.split('.').next().unwrap()));
        for layer in layers {
            for (i, row) in rows.iter().enumerate() {
                let (one, other) = (
                    last.row(tensor, layer as usize, i),
                    all.row(tensor, layer as usize, *row as usize),
                );
                assert_eq!(one, other, "{tensor} {layer} {row}");
            }
        }
    }
}

/// Steered logits obey the one promise.
#[rstest]
fn steered_bits_are_the_same(#[values("gpt_oss", "qwen3_5", "gemma4")] family: &str) {
    let prompt = ids_file(
        tempfile::tempdir().unwrap().keep().as_path(),
        "ids.json",
        &(0..40).map(|i| i * 7 % 90 + 1).collect::<Vec<u64>>(),
    );
    let same = |steer: &[String]| {
        let mut command = forebay();
        command.args(["eval", "same", "--json", "--tokens", "4", "--threads", "2"]);
        let command = command.arg(checkpoint(family)).arg("--prompt-ids").arg(&prompt);
        json(command.args(steer))
    };
    let file = directions(family);
    let steer = [
        "--steer".into(),
        format!("{file}:mode=renormalise"),
        "--steer".into(),
        format!("{file}:mode=ablate,point=attention"),
    ];
    let steered = same(&steer);
    assert!(steered["ok"] == true && steered["combinations"].as_u64() > Some(1), "{steered}");
    assert_ne!(steered["hash"], same(&[])["hash"]);
}

/// Without taps a program is what it was; with them it has taps besides and nothing else.
#[rstest]
fn taps_are_all_that_they_add(#[values("gpt_oss", "mixtral", "gemma4", "qwen3_5")] family: &str) {
    let catalog = Catalog::open(&checkpoint(family)).unwrap();
    let spec = forebay_models::read(&catalog).unwrap();
    let plain = lower(&spec, Precision::Q8);
    let is_tap = |op: &Op| matches!(op, Op::Tap(_));
    assert!(!plain.segments.iter().flat_map(|s| &s.ops).any(is_tap));
    let mut taps = TapSet::default();
    taps.extend((0..spec.layers.len()).flat_map(|l| Point::ALL.map(|p| (l, p))));
    let mut tapped = lower_with(&spec, Precision::Q8, Extras { taps, ..Extras::default() });
    let mut seen = 0;
    for segment in &mut tapped.segments {
        let before = segment.ops[..segment.router].iter().filter(|op| is_tap(op)).count();
        seen += segment.ops.iter().filter(|op| is_tap(op)).count();
        segment.ops.retain(|op| !is_tap(op));
        segment.router -= before;
    }
    let routed = spec.layers.iter().filter(|l| l.ffn.routed.is_some()).count();
    assert_eq!(seen, spec.layers.len() * 2 + routed);
    assert_eq!(tapped, plain);
}

/// The ledger has lines for what is asked for, and no line and no byte for what is not.
#[test]
fn the_ledger_knows_what_is_asked_for() {
    let ledger = |options: &[&str]| {
        let report = json(
            forebay()
                .arg("inspect")
                .arg(model(GPT_OSS))
                .args(["--json", "--memory", "1GiB"])
                .args(options),
        );
        report["ledger"].as_array().unwrap().clone()
    };
    let plain = ledger(&[]);
    let bytes = |ledger: &[Value], what: &str| {
        ledger
            .iter()
            .filter(|l| l["what"] == what)
            .map(|l| l["bytes"].as_u64().unwrap())
            .sum::<u64>()
    };
    assert_eq!(bytes(&plain, "steering vectors") + bytes(&plain, "capture"), 0);
    let steered = ledger(&["--steer", &format!("{}:layers=1-3", directions("gpt_oss"))]);
    assert_eq!(bytes(&steered, "steering vectors"), 3 * 256 * 4);
    let rest: Vec<&Value> = steered.iter().filter(|l| l["what"] != "steering vectors").collect();
    assert_eq!(rest, plain.iter().collect::<Vec<_>>());
}

#[test]
fn bad_vectors_are_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name);
    let write = |name: &str, tensors: &[(&str, &str, Vec<usize>, Vec<u8>)]| {
        let mut header = serde_json::Map::new();
        let mut data = Vec::new();
        for (tensor, dtype, shape, bytes) in tensors {
            let offsets = [data.len(), data.len() + bytes.len()];
            header.insert(
                (*tensor).into(),
                json!({"dtype": dtype, "shape": shape, "data_offsets": offsets}),
            );
            data.extend(bytes);
        }
        std::fs::write(path(name), safetensors(&Value::Object(header), &data)).unwrap();
    };
    let floats = |v: f32, n: usize| v.to_le_bytes().repeat(n);
    write("narrow", &[("direction.1", "F32", vec![8], floats(1.0, 8))]);
    write("high", &[("direction.6", "F32", vec![256], floats(1.0, 256))]);
    write("huge", &[("direction.99999999999999999999999", "F32", vec![256], floats(1.0, 256))]);
    write("nan", &[("direction.2", "F32", vec![256], floats(f32::NAN, 256))]);
    write("zero", &[("direction.2", "F32", vec![256], floats(0.0, 256))]);
    write("words", &[("direction.2", "I32", vec![256], floats(1.0, 256))]);
    write("other", &[("weight", "F32", vec![256], floats(1.0, 256))]);
    write(
        "twice",
        &[
            ("direction.2", "F32", vec![256], floats(1.0, 256)),
            ("layers.2", "F32", vec![256], floats(1.0, 256)),
        ],
    );
    let gguf = std::fs::read(here("taps/gpt_oss/directions.gguf")).unwrap();
    let mut zeroth = gguf.clone();
    let at = find(&zeroth, b"direction.1");
    zeroth[at + 10] = b'0';
    std::fs::write(path("zeroth"), zeroth).unwrap();
    std::fs::write(path("cut"), &gguf[..gguf.len() - 100]).unwrap();
    std::fs::write(path("text"), "not a vector").unwrap();
    let known = directions("gpt_oss");
    for (option, code, words) in [
        (path("narrow").display().to_string(), 1, &["direction.1", "[8]", "[256]"][..]),
        (path("high").display().to_string(), 1, &["direction.6", "0 to 5"]),
        (path("huge").display().to_string(), 1, &["direction.9999", "0 to 5"]),
        (path("nan").display().to_string(), 1, &["direction.2", "finite"]),
        (format!("{}:mode=ablate", path("zero").display()), 1, &["layer 2", "zeros"]),
        (path("words").display().to_string(), 1, &["direction.2", "F32"]),
        (path("other").display().to_string(), 1, &["holds no direction", "direction.N"]),
        (path("twice").display().to_string(), 1, &["layer 2", "two"]),
        (path("zeroth").display().to_string(), 1, &["direction.0", "1 to 5"]),
        (path("cut").display().to_string(), 1, &["cut"]),
        (path("text").display().to_string(), 1, &["text"]),
        (path("none").display().to_string(), 1, &["none"]),
        (format!("{known}:layers=9-12"), 1, &["layers 9 to 12"]),
        (format!("{known}:layers=2-12"), 1, &["layers 2 to 12", "layers 0 to 5"]),
        (format!("{known}:point=router"), 1, &["router", "attention or feed-forward"]),
        (format!("{known}:mode=double"), 2, &["double", "ablate"]),
    ] {
        let out = output(
            forebay()
                .args(["run", "--tokens", "1"])
                .arg(model(GPT_OSS))
                .args(["hello", "--steer", &option]),
        );
        let stderr = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(code), "{option}: {stderr}");
        for word in words {
            assert!(stderr.contains(word), "{option}: {word}: {stderr}");
        }
    }
    for (capture, out, code, words) in [
        ("feed-forward@6", "x", 3, &["layers 0 to 5"][..]),
        ("head", "x", 2, &["head", "router"]),
        ("router", "missing/x", 1, &["missing"]),
        ("router", "new/", 1, &["new/", "is a directory"]),
    ] {
        let ran = output(
            forebay()
                .args(["run", "--tokens", "1"])
                .arg(model(GPT_OSS))
                .arg("hello")
                .args(["--capture", capture, "--capture-out"])
                .arg(path(out)),
        );
        let stderr = String::from_utf8_lossy(&ran.stderr);
        assert_eq!(ran.status.code(), Some(code), "{capture}: {stderr}");
        assert!(words.iter().all(|word| stderr.contains(word)), "{capture}: {stderr}");
        assert!(!path(out).exists());
    }
    let dense = output(
        forebay()
            .args(["run", "--tokens", "1", "--raw"])
            .arg(checkpoint("qwen3_5"))
            .args(["a", "--capture", "router", "--capture-out"])
            .arg(path("x")),
    );
    assert_eq!(dense.status.code(), Some(3), "{}", String::from_utf8_lossy(&dense.stderr));
}
