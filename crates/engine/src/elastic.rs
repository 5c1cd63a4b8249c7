//! The budget while running: lowered and raised by the caller, and by itself when the system is short.
//!
//! What can give way is the pool of expert slots; everything else (trunk, keys and values, scratch) is
//! as large as the first plan made it. Answers do not change with the pool.

use std::time::{Duration, Instant};

use forebay_program::ledger::human;
use forebay_store::pressure::{Pressure, PressureGauge};
use forebay_store::{Residency, open_store};

use crate::engine::Engine;
use crate::error::EngineError;
use crate::plan::{EXPERTS_LINE, RESERVE_LINE, SLOTS_LINE, reserve_bytes};

/// Time between looks at the system.
const LOOK: Duration = Duration::from_secs(1);
/// Percent of time waiting for memory that makes the budget give way.
const SHORT: f64 = 10.0;
/// Percent below which the system is at ease.
const EASE: f64 = 1.0;
/// How long the system has to be at ease before the budget grows again.
const CALM: Duration = Duration::from_secs(30);
/// Part of the budget that goes, and comes back, in one step.
const STEP: u64 = 8;

/// Watches the system.
#[derive(Debug)]
pub(crate) struct Governor {
    gauge: PressureGauge,
    /// What was asked for: never more than this.
    asked: u64,
    looked: Instant,
    /// Since when the system is at ease; none while it is not.
    calm: Option<Instant>,
}

/// What to do about the budget.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Stay,
    To(u64),
}

impl Governor {
    pub(crate) fn new(gauge: PressureGauge, asked: u64) -> Governor {
        Governor { gauge, asked, looked: Instant::now(), calm: None }
    }

    /// The caller's wish.
    fn ask(&mut self, budget: u64) {
        self.asked = budget;
    }

    fn step(&mut self, now: Instant, budget: u64, seen: Pressure) -> Step {
        if let Some(limit) = seen.limit.filter(|&limit| limit < budget) {
            self.calm = None;
            return Step::To(limit);
        }
        let Some(waiting) = seen.some_avg10 else { return Step::Stay };
        if waiting >= SHORT {
            self.calm = None;
            return Step::To(budget - budget / STEP);
        }
        if waiting > EASE {
            self.calm = None;
            return Step::Stay;
        }
        let since = *self.calm.get_or_insert(now);
        if budget >= self.asked || now.duration_since(since) < CALM {
            return Step::Stay;
        }
        self.calm = Some(now);
        let most = seen.limit.map_or(self.asked, |limit| limit.min(self.asked));
        Step::To((budget + budget / STEP).min(most))
    }
}

impl Engine {
    /// Changes the budget. Returns the slots of the pool: memory of those that a pass still holds comes
    /// back when it ends.
    ///
    /// A model whose experts are all resident is streamed from then on, if the new budget does not hold
    /// them.
    ///
    /// # Errors
    /// The budget cannot hold one expert beside everything else; nothing changed then. A model without
    /// experts, or with mapped ones, has nothing to give.
    pub fn set_budget(&mut self, budget: u64) -> Result<usize, EngineError> {
        let slots = self.resize_to(budget)?;
        if let Some(governor) = &mut self.governor {
            governor.ask(budget);
        }
        Ok(slots)
    }

    fn resize_to(&mut self, budget: u64) -> Result<usize, EngineError> {
        let elastic = [SLOTS_LINE, EXPERTS_LINE, RESERVE_LINE];
        let items = self.plan.ledger.items.iter();
        let fixed: u64 = items.filter(|i| !elastic.contains(&i.what)).map(|i| i.bytes).sum();
        let reserve = reserve_bytes(budget);
        let left = budget.saturating_sub(fixed + reserve);
        let resident = self.plan.residency == Some(Residency::Resident);
        if !(resident && self.plan.ledger.get(EXPERTS_LINE) <= left) {
            let slot = self.elastic.slot_bytes;
            let slots = left.checked_div(slot).unwrap_or(0) as usize;
            if slots == 0 && self.elastic.n_experts > 0 {
                return Err(EngineError::BudgetTooSmall {
                    budget,
                    minimum: self.plan.minimum.max(fixed + slot + reserve),
                    advice: "one expert buffer beside what is loaded already".into(),
                });
            }
            self.pool_of(slots)?;
        }
        self.plan.ledger.items.retain(|i| i.what != RESERVE_LINE);
        self.plan.ledger.add(RESERVE_LINE, reserve);
        self.plan.budget = budget;
        Ok(self.plan.slots)
    }

    /// Changes the size of the pool; resident experts are streamed from then on. Returns the slots.
    ///
    /// # Errors
    /// No slots at all; a model without experts, or with mapped ones, which have no pool.
    pub fn set_slots(&mut self, slots: usize) -> Result<usize, EngineError> {
        self.lender = None;
        self.pool_of(slots)
    }

    /// Changes the slots that the plan has for the pool.
    fn pool_of(&mut self, slots: usize) -> Result<usize, EngineError> {
        let refused = |instead: &str| {
            let what = "changing the memory of experts".into();
            Err(EngineError::Refused { what, instead: instead.into() })
        };
        let Some(store) = &mut self.store else {
            return refused("this model has no routed experts: nothing can give way");
        };
        let slots = slots.min(self.elastic.n_experts);
        if slots == 0 {
            return refused("at least one expert must fit");
        }
        match self.plan.residency {
            Some(Residency::Stream { .. }) => {
                store.resize(slots + self.lender.as_ref().map_or(0, |lender| lender.slots))?;
            }
            Some(Residency::Resident) => {
                // The resident copy goes before the pool comes.
                let spec = store.spec().clone();
                self.store = None;
                let mode = Residency::Stream { slots };
                let files = self.files().clone();
                let store = open_store(&spec, files, mode, self.elastic.store, &mut |_, _| {})?;
                self.store = Some(store);
            }
            _ => return refused("mapped experts are the system's to page; use --residency stream"),
        }
        self.plan.residency = Some(Residency::Stream { slots });
        self.plan.slots = slots;
        self.plan.ledger.items.retain(|i| ![SLOTS_LINE, EXPERTS_LINE].contains(&i.what));
        self.plan.ledger.add(SLOTS_LINE, slots as u64 * self.elastic.slot_bytes);
        Ok(slots)
    }

    /// Looks at the system now and then, and gives way.
    pub(crate) fn govern(&mut self) {
        let now = Instant::now();
        let Some(governor) = &mut self.governor else { return };
        let streams = matches!(self.plan.residency, Some(Residency::Stream { .. }));
        if !streams || now.duration_since(governor.looked) < LOOK {
            return;
        }
        governor.looked = now;
        let seen = governor.gauge.read();
        let Step::To(budget) = governor.step(now, self.plan.budget, seen) else { return };
        let before = self.plan.budget;
        match self.resize_to(budget) {
            Ok(slots) => {
                let (from, to) = (human(before), human(budget));
                tracing::info!(from, to, slots, ?seen, "the memory budget follows the system");
                self.elastic.adjustments += 1;
            }
            // There is nothing left to give.
            Err(error) => tracing::debug!(%error, "the memory budget stays"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn seen(waiting: f64) -> Pressure {
        Pressure { some_avg10: Some(waiting), limit: None }
    }

    #[test]
    fn gives_way_under_pressure_and_comes_back_when_it_is_over() {
        let mut g = Governor::new(PressureGauge::default(), 8 * GIB);
        let start = Instant::now();
        assert_eq!(g.step(start, 8 * GIB, seen(40.0)), Step::To(7 * GIB));
        assert_eq!(g.step(start, 7 * GIB, seen(5.0)), Step::Stay);
        assert_eq!(g.step(start, 7 * GIB, seen(0.0)), Step::Stay);
        assert_eq!(g.step(start + CALM, 7 * GIB, seen(0.0)), Step::To(7 * GIB + 7 * GIB / 8));
        // One step per calm time, and never beyond what was asked for.
        assert_eq!(g.step(start + CALM, 7 * GIB, seen(0.0)), Step::Stay);
        assert_eq!(g.step(start + 2 * CALM, 8 * GIB - 1, seen(0.0)), Step::To(8 * GIB));
        assert_eq!(g.step(start + 9 * CALM, 8 * GIB, seen(0.0)), Step::Stay);
    }

    #[test]
    fn a_lowered_limit_of_the_container_is_obeyed() {
        let mut g = Governor::new(PressureGauge::default(), 8 * GIB);
        let limited = Pressure { some_avg10: None, limit: Some(3 * GIB) };
        assert_eq!(g.step(Instant::now(), 8 * GIB, limited), Step::To(3 * GIB));
        assert_eq!(g.step(Instant::now(), 3 * GIB, limited), Step::Stay);
    }
}
