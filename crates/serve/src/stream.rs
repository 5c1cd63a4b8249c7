//! Events of answers to the bytes of a body, while they come.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::header;
use axum::response::Response;

use crate::error::ApiError;
use crate::service::{Answers, Event, Service};

/// A quiet stream says that it lives this often.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// Turns events into an API's bytes.
pub(crate) trait Encode: Send + 'static {
    /// Before the first event.
    fn start(&mut self) -> String {
        String::new()
    }

    /// One event of one answer.
    fn event(&mut self, index: usize, event: Event) -> String;

    /// After the last event, where none failed.
    fn end(&mut self) -> String {
        String::new()
    }

    /// While nothing happens.
    fn keep_alive(&mut self) -> String {
        ": keepalive\n\n".to_owned()
    }

    /// `Content-Type` of the body.
    fn content_type(&self) -> &'static str {
        "text/event-stream; charset=utf-8"
    }
}

struct State<E> {
    answers: Answers,
    encoder: E,
    open: usize,
    stage: Stage,
    /// The service, which lives as long as somebody is answered.
    _alive: Arc<dyn Any + Send + Sync>,
}

enum Stage {
    Start,
    Events,
    Over,
}

/// A response that streams.
pub(crate) fn response<E: Encode>(
    service: &Arc<Service>,
    answers: Answers,
    encoder: E,
) -> Response {
    let content_type = encoder.content_type();
    let open = answers.n;
    let state = State { answers, encoder, open, stage: Stage::Start, _alive: service.clone() };
    let stream = futures_util::stream::unfold(state, |mut state| async move {
        loop {
            let text = next(&mut state).await?;
            if !text.is_empty() {
                return Some((Ok::<Bytes, std::convert::Infallible>(text.into()), state));
            }
        }
    });
    Response::builder()
        .header(header::CONTENT_TYPE, content_type)
        .header(header::CACHE_CONTROL, "no-cache")
        .header("x-accel-buffering", "no")
        .body(Body::from_stream(stream))
        .expect("constant headers are valid")
}

async fn next<E: Encode>(state: &mut State<E>) -> Option<String> {
    match state.stage {
        Stage::Over => None,
        Stage::Start => {
            state.stage = Stage::Events;
            Some(state.encoder.start())
        }
        Stage::Events if state.open == 0 => {
            state.stage = Stage::Over;
            Some(state.encoder.end())
        }
        Stage::Events => {
            let received = tokio::time::timeout(KEEP_ALIVE, state.answers.events.recv()).await;
            Some(match received {
                Err(_) => state.encoder.keep_alive(),
                Ok(None) => {
                    state.stage = Stage::Over;
                    let gone = ApiError::new(crate::error::Kind::Internal, "the engine is gone");
                    state.encoder.event(0, Event::Failed(gone))
                }
                Ok(Some((index, event))) => {
                    match event {
                        Event::Done(_) => state.open -= 1,
                        Event::Failed(_) => state.stage = Stage::Over,
                        Event::Piece { .. } => {}
                    }
                    state.encoder.event(index, event)
                }
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Quiet;

    impl Encode for Quiet {
        fn event(&mut self, _: usize, _: Event) -> String {
            "event\n\n".to_owned()
        }
    }

    /// A stream on which nothing happens says so at every interval, and what comes then comes at once.
    #[tokio::test(start_paused = true)]
    async fn a_quiet_stream_says_that_it_lives() {
        let (send, events) = tokio::sync::mpsc::unbounded_channel();
        let answers = Answers { id: String::new(), created: 0, n: 1, prompt_tokens: 1, events };
        let (encoder, stage) = (Quiet, Stage::Events);
        let mut state = State { answers, encoder, open: 1, stage, _alive: Arc::new(()) };
        let began = tokio::time::Instant::now();
        for n in 1..4 {
            assert_eq!(next(&mut state).await.unwrap(), ": keepalive\n\n");
            assert_eq!(began.elapsed(), n * KEEP_ALIVE);
        }
        send.send((0, Event::Piece { deltas: Vec::new(), token: None })).unwrap();
        assert_eq!(next(&mut state).await.unwrap(), "event\n\n");
        assert_eq!(began.elapsed(), 3 * KEEP_ALIVE);
    }
}
