//! Connections: how many there may be, how long one may be silent or deaf, and how they end.
//!
//! axum's own loop takes as many connections as come and waits for headers for ever, so the loop is here, over the
//! same hyper. Who comes when all places are taken is answered with 503 on a connection that is closed then; when
//! many are being turned away too, the rest waits in the system's backlog.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
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
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::Semaphore;
use tokio::time::Sleep;

/// How long headers may take to come, on a connection that is new or was used before.
const HEADERS: Duration = Duration::from_secs(30);
/// The same on a connection that is turned away.
const TURNED_AWAY: Duration = Duration::from_secs(5);
/// What a connection may have sent or has still to send, each, in bytes.
const BUFFER: usize = 128 << 10;
/// Connections that are turned away at once.
const MOST_TURNED_AWAY: usize = 32;

/// How many connections there may be, and how long one may take nothing of what is sent to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    pub most: usize,
    pub unread: Duration,
}

/// Serves connections until `ended` is ready, then until all of them are over; idle ones are closed at once.
/// `refusal` answers who finds all places taken.
pub(crate) async fn serve<L: Listener<Addr = SocketAddr>>(
    mut listener: L,
    app: Router,
    bounds: Bounds,
    refusal: impl Fn(&str) -> Response + Clone + Send + 'static,
    ended: impl Future<Output = ()>,
) {
    let places = Arc::new(Semaphore::new(bounds.most));
    let turned_away = Arc::new(Semaphore::new(MOST_TURNED_AWAY));
    let graceful = GracefulShutdown::new();
    let mut ended = std::pin::pin!(ended);
    loop {
        let (io, peer) = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut ended => break,
        };
        let unread = Arc::new(AtomicBool::new(false));
        let io = TokioIo::new(Taken::new(io, bounds.unread, unread.clone()));
        if let Ok(place) = places.clone().try_acquire_owned() {
            let service = TowerToHyperService::new(app.clone());
            let connection = graceful.watch(builder(HEADERS).serve_connection(io, service));
            tokio::spawn(async move {
                // What a client does to its connection is its own affair.
                let _ = connection.await;
                drop(place);
                if unread.load(Ordering::Relaxed) {
                    let seconds = bounds.unread.as_secs();
                    tracing::warn!(
                        target: "forebay::request",
                        %peer,
                        seconds,
                        "a client read nothing of what was sent to it for so long: its connection is closed"
                    );
                }
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

/// A connection whose writes fail once its client has taken nothing for so long. Without that, who asks and never reads
/// keeps a place for ever.
struct Taken<T> {
    io: T,
    most: Duration,
    /// Runs while a write waits.
    waiting: Option<Pin<Box<Sleep>>>,
    /// Told when it ran out.
    unread: Arc<AtomicBool>,
}

impl<T> Taken<T> {
    fn new(io: T, most: Duration, unread: Arc<AtomicBool>) -> Taken<T> {
        Taken { io, most, waiting: None, unread }
    }

    /// What came of a write, or that it waits for too long.
    fn bounded<R>(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<R>>,
    ) -> Poll<io::Result<R>> {
        if written.is_ready() {
            self.waiting = None;
            return written;
        }
        let most = self.most;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(tokio::time::sleep(most)));
        std::task::ready!(waiting.as_mut().poll(cx));
        self.unread.store(true, Ordering::Relaxed);
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Taken<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Taken<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write(cx, buf);
        self.bounded(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.io).poll_write_vectored(cx, bufs);
        self.bounded(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.io.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match Pin::new(&mut self.io).poll_flush(cx) {
            // A plain connection is always flushed, also while it takes nothing.
            Poll::Ready(flushed) => Poll::Ready(flushed),
            Poll::Pending => self.bounded(cx, Poll::Pending),
        }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.io).poll_shutdown(cx);
        self.bounded(cx, shut)
    }
}
