//! Which vector instructions the kernels use. Chosen once at start; results do not depend on it.

use std::fmt;
use std::str::FromStr;

/// A vector width with all instructions its kernels need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Level {
    /// Portable code, as the oracle.
    Scalar,
    /// x86-64: AVX2, FMA, F16C.
    Avx2,
    /// x86-64: AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
    /// AArch64: NEON, which every one has.
    Neon,
    /// AArch64: NEON and dot products of bytes (`FEAT_DotProd`).
    NeonDot,
    /// AArch64: the same and matrix products of bytes (`FEAT_I8MM`).
    NeonI8mm,
}

impl Level {
    /// All there are, of any machine.
    const ALL: [Level; 6] =
        [Level::Scalar, Level::Avx2, Level::Avx512, Level::Neon, Level::NeonDot, Level::NeonI8mm];

    /// All levels that this machine can run, slowest first.
    pub fn available() -> Vec<Level> {
        #[allow(unused_mut)]
        let mut levels = vec![Level::Scalar];
        #[cfg(target_arch = "x86_64")]
        {
            let avx2 = is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c");
            if avx2 {
                levels.push(Level::Avx2);
            }
            if avx2
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx512vnni")
            {
                levels.push(Level::Avx512);
            }
        }
        #[cfg(target_arch = "aarch64")]
        {
            levels.push(Level::Neon);
            if std::arch::is_aarch64_feature_detected!("dotprod") {
                levels.push(Level::NeonDot);
                if std::arch::is_aarch64_feature_detected!("i8mm") {
                    levels.push(Level::NeonI8mm);
                }
            }
        }
        levels
    }

    /// The fastest level of this machine.
    pub fn best() -> Level {
        *Level::available().last().expect("scalar is always there")
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Level::Scalar => "scalar",
            Level::Avx2 => "avx2",
            Level::Avx512 => "avx512",
            Level::Neon => "neon",
            Level::NeonDot => "neon-dot",
            Level::NeonI8mm => "neon-i8mm",
        })
    }
}

impl FromStr for Level {
    type Err = String;
    fn from_str(s: &str) -> Result<Level, String> {
        Level::ALL.into_iter().find(|l| l.to_string() == s).ok_or_else(|| {
            let known = Level::ALL.map(|l| l.to_string()).join(", ");
            format!("unknown vector level {s:?}; known: {known}")
        })
    }
}
