//! What a backend must do: a handful of coarse, object-safe methods over whole operations.
//!
//! A backend owns the trunk, scratch and KV pages in its own memory. It never waits for a disk and
//! never decides an order of sums: that is fixed by the formats and by [`crate::op`].

use std::ops::Range;

use forebay_quant::MatrixView;

use crate::op::{BufferId, MoeId, Op};
use crate::profile::Profile;

/// The pages of one sequence, per KV class: `tables[class][position / BLOCK]` is a page index.
#[derive(Clone, Copy, Debug)]
pub struct SequenceTables<'a> {
    /// One table per class of [`crate::Program::kv_windows`].
    pub classes: &'a [Vec<u32>],
    /// Slots of recurrent state: the one from before the pass and the one to fill. The state before the
    /// first token is zero, and is slot 0.
    pub state: [u32; 2],
}

/// The rows of a pass.
#[derive(Clone, Copy, Debug)]
pub struct Pass<'a> {
    /// Position of each row in its sequence, `[rows]`.
    pub positions: &'a [u32],
    /// Which of `sequences` a row belongs to, `[rows]`.
    pub row_sequence: &'a [u32],
    /// Page tables.
    pub sequences: &'a [SequenceTables<'a>],
    /// Keep what recurrent layers consume, so that [`Backend::replay`] can follow. Only where all rows are of one
    /// sequence, and no more than the backend was made for.
    pub tape: bool,
}

impl Pass<'_> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.positions.len()
    }
}

/// Which experts the rows chose, rank order: `ids[row * top_k + rank]`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Routing {
    /// Experts, `[rows, top_k]`.
    pub ids: Vec<u16>,
    /// Their weights, `[rows, top_k]`.
    pub weights: Vec<f32>,
}

/// Matrices of one expert, wherever they live.
#[derive(Clone, Copy, Debug)]
pub struct ExpertMatrices<'a> {
    /// Index of the expert in its layer.
    pub expert: u16,
    /// `[inter, d]`
    pub gate: MatrixView<'a>,
    /// `[inter, d]`
    pub up: MatrixView<'a>,
    /// `[d, inter]`
    pub down: MatrixView<'a>,
}

/// Why a backend could not go on.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// A number that must be finite is not.
    #[error(
        "NaN in the router logits of layer {layer}: the weights or the input are damaged, or steering is too strong"
    )]
    RouterNan {
        /// Layer in the model.
        layer: usize,
    },
    /// A device stopped working.
    #[error("{message}")]
    Device {
        /// What was done, and what the driver says.
        message: String,
    },
}

/// A backend that holds embedding and experts itself runs a pass without being asked back: what lies between the segments
/// of a program is its own affair.
pub trait WholePass {
    /// Embeds the tokens `[rows]` and runs the whole body. It may still be running when this returns: [`Backend::logits`]
    /// waits, and tells what went wrong meanwhile.
    fn pass(&mut self, pass: &Pass<'_>, tokens: &[u32]) -> Result<(), BackendError>;
}

/// Logits that are looked at together where a row is sampled by [`LogitLines`].
pub const LOGIT_LINE: usize = 1024;

/// What choosing a token needs of a row's logits, without the logits: by lines of [`LOGIT_LINE`], the last one shorter.
///
/// Numbers are the sampler's, bit for bit: exponentials in f32 with `x = (l - max) * t` taken as -80 where it is below, `max`
/// being the row's largest; sums of a line in f64, number `i` of it going to lane `i % 8` in ascending order, then the lanes in
/// ascending order, then what is left of a line that is no multiple of 8, by itself and added last.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct LogitLines {
    /// The largest logit of each line; NaN where any of it is.
    pub largest: Vec<f32>,
    /// The sum of each line's exponentials with `t` = 1.
    pub sums: Vec<f64>,
    /// The same with the `t` that was asked for; empty where that is 1.
    pub own_sums: Vec<f64>,
    /// The logits of the line that was picked.
    pub line: Vec<f32>,
}

/// Names a line, by the sums and maxima of all.
pub type PickLine<'a> = &'a dyn Fn(&LogitLines) -> usize;

/// Runs programs.
pub trait Backend: Send {
    /// Name as in `--backend`.
    fn name(&self) -> &'static str;

    /// The backend as one that runs whole passes; such a one is not driven by segments, and none of [`Backend::tied_embedding`],
    /// [`Backend::begin`], [`Backend::run`], [`Backend::routing`] and [`Backend::experts`] is called.
    fn whole(&mut self) -> Option<&mut dyn WholePass> {
        None
    }

    /// Rows of the embedding that is resident because the head is tied to it: `out` is `[tokens.len(), d]`.
    fn tied_embedding(&self, tokens: &[u32], out: &mut [f32]);

    /// Starts a pass: sets the residual stream, `hidden` being `[rows, d]`.
    fn begin(&mut self, pass: &Pass<'_>, hidden: &[f32]);

    /// Runs operations of the body.
    fn run(&mut self, pass: &Pass<'_>, ops: &[Op]) -> Result<(), BackendError>;

    /// The rows of a buffer of the body, `[rows, width]`, between two runs of a pass: what an [`Op::Tap`] names. The backend
    /// itself is never given taps to run. None: it lets nobody look, and programs for it have no taps.
    fn buffer(&mut self, buf: BufferId, rows: usize) -> Option<&mut [f32]> {
        let _ = (buf, rows);
        None
    }

    /// The choice made by the last [`Op::Route`] of `moe`.
    fn routing(&self, moe: MoeId) -> &Routing;

    /// What the last [`Op::Guess`] of `moe` noted, `[rows * top_k]`, repetitions included.
    fn guessed(&self, moe: MoeId) -> &[u16];

    /// Computes experts for every row that chose them, into `[rows, top_k, d]`.
    fn experts(&mut self, moe: MoeId, experts: &[ExpertMatrices<'_>]);

    /// Logits of chosen rows: `out` is `[rows.len(), vocab]`, at most [`Backend::max_logit_rows`] rows.
    fn logits(&mut self, rows: &[u32], out: &mut [f32]) -> Result<(), BackendError>;

    /// Fills `lines` for one row, with `t` as its own factor, and the line that `pick` names; its errors are those of
    /// [`Backend::logits`]. False: this backend has nothing to gain from it, and [`Backend::logits`] is to be called.
    fn logit_lines(
        &mut self,
        row: u32,
        t: f32,
        lines: &mut LogitLines,
        pick: PickLine<'_>,
    ) -> Result<bool, BackendError> {
        let _ = (row, t, lines, pick);
        Ok(false)
    }

    /// Most rows in one call of [`Backend::logits`].
    fn max_logit_rows(&self) -> usize;

    /// Whether a pass can be taken back in part: [`Backend::replay`] works, and so do the methods for drafting below it.
    fn can_replay(&self) -> bool {
        false
    }

    /// Fills the state slot that the last pass filled once more, as if the pass had had its first `rows` rows only. The pass
    /// was [taped](Pass::tape), and `sequence` is what it was given. Keys and values of later rows stay in their
    /// pages, where no row before them looks.
    fn replay(&mut self, sequence: &SequenceTables<'_>, rows: usize) {
        let _ = (sequence, rows);
        unreachable!("{} takes no pass back: see can_replay", self.name())
    }

    /// Appends `rows` of a buffer as the last pass left it. Only buffers that live to the end of a program can be asked for:
    /// [`crate::Program::kept_layers`] and those of [`crate::DraftBlock`].
    fn read(&self, buffer: BufferId, rows: Range<usize>, out: &mut Vec<f32>) {
        let _ = (buffer, rows, out);
        unreachable!("{} hands no rows out: see can_replay", self.name())
    }

    /// Sets the first rows of an input of [`crate::DraftBlock`]: `rows` is `[n, width]`.
    fn write(&mut self, buffer: BufferId, rows: &[f32]) {
        let _ = (buffer, rows);
        unreachable!("{} takes no rows: see can_replay", self.name())
    }

    /// As [`Backend::logits`], by the head of the draft block.
    fn draft_logits(&mut self, rows: &[u32], out: &mut [f32]) -> Result<(), BackendError> {
        let _ = (rows, out);
        unreachable!("{} has no draft block: see can_replay", self.name())
    }

    /// Weight and KV bytes that the operations have read from memory since the last call.
    fn take_bytes_moved(&mut self) -> u64;

    /// Begins or ends timing each operation. False: this backend cannot.
    fn set_profiling(&mut self, on: bool) -> bool {
        !on
    }

    /// What was timed so far; empty where nothing is.
    fn profile(&self) -> Profile {
        Profile::default()
    }

    /// Appends the bytes of a KV page of all layers of a class. False: this backend saves nothing.
    fn save_page(&self, class: usize, page: u32, out: &mut Vec<u8>) -> bool {
        let _ = (class, page, out);
        false
    }

    /// Fills a page from what [`Backend::save_page`] gave. False: the bytes are not of this shape.
    fn load_page(&mut self, class: usize, page: u32, bytes: &[u8]) -> bool {
        let _ = (class, page, bytes);
        false
    }

    /// Appends the bytes of a slot of recurrent state of all layers.
    fn save_state(&self, slot: u32, out: &mut Vec<u8>) -> bool {
        let _ = (slot, out);
        false
    }

    /// Fills a slot from what [`Backend::save_state`] gave.
    fn load_state(&mut self, slot: u32, bytes: &[u8]) -> bool {
        let _ = (slot, bytes);
        false
    }
}
