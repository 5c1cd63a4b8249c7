//! Every vector level gives the oracle's bits, for every format, shape, row map and number of threads.

use forebay_cpu::matmul::{Input, Job, OutRows, Rows, pack_rows, run_jobs};
use forebay_cpu::{Level, Pool};
use forebay_quant::{Format, MatrixView, ParamType, PlaneView, Q8Rows, dot_f32, dot_q8};
use proptest::prelude::*;

const FORMATS: &[Format] = &[
    Format::F32,
    Format::F16,
    Format::Bf16,
    Format::Q8_0,
    Format::Q4_0,
    Format::Q4_1,
    Format::Q5_0,
    Format::Q5_1,
    Format::Q2K,
    Format::Q3K,
    Format::Q4K,
    Format::Q5K,
    Format::Q6K,
    Format::Iq1S,
    Format::Iq1M,
    Format::Iq2Xxs,
    Format::Iq2Xs,
    Format::Iq2S,
    Format::Iq3Xxs,
    Format::Iq3S,
    Format::Iq4Nl,
    Format::Iq4Xs,
    Format::Mxfp4,
    Format::Mxfp4Split,
    Format::MlxAffine { bits: 2, group: 32, params: ParamType::F16 },
    Format::MlxAffine { bits: 2, group: 64, params: ParamType::Bf16 },
    Format::MlxAffine { bits: 3, group: 32, params: ParamType::Bf16 },
    Format::MlxAffine { bits: 3, group: 128, params: ParamType::F32 },
    Format::MlxAffine { bits: 4, group: 32, params: ParamType::F16 },
    Format::MlxAffine { bits: 4, group: 64, params: ParamType::Bf16 },
    Format::MlxAffine { bits: 4, group: 128, params: ParamType::F32 },
    Format::MlxAffine { bits: 5, group: 32, params: ParamType::F32 },
    Format::MlxAffine { bits: 5, group: 64, params: ParamType::Bf16 },
    Format::MlxAffine { bits: 6, group: 64, params: ParamType::F16 },
    Format::MlxAffine { bits: 6, group: 32, params: ParamType::Bf16 },
    Format::MlxAffine { bits: 8, group: 64, params: ParamType::Bf16 },
    Format::MlxAffine { bits: 8, group: 128, params: ParamType::F16 },
    Format::MlxAffine { bits: 8, group: 32, params: ParamType::F32 },
];

#[test]
fn no_format_is_left_out() {
    let same = |a: &Format, b: &Format| match (a, b) {
        (Format::MlxAffine { bits: a, .. }, Format::MlxAffine { bits: b, .. }) => a == b,
        _ => a == b,
    };
    for format in Format::all() {
        assert!(FORMATS.iter().any(|f| same(f, format)), "{format:?}");
    }
}

/// A small deterministic random source, seeded by proptest.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = (self.0 >> 33) ^ self.0;
        x.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16
    }
    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
    fn float(&mut self) -> f32 {
        (self.next() & 0xffff) as f32 / 32768.0 - 1.0
    }
}

/// Bytes of an anonymous mapping that end at a page without access: a read behind them ends the test.
struct Guarded {
    base: *mut std::ffi::c_void,
    mapped: usize,
    len: usize,
}

impl Guarded {
    fn new(bytes: &[u8]) -> Guarded {
        use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mmap_anonymous, mprotect};
        let page = rustix::param::page_size();
        let data = bytes.len().next_multiple_of(page);
        let mapped = data + page;
        // SAFETY: a new private mapping; its last page is made inaccessible, the bytes end just before it.
        unsafe {
            let rw = ProtFlags::READ | ProtFlags::WRITE;
            let base = mmap_anonymous(std::ptr::null_mut(), mapped, rw, MapFlags::PRIVATE).unwrap();
            mprotect(base.byte_add(data), page, MprotectFlags::empty()).unwrap();
            let start = base.cast::<u8>().add(data - bytes.len());
            start.copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            Guarded { base: base.byte_add(data - bytes.len()), mapped, len: bytes.len() }
        }
    }
    fn bytes(&self) -> &[u8] {
        // SAFETY: initialised by `new`.
        unsafe { std::slice::from_raw_parts(self.base.cast(), self.len) }
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        let page = rustix::param::page_size();
        let base = self.base as usize / page * page;
        // SAFETY: the mapping of `new`, no longer borrowed.
        unsafe { rustix::mm::munmap(base as *mut _, self.mapped).unwrap() }
    }
}

/// Planes of a random matrix; in each the last row ends at a guard page.
struct Matrix {
    format: Format,
    rows: usize,
    cols: usize,
    planes: Vec<(Guarded, usize)>,
}

impl Matrix {
    /// `doubled` leaves room for another matrix's row after each row.
    fn random(format: Format, rows: usize, cols: usize, doubled: bool, rng: &mut Rng) -> Matrix {
        Matrix::with(format, rows, cols, doubled, |_, _| rng.next() as u8)
    }

    fn with(
        format: Format,
        rows: usize,
        cols: usize,
        doubled: bool,
        mut byte: impl FnMut(usize, usize) -> u8,
    ) -> Matrix {
        let layouts = format.planes();
        let planes = layouts.iter().enumerate().map(|(p, layout)| {
            let row = layout.row_bytes(cols).unwrap();
            let stride = if doubled { 2 * row } else { row };
            let len = rows.saturating_sub(1) * stride + if rows > 0 { row } else { 0 };
            let mut bytes: Vec<u8> = (0..len).map(|i| byte(p, i)).collect();
            for start in (0..len).step_by(stride.max(1)) {
                for unit in bytes[start..][..row].chunks_mut(layout.bytes) {
                    finite(format, p, unit);
                }
            }
            (Guarded::new(&bytes), stride)
        });
        Matrix { format, rows, cols, planes: planes.collect() }
    }

    fn view(&self) -> MatrixView<'_> {
        let planes: Vec<PlaneView<'_>> = self
            .planes
            .iter()
            .map(|(data, stride)| PlaneView { data: data.bytes(), stride: *stride })
            .collect();
        MatrixView::new(self.format, self.rows, self.cols, &planes).unwrap()
    }
}

/// Makes the scales of a unit finite.
fn finite(format: Format, plane: usize, unit: &mut [u8]) {
    let mut half = |at: usize| unit[at + 1] &= 0xbf;
    match (format, plane) {
        (Format::F32, _) => half(2),
        (Format::Q4_1 | Format::Q5_1 | Format::Q4K | Format::Q5K, _) => {
            half(0);
            half(2);
        }
        (Format::Q2K, _) => {
            half(80);
            half(82);
        }
        (Format::Q3K, _) => half(108),
        (Format::Q6K, _) => half(208),
        // The top nibble of the half lies here.
        (Format::Iq1M, _) => half(54),
        (Format::Mxfp4, _) | (Format::Mxfp4Split, 1) => unit[0] %= 200,
        (Format::MlxAffine { params, .. }, 1..) => half(params.bytes() - 2),
        (Format::MlxAffine { .. } | Format::Mxfp4Split, 0) => {}
        _ => half(0),
    }
}

fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())
}

/// Runs one matrix over the rows of `map` at every level and compares with the oracle.
fn check(
    matrix: &Matrix,
    x: &[f32],
    stride: usize,
    map: Option<&[(u32, u32)]>,
    n: usize,
    threads: usize,
) {
    let (weight, cols) = (matrix.view(), matrix.cols);
    let in_rows = (x.len() + stride - cols).checked_div(stride).unwrap_or(n);
    let rows = map.map_or(Rows::All(n), Rows::Map);
    let pool = Pool::new(threads);
    let out_rows = (0..rows.len()).map(|i| rows.get(i).1 + 1).max().unwrap_or(0);
    let out_stride = matrix.rows + 3;
    let bias: Vec<f32> = (0..matrix.rows).map(|i| i as f32 * 0.37 - 1.0).collect();
    for q8 in [false, true] {
        if q8 && !matrix.format.is_quantized() {
            continue;
        }
        for level in Level::available() {
            let mut q = Q8Rows::new(0, 0, matrix.format.act_order());
            if q8 {
                q.reshape(in_rows, cols, matrix.format.act_order());
                pack_rows(&pool, level, x, stride, in_rows, &mut q);
            }
            let mut out = vec![-7.0f32; out_rows * out_stride];
            let bias = n.is_multiple_of(2).then_some(&bias[..]);
            let input = if q8 { Input::Q8(&q) } else { Input::F32 { data: x, stride } };
            let job = Job { weight, input, rows, out: OutRows::new(&mut out, out_stride), bias };
            run_jobs(&pool, level, &[job]);
            let mut expected = vec![-7.0f32; out.len()];
            for i in 0..rows.len() {
                let (from, to) = rows.get(i);
                let x = &x[from * stride..][..cols];
                for o in 0..matrix.rows {
                    let dot = if q8 { dot_q8(&weight, o, x) } else { dot_f32(&weight, o, x) };
                    expected[to * out_stride + o] = bias.map_or(dot, |b| dot + b[o]);
                }
            }
            for (i, (&got, &want)) in out.iter().zip(&expected).enumerate() {
                assert!(
                    same(got, want),
                    "{} {level} q8 {q8} [{}, {cols}] x {}: row {} feature {}: {got:e} != {want:e}",
                    matrix.format.name(),
                    matrix.rows,
                    rows.len(),
                    i / out_stride,
                    i % out_stride,
                );
            }
        }
    }
}

/// Many cases, unless the environment says how many: an emulator is slow.
fn config() -> ProptestConfig {
    let default = ProptestConfig { failure_persistence: None, ..Default::default() };
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => default,
        None => ProptestConfig { cases: 3000, ..default },
    }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn every_level_is_the_oracle(
        seed in any::<u64>(),
        format in 0..FORMATS.len(),
        features in prop_oneof![Just(0usize), Just(1), 2usize..40, 120usize..300],
        blocks in prop_oneof![0usize..24, 24usize..72],
        n in prop_oneof![Just(0usize), Just(1), 2usize..8, 30usize..70],
        threads in 1usize..4,
        doubled: bool,
        mapped: bool,
    ) {
        let mut rng = Rng(seed);
        let format = FORMATS[format];
        let unit = format.block_elements();
        let cols = if unit == 1 { blocks * 9 + rng.below(9) } else { (blocks * 32).next_multiple_of(unit) };
        let features = if n > 2 { features % 41 } else { features };
        let matrix = Matrix::random(format, features, cols, doubled, &mut rng);
        let stride = cols + rng.below(3);
        let x: Vec<f32> = (0..n.max(1) * stride + 1).map(|_| rng.float()).collect();
        // An odd address, four bytes off.
        let x = &x[1..];
        let len = x.len() - (stride - cols);
        let mut out_rows: Vec<u32> = (0..n as u32 + 2).collect();
        let map: Vec<(u32, u32)> = (0..n)
            .map(|_| {
                let to = out_rows.swap_remove(rng.below(out_rows.len()));
                (rng.below(n) as u32, to)
            })
            .collect();
        check(&matrix, &x[..len], stride, mapped.then_some(&map), n, threads);
    }
}

#[test]
fn saturation_extremes() {
    for &format in FORMATS {
        let cols = 512;
        for fill in [0xffu8, 0x00, 0x80, 0x7f] {
            // Scales of the blocks become what `finite` leaves of the fill: any number will do.
            let matrix = Matrix::with(format, 5, cols, false, |_, _| fill);
            for sign in [1.0f32, -1.0] {
                let x: Vec<f32> = (0..3 * cols)
                    .map(|i| if i / cols == 2 && i % 2 == 1 { -sign } else { sign } * 0.75)
                    .collect();
                check(&matrix, &x, cols, None, 3, 1);
                check(&matrix, &x[2 * cols..], cols, None, 1, 1);
            }
        }
    }
}

#[test]
fn values_that_are_not_finite_become_nan() {
    let mut rng = Rng(5);
    for &format in FORMATS.iter().filter(|f| f.is_quantized()) {
        let matrix = Matrix::random(format, 3, 512, false, &mut rng);
        for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut x: Vec<f32> = (0..1024).map(|_| rng.float()).collect();
            x[777] = bad;
            check(&matrix, &x, 512, None, 2, 1);
            let mut q = Q8Rows::new(2, 512, format.act_order());
            let pool = Pool::new(1);
            pack_rows(&pool, Level::best(), &x, 512, 2, &mut q);
            let mut out = [0.0; 6];
            let job = Job {
                weight: matrix.view(),
                input: Input::Q8(&q),
                rows: Rows::All(2),
                out: OutRows::new(&mut out, 3),
                bias: None,
            };
            run_jobs(&pool, Level::best(), &[job]);
            assert!(out[..3].iter().all(|y| y.is_finite()) && out[3..].iter().all(|y| y.is_nan()));
        }
    }
}

#[test]
fn packing_is_the_same_at_every_level() {
    let mut rng = Rng(11);
    let pool = Pool::new(2);
    for order in [forebay_quant::ActOrder::Sequential, forebay_quant::ActOrder::NibblePairs] {
        for cols in [32usize, 224, 256, 2880] {
            let scale = [1.0f32, 1e-30, 1e30, 1e-38, 0.0];
            let x: Vec<f32> = (0..20 * cols).map(|i| rng.float() * scale[i / 32 % 5]).collect();
            let mut expected = Q8Rows::new(20, cols, order);
            x.chunks(cols).enumerate().for_each(|(r, x)| expected.pack(r, x));
            for level in Level::available() {
                let mut q = Q8Rows::new(20, cols, order);
                pack_rows(&pool, level, &x, cols, 20, &mut q);
                (0..20).for_each(|r| assert_eq!(q.row(r), expected.row(r), "{level}"));
            }
        }
    }
}

#[test]
fn several_jobs_into_one_output() {
    let mut rng = Rng(3);
    let (a, b) = (
        Matrix::random(Format::Q8_0, 100, 64, false, &mut rng),
        Matrix::random(Format::Q6K, 37, 256, false, &mut rng),
    );
    let x: Vec<f32> = (0..5 * 256).map(|_| rng.float()).collect();
    let (n, pool) = (137, Pool::new(3));
    for level in Level::available() {
        let mut out = vec![0.0; 5 * n];
        let (left, right) = (OutRows::new(&mut out, n), &[(0, 4), (3, 1)]);
        // SAFETY: the second job writes rows 1 and 4, the first rows 0 and 2.
        let other = unsafe { left.alias() };
        let jobs = [
            Job {
                weight: a.view(),
                input: Input::F32 { data: &x, stride: 256 },
                rows: Rows::Map(&[(1, 0), (2, 2)]),
                out: left,
                bias: None,
            },
            Job {
                weight: b.view(),
                input: Input::F32 { data: &x, stride: 256 },
                rows: Rows::Map(right),
                out: other,
                bias: None,
            },
        ];
        run_jobs(&pool, level, &jobs);
        for o in 0..100 {
            assert!(same(out[2 * n + o], dot_f32(&a.view(), o, &x[512..576])));
        }
        for o in 0..37 {
            assert!(same(out[n + o], dot_f32(&b.view(), o, &x[768..1024])));
        }
    }
}
