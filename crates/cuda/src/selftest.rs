//! Products on the GPU against the scalar oracle, for every format: what `forebay selftest` runs on a machine with a GPU, and
//! the tests run in the emulator. Whole models are compared by `eval same --backend cuda`.

use forebay_cpu::vecmath::exp;
use forebay_program::{LOGIT_LINE, LogitLines};
use forebay_quant::format::ParamType;
use forebay_quant::{Format, MatrixView, PlaneView, dequantize_row, dot_f32, dot_q8};

use crate::args::{Acts, EmbedArgs, FloatJob, GemmArgs, GemvArgs, GemvJob, NormArgs, Ptr};
use crate::backend::Gpu;
use crate::driver::{Driver, Kernel, Launch, Plain, bytes_of, bytes_of_mut};
use crate::error::CudaError;
use crate::layout::Layout;
use crate::lines::LinesAt;
use crate::load::{Stack, place};
use crate::run::GEMM_SHARED;

/// What was compared, and what differed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Comparisons of one matrix with one kernel.
    pub cases: usize,
    /// Numbers compared.
    pub numbers: usize,
    /// Of those, how many were not NaN.
    pub finite: usize,
    /// One line per comparison with a difference.
    pub different: Vec<String>,
}

/// Every format with every choice that has arithmetic of its own.
fn formats() -> Vec<Format> {
    let mut all: Vec<Format> = Format::all().to_vec();
    for (bits, group, params) in [
        (2, 32, ParamType::F16),
        (3, 128, ParamType::F32),
        (4, 32, ParamType::F16),
        (4, 128, ParamType::F32),
        (5, 32, ParamType::F32),
        (6, 64, ParamType::F16),
        (8, 128, ParamType::F16),
        (8, 32, ParamType::F32),
    ] {
        all.push(Format::MlxAffine { bits, group, params });
    }
    all
}

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let x = (self.0 >> 33) ^ self.0;
        x.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16
    }
    fn float(&mut self) -> f32 {
        (self.next() & 0xffff) as f32 / 32768.0 - 1.0
    }
}

/// Compares all formats in some shapes. `seed` chooses the numbers.
pub fn products(gpu: &Gpu, seed: u64) -> Result<Report, CudaError> {
    let mut report = Report::default();
    let mut rng = Rng(seed);
    for format in formats() {
        let unit = format.block_elements().max(32);
        // Rows and columns: a single block, ragged groups, more than one tile.
        for (rows, blocks, mask) in
            [(1usize, 1usize, 0xff), (17, 9, 0xff), (70, 5, 0xbf), (67, 19, 0xbf)]
        {
            let blocks = if unit >= 128 { blocks.div_ceil(4) } else { blocks };
            let case = Case::random(format, rows, unit * blocks, mask, &mut rng);
            case.compare(&*gpu.0, &mut rng, &mut report)?;
        }
    }
    for (n, t) in [(1, 1.0), (1023, 0.7), (1024, 1.0), (5003, 1.9)] {
        compare_lines(&*gpu.0, n, t, &mut rng, &mut report)?;
    }
    Ok(report)
}

/// The largest and the sums of a row's lines against their definition, one number after the other.
fn compare_lines(
    d: &dyn Driver,
    n: usize,
    t: f32,
    rng: &mut Rng,
    report: &mut Report,
) -> Result<(), CudaError> {
    let mut logits: Vec<f32> = (0..n).map(|_| 60.0 * rng.float()).collect();
    logits[n / 2] = f32::NEG_INFINITY;
    logits[0] = 61.0;
    let max = logits[0];
    let sums = |t: f32| -> Vec<f64> {
        let exp = |l: &f32| exp(((l - max) * t).max(-80.0)) as f64;
        let line = |line: &[f32]| {
            let (whole, rest) = line.split_at(line.len() / 8 * 8);
            let lane = |i| whole.iter().skip(i).step_by(8).map(exp).fold(0.0, |s, e| s + e);
            (0..8).map(lane).fold(0.0, |s, e| s + e) + rest.iter().map(exp).fold(0.0, |s, e| s + e)
        };
        logits.chunks(LOGIT_LINE).map(line).collect()
    };
    let largest = |line: &[f32]| line.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let want = LogitLines {
        largest: logits.chunks(LOGIT_LINE).map(largest).collect(),
        sums: sums(1.0),
        own_sums: if t == 1.0 { Vec::new() } else { sums(t) },
        line: Vec::new(),
    };
    let (at, to) = (d.alloc(4 * n as u64)?, d.alloc(LinesAt::bytes(n) as u64)?);
    d.write(at, bytes_of(&logits))?;
    let mut got = LogitLines::default();
    let lines = LinesAt::enqueue(d, at, n, t, to)?;
    let (from, bytes) = lines.results();
    let mut bytes = vec![0; bytes];
    d.read(from, &mut bytes)?;
    lines.parse(&bytes, &mut got);
    d.free(at);
    d.free(to);
    report.cases += 1;
    report.numbers += 3 * want.sums.len();
    report.finite += 3 * want.sums.len();
    if got != want {
        report.different.push(format!("lines of {n} logits, t {t}: {got:?}, not {want:?}"));
    }
    Ok(())
}

struct Case {
    format: Format,
    rows: usize,
    cols: usize,
    planes: Vec<(Vec<u8>, usize)>,
}

impl Case {
    /// Random bytes; a mask of 0xbf keeps halves and E8M0 scales finite.
    fn random(format: Format, rows: usize, cols: usize, mask: u8, rng: &mut Rng) -> Case {
        let planes = format.planes().into_iter().map(|layout| {
            let stride = layout.row_bytes(cols).expect("whole blocks");
            let bytes = (0..rows * stride).map(|_| rng.next() as u8 & mask).collect();
            (bytes, stride)
        });
        Case { format, rows, cols, planes: planes.collect() }
    }

    fn view(&self) -> MatrixView<'_> {
        let planes = self.planes.iter();
        let planes: Vec<_> =
            planes.map(|(data, stride)| PlaneView { data, stride: *stride }).collect();
        MatrixView::new(self.format, self.rows, self.cols, &planes)
            .expect("planes as long as they must be")
    }

    fn compare(&self, d: &dyn Driver, rng: &mut Rng, report: &mut Report) -> Result<(), CudaError> {
        let view = self.view();
        let layout = Layout::of(self.format).expect("every format has a layout");
        let weight = forebay_models::WeightRef {
            name: "test".into(),
            format: self.format,
            rows: self.rows,
            cols: self.cols,
            planes: Vec::new(),
        };
        let stack = Stack::one(&weight);
        let memory = d.alloc(stack.bytes()?)?;
        let placed = place(&stack, memory)?;
        let mut planes: Vec<Vec<u8>> =
            layout.row_bytes(self.cols).iter().map(|n| vec![0; n * self.rows]).collect();
        let [a, b, c, e] = planes.as_mut_slice() else { unreachable!("four planes") };
        layout.repack(&view, 0..self.rows, [a, b, c, e]);
        let w = placed.args;
        for (to, bytes) in [w.codes, w.high, w.scales, w.supers].into_iter().zip(&planes) {
            d.write(to, bytes)?;
        }
        const MOST: usize = 37;
        let x: Vec<f32> = (0..MOST * self.cols).map(|_| rng.float()).collect();
        let at_x = d.alloc(4 * x.len() as u64)?;
        d.write(at_x, bytes_of(&x))?;
        let out = d.alloc((4 * MOST * self.rows.max(self.cols)) as u64)?;
        let mut check = |name: &str, got: Vec<f32>, want: Vec<f32>| {
            report.cases += 1;
            report.numbers += got.len();
            report.finite += want.iter().filter(|w| !w.is_nan()).count();
            let same =
                |(g, w): &(&f32, &f32)| g.to_bits() == w.to_bits() || (g.is_nan() && w.is_nan());
            if let Some(i) = got.iter().zip(&want).position(|p| !same(&p)) {
                let n = got.iter().zip(&want).filter(|p| !same(p)).count();
                report.different.push(format!(
                    "{} {}x{} {name}: {n} of {} differ, first {i}: {} and not {}",
                    self.format.name(),
                    self.rows,
                    self.cols,
                    got.len(),
                    got[i],
                    want[i]
                ));
            }
        };
        // The embedding's rows, dequantised.
        let tokens: Vec<u32> = (0..self.rows as u32).collect();
        let at_tokens = d.alloc(4 * tokens.len() as u64)?;
        d.write(at_tokens, bytes_of(&tokens))?;
        let args = EmbedArgs { w, tokens: at_tokens, out, d: self.cols as u32, pad: 0 };
        let n = self.rows.min(MOST);
        launch(d, Kernel::Embed, [self.cols.div_ceil(256), n, 1], 256, 0, args)?;
        let mut want = vec![0.0; n * self.cols];
        for (r, want) in want.chunks_exact_mut(self.cols).enumerate() {
            dequantize_row(&view, r, want);
        }
        check("rows", read(d, out, n * self.cols)?, want);
        // f32 activations.
        for rows in [1usize, 11] {
            let args = FloatJob {
                w,
                x: at_x,
                out,
                x_stride: self.cols as u32,
                stride: self.rows as u32,
                divisor: 1,
                rows: rows as u32,
                features: self.rows as u32,
                ..Default::default()
            };
            let (kernel, y) =
                if rows == 1 { (Kernel::Float1, 1) } else { (Kernel::Float8, rows.div_ceil(8)) };
            launch(d, kernel, [self.rows.div_ceil(8), y, 1], 128, 0, args)?;
            let want = self.expected(&x, rows, |r, x| dot_f32(&view, r, x));
            check("f32", read(d, out, rows * self.rows)?, want);
        }
        if self.format.is_quantized() {
            let acts = self.pack(d, at_x, MOST)?;
            for rows in [1usize, 2, 3, 4, 37] {
                let sent = [w.rows, rows as u32];
                match rows {
                    37 => {
                        let args = GemmArgs {
                            w,
                            acts,
                            out,
                            rows: sent[1],
                            features: sent[0],
                            stride: sent[0],
                            divisor: 1,
                            variant: placed.variant,
                            ..Default::default()
                        };
                        launch(
                            d,
                            Kernel::Gemm,
                            [self.rows.div_ceil(64), 2, 1],
                            256,
                            GEMM_SHARED,
                            args,
                        )?;
                    }
                    _ => {
                        let mut args = GemvArgs {
                            acts,
                            n_jobs: 1,
                            rows: sent[1],
                            passes: 3,
                            ..Default::default()
                        };
                        args.jobs[0] = GemvJob {
                            w,
                            out,
                            stride: sent[0],
                            variant: placed.variant,
                            ..Default::default()
                        };
                        if rows == 1 {
                            let shared = 48 * self.cols / 32 + 128;
                            let grid = [self.rows.div_ceil(12), 1, 1];
                            launch(d, Kernel::Gemv1, grid, 128, shared, args)?;
                        } else {
                            let grid = [self.rows.div_ceil(8), rows.div_ceil(2), 1];
                            launch(d, Kernel::Gemv2, grid, 256, 0, args)?;
                        }
                    }
                }
                let want = self.expected(&x, rows, |r, x| dot_q8(&view, r, x));
                check(&format!("q8 of {rows} rows"), read(d, out, rows * self.rows)?, want);
            }
            d.free(acts.codes);
            d.free(acts.meta);
        }
        for at in [memory, at_x, out, at_tokens] {
            d.free(at);
        }
        Ok(())
    }

    /// `[rows, features]`
    fn expected(&self, x: &[f32], rows: usize, dot: impl Fn(usize, &[f32]) -> f32) -> Vec<f32> {
        let rows = x.chunks_exact(self.cols).take(rows);
        rows.flat_map(|x| (0..self.rows).map(|r| dot(r, x)).collect::<Vec<_>>()).collect()
    }

    fn pack(&self, d: &dyn Driver, x: Ptr, rows: usize) -> Result<Acts, CudaError> {
        let acts = Acts {
            codes: d.alloc((rows * self.cols) as u64)?,
            meta: d.alloc((rows * self.cols / 2) as u64)?,
            row_codes: self.cols as u64,
            row_meta: self.cols as u64 / 2,
        };
        let mut args = NormArgs { src: x, width: self.cols as u32, ..Default::default() };
        (args.codes[0], args.meta[0]) = (acts.codes, acts.meta);
        (args.row_codes[0], args.row_meta[0]) = (acts.row_codes, acts.row_meta);
        launch(d, Kernel::NormPack, [rows, 1, 1], 256, 4 * self.cols, args)?;
        Ok(acts)
    }
}

fn launch<T: Plain>(
    d: &dyn Driver,
    kernel: Kernel,
    grid: [usize; 3],
    threads: u32,
    shared: usize,
    args: T,
) -> Result<(), CudaError> {
    let grid = grid.map(|n| n as u32);
    let shared = shared as u32;
    d.launch(Launch { kernel, grid, threads, shared }, bytes_of(&[args]))
}

fn read(d: &dyn Driver, from: Ptr, n: usize) -> Result<Vec<f32>, CudaError> {
    let mut out = vec![0.0; n];
    d.read(from, bytes_of_mut(&mut out))?;
    Ok(out)
}
