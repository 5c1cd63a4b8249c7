//! Case D03: mapped pages are not own memory, and streaming stays within its slots. One test, so
//! that nothing else allocates beside it.
#![cfg(target_os = "linux")]

use std::sync::Arc;

use forebay_models::{ExpertWeights, Extent, PlaneRef, WeightRef};
use forebay_quant::Format;
use forebay_store::io::entry_of;
use forebay_store::map::FileMap;
use forebay_store::memory::{PeakSampler, mapped_bytes, own_bytes};
use forebay_store::{
    FileSet, HugePages, IoMode, IoOptions, LayerExperts, Region, Residency, StoreSpec, open_store,
};

const MIB: u64 = 1 << 20;
const FILE_BYTES: u64 = 200 * MIB;

#[test]
fn own_memory_is_slots_not_files() {
    let file = tempfile::NamedTempFile::new().unwrap();
    file.as_file().set_len(FILE_BYTES).unwrap();
    mapped_pages_are_not_own(file.as_file());
    for mode in [IoMode::Auto, IoMode::Buffered] {
        a_stream_stays_within_its_slots(file.path(), mode);
    }
}

fn mapped_pages_are_not_own(file: &std::fs::File) {
    let sampler = PeakSampler::start().unwrap();
    let (own, mapped) = (own_bytes().unwrap(), mapped_bytes().unwrap());

    let map = FileMap::new(file).unwrap();
    let sum: u64 = map.iter().step_by(4096).map(|&byte| byte as u64).sum();
    assert_eq!(sum, 0);
    assert!(mapped_bytes().unwrap() >= mapped + 190 * MIB);
    assert!(own_bytes().unwrap() < own + 10 * MIB);
    assert!(sampler.peak_bytes() < own + 10 * MIB);

    let mut region = Region::new(50 << 20, HugePages::Default).unwrap();
    assert!(own_bytes().unwrap() < own + 10 * MIB, "reserved memory is not there yet");
    region.fill(1);
    let grown = own_bytes().unwrap();
    assert!((own + 45 * MIB..own + 60 * MIB).contains(&grown));
    assert!((own + 45 * MIB..own + 60 * MIB).contains(&sampler.peak_bytes()));

    region.discard(0..50 << 20);
    assert!(own_bytes().unwrap() < own + 10 * MIB);
    assert!(sampler.peak_bytes() >= own + 45 * MIB);
}

/// Experts of 3 MiB, ten times as many as there are slots.
fn a_stream_stays_within_its_slots(path: &std::path::Path, mode: IoMode) {
    let weight = |i: u64| WeightRef {
        name: format!("weight {i}").into(),
        format: Format::F32,
        rows: 256,
        cols: 1024,
        planes: vec![PlaneRef {
            extent: Extent { file: 0, offset: 1234 + i * MIB, len: MIB },
            stride: 4096,
        }],
    };
    let expert = |i: u64| ExpertWeights {
        gate: weight(3 * i),
        up: weight(3 * i + 1),
        down: weight(3 * i + 2),
    };
    let layer = |l: u64| LayerExperts {
        layer: l as usize,
        experts: (0..15).map(|e| expert(15 * l + e)).collect(),
    };
    let spec = StoreSpec { layers: (0..4).map(layer).collect() };
    let files = Arc::new(FileSet::open(&[entry_of(path).unwrap()], mode).unwrap());
    let slots = 6;
    let sampler = PeakSampler::start().unwrap();
    let own = own_bytes().unwrap();
    let residency = Residency::Stream { slots };
    let mut store =
        open_store(&spec, files, residency, IoOptions::default(), &mut |_, _| {}).unwrap();
    let mut leases = Vec::new();
    for layer in (0..4).cycle().take(12) {
        store.begin(layer, &Vec::from_iter(0..15)).unwrap();
        while {
            store.next_ready(&mut leases).unwrap();
            !leases.is_empty()
        } {
            store.release(&mut leases);
        }
        store.end();
    }
    assert_eq!(store.bytes_in_memory(), slots as u64 * spec.slot_bytes());
    let grown = sampler.peak_bytes() - own;
    assert!(grown < store.bytes_in_memory() + 4 * MIB, "{grown}");

    // A smaller pool gives its memory back at once.
    let before = own_bytes().unwrap();
    assert_eq!(store.resize(2).unwrap(), 2);
    let given = before - own_bytes().unwrap();
    assert!(given + MIB > 4 * spec.slot_bytes(), "{given}");
    assert_eq!(store.bytes_in_memory(), 2 * spec.slot_bytes());
}
