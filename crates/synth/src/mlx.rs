//! Writes MLX folders: sharded safetensors (<https://github.com/huggingface/safetensors#format>) with
//! a config and the tokenizer of a small model.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use anyhow::Context;
use serde_json::{Map, Value, json};

use crate::Options;
use crate::noise::{Fill, Noise};
use crate::shapes::{MlxShape, Tensor};

/// Shards end after the tensor that takes them over this.
const SHARD_BYTES: u64 = 5_000_000_000;

/// Writes a shape to a folder.
///
/// # Errors
/// The tokenizer's model cannot be read, the files cannot be written.
pub fn write(
    shape: &MlxShape,
    models: &Path,
    out: &Path,
    options: Options,
    progress: &mut dyn FnMut(u64, u64),
) -> anyhow::Result<()> {
    fs::create_dir_all(out)?;
    let from = models.join(shape.tokenizer);
    for name in ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"] {
        let source = from.join(name);
        if source.exists() {
            fs::copy(&source, out.join(name))
                .with_context(|| format!("copying {}", source.display()))?;
        }
    }
    fs::write(out.join("config.json"), serde_json::to_string_pretty(&shape.config)?)?;
    let mut shards: Vec<Vec<&Tensor>> = vec![Vec::new()];
    let mut filled = 0;
    for tensor in &shape.tensors {
        if filled > SHARD_BYTES {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += tensor.bytes();
        shards.last_mut().expect("never empty").push(tensor);
    }
    let total: u64 = shape.tensors.iter().map(Tensor::bytes).sum();
    let mut index = Map::new();
    let (mut done, mut noise) = (0, Noise::new());
    let count = shards.len();
    for (i, tensors) in shards.iter().enumerate() {
        let name = format!("model-{:05}-of-{count:05}.safetensors", i + 1);
        for tensor in tensors {
            index.insert(tensor.name.clone(), json!(name));
        }
        let mut file = BufWriter::with_capacity(1 << 20, File::create(out.join(&name))?);
        let header = header(tensors);
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(header.as_bytes())?;
        if options.sparse {
            let bytes: u64 = tensors.iter().map(|t| t.bytes()).sum();
            file.into_inner()?.set_len(8 + header.len() as u64 + bytes)?;
            continue;
        }
        for Tensor { fill, dims, .. } in tensors {
            noise.fill(*fill, dims.iter().product(), &mut |bytes| {
                done += bytes.len() as u64;
                progress(done, total);
                file.write_all(bytes)
            })?;
        }
        file.flush()?;
    }
    let index = json!({ "metadata": { "total_size": total }, "weight_map": Value::Object(index) });
    fs::write(out.join("model.safetensors.index.json"), serde_json::to_string_pretty(&index)?)?;
    Ok(())
}

fn header(tensors: &[&Tensor]) -> String {
    let mut entries = Map::new();
    entries.insert("__metadata__".into(), json!({ "format": "mlx" }));
    let mut offset = 0;
    for tensor in tensors {
        let dtype = match tensor.fill {
            Fill::Codes => "U32",
            Fill::Bf16 { .. } | Fill::Bf16Rows { .. } => "BF16",
            Fill::F32 { .. } | Fill::F32Rows { .. } => "F32",
            _ => unreachable!("shapes for MLX have no GGUF blocks"),
        };
        let end = offset + tensor.bytes();
        entries.insert(
            tensor.name.clone(),
            json!({ "dtype": dtype, "shape": tensor.dims, "data_offsets": [offset, end] }),
        );
        offset = end;
    }
    Value::Object(entries).to_string()
}
