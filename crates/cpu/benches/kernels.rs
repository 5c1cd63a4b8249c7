//! One kernel at a time, at the best level of this machine and on one thread: what to run before and after a change.
//!
//!     cargo bench -p forebay-cpu --bench kernels -- [FILTER]
//!
//! Products of one row, whose weights are in the cache (`gemv`), and of 32 rows (`gemm`), packing of activations, norms,
//! attention. What memory gives, and all formats and levels, are in `examples/matmul_bench.rs` and `ops_bench.rs`.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use forebay_cpu::attention::{AttnParams, AttnRow, BLOCK, KvLayout, KvPages, KvType, attend};
use forebay_cpu::matmul::{self, Input, Job, OutRows, pack_rows, run_jobs};
use forebay_cpu::{Level, Pool, Rows, RowsMut, ops};
use forebay_quant::{ActOrder, Format, MatrixView, ParamType, PlaneView, Q8Rows};

const COLS: usize = 2048;
const FEATURES: usize = 128;
const ROWS: usize = 32;

fn formats() -> [(&'static str, Format); 5] {
    let mlx = Format::MlxAffine { bits: 4, group: 64, params: ParamType::Bf16 };
    [
        ("Q8_0", Format::Q8_0),
        ("Q4_1", Format::Q4_1),
        ("Q4_K", Format::Q4K),
        ("Q6_K", Format::Q6K),
        ("MLX 4", mlx),
    ]
}

fn values(n: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 37 % 255) as f32 - 127.0) / 64.0).collect()
}

fn products(c: &mut Criterion) {
    let (pool, level) = (Pool::new(1), Level::best());
    let x = values(ROWS * COLS);
    let mut out = vec![0.0; ROWS * FEATURES];
    for (name, format) in formats() {
        // The top bits of exponents are clear in these bytes, so that all numbers are ordinary.
        let planes: Vec<(Vec<u8>, usize)> = format
            .planes()
            .iter()
            .map(|layout| {
                let row = layout.row_bytes(COLS).expect("whole super-blocks");
                ((0..row * FEATURES).map(|i| (i * 97 % 251) as u8 & 0x3b).collect(), row)
            })
            .collect();
        let views: Vec<PlaneView<'_>> =
            planes.iter().map(|(data, stride)| PlaneView { data, stride: *stride }).collect();
        let weight = MatrixView::new(format, FEATURES, COLS, &views).expect("the shape fits");
        let mut q = Q8Rows::new(ROWS, COLS, format.act_order());
        pack_rows(&pool, level, &x, COLS, ROWS, &mut q);
        for (group, rows) in [("gemv", 1), ("gemm", ROWS)] {
            let mut group = c.benchmark_group(group);
            group.throughput(Throughput::Elements((rows * COLS * FEATURES) as u64));
            for (precision, input) in
                [("q8", Input::Q8(&q)), ("f32", Input::F32 { data: &x, stride: COLS })]
            {
                group.bench_function(BenchmarkId::new(name, precision), |b| {
                    b.iter(|| {
                        let rows = matmul::Rows::All(rows);
                        let out = OutRows::new(&mut out, FEATURES);
                        run_jobs(&pool, level, &[Job { weight, input, rows, out, bias: None }]);
                    });
                });
            }
        }
    }
}

fn rows(c: &mut Criterion) {
    let (pool, level) = (Pool::new(1), Level::best());
    let x = values(ROWS * COLS);
    let (weight, mut out) = (vec![1.5; COLS], vec![0.0; ROWS * COLS]);
    let mut group = c.benchmark_group("rows");
    group.throughput(Throughput::Elements((ROWS * COLS) as u64));
    group.bench_function("rms_norm", |b| {
        b.iter(|| {
            let (x, out) = (Rows::dense(black_box(&x), COLS), RowsMut::dense(&mut out, COLS));
            ops::rms_norm(&pool, level, x, Some(&weight), 1e-5, out);
        });
    });
    for (name, order) in
        [("sequential", ActOrder::Sequential), ("nibble pairs", ActOrder::NibblePairs)]
    {
        let mut q = Q8Rows::new(ROWS, COLS, order);
        group.bench_function(BenchmarkId::new("pack", name), |b| {
            b.iter(|| pack_rows(&pool, level, black_box(&x), COLS, ROWS, &mut q));
        });
    }
}

fn attention(c: &mut Criterion) {
    const CONTEXT: usize = 1024;
    const HEADS: usize = 32;
    let (pool, level) = (Pool::new(1), Level::best());
    let mut group = c.benchmark_group("attention");
    for kv_type in [KvType::F32, KvType::F16, KvType::Q8] {
        let layout = KvLayout::new(8, 64, kv_type);
        let mut pages = vec![0; layout.page_bytes() * CONTEXT / BLOCK];
        let k = values(8 * 64);
        for (p, page) in pages.chunks_exact_mut(layout.page_bytes()).enumerate() {
            for slot in 0..BLOCK {
                let from = (p + slot) % 7;
                let k: Vec<f32> = k.iter().cycle().skip(from).take(8 * 64).copied().collect();
                layout.store(level, page, slot, &k, &k);
            }
        }
        let table: Vec<u32> = (0..(CONTEXT / BLOCK) as u32).collect();
        let params = AttnParams { n_heads: HEADS, scale: 0.125, window: None, sinks: None };
        let kv = KvPages { layout, data: &pages, stride: layout.page_bytes() };
        for n in [1, 16] {
            let rows: Vec<AttnRow> =
                (CONTEXT - n..CONTEXT).map(|p| AttnRow { pos: p as u32, table: &table }).collect();
            let (q, mut out) = (values(n * HEADS * 64), vec![0.0; n * HEADS * 64]);
            group.throughput(Throughput::Elements((n * CONTEXT * HEADS) as u64));
            group.bench_function(BenchmarkId::new(format!("{kv_type:?}"), n), |b| {
                b.iter(|| {
                    let q = Rows::dense(black_box(&q), HEADS * 64);
                    let out = RowsMut::dense(&mut out, HEADS * 64);
                    attend(&pool, level, &params, &kv, &rows, q, out);
                });
            });
        }
    }
}

criterion_group! {
    name = kernels;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .sample_size(30);
    targets = products, rows, attention
}
criterion_main!(kernels);
