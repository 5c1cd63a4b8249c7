//! Finds weights in a catalog whatever container and dialect they come in, and keeps the books: a
//! tensor that no part of the model asked for is an error, and so is one that is not there.
//!
//! A logical matrix may be one tensor (GGUF, float safetensors), two (`_blocks`, `_scales`) or three
//! (MLX `weight`, `scales`, `biases`); [`Weights`] turns all of them into [`WeightRef`]s that address
//! the published bytes in place. Not here: which names a family uses.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::sync::Arc;

use forebay_files::{Catalog, Dtype, FileAccess, Source, TensorInfo};
use forebay_quant::{Format, ParamType};
use serde_json::Value;

use crate::error::ModelError;
use crate::spec::{Extent, Linear, Norm, PlaneRef, VectorRef, WeightRef};

/// Names of one thing in the two kinds of container; `{l}` and `{e}` stand for layer and expert.
#[derive(Clone, Copy, Debug)]
pub struct Name {
    /// In a safetensors folder, after the `model.` prefix (see [`Weights::new`]).
    pub hf: &'static str,
    /// In a GGUF.
    pub gguf: &'static str,
}

/// A stack of equally shaped matrices in one tensor (or one set of planes): `[count, rows, cols]`.
#[derive(Clone, Debug)]
pub struct Stack {
    name: Arc<str>,
    format: Format,
    count: usize,
    rows: usize,
    cols: usize,
    planes: Vec<StackPlane>,
}

#[derive(Clone, Debug)]
struct StackPlane {
    file: u32,
    offset: u64,
    row_bytes: u64,
}

impl Stack {
    /// Matrix `i` of the stack; `first` and `step` choose rows `first, first + step, …`, `rows` of them.
    pub fn rows(&self, i: usize, first: usize, step: usize, rows: usize) -> WeightRef {
        assert!(
            i < self.count && first + (rows - 1) * step < self.rows,
            "rows outside of {}",
            self.name
        );
        let planes = self.planes.iter().map(|p| {
            let start = (i * self.rows + first) as u64 * p.row_bytes;
            let len = ((rows - 1) * step + 1) as u64 * p.row_bytes;
            PlaneRef {
                extent: Extent { file: p.file, offset: p.offset + start, len },
                stride: step as u64 * p.row_bytes,
            }
        });
        WeightRef {
            name: self.name.clone(),
            format: self.format,
            rows,
            cols: self.cols,
            planes: planes.collect(),
        }
    }

    /// Matrix `i`, whole.
    pub fn matrix(&self, i: usize) -> WeightRef {
        self.rows(i, 0, 1, self.rows)
    }
}

/// The tensors of a checkpoint, with a mark on each that was asked for.
pub struct Weights<'a> {
    catalog: &'a Catalog,
    prefix: Cell<&'static str>,
    used: RefCell<BTreeSet<&'a str>>,
}

/// Where a folder's decoder lies: plain, or inside a multimodal checkpoint.
const PREFIXES: [&str; 4] = ["model.language_model.", MLX_PREFIX, "model.", ""];
const MLX_PREFIX: &str = "language_model.model.";
const MLX_BESIDE: &str = "language_model.";

impl<'a> Weights<'a> {
    /// Finds out under which prefix a folder's decoder weights are named.
    pub fn new(catalog: &'a Catalog) -> Weights<'a> {
        let has = |p: &str| catalog.tensors.contains_key(&format!("{p}embed_tokens.weight"));
        let prefix = match catalog.source {
            Source::Gguf { .. } => "",
            Source::Folder { .. } => PREFIXES.into_iter().find(|p| has(p)).unwrap_or("model."),
        };
        Weights { catalog, prefix: Cell::new(prefix), used: RefCell::default() }
    }

    fn is_gguf(&self) -> bool {
        matches!(self.catalog.source, Source::Gguf { .. })
    }

    /// The full name for this container. A folder name that begins with `/` is not under the decoder's
    /// prefix, but beside the decoder: at the top, or, in MLX folders of multimodal models, under
    /// `language_model.` with it.
    fn full(&self, name: Name, l: usize, e: usize) -> String {
        let (prefix, text) = match (self.is_gguf(), name.hf.strip_prefix('/')) {
            (true, _) => ("", name.gguf),
            (false, Some(beside)) if self.prefix.get() == MLX_PREFIX => {
                let base = format!("{MLX_BESIDE}{beside}.");
                let is_there = self.catalog.tensors.range(base.clone()..).next();
                let is_there = is_there.is_some_and(|(name, _)| name.starts_with(&base));
                (if is_there { MLX_BESIDE } else { "" }, beside)
            }
            (false, Some(beside)) => ("", beside),
            (false, None) => (self.prefix.get(), name.hf),
        };
        let text = text.replace("{l}", &l.to_string()).replace("{e}", &e.to_string());
        format!("{prefix}{text}")
    }

    /// Runs `f` with names of folders under another prefix: a part of the checkpoint beside the decoder.
    pub fn within<R>(&self, prefix: &'static str, f: impl FnOnce(&Self) -> R) -> R {
        let decoder = self.prefix.replace(prefix);
        let result = f(self);
        self.prefix.set(decoder);
        result
    }

    fn peek(&self, name: &str) -> Option<&'a TensorInfo> {
        self.catalog.tensors.get(name)
    }

    fn take(&self, name: &str) -> Option<&'a TensorInfo> {
        let t = self.peek(name)?;
        self.used.borrow_mut().insert(&t.name);
        Some(t)
    }

    /// Whether the matrix is there in any of its forms.
    pub fn has(&self, name: Name, l: usize) -> bool {
        let base = self.full(name, l, 0);
        ["", ".weight", "_blocks"].iter().any(|s| self.peek(&format!("{base}{s}")).is_some())
    }

    /// A stack `[count, rows, cols]`; with `count` 1 the tensor may also be `[rows, cols]`.
    pub fn stack(
        &self,
        name: Name,
        l: usize,
        e: usize,
        shape: [usize; 3],
    ) -> Result<Stack, ModelError> {
        let base = self.full(name, l, e);
        let [count, rows, cols] = shape;
        let stack = |t: &TensorInfo, format, planes| Stack {
            name: t.name.as_str().into(),
            format,
            count,
            rows,
            cols,
            planes,
        };
        let plane = |t: &TensorInfo| StackPlane {
            file: t.file,
            offset: t.offset,
            row_bytes: t.len / (count * rows) as u64,
        };
        // [E, rows, cols/32, 16] and [E, rows, cols/32]
        if let Some(blocks) = self.take(&format!("{base}_blocks")) {
            let scales = self.need(&format!("{base}_scales"))?;
            expect_dtype(blocks, Dtype::U8)?;
            expect_dtype(scales, Dtype::U8)?;
            expect_shape(blocks, &[count, rows, cols / 32, 16])?;
            expect_shape(scales, &[count, rows, cols / 32])?;
            whole_blocks(blocks, cols, Format::Mxfp4Split)?;
            return Ok(stack(blocks, Format::Mxfp4Split, vec![plane(blocks), plane(scales)]));
        }
        let weight = match self.take(&format!("{base}.weight")).or_else(|| self.take(&base)) {
            Some(t) => t,
            None => {
                return Err(ModelError::MissingTensor {
                    name: format!("{base}.weight"),
                    hint: String::new(),
                });
            }
        };
        if weight.dtype == Dtype::U32 {
            return self.mlx_stack(&base, weight, shape);
        }
        let format = float_or_ggml(weight)?;
        match (count, weight.shape.len()) {
            (1, 2) => expect_shape(weight, &[rows, cols])?,
            // llama-quantize drops the outer dimension of a single row.
            (1, 1) if rows == 1 => expect_shape(weight, &[cols])?,
            _ => expect_shape(weight, &[count, rows, cols])?,
        }
        whole_blocks(weight, cols, format)?;
        Ok(stack(weight, format, vec![plane(weight)]))
    }

    fn mlx_stack(
        &self,
        base: &str,
        weight: &TensorInfo,
        shape: [usize; 3],
    ) -> Result<Stack, ModelError> {
        let [count, rows, cols] = shape;
        let q = self.mlx_quantization(base)?;
        let scales = self.need(&format!("{base}.scales"))?;
        let lead: &[usize] = if weight.shape.len() == 2 && count == 1 { &[] } else { &[count] };
        let expect = |t: &TensorInfo, last: usize| expect_shape(t, &[lead, &[rows, last]].concat());
        expect(weight, cols * q.bits / 32)?;
        expect(scales, cols / q.group)?;
        let mut tensors = vec![weight, scales];
        let format = if q.mxfp4 {
            expect_dtype(scales, Dtype::U8)?;
            Format::Mxfp4Split
        } else {
            let biases = self.need(&format!("{base}.biases"))?;
            expect(biases, cols / q.group)?;
            expect_dtype(biases, scales.dtype)?;
            tensors.push(biases);
            let params = match scales.dtype {
                Dtype::Bf16 => ParamType::Bf16,
                Dtype::F16 => ParamType::F16,
                Dtype::F32 => ParamType::F32,
                _ => return Err(unsupported_type(scales)),
            };
            Format::MlxAffine { bits: q.bits as u8, group: q.group as u16, params }
        };
        whole_blocks(weight, cols, format)?;
        let planes = tensors.iter().map(|t| StackPlane {
            file: t.file,
            offset: t.offset,
            row_bytes: t.len / (count * rows) as u64,
        });
        Ok(Stack {
            name: weight.name.as_str().into(),
            format,
            count,
            rows,
            cols,
            planes: planes.collect(),
        })
    }

    /// `quantization` of config.json: the default, and exceptions by module name. An exception without
    /// `mode` is affine, whatever the default's mode.
    fn mlx_quantization(&self, base: &str) -> Result<MlxQuantization, ModelError> {
        let Source::Folder { config, .. } = &self.catalog.source else {
            unreachable!("U32 is a safetensors type")
        };
        let default = config.get("quantization").or_else(|| config.get("quantization_config"));
        let default =
            default.ok_or_else(|| ModelError::MissingKey { key: "quantization".into() })?;
        // Exceptions are keyed by the module's name in the file, or without the decoder's prefix.
        let exception = [base, base.strip_prefix(self.prefix.get()).unwrap_or(base)]
            .into_iter()
            .find_map(|key| default.get(key))
            .filter(|e| e.is_object());
        let q = exception.unwrap_or(default);
        let number = |key: &str| {
            let v = q.get(key).or_else(|| default.get(key)).and_then(Value::as_u64);
            v.map(|x| x as usize).ok_or_else(|| ModelError::MissingKey {
                key: format!("quantization.{key} of {base}"),
            })
        };
        let mode = q.get("mode").and_then(Value::as_str).unwrap_or("affine");
        let (bits, group) = (number("bits")?, number("group_size")?);
        let known = match mode {
            "affine" => Format::is_mlx_affine(bits, group),
            "mxfp4" => bits == 4 && group == 32,
            _ => false,
        };
        if !known {
            return Err(ModelError::Unsupported {
                what: format!(
                    "MLX quantisation of {base}: mode {mode}, {bits} bits, groups of {group}"
                ),
                detail: "known are affine 2, 3, 4, 5, 6 and 8 bits with groups of 32, 64, 128, and mxfp4"
                    .into(),
            });
        }
        Ok(MlxQuantization { bits, group, mxfp4: mode == "mxfp4" })
    }

    /// A matrix `[rows, cols]`.
    pub fn matrix(
        &self,
        name: Name,
        l: usize,
        rows: usize,
        cols: usize,
    ) -> Result<WeightRef, ModelError> {
        Ok(self.stack(name, l, 0, [1, rows, cols])?.matrix(0))
    }

    /// A matrix and its bias `[rows]`, where one is there.
    pub fn linear(
        &self,
        name: Name,
        l: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Linear, ModelError> {
        let weight = self.matrix(name, l, rows, cols)?;
        let bias = self.take(&format!("{}.bias", self.full(name, l, 0)));
        let bias = bias.map(|t| vector(t, &[rows])).transpose()?;
        Ok(Linear { weight, bias })
    }

    /// A vector `[len]` named `….weight` or as it is.
    pub fn vector(&self, name: Name, l: usize, len: usize) -> Result<VectorRef, ModelError> {
        let base = self.full(name, l, 0);
        let t = self.take(&format!("{base}.weight")).or_else(|| self.take(&base));
        vector(t.ok_or_else(|| missing(&format!("{base}.weight")))?, &[len])
    }

    /// All elements of a tensor that has one of `shapes`, in the order of the file.
    pub fn flat(&self, name: Name, l: usize, shapes: &[&[usize]]) -> Result<VectorRef, ModelError> {
        let base = self.full(name, l, 0);
        let t = self.take(&format!("{base}.weight")).or_else(|| self.take(&base));
        let t = t.ok_or_else(|| missing(&format!("{base}.weight")))?;
        let fits = |s: &&&[usize]| t.shape.iter().copied().eq(s.iter().map(|&x| x as u64));
        let shape = shapes.iter().find(fits).unwrap_or(&shapes[0]);
        vector(t, shape)
    }

    /// Whether the tensor is there with exactly this shape.
    pub fn has_shape(&self, name: Name, l: usize, shape: &[usize]) -> bool {
        let base = self.full(name, l, 0);
        let t = self.peek(&format!("{base}.weight")).or_else(|| self.peek(&base));
        t.is_some_and(|t| t.shape.iter().copied().eq(shape.iter().map(|&x| x as u64)))
    }

    /// An RMSNorm with plain weight `[len]`.
    pub fn norm(&self, name: Name, l: usize, len: usize, eps: f32) -> Result<Norm, ModelError> {
        let weight = Some(self.vector(name, l, len)?);
        Ok(Norm { weight, eps, plus_one: false, factor: 1.0 })
    }

    /// The first of `names` that is there, or the first of all.
    pub fn any(&self, names: &[Name], l: usize) -> Name {
        names.iter().copied().find(|n| self.has(*n, l)).unwrap_or(names[0])
    }

    /// The numbers of a small F32 table that a converter wrote and that decides the description itself
    /// (`rope_freqs`): `[len]`. None when it is not there.
    pub fn table(
        &self,
        access: &dyn FileAccess,
        name: Name,
        len: usize,
    ) -> Result<Option<Vec<f32>>, ModelError> {
        let base = self.full(name, 0, 0);
        let Some(t) = self.take(&format!("{base}.weight")) else { return Ok(None) };
        expect_dtype(t, Dtype::F32)?;
        expect_shape(t, &[len])?;
        let bytes = access.read_at(self.catalog.file_of(t), t.offset, len * 4);
        let bytes = bytes
            .map_err(|e| ModelError::Unreadable { name: t.name.clone(), why: e.to_string() })?;
        let numbers = bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        Ok(Some(numbers.collect()))
    }

    /// Row `i` of a stack of vectors `[count, len]`: elements `first, first + step, …`.
    pub fn vector_row(
        &self,
        name: Name,
        l: usize,
        shape: [usize; 2],
        part: VectorPart,
    ) -> Result<VectorRef, ModelError> {
        let t = self.need(&self.full(name, l, 0))?;
        let all = vector(t, &shape)?;
        let item = t.len / (shape[0] * shape[1]) as u64;
        let VectorPart { row, first, step, len } = part;
        let start = (row * shape[1] + first) as u64 * item;
        Ok(VectorRef {
            len,
            stride: step,
            extent: Extent {
                offset: all.extent.offset + start,
                len: ((len - 1) * step + 1) as u64 * item,
                ..all.extent
            },
            ..all
        })
    }

    /// Whether a tensor of exactly this name is there.
    pub fn has_tensor(&self, name: Name, l: usize) -> bool {
        self.peek(&self.full(name, l, 0)).is_some()
    }

    /// The output head `[vocab, d]`, or none when it is tied to the embedding.
    pub fn head(
        &self,
        name: Name,
        tied: Option<bool>,
        vocab: usize,
        d: usize,
    ) -> Result<Option<WeightRef>, ModelError> {
        let there = self.has(name, 0);
        if !there {
            return match (self.is_gguf(), tied) {
                (false, Some(false)) => Err(ModelError::MissingTensor {
                    name: format!("{}.weight", self.full(name, 0, 0)),
                    hint:
                        " (config.json says tie_word_embeddings is false; was a tied model meant?)"
                            .into(),
                }),
                _ => Ok(None),
            };
        }
        let head = self.matrix(name, 0, vocab, d)?;
        Ok((tied != Some(true)).then_some(head))
    }

    fn need(&self, name: &str) -> Result<&'a TensorInfo, ModelError> {
        self.take(name).ok_or_else(|| missing(name))
    }

    /// Ends the reading: tensors left are skipped with a note where `skip` knows what they are, and an
    /// error otherwise.
    pub fn finish(
        self,
        skip: &dyn Fn(&str) -> Option<&'static str>,
    ) -> Result<Vec<String>, ModelError> {
        let used = self.used.into_inner();
        let mut skipped = BTreeSet::new();
        let mut unread = Vec::new();
        for name in self.catalog.tensors.keys().filter(|n| !used.contains(n.as_str())) {
            match skip(name) {
                Some(what) => _ = skipped.insert(what),
                None => unread.push(name),
            }
        }
        match unread.first() {
            Some(first) => {
                Err(ModelError::UnreadTensors { count: unread.len(), first: first.to_string() })
            }
            None => Ok(skipped.into_iter().map(|w| format!("{w} skipped")).collect()),
        }
    }
}

/// Which elements of a stack of vectors: row `row`, elements `first, first + step, …`, `len` of them.
#[derive(Clone, Copy, Debug)]
pub struct VectorPart {
    /// Row.
    pub row: usize,
    /// First element.
    pub first: usize,
    /// Distance of elements.
    pub step: usize,
    /// Elements.
    pub len: usize,
}

struct MlxQuantization {
    bits: usize,
    group: usize,
    mxfp4: bool,
}

/// Parts of a checkpoint that every text family passes over.
pub fn skip_common(name: &str) -> Option<&'static str> {
    let has = |parts: &[&str]| {
        parts.iter().any(|p| name.starts_with(p) || name.contains(&format!(".{p}")))
    };
    if has(&[
        "vision_tower.",
        "vision_model.",
        "visual.",
        "multi_modal_projector.",
        "embed_vision.",
        "mm.",
    ]) {
        Some("vision weights")
    } else if has(&["audio_tower.", "embed_audio."]) {
        Some("audio weights")
    } else if name.ends_with("rotary_emb.inv_freq") {
        Some("stored rotary frequencies")
    } else {
        None
    }
}

fn missing(name: &str) -> ModelError {
    ModelError::MissingTensor { name: name.into(), hint: String::new() }
}

fn vector(t: &TensorInfo, shape: &[usize]) -> Result<VectorRef, ModelError> {
    let format = match t.dtype {
        Dtype::F32 => Format::F32,
        Dtype::F16 => Format::F16,
        Dtype::Bf16 => Format::Bf16,
        _ => return Err(unsupported_type(t)),
    };
    expect_shape(t, shape)?;
    Ok(VectorRef {
        name: t.name.as_str().into(),
        format,
        len: shape.iter().product(),
        extent: Extent { file: t.file, offset: t.offset, len: t.len },
        stride: 1,
    })
}

fn float_or_ggml(t: &TensorInfo) -> Result<Format, ModelError> {
    match t.dtype {
        Dtype::F32 => Ok(Format::F32),
        Dtype::F16 => Ok(Format::F16),
        Dtype::Bf16 => Ok(Format::Bf16),
        Dtype::Ggml(f) => Ok(f),
        _ => Err(unsupported_type(t)),
    }
}

fn unsupported_type(t: &TensorInfo) -> ModelError {
    let dtype = match t.dtype {
        Dtype::GgmlOther { name, .. } => name.to_string(),
        other => other.name(),
    };
    ModelError::UnsupportedType { name: t.name.clone(), dtype, known: known_formats() }
}

fn known_formats() -> String {
    let affine = |f: &&Format| matches!(f, Format::MlxAffine { .. });
    let mut names: Vec<_> = Format::all().iter().filter(|f| !affine(f)).map(|f| f.name()).collect();
    names.dedup();
    format!("{}, MLX 2, 3, 4, 5, 6 and 8 bits", names.join(", "))
}

fn expect_dtype(t: &TensorInfo, dtype: Dtype) -> Result<(), ModelError> {
    if t.dtype == dtype { Ok(()) } else { Err(unsupported_type(t)) }
}

fn expect_shape(t: &TensorInfo, shape: &[usize]) -> Result<(), ModelError> {
    if t.shape.iter().copied().eq(shape.iter().map(|&x| x as u64)) {
        return Ok(());
    }
    Err(ModelError::ShapeMismatch {
        name: t.name.clone(),
        found: t.shape.clone(),
        expected: shape.iter().map(|&x| x as u64).collect(),
    })
}

fn whole_blocks(t: &TensorInfo, cols: usize, format: Format) -> Result<(), ModelError> {
    let block = format.block_elements();
    if cols.is_multiple_of(block) {
        return Ok(());
    }
    Err(ModelError::BadValue {
        key: format!("row length of {}", t.name),
        found: cols.to_string(),
        expected: format!("a multiple of {block} for {}", format.name()),
    })
}
