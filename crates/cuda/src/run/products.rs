//! Products: packed rows with up to four matrices at a time, or rows of floats.

use forebay_program::{BufferId, Operand, PackId};

use super::Run;
use crate::args::*;
use crate::driver::Kernel;
use crate::error::CudaError;
use crate::layout::Width;
use crate::map::{FEW_ROWS, TILE_N};
use crate::steps::Linear;

/// Output features of a tile of the matrix kernel for many rows.
const TILE_M: usize = 64;
/// Its shared memory: three rounds of the widest format, `Round<W_8>::BYTES` in `gemm.cu`; lanes need less.
pub(crate) const GEMM_SHARED: usize = 3 * 35584;

impl Run<'_> {
    pub(super) fn linears(&self, list: &[Linear]) -> Result<(), CudaError> {
        let mut packed: Vec<(PackId, Vec<&Linear>)> = Vec::new();
        for linear in list {
            match linear.op.src {
                Operand::F32(src) => self.float_linear(linear, src)?,
                Operand::Packed(p) => {
                    match packed.iter_mut().find(|(id, l)| *id == p && l.len() < 4) {
                        Some((_, list)) => list.push(linear),
                        None => packed.push((p, vec![linear])),
                    }
                }
            }
        }
        for (pack, list) in packed {
            let acts = self.acts(&self.map.packs[pack.0]);
            let jobs: Vec<GemvJob> = list.iter().map(|l| self.job(l)).collect();
            self.products(&jobs, acts, self.rows)?;
        }
        Ok(())
    }

    pub(crate) fn job(&self, l: &Linear) -> GemvJob {
        let w = &self.map.trunk[l.op.weight.0];
        let dst = l.add_into.unwrap_or(l.op.dst);
        GemvJob {
            w: w.args,
            bias: self.vector(l.op.bias),
            out: self.buffer(dst),
            stride: w.args.rows,
            add: l.add_into.is_some() as u32,
            variant: w.variant,
            first_block: 0,
        }
    }

    /// Products of packed rows with up to four matrices.
    pub(crate) fn products(
        &self,
        jobs: &[GemvJob],
        acts: Acts,
        rows: usize,
    ) -> Result<(), CudaError> {
        if rows > FEW_ROWS {
            for job in jobs {
                let args = GemmArgs {
                    w: job.w,
                    acts,
                    bias: job.bias,
                    out: job.out,
                    rows: rows as u32,
                    features: job.w.rows,
                    stride: job.stride,
                    divisor: 1,
                    add: job.add,
                    variant: job.variant,
                    ..Default::default()
                };
                self.gemm(args, rows.div_ceil(TILE_N))?;
            }
            return Ok(());
        }
        if rows == 1 {
            return self.one_row(jobs, GemvArgs { acts, ..Default::default() });
        }
        let mut args =
            GemvArgs { acts, n_jobs: jobs.len() as u32, rows: rows as u32, ..Default::default() };
        let mut blocks = 0;
        for (to, job) in args.jobs.iter_mut().zip(jobs) {
            *to = GemvJob { first_block: blocks, ..*job };
            blocks += job.w.rows.div_ceil(8);
        }
        self.launch(Kernel::Gemv2, [blocks as usize, rows.div_ceil(2), 1], 256, 0, args)
    }

    pub(super) fn gemm(&self, args: GemmArgs, tiles: usize) -> Result<(), CudaError> {
        let grid = [(args.features as usize).div_ceil(TILE_M), tiles, 1];
        self.launch(Kernel::Gemm, grid, 256, GEMM_SHARED, args)
    }

    fn float_linear(&self, l: &Linear, src: BufferId) -> Result<(), CudaError> {
        let w = &self.map.trunk[l.op.weight.0];
        let args = FloatJob {
            w: w.args,
            x: self.buffer(src),
            bias: self.vector(l.op.bias),
            out: self.buffer(l.add_into.unwrap_or(l.op.dst)),
            x_stride: w.args.cols,
            stride: w.args.rows,
            add: l.add_into.is_some() as u32,
            divisor: 1,
            rows: self.rows as u32,
            features: w.args.rows,
            ..Default::default()
        };
        self.float(args)
    }

    pub(crate) fn float(&self, args: FloatJob) -> Result<(), CudaError> {
        let (rows, blocks) = (args.rows as usize, (args.features as usize).div_ceil(8));
        let cols = args.w.cols as usize;
        let few = rows <= FEW_ROWS && args.ids == 0 && args.divisor == 1 && args.features <= 1024;
        let whole = args.w.width == Width::F32 as u32 && cols.is_multiple_of(4) && cols <= 5120;
        if few && whole {
            let grid = [args.features as usize, rows, 1];
            return self.launch(Kernel::FloatRow, grid, 256, 8 * cols, args);
        }
        match rows == 1 || args.ids != 0 {
            true => self.launch(Kernel::Float1, [blocks, rows, 1], 128, 0, args),
            false => self.launch(Kernel::Float8, [blocks, rows.div_ceil(8), 1], 128, 0, args),
        }
    }
}
