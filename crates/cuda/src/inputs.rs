//! What a pass tells the GPU: tokens, positions, page tables, and how rows are cut into tiles. One small copy per pass, to
//! fixed addresses, so that a captured graph finds it.

use forebay_program::{Pass, Program};

use crate::args::Ptr;
use crate::map::CudaShape;

/// Word offsets in the copy.
#[derive(Clone, Debug)]
pub(crate) struct InputsMap {
    /// Address of the first word.
    pub base: Ptr,
    /// Words in all.
    pub words: usize,
    /// Rows there is room for.
    pub rows: usize,
    /// Entries of one page table.
    pub table_len: usize,
    sequences: usize,
    spans: usize,
    tables: Vec<usize>,
    tokens: usize,
    positions: usize,
    row_sequence: usize,
    tiles: Vec<(usize, usize)>,
}

impl InputsMap {
    pub(crate) fn new(
        program: &Program,
        shape: &CudaShape,
        rows: usize,
        tile_rows: &[usize],
    ) -> InputsMap {
        let table_len = shape.context.div_ceil(32);
        let sequences = shape.sequences.max(1);
        let mut words = 0;
        let mut take = |n: usize| {
            let at = words;
            words += n;
            at
        };
        let spans = take(4 * sequences);
        let tables = program.kv_windows.iter().map(|_| take(sequences * table_len)).collect();
        let (tokens, positions, row_sequence) = (take(rows), take(rows), take(rows));
        let tiles =
            tile_rows.iter().map(|&n| (n, take(2 * (rows.div_ceil(n) + sequences)))).collect();
        InputsMap {
            base: 0,
            words,
            rows,
            table_len,
            sequences,
            spans,
            tables,
            tokens,
            positions,
            row_sequence,
            tiles,
        }
    }

    fn at(&self, word: usize) -> Ptr {
        self.base + 4 * word as u64
    }

    pub(crate) fn spans(&self) -> Ptr {
        self.at(self.spans)
    }

    pub(crate) fn table(&self, class: usize) -> Ptr {
        self.at(self.tables[class])
    }

    pub(crate) fn tokens(&self) -> Ptr {
        self.at(self.tokens)
    }

    pub(crate) fn positions(&self) -> Ptr {
        self.at(self.positions)
    }

    pub(crate) fn row_sequence(&self) -> Ptr {
        self.at(self.row_sequence)
    }

    /// Tiles of `rows` rows.
    pub(crate) fn tiles(&self, rows: usize) -> Ptr {
        self.at(self.tiles.iter().find(|t| t.0 == rows).expect("tiles of every attention").1)
    }

    /// Fills `words` for a pass.
    pub(crate) fn fill(&self, pass: &Pass<'_>, tokens: &[u32], words: &mut Vec<u32>) -> Counts {
        let rows = pass.rows();
        assert!(
            rows <= self.rows && pass.sequences.len() <= self.sequences,
            "a pass is as planned"
        );
        words.clear();
        words.resize(self.words, 0);
        words[self.tokens..][..rows].copy_from_slice(tokens);
        words[self.positions..][..rows].copy_from_slice(pass.positions);
        words[self.row_sequence..][..rows].copy_from_slice(pass.row_sequence);
        let mut counts = Counts { spans: 0, tiles: Vec::new(), blocks: 0 };
        for (s, sequence) in pass.sequences.iter().enumerate() {
            for (class, table) in sequence.classes.iter().enumerate() {
                let to = &mut words[self.tables[class] + s * self.table_len..][..self.table_len];
                let n = table.len().min(self.table_len);
                to[..n].copy_from_slice(&table[..n]);
            }
        }
        let mut start = 0;
        let mut next_tile: Vec<usize> = self.tiles.iter().map(|t| t.1).collect();
        for run in pass.row_sequence.chunk_by(|a, b| a == b) {
            let state = pass.sequences[run[0] as usize].state;
            words[self.spans + 4 * counts.spans..][..4].copy_from_slice(&[
                start as u32,
                run.len() as u32,
                state[0],
                state[1],
            ]);
            counts.spans += 1;
            for ((size, _), next) in self.tiles.iter().zip(&mut next_tile) {
                for first in (0..run.len()).step_by(*size) {
                    let n = (run.len() - first).min(*size);
                    words[*next..*next + 2].copy_from_slice(&[(start + first) as u32, n as u32]);
                    *next += 2;
                }
            }
            start += run.len();
        }
        counts.tiles =
            self.tiles.iter().zip(next_tile).map(|((n, at), next)| (*n, (next - at) / 2)).collect();
        counts.blocks = pass.positions.iter().max().map_or(0, |p| *p as usize / 32 + 1);
        counts
    }
}

/// How much of each there is in a pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Counts {
    /// Runs of rows of one sequence.
    pub spans: usize,
    /// (rows of a tile, tiles)
    pub tiles: Vec<(usize, usize)>,
    /// Blocks of positions of the longest sequence.
    pub blocks: usize,
}
