//! Memory of keys and values that nobody has written yet, lent to the pool of expert slots.
//!
//! The plan holds pages for all sequences at their longest. The system gives memory to a page when it is first
//! written, and pages are taken lowest number first, so what lies above the highest page ever taken takes none. The pool has
//! slots of it until then, and gives them back before a pass that writes further. Together they never take more than
//! both lines of the ledger say. A page that was written once keeps its memory, so what is lent only shrinks.
//!
//! A pool whose size was asked for in slots stays at that.

use forebay_cpu::attention::{KvLayout, KvType};
use forebay_program::Program;
use forebay_store::{Residency, StoreError};

use crate::engine::Engine;

/// What the system may give a layer's pages besides those that are written: it deals in huge pages where it likes.
const HUGE_PAGE: u64 = 2 << 20;

/// What can be lent, and is.
#[derive(Debug)]
pub(crate) struct Lender {
    /// Bytes of a page, all layers of its class together.
    page_bytes: Vec<u64>,
    /// Never lent.
    kept: u64,
    /// Slots that the pool has besides the plan's.
    pub(crate) slots: usize,
}

impl Lender {
    pub(crate) fn new(program: &Program, kv: KvType) -> Lender {
        let mut page_bytes = vec![0; program.kv_windows.len()];
        // A draft block's pages are of a class behind these: they are no sequence's, and not lent.
        let classes = program.kv_windows.len();
        for layer in program.kv_layers.iter().filter(|layer| layer.class < classes) {
            let layout = KvLayout::new(layer.n_kv_heads, layer.head_dim, kv);
            page_bytes[layer.class] += layout.page_bytes() as u64;
        }
        let kept = program.kv_layers.len() as u64 * HUGE_PAGE;
        Lender { page_bytes, kept, slots: 0 }
    }

    /// Slots that so many pages of the classes are worth.
    fn worth(&self, unwritten: &[usize], slot_bytes: u64) -> usize {
        let bytes: u64 = self.page_bytes.iter().zip(unwritten).map(|(b, &n)| b * n as u64).sum();
        bytes.saturating_sub(self.kept).checked_div(slot_bytes).unwrap_or(0) as usize
    }
}

impl Engine {
    /// Lets the pool have what keys and values do not use, and takes back what they are about to. Called with the
    /// pages of the next pass taken, and none of them written.
    pub(crate) fn lend(&mut self) -> Result<(), StoreError> {
        let streams = matches!(self.plan.residency, Some(Residency::Stream { .. }));
        let Some(lender) = self.lender.as_mut().filter(|_| streams) else { return Ok(()) };
        let slots = lender.worth(&self.pages.unwritten_pages(), self.elastic.slot_bytes);
        let Some(store) = self.store.as_mut().filter(|_| slots != lender.slots) else {
            return Ok(());
        };
        let grows = slots > std::mem::replace(&mut lender.slots, slots);
        match store.resize(self.plan.slots + slots) {
            // The system has not as much; the plan's own slots are there.
            Err(_) if grows => Ok(()),
            result => result.map(|_| ()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lent_that_is_kept_or_written() {
        let lender = Lender { page_bytes: vec![10, 20], kept: 50, slots: 0 };
        for (unwritten, slots) in
            [([0, 0], 0), ([5, 0], 0), ([5, 1], 0), ([5, 5], 1), ([100, 0], 9)]
        {
            assert_eq!(lender.worth(&unwritten, 100), slots, "{unwritten:?}");
        }
        assert_eq!(lender.worth(&[100, 100], 0), 0);
    }
}
