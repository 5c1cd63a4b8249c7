//! A second copy of the checkpoint: both are read, and one makes up for the other.
#![cfg(unix)]

mod common;

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use common::{Checkpoint, engines};
use forebay_files::Catalog;
use forebay_store::faults::{Action, Call, Faulty};
use forebay_store::platform::Access;
use forebay_store::{
    ExpertStore, FileSet, IoEngine, IoMode, IoOptions, Residency, StoreError, open_store,
};

const EIO: i32 = 5;

fn open(checkpoint: &Checkpoint, files: &Arc<FileSet>, engine: IoEngine) -> Box<dyn ExpertStore> {
    let io = IoOptions { engine, max_read_bytes: 4096, ..IoOptions::default() };
    let mode = Residency::Stream { slots: 4 };
    open_store(&checkpoint.spec, files.clone(), mode, io, &mut |_, _| {}).unwrap()
}

fn pass(
    checkpoint: &Checkpoint,
    store: &mut dyn ExpertStore,
    layer: usize,
) -> Result<(), StoreError> {
    let result = (|| {
        store.begin(layer, &[0, 1, 2, 3, 4, 5])?;
        let mut leases = Vec::new();
        loop {
            store.next_ready(&mut leases)?;
            if leases.is_empty() {
                return Ok(());
            }
            for lease in &leases {
                checkpoint.check_expert(layer, lease.expert, store.view(lease));
            }
            store.release(&mut leases);
        }
    })();
    store.end();
    result
}

/// Two copies, with a script that is told which one is read.
fn two(
    checkpoint: &Checkpoint,
    script: impl Fn(usize, Access, Call) -> Action + Send + Sync + 'static,
) -> (tempfile::TempDir, Arc<FileSet>) {
    let (dir, entries) = checkpoint.copy();
    let second = dir.path().to_path_buf();
    let platform = Faulty::new(move |path: &Path, access, call| {
        script(usize::from(path.starts_with(&second)), access, call)
    });
    let mut files =
        FileSet::open_on(Arc::new(platform), &checkpoint.entries, IoMode::Auto).unwrap();
    files.add_copy_of_files(&entries).unwrap();
    (dir, Arc::new(files))
}

#[test]
fn both_copies_are_read() {
    let checkpoint = Checkpoint::new(51, 3, 6);
    for engine in engines() {
        let reads = Arc::new([AtomicUsize::new(0), AtomicUsize::new(0)]);
        let counted = reads.clone();
        let (_dir, files) = two(&checkpoint, move |copy, _, call| {
            if matches!(call, Call::Read { .. }) {
                counted[copy].fetch_add(1, SeqCst);
            }
            Action::Pass
        });
        let mut store = open(&checkpoint, &files, engine);
        for layer in [0, 1, 2, 0, 1, 2] {
            pass(&checkpoint, &mut *store, layer).unwrap();
        }
        assert!(reads.iter().all(|reads| reads.load(SeqCst) > 0), "{reads:?}");
        assert!(files.notes().is_empty());
    }
}

#[test]
fn what_one_copy_cannot_give_comes_from_the_other() {
    let checkpoint = Checkpoint::new(52, 3, 6);
    for engine in engines() {
        for bad in [0, 1] {
            let broken = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
            let script = broken.clone();
            let (_dir, files) = two(&checkpoint, move |copy, _, call| match call {
                Call::Read { .. } if script[copy].load(SeqCst) => Action::Fail(EIO),
                _ => Action::Pass,
            });
            let mut store = open(&checkpoint, &files, engine);
            pass(&checkpoint, &mut *store, 0).unwrap();
            broken[bad].store(true, SeqCst);
            // On a busy machine the quicker copy may be given all reads for a while.
            for layer in [1, 2, 0].into_iter().cycle().take(300) {
                pass(&checkpoint, &mut *store, layer).unwrap();
                if !files.notes().is_empty() {
                    break;
                }
            }
            for layer in [0, 1, 2] {
                pass(&checkpoint, &mut *store, layer).unwrap();
            }
            let notes = files.notes();
            assert!(notes.len() == 1 && notes[0].contains("other copy"), "{notes:?}");
            assert!(notes[0].contains("offset"), "{notes:?}");
            // Small reads as well.
            let extent = checkpoint.spec.layers[0].experts[0].up.planes[0].extent;
            let mut bytes = vec![0; extent.len as usize];
            files.read_exact_at(extent, &mut bytes).unwrap();
            assert!(bytes == checkpoint.expected(extent));
            // With both gone there is an error, and the store survives it.
            broken[1 - bad].store(true, SeqCst);
            let error = pass(&checkpoint, &mut *store, 0).unwrap_err();
            assert_eq!(error.class(), "IoError");
            assert!(error.to_string().contains("layer 1 expert"), "{error}");
            broken[1 - bad].store(false, SeqCst);
            // What was in flight then may still fail.
            let mut attempts = (0..20).map(|_| pass(&checkpoint, &mut *store, 0));
            assert!(attempts.any(|attempt| attempt.is_ok()));
        }
    }
}

#[test]
fn a_copy_that_changes_is_left_alone() {
    let checkpoint = Checkpoint::new(53, 2, 6);
    for engine in engines() {
        let after = Arc::new(Mutex::new(None::<usize>));
        let counted = after.clone();
        let (dir, files) = two(&checkpoint, move |copy, _, call| {
            if let (1, Call::Read { .. }, Some(count)) =
                (copy, call, counted.lock().unwrap().as_mut())
            {
                *count += 1;
            }
            Action::Pass
        });
        let mut store = open(&checkpoint, &files, engine);
        pass(&checkpoint, &mut *store, 0).unwrap();
        for file in 0..3 {
            let path = dir.path().join(format!("weights-{file}.bin"));
            let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
            file.set_len(1).unwrap();
        }
        *after.lock().unwrap() = Some(0);
        pass(&checkpoint, &mut *store, 1).unwrap();
        pass(&checkpoint, &mut *store, 0).unwrap();
        assert_eq!(*after.lock().unwrap(), Some(0), "no read from it any more");
        let notes = files.notes();
        assert!(notes.len() == 1 && notes[0].contains("changed"), "{notes:?}");
    }
}

#[test]
fn what_is_no_copy_is_refused() {
    let checkpoint = Checkpoint::new(54, 1, 2);
    let (dir, mut entries) = checkpoint.copy();
    let mut files = FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap();
    let error = files.add_copy_of_files(&entries[..2]).unwrap_err();
    assert!(error.to_string().contains("2 files instead of 3"), "{error}");
    entries[1].len -= 1;
    let error = files.add_copy_of_files(&entries).unwrap_err();
    assert!(error.to_string().contains("weights-1.bin"), "{error}");
    entries[1].len += 1;
    std::fs::remove_file(dir.path().join("weights-2.bin")).unwrap();
    assert_eq!(files.add_copy_of_files(&entries).unwrap_err().class(), "IoError");
}

#[test]
fn a_copy_is_known_by_the_hash_of_its_header() {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models");
    let (one, other) = (models.join("tiny-gpt-oss"), models.join("tiny-qwen3-moe"));
    let catalog = |path: &Path| Catalog::open(path).unwrap();
    let mut files = FileSet::open(&catalog(&one).files, IoMode::Auto).unwrap();
    files.add_copy(&catalog(&one), &catalog(&one)).unwrap();
    let error = files.add_copy(&catalog(&one), &catalog(&other)).unwrap_err();
    assert!(error.to_string().contains("header"), "{error}");
}
