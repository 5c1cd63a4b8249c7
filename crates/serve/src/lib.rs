//! HTTP over the scheduler: the APIs of OpenAI, Anthropic and Ollama, so that existing clients work unchanged.
//!
//! Reading order: [`service`] (one kind of request in, one kind of event out: what all APIs share), `grammar`
//! (what an answer must look like) with `dialect` (calls that are no JSON), `check` (what all APIs ask of functions and
//! messages), then the APIs, each a thin translation: `openai`, `responses`, `anthropic`,
//! `ollama`; [`http`] (routes, keys, limits), `connections`, `stream` (events to bodies), [`room`]
//! (memory of requests), `metrics`, `live` and `page` (what people look at), `record`
//! (the log), `tls`,
//! [`talk`] (the same without HTTP).
//!
//! Fields that an API does not have are ignored; fields that it has and this server does not support are refused
//! by name. Errors have the shape and the status of the API that was asked.
//!
//! Not here: batching and the engine (`forebay-schedule`), parsing of answers (`forebay-chat`).
#![forbid(unsafe_code)]

mod anthropic;
mod check;
mod connections;
mod dialect;
mod error;
mod fallback;
mod fields;
mod grammar;
pub mod http;
mod live;
mod metrics;
mod ollama;
mod openai;
mod page;
mod record;
mod responses;
pub mod room;
pub mod service;
mod stream;
pub mod talk;
mod tls;

pub use error::{ApiError, Kind};
pub use http::{HttpOptions, serve};
pub use service::{ModelInfo, Service, usual_sampling};
pub use talk::{Said, Talk, TalkOptions};
pub use tls::Tls;
