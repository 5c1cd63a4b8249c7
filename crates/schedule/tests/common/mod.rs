//! Bundled models, prompts, and a listener that writes down what it hears.
#![allow(dead_code, reason = "each test uses its part")]

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};

use forebay_engine::engine::Opened;
use forebay_engine::{Engine, EngineOptions, SamplerParams};
use forebay_schedule::{Flow, Job, Listener, Outcome, Token, Usage};

/// Windows and sinks; attention in all layers; recurrent layers.
pub const MODELS: [&str; 3] = [
    "tiny-gpt-oss",
    "tiny-qwen3-moe/qwen3_moe-Q4_K_M.gguf",
    "tiny-qwen3.5-moe/qwen3_5_moe-Q4_K_M.gguf",
];

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
        self.gone.load(Ordering::SeqCst)
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
