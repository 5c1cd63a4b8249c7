//! One suite for every residency: all give the same bytes, each expert once.

mod common;

use std::sync::Arc;

use common::{Checkpoint, Rng};
use forebay_store::{
    ExpertStore, FileSet, IoMode, IoOptions, Lease, Residency, StoreError, TrunkImage, open_store,
};

fn modes() -> [Residency; 7] {
    let stream = |slots| Residency::Stream { slots };
    [
        stream(1),
        stream(2),
        stream(5),
        stream(12),
        stream(1000),
        Residency::Mapped,
        Residency::Resident,
    ]
}

fn open(checkpoint: &Checkpoint, mode: Residency, io: IoMode) -> Box<dyn ExpertStore> {
    let files = Arc::new(FileSet::open(&checkpoint.entries, io).unwrap());
    // Small reads, so that experts take several.
    let options = IoOptions { max_read_bytes: 8192, ..IoOptions::default() };
    open_store(&checkpoint.spec, files, mode, options, &mut |_, _| {}).unwrap()
}

/// Runs a pass to its end, checking bytes; each expert comes once.
fn whole_pass(store: &mut dyn ExpertStore, checkpoint: &Checkpoint, layer: usize, experts: &[u16]) {
    store.begin(layer, experts).unwrap();
    let mut seen = Vec::new();
    let mut leases: Vec<Lease> = Vec::new();
    loop {
        store.next_ready(&mut leases).unwrap();
        if leases.is_empty() {
            break;
        }
        for lease in &leases {
            checkpoint.check_expert(layer, lease.expert, store.view(lease));
            seen.push(lease.expert);
        }
        store.release(&mut leases);
        assert!(leases.is_empty());
    }
    store.end();
    seen.sort_unstable();
    let mut wanted = experts.to_vec();
    wanted.sort_unstable();
    assert_eq!(seen, wanted);
}

fn some_experts(rng: &mut Rng, n: u64) -> Vec<u16> {
    let mut experts: Vec<u16> = (0..n as u16).collect();
    for i in (1..experts.len()).rev() {
        experts.swap(i, rng.below(i as u64 + 1) as usize);
    }
    experts.truncate(rng.below(n + 1) as usize);
    experts
}

#[test]
fn every_mode_gives_the_bytes_of_the_files() {
    for (seed, layers, experts) in [(1, 4, 8), (2, 1, 1), (3, 5, 3)] {
        let checkpoint = Checkpoint::new(seed, layers, experts);
        for mode in modes() {
            for io in [IoMode::Auto, IoMode::Buffered] {
                let mut store = open(&checkpoint, mode, io);
                let mut rng = Rng(seed);
                for _ in 0..4 {
                    for layer in 0..layers {
                        let chosen = some_experts(&mut rng, experts as u64);
                        whole_pass(&mut *store, &checkpoint, layer, &chosen);
                    }
                }
                let stats = store.stats();
                let per_layer: (u64, u64) =
                    stats.layers.iter().fold((0, 0), |sum, l| (sum.0 + l.hits, sum.1 + l.misses));
                assert_eq!(per_layer, (stats.hits, stats.misses));
                assert_eq!(stats.bytes_written, 0);
                store.reset_stats();
                assert_eq!(store.stats().hits, 0);
            }
        }
    }
}

#[test]
fn a_pass_may_be_abandoned_anywhere() {
    let checkpoint = Checkpoint::new(7, 4, 8);
    for mode in modes() {
        let mut store = open(&checkpoint, mode, IoMode::Auto);
        let mut rng = Rng(9);
        for round in 0..40 {
            let layer = rng.below(4) as usize;
            store.begin(layer, &some_experts(&mut rng, 8)).unwrap();
            let mut stale = Vec::new();
            if round % 2 == 0 {
                store.next_ready(&mut stale).unwrap();
            }
            store.end();
            store.end();
            // Leases of an ended pass are void, not harmful.
            store.release(&mut stale);
            whole_pass(&mut *store, &checkpoint, layer, &[3, 0, 7]);
        }
        let mut none = Vec::new();
        store.next_ready(&mut none).unwrap();
        assert!(none.is_empty());
    }
}

#[test]
fn hits_and_misses_are_counted() {
    let checkpoint = Checkpoint::new(5, 2, 8);
    let mut store = open(&checkpoint, Residency::Stream { slots: 8 }, IoMode::Auto);
    // Memory is touched ahead of use, never more than the pool's.
    let slots = |n: u64| n * checkpoint.spec.slot_bytes();
    assert!(store.bytes_in_memory() <= slots(8));
    whole_pass(&mut *store, &checkpoint, 0, &[0, 1, 2, 3]);
    whole_pass(&mut *store, &checkpoint, 0, &[2, 3, 4]);
    let stats = store.stats();
    assert_eq!((stats.hits, stats.misses), (2, 5));
    assert!(stats.bytes_read >= 5 * 3 * 64 * 96 / 2 && stats.reads >= 15);
    assert!((slots(5)..=slots(8)).contains(&store.bytes_in_memory()));
    for mode in [Residency::Mapped, Residency::Resident] {
        let mut store = open(&checkpoint, mode, IoMode::Auto);
        whole_pass(&mut *store, &checkpoint, 1, &[0, 1, 2]);
        let stats = store.stats();
        assert_eq!((stats.hits, stats.misses, stats.bytes_read), (3, 0, 0));
        assert_eq!(store.residency(), mode);
    }
}

#[test]
fn hits_come_before_misses() {
    let checkpoint = Checkpoint::new(5, 1, 8);
    let mut store = open(&checkpoint, Residency::Stream { slots: 4 }, IoMode::Auto);
    whole_pass(&mut *store, &checkpoint, 0, &[4, 5]);
    store.begin(0, &[0, 4, 1, 5]).unwrap();
    let mut leases = Vec::new();
    store.next_ready(&mut leases).unwrap();
    let first: Vec<u16> = leases.iter().map(|lease| lease.expert).collect();
    assert!(first.contains(&4) && first.contains(&5));
    store.end();
}

#[test]
fn asking_on_with_every_slot_leased_is_an_error() {
    let checkpoint = Checkpoint::new(5, 1, 4);
    let mut store = open(&checkpoint, Residency::Stream { slots: 2 }, IoMode::Auto);
    store.begin(0, &[0, 1, 2]).unwrap();
    let mut leases = Vec::new();
    let error = loop {
        if let Err(error) = store.next_ready(&mut leases) {
            break error;
        }
    };
    assert!(matches!(error, StoreError::AllLeased { layer: 1, waiting: 1, leased: 2 }), "{error}");
    store.release(&mut leases);
    store.next_ready(&mut leases).unwrap();
    assert_eq!(leases.len(), 1);
    checkpoint.check_expert(0, leases[0].expert, store.view(&leases[0]));
    store.release(&mut leases);
    store.end();
}

#[test]
fn a_store_without_slots_is_refused() {
    let checkpoint = Checkpoint::new(5, 1, 1);
    let files = Arc::new(FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap());
    let mode = Residency::Stream { slots: 0 };
    let error = open_store(&checkpoint.spec, files, mode, IoOptions::default(), &mut |_, _| {})
        .err()
        .expect("no slot");
    assert_eq!(error.class(), "BudgetTooSmall");
}

#[test]
fn bad_specs_are_refused_when_opened() {
    let checkpoint = Checkpoint::new(5, 1, 2);
    let files = Arc::new(FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap());
    type Break = fn(&mut forebay_models::WeightRef);
    let break_it: [(&str, Break); 6] = [
        ("OutOfBounds", |w| w.planes[0].extent.offset = u64::MAX),
        ("OutOfBounds", |w| w.planes[0].extent.file = 9),
        ("SizeMismatch", |w| w.planes[0].extent.len -= 1),
        ("SizeMismatch", |w| w.planes[0].stride -= 1),
        ("SizeMismatch", |w| w.cols += 1),
        ("SizeMismatch", |w| w.planes.clear()),
    ];
    for (class, change) in break_it {
        let mut spec = checkpoint.spec.clone();
        change(&mut spec.layers[0].experts[1].down);
        for mode in modes() {
            let opened =
                open_store(&spec, files.clone(), mode, IoOptions::default(), &mut |_, _| {});
            let error = opened.err().expect("refused");
            assert_eq!(error.class(), class, "{error}");
            assert!(error.to_string().contains("0.down"), "{error}");
        }
    }
}

#[test]
fn a_nan_scale_names_tensor_and_expert() {
    // Layer 0 has blocks with scales in them, layer 1 a plane of scales.
    for (layer, plane, at) in [(0, 0, 17 * 4), (1, 1, 4)] {
        let mut checkpoint = Checkpoint::new(5, 2, 4);
        let extent = checkpoint.spec.layers[layer].experts[2].down.planes[plane].extent;
        checkpoint.poke(extent.file, extent.offset + at, 255);
        let tensor = format!("{layer}.down: layer {} expert 2", 2 * layer + 1);
        for mode in modes() {
            let files = Arc::new(FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap());
            let io = IoOptions::default();
            let opened = open_store(&checkpoint.spec, files, mode, io, &mut |_, _| {});
            let error = match opened {
                Err(error) => error,
                Ok(mut store) => {
                    store.begin(layer, &[2]).unwrap();
                    let error = store.next_ready(&mut Vec::new()).unwrap_err();
                    store.end();
                    whole_pass(&mut *store, &checkpoint, layer, &[0, 1, 3]);
                    error
                }
            };
            assert_eq!(error.class(), "NumericFault");
            assert!(error.to_string().contains(&tensor), "{error}");
            // inter = 64: two blocks a row.
            assert!(error.to_string().contains("row 2 block 0"), "{error}");
        }
    }
}

#[test]
fn a_trunk_image_holds_every_extent() {
    let checkpoint = Checkpoint::new(11, 4, 3);
    let extents: Vec<_> = checkpoint
        .spec
        .layers
        .iter()
        .flat_map(|layer| layer.experts.iter().flat_map(|e| [&e.gate, &e.up, &e.down]))
        .flat_map(|weight| weight.planes.iter().map(|plane| plane.extent))
        .step_by(2)
        .collect();
    for mode in [IoMode::Auto, IoMode::Buffered] {
        let files = Arc::new(FileSet::open(&checkpoint.entries, mode).unwrap());
        let io = IoOptions { max_read_bytes: 4096 * 5, ..IoOptions::default() };
        let (mut told, mut total) = (Vec::new(), 0);
        let image = TrunkImage::load(&files, &extents, &io, &mut |done, all| {
            told.push(done);
            total = all;
        })
        .unwrap();
        assert_eq!(image.memory_bytes(), TrunkImage::plan_bytes(&extents));
        assert_eq!((told.first(), told.last()), (Some(&0), Some(&total)));
        assert!(told.is_sorted());
        for &extent in &extents {
            assert!(image.bytes(extent) == checkpoint.expected(extent));
            let mut row = vec![0; 5];
            let small = forebay_models::Extent { offset: extent.offset + 3, len: 5, ..extent };
            files.read_exact_at(small, &mut row).unwrap();
            assert_eq!(image.bytes(small), row);
        }
    }
    let files = Arc::new(FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap());
    let none = TrunkImage::load(&files, &[], &IoOptions::default(), &mut |_, _| {}).unwrap();
    assert_eq!(none.memory_bytes(), 0);
}

#[test]
fn bandwidth_is_measured() {
    let checkpoint = Checkpoint::new(11, 4, 3);
    let files = Arc::new(FileSet::open(&checkpoint.entries, IoMode::Auto).unwrap());
    let duration = std::time::Duration::from_millis(5);
    let found = forebay_store::bandwidth::measure(&files, 0, 5000, 3, duration).unwrap();
    assert_eq!(found.bytes, found.reads * 8192);
    assert!(found.reads >= 3 && found.bytes_per_second() > 0.0);
    let error = forebay_store::bandwidth::measure(&files, 0, 1 << 30, 1, duration).unwrap_err();
    assert_eq!(error.class(), "Truncated");
}
