//! Sequences and their KV pages.
//!
//! A page holds the keys and values of `BLOCK` consecutive positions, aligned to absolute positions, of
//! one layer. Layers with the same window form a class and share page tables: page `p` of a class
//! means page `p` in each of its layers. Pages that a sliding window has left behind are given back
//! when rows are committed, so a sliding layer never holds more than its window and one chunk.
//!
//! Bytes of pages belong to the backend; here are only indices.

use forebay_cpu::attention::BLOCK;
use forebay_program::SequenceTables;

/// No page: never written, or given back.
const NONE: u32 = u32::MAX;

/// Free pages of each class.
#[derive(Debug)]
pub struct PagePool {
    windows: Vec<Option<usize>>,
    free: Vec<Vec<u32>>,
    /// Free slots of recurrent state; none: no layer is recurrent.
    free_states: Option<Vec<u32>>,
}

/// Slots of recurrent state for so many sequences: each reads one and fills another; slot 0 is the zero
/// state that all begin with.
pub fn state_slots(sequences: usize) -> usize {
    1 + 2 * sequences
}

/// Pages of a class that one sequence of `context` tokens needs, when `chunk` rows are added at once.
pub fn pages_per_sequence(window: Option<usize>, context: usize, chunk: usize) -> usize {
    let all = context.div_ceil(BLOCK);
    match window {
        // The window before the first row of a chunk, the chunk, and both ends may be partly used.
        Some(w) => all.min((w + chunk).div_ceil(BLOCK) + 1),
        None => all,
    }
}

impl PagePool {
    /// `pages[class]` pages per class and `states` slots of recurrent state (0: no layer has one), all
    /// free.
    pub fn new(windows: &[Option<usize>], pages: &[usize], states: usize) -> PagePool {
        let free = pages.iter().map(|&n| (0..n as u32).rev().collect()).collect();
        let free_states = (states > 0).then(|| (1..states as u32).rev().collect());
        PagePool { windows: windows.to_vec(), free, free_states }
    }

    /// Free pages of the classes, for tests and statistics.
    pub fn free_pages(&self) -> Vec<usize> {
        self.free.iter().map(Vec::len).collect()
    }
}

/// One sequence: how many positions are done, and where their KV lies.
#[derive(Debug, Default)]
pub struct Sequence {
    tables: Vec<Vec<u32>>,
    /// Slot that holds the state after `len` tokens (0 at the start), and the one to fill.
    state: [u32; 2],
    len: usize,
}

impl Sequence {
    /// An empty sequence for a pool.
    pub fn new(pool: &PagePool) -> Sequence {
        Sequence { tables: vec![Vec::new(); pool.windows.len()], state: [0; 2], len: 0 }
    }

    /// Positions that are done.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is done yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The tables, for a backend.
    pub fn tables(&self) -> SequenceTables<'_> {
        SequenceTables { classes: &self.tables, state: self.state }
    }

    /// Makes room for `rows` more positions. False when the pool is out of pages; then nothing changed
    /// that [`Sequence::commit`] or [`Sequence::release`] would not undo.
    #[must_use]
    pub fn reserve(&mut self, pool: &mut PagePool, rows: usize) -> bool {
        if let Some(free) = pool.free_states.as_mut().filter(|_| self.state[1] == 0) {
            let Some(slot) = free.pop() else { return false };
            self.state[1] = slot;
        }
        let blocks = (self.len + rows).div_ceil(BLOCK);
        for (class, table) in self.tables.iter_mut().enumerate() {
            while table.len() < blocks {
                match pool.free[class].pop() {
                    Some(page) => table.push(page),
                    None => return false,
                }
            }
        }
        true
    }

    /// Takes `rows` reserved positions as done, and gives back pages no later position can see.
    pub fn commit(&mut self, pool: &mut PagePool, rows: usize) {
        self.len += rows;
        // What was filled holds; what was read is filled next, unless it is the zero state.
        self.state.swap(0, 1);
        for (class, table) in self.tables.iter_mut().enumerate() {
            let Some(window) = pool.windows[class] else { continue };
            // The next position sees `len - window + 1` and later.
            let first_seen = (self.len + 1).saturating_sub(window);
            for page in table.iter_mut().take(first_seen / BLOCK) {
                if *page != NONE {
                    pool.free[class].push(std::mem::replace(page, NONE));
                }
            }
        }
    }

    /// Gives all pages back; the sequence is empty again.
    pub fn release(&mut self, pool: &mut PagePool) {
        for (class, table) in self.tables.iter_mut().enumerate() {
            pool.free[class].extend(table.drain(..).filter(|p| *p != NONE));
        }
        if let Some(free) = &mut pool.free_states {
            free.extend(self.state.iter().filter(|s| **s != 0));
        }
        self.state = [0; 2];
        self.len = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashSet;

    proptest! {
        /// Pages needed are never more than planned, none is in two places, none is lost.
        #[test]
        fn pages_are_neither_shared_nor_lost(
            window in proptest::option::of(1usize..200),
            chunk in 1usize..100,
            steps in proptest::collection::vec(1usize..100, 1..40),
        ) {
            let context = 1000;
            let n = pages_per_sequence(window, context, chunk);
            let mut pool = PagePool::new(&[window], &[n], state_slots(1));
            let mut s = Sequence::new(&pool);
            for step in steps {
                let rows = step.min(chunk).min(context - s.len());
                if rows == 0 { break; }
                prop_assert!(s.reserve(&mut pool, rows), "planned pages must suffice");
                let held: Vec<u32> =
                    s.tables[0].iter().copied().filter(|p| *p != NONE).collect();
                let distinct: HashSet<u32> = held.iter().chain(&pool.free[0]).copied().collect();
                prop_assert_eq!(distinct.len(), n);
                prop_assert_eq!(held.len() + pool.free[0].len(), n);
                for pos in s.len()..s.len() + rows {
                    let lo = window.map_or(0, |w| (pos + 1).saturating_sub(w));
                    prop_assert!((lo..=pos).all(|j| s.tables[0][j / BLOCK] != NONE));
                }
                s.commit(&mut pool, rows);
            }
            s.release(&mut pool);
            prop_assert_eq!(pool.free_pages(), vec![n]);
        }
    }
}
