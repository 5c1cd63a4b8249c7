//! Sets of files: split GGUFs, sharded safetensors, folders.

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::{Cursor, Error, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use common::*;
use forebay_files::{Catalog, Dtype, FileAccess, FileEntry, FilesError, MetaValue, ShardFault};
use serde_json::{Value, json};

/// Shard `number` (from 0) of `count`, with one tensor of two floats.
fn split(number: u16, count: u16, total: i32, tensor: &str) -> Vec<u8> {
    let data = floats(&[number as f32, 0.5]);
    Gguf::new(&[info(tensor, &[2], T_F32, 0)], &data)
        .key(key_u16("split.no", number))
        .key(key_u16("split.count", count))
        .key(key("split.tensors.count", I32, &total.to_le_bytes()))
        .bytes()
}

fn write(dir: &Path, files: &[(&str, Vec<u8>)]) {
    for (name, bytes) in files {
        let path = dir.join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, bytes).unwrap();
    }
}

fn st(tensor: &str) -> Vec<u8> {
    safetensors(&json!({tensor: entry("F32", &[1], 0, 4)}), &floats(&[1.0]))
}

fn text(value: Value) -> Vec<u8> {
    value.to_string().into_bytes()
}

fn index(map: Value) -> Vec<u8> {
    text(json!({"metadata": {"total_size": 8}, "weight_map": map}))
}

type Files = Vec<(&'static str, Vec<u8>)>;

/// Files, what to open (empty: the folder), class, what the message names.
type Row = (&'static str, Files, &'static str, &'static str, &'static [&'static str]);

fn check(rows: Vec<Row>) {
    for (row, files, path, class, mentions) in rows {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &files);
        match Catalog::open(&dir.path().join(path)) {
            Ok(catalog) => {
                assert_eq!(class, "ok", "{row}");
                for name in mentions {
                    assert!(catalog.tensor(name).is_some(), "{row}: no {name}");
                }
                assert_eq!(catalog.tensors.len(), mentions.len(), "{row}");
            }
            Err(error) => {
                let message = error.to_string();
                assert_eq!(error.class(), class, "{row}: {message}");
                for part in mentions {
                    assert!(message.contains(part), "{row}: {message:?} does not name {part:?}");
                }
            }
        }
    }
}

const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n";

const T1: &str = "toy-00001-of-00003.gguf";
const T2: &str = "toy-00002-of-00003.gguf";
const T3: &str = "toy-00003-of-00003.gguf";

#[test]
fn split_gguf() {
    let set = |total| {
        vec![
            (T1, split(0, 3, total, "a")),
            (T2, split(1, 3, total, "b")),
            (T3, split(2, 3, total, "c")),
        ]
    };
    let with = |i: usize, bytes: Vec<u8>| {
        let mut files = set(3);
        files[i].1 = bytes;
        files
    };
    let cut = {
        let mut bytes = split(2, 3, 3, "c");
        bytes.pop();
        bytes
    };
    check(vec![
        ("whole", set(3), T1, "ok", &["a", "b", "c"]),
        ("by folder", set(3), "", "ok", &["a", "b", "c"]),
        ("second opened", set(3), T2, "ShardMismatch", &[T2, "open the first", T1]),
        ("two missing", vec![(T1, split(0, 3, 3, "a"))], T1, "MissingShard", &[T2, T3]),
        ("first missing", set(3)[1..].to_vec(), "", "MissingShard", &[T1]),
        ("last cut", with(2, cut), T1, "Truncated", &[T3, "\"c\"", "8", "7"]),
        ("total", set(4), T1, "ShardMismatch", &["split.tensors.count", "4", "3"]),
        ("swapped", with(1, split(2, 3, 3, "b")), T1, "ShardMismatch", &[T2, "split.no", "2", "1"]),
        ("other set", with(1, split(1, 2, 3, "b")), T1, "ShardMismatch", &[T2, "split.count"]),
        (
            "no keys",
            with(1, small_gguf().bytes()),
            T1,
            "ShardMismatch",
            &[T2, "split.no", "missing"],
        ),
        ("twice", with(1, split(1, 3, 3, "a")), T1, "DuplicateName", &["\"a\"", T1, T2]),
        (
            "renamed",
            vec![("toy.gguf", split(0, 3, 3, "a"))],
            "toy.gguf",
            "ShardMismatch",
            &["-00001-of-00003"],
        ),
        (
            "count and name",
            vec![(T1, split(0, 2, 2, "a"))],
            T1,
            "ShardMismatch",
            &["split.count", "2", "3"],
        ),
        ("pointer", with(1, POINTER.to_vec()), T1, "BadMagic", &[T2, "Git LFS pointer"]),
        (
            "a thousand and more missing",
            vec![("x-00001-of-09999.gguf", split(0, 9999, 1, "a"))],
            "",
            "MissingShard",
            &["x-01000-of-09999", "and 8998 more"],
        ),
        ("set of one", vec![("x-00001-of-00001.gguf", split(0, 1, 1, "a"))], "", "ok", &["a"]),
    ]);
}

const S1: &str = "model-00001-of-00002.safetensors";
const S2: &str = "model-00002-of-00002.safetensors";
const INDEX: &str = "model.safetensors.index.json";

#[test]
fn sharded_safetensors() {
    let set = |map: Value| vec![(S1, st("a")), (S2, st("b")), (INDEX, index(map))];
    let whole = || json!({"a": S1, "b": S2});
    check(vec![
        ("whole", set(whole()), "", "ok", &["a", "b"]),
        ("without index", set(whole())[..2].to_vec(), "", "ok", &["a", "b"]),
        ("without index, first", set(whole())[..2].to_vec(), S1, "ok", &["a", "b"]),
        ("without index, second", set(whole())[..2].to_vec(), S2, "ShardMismatch", &[S1]),
        ("one shard opened", set(whole()), S1, "ShardMismatch", &["open the folder"]),
        ("missing", vec![(INDEX, index(whole()))], "", "MissingShard", &[S1, S2]),
        ("missing, no index", vec![(S2, st("b"))], "", "MissingShard", &[S1]),
        (
            "not in shard",
            set(json!({"a": S1, "b": S2, "c": S2})),
            "",
            "ShardMismatch",
            &[S2, "\"c\""],
        ),
        ("not in index", set(json!({"x": S1, "b": S2})), "", "ShardMismatch", &[S1, "\"a\""]),
        (
            "elsewhere",
            set(json!({"a": S2, "b": S2, "c": S1})),
            "",
            "ShardMismatch",
            &[S1, "\"a\"", S2],
        ),
        (
            "in two shards",
            vec![(S1, st("a")), (S2, st("a")), (INDEX, index(json!({"a": S1, "b": S2})))],
            "",
            "ShardMismatch",
            &["\"a\"", S1, S2],
        ),
        (
            "leads out",
            set(json!({"a": "../a.safetensors"})),
            "",
            "UnsafePath",
            &["../a.safetensors"],
        ),
        ("absolute", set(json!({"a": "/etc/passwd"})), "", "UnsafePath", &["/etc/passwd"]),
        ("backslash", set(json!({"a": "..\\a"})), "", "UnsafePath", &["a"]),
        ("no name", set(json!({"a": 1})), "", "BadValue", &["\"a\""]),
        (
            "no map",
            vec![(S1, st("a")), (INDEX, text(json!({})))],
            "",
            "MissingKey",
            &["weight_map"],
        ),
        (
            "empty map",
            vec![(S1, st("a")), (INDEX, index(json!({})))],
            "",
            "BadValue",
            &["weight_map"],
        ),
        ("no JSON", vec![(S1, st("a")), (INDEX, b"{".to_vec())], "", "BadJson", &[INDEX]),
        (
            "twice in the index",
            vec![(INDEX, br#"{"weight_map":{"a":"x","a":"y"}}"#.to_vec())],
            "",
            "DuplicateKey",
            &["\"a\"", INDEX],
        ),
        (
            "in a folder of its own",
            vec![
                ("s/one", st("a")),
                ("s/two", st("b")),
                (INDEX, index(json!({"a": "s/one", "b": "s/two"}))),
            ],
            "",
            "ok",
            &["a", "b"],
        ),
        (
            "pointer",
            vec![(S1, st("a")), (S2, POINTER.to_vec()), (INDEX, index(whole()))],
            "",
            "BadMagic",
            &[S2, "Git LFS pointer"],
        ),
        (
            "one file with an index",
            vec![("model.safetensors", st("a")), (INDEX, index(json!({"a": "model.safetensors"})))],
            "",
            "ok",
            &["a"],
        ),
        (
            "one file with the index of another set",
            vec![("model.safetensors", st("a")), (INDEX, index(whole()))],
            "",
            "ok",
            &["a"],
        ),
    ]);
}

#[test]
fn folders() {
    let gguf = || small_gguf().bytes();
    check(vec![
        ("empty", vec![], "", "UnknownFormat", &["no *.gguf"]),
        ("pickles", vec![("pytorch_model.bin", vec![])], "", "UnknownFormat", &["PyTorch"]),
        ("another name", vec![("weights.safetensors", st("a"))], "", "ok", &["a"]),
        (
            "hidden files do not count",
            vec![("weights.safetensors", st("a")), ("._weights.safetensors", vec![0])],
            "",
            "ok",
            &["a"],
        ),
        ("one GGUF", vec![("m.gguf", gguf())], "", "ok", &["w"]),
        ("with projector", vec![("m.gguf", gguf()), ("mmproj-m.gguf", gguf())], "", "ok", &["w"]),
        ("a projector alone", vec![("mmproj-m.gguf", gguf())], "", "ok", &["w"]),
        (
            "two GGUFs",
            vec![("m.gguf", gguf()), ("n.gguf", gguf())],
            "",
            "UnknownFormat",
            &["several", "m.gguf", "n.gguf"],
        ),
        (
            "both formats",
            vec![("m.gguf", gguf()), ("model.safetensors", st("a"))],
            "",
            "UnknownFormat",
            &["m.gguf", "model.safetensors"],
        ),
        (
            "broken config",
            vec![("model.safetensors", st("a")), ("config.json", b"{".to_vec())],
            "",
            "BadJson",
            &["config.json"],
        ),
        (
            "config with a key twice",
            vec![("model.safetensors", st("a")), ("config.json", br#"{"n":1,"n":2}"#.to_vec())],
            "",
            "DuplicateKey",
            &["config.json", "\"n\""],
        ),
    ]);
}

#[test]
fn what_a_catalog_tells() {
    let dir = tempfile::tempdir().unwrap();
    let header = json!({
        "codes": entry("U32", &[2, 3], 1, 25),
        "odd": entry("U8", &[1], 0, 1),
        "none": entry("F32", &[0, 7], 25, 25),
        "scalar": entry("BF16", &[], 25, 27),
        "f8": entry("F8_E4M3", &[2], 27, 29),
        "f4": entry("F4", &[4], 29, 31),
    });
    let config = json!({"model_type": "toy"});
    write(
        dir.path(),
        &[
            ("model.safetensors", safetensors(&header, &[0; 31])),
            ("config.json", text(config.clone())),
            ("generation_config.json", text(json!({"eos_token_id": 3}))),
        ],
    );
    let folder = Catalog::open(dir.path()).unwrap();
    assert_eq!(folder.config(), Some(&config));
    assert_eq!(folder.generation_config().unwrap()["eos_token_id"], 3);
    assert_eq!(folder.weight_bytes(), 31);
    assert_eq!(folder.display_path().to_string(), dir.path().display().to_string());
    assert_eq!(folder.meta("model_type"), None);
    let codes = folder.tensor("codes").unwrap();
    assert_eq!((codes.dtype, codes.elements(), codes.len), (Dtype::U32, 6, 24));
    assert_eq!(codes.end(), folder.files[0].len - 6);
    assert_eq!(folder.tensor("f8").unwrap().dtype, Dtype::Other { bytes: 1 });
    assert_eq!(folder.tensor("f4").unwrap().dtype, Dtype::SubByte { bits: 4 });
    assert_eq!(folder.tensor("scalar").unwrap().elements(), 1);

    // The file by itself is the same checkpoint; another config is another one.
    let file = Catalog::open(&dir.path().join("model.safetensors")).unwrap();
    assert_eq!(file.header_hash, folder.header_hash);
    assert_eq!(file.config(), Some(&config));
    fs::write(dir.path().join("config.json"), "{}").unwrap();
    assert_ne!(Catalog::open(dir.path()).unwrap().header_hash, folder.header_hash);
    fs::remove_file(dir.path().join("config.json")).unwrap();
    let error = Catalog::open(dir.path()).unwrap().require_config().unwrap_err();
    assert_eq!(error.class(), "MissingKey");
    let error = folder.require_tensor("lm_head.weight").unwrap_err();
    assert_eq!(error.class(), "MissingTensor");
    assert!(error.to_string().contains("lm_head.weight"));
}

#[test]
fn gguf_values() {
    let nested =
        [array_head(ARRAY, 2), array_head(U8, 2), vec![1, 2], array_head(STRING, 1), string("x")]
            .concat();
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let gguf = Gguf::new(&[info("m", &[32, 3, 2], T_MXFP4, 0)], &[127; 17 * 6])
        .key(key("nested", ARRAY, &nested))
        .key(key("minus", I32, &(-3i32).to_le_bytes()))
        .key(key("yes", BOOL, &[1]));
    fs::write(&path, gguf.bytes()).unwrap();
    let mut catalog = Catalog::open(&path).unwrap();
    let tensor = catalog.tensor("m").unwrap();
    assert_eq!((tensor.shape.as_slice(), tensor.len), (&[2, 3, 32][..], 102));
    assert_eq!(tensor.dtype, Dtype::Ggml(forebay_quant::Format::Mxfp4));
    assert_eq!(catalog.meta("minus").unwrap().as_f64(), Some(-3.0));
    assert_eq!(catalog.meta("minus").unwrap().as_u64(), None);
    assert_eq!(catalog.meta("yes").unwrap().as_bool(), Some(true));
    let want = MetaValue::Array(vec![
        MetaValue::Array(vec![MetaValue::U8(1), MetaValue::U8(2)]),
        MetaValue::Array(vec![MetaValue::String("x".into())]),
    ]);
    assert_eq!(catalog.take_meta("nested"), Some(want));
    assert_eq!(catalog.meta("nested"), None);
    assert_eq!(catalog.config(), None);
}

/// A vocabulary of the size that models have: parsed in one pass.
#[test]
fn large_vocabulary() {
    const TOKENS: u64 = 262_144;
    let mut tokens = array_head(STRING, TOKENS);
    (0..TOKENS).for_each(|i| tokens.extend(string(format!("token {i}"))));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let gguf = small_gguf().key(key("tokenizer.ggml.tokens", ARRAY, &tokens));
    fs::write(&path, gguf.bytes()).unwrap();
    let catalog = Catalog::open(&path).unwrap();
    let tokens = catalog.meta("tokenizer.ggml.tokens").unwrap().as_array().unwrap();
    assert_eq!(tokens.len() as u64, TOKENS);
    assert_eq!(tokens[262_143].as_str(), Some("token 262143"));
}

/// A file of a tebibyte opens at once: nothing but its header is read.
#[test]
fn opening_costs_the_header() {
    const BYTES: u64 = 1 << 40;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    fs::write(&path, Gguf::new(&[info("w", &[BYTES / 4], T_F32, 0)], &[]).bytes()).unwrap();
    let file = fs::File::options().append(true).open(&path).unwrap();
    if let Err(e) = file.set_len(file.metadata().unwrap().len() + BYTES) {
        eprintln!("skipped: no sparse file of that size here: {e}");
        return;
    }
    assert_eq!(Catalog::open(&path).unwrap().weight_bytes(), BYTES);
}

#[test]
fn a_file_changes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("m.gguf");
    let bytes = small_gguf().bytes();
    fs::write(&path, &bytes).unwrap();
    let catalog = Catalog::open(&path).unwrap();
    catalog.check_unchanged().unwrap();

    let touched = fs::File::options().append(true).open(&path).unwrap();
    touched.set_modified(SystemTime::now() + Duration::from_secs(60)).unwrap();
    let error = catalog.check_unchanged().unwrap_err();
    assert_eq!(error.class(), "FileChanged");
    assert!(error.to_string().contains("m.gguf: the modification time changed"), "{error}");

    fs::write(&path, [&bytes[..], &[0]].concat()).unwrap();
    let error = catalog.check_unchanged().unwrap_err().to_string();
    assert!(error.contains("the length changed from"), "{error}");

    fs::remove_file(&path).unwrap();
    let error = catalog.check_unchanged().unwrap_err();
    assert_eq!(error.class(), "FileChanged");
    assert!(error.to_string().contains("disappeared"), "{error}");
}

#[test]
fn faults_are_data() {
    let dir = tempfile::tempdir().unwrap();
    write(dir.path(), &[(T2, split(1, 3, 3, "b"))]);
    let error = Catalog::open(&dir.path().join(T2)).unwrap_err();
    let FilesError::ShardMismatch { fault, .. } = error else { panic!("{error}") };
    assert_eq!(fault, ShardFault::NotFirst { number: 2, count: 3, first: T1.into() });
}

/// Files that are on no disk.
struct Elsewhere(BTreeMap<PathBuf, Vec<u8>>);

impl FileAccess for Elsewhere {
    fn list(&self, path: &Path) -> Result<Option<Vec<String>>, FilesError> {
        if self.0.contains_key(path) {
            return Ok(None);
        }
        let inside = self.0.keys().filter(|p| p.parent() == Some(path));
        Ok(Some(inside.map(|p| p.file_name().unwrap().to_str().unwrap().to_owned()).collect()))
    }

    fn open(&self, path: &Path) -> Result<(Box<dyn Read>, FileEntry), FilesError> {
        let file = path.to_owned();
        match self.0.get(path) {
            Some(bytes) => {
                let entry = FileEntry { path: file, len: bytes.len() as u64, mtime_ns: 0 };
                Ok((Box::new(Cursor::new(bytes.clone())), entry))
            }
            None => {
                let source = Error::from(ErrorKind::NotFound);
                Err(FilesError::Io { file, action: "open", source })
            }
        }
    }

    fn read_at(&self, path: &Path, offset: u64, len: usize) -> Result<Vec<u8>, FilesError> {
        Ok(self.0[path][offset as usize..][..len].to_vec())
    }

    fn is_file(&self, path: &Path) -> bool {
        self.0.contains_key(path)
    }
}

#[test]
fn files_that_are_elsewhere() {
    let sharded = vec![
        ("config.json", text(json!({"model_type": "x"}))),
        (
            "model.safetensors.index.json",
            index(json!({"a": "1.safetensors", "b": "2.safetensors"})),
        ),
        ("1.safetensors", st("a")),
        ("2.safetensors", st("b")),
    ];
    let set = vec![(T1, split(0, 3, 3, "a")), (T2, split(1, 3, 3, "b")), (T3, split(2, 3, 3, "c"))];
    for (files, opened) in [(sharded, ""), (set, T1)] {
        let dir = tempfile::tempdir().unwrap();
        write(dir.path(), &files);
        let here = Catalog::open(&dir.path().join(opened)).unwrap();
        let there = files.into_iter().map(|(name, bytes)| (dir.path().join(name), bytes));
        let mut there = Elsewhere(there.collect());
        drop(dir);
        let path = here.path();
        let catalog = Catalog::open_with(&there, path).unwrap();
        assert_eq!((&catalog.tensors, catalog.header_hash), (&here.tensors, here.header_hash));
        assert_eq!(catalog.path(), path);
        there.0.pop_last();
        let gone = Catalog::open_with(&there, path).unwrap_err();
        assert_eq!(gone.class(), if opened.is_empty() { "UnknownFormat" } else { "MissingShard" });
    }
}
