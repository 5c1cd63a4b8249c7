//! Malformed files, one fault a row: the class of the error and what its message names.

mod common;

use std::fs;
use std::path::Path;

use common::*;
use forebay_files::{Catalog, FilesError};
use serde_json::json;

/// Writes the bytes under `name`, opens them, and compares.
fn check(dir: &Path, row: &str, name: &str, bytes: &[u8], class: &str, mentions: &[&str]) {
    let path = dir.join(name);
    fs::write(&path, bytes).unwrap();
    let error = Catalog::open(&path).expect_err(row);
    let message = error.to_string();
    assert_eq!(error.class(), class, "{row}: {message}");
    assert!(!message.contains('\n'), "{row}: {message}");
    for part in mentions.iter().chain(&[name]) {
        assert!(message.contains(part), "{row}: {message:?} does not name {part:?}");
    }
}

type Row = (&'static str, Vec<u8>, &'static str, &'static [&'static str]);

#[test]
fn gguf() {
    let data = floats(&[1.0, 2.0, 3.0, 4.0]);
    let with = |infos: &[Vec<u8>], data: &[u8]| Gguf::new(infos, data).bytes();
    let one = |info: Vec<u8>| Gguf::new(&[info], &data).bytes();
    let keyed = |k: Vec<u8>| small_gguf().key(k).bytes();
    let nested = {
        // Arrays in arrays, one item each, deeper than anyone nests.
        let mut value = array_head(U8, 0);
        for _ in 0..20 {
            value = [array_head(ARRAY, 1), value].concat();
        }
        keyed(key("deep", ARRAY, &value))
    };
    let rows: Vec<Row> = vec![
        ("empty", vec![], "Truncated", &[]),
        ("part of the magic", b"GG".to_vec(), "Truncated", &[]),
        ("only the magic", b"GGUF".to_vec(), "Truncated", &["header"]),
        ("another magic", b"GGML\x01\0\0\0 and more".to_vec(), "BadMagic", &["GGML", "GGUF"]),
        (
            "pointer",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n".to_vec(),
            "BadMagic",
            &["Git LFS pointer", "fetch"],
        ),
        (
            "tensor twice, the second one also misaligned",
            with(&[info("w", &[4], T_F32, 0), info("w", &[4], T_F32, 4)], &data),
            "DuplicateName",
            &["\"w\""],
        ),
        (
            "alignment beyond the file",
            keyed(key_u32("general.alignment", 1 << 31)),
            "Truncated",
            &["\"w\""],
        ),
        ("web page", b"<!DOCTYPE html><html></html>".to_vec(), "BadMagic", &["web page"]),
        ("version 1", Gguf { version: 1, ..small_gguf() }.bytes(), "BadVersion", &["1"]),
        ("version 9", Gguf { version: 9, ..small_gguf() }.bytes(), "BadVersion", &["9"]),
        (
            "big-endian",
            Gguf { version: 3u32.swap_bytes(), ..small_gguf() }.bytes(),
            "WrongEndian",
            &["big-endian"],
        ),
        (
            "keys without end",
            Gguf { n_keys: Some(1 << 62), ..small_gguf() }.bytes(),
            "LimitExceeded",
            &["number of keys"],
        ),
        (
            "tensors without end",
            Gguf { n_tensors: Some(1 << 61), ..small_gguf() }.bytes(),
            "LimitExceeded",
            &["number of tensors"],
        ),
        (
            "more keys than the file can hold",
            Gguf { n_keys: Some(1000), ..small_gguf() }.bytes(),
            "Truncated",
            &["header"],
        ),
        (
            "a name of 2^63 bytes",
            Gguf {
                n_keys: Some(1),
                keys: vec![(1u64 << 63).to_le_bytes().to_vec()],
                ..small_gguf()
            }
            .bytes(),
            "LimitExceeded",
            &["name of key 0"],
        ),
        (
            "a string longer than the file",
            keyed(key("k", STRING, &4096u64.to_le_bytes())),
            "Truncated",
            &["\"k\"", "4096"],
        ),
        (
            "an array of 2^60",
            keyed(key("k", ARRAY, &array_head(U8, 1 << 60))),
            "LimitExceeded",
            &["\"k\""],
        ),
        (
            "an array longer than the file",
            keyed(key("k", ARRAY, &array_head(U32, 1 << 20))),
            "Truncated",
            &["\"k\"", "4194304"],
        ),
        ("arrays too deep", nested, "LimitExceeded", &["\"deep\"", "depth"]),
        ("unknown value type", keyed(key("k", 77, &[0; 8])), "BadValue", &["\"k\"", "77"]),
        ("a bool of 2", keyed(key("k", BOOL, &[2])), "BadValue", &["\"k\"", "2"]),
        (
            "key twice",
            small_gguf().key(key_u32("toy.n", 1)).key(key_u32("toy.n", 2)).bytes(),
            "DuplicateKey",
            &["toy.n"],
        ),
        (
            "tensor twice",
            with(
                &[info("w", &[4], T_F32, 0), info("w", &[4], T_F32, 32)],
                &[&data[..], &[0; 16], &data].concat(),
            ),
            "DuplicateName",
            &["\"w\""],
        ),
        ("key is not text", keyed(key(b"toy.\xff", U8, &[1])), "BadUtf8", &["toy."]),
        ("value is not text", keyed(key("k", STRING, &string(b"\xc3\x28"))), "BadUtf8", &["\"k\""]),
        ("dimension of 0", with(&[info("z", &[4, 0], T_F32, 0)], &[]), "BadDimension", &["\"z\""]),
        (
            "too many dimensions",
            one(info_with("w", u32::MAX, &[4], T_F32, 0)),
            "BadDimension",
            &["\"w\"", "4294967295"],
        ),
        (
            "size wraps around",
            one(info("w", &[4, (1 << 42) + 1, 1 << 20], T_F32, 0)),
            "Overflow",
            &["\"w\""],
        ),
        (
            "end of the range wraps around",
            one(info("w", &[16], T_F32, u64::MAX - 31)),
            "Overflow",
            &["\"w\""],
        ),
        ("unknown type", one(info("w", &[4], 999, 0)), "UnknownType", &["\"w\"", "999"]),
        ("withdrawn type", one(info("w", &[32], 4, 0)), "UnknownType", &["\"w\"", "4"]),
        (
            "ragged row",
            with(&[info("q", &[33], T_Q4_0, 0)], &[0; 36]),
            "BadDimension",
            &["\"q\"", "33", "32"],
        ),
        (
            "data cut",
            with(&[info("w", &[64], T_F32, 0)], &[0; 252]),
            "Truncated",
            &["\"w\"", "256", "252"],
        ),
        (
            "data cut before the last tensor",
            with(&[info("a", &[4], T_F32, 0), info("b", &[4], T_F32, 32)], &[0; 16]),
            "Truncated",
            &["\"b\"", "16"],
        ),
        ("offset past the end", one(info("w", &[4], T_F32, 1 << 40)), "OutOfBounds", &["\"w\""]),
        ("offset not aligned", one(info("w", &[3], T_F32, 4)), "Misaligned", &["\"w\"", "32"]),
        (
            "overlap",
            with(&[info("a", &[16], T_F32, 0), info("b", &[16], T_F32, 32)], &[0; 96]),
            "Overlap",
            &["\"a\"", "\"b\""],
        ),
        (
            "alignment 0",
            keyed(key_u32("general.alignment", 0)),
            "BadAlignment",
            &["general.alignment"],
        ),
        ("alignment 48", keyed(key_u32("general.alignment", 48)), "BadAlignment", &["48"]),
        (
            "alignment is no number",
            keyed(key("general.alignment", STRING, &string("32"))),
            "BadValue",
            &["general.alignment", "u32"],
        ),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (row, bytes, class, mentions) in rows {
        check(dir.path(), row, "bad.gguf", &bytes, class, mentions);
    }
}

#[test]
fn safetensors_files() {
    let data = floats(&[1.0, 2.0, 3.0, 4.0]);
    let st = |header: serde_json::Value| safetensors(&header, &data);
    let text = |header: &[u8]| safetensors_text(header, &data);
    let with_length = |length: u64| {
        let mut bytes = st(json!({"w": entry("F32", &[4], 0, 16)}));
        bytes[..8].copy_from_slice(&length.to_le_bytes());
        bytes
    };
    let many = vec![1u64; 33];
    let rows: Vec<Row> = vec![
        ("empty", vec![], "Truncated", &[]),
        ("three bytes", b"\x10\0\0".to_vec(), "Truncated", &["header"]),
        ("header past the end", with_length(1000), "Truncated", &["1000"]),
        ("header of 2^63", with_length(1 << 63), "LimitExceeded", &["header"]),
        ("header of nothing", with_length(0), "BadJson", &["header"]),
        (
            "pointer",
            b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n".to_vec(),
            "BadMagic",
            &["Git LFS pointer"],
        ),
        ("no JSON", text(b"{'w': 1}"), "BadJson", &["header"]),
        ("an array", text(b"[1,2,3]"), "BadJson", &["[1,2,3]"]),
        ("cut inside", text(b"{\"w\":{\"dtype\":\"F32\","), "BadJson", &["\"w\""]),
        ("text after", text(b"{} {}"), "BadJson", &["header"]),
        ("not text", text(b"{\"\xff\":1}"), "BadUtf8", &["header"]),
        ("not a tensor", st(json!({"w": 1})), "BadValue", &["\"w\""]),
        ("deep", text(format!("{{\"w\":{{\"x\":{}", "[".repeat(9999)).as_bytes()), "BadJson", &[]),
        (
            "tensor twice",
            text(
                br#"{"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},
                     "w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}}"#,
            ),
            "DuplicateName",
            &["\"w\""],
        ),
        (
            "field twice",
            text(br#"{"w":{"dtype":"F32","dtype":"I32","shape":[4],"data_offsets":[0,16]}}"#),
            "DuplicateKey",
            &["w.dtype"],
        ),
        (
            "metadata key twice",
            text(br#"{"__metadata__":{"a":"1","a":"2"},"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}"#),
            "DuplicateKey",
            &["\"a\""],
        ),
        ("field missing", st(json!({"w": {"dtype": "F32", "shape": [4]}})), "MissingKey", &["w.data_offsets"]),
        (
            "one offset",
            st(json!({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0]}})),
            "BadValue",
            &["\"w\"", "data_offsets"],
        ),
        ("backwards", st(json!({"w": entry("F32", &[4], 16, 0)})), "BadValue", &["\"w\"", "16"]),
        (
            "negative",
            st(json!({"w": {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}})),
            "BadValue",
            &["\"w\"", "-4"],
        ),
        (
            "overlap",
            safetensors(
                &json!({"k": entry("F32", &[2], 0, 8), "v": entry("F32", &[2], 0, 8)}),
                &data[..8],
            ),
            "Overlap",
            &["\"k\"", "\"v\""],
        ),
        ("hole at the start", st(json!({"w": entry("F32", &[2], 8, 16)})), "Hole", &["\"w\"", "0..8"]),
        ("bytes left over", st(json!({"w": entry("F32", &[2], 0, 8)})), "Hole", &["\"w\"", "8..16"]),
        (
            "hole in the middle",
            st(json!({"a": entry("F32", &[1], 0, 4), "b": entry("F32", &[2], 8, 16)})),
            "Hole",
            &["\"a\"", "\"b\"", "4..8"],
        ),
        ("cut", st(json!({"w": entry("F32", &[5], 0, 20)})), "Truncated", &["\"w\"", "20", "16"]),
        (
            "past the end",
            st(json!({"a": entry("F32", &[4], 0, 16), "w": entry("F32", &[1], 1 << 40, (1 << 40) + 4)})),
            "OutOfBounds",
            &["\"w\""],
        ),
        ("size of another shape", st(json!({"w": entry("F32", &[3], 0, 16)})), "SizeMismatch", &["\"w\"", "12", "16"]),
        ("size wraps around", st(json!({"w": entry("F32", &[1 << 40, 1 << 40], 0, 16)})), "Overflow", &["\"w\""]),
        (
            "size wraps around before a zero",
            st(json!({"w": entry("F32", &[1 << 40, 1 << 40, 0], 0, 0)})),
            "Overflow",
            &["\"w\""],
        ),
        ("too many dimensions", st(json!({"w": entry("F32", &many, 0, 4)})), "BadValue", &["\"w\"", "32"]),
        ("half a byte", st(json!({"w": entry("F4", &[31], 0, 16)})), "BadDimension", &["\"w\"", "4-bit"]),
        ("unknown type", st(json!({"w": entry("Q7", &[4], 0, 16)})), "UnknownType", &["\"w\"", "Q7"]),
    ];
    let dir = tempfile::tempdir().unwrap();
    for (row, bytes, class, mentions) in rows {
        check(dir.path(), row, "bad.safetensors", &bytes, class, mentions);
    }
}

#[test]
fn neither_format() {
    let dir = tempfile::tempdir().unwrap();
    type Row<'a> = (&'a str, &'a str, &'a [u8], &'a str, &'a [&'a str]);
    let rows: &[Row<'_>] = &[
        ("text", "notes.txt", b"some notes on a model", "UnknownFormat", &["some notes"]),
        ("pickle", "pytorch_model.bin", b"PK\x03\x04rest of a zip", "UnknownFormat", &["PyTorch"]),
        ("old", "old.bin", b"tjgg\x03\0\0\0rest of it", "UnknownFormat", &["older than GGUF"]),
        ("short", "x", b"abc", "Truncated", &["3"]),
    ];
    for (row, name, bytes, class, mentions) in rows {
        check(dir.path(), row, name, bytes, class, mentions);
    }
}

#[test]
fn content_goes_before_the_name() {
    let dir = tempfile::tempdir().unwrap();
    let gguf = dir.path().join("a.safetensors");
    fs::write(&gguf, small_gguf().bytes()).unwrap();
    assert!(Catalog::open(&gguf).unwrap().is_gguf());
    let blob = dir.path().join("sha256-0123");
    let bytes = safetensors(&json!({"w": entry("F32", &[4], 0, 16)}), &[0; 16]);
    fs::write(&blob, bytes).unwrap();
    assert!(!Catalog::open(&blob).unwrap().is_gguf());
}

#[test]
fn names_cannot_forge_lines() {
    let dir = tempfile::tempdir().unwrap();
    let long = format!("a\nERROR {}", "x".repeat(5000));
    let path = dir.path().join("bad.gguf");
    fs::write(&path, Gguf::new(&[info(&long, &[4], 999, 0)], &[0; 16]).bytes()).unwrap();
    let message = Catalog::open(&path).unwrap_err().to_string();
    assert!(!message.contains('\n') && message.len() < 1000, "{message}");
}

#[test]
fn the_system_fails() {
    let dir = tempfile::tempdir().unwrap();
    let error = Catalog::open(&dir.path().join("nowhere.gguf")).unwrap_err();
    assert_eq!(error.class(), "IoError");
    assert!(matches!(&error, FilesError::Io { source, .. }
        if source.kind() == std::io::ErrorKind::NotFound));
    assert!(error.to_string().contains("nowhere.gguf"));
}
