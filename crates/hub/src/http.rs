//! Requests: redirects followed by hand, the token kept to the endpoint, failures sorted into those
//! worth another attempt and those that are not, and a bound on attempts.

use std::io::Read;
use std::time::{Duration, Instant};

use ureq::http::{HeaderMap, Uri};
use ureq::{Agent, BodyReader};

use crate::config::{HubConfig, Retry};
use crate::error::{HubError, Missing, tame};

const MAX_REDIRECTS: usize = 10;

/// What a request is about, for messages.
#[derive(Clone, Debug)]
pub(crate) struct Subject {
    pub repo: String,
    pub revision: String,
    pub file: Option<String>,
}

/// An answer whose body has not been read.
pub(crate) struct Answer {
    /// 200, 206 or 416.
    pub status: u16,
    /// Of the last answer.
    pub headers: HeaderMap,
    /// What the endpoint itself called the content (`X-Linked-ETag`, or `ETag`), whoever sent it then.
    pub validator: Option<String>,
    /// Length of the body, if told.
    pub len: Option<u64>,
    pub body: BodyReader<'static>,
}

/// A failed attempt.
pub(crate) enum Fault {
    /// Another attempt may help, after `wait` if the server asked for it.
    Again { error: HubError, wait: Option<Duration> },
    /// It will not.
    Final(HubError),
}

impl Fault {
    pub fn bad_answer(url: &str, expected: &str, found: impl Into<String>) -> HubError {
        let (url, expected) = (url.to_owned(), expected.to_owned());
        HubError::BadAnswer { url, expected, found: tame(&found.into()) }
    }
}

/// Talks to one endpoint.
pub(crate) struct Client {
    agent: Agent,
    pub endpoint: String,
    token: Option<String>,
    pub retry: Retry,
}

impl Client {
    pub fn new(config: &HubConfig) -> Result<Client, HubError> {
        let bad = |reason| HubError::BadSetting {
            what: "HF_ENDPOINT",
            value: config.endpoint.clone(),
            reason,
        };
        let uri: Uri = config.endpoint.parse().map_err(|_| bad("it is no address"))?;
        if !matches!(uri.scheme_str(), Some("http" | "https")) || uri.host().is_none() {
            return Err(bad("it does not begin with http:// or https:// and a host"));
        }
        let retry = config.retry;
        let mut settings = Agent::config_builder()
            .user_agent(concat!("forebay/", env!("CARGO_PKG_VERSION")))
            .accept_encoding("identity") // lengths and ranges are those of the file
            .http_status_as_error(false)
            .max_redirects(0)
            .max_redirects_will_error(false)
            .timeout_connect(Some(retry.connect))
            .timeout_recv_response(Some(retry.stall))
            .timeout_per_read(Some(retry.stall))
            .timeout_per_write(Some(retry.stall))
            .max_idle_connections_per_host(config.jobs.max(1));
        if matches!(uri.host(), Some("127.0.0.1" | "localhost" | "[::1]")) {
            settings = settings.proxy(None);
        }
        let (endpoint, token) = (config.endpoint.clone(), config.token.clone());
        Ok(Client { agent: settings.build().into(), endpoint, token, retry })
    }

    /// Page of a repository, for people.
    pub fn page(&self, repo: &str) -> String {
        format!("{}/{repo}", self.endpoint)
    }

    /// One attempt at a GET, of the bytes from `range.0` on, up to `range.1` (excluded) if told.
    pub fn get(
        &self,
        url: &str,
        range: Option<(u64, Option<u64>)>,
        subject: &Subject,
    ) -> Result<Answer, Fault> {
        let mut url = url.to_owned();
        let mut validator = None;
        for _ in 0..=MAX_REDIRECTS {
            let ours = same_origin(&url, &self.endpoint);
            let mut request = self.agent.get(&url);
            if let Some(token) = self.token.as_ref().filter(|_| ours) {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            if let Some((from, to)) = range {
                let to = to.map_or(String::new(), |t| (t - 1).to_string());
                request = request.header("Range", format!("bytes={from}-{to}"));
            }
            let response = request.call().map_err(|e| connection(&url, e))?;
            let (parts, body) = response.into_parts();
            if ours {
                let linked = text(&parts.headers, "x-linked-etag");
                validator = linked.or_else(|| text(&parts.headers, "etag")).or(validator);
            }
            match parts.status.as_u16() {
                status @ (200 | 206 | 416) => {
                    return Ok(Answer {
                        status,
                        len: body.content_length(),
                        headers: parts.headers,
                        validator,
                        body: body.into_reader(),
                    });
                }
                301 | 302 | 303 | 307 | 308 => {
                    let location = text(&parts.headers, "location").unwrap_or_default();
                    url = join(&url, &location).ok_or_else(|| {
                        Fault::Final(Fault::bad_answer(&url, "a redirect to an address", location))
                    })?;
                }
                status => {
                    let mut reader = body.into_reader();
                    return Err(self.refused(&url, status, &parts.headers, &mut reader, subject));
                }
            }
        }
        Err(Fault::Final(Fault::bad_answer(&url, "at most 10 redirects", "one more".to_owned())))
    }

    /// A small document, with as many attempts as allowed, and the address of the next page.
    pub fn document(
        &self,
        url: &str,
        limit: u64,
        subject: &Subject,
        stopped: &dyn Fn() -> bool,
    ) -> Result<(Vec<u8>, Option<String>), HubError> {
        let mut tries = Tries::new(self.retry, stopped);
        loop {
            let fault = match self.get(url, None, subject) {
                Err(fault) => fault,
                Ok(answer) if answer.status != 200 => {
                    let status = answer.status.to_string();
                    return Err(Fault::bad_answer(url, "status 200", status));
                }
                Ok(answer) => {
                    let next = text(&answer.headers, "link").and_then(|l| next_link(&l));
                    let mut bytes = Vec::new();
                    match answer.body.take(limit + 1).read_to_end(&mut bytes) {
                        Ok(_) if bytes.len() as u64 > limit => {
                            let expected = format!("at most {limit} bytes");
                            return Err(Fault::bad_answer(url, &expected, "more"));
                        }
                        Ok(_) => return Ok((bytes, next.and_then(|n| self.ours(url, &n)))),
                        Err(e) => cut(url, &e),
                    }
                }
            };
            tries.failed(fault)?;
        }
    }

    /// An address that the server gave, as one of the endpoint: the token must not go elsewhere.
    fn ours(&self, base: &str, link: &str) -> Option<String> {
        let url = join(base, link)?;
        if same_origin(&url, &self.endpoint) {
            return Some(url);
        }
        let uri: Uri = url.parse().ok()?;
        Some(format!("{}{}", origin(&self.endpoint)?, uri.path_and_query()?))
    }

    /// Sorts a status that is no success.
    fn refused(
        &self,
        url: &str,
        status: u16,
        headers: &HeaderMap,
        body: &mut dyn Read,
        subject: &Subject,
    ) -> Fault {
        let header = |name: &str| text(headers, name).map(|t| tame(&t)).unwrap_or_default();
        let (code, mut message) = (header("x-error-code"), header("x-error-message"));
        if message.is_empty() && header("content-type").starts_with("text/plain") {
            let mut bytes = Vec::new();
            let _ = body.take(1024).read_to_end(&mut bytes);
            message = tame(String::from_utf8_lossy(&bytes).trim());
        }
        let shown = without_query(url);
        let repo = subject.repo.clone();
        let ours = same_origin(url, &self.endpoint);
        let other = |message| HubError::Status { url: shown.clone(), status, message };
        match status {
            // A storage host refuses addresses that have expired: ask the endpoint for a new one.
            401 | 403 if !ours => Fault::Again { error: other(message), wait: None },
            401 => {
                let (sent, url) = (self.token.is_some(), self.page(&repo));
                Fault::Final(HubError::Unauthorized { repo, sent, url })
            }
            403 => {
                let url = self.page(&repo);
                Fault::Final(HubError::Gated { repo, url, message })
            }
            404 => {
                let Subject { revision, file, .. } = subject.clone();
                let missing = match (code.as_str(), file) {
                    ("RepoNotFound", _) => Missing::Repository,
                    ("RevisionNotFound", _) => Missing::Revision(revision),
                    (_, Some(file)) => Missing::File { file, revision },
                    ("", None) if revision == "main" => Missing::Repository,
                    (_, None) => Missing::Revision(revision),
                };
                Fault::Final(HubError::NotFound { repo, missing })
            }
            429 => {
                let wait = retry_after(headers);
                let error = HubError::RateLimited { url: shown, after: wait };
                self.after_wait(error, wait)
            }
            408 | 425 | 500..=599 => self.after_wait(other(message), retry_after(headers)),
            _ => Fault::Final(other(message)),
        }
    }

    fn after_wait(&self, error: HubError, wait: Option<Duration>) -> Fault {
        match wait {
            Some(wait) if wait > self.retry.max_server_delay => Fault::Final(error),
            wait => Fault::Again { error, wait },
        }
    }
}

/// Counts failures in a row and waits between attempts.
pub(crate) struct Tries<'a> {
    retry: Retry,
    failures: u32,
    stopped: &'a dyn Fn() -> bool,
}

impl<'a> Tries<'a> {
    pub fn new(retry: Retry, stopped: &'a dyn Fn() -> bool) -> Tries<'a> {
        Tries { retry, failures: 0, stopped }
    }

    /// Something worth having arrived.
    pub fn progressed(&mut self) {
        self.failures = 0;
    }

    /// Waits, or gives the error back when there is no further attempt.
    pub fn failed(&mut self, fault: Fault) -> Result<(), HubError> {
        let (error, asked) = match fault {
            Fault::Final(error) => return Err(error),
            Fault::Again { error, wait } => (error, wait),
        };
        self.failures += 1;
        if self.failures >= self.retry.attempts {
            return Err(error);
        }
        let doublings = (self.failures - 1).min(16);
        let backoff = self.retry.first_delay.saturating_mul(1 << doublings);
        let wait = asked.unwrap_or_default().max(backoff.min(self.retry.max_delay));
        pause(wait, self.stopped)
    }
}

/// Sleeps, unless stopped.
pub(crate) fn pause(wait: Duration, stopped: &dyn Fn() -> bool) -> Result<(), HubError> {
    const STEP: Duration = Duration::from_millis(50);
    let end = Instant::now() + wait;
    loop {
        if stopped() {
            return Err(HubError::Cancelled);
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        std::thread::sleep(left.min(STEP));
    }
}

/// A body that ended early or broke.
pub(crate) fn cut(url: &str, e: &std::io::Error) -> Fault {
    let (url, detail) = (without_query(url), tame(&e.to_string()));
    Fault::Again { error: HubError::Connection { url, detail, received: 0 }, wait: None }
}

fn connection(url: &str, e: ureq::Error) -> Fault {
    use ureq::Error as E;
    let hopeless = matches!(
        e,
        E::BadUri(_)
            | E::Http(_)
            | E::Tls(_)
            | E::Rustls(_)
            | E::Pem(_)
            | E::InvalidProxyUrl
            | E::LargeResponseHeader(..)
    );
    let detail = match &e {
        E::Timeout(_) => "nothing arrived for too long".to_owned(),
        E::HostNotFound => "the host's address was not found".to_owned(),
        e => tame(&e.to_string()),
    };
    let error = HubError::Connection { url: without_query(url), detail, received: 0 };
    if hopeless { Fault::Final(error) } else { Fault::Again { error, wait: None } }
}

/// Addresses of storage hosts carry signatures that open the file: they stay out of messages.
pub(crate) fn without_query(url: &str) -> String {
    tame(url.split(['?', '#']).next().unwrap_or(url))
}

pub(crate) fn text(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(|s| s.trim().to_owned())
}

/// Seconds, as all hubs send it; a date is left to the backoff.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    text(headers, "retry-after")?.parse().ok().map(Duration::from_secs)
}

/// `bytes 300-999/1000`: first, one past the last, total if told.
pub(crate) fn content_range(headers: &HeaderMap) -> Option<(u64, u64, Option<u64>)> {
    let value = text(headers, "content-range")?;
    let (range, total) = value.strip_prefix("bytes")?.trim().split_once('/')?;
    let (first, last) = range.split_once('-')?;
    let (first, last): (u64, u64) = (first.trim().parse().ok()?, last.trim().parse().ok()?);
    (first <= last).then_some(())?;
    Some((first, last.checked_add(1)?, total.trim().parse().ok()))
}

/// The address of `rel="next"` in a `Link` header.
fn next_link(header: &str) -> Option<String> {
    header.split(',').find_map(|link| {
        let (url, rest) = link.trim().strip_prefix('<')?.split_once('>')?;
        let next = rest.split(';').any(|p| matches!(p.trim(), "rel=\"next\"" | "rel=next"));
        next.then(|| url.to_owned())
    })
}

fn origin(url: &str) -> Option<String> {
    let uri: Uri = url.parse().ok()?;
    Some(format!("{}://{}", uri.scheme_str()?, uri.authority()?).to_ascii_lowercase())
}

fn same_origin(a: &str, b: &str) -> bool {
    let key = |url: &str| {
        let uri: Uri = url.parse().ok()?;
        let scheme = uri.scheme_str()?.to_ascii_lowercase();
        let port = uri.port_u16().unwrap_or(if scheme == "https" { 443 } else { 80 });
        Some((scheme, uri.host()?.to_ascii_lowercase(), port))
    };
    key(a).is_some() && key(a) == key(b)
}

/// Where a redirect leads. Never from https to http.
fn join(base: &str, location: &str) -> Option<String> {
    let from: Uri = base.parse().ok()?;
    let url = if location.starts_with("//") {
        format!("{}:{location}", from.scheme_str()?)
    } else if location.starts_with('/') {
        format!("{}{location}", origin(base)?)
    } else if location.contains("://") {
        location.to_owned()
    } else {
        return None;
    };
    let to: Uri = url.parse().ok()?;
    let schemes = (from.scheme_str()?, to.scheme_str()?);
    let kept = matches!(schemes, (_, "https") | ("http", "http"));
    (kept && to.host().is_some()).then_some(url)
}

/// Percent-encodes all but unreserved characters and those in `keep`.
pub(crate) fn encode(text: &str, keep: &[u8]) -> String {
    let mut out = String::new();
    for b in text.bytes() {
        match b.is_ascii_alphanumeric() || b"-_.~".contains(&b) || keep.contains(&b) {
            true => out.push(b as char),
            false => out.push_str(&format!("%{b:02X}")),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redirects() {
        for (base, location, want) in [
            ("https://a/x", "https://b/y?z", Some("https://b/y?z")),
            ("https://a:8/x", "/y", Some("https://a:8/y")),
            ("https://a/x", "//b/y", Some("https://b/y")),
            ("https://a/x", "http://a/y", None),
            ("http://a/x", "http://b/y", Some("http://b/y")),
            ("http://a/x", "file:///etc/passwd", None),
            ("http://a/x", "", None),
        ] {
            assert_eq!(join(base, location).as_deref(), want, "{base} {location}");
        }
        assert!(same_origin("https://a/x", "https://A:443/y"));
        for other in ["https://a:8/x", "http://a/x", "https://a.b/x", "x"] {
            assert!(!same_origin(other, "https://a"), "{other}");
        }
    }

    #[test]
    fn headers() {
        let link = r#"<https://h/a?c=1>; rel="prev", <https://h/b?c=2>; rel="next""#;
        assert_eq!(next_link(link).as_deref(), Some("https://h/b?c=2"));
        assert_eq!(next_link("<https://h/b>; rel=\"last\""), None);
        let range = |value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("content-range", value.parse().unwrap());
            content_range(&headers)
        };
        assert_eq!(range("bytes 300-999/1000"), Some((300, 1000, Some(1000))));
        assert_eq!(range("bytes 0-0/*"), Some((0, 1, None)));
        for odd in [
            "bytes */1000",
            "bytes 5-4/9",
            "300-999/1000",
            "bytes a-b/c",
            "bytes 0-18446744073709551615/1",
        ] {
            assert_eq!(range(odd), None, "{odd}");
        }
        assert_eq!(encode("a b/ü#", b"/"), "a%20b/%C3%BC%23");
    }
}
