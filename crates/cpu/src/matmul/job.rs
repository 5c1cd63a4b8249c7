//! Jobs, their checks, and the split of their work over threads.

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use forebay_quant::{MatrixView, Q8Rows};

use crate::{Level, Pool};

/// Activation rows.
#[derive(Clone, Copy)]
pub enum Input<'a> {
    /// Precision `f32`: row `r` is `data[r * stride..][..cols]`.
    F32 {
        /// The values.
        data: &'a [f32],
        /// Distance between the starts of two rows.
        stride: usize,
    },
    /// Precision `q8`: rows quantised in the order that the weight's format wants.
    Q8(&'a Q8Rows),
}

/// Output rows that several threads write at once, each a different part.
pub struct OutRows<'a> {
    data: *mut f32,
    len: usize,
    stride: usize,
    _borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: an OutRows is an exclusive borrow of plain floats; threads write disjoint elements through it (see `set`).
unsafe impl Send for OutRows<'_> {}
// SAFETY: as above; there is no way to read through a shared OutRows.
unsafe impl Sync for OutRows<'_> {}

impl<'a> OutRows<'a> {
    /// Row `r` starts at `r * stride`.
    pub fn new(data: &'a mut [f32], stride: usize) -> OutRows<'a> {
        OutRows { data: data.as_mut_ptr(), len: data.len(), stride, _borrow: PhantomData }
    }

    /// The same rows for another job.
    ///
    /// # Safety
    /// Jobs of one run that share memory must write disjoint elements, and the copies must not outlive
    /// the borrow that the first was made from.
    pub unsafe fn alias(&self) -> OutRows<'a> {
        OutRows { data: self.data, len: self.len, stride: self.stride, _borrow: PhantomData }
    }

    /// Writes one element.
    ///
    /// # Safety
    /// The element lies inside (checked once by `run_jobs`) and no other thread touches it meanwhile.
    #[inline(always)]
    pub(super) unsafe fn set(&self, row: usize, col: usize, value: f32) {
        debug_assert!(row * self.stride + col < self.len);
        // SAFETY: by the contract above.
        unsafe { *self.data.add(row * self.stride + col) = value }
    }

    /// Writes 16 elements.
    ///
    /// # Safety
    /// As of `set`, for each of them.
    #[inline(always)]
    pub(super) unsafe fn set16(&self, row: usize, col: usize, values: [f32; 16]) {
        debug_assert!(row * self.stride + col + 16 <= self.len);
        // SAFETY: by the contract above.
        unsafe {
            self.data.add(row * self.stride + col).cast::<[f32; 16]>().write_unaligned(values)
        }
    }
}

/// Which input row goes to which output row.
#[derive(Clone, Copy)]
pub enum Rows<'a> {
    /// Row `i` to row `i`, for `i` below this.
    All(usize),
    /// (input row, output row)
    Map(&'a [(u32, u32)]),
}

impl Rows<'_> {
    /// How many rows.
    pub fn len(&self) -> usize {
        match self {
            Rows::All(n) => *n,
            Rows::Map(map) => map.len(),
        }
    }
    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Input and output row of pair `i`.
    #[inline(always)]
    pub fn get(&self, i: usize) -> (usize, usize) {
        match self {
            Rows::All(_) => (i, i),
            Rows::Map(map) => (map[i].0 as usize, map[i].1 as usize),
        }
    }
    fn max(&self) -> Option<(usize, usize)> {
        match self {
            Rows::All(n) => n.checked_sub(1).map(|i| (i, i)),
            Rows::Map(map) => {
                let input = map.iter().map(|p| p.0).max()?;
                let output = map.iter().map(|p| p.1).max()?;
                Some((input as usize, output as usize))
            }
        }
    }
}

/// One matrix product: `out[out_row][o] = dot(weight[o], input[in_row]) (+ bias[o])` for all pairs of `rows`.
pub struct Job<'a> {
    /// `[out_features, cols]`
    pub weight: MatrixView<'a>,
    /// `[.., cols]`
    pub input: Input<'a>,
    /// Which rows.
    pub rows: Rows<'a>,
    /// `[.., out_features]`
    pub out: OutRows<'a>,
    /// `[out_features]`
    pub bias: Option<&'a [f32]>,
}

impl Job<'_> {
    /// Every bound the kernels rely on.
    fn check(&self) {
        let (w, format) = (&self.weight, self.weight.format());
        assert!(self.bias.is_none_or(|b| b.len() >= w.rows()), "bias shorter than the output");
        let Some((max_in, max_out)) = self.rows.max() else { return };
        match self.input {
            Input::F32 { data, stride } => {
                let end = max_in.checked_mul(stride).and_then(|x| x.checked_add(w.cols()));
                assert!(
                    end.is_some_and(|end| end <= data.len()),
                    "input row {max_in} out of bounds"
                );
            }
            Input::Q8(q) => {
                assert!(format.is_quantized(), "{} takes f32 activations", format.name());
                assert_eq!(q.cols(), w.cols(), "columns of activations and weights");
                assert_eq!(q.order(), format.act_order(), "order of the activations");
                assert!(max_in < q.max_rows(), "input row {max_in} out of bounds");
            }
        }
        let end = max_out.checked_mul(self.out.stride).and_then(|x| x.checked_add(w.rows()));
        assert!(end.is_some_and(|end| end <= self.out.len), "output row {max_out} out of bounds");
        assert!(
            self.out.stride >= w.rows() || max_out == 0,
            "output rows overlap: stride {} < {}",
            self.out.stride,
            w.rows()
        );
    }

    /// Cost of one output feature, in bytes of weights or what takes as long.
    fn cost(&self) -> usize {
        let bytes: usize = (0..self.weight.n_planes()).map(|p| self.weight.row_bytes(p)).sum();
        bytes + self.rows.len() * self.weight.cols() / 16
    }

    /// Output features of a tile that costs about `target`.
    fn tile(&self, target: usize) -> usize {
        let tile = (target / self.cost().max(1)).clamp(MIN_TILE, MAX_TILE);
        tile.next_multiple_of(MIN_TILE)
    }
}

/// A tile of one job: all its rows, some of its output features.
pub(super) struct Tile<'a> {
    pub job: &'a Job<'a>,
    pub features: Range<usize>,
    /// The weights and the first output feature that this thread most likely works on next.
    pub next: Option<(&'a MatrixView<'a>, usize)>,
}

impl Tile<'_> {
    /// Writes one output, its bias added.
    ///
    /// # Safety
    /// `feature` lies in `features`, `out_row` is one of the job's.
    #[inline(always)]
    pub(super) unsafe fn write(&self, out_row: usize, feature: usize, dot: f32) {
        let y = match self.job.bias {
            Some(bias) => dot + bias[feature],
            None => dot,
        };
        // SAFETY: `Job::check` has bounded the rows; tiles are disjoint and each is one thread's.
        unsafe { self.job.out.set(out_row, feature, y) }
    }

    /// Writes 16 outputs in a row.
    ///
    /// # Safety
    /// As of [`Tile::write`], for each of them.
    #[inline(always)]
    pub(super) unsafe fn write16(&self, out_row: usize, feature: usize, mut dots: [f32; 16]) {
        if let Some(bias) = self.job.bias {
            for (dot, bias) in dots.iter_mut().zip(&bias[feature..feature + 16]) {
                *dot += bias;
            }
        }
        // SAFETY: as `write`.
        unsafe { self.job.out.set16(out_row, feature, dots) }
    }
}

/// Tiles are multiples of this many output features, and small ones are exactly as large.
const MIN_TILE: usize = 16;
/// Output features that go over a chunk of activation rows while it is in the cache.
const MAX_TILE: usize = 128;
/// Tiles a thread should find, so that the last ones even out.
const TILES_PER_THREAD: usize = 6;

/// One thread's tiles. On a cache line of its own (two of 64 bytes, one of 128).
#[repr(align(128))]
struct Share {
    next: AtomicUsize,
    end: usize,
}

/// The tiles of a run: those of the first job, then those of the second, ...
struct Tiles<'a> {
    jobs: &'a [Job<'a>],
    target: usize,
    n: usize,
}

impl<'a> Tiles<'a> {
    fn new(jobs: &'a [Job<'a>], threads: usize) -> Tiles<'a> {
        let mut total = 0usize;
        for job in jobs {
            job.check();
            if !job.rows.is_empty() {
                total += job.cost() * job.weight.rows();
            }
        }
        let mut tiles = Tiles { jobs, target: total / (threads * TILES_PER_THREAD), n: 0 };
        tiles.n = jobs.iter().map(|job| tiles.of(job)).sum();
        tiles
    }

    /// How many a job has.
    fn of(&self, job: &Job<'_>) -> usize {
        match job.rows.is_empty() {
            true => 0,
            false => job.weight.rows().div_ceil(job.tile(self.target)),
        }
    }

    /// Splits them into runs of about the same cost, one a thread.
    fn shares(&self, threads: usize) -> Vec<Share> {
        let cost = |job: &Job<'_>| job.cost() * job.tile(self.target);
        let total: usize = self.jobs.iter().map(|job| self.of(job) * cost(job)).sum();
        let mut shares = Vec::with_capacity(threads);
        let (mut start, mut tile, mut passed) = (0, 0, 0);
        for job in self.jobs {
            let (n, cost) = (self.of(job), cost(job));
            while shares.len() + 1 < threads {
                let left = (total * (shares.len() + 1) / threads).saturating_sub(passed);
                if left >= n * cost {
                    break;
                }
                let end = tile + left / cost.max(1);
                shares.push(Share { next: AtomicUsize::new(start), end });
                start = end;
            }
            tile += n;
            passed += n * cost;
        }
        while shares.len() < threads {
            let end = if shares.len() + 1 == threads { self.n } else { start };
            shares.push(Share { next: AtomicUsize::new(start), end });
            start = end;
        }
        shares
    }

    /// Job and first feature of tile `i`. `seen` is where an earlier tile was found: (job, its first tile).
    fn locate(&self, i: usize, seen: &mut (usize, usize)) -> (&'a Job<'a>, usize) {
        if i < seen.1 {
            *seen = (0, 0);
        }
        loop {
            let n = self.of(&self.jobs[seen.0]);
            if i - seen.1 < n {
                let job = &self.jobs[seen.0];
                return (job, (i - seen.1) * job.tile(self.target));
            }
            *seen = (seen.0 + 1, seen.1 + n);
        }
    }

    /// A thread's life: its own share from front to back, then tiles of whoever has most left.
    fn work(&self, level: Level, shares: &[Share], thread: usize) {
        let (mut owner, mut seen) = (thread, (0, 0));
        loop {
            let share = &shares[owner];
            let i = share.next.fetch_add(1, Ordering::Relaxed);
            if i >= share.end {
                let left = |s: &Share| s.end.saturating_sub(s.next.load(Ordering::Relaxed));
                match (0..shares.len()).max_by_key(|&s| left(&shares[s])) {
                    Some(most) if left(&shares[most]) > 0 => owner = most,
                    _ => return,
                }
                continue;
            }
            let (job, start) = self.locate(i, &mut seen);
            let features = start..(start + job.tile(self.target)).min(job.weight.rows());
            let next = (i + 1 < share.end).then(|| {
                let (job, start) = self.locate(i + 1, &mut seen);
                (&job.weight, start)
            });
            run_tile(level, &Tile { job, features, next });
        }
    }
}

/// Runs all jobs in one parallel region. Each thread begins with a run of tiles of its own, which lie one
/// behind the other in memory; who is done takes from the others.
///
/// # Panics
/// If a job's rows, strides or bias do not fit its memory, its activations do not fit its weights, or the machine
/// lacks the level.
pub fn run_jobs(pool: &Pool, level: Level, jobs: &[Job<'_>]) {
    super::require(level);
    let tiles = Tiles::new(jobs, pool.threads());
    match tiles.n {
        0 => {}
        1 => tiles.work(level, &[Share { next: AtomicUsize::new(0), end: 1 }], 0),
        _ => {
            let shares = tiles.shares(pool.threads());
            pool.run(&|thread| tiles.work(level, &shares, thread));
        }
    }
}

fn run_tile(level: Level, tile: &Tile<'_>) {
    match (level, tile.job.input) {
        #[cfg(target_arch = "x86_64")]
        (Level::Avx512, Input::Q8(q)) => super::avx512::q8_tile(tile, q),
        #[cfg(target_arch = "x86_64")]
        (Level::Avx512, Input::F32 { data, stride }) => super::avx512::f32_tile(tile, data, stride),
        #[cfg(target_arch = "x86_64")]
        (Level::Avx2, Input::Q8(q)) => super::avx2::q8_tile(tile, q),
        #[cfg(target_arch = "x86_64")]
        (Level::Avx2, Input::F32 { data, stride }) => super::avx2::f32_tile(tile, data, stride),
        #[cfg(target_arch = "aarch64")]
        (Level::NeonI8mm, Input::Q8(q)) => super::neon::q8_tile_i8mm(tile, q),
        #[cfg(target_arch = "aarch64")]
        (Level::NeonDot, Input::Q8(q)) => super::neon::q8_tile_dot(tile, q),
        #[cfg(target_arch = "aarch64")]
        (Level::Neon, Input::Q8(q)) => super::neon::q8_tile(tile, q),
        #[cfg(target_arch = "aarch64")]
        (Level::Neon | Level::NeonDot | Level::NeonI8mm, Input::F32 { data, stride }) => {
            super::neon::f32_tile(tile, data, stride)
        }
        (_, Input::Q8(q)) => super::scalar::q8_tile(tile, q),
        (_, Input::F32 { data, stride }) => super::scalar::f32_tile(tile, data, stride),
    }
}
