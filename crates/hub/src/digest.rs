//! What a file's content must hash to: the hub tells it before the download, and names blobs by it.

use std::fmt;

use sha1::Sha1;
use sha2::{Digest as _, Sha256};

/// A content's expected digest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Digest {
    /// SHA-256 of the content: files kept in large-file storage.
    Sha256([u8; 32]),
    /// SHA-1 of `blob {length}\0` and the content, as git names it: files kept in git.
    Git([u8; 20]),
}

impl Digest {
    /// From hexadecimal digits, 64 or 40 of them.
    pub fn parse(hex: &str) -> Option<Digest> {
        match hex.len() {
            64 => Some(Digest::Sha256(bytes(hex)?)),
            40 => Some(Digest::Git(bytes(hex)?)),
            _ => None,
        }
    }

    /// From an `ETag`: quotes and a weakness mark are taken off.
    pub fn from_etag(etag: &str) -> Option<Digest> {
        let etag = etag.trim();
        let etag = etag.strip_prefix("W/").unwrap_or(etag);
        Digest::parse(etag.trim_matches('"'))
    }

    /// Starts hashing a content of `len` bytes.
    pub(crate) fn hasher(self, len: u64) -> Hasher {
        match self {
            Digest::Sha256(_) => Hasher::Sha256(Sha256::new()),
            Digest::Git(_) => {
                Hasher::Git(Sha1::new_with_prefix(format!("blob {len}\0").as_bytes()))
            }
        }
    }
}

/// The digits: the name of the blob.
impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes: &[u8] = match self {
            Digest::Sha256(b) => b,
            Digest::Git(b) => b,
        };
        bytes.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A digest being computed.
pub(crate) enum Hasher {
    Sha256(Sha256),
    Git(Sha1),
}

impl Hasher {
    pub fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(h) => h.update(bytes),
            Hasher::Git(h) => h.update(bytes),
        }
    }

    pub fn finish(self) -> Digest {
        match self {
            Hasher::Sha256(h) => Digest::Sha256(h.finalize().into()),
            Hasher::Git(h) => Digest::Git(h.finalize().into()),
        }
    }
}

fn bytes<const N: usize>(hex: &str) -> Option<[u8; N]> {
    let mut out = [0; N];
    let digit = |b: u8| (b as char).to_digit(16);
    for (byte, pair) in out.iter_mut().zip(hex.as_bytes().chunks_exact(2)) {
        *byte = (digit(pair[0])? * 16 + digit(pair[1])?) as u8;
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_answers() {
        // `printf hello | git hash-object --stdin`, `printf hello | sha256sum`.
        let git = "b6fc4c620b67d95f953a5c1c1230aaab5db5a1b0";
        let sha = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824";
        for hex in [git, sha] {
            let digest = Digest::parse(hex).unwrap();
            let mut hasher = digest.hasher(5);
            hasher.update(b"hel");
            hasher.update(b"lo");
            assert_eq!(hasher.finish(), digest);
            assert_eq!(digest.to_string(), hex);
            assert_eq!(Digest::from_etag(&format!("W/\"{hex}\"")), Some(digest));
        }
        for odd in ["", "xyz", "../../../../../../../../../../../../x/..", &"é".repeat(20)] {
            assert_eq!(Digest::parse(odd), None, "{odd}");
        }
    }
}
