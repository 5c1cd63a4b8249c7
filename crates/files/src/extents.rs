//! The one check of byte ranges: inside the data, apart from one another, without gaps.

use std::path::Path;

use crate::error::FilesError;
use crate::reader::Place;

/// A tensor's bytes, as offsets in the data section.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent<'a> {
    pub name: &'a str,
    pub start: u64,
    pub end: u64,
}

/// Whether bytes of no tensor are allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gaps {
    /// GGUF: tensors start at multiples of the alignment, more is tolerated.
    Padded { alignment: u64 },
    /// safetensors: the data is covered exactly.
    Forbidden,
}

/// Checks the ranges of one file against its data section of `available` bytes. `start <= end` holds.
pub(crate) fn check(
    file: &Path,
    available: u64,
    mut extents: Vec<Extent<'_>>,
    gaps: Gaps,
) -> Result<(), FilesError> {
    extents.sort_by_key(|e| (e.start, e.end));
    let mut previous: Option<Extent<'_>> = None;
    for e in extents {
        let covered = previous.map_or(0, |p| p.end);
        if let Some(p) = previous
            && e.start < p.end
        {
            return Err(FilesError::Overlap {
                file: file.to_owned(),
                first: p.name.to_owned(),
                second: e.name.to_owned(),
                start: e.start,
                end: p.end,
            });
        }
        if e.end > available {
            return Err(beyond(file, e, available, covered, gaps));
        }
        if gaps == Gaps::Forbidden && e.start > covered {
            return Err(FilesError::Hole {
                file: file.to_owned(),
                before: previous.map(|p| p.name.to_owned()),
                after: Some(e.name.to_owned()),
                start: covered,
                end: e.start,
            });
        }
        previous = Some(e);
    }
    let covered = previous.map_or(0, |p| p.end);
    if gaps == Gaps::Forbidden && covered < available {
        return Err(FilesError::Hole {
            file: file.to_owned(),
            before: previous.map(|p| p.name.to_owned()),
            after: None,
            start: covered,
            end: available,
        });
    }
    Ok(())
}

/// A range that follows on from its neighbour says that the file was cut; one that jumps is wrong in itself.
fn beyond(file: &Path, e: Extent<'_>, available: u64, covered: u64, gaps: Gaps) -> FilesError {
    let follows = match gaps {
        Gaps::Padded { alignment } => covered.checked_next_multiple_of(alignment),
        Gaps::Forbidden => Some(covered),
    };
    if follows == Some(e.start) {
        return FilesError::Truncated {
            file: file.to_owned(),
            what: Place::Tensor(e.name).to_string(),
            expected: e.end - e.start,
            found: available.saturating_sub(e.start),
        };
    }
    FilesError::OutOfBounds {
        file: file.to_owned(),
        tensor: e.name.to_owned(),
        start: e.start,
        end: e.end,
        available,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn class(available: u64, ranges: &[(&str, u64, u64)], gaps: Gaps) -> &'static str {
        let extents = ranges.iter().map(|&(name, start, end)| Extent { name, start, end });
        check(Path::new("f"), available, extents.collect(), gaps)
            .map_or_else(|e| e.class(), |()| "ok")
    }

    #[test]
    fn table() {
        let padded = Gaps::Padded { alignment: 32 };
        let exact = Gaps::Forbidden;
        type Row<'a> = (&'a str, u64, &'a [(&'a str, u64, u64)], Gaps, &'a str);
        let rows: &[Row<'_>] = &[
            ("nothing", 0, &[], exact, "ok"),
            ("nothing, yet bytes", 1, &[], exact, "Hole"),
            ("exact", 8, &[("b", 4, 8), ("a", 0, 4)], exact, "ok"),
            ("empty tensors between", 8, &[("a", 0, 4), ("e", 4, 4), ("b", 4, 8)], exact, "ok"),
            ("empty tensor inside another", 8, &[("a", 0, 8), ("e", 4, 4)], exact, "Overlap"),
            ("hole at the start", 8, &[("a", 4, 8)], exact, "Hole"),
            ("hole in the middle", 8, &[("a", 0, 2), ("b", 4, 8)], exact, "Hole"),
            ("hole at the end", 9, &[("a", 0, 8)], exact, "Hole"),
            ("overlap by one", 8, &[("a", 0, 5), ("b", 4, 8)], exact, "Overlap"),
            ("cut", 7, &[("a", 0, 4), ("b", 4, 8)], exact, "Truncated"),
            ("jump past the end", 8, &[("a", 0, 8), ("b", 9, 12)], exact, "OutOfBounds"),
            ("padding", 40, &[("a", 0, 4), ("b", 32, 40)], padded, "ok"),
            ("padding at the end", 64, &[("a", 0, 4)], padded, "ok"),
            ("cut inside", 39, &[("a", 0, 4), ("b", 32, 40)], padded, "Truncated"),
            ("cut in the padding", 16, &[("a", 0, 4), ("b", 32, 40)], padded, "Truncated"),
            ("jump", 40, &[("a", 0, 4), ("b", 1 << 40, (1 << 40) + 8)], padded, "OutOfBounds"),
            (
                "end of the number line",
                40,
                &[("a", 0, u64::MAX), ("b", u64::MAX, u64::MAX)],
                padded,
                "Truncated",
            ),
        ];
        for &(name, available, ranges, gaps, want) in rows {
            assert_eq!(class(available, ranges, gaps), want, "{name}");
        }
    }
}
