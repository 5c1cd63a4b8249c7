//! Attention of a pass: which row sees which pages.

use forebay_program::{AttentionOp, Pass};

use super::CpuBackend;
use crate::attention::{self, AttnParams, AttnRow, KvPages};
use crate::rows::{Rows, RowsMut};

impl CpuBackend {
    pub(super) fn attention(&mut self, pass: &Pass<'_>, op: &AttentionOp) {
        let rows = pass.rows();
        let class = self.program.kv_layers[op.kv.0].class;
        let q_range = self.range(op.q, rows);
        let dst_range = self.range(op.dst, rows);
        let kv = &self.kv[op.kv.0];
        let mut attn_rows = attention_rows(pass, class);
        let mut window = op.window;
        if op.two_way {
            // Who sees to the end of its rows sees what the last of them sees; a window grows by as many.
            let mut longest = 0;
            for rows in attn_rows.chunk_by_mut(|a, _| !a.last_of_sequence) {
                let last = rows.last().map_or(0, |row| row.pos);
                rows.iter_mut().for_each(|row| row.pos = last);
                longest = longest.max(rows.len());
            }
            window = window.map(|w| w + longest - 1);
        }
        let position_bytes = kv.layout.page_bytes() as u64 / attention::BLOCK as u64;
        for row in &attn_rows {
            let seen = (row.pos as u64 + 1).min(window.unwrap_or(usize::MAX) as u64);
            // Rows of one sequence share what they read; the last row's reads stand for all.
            if row.last_of_sequence {
                self.bytes_moved += seen * position_bytes;
            }
        }
        let rows: Vec<AttnRow<'_>> = attn_rows.iter().map(|r| r.row()).collect();
        let [q, out] = self
            .arena
            .get_disjoint_mut([q_range, dst_range])
            .expect("attention's buffers are apart");
        let width = op.n_heads * kv.layout.head_dim;
        let params = AttnParams {
            n_heads: op.n_heads,
            scale: op.scale,
            window,
            sinks: op.sinks.map(|s| self.vectors[s.0].as_slice()),
        };
        let pages = KvPages { layout: kv.layout, data: &kv.pages, stride: kv.layout.page_bytes() };
        let (q, out) = (Rows::dense(q, width), RowsMut::dense(out, width));
        attention::attend(&self.pool, self.level, &params, &pages, &rows, q, out);
    }
}

/// A row with its page table.
pub(super) struct RowPages<'a> {
    pub pos: u32,
    pub table: &'a [u32],
    pub last_of_sequence: bool,
}

impl<'a> RowPages<'a> {
    pub fn row(&self) -> AttnRow<'a> {
        AttnRow { pos: self.pos, table: self.table }
    }
}

pub(super) fn attention_rows<'a>(pass: &Pass<'a>, class: usize) -> Vec<RowPages<'a>> {
    let next = pass.row_sequence.iter().skip(1).map(Some).chain([None]);
    let rows = pass.positions.iter().zip(pass.row_sequence).zip(next);
    rows.map(|((&pos, s), next)| RowPages {
        pos,
        table: &pass.sequences[*s as usize].classes[class],
        last_of_sequence: next != Some(s),
    })
    .collect()
}
