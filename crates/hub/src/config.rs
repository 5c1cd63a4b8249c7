//! Where the hub is, where its cache is, and how patient to be. All environment variables are here;
//! they are those of Hugging Face's own tools.

use std::ffi::OsString;
use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

const PUBLIC_ENDPOINT: &str = "https://huggingface.co";
/// A token file is one short line.
const MAX_TOKEN_BYTES: u64 = 4096;

/// Settings of a [`crate::Hub`].
#[derive(Clone)]
pub struct HubConfig {
    /// Address of the hub, without a slash at the end (`HF_ENDPOINT`).
    pub endpoint: String,
    /// Folder with `models--org--name` (`HF_HUB_CACHE`, else `HF_HOME/hub`).
    pub cache: PathBuf,
    /// Access token (`HF_TOKEN`, `HUGGING_FACE_HUB_TOKEN`, or the file `HF_TOKEN_PATH`). Sent to the
    /// endpoint and to nobody else.
    pub token: Option<String>,
    /// Never ask the network (`HF_HUB_OFFLINE`).
    pub offline: bool,
    /// Files downloaded at a time.
    pub jobs: usize,
    /// What to do about failures.
    pub retry: Retry,
}

/// How often and how long to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Failures in a row, without progress in between, after which to give up.
    pub attempts: u32,
    /// Wait after the first failure; doubled after each further one.
    pub first_delay: Duration,
    /// Longest of these waits.
    pub max_delay: Duration,
    /// Longest wait that a server may ask for (`Retry-After`).
    pub max_server_delay: Duration,
    /// A connection on which nothing arrives for so long is given up.
    pub stall: Duration,
    /// Longest time to connect.
    pub connect: Duration,
}

impl Default for Retry {
    fn default() -> Self {
        Retry {
            attempts: 5,
            first_delay: Duration::from_secs(1),
            max_delay: Duration::from_secs(30),
            max_server_delay: Duration::from_secs(60),
            stall: Duration::from_secs(30),
            connect: Duration::from_secs(15),
        }
    }
}

impl HubConfig {
    /// For an endpoint and a cache, without a token.
    pub fn new(endpoint: &str, cache: &Path) -> HubConfig {
        HubConfig {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            cache: cache.to_owned(),
            token: None,
            offline: false,
            jobs: 4,
            retry: Retry::default(),
        }
    }

    /// As the environment says.
    pub fn from_env() -> HubConfig {
        HubConfig::from_variables(&|name| std::env::var_os(name))
    }

    fn from_variables(variable: &dyn Fn(&str) -> Option<OsString>) -> HubConfig {
        let given = |name: &str| variable(name).filter(|v| !v.is_empty());
        let text = |name: &str| given(name).and_then(|v| v.into_string().ok());
        let home = given("HOME").or_else(|| given("USERPROFILE")).map(PathBuf::from);
        let path = |name: &str| given(name).map(|v| expand(PathBuf::from(v), home.as_deref()));

        let cache_home = path("XDG_CACHE_HOME");
        let cache_home = cache_home.or_else(|| home.as_ref().map(|h| h.join(".cache")));
        let hf_home = path("HF_HOME")
            .unwrap_or_else(|| cache_home.unwrap_or_else(std::env::temp_dir).join("huggingface"));
        let cache = path("HF_HUB_CACHE").or_else(|| path("HUGGINGFACE_HUB_CACHE"));
        let endpoint = text("HF_ENDPOINT").unwrap_or_else(|| PUBLIC_ENDPOINT.to_owned());

        let mut config = HubConfig::new(&endpoint, &cache.unwrap_or_else(|| hf_home.join("hub")));
        config.token = text("HF_TOKEN")
            .or_else(|| text("HUGGING_FACE_HUB_TOKEN"))
            .or_else(|| read_token(&path("HF_TOKEN_PATH").unwrap_or(hf_home.join("token"))))
            .and_then(|t| sound_token(&t));
        let offline = text("HF_HUB_OFFLINE").unwrap_or_default().to_ascii_uppercase();
        config.offline = ["1", "ON", "YES", "TRUE"].contains(&offline.as_str());
        config
    }
}

/// The token is nobody's business.
impl fmt::Debug for HubConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubConfig")
            .field("endpoint", &self.endpoint)
            .field("cache", &self.cache)
            .field("token", &self.token.as_ref().map(|_| "..."))
            .field("offline", &self.offline)
            .field("jobs", &self.jobs)
            .field("retry", &self.retry)
            .finish()
    }
}

fn expand(path: PathBuf, home: Option<&Path>) -> PathBuf {
    match (path.strip_prefix("~"), home) {
        (Ok(rest), Some(home)) => home.join(rest),
        _ => path,
    }
}

fn read_token(path: &Path) -> Option<String> {
    let metadata = std::fs::metadata(path).ok()?;
    if !metadata.is_file() || metadata.len() > MAX_TOKEN_BYTES {
        return None;
    }
    std::fs::read_to_string(path).ok()
}

/// What can stand in a header; anything else is no token.
fn sound_token(text: &str) -> Option<String> {
    let token = text.trim();
    (!token.is_empty() && token.bytes().all(|b| b.is_ascii_graphic())).then(|| token.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(variables: &[(&str, &str)]) -> HubConfig {
        HubConfig::from_variables(&|name| {
            variables.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into())
        })
    }

    #[test]
    fn the_cache_is_where_other_tools_look() {
        let rows: &[(&[(&str, &str)], &str)] = &[
            (&[("HOME", "/h")], "/h/.cache/huggingface/hub"),
            (&[("HOME", "/h"), ("XDG_CACHE_HOME", "/x")], "/x/huggingface/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "/hf")], "/hf/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "~/hf")], "/h/hf/hub"),
            (&[("HOME", "/h"), ("HF_HOME", "/hf"), ("HF_HUB_CACHE", "/c")], "/c"),
            (&[("HOME", "/h"), ("HF_HUB_CACHE", "")], "/h/.cache/huggingface/hub"),
        ];
        for (variables, want) in rows {
            assert_eq!(config(variables).cache, Path::new(want), "{variables:?}");
        }
    }

    #[test]
    fn tokens() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("token"), "from_file\n").unwrap();
        let hf_home = dir.path().to_str().unwrap();
        assert_eq!(config(&[("HF_HOME", hf_home)]).token.as_deref(), Some("from_file"));
        let both = config(&[("HF_HOME", hf_home), ("HF_TOKEN", " hf_x ")]);
        assert_eq!(both.token.as_deref(), Some("hf_x"));
        assert!(!format!("{both:?}").contains("hf_x"));
        assert_eq!(config(&[("HF_TOKEN", "a\r\nEvil: 1")]).token, None);
        assert_eq!(config(&[("HUGGING_FACE_HUB_TOKEN", "old")]).token.as_deref(), Some("old"));
    }

    #[test]
    fn endpoints() {
        assert_eq!(config(&[]).endpoint, PUBLIC_ENDPOINT);
        assert_eq!(config(&[("HF_ENDPOINT", "http://h:1/")]).endpoint, "http://h:1");
        assert!(config(&[("HF_HUB_OFFLINE", "true")]).offline);
        assert!(!config(&[("HF_HUB_OFFLINE", "0")]).offline);
    }
}
