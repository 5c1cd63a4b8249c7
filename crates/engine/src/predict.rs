//! What a budget would give: hits, bytes and tokens per second, before a weight is loaded.
//!
//! Hits come from replaying choices of experts through the cache's own bookkeeping
//! (`forebay_store::replay`). The choices are those of a recorded trace, or drawn: from the router's
//! own bias and the lengths of its rows, or uniformly ([`Prior`]). Drawn tokens are independent of each
//! other; those of real text are not, and hit more often. Speeds come from what was measured
//! ([`Speeds`]).
//!
//! The model of a decoded token: the products of the program, each timed in its own shape beside those it runs
//! with, its other operations at the time of a small one, and what has to be waited for. While
//! a layer's missing experts are read, those that are there are computed; so a layer takes the longer
//! of the two, then the last missing expert is computed. A prompt's chunk reads what its layers' unions
//! miss, and computes meanwhile.

use forebay_cpu::backend::read_vector;
use forebay_cpu::probe::{Probe, Shape};
use forebay_files::Catalog;
use forebay_models::{ExpertWeights, ModelSpec, RoutedBranch, WeightRef};
use forebay_program::{Moe, Op, Program};
use forebay_quant::Format;
use forebay_store::{FileSet, Policy, Residency, StoreError, StoreSpec, replay_each};

use crate::error::EngineError;
use crate::plan::MemoryPlan;
use crate::rows::RowReader;
use crate::sampler::uniform;

/// What a pass chose in a routed layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// The routed layer.
    pub layer: usize,
    /// Rows of the pass: one when decoding.
    pub rows: usize,
    /// Distinct experts.
    pub experts: Vec<u16>,
}

/// Where choices of experts come from.
#[derive(Clone, Debug, PartialEq)]
pub enum Prior {
    /// Recorded.
    Trace(Vec<Routed>),
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
    /// Seconds of a program's products with one row, for lists that run at once.
    pub products: Vec<(Vec<Shape>, f64)>,
    /// Weight bytes per second of the quickest of them.
    pub one_row: Option<f64>,
    /// Weight bytes times rows per second of products with many rows, per format.
    pub many_rows: Vec<(Format, f64)>,
    /// Seconds of an operation that is no product, with one row.
    pub small: f64,
}

impl Speeds {
    /// Times what a program does.
    pub fn measure(probe: &Probe<'_>, program: &Program, store: &StoreSpec) -> Speeds {
        let mut products: Vec<(Vec<Shape>, f64)> = Vec::new();
        for shapes in lists(program, store) {
            if !products.iter().any(|(known, _)| *known == shapes) {
                let seconds = probe.one_row(&shapes);
                products.push((shapes, seconds));
            }
        }
        let bytes = |s: &Shape| s.format.matrix_bytes(s.rows, s.cols).unwrap_or(0) as f64;
        let rates = products.iter().map(|(list, s)| list.iter().map(bytes).sum::<f64>() / s);
        let many = formats(program, store).into_iter().map(|f| (f, probe.many_rows(f)));
        Speeds {
            disk: None,
            one_row: rates.reduce(f64::max),
            many_rows: many.collect(),
            small: probe.small(program.buffers[program.hidden.0].width),
            products,
        }
    }

    /// Of measurements of the same program at different moments, the median of every figure: what another program does
    /// for a second must not decide what is predicted. None without a measurement.
    pub fn median(rounds: &[Speeds]) -> Option<Speeds> {
        let first = rounds.first()?;
        let over =
            |figure: &dyn Fn(&Speeds) -> Option<f64>| middle(rounds.iter().filter_map(figure));
        Some(Speeds {
            disk: over(&|r| r.disk),
            one_row: over(&|r| r.one_row),
            small: over(&|r| Some(r.small))?,
            products: (first.products.iter())
                .map(|(list, s)| (list.clone(), over(&|r| Some(r.seconds(list))).unwrap_or(*s)))
                .collect(),
            many_rows: (first.many_rows.iter())
                .map(|&(f, rate)| (f, over(&|r| r.rate(f)).unwrap_or(rate)))
                .collect(),
        })
    }

    fn rate(&self, format: Format) -> Option<f64> {
        self.many_rows.iter().find(|(f, _)| *f == format).map(|(_, rate)| *rate)
    }

    fn seconds(&self, shapes: &[Shape]) -> f64 {
        let found = self.products.iter().find(|(known, _)| known == shapes);
        found.map_or(0.0, |(_, seconds)| *seconds)
    }
}

/// The median; of an even number of values the lower of the middle two.
fn middle(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_unstable_by(f64::total_cmp);
    values.get(values.len().checked_sub(1)? / 2).copied()
}

/// The products of a program with one row that run at once: those of its body, the head, and for every routed
/// layer gate and up of the chosen experts, then down.
fn lists(program: &Program, store: &StoreSpec) -> Vec<Vec<Shape>> {
    let mut all: Vec<Vec<Shape>> = ops(program).filter_map(|op| linears(program, op)).collect();
    all.push(vec![shape(&program.weights[program.head.weight.0])]);
    for (moe, layer) in program.moes.iter().zip(&store.layers) {
        all.extend(layer.experts.first().iter().flat_map(|e| of_experts(moe, e)));
    }
    all
}

fn ops(program: &Program) -> impl Iterator<Item = &Op> {
    program.segments.iter().flat_map(|s| s.ops.iter().chain(&s.overlap))
}

fn linears(program: &Program, op: &Op) -> Option<Vec<Shape>> {
    match op {
        Op::Linears(list) => {
            Some(list.iter().map(|l| shape(&program.weights[l.weight.0])).collect())
        }
        _ => None,
    }
}

fn of_experts(moe: &Moe, e: &ExpertWeights) -> [Vec<Shape>; 2] {
    [[shape(&e.gate), shape(&e.up)].repeat(moe.top_k), vec![shape(&e.down); moe.top_k]]
}

fn shape(w: &WeightRef) -> Shape {
    Shape { format: w.format, rows: w.rows, cols: w.cols }
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

/// Drawn tokens.
const TOKENS: usize = 400;

/// Operations of a routed layer's experts that are no products: activation, rounding, and the way there.
const OPS_OF_EXPERTS: f64 = 4.0;
/// Operations that are no products, as a share of the products' time of a prompt; measured on full shapes.
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
    /// What `plan` would give, if experts are chosen as `passes` are. A prompt among the passes fills the
    /// pool; without one the first quarter does, and is not counted.
    ///
    /// # Errors
    /// A trace that is not of this model.
    pub fn predict(&self, plan: &MemoryPlan, passes: &[Routed]) -> Result<Prediction, EngineError> {
        let trunk = self.trunk_seconds();
        let layers = self.store.layers.len();
        if layers == 0 {
            let prefill = self.prefill_seconds(plan.chunk, 0.0);
            return Ok(Prediction {
                hit_rate: None,
                disk_bytes_per_token: 0.0,
                decode_tokens_per_s: Some(1.0 / trunk),
                prefill_tokens_per_s: prefill.map(|s| plan.chunk as f64 / s),
            });
        }
        let misses = match plan.residency {
            Some(Residency::Stream { slots }) => self.misses(passes, slots)?,
            _ => vec![0; passes.len()],
        };
        let filling = if passes.iter().any(|p| p.rows > 1) { 0 } else { passes.len() / 4 };
        let counted = passes.iter().zip(&misses).skip(filling).filter(|(p, _)| p.rows == 1);
        let counted: Vec<(&Routed, usize)> = counted.map(|(p, m)| (p, *m)).collect();
        let chosen: usize = counted.iter().map(|(p, _)| p.experts.len()).sum();
        let missed: usize = counted.iter().map(|(_, m)| m).sum();
        let tokens = counted.len() as f64 / layers as f64;
        let bytes = self.expert_bytes();
        let mut seconds = Some(0.0);
        for (pass, missing) in &counted {
            let expert = self.expert_seconds(pass.layer);
            let there = (pass.experts.len() - missing) as f64 * expert;
            let one = match missing {
                0 => Some(there),
                n => self.speeds.disk.map(|d| (*n as f64 * bytes / d).max(there) + expert),
            };
            seconds = seconds.zip(one).map(|(sum, one)| sum + one);
        }
        let seconds = seconds.filter(|_| tokens > 0.0).map(|s| trunk + s / tokens);
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

    /// Passes layer by layer, as a prior has them.
    pub fn passes(&self, prior: &Prior) -> Vec<Routed> {
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
                out.push(Routed { layer, rows: 1, experts: ids });
            }
        }
        out
    }

    /// Misses of every pass.
    fn misses(&self, passes: &[Routed], slots: usize) -> Result<Vec<usize>, StoreError> {
        let experts: Vec<usize> = self.store.layers.iter().map(|l| l.experts.len()).collect();
        let mut misses = Vec::with_capacity(passes.len());
        replay_each(
            &experts,
            passes.iter().map(|p| (p.layer, &p.experts)),
            self.policy,
            slots,
            &mut |_, _, m| {
                misses.push(m as usize);
            },
        )?;
        Ok(misses)
    }

    /// Distinct experts that so many rows choose in a layer, on average.
    fn union(&self, rows: usize, passes: &[Routed]) -> f64 {
        let layers = self.store.layers.len();
        let mut counts: Vec<Vec<u32>> =
            self.store.layers.iter().map(|l| vec![0; l.experts.len()]).collect();
        let mut tokens = vec![0u32; layers];
        for p in passes.iter().filter(|p| p.rows == 1) {
            tokens[p.layer] += 1;
            p.experts.iter().for_each(|&e| counts[p.layer][e as usize] += 1);
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

    /// Seconds of one of the experts that a row chooses in a layer.
    fn expert_seconds(&self, layer: usize) -> f64 {
        let (moe, experts) = (&self.program.moes[layer], &self.store.layers[layer].experts);
        let Some(expert) = experts.first() else { return 0.0 };
        let products: f64 =
            of_experts(moe, expert).iter().map(|list| self.speeds.seconds(list)).sum();
        (products + OPS_OF_EXPERTS * self.speeds.small) / moe.top_k.max(1) as f64
    }

    /// Seconds of everything but experts, with one row.
    fn trunk_seconds(&self) -> f64 {
        let body = ops(self.program).map(|op| match linears(self.program, op) {
            Some(list) => self.speeds.seconds(&list),
            None => self.speeds.small,
        });
        let head = shape(&self.program.weights[self.program.head.weight.0]);
        body.sum::<f64>() + self.speeds.seconds(&[head])
    }

    /// Seconds of a chunk of so many rows that reads so many bytes.
    fn prefill_seconds(&self, rows: usize, read: f64) -> Option<f64> {
        let head = &self.program.weights[self.program.head.weight.0];
        let body = self.program.weights.iter().filter(|w| *w != head);
        let many = |w: &WeightRef, rows: f64| {
            Some(matrix_bytes(w) as f64 * rows / self.speeds.rate(w.format)?)
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

#[cfg(test)]
mod tests {
    use super::*;

    fn speeds(scale: f64) -> Speeds {
        let list = |rows| vec![Shape { format: Format::Q8_0, rows, cols: 64 }];
        Speeds {
            disk: Some(2e9 * scale),
            products: vec![(list(32), 1e-3 / scale), (list(64), 2e-3 / scale)],
            one_row: Some(2e10 * scale),
            many_rows: vec![(Format::Q8_0, 1e11 * scale)],
            small: 1e-6 / scale,
        }
    }

    #[test]
    fn one_slow_moment_changes_no_figure() {
        for slow in 0..3 {
            let rounds: Vec<Speeds> =
                (0..3).map(|i| speeds(if i == slow { 0.1 } else { 1.0 })).collect();
            assert_eq!(Speeds::median(&rounds), Some(speeds(1.0)));
        }
        assert_eq!(Speeds::median(&[]), None);
    }

    #[test]
    fn what_no_round_measured_stays_unknown() {
        let unmeasured = Speeds { disk: None, ..speeds(1.0) };
        assert_eq!(Speeds::median(std::slice::from_ref(&unmeasured)), Some(unmeasured));
    }
}
