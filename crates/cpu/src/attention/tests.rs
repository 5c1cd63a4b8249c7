use super::*;

/// Uniform in [-1, 1).
fn random(n: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12_345);
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// A sequence in a cache, with its exact keys and values beside it.
struct Sequence {
    layout: KvLayout,
    /// `[positions, n_kv_heads * head_dim]`, as given to `store`.
    k: Vec<f32>,
    v: Vec<f32>,
    pages: Vec<u8>,
    stride: usize,
    table: Vec<u32>,
}

impl Sequence {
    fn new(layout: KvLayout, positions: usize, seed: u32) -> Sequence {
        let k = random(positions * layout.n_kv_heads * layout.head_dim, seed);
        let v = random(positions * layout.n_kv_heads * layout.v_head_dim, seed + 1);
        let blocks = positions.div_ceil(BLOCK);
        let stride = layout.page_bytes() + 12;
        // Pages in reverse, and what is not stored is NaN: nobody may read it into a result.
        let mut pages = vec![0xff; stride * (blocks + 1)];
        let table: Vec<u32> = (0..blocks as u32).rev().collect();
        let (kw, vw) = (layout.n_kv_heads * layout.head_dim, layout.n_kv_heads * layout.v_head_dim);
        for p in 0..positions {
            let page = &mut pages[table[p / BLOCK] as usize * stride..][..layout.page_bytes()];
            layout.store(Level::best(), page, p % BLOCK, &k[p * kw..][..kw], &v[p * vw..][..vw]);
        }
        Sequence { layout, k, v, pages, stride, table }
    }

    fn kv(&self) -> KvPages<'_> {
        KvPages { layout: self.layout, data: &self.pages, stride: self.stride }
    }

    fn row(&self, pos: usize) -> AttnRow<'_> {
        AttnRow { pos: pos as u32, table: &self.table }
    }

    /// What the cache holds for a head's key or value.
    fn rounded(&self, x: &[f32]) -> Vec<f64> {
        match self.layout.kv_type {
            KvType::F32 => x.iter().map(|&x| x as f64).collect(),
            KvType::F16 => x.iter().map(|&x| half::f16::from_f32_const(x).to_f64()).collect(),
            KvType::Q8 => {
                let a = x.iter().fold(0f32, |m, x| m.max(x.abs()));
                let code = |x: f32| (x * (127.0 / a)).round_ties_even() as f64;
                x.iter().map(|&x| code(x) * (a / 127.0) as f64).collect()
            }
        }
    }

    /// Attention of one head in f64, straight from its definition.
    fn naive(&self, params: &AttnParams, pos: usize, head: usize, q: &[f32]) -> Vec<f64> {
        let l = &self.layout;
        let h = head / (params.n_heads / l.n_kv_heads);
        let first = params.window.map_or(0, |w| (pos + 1).saturating_sub(w));
        let scores: Vec<f64> = (first..=pos)
            .map(|j| {
                let k = self.rounded(&self.k[(j * l.n_kv_heads + h) * l.head_dim..][..l.head_dim]);
                let dot: f64 = k.iter().zip(q).map(|(k, &q)| k * q as f64).sum();
                dot * params.scale as f64
            })
            .collect();
        let sink = params.sinks.map(|s| s[head] as f64);
        let max = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().copied().chain(sink).map(|s| (s - max).exp()).sum();
        let mut out = vec![0.0; l.v_head_dim];
        for (j, s) in (first..=pos).zip(scores) {
            let v = self.rounded(&self.v[(j * l.n_kv_heads + h) * l.v_head_dim..][..l.v_head_dim]);
            for (o, v) in out.iter_mut().zip(v) {
                *o += (s - max).exp() / sum * v;
            }
        }
        out
    }

    fn attend(
        &self,
        pool: &Pool,
        level: Level,
        params: &AttnParams,
        rows: &[AttnRow],
        q: &[f32],
    ) -> Vec<f32> {
        let width = params.n_heads * self.layout.head_dim;
        let out_width = params.n_heads * self.layout.v_head_dim;
        let mut out = vec![0.0; rows.len() * out_width];
        let q = Rows::dense(q, width);
        attend(pool, level, params, &self.kv(), rows, q, RowsMut::dense(&mut out, out_width));
        out
    }
}

struct Case {
    name: &'static str,
    n_heads: usize,
    n_kv_heads: usize,
    head_dim: usize,
    v_head_dim: usize,
    window: Option<usize>,
    sinks: bool,
    positions: usize,
    rows: Range<usize>,
}

const CASES: [Case; 10] = [
    case("one position", [2, 1, 16], None, false, 1, 0..1),
    case("gqa with sinks", [8, 2, 64], None, true, 100, 60..100),
    case("window of 4", [3, 1, 20], Some(4), false, 40, 0..40),
    case("window of 128", [4, 2, 64], Some(128), true, 300, 120..140),
    case("no groups", [3, 3, 48], None, false, 70, 0..70),
    case("six to one, head of 80", [6, 1, 80], Some(33), true, 97, 90..97),
    case("sixteen to one, head of 128", [16, 1, 128], None, false, 65, 62..65),
    case("long, split over threads", [8, 2, 32], None, true, 700, 698..700),
    case("long window, split over threads", [4, 1, 48], Some(600), true, 700, 640..643),
    Case { v_head_dim: 40, ..case("narrower values", [4, 2, 56], None, true, 50, 40..50) },
];

/// Heads of queries, heads of keys and values, and their width.
const fn case(
    name: &'static str,
    [n_heads, n_kv_heads, head_dim]: [usize; 3],
    window: Option<usize>,
    sinks: bool,
    positions: usize,
    rows: Range<usize>,
) -> Case {
    Case {
        name,
        n_heads,
        n_kv_heads,
        head_dim,
        v_head_dim: head_dim,
        window,
        sinks,
        positions,
        rows,
    }
}

const TYPES: [KvType; 3] = [KvType::F32, KvType::F16, KvType::Q8];

/// Values are below 1 and the scores' error is a few 1e-7 times their size (below 10 here): 5e-6 is ample,
/// and 100 times smaller than what a wrong position would make.
#[test]
fn close_to_f64_and_the_same_bits_everywhere() {
    for c in &CASES {
        for kv_type in TYPES {
            let layout = KvLayout {
                n_kv_heads: c.n_kv_heads,
                head_dim: c.head_dim,
                v_head_dim: c.v_head_dim,
                kv_type,
            };
            let sequence = Sequence::new(layout, c.positions, 20);
            let sinks = random(c.n_heads, 22);
            let sinks = c.sinks.then_some(&sinks[..]);
            let params = AttnParams { n_heads: c.n_heads, scale: 0.6, window: c.window, sinks };
            let rows: Vec<AttnRow> = c.rows.clone().map(|p| sequence.row(p)).collect();
            let (width, out_width) = (c.n_heads * c.head_dim, c.n_heads * c.v_head_dim);
            let q = random(rows.len() * width, 23);

            let want = sequence.attend(&Pool::new(1), Level::Scalar, &params, &rows, &q);
            for (r, pos) in c.rows.clone().enumerate() {
                for h in 0..c.n_heads {
                    let q = &q[r * width + h * c.head_dim..][..c.head_dim];
                    let exact = sequence.naive(&params, pos, h, q);
                    let got = &want[r * out_width + h * c.v_head_dim..][..c.v_head_dim];
                    for (g, e) in got.iter().zip(&exact) {
                        assert!(
                            (*g as f64 - e).abs() < 5e-6,
                            "{} {kv_type:?} {pos}: {g}, {e}",
                            c.name
                        );
                    }
                }
            }

            for threads in [1, 2, 5, 16] {
                let pool = Pool::new(threads);
                for level in
                    Level::available().into_iter().filter(|&l| l != Level::Scalar || threads == 2)
                {
                    for chunk in [rows.len(), 3, 1] {
                        let got: Vec<f32> = rows
                            .chunks(chunk)
                            .zip(q.chunks(chunk * width))
                            .flat_map(|(rows, q)| sequence.attend(&pool, level, &params, rows, q))
                            .collect();
                        let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
                        assert!(
                            same,
                            "{} {kv_type:?} {level}, {threads} threads, {chunk} rows",
                            c.name
                        );
                    }
                }
            }
        }
    }
}

/// Several waves, whose states are carried on; rows that see different blocks.
#[test]
fn waves_change_nothing() {
    let layout = KvLayout::new(2, 40, KvType::F16);
    let sequence = Sequence::new(layout, 300, 80);
    let sinks = random(4, 82);
    for window in [None, Some(100)] {
        let params = AttnParams { n_heads: 4, scale: 0.5, window, sinks: Some(&sinks) };
        let rows = [299, 130, 31, 32, 298].map(|p| sequence.row(p));
        let q = random(rows.len() * 160, 83);
        let want = sequence.attend(&Pool::new(1), Level::best(), &params, &rows, &q);
        for wave in [1, 3, 9, 10, 100] {
            let pool = Pool::new(3);
            let out = std::sync::Mutex::new(vec![0.0; want.len()]);
            let call = (&params, &sequence.kv(), &rows[..]);
            split::attend(&pool, Level::best(), wave, call, Rows::dense(&q, 160), &|r, h, x| {
                out.lock().unwrap()[r * 160 + h * 40..][..40].copy_from_slice(x);
            });
            assert_eq!(out.into_inner().unwrap(), want, "{wave} blocks, window {window:?}");
        }
    }
}

/// With zero queries every visible position weighs the same, and values that name their position in one
/// dimension each tell exactly which ones were seen.
#[test]
fn windows_see_exactly_their_positions() {
    for (window, position, seen) in [
        (Some(4), 0, 0..=0),
        (Some(4), 3, 0..=3),
        (Some(4), 6, 3..=6),
        (Some(4), 9, 6..=9),
        (Some(128), 127, 0..=127),
        (Some(128), 128, 1..=128),
        (Some(128), 129, 2..=129),
        (Some(32), 63, 32..=63),
        (Some(32), 64, 33..=64),
        (Some(1), 32, 32..=32),
        (None, 129, 0..=129),
    ] {
        let hd = 160;
        let layout = KvLayout::new(1, hd, KvType::F16);
        let mut pages = vec![0xff; layout.page_bytes() * 5];
        for p in 0..=position {
            let mut v = vec![0.0; hd];
            v[p] = 1.0;
            let page = &mut pages[(p / BLOCK) * layout.page_bytes()..][..layout.page_bytes()];
            layout.store(Level::best(), page, p % BLOCK, &vec![1.0; hd], &v);
        }
        let params = AttnParams { n_heads: 1, scale: 1.0, window, sinks: None };
        let kv = KvPages { layout, data: &pages, stride: layout.page_bytes() };
        let rows = [AttnRow { pos: position as u32, table: &[0, 1, 2, 3, 4] }];
        let (q, mut out) = (vec![0.0; hd], vec![0.0; hd]);
        let pool = Pool::new(1);
        attend(
            &pool,
            Level::best(),
            &params,
            &kv,
            &rows,
            Rows::dense(&q, hd),
            RowsMut::dense(&mut out, hd),
        );
        let weight = 1.0 / seen.clone().count() as f32;
        for (j, &o) in out.iter().enumerate() {
            let want = if seen.contains(&j) { weight } else { 0.0 };
            assert!(
                (o - want).abs() < 1e-7,
                "window {window:?}, position {position}: {j} weighs {o}"
            );
        }
    }
}

#[test]
fn masked_blocks_need_no_page() {
    let sequence = Sequence::new(KvLayout::new(1, 32, KvType::F32), 100, 30);
    let params = AttnParams { n_heads: 2, scale: 1.0, window: Some(20), sinks: None };
    let q = random(64, 31);
    let pool = Pool::new(1);
    let want = sequence.attend(&pool, Level::best(), &params, &[sequence.row(99)], &q);
    let table: Vec<u32> =
        [u32::MAX, u32::MAX].into_iter().chain(sequence.table[2..].iter().copied()).collect();
    let row = AttnRow { pos: 99, table: &table };
    assert_eq!(sequence.attend(&pool, Level::best(), &params, &[row], &q), want);
}

/// Rows of two sequences, mixed, in one call.
#[test]
fn sequences_side_by_side() {
    let layout = KvLayout::new(2, 32, KvType::F16);
    let (a, b) = (Sequence::new(layout, 90, 40), Sequence::new(layout, 50, 50));
    let pages: Vec<u8> = a.pages.iter().chain(&b.pages).copied().collect();
    let offset = (a.pages.len() / a.stride) as u32;
    let b_table: Vec<u32> = b.table.iter().map(|p| p + offset).collect();
    let params = AttnParams { n_heads: 4, scale: 0.3, window: None, sinks: None };
    let q = random(4 * 128, 60);
    let (pool, level) = (Pool::new(2), Level::best());
    let rows = [
        AttnRow { pos: 89, table: &a.table },
        AttnRow { pos: 48, table: &b_table },
        AttnRow { pos: 40, table: &a.table },
        AttnRow { pos: 49, table: &b_table },
    ];
    let mut got = vec![0.0; 4 * 128];
    let kv = KvPages { layout, data: &pages, stride: a.stride };
    attend(&pool, level, &params, &kv, &rows, Rows::dense(&q, 128), RowsMut::dense(&mut got, 128));
    for (i, (sequence, pos)) in [(&a, 89), (&b, 48), (&a, 40), (&b, 49)].into_iter().enumerate() {
        let q = &q[i * 128..][..128];
        assert_eq!(
            got[i * 128..][..128],
            sequence.attend(&pool, level, &params, &[sequence.row(pos)], q)
        );
    }
}

#[test]
fn stores_have_the_same_bits_at_every_level() {
    for kv_type in TYPES {
        let layout = KvLayout::new(3, 72, kv_type);
        let (k, v) = (random(216, 70), random(216, 71));
        let mut want: Option<Vec<u8>> = None;
        for level in Level::available() {
            let mut page = vec![0; layout.page_bytes()];
            layout.store(level, &mut page, 31, &k, &v);
            assert_eq!(&page, want.get_or_insert(page.clone()), "{kv_type:?} {level}");
        }
    }
}

#[test]
fn quantised_rows_of_zeros_and_of_nan() {
    let layout = KvLayout::new(1, 32, KvType::Q8);
    let params = AttnParams { n_heads: 1, scale: 1.0, window: None, sinks: None };
    let run = |k: f32, v: f32| {
        let mut page = vec![0; layout.page_bytes()];
        layout.store(Level::best(), &mut page, 0, &[k; 32], &[v; 32]);
        let kv = KvPages { layout, data: &page, stride: page.len() };
        let (q, mut out) = ([1.0; 32], [9.0; 32]);
        let (q, row) = (Rows::dense(&q, 32), AttnRow { pos: 0, table: &[0] });
        attend(&Pool::new(1), Level::best(), &params, &kv, &[row], q, RowsMut::dense(&mut out, 32));
        out[5]
    };
    assert_eq!(run(0.0, 0.0), 0.0);
    assert!(run(1.0, f32::NAN).is_nan());
    assert!(run(f32::NAN, 1.0).is_nan());
    assert!((run(2.0, -3.0) + 3.0).abs() < 1e-6);
}
