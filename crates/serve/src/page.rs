//! The page at `/`: a chat, and the machine at work. Three files, in the program; nothing from outside.

use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};

/// Its own files and its own server, and nothing else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const FILES: [(&str, &str, &str); 3] = [
    ("/", "text/html; charset=utf-8", include_str!("page/index.html")),
    ("/forebay.css", "text/css; charset=utf-8", include_str!("page/forebay.css")),
    ("/forebay.js", "text/javascript; charset=utf-8", include_str!("page/forebay.js")),
];

/// Paths of the files: they hold no secret, so they need no key.
pub(crate) fn has(path: &str) -> bool {
    FILES.iter().any(|(p, ..)| *p == path)
}

/// A file.
pub(crate) fn file(path: &str) -> Option<Response> {
    let (_, kind, text) = FILES.iter().find(|(p, ..)| *p == path)?;
    let mut response = text.into_response();
    for (name, value) in [
        (header::CONTENT_TYPE, *kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // A new version of the program has other files.
        (header::CACHE_CONTROL, "no-cache"),
    ] {
        response.headers_mut().insert(name, HeaderValue::from_static(value));
    }
    Some(response)
}
