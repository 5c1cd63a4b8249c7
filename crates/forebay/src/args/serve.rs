//! `serve`

use std::path::PathBuf;

use clap::builder::BoolishValueParser;
use clap::{Args, ValueEnum};

use crate::args::options::ModelArgs;
use crate::args::sampling::SamplingArgs;
use crate::args::value_enum;

#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    pub model: ModelArgs,
    /// Address and port; port 0 takes a free one.
    #[arg(long, env = "FOREBAY_LISTEN", default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    pub listen: std::net::SocketAddr,
    /// Name of the model; that of its file unless told.
    #[arg(long, env = "FOREBAY_NAME")]
    pub name: Option<String>,
    /// Answers that are computed at once; 4 unless told.
    #[arg(long, env = "FOREBAY_PARALLEL", value_name = "N")]
    pub parallel: Option<usize>,
    /// Whole contexts that the memory plan has room for; as many as --parallel, and if neither is told, as many as cost
    /// experts little memory. Each answer takes room for its prompt and the tokens that it asks for, so with fewer,
    /// many short ones still run at once.
    #[arg(long, env = "FOREBAY_CONTEXTS", value_name = "N")]
    pub contexts: Option<usize>,
    /// Requests that may wait; more are told to come again.
    #[arg(long, env = "FOREBAY_QUEUE", value_name = "N", default_value_t = 64)]
    pub queue: usize,
    /// Connections that may be open; more are turned away with 503.
    #[arg(long, env = "FOREBAY_CONNECTIONS", value_name = "N", default_value_t = 256)]
    pub connections: usize,
    /// Seconds that a client may take nothing of what is sent to it, before its connection is closed.
    #[arg(
        long,
        env = "FOREBAY_UNREAD",
        value_name = "SECONDS",
        default_value_t = 60,
        value_parser = clap::value_parser!(u64).range(1..=86_400)
    )]
    pub unread: u64,
    /// A file with API keys, one a line; everybody may ask unless told.
    #[arg(long, env = "FOREBAY_API_KEYS", value_name = "FILE")]
    pub api_keys: Option<PathBuf>,
    /// An origin whose pages may ask, or *; may be given several times.
    #[arg(long, value_name = "ORIGIN")]
    pub cors: Vec<String>,
    /// Largest body of a request, in bytes.
    #[arg(long, env = "FOREBAY_MAX_BODY", value_name = "BYTES", default_value_t = 8 << 20)]
    pub max_body: usize,
    /// Seconds that running answers may go on after Ctrl-C.
    #[arg(long, env = "FOREBAY_GRACE", value_name = "SECONDS", default_value_t = 30)]
    pub grace: u64,
    /// Certificate chain in PEM form, the server's own first: serves https.
    #[arg(long, env = "FOREBAY_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,
    /// Private key of the certificate, in PEM form.
    #[arg(long, env = "FOREBAY_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,
    /// How requests are logged, on stderr: one line each, without texts.
    #[arg(long, env = "FOREBAY_LOG_FORMAT", value_enum, default_value = "text")]
    pub log_format: LogArg,
    /// Log the texts of prompts, too.
    #[arg(long, env = "FOREBAY_LOG_PROMPTS", value_parser = BoolishValueParser::new())]
    pub log_prompts: bool,
    /// A folder where what was computed of prompts is kept over a restart.
    #[arg(long, env = "FOREBAY_SESSIONS", value_name = "DIR")]
    pub sessions: Option<PathBuf>,
    #[command(flatten)]
    pub sampling: SamplingArgs,
}

value_enum!(
    /// `--log-format`
    LogArg {
        /// For people
        Text,
        /// One JSON object a line
        Json,
        /// Not at all
        Off,
    }
);
