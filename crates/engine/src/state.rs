//! Sequences and their KV pages.
//!
//! A page holds the keys and values of `BLOCK` consecutive positions, aligned to absolute positions, of
//! one layer. Layers with the same window form a class and share page tables: page `p` of a class
//! means page `p` in each of its layers. Pages that a sliding window has left behind are given back
//! before rows are added, so a sliding layer never holds more than its window, one chunk and what the edges take.
//!
//! Pages and states are counted, so that sequences may share them. Sharing begins and ends at block
//! boundaries: a shared page is full, and nobody writes to it again. That is copy on write without the copy:
//! who goes on from a boundary takes a new page. A recurrent state is shared at exactly the position it was
//! left at, and a pass fills another slot than it reads.
//!
//! What keys, values and states are depends on how their sequence was steered: a snapshot says how, and only sequences that are
//! steered alike begin with it.
//!
//! Bytes of pages belong to the backend; here are only indices. What is kept for later: [`crate::prefix`].

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use forebay_cpu::attention::BLOCK;
use forebay_program::SequenceTables;

use crate::steer::{SteerKey, Steering};

/// Told apart by who follows them.
static NEXT_ID: AtomicU64 = AtomicU64::new(1);

/// No page: never written, or given back.
const NONE: u32 = u32::MAX;

/// Pages of each class and slots of state, with how many hold each.
#[derive(Debug)]
pub struct PagePool {
    windows: Vec<Option<usize>>,
    classes: Vec<Counted>,
    /// Slots of recurrent state; none: no layer is recurrent.
    states: Option<Counted>,
    /// Whether beginnings are kept: then pages stay until no snapshot at a boundary needs them.
    shared: bool,
}

/// Things that are taken, shared and given back by index.
#[derive(Debug)]
struct Counted {
    free: Vec<u32>,
    holders: Vec<u32>,
    /// The highest index ever taken, plus one.
    reached: usize,
}

impl Counted {
    fn new(range: std::ops::Range<u32>) -> Counted {
        Counted { holders: vec![0; range.end as usize], free: range.rev().collect(), reached: 0 }
    }

    fn take(&mut self) -> Option<u32> {
        let index = self.free.pop()?;
        self.holders[index as usize] = 1;
        self.reached = self.reached.max(index as usize + 1);
        Some(index)
    }

    fn share(&mut self, index: u32) {
        self.holders[index as usize] += 1;
    }

    fn give_back(&mut self, index: u32) {
        let holders = &mut self.holders[index as usize];
        *holders = holders.checked_sub(1).expect("what is given back was held");
        if *holders == 0 {
            self.free.push(index);
        }
    }

    fn is_shared(&self, index: u32) -> bool {
        self.holders[index as usize] > 1
    }
}

/// Slots of recurrent state for so many sequences and as many snapshots: each sequence reads one and fills
/// another; slot 0 is the zero state that all begin with.
pub fn state_slots(sequences: usize, snapshots: usize) -> usize {
    1 + 2 * sequences + snapshots
}

/// Pages of a class that one sequence of `context` tokens needs, when `chunk` rows are added at once. Where
/// beginnings are `shared`, windows reach back from the last block boundary instead of from the last position.
pub fn pages_per_sequence(
    window: Option<usize>,
    context: usize,
    chunk: usize,
    shared: bool,
) -> usize {
    let all = context.div_ceil(BLOCK);
    match window {
        // The window before the first row of a chunk, the chunk, and both ends may be partly used.
        Some(w) => all.min((w + chunk).div_ceil(BLOCK) + 1 + usize::from(shared)),
        None => all,
    }
}

/// Pages of a class that a snapshot needs besides those of running sequences: where all is kept anyway, it
/// lives on what they leave free.
pub fn pages_per_snapshot(window: Option<usize>, context: usize) -> usize {
    window.map_or(0, |w| context.div_ceil(BLOCK).min(w.div_ceil(BLOCK) + 1))
}

impl PagePool {
    /// `pages[class]` pages per class and `states` slots of recurrent state (0: no layer has one), all
    /// free. `shared`: see [`pages_per_sequence`].
    pub fn new(
        windows: &[Option<usize>],
        pages: &[usize],
        states: usize,
        shared: bool,
    ) -> PagePool {
        let classes = pages.iter().map(|&n| Counted::new(0..n as u32)).collect();
        let states = (states > 0).then(|| Counted::new(1..states as u32));
        PagePool { windows: windows.to_vec(), classes, states, shared }
    }

    /// Free pages of the classes.
    pub fn free_pages(&self) -> Vec<usize> {
        self.classes.iter().map(|class| class.free.len()).collect()
    }

    /// Pages of the classes that were never taken: those above the highest that was.
    pub fn unwritten_pages(&self) -> Vec<usize> {
        self.classes.iter().map(|class| class.holders.len() - class.reached).collect()
    }

    /// Pages of the classes that a sequence takes at most while it grows to `positions` in passes of at most
    /// `chunk` rows. Pages that it shares count as its own.
    pub fn pages_for(&self, positions: usize, chunk: usize) -> Vec<usize> {
        let windows = self.windows.iter();
        windows.map(|w| pages_per_sequence(*w, positions, chunk, self.shared)).collect()
    }

    /// Free slots of recurrent state; none: no layer is recurrent.
    pub fn free_states(&self) -> Option<usize> {
        self.states.as_ref().map(|states| states.free.len())
    }

    /// Whether a layer is recurrent: then a snapshot holds for exactly one length.
    pub fn is_recurrent(&self) -> bool {
        self.states.is_some()
    }

    /// First page of a class that a sequence needs to go on after `len` positions.
    fn first_needed(&self, class: usize, len: usize) -> usize {
        self.windows[class].map_or(0, |window| (len + 1).saturating_sub(window) / BLOCK)
    }
}

/// The state after some tokens, held so that sequences may begin with it.
#[derive(Debug)]
pub struct Snapshot {
    tables: Vec<Vec<u32>>,
    state: u32,
    len: usize,
    steering: Option<SteerKey>,
}

impl Snapshot {
    /// Positions it holds: a multiple of [`BLOCK`].
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The longest length, at most `most`, at which a sequence can begin with it.
    pub fn usable(&self, pool: &PagePool, most: usize) -> usize {
        let mut len = self.len.min(most) / BLOCK * BLOCK;
        if pool.is_recurrent() {
            return if len == self.len { len } else { 0 };
        }
        let has = |len: usize| {
            self.tables.iter().enumerate().all(|(class, table)| {
                let needed = pool.first_needed(class, len)..len / BLOCK;
                table[needed].iter().all(|page| *page != NONE)
            })
        };
        while len > 0 && !has(len) {
            len -= BLOCK;
        }
        len
    }

    /// Gives up what it holds.
    pub fn release(self, pool: &mut PagePool) {
        for (class, table) in pool.classes.iter_mut().zip(self.tables) {
            table.into_iter().filter(|page| *page != NONE).for_each(|page| class.give_back(page));
        }
        if let Some(states) = pool.states.as_mut().filter(|_| self.state != 0) {
            states.give_back(self.state);
        }
    }

    /// How the sequence was steered that it is of.
    pub fn steering(&self) -> Option<SteerKey> {
        self.steering
    }

    /// Tables and slot, for who saves the bytes.
    pub(crate) fn parts(&self) -> (&[Vec<u32>], u32) {
        (&self.tables, self.state)
    }

    /// New pages and a slot for `len` positions; of each class the pages from `first[class]` on. None: the
    /// pool has too few.
    pub(crate) fn allocate(
        pool: &mut PagePool,
        len: usize,
        first: &[usize],
        steering: Option<SteerKey>,
    ) -> Option<Snapshot> {
        let tables = vec![Vec::new(); first.len()];
        let mut snapshot = Snapshot { tables, state: 0, len, steering };
        let mut complete = true;
        for ((class, first), table) in pool.classes.iter_mut().zip(first).zip(&mut snapshot.tables)
        {
            for page in 0..len / BLOCK {
                let page = if page >= *first { class.take() } else { Some(NONE) };
                complete &= page.is_some();
                table.push(page.unwrap_or(NONE));
            }
        }
        if let Some(states) = &mut pool.states {
            let slot = states.take();
            complete &= slot.is_some();
            snapshot.state = slot.unwrap_or(0);
        }
        if !complete {
            snapshot.release(pool);
            return None;
        }
        Some(snapshot)
    }

    /// First page that is there, per class.
    pub(crate) fn first_pages(&self) -> Vec<usize> {
        let first = |table: &Vec<u32>| table.iter().position(|p| *p != NONE).unwrap_or(table.len());
        self.tables.iter().map(first).collect()
    }
}

/// One sequence: how many positions are done, and where their KV lies.
#[derive(Debug, Default)]
pub struct Sequence {
    tables: Vec<Vec<u32>>,
    /// Slot that holds the state after `len` tokens (0 at the start), and the one to fill.
    state: [u32; 2],
    len: usize,
    steering: Option<Arc<Steering>>,
    /// No other has the same.
    id: u64,
}

impl Sequence {
    /// An empty sequence for a pool.
    pub fn new(pool: &PagePool) -> Sequence {
        Sequence::steered(pool, None)
    }

    /// Which one it is, of all of this process.
    pub(crate) fn id(&self) -> u64 {
        self.id
    }

    /// An empty sequence whose rows are steered.
    pub fn steered(pool: &PagePool, steering: Option<Arc<Steering>>) -> Sequence {
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        let tables = vec![Vec::new(); pool.windows.len()];
        Sequence { tables, state: [0; 2], len: 0, steering, id }
    }

    /// A sequence that begins with the first `len` positions of a snapshot, which is of one that was steered alike; `len` is
    /// [usable](Snapshot::usable).
    pub fn begin(
        pool: &mut PagePool,
        snapshot: &Snapshot,
        len: usize,
        steering: Option<Arc<Steering>>,
    ) -> Sequence {
        assert_eq!(len, snapshot.usable(pool, len), "a length at which the snapshot is usable");
        let key = steering.as_ref().map(|s| s.key());
        assert_eq!(key, snapshot.steering, "a snapshot of what was steered alike");
        let mut sequence = Sequence::steered(pool, steering);
        sequence.len = len;
        for (class, table) in snapshot.tables.iter().enumerate() {
            sequence.tables[class] =
                shared(pool, class, table, pool.first_needed(class, len)..len / BLOCK);
        }
        if let Some(states) = pool.states.as_mut().filter(|_| len > 0) {
            states.share(snapshot.state);
            sequence.state[0] = snapshot.state;
        }
        sequence
    }

    /// How its rows are steered.
    pub fn steering(&self) -> Option<&Arc<Steering>> {
        self.steering.as_ref()
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

    /// Makes room for `rows` more positions, and gives back pages that none of them can see. False when the
    /// pool is out of pages; then nothing changed that another try or [`Sequence::release`] would not
    /// undo.
    #[must_use]
    pub fn reserve(&mut self, pool: &mut PagePool, rows: usize) -> bool {
        // From the last boundary on, so that a snapshot can still be taken there.
        let seen_from = if pool.shared { self.len / BLOCK * BLOCK } else { self.len };
        for (class, table) in self.tables.iter_mut().enumerate() {
            let unseen = pool.first_needed(class, seen_from).min(table.len());
            for page in table[..unseen].iter_mut().filter(|page| **page != NONE) {
                pool.classes[class].give_back(std::mem::replace(page, NONE));
            }
        }
        if let Some(states) = pool.states.as_mut().filter(|_| self.state[1] == 0) {
            let Some(slot) = states.take() else { return false };
            self.state[1] = slot;
        }
        let blocks = (self.len + rows).div_ceil(BLOCK);
        for (class, table) in self.tables.iter_mut().enumerate() {
            while table.len() < blocks {
                match pool.classes[class].take() {
                    Some(page) => table.push(page),
                    None => return false,
                }
            }
        }
        true
    }

    /// Takes `rows` reserved positions as done.
    pub fn commit(&mut self, pool: &mut PagePool, rows: usize) {
        self.len += rows;
        // What was filled holds; what was read is filled next, unless it is the zero state or another's too.
        self.state.swap(0, 1);
        if let Some(states) = pool.states.as_mut().filter(|_| self.state[1] != 0)
            && states.is_shared(self.state[1])
        {
            states.give_back(std::mem::take(&mut self.state[1]));
        }
    }

    /// Gives back pages that were reserved for rows that did not come to hold.
    pub(crate) fn trim(&mut self, pool: &mut PagePool) {
        let blocks = self.len.div_ceil(BLOCK);
        for (class, table) in self.tables.iter_mut().enumerate() {
            let rest = table.drain(blocks.min(table.len())..).filter(|page| *page != NONE);
            rest.for_each(|page| pool.classes[class].give_back(page));
        }
    }

    /// Holds the state after the first `len` positions, a block boundary. None: there is no such state (any
    /// more), or nothing to hold.
    pub fn snapshot(&self, pool: &mut PagePool, len: usize) -> Option<Snapshot> {
        let exact = !pool.is_recurrent() || len == self.len;
        if len == 0 || !len.is_multiple_of(BLOCK) || len > self.len || !exact {
            return None;
        }
        let needed: Vec<_> =
            (0..self.tables.len()).map(|c| pool.first_needed(c, len)..len / BLOCK).collect();
        let whole = |(table, needed): (&Vec<u32>, &std::ops::Range<usize>)| {
            table[needed.clone()].iter().all(|page| *page != NONE)
        };
        if !self.tables.iter().zip(&needed).all(whole) {
            return None;
        }
        let tables = self.tables.iter().zip(needed).enumerate();
        let tables =
            tables.map(|(class, (table, needed))| shared(pool, class, table, needed)).collect();
        if let Some(states) = &mut pool.states {
            states.share(self.state[0]);
        }
        let steering = self.steering.as_ref().map(|s| s.key());
        Some(Snapshot { tables, state: self.state[0], len, steering })
    }

    /// Gives all pages back; the sequence is empty again.
    pub fn release(&mut self, pool: &mut PagePool) {
        for (class, table) in self.tables.iter_mut().enumerate() {
            let held = table.drain(..).filter(|page| *page != NONE);
            held.for_each(|page| pool.classes[class].give_back(page));
        }
        if let Some(states) = &mut pool.states {
            self.state.iter().filter(|slot| **slot != 0).for_each(|slot| states.give_back(*slot));
        }
        self.state = [0; 2];
        self.len = 0;
    }
}

/// A table with the pages of `range`, each held once more.
fn shared(
    pool: &mut PagePool,
    class: usize,
    table: &[u32],
    range: std::ops::Range<usize>,
) -> Vec<u32> {
    let mut out = vec![NONE; range.start];
    for &page in &table[range] {
        if page != NONE {
            pool.classes[class].share(page);
        }
        out.push(page);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::HashMap;

    proptest! {
        /// Pages needed are never more than planned, all that a row sees are there.
        #[test]
        fn planned_pages_suffice(
            window in proptest::option::of(1usize..200),
            chunk in 1usize..100,
            shared in any::<bool>(),
            steps in proptest::collection::vec(1usize..100, 1..40),
        ) {
            let context = 1000;
            let n = pages_per_sequence(window, context, chunk, shared);
            let mut pool = PagePool::new(&[window], &[n], state_slots(1, 0), shared);
            let mut s = Sequence::new(&pool);
            for step in steps {
                let rows = step.min(chunk).min(context - s.len());
                if rows == 0 { break; }
                prop_assert!(s.reserve(&mut pool, rows), "planned pages must suffice");
                for pos in s.len()..s.len() + rows {
                    let lo = window.map_or(0, |w| (pos + 1).saturating_sub(w));
                    prop_assert!((lo..=pos).all(|j| s.tables[0][j / BLOCK] != NONE));
                }
                s.commit(&mut pool, rows);
            }
            s.release(&mut pool);
            prop_assert_eq!(pool.free_pages(), vec![n]);
        }

        /// Random sequences that begin with each other's snapshots, against bytes that a naive model keeps:
        /// what a row sees is what its own history wrote, and in the end nothing is lost.
        #[test]
        fn sharing_never_changes_what_a_sequence_sees(
            window in proptest::option::of(1usize..100),
            recurrent in any::<bool>(),
            steps in proptest::collection::vec((0usize..4, 0usize..6, 1usize..80), 1..60),
        ) {
            const PAGES: usize = 60;
            let states = if recurrent { state_slots(4, 4) } else { 0 };
            let mut pool = PagePool::new(&[window, None], &[PAGES, PAGES], states, true);
            // What every cell of every page holds: (writer's history, position).
            let mut cells: HashMap<(usize, u32, usize), u64> = HashMap::new();
            let mut slots: HashMap<u32, u64> = HashMap::from([(0, 0)]);
            let mut live: Vec<(Sequence, Vec<u64>)> = Vec::new();
            let mut kept: Vec<(Snapshot, Vec<u64>)> = Vec::new();
            let mut next = 1u64;
            for (what, which, rows) in steps {
                match what {
                    // A new sequence, from a snapshot where there is one.
                    0 => {
                        let mut born = (Sequence::new(&pool), Vec::new());
                        if let Some((snapshot, history)) = kept.get(which) {
                            let len = snapshot.usable(&pool, snapshot.len() - rows % 2 * BLOCK);
                            born = (Sequence::begin(&mut pool, snapshot, len, None), history[..len].to_vec());
                        }
                        if live.len() < 4 { live.push(born); } else { born.0.release(&mut pool); }
                    }
                    1 => if let Some((sequence, history)) = live.get(which) {
                        let len = sequence.len() / BLOCK * BLOCK;
                        if let Some(snapshot) = sequence.snapshot(&mut pool, len) {
                            kept.push((snapshot, history[..len].to_vec()));
                        }
                    },
                    2 if which < kept.len() => kept.swap_remove(which).0.release(&mut pool),
                    2 if which < live.len() => live.swap_remove(which).0.release(&mut pool),
                    _ => if let Some((sequence, history)) = live.get_mut(which) {
                        if !sequence.reserve(&mut pool, rows) { continue; }
                        let [from, to] = sequence.state;
                        if recurrent {
                            prop_assert_ne!(from, to);
                            prop_assert_eq!(slots[&from], history.last().copied().unwrap_or(0));
                        }
                        for pos in sequence.len()..sequence.len() + rows {
                            history.push(next);
                            for class in 0..2 {
                                let page = sequence.tables[class][pos / BLOCK];
                                cells.insert((class, page, pos % BLOCK), next);
                                let lo = pool.windows[class].map_or(0, |w| (pos + 1).saturating_sub(w));
                                for (seen, wrote) in history.iter().enumerate().skip(lo) {
                                    let page = sequence.tables[class][seen / BLOCK];
                                    prop_assert_eq!(cells.get(&(class, page, seen % BLOCK)), Some(wrote));
                                }
                            }
                            next += 1;
                        }
                        slots.insert(to, *history.last().unwrap());
                        sequence.commit(&mut pool, rows);
                    },
                }
            }
            live.into_iter().for_each(|(mut s, _)| s.release(&mut pool));
            kept.into_iter().for_each(|(s, _)| s.release(&mut pool));
            prop_assert_eq!(pool.free_pages(), vec![PAGES; 2]);
            prop_assert_eq!(pool.free_states(), recurrent.then_some(states - 1));
        }
    }
}
