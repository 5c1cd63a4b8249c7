//! The header of one safetensors file.
//!
//! The layout (<https://github.com/huggingface/safetensors#format>): the length of the header as u64,
//! a JSON object of tensors, the data. As the format asks, names are unique and the data is covered
//! exactly: no two tensors share a byte and no byte is left over. A tensor may start at any byte.
//!
//! Not here: how the files of a folder fit together (`safetensors_set`).

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io::Read;
use std::path::Path;

use serde::de::{DeserializeSeed, Deserializer, Error, IgnoredAny, MapAccess, Visitor};

use crate::catalog::{Dtype, TensorInfo};
use crate::error::{FilesError, Hint, quoted, readable};
use crate::extents::{self, Extent, Gaps};
use crate::json;
use crate::reader::{HeaderReader, Place};

/// Longest header accepted, in bytes: the format's own limit.
pub const MAX_HEADER_BYTES: u64 = 100_000_000;
const LENGTH_BYTES: u64 = 8;
const MAX_DIMENSIONS: usize = 32;
/// The one name in the header that is not a tensor.
const METADATA: &str = "__metadata__";

/// A checked header.
#[derive(Clone, Debug)]
pub struct Header {
    /// All tensors; `file` is 0, offsets are absolute.
    pub tensors: BTreeMap<String, TensorInfo>,
    /// Absolute offset of the data section.
    pub data_start: u64,
    /// blake3 over the header and the length of the file.
    pub hash: [u8; 32],
}

/// Reads and checks the header of a file of `file_len` bytes. `file` is only used in messages.
pub fn read_header<R: Read>(inner: R, file_len: u64, file: &Path) -> Result<Header, FilesError> {
    let mut reader = HeaderReader::new(inner, file_len, file);
    let header_len = reader.u64(Place::Header)?;
    let text = reader.bytes(header_len, MAX_HEADER_BYTES, Place::Header)?;
    let data_start = LENGTH_BYTES + header_len;
    let available = file_len - data_start;

    if text.first() != Some(&b'{') {
        return Err(FilesError::BadJson {
            file: file.to_owned(),
            what: "header".into(),
            detail: format!("expected an object, found {}", readable(&text)),
            hint: Hint::of(&text),
        });
    }
    let mut tensors = parse(&text, file)?;
    let ranges =
        tensors.values().map(|t| Extent { name: &t.name, start: t.offset, end: t.offset + t.len });
    extents::check(file, available, ranges.collect(), Gaps::Forbidden)?;
    for tensor in tensors.values_mut() {
        tensor.offset += data_start;
    }
    Ok(Header { tensors, data_start, hash: reader.finish() })
}

/// The type of that name: what the catalog calls it, and bits of an element.
fn dtype(name: &str) -> Option<(Dtype, u64)> {
    Some(match name {
        "F32" => (Dtype::F32, 32),
        "F16" => (Dtype::F16, 16),
        "BF16" => (Dtype::Bf16, 16),
        "U8" => (Dtype::U8, 8),
        "U32" => (Dtype::U32, 32),
        "BOOL" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" | "F8_E5M2FNUZ" | "F8_E4M3FNUZ" => {
            (Dtype::Other { bytes: 1 }, 8)
        }
        "I16" | "U16" => (Dtype::Other { bytes: 2 }, 16),
        "I32" => (Dtype::Other { bytes: 4 }, 32),
        "I64" | "U64" | "F64" | "C64" => (Dtype::Other { bytes: 8 }, 64),
        "F4" => (Dtype::SubByte { bits: 4 }, 4),
        "F6_E2M3" | "F6_E3M2" => (Dtype::SubByte { bits: 6 }, 6),
        _ => return None,
    })
}

/// An entry as written.
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    offsets: Vec<u64>,
}

/// Tensors with offsets relative to the data section.
fn parse(text: &[u8], file: &Path) -> Result<BTreeMap<String, TensorInfo>, FilesError> {
    let current = RefCell::new(String::new());
    let fault = RefCell::new(None);
    let seed = HeaderSeed { file, current: &current, fault: &fault };
    json::parse_seed(text, file, "header", seed).map_err(|e| {
        // A typed fault goes before serde's text; without one, say at least near which tensor.
        let near = match current.take() {
            name if name.is_empty() => Place::Header.to_string(),
            name => Place::Tensor(&name).to_string(),
        };
        match (fault.take(), e) {
            (Some(fault), _) => fault,
            (None, FilesError::BadValue { file, expected, found, .. }) => {
                FilesError::BadValue { file, what: near, expected, found }
            }
            (None, FilesError::BadJson { file, detail, hint, .. }) => {
                FilesError::BadJson { file, what: near, detail, hint }
            }
            (None, other) => other,
        }
    })
}

/// Checks one entry by itself: everything but its place among the others.
fn tensor(name: &str, entry: Entry, file: &Path) -> Result<TensorInfo, FilesError> {
    let bad_value = |expected: &str, found: String| FilesError::BadValue {
        file: file.to_owned(),
        what: Place::Tensor(name).to_string(),
        expected: expected.to_owned(),
        found,
    };
    let Entry { dtype: dtype_name, shape, offsets } = entry;
    let (dtype, bits) = dtype(&dtype_name).ok_or_else(|| FilesError::UnknownType {
        file: file.to_owned(),
        tensor: name.to_owned(),
        found: quoted(&dtype_name),
    })?;
    let &[start, end] = offsets.as_slice() else {
        return Err(bad_value("two data_offsets", format!("{}", offsets.len())));
    };
    if start > end {
        return Err(bad_value("data_offsets in ascending order", format!("{start} and {end}")));
    }
    let overflow = || FilesError::Overflow {
        file: file.to_owned(),
        tensor: name.to_owned(),
        shape: shape.clone(),
    };
    // Every partial product has to fit, so that nobody who multiplies in another order is surprised
    // by a zero that comes late.
    let product =
        |init: u64| shape.iter().filter(|&&d| d != 0).try_fold(init, |n, &d| n.checked_mul(d));
    let mut total_bits = product(bits).ok_or_else(overflow)?;
    if shape.contains(&0) {
        total_bits = 0;
    }
    if total_bits % 8 != 0 {
        return Err(FilesError::BadDimension {
            file: file.to_owned(),
            tensor: name.to_owned(),
            expected: format!("whole bytes of {bits}-bit elements"),
            found: format!("{shape:?}"),
        });
    }
    let expected = total_bits / 8;
    let found = end - start;
    if expected != found {
        let (file, tensor) = (file.to_owned(), name.to_owned());
        return Err(FilesError::SizeMismatch { file, tensor, expected, found });
    }
    Ok(TensorInfo { name: name.to_owned(), shape, dtype, file: 0, offset: start, len: found })
}

/// Reads the header's object straight into checked tensors. Faults with a class of their own go
/// through `fault`, since a serde error carries nothing but text.
#[derive(Clone, Copy)]
struct HeaderSeed<'a> {
    file: &'a Path,
    /// The name last seen.
    current: &'a RefCell<String>,
    fault: &'a RefCell<Option<FilesError>>,
}

impl HeaderSeed<'_> {
    fn fail<E: Error>(&self, fault: FilesError) -> E {
        self.fault.replace(Some(fault));
        E::custom("refused")
    }
}

impl<'de> DeserializeSeed<'de> for HeaderSeed<'_> {
    type Value = BTreeMap<String, TensorInfo>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for HeaderSeed<'_> {
    type Value = BTreeMap<String, TensorInfo>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensors")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut tensors = BTreeMap::new();
        let mut metadata_seen = false;
        while let Some(name) = map.next_key::<String>()? {
            self.current.replace(name.clone());
            if name == METADATA {
                if std::mem::replace(&mut metadata_seen, true) {
                    let file = self.file.to_owned();
                    return Err(self.fail(FilesError::DuplicateKey { file, key: name }));
                }
                map.next_value_seed(MetadataSeed(self))?;
                continue;
            }
            if tensors.contains_key(&name) {
                let (file, tensor) = (self.file.to_owned(), name);
                return Err(self.fail(FilesError::DuplicateName { file, tensor, other: None }));
            }
            let entry = map.next_value_seed(EntrySeed(self))?;
            let info = tensor(&name, entry, self.file).map_err(|e| self.fail(e))?;
            tensors.insert(name, info);
        }
        Ok(tensors)
    }
}

/// The free-text part: read over, but not with a key twice.
struct MetadataSeed<'a>(HeaderSeed<'a>);

impl<'de> DeserializeSeed<'de> for MetadataSeed<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for MetadataSeed<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of texts")
    }

    /// As some writers say that there is none.
    fn visit_unit<E>(self) -> Result<(), E> {
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut seen = BTreeSet::new();
        while let Some(key) = map.next_key::<String>()? {
            map.next_value::<IgnoredAny>()?;
            if seen.contains(&key) {
                let file = self.0.file.to_owned();
                return Err(self.0.fail(FilesError::DuplicateKey { file, key }));
            }
            seen.insert(key);
        }
        Ok(())
    }
}

/// One tensor's object. Fields that the format does not name are read over.
struct EntrySeed<'a>(HeaderSeed<'a>);

impl EntrySeed<'_> {
    fn tensor(&self) -> String {
        self.0.current.borrow().clone()
    }

    fn set<T, E: Error>(&self, slot: &mut Option<T>, value: T, field: &str) -> Result<(), E> {
        if slot.replace(value).is_none() {
            return Ok(());
        }
        Err(self.0.fail(FilesError::DuplicateKey {
            file: self.0.file.to_owned(),
            key: format!("{}.{field}", self.tensor()),
        }))
    }

    fn need<T, E: Error>(&self, slot: Option<T>, field: &str) -> Result<T, E> {
        slot.ok_or_else(|| {
            self.0.fail(FilesError::MissingKey {
                file: self.0.file.to_owned(),
                key: format!("{}.{field}", self.tensor()),
            })
        })
    }
}

impl<'de> DeserializeSeed<'de> for EntrySeed<'_> {
    type Value = Entry;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Entry, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for EntrySeed<'_> {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with dtype, shape and data_offsets")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entry, A::Error> {
        let (mut dtype, mut shape, mut offsets) = (None, None, None);
        while let Some(field) = map.next_key::<String>()? {
            match field.as_str() {
                "dtype" => self.set(&mut dtype, map.next_value()?, &field)?,
                "shape" => self.set(&mut shape, map.next_value::<Numbers>()?.0, &field)?,
                "data_offsets" => self.set(&mut offsets, map.next_value::<Numbers>()?.0, &field)?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(Entry {
            dtype: self.need(dtype, "dtype")?,
            shape: self.need(shape, "shape")?,
            offsets: self.need(offsets, "data_offsets")?,
        })
    }
}

/// A short list of numbers.
struct Numbers(Vec<u64>);

impl<'de> serde::Deserialize<'de> for Numbers {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Numbers, D::Error> {
        struct Short;
        impl<'de> Visitor<'de> for Short {
            type Value = Numbers;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "a list of at most {MAX_DIMENSIONS} whole numbers")
            }

            fn visit_seq<A: serde::de::SeqAccess<'de>>(
                self,
                mut seq: A,
            ) -> Result<Numbers, A::Error> {
                let mut numbers = Vec::new();
                while let Some(number) = seq.next_element()? {
                    if numbers.len() == MAX_DIMENSIONS {
                        return Err(A::Error::invalid_length(MAX_DIMENSIONS + 1, &self));
                    }
                    numbers.push(number);
                }
                Ok(Numbers(numbers))
            }
        }
        deserializer.deserialize_seq(Short)
    }
}
