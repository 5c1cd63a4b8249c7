//! Random sequences of calls with failing reads: no slot is lost or handed out twice, and bytes are
//! always right.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use proptest::prelude::*;

use super::*;
use crate::IoMode;
use crate::faults::{Action, Call, Faulty};
use common::Checkpoint;

#[path = "../tests/common/mod.rs"]
mod common;

const LAYERS: usize = 3;
const EXPERTS: u16 = 7;

#[derive(Clone, Debug)]
enum Step {
    Begin {
        layer: usize,
        mask: u8,
    },
    Next,
    /// So many of the leases out, from the front or the back.
    Release {
        count: usize,
        back: bool,
    },
    End,
    /// From now on one read in `odds` fails; 0: none.
    Faults {
        odds: u64,
    },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..LAYERS, 0u8..1 << EXPERTS).prop_map(|(layer, mask)| Step::Begin { layer, mask }),
        8 => Just(Step::Next),
        6 => (1usize..4, any::<bool>()).prop_map(|(count, back)| Step::Release { count, back }),
        1 => Just(Step::End),
        1 => (0u64..6).prop_map(|odds| Step::Faults { odds }),
    ]
}

/// What a caller knows about its pass.
#[derive(Default)]
struct Model {
    layer: usize,
    due: Vec<u16>,
    leases: Vec<Lease>,
    active: bool,
}

impl Model {
    fn next(&mut self, store: &mut StreamStore, checkpoint: &Checkpoint) {
        let known = self.leases.len();
        match store.next_ready(&mut self.leases) {
            Ok(()) if self.leases.len() == known => {
                assert!(self.due.is_empty(), "all were handed out")
            }
            Ok(()) => {}
            Err(StoreError::AllLeased { waiting, leased, .. }) => {
                assert_eq!(leased, known);
                assert!(waiting > 0 && known > 0);
            }
            Err(error) => assert_eq!(error.class(), "IoError", "{error}"),
        }
        for lease in &self.leases[known..] {
            let at = self.due.iter().position(|&expert| expert == lease.expert);
            self.due.swap_remove(at.expect("due, and handed out once"));
        }
        // Every lease out shows its own expert, whatever happened since.
        for lease in &self.leases {
            checkpoint.check_expert(self.layer, lease.expert, store.view(lease));
        }
        let mut slots: Vec<_> = self.leases.iter().map(|lease| lease.slot).collect();
        slots.sort_unstable();
        assert!(slots.windows(2).all(|pair| pair[0] != pair[1]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn slots_and_bytes_survive_any_sequence(
        slots in 1usize..12,
        threads in 1usize..4,
        steps in prop::collection::vec(step(), 1..60),
    ) {
        let checkpoint = Checkpoint::new(1, LAYERS, EXPERTS as usize);
        let odds = Arc::new(AtomicU64::new(0));
        let nth = AtomicU64::new(0);
        let script = {
            let odds = odds.clone();
            move |_: &std::path::Path, _, call| match (call, odds.load(SeqCst)) {
                (Call::Read { offset, .. }, odds) if odds > 0 => {
                    let nth = nth.fetch_add(1, SeqCst);
                    match (offset / 4096 + nth / 5).is_multiple_of(odds) {
                        // Not a device error, so that it is not tried again.
                        true => Action::Fail(13),
                        false => Action::Short(1 + (nth as usize * 977) % 20_000),
                    }
                }
                _ => Action::Pass,
            }
        };
        let platform = Faulty::new(script);
        let files = FileSet::open_on(&platform, &checkpoint.entries, IoMode::Auto).unwrap();
        let io = IoOptions { threads, max_read_bytes: 8192, ..IoOptions::default() };
        let mut store = StreamStore::open(&checkpoint.spec, Arc::new(files), slots, io).unwrap();
        let mut model = Model::default();
        let mut void = Vec::new();
        for step in steps {
            match step {
                Step::Begin { layer, mask } => {
                    store.end();
                    // Leases that outlive their pass are released late.
                    void.append(&mut model.leases);
                    let due: Vec<u16> = (0..EXPERTS).filter(|e| mask >> e & 1 == 1).collect();
                    store.begin(layer, &due).unwrap();
                    model = Model { layer, due, leases: Vec::new(), active: true };
                }
                Step::Next if model.active => model.next(&mut store, &checkpoint),
                Step::Release { count, back } => {
                    let count = count.min(model.leases.len());
                    let at = if back { model.leases.len() - count } else { 0 };
                    let mut some: Vec<Lease> = model.leases.drain(at..at + count).collect();
                    store.release(&mut some);
                    store.release(&mut void);
                }
                Step::End => {
                    store.end();
                    void.append(&mut model.leases);
                    model = Model::default();
                }
                Step::Faults { odds: new } => odds.store(new, SeqCst),
                Step::Next => {}
            }
            store.audit();
        }
        // Once the disk is well again, every expert can be had.
        odds.store(0, SeqCst);
        store.end();
        for layer in 0..LAYERS {
            let due: Vec<u16> = (0..EXPERTS).collect();
            store.begin(layer, &due).unwrap();
            model = Model { layer, due, leases: Vec::new(), active: true };
            while !model.due.is_empty() {
                model.next(&mut store, &checkpoint);
                store.release(&mut model.leases);
                store.audit();
            }
            store.end();
        }
        while let Some(completion) = store.queue.wait() {
            store.settle(completion);
        }
        store.audit();
    }
}
