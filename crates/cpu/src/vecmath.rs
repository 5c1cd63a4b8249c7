//! Elementary functions, each written out once as IEEE operations, so that every level, thread and
//! backend computes the same bits.
//!
//! f32 functions are within a few ulp (bounds are asserted in the tests, against f64 `std`). The scalar
//! functions are the definition; the `*_slice` functions are the same bodies compiled for a vector level.
//! The f64 functions serve rotary tables and constants, where a result is rounded to f32 afterwards.
//!
//! Everywhere: NaN in, NaN out; no flushing of subnormals.

use crate::dispatch::per_level;

/// Adding and subtracting it rounds an f32 of magnitude below 2^22 to the nearest integer, ties to even.
const ROUND_F32: f32 = 12_582_912.0; // 1.5 * 2^23
/// The same for an f64 below 2^51.
const ROUND_F64: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52

/// `e^x`: +0 below about -103.97, +inf above about 88.72.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // ln 2 = LN2_HI + LN2_LO
    const LN2_HI: f32 = std::f32::consts::LN_2;
    const LN2_LO: f32 = -1.904_654_2e-9;
    // Outside these bounds the result is 0 or infinite anyway. Comparisons keep NaN.
    let x = if x < -105.0 { -105.0 } else { x };
    let x = if x > 89.0 { 89.0 } else { x };
    // x = n ln2 + r, |r| <= ln2 / 2
    let shifted = x.mul_add(std::f32::consts::LOG2_E, ROUND_F32);
    let n = shifted - ROUND_F32;
    let r = n.mul_add(-LN2_HI, x);
    let r = n.mul_add(-LN2_LO, r);
    // e^r = 1 + r + r^2 p(r); minimax, relative error of the sum 3.1e-9
    let p = 0.001_381_431_8_f32;
    let p = p.mul_add(r, 0.008_368_852);
    let p = p.mul_add(r, 0.041_668_4);
    let p = p.mul_add(r, 0.166_665_2);
    let p = p.mul_add(r, 0.499_999_94);
    let e = p.mul_add(r * r, r) + 1.0;
    // 2^n in two factors, each a normal number, so that subnormal results are rounded once.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND_F32.to_bits() as i32);
    let half = n >> 1;
    let rest = n.wrapping_sub(half);
    e * power_of_two(half) * power_of_two(rest)
}

/// `2^n` for `-126 <= n <= 127`.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) as u32) << 23)
}

/// Natural logarithm, correctly rounded but for double rounding: -inf at 0, NaN below.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    ln_f64(x as f64) as f32
}

/// `ln(1 + t)` for `0 <= t <= 1`.
#[inline(always)]
fn ln_1p_unit(t: f32) -> f32 {
    // 2 atanh(s) = 2 s + s^3 p(s^2), s <= 1/3; minimax, relative error 1.2e-10
    let s = t / (t + 2.0);
    let z = s * s;
    let p = 0.243_083_25_f32;
    let p = p.mul_add(z, 0.214_258_5);
    let p = p.mul_add(z, 0.286_170_36);
    let p = p.mul_add(z, 0.399_988_74);
    let p = p.mul_add(z, 0.666_666_75);
    (z * s).mul_add(p, s + s)
}

/// `1 / (1 + e^-x)`
#[inline(always)]
pub fn sigmoid(x: f32) -> f32 {
    let e = exp(-x.abs());
    let top = if x < 0.0 { e } else { 1.0 };
    top / (1.0 + e)
}

/// `x sigmoid(x)`; -0 at -inf.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    let x = if x < -200.0 { -200.0 } else { x };
    x * sigmoid(x)
}

/// Hyperbolic tangent.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let a = x.abs();
    // |x| < 0.625: x + x^3 p(x^2); minimax, relative error 4.2e-9
    let z = x * x;
    let p = -0.005_717_037_f32;
    let p = p.mul_add(z, 0.020_650_579);
    let p = p.mul_add(z, -0.053_743_497);
    let p = p.mul_add(z, 0.133_314_91);
    let p = p.mul_add(z, -0.333_332_84);
    let small = (z * x).mul_add(p, x);
    // otherwise 1 - 2 / (e^2|x| + 1)
    let large = 1.0 - 2.0 / (exp(a + a) + 1.0);
    (if a < 0.625 { small } else { large }).copysign(x)
}

/// GELU in its tanh form, `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`; -0 at -inf.
///
/// Computed as `x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))`, the same function without the cancellation.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769_2;
    let x = if x < -30.0 { -30.0 } else { x };
    let cube = x * x * x;
    x * sigmoid(TWO_SQRT_2_OVER_PI * cube.mul_add(0.044_715, x))
}

/// `ln(1 + e^x)`
#[inline(always)]
pub fn softplus(x: f32) -> f32 {
    let positive = if x < 0.0 { 0.0 } else { x };
    positive + ln_1p_unit(exp(-x.abs()))
}

/// `e^x` in f64, for `|x| <= 700`.
#[inline(always)]
pub fn exp_f64(x: f64) -> f64 {
    const LN2_LO: f64 = 2.319_046_813_846_299_6e-17;
    let shifted = x.mul_add(std::f64::consts::LOG2_E, ROUND_F64);
    let n = shifted - ROUND_F64;
    let r = n.mul_add(-std::f64::consts::LN_2, x);
    let r = n.mul_add(-LN2_LO, r);
    // Taylor to r^13 / 13!; the next term is below 5e-18.
    let mut e = 1.0 / 6_227_020_800.0;
    for c in [
        1.0 / 479_001_600.0,
        1.0 / 39_916_800.0,
        1.0 / 3_628_800.0,
        1.0 / 362_880.0,
        1.0 / 40_320.0,
        1.0 / 5_040.0,
        1.0 / 720.0,
        1.0 / 120.0,
        1.0 / 24.0,
        1.0 / 6.0,
        1.0 / 2.0,
        1.0,
        1.0,
    ] {
        e = r.mul_add(e, c);
    }
    let n = (shifted.to_bits() as i64).wrapping_sub(ROUND_F64.to_bits() as i64);
    e * f64::from_bits((n.wrapping_add(1023) as u64) << 52)
}

/// Natural logarithm in f64 (of normal numbers): -inf at 0, NaN below.
#[inline(always)]
pub fn ln_f64(x: f64) -> f64 {
    const LN2_LO: f64 = 2.319_046_813_846_299_6e-17;
    // x = 2^n m with m in [sqrt(1/2), sqrt(2))
    const SQRT_HALF_BITS: u64 = 0x3fe6_a09e_667f_3bcd;
    let offset = x.to_bits().wrapping_sub(SQRT_HALF_BITS);
    let n = ((offset as i64) >> 52) as i32 as f64;
    let m = f64::from_bits((offset & 0x000f_ffff_ffff_ffff).wrapping_add(SQRT_HALF_BITS));
    // ln m = 2 atanh(s), s = (m - 1) / (m + 1), |s| < 0.172; Taylor to s^23 / 23
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut p = 2.0 / 23.0;
    for c in [
        2.0 / 21.0,
        2.0 / 19.0,
        2.0 / 17.0,
        2.0 / 15.0,
        2.0 / 13.0,
        2.0 / 11.0,
        2.0 / 9.0,
        2.0 / 7.0,
        2.0 / 5.0,
        2.0 / 3.0,
    ] {
        p = z.mul_add(p, c);
    }
    let mantissa = (z * s).mul_add(p, s + s);
    let y = n.mul_add(std::f64::consts::LN_2, n.mul_add(LN2_LO, mantissa));
    let y = if x == f64::INFINITY { x } else { y };
    let y = if x == 0.0 { f64::NEG_INFINITY } else { y };
    if x >= 0.0 { y } else { f64::NAN }
}

/// `base^exponent` in f64 for positive `base`, as in the rotary frequencies `theta^(-2 i / d)`.
#[inline(always)]
pub fn pow_f64(base: f64, exponent: f64) -> f64 {
    exp_f64(exponent * ln_f64(base))
}

/// `2^x` in f64, for `|x| <= 1000`.
#[inline(always)]
pub fn exp2_f64(x: f64) -> f64 {
    exp_f64(x * std::f64::consts::LN_2)
}

/// Sine and cosine of an angle in radians, `|x| <= 1e9`: absolute error below 1e-15 up to 1e6.
#[inline(always)]
pub fn sin_cos_f64(x: f64) -> (f64, f64) {
    // pi / 2 = PIO2 + PIO2_LO
    const PIO2: f64 = std::f64::consts::FRAC_PI_2;
    const PIO2_LO: f64 = 6.123_233_995_736_766e-17;
    // x = n pi/2 + r, |r| <= pi/4; each product is exact inside the fused operation.
    let shifted = x.mul_add(std::f64::consts::FRAC_2_PI, ROUND_F64);
    let n = shifted - ROUND_F64;
    let r = n.mul_add(-PIO2, x);
    let r = n.mul_add(-PIO2_LO, r);
    let z = r * r;
    // Taylor; the first terms left out are r^19 / 19! < 1e-19 and r^18 / 18! < 3e-18.
    let mut s = 1.0 / 355_687_428_096_000.0;
    for c in [
        -1.0 / 1_307_674_368_000.0,
        1.0 / 6_227_020_800.0,
        -1.0 / 39_916_800.0,
        1.0 / 362_880.0,
        -1.0 / 5_040.0,
        1.0 / 120.0,
        -1.0 / 6.0,
    ] {
        s = z.mul_add(s, c);
    }
    let s = (z * r).mul_add(s, r);
    let mut c = 1.0 / 20_922_789_888_000.0;
    for k in [
        -1.0 / 87_178_291_200.0,
        1.0 / 479_001_600.0,
        -1.0 / 3_628_800.0,
        1.0 / 40_320.0,
        -1.0 / 720.0,
        1.0 / 24.0,
        -1.0 / 2.0,
        1.0,
    ] {
        c = z.mul_add(c, k);
    }
    // The quadrant: the last two bits of n.
    let q = shifted.to_bits();
    let (sin, cos) = if q & 1 == 0 { (s, c) } else { (c, s) };
    let sin = if q & 2 == 0 { sin } else { -sin };
    let cos = if q.wrapping_add(1) & 2 == 0 { cos } else { -cos };
    (sin, cos)
}

macro_rules! slices {
    ($($(#[$meta:meta])* $name:ident = $f:ident;)*) => {$(
        per_level! {
            $(#[$meta])*
            pub fn $name(xs: &mut [f32]) = {
                #[inline(always)]
                fn body(xs: &mut [f32]) {
                    for x in xs {
                        *x = $f(*x);
                    }
                }
                body
            }
        }
    )*};
}

slices! {
    /// [`exp`] of every element, in place.
    exp_slice = exp;
    /// [`ln`] of every element, in place.
    ln_slice = ln;
    /// [`sigmoid`] of every element, in place.
    sigmoid_slice = sigmoid;
    /// [`silu`] of every element, in place.
    silu_slice = silu;
    /// [`tanh`] of every element, in place.
    tanh_slice = tanh;
    /// [`gelu_tanh`] of every element, in place.
    gelu_tanh_slice = gelu_tanh;
    /// [`softplus`] of every element, in place.
    softplus_slice = softplus;
}

per_level! {
    /// Sine and cosine, evaluated in f64 and rounded to f32, of every angle in radians. Three slices of one length.
    pub fn sin_cos_slice(angles: &[f32], sin: &mut [f32], cos: &mut [f32]) = {
        #[inline(always)]
        fn body(angles: &[f32], sin: &mut [f32], cos: &mut [f32]) {
            assert!(angles.len() == sin.len() && angles.len() == cos.len());
            for i in 0..angles.len() {
                let (s, c) = sin_cos_f64(angles[i] as f64);
                sin[i] = s as f32;
                cos[i] = c as f32;
            }
        }
        body
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Level;

    type SliceFn = fn(Level, &mut [f32]);

    /// Distance of `got` from `want` in ulps of `want` (of the smallest normal number at least).
    fn ulps(got: f32, want: f64) -> f64 {
        if got as f64 == want || got == want as f32 {
            return 0.0;
        }
        let exponent = want.abs().max(f32::MIN_POSITIVE as f64).log2().floor();
        (got as f64 - want).abs() / (exponent - 23.0).exp2()
    }

    fn sweep(lo: f32, hi: f32, n: usize) -> Vec<f32> {
        (0..=n).map(|i| lo + (hi - lo) * (i as f32 / n as f32)).collect()
    }

    struct Case {
        name: &'static str,
        f: SliceFn,
        reference: fn(f64) -> f64,
        range: (f32, f32),
        max_ulps: f64,
        at_minus_inf: f32,
        at_inf: f32,
    }

    fn cases() -> Vec<Case> {
        let case = |name, f, reference, range, max_ulps, at_minus_inf, at_inf| Case {
            name,
            f,
            reference,
            range,
            max_ulps,
            at_minus_inf,
            at_inf,
        };
        let inf = f32::INFINITY;
        vec![
            case("exp", exp_slice, f64::exp, (-87.0, 88.5), 1.5, 0.0, inf),
            case("exp near 0", exp_slice, f64::exp, (-1.0, 1.0), 1.5, 0.0, inf),
            case("exp subnormal", exp_slice, f64::exp, (-104.0, -87.0), 1.5, 0.0, inf),
            case("ln", ln_slice, f64::ln, (1e-30, 10.0), 0.51, f32::NAN, inf),
            case("ln near 1", ln_slice, f64::ln, (0.9, 1.1), 0.51, f32::NAN, inf),
            case("ln large", ln_slice, f64::ln, (1.0, 3e38), 0.51, f32::NAN, inf),
            case("ln subnormal", ln_slice, f64::ln, (1e-45, 1e-38), 0.51, f32::NAN, inf),
            case(
                "sigmoid",
                sigmoid_slice,
                |x| 1.0 / (1.0 + (-x).exp()),
                (-85.0, 85.0),
                3.0,
                0.0,
                1.0,
            ),
            case("silu", silu_slice, |x| x / (1.0 + (-x).exp()), (-80.0, 80.0), 3.5, -0.0, inf),
            case("tanh", tanh_slice, f64::tanh, (-10.0, 10.0), 2.0, -1.0, 1.0),
            case("tanh near 0", tanh_slice, f64::tanh, (-0.7, 0.7), 2.0, -1.0, 1.0),
            case(
                "softplus",
                softplus_slice,
                |x| if x > 0.0 { x + (-x).exp().ln_1p() } else { x.exp().ln_1p() },
                (-80.0, 80.0),
                3.0,
                0.0,
                inf,
            ),
        ]
    }

    #[test]
    fn close_to_f64() {
        for c in cases() {
            for level in Level::available() {
                let n = if level == Level::Scalar { 20_000 } else { 400_000 };
                let xs = sweep(c.range.0, c.range.1, n);
                let mut ys = xs.clone();
                (c.f)(level, &mut ys);
                let (worst, at) =
                    xs.iter().zip(&ys).fold((0.0, 0.0), |worst: (f64, f32), (&x, &y)| {
                        let u = ulps(y, (c.reference)(x as f64));
                        if u > worst.0 || u.is_nan() { (u, x) } else { worst }
                    });
                eprintln!("{} {level}: {worst:.2} ulp at {at}", c.name);
                assert!(worst <= c.max_ulps, "{} {level}: {worst} ulp at {at}", c.name);
            }
        }
    }

    /// Absolute error relative to |x|: in the far negative tail the argument of the exponential is
    /// itself rounded, which costs relative but no absolute accuracy.
    #[test]
    fn gelu_close_to_f64() {
        let reference = |x: f64| {
            let u = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x);
            x / (1.0 + (-2.0 * u).exp())
        };
        for level in Level::available() {
            let xs = sweep(-12.0, 12.0, 100_000);
            let mut ys = xs.clone();
            gelu_tanh_slice(level, &mut ys);
            for (&x, &y) in xs.iter().zip(&ys) {
                let want = reference(x as f64);
                let error = (y as f64 - want).abs();
                assert!(
                    error <= 3e-7 * want.abs() + 2e-8 * x.abs() as f64,
                    "{level}: gelu({x}) = {y}, not {want}"
                );
            }
        }
    }

    #[test]
    fn edges() {
        let same = |a: f32, b: f32| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
        for c in cases() {
            for level in Level::available() {
                // Long enough to meet the vector loop.
                let at = |x: f32| {
                    let mut xs = [x; 37];
                    (c.f)(level, &mut xs);
                    assert!(xs.iter().all(|&y| same(y, xs[0])));
                    xs[0]
                };
                let (below, above) = (at(f32::NEG_INFINITY), at(f32::INFINITY));
                assert!(same(below, c.at_minus_inf), "{} {level} at -inf: {below}", c.name);
                assert!(same(above, c.at_inf), "{} {level} at inf: {above}", c.name);
                assert!(at(f32::NAN).is_nan(), "{} {level} at NaN", c.name);
            }
        }
        assert_eq!(exp(0.0).to_bits(), 1.0f32.to_bits());
        assert_eq!(exp(-0.0).to_bits(), 1.0f32.to_bits());
        assert_eq!(exp(-1e30), 0.0);
        assert_eq!(exp(1e30), f32::INFINITY);
        assert_eq!(exp(88.8), f32::INFINITY);
        assert_eq!(tanh(-0.0).to_bits(), (-0.0f32).to_bits());
        assert_eq!(gelu_tanh(f32::INFINITY), f32::INFINITY);
        assert_eq!(gelu_tanh(f32::NEG_INFINITY), 0.0);
        assert_eq!(gelu_tanh(3e38), 3e38);
        assert!(gelu_tanh(f32::NAN).is_nan());
        assert_eq!(ln(0.0), f32::NEG_INFINITY);
        assert!(ln(-1.0).is_nan());
        assert_eq!(ln(1.0), 0.0);
    }

    #[test]
    fn same_bits_at_every_level() {
        // Random bit patterns: all exponents, both signs, NaN and infinities among them.
        let mut state = 1u32;
        let xs: Vec<f32> = (0..20_003)
            .map(|i| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                if i % 2 == 0 {
                    f32::from_bits(state)
                } else {
                    (state as f32 / u32::MAX as f32 - 0.5) * 60.0
                }
            })
            .collect();
        let mut fns: Vec<(&str, SliceFn)> = cases().iter().map(|c| (c.name, c.f)).collect();
        fns.push(("gelu", gelu_tanh_slice));
        for (name, f) in fns {
            let mut want = xs.clone();
            f(Level::Scalar, &mut want);
            for level in Level::available() {
                let mut got = xs.clone();
                f(level, &mut got);
                for i in 0..xs.len() {
                    let same = got[i].to_bits() == want[i].to_bits()
                        || (got[i].is_nan() && want[i].is_nan());
                    assert!(same, "{name}({}) {level}: {} and {}", xs[i], got[i], want[i]);
                }
            }
        }
    }

    #[test]
    fn sine_and_cosine() {
        let mut angles = sweep(-30.0, 30.0, 100_000);
        angles.extend(sweep(0.0, 1e6, 300_000));
        angles.extend((0..20_000).map(|i| i as f32 * 49.7));
        let n = angles.len();
        let mut expected: Option<(Vec<f32>, Vec<f32>)> = None;
        for level in Level::available() {
            let (mut sin, mut cos) = (vec![0.0; n], vec![0.0; n]);
            sin_cos_slice(level, &angles, &mut sin, &mut cos);
            for i in 0..n {
                let (s, c) = (angles[i] as f64).sin_cos();
                assert!(
                    ulps(sin[i], s) <= 0.501,
                    "{level}: sin({}) = {}, not {s}",
                    angles[i],
                    sin[i]
                );
                assert!(
                    ulps(cos[i], c) <= 0.501,
                    "{level}: cos({}) = {}, not {c}",
                    angles[i],
                    cos[i]
                );
            }
            let (s, c) = expected.get_or_insert_with(|| (sin.clone(), cos.clone()));
            assert!(*s == sin && *c == cos, "{level}");
        }
    }

    #[test]
    fn f64_functions() {
        for i in 0..20_000 {
            let x = i as f64 / 100.0 - 100.0;
            let close = |got: f64, want: f64, tolerance: f64| {
                assert!((got / want - 1.0).abs() < tolerance, "{x}: {got} and {want}");
            };
            close(exp_f64(x), x.exp(), 5e-16);
            close(exp2_f64(x), x.exp2(), 3e-14);
            let (s, c) = sin_cos_f64(x * 1e4);
            assert!(
                (s - (x * 1e4).sin()).abs() < 1e-15 && (c - (x * 1e4).cos()).abs() < 1e-15,
                "{x}"
            );
            if i != 10_100 {
                close(ln_f64(i as f64 / 100.0 + 0.001), (i as f64 / 100.0 + 0.001).ln(), 4e-16);
            }
        }
        for theta in [1e4, 1.5e5, 5e5, 1e6, 1e7] {
            for i in 0..64 {
                let e = -2.0 * i as f64 / 128.0;
                let (got, want) = (pow_f64(theta, e), f64::powf(theta, e));
                assert!((got / want - 1.0).abs() < 1e-14);
                assert!((got as f32 / want as f32 - 1.0).abs() < 1e-7);
            }
        }
    }
}
