//! Names of repositories, and patterns for files in them.

use std::fmt;

const MAX_PART_BYTES: usize = 96;

/// `org/name`, checked: it can be put into a path or an address as it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RepoId {
    org: String,
    name: String,
}

impl RepoId {
    /// From `org/name`; `None` for what no repository can be called.
    pub fn parse(text: &str) -> Option<RepoId> {
        let (org, name) = text.split_once('/')?;
        (is_part(org) && is_part(name)).then(|| RepoId { org: org.into(), name: name.into() })
    }

    /// From `org/name` or `org/name:pattern`.
    pub fn parse_with_pattern(text: &str) -> Option<(RepoId, Option<String>)> {
        match text.split_once(':') {
            None => Some((RepoId::parse(text)?, None)),
            Some((_, "")) => None,
            Some((id, pattern)) => Some((RepoId::parse(id)?, Some(pattern.to_owned()))),
        }
    }

    /// Name of its folder in the cache.
    pub(crate) fn folder(&self) -> String {
        format!("models--{}--{}", self.org, self.name)
    }
}

impl fmt::Display for RepoId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.org, self.name)
    }
}

/// The hub's own rule. Without `--`, the cache's folder names are unambiguous.
fn is_part(part: &str) -> bool {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    let end = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric() || c == '_');
    part.len() <= MAX_PART_BYTES
        && part.bytes().all(allowed)
        && end(part.chars().next())
        && end(part.chars().last())
        && !part.contains("--")
        && !part.contains("..")
}

/// Whether a name of a revision can be put into a path: `main`, `v1.0`, `refs/pr/3`, a commit.
pub(crate) fn is_revision(text: &str) -> bool {
    let part = |p: &str| {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_.+".contains(&b);
        !p.is_empty() && p.bytes().all(allowed) && !p.starts_with('.') && !p.contains("..")
    };
    text.len() <= 255 && text.split('/').all(part)
}

/// Whether a pattern has wildcards.
pub(crate) fn is_glob(pattern: &str) -> bool {
    pattern.contains(['*', '?'])
}

/// `*` for any characters, `?` for one, case ignored. Linear in the pattern for each start of the text.
pub(crate) fn glob(pattern: &str, text: &str) -> bool {
    let lower = |s: &str| s.to_lowercase().chars().collect::<Vec<char>>();
    let (pattern, text) = (lower(pattern), lower(text));
    let (mut p, mut t) = (0, 0);
    let mut star: Option<(usize, usize)> = None;
    while t < text.len() {
        match pattern.get(p) {
            Some('*') => {
                star = Some((p, t));
                p += 1;
            }
            Some(&c) if c == '?' || c == text[t] => {
                p += 1;
                t += 1;
            }
            _ => {
                // Let the last star take one character more.
                let Some((star_p, star_t)) = star else { return false };
                star = Some((star_p, star_t + 1));
                p = star_p + 1;
                t = star_t + 1;
            }
        }
    }
    pattern[p..].iter().all(|c| *c == '*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let id = RepoId::parse("openai/gpt-oss-20b").unwrap();
        assert_eq!(
            (id.to_string(), id.folder()),
            ("openai/gpt-oss-20b".into(), "models--openai--gpt-oss-20b".into())
        );
        let (id, pattern) = RepoId::parse_with_pattern("a/b.c:Q4_K_M/x*").unwrap();
        assert_eq!((id.to_string().as_str(), pattern.as_deref()), ("a/b.c", Some("Q4_K_M/x*")));
        for odd in [
            "", "a", "a/", "/a", "a/b/c", "../x", "a/..", "./a", "a/.b", "a--b/c", "a b/c", "a/b:",
            "C:/x", "a\\b/c", "é/a",
        ] {
            assert_eq!(RepoId::parse_with_pattern(odd), None, "{odd}");
        }
    }

    #[test]
    fn revisions() {
        for good in ["main", "refs/pr/3", "v1.0", "0123abc"] {
            assert!(is_revision(good), "{good}");
        }
        for bad in ["", "..", "a/../b", "/a", "a/", ".git", "a b", "a\\b", "a%2f"] {
            assert!(!is_revision(bad), "{bad}");
        }
    }

    #[test]
    fn globs() {
        for (pattern, text, want) in [
            ("*", "", true),
            ("*Q4*", "x-q4_k.gguf", true),
            ("*.gguf", "a/b.gguf", true),
            ("a?c", "abc", true),
            ("a?c", "ac", false),
            ("*a*b*c", "xxaxxbxxc", true),
            ("*a*b*c", "xxaxxcxxb", false),
            ("abc", "abcd", false),
        ] {
            assert_eq!(glob(pattern, text), want, "{pattern} {text}");
        }
    }
}
