//! Opening a model: catalog, spec, program, plan, trunk, store.

use std::path::Path;
use std::sync::Arc;

use forebay_cpu::backend::CpuBackend;
use forebay_cpu::{Level, Pool};
use forebay_cuda::{CudaBackend, Gpu};
use forebay_files::{Catalog, Disk, FileAccess, FileEntry};
use forebay_models::ModelSpec;
use forebay_program::{Backend, Extras, LogitLines, Program, TapSet, lower_with};
use forebay_store::pressure::PressureGauge;
use forebay_store::{
    ExpertStore, FileSet, HugePages, IoOptions, LayerExperts, Policy, StoreOptions, StoreSnapshot,
    StoreSpec, memory, open_store,
};

use crate::capture::{self, Capture, CaptureRows, Captured};
use crate::device::{self, Place};
use crate::elastic::Governor;
use crate::error::EngineError;
use crate::lend::Lender;
use crate::options::{EngineOptions, MemoryLimit, ResidencyChoice};
use crate::pilot::{Pilot, PilotCounts, Prefetch};
use crate::plan::{MemoryPlan, PlanInput};
use crate::prefix::PrefixCache;
use crate::rows::RowReader;
use crate::speculate::setup::BlockFiles;
use crate::speculate::{Speculation, setup};
use crate::state::{PagePool, Sequence};
use crate::stats::Stats;
use crate::steer::file::Shape;
use crate::steer::{SteerVectors, Steering};
use crate::tap::RoutingTap;

/// A model as far as it is known before weights are loaded.
pub struct Opened {
    /// Tensors and description.
    pub catalog: Catalog,
    /// What the model is.
    pub spec: ModelSpec,
    /// Lowered.
    pub program: Arc<Program>,
    /// Its experts.
    pub store: StoreSpec,
    /// Choices.
    pub options: EngineOptions,
    /// Vectors that steer.
    pub steer: Arc<SteerVectors>,
    /// Places that are captured.
    pub(crate) captured: TapSet,
    /// A draft model.
    pub draft: Option<Box<Opened>>,
    /// A block drafter.
    pub block: Option<Box<BlockFiles>>,
}

impl Opened {
    /// Reads headers and the family; no weights.
    pub fn open(path: &Path, options: EngineOptions) -> Result<Opened, EngineError> {
        let catalog = Catalog::open(path)?;
        Opened::from_catalog(catalog, options)
    }

    /// The same for a catalog that is open.
    pub fn from_catalog(catalog: Catalog, options: EngineOptions) -> Result<Opened, EngineError> {
        Opened::from_catalog_with(&Disk, catalog, options)
    }

    /// The same where the catalog's files are elsewhere.
    pub fn from_catalog_with(
        access: &dyn FileAccess,
        catalog: Catalog,
        mut options: EngineOptions,
    ) -> Result<Opened, EngineError> {
        let spec = forebay_models::read_with(access, &catalog)?;
        setup::resolve(&mut options, &spec)?;
        let draft = setup::open_model(&options, &spec)?;
        let files = catalog.files.len() as u32;
        let block_files = setup::open_block(access, &mut options, &spec, files)?;
        let streams = matches!(options.residency, ResidencyChoice::Auto | ResidencyChoice::Stream);
        let pilot = streams && options.prefetch != Prefetch::Off;
        let shape = Shape { layers: spec.layers.len(), width: spec.hidden_size };
        let steer = Arc::new(SteerVectors::read(&options.steer, shape)?);
        let routed = |layer: usize| spec.layers[layer].ffn.routed.is_some();
        let captured = capture::taps(&options.capture, shape.layers, &routed)?;
        let mut taps = steer.taps();
        taps.extend(captured.iter());
        let extras = Extras { pilot, taps, ..setup::extras(&options, block_files.as_deref()) };
        let program = Arc::new(lower_with(&spec, options.precision(), extras));
        let block = spec.multi_token.iter().filter(|_| program.draft.is_some());
        let layers = spec.layers.iter().chain(block.map(|block| &block.layer));
        let layers = layers.enumerate().filter_map(|(layer, l)| {
            let routed = l.ffn.routed.as_ref()?;
            Some(LayerExperts { layer, experts: routed.experts.weights.clone() })
        });
        let store = StoreSpec { layers: layers.collect() };
        let block = block_files;
        Ok(Opened { catalog, spec, program, store, options, steer, captured, draft, block })
    }

    /// The budget in bytes.
    pub fn budget(&self) -> Result<u64, EngineError> {
        budget_bytes(self.options.memory)
    }

    /// The plan for the budget, or for the GPU where the model goes to one.
    pub fn plan(&self) -> Result<MemoryPlan, EngineError> {
        match device::choose(self)? {
            Place::Gpu(_, plan) => Ok(*plan),
            Place::Cpu(_) => self.plan_input().plan(self.budget()?),
        }
    }

    /// What plans are made from.
    pub fn plan_input(&self) -> PlanInput<'_> {
        PlanInput {
            spec: &self.spec,
            program: &self.program,
            store: &self.store,
            options: &self.options,
            tensors: self.catalog.tensors.len(),
            steer_bytes: self.steer.bytes(),
            draft: self.draft.as_deref(),
            block: self.block.as_deref(),
        }
    }
}

/// What a limit means on this machine, now.
pub fn budget_bytes(limit: MemoryLimit) -> Result<u64, EngineError> {
    let root = Path::new("/");
    let room = || {
        memory::usable_bytes(root).ok_or_else(|| EngineError::Refused {
            what: "finding out how much memory there is".into(),
            instead: "this system does not tell; give --memory a size, such as 4GiB".into(),
        })
    };
    Ok(match limit {
        MemoryLimit::Bytes(b) => b,
        // A tenth stays for the page cache and for whatever else runs.
        MemoryLimit::Auto => room()? / 10 * 9,
        MemoryLimit::Fraction(f) => {
            let limit = memory::container_memory(root).map(|c| c.limit);
            let ram = memory::host_available(root);
            let smaller = limit.into_iter().chain(ram).min().map_or_else(room, Ok)?;
            (smaller as f64 * f) as u64
        }
    })
}

/// A model that runs.
pub struct Engine {
    /// What the model is; the experts' addresses are with the store.
    pub spec: ModelSpec,
    /// Lowered.
    pub program: Arc<Program>,
    /// What the budget bought.
    pub plan: MemoryPlan,
    /// Counters; the store's are merged by [`Engine::stats`].
    pub(crate) stats: Stats,
    pub(crate) backend: Box<dyn Backend>,
    pub(crate) store: Option<Box<dyn ExpertStore>>,
    pub(crate) pages: PagePool,
    pub(crate) prefixes: PrefixCache,
    pub(crate) hidden: Vec<f32>,
    pub(crate) logits: Vec<f32>,
    pub(crate) lines: LogitLines,
    pub(crate) pilot: Pilot,
    pub(crate) taps: Vec<Box<dyn RoutingTap>>,
    pub(crate) steer: Arc<SteerVectors>,
    /// How sequences are steered of which nothing is said.
    pub(crate) steering: Option<Arc<Steering>>,
    pub(crate) capture: Option<Capture>,
    captured: TapSet,
    /// The drafter; boxed, as it is taken out while it works on the engine.
    pub(crate) speculation: Option<Box<Speculation>>,
    pub(crate) governor: Option<Governor>,
    pub(crate) elastic: ElasticShape,
    pub(crate) lender: Option<Lender>,
    files: Arc<FileSet>,
    embedding: Embedding,
    pub(crate) level: Level,
    gpu: Option<Gpu>,
    /// Why a GPU that is there was not taken.
    reason: Option<String>,
    pub(crate) numbers: Numbers,
}

/// What decides the bits of keys, values and states, besides the model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Numbers {
    pub precision: forebay_program::Precision,
    pub kv: forebay_cpu::attention::KvType,
}

/// What changing the budget needs to know.
pub(crate) struct ElasticShape {
    /// Bytes of a slot.
    pub slot_bytes: u64,
    /// Experts of all layers.
    pub n_experts: usize,
    /// How a pool is opened when resident experts give way to one.
    pub store: StoreOptions,
    /// How often the budget followed the system.
    pub adjustments: u64,
}

/// Where embedding rows come from.
enum Embedding {
    /// Read row by row from the file.
    File(RowReader),
    /// In memory with the head that is tied to it.
    Tied,
}

/// What stays of what was opened.
struct Known {
    spec: ModelSpec,
    program: Arc<Program>,
    options: EngineOptions,
    steer: Arc<SteerVectors>,
    captured: TapSet,
}

/// What computes, on the CPU or on a GPU, and what it reads.
struct Placed {
    plan: MemoryPlan,
    files: Arc<FileSet>,
    backend: Box<dyn Backend>,
    store: Option<Box<dyn ExpertStore>>,
    io: IoOptions,
    embedding: Embedding,
    gpu: Option<Gpu>,
    reason: Option<String>,
}

impl Engine {
    /// Loads the trunk and opens the store. `progress` is told (bytes read, bytes in all).
    pub fn load(opened: Opened, progress: &mut dyn FnMut(u64, u64)) -> Result<Engine, EngineError> {
        let reason = match device::choose(&opened)? {
            Place::Gpu(gpu, plan) => return Engine::load_device(opened, gpu, *plan, progress),
            Place::Cpu(reason) => reason,
        };
        let plan = opened.plan_input().plan(opened.budget()?)?;
        let pool = Arc::new(Pool::new(opened.options.threads()));
        Engine::load_on_cpu(opened, plan, pool, reason, progress)
    }

    /// Loads to memory, to be computed by the threads of `pool`.
    pub(crate) fn load_on_cpu(
        opened: Opened,
        plan: MemoryPlan,
        pool: Arc<Pool>,
        reason: Option<String>,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Engine, EngineError> {
        let Opened { catalog, mut spec, program, store: store_spec, options, .. } = opened;
        let Opened { steer, captured, draft, block, .. } = opened;
        drop_experts(&mut spec);
        let beside = block.iter().flat_map(|block| &block.files);
        let entries: Vec<FileEntry> = catalog.files.iter().chain(beside).cloned().collect();
        let mut files = FileSet::open(&entries, options.io)?;
        if let Some(also) = &options.also {
            files.add_copy(&catalog, &Catalog::open(also)?)?;
        }
        let files = Arc::new(files);
        drop(catalog);
        let io = IoOptions {
            engine: options.io_engine,
            depth: options.io_depth,
            huge_pages: HugePages::Advise,
            ..IoOptions::default()
        };
        let level = options.level.unwrap_or_else(Level::best);
        let backend = CpuBackend::new(
            program.clone(),
            &plan.shape,
            pool.clone(),
            level,
            &files,
            &io,
            progress,
        )?;
        let store_options = StoreOptions { io, policy: options.policy };
        let store = match plan.residency {
            Some(mode) => {
                Some(open_store(&store_spec, files.clone(), mode, store_options, progress)?)
            }
            None => None,
        };
        let embedding = match program.head.tied {
            true => Embedding::Tied,
            false => Embedding::File(RowReader::new(spec.embedding.clone())),
        };
        let speculate = options.clone();
        let (backend, gpu) = (Box::new(backend), None);
        let placed = Placed { plan, files, backend, store, io, embedding, gpu, reason };
        let known = Known { spec, program, options, steer, captured };
        let mut engine = Engine::assemble(known, placed);
        engine.speculation = setup::build(&engine, &speculate, (draft, block), &pool)?;
        engine.lend()?;
        Ok(engine)
    }

    /// Loads everything to the GPU.
    fn load_device(
        opened: Opened,
        gpu: Gpu,
        plan: MemoryPlan,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<Engine, EngineError> {
        let files = Arc::new(FileSet::open(&opened.catalog.files, opened.options.io)?);
        let shape = &plan.device.as_ref().expect("a plan for a GPU").shape;
        let threads = opened.options.threads();
        let backend = CudaBackend::new(
            &gpu,
            opened.program.clone(),
            &device::model(&opened),
            shape,
            &files,
            threads,
            progress,
        )?;
        let Opened { mut spec, program, options, steer, captured, .. } = opened;
        drop_experts(&mut spec);
        let placed = Placed {
            plan,
            files,
            backend: Box::new(backend),
            store: None,
            io: IoOptions::default(),
            embedding: Embedding::Tied,
            gpu: Some(gpu),
            reason: None,
        };
        Ok(Engine::assemble(Known { spec, program, options, steer, captured }, placed))
    }

    /// Everything that follows from what was loaded.
    fn assemble(known: Known, placed: Placed) -> Engine {
        let Known { spec, program, options, steer, captured } = known;
        let Placed { plan, files, backend, store, io, embedding, gpu, reason } = placed;
        let pages = PagePool::new(
            &program.kv_windows,
            &plan.shape.kv_pages[..program.kv_windows.len()],
            plan.shape.states,
            options.snapshots > 0,
        );
        let experts = store.as_ref().map(|store| store.spec());
        let elastic = ElasticShape {
            slot_bytes: experts.map_or(0, |spec| spec.slot_bytes()),
            n_experts: experts.map_or(0, |spec| spec.n_experts_total()),
            store: StoreOptions { io, policy: options.policy },
            adjustments: 0,
        };
        let pilot = match store {
            Some(_) => Pilot::new(options.prefetch, program.moes.len()),
            None => Pilot::new(Prefetch::Off, 0),
        };
        let governed = options.elastic && gpu.is_none();
        let as_asked = options.slots_total.or(options.slots_per_layer).is_some();
        let lends = store.is_some() && !as_asked;
        Engine {
            lender: lends.then(|| Lender::new(&program, options.kv())),
            governor: governed.then(|| Governor::new(PressureGauge::default(), plan.budget)),
            level: options.level.unwrap_or_else(Level::best),
            numbers: Numbers { precision: options.precision(), kv: options.kv() },
            spec,
            program,
            plan,
            stats: Stats::default(),
            backend,
            store,
            pages,
            prefixes: PrefixCache::default(),
            hidden: Vec::new(),
            logits: Vec::new(),
            lines: LogitLines::default(),
            pilot,
            taps: Vec::new(),
            steering: steer.all(),
            steer,
            capture: None,
            captured,
            speculation: None,
            elastic,
            files,
            embedding,
            gpu,
            reason,
        }
    }

    /// Name of what computes, as in `--backend`.
    pub fn backend_name(&self) -> &'static str {
        self.backend.name()
    }

    /// Bytes per second of a large copy on the GPU, read and written bytes counted; none without one.
    pub fn device_bandwidth(&self) -> Option<f64> {
        self.gpu.as_ref()?.copy_bandwidth().ok()
    }

    /// An empty sequence, steered as [`steer_by_default`](Self::steer_by_default) says.
    pub fn new_sequence(&self) -> Sequence {
        Sequence::steered(&self.pages, self.steering.clone())
    }

    /// Vectors that can steer sequences.
    pub fn steer_vectors(&self) -> &Arc<SteerVectors> {
        &self.steer
    }

    /// How sequences are steered of which nothing else is said: by all vectors, unless told here.
    pub fn steer_by_default(&mut self, steering: Option<Arc<Steering>>) {
        self.steering = steering;
    }

    /// Captures the points of the options from now on, into a safetensors file; what was captured before is given up.
    pub fn capture(&mut self, out: &Path, rows: CaptureRows) -> Result<(), EngineError> {
        self.capture = None;
        let wanted = self.captured.clone();
        self.capture = Some(Capture::begin(out, rows, wanted, &self.program)?);
        Ok(())
    }

    /// Ends the capture and writes its file. None: nothing was captured.
    pub fn finish_capture(&mut self) -> Result<Option<Captured>, EngineError> {
        self.capture.take().map(Capture::finish).transpose()
    }

    /// Pages of the classes that a sequence takes at most while it grows to `positions`. Sequences whose sums stay
    /// within [`pages_for_all`](Self::pages_for_all) never lack one.
    pub fn pages_for(&self, positions: usize) -> Vec<usize> {
        self.pages.pages_for(positions.min(self.plan.context), self.plan.shape.max_rows)
    }

    /// Pages of the classes that the plan has for sequences.
    pub fn pages_for_all(&self) -> Vec<usize> {
        self.plan.sequence_pages.clone()
    }

    /// Gives a sequence's pages back.
    pub fn release(&mut self, sequence: &mut Sequence) {
        sequence.release(&mut self.pages);
    }

    /// All counters since opening.
    pub fn stats(&self) -> Stats {
        let store = self.store.as_ref().map(|s| s.stats()).unwrap_or_default();
        Stats { store, profile: self.backend.profile(), ..self.stats.clone() }
    }

    /// From here on [`Engine::stats`] says how long each operation takes; refused where the backend cannot tell.
    pub fn profile(&mut self) -> Result<(), EngineError> {
        match self.backend.set_profiling(true) {
            true => Ok(()),
            false => Err(EngineError::Refused {
                what: format!("a profile on the backend {}", self.backend.name()),
                instead: "its operations are not timed one by one; choose --backend cpu".into(),
            }),
        }
    }

    /// Adds a tap on the choice of experts.
    pub fn tap(&mut self, tap: Box<dyn RoutingTap>) {
        self.taps.push(tap);
    }

    /// How well guesses at experts do, per routed layer, and what is thought of them.
    pub fn pilot(&self) -> (&[PilotCounts], &'static str) {
        (self.pilot.counts(), self.pilot.verdict())
    }

    /// Which expert has to go when a slot is needed.
    pub fn policy(&self) -> Policy {
        self.elastic.store.policy
    }

    /// How often the budget followed the system since opening.
    pub fn budget_adjustments(&self) -> u64 {
        self.elastic.adjustments
    }

    /// Which experts are in memory.
    pub fn snapshot(&self) -> StoreSnapshot {
        self.store.as_ref().map(|s| s.snapshot()).unwrap_or_default()
    }

    /// Experts that were used, as (routed layer, expert), hottest first.
    pub fn hot_experts(&self) -> Vec<(usize, u16)> {
        self.store.as_ref().map(|s| s.hot()).unwrap_or_default()
    }

    /// Reads these experts first, while nothing else is read.
    pub fn warm(&mut self, experts: &[(usize, u16)]) {
        if let Some(store) = &mut self.store {
            store.warm(experts);
        }
    }

    /// Things said once about how files are read.
    pub fn notes(&self) -> Vec<String> {
        let mut notes = self.files.notes();
        if let Some(reason) = &self.reason {
            notes.push(format!("computing on the CPU: {reason}"));
        }
        notes
    }

    /// Vector width in use.
    pub fn level(&self) -> Level {
        self.level
    }

    /// Size of a typical expert read in bytes, and how many are in flight: what a raw measurement of the
    /// disk has to be compared at.
    pub fn read_shape(&self) -> (usize, usize) {
        let stats = self.store.as_ref().map(|s| s.stats()).unwrap_or_default();
        let block = stats.bytes_read.checked_div(stats.reads).unwrap_or(1 << 20);
        (block as usize, stats.queue_depth.max(1))
    }

    /// Bytes of a routed expert on disk, the mean of all; 0 without experts.
    pub fn expert_bytes(&self) -> u64 {
        let Some(store) = &self.store else { return 0 };
        let spec = store.spec();
        spec.total_bytes().checked_div(spec.n_experts_total() as u64).unwrap_or(0)
    }

    /// The files of the model.
    pub fn files(&self) -> &Arc<FileSet> {
        &self.files
    }

    /// Fills `hidden` `[tokens, d]` from the embedding.
    pub(crate) fn embed(&mut self, tokens: &[u32]) -> Result<(), EngineError> {
        let d = self.spec.hidden_size;
        self.hidden.resize(tokens.len() * d, 0.0);
        match &mut self.embedding {
            Embedding::Tied => self.backend.tied_embedding(tokens, &mut self.hidden),
            Embedding::File(reader) => {
                reader.check_unchanged(&self.files)?;
                reader.read_all(&self.files, tokens, &mut self.hidden)?;
            }
        }
        Ok(())
    }
}

/// Descriptions of experts, which are with the backend or the store.
fn drop_experts(spec: &mut ModelSpec) {
    let block = spec.multi_token.iter_mut().map(|block| &mut block.layer);
    for layer in spec.layers.iter_mut().chain(block) {
        if let Some(routed) = &mut layer.ffn.routed {
            routed.experts.weights = Vec::new();
            routed.experts.biases = Vec::new();
        }
    }
}
