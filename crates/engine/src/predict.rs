//! What a budget would give: hits, bytes and tokens per second, before a weight is loaded.
//!
//! Hits come from replaying choices of experts through the cache's own bookkeeping
//! (`forebay_store::replay`). The choices are those of a recorded trace, or drawn: from the router's
//! own bias and the lengths of its rows, or uniformly ([`Prior`]). Drawn tokens are independent of each
//! other; those of real text are not, and hit more often. Speeds come from what was measured
//! ([`Speeds`]).
//!
//! The model of a decoded token: products at the speed of memory, plus what has to be waited for. While
//! a layer's missing experts are read, those that are there are computed; so a layer takes the longer
//! of the two, then the last missing expert is computed. A prompt's chunk reads what its layers' unions
//! miss, and computes meanwhile.

use forebay_cpu::backend::read_vector;
use forebay_files::Catalog;
use forebay_models::{ExpertWeights, ModelSpec, RoutedBranch, WeightRef};
use forebay_program::Program;
use forebay_quant::Format;
use forebay_store::{FileSet, Policy, Residency, StoreError, StoreSpec, replay_each};

use crate::error::EngineError;
use crate::plan::MemoryPlan;
use crate::rows::RowReader;
use crate::sampler::uniform;

/// Where choices of experts come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Prior {
    /// Recorded: (routed layer, distinct experts) of every pass of one row.
    Trace(Vec<(usize, Vec<u16>)>),
    /// Drawn from the routers: per routed layer and expert the bias and the length of the row.
    Router(Vec<Vec<(f32, f32)>>),
    /// Every expert alike.
    Uniform,
}

impl Prior {
    /// As shown.
    pub fn name(&self) -> &'static str {
        match self {
            Prior::Trace(_) => "trace",
            Prior::Router(_) => "router",
            Prior::Uniform => "uniform",
        }
    }

    /// Reads the routers of a model that is here. The input of a router is normed: its elements have
    /// a mean square of 1 before the norm's weight, so a logit's deviation is the length of the row.
    ///
    /// # Errors
    /// The weights cannot be read.
    pub fn from_routers(catalog: &Catalog, spec: &ModelSpec) -> Result<Prior, EngineError> {
        let files = FileSet::open(&catalog.files, forebay_store::IoMode::Buffered)?;
        let routed = spec.layers.iter().filter_map(|l| l.ffn.routed.as_ref());
        let layers = routed.map(|r| router_rows(&files, r));
        Ok(Prior::Router(layers.collect::<Result<_, _>>()?))
    }
}

fn router_rows(files: &FileSet, r: &RoutedBranch) -> Result<Vec<(f32, f32)>, EngineError> {
    let weight = &r.router.weight.weight;
    let bias = match &r.router.weight.bias {
        Some(bias) => read_vector(files, bias)?,
        None => vec![0.0; weight.rows],
    };
    let norm = r.router.input_norm.as_ref().unwrap_or(&r.norm);
    let gain = match &norm.weight {
        Some(w) => read_vector(files, w)?,
        None => vec![1.0; weight.cols],
    };
    let plus = if norm.plus_one { 1.0 } else { 0.0 };
    let mut reader = RowReader::new(weight.clone());
    let mut row = vec![0.0; weight.cols];
    let mut out = Vec::with_capacity(weight.rows);
    for (e, bias) in bias.into_iter().enumerate() {
        reader.read(files, e as u32, &mut row)?;
        let squares = row.iter().zip(&gain).map(|(w, g)| (w * (g + plus) * norm.factor).powi(2));
        out.push((bias, squares.sum::<f32>().sqrt()));
    }
    Ok(out)
}

/// What the machine does.
#[derive(Clone, Debug, PartialEq)]
pub struct Speeds {
    /// Bytes per second of random reads at the size and depth of expert reads; none where experts are
    /// not read from a disk that is here.
    pub disk: Option<f64>,
    /// Weight bytes per second of products with one row, per format.
    pub one_row: Vec<(Format, f64)>,
    /// Weight bytes times rows per second of products with many rows, per format.
    pub many_rows: Vec<(Format, f64)>,
}

/// What a plan would give.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Of the experts of decoded tokens; none without routed experts.
    pub hit_rate: Option<f64>,
    /// Read per decoded token.
    pub disk_bytes_per_token: f64,
    /// Decoded.
    pub decode_tokens_per_s: Option<f64>,
    /// Of a prompt as long as a chunk.
    pub prefill_tokens_per_s: Option<f64>,
}

/// Drawn tokens: the first quarter fills the pool and is not counted.
const TOKENS: usize = 400;

/// Operations that are no products, as a share of the products' time; measured on full shapes.
const OTHER_DECODE: f64 = 0.08;
const OTHER_PREFILL: f64 = 0.25;

/// Predicts for plans of one model.
pub struct Predictor<'a> {
    /// The model.
    pub spec: &'a ModelSpec,
    /// Its program.
    pub program: &'a Program,
    /// Its experts.
    pub store: &'a StoreSpec,
    /// Who has to go.
    pub policy: Policy,
    /// The machine.
    pub speeds: &'a Speeds,
}

impl Predictor<'_> {
    /// What `plan` would give, if experts are chosen as `passes` are.
    ///
    /// # Errors
    /// A trace that is not of this model.
    pub fn predict(
        &self,
        plan: &MemoryPlan,
        passes: &[(usize, Vec<u16>)],
    ) -> Result<Prediction, EngineError> {
        let trunk = self.trunk_seconds();
        let layers = self.store.layers.len();
        if layers == 0 {
            let prefill = self.prefill_seconds(plan.chunk, 0.0);
            return Ok(Prediction {
                hit_rate: None,
                disk_bytes_per_token: 0.0,
                decode_tokens_per_s: trunk.map(|s| 1.0 / s),
                prefill_tokens_per_s: prefill.map(|s| plan.chunk as f64 / s),
            });
        }
        let misses = match plan.residency {
            Some(Residency::Stream { slots }) => self.misses(passes, slots)?,
            _ => vec![0; passes.len()],
        };
        let settled = passes.len() / 4..;
        let chosen: usize = passes[settled.clone()].iter().map(|(_, e)| e.len()).sum();
        let missed: usize = misses[settled.clone()].iter().sum();
        let tokens = passes[settled.clone()].len() as f64 / layers as f64;
        let bytes = self.expert_bytes();
        let seconds = trunk.zip(self.expert_seconds()).and_then(|(trunk, expert)| {
            let mut seconds = 0.0;
            for ((_, experts), &missing) in
                passes[settled.clone()].iter().zip(&misses[settled.clone()])
            {
                let there = (experts.len() - missing) as f64 * expert;
                seconds += match missing {
                    0 => there,
                    n => (n as f64 * bytes / self.speeds.disk?).max(there) + expert,
                };
            }
            Some(trunk + seconds / tokens)
        });
        let union = self.union(plan.chunk, passes);
        let slots_per_layer = plan.slots as f64 / layers as f64;
        let read = match plan.residency {
            Some(Residency::Stream { .. }) => {
                (union - slots_per_layer.min(union)) * layers as f64 * bytes
            }
            _ => 0.0,
        };
        let prefill = self.prefill_seconds(plan.chunk, read);
        Ok(Prediction {
            hit_rate: (chosen > 0).then(|| 1.0 - missed as f64 / chosen as f64),
            disk_bytes_per_token: missed as f64 * bytes / tokens.max(1e-9),
            decode_tokens_per_s: seconds.map(|s| 1.0 / s),
            prefill_tokens_per_s: prefill.map(|s| plan.chunk as f64 / s),
        })
    }

    /// Passes of one row, layer by layer, as a prior has them.
    pub fn passes(&self, prior: &Prior) -> Vec<(usize, Vec<u16>)> {
        if let Prior::Trace(passes) = prior {
            return passes.clone();
        }
        let mut out = Vec::with_capacity(TOKENS * self.program.moes.len());
        for token in 0..TOKENS {
            for (layer, moe) in self.program.moes.iter().enumerate() {
                let normal = |e: usize| {
                    let draw = (token * self.program.moes.len() + layer) * moe.n_experts + e;
                    // Box and Muller.
                    let (a, b) = (uniform(3, draw as u64, 0), uniform(3, draw as u64, 1));
                    (-2.0 * a.max(1e-300).ln()).sqrt() * (std::f64::consts::TAU * b).cos()
                };
                let logit = |e: usize| match prior {
                    Prior::Router(rows) => {
                        let (bias, length) = rows[layer][e];
                        bias as f64 + length as f64 * normal(e)
                    }
                    _ => normal(e),
                };
                let logits: Vec<f64> = (0..moe.n_experts).map(logit).collect();
                let mut ids: Vec<u16> = (0..moe.n_experts as u16).collect();
                ids.sort_by(|&a, &b| logits[b as usize].total_cmp(&logits[a as usize]));
                ids.truncate(moe.top_k);
                out.push((layer, ids));
            }
        }
        out
    }

    /// Misses of every pass.
    fn misses(&self, passes: &[(usize, Vec<u16>)], slots: usize) -> Result<Vec<usize>, StoreError> {
        let experts: Vec<usize> = self.store.layers.iter().map(|l| l.experts.len()).collect();
        let mut misses = Vec::with_capacity(passes.len());
        replay_each(
            &experts,
            passes.iter().map(|(l, e)| (*l, e)),
            self.policy,
            slots,
            &mut |_, _, m| {
                misses.push(m as usize);
            },
        )?;
        Ok(misses)
    }

    /// Distinct experts that so many rows choose in a layer, on average.
    fn union(&self, rows: usize, passes: &[(usize, Vec<u16>)]) -> f64 {
        let layers = self.store.layers.len();
        let mut counts: Vec<Vec<u32>> =
            self.store.layers.iter().map(|l| vec![0; l.experts.len()]).collect();
        let mut tokens = vec![0u32; layers];
        for (layer, experts) in passes {
            tokens[*layer] += 1;
            experts.iter().for_each(|&e| counts[*layer][e as usize] += 1);
        }
        let of_layer = counts.iter().zip(&tokens).map(|(counts, &tokens)| {
            let share = |n: u32| n as f64 / tokens.max(1) as f64;
            counts.iter().map(|&n| 1.0 - (1.0 - share(n)).powi(rows as i32)).sum::<f64>()
        });
        of_layer.sum::<f64>() / layers as f64
    }

    fn expert_bytes(&self) -> f64 {
        let experts = self.store.layers.iter().flat_map(|l| &l.experts);
        let bytes: u64 = experts.flat_map(matrices).map(matrix_bytes).sum();
        bytes as f64 / self.store.n_experts_total() as f64
    }

    /// Seconds of one expert with one row.
    fn expert_seconds(&self) -> Option<f64> {
        let expert = self.store.layers.first()?.experts.first()?;
        let parts = matrices(expert).into_iter();
        let seconds =
            parts.map(|m| Some(matrix_bytes(m) as f64 / self.rate(&self.speeds.one_row, m)?));
        seconds.sum::<Option<f64>>().map(|s| s * (1.0 + OTHER_DECODE))
    }

    /// Seconds of everything but experts, with one row.
    fn trunk_seconds(&self) -> Option<f64> {
        let weights = self.program.weights.iter();
        let seconds =
            weights.map(|w| Some(matrix_bytes(w) as f64 / self.rate(&self.speeds.one_row, w)?));
        seconds.sum::<Option<f64>>().map(|s| s * (1.0 + OTHER_DECODE))
    }

    /// Seconds of a chunk of so many rows that reads so many bytes.
    fn prefill_seconds(&self, rows: usize, read: f64) -> Option<f64> {
        let head = &self.program.weights[self.program.head.weight.0];
        let body = self.program.weights.iter().filter(|w| *w != head);
        let many = |w: &WeightRef, rows: f64| {
            Some(matrix_bytes(w) as f64 * rows / self.rate(&self.speeds.many_rows, w)?)
        };
        let trunk: f64 = body.map(|w| many(w, rows as f64)).sum::<Option<f64>>()?;
        let mut experts = 0.0;
        for (moe, layer) in self.program.moes.iter().zip(&self.store.layers) {
            let first = layer.experts.first()?;
            let part = matrices(first).into_iter().map(|m| many(m, (rows * moe.top_k) as f64));
            experts += part.sum::<Option<f64>>()?;
        }
        let compute = (trunk + experts) * (1.0 + OTHER_PREFILL);
        let disk = match read > 0.0 {
            true => read / self.speeds.disk?,
            false => 0.0,
        };
        Some(compute.max(disk) + compute.min(disk) / 4.0)
    }

    fn rate(&self, rates: &[(Format, f64)], w: &WeightRef) -> Option<f64> {
        rates.iter().find(|(format, _)| *format == w.format).map(|(_, rate)| *rate)
    }
}

/// Formats of a model's products.
pub fn formats(program: &Program, store: &StoreSpec) -> Vec<Format> {
    let experts = store.layers.iter().flat_map(|l| l.experts.first()).flat_map(matrices);
    let mut formats = Vec::new();
    for w in program.weights.iter().chain(experts) {
        if !formats.contains(&w.format) {
            formats.push(w.format);
        }
    }
    formats
}

fn matrices(e: &ExpertWeights) -> [&WeightRef; 3] {
    [&e.gate, &e.up, &e.down]
}

fn matrix_bytes(w: &WeightRef) -> u64 {
    w.format.matrix_bytes(w.rows, w.cols).unwrap_or(0)
}
