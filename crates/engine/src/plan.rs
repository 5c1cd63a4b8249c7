//! What a memory budget buys: residency, slots, chunk and context, with the ledger that proves it.
//!
//! Everything is computed before a byte of weights is read. The plan is a function of the model's
//! shape, the options and the budget.

use forebay_cpu::attention::BLOCK;
use forebay_cpu::backend::{CpuBackend, CpuBytes, CpuShape};
use forebay_models::ModelSpec;
use forebay_program::Program;
use forebay_program::ledger::{Ledger, human};
use forebay_store::{Residency, StoreSpec};

use crate::device::DevicePlan;
use crate::engine::Opened;
use crate::error::EngineError;
use crate::options::{Contexts, EngineOptions, ResidencyChoice};
use crate::speculate::setup::BlockFiles;
use crate::speculate::{DrafterChoice, MOST_TOKENS, setup};
use crate::state::{pages_per_sequence, pages_per_snapshot, state_slots};

const MIB: u64 = 1 << 20;

/// The program's own code and data, measured as anonymous memory of an idle process and rounded up.
const PROCESS_BYTES: u64 = 12 * MIB;

/// Stacks of compute threads that those of readers count as: there may be more of them, but small ones.
const IO_THREADS: usize = 4;

/// Memory that a description of the model takes per tensor or expert matrix: names, shapes, extents.
const BYTES_PER_TENSOR: u64 = 1024;

/// Context when none is asked for and memory is short.
const DEFAULT_CONTEXT: usize = 4096;

/// Rows of a prefill chunk that are tried, largest first.
const CHUNKS: [usize; 13] = [4096, 2048, 1024, 512, 256, 128, 64, 32, 16, 8, 4, 2, 1];

/// Most rows of a chunk where no experts are: more rows would not be quicker.
const DENSE_CHUNK: usize = 512;

/// Rows up to which a larger chunk is worth many slots.
const SMALL_CHUNK: usize = 128;

/// Contexts that are tried when none is asked for, if they cost next to nothing.
const LONGER_CONTEXTS: [usize; 3] = [32_768, 16_384, 8192];

/// Line of the expert pool.
pub(crate) const SLOTS_LINE: &str = "expert slots";
/// Line of keys and values.
const KV_LINE: &str = "keys and values";
/// Line of what drafts tokens ahead.
pub const DRAFTER_LINE: &str = "drafter";
/// Line of resident experts.
pub(crate) const EXPERTS_LINE: &str = "experts";
/// Line of what the system takes.
pub(crate) const RESERVE_LINE: &str = "kernel and cache reserve";

/// Line of steering vectors.
const STEER_LINE: &str = "steering vectors";
/// Line of the buffers of a capture.
const CAPTURE_LINE: &str = "capture";

/// What kernel memory and page cache of a container get: `max(64 MiB, 3%)`.
pub fn reserve_bytes(budget: u64) -> u64 {
    (64 * MIB).max(budget / 100 * 3)
}

/// A plan that fits its budget.
#[derive(Clone, Debug)]
pub struct MemoryPlan {
    /// Line by line.
    pub ledger: Ledger,
    /// Budget in bytes.
    pub budget: u64,
    /// Smallest budget that would work with the same context and KV type.
    pub minimum: u64,
    /// Where experts live; none for a model without experts.
    pub residency: Option<Residency>,
    /// Expert buffers in the pool (stream mode).
    pub slots: usize,
    /// Most rows of a pass over a prompt. A pass that checks drafts may have more: `shape.max_rows`.
    pub chunk: usize,
    /// Positions of a sequence.
    pub context: usize,
    /// Whole contexts that all sequences have room for together; where needs are known, contexts as long as needed.
    pub contexts: usize,
    /// Pages of each class of windows that sequences have together.
    pub sequence_pages: Vec<usize>,
    /// What the backend allocates.
    pub shape: CpuShape,
    /// What lies on a GPU, when one computes; then the other lines are the process's own.
    pub device: Option<DevicePlan>,
}

/// What a plan is made from.
pub struct PlanInput<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// Its program.
    pub program: &'a Program,
    /// Its experts.
    pub store: &'a StoreSpec,
    /// Choices.
    pub options: &'a EngineOptions,
    /// Tensors in the checkpoint.
    pub tensors: usize,
    /// Bytes of steering vectors.
    pub steer_bytes: u64,
    /// A draft model.
    pub draft: Option<&'a Opened>,
    /// A block drafter.
    pub block: Option<&'a BlockFiles>,
}

impl PlanInput<'_> {
    /// The best plan within `budget`.
    pub fn plan(&self, budget: u64) -> Result<MemoryPlan, EngineError> {
        if self.options.contexts == Contexts::Fitting {
            return self.fitting(budget);
        }
        let context = self.context()?;
        let Some(base) = self.plan_with(budget, context)? else {
            let kv = self.options.kv();
            let bytes = self.fixed(1, context).0.get(KV_LINE);
            let advice = match self.options.contexts() {
                1 => format!(
                    "{context} tokens of context, whose {kv:?} keys and values take {bytes} bytes; a shorter \
                     --context or a smaller --kv lowers it"
                ),
                n => format!(
                    "{n} times {context} tokens of context, whose {kv:?} keys and values take {bytes} bytes; a \
                     smaller --parallel or --contexts, a shorter --context or a smaller --kv lowers it"
                ),
            };
            let drafter = match &self.options.speculate.drafter {
                DrafterChoice::Off => String::new(),
                drafter => {
                    let alone = self.draft.map(|draft| human(draft.draft_bytes(context)));
                    let alone =
                        alone.map_or(String::new(), |n| format!(", the draft model takes {n}"));
                    format!("; so does --speculate off in place of {}{alone}", drafter.name())
                }
            };
            let advice = advice + &drafter;
            let minimum = self.minimum_as_asked(context);
            return Err(EngineError::BudgetTooSmall { budget, minimum, advice });
        };
        if self.options.context.is_some() {
            return Ok(base);
        }
        for longer in LONGER_CONTEXTS.into_iter().filter(|&c| c <= self.spec.context_length) {
            if let Some(plan) = self.plan_with(budget, longer)?.filter(|p| p.costs_little(&base)) {
                return Ok(MemoryPlan { minimum: base.minimum, ..plan });
            }
        }
        Ok(base)
    }

    /// The plan with as much room for contexts as leaves experts most of what they have with room for one.
    fn fitting(&self, budget: u64) -> Result<MemoryPlan, EngineError> {
        let with = |contexts: usize, context: Option<usize>| {
            let contexts = Contexts::Exactly(contexts);
            let options = EngineOptions { contexts, context, ..self.options.clone() };
            PlanInput { options: &options, ..*self }.plan(budget)
        };
        let base = with(1, self.options.context)?;
        let halves = |n: &usize| (*n > 2).then(|| n.div_ceil(2));
        for contexts in std::iter::successors(Some(self.options.sequences), halves) {
            if contexts > 1
                && let Ok(plan) = with(contexts, Some(base.context))
                && plan.leaves_most(&base)
            {
                return Ok(MemoryPlan { minimum: base.minimum, ..plan });
            }
        }
        Ok(base)
    }

    /// The best plan with so many tokens of context; none: the budget is too small.
    fn plan_with(&self, budget: u64, context: usize) -> Result<Option<MemoryPlan>, EngineError> {
        let minimum = self.minimum_as_asked(context);
        let slot = self.store.slot_bytes();
        let routed = !self.store.layers.is_empty();
        let chunks: Vec<usize> = match (self.options.chunk, routed) {
            (Some(chunk), _) => vec![chunk.max(1)],
            (None, true) => CHUNKS.to_vec(),
            (None, false) => CHUNKS.into_iter().filter(|&c| c <= DENSE_CHUNK).collect(),
        };
        let left = |fixed: &Ledger| budget.checked_sub(fixed.total() + reserve_bytes(budget));
        // What is read for a step should serve all sequences, so chunks begin with a row for each.
        let a_row_each = self.options.sequences.next_power_of_two();
        let smallest = self.fixed(a_row_each.min(chunks[0]), context).0;
        // Experts that can all be resident are not streamed for the sake of a larger chunk.
        let some_chunk = chunks.iter().find(|&&c| c <= DENSE_CHUNK).unwrap_or(&chunks[0]);
        let keep_resident = match left(&self.fixed(*some_chunk, context).0) {
            Some(left) => matches!(self.residency(left)?, Some(Some(Residency::Resident))),
            None => false,
        };
        for &chunk in &chunks {
            let (fixed, shape) = self.fixed(chunk, context);
            // Scratch may take an eighth of what experts could have; a quarter as long as chunks are so
            // small that prompts would read most experts again and again.
            let part = if chunk <= SMALL_CHUNK { 4 } else { 8 };
            let more = fixed.total().saturating_sub(smallest.total());
            let modest = more <= left(&smallest).unwrap_or(0) / part;
            let is_last = Some(&chunk) == chunks.last();
            let taken = !routed || modest || is_last || chunk <= a_row_each;
            let Some(left) = left(&fixed).filter(|_| taken) else {
                continue;
            };
            let Some(residency) = self.residency(left)? else { continue };
            if keep_resident && residency != Some(Residency::Resident) {
                continue;
            }
            let mut ledger = fixed;
            let mut slots = 0;
            match residency {
                Some(Residency::Stream { slots: n }) => {
                    slots = n;
                    ledger.add(SLOTS_LINE, n as u64 * slot);
                }
                Some(Residency::Resident) => ledger.add(EXPERTS_LINE, self.store.resident_bytes()),
                _ => {}
            }
            ledger.add(RESERVE_LINE, reserve_bytes(budget));
            return Ok(Some(MemoryPlan {
                ledger,
                budget,
                minimum,
                residency,
                slots,
                chunk: chunk.min(self.most_rows(context)),
                context,
                contexts: self.options.positions(context).len(),
                sequence_pages: sequence_pages(self.program, self.options, shape.max_rows, context),
                shape,
                device: None,
            }));
        }
        Ok(None)
    }

    /// Context in tokens.
    pub(crate) fn context(&self) -> Result<usize, EngineError> {
        let longest = self.spec.context_length;
        match self.options.context {
            Some(0) => Err(EngineError::Refused {
                what: "a context of 0 tokens".into(),
                instead: "give --context at least 1".into(),
            }),
            Some(c) if c > longest => Err(EngineError::Refused {
                what: format!("a context of {c} tokens"),
                instead: format!("the model was made for {longest}; give --context at most that"),
            }),
            Some(c) => Ok(c),
            None => Ok(longest.min(DEFAULT_CONTEXT)),
        }
    }

    /// Where experts go with `left` bytes for them. Outer none: they do not fit.
    fn residency(&self, left: u64) -> Result<Option<Option<Residency>>, EngineError> {
        if self.store.layers.is_empty() {
            return match self.options.residency {
                ResidencyChoice::Stream => Err(EngineError::Refused {
                    what: "--residency stream".into(),
                    instead: "this model has no routed experts; leave it at auto".into(),
                }),
                _ => Ok(Some(None)),
            };
        }
        let o = self.options;
        let all = self.store.n_experts_total();
        let fit = (left / self.store.slot_bytes()) as usize;
        let asked = self.slots_asked();
        let stream = || {
            let slots = asked.unwrap_or(fit.min(all));
            (slots >= 1 && slots <= fit).then_some(Some(Residency::Stream { slots }))
        };
        let resident = (self.store.resident_bytes() <= left).then_some(Some(Residency::Resident));
        Ok(match o.residency {
            ResidencyChoice::Stream => stream(),
            ResidencyChoice::Mapped => Some(Some(Residency::Mapped)),
            ResidencyChoice::Resident => resident,
            ResidencyChoice::Auto if asked.is_some() => stream(),
            ResidencyChoice::Auto => resident.or_else(stream),
        })
    }

    /// Slots of the pool that the options name; never more than there are experts.
    fn slots_asked(&self) -> Option<usize> {
        let o = self.options;
        let layers = self.store.layers.len();
        let asked = o.slots_total.or(o.slots_per_layer.map(|n| n.saturating_mul(layers)));
        asked.map(|n| n.min(self.store.n_experts_total()))
    }

    /// Rows that a pass can have: those of all contexts.
    fn most_rows(&self, context: usize) -> usize {
        self.options.positions(context).into_iter().fold(0, usize::saturating_add)
    }

    /// All lines but experts and reserve.
    fn fixed(&self, chunk: usize, context: usize) -> (Ledger, CpuShape) {
        let chunk = chunk.min(self.most_rows(context));
        let o = self.options;
        // However small chunks are, there is room for a pass over drafts, and for a block of masks.
        let block_rows = self.block.map_or(0, |block| block.drafter.block_size);
        let max_rows = chunk.max(o.speculate.tape_rows().min(context)).max(block_rows);
        let (mut kv_pages, states) = sequence_memory(self.program, o, max_rows, context);
        // What drafts follows one sequence; a block of masks comes behind it.
        let block = self.program.block_draft.as_ref().map(|_| MOST_TOKENS + 1);
        let beyond = self.program.draft.as_ref().map(|_| 0).or(block);
        kv_pages.extend(beyond.map(|rows| (context + rows).div_ceil(BLOCK)));
        let tape_rows = o.speculate.tape_rows().min(max_rows);
        let shape = CpuShape { max_rows, kv_type: o.kv(), kv_pages, states, tape_rows };
        let CpuBytes { trunk, vectors, kv, state, scratch, draft } =
            CpuBackend::bytes(self.program, &shape);
        let host = self.host_bytes(max_rows);
        let mut ledger = Ledger::default();
        ledger.add("trunk", trunk + vectors);
        ledger.add(KV_LINE, kv);
        ledger.add("recurrent state", state);
        ledger.add("scratch", scratch + host);
        let drafter = setup::host_bytes(o, self.spec, self.draft, max_rows, context);
        ledger.add(DRAFTER_LINE, draft + drafter);
        self.common(&mut ledger);
        (ledger, shape)
    }

    /// Lines that do not depend on what computes.
    pub(crate) fn common(&self, ledger: &mut Ledger) {
        let o = self.options;
        let threads = o.threads() + IO_THREADS;
        ledger.add("tokenizer", o.caller_bytes);
        ledger.add(STEER_LINE, self.steer_bytes);
        if !o.capture.is_empty() {
            ledger.add(CAPTURE_LINE, crate::capture::CAPTURE_BYTES);
        }
        o.caller_lines.iter().for_each(|&(what, bytes)| ledger.add(what, bytes));
        ledger.add("description of the model", self.description_bytes());
        // Half a stack at most is touched; the rest is address space.
        ledger.add("threads", threads as u64 * forebay_cpu::pool::STACK_BYTES as u64 / 2);
        ledger.add("program", PROCESS_BYTES);
    }

    /// Rows of the stream and of logits outside of the backend.
    pub(crate) fn host_bytes(&self, chunk: usize) -> u64 {
        let (d, vocab) = (self.spec.hidden_size as u64, self.spec.vocab_size as u64);
        chunk as u64 * d * 4 + 16.min(chunk) as u64 * vocab * 8
    }

    /// Names, shapes and extents.
    pub(crate) fn description_bytes(&self) -> u64 {
        let matrices = self.store.n_experts_total() * 3 + self.tensors;
        matrices as u64 * BYTES_PER_TENSOR
    }

    /// Smallest total with one expert buffer and one row at a time.
    pub fn minimum(&self, context: usize) -> u64 {
        self.minimum_with(1, context, 1)
    }

    /// Smallest total with the chunk and the slots that were asked for.
    fn minimum_as_asked(&self, context: usize) -> u64 {
        let o = self.options;
        let slots = self.slots_asked().unwrap_or(1);
        self.minimum_with(o.chunk.unwrap_or(1).max(1), context, slots.max(1))
    }

    fn minimum_with(&self, chunk: usize, context: usize, slots: usize) -> u64 {
        let experts = match (self.store.layers.is_empty(), self.options.residency) {
            (true, _) | (_, ResidencyChoice::Mapped) => 0,
            (_, ResidencyChoice::Resident) => self.store.resident_bytes(),
            _ => self.store.slot_bytes() * slots as u64,
        };
        let need = self.fixed(chunk, context).0.total() + experts;
        // The reserve is a share of the budget itself.
        let by_share = (need as f64 / 0.97).ceil() as u64 + 100;
        (need + 64 * MIB).max(by_share).next_multiple_of(MIB)
    }
}

/// Pages of each class of windows, and recurrent states, that the options' contexts and snapshots take.
pub(crate) fn sequence_memory(
    program: &Program,
    o: &EngineOptions,
    chunk: usize,
    context: usize,
) -> (Vec<usize>, usize) {
    let mut pages = sequence_pages(program, o, chunk, context);
    for (pages, window) in pages.iter_mut().zip(&program.kv_windows) {
        *pages += pages_per_snapshot(*window, context) * o.snapshots;
    }
    let states = match program.recurrent.is_empty() {
        true => 0,
        false => state_slots(o.sequences, o.snapshots),
    };
    (pages, states)
}

/// Pages of each class of windows that the options' contexts take.
pub(crate) fn sequence_pages(
    program: &Program,
    o: &EngineOptions,
    chunk: usize,
    context: usize,
) -> Vec<usize> {
    let positions = o.positions(context);
    let of_window = |w: &Option<usize>| {
        let pages = |&p: &usize| pages_per_sequence(*w, p, chunk, o.snapshots > 0);
        positions.iter().map(pages).sum()
    };
    program.kv_windows.iter().map(of_window).collect()
}

impl MemoryPlan {
    /// Whether this plan, for a longer context, gives up next to nothing of another.
    fn costs_little(&self, other: &MemoryPlan) -> bool {
        let experts = match (self.residency, other.residency) {
            (Some(Residency::Stream { slots }), Some(Residency::Stream { slots: had })) => {
                slots * 16 >= had * 15
            }
            (mine, others) => mine == others,
        };
        experts && self.chunk * 2 >= other.chunk && self.ledger.get(KV_LINE) <= self.budget / 8
    }

    /// Whether this plan, for more contexts, leaves experts most of what they have in another.
    fn leaves_most(&self, other: &MemoryPlan) -> bool {
        match (self.residency, other.residency) {
            (Some(Residency::Stream { slots }), Some(Residency::Stream { slots: had })) => {
                slots * 5 >= had * 4
            }
            (mine, others) => mine == others,
        }
    }

    /// One line for people.
    pub fn summary(&self) -> String {
        if let Some(device) = &self.device {
            return device.summary(self.chunk, self.context);
        }
        let experts = match self.residency {
            None => "no experts".to_string(),
            Some(Residency::Stream { slots }) => format!("{slots} expert slots, streamed"),
            Some(Residency::Mapped) => "experts mapped".to_string(),
            Some(Residency::Resident) => "experts resident".to_string(),
            Some(other) => format!("experts {other:?}"),
        };
        format!(
            "budget {}: {experts}, chunks of {}, context {}",
            human(self.budget),
            self.chunk,
            self.context
        )
    }
}
