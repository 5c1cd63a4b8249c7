//! How quick this machine is at what a program does: what predictions are made from.
//!
//! With one row, the very products of the model are timed, as many at once as the program runs at once,
//! on memory that no cache holds: small matrices take longer per byte than large ones. With many rows
//! (bound by arithmetic) one matrix per format stands for all. What is not here: benches, which compare
//! with limits and repeat.

use std::time::{Duration, Instant};

use forebay_quant::{ActOrder, Format, MatrixView, PlaneView, Q8Rows};

use crate::matmul::{self, Input, Job, OutRows, Rows};
use crate::ops;
use crate::pool::Pool;
use crate::rows::{Rows as RowsOf, RowsMut};
use crate::simd::Level;

/// Bytes that products with one row go through in turn: several times what caches hold.
const BYTES: usize = 144 << 20;
/// Bytes of a matrix probed with many, whose place decides little.
const BYTES_MANY: usize = 24 << 20;
const COLS: usize = 2048;
/// Rows of a product that is bound by arithmetic.
const MANY: usize = 64;
/// Every byte of the matrix: as a scale in any format it gives normal numbers.
const FILLING: u8 = 0x33;
/// Shortest time of a probe: a machine that others use has moments.
const LEAST: Duration = Duration::from_millis(100);

/// A matrix as far as its speed goes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Shape {
    /// Its numbers.
    pub format: Format,
    /// Output features.
    pub rows: usize,
    /// Input features.
    pub cols: usize,
}

/// Times things on one pool.
pub struct Probe<'a> {
    pool: &'a Pool,
    level: Level,
    q8: bool,
    memory: Vec<u8>,
}

impl<'a> Probe<'a> {
    /// Activations are rounded to 8 bits if `q8` and a format is quantised.
    pub fn new(pool: &'a Pool, level: Level, q8: bool) -> Probe<'a> {
        Probe { pool, level, q8, memory: vec![FILLING; BYTES] }
    }

    /// Seconds of products with one row that run at once, the median over different places in memory. What is
    /// larger than the memory is measured in part.
    pub fn one_row(&self, shapes: &[Shape]) -> f64 {
        let whole: usize = shapes.iter().map(bytes_of).sum();
        let parts = whole.div_ceil(BYTES);
        let part = |s: &Shape| Shape { rows: (s.rows / parts).max(1), ..*s };
        let shapes: Vec<Shape> = shapes.iter().map(part).collect();
        let shapes = &shapes[..];
        let bytes: usize = shapes.iter().map(bytes_of).sum();
        let inputs: Vec<Activations> =
            shapes.iter().map(|s| self.activations(s.format, s.cols, 1)).collect();
        let mut out: Vec<Vec<f32>> = shapes.iter().map(|s| vec![0.0; s.rows]).collect();
        let mut place = 0;
        self.median(|| {
            if place + bytes > BYTES {
                place = 0;
            }
            let mut jobs = Vec::with_capacity(shapes.len());
            let mut at = place;
            for ((shape, input), out) in shapes.iter().zip(&inputs).zip(&mut out) {
                let Some(weight) = self.matrix(shape, at) else { continue };
                at += bytes_of(shape);
                let out = OutRows::new(out, shape.rows);
                jobs.push(Job { weight, input: input.get(), rows: Rows::All(1), out, bias: None });
            }
            matmul::run_jobs(self.pool, self.level, &jobs);
            place += bytes;
        }) * whole as f64
            / bytes.max(1) as f64
    }

    /// Weight bytes times rows per second with many rows.
    pub fn many_rows(&self, format: Format) -> f64 {
        let row_bytes = bytes_of(&Shape { format, rows: 1, cols: COLS });
        let rows = (BYTES_MANY / row_bytes).max(16) / 16 * 16;
        let shape = Shape { format, rows, cols: COLS };
        let input = self.activations(format, COLS, MANY);
        // [MANY, rows]
        let mut out = vec![0.0; MANY * rows];
        let seconds = self.median(|| {
            let weight = self.matrix(&shape, 0).expect("smaller than the memory");
            let out = OutRows::new(&mut out, rows);
            let job = Job { weight, input: input.get(), rows: Rows::All(MANY), out, bias: None };
            matmul::run_jobs(self.pool, self.level, &[job]);
        });
        (row_bytes * rows * MANY) as f64 / seconds
    }

    /// Seconds of an operation that is no product, with one row: a norm of `width` elements.
    pub fn small(&self, width: usize) -> f64 {
        const TIMES: usize = 64;
        let (x, weight) = (vec![0.5; width], vec![1.0; width]);
        let mut out = vec![0.0; width];
        let seconds = self.median(|| {
            for _ in 0..TIMES {
                let (x, out) = (RowsOf::dense(&x, width), RowsMut::dense(&mut out, width));
                ops::rms_norm(self.pool, self.level, x, Some(&weight), 1e-6, out);
            }
        });
        seconds / TIMES as f64
    }

    /// A matrix that begins at a byte of the memory, its planes one behind the other; none if it is too large.
    fn matrix(&self, shape: &Shape, at: usize) -> Option<MatrixView<'_>> {
        let mut planes = [PlaneView { data: &[], stride: 0 }; 3];
        let layouts = shape.format.planes();
        let mut at = at;
        for (plane, layout) in planes.iter_mut().zip(&layouts) {
            let stride = layout.row_bytes(shape.cols)?;
            *plane = PlaneView { data: self.memory.get(at..at + stride * shape.rows)?, stride };
            at += stride * shape.rows;
        }
        MatrixView::new(shape.format, shape.rows, shape.cols, &planes[..layouts.len()]).ok()
    }

    /// `[rows, cols]`
    fn activations(&self, format: Format, cols: usize, rows: usize) -> Activations {
        let x: Vec<f32> = (0..rows * cols).map(|i| (i % 17) as f32 - 8.0).collect();
        let order: Option<ActOrder> =
            (self.q8 && format.is_quantized()).then(|| format.act_order());
        let packed = order.map(|order| {
            let mut packed = Q8Rows::new(rows, cols, order);
            matmul::pack_rows(self.pool, self.level, &x, cols, rows, &mut packed);
            packed
        });
        Activations { x, cols, packed }
    }

    fn median(&self, mut run: impl FnMut()) -> f64 {
        run();
        let (clock, mut times) = (Instant::now(), Vec::new());
        while times.len() < 3 || clock.elapsed() < LEAST {
            let one = Instant::now();
            run();
            times.push(one.elapsed());
        }
        times.sort_unstable();
        times[times.len() / 2].as_secs_f64().max(1e-9)
    }
}

struct Activations {
    x: Vec<f32>,
    cols: usize,
    packed: Option<Q8Rows>,
}

impl Activations {
    fn get(&self) -> Input<'_> {
        match &self.packed {
            Some(packed) => Input::Q8(packed),
            None => Input::F32 { data: &self.x, stride: self.cols },
        }
    }
}

fn bytes_of(shape: &Shape) -> usize {
    let planes = shape.format.planes();
    planes.iter().filter_map(|l| l.row_bytes(shape.cols)).sum::<usize>() * shape.rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_can_be_probed() {
        let pool = Pool::new(1);
        for q8 in [false, true] {
            let probe = Probe::new(&pool, Level::best(), q8);
            assert!(probe.small(2048) > 0.0);
            for format in Format::all() {
                let shape = Shape { format: *format, rows: 64, cols: COLS };
                let one = probe.one_row(&[shape]);
                assert!(one > 0.0 && probe.many_rows(*format) > 0.0, "{format:?}");
            }
        }
    }

    #[test]
    fn what_is_larger_than_the_memory_is_measured_in_part() {
        let pool = Pool::new(1);
        let probe = Probe::new(&pool, Level::best(), true);
        let shape = |rows| Shape { format: Format::Q8_0, rows, cols: COLS };
        assert!(probe.matrix(&shape(1 << 20), 0).is_none());
        assert!(probe.one_row(&[shape(1 << 20)]) > probe.one_row(&[shape(1 << 12)]));
    }
}
