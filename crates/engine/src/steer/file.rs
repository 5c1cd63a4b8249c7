//! Files of directions: safetensors, and the GGUF files that llama.cpp calls control vectors.
//!
//! - GGUF: tensors `direction.N` `[d]`; `N` is the layer after which it acts, counted from 0 like all layers here. llama.cpp has no place
//!   for layer 0, so its files begin with `direction.1`.
//! - safetensors: `direction.N` or `layers.N` `[d]`, `N` from 0; or one `direction` `[d]` for all layers; or `directions` `[layers, d]`.
//!
//! A vector is small, so the whole of it is read; what a file may claim is bounded by the model before anything is read.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::ops::RangeInclusive;
use std::path::Path;

use forebay_files::{TensorInfo, gguf, safetensors};
use forebay_quant::Format;

use super::SteerError;

/// The model that directions are for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Layers.
    pub layers: usize,
    /// `d`
    pub width: usize,
}

/// What a tensor is for.
enum Use {
    /// One layer.
    Layer(usize),
    /// Every layer.
    All,
    /// A row for each layer.
    Rows,
}

/// Directions by layer, `[d]` each, of the layers asked for.
pub(crate) fn read(
    path: &Path,
    shape: Shape,
    layers: Option<&RangeInclusive<usize>>,
) -> Result<BTreeMap<usize, Vec<f32>>, SteerError> {
    let io = |error| SteerError::Io { file: path.to_owned(), error };
    let mut file = File::open(path).map_err(io)?;
    let len = file.metadata().map_err(io)?.len();
    let mut magic = [0; 4];
    let is_gguf = len >= 4 && file.read_exact(&mut magic).is_ok() && &magic == b"GGUF";
    file.rewind().map_err(io)?;
    let tensors = match is_gguf {
        true => gguf::read_header(&mut file, len, path)?.tensors,
        false => safetensors::read_header(&mut file, len, path)?.tensors,
    };
    let mut found = BTreeMap::new();
    for tensor in tensors.values() {
        let Some(purpose) = purpose(&tensor.name, is_gguf) else { continue };
        let one = [shape.width as u64];
        let all = [shape.layers as u64, shape.width as u64];
        let wanted = if matches!(purpose, Use::Rows) { &all[..] } else { &one[..] };
        if tensor.shape != wanted {
            return Err(SteerError::Shape {
                file: path.to_owned(),
                tensor: tensor.name.clone(),
                expected: wanted.to_vec(),
                found: tensor.shape.clone(),
            });
        }
        let values = values(&mut file, tensor, path)?;
        let rows: Vec<(usize, &[f32])> = match purpose {
            Use::Layer(0) if is_gguf => {
                return Err(SteerError::Layer {
                    file: path.to_owned(),
                    tensor: tensor.name.clone(),
                    expected: format!("1 to {}", shape.layers - 1),
                });
            }
            Use::Layer(layer) if layer >= shape.layers => {
                return Err(SteerError::Layer {
                    file: path.to_owned(),
                    tensor: tensor.name.clone(),
                    expected: format!("{} to {}", usize::from(is_gguf), shape.layers - 1),
                });
            }
            Use::Layer(layer) => vec![(layer, &values[..])],
            Use::All => (0..shape.layers).map(|layer| (layer, &values[..])).collect(),
            Use::Rows => values.chunks_exact(shape.width).enumerate().collect(),
        };
        for (layer, row) in rows {
            if layers.is_none_or(|asked| asked.contains(&layer))
                && found.insert(layer, row.to_vec()).is_some()
            {
                return Err(SteerError::Twice { file: path.to_owned(), layer });
            }
        }
    }
    if found.is_empty() {
        return Err(SteerError::Empty {
            file: path.to_owned(),
            layers: layers.map(|asked| (*asked.start(), *asked.end())),
        });
    }
    Ok(found)
}

/// What a tensor of this name is for; none: nothing here.
fn purpose(name: &str, is_gguf: bool) -> Option<Use> {
    let number = |text: &str| {
        let plain = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        // A number that is too large for any model is still a layer, and is refused as one.
        plain.then(|| text.parse().unwrap_or(usize::MAX))
    };
    if let Some(layer) = name.strip_prefix("direction.").and_then(number) {
        return Some(Use::Layer(layer));
    }
    if is_gguf {
        return None;
    }
    match name {
        "direction" => Some(Use::All),
        "directions" => Some(Use::Rows),
        _ => name.strip_prefix("layers.").and_then(number).map(Use::Layer),
    }
}

/// All elements as f32.
fn values(file: &mut File, tensor: &TensorInfo, path: &Path) -> Result<Vec<f32>, SteerError> {
    let bad = |expected: &'static str, found: String| SteerError::Values {
        file: path.to_owned(),
        tensor: tensor.name.clone(),
        expected,
        found,
    };
    let format = tensor.dtype.format();
    let format = format.filter(|f| matches!(f, Format::F32 | Format::F16 | Format::Bf16));
    let format = format.ok_or_else(|| bad("F32, F16 or BF16", tensor.dtype.name()))?;
    let mut bytes = vec![0; tensor.len as usize];
    let io = |error| SteerError::Io { file: path.to_owned(), error };
    file.seek(SeekFrom::Start(tensor.offset)).map_err(io)?;
    file.read_exact(&mut bytes).map_err(io)?;
    let mut values = vec![0.0; tensor.elements() as usize];
    forebay_quant::decode_floats(format, &bytes, &mut values);
    match values.iter().find(|v| !v.is_finite()) {
        Some(v) => Err(bad("finite numbers", v.to_string())),
        None => Ok(values),
    }
}
