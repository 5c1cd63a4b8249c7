//! Case D03: mapped pages are not own memory. One test, so that nothing else allocates beside it.
#![cfg(target_os = "linux")]

use forebay_store::map::FileMap;
use forebay_store::memory::{PeakSampler, mapped_bytes, own_bytes};
use forebay_store::{HugePages, Region};

const MIB: u64 = 1 << 20;

#[test]
fn mapped_pages_are_not_own_memory() {
    let file = tempfile::tempfile().unwrap();
    file.set_len(200 * MIB).unwrap();
    let sampler = PeakSampler::start().unwrap();
    let (own, mapped) = (own_bytes().unwrap(), mapped_bytes().unwrap());

    let map = FileMap::new(&file).unwrap();
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
