//! Quantising activation rows, in parallel and with the machine's vectors.

use std::sync::atomic::{AtomicUsize, Ordering};

use forebay_quant::group::GROUP;
use forebay_quant::{ActOrder, Q8Group, Q8Rows};

use crate::{Level, Pool};

/// Values below which waking other threads costs more than they save.
const SERIAL: usize = 32 * 1024;

/// Quantises `rows` rows of `x`, row `r` at `r * stride`, into the rows of `q`. The same bits at every level.
///
/// # Panics
/// If the rows lie outside `x` or do not fit `q`, or the machine lacks the level.
pub fn pack_rows(pool: &Pool, level: Level, x: &[f32], stride: usize, rows: usize, q: &mut Q8Rows) {
    super::require(level);
    let (cols, order) = (q.cols(), q.order());
    let (n_groups, group_stride) = (q.groups_per_row(), q.stride());
    assert!(rows <= q.max_rows(), "{rows} rows into room for {}", q.max_rows());
    if rows == 0 || cols == 0 {
        return;
    }
    let last = (rows - 1).checked_mul(stride).and_then(|s| s.checked_add(cols));
    assert!(last.is_some_and(|end| end <= x.len()), "rows of activations out of bounds");
    let out = Groups(q.groups_mut().as_mut_ptr());
    let pack_one = |row: usize| {
        // SAFETY: row < rows <= max_rows, and each row is given to one thread.
        let groups =
            unsafe { std::slice::from_raw_parts_mut(out.row(row * group_stride), n_groups) };
        pack_row(level, order, &x[row * stride..][..cols], groups);
    };
    if rows == 1 || rows * cols <= SERIAL {
        (0..rows).for_each(pack_one);
        return;
    }
    let next = AtomicUsize::new(0);
    pool.run(&|_| {
        loop {
            let row = next.fetch_add(1, Ordering::Relaxed);
            if row >= rows {
                return;
            }
            pack_one(row);
        }
    });
}

struct Groups(*mut Q8Group);

// SAFETY: a pointer into an exclusive borrow; threads use disjoint rows of it.
unsafe impl Sync for Groups {}

impl Groups {
    /// # Safety
    /// `group` lies within the borrow.
    unsafe fn row(&self, group: usize) -> *mut Q8Group {
        // SAFETY: by the contract.
        unsafe { self.0.add(group) }
    }
}

fn pack_row(level: Level, order: ActOrder, x: &[f32], out: &mut [Q8Group]) {
    match level {
        // SAFETY: a Level is only chosen where its instructions are there.
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 | Level::Avx2 => unsafe { super::pack_avx2::pack_row(order, x, out) },
        _ => {
            for (group, x) in out.iter_mut().zip(x.chunks(GROUP)) {
                group.pack(order, x);
            }
        }
    }
}
