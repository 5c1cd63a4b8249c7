//! How quick matrix products of a format are on this machine: what predictions are made from.
//!
//! One large matrix per format is multiplied for a moment, with one row (bound by memory) and with many
//! (bound by arithmetic). What is not here: benches, which compare with limits and repeat.

use std::time::{Duration, Instant};

use forebay_quant::{Format, MatrixView, PlaneView, Q8Rows};

use crate::matmul::{self, Input, Job, OutRows, Rows};
use crate::pool::Pool;
use crate::simd::Level;

/// Bytes of a matrix probed with one row: several times what caches hold.
const BYTES: usize = 144 << 20;
/// Bytes of a matrix probed with many, whose place decides little.
const BYTES_MANY: usize = 24 << 20;
const COLS: usize = 2048;
/// Rows of a product that is bound by arithmetic.
const MANY: usize = 64;
/// Every byte of the matrix: as a scale in any format it gives normal numbers.
const FILLING: u8 = 0x33;
/// Shortest time of a probe: a machine that others use has moments.
const LEAST: Duration = Duration::from_millis(150);

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Speed {
    /// Weight bytes per second with one row.
    pub one_row: f64,
    /// Weight bytes times rows per second with many.
    pub many_rows: f64,
}

/// Measures a format; activations are rounded to 8 bits if `q8` and the format is quantised.
pub fn measure(pool: &Pool, level: Level, format: Format, q8: bool) -> Speed {
    let one_row = rate(pool, level, format, q8, BYTES, 1);
    let many_rows = rate(pool, level, format, q8, BYTES_MANY, MANY);
    Speed { one_row, many_rows }
}

/// Weight bytes times rows per second, the median of a few products.
fn rate(pool: &Pool, level: Level, format: Format, q8: bool, bytes: usize, rows: usize) -> f64 {
    let layouts = format.planes();
    let row_bytes: usize = layouts.iter().filter_map(|l| l.row_bytes(COLS)).sum();
    let outputs = (bytes / row_bytes).max(16) / 16 * 16;
    let planes: Vec<(Vec<u8>, usize)> = layouts
        .iter()
        .map(|l| {
            let stride = l.row_bytes(COLS).expect("whole blocks");
            (vec![FILLING; stride * outputs], stride)
        })
        .collect();
    let views: Vec<PlaneView<'_>> =
        planes.iter().map(|(data, stride)| PlaneView { data, stride: *stride }).collect();
    let weight = MatrixView::new(format, outputs, COLS, &views).expect("made to fit");
    // [rows, COLS]
    let x: Vec<f32> = (0..rows * COLS).map(|i| (i % 17) as f32 - 8.0).collect();
    let q8 = q8 && format.is_quantized();
    let packed = q8.then(|| {
        let mut packed = Q8Rows::new(rows, COLS, format.act_order());
        matmul::pack_rows(pool, level, &x, COLS, rows, &mut packed);
        packed
    });
    // [rows, outputs]
    let mut out = vec![0.0; rows * outputs];
    let mut run = || {
        let input = match &packed {
            Some(packed) => Input::Q8(packed),
            None => Input::F32 { data: &x, stride: COLS },
        };
        let out = OutRows::new(&mut out, outputs);
        let job = Job { weight, input, rows: Rows::All(rows), out, bias: None };
        matmul::run_jobs(pool, level, &[job]);
    };
    run();
    let (clock, mut times) = (Instant::now(), Vec::new());
    while times.len() < 3 || clock.elapsed() < LEAST {
        let one = Instant::now();
        run();
        times.push(one.elapsed());
    }
    times.sort_unstable();
    (row_bytes * outputs * rows) as f64 / times[times.len() / 2].as_secs_f64().max(1e-9)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_can_be_probed() {
        let pool = Pool::new(1);
        for format in Format::all() {
            for q8 in [false, true] {
                let speed = measure(&pool, Level::best(), *format, q8);
                assert!(speed.one_row > 0.0 && speed.many_rows > 0.0, "{format:?}");
            }
        }
    }
}
