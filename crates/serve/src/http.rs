//! Routes, keys, limits, and the end.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::{Path, Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::serve::ListenerExt;
use bytes::BytesMut;
use futures_util::StreamExt;
use serde_json::Value;
use subtle::ConstantTimeEq;
use tokio::net::{TcpListener, TcpSocket};

use crate::error::{ApiError, Kind};
use crate::record::{self, recorded};
use crate::room::{self, Bodies, Held};
use crate::service::{Answers, Service};
use crate::tls::{Tls, TlsListener};
use crate::{anthropic, connections, live, metrics, ollama, openai, page, responses};

/// What the system holds of what a connection was sent, in bytes.
const SEND_BUFFER: u32 = 64 << 10;
/// Connections that may wait to be accepted.
const BACKLOG: u32 = 1024;
/// How long a body may take to come.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);
/// Where to ask, for those who asked elsewhere.
const ROUTES: &str = "/v1/chat/completions, /v1/completions, /v1/responses, /v1/models, /v1/messages, \
                      /v1/messages/count_tokens, /api/chat, /api/generate, /api/tags, /api/ps, /api/show, \
                      /api/version, /health, /metrics";
/// How often memory that is free is given back.
const GIVE_BACK: Duration = Duration::from_secs(2);
/// How long those whose answers were cut off at the end may take to read so.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// What a client that was turned away waits.
const RETRY_AFTER: &str = "1";

/// Choices of the HTTP side.
#[derive(Clone, Debug)]
pub struct HttpOptions {
    /// Where to listen.
    pub listen: SocketAddr,
    /// Keys, one of which a request must bring; none: everybody may ask.
    pub keys: Vec<String>,
    /// Origins whose pages may ask; `*` is all. None: none but the server's own.
    pub cors: Vec<String>,
    /// Connections at once; who comes besides is turned away.
    pub max_connections: usize,
    /// How long a client may take nothing of what is sent to it, before its connection is closed.
    pub unread: Duration,
    /// Largest body in bytes.
    pub max_body_bytes: usize,
    /// Largest headers in bytes, all together.
    pub max_header_bytes: usize,
    /// How long running answers may go on after the server was told to end.
    pub grace: Duration,
    /// Encrypts with this.
    pub tls: Option<Tls>,
}

impl Default for HttpOptions {
    fn default() -> Self {
        HttpOptions {
            listen: SocketAddr::from(([127, 0, 0, 1], 8080)),
            keys: Vec::new(),
            cors: Vec::new(),
            max_connections: 256,
            unread: Duration::from_secs(60),
            max_body_bytes: 8 << 20,
            max_header_bytes: 64 << 10,
            grace: Duration::from_secs(30),
            tls: None,
        }
    }
}

#[derive(Clone)]
struct App {
    service: Arc<Service>,
    options: Arc<HttpOptions>,
    bodies: Arc<Bodies>,
}

/// The API that a path belongs to, for the shape of errors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Api {
    OpenAi,
    Anthropic,
    Ollama,
}

impl Api {
    fn of(path: &str) -> Api {
        match path {
            _ if path.starts_with("/v1/messages") => Api::Anthropic,
            _ if path.starts_with("/api/") => Api::Ollama,
            _ => Api::OpenAi,
        }
    }

    fn error(self, error: &ApiError) -> Response {
        let body = match self {
            Api::OpenAi => openai::error_body(error),
            Api::Anthropic => anthropic::error_body(error),
            Api::Ollama => ollama::error_body(error),
        };
        let mut response = json(&body);
        let status = StatusCode::from_u16(error.status());
        *response.status_mut() = status.unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        if matches!(error.kind, Kind::Busy | Kind::Full | Kind::Closing) {
            let value = HeaderValue::from_static(RETRY_AFTER);
            response.headers_mut().insert(header::RETRY_AFTER, value);
        }
        response
    }
}

fn json(body: &Value) -> Response {
    let content_type = HeaderValue::from_static("application/json");
    ([(header::CONTENT_TYPE, content_type)], body.to_string()).into_response()
}

/// A good response.
pub(crate) fn ok_json(body: &Value) -> Response {
    json(body)
}

/// Runs work that takes a while, such as rendering a long prompt, where it holds nobody up.
pub(crate) async fn off_the_reactor<R: Send + 'static>(
    f: impl FnOnce() -> Result<R, ApiError> + Send + 'static,
) -> Result<R, ApiError> {
    let held = room::release();
    let work = move || {
        let result = f();
        drop(held);
        result
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(_) => Err(ApiError::new(Kind::Internal, "the request could not be worked on")),
    }
}

/// What every API's route for embeddings says.
async fn no_embeddings(uri: axum::http::Uri) -> Response {
    let what = "this server has no embeddings: it serves a model that generates text";
    Api::of(uri.path()).error(&ApiError::new(Kind::NoRoute, what))
}

/// Begins to answer what the request of this task asks.
pub(crate) async fn begin(
    service: &Arc<Service>,
    request: crate::service::Request,
) -> Result<Answers, ApiError> {
    let (service, record) = (service.clone(), record::current());
    off_the_reactor(move || service.begin(&request, record.as_ref())).await
}

/// Serves until `ended` is ready, then lets running answers end, for as long as the grace. `listening` is
/// told the address.
pub async fn serve(
    service: Arc<Service>,
    options: HttpOptions,
    listening: impl FnOnce(SocketAddr),
    ended: impl Future<Output = ()> + Send + 'static,
) -> std::io::Result<()> {
    let listener = listen(options.listen)?;
    listening(listener.local_addr()?);
    let (grace, tls, most) = (options.grace, options.tls.clone(), options.max_connections);
    let bounds = connections::Bounds { most, unread: options.unread };
    let app = router(service.clone(), options);
    let (told, mut hears) = tokio::sync::watch::channel(false);
    let closing = service.clone();
    let shutdown = async move {
        ended.await;
        closing.scheduler().close();
        let _ = told.send(true);
    };
    let full = move |path: &str| {
        let what =
            format!("{most} connections are open, and no more may be; try again in a moment");
        Api::of(path).error(&ApiError::new(Kind::Full, what))
    };
    let server = async move {
        match tls {
            None => {
                // Tokens go out one by one. Where that cannot be said, they are late.
                let listener = listener.tap_io(|stream| _ = stream.set_nodelay(true));
                connections::serve(listener, app, bounds, full, shutdown).await;
            }
            Some(tls) => {
                let listener = TlsListener::new(listener, &tls)?;
                connections::serve(listener, app, bounds, full, shutdown).await;
            }
        }
        std::io::Result::Ok(())
    };
    let too_long = async {
        // The sender lives as long as the server.
        let _ = hears.wait_for(|told| *told).await;
        tokio::time::sleep(grace).await;
    };
    let mut server = std::pin::pin!(server);
    let result = tokio::select! {
        never = give_back(service.clone()) => match never {},
        result = &mut server => result,
        () = too_long => {
            service.scheduler().abort();
            // Who was cut off is told so, if it reads.
            tokio::time::timeout(LAST_WORDS, server).await.unwrap_or(Ok(()))
        }
    };
    service.scheduler().abort();
    result
}

/// A socket whose connections hold little that was not taken yet: with the system's own buffers of megabytes, a client
/// that reads slowly and steadily would look for minutes like one that reads nothing.
fn listen(address: SocketAddr) -> std::io::Result<TcpListener> {
    let socket = match address {
        SocketAddr::V4(_) => TcpSocket::new_v4()?,
        SocketAddr::V6(_) => TcpSocket::new_v6()?,
    };
    if cfg!(unix) {
        socket.set_reuseaddr(true)?;
    }
    socket.set_send_buffer_size(SEND_BUFFER)?;
    socket.bind(address)?;
    socket.listen(BACKLOG)
}

/// Gives memory back that long texts have left free.
async fn give_back(service: Arc<Service>) -> std::convert::Infallible {
    loop {
        tokio::time::sleep(GIVE_BACK).await;
        if service.encoding.left_holes() {
            // It cannot fail, and nobody depends on it.
            let _ = tokio::task::spawn_blocking(forebay_engine::heap::give_back).await;
        }
    }
}

/// All routes.
fn router(service: Arc<Service>, options: HttpOptions) -> Router {
    let app = App {
        service,
        bodies: Arc::new(Bodies::new(options.max_body_bytes)),
        options: Arc::new(options),
    };
    macro_rules! asks {
        ($handler:path) => {
            post(|State(app): State<App>, request: Request| async move {
                let api = Api::of(request.uri().path());
                let answer = async {
                    let (body, held) = body(&app, request).await?;
                    room::holding(held, $handler(app.service.clone(), body)).await
                };
                answer.await.unwrap_or_else(|error: ApiError| api.error(&error))
            })
        };
    }
    Router::new()
        .route("/v1/chat/completions", asks!(openai::chat))
        .route("/v1/completions", asks!(openai::completions))
        .route("/v1/responses", asks!(responses::responses))
        .route("/v1/embeddings", post(no_embeddings))
        .route("/api/embed", post(no_embeddings))
        .route("/api/embeddings", post(no_embeddings))
        .route(
            "/v1/models",
            get(|State(app): State<App>| async move { json(&openai::models(&app.service)) }),
        )
        .route("/v1/models/{*name}", get(model))
        .route("/v1/messages", asks!(anthropic::messages))
        .route("/v1/messages/count_tokens", asks!(anthropic::count_tokens))
        .route("/api/chat", asks!(ollama::chat))
        .route("/api/generate", asks!(ollama::generate))
        .route(
            "/api/tags",
            get(|State(app): State<App>| async move { json(&ollama::tags(&app.service)) }),
        )
        .route(
            "/api/ps",
            get(|State(app): State<App>| async move { json(&ollama::loaded_models(&app.service)) }),
        )
        .route("/api/show", asks!(ollama::show))
        .route(
            "/api/version",
            get(|| async { json(&serde_json::json!({ "version": env!("CARGO_PKG_VERSION") })) }),
        )
        .route("/health", get(health))
        .route("/", get(page_file))
        .route("/forebay.css", get(page_file))
        .route("/forebay.js", get(page_file))
        .route(
            "/v1/forebay/live",
            get(|State(app): State<App>| async move { json(&live::live(&app.service)) }),
        )
        .route(
            "/metrics",
            get(|State(app): State<App>| async move {
                let kind = HeaderValue::from_static("text/plain; version=0.0.4");
                ([(header::CONTENT_TYPE, kind)], metrics::metrics(&app.service))
            }),
        )
        .fallback(|request: Request| async move {
            let path = request.uri().path().to_owned();
            let what = format!("there is no route {} {path}; there are {ROUTES}", request.method());
            Api::of(&path).error(&ApiError::new(Kind::NoRoute, what))
        })
        .method_not_allowed_fallback(|request: Request| async move {
            let path = request.uri().path().to_owned();
            let what = format!("{path} does not take {}", request.method());
            Api::of(&path).error(&ApiError::new(Kind::Method, what))
        })
        .layer(middleware::from_fn_with_state(app.clone(), guard))
        .with_state(app)
}

async fn page_file(request: Request) -> Response {
    page::file(request.uri().path()).unwrap_or_else(|| StatusCode::NOT_FOUND.into_response())
}

async fn health(State(app): State<App>) -> Response {
    let (open, health) = metrics::health(&app.service);
    let mut response = json(&health);
    if !open {
        *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    }
    response
}

async fn model(
    State(app): State<App>,
    name: Result<Path<String>, axum::extract::rejection::PathRejection>,
) -> Response {
    // What is no text is nobody's name.
    let name = name.map_or_else(|_| "?".to_owned(), |Path(name)| name);
    match app.service.check_model(Some(&name)) {
        Ok(()) => json(&openai::model(&app.service)),
        Err(error) => Api::OpenAi.error(&error),
    }
}

/// The body as JSON, with the room that it takes.
async fn body(app: &App, request: Request) -> Result<(Value, Held), ApiError> {
    let most = app.options.max_body_bytes;
    let encoding = request.headers().get(header::CONTENT_ENCODING);
    if let Some(encoding) = encoding.filter(|e| !e.is_empty() && *e != "identity") {
        let encoding: String = encoding.to_str().unwrap_or("?").chars().take(60).collect();
        let what =
            format!("a body with Content-Encoding `{encoding}` is not read: send it as it is");
        return Err(ApiError::new(Kind::Encoding, what));
    }
    let too_large =
        || ApiError::new(Kind::TooLarge, format!("the body is larger than {most} bytes"));
    let declared = request.headers().get(header::CONTENT_LENGTH);
    let declared = declared.and_then(|v| v.to_str().ok()?.parse::<u64>().ok());
    if declared.is_some_and(|n| n > most as u64) {
        return Err(too_large());
    }
    // Room is taken as bytes come: who only says that much will come takes none.
    let mut stream = request.into_body().into_data_stream();
    let mut bytes = BytesMut::new();
    let mut held: Option<Held> = None;
    let read = async {
        while let Some(piece) = stream.next().await {
            let cut = |_| ApiError::new(Kind::Invalid, "the body was cut off");
            let piece = piece.map_err(cut)?;
            if bytes.len() + piece.len() > most {
                return Err(too_large());
            }
            // What grows may be there twice for a moment.
            let more = app.bodies.take(2 * piece.len())?;
            match &mut held {
                Some(held) => held.merge(more),
                None => held = Some(more),
            }
            bytes.extend_from_slice(&piece);
        }
        Ok(())
    };
    match tokio::time::timeout(BODY_TIMEOUT, read).await {
        Err(_) => return Err(ApiError::new(Kind::Timeout, "the body did not come in time")),
        Ok(result) => result?,
    }
    let bytes = bytes.freeze();
    drop(held);
    let held = app.bodies.take_parsed(&bytes)?;
    // A mark of UTF-8 is no part of it.
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(&bytes);
    if text.is_empty() {
        return Err(ApiError::new(Kind::Invalid, "the body is empty: send a JSON object"));
    }
    let value = serde_json::from_slice(text).map_err(|error| {
        let what = format!("the body is no JSON: {error}; send a JSON object in UTF-8");
        ApiError::new(Kind::Invalid, what)
    })?;
    Ok((value, held))
}

/// What every request passes: limits, origins, keys.
async fn guard(State(app): State<App>, request: Request, next: Next) -> Response {
    let (method, path) = (request.method().to_string(), request.uri().path().to_owned());
    recorded(&method, &path, judge(app, request, next)).await
}

async fn judge(app: App, request: Request, next: Next) -> Response {
    let options = &app.options;
    let api = Api::of(request.uri().path());
    let refuse = |kind, what: &str| api.error(&ApiError::new(kind, what));
    let size: usize = request.headers().iter().map(|(n, v)| n.as_str().len() + v.len()).sum();
    if size > options.max_header_bytes {
        return refuse(Kind::Headers, "the headers are too large");
    }
    let origin = request.headers().get(header::ORIGIN).cloned();
    let allowed = origin.as_ref().is_some_and(|origin| {
        options.cors.iter().any(|o| o == "*" || o.as_bytes() == origin.as_bytes())
    });
    if let Some(origin) = &origin
        && !allowed
        && !is_own(origin, request.headers())
    {
        return refuse(
            Kind::Forbidden,
            "pages of other origins may not ask; allow them with --cors",
        );
    }
    let mut response = if allowed && request.method() == Method::OPTIONS {
        StatusCode::NO_CONTENT.into_response()
    } else if !may_pass(options, &request) {
        refuse(Kind::Unauthorized, "the API key is missing or wrong")
    } else {
        next.run(request).await
    };
    if let Some(origin) = origin.filter(|_| allowed) {
        let headers = response.headers_mut();
        headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
        headers.insert(header::VARY, HeaderValue::from_static("origin"));
        let methods = HeaderValue::from_static("GET, POST, OPTIONS");
        headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, methods);
        headers.insert(
            header::ACCESS_CONTROL_ALLOW_HEADERS,
            HeaderValue::from_static("*, authorization"),
        );
    }
    response
}

/// Whether a page is the server's own.
fn is_own(origin: &HeaderValue, headers: &HeaderMap) -> bool {
    let host = headers.get(header::HOST).and_then(|host| host.to_str().ok());
    let origin = origin.to_str().ok();
    let origin = origin.and_then(|o| o.split_once("://")).map(|(_, host)| host);
    origin.is_some() && origin == host
}

fn may_pass(options: &HttpOptions, request: &axum::http::Request<Body>) -> bool {
    if options.keys.is_empty()
        || request.uri().path() == "/health"
        || page::has(request.uri().path())
    {
        return true;
    }
    let headers = request.headers();
    let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes);
    let bearer = bearer.and_then(|value| value.strip_prefix(b"Bearer "));
    let given = bearer.or(headers.get("x-api-key").map(HeaderValue::as_bytes));
    let Some(given) = given else { return false };
    // All keys are compared, each in constant time; only lengths show.
    let mut found = subtle::Choice::from(0);
    for key in &options.keys {
        found |= key.as_bytes().ct_eq(given);
    }
    found.into()
}
