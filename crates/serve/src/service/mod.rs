//! One kind of request in, one kind of event out: what all APIs share. `prepare` makes prompts, `ear` events.

mod ear;
mod prepare;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use forebay_chat::{Answer, Delta, Format, Parsed, Tool};
use forebay_engine::{SamplerParams, SteerVectors, Steering};
use forebay_schedule::{Constraint, Job, Refusal, Scheduler, Usage};
use forebay_text::{ChatTemplate, Markers, Tokenizer};
use serde_json::{Map, Value};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use self::ear::Ear;
use self::prepare::Prepared;
use crate::check::Names;
use crate::error::{ApiError, Kind};
use crate::fields::Fields;
use crate::grammar::{Grammars, Shape};
use crate::record::Record;
use crate::room::Encoding;

/// What the APIs sample with where neither a request nor the server's owner nor the model says anything.
pub fn usual_sampling() -> SamplerParams {
    SamplerParams { temperature: 1.0, ..SamplerParams::default() }
}

/// What the model is, for those who ask.
#[derive(Clone, Debug)]
pub struct ModelInfo {
    /// Name under which it is served.
    pub name: String,
    /// Family.
    pub family: String,
    /// Bytes of its files.
    pub bytes: u64,
    /// When its files were written, or the server began, in seconds since 1970.
    pub created: u64,
    /// Positions of a sequence.
    pub context: usize,
    /// Rows of the embedding.
    pub vocab: usize,
    /// Experts of a routed layer; 0 where there are none.
    pub experts: usize,
    /// Which layers are routed.
    pub routed_layers: Vec<usize>,
    /// Bytes that the memory plan is for.
    pub budget: u64,
    /// Bytes of a GPU's memory besides.
    pub device_bytes: u64,
    /// Lines of the memory plan.
    pub ledger: Vec<(&'static str, u64)>,
}

/// A model that answers.
pub struct Service {
    pub(crate) info: ModelInfo,
    pub(crate) scheduler: Scheduler,
    pub(crate) defaults: SamplerParams,
    tokenizer: Tokenizer,
    template: Option<ChatTemplate>,
    format: Format,
    /// Whether the template itself writes tools.
    writes_tools: bool,
    ends: Arc<[u32]>,
    grammars: Grammars,
    ids: AtomicU64,
    pub(crate) encoding: Encoding,
    pub(crate) began: std::time::Instant,
    log_prompts: bool,
    steer: Arc<SteerVectors>,
    /// How the model is steered where a request says nothing.
    steering: Option<Arc<Steering>>,
}

/// What to go on from.
#[derive(Clone, Debug)]
pub(crate) enum Input {
    /// A conversation.
    Chat {
        messages: Vec<Value>,
        /// Further variables of the template.
        kwargs: Map<String, Value>,
    },
    /// A text as it is.
    Text(String),
    /// Token ids as they are.
    Ids(Vec<u32>),
}

/// Which tools must or may be called.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) enum ToolChoice {
    #[default]
    Auto,
    None,
    Required,
    Named(String),
}

/// A request in nobody's shape.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    /// What the API calls what may be wrong.
    pub names: Names,
    pub input: Input,
    /// Tools in OpenAI's form.
    pub tools: Vec<Value>,
    pub tool_choice: ToolChoice,
    pub parallel_calls: bool,
    pub shape: Option<Shape>,
    pub max_tokens: Option<usize>,
    pub sampling: SamplerParams,
    /// Added to logits, by token.
    pub bias: Vec<(u32, f32)>,
    /// The answer begins with the prompt.
    pub echo: bool,
    /// No token ends the answer.
    pub ignores_ends: bool,
    pub stops: Vec<String>,
    pub n: usize,
    pub logprobs: Option<usize>,
    /// How the model is steered.
    pub steering: Option<Arc<Steering>>,
}

/// A token with its log-probability, as text.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TokenInfo {
    pub text: String,
    pub bytes: Vec<u8>,
    pub logprob: f32,
    pub top: Vec<(String, Vec<u8>, f32)>,
}

/// Something that happened to an answer.
#[derive(Clone, Debug)]
pub(crate) enum Event {
    /// A token: text that is certain by now, and the token where log-probabilities are wanted.
    Piece { deltas: Vec<Delta>, token: Option<TokenInfo> },
    /// The end.
    Done(Finished),
    /// It failed.
    Failed(ApiError),
}

/// How an answer ended.
#[derive(Clone, Debug)]
pub(crate) struct Finished {
    /// `stop`, `length` or `tool_calls`.
    pub reason: &'static str,
    /// The stop string that was reached.
    pub stop: Option<String>,
    pub usage: Usage,
}

/// Answers on their way. Dropping it stops them.
#[derive(Debug)]
pub(crate) struct Answers {
    pub id: String,
    pub created: u64,
    pub n: usize,
    pub prompt_tokens: usize,
    pub events: UnboundedReceiver<(usize, Event)>,
}

/// A whole answer.
#[derive(Clone, Debug)]
pub(crate) struct Whole {
    pub parsed: Parsed,
    pub tokens: Vec<TokenInfo>,
    pub finished: Finished,
}

impl Answers {
    /// Waits for all of them.
    pub async fn whole(mut self) -> Result<Vec<Whole>, ApiError> {
        let mut parsed = vec![Parsed::default(); self.n];
        let mut tokens = vec![Vec::new(); self.n];
        let mut finished = vec![None; self.n];
        while let Some((index, event)) = self.events.recv().await {
            match event {
                Event::Piece { deltas, token } => {
                    deltas.into_iter().for_each(|delta| parsed[index].add(delta));
                    tokens[index].extend(token);
                }
                Event::Done(done) => finished[index] = Some(done),
                Event::Failed(error) => return Err(error),
            }
        }
        let all = parsed.into_iter().zip(tokens).zip(finished);
        all.map(|((mut parsed, tokens), finished)| {
            let gone = || ApiError::new(Kind::Internal, "the engine is gone");
            let finished = finished.ok_or_else(gone)?;
            parsed.finish_reason = finished.reason;
            Ok(Whole { parsed, tokens, finished })
        })
        .collect()
    }
}

impl Service {
    /// A service over a scheduler whose engine has this model.
    pub fn new(
        info: ModelInfo,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        template: Option<ChatTemplate>,
        ends: Vec<u32>,
        defaults: SamplerParams,
    ) -> Service {
        let source = template.as_ref().map_or("", |t| t.source());
        let ends: Arc<[u32]> = ends.into();
        Service {
            format: Format::of_template(source),
            writes_tools: source.contains("tools"),
            grammars: Grammars::new(tokenizer.clone(), ends.clone(), info.vocab, source),
            info,
            scheduler,
            defaults,
            tokenizer,
            template,
            ends,
            ids: AtomicU64::new(0),
            encoding: Encoding::default(),
            began: std::time::Instant::now(),
            log_prompts: false,
            steer: Arc::default(),
            steering: None,
        }
    }

    /// Vectors that requests can name, and how the model is steered where one says nothing.
    pub fn steer(&mut self, vectors: Arc<SteerVectors>, otherwise: Option<Arc<Steering>>) {
        self.steer = vectors;
        self.steering = otherwise;
    }

    /// How a request that says nothing is steered.
    pub(crate) fn steering(&self) -> Option<Arc<Steering>> {
        self.steering.clone()
    }

    /// What a request's field `steer` says: `{"name": strength}`, or true for the vector's own strength.
    pub(crate) fn steering_of(
        &self,
        fields: Fields<'_>,
    ) -> Result<Option<Arc<Steering>>, ApiError> {
        let Some(value) = fields.get("steer") else { return Ok(self.steering()) };
        let wrong = || {
            let what = "must be an object of vectors' names and their strengths: numbers, or true";
            fields.wrong("steer", what)
        };
        let mut chosen = Vec::new();
        for (name, strength) in value.as_object().ok_or_else(wrong)? {
            let strength = match strength {
                Value::Bool(true) => None,
                Value::Bool(false) => Some(0.0),
                number => Some(number.as_f64().ok_or_else(wrong)? as f32),
            };
            chosen.push((name.as_str(), strength));
        }
        self.steer
            .choose(chosen)
            .map_err(|error| fields.wrong("steer", format_args!("is refused: {error}")))
    }

    /// Writes the texts of prompts to the log.
    pub fn log_prompts(&mut self) {
        self.log_prompts = true;
    }

    /// The scheduler.
    pub fn scheduler(&self) -> &Scheduler {
        &self.scheduler
    }

    /// Sampling where a request says nothing.
    pub fn sampling_defaults(&self) -> &SamplerParams {
        &self.defaults
    }

    /// Sampling of a request that says nothing, with a seed of its own.
    pub(crate) fn sampling(&self) -> SamplerParams {
        let seed = fresh_seed(self.ids.fetch_add(1, Ordering::Relaxed));
        SamplerParams { seed, ..self.defaults.clone() }
    }

    /// Refuses another model's name.
    pub(crate) fn check_model(&self, name: Option<&str>) -> Result<(), ApiError> {
        let own = &self.info.name;
        match name {
            // Some clients append a tag.
            Some(name) if name != own && name.strip_suffix(":latest") != Some(own) => {
                let message = format!("the model `{name}` is not served here; there is `{own}`");
                Err(ApiError { kind: Kind::NoModel, message, param: Some("model".into()) })
            }
            _ => Ok(()),
        }
    }

    /// Tokens that a prompt takes.
    pub(crate) fn count(&self, request: &Request) -> Result<usize, ApiError> {
        Ok(self.prepare(request)?.ids.len())
    }

    /// Begins to answer, for one that is recorded in the log or not.
    pub(crate) fn begin(
        &self,
        request: &Request,
        record: Option<&Arc<Record>>,
    ) -> Result<Answers, ApiError> {
        let prepared = self.prepare(request)?;
        let prompt_tokens = prepared.ids.len();
        if prompt_tokens >= self.info.context {
            return Err(self.too_long(request, prompt_tokens, ""));
        }
        let shape = self.shape(request, &prepared.tools)?;
        let most = request.max_tokens.unwrap_or(usize::MAX).min(self.info.context - prompt_tokens);
        let number = self.ids.fetch_add(1, Ordering::Relaxed);
        let id = format!("{:016x}{number:08x}", fresh_seed(number));
        if self.log_prompts {
            let prompt = self.tokenizer.decode(&prepared.ids, Markers::Keep);
            tracing::info!(target: "forebay::prompt", id, prompt, "prompt");
        }
        let echo = request.echo.then(|| match &request.input {
            Input::Text(text) => text.clone(),
            _ => self.tokenizer.decode(&prepared.ids, Markers::Keep),
        });
        let bias: Arc<[(u32, f32)]> = request.bias.clone().into();
        let ids: Arc<[u32]> = prepared.ids.as_slice().into();
        let (send, events) = unbounded_channel();
        let mut jobs = Vec::with_capacity(request.n);
        for index in 0..request.n {
            let constraint = match &shape {
                None => None,
                Some(shape) => Some(self.constraint(request, &prepared, shape, most)?),
            };
            let sampling = SamplerParams {
                seed: request.sampling.seed.wrapping_add(index as u64),
                ..request.sampling.clone()
            };
            jobs.push(Job {
                prompt: ids.clone(),
                max_tokens: request.max_tokens.unwrap_or(usize::MAX),
                ends: if request.ignores_ends { Arc::default() } else { self.ends.clone() },
                sampling,
                bias: bias.clone(),
                logprobs: request.logprobs,
                checkpoints: prepared.checkpoints.clone(),
                steering: request.steering.clone(),
                constraint,
                listener: Box::new(Ear {
                    index,
                    answer: Answer::new(
                        &self.tokenizer,
                        prepared.format,
                        &prepared.tools,
                        &prepared.tail,
                        &request.stops,
                    ),
                    stops: request.stops.clone(),
                    wants_tokens: request.logprobs.is_some(),
                    calls_only: matches!(shape, Some(Shape::Call { .. })),
                    tokenizer: self.tokenizer.clone(),
                    send: send.clone(),
                    record: record.cloned(),
                }),
            });
        }
        for index in 0..request.n {
            if let Some(text) = &echo {
                let deltas = vec![Delta::Content(text.clone())];
                // The receiver is in our hands.
                let _ = send.send((index, Event::Piece { deltas, token: None }));
            }
        }
        drop(send);
        self.scheduler.submit_all(jobs).map_err(|refusal| match refusal {
            Refusal::QueueFull => {
                ApiError::new(Kind::Busy, "as many requests wait as may; try again in a moment")
            }
            Refusal::Closed => ApiError::new(Kind::Closing, "the server is shutting down"),
        })?;
        if let Some(record) = record {
            record.begun(&id, request.n);
        }
        Ok(Answers { id, created: now(), n: request.n, prompt_tokens, events })
    }

    /// What holds an answer to its shape.
    fn constraint(
        &self,
        request: &Request,
        prepared: &Prepared,
        shape: &Shape,
        most: usize,
    ) -> Result<Box<dyn Constraint>, ApiError> {
        let (format, reasons) = (prepared.format, prepared.reasons);
        let of = |shape: &Shape| self.grammars.constraint(shape, format, reasons, most);
        of(shape).map_err(|fault| match shape {
            _ if fault.kind != Kind::Invalid => fault,
            Shape::Call { tools, .. } => {
                // Whose schema it is.
                let alone = |tool: &Tool| Shape::Call { tools: vec![tool.clone()], many: false };
                let all = tools.iter().filter_map(|tool| Some((tool, of(&alone(tool)).err()?)));
                let (name, fault) = all
                    .map(|(tool, fault)| (Some(&tool.name), fault))
                    .next()
                    .unwrap_or((None, fault));
                let at = name.and_then(|name| prepared.tools.iter().position(|t| t.name == *name));
                match at {
                    Some(at) => {
                        let path = format!("tools[{at}].{}", request.names.schema);
                        ApiError::field(path, fault.message)
                    }
                    None => ApiError::field("tools", fault.message),
                }
            }
            _ => ApiError::field(request.names.shape, fault.message),
        })
    }

    /// The shape that an answer must have, tools included.
    fn shape(&self, request: &Request, tools: &[Tool]) -> Result<Option<Shape>, ApiError> {
        let many = request.parallel_calls;
        let wrong = |what: &str| ApiError::field("tool_choice", what);
        match &request.tool_choice {
            ToolChoice::Auto | ToolChoice::None => Ok(request.shape.clone()),
            ToolChoice::Required if tools.is_empty() => {
                Err(wrong("there are no tools to choose from"))
            }
            ToolChoice::Required => Ok(Some(Shape::Call { tools: tools.to_vec(), many })),
            ToolChoice::Named(name) => {
                let tool = tools.iter().find(|tool| tool.name == *name);
                let tool = tool.ok_or_else(|| wrong(&format!("there is no tool `{name}`")))?;
                Ok(Some(Shape::Call { tools: vec![tool.clone()], many: false }))
            }
        }
    }
}

/// Seconds since 1970.
pub(crate) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

fn fresh_seed(number: u64) -> u64 {
    let nanos = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    (nanos ^ number.rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}
