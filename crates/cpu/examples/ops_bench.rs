//! Speed of the operations between the matrix products: nanoseconds per element, and attention in GB/s of KV.
//!
//! `cargo run --release -p forebay-cpu --example ops_bench [threads]`

use std::hint::black_box;
use std::time::Instant;

use forebay_cpu::attention::{AttnParams, AttnRow, BLOCK, KvLayout, KvPages, KvType, attend};
use forebay_cpu::{Level, Pool, Rows, RowsMut, ops, vecmath};
use forebay_models::Activation;

type SliceFn = fn(Level, &mut [f32]);

/// Seconds of one call: the best of many short batches, to find a quiet moment of a shared machine.
fn time(mut f: impl FnMut()) -> f64 {
    f();
    let start = Instant::now();
    f();
    let calls = (0.002 / start.elapsed().as_secs_f64().max(1e-8)).clamp(1.0, 1e5) as usize;
    (0..40)
        .map(|_| {
            let start = Instant::now();
            for _ in 0..calls {
                f();
            }
            start.elapsed().as_secs_f64() / calls as f64
        })
        .fold(f64::INFINITY, f64::min)
}

fn attention(
    pool: &Pool,
    level: Level,
    layout: KvLayout,
    n_heads: usize,
    context: usize,
    n_rows: usize,
) {
    let blocks = context.div_ceil(BLOCK);
    let mut pages = vec![0u8; layout.page_bytes() * blocks];
    let kw = layout.n_kv_heads * layout.head_dim;
    let k: Vec<f32> = (0..kw).map(|i| ((i * 37) % 101) as f32 / 50.0 - 1.0).collect();
    for p in 0..context {
        let page = &mut pages[p / BLOCK * layout.page_bytes()..][..layout.page_bytes()];
        layout.store(level, page, p % BLOCK, &k, &k);
    }
    let table: Vec<u32> = (0..blocks as u32).collect();
    let rows: Vec<AttnRow> =
        (context - n_rows..context).map(|p| AttnRow { pos: p as u32, table: &table }).collect();
    let width = n_heads * layout.head_dim;
    let q = vec![0.1; n_rows * width];
    let mut out = vec![0.0; n_rows * width];
    let params = AttnParams { n_heads, scale: 0.125, window: None, sinks: None };
    let kv = KvPages { layout, data: &pages, stride: layout.page_bytes() };
    let s = time(|| {
        attend(
            pool,
            level,
            &params,
            &kv,
            &rows,
            Rows::dense(&q, width),
            RowsMut::dense(&mut out, width),
        );
    });
    let flops = 4.0 * (n_rows * n_heads * layout.head_dim) as f64 * context as f64;
    println!(
        "  attend {:?} {context} ctx, {n_rows} rows, {n_heads}/{} heads of {}: {:.3} ms, {:.1} GB/s of KV, {:.1} Gflop/s",
        layout.kv_type,
        layout.n_kv_heads,
        layout.head_dim,
        s * 1e3,
        pages.len() as f64 / s / 1e9,
        flops / s / 1e9,
    );
}

fn main() {
    let threads = std::env::args().nth(1).map_or(1, |a| a.parse().expect("a number of threads"));
    let pool = Pool::new(threads);
    println!("{threads} threads; an empty job: {:.2} us", time(|| pool.run(&|_| {})) * 1e6);
    for level in Level::available().into_iter().rev() {
        println!("{level}");
        let n = 4096;
        let xs: Vec<f32> = (0..n).map(|i| (i % 200) as f32 / 20.0 - 5.0).collect();
        let mut ys = xs.clone();
        let fns: [(&str, SliceFn); 7] = [
            ("exp", vecmath::exp_slice),
            ("sigmoid", vecmath::sigmoid_slice),
            ("silu", vecmath::silu_slice),
            ("tanh", vecmath::tanh_slice),
            ("gelu_tanh", vecmath::gelu_tanh_slice),
            ("softplus", vecmath::softplus_slice),
            ("ln", vecmath::ln_slice),
        ];
        for (name, f) in fns {
            let s = time(|| {
                ys.copy_from_slice(&xs);
                f(level, black_box(&mut ys));
            });
            println!("  {name}: {:.3} ns per element", s / n as f64 * 1e9);
        }
        let (mut sin, mut cos) = (xs.clone(), xs.clone());
        let s = time(|| vecmath::sin_cos_slice(level, black_box(&xs), &mut sin, &mut cos));
        println!("  sin_cos: {:.3} ns per element", s / n as f64 * 1e9);
        for (rows, d) in [(1, 2880), (512, 2880), (512, 64)] {
            let x = vec![0.5; rows * d];
            let w = vec![1.5; d];
            let mut out = vec![0.0; rows * d];
            let s = time(|| {
                let x = Rows::dense(black_box(&x), d);
                ops::rms_norm(&pool, level, x, Some(&w), 1e-5, RowsMut::dense(&mut out, d));
            });
            println!("  rms_norm {rows} x {d}: {:.3} ns per element", s / (rows * d) as f64 * 1e9);
        }
        let (gate, up) = (vec![0.5; 64 * 2880], vec![0.7; 64 * 2880]);
        let mut out = gate.clone();
        let clamped = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
        for activation in [Activation::Silu, Activation::GeluTanh, clamped] {
            let s = time(|| ops::glu(&pool, level, activation, black_box(&mut out), &up));
            println!("  glu {activation:?}: {:.3} ns per element", s / gate.len() as f64 * 1e9);
        }
        if level == Level::Scalar {
            attention(&pool, level, KvLayout::new(8, 64, KvType::F16), 64, 512, 1);
            continue;
        }
        for kv_type in [KvType::F16, KvType::F32, KvType::Q8] {
            attention(&pool, level, KvLayout::new(8, 64, kv_type), 64, 4096, 1);
        }
        attention(&pool, level, KvLayout::new(8, 64, KvType::F16), 64, 4096, 64);
        attention(&pool, level, KvLayout::new(4, 128, KvType::F16), 32, 4096, 1);
        attention(&pool, level, KvLayout::new(2, 256, KvType::F16), 16, 4096, 1);
        attention(&pool, level, KvLayout::new(32, 128, KvType::F16), 32, 1024, 1);
        attention(&pool, level, KvLayout::new(32, 128, KvType::F16), 32, 1024, 64);
    }
}
