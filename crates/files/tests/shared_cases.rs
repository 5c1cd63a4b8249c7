//! The generator of odd files that is kept beside the repository, when it is there.
//!
//! `FOREBAY_SHARED` names the folder that holds `cases/make_bad_gguf.py`; without it, `shared` beside
//! the repository is tried. The rows of `bad_files.rs` cover the same kinds of fault without it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use forebay_files::{Catalog, TensorInfo};
use serde_json::Value;

fn shared() -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let dir = std::env::var_os("FOREBAY_SHARED").map_or_else(beside, PathBuf::from);
    dir.join("cases/make_bad_gguf.py").is_file().then_some(dir)
}

#[test]
fn every_entry_of_the_manifest() {
    let Some(shared) = shared() else {
        eprintln!("skipped: no cases/make_bad_gguf.py in FOREBAY_SHARED or beside the repository");
        return;
    };
    let out = tempfile::tempdir().unwrap();
    let run =
        Command::new("python3").arg(shared.join("cases/make_bad_gguf.py")).arg(out.path()).status();
    match run {
        Ok(status) => assert!(status.success(), "the generator failed"),
        Err(e) => {
            eprintln!("skipped: python3 does not start: {e}");
            return;
        }
    }
    let manifest = fs::read(out.path().join("manifest.json")).unwrap();
    let manifest: Value = serde_json::from_slice(&manifest).unwrap();
    let entries = manifest["entries"].as_array().unwrap();
    assert!(entries.len() > 40);
    for entry in entries {
        let path = entry["path"].as_str().unwrap();
        let opened = Catalog::open(&out.path().join(path));
        match entry["expect"].as_str().unwrap() {
            "ok" => {
                let catalog = opened.unwrap_or_else(|e| panic!("{path}: {e}"));
                assert_eq!(catalog.is_gguf(), entry["format"] == "gguf", "{path}");
                for (name, want) in entry["tensors"].as_object().unwrap() {
                    check_tensor(&catalog, path, name, want);
                }
            }
            _ => {
                let error = opened.expect_err(path);
                let message = error.to_string();
                let mut classes = vec![entry["error_class"].as_str().unwrap()];
                classes.extend(texts(&entry["accept_also"]));
                assert!(classes.contains(&error.class()), "{path}: {}: {message}", error.class());
                let names = texts(&entry["names"]);
                let named = names.is_empty() || names.iter().any(|n| message.contains(n));
                assert!(named, "{path}: {message}");
                assert!(!message.contains('\n'), "{path}: {message}");
            }
        }
    }
}

fn texts(value: &Value) -> Vec<&str> {
    value.as_array().unwrap().iter().map(|v| v.as_str().unwrap()).collect()
}

fn check_tensor(catalog: &Catalog, path: &str, name: &str, want: &Value) {
    let values: Vec<f32> =
        want["values"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect();
    let mxfp4 = want["dtype"] == "mxfp4";
    let got = match catalog.tensor(name) {
        Some(t) => {
            let mut shape: Vec<u64> =
                want["shape"].as_array().unwrap().iter().map(|d| d.as_u64().unwrap()).collect();
            if catalog.is_gguf() {
                shape.reverse();
            }
            assert_eq!(t.shape, shape, "{path}: {name}");
            let bytes = read(catalog, t);
            match mxfp4 {
                // A GGUF block: the scale, then 16 bytes with elements j and j + 16.
                true => {
                    let codes = bytes[1..].iter().map(|b| b & 15);
                    mxfp4_values(bytes[0], codes.chain(bytes[1..].iter().map(|b| b >> 4)))
                }
                false => f32_values(&bytes),
            }
        }
        // A checkpoint's planes: a byte holds elements 2i and 2i + 1.
        None => {
            let plane = |part| read(catalog, catalog.tensor(&format!("{name}_{part}")).unwrap());
            let (blocks, scales) = (plane("blocks"), plane("scales"));
            mxfp4_values(scales[0], blocks.iter().flat_map(|b| [b & 15, b >> 4]))
        }
    };
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&got), bits(&values), "{path}: {name}");
}

fn read(catalog: &Catalog, tensor: &TensorInfo) -> Vec<u8> {
    let file = fs::read(catalog.file_of(tensor)).unwrap();
    file[tensor.offset as usize..tensor.end() as usize].to_vec()
}

fn f32_values(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
}

fn mxfp4_values(scale: u8, codes: impl Iterator<Item = u8>) -> Vec<f32> {
    const E2M1: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let scale = f32::powi(2.0, i32::from(scale) - 127);
    let value = |code: u8| E2M1[usize::from(code & 7)] * if code & 8 == 0 { scale } else { -scale };
    codes.map(value).collect()
}

#[test]
fn every_model_opens() {
    let Some(shared) = shared() else {
        eprintln!("skipped: no models beside the repository");
        return;
    };
    let mut opened = 0;
    for family in fs::read_dir(shared.join("models")).unwrap().flatten() {
        for variant in fs::read_dir(family.path()).into_iter().flatten().flatten() {
            let Ok(entries) = fs::read_dir(variant.path()) else { continue };
            let mut paths: Vec<PathBuf> = entries.flatten().map(|e| e.path()).collect();
            paths.retain(|p| p.extension().is_some_and(|e| e == "gguf"));
            if paths.is_empty() {
                paths.push(variant.path());
            }
            for path in paths {
                let catalog = Catalog::open(&path).unwrap_or_else(|e| panic!("{e}"));
                let text = format!("{}: {} tensors", path.display(), catalog.tensors.len());
                assert!(catalog.tensors.len() > 10, "{text}");
                assert!(catalog.is_gguf() || catalog.config().is_some(), "{text}");
                opened += 1;
            }
        }
    }
    assert!(opened > 0);
}
