//! Damaged headers never panic, and what still opens lies inside its file.

mod common;

use std::io::{self, ErrorKind, Read};
use std::path::Path;

use common::*;
use forebay_files::{TensorInfo, gguf, safetensors as st};
use proptest::prelude::*;
use serde_json::json;

fn sound_gguf() -> Vec<u8> {
    let tokens = [array_head(STRING, 3), string("a"), string("bc"), string("")].concat();
    let nested = [array_head(ARRAY, 1), array_head(U8, 2), vec![7, 8]].concat();
    let infos = [
        info("token_embd.weight", &[32, 3], 8, 0),
        info("blk.0.ffn_up_exps.weight", &[32, 2, 2], T_MXFP4, 128),
        info("blk.0.norm", &[5], T_F32, 224),
    ];
    let mut data = vec![0; 102];
    data.resize(128 + 68, 1);
    data.resize(224 + 20, 2);
    Gguf::new(&infos, &data)
        .key(key_u32("general.alignment", 32))
        .key(key("tokenizer.ggml.tokens", ARRAY, &tokens))
        .key(key("nested", ARRAY, &nested))
        .key(key("flag", BOOL, &[1]))
        .bytes()
}

fn sound_safetensors() -> Vec<u8> {
    let header = json!({
        "__metadata__": {"format": "pt"},
        "model.embed.weight": entry("BF16", &[3, 4], 0, 24),
        "b": entry("U8", &[5], 24, 29),
        "c": entry("F32", &[], 29, 33),
    });
    safetensors(&header, &[1; 33])
}

fn inside<'a>(tensors: impl Iterator<Item = &'a TensorInfo>, data_start: u64, file_len: u64) {
    let mut ranges: Vec<(u64, u64)> =
        tensors.map(|t| (t.offset, t.offset.checked_add(t.len).expect("the end fits"))).collect();
    ranges.sort_unstable();
    let mut covered = data_start;
    for (start, end) in ranges {
        assert!(start >= covered && end <= file_len, "{start}..{end} of {file_len}");
        covered = end;
    }
}

fn open_gguf(bytes: &[u8]) -> &'static str {
    match gguf::read_header(bytes, bytes.len() as u64, Path::new("f")) {
        Ok(h) => {
            inside(h.tensors.values(), h.data_start, bytes.len() as u64);
            "ok"
        }
        Err(e) => {
            assert!(!e.to_string().contains('\n'));
            e.class()
        }
    }
}

fn open_safetensors(bytes: &[u8]) -> &'static str {
    match st::read_header(bytes, bytes.len() as u64, Path::new("f")) {
        Ok(h) => {
            inside(h.tensors.values(), h.data_start, bytes.len() as u64);
            "ok"
        }
        Err(e) => {
            assert!(!e.to_string().contains('\n'));
            e.class()
        }
    }
}

/// Bytes overwritten, an 8-byte field set to an extreme, a cut, an insertion.
#[derive(Clone, Debug)]
enum Damage {
    Byte { at: prop::sample::Index, value: u8 },
    Field { at: prop::sample::Index, value: u64 },
    Cut { at: prop::sample::Index },
    Insert { at: prop::sample::Index, bytes: Vec<u8> },
}

impl Damage {
    fn apply(&self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        match self {
            Damage::Byte { at, value } => {
                let i = at.index(bytes.len());
                bytes[i] = *value;
            }
            Damage::Field { at, value } => {
                let i = at.index(bytes.len());
                let end = bytes.len().min(i + 8);
                bytes[i..end].copy_from_slice(&value.to_le_bytes()[..end - i]);
            }
            Damage::Cut { at } => bytes.truncate(at.index(bytes.len())),
            Damage::Insert { at, bytes: new } => {
                let i = at.index(bytes.len());
                bytes.splice(i..i, new.iter().copied());
            }
        }
    }
}

fn damage() -> impl Strategy<Value = Damage> {
    let at = any::<prop::sample::Index>;
    let extreme = prop_oneof![
        any::<u64>(),
        (0u32..64).prop_map(|b| 1 << b),
        (0u32..64).prop_map(|b| u64::MAX >> b),
        0u64..64,
    ];
    prop_oneof![
        4 => (at(), any::<u8>()).prop_map(|(at, value)| Damage::Byte { at, value }),
        3 => (at(), extreme).prop_map(|(at, value)| Damage::Field { at, value }),
        1 => at().prop_map(|at| Damage::Cut { at }),
        1 => (at(), prop::collection::vec(any::<u8>(), 1..20))
            .prop_map(|(at, bytes)| Damage::Insert { at, bytes }),
    ]
}

#[test]
fn sound_ones_open() {
    assert_eq!(open_gguf(&sound_gguf()), "ok");
    assert_eq!(open_safetensors(&sound_safetensors()), "ok");
    // As some writers say that there is no free text.
    let header = json!({"__metadata__": null, "w": entry("U8", &[5], 0, 5)});
    assert_eq!(open_safetensors(&safetensors(&header, &[1; 5])), "ok");
}

/// Every single cut and every single byte of each value, without chance.
#[test]
fn every_cut_is_noticed() {
    let (gguf, st) = (sound_gguf(), sound_safetensors());
    for len in 0..gguf.len() {
        assert_eq!(open_gguf(&gguf[..len]), "Truncated", "GGUF of {len} bytes");
    }
    for len in 0..st.len() {
        assert_eq!(open_safetensors(&st[..len]), "Truncated", "safetensors of {len} bytes");
    }
}

#[test]
fn every_flipped_byte() {
    for (sound, open) in [
        (sound_gguf(), open_gguf as fn(&[u8]) -> &'static str),
        (sound_safetensors(), open_safetensors),
    ] {
        for i in 0..sound.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff, sound[i] ^ 1, sound[i].wrapping_add(1)] {
                let mut bytes = sound.clone();
                bytes[i] = value;
                open(&bytes);
            }
        }
    }
}

/// Gives a byte at a time, with interruptions; then what `end` says.
struct Drip<'a> {
    bytes: &'a [u8],
    interrupt: bool,
    end: Option<ErrorKind>,
}

impl Read for Drip<'_> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        self.interrupt = !self.interrupt;
        match (self.interrupt, self.bytes.split_first(), self.end) {
            (true, _, _) => Err(ErrorKind::Interrupted.into()),
            (false, Some((&byte, rest)), _) => {
                out[0] = byte;
                self.bytes = rest;
                Ok(1)
            }
            (false, None, Some(kind)) => Err(kind.into()),
            (false, None, None) => Ok(0),
        }
    }
}

#[test]
fn short_reads_and_failures() {
    let bytes = sound_gguf();
    let len = bytes.len() as u64;
    let read = |bytes, end| {
        let drip = Drip { bytes, interrupt: false, end };
        gguf::read_header(drip, len, Path::new("f"))
    };
    let plain = gguf::read_header(&bytes[..], len, Path::new("f")).unwrap();
    let dripped = read(&bytes, None).unwrap();
    assert_eq!((plain.hash, plain.tensors), (dripped.hash, dripped.tensors));
    // The file shrinks, or the device fails, while its header is read.
    assert_eq!(read(&bytes[..100], None).unwrap_err().class(), "Truncated");
    let error = read(&bytes[..100], Some(ErrorKind::Other)).unwrap_err();
    assert_eq!(error.class(), "IoError");
    assert!(error.to_string().starts_with("f: cannot read"), "{error}");
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damaged_gguf(steps in prop::collection::vec(damage(), 1..5)) {
        let mut bytes = sound_gguf();
        steps.iter().for_each(|d| d.apply(&mut bytes));
        open_gguf(&bytes);
    }

    #[test]
    fn damaged_safetensors(steps in prop::collection::vec(damage(), 1..5)) {
        let mut bytes = sound_safetensors();
        steps.iter().for_each(|d| d.apply(&mut bytes));
        open_safetensors(&bytes);
    }

    #[test]
    fn noise(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        open_gguf(&bytes);
        open_safetensors(&bytes);
        open_gguf(&[&b"GGUF\x03\0\0\0"[..], &bytes].concat());
    }
}
