//! Writers of small GGUF and safetensors files, sound or not, for tests.
#![allow(dead_code, reason = "every test binary uses a part")]

use serde_json::{Value, json};

pub const U8: u32 = 0;
pub const U16: u32 = 2;
pub const U32: u32 = 4;
pub const I32: u32 = 5;
pub const BOOL: u32 = 7;
pub const STRING: u32 = 8;
pub const ARRAY: u32 = 9;

pub const T_F32: u32 = 0;
pub const T_Q4_0: u32 = 2;
pub const T_MXFP4: u32 = 39;

/// A length and the bytes.
pub fn string(bytes: impl AsRef<[u8]>) -> Vec<u8> {
    let bytes = bytes.as_ref();
    [&(bytes.len() as u64).to_le_bytes()[..], bytes].concat()
}

/// A key and a value whose bytes are given.
pub fn key(name: impl AsRef<[u8]>, value_type: u32, value: &[u8]) -> Vec<u8> {
    [&string(name)[..], &value_type.to_le_bytes(), value].concat()
}

pub fn key_u16(name: &str, value: u16) -> Vec<u8> {
    key(name, U16, &value.to_le_bytes())
}

pub fn key_u32(name: &str, value: u32) -> Vec<u8> {
    key(name, U32, &value.to_le_bytes())
}

/// Head of an array value: item type and length.
pub fn array_head(item_type: u32, count: u64) -> Vec<u8> {
    [&item_type.to_le_bytes()[..], &count.to_le_bytes()].concat()
}

/// A tensor info; dimensions innermost first, as in the file.
pub fn info(name: &str, dims: &[u64], ggml_type: u32, offset: u64) -> Vec<u8> {
    info_with(name, dims.len() as u32, dims, ggml_type, offset)
}

pub fn info_with(name: &str, n_dims: u32, dims: &[u64], ggml_type: u32, offset: u64) -> Vec<u8> {
    let mut out = string(name);
    out.extend(n_dims.to_le_bytes());
    dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
    out.extend(ggml_type.to_le_bytes());
    out.extend(offset.to_le_bytes());
    out
}

/// A GGUF, every field open to abuse.
pub struct Gguf {
    pub magic: [u8; 4],
    pub version: u32,
    pub n_keys: Option<u64>,
    pub n_tensors: Option<u64>,
    pub keys: Vec<Vec<u8>>,
    pub infos: Vec<Vec<u8>>,
    pub data: Vec<u8>,
    pub alignment: usize,
}

impl Gguf {
    /// One key that says the architecture, and the tensors given.
    pub fn new(infos: &[Vec<u8>], data: &[u8]) -> Gguf {
        Gguf {
            magic: *b"GGUF",
            version: 3,
            n_keys: None,
            n_tensors: None,
            keys: vec![key("general.architecture", STRING, &string("toy"))],
            infos: infos.to_vec(),
            data: data.to_vec(),
            alignment: 32,
        }
    }

    pub fn key(mut self, key: Vec<u8>) -> Gguf {
        self.keys.push(key);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = self.magic.to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend(self.n_tensors.unwrap_or(self.infos.len() as u64).to_le_bytes());
        out.extend(self.n_keys.unwrap_or(self.keys.len() as u64).to_le_bytes());
        self.keys.iter().for_each(|k| out.extend(k));
        self.infos.iter().for_each(|i| out.extend(i));
        out.resize(out.len().next_multiple_of(self.alignment), 0);
        out.extend(&self.data);
        out
    }
}

/// A sound file of four floats.
pub fn small_gguf() -> Gguf {
    Gguf::new(&[info("w", &[4], T_F32, 0)], &floats(&[1.0, 2.0, 3.0, 4.0]))
}

pub fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// A safetensors file with that header text.
pub fn safetensors_text(header: &[u8], data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes()[..], header, data].concat()
}

pub fn safetensors(header: &Value, data: &[u8]) -> Vec<u8> {
    safetensors_text(header.to_string().as_bytes(), data)
}

pub fn entry(dtype: &str, shape: &[u64], start: u64, end: u64) -> Value {
    json!({"dtype": dtype, "shape": shape, "data_offsets": [start, end]})
}
