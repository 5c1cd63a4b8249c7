//! Case D02 and its kin: reads that fail, stop short, or meet a file that changed.
#![cfg(unix)]

mod common;

use std::collections::HashSet;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::sync::{Arc, Mutex};

use common::{Checkpoint, engines};
use forebay_models::Extent;
use forebay_store::faults::{Action, Call, Faulty};
use forebay_store::platform::Access;
use forebay_store::{
    ExpertStore, FileSet, IoEngine, IoMode, IoOptions, Residency, StoreError, TrunkImage,
    open_store,
};

const EINTR: i32 = 4;
const EIO: i32 = 5;
const EINVAL: i32 = 22;

fn open_with(
    checkpoint: &Checkpoint,
    mode: IoMode,
    script: impl Fn(&Path, Access, Call) -> Action + Send + Sync + 'static,
) -> Result<Arc<FileSet>, StoreError> {
    FileSet::open_on(Arc::new(Faulty::new(script)), &checkpoint.entries, mode).map(Arc::new)
}

fn stream(checkpoint: &Checkpoint, files: &Arc<FileSet>, engine: IoEngine) -> Box<dyn ExpertStore> {
    let mode = Residency::Stream { slots: 3 };
    let io = IoOptions { engine, ..IoOptions::default() };
    open_store(&checkpoint.spec, files.clone(), mode, io, &mut |_, _| {}).unwrap()
}

/// Hands out all experts of a layer, or gives up at the first error.
fn pass(
    checkpoint: &Checkpoint,
    store: &mut dyn ExpertStore,
    layer: usize,
) -> Result<(), StoreError> {
    let experts: Vec<u16> = (0..checkpoint.spec.layers[layer].experts.len() as u16).collect();
    let result = (|| {
        store.begin(layer, &experts)?;
        let (mut leases, mut seen) = (Vec::new(), 0);
        loop {
            store.next_ready(&mut leases)?;
            if leases.is_empty() {
                assert_eq!(seen, experts.len());
                return Ok(());
            }
            for lease in &leases {
                checkpoint.check_expert(layer, lease.expert, store.view(lease));
                seen += 1;
            }
            store.release(&mut leases);
        }
    })();
    store.end();
    result
}

type Script = Box<dyn Fn(&Path, Access, Call) -> Action + Send + Sync>;
type OnRead = Box<dyn Fn(&Path, Access, u64, usize) -> Action + Send + Sync>;

/// True once per (file, access, offset).
fn first_time() -> impl Fn(&Path, Access, u64) -> bool + Send + Sync {
    let seen = Mutex::new(HashSet::new());
    move |path, access, offset| {
        seen.lock().unwrap().insert((path.to_path_buf(), access == Access::Direct, offset))
    }
}

fn harmless() -> Vec<(&'static str, Script)> {
    let reads = |f: OnRead| -> Script {
        Box::new(move |path, access, call| match call {
            Call::Read { offset, len } => f(path, access, offset, len),
            _ => Action::Pass,
        })
    };
    let (first, second, third) = (first_time(), first_time(), first_time());
    let nth = AtomicUsize::new(0);
    vec![
        ("nothing", reads(Box::new(|_, _, _, _| Action::Pass))),
        (
            "1 byte, then half, then the rest",
            reads(Box::new(move |_, _, _, len| match nth.fetch_add(1, SeqCst) % 3 {
                0 => Action::Short(1),
                1 => Action::Short(len.div_ceil(2)),
                _ => Action::Pass,
            })),
        ),
        (
            "interrupted once",
            reads(Box::new(move |path, access, offset, _| match first(path, access, offset) {
                true => Action::Fail(EINTR),
                false => Action::Pass,
            })),
        ),
        (
            "device error once",
            reads(Box::new(move |path, access, offset, _| match second(path, access, offset) {
                true => Action::Fail(EIO),
                false => Action::Pass,
            })),
        ),
        (
            "direct reads refused",
            reads(Box::new(|_, access, _, _| match access {
                Access::Direct => Action::Fail(EINVAL),
                Access::Buffered => Action::Pass,
            })),
        ),
        (
            "direct open refused",
            Box::new(|_, access, call| match (access, call) {
                (Access::Direct, Call::Open) => Action::Fail(EINVAL),
                _ => Action::Pass,
            }),
        ),
        (
            "slow, and refused in the middle",
            reads(Box::new(move |path, access, offset, _| {
                std::thread::sleep(std::time::Duration::from_micros(200));
                match access == Access::Direct && !third(path, access, offset) {
                    true => Action::Fail(EINVAL),
                    false => Action::Pass,
                }
            })),
        ),
    ]
}

#[test]
fn faults_that_can_be_overcome_change_no_byte() {
    let checkpoint = Checkpoint::new(21, 4, 6);
    let both = [IoMode::Auto, IoMode::Buffered];
    let cases = both.into_iter().flat_map(|mode| engines().into_iter().map(move |e| (mode, e)));
    for (mode, engine) in cases {
        for (name, script) in harmless() {
            let files = open_with(&checkpoint, mode, script).unwrap();
            let mut store = stream(&checkpoint, &files, engine);
            for _ in 0..2 {
                for layer in 0..4 {
                    pass(&checkpoint, &mut *store, layer).unwrap_or_else(|e| panic!("{name}: {e}"));
                }
            }
            let weight = &checkpoint.spec.layers[0].experts[0].gate;
            let extents: Vec<Extent> = weight.planes.iter().map(|plane| plane.extent).collect();
            let io = IoOptions { engine, ..IoOptions::default() };
            let image = TrunkImage::load(&files, &extents, &io, &mut |_, _| {});
            assert!(image.unwrap().bytes(extents[0]) == checkpoint.expected(extents[0]), "{name}");
            let refused = name.contains("refused") && mode == IoMode::Auto;
            // Once per file, however many reads were refused at the same time.
            assert_eq!(files.notes().len(), if refused { 3 } else { 0 }, "{name}");
            assert_eq!((0..3).any(|file| files.is_direct(file)), mode == IoMode::Auto && !refused);
        }
    }
}

#[test]
fn demanded_direct_reads_are_not_replaced() {
    let checkpoint = Checkpoint::new(21, 1, 2);
    let refuse_open =
        open_with(&checkpoint, IoMode::Direct, |_, access, call| match (access, call) {
            (Access::Direct, Call::Open) => Action::Fail(EINVAL),
            _ => Action::Pass,
        });
    assert!(matches!(refuse_open.err(), Some(StoreError::DirectUnsupported { .. })));
    let files = open_with(&checkpoint, IoMode::Direct, |_, access, call| match (access, call) {
        (Access::Direct, Call::Read { .. }) => Action::Fail(EINVAL),
        _ => Action::Pass,
    });
    let files = files.unwrap();
    for engine in engines() {
        let mut store = stream(&checkpoint, &files, engine);
        let error = pass(&checkpoint, &mut *store, 0).unwrap_err();
        assert!(matches!(error, StoreError::DirectUnsupported { .. }), "{error}");
    }
    assert!(files.notes().is_empty());
}

#[test]
fn a_lasting_device_error_is_retried_named_and_survived() {
    engines().into_iter().for_each(a_lasting_device_error);
}

fn a_lasting_device_error(engine: IoEngine) {
    let checkpoint = Checkpoint::new(22, 4, 6);
    let bad = checkpoint.spec.layers[2].experts[4].down.planes[1].extent;
    let bad_path = checkpoint.path(bad.file as usize);
    let broken = Arc::new(AtomicBool::new(false));
    let tries = Arc::new(AtomicU64::new(0));
    let files = open_with(&checkpoint, IoMode::Auto, {
        let (broken, tries, bad_path) = (broken.clone(), tries.clone(), bad_path.clone());
        move |path, _, call| match call {
            Call::Read { offset, len }
                if broken.load(SeqCst)
                    && path == bad_path
                    && (offset..offset + len as u64).contains(&bad.offset) =>
            {
                tries.fetch_add(1, SeqCst);
                Action::Fail(EIO)
            }
            _ => Action::Pass,
        }
    })
    .unwrap();
    let mut store = stream(&checkpoint, &files, engine);
    pass(&checkpoint, &mut *store, 0).unwrap();
    broken.store(true, SeqCst);
    store.begin(2, &[4]).unwrap();
    let error = store.next_ready(&mut Vec::new()).unwrap_err();
    store.end();
    assert_eq!(error.class(), "IoError");
    assert_eq!(tries.load(SeqCst), 3, "twice again");
    let text = error.to_string();
    for part in ["weights-", "layer 5 expert 4", "offset"] {
        assert!(text.contains(part), "{text}");
    }
    // Other layers go on while it is broken, and all once it is not.
    pass(&checkpoint, &mut *store, 0).unwrap();
    pass(&checkpoint, &mut *store, 3).unwrap();
    broken.store(false, SeqCst);
    pass(&checkpoint, &mut *store, 2).unwrap();

    // A resident store names the expert as well.
    broken.store(true, SeqCst);
    let io = IoOptions { engine, max_read_bytes: 4096, ..IoOptions::default() };
    let opened = open_store(&checkpoint.spec, files, Residency::Resident, io, &mut |_, _| {});
    let error = opened.err().expect("broken").to_string();
    assert!(error.contains("layer 5 expert"), "{error}");
}

#[test]
fn a_failed_expert_is_tried_again_when_asked_for_again() {
    engines().into_iter().for_each(a_failed_expert_is_tried_again);
}

fn a_failed_expert_is_tried_again(engine: IoEngine) {
    let checkpoint = Checkpoint::new(22, 1, 3);
    let broken = Arc::new(AtomicBool::new(true));
    let files = open_with(&checkpoint, IoMode::Auto, {
        let broken = broken.clone();
        move |_, _, call| match call {
            Call::Read { .. } if broken.load(SeqCst) => Action::Fail(EIO),
            _ => Action::Pass,
        }
    });
    let mut store = stream(&checkpoint, &files.unwrap(), engine);
    store.begin(0, &[0, 1, 2]).unwrap();
    let mut leases = Vec::new();
    assert!(store.next_ready(&mut leases).is_err());
    broken.store(false, SeqCst);
    let mut seen = Vec::new();
    // What else was in flight when the disk was broken may still fail.
    for _ in 0..20 {
        if store.next_ready(&mut leases).is_ok() && leases.is_empty() {
            break;
        }
        seen.extend(leases.iter().map(|lease| lease.expert));
        store.release(&mut leases);
    }
    seen.sort_unstable();
    assert_eq!(seen, [0, 1, 2]);
}

#[test]
fn an_early_end_is_truncated_with_both_numbers() {
    let checkpoint = Checkpoint::new(23, 1, 2);
    let extent = checkpoint.spec.layers[0].experts[1].gate.planes[0].extent;
    let end = extent.offset + extent.len - 10;
    let cut = checkpoint.path(extent.file as usize);
    for mode in [IoMode::Auto, IoMode::Buffered] {
        let cut = cut.clone();
        let files = open_with(&checkpoint, mode, move |path, _, call| match call {
            Call::Read { offset, .. } if path == cut => {
                Action::Short(end.saturating_sub(offset) as usize)
            }
            _ => Action::Pass,
        })
        .unwrap();
        let mut buf = vec![0; extent.len as usize];
        match files.read_exact_at(extent, &mut buf).unwrap_err() {
            StoreError::Truncated { wanted, got, offset, .. } => {
                assert_eq!((wanted, got, offset), (extent.len, extent.len - 10, extent.offset));
            }
            other => panic!("{other}"),
        }
        for engine in engines() {
            let mut store = stream(&checkpoint, &files, engine);
            let error = pass(&checkpoint, &mut *store, 0).unwrap_err();
            assert_eq!(error.class(), "Truncated", "{error}");
            assert!(error.to_string().contains("layer 1 expert"), "{error}");
        }
    }
}

#[test]
fn a_changed_file_is_noticed() {
    type Change = fn(&Path);
    let change: [(&str, Change); 3] = [
        ("shorter", |path| {
            let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
            file.set_len(file.metadata().unwrap().len() - 1).unwrap();
        }),
        ("longer", |path| {
            use std::io::Write;
            std::fs::OpenOptions::new().append(true).open(path).unwrap().write_all(b"x").unwrap();
        }),
        ("touched", |path| {
            let file = std::fs::OpenOptions::new().write(true).open(path).unwrap();
            let then = std::time::UNIX_EPOCH + std::time::Duration::from_nanos(1_000_000_001);
            file.set_modified(then).unwrap();
        }),
    ];
    for (name, change) in change {
        for mode in [Residency::Stream { slots: 2 }, Residency::Mapped] {
            let checkpoint = Checkpoint::new(24, 1, 3);
            let files = Arc::new(FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap());
            let io = IoOptions::default();
            let mut store =
                open_store(&checkpoint.spec, files.clone(), mode, io, &mut |_, _| {}).unwrap();
            pass(&checkpoint, &mut *store, 0).unwrap();
            for file in 0..3 {
                change(&checkpoint.path(file));
            }
            let error = pass(&checkpoint, &mut *store, 0).unwrap_err();
            assert_eq!(error.class(), "FileChanged", "{name}: {error}");
            let again = FileSet::open(&checkpoint.entries, IoMode::Auto);
            assert_eq!(again.err().expect("changed").class(), "FileChanged", "{name}");
        }
    }
    let checkpoint = Checkpoint::new(24, 1, 1);
    std::fs::remove_file(checkpoint.path(1)).unwrap();
    let error = FileSet::open(&checkpoint.entries, IoMode::Auto).err().expect("gone");
    assert_eq!(error.class(), "IoError");
    assert!(error.to_string().contains("weights-1"), "{error}");
}

/// Case D03, second half: buffered streaming leaves nothing behind in the page cache.
#[test]
fn buffered_streams_give_their_page_cache_back() {
    engines().into_iter().for_each(page_cache_is_given_back);
}

fn page_cache_is_given_back(engine: IoEngine) {
    let checkpoint = Checkpoint::new(25, 2, 4);
    let forgotten = Arc::new(Mutex::new(Vec::new()));
    let read = Arc::new(Mutex::new(Vec::new()));
    let files = open_with(&checkpoint, IoMode::Buffered, {
        let (forgotten, read) = (forgotten.clone(), read.clone());
        move |path, access, call| {
            assert!(access == Access::Buffered || matches!(call, Call::Ring | Call::Register));
            match call {
                Call::Read { offset, len } => {
                    read.lock().unwrap().push((path.to_path_buf(), offset, offset + len as u64));
                }
                Call::Forget { offset, len } => {
                    forgotten.lock().unwrap().push((path.to_path_buf(), offset, offset + len));
                }
                Call::Open | Call::Ring | Call::Register => {}
            }
            Action::Pass
        }
    });
    let mut store = stream(&checkpoint, &files.unwrap(), engine);
    pass(&checkpoint, &mut *store, 0).unwrap();
    pass(&checkpoint, &mut *store, 1).unwrap();
    drop(store);
    let forgotten = forgotten.lock().unwrap();
    for (path, start, end) in read.lock().unwrap().iter() {
        assert!(forgotten.iter().any(|(p, s, e)| p == path && s <= start && end <= e));
    }
}
