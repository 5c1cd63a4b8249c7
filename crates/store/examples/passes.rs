//! Decode passes of a store without a model: how much of the disk's bandwidth demanded reads get.
//!
//! ```text
//! cargo run --release -p forebay-store --example passes -- FILE [TOKENS]
//! ```
//! Any large file will do: its bytes stand for the experts of 24 layers of 32 with three matrices of 4.2
//! MiB each, at odd offsets, 4 used per token, 8 slots a layer, chosen by a generated trace. "of raw"
//! is the rate of demanded bytes while demanded reads are outstanding, over that of random reads of the
//! same size and depth in the same run. A token "computes" by sleeping.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forebay_models::{ExpertWeights, Extent, PlaneRef, WeightRef};
use forebay_quant::Format;
use forebay_store::bandwidth::measure_with;
use forebay_store::io::entry_of;
use forebay_store::traces::{Routing, fitted};
use forebay_store::{
    ExpertStore, FileSet, IoEngine, IoMode, IoOptions, LayerExperts, QueueDepth, Residency,
    StoreSpec, open_store,
};

const LAYERS: usize = 24;
const EXPERTS: usize = 32;
const SLOTS_PER_LAYER: usize = 8;
/// `[rows, cols]` of f32.
const ROWS: usize = 1075;
const COLS: usize = 1024;

fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().expect("a file");
    let tokens = args.next().map_or(40, |n| n.parse().expect("a number of tokens"));
    let entry = entry_of(Path::new(&path)).expect("a file that can be opened");
    let spec = spec(entry.len);
    let files = Arc::new(FileSet::open(&[entry], IoMode::Auto).expect("the same"));
    println!(
        "{:<8} {:>9} {:>8} {:>6} {:>8} {:>9} {:>8} {:>7} {:>7}",
        "engine", "read KiB", "compute", "hits", "GB/s", "raw GB/s", "of raw", "depth", "ms/tok"
    );
    let mut seed = Instant::now().elapsed().as_nanos() as u64;
    for compute_us in [0, 500] {
        for max_read_bytes in [1 << 20, 4 << 20, 16 << 20] {
            for engine in [IoEngine::Threads, IoEngine::Uring] {
                seed += 1;
                let io = IoOptions { engine, max_read_bytes, ..IoOptions::default() };
                let compute = Duration::from_micros(compute_us);
                run(&spec, &files, io, compute, tokens, seed);
            }
        }
    }
    files.notes().iter().for_each(|note| println!("note: {note}"));
}

fn run(
    spec: &StoreSpec,
    files: &Arc<FileSet>,
    io: IoOptions,
    compute: Duration,
    tokens: usize,
    seed: u64,
) {
    let mode = Residency::Stream { slots: SLOTS_PER_LAYER * LAYERS };
    let mut store = match open_store(spec, files.clone(), mode, io, &mut |_, _| {}) {
        Ok(store) => store,
        Err(error) => return println!("{:?}: {error}", io.engine),
    };
    let (_, routing, _) = fitted()[1];
    let routing = Routing { layers: LAYERS, experts: EXPERTS, top_k: 4, reach: 8.0, ..routing };
    let mut start = Instant::now();
    for (i, (layer, experts)) in routing.trace(tokens, seed).enumerate() {
        if i == tokens / 4 * LAYERS {
            store.reset_stats();
            start = Instant::now();
        }
        pass(&mut *store, layer, &experts, compute);
    }
    let ms = start.elapsed().as_secs_f64() * 1e3 / (tokens - tokens / 4) as f64;
    let stats = store.stats();
    drop(store);
    let block = (stats.bytes_read / stats.reads.max(1)) as usize;
    let raw = IoOptions { depth: QueueDepth::Fixed(stats.queue_depth.max(1)), ..io };
    let raw = measure_with(files, 0, block, &raw, Duration::from_secs(1)).expect("a good disk");
    let (rate, raw) =
        (stats.bytes_read as f64 / stats.read_busy.as_secs_f64(), raw.bytes_per_second());
    println!(
        "{:<8} {:>9} {:>5} us {:>5.0}% {:>8.2} {:>9.2} {:>7.0}% {:>7} {:>7.0}",
        format!("{:?}", io.engine),
        block >> 10,
        compute.as_micros(),
        100.0 * stats.hits as f64 / (stats.hits + stats.misses) as f64,
        rate / 1e9,
        raw / 1e9,
        100.0 * rate / raw,
        stats.queue_depth,
        ms,
    );
}

fn pass(store: &mut dyn ExpertStore, layer: usize, experts: &[u16], compute: Duration) {
    store.begin(layer, experts).expect("a good disk");
    let mut leases = Vec::new();
    loop {
        store.next_ready(&mut leases).expect("a good disk");
        if leases.is_empty() {
            break;
        }
        std::thread::sleep(compute * leases.len() as u32);
        store.release(&mut leases);
    }
    store.end();
}

fn spec(file_len: u64) -> StoreSpec {
    let len = (ROWS * COLS * 4) as u64;
    let count = (LAYERS * EXPERTS * 3) as u64;
    let step = (file_len - len - 1) / count;
    // Experts of a layer lie side by side per matrix, as in GGUF files.
    let weight = |layer: usize, matrix: usize, expert: usize| WeightRef {
        name: format!("{layer}.{matrix}").into(),
        format: Format::F32,
        rows: ROWS,
        cols: COLS,
        planes: vec![PlaneRef {
            extent: Extent {
                file: 0,
                offset: 1 + step * ((layer * 3 + matrix) * EXPERTS + expert) as u64,
                len,
            },
            stride: COLS as u64 * 4,
        }],
    };
    let expert = |layer, e| ExpertWeights {
        gate: weight(layer, 0, e),
        up: weight(layer, 1, e),
        down: weight(layer, 2, e),
    };
    let layer =
        |l| LayerExperts { layer: l, experts: (0..EXPERTS).map(|e| expert(l, e)).collect() };
    StoreSpec { layers: (0..LAYERS).map(layer).collect() }
}
