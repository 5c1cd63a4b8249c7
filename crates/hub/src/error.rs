//! Why a repository cannot be listed or fetched, with what to do about it.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::digest::Digest;

/// What a hub, a connection or the cache can do wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HubError {
    /// 401.
    #[error("{repo}: token missing or rejected{}", unauthorized(*sent, url))]
    Unauthorized {
        /// The repository.
        repo: String,
        /// Whether a token was sent.
        sent: bool,
        /// Page of the repository.
        url: String,
    },
    /// 403.
    #[error(
        "{repo}: access is not granted: accept the licence at {url} with the account of the token, then try again{}",
        said(message)
    )]
    Gated {
        /// The repository.
        repo: String,
        /// Where to accept.
        url: String,
        /// What the server said.
        message: String,
    },
    /// 404.
    #[error("{repo}: {missing}")]
    NotFound {
        /// The repository.
        repo: String,
        /// What is not there.
        missing: Missing,
    },
    /// 429, for longer than it makes sense to wait.
    #[error(
        "{url}: the server asks to slow down{}; try again later, or set HF_TOKEN for higher limits",
        wait(after)
    )]
    RateLimited {
        /// The address.
        url: String,
        /// What it asked for.
        after: Option<Duration>,
    },
    /// A status that is none of these, after all attempts if it was a server's fault.
    #[error("{url}: the server answers {status}{}", said(message))]
    Status {
        /// The address.
        url: String,
        /// The status.
        status: u16,
        /// What it said.
        message: String,
    },
    /// No connection, or one that broke or fell silent, after all attempts.
    #[error("{url}: {detail}; {}", kept(*received))]
    Connection {
        /// The address.
        url: String,
        /// What happened.
        detail: String,
        /// Bytes that are kept for the next try.
        received: u64,
    },
    /// An answer that breaks the protocol.
    #[error("{url}: unusable answer: expected {expected}, found {found}")]
    BadAnswer {
        /// The address.
        url: String,
        /// The rule.
        expected: String,
        /// What breaks it.
        found: String,
    },
    /// The content is not what the hub promised.
    #[error(
        "{file}: the content's digest is {found}, the hub promised {expected}; the download was discarded, try again"
    )]
    WrongDigest {
        /// The file in the repository.
        file: String,
        /// Promised.
        expected: Digest,
        /// Received.
        found: Digest,
    },
    /// A path in the repository leads out of its folder.
    #[error("{repo}: path {path:?} leads out of the folder; only plain relative paths are written")]
    UnsafePath {
        /// The repository.
        repo: String,
        /// The path.
        path: String,
    },
    /// Several models fit, none was chosen.
    #[error("{repo} holds several models, choose one with {repo}:{example} (or another part of its name): {}", choices.join(", "))]
    Ambiguous {
        /// The repository.
        repo: String,
        /// Each one's name, with its size.
        choices: Vec<String>,
        /// A pattern that chooses one.
        example: String,
    },
    /// No file fits the pattern.
    #[error("{repo}: no model file matches {pattern:?}; there are: {}", choices.join(", "))]
    NoMatch {
        /// The repository.
        repo: String,
        /// The pattern.
        pattern: String,
        /// What there is.
        choices: Vec<String>,
    },
    /// Neither safetensors nor GGUF.
    #[error("{repo} holds no safetensors and no GGUF{}", instead(found))]
    NoModel {
        /// The repository.
        repo: String,
        /// What there is instead.
        found: Vec<String>,
    },
    /// The disk is too small.
    #[error("{d}: {needed} bytes are to be downloaded, {available} are free; free {f} bytes or set HF_HUB_CACHE to another disk",
            d = dir.display(), f = needed - available)]
    NoSpace {
        /// The cache.
        dir: PathBuf,
        /// Bytes to come.
        needed: u64,
        /// Bytes free.
        available: u64,
    },
    /// `HF_HUB_OFFLINE` is set.
    #[error("{repo} is not complete in the cache, and HF_HUB_OFFLINE forbids to fetch it")]
    Offline {
        /// The repository.
        repo: String,
    },
    /// A setting that cannot be used.
    #[error("{what} {value:?} cannot be used: {reason}")]
    BadSetting {
        /// Which.
        what: &'static str,
        /// Its value.
        value: String,
        /// The rule it breaks.
        reason: &'static str,
    },
    /// Interrupted; what had arrived is kept.
    #[error("interrupted; what has arrived is kept, the same command goes on from there")]
    Cancelled,
    /// The system failed.
    #[error("{f}: cannot {action}: {source}", f = path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was tried.
        action: &'static str,
        /// The system's error.
        source: io::Error,
    },
}

/// What a 404 is about.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Missing {
    /// The repository.
    Repository,
    /// A revision of it.
    Revision(String),
    /// A file of a revision.
    File {
        /// Path in the repository.
        file: String,
        /// The revision.
        revision: String,
    },
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Missing::Repository => {
                write!(f, "no such repository; check the name (a private one needs HF_TOKEN)")
            }
            Missing::Revision(revision) => write!(f, "no revision {revision:?}"),
            Missing::File { file, revision } => {
                write!(f, "no file {file:?} in revision {revision:?}")
            }
        }
    }
}

impl HubError {
    /// The class of the failure, a stable name for tests and clients.
    pub fn class(&self) -> &'static str {
        match self {
            HubError::Unauthorized { .. } => "Unauthorized",
            HubError::Gated { .. } => "Gated",
            HubError::NotFound { .. } => "NotFound",
            HubError::RateLimited { .. } => "RateLimited",
            HubError::Status { .. } | HubError::BadAnswer { .. } => "ServerError",
            HubError::Connection { .. } => "ConnectionFailed",
            HubError::WrongDigest { .. } => "WrongDigest",
            HubError::UnsafePath { .. } => "UnsafePath",
            HubError::Ambiguous { .. } => "Ambiguous",
            HubError::NoMatch { .. } | HubError::NoModel { .. } => "NoMatch",
            HubError::NoSpace { .. } => "NoSpace",
            HubError::Offline { .. } => "Offline",
            HubError::BadSetting { .. } => "Usage",
            HubError::Cancelled => "Cancelled",
            HubError::Io { .. } => "IoError",
        }
    }

    pub(crate) fn io(path: &Path, action: &'static str) -> impl FnOnce(io::Error) -> HubError {
        let path = path.to_owned();
        move |source| HubError::Io { path, action, source }
    }
}

/// Text from a server: one line, no control characters, short.
pub(crate) fn tame(text: &str) -> String {
    const LONGEST: usize = 300;
    text.chars().filter(|c| !c.is_control()).take(LONGEST).collect()
}

/// A size as people write it.
pub(crate) fn human(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

fn unauthorized(sent: bool, url: &str) -> String {
    match sent {
        true => format!(
            "; the token that was sent (HF_TOKEN or the token file) does not open {url}: check that it is valid, \
             that the name is right, and that its account has access"
        ),
        false => format!(
            "; set HF_TOKEN to a token of an account with access to {url} (a name that does not exist is answered \
             in the same way)"
        ),
    }
}

fn said(message: &str) -> String {
    if message.is_empty() { String::new() } else { format!(" (the server says: {message})") }
}

fn wait(after: &Option<Duration>) -> String {
    after.map_or_else(String::new, |d| format!(" for {} s", d.as_secs()))
}

fn kept(received: u64) -> String {
    match received {
        0 => "check the network and try again".to_owned(),
        n => format!("{n} bytes are kept, the same command goes on from there"),
    }
}

fn instead(found: &[String]) -> String {
    if found.is_empty() { String::new() } else { format!("; found {}", found.join(", ")) }
}
