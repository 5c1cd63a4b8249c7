//! Writes GGUF files (version 3; <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>).

use std::fs::File;
use std::io::{BufWriter, Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::Context;
use forebay_files::{Catalog, MetaValue, Source};

use crate::Options;
use crate::noise::{Fill, Noise};
use crate::shapes::{GgufShape, Tensor};

const ALIGNMENT: u64 = 32;

/// Writes a shape to one file.
///
/// # Errors
/// The tokenizer's model cannot be read, the file cannot be written.
pub fn write(
    shape: &GgufShape,
    models: &Path,
    out: &Path,
    options: Options,
    progress: &mut dyn FnMut(u64, u64),
) -> anyhow::Result<()> {
    let mut keys = shape.keys.clone();
    keys.extend(tokenizer(&models.join(shape.tokenizer), shape.vocab)?);
    let mut header = Vec::new();
    header.extend(b"GGUF");
    header.extend(3u32.to_le_bytes());
    header.extend((shape.tensors.len() as u64).to_le_bytes());
    header.extend((keys.len() as u64).to_le_bytes());
    for (key, value) in &keys {
        string(&mut header, key);
        header.extend(type_id(value).to_le_bytes());
        put(&mut header, value);
    }
    let mut offset = 0u64;
    for tensor in &shape.tensors {
        string(&mut header, &tensor.name);
        header.extend((tensor.dims.len() as u32).to_le_bytes());
        for dim in tensor.dims.iter().rev() {
            header.extend(dim.to_le_bytes());
        }
        header.extend(ggml_type(tensor.fill).to_le_bytes());
        header.extend(offset.to_le_bytes());
        offset = (offset + tensor.bytes()).next_multiple_of(ALIGNMENT);
    }
    header.resize(header.len().next_multiple_of(ALIGNMENT as usize), 0);
    let total = header.len() as u64 + offset;
    let mut file = BufWriter::with_capacity(1 << 20, File::create(out)?);
    file.write_all(&header)?;
    if options.sparse {
        file.into_inner()?.set_len(total)?;
        return Ok(());
    }
    let mut done = header.len() as u64;
    let mut noise = Noise::new();
    for Tensor { fill, dims, .. } in &shape.tensors {
        let padded = done.next_multiple_of(ALIGNMENT);
        file.write_all(&vec![0; (padded - done) as usize])?;
        done = padded;
        noise.fill(*fill, dims.iter().product(), &mut |bytes| {
            done += bytes.len() as u64;
            progress(done, total);
            file.write_all(bytes)
        })?;
    }
    let end = file.seek(SeekFrom::End(0))?;
    file.write_all(&vec![0; (total - end) as usize])?;
    file.flush()?;
    Ok(())
}

/// The tokenizer's keys of a small model, its vocabulary filled up to `vocab` with unused tokens.
fn tokenizer(model: &Path, vocab: u64) -> anyhow::Result<Vec<(String, MetaValue)>> {
    let catalog = Catalog::open(model).with_context(|| format!("reading {}", model.display()))?;
    let Source::Gguf { metadata } = catalog.source else {
        anyhow::bail!("{} is no GGUF file", model.display());
    };
    let keys = metadata.into_iter().filter(|(key, _)| key.starts_with("tokenizer."));
    let padded = keys.map(|(key, value)| {
        let value = match (key.as_str(), value) {
            ("tokenizer.ggml.tokens", MetaValue::Array(mut tokens)) => {
                let unused = tokens.len() as u64..vocab;
                tokens.extend(unused.map(|i| MetaValue::String(format!("<unused{i}>"))));
                MetaValue::Array(tokens)
            }
            // 5 is "unused" in llama.cpp's token types.
            ("tokenizer.ggml.token_type", MetaValue::Array(mut types)) => {
                types.resize(vocab as usize, MetaValue::I32(5));
                MetaValue::Array(types)
            }
            (_, value) => value,
        };
        (key, value)
    });
    Ok(padded.collect())
}

fn ggml_type(fill: Fill) -> u32 {
    match fill {
        Fill::F32 { .. } | Fill::F32Rows { .. } => 0,
        Fill::Q8_0 => 8,
        Fill::Q4K { .. } => 12,
        Fill::Q6K => 14,
        Fill::Mxfp4 => 39,
        Fill::Bf16 { .. } | Fill::Bf16Rows { .. } | Fill::Codes => {
            unreachable!("shapes for GGUF have none of these")
        }
    }
}

fn type_id(value: &MetaValue) -> u32 {
    match value {
        MetaValue::U8(_) => 0,
        MetaValue::I8(_) => 1,
        MetaValue::U16(_) => 2,
        MetaValue::I16(_) => 3,
        MetaValue::U32(_) => 4,
        MetaValue::I32(_) => 5,
        MetaValue::F32(_) => 6,
        MetaValue::Bool(_) => 7,
        MetaValue::String(_) => 8,
        MetaValue::Array(_) => 9,
        MetaValue::U64(_) => 10,
        MetaValue::I64(_) => 11,
        MetaValue::F64(_) => 12,
    }
}

fn string(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

fn put(out: &mut Vec<u8>, value: &MetaValue) {
    match value {
        MetaValue::U8(v) => out.push(*v),
        MetaValue::I8(v) => out.extend(v.to_le_bytes()),
        MetaValue::U16(v) => out.extend(v.to_le_bytes()),
        MetaValue::I16(v) => out.extend(v.to_le_bytes()),
        MetaValue::U32(v) => out.extend(v.to_le_bytes()),
        MetaValue::I32(v) => out.extend(v.to_le_bytes()),
        MetaValue::U64(v) => out.extend(v.to_le_bytes()),
        MetaValue::I64(v) => out.extend(v.to_le_bytes()),
        MetaValue::F32(v) => out.extend(v.to_le_bytes()),
        MetaValue::F64(v) => out.extend(v.to_le_bytes()),
        MetaValue::Bool(v) => out.push(*v as u8),
        MetaValue::String(s) => string(out, s),
        MetaValue::Array(items) => {
            let of = items.first().map_or(4, type_id);
            out.extend(of.to_le_bytes());
            out.extend((items.len() as u64).to_le_bytes());
            items.iter().for_each(|item| put(out, item));
        }
    }
}
