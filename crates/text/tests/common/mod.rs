//! Where test data lies.
#![allow(dead_code, reason = "each test uses its part")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use forebay_files::MetaValue;

/// The shared folder with large reference data, or `None` with a line that says what is skipped.
pub fn shared(skipped: &str) -> Option<PathBuf> {
    let beside = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared");
    let dir = std::env::var_os("FOREBAY_SHARED").map_or_else(beside, PathBuf::from);
    if !dir.join("templates").is_dir() {
        println!("skipped, there is no shared folder at {}: {skipped}", dir.display());
        return None;
    }
    Some(dir)
}

/// The models of this repository.
pub fn models() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models")
}

pub fn json(path: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// The keys of a sound GGUF file. The product's reader lives in another crate; this one checks nothing.
pub fn gguf(path: &Path) -> BTreeMap<String, MetaValue> {
    let bytes = std::fs::read(path).unwrap();
    let mut cursor = Cursor { bytes: &bytes, at: 16 };
    let count = cursor.u64();
    (0..count)
        .map(|_| {
            let key = cursor.string();
            let kind = cursor.u32();
            (key, cursor.value(kind))
        })
        .collect()
}

struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn take<const N: usize>(&mut self) -> [u8; N] {
        self.at += N;
        self.bytes[self.at - N..self.at].try_into().unwrap()
    }
    fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.take())
    }
    fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.take())
    }
    fn string(&mut self) -> String {
        let len = self.u64() as usize;
        self.at += len;
        String::from_utf8(self.bytes[self.at - len..self.at].to_vec()).unwrap()
    }
    fn value(&mut self, kind: u32) -> MetaValue {
        match kind {
            0 => MetaValue::U8(self.take::<1>()[0]),
            1 => MetaValue::I8(i8::from_le_bytes(self.take())),
            2 => MetaValue::U16(u16::from_le_bytes(self.take())),
            3 => MetaValue::I16(i16::from_le_bytes(self.take())),
            4 => MetaValue::U32(self.u32()),
            5 => MetaValue::I32(i32::from_le_bytes(self.take())),
            6 => MetaValue::F32(f32::from_le_bytes(self.take())),
            7 => MetaValue::Bool(self.take::<1>()[0] != 0),
            8 => MetaValue::String(self.string()),
            9 => {
                let kind = self.u32();
                let len = self.u64();
                MetaValue::Array((0..len).map(|_| self.value(kind)).collect())
            }
            10 => MetaValue::U64(self.u64()),
            11 => MetaValue::I64(i64::from_le_bytes(self.take())),
            12 => MetaValue::F64(f64::from_le_bytes(self.take())),
            _ => panic!("unknown value type {kind}"),
        }
    }
}
