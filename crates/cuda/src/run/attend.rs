//! Attention: over blocks of positions and then merged for few rows, over tiles of queries for many.

use forebay_cpu::attention::KvLayout;
use forebay_program::{AttentionOp, BufferId, PackId};

use super::Run;
use crate::args::*;
use crate::driver::Kernel;
use crate::error::CudaError;
use crate::map::{FEW_ROWS, rows_of_tile, tile_queries, window_blocks};

/// Blocks of positions that wait in shared memory together while they are merged, as in `attention.cu`.
const MERGED: usize = 128;

impl Run<'_> {
    pub(super) fn attention(
        &self,
        op: &AttentionOp,
        gate: Option<BufferId>,
        pack: Option<PackId>,
    ) -> Result<(), CudaError> {
        let args = self.attend_args(op)?;
        let (dim, blocks) = (args.dim as usize, args.max_blocks as usize);
        let shared = self.attend_shared(&args);
        if self.rows <= FEW_ROWS && shared <= self.driver.info().shared_bytes as usize {
            let grid = [blocks, args.n_kv_heads as usize, self.rows];
            self.launch(Kernel::AttendBlocks, grid, 256, shared, args)?;
            return self.merge(op, args, gate, pack);
        }
        let kernel = match dim {
            ..=64 => Kernel::AttendTile64,
            65..=128 => Kernel::AttendTile128,
            129..=256 => Kernel::AttendTile256,
            _ => Kernel::AttendTile512,
        };
        let rows_of_tile = rows_of_tile(self.program, op);
        let tiles =
            self.counts.tiles.iter().find(|t| t.0 == rows_of_tile).expect("of every attention").1;
        let queries = tile_queries(dim);
        // As `tile_body` lays it out: keys or probabilities, values, queries, and numbers of queries and positions.
        let blocks = if dim > 256 { 1 } else { 2 };
        let positions = 32 * blocks;
        let rows = dim.max(queries) * positions + (positions + queries) * dim;
        let floats = rows + 2 * queries * (blocks + 1) + 2 * positions;
        let grid = [tiles, args.n_kv_heads as usize, 1];
        self.launch(kernel, grid, 256, 4 * floats, args)?;
        if let Some(gate) = gate {
            let y = self.buffer(gate);
            self.element(ElementOp::Sigmoid, op.dst, ElementArgs { y, ..Default::default() })?;
        }
        match pack {
            Some(p) => self.pack(op.dst, p),
            None => Ok(()),
        }
    }

    pub(crate) fn attend_args(&self, op: &AttentionOp) -> Result<AttendArgs, CudaError> {
        let layer = &self.program.kv_layers[op.kv.0];
        let dim = layer.head_dim;
        if !dim.is_multiple_of(16) {
            return Err(CudaError::Unsupported(format!(
                "heads {dim} wide, which is no multiple of 16"
            )));
        }
        let layout = KvLayout::new(layer.n_kv_heads, dim, self.shape.kv_type);
        Ok(AttendArgs {
            q: self.buffer(op.q),
            out: self.buffer(op.dst),
            sinks: self.vector(op.sinks),
            pages: self.map.kv[op.kv.0],
            tables: self.inputs.table(layer.class),
            positions: self.inputs.positions(),
            row_sequence: self.inputs.row_sequence(),
            tiles: self.inputs.tiles(rows_of_tile(self.program, op)),
            parts: self.map.parts,
            part_ml: self.map.part_ml,
            page_bytes: layout.page_bytes() as u64,
            rows: self.rows as u32,
            n_heads: op.n_heads as u32,
            n_kv_heads: layer.n_kv_heads as u32,
            dim: dim as u32,
            table_len: self.inputs.table_len as u32,
            kv_type: self.shape.kv_type as u32,
            window: op.window.unwrap_or(0) as u32,
            max_blocks: window_blocks(op.window, self.blocks) as u32,
            scale: op.scale,
            group: (op.n_heads / layer.n_kv_heads) as u32,
            ..Default::default()
        })
    }

    /// Shared memory of attention over blocks, as `waiting` in `attention.cu` lays it out: queries and room for a key and
    /// a value, probabilities, and a head of a page.
    pub(crate) fn attend_shared(&self, args: &AttendArgs) -> usize {
        let (dim, group) = (args.dim as usize, (args.n_heads / args.n_kv_heads) as usize);
        4 * (group + 2) * (dim + 4) + 128 * group + 64 * dim * self.shape.kv_type.bytes() + 256
    }

    /// The second half of attention for few rows.
    pub(crate) fn merge(
        &self,
        op: &AttentionOp,
        mut args: AttendArgs,
        gate: Option<BufferId>,
        pack: Option<PackId>,
    ) -> Result<(), CudaError> {
        let (dim, blocks) = (args.dim as usize, args.max_blocks as usize);
        // A block of 32 outputs is one head's: packed where it is made.
        let packs_here = dim.is_multiple_of(32);
        if let (Some(p), true) = (pack, packs_here) {
            let p = &self.map.packs[p.0];
            (args.codes, args.meta) = (p.codes, p.meta);
            (args.row_codes, args.row_meta) = (p.row_codes, p.row_meta);
        }
        args.gate = gate.map_or(0, |g| self.buffer(g));
        let grid = [op.n_heads * dim.div_ceil(32), self.rows, 1];
        let shared = 4 * (32 * blocks.min(MERGED) + 4 * blocks);
        self.launch(Kernel::AttendMerge, grid, 256, shared, args)?;
        match (pack, packs_here) {
            (Some(p), false) => self.pack(op.dst, p),
            _ => Ok(()),
        }
    }
}
