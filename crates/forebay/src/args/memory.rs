//! `--memory`

use std::str::FromStr;

use forebay_engine::MemoryLimit;

/// `--memory`
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryArg(pub MemoryLimit);

impl FromStr for MemoryArg {
    type Err = String;
    fn from_str(s: &str) -> Result<MemoryArg, String> {
        let text = s.trim();
        if text == "auto" {
            return Ok(MemoryArg(MemoryLimit::Auto));
        }
        let bad = || format!("{s:?} is no size; write 4GiB, 3500MB, 75% or auto");
        if let Some(percent) = text.strip_suffix('%') {
            let p: f64 = percent.trim().parse().map_err(|_| bad())?;
            return match p > 0.0 && p <= 100.0 {
                true => Ok(MemoryArg(MemoryLimit::Fraction(p / 100.0))),
                false => Err(format!("{s:?}: a percentage lies between 0 and 100")),
            };
        }
        let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
        let (number, unit) = text.split_at(split);
        let number: f64 = number.parse().map_err(|_| bad())?;
        let factor = match unit.trim().to_ascii_lowercase().as_str() {
            "" | "b" => 1.0,
            "k" | "kib" => 1024.0,
            "m" | "mib" => 1048576.0,
            "g" | "gib" => 1073741824.0,
            "t" | "tib" => 1099511627776.0,
            "kb" => 1e3,
            "mb" => 1e6,
            "gb" => 1e9,
            "tb" => 1e12,
            _ => return Err(bad()),
        };
        let bytes = number * factor;
        match bytes.is_finite() && (1.0..1e18).contains(&bytes) {
            true => Ok(MemoryArg(MemoryLimit::Bytes(bytes as u64))),
            false => Err(bad()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    #[rstest]
    #[case("4GiB", 4 << 30)]
    #[case("4g", 4 << 30)]
    #[case("1.5 MiB", 3 << 19)]
    #[case("3500MB", 3_500_000_000)]
    #[case("1000", 1000)]
    fn sizes(#[case] text: &str, #[case] bytes: u64) {
        assert_eq!(text.parse(), Ok(MemoryArg(MemoryLimit::Bytes(bytes))));
    }

    #[rstest]
    #[case("")]
    #[case("4X")]
    #[case("-1GiB")]
    #[case("0")]
    #[case("0%")]
    #[case("101%")]
    #[case("1e99GiB")]
    fn no_sizes(#[case] text: &str) {
        assert!(text.parse::<MemoryArg>().is_err());
    }
}
