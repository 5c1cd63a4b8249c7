//! One body, compiled once per vector level.
//!
//! The bodies are plain Rust on slices and fixed arrays: additions, products, divisions, square roots
//! and explicit `mul_add`, all exactly rounded by IEEE 754. Rust neither contracts nor reassociates
//! them, so the compiler may use any vector width and the bits stay the same.

/// Whether this machine runs code compiled for `level`. (A [`Level`] can be named anywhere, parsed from
/// a command line for instance, so the fenced calls below ask for themselves.)
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn runs(level: crate::simd::Level) -> bool {
    use crate::simd::Level;
    match level {
        Level::Scalar => true,
        Level::Avx2 => {
            is_x86_feature_detected!("avx2")
                && is_x86_feature_detected!("fma")
                && is_x86_feature_detected!("f16c")
        }
        Level::Avx512 => {
            runs(Level::Avx2)
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        }
        Level::Neon | Level::NeonDot | Level::NeonI8mm => false,
    }
}

/// Declares `fn name(level, args...)` that runs an `#[inline(always)]` body compiled for `level`, or the
/// portable compilation where the machine lacks that level: the bits are the same.
///
/// `per_level! { fn name(arg: Type) -> Ret = body }`, or with one body for each vector width:
/// `= avx512: a, avx2: b, portable: c`.
macro_rules! per_level {
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)?
        = avx512: $avx512:expr, avx2: $avx2:expr, portable: $portable:expr) => {
        $(#[$meta])*
        $vis fn $name(level: $crate::simd::Level, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2,fma,f16c")]
                fn avx2($($arg: $ty),*) $(-> $ret)? {
                    ($avx2)($($arg),*)
                }
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
                fn avx512($($arg: $ty),*) $(-> $ret)? {
                    ($avx512)($($arg),*)
                }
                if level == $crate::simd::Level::Avx512 && $crate::dispatch::runs(level) {
                    // SAFETY: `runs` has found every feature that `avx512` is compiled with.
                    return unsafe { avx512($($arg),*) };
                }
                if level == $crate::simd::Level::Avx2 && $crate::dispatch::runs(level) {
                    // SAFETY: `runs` has found every feature that `avx2` is compiled with.
                    return unsafe { avx2($($arg),*) };
                }
            }
            let _ = level;
            ($portable)($($arg),*)
        }
    };
    ($(#[$meta:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $(-> $ret:ty)? = $body:expr) => {
        $crate::dispatch::per_level! {
            $(#[$meta])* $vis fn $name($($arg: $ty),*) $(-> $ret)?
                = avx512: $body, avx2: $body, portable: $body
        }
    };
}
pub(crate) use per_level;
