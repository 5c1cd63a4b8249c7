//! Connections: how many there may be, how long one may be silent, and how they end.
//!
//! axum's own loop takes as many connections as come and waits for headers for ever, so the loop is here, over the
//! same hyper. Who comes when all places are taken is answered with 503 on a connection that is closed then; when
//! many are being turned away too, the rest waits in the system's backlog.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::response::Response;
use axum::serve::Listener;
use hyper::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::sync::Semaphore;

/// How long headers may take to come, on a connection that is new or was used before.
const HEADERS: Duration = Duration::from_secs(30);
/// The same on a connection that is turned away.
const TURNED_AWAY: Duration = Duration::from_secs(5);
/// What a connection may have sent or has still to send, each, in bytes.
const BUFFER: usize = 128 << 10;
/// Connections that are turned away at once.
const MOST_TURNED_AWAY: usize = 32;

/// Serves connections until `ended` is ready, then until all of them are over; idle ones are closed at once.
/// `refusal` answers who finds more than `most` connections.
pub(crate) async fn serve<L: Listener>(
    mut listener: L,
    app: Router,
    most: usize,
    refusal: impl Fn(&str) -> Response + Clone + Send + 'static,
    ended: impl Future<Output = ()>,
) {
    let places = Arc::new(Semaphore::new(most));
    let turned_away = Arc::new(Semaphore::new(MOST_TURNED_AWAY));
    let graceful = GracefulShutdown::new();
    let mut ended = std::pin::pin!(ended);
    loop {
        let io = tokio::select! {
            (io, _) = listener.accept() => TokioIo::new(io),
            () = &mut ended => break,
        };
        if let Ok(place) = places.clone().try_acquire_owned() {
            let service = TowerToHyperService::new(app.clone());
            let connection = graceful.watch(builder(HEADERS).serve_connection(io, service));
            tokio::spawn(async move {
                // What a client does to its connection is its own affair.
                let _ = connection.await;
                drop(place);
            });
            continue;
        }
        let place = tokio::select! {
            place = turned_away.clone().acquire_owned() => place.expect("nobody closes it"),
            () = &mut ended => break,
        };
        let refusal = refusal.clone();
        let service = service_fn(move |request: Request<Incoming>| {
            let response = refusal(request.uri().path());
            async move { Ok::<_, Infallible>(response) }
        });
        let mut refusing = builder(TURNED_AWAY);
        let connection = refusing.keep_alive(false).serve_connection(io, service);
        tokio::spawn(async move {
            let _ = tokio::time::timeout(2 * TURNED_AWAY, connection).await;
            drop(place);
        });
    }
    drop(listener);
    graceful.shutdown().await;
}

fn builder(headers: Duration) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(headers).max_buf_size(BUFFER);
    builder
}
