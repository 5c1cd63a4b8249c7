//! What arithmetic can do: multiply-adds per second with all operands in registers, on all threads of a pool.
//! A bench divides what it got by this, as by [`crate::bandwidth`].

use std::time::{Duration, Instant};

use crate::pool::Pool;
use crate::simd::Level;

/// Rounds; the fastest counts, since a shared machine has moments.
const ROUNDS: usize = 12;
/// How long a round takes at least.
const ROUND: Duration = Duration::from_millis(4);
/// Steps between two looks at the clock.
const STEPS: usize = 4096;
/// Independent sums: more than latency times issue width of any core.
const SUMS: usize = 16;

/// Multiply-adds per second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Peaks {
    /// 8-bit products into sums of 32 bits; where the instruction set adds in 16 bits first, with that addition.
    pub integer: f64,
    /// Fused, f32.
    pub float: f64,
}

/// Measures the instructions that the kernels of `level` are made of; none for portable code, which is no limit of
/// the machine.
pub fn measure(pool: &Pool, level: Level) -> Option<Peaks> {
    let kernels = kernels(level)?;
    let [integer, float] = kernels.map(|(kernel, macs)| {
        let mut best = 0.0f64;
        for _ in 0..ROUNDS {
            let clock = Instant::now();
            let steps = std::sync::atomic::AtomicU64::new(0);
            pool.run(&|_| {
                let mine = Instant::now();
                let mut n = 0;
                while mine.elapsed() < ROUND {
                    kernel();
                    n += STEPS as u64;
                }
                steps.fetch_add(n, std::sync::atomic::Ordering::Relaxed);
            });
            let steps = steps.into_inner() as f64;
            best = best.max(steps * (SUMS * macs) as f64 / clock.elapsed().as_secs_f64());
        }
        best
    });
    Some(Peaks { integer, float })
}

/// A function that runs [`STEPS`] steps of [`SUMS`] instructions, and multiply-adds of one: integer, float.
type Kernels = [(fn(), usize); 2];

fn kernels(level: Level) -> Option<Kernels> {
    if !Level::available().contains(&level) {
        return None;
    }
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512 => Some([(x86::int512, 64), (x86::float512, 16)]),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => Some([(x86::int256, 32), (x86::float256, 8)]),
        // The products of `usdot` are as many as those of `sdot`.
        #[cfg(target_arch = "aarch64")]
        Level::NeonI8mm | Level::NeonDot => Some([(arm::sdot, 16), (arm::float, 4)]),
        #[cfg(target_arch = "aarch64")]
        Level::Neon => Some([(arm::widening, 8), (arm::float, 4)]),
        _ => None,
    }
}

/// The same loop around any instruction.
#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
macro_rules! peak {
    ($name:ident, $features:literal, $zero:expr, $operand:expr, |$x:ident, $a:ident| $step:expr) => {
        pub(super) fn $name() {
            #[target_feature(enable = $features)]
            fn body() {
                let $a = black_box($operand);
                let mut sums = [$zero; SUMS];
                for _ in 0..STEPS {
                    for $x in &mut sums {
                        *$x = $step;
                    }
                }
                black_box(sums);
            }
            // SAFETY: `kernels` hands this out only where the level's instructions are there.
            unsafe { body() }
        }
    };
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    use super::{STEPS, SUMS};

    peak!(int512, "avx512f,avx512vnni", _mm512_setzero_si512(), _mm512_set1_epi8(3), |x, a| {
        _mm512_dpbusd_epi32(*x, a, a)
    });
    peak!(float512, "avx512f", _mm512_setzero_ps(), _mm512_set1_ps(0.5), |x, a| {
        _mm512_fmadd_ps(*x, a, a)
    });
    // The product depends on the sum, or it would be computed once.
    peak!(int256, "avx2", _mm256_setzero_si256(), _mm256_set1_epi8(3), |x, a| {
        _mm256_add_epi16(*x, _mm256_maddubs_epi16(*x, a))
    });
    peak!(float256, "avx2,fma", _mm256_setzero_ps(), _mm256_set1_ps(0.5), |x, a| {
        _mm256_fmadd_ps(*x, a, a)
    });
}

#[cfg(target_arch = "aarch64")]
mod arm {
    use std::arch::aarch64::*;
    use std::arch::asm;
    use std::hint::black_box;

    use super::{STEPS, SUMS};

    peak!(sdot, "neon,dotprod", vdupq_n_s32(0), vdupq_n_s8(3), |x, a| {
        let mut sum = *x;
        // SAFETY: a register operation; the instruction is enabled here.
        unsafe {
            asm!(
                "sdot {0:v}.4s, {1:v}.16b, {1:v}.16b",
                inout(vreg) sum,
                in(vreg) a,
                options(pure, nomem, nostack, preserves_flags)
            );
        }
        sum
    });
    peak!(widening, "neon", vdupq_n_s16(0), vdup_n_s8(3), |x, a| vmlal_s8(*x, a, a));
    peak!(float, "neon", vdupq_n_f32(0.0), vdupq_n_f32(0.5), |x, a| vfmaq_f32(*x, a, a));
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every vector level says what its instructions can do; portable code has no such figure.
    #[test]
    fn levels_of_this_machine_have_peaks() {
        let pool = Pool::new(1);
        for level in Level::available() {
            let peaks = measure(&pool, level);
            assert_eq!(peaks.is_some(), level != Level::Scalar, "{level}");
            if let Some(p) = peaks {
                assert!(p.integer > 0.0 && p.float > 0.0, "{p:?}");
            }
        }
    }
}
