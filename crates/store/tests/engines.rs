//! Engines of reads: what is refused is replaced and said once, what is late stops nobody, and files
//! that change under a running store are noticed.
#![cfg(unix)]

mod common;

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::time::{Duration, SystemTime};

use common::{Checkpoint, engines};
use forebay_store::faults::{Action, Call, Faulty};
use forebay_store::platform::Access;
use forebay_store::{
    ExpertStore, FileSet, IoEngine, IoMode, IoOptions, QueueDepth, Residency, StoreError,
    open_store,
};

const EPERM: i32 = 1;
const ENOMEM: i32 = 12;
const ENOSYS: i32 = 38;

fn files(
    checkpoint: &Checkpoint,
    script: impl Fn(&Path, Access, Call) -> Action + Send + Sync + 'static,
) -> Arc<FileSet> {
    let platform = Arc::new(Faulty::new(script));
    Arc::new(FileSet::open_on(platform, &checkpoint.entries, IoMode::Auto).unwrap())
}

fn open(
    checkpoint: &Checkpoint,
    files: &Arc<FileSet>,
    engine: IoEngine,
) -> Result<Box<dyn ExpertStore>, StoreError> {
    let io = IoOptions { engine, ..IoOptions::default() };
    let mode = Residency::Stream { slots: 8 };
    open_store(&checkpoint.spec, files.clone(), mode, io, &mut |_, _| {})
}

/// Experts in the order in which they came.
fn pass(
    checkpoint: &Checkpoint,
    store: &mut dyn ExpertStore,
    layer: usize,
    experts: &[u16],
) -> Result<Vec<u16>, StoreError> {
    let result = (|| {
        store.begin(layer, experts)?;
        let (mut leases, mut seen) = (Vec::new(), Vec::new());
        loop {
            store.next_ready(&mut leases)?;
            if leases.is_empty() {
                return Ok(seen);
            }
            for lease in &leases {
                checkpoint.check_expert(layer, lease.expert, store.view(lease));
                seen.push(lease.expert);
            }
            store.release(&mut leases);
        }
    })();
    store.end();
    result
}

#[test]
fn a_refused_ring_is_replaced_by_threads_with_one_note() {
    let checkpoint = Checkpoint::new(41, 2, 6);
    for code in [EPERM, ENOSYS] {
        let files = files(&checkpoint, move |_, _, call| match call {
            Call::Ring => Action::Fail(code),
            _ => Action::Pass,
        });
        for _ in 0..2 {
            let mut store = open(&checkpoint, &files, IoEngine::Auto).unwrap();
            assert_eq!(pass(&checkpoint, &mut *store, 1, &[0, 3, 5]).unwrap().len(), 3);
        }
        let notes = files.notes();
        assert!(notes.len() == 1 && notes[0].contains("io_uring"), "{notes:?}");
        let error = open(&checkpoint, &files, IoEngine::Uring).err().expect("demanded");
        assert_eq!(error.class(), "Unsupported");
        assert!(error.to_string().contains("threads"), "{error}");
        // Whoever asks for threads is told nothing.
        let quiet = self::files(&checkpoint, |_, _, _| Action::Pass);
        open(&checkpoint, &quiet, IoEngine::Threads).unwrap();
        assert!(quiet.notes().is_empty());
    }
}

#[test]
fn refused_registration_is_said_once_and_changes_nothing() {
    if !engines().contains(&IoEngine::Uring) {
        return;
    }
    let checkpoint = Checkpoint::new(42, 2, 6);
    // The first region is taken, then no more: that is how a limit looks.
    let taken = AtomicBool::new(false);
    let files = files(&checkpoint, move |_, _, call| match call {
        Call::Register if taken.swap(true, SeqCst) => Action::Fail(ENOMEM),
        _ => Action::Pass,
    });
    let mut store = open(&checkpoint, &files, IoEngine::Uring).unwrap();
    for layer in [0, 1, 0, 1] {
        assert_eq!(pass(&checkpoint, &mut *store, layer, &[0, 1, 2, 3, 4, 5]).unwrap().len(), 6);
    }
    store.resize(2).unwrap();
    store.resize(8).unwrap();
    pass(&checkpoint, &mut *store, 0, &[0, 1, 2, 3, 4, 5]).unwrap();
    let notes = files.notes();
    assert!(notes.len() == 1 && notes[0].contains("registered"), "{notes:?}");
}

/// Registered memory goes with its slot, and what comes in its place is registered again.
#[test]
fn registered_memory_follows_the_pool() {
    if !engines().contains(&IoEngine::Uring) {
        return;
    }
    let checkpoint = Checkpoint::new(43, 2, 8);
    let files = Arc::new(FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap());
    let mut store = open(&checkpoint, &files, IoEngine::Uring).unwrap();
    for slots in [8, 1, 5, 2, 8, 3, 16] {
        store.resize(slots).unwrap();
        for layer in [0, 1] {
            let all = pass(&checkpoint, &mut *store, layer, &[0, 1, 2, 3, 4, 5, 6, 7]).unwrap();
            assert_eq!(all.len(), 8);
        }
    }
}

#[test]
fn a_read_that_hangs_stops_nobody_else() {
    for engine in engines() {
        let checkpoint = Checkpoint::new(44, 1, 6);
        let slow = checkpoint.spec.layers[0].experts[0].gate.planes[0].extent;
        let slow_path = checkpoint.path(slow.file as usize);
        let files = files(&checkpoint, move |path, _, call| match call {
            Call::Read { offset, .. }
                if path == slow_path && offset == slow.offset / 4096 * 4096 =>
            {
                Action::Late(Duration::from_secs(5))
            }
            _ => Action::Pass,
        });
        for depth in [QueueDepth::Measured, QueueDepth::Fixed(2)] {
            let io = IoOptions { engine, depth, ..IoOptions::default() };
            let mode = Residency::Stream { slots: 6 };
            let mut store =
                open_store(&checkpoint.spec, files.clone(), mode, io, &mut |_, _| {}).unwrap();
            let order = pass(&checkpoint, &mut *store, 0, &[0, 1, 2, 3, 4, 5]).unwrap();
            assert_eq!((order.len(), order.last()), (6, Some(&0)), "{engine:?} {order:?}");
        }
    }
}

/// Dropping a store with reads in flight waits for them: nothing writes into memory that is gone.
#[test]
fn a_store_may_be_dropped_at_any_moment() {
    for engine in engines() {
        let checkpoint = Checkpoint::new(45, 2, 8);
        let files = files(&checkpoint, |_, _, call| match call {
            Call::Read { offset, .. } => Action::Late(Duration::from_millis(offset / 4096 % 4)),
            _ => Action::Pass,
        });
        for round in 0..8 {
            let mut store = open(&checkpoint, &files, engine).unwrap();
            store.guess(0, &[5, 6]);
            store.begin(1, &[0, 1, 2, 3]).unwrap();
            if round % 2 == 0 {
                store.next_ready(&mut Vec::new()).unwrap();
            }
        }
    }
}

#[test]
fn a_file_cut_short_while_it_is_read_is_noticed_and_survived() {
    for engine in engines() {
        let checkpoint = Checkpoint::new(46, 1, 4);
        let cut_now = Arc::new(AtomicBool::new(false));
        let weights = &checkpoint.spec.layers[0].experts[2];
        let extent = weights.down.planes[0].extent;
        let path = checkpoint.path(extent.file as usize);
        let files = files(&checkpoint, {
            let (cut_now, path) = (cut_now.clone(), path.clone());
            move |read, _, call| {
                if matches!(call, Call::Read { .. }) && read == path && cut_now.swap(false, SeqCst)
                {
                    // Between the look at the file and the read.
                    let file = std::fs::OpenOptions::new().write(true).open(read).unwrap();
                    file.set_len(extent.offset + 1).unwrap();
                }
                Action::Pass
            }
        });
        let before = std::fs::metadata(&path).unwrap().modified().unwrap();
        let mut store = open(&checkpoint, &files, engine).unwrap();
        pass(&checkpoint, &mut *store, 0, &[0, 1]).unwrap();
        cut_now.store(true, SeqCst);
        let error = pass(&checkpoint, &mut *store, 0, &[2]).unwrap_err();
        assert!(["Truncated", "FileChanged"].contains(&error.class()), "{error}");
        for part in ["weights-", "layer 1 expert 2"] {
            assert!(error.to_string().contains(part), "{error}");
        }
        // While it is cut, every read is refused; experts in memory do not care.
        let error = pass(&checkpoint, &mut *store, 0, &[3]).unwrap_err();
        assert_eq!(error.class(), "FileChanged", "{error}");
        pass(&checkpoint, &mut *store, 0, &[0, 1]).unwrap();
        restore(&path, &checkpoint.bytes[extent.file as usize], before);
        assert_eq!(pass(&checkpoint, &mut *store, 0, &[3, 2]).unwrap().len(), 2);
    }
}

fn restore(path: &Path, bytes: &[u8], modified: SystemTime) {
    use std::io::Write;
    let mut file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
    file.set_len(bytes.len() as u64).unwrap();
    file.write_all(bytes).unwrap();
    file.set_modified(modified).unwrap();
}

/// A new file in the place of the old one, as a careful program writes it: who has the old one open
/// goes on with it.
#[test]
fn a_replaced_file_goes_on_being_the_old_one() {
    for engine in engines() {
        let checkpoint = Checkpoint::new(47, 1, 6);
        let files = Arc::new(FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap());
        let mut store = open(&checkpoint, &files, engine).unwrap();
        pass(&checkpoint, &mut *store, 0, &[0, 1]).unwrap();
        for file in 0..3 {
            let path = checkpoint.path(file);
            let other = path.with_extension("new");
            std::fs::write(&other, vec![0xAB; checkpoint.bytes[file].len()]).unwrap();
            std::fs::rename(&other, &path).unwrap();
        }
        assert_eq!(pass(&checkpoint, &mut *store, 0, &[0, 1, 2, 3, 4, 5]).unwrap().len(), 6);
        let again = FileSet::open(&checkpoint.entries, IoMode::Auto);
        assert_eq!(again.err().expect("another file").class(), "FileChanged");
    }
}
