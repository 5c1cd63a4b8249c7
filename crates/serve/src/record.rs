//! One line of the log for each request, when the last of it is over: body sent and answers computed.
//!
//! Lines are `tracing` events; what becomes of them is the program's choice. Texts are not in them.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use axum::body::{Body, HttpBody};
use axum::response::Response;
use forebay_schedule::Usage;
use futures_util::StreamExt;

/// Asked by machines, every few seconds.
const QUIET: [&str; 3] = ["/health", "/metrics", "/v1/forebay/live"];

/// What is known of a request so far. Written when the last who holds it lets go.
pub(crate) struct Record {
    began: Instant,
    method: String,
    path: String,
    known: Mutex<Known>,
}

#[derive(Default)]
struct Known {
    status: u16,
    head_s: Option<f64>,
    sent: bool,
    id: String,
    answers: usize,
    prompt: usize,
    cached: usize,
    generated: usize,
    queued_s: f64,
    first_token_s: f64,
    decode_s: f64,
}

tokio::task_local! {
    static RECORD: Arc<Record>;
}

/// The record of the request that this task handles.
pub(crate) fn current() -> Option<Arc<Record>> {
    RECORD.try_with(Arc::clone).ok()
}

/// Handles a request and records it.
pub(crate) async fn recorded(
    method: &str,
    path: &str,
    handler: impl Future<Output = Response>,
) -> Response {
    let record = Arc::new(Record {
        began: Instant::now(),
        method: method.to_owned(),
        path: path.to_owned(),
        known: Mutex::default(),
    });
    let response = RECORD.scope(record.clone(), handler).await;
    record.know(|known| {
        known.status = response.status().as_u16();
        known.head_s = Some(record.began.elapsed().as_secs_f64());
    });
    if response.body().size_hint().exact().is_some() {
        record.know(|known| known.sent = true);
        return response;
    }
    // A body that comes piece by piece holds the record.
    response.map(|body| {
        let last = futures_util::stream::once({
            let record = record.clone();
            async move {
                record.know(|known| known.sent = true);
                Ok(axum::body::Bytes::new())
            }
        });
        let stream = body.into_data_stream().chain(last).filter(move |piece| {
            let _held = &record;
            let empty = piece.as_ref().is_ok_and(axum::body::Bytes::is_empty);
            std::future::ready(!empty)
        });
        Body::from_stream(stream)
    })
}

impl Record {
    fn know(&self, f: impl FnOnce(&mut Known)) {
        f(&mut self.known.lock().unwrap_or_else(|e| e.into_inner()));
    }

    /// The answers have an id.
    pub fn begun(&self, id: &str, answers: usize) {
        self.know(|known| {
            known.id = id.to_owned();
            known.answers = answers;
        });
    }

    /// An answer is over.
    pub fn ended(&self, usage: &Usage) {
        self.know(|known| {
            known.prompt = usage.prompt;
            known.cached = known.cached.max(usage.cached);
            known.generated += usage.generated;
            known.queued_s = known.queued_s.max(usage.queued_s);
            known.first_token_s = known.first_token_s.max(usage.first_token_s);
            known.decode_s = known.decode_s.max(usage.decode_s);
        });
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        let known = self.known.get_mut().unwrap_or_else(|e| e.into_inner());
        let duration_ms = milliseconds(self.began.elapsed().as_secs_f64());
        let (method, path, status) = (&self.method, &self.path, known.status);
        // No head was sent: the client left before.
        let left = known.head_s.is_none() || !known.sent;
        // What is asked again and again is of interest when it goes wrong.
        if QUIET.contains(&path.as_str()) && status < 400 {
            tracing::debug!(target: "forebay::request", method, path, status, duration_ms, left, "request");
            return;
        }
        if known.answers == 0 {
            tracing::info!(target: "forebay::request", method, path, status, duration_ms, left, "request");
            return;
        }
        tracing::info!(
            target: "forebay::request",
            method,
            path,
            status,
            duration_ms,
            left,
            id = known.id,
            answers = known.answers,
            prompt_tokens = known.prompt,
            cached_tokens = known.cached,
            generated_tokens = known.generated,
            queued_ms = milliseconds(known.queued_s),
            first_token_ms = milliseconds(known.first_token_s),
            decode_ms = milliseconds(known.decode_s),
            "answer"
        );
    }
}

/// With three digits behind the point.
fn milliseconds(seconds: f64) -> f64 {
    (seconds * 1e6).round() / 1e3
}
