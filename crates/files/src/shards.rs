//! Names of the files of a set: `prefix-00001-of-00003.gguf`, counted from 1.

use std::collections::BTreeSet;
use std::path::{Component, Path};

/// A shard's name taken apart. Widths are kept: some publishers write `-00001-of-000163`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardName {
    prefix: String,
    number_width: usize,
    count_text: String,
    extension: String,
    /// From 1.
    pub number: u64,
    /// Files of the set.
    pub count: u64,
}

impl ShardName {
    /// `None` if the name does not follow the rule.
    pub fn parse(name: &str) -> Option<ShardName> {
        let (stem, extension) = name.rsplit_once('.')?;
        let (rest, count_text) = stem.rsplit_once("-of-")?;
        let (prefix, number_text) = rest.rsplit_once('-')?;
        let number = digits(number_text)?;
        let count = digits(count_text)?;
        if number == 0 || number > count {
            return None;
        }
        Some(ShardName {
            prefix: prefix.to_owned(),
            number_width: number_text.len(),
            count_text: count_text.to_owned(),
            extension: extension.to_owned(),
            number,
            count,
        })
    }

    /// Name of shard `number` (from 1) of the same set.
    pub fn sibling(&self, number: u64) -> String {
        let (prefix, width, extension) = (&self.prefix, self.number_width, &self.extension);
        format!("{prefix}-{number:0width$}-of-{}.{extension}", self.count_text)
    }
}

/// Four to six digits: more files than that no set has.
fn digits(text: &str) -> Option<u64> {
    let plausible = (4..=6).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_digit());
    plausible.then(|| text.parse().ok()).flatten()
}

/// First file of each set among names of one extension; a file outside any set is a set of its own.
pub fn first_files<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let firsts: BTreeSet<String> = names
        .map(|name| ShardName::parse(name).map_or_else(|| name.to_owned(), |s| s.sibling(1)))
        .collect();
    firsts.into_iter().collect()
}

/// Whether the name has the extension, in any case. Hidden files (`._x.gguf` of macOS) do not count.
pub fn has_extension(name: &str, extension: &str) -> bool {
    let found = Path::new(name).extension().and_then(|e| e.to_str());
    !name.starts_with('.') && found.is_some_and(|e| e.eq_ignore_ascii_case(extension))
}

/// A relative path without `..`, drive or backslash, on any system.
pub fn is_plain(name: &str) -> bool {
    let odd = |c: char| c == '\\' || c == ':' || c.is_control();
    !name.is_empty()
        && !name.contains(odd)
        && Path::new(name).components().all(|c| matches!(c, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let s = ShardName::parse("a-b-00002-of-00003.gguf").unwrap();
        assert_eq!((s.number, s.count), (2, 3));
        assert_eq!(s.sibling(1), "a-b-00001-of-00003.gguf");
        let s = ShardName::parse("model-00007-of-000163.safetensors").unwrap();
        assert_eq!(s.sibling(163), "model-00163-of-000163.safetensors");
        for odd in [
            "model.gguf",
            "a-00000-of-00003.gguf",
            "a-00004-of-00003.gguf",
            "a-1-of-3.gguf",
            "a-0000x-of-00003.gguf",
            "a-00001-of-00003",
            "-of-.gguf",
            "00001-of-00001.gguf",
        ] {
            assert_eq!(ShardName::parse(odd), None, "{odd}");
        }
    }

    #[test]
    fn sets() {
        let names = ["x.gguf", "a-00002-of-00002.gguf", "a-00001-of-00002.gguf"];
        assert_eq!(first_files(names.into_iter()), ["a-00001-of-00002.gguf", "x.gguf"]);
    }

    #[test]
    fn plain_names() {
        for good in ["model-00001-of-00002.safetensors", "a/b.safetensors", "..a", "ü.safetensors"]
        {
            assert!(is_plain(good), "{good}");
        }
        for bad in ["", "..", "../a", "a/../../b", "/etc/x", "C:x", "a\\b", "./a", "a\0b", "a\nb"] {
            assert!(!is_plain(bad), "{bad:?}");
        }
    }
}
