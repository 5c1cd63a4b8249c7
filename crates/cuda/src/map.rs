//! Where everything lies in one allocation of GPU memory: computed before a byte is allocated, and then again with the
//! allocation's address, so that the ledger cannot be wrong.

use std::collections::BTreeSet;

use forebay_cpu::attention::{KvLayout, KvType};
use forebay_models::WeightRef;
use forebay_program::{Ledger, Op, Program};
use forebay_store::StoreSpec;

use crate::args::Ptr;
use crate::error::CudaError;
use crate::inputs::InputsMap;
use crate::lines::LinesAt;
use crate::load::{Placed, Stack, place};

/// Rows that the kernels for few rows take: a decode step, or a few sequences' steps.
pub(crate) const FEW_ROWS: usize = 4;
/// Rows of a tile of the matrix kernel for many rows.
pub(crate) const TILE_N: usize = 32;
/// Rows that want logits are worked through this many at a time.
pub(crate) const LOGIT_ROWS: usize = 16;

/// Sizes that decide what the backend allocates.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaShape {
    /// Most rows of a pass.
    pub max_rows: usize,
    /// Type of keys and values.
    pub kv_type: KvType,
    /// Pages of each KV class.
    pub kv_pages: Vec<usize>,
    /// Slots of recurrent state, the zero one included; 0 where no layer is recurrent.
    pub states: usize,
    /// Most sequences of a pass.
    pub sequences: usize,
    /// Most positions of a sequence.
    pub context: usize,
}

/// What is to be resident.
#[derive(Clone, Copy)]
pub struct Model<'a> {
    /// Lowered.
    pub program: &'a Program,
    /// Routed experts, one entry per [`Program::moes`].
    pub store: &'a StoreSpec,
    /// `[vocab, d]`; the head's matrix is used where it is tied to it.
    pub embedding: &'a WeightRef,
}

/// Packed rows.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct PackMem {
    pub codes: Ptr,
    pub meta: Ptr,
    pub row_codes: u64,
    pub row_meta: u64,
}

/// Addresses.
pub(crate) struct Map {
    pub trunk: Vec<Placed>,
    /// Gate, up, down of each routed layer.
    pub experts: Vec<[Placed; 3]>,
    /// None: tied to the head.
    pub embedding: Option<Placed>,
    pub vectors: Vec<Ptr>,
    /// `[E, n]` of gate, up, down; 0 where there are none.
    pub expert_biases: Vec<[Ptr; 3]>,
    pub inv_freq: Vec<Ptr>,
    pub kv: Vec<Ptr>,
    pub states: Vec<Ptr>,
    /// Scratch buffers of the program, `[max_rows, scratch_width]`.
    pub arena: Ptr,
    pub packs: Vec<PackMem>,
    /// Of routed layers: choices, then rows by expert.
    pub ids: Ptr,
    pub weights: Ptr,
    pub sorted: Ptr,
    pub tiles: Ptr,
    pub n_tiles: Ptr,
    /// `[pairs, inter]`
    pub gate: Ptr,
    pub up: Ptr,
    pub hidden: PackMem,
    /// Blocks of few rows' attention.
    pub parts: Ptr,
    pub part_ml: Ptr,
    /// One word: 1 + layer of a router fault.
    pub fault: Ptr,
    pub inputs: [InputsMap; 2],
    pub gathered: Ptr,
    pub head_pack: PackMem,
    pub logits: Ptr,
    /// [`LinesAt`] of one row's logits.
    pub lines: Ptr,
    /// Bytes in all.
    pub total: u64,
    pub ledger: Ledger,
}

struct Cursor {
    at: Ptr,
    ledger: Ledger,
}

impl Cursor {
    fn take(&mut self, bytes: u64) -> Ptr {
        let at = self.at;
        self.at += bytes.next_multiple_of(256);
        at
    }

    fn floats(&mut self, n: usize) -> Ptr {
        self.take(n as u64 * 4)
    }

    fn pack(&mut self, rows: usize, cols: usize) -> PackMem {
        let (row_codes, row_meta) = (cols as u64, cols as u64 / 2);
        PackMem {
            codes: self.take(rows as u64 * row_codes),
            meta: self.take(rows as u64 * row_meta),
            row_codes,
            row_meta,
        }
    }

    fn place(&mut self, stack: &Stack<'_>) -> Result<Placed, CudaError> {
        let at = self.take(stack.bytes()?);
        place(stack, at)
    }

    /// Ends a section that began at `from`.
    fn section(&mut self, what: &'static str, from: Ptr) -> Ptr {
        self.ledger.add(what, self.at - from);
        self.at
    }
}

/// The stacks of a model, in the order of their places: trunk, experts, embedding.
pub(crate) fn stacks<'a>(model: &Model<'a>) -> Vec<Stack<'a>> {
    let mut out: Vec<Stack<'a>> = model.program.weights.iter().map(Stack::one).collect();
    for layer in &model.store.layers {
        let all = |f: fn(&forebay_models::ExpertWeights) -> &WeightRef| Stack {
            parts: layer.experts.iter().map(f).collect(),
            layer: Some(layer.layer),
        };
        out.extend([all(|e| &e.gate), all(|e| &e.up), all(|e| &e.down)]);
    }
    if !model.program.head.tied {
        out.push(Stack::one(model.embedding));
    }
    out
}

impl Map {
    /// Addresses from `base` on, which is 256-aligned.
    pub(crate) fn new(model: &Model<'_>, shape: &CudaShape, base: Ptr) -> Result<Map, CudaError> {
        let Model { program, .. } = model;
        let rows = shape.max_rows;
        let mut c = Cursor { at: base, ledger: Ledger::default() };
        let mut from = base;
        let stacks = stacks(model);
        let n = program.weights.len();
        let trunk: Vec<Placed> =
            stacks[..n].iter().map(|s| c.place(s)).collect::<Result<_, CudaError>>()?;
        let vectors: Vec<Ptr> = program.vectors.iter().map(|v| c.floats(v.source.len)).collect();
        let expert_biases = program
            .moes
            .iter()
            .map(|m| match m.biases.is_empty() {
                true => [0; 3],
                false => [m.intermediate, m.intermediate, m.hidden_size]
                    .map(|width| c.floats(m.n_experts * width)),
            })
            .collect();
        let inv_freq = program.ropes.iter().map(|r| c.floats(r.inv_freq.len())).collect();
        from = c.section("trunk", from);
        let mut experts = Vec::new();
        for three in stacks[n..].chunks_exact(3).take(program.moes.len()) {
            experts.push([c.place(&three[0])?, c.place(&three[1])?, c.place(&three[2])?]);
        }
        from = c.section("experts", from);
        let embedding = match program.head.tied {
            true => None,
            false => Some(c.place(stacks.last().expect("the embedding is the last"))?),
        };
        from = c.section("embedding", from);
        let kv = program
            .kv_layers
            .iter()
            .map(|l| {
                let layout = KvLayout::new(l.n_kv_heads, l.head_dim, shape.kv_type);
                c.take(layout.page_bytes() as u64 * shape.kv_pages[l.class] as u64)
            })
            .collect();
        from = c.section("keys and values", from);
        let states = program
            .recurrent
            .iter()
            .map(|r| c.floats(state_floats(r).iter().sum::<usize>() * shape.states))
            .collect();
        from = c.section("recurrent state", from);
        let arena = c.floats(rows * program.scratch_width);
        let packs = program.packs.iter().map(|p| c.pack(rows, p.cols)).collect();
        let most =
            |f: fn(&forebay_program::Moe) -> usize| program.moes.iter().map(f).max().unwrap_or(0);
        let pairs = rows * most(|m| m.top_k);
        let inner = most(|m| m.intermediate);
        let n_tiles = pairs / TILE_N + most(|m| m.n_experts) + 1;
        let few = rows.min(FEW_ROWS);
        let part_floats = program.segments.iter().flat_map(|s| s.ops.iter().chain(&s.overlap));
        let blocks = shape.context.div_ceil(32).next_power_of_two().max(8);
        let (mut parts, mut part_ml) = (0, 0);
        for op in part_floats {
            if let Op::Attention(a) = op {
                let n = few * a.n_heads * window_blocks(a.window, blocks);
                parts = parts.max(n * program.kv_layers[a.kv.0].head_dim);
                part_ml = part_ml.max(2 * n);
            }
        }
        let head = &program.weights[program.head.weight.0];
        let logit_rows = rows.min(LOGIT_ROWS);
        let tile_rows = tile_rows(program);
        let mut map = Map {
            trunk,
            experts,
            embedding,
            vectors,
            expert_biases,
            inv_freq,
            kv,
            states,
            arena,
            packs,
            ids: c.take(2 * pairs as u64),
            weights: c.floats(pairs),
            sorted: c.floats(pairs),
            tiles: c.floats(3 * n_tiles),
            n_tiles: c.floats(1),
            gate: c.floats(pairs * inner),
            up: c.floats(pairs * inner),
            hidden: c.pack(pairs, inner.next_multiple_of(32)),
            parts: c.floats(parts),
            part_ml: c.floats(part_ml),
            fault: c.floats(1),
            inputs: [few, rows].map(|rows| {
                let mut map = InputsMap::new(program, shape, rows, &tile_rows);
                map.base = c.floats(map.words);
                map
            }),
            gathered: c.floats(logit_rows * head.cols),
            head_pack: c.pack(logit_rows, head.cols.next_multiple_of(32)),
            logits: c.floats(logit_rows * head.rows),
            lines: c.take(LinesAt::bytes(head.rows) as u64),
            total: 0,
            ledger: Ledger::default(),
        };
        c.section("scratch", from);
        map.total = c.at - base;
        map.ledger = c.ledger;
        Ok(map)
    }
}

/// Floats of one slot of a recurrent layer: convolution, delta rule.
pub(crate) fn state_floats(r: &forebay_program::Recurrent) -> [usize; 2] {
    let channels = 2 * r.n_k_heads * r.k_dim + r.n_v_heads * r.v_dim;
    [(r.conv_width - 1) * channels, r.n_v_heads * r.k_dim * r.v_dim]
}

/// Most blocks of positions that a query sees, of `blocks` in all.
pub(crate) fn window_blocks(window: Option<usize>, blocks: usize) -> usize {
    window.map_or(blocks, |w| blocks.min(w / 32 + 2))
}

/// Queries of a tile of attention over many rows.
pub(crate) fn tile_queries(head_dim: usize) -> usize {
    if head_dim > 256 { 32 } else { 64 }
}

/// Rows of a tile, for every attention of a program.
pub(crate) fn tile_rows(program: &Program) -> Vec<usize> {
    let ops = program.segments.iter().flat_map(|s| s.ops.iter().chain(&s.overlap));
    let all: BTreeSet<usize> = ops
        .filter_map(|op| match op {
            Op::Attention(a) => Some(rows_of_tile(program, a)),
            _ => None,
        })
        .collect();
    all.into_iter().collect()
}

/// Rows of a tile of this attention.
pub(crate) fn rows_of_tile(program: &Program, a: &forebay_program::AttentionOp) -> usize {
    let kv = &program.kv_layers[a.kv.0];
    (tile_queries(kv.head_dim) * kv.n_kv_heads / a.n_heads).max(1)
}
