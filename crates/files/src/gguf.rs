//! The header of one GGUF file, versions 2 and 3, little endian.
//!
//! The layout is that of the GGUF specification
//! (<https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>): magic, version, counts, key/value
//! pairs, tensor infos, padding to the alignment, data. What the specification leaves open follows
//! ggml's own reader: at most four dimensions, an alignment that is a power of two.
//!
//! Not here: how the files of a split set fit together (`gguf_split`), what keys mean (`forebay-models`).

use std::collections::BTreeMap;
use std::io::Read;
use std::path::Path;

use crate::catalog::{MetaValue, TensorInfo};
use crate::error::{FilesError, Hint, readable};
use crate::extents::{self, Extent, Gaps};
use crate::ggml_types;
use crate::reader::{HeaderReader, Place};

/// The first four bytes.
pub const MAGIC: &[u8; 4] = b"GGUF";

/// Key that changes the alignment of the data section and of every tensor.
pub const ALIGNMENT_KEY: &str = "general.alignment";
const DEFAULT_ALIGNMENT: u64 = 32;

// Largest values accepted. Published files stay far below: some 60 keys, tens of thousands of
// tensors, vocabularies of 260,000 tokens with twice as many merges.
const MAX_KEYS: u64 = 1 << 16;
const MAX_TENSORS: u64 = 1 << 20;
const MAX_NAME_BYTES: u64 = (1 << 16) - 1;
const MAX_STRING_BYTES: u64 = 16 << 20;
/// Over all arrays of a file: bounds the memory of the parsed form.
const MAX_ARRAY_ITEMS: u64 = 8 << 20;
const MAX_ARRAY_DEPTH: u64 = 4;
const MAX_DIMENSIONS: u32 = 4;

// Fewest bytes that an entry can take: a count beyond `remaining / MIN` cannot be true.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;

/// A checked header.
#[derive(Clone, Debug)]
pub struct Header {
    /// Version of the format.
    pub version: u32,
    /// All keys.
    pub metadata: BTreeMap<String, MetaValue>,
    /// All tensors; `file` is 0, offsets are absolute.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// Alignment of the data section and of every tensor.
    pub alignment: u64,
    /// Absolute offset of the data section.
    pub data_start: u64,
    /// blake3 over the header and the length of the file.
    pub hash: [u8; 32],
}

/// Reads and checks the header of a file of `file_len` bytes. `file` is only used in messages.
pub fn read_header<R: Read>(inner: R, file_len: u64, file: &Path) -> Result<Header, FilesError> {
    let mut parser =
        Parser { reader: HeaderReader::new(inner, file_len, file), items_left: MAX_ARRAY_ITEMS };
    let version = parser.version()?;
    let n_tensors = parser.reader.u64(Place::Header)?;
    let n_keys = parser.reader.u64(Place::Header)?;
    parser.check_count("number of tensors", n_tensors, MAX_TENSORS, MIN_TENSOR_BYTES)?;
    parser.check_count("number of keys", n_keys, MAX_KEYS, MIN_KEY_BYTES)?;
    let metadata = parser.metadata(n_keys)?;
    let alignment = alignment(&metadata, file)?;
    let mut tensors = parser.tensors(n_tensors, alignment)?;

    let header_len = parser.reader.position();
    // The header lies in the file and the alignment is at most 2^32: no overflow.
    let data_start = header_len.next_multiple_of(alignment);
    let available = file_len.saturating_sub(data_start);
    let ranges =
        tensors.values().map(|t| Extent { name: &t.name, start: t.offset, end: t.offset + t.len });
    extents::check(file, available, ranges.collect(), Gaps::Padded { alignment })?;
    for tensor in tensors.values_mut() {
        tensor.offset += data_start;
    }
    let hash = parser.reader.finish();
    Ok(Header { version, metadata, tensors, alignment, data_start, hash })
}

fn alignment(metadata: &BTreeMap<String, MetaValue>, file: &Path) -> Result<u64, FilesError> {
    let Some(value) = metadata.get(ALIGNMENT_KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    let MetaValue::U32(alignment) = *value else {
        return Err(FilesError::BadValue {
            file: file.to_owned(),
            what: Place::Key(ALIGNMENT_KEY).to_string(),
            expected: "a u32".into(),
            found: kind(value).into(),
        });
    };
    if !alignment.is_power_of_two() {
        let (file, key) = (file.to_owned(), ALIGNMENT_KEY.to_owned());
        return Err(FilesError::BadAlignment { file, key, found: alignment.into() });
    }
    Ok(alignment.into())
}

fn kind(value: &MetaValue) -> &'static str {
    match value {
        MetaValue::U8(_) => "a u8",
        MetaValue::I8(_) => "an i8",
        MetaValue::U16(_) => "a u16",
        MetaValue::I16(_) => "an i16",
        MetaValue::U32(_) => "a u32",
        MetaValue::I32(_) => "an i32",
        MetaValue::U64(_) => "a u64",
        MetaValue::I64(_) => "an i64",
        MetaValue::F32(_) => "an f32",
        MetaValue::F64(_) => "an f64",
        MetaValue::Bool(_) => "a bool",
        MetaValue::String(_) => "a string",
        MetaValue::Array(_) => "an array",
    }
}

/// Types of metadata values, with the fewest bytes that a value takes.
#[derive(Clone, Copy)]
enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    fn from_id(id: u32) -> Option<ValueType> {
        use ValueType::*;
        const BY_ID: [ValueType; 13] =
            [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64];
        BY_ID.get(id as usize).copied()
    }

    fn min_bytes(self) -> u64 {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => 1,
            U16 | I16 => 2,
            U32 | I32 | F32 => 4,
            U64 | I64 | F64 | String => 8,
            Array => 4 + 8,
        }
    }
}

struct Parser<R> {
    reader: HeaderReader<R>,
    items_left: u64,
}

impl<R: Read> Parser<R> {
    fn version(&mut self) -> Result<u32, FilesError> {
        let magic = self.reader.array::<4>(Place::Header)?;
        if &magic != MAGIC {
            return Err(FilesError::BadMagic {
                file: self.reader.file().to_owned(),
                expected: "\"GGUF\"",
                found: readable(&magic),
                hint: Hint::of(&magic),
            });
        }
        let version = self.reader.u32(Place::Header)?;
        let file = || self.reader.file().to_owned();
        match version {
            2 | 3 => Ok(version),
            // A small number written the other way round.
            _ if version != 0 && version & 0xffff == 0 => {
                Err(FilesError::WrongEndian { file: file() })
            }
            _ => Err(FilesError::BadVersion { file: file(), found: version }),
        }
    }

    fn check_count(
        &self,
        what: &str,
        count: u64,
        limit: u64,
        min_bytes: u64,
    ) -> Result<(), FilesError> {
        if count > limit {
            return Err(self.reader.limit(what.to_owned(), limit, count));
        }
        self.reader.require(count * min_bytes, Place::Header)
    }

    fn metadata(&mut self, n_keys: u64) -> Result<BTreeMap<String, MetaValue>, FilesError> {
        let mut metadata = BTreeMap::new();
        for index in 0..n_keys {
            let key = self.string(MAX_NAME_BYTES, Place::KeyName { index })?;
            if metadata.contains_key(&key) {
                let file = self.reader.file().to_owned();
                return Err(FilesError::DuplicateKey { file, key });
            }
            let value_type = self.value_type(Place::Key(&key))?;
            let value = self.value(value_type, 0, Place::Key(&key))?;
            metadata.insert(key, value);
        }
        Ok(metadata)
    }

    fn value_type(&mut self, place: Place<'_>) -> Result<ValueType, FilesError> {
        let id = self.reader.u32(place)?;
        ValueType::from_id(id)
            .ok_or_else(|| self.bad_value(place, "a value type from 0 to 12", id.to_string()))
    }

    fn bad_value(&self, place: Place<'_>, expected: &str, found: String) -> FilesError {
        FilesError::BadValue {
            file: self.reader.file().to_owned(),
            what: place.to_string(),
            expected: expected.to_owned(),
            found,
        }
    }

    fn value(
        &mut self,
        value_type: ValueType,
        depth: u64,
        place: Place<'_>,
    ) -> Result<MetaValue, FilesError> {
        let r = &mut self.reader;
        Ok(match value_type {
            ValueType::U8 => MetaValue::U8(u8::from_le_bytes(r.array(place)?)),
            ValueType::I8 => MetaValue::I8(i8::from_le_bytes(r.array(place)?)),
            ValueType::U16 => MetaValue::U16(u16::from_le_bytes(r.array(place)?)),
            ValueType::I16 => MetaValue::I16(i16::from_le_bytes(r.array(place)?)),
            ValueType::U32 => MetaValue::U32(u32::from_le_bytes(r.array(place)?)),
            ValueType::I32 => MetaValue::I32(i32::from_le_bytes(r.array(place)?)),
            ValueType::U64 => MetaValue::U64(u64::from_le_bytes(r.array(place)?)),
            ValueType::I64 => MetaValue::I64(i64::from_le_bytes(r.array(place)?)),
            ValueType::F32 => MetaValue::F32(f32::from_le_bytes(r.array(place)?)),
            ValueType::F64 => MetaValue::F64(f64::from_le_bytes(r.array(place)?)),
            ValueType::Bool => match r.array(place)? {
                [0] => MetaValue::Bool(false),
                [1] => MetaValue::Bool(true),
                [other] => return Err(self.bad_value(place, "a bool, 0 or 1", other.to_string())),
            },
            ValueType::String => MetaValue::String(self.string(MAX_STRING_BYTES, place)?),
            ValueType::Array => self.array(depth, place)?,
        })
    }

    /// `depth` arrays enclose this one; it is bounded, so the recursion is too.
    fn array(&mut self, depth: u64, place: Place<'_>) -> Result<MetaValue, FilesError> {
        if depth == MAX_ARRAY_DEPTH {
            let what = format!("array depth of {place}");
            return Err(self.reader.limit(what, MAX_ARRAY_DEPTH, depth + 1));
        }
        let item_type = self.value_type(place)?;
        let count = self.reader.u64(place)?;
        if count > self.items_left {
            let what = format!("array length of {place}");
            return Err(self.reader.limit(what, self.items_left, count));
        }
        self.reader.require(count * item_type.min_bytes(), place)?;
        self.items_left -= count;
        let mut items = Vec::with_capacity(count as usize);
        for _ in 0..count {
            items.push(self.value(item_type, depth + 1, place)?);
        }
        Ok(MetaValue::Array(items))
    }

    fn string(&mut self, limit: u64, place: Place<'_>) -> Result<String, FilesError> {
        let len = self.reader.u64(place)?;
        let bytes = self.reader.bytes(len, limit, place)?;
        String::from_utf8(bytes).map_err(|e| FilesError::BadUtf8 {
            file: self.reader.file().to_owned(),
            what: place.to_string(),
            found: readable(e.as_bytes()),
        })
    }

    /// Tensor infos; offsets stay relative to the data section.
    fn tensors(
        &mut self,
        n_tensors: u64,
        alignment: u64,
    ) -> Result<BTreeMap<String, TensorInfo>, FilesError> {
        let mut tensors = BTreeMap::new();
        for index in 0..n_tensors {
            let name = self.string(MAX_NAME_BYTES, Place::TensorName { index })?;
            // Before its offset is looked at: a duplicate is not an offset fault.
            if tensors.contains_key(&name) {
                let file = self.reader.file().to_owned();
                return Err(FilesError::DuplicateName { file, tensor: name, other: None });
            }
            let tensor = self.tensor(name, alignment)?;
            tensors.insert(tensor.name.clone(), tensor);
        }
        Ok(tensors)
    }

    fn tensor(&mut self, name: String, alignment: u64) -> Result<TensorInfo, FilesError> {
        let place = Place::Tensor(&name);
        let n_dimensions = self.reader.u32(place)?;
        if n_dimensions > MAX_DIMENSIONS {
            let expected = format!("at most {MAX_DIMENSIONS} dimensions");
            return Err(self.bad_dimension(&name, expected, n_dimensions.to_string()));
        }
        // In the file the innermost dimension comes first.
        let mut shape = vec![0; n_dimensions as usize];
        for dimension in shape.iter_mut().rev() {
            *dimension = self.reader.u64(place)?;
        }
        let id = self.reader.u32(place)?;
        let offset = self.reader.u64(place)?;
        let file = || self.reader.file().to_owned();

        let ggml_type = ggml_types::by_id(id).ok_or_else(|| FilesError::UnknownType {
            file: file(),
            tensor: name.clone(),
            found: id.to_string(),
        })?;
        if shape.contains(&0) {
            let expected = "no dimension of 0".to_owned();
            return Err(self.bad_dimension(&name, expected, format!("{shape:?}")));
        }
        let block = u64::from(ggml_type.elements);
        let cols = shape.last().copied().unwrap_or(1);
        if cols % block != 0 {
            let expected = format!("rows in {} blocks of {block}", ggml_type.name);
            return Err(self.bad_dimension(&name, expected, format!("rows of {cols}")));
        }
        let overflow =
            || FilesError::Overflow { file: file(), tensor: name.clone(), shape: shape.clone() };
        let elements =
            shape.iter().try_fold(1u64, |n, &d| n.checked_mul(d)).ok_or_else(overflow)?;
        let len = (elements / block).checked_mul(ggml_type.bytes.into()).ok_or_else(overflow)?;
        if offset % alignment != 0 {
            return Err(FilesError::Misaligned { file: file(), tensor: name, offset, alignment });
        }
        // The end of the range is formed later, so it must fit.
        offset.checked_add(len).ok_or_else(overflow)?;
        Ok(TensorInfo { shape, dtype: ggml_type.dtype(), file: 0, offset, len, name })
    }

    fn bad_dimension(&self, tensor: &str, expected: String, found: String) -> FilesError {
        FilesError::BadDimension {
            file: self.reader.file().to_owned(),
            tensor: tensor.to_owned(),
            expected,
            found,
        }
    }
}
