//! The backend: a whole pass in one go, a decode step as one graph.

use std::collections::HashMap;
use std::sync::Arc;

use forebay_program::{
    Backend, BackendError, ExpertMatrices, LOGIT_LINE, Ledger, LogitLines, MoeId, Op, Pass,
    PickLine, Program, Routing, WholePass,
};
use forebay_store::FileSet;

use crate::args::{ElementArgs, ElementOp, EmbedArgs, FloatJob, GatherArgs, GemvJob, Ptr};
use crate::driver::{Driver, GpuInfo, GraphId, Kernel, bytes_of, bytes_of_mut};
use crate::error::CudaError;
use crate::inputs::Counts;
use crate::lines::LinesAt;
use crate::load::{LoadError, load};
use crate::map::{CudaShape, FEW_ROWS, LOGIT_ROWS, Map, Model, PackMem, stacks};
use crate::run::{NormRows, Run};
use crate::steps::{Step, steps};

/// A GPU that was opened.
pub struct Gpu(pub(crate) Arc<dyn Driver>);

impl Gpu {
    /// Whether there is a GPU that could be used; loads nothing.
    pub fn probe() -> Result<GpuInfo, CudaError> {
        #[cfg(feature = "emulator")]
        if std::env::var_os(EMULATOR).is_some() {
            return Ok(Gpu::open()?.info().clone());
        }
        crate::driver::real::Real::probe()
    }

    /// Opens the first GPU and its kernels.
    pub fn open() -> Result<Gpu, CudaError> {
        #[cfg(feature = "emulator")]
        if let Some(path) = std::env::var_os(EMULATOR) {
            let emulated = crate::driver::emulated::Emulated::load(path.as_ref())?;
            return Ok(Gpu(Arc::new(emulated)));
        }
        Ok(Gpu(Arc::new(crate::driver::real::Real::open()?)))
    }

    /// What is known of it.
    pub fn info(&self) -> &GpuInfo {
        self.0.info()
    }

    /// Bytes per second of a large copy on the GPU, bytes read and bytes written both counted.
    pub fn copy_bandwidth(&self) -> Result<f64, CudaError> {
        self.0.copy_bandwidth()
    }
}

/// Names the emulator's library, in builds for tests.
#[cfg(feature = "emulator")]
const EMULATOR: &str = "FOREBAY_CUDA_EMULATOR";

/// The CUDA backend: trunk, experts, embedding and KV in GPU memory.
pub struct CudaBackend {
    driver: Arc<dyn Driver>,
    program: Arc<Program>,
    shape: CudaShape,
    steps: Vec<Step>,
    memory: Ptr,
    map: Map,
    graphs: HashMap<GraphKey, GraphId>,
    words: Vec<u32>,
    bytes_moved: u64,
    expert_bytes: Vec<u64>,
}

/// What a captured pass depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct GraphKey {
    rows: usize,
    spans: usize,
    blocks: usize,
    tiles: Vec<(usize, usize)>,
}

impl CudaBackend {
    /// Lines of GPU memory that [`CudaBackend::new`] will take; an error for what it cannot run.
    pub fn ledger(model: &Model<'_>, shape: &CudaShape) -> Result<Ledger, CudaError> {
        Ok(Map::new(model, shape, 0)?.ledger)
    }

    /// Allocates everything and loads the weights. `progress` is told (bytes read, bytes in all).
    pub fn new(
        gpu: &Gpu,
        program: Arc<Program>,
        model: &Model<'_>,
        shape: &CudaShape,
        files: &FileSet,
        threads: usize,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<CudaBackend, LoadError> {
        let driver = gpu.0.clone();
        let needed = Map::new(model, shape, 0)?.total;
        let info = driver.info();
        if needed > info.free_bytes {
            let (name, free) = (info.name.clone(), info.free_bytes);
            return Err(CudaError::Memory { name, needed, free }.into());
        }
        let memory = driver.alloc(needed)?;
        let map = Map::new(model, shape, memory)?;
        let backend = CudaBackend {
            driver,
            steps: steps(&program),
            shape: shape.clone(),
            memory,
            graphs: HashMap::new(),
            words: Vec::new(),
            bytes_moved: 0,
            expert_bytes: expert_bytes(&map, &program),
            map,
            program,
        };
        backend.load_weights(model, files, threads, progress)?;
        backend.load_vectors(files)?;
        backend.clear()?;
        Ok(backend)
    }

    fn load_weights(
        &self,
        model: &Model<'_>,
        files: &FileSet,
        threads: usize,
        progress: &mut dyn FnMut(u64, u64),
    ) -> Result<(), LoadError> {
        let placed = self.map.trunk.iter().chain(self.map.experts.iter().flatten());
        let placed = placed.chain(&self.map.embedding).copied();
        let work: Vec<_> = stacks(model).into_iter().zip(placed).collect();
        load(&*self.driver, files, &work, threads, progress)
    }

    fn load_vectors(&self, files: &FileSet) -> Result<(), LoadError> {
        let load = |id: usize| forebay_cpu::backend::load_vector(files, &self.program.vectors[id]);
        for (id, at) in self.map.vectors.iter().enumerate() {
            self.driver.write(*at, bytes_of(&load(id)?))?;
        }
        for (moe, to) in self.program.moes.iter().zip(&self.map.expert_biases) {
            for which in 0..3 {
                let mut all: Vec<f32> = Vec::new();
                for biases in &moe.biases {
                    all.extend(load(biases[which].0)?);
                }
                if !all.is_empty() {
                    self.driver.write(to[which], bytes_of(&all))?;
                }
            }
        }
        for (rope, at) in self.program.ropes.iter().zip(&self.map.inv_freq) {
            self.driver.write(*at, bytes_of(&rope.inv_freq))?;
        }
        Ok(())
    }

    /// Zeroes what is read before it is written: states, faults, and pages, whose unwritten places must be numbers.
    fn clear(&self) -> Result<(), CudaError> {
        for (r, at) in self.program.recurrent.iter().zip(&self.map.states) {
            let floats: usize = crate::map::state_floats(r).iter().sum();
            self.driver.enqueue_zero(*at, (floats * self.shape.states * 4) as u64)?;
        }
        let end = self.map.states.first().copied().unwrap_or(self.map.arena);
        if let Some(first) = self.map.kv.first() {
            self.driver.enqueue_zero(*first, end - first)?;
        }
        self.driver.enqueue_zero(self.map.fault, 4)?;
        self.driver.sync()
    }

    fn launcher<'a>(&'a self, rows: usize, counts: &'a Counts, blocks: usize) -> Run<'a> {
        Run {
            driver: &*self.driver,
            program: &self.program,
            shape: &self.shape,
            map: &self.map,
            inputs: &self.map.inputs[(rows > FEW_ROWS) as usize],
            rows,
            counts,
            blocks,
        }
    }

    fn body(&self, run: &Run<'_>) -> Result<(), CudaError> {
        let w = self.map.embedding.as_ref().unwrap_or(&self.map.trunk[self.program.head.weight.0]);
        let width = run.width(self.program.hidden);
        let args = EmbedArgs {
            w: w.args,
            tokens: run.inputs.tokens(),
            out: run.buffer(self.program.hidden),
            d: width as u32,
            pad: 0,
        };
        run.launch(Kernel::Embed, [width.div_ceil(256), run.rows, 1], 256, 0, args)?;
        let mut rest = &self.steps[..];
        while let Some((first, others)) = rest.split_first() {
            rest = match run.together(rest)? {
                0 => {
                    run.step(first)?;
                    others
                }
                n => &rest[n..],
            };
        }
        Ok(())
    }

    fn pass(&mut self, pass: &Pass<'_>, tokens: &[u32]) -> Result<(), CudaError> {
        let rows = pass.rows();
        let inputs = &self.map.inputs[(rows > FEW_ROWS) as usize];
        let counts = inputs.fill(pass, tokens, &mut self.words);
        self.driver.enqueue_write(inputs.base, bytes_of(&self.words))?;
        if rows > FEW_ROWS {
            return self.body(&self.launcher(rows, &counts, 0));
        }
        let blocks = captured_blocks(counts.blocks);
        #[cfg(feature = "profile")]
        if self.driver.profiles("") {
            return self.body(&self.launcher(rows, &counts, blocks));
        }
        let key = GraphKey { rows, spans: counts.spans, blocks, tiles: counts.tiles.clone() };
        if let Some(graph) = self.graphs.get(&key) {
            return self.driver.launch_graph(*graph);
        }
        self.driver.begin_capture()?;
        let captured = self.body(&self.launcher(rows, &counts, blocks));
        let graph = self.driver.end_capture();
        captured?;
        let graph = graph?;
        self.graphs.insert(key, graph);
        self.driver.launch_graph(graph)
    }

    /// Computes logits of rows.
    fn head(&mut self, rows: &[u32]) -> Result<(), CudaError> {
        let counts = Counts { spans: 0, tiles: Vec::new(), blocks: 0 };
        let run = self.launcher(rows.len(), &counts, 0);
        let program = &self.program;
        let head = program.head;
        let w = &self.map.trunk[head.weight.0];
        let d = w.args.cols as usize;
        let hidden = run.buffer(program.hidden);
        let src = match rows {
            [one] => hidden + 4 * u64::from(*one) * d as u64,
            _ => {
                // The rows' numbers lie in the logits' own memory, which is written after they are read.
                self.driver.enqueue_write(self.map.logits, bytes_of(rows))?;
                let (numbers, dst) = (self.map.logits, self.map.gathered);
                let args = GatherArgs { src: hidden, rows: numbers, dst, width: d as u32, pad: 0 };
                run.launch(Kernel::Gather, [d.div_ceil(256), rows.len(), 1], 256, 0, args)?;
                dst
            }
        };
        let pack = PackMem { row_codes: d as u64, row_meta: d as u64 / 2, ..self.map.head_pack };
        let packs = head.pack.map(|_| pack);
        let floats = if packs.is_none() { self.map.gathered } else { 0 };
        run.norm_rows(NormRows {
            rows: rows.len(),
            src,
            width: d,
            add: 0,
            norm: Some(head.norm),
            dst: floats,
            packs: packs.as_slice(),
        })?;
        match packs {
            Some(p) => {
                let job = GemvJob {
                    w: w.args,
                    out: self.map.logits,
                    stride: w.args.rows,
                    variant: w.variant,
                    ..Default::default()
                };
                let acts = crate::args::Acts {
                    codes: p.codes,
                    meta: p.meta,
                    row_codes: p.row_codes,
                    row_meta: p.row_meta,
                };
                run.products(&[job], acts, rows.len())?;
            }
            None => run.float(FloatJob {
                w: w.args,
                x: self.map.gathered,
                out: self.map.logits,
                x_stride: d as u32,
                stride: w.args.rows,
                divisor: 1,
                rows: rows.len() as u32,
                features: w.args.rows,
                ..Default::default()
            })?,
        }
        if let Some(cap) = head.softcap {
            let args = ElementArgs { x: self.map.logits, constant: cap, ..Default::default() };
            let n = rows.len() * w.args.rows as usize;
            run.element_at(ElementOp::Softcap, n, args)?;
        }
        let head = &self.map.trunk[head.weight.0];
        self.bytes_moved += head.row_bytes * head.args.rows as u64;
        Ok(())
    }

    /// Waits, and reads from `at`; says the router fault's word.
    fn read(&self, at: Ptr, out: &mut [u8]) -> Result<u32, CudaError> {
        #[cfg(feature = "profile")]
        self.driver.profiles("a pass with logits");
        let mut fault = [0; 4];
        self.driver.read_parts(&mut [(self.map.fault, &mut fault), (at, out)])?;
        Ok(u32::from_le_bytes(fault))
    }

    /// The largest and the sums of a row's lines; says the router fault's word.
    fn lines(&mut self, row: u32, t: f32, lines: &mut LogitLines) -> Result<u32, CudaError> {
        self.head(&[row])?;
        let vocab = self.map.trunk[self.program.head.weight.0].args.rows as usize;
        let (logits, at) = (self.map.logits, self.map.lines);
        let at = LinesAt::enqueue(&*self.driver, logits, vocab, t, at)?;
        let (from, n) = at.results();
        let mut bytes = vec![0; n];
        let fault = self.read(from, &mut bytes)?;
        at.parse(&bytes, lines);
        Ok(fault)
    }

    /// The error of a router whose fault's word is not 0.
    fn faultless(&self, fault: u32) -> Result<(), BackendError> {
        match fault {
            0 => Ok(()),
            n => {
                self.driver.enqueue_zero(self.map.fault, 4).map_err(device)?;
                Err(BackendError::RouterNan { layer: n as usize - 1 })
            }
        }
    }

    /// Bytes of weights that a pass reads from memory: of experts, as many as rows can have chosen.
    fn count_bytes(&mut self, rows: usize) {
        let head = self.program.head.weight.0;
        let trunk = self.map.trunk.iter().enumerate().filter(|(i, _)| *i != head);
        let trunk: u64 = trunk.map(|(_, w)| w).map(|w| w.row_bytes * w.args.rows as u64).sum();
        let moes = self.program.moes.iter().zip(&self.expert_bytes);
        let experts = moes.map(|(m, bytes)| (rows * m.top_k).min(m.n_experts) as u64 * bytes);
        self.bytes_moved += trunk + experts.sum::<u64>();
    }
}

impl Drop for CudaBackend {
    fn drop(&mut self) {
        // Nothing can be done about a failure here.
        let _ = self.driver.sync();
        self.driver.free(self.memory);
    }
}

/// Blocks of positions that a captured pass allows for: launches for more than there are cost little, a new graph costs
/// much. At most the next power of two.
fn captured_blocks(blocks: usize) -> usize {
    blocks.next_multiple_of((blocks.next_power_of_two() / 4).max(8))
}

/// Bytes of one expert of each routed layer.
fn expert_bytes(map: &Map, program: &Program) -> Vec<u64> {
    let bytes = |w: &crate::load::Placed| w.row_bytes * w.args.rows as u64;
    let layers = map.experts.iter().zip(&program.moes);
    layers.map(|(e, m)| e.iter().map(bytes).sum::<u64>() / m.n_experts as u64).collect()
}

fn device(e: CudaError) -> BackendError {
    BackendError::Device { message: e.to_string() }
}

impl WholePass for CudaBackend {
    fn pass(&mut self, pass: &Pass<'_>, tokens: &[u32]) -> Result<(), BackendError> {
        self.count_bytes(pass.rows());
        CudaBackend::pass(self, pass, tokens).map_err(device)
    }
}

impl Backend for CudaBackend {
    fn name(&self) -> &'static str {
        "cuda"
    }

    fn whole(&mut self) -> Option<&mut dyn WholePass> {
        Some(self)
    }

    fn tied_embedding(&self, _tokens: &[u32], _out: &mut [f32]) {
        unreachable!("a backend with whole passes embeds itself")
    }

    fn begin(&mut self, _pass: &Pass<'_>, _hidden: &[f32]) {
        unreachable!("a backend with whole passes is not driven by segments")
    }

    fn run(&mut self, _pass: &Pass<'_>, _ops: &[Op]) -> Result<(), BackendError> {
        unreachable!("a backend with whole passes is not driven by segments")
    }

    fn routing(&self, _moe: MoeId) -> &Routing {
        unreachable!("nothing is read back")
    }

    fn guessed(&self, _moe: MoeId) -> &[u16] {
        unreachable!("nothing is guessed where all is resident")
    }

    fn experts(&mut self, _moe: MoeId, _experts: &[ExpertMatrices<'_>]) {
        unreachable!("all experts are here")
    }

    fn logits(&mut self, rows: &[u32], out: &mut [f32]) -> Result<(), BackendError> {
        self.head(rows).map_err(device)?;
        let fault = self.read(self.map.logits, bytes_of_mut(out)).map_err(device)?;
        self.faultless(fault)
    }

    fn logit_lines(
        &mut self,
        row: u32,
        t: f32,
        lines: &mut LogitLines,
        pick: PickLine<'_>,
    ) -> Result<bool, BackendError> {
        let fault = self.lines(row, t, lines).map_err(device)?;
        self.faultless(fault)?;
        let vocab = self.map.trunk[self.program.head.weight.0].args.rows as usize;
        let from = pick(lines) * LOGIT_LINE;
        lines.line.resize(LOGIT_LINE.min(vocab - from), 0.0);
        let at = self.map.logits + 4 * from as u64;
        self.driver.read(at, bytes_of_mut(&mut lines.line)).map_err(device)?;
        Ok(true)
    }

    fn max_logit_rows(&self) -> usize {
        self.shape.max_rows.min(LOGIT_ROWS)
    }

    fn take_bytes_moved(&mut self) -> u64 {
        std::mem::take(&mut self.bytes_moved)
    }
}
