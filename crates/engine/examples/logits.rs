//! Prints a hash of a model's logits at every vector level of this machine, so that machines can be compared.
//!
//!     cargo run --release -p forebay-engine --example logits -- MODEL
//!
//! The prompt is fixed ids, in chunks of 5 rows, then greedy tokens one by one; experts are resident and streamed. All lines
//! of one precision must be the same, on this machine and on any other. Exit code 1 if those of this machine are not.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::AtomicBool;

use forebay_cpu::Level;
use forebay_engine::engine::Opened;
use forebay_engine::sampler::argmax;
use forebay_engine::{
    Batch, Control, Engine, EngineError, EngineOptions, MemoryLimit, ResidencyChoice,
};
use forebay_program::Precision;

const PROMPT: [u32; 17] = [1, 40, 41, 7, 300, 12, 99, 100, 101, 5, 6, 250, 33, 8, 77, 2, 19];
const CHUNK: usize = 5;
const GREEDY: usize = 6;

fn main() -> ExitCode {
    let Some(path) = std::env::args().nth(1).map(PathBuf::from) else {
        eprintln!("usage: logits MODEL");
        return ExitCode::from(2);
    };
    let mut same = true;
    for (name, precision) in [("q8", Precision::Q8), ("f32", Precision::F32)] {
        let mut first = None;
        for level in Level::available() {
            for residency in [ResidencyChoice::Resident, ResidencyChoice::Stream] {
                let options = EngineOptions {
                    memory: MemoryLimit::Bytes(2 << 30),
                    residency,
                    slots_per_layer: (residency == ResidencyChoice::Stream).then_some(3),
                    threads: Some(2),
                    chunk: Some(CHUNK),
                    precision: Some(precision),
                    context: Some(64),
                    level: Some(level),
                    ..EngineOptions::default()
                };
                let (hash, tokens) = match run(&path, options) {
                    Ok(done) => done,
                    Err(error) => {
                        eprintln!("{}: {error}", path.display());
                        return ExitCode::FAILURE;
                    }
                };
                // The level is a matter of the machine: it goes where it is not compared.
                eprintln!("{level} {residency:?}");
                println!("{name} {hash} {tokens:?}");
                same &= *first.get_or_insert(hash) == hash;
            }
        }
    }
    ExitCode::from(!same as u8)
}

/// Hash of the bits of the logits of all positions, and the greedy tokens.
fn run(
    path: &std::path::Path,
    options: EngineOptions,
) -> Result<(blake3::Hash, Vec<u32>), EngineError> {
    let mut engine = Engine::load(Opened::open(path, options)?, &mut |_, _| {})?;
    let mut sequence = engine.new_sequence();
    let cancel = AtomicBool::new(false);
    let mut hasher = blake3::Hasher::new();
    let (mut tokens, mut done) = (PROMPT.to_vec(), 0);
    while done < PROMPT.len() + GREEDY {
        let n = (tokens.len() - done).min(CHUNK);
        let batch = Batch::single(&tokens[done..done + n], (0..n as u32).collect());
        let mut control = Control { cancel: &cancel, progress: &mut |_, _| {} };
        let mut last = 0;
        engine.forward(&batch, &mut [&mut sequence], &mut control, &mut |_, logits| {
            for l in logits {
                hasher.update(&l.to_bits().to_le_bytes());
            }
            last = argmax(logits);
            Ok(())
        })?;
        done += n;
        if done == tokens.len() {
            tokens.push(last);
        }
    }
    Ok((hasher.finalize(), tokens.split_off(PROMPT.len())))
}
