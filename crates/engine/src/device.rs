//! Whether a model goes to the GPU, and what it takes there.
//!
//! Everything or nothing: trunk, experts, embedding, keys and values lie in GPU memory, and the host keeps a description and
//! the tokenizer. `auto` takes the GPU when there is one, it has kernels for all of the model and room for it, and no option
//! asks for what only the CPU has; otherwise the CPU, and says why where a GPU was found.

use forebay_cpu::backend::CpuShape;
use forebay_cuda::{CudaBackend, CudaError, CudaShape, Gpu, LoadError, Model};
use forebay_program::ledger::{Ledger, human};

use crate::engine::Opened;
use crate::error::EngineError;
use crate::options::{BackendChoice, EngineOptions, ResidencyChoice};
use crate::plan::{MemoryPlan, PlanInput, sequence_memory, sequence_pages};
use crate::speculate::DrafterChoice;

/// Rows of a prefill chunk that are tried, largest first.
const CHUNKS: [usize; 8] = [2048, 1024, 512, 256, 128, 64, 16, 1];

/// GPU memory that stays free for the driver and for launches.
const RESERVE_BYTES: u64 = 256 << 20;

/// Memory of the process that the GPU's driver takes.
const DRIVER_BYTES: u64 = 512 << 20;

/// What a model takes on a GPU.
#[derive(Clone, Debug)]
pub struct DevicePlan {
    /// As the driver names it.
    pub name: String,
    /// Line by line.
    pub ledger: Ledger,
    /// Bytes that were free.
    pub free_bytes: u64,
    /// What the backend allocates.
    pub shape: CudaShape,
}

/// Where a model is computed.
pub(crate) enum Place {
    /// On the CPU; with a reason where a GPU was found and not taken.
    Cpu(Option<String>),
    /// On a GPU.
    Gpu(Gpu, Box<MemoryPlan>),
}

/// Decides, as the options say.
pub(crate) fn choose(opened: &Opened) -> Result<Place, EngineError> {
    let o = &opened.options;
    match o.backend {
        BackendChoice::Cpu => Ok(Place::Cpu(None)),
        BackendChoice::Cuda => {
            if o.speculate.drafter != DrafterChoice::Off {
                return Err(EngineError::Refused {
                    what: format!("--speculate {} with --backend cuda", o.speculate.drafter.name()),
                    instead: "on the GPU rejected tokens cannot be taken back; leave it out, or compute with --backend cpu".into(),
                });
            }
            if let Some(what) = cpu_only(o) {
                return Err(EngineError::Refused {
                    what: format!("{what} with --backend cuda"),
                    instead: "on the GPU a whole model is resident and runs unwatched; leave it out, or compute with --backend cpu".into(),
                });
            }
            let gpu = Gpu::open()?;
            let plan = plan(opened, &gpu)?;
            Ok(Place::Gpu(gpu, Box::new(plan)))
        }
        BackendChoice::Auto => {
            if cpu_only(o).is_some() || Gpu::probe().is_err() {
                return Ok(Place::Cpu(None));
            }
            let opened_gpu = Gpu::open().map_err(EngineError::from);
            match opened_gpu.and_then(|gpu| plan(opened, &gpu).map(|plan| (gpu, plan))) {
                Ok((gpu, plan)) => Ok(Place::Gpu(gpu, Box::new(plan))),
                Err(e @ EngineError::Cuda(_)) => Ok(Place::Cpu(Some(e.to_string()))),
                Err(e) => Err(e),
            }
        }
    }
}

/// Whether a GPU may compute, before anything is known of the model's size.
pub(crate) fn is_likely(o: &EngineOptions) -> bool {
    match o.backend {
        BackendChoice::Cpu => false,
        BackendChoice::Cuda => true,
        BackendChoice::Auto => cpu_only(o).is_none() && Gpu::probe().is_ok(),
    }
}

/// An option that only the CPU has.
fn cpu_only(o: &EngineOptions) -> Option<&'static str> {
    match o.residency {
        ResidencyChoice::Stream => return Some("--residency stream"),
        ResidencyChoice::Mapped => return Some("--residency mapped"),
        _ => {}
    }
    if o.slots_per_layer.is_some() || o.slots_total.is_some() {
        return Some("--slots");
    }
    if !o.steer.is_empty() {
        return Some("--steer");
    }
    if !o.capture.is_empty() {
        return Some("--capture");
    }
    if !matches!(o.speculate.drafter, DrafterChoice::Off | DrafterChoice::Auto) {
        return Some("--speculate");
    }
    o.level.map(|_| "--simd")
}

/// The parts of a model that go to the GPU.
pub(crate) fn model(opened: &Opened) -> Model<'_> {
    Model { program: &opened.program, store: &opened.store, embedding: &opened.spec.embedding }
}

/// The plan with the largest chunk that fits.
fn plan(opened: &Opened, gpu: &Gpu) -> Result<MemoryPlan, EngineError> {
    let o = &opened.options;
    let input = opened.plan_input();
    let context = input.context()?;
    let info = gpu.info();
    let room = info.free_bytes.saturating_sub(RESERVE_BYTES);
    let chunks = o.chunk.map_or(CHUNKS.to_vec(), |c| vec![c.max(1)]);
    let mut smallest = 0;
    for chunk in chunks {
        let shape = shape(opened, chunk.min(context), context);
        let ledger = CudaBackend::ledger(&model(opened), &shape)?;
        if ledger.total() > room {
            smallest = ledger.total();
            continue;
        }
        let host = host_ledger(&input, &shape);
        let budget = opened.budget()?;
        if host.total() > budget {
            return Err(EngineError::BudgetTooSmall {
                budget,
                minimum: host.total().next_multiple_of(1 << 20),
                advice: "--backend cuda (memory of the process, not of the GPU)".into(),
            });
        }
        return Ok(MemoryPlan {
            minimum: host.total(),
            ledger: host,
            budget,
            residency: None,
            slots: 0,
            chunk: shape.max_rows,
            context,
            contexts: o.positions(context).len(),
            sequence_pages: sequence_pages(&opened.program, o, shape.max_rows, context),
            shape: CpuShape {
                max_rows: shape.max_rows,
                kv_type: shape.kv_type,
                kv_pages: shape.kv_pages.clone(),
                states: shape.states,
                tape_rows: 0,
            },
            device: Some(DevicePlan {
                name: info.name.clone(),
                ledger,
                free_bytes: info.free_bytes,
                shape,
            }),
        });
    }
    let needed = smallest + RESERVE_BYTES;
    let (name, free) = (info.name.clone(), info.free_bytes);
    Err(LoadError::from(CudaError::Memory { name, needed, free }).into())
}

fn shape(opened: &Opened, chunk: usize, context: usize) -> CudaShape {
    let o = &opened.options;
    let program = &opened.program;
    let (kv_pages, states) = sequence_memory(program, o, chunk, context);
    CudaShape {
        max_rows: chunk,
        kv_type: o.kv(),
        kv_pages,
        states,
        sequences: o.sequences,
        context,
    }
}

/// Memory of the process.
fn host_ledger(input: &PlanInput<'_>, shape: &CudaShape) -> Ledger {
    let mut ledger = Ledger::default();
    let rows = shape.max_rows.min(16) as u64;
    ledger.add("logits", rows * input.spec.vocab_size as u64 * 8);
    ledger.add("GPU driver", DRIVER_BYTES);
    input.common(&mut ledger);
    ledger
}

impl DevicePlan {
    /// One line for people.
    pub fn summary(&self, chunk: usize, context: usize) -> String {
        format!(
            "{}: {} of {} free, all resident, chunks of {chunk}, context {context}",
            self.name,
            human(self.ledger.total()),
            human(self.free_bytes),
        )
    }
}
