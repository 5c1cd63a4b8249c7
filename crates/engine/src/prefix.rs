//! Beginnings that are kept, so that the next request with the same ones need not compute them again.
//!
//! A kept beginning is a [`Snapshot`] with the tokens that it holds. It lives on pages that running
//! sequences leave free and goes, least lately used first, when one of them needs a page. A sequence that
//! begins with one computes the same bits as without: keys, values and states do not depend on who computed
//! them, or in which chunks. How they were steered is part of what they are: only a sequence that is steered alike begins with one.

use std::sync::Arc;

use crate::engine::Engine;
use crate::state::{PagePool, Sequence, Snapshot};
use crate::steer::Steering;

/// More beginnings than this are not kept: each is looked at when a request comes.
const MAX_KEPT: usize = 256;

/// The beginnings.
#[derive(Debug, Default)]
pub struct PrefixCache {
    kept: Vec<Kept>,
    clock: u64,
}

/// Where a beginning comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// A request's prompt.
    Prompt,
    /// An answer that grows: a longer beginning of the same answer takes its place.
    Answer(u64),
}

#[derive(Debug)]
struct Kept {
    tokens: Arc<[u32]>,
    snapshot: Snapshot,
    origin: Origin,
    used: u64,
}

impl Kept {
    fn tokens(&self) -> &[u32] {
        &self.tokens[..self.snapshot.len()]
    }

    fn is_steered_as(&self, snapshot: &Snapshot) -> bool {
        self.snapshot.steering() == snapshot.steering()
    }
}

impl PrefixCache {
    /// How many are kept.
    pub fn len(&self) -> usize {
        self.kept.len()
    }

    /// Whether none is kept.
    pub fn is_empty(&self) -> bool {
        self.kept.is_empty()
    }

    /// What is kept, the most lately used first; of one that begins another, only where `all`.
    pub(crate) fn latest(&self, all: bool) -> Vec<(&[u32], &Snapshot)> {
        let mut latest: Vec<&Kept> = self.kept.iter().collect();
        latest.sort_by_key(|kept| std::cmp::Reverse(kept.used));
        let begins_another = |kept: &&Kept| {
            let longer = |other: &Kept| other.tokens().len() > kept.tokens().len();
            let mut others = self.kept.iter().filter(|other| other.is_steered_as(&kept.snapshot));
            others.any(|other| longer(other) && other.tokens().starts_with(kept.tokens()))
        };
        latest.retain(|kept| all || !begins_another(kept));
        latest.into_iter().map(|kept| (kept.tokens(), &kept.snapshot)).collect()
    }

    /// Gives the least lately used one up. False: there is none.
    pub(crate) fn evict(&mut self, pool: &mut PagePool) -> bool {
        let oldest = (0..self.kept.len()).min_by_key(|&i| self.kept[i].used);
        if let Some(index) = oldest {
            self.kept.swap_remove(index).snapshot.release(pool);
        }
        oldest.is_some()
    }

    /// A sequence that holds as much of `prompt` as is kept, but never all of it: the last token's logits
    /// have to be computed.
    fn begin(
        &mut self,
        pool: &mut PagePool,
        prompt: &[u32],
        steering: Option<Arc<Steering>>,
    ) -> Sequence {
        let key = steering.as_ref().map(|s| s.key());
        let usable = |kept: &Kept| {
            if kept.snapshot.steering() != key {
                return 0;
            }
            let common = kept.tokens().iter().zip(prompt).take_while(|(a, b)| a == b).count();
            kept.snapshot.usable(pool, common.min(prompt.len().saturating_sub(1)))
        };
        let best = self.kept.iter().enumerate().map(|(i, kept)| (usable(kept), i)).max();
        let Some((len, index)) = best.filter(|(len, _)| *len > 0) else {
            return Sequence::steered(pool, steering);
        };
        self.clock += 1;
        self.kept[index].used = self.clock;
        Sequence::begin(pool, &self.kept[index].snapshot, len, steering)
    }

    pub(crate) fn keep(
        &mut self,
        pool: &mut PagePool,
        tokens: &Arc<[u32]>,
        snapshot: Snapshot,
        origin: Origin,
    ) {
        self.clock += 1;
        let new = Kept { tokens: tokens.clone(), snapshot, origin, used: self.clock };
        let same =
            |kept: &&mut Kept| kept.tokens() == new.tokens() && kept.is_steered_as(&new.snapshot);
        if let Some(same) = self.kept.iter_mut().find(same) {
            same.used = new.used;
            return new.snapshot.release(pool);
        }
        let shorter = |kept: &Kept| origin != Origin::Prompt && kept.origin == origin;
        if let Some(index) = self.kept.iter().position(shorter) {
            self.kept.swap_remove(index).snapshot.release(pool);
        }
        if self.kept.len() >= MAX_KEPT {
            self.evict(pool);
        }
        self.kept.push(new);
    }
}

impl Engine {
    /// A sequence for `prompt` that begins with what is kept of it; its length says how much that is.
    pub fn begin(&mut self, prompt: &[u32]) -> Sequence {
        self.begin_steered(prompt, self.steering.clone())
    }

    /// The same for a sequence that is steered in this way, or not at all.
    pub fn begin_steered(&mut self, prompt: &[u32], steering: Option<Arc<Steering>>) -> Sequence {
        self.prefixes.begin(&mut self.pages, prompt, steering)
    }

    /// Keeps the first `len` positions of `sequence`, whose tokens are `tokens`, for later. `len` is rounded
    /// down to a block where the model has no recurrent layer; where it has one, it must be the
    /// sequence's length and a block boundary. False: nothing could be kept.
    pub fn keep(
        &mut self,
        sequence: &Sequence,
        tokens: &Arc<[u32]>,
        len: usize,
        origin: Origin,
    ) -> bool {
        let block = forebay_cpu::attention::BLOCK;
        let len = if self.pages.is_recurrent() { len } else { len / block * block };
        if tokens.len() < len {
            return false;
        }
        match sequence.snapshot(&mut self.pages, len) {
            Some(snapshot) => {
                self.prefixes.keep(&mut self.pages, tokens, snapshot, origin);
                true
            }
            None => false,
        }
    }

    /// Whether a beginning can be kept only at the very length of a sequence.
    pub fn keeps_exactly(&self) -> bool {
        self.pages.is_recurrent()
    }

    /// Positions of a block: beginnings end at multiples of it.
    pub fn block(&self) -> usize {
        forebay_cpu::attention::BLOCK
    }

    /// How many beginnings are kept.
    pub fn kept(&self) -> usize {
        self.prefixes.len()
    }

    /// Gives up all beginnings.
    pub fn forget(&mut self) {
        while self.prefixes.evict(&mut self.pages) {}
    }

    /// Makes room in a sequence, at the cost of beginnings where need be.
    pub(crate) fn reserve(&mut self, sequence: &mut Sequence, rows: usize) -> bool {
        loop {
            if sequence.reserve(&mut self.pages, rows) {
                return true;
            }
            if !self.prefixes.evict(&mut self.pages) {
                return false;
            }
        }
    }
}
