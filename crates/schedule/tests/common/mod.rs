//! Bundled models, prompts, and a listener that writes down what it hears.
#![allow(dead_code, reason = "each test uses its part")]

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use forebay_engine::engine::Opened;
use forebay_engine::{Engine, EngineOptions, Mode, SamplerParams, SteerSource, Steering};
use forebay_schedule::{Constraint, Flow, Job, Listener, Outcome, Token, Usage};

/// Windows and sinks; attention in all layers; recurrent layers.
pub const MODELS: [&str; 3] = [
    "tiny-gpt-oss",
    "tiny-qwen3-moe/qwen3_moe-Q4_K_M.gguf",
    "tiny-qwen3.5-moe/qwen3_5_moe-Q4_K_M.gguf",
];

/// Windows as well, in five layers of six.
pub const GEMMA: &str = "tiny-gemma4-mlx4";

pub fn engine(model: &str, adjust: impl FnOnce(&mut EngineOptions)) -> Engine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(model);
    let mut options = EngineOptions {
        threads: Some(2),
        context: Some(512),
        chunk: Some(64),
        ..EngineOptions::default()
    };
    adjust(&mut options);
    Engine::load(Opened::open(&path, options).unwrap(), &mut |_, _| {}).unwrap()
}

/// The reference prompts: 12, 40, 200 and 700 ids.
pub fn prompt(index: usize, n: usize) -> Vec<u32> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/reference/prompts.json");
    let prompts: Vec<Vec<u32>> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    prompts[index].iter().copied().take(n).collect()
}

/// What a listener heard.
#[derive(Clone, Debug, PartialEq)]
pub struct Heard {
    pub tokens: Vec<Token>,
    pub outcome: Outcome,
    pub usage: Usage,
}

pub struct Ear {
    tokens: Vec<Token>,
    send: mpsc::Sender<Heard>,
    /// Gone as soon as set.
    pub gone: Arc<AtomicBool>,
    /// Counts tokens of all.
    pub heard: Arc<AtomicUsize>,
    /// Says stop after so many.
    pub stop_after: usize,
    /// Is gone after so many.
    pub gone_after: usize,
}

impl Ear {
    pub fn new() -> (Ear, mpsc::Receiver<Heard>) {
        let (send, receive) = mpsc::channel();
        let ear = Ear {
            tokens: Vec::new(),
            send,
            gone: Arc::default(),
            heard: Arc::default(),
            stop_after: usize::MAX,
            gone_after: usize::MAX,
        };
        (ear, receive)
    }
}

impl Listener for Ear {
    fn token(&mut self, token: &Token) -> Flow {
        self.heard.fetch_add(1, Ordering::SeqCst);
        self.tokens.push(token.clone());
        if self.tokens.len() >= self.stop_after { Flow::Stop } else { Flow::Continue }
    }

    fn done(self: Box<Self>, outcome: Outcome, usage: Usage) {
        let _ = self.send.send(Heard { tokens: self.tokens, outcome, usage });
    }

    fn is_gone(&self) -> bool {
        self.gone.load(Ordering::SeqCst) || self.tokens.len() >= self.gone_after
    }
}

pub fn job(prompt: &[u32], max_tokens: usize, sampling: SamplerParams, ear: Ear) -> Job {
    Job {
        prompt: prompt.into(),
        max_tokens,
        ends: Arc::new([0, 2]),
        sampling,
        bias: Arc::new([]),
        logprobs: Some(3),
        checkpoints: Vec::new(),
        steering: None,
        constraint: None,
        listener: Box::new(ear),
    }
}

/// Every token but those that are odd where the one before was.
#[derive(Default)]
pub struct Rules {
    last: u32,
}

impl Constraint for Rules {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        if self.last % 2 == 1 {
            logits.iter_mut().skip(1).step_by(2).for_each(|l| *l = f32::NEG_INFINITY);
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<bool, String> {
        if self.last % 2 == 1 && token % 2 == 1 {
            return Err(format!("token {token} was not allowed"));
        }
        self.last = token;
        Ok(false)
    }
}

/// All models here are as wide.
const WIDTH: usize = 256;

/// A file with a direction for each of the first four layers.
pub fn vector(dir: &Path, name: &str, seed: u64) -> PathBuf {
    let mut x = seed;
    let mut next = || {
        x = x.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((x >> 40) as f32 / (1 << 24) as f32 - 0.5) * 4.0
    };
    let mut header = Vec::new();
    let mut data = Vec::new();
    for layer in 0..4 {
        let start = data.len();
        data.extend((0..WIDTH).flat_map(|_| next().to_le_bytes()));
        header.push(format!(
            r#""direction.{layer}":{{"dtype":"F32","shape":[{WIDTH}],"data_offsets":[{start},{}]}}"#,
            data.len()
        ));
    }
    let header = format!("{{{}}}", header.join(","));
    let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
    bytes.extend(header.as_bytes());
    bytes.extend(data);
    let path = dir.join(name);
    std::fs::write(&path, bytes).unwrap();
    path
}

/// Two vectors with names.
pub fn steered(model: &str, dir: &Path, adjust: impl FnOnce(&mut EngineOptions)) -> Engine {
    let a = SteerSource { name: Some("a".into()), ..SteerSource::new(vector(dir, "a", 1)) };
    let b = SteerSource {
        name: Some("b".into()),
        mode: Mode::Ablate,
        point: forebay_program::Point::Attention,
        ..SteerSource::new(vector(dir, "b", 2))
    };
    let mut engine = engine(model, |o| {
        o.steer = vec![a, b];
        adjust(o);
    });
    engine.steer_by_default(None);
    engine
}

/// No steering, and three kinds.
pub fn kinds(engine: &Engine) -> Vec<Option<Arc<Steering>>> {
    let choose = |chosen: &[(&'static str, Option<f32>)]| {
        engine.steer_vectors().choose(chosen.iter().copied()).unwrap()
    };
    vec![
        choose(&[]),
        choose(&[("a", None)]),
        choose(&[("b", Some(0.8)), ("a", Some(-0.5))]),
        choose(&[("a", Some(1.5))]),
    ]
}
