//! `--steer` and `--capture` as they are written.

use std::path::Path;
use std::str::FromStr;

use forebay_engine::{CapturePoint, CaptureRows, Mode, SteerSource};
use forebay_program::Point;

/// `--steer [NAME=]FILE[:key=value,...]`
#[derive(Clone, Debug, PartialEq)]
pub struct SteerArg(pub SteerSource);

/// Keys after the file.
const KEYS: [&str; 6] = ["point", "mode", "strength", "layers", "min", "max"];

impl FromStr for SteerArg {
    type Err = String;

    fn from_str(text: &str) -> Result<SteerArg, String> {
        // A colon may be part of a path: what follows the last one are settings if it begins with a key.
        let is_settings = |rest: &str| KEYS.iter().any(|key| rest.starts_with(&format!("{key}=")));
        let (file, settings) = match text.rsplit_once(':') {
            Some((file, rest)) if is_settings(rest) => (file, rest),
            _ => (text, ""),
        };
        let is_name = |name: &str| {
            !name.is_empty()
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.".contains(&b))
        };
        let (name, file) = match file.split_once('=') {
            Some((name, path)) if is_name(name) && !Path::new(file).exists() => (Some(name), path),
            _ => (None, file),
        };
        if file.is_empty() {
            return Err(format!("{text:?} names no file; write [NAME=]FILE[:key=value,...]"));
        }
        let mut source = SteerSource { name: name.map(str::to_owned), ..SteerSource::new(file) };
        let (mut min, mut max) = (None, None);
        let mut clamp = false;
        for setting in settings.split(',').filter(|s| !s.is_empty()) {
            let (key, value) = setting
                .split_once('=')
                .ok_or_else(|| format!("{setting:?} is no setting; write key=value"))?;
            match key {
                "point" => source.point = value.parse()?,
                "strength" => source.strength = number(key, value)?,
                "layers" => {
                    let (first, last) = layers(value)?;
                    source.layers = Some(first..=last);
                }
                "min" => min = Some(number(key, value)?),
                "max" => max = Some(number(key, value)?),
                "mode" => {
                    clamp = value == "clamp";
                    source.mode = match value {
                        "add" | "clamp" => Mode::Add,
                        "ablate" => Mode::Ablate,
                        "renormalise" | "renormalize" => Mode::Renormalise,
                        _ => {
                            return Err(format!(
                                "{value:?} is no mode; there are add, ablate, clamp, renormalise"
                            ));
                        }
                    };
                }
                _ => {
                    return Err(format!("{key:?} is no setting; there are {}", KEYS.join(", ")));
                }
            }
        }
        if clamp {
            if min.is_none() && max.is_none() {
                return Err("mode=clamp needs min=, max= or both".into());
            }
            let (min, max) = (min.unwrap_or(f32::NEG_INFINITY), max.unwrap_or(f32::INFINITY));
            if min > max {
                return Err(format!("min={min} is above max={max}"));
            }
            source.mode = Mode::Clamp { min, max };
        } else if min.is_some() || max.is_some() {
            return Err("min= and max= are for mode=clamp".into());
        }
        Ok(SteerArg(source))
    }
}

fn number(key: &str, value: &str) -> Result<f32, String> {
    let number = value.parse().ok().filter(|n: &f32| n.is_finite());
    number.ok_or_else(|| format!("{key}={value}: a finite number is wanted"))
}

/// `a-b`, or one layer.
fn layers(text: &str) -> Result<(usize, usize), String> {
    let (first, last) = text.split_once('-').unwrap_or((text, text));
    let range = first.trim().parse().ok().zip(last.trim().parse().ok());
    let range = range.filter(|(first, last): &(usize, usize)| first <= last);
    range.ok_or_else(|| format!("{text:?} is no range of layers; write 3-7, or 3"))
}

/// A point of `--capture`, `POINT[@a-b]`.
#[derive(Clone, Debug, PartialEq)]
pub struct CaptureArg(pub CapturePoint);

impl FromStr for CaptureArg {
    type Err = String;

    fn from_str(text: &str) -> Result<CaptureArg, String> {
        let (point, layers) = match text.split_once('@') {
            Some((point, range)) => (point, Some(layers(range)?)),
            None => (text, None),
        };
        let point: Point = point.parse()?;
        Ok(CaptureArg(CapturePoint { point, layers }))
    }
}

/// `--capture-rows`
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum CaptureRowsArg {
    /// Those whose logits are wanted: the last of the prompt, then each generated token that is run
    Last,
    /// All
    All,
}

impl From<CaptureRowsArg> for CaptureRows {
    fn from(rows: CaptureRowsArg) -> CaptureRows {
        match rows {
            CaptureRowsArg::Last => CaptureRows::Last,
            CaptureRowsArg::All => CaptureRows::All,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rstest::rstest;

    fn source(file: &str) -> SteerSource {
        SteerSource::new(file)
    }

    #[rstest]
    #[case("v.gguf", source("v.gguf"))]
    #[case("calm=v.gguf", SteerSource { name: Some("calm".into()), ..source("v.gguf") })]
    #[case(r"C:\v.gguf", source(r"C:\v.gguf"))]
    #[case("v.gguf:strength=-0.5,layers=3-7", SteerSource { strength: -0.5, layers: Some(3..=7), ..source("v.gguf") })]
    #[case("v:mode=ablate,point=attention,layers=2", SteerSource { mode: Mode::Ablate, point: Point::Attention, layers: Some(2..=2), ..source("v") })]
    #[case("v:mode=clamp,min=-1", SteerSource { mode: Mode::Clamp { min: -1.0, max: f32::INFINITY }, ..source("v") })]
    #[case("a=b/c=d:mode=renormalise", SteerSource { name: Some("a".into()), mode: Mode::Renormalise, ..source("b/c=d") })]
    fn vectors(#[case] text: &str, #[case] wanted: SteerSource) {
        assert_eq!(text.parse(), Ok(SteerArg(wanted)));
    }

    #[rstest]
    #[case("")]
    #[case("name=")]
    #[case("v:strength=much")]
    #[case("v:strength=inf")]
    #[case("v:layers=7-3")]
    #[case("v:mode=multiply")]
    #[case("v:mode=clamp")]
    #[case("v:mode=clamp,min=2,max=1")]
    #[case("v:min=2")]
    #[case("v:point=head")]
    #[case("v:strength=1,colour=red")]
    fn no_vectors(#[case] text: &str) {
        assert!(text.parse::<SteerArg>().is_err());
    }

    #[rstest]
    #[case("router", Point::Router, None)]
    #[case("feed-forward@3-5", Point::FeedForward, Some((3, 5)))]
    #[case("choice@0", Point::Choice, Some((0, 0)))]
    fn points(#[case] text: &str, #[case] point: Point, #[case] layers: Option<(usize, usize)>) {
        assert_eq!(text.parse(), Ok(CaptureArg(CapturePoint { point, layers })));
    }

    #[rstest]
    #[case("head")]
    #[case("router@")]
    #[case("router@5-3")]
    fn no_points(#[case] text: &str) {
        assert!(text.parse::<CaptureArg>().is_err());
    }
}
