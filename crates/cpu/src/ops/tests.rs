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

/// Calls `f` for every level and several thread counts; its results must have the same bits. Returns them.
fn same_everywhere(f: impl Fn(&Pool, Level) -> Vec<f32>) -> Vec<f32> {
    let want = f(&Pool::new(1), Level::Scalar);
    for threads in [1, 2, 3] {
        let pool = Pool::new(threads);
        for level in Level::available() {
            let got = f(&pool, level);
            let same = got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits());
            assert!(same && got.len() == want.len(), "{level}, {threads} threads");
        }
    }
    want
}

#[test]
fn rms_norm_is_the_formula() {
    for (rows, width) in [(1, 1), (3, 15), (2, 16), (5, 17), (4, 64), (33, 720), (1, 2881)] {
        let stride = width + 3;
        let x = random(rows * stride, 1);
        let w = random(width, 2);
        for weight in [None, Some(&w[..])] {
            let got = same_everywhere(|pool, level| {
                let mut out = vec![7.0; rows * stride];
                let x = Rows::new(&x, rows, width, stride);
                rms_norm(pool, level, x, weight, 1e-5, RowsMut::new(&mut out, rows, width, stride));
                out
            });
            for r in 0..rows {
                let row = &x[r * stride..][..width];
                let mean = row.iter().map(|&v| (v as f64).powi(2)).sum::<f64>() / width as f64;
                for i in 0..width {
                    let want =
                        row[i] as f64 / (mean + 1e-5).sqrt() * weight.map_or(1.0, |w| w[i] as f64);
                    let error = (got[r * stride + i] as f64 - want).abs();
                    assert!(error <= 1e-6 * want.abs(), "{rows}x{width}: row {r}, {i}");
                }
                // Nothing is written between the rows.
                assert!(got[r * stride + width..][..3].iter().all(|&v| v == 7.0));
            }
            // A row alone, and the in-place form, have the same bits.
            let mut alone = vec![0.0; width];
            let last = Rows::dense(&x[(rows - 1) * stride..][..width], width);
            let pool = Pool::new(1);
            rms_norm(&pool, Level::best(), last, weight, 1e-5, RowsMut::dense(&mut alone, width));
            assert_eq!(alone, got[(rows - 1) * stride..][..width]);
            let mut inside = x.clone();
            let view = RowsMut::new(&mut inside, rows, width, stride);
            rms_norm_heads(&pool, Level::best(), view, width, weight, 1e-5);
            assert_eq!(inside[(rows - 1) * stride..][..width], alone);
        }
    }
}

#[test]
fn head_norm_norms_every_head() {
    let (rows, heads, hd) = (9, 4, 96);
    let x = random(rows * heads * hd, 3);
    let w = random(hd, 4);
    let got = same_everywhere(|pool, level| {
        let mut y = x.clone();
        rms_norm_heads(pool, level, RowsMut::dense(&mut y, heads * hd), hd, Some(&w), 1e-6);
        y
    });
    let mut want = vec![0.0; x.len()];
    let (pool, level) = (Pool::new(1), Level::best());
    rms_norm(&pool, level, Rows::dense(&x, hd), Some(&w), 1e-6, RowsMut::dense(&mut want, hd));
    assert_eq!(got, want);
}

#[test]
fn rope_rotates_pairs() {
    let (rows, heads, hd, rot) = (7, 3, 24, 18);
    let inv_freq: Vec<f32> =
        (0..rot / 2).map(|i| vecmath::pow_f64(1e4, -2.0 * i as f64 / rot as f64) as f32).collect();
    let positions = [0, 1, 2, 100, 4095, 131_071, 1_000_000];
    let x = random(rows * heads * hd, 5);
    for pairs in [RopePairs::Halves, RopePairs::Adjacent] {
        let got = same_everywhere(|pool, level| {
            let mut cos = vec![0.0; rows * rot / 2];
            let mut sin = cos.clone();
            rope_angles(level, &positions, &inv_freq, 1.25, &mut cos, &mut sin);
            let mut y = x.clone();
            let turn = Turn { head_dim: hd, rotary_dim: rot, pairs };
            apply_rope(pool, level, RowsMut::dense(&mut y, heads * hd), turn, &cos, &sin);
            y
        });
        for (r, position) in positions.into_iter().enumerate() {
            for h in 0..heads {
                let at = |i: usize| (r * heads + h) * hd + i;
                for (i, freq) in inv_freq.iter().enumerate() {
                    let angle = (position as f32 * freq) as f64;
                    let (s, c) = angle.sin_cos();
                    let (first, second) = match pairs {
                        RopePairs::Halves => (at(i), at(i + rot / 2)),
                        RopePairs::Adjacent => (at(2 * i), at(2 * i + 1)),
                    };
                    let (a, b) = (x[first] as f64, x[second] as f64);
                    assert!((got[first] as f64 - 1.25 * (a * c - b * s)).abs() < 4e-7);
                    assert!((got[second] as f64 - 1.25 * (b * c + a * s)).abs() < 4e-7);
                }
                assert_eq!(got[at(rot)..at(hd)], x[at(rot)..at(hd)]);
            }
        }
    }
}

#[test]
fn gated_activations() {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    let clamped = Activation::ClampedSwiglu { alpha: 1.702, limit: 7.0 };
    for n in [0, 1, 15, 33, 20_000] {
        let gate: Vec<f32> = random(n, 6).iter().map(|x| x * 12.0).collect();
        let up: Vec<f32> = random(n, 7).iter().map(|x| x * 12.0).collect();
        for activation in [Activation::Silu, Activation::GeluTanh, clamped] {
            let got = same_everywhere(|pool, level| {
                let mut out = gate.clone();
                glu(pool, level, activation, &mut out, &up);
                out
            });
            for i in 0..n {
                let (g, u) = (gate[i] as f64, up[i] as f64);
                let want = match activation {
                    Activation::Silu => g * sigmoid(g) * u,
                    Activation::GeluTanh => {
                        let z = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g.powi(3));
                        0.5 * g * (1.0 + z.tanh()) * u
                    }
                    _ => {
                        let (g, u) = (g.min(7.0), u.clamp(-7.0, 7.0));
                        (u + 1.0) * g * sigmoid(1.702 * g)
                    }
                };
                let error = (got[i] as f64 - want).abs();
                assert!(error <= 1e-6 * want.abs() + 2e-6, "{activation:?}({g}, {u}) = {}", got[i]);
            }
        }
    }
}

#[test]
fn element_wise() {
    for n in [1, 31, 10_000] {
        let (x, y) = (random(n, 8), random(n, 9));
        let got = same_everywhere(|pool, level| {
            let mut out = y.clone();
            add_into(pool, level, &x, &mut out);
            scale(pool, level, 3.0, &mut out);
            mul_into(pool, level, &x, &mut out);
            add_bias(pool, level, &x, RowsMut::dense(&mut out, n));
            softcap(pool, level, 2.0, &mut out);
            out
        });
        for i in 0..n {
            let (x, y) = (x[i] as f64, y[i] as f64);
            let want = 2.0 * (((y + x) * 3.0 * x + x) / 2.0).tanh();
            assert!((got[i] as f64 - want).abs() < 1e-6);
        }
    }
}

#[test]
fn routing_ranks_by_logit_and_breaks_ties_downwards() {
    let cases: [(&str, &[f32], usize, &[u16]); 6] = [
        ("plain", &[0.0, 3.0, 1.0, 2.0], 2, &[1, 3]),
        ("tie", &[1.0, 2.0, 2.0, 2.0], 2, &[1, 2]),
        ("tie of all", &[5.0; 6], 4, &[0, 1, 2, 3]),
        ("tie of zeros", &[-0.0, 0.0, -1.0], 2, &[0, 1]),
        ("all", &[1.0, 3.0, 2.0], 3, &[1, 2, 0]),
        ("masked", &[f32::NEG_INFINITY, 1.0, f32::NEG_INFINITY], 2, &[1, 0]),
    ];
    for (name, logits, top_k, want) in cases {
        for level in Level::available() {
            let (mut ids, mut weights) = (vec![0; top_k], vec![0.0; top_k]);
            route(level, logits, Score::SoftmaxSelected, &mut ids, &mut weights).expect(name);
            assert_eq!(ids, want, "{name}");
            assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6, "{name}");
        }
    }
}

#[test]
fn routing_weights() {
    for experts in [4, 16, 32, 61, 128] {
        let logits: Vec<f32> = random(experts, 10).iter().map(|x| x * 8.0).collect();
        for score in [Score::SoftmaxSelected, Score::SoftmaxAll] {
            let mut ids = [0u16; 4];
            let got = same_everywhere(|_, level| {
                let (mut ids, mut weights) = ([0; 4], vec![0.0; 4]);
                route(level, &logits, score, &mut ids, &mut weights).unwrap();
                weights
            });
            let mut weights = [0.0; 4];
            route(Level::best(), &logits, score, &mut ids, &mut weights).unwrap();
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]));
            let chosen: Vec<usize> = ids.iter().map(|&i| i as usize).collect();
            assert_eq!(chosen, order[..4]);
            let over = if score == Score::SoftmaxAll { &order[..] } else { &order[..4] };
            let sum: f64 = over.iter().map(|&e| (logits[e] as f64).exp()).sum();
            for (w, &e) in got.iter().zip(&chosen) {
                let want = (logits[e] as f64).exp() / sum;
                assert!((*w as f64 / want - 1.0).abs() < 1e-6);
            }
        }
    }
}

#[test]
fn routing_refuses_nan() {
    let (mut ids, mut weights) = ([0; 2], [0.0; 2]);
    let mut go = |logits: &[f32]| {
        route(Level::best(), logits, Score::SoftmaxSelected, &mut ids, &mut weights)
    };
    assert_eq!(go(&[0.0, 1.0, f32::NAN]), Err(RouteError::Nan { expert: 2 }));
    let infinite = RouteError::Infinite { expert: 1, value: f32::INFINITY };
    assert_eq!(go(&[0.0, f32::INFINITY]), Err(infinite));
    let nothing = RouteError::Infinite { expert: 0, value: f32::NEG_INFINITY };
    assert_eq!(go(&[f32::NEG_INFINITY; 3]), Err(nothing));
}

#[test]
fn combine_sums_in_rank_order() {
    for (rows, top_k, d) in [(1, 1, 5), (3, 4, 17), (40, 3, 300)] {
        let experts = random(rows * top_k * d, 11);
        let weights = random(rows * top_k, 12);
        let got = same_everywhere(|pool, level| {
            let mut out = vec![9.0; rows * d];
            combine(pool, level, &experts, &weights, RowsMut::dense(&mut out, d));
            out
        });
        for r in 0..rows {
            for i in 0..d {
                let want = (0..top_k).fold(0.0f32, |sum, k| {
                    weights[r * top_k + k].mul_add(experts[(r * top_k + k) * d + i], sum)
                });
                assert_eq!(got[r * d + i].to_bits(), want.to_bits());
            }
        }
    }
}
