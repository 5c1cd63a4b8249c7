//! Few rows over a long context: blocks of positions shared out over the threads.
//!
//! Every block's own result is written down, then each query merges its results in ascending order: the
//! same operations on the same numbers as [`super::kernel::attend_unit`], hence the same bits. A wave is
//! as many blocks as [`SPLIT_BYTES`] holds results of.

use std::cell::RefCell;

use super::kernel::{Unit, attend_unit_blocks, blocks, finish_record, merge_record, record_len};
use super::{AttnParams, AttnRow, KvPages, SCRATCH, unit_rows};
use crate::pool::Pool;
use crate::rows::{DisjointMut, Rows};
use crate::simd::Level;

/// The most memory that the results of a wave take, in bytes.
pub const SPLIT_BYTES: usize = 4 << 20;

/// Fewer blocks than this are not worth a second barrier.
const MIN_BLOCKS: usize = 16;

thread_local! {
    /// States, then results; of the calling thread.
    static RECORDS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Blocks of a wave if this call should be split, none if its heads and rows keep the threads busy.
pub(super) fn wave(
    pool: &Pool,
    params: &AttnParams,
    kv: &KvPages,
    rows: &[AttnRow],
) -> Option<usize> {
    let units = rows.len().div_ceil(unit_rows(params, kv)) * kv.layout.n_kv_heads;
    let rounds = units.div_ceil(pool.threads());
    // Each thread would have one unit or two, and some of them none for a while.
    let few = rounds <= 2 && units * 5 < rounds * pool.threads() * 4;
    let records = SPLIT_BYTES / size_of::<f32>() / record_len(&kv.layout);
    let wave = (records / (rows.len() * params.n_heads).max(1)).saturating_sub(1);
    let n_blocks = blocks(rows, params.window).len();
    (few && n_blocks.min(wave) >= MIN_BLOCKS).then_some(wave.min(n_blocks))
}

/// [`super::attend`] in waves of `wave` blocks.
pub(super) fn attend(
    pool: &Pool,
    level: Level,
    wave: usize,
    (params, kv, rows): (&AttnParams, &KvPages, &[AttnRow]),
    q: Rows,
    write: &(dyn Fn(usize, usize, &[f32]) + Sync),
) {
    let layout = &kv.layout;
    let group = params.n_heads / layout.n_kv_heads;
    let unit_rows = unit_rows(params, kv);
    let (vp, v_head_dim, len) = (layout.padded_v(), layout.v_head_dim, record_len(layout));
    let queries = rows.len() * params.n_heads;
    RECORDS.with_borrow_mut(|buffer| {
        let needed = (wave + 1) * queries * len;
        if buffer.len() < needed {
            buffer.resize(needed, 0.0);
        }
        let (states, results) = buffer.split_at_mut(queries * len);
        for state in states.chunks_exact_mut(len) {
            state.fill(0.0);
            state[vp] = f32::NEG_INFINITY;
        }
        let all = blocks(rows, params.window);
        for start in all.clone().step_by(wave) {
            let wave = start..(start + wave).min(all.end);

            // One piece of work: some blocks of one unit of rows and one KV head.
            let units = rows.len().div_ceil(unit_rows) * layout.n_kv_heads;
            let piece = (wave.len() * units / (4 * pool.threads())).clamp(1, 8);
            let pieces = wave.len().div_ceil(piece);
            let out = DisjointMut::new(results);
            pool.run_chunks(units * pieces, 1, &|range| {
                for work in range {
                    let (u, first) = (work / pieces, wave.start + work % pieces * piece);
                    let (row_unit, kv_head) = (u / layout.n_kv_heads, u % layout.n_kv_heads);
                    let first_row = row_unit * unit_rows;
                    let unit = Unit {
                        params,
                        kv,
                        rows: &rows[first_row..rows.len().min(first_row + unit_rows)],
                        first_row,
                        kv_head,
                        heads: kv_head * group..(kv_head + 1) * group,
                        q,
                        partial: true,
                    };
                    let of = first..(first + piece).min(wave.end);
                    SCRATCH.with_borrow_mut(|scratch| {
                        attend_unit_blocks(level, &unit, of, scratch, |b, row, head, acc, m, l| {
                            let at = (b - wave.start) * queries + row * params.n_heads + head;
                            // SAFETY: each (block, row, head) belongs to one piece of work.
                            let record = unsafe { out.slice(at * len..(at + 1) * len) };
                            record[..vp].copy_from_slice(acc);
                            record[vp..].copy_from_slice(&[m, l]);
                        });
                    });
                }
            });

            let results = &*results;
            let out = DisjointMut::new(states);
            pool.run_chunks(queries, 1, &|range| {
                for i in range {
                    // SAFETY: each query is handed out once.
                    let state = unsafe { out.slice(i * len..(i + 1) * len) };
                    let (row, head) = (i / params.n_heads, i % params.n_heads);
                    let seen = blocks(&rows[row..row + 1], params.window);
                    for b in seen.start.max(wave.start)..seen.end.min(wave.end) {
                        let at = (b - wave.start) * queries + i;
                        merge_record(level, &results[at * len..(at + 1) * len], state);
                    }
                    if wave.end == all.end {
                        finish_record(level, state, params.sinks.map(|s| s[head]));
                        write(row, head, &state[..v_head_dim]);
                    }
                }
            });
        }
    });
}
