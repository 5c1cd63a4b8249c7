//! How fast the matrix kernels are, beside what this machine can do.
//!
//!     cargo run --release -p forebay-cpu --example matmul_bench -- [--threads N] [--level L] [--rows R] [--toy] [FORMAT..]
//!
//! GEMV runs over enough matrices to come from memory and is printed in GB/s of weights and as a share of a plain
//! read of memory by the same threads; GEMM over 256 rows of one in GMAC/s and as a share of what `vpdpbusd` (or f32 FMA)
//! alone reaches. Behind them, what 2 to 32 rows from memory take in times of one row. Shape 2880 x 2880. The hash is of all outputs: it is the same for every level and thread count.

use std::hint::black_box;
use std::time::Instant;

use forebay_cpu::matmul::{Input, Job, OutRows, Rows, pack_rows, run_jobs};
use forebay_cpu::{Level, Pool};
use forebay_quant::{Format, MatrixView, PlaneView, Q8Rows};

const N: usize = 2880;
/// Rows of a speculated block, of a few sequences, of an expert in a batch.
const FEW: [usize; 8] = [2, 3, 4, 5, 8, 12, 16, 32];

fn main() {
    let (mut threads, mut level, mut gemm_rows, mut toy) = (1, Level::best(), 128, false);
    let mut names = Vec::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut value = || args.next().expect("a value");
        match arg.as_str() {
            "--threads" => threads = value().parse().expect("a number"),
            "--level" => level = value().parse().expect("a level"),
            "--rows" => gemm_rows = value().parse().expect("a number"),
            "--toy" => toy = true,
            _ => names.push(arg),
        }
    }
    let pool = Pool::new(threads);
    let bytes = if toy { 4 << 20 } else { 400 << 20 };
    let read = read_bandwidth(&pool, bytes);
    let (int_peak, float_peak) = peaks(level);
    println!("{level}, {threads} threads, {N} x {N}; memory read {:.1} GB/s", read / 1e9);
    println!(
        "one thread's peak: {:.0} integer, {:.0} f32 GMAC/s",
        int_peak / 1e9,
        float_peak / 1e9
    );
    println!(
        "{:24}{:>10}{:>9}{:>10}{:>12}{:>9}{:>40}  hash",
        "",
        "GEMV GB/s",
        "of read",
        "in cache",
        "GEMM GMAC/s",
        "of peak",
        "2, 3, 4, 5, 8, 12, 16, 32 rows"
    );
    for &format in Format::all() {
        let name = format.name();
        if !names.is_empty() && !names.iter().any(|n| name.contains(n.as_str())) {
            continue;
        }
        for q8 in [true, false] {
            if q8 && !format.is_quantized() {
                continue;
            }
            // Rows of K and IQ formats are whole super-blocks.
            let cols = N.next_multiple_of(format.block_elements());
            let bench = Bench { pool: &pool, level, format, cols, q8, bytes, gemm_rows, toy };
            let ([gemv, cached], few, gemm, hash) = bench.run();
            let few: String = few.iter().map(|t| format!("{t:5.2}")).collect();
            let peak = threads as f64 * if q8 { int_peak } else { float_peak };
            println!(
                "{:24}{:10.1}{:8.0}%{:10.1}{:12.0}{:8.0}%{few}  {hash:016x}",
                format!(
                    "{name} {}{}",
                    if q8 { "q8" } else { "f32" },
                    if format == Format::Mxfp4Split { " split" } else { "" }
                ),
                gemv / 1e9,
                100.0 * gemv / read,
                cached / 1e9,
                gemm / 1e9,
                100.0 * gemm / peak,
            );
        }
    }
}

struct Bench<'a> {
    pool: &'a Pool,
    level: Level,
    format: Format,
    cols: usize,
    q8: bool,
    bytes: usize,
    gemm_rows: usize,
    toy: bool,
}

impl Bench<'_> {
    /// Bytes per second of GEMV from memory and from cache, times of few rows over that of one, multiply-adds
    /// per second of GEMM, hash of the outputs.
    fn run(&self) -> ([f64; 2], [f64; FEW.len()], f64, u64) {
        let one = self.format.matrix_bytes(N, self.cols).expect("shape") as usize;
        let count = (self.bytes / one).max(1);
        let layouts = self.format.planes();
        let row_bytes: Vec<usize> =
            layouts.iter().map(|l| l.row_bytes(self.cols).expect("shape")).collect();
        // Bits are random but for the top exponent bits, so that all numbers are ordinary.
        let mut state = 1u32;
        let data: Vec<Vec<u8>> = row_bytes
            .iter()
            .enumerate()
            .map(|(plane, row)| {
                let mut next = || {
                    state = state.wrapping_mul(1664525).wrapping_add(1013904223);
                    (state >> 24) as u8 & 0x3b
                };
                let mut bytes: Vec<u8> = (0..row * N * count).map(|_| next()).collect();
                ordinary_scales(self.format, plane, &mut bytes);
                bytes
            })
            .collect();
        let view = |i: usize| {
            let planes: Vec<PlaneView<'_>> = data
                .iter()
                .zip(&row_bytes)
                .map(|(data, &stride)| PlaneView {
                    data: &data[i * stride * N..][..stride * N],
                    stride,
                })
                .collect();
            MatrixView::new(self.format, N, self.cols, &planes).expect("shape")
        };
        let views: Vec<MatrixView<'_>> = (0..count).map(view).collect();
        let rows = self.gemm_rows.max(FEW[FEW.len() - 1]);
        let x: Vec<f32> =
            (0..rows * self.cols).map(|i| ((i * 37 % 255) as f32 - 127.0) / 64.0).collect();
        let mut q = Q8Rows::new(rows, self.cols, self.format.act_order());
        pack_rows(self.pool, self.level, &x, self.cols, rows, &mut q);
        let mut out = vec![0.0f32; rows * N];
        let mut hash = 0u64;
        let mut run = |weight: &MatrixView<'_>, rows: usize| {
            let input =
                if self.q8 { Input::Q8(&q) } else { Input::F32 { data: &x, stride: self.cols } };
            let out = OutRows::new(&mut out, N);
            run_jobs(
                self.pool,
                self.level,
                &[Job { weight: *weight, input, rows: Rows::All(rows), out, bias: None }],
            );
        };
        // Each matrix is timed by itself, and of the times a low percentile counts: other work on the machine
        // would otherwise be measured along.
        let mut gemv = Vec::new();
        let mut few = [const { Vec::new() }; FEW.len()];
        for _ in 0..if self.toy { 1 } else { 4 } {
            for view in &views {
                let start = Instant::now();
                run(view, 1);
                gemv.push(start.elapsed().as_secs_f64());
            }
            for (times, rows) in few.iter_mut().zip(FEW) {
                for view in &views[..views.len().div_ceil(2)] {
                    let start = Instant::now();
                    run(view, rows);
                    times.push(start.elapsed().as_secs_f64());
                }
            }
        }
        // 64 features fit the second-level cache: what decode and dot products cost by themselves.
        let slice = |features: usize| {
            let planes: Vec<PlaneView<'_>> = data
                .iter()
                .zip(&row_bytes)
                .map(|(data, &stride)| PlaneView { data: &data[..features * stride], stride })
                .collect();
            MatrixView::new(self.format, features, self.cols, &planes).expect("shape")
        };
        let small = slice(64);
        let mut cached = Vec::new();
        for _ in 0..if self.toy { 1 } else { 2000 } {
            let start = Instant::now();
            run(&small, 1);
            cached.push(start.elapsed().as_secs_f64());
        }
        let part = slice(256);
        let mut gemm = Vec::new();
        for _ in 0..if self.toy { 1 } else { 300 } {
            let start = Instant::now();
            run(&part, self.gemm_rows);
            gemm.push(start.elapsed().as_secs_f64());
        }
        run(&views[0], self.gemm_rows.min(16));
        for y in &out {
            hash = (hash ^ y.to_bits() as u64).wrapping_mul(0x0100_0000_01b3).rotate_left(17);
        }
        let macs = (256 * self.cols * self.gemm_rows) as f64;
        let small = one as f64 * 64.0 / N as f64;
        let gemv = low(gemv);
        let few = few.map(|times| low(times) / gemv);
        ([one as f64 / gemv, small / low(cached)], few, macs / low(gemm), hash)
    }
}

/// Scales with 8 bits of exponent must not make the arithmetic denormal: that would be slow, and is not what models have.
fn ordinary_scales(format: Format, plane: usize, bytes: &mut [u8]) {
    let (first, step) = match (format, plane) {
        (Format::Mxfp4, _) => (0, 17),
        (Format::Mxfp4Split, 1) => (0, 1),
        (Format::Bf16, _) | (Format::MlxAffine { .. }, 1..) => (1, 2),
        (Format::F32, _) => (3, 4),
        _ => return,
    };
    for b in bytes[first..].iter_mut().step_by(step) {
        *b = if step % 2 == 0 { 0x3b } else { 120 | *b & 7 };
    }
}

/// The second percentile.
fn low(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 50]
}

/// Bytes per second that the pool's threads read from memory.
fn read_bandwidth(pool: &Pool, bytes: usize) -> f64 {
    let data = vec![1u64; bytes / 8];
    const PART: usize = 1 << 20;
    let parts = (data.len() / PART).max(1);
    let chunk = PART.min(data.len()) / pool.threads();
    let mut seconds = Vec::new();
    for i in 0..4 * parts {
        let start = Instant::now();
        pool.run(&|t| {
            let data = &data[i % parts * PART..][t * chunk..][..chunk];
            let mut sums = [0u64; 32];
            for block in data.as_chunks::<32>().0 {
                for (s, x) in sums.iter_mut().zip(block) {
                    *s += x;
                }
            }
            black_box(sums);
        });
        seconds.push(start.elapsed().as_secs_f64());
    }
    (chunk * pool.threads() * 8) as f64 / low(seconds)
}

/// Multiply-adds per second of one thread with everything in registers: integer and f32.
fn peaks(level: Level) -> (f64, f64) {
    #[cfg(target_arch = "x86_64")]
    if level == Level::Avx512 {
        // SAFETY: the level says that the instructions are there.
        return unsafe { x86::peaks512() };
    }
    let _ = level;
    (f64::NAN, f64::NAN)
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;
    use std::time::Instant;

    const STEPS: usize = 20_000;

    #[target_feature(enable = "avx512f,avx512vnni")]
    pub fn peaks512() -> (f64, f64) {
        let (mut int, mut float) = (0.0f64, 0.0f64);
        for _ in 0..500 {
            let a = black_box(_mm512_set1_epi8(3));
            let b = black_box(_mm512_set1_epi8(5));
            let mut acc = [_mm512_setzero_si512(); 16];
            let start = Instant::now();
            for _ in 0..STEPS {
                for x in &mut acc {
                    *x = _mm512_dpbusd_epi32(*x, a, b);
                }
            }
            int = int.max((STEPS * 16 * 64) as f64 / start.elapsed().as_secs_f64());
            black_box(acc);
            let a = black_box(_mm512_set1_ps(1.0));
            let mut acc = [_mm512_setzero_ps(); 16];
            let start = Instant::now();
            for _ in 0..STEPS {
                for x in &mut acc {
                    *x = _mm512_fmadd_ps(*x, a, a);
                }
            }
            float = float.max((STEPS * 16 * 16) as f64 / start.elapsed().as_secs_f64());
            black_box(acc);
        }
        (int, float)
    }
}
