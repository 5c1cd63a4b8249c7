//! Reads that nobody demanded yet, and a pool that changes its size.
#![cfg(unix)]

mod common;

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use common::Checkpoint;
use forebay_store::faults::{Action, Call, Faulty};
use forebay_store::{
    ExpertStore, FileSet, IoMode, IoOptions, Policy, QueueDepth, Residency, StoreOptions,
    open_store,
};

fn open(checkpoint: &Checkpoint, files: FileSet, slots: usize) -> Box<dyn ExpertStore> {
    let io = IoOptions { depth: QueueDepth::Fixed(1), ..IoOptions::default() };
    let options = StoreOptions { io, policy: Policy::Lru };
    let mode = Residency::Stream { slots };
    open_store(&checkpoint.spec, Arc::new(files), mode, options, &mut |_, _| {}).unwrap()
}

fn whole_pass(store: &mut dyn ExpertStore, checkpoint: &Checkpoint, layer: usize, experts: &[u16]) {
    store.begin(layer, experts).unwrap();
    let (mut leases, mut seen) = (Vec::new(), 0);
    loop {
        store.next_ready(&mut leases).unwrap();
        if leases.is_empty() {
            break;
        }
        for lease in &leases {
            checkpoint.check_expert(layer, lease.expert, store.view(lease));
            seen += 1;
        }
        store.release(&mut leases);
    }
    store.end();
    assert_eq!(seen, experts.len());
}

/// Calls the store until it says so.
fn until(store: &mut dyn ExpertStore, what: &str, so: impl Fn(&dyn ExpertStore) -> bool) {
    for _ in 0..10_000 {
        store.poll();
        if so(store) {
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    panic!("never: {what}");
}

fn resident(store: &dyn ExpertStore, layer: usize) -> Vec<u16> {
    store.snapshot().layers[layer].resident.iter().map(|&(expert, _)| expert).collect()
}

/// Reads stop at a gate until it is opened; what was read is written down.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
    waiting: Mutex<usize>,
    /// (file name, offset)
    reads: Mutex<Vec<(String, u64)>>,
}

impl Gate {
    fn files(self: &Arc<Gate>, checkpoint: &Checkpoint) -> FileSet {
        let gate = self.clone();
        let platform = Faulty::new(move |path, _, call| {
            if let Call::Read { offset, .. } = call {
                let name = path.file_name().unwrap().to_str().unwrap().to_string();
                gate.reads.lock().unwrap().push((name, offset));
                *gate.waiting.lock().unwrap() += 1;
                let open = gate.open.lock().unwrap();
                drop(gate.opened.wait_while(open, |open| !*open).unwrap());
            }
            Action::Pass
        });
        FileSet::open_on(Arc::new(platform), &checkpoint.entries, IoMode::Auto).unwrap()
    }

    fn set(&self, open: bool) {
        *self.open.lock().unwrap() = open;
        self.opened.notify_all();
    }

    fn wait_for_a_read(&self) {
        while *self.waiting.lock().unwrap() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

#[test]
fn a_guess_that_comes_true_is_a_hit() {
    let checkpoint = Checkpoint::new(31, 3, 8);
    let files = FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap();
    let mut store = open(&checkpoint, files, 12);
    whole_pass(&mut *store, &checkpoint, 0, &[0, 1]);
    store.guess(1, &[2, 3, 4]);
    until(&mut *store, "guesses arrive", |store| resident(store, 1) == [2, 3, 4]);
    let before = store.stats();
    assert_eq!((before.guesses.guessed, before.guesses.used), (3, 0));
    assert!(before.guesses.bytes > 0);
    whole_pass(&mut *store, &checkpoint, 1, &[3, 4, 5]);
    let stats = store.stats();
    assert_eq!((stats.hits, stats.misses), (2, 3));
    assert_eq!((stats.guesses.used, stats.guesses.wasted), (2, 0));
    assert_eq!(stats.guesses.bytes, before.guesses.bytes);
    // 2 was wrong: it is the first to go once the pool is full.
    whole_pass(&mut *store, &checkpoint, 1, &[0, 1, 6, 7]);
    whole_pass(&mut *store, &checkpoint, 0, &[2, 3, 4, 5]);
    assert_eq!(store.stats().guesses.wasted, 1);
    assert!(!resident(&*store, 1).contains(&2));
}

#[test]
fn what_is_announced_is_read_before_its_pass() {
    let checkpoint = Checkpoint::new(35, 3, 8);
    let files = FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap();
    let mut store = open(&checkpoint, files, 12);
    whole_pass(&mut *store, &checkpoint, 0, &[0, 1]);
    store.announce(1, &[2, 3, 4]);
    until(&mut *store, "announced experts arrive", |store| resident(store, 1) == [2, 3, 4]);
    let before = store.stats();
    // 2 is not wanted in the end: what was read was read, and no guess was made.
    whole_pass(&mut *store, &checkpoint, 1, &[3, 4, 5]);
    let stats = store.stats();
    assert_eq!((stats.hits, stats.misses, stats.hits_beside_misses), (2, 3, 2));
    assert_eq!(stats.guesses, Default::default());
    assert!(stats.bytes_read > before.bytes_read);
    // Counted like the reads of a store that was told nothing.
    let files = FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap();
    let mut other = open(&checkpoint, files, 12);
    whole_pass(&mut *other, &checkpoint, 0, &[0, 1]);
    whole_pass(&mut *other, &checkpoint, 1, &[2, 3, 4, 5]);
    assert_eq!((stats.reads, stats.bytes_read), (other.stats().reads, other.stats().bytes_read));
}

#[test]
fn announcements_leave_their_own_layer_and_quotas_alone() {
    let checkpoint = Checkpoint::new(36, 2, 8);
    // Entitled to 4 and 3 experts, one is shared; after a pass that used most of a layer to 2 and 2.
    for (used, stay, come) in [(4, 4, 4), (5, 2, 6)] {
        let files = FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap();
        let mut store = open(&checkpoint, files, 8);
        whole_pass(&mut *store, &checkpoint, 1, &[0, 1, 2]);
        whole_pass(&mut *store, &checkpoint, 0, &(0..used).collect::<Vec<u16>>());
        assert_eq!(resident(&*store, 0).len(), used as usize);
        assert_eq!(resident(&*store, 1).len(), 3);
        store.announce(1, &[0, 1, 2, 3, 4, 5, 6, 7]);
        until(&mut *store, "those for which there is room arrive", |store| {
            resident(store, 1).len() == come
        });
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(resident(&*store, 1)[..3], [0, 1, 2], "what is there stays");
        assert_eq!((resident(&*store, 0).len(), resident(&*store, 1).len()), (stay, come));
        whole_pass(&mut *store, &checkpoint, 1, &[0, 1, 2, 3, 4, 5, 6, 7]);
    }
}

#[test]
fn demanded_reads_overtake_guesses_and_join_them() {
    let checkpoint = Checkpoint::new(32, 3, 8);
    let gate = Arc::new(Gate::default());
    let mut store = open(&checkpoint, gate.files(&checkpoint), 12);
    store.guess(1, &[2, 3, 4]);
    gate.wait_for_a_read();
    // One read of a guess is stuck. Now another layer wants experts, and then 3 and 4 come true.
    store.begin(0, &[0, 1]).unwrap();
    store.guess(2, &[5]);
    gate.set(true);
    let mut leases = Vec::new();
    while {
        store.next_ready(&mut leases).unwrap();
        !leases.is_empty()
    } {
        store.release(&mut leases);
    }
    let offsets = |layer: usize, experts: &[u16]| -> Vec<(String, u64)> {
        let weights = experts.iter().map(|&e| &checkpoint.spec.layers[layer].experts[e as usize]);
        let planes = weights.flat_map(|w| [&w.gate, &w.up, &w.down]).flat_map(|w| &w.planes);
        let extents = planes.map(|plane| plane.extent);
        extents.map(|e| (format!("weights-{}.bin", e.file), e.offset / 4096 * 4096)).collect()
    };
    {
        let reads = gate.reads.lock().unwrap();
        let demanded = offsets(0, &[0, 1]);
        let last = reads.iter().rposition(|read| demanded.contains(read)).unwrap();
        let guessed = [offsets(1, &[2, 3, 4]), offsets(2, &[5])].concat();
        let early = reads[..last].iter().filter(|read| guessed.contains(read)).count();
        assert!(early <= 1, "only what was begun before: {reads:?}");
    }
    store.end();
    whole_pass(&mut *store, &checkpoint, 1, &[3, 4]);
    until(&mut *store, "the last guess arrives", |store| resident(store, 2) == [5]);
    let stats = store.stats();
    assert_eq!((stats.guesses.guessed, stats.guesses.used, stats.hits + stats.misses), (4, 2, 4));
}

#[test]
fn a_wrong_guess_that_was_not_begun_is_withdrawn() {
    let checkpoint = Checkpoint::new(33, 2, 8);
    let gate = Arc::new(Gate::default());
    let mut store = open(&checkpoint, gate.files(&checkpoint), 8);
    store.guess(1, &[2, 3, 4]);
    gate.wait_for_a_read();
    store.begin(1, &[3]).unwrap();
    gate.set(true);
    let mut leases = Vec::new();
    store.next_ready(&mut leases).unwrap();
    assert_eq!(leases[0].expert, 3);
    checkpoint.check_expert(1, 3, store.view(&leases[0]));
    store.end();
    until(&mut *store, "nothing in flight", |store| {
        let snapshot = store.snapshot();
        snapshot.free + snapshot.layers[1].resident.len() == 8
    });
    let stats = store.stats();
    assert_eq!((stats.guesses.guessed, stats.guesses.used), (3, 1));
    // 2 had begun; its other reads, if any, were withdrawn like all of 4.
    assert!((1..=2).contains(&stats.guesses.withdrawn), "{stats:?}");
    assert!(!resident(&*store, 1).contains(&4));
}

#[test]
fn what_was_hot_is_loaded_first_next_time() {
    let checkpoint = Checkpoint::new(34, 2, 8);
    let open_it =
        |slots| open(&checkpoint, FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap(), slots);
    let mut store = open_it(6);
    for experts in [[1, 2], [2, 3], [2, 4]] {
        for layer in 0..2 {
            whole_pass(&mut *store, &checkpoint, layer, &experts);
        }
    }
    let hot = store.hot();
    assert_eq!(hot.len(), 8, "also what was evicted: {hot:?}");
    assert_eq!(hot[..4], [(1, 2), (1, 4), (0, 2), (0, 4)]);
    let mut store = open_it(4);
    // A list of another model.
    store.warm(&[(7, 0), (0, 99)]);
    store.warm(&hot);
    until(&mut *store, "hot experts arrive", |store| {
        resident(store, 0) == [2, 4] && resident(store, 1) == [2, 4]
    });
    assert_eq!(store.stats().warmed, 4);
    whole_pass(&mut *store, &checkpoint, 1, &[2, 4]);
    let stats = store.stats();
    assert_eq!((stats.hits, stats.misses, stats.bytes_read), (2, 0, 0));
    assert!(stats.warmed_bytes > 0);
}

#[test]
fn the_pool_changes_its_size_under_a_pass() {
    let checkpoint = Checkpoint::new(35, 2, 8);
    for policy in Policy::ALL {
        let files = Arc::new(FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap());
        let options = StoreOptions { policy, ..StoreOptions::default() };
        let mode = Residency::Stream { slots: 8 };
        let mut store = open_store(&checkpoint.spec, files, mode, options, &mut |_, _| {}).unwrap();
        store.begin(0, &[0, 1, 2, 3, 4]).unwrap();
        let mut leases = Vec::new();
        store.next_ready(&mut leases).unwrap();
        let reached = store.resize(1).unwrap();
        assert!((leases.len()..=5).contains(&reached), "{reached} slots are at work");
        let mut seen = 0;
        while !leases.is_empty() {
            for lease in &leases {
                checkpoint.check_expert(0, lease.expert, store.view(lease));
                seen += 1;
            }
            store.release(&mut leases);
            store.next_ready(&mut leases).unwrap();
        }
        assert_eq!(seen, 5);
        store.end();
        assert_eq!((store.slots(), store.residency()), (1, Residency::Stream { slots: 1 }));
        assert!(store.bytes_in_memory() <= checkpoint.spec.slot_bytes());
        whole_pass(&mut *store, &checkpoint, 1, &[5, 6]);
        assert_eq!(store.resize(1000).unwrap(), 16, "as many as there are experts");
        assert_eq!(store.resize(0).unwrap_err().class(), "BudgetTooSmall");
        whole_pass(&mut *store, &checkpoint, 1, &[6, 5, 7]);
        let stats = store.stats();
        assert_eq!((stats.hits, stats.misses), (1, 9), "{policy}");
        let snapshot = store.snapshot();
        assert_eq!((snapshot.slots, snapshot.free, snapshot.policy), (16, 13, Some(policy)));
        assert_eq!(snapshot.layers[1].resident, [(5, 2), (6, 2), (7, 1)]);
    }
}

#[test]
fn where_there_is_no_pool_nothing_happens() {
    let checkpoint = Checkpoint::new(36, 1, 3);
    for mode in [Residency::Mapped, Residency::Resident] {
        let files = Arc::new(FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap());
        let io = IoOptions::default();
        let mut store = open_store(&checkpoint.spec, files, mode, io, &mut |_, _| {}).unwrap();
        assert_eq!(store.resize(1).unwrap(), 3);
        store.guess(0, &[1]);
        store.warm(&[(0, 2)]);
        assert!(store.hot().is_empty() && store.snapshot().layers.is_empty());
        whole_pass(&mut *store, &checkpoint, 0, &[0, 1, 2]);
    }
}
