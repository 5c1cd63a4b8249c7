//! Random sequences of calls with failing reads, guesses and a pool that changes its size: no slot is
//! lost or handed out twice, there are never more than allowed, and bytes are always right.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::SeqCst};

use proptest::prelude::*;

use super::*;
use crate::faults::{Action, Call, Faulty};
use crate::{IoEngine, IoMode, QueueDepth};
use common::Checkpoint;

#[path = "../../tests/common/mod.rs"]
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
    Resize {
        slots: usize,
    },
    Announce {
        layer: usize,
        mask: u8,
    },
    Guess {
        layer: usize,
        mask: u8,
    },
    Warm {
        first: usize,
        count: usize,
    },
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
        2 => (1usize..14).prop_map(|slots| Step::Resize { slots }),
        3 => (0..LAYERS, 0u8..1 << EXPERTS).prop_map(|(layer, mask)| Step::Guess { layer, mask }),
        2 => (0..LAYERS, 0u8..1 << EXPERTS).prop_map(|(layer, mask)| Step::Announce { layer, mask }),
        1 => (0usize..20, 0usize..20).prop_map(|(first, count)| Step::Warm { first, count }),
        1 => (0u64..6).prop_map(|odds| Step::Faults { odds }),
    ]
}

fn experts_of(mask: u8) -> Vec<u16> {
    (0..EXPERTS).filter(|expert| mask >> expert & 1 == 1).collect()
}

impl StreamStore {
    fn audit(&self) {
        self.cache.audit();
        let ids = 0..self.slots.len() as SlotId;
        for (id, slot) in ids.clone().zip(&self.slots) {
            let here = slot.region.is_some() || self.toucher.has(id);
            let lent = slot.fill.is_some();
            let expected = match self.cache.state(id) {
                State::Gone => (false, false),
                State::Reading => (false, true),
                State::Free | State::Idle | State::Held => (true, false),
            };
            assert_eq!((here, lent), expected, "memory of slot {id}");
        }
        let held = ids.filter(|&id| self.cache.state(id) == State::Held);
        let expected = self.pass.as_ref().map_or(0, |pass| pass.ready.len() + pass.leased);
        assert_eq!(held.count(), expected);
    }

    /// Lets everything in flight finish.
    fn drain(&mut self) {
        while let Some(completion) = self.queue.wait() {
            self.settle(completion);
        }
    }
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
    fn next(&mut self, store: &mut StreamStore) {
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
    }

    /// Every lease out shows its own expert, whatever happened since.
    fn check(&self, store: &StreamStore, checkpoint: &Checkpoint) {
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
        two_copies in any::<bool>(),
        policy in prop::sample::select(&Policy::ALL[..]),
        engine in prop::sample::select(&[IoEngine::Auto, IoEngine::Threads][..]),
        depth in prop::sample::select(&[QueueDepth::Measured, QueueDepth::Fixed(1), QueueDepth::Fixed(3)][..]),
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
                    // Interrupted; the device failed, and may not the next time.
                    match nth % 11 {
                        3 => return Action::Fail(4),
                        7 => return Action::Fail(5),
                        _ => {}
                    }
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
        let mut files = FileSet::open_on(Arc::new(platform), &checkpoint.entries, IoMode::Auto).unwrap();
        if two_copies {
            files.add_copy_of_files(&checkpoint.entries).unwrap();
        }
        let io = IoOptions { engine, depth, max_read_bytes: 8192, ..IoOptions::default() };
        let options = StoreOptions { io, policy };
        let files = Arc::new(files);
        let mut store = StreamStore::open(&checkpoint.spec, files, slots, options).unwrap();
        let mut allowed = slots;
        let mut model = Model::default();
        let mut void = Vec::new();
        for step in steps {
            match step {
                Step::Begin { layer, mask } => {
                    store.end();
                    // Leases that outlive their pass are released late.
                    void.append(&mut model.leases);
                    let due = experts_of(mask);
                    store.begin(layer, &due).unwrap();
                    model = Model { layer, due, leases: Vec::new(), active: true };
                }
                Step::Next if model.active => model.next(&mut store),
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
                Step::Resize { slots } => {
                    let before = store.slots();
                    let reached = store.resize(slots).unwrap();
                    assert!(reached >= slots && reached <= before.max(slots));
                    allowed = slots;
                }
                Step::Guess { layer, mask } => store.guess(layer, &experts_of(mask)),
                Step::Announce { layer, mask } => store.announce(layer, &experts_of(mask)),
                Step::Warm { first, count } => {
                    // Some of them do not exist.
                    let list = (first..first + count).map(|i| (i % 4, (i * 3 % 8) as u16));
                    store.warm(&Vec::from_iter(list));
                }
                Step::Faults { odds: new } => odds.store(new, SeqCst),
                Step::Next => {}
            }
            store.audit();
            model.check(&store, &checkpoint);
        }
        // Once the disk is well again, every expert can be had.
        odds.store(0, SeqCst);
        store.end();
        for layer in 0..LAYERS {
            let due: Vec<u16> = (0..EXPERTS).collect();
            store.begin(layer, &due).unwrap();
            model = Model { layer, due, leases: Vec::new(), active: true };
            while !model.due.is_empty() {
                model.next(&mut store);
                model.check(&store, &checkpoint);
                store.release(&mut model.leases);
                store.audit();
            }
            store.end();
        }
        store.drain();
        store.audit();
        // With nothing at work, the pool is as large as it was last asked to be.
        assert_eq!(store.slots(), allowed);
    }
}
