//! `value[start:stop:step]`, as Python counts.

use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, ErrorKind, Value};

use super::meter::{self, VALUE_BYTES};

/// Items of a list, which is not copied: templates slice all messages at every message. A slice of a slice is one of
/// the list itself.
#[derive(Debug)]
struct Slice {
    of: Value,
    range: Range,
}

impl Object for Slice {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Seq
    }

    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        self.of.get_item_by_index(self.range.at(key.as_usize()?)?).ok()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Seq(self.range.len)
    }
}

/// Positions in something: the first, and how far and how often to go on.
#[derive(Clone, Copy, Debug)]
struct Range {
    start: i128,
    step: i128,
    len: usize,
}

impl Range {
    /// `slice(start, stop, step).indices(len)`.
    fn new(start: Option<i64>, stop: Option<i64>, step: i64, len: usize) -> Self {
        let (step, len) = (i128::from(step), len as i128);
        let (lowest, highest) = if step > 0 { (0, len) } else { (-1, len - 1) };
        let bound = |given: Option<i64>, default: i128| match given.map(i128::from) {
            None => default,
            Some(at) if at < 0 => (at + len).max(lowest),
            Some(at) => at.min(highest),
        };
        let (first, last) = if step > 0 { (lowest, highest) } else { (highest, lowest) };
        let (start, stop) = (bound(start, first), bound(stop, last));
        let span = if step > 0 { stop - start } else { start - stop };
        let count = if span > 0 { (span - 1) / step.abs() + 1 } else { 0 };
        // Then no product of steps overflows: they are less than the list is long.
        let step = if count > 1 { step } else { 1 };
        let start = if count > 0 { start } else { 0 };
        Self { start, step, len: count as usize }
    }

    /// The position of item `index`.
    fn at(&self, index: usize) -> Option<usize> {
        if index >= self.len {
            return None;
        }
        usize::try_from(self.start + self.step * index as i128).ok()
    }
}

pub(super) fn slice(value: Value, start: Value, stop: Value, step: Value) -> Result<Value, Error> {
    let number = |value: Value| match value.is_none() {
        true => Ok(None),
        false => i64::try_from(value).map(Some),
    };
    let (start, stop, step) = (number(start)?, number(stop)?, number(step)?.unwrap_or(1));
    let refused = |detail: String| Err(Error::new(ErrorKind::InvalidOperation, detail));
    if step == 0 {
        return refused("slice step cannot be zero".to_owned());
    }
    if let Some(text) = value.as_str() {
        meter::make(5 * text.len() as u64)?;
        let chars: Vec<char> = text.chars().collect();
        let range = Range::new(start, stop, step, chars.len());
        let cut = (0..range.len).filter_map(|i| chars.get(range.at(i)?));
        return Ok(Value::from(cut.collect::<String>()));
    }
    meter::make(128)?;
    let of = match value.kind() {
        ValueKind::Undefined | ValueKind::None => return Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Seq => value,
        ValueKind::Iterable => {
            meter::make(meter::len(&value).saturating_mul(VALUE_BYTES))?;
            Value::from(value.try_iter()?.collect::<Vec<_>>())
        }
        kind => return refused(format!("value of type {kind} cannot be sliced")),
    };
    let mut range = Range::new(start, stop, step, of.len().unwrap_or(0));
    let of = match of.downcast_object_ref::<Slice>() {
        Some(inner) => {
            range.start = inner.range.start + inner.range.step * range.start;
            range.step *= inner.range.step;
            inner.of.clone()
        }
        None => of,
    };
    Ok(Value::from_object(Slice { of, range }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What Python 3.13 says of `list(range(5))`.
    #[test]
    fn slices_as_python() {
        let list = Value::from((0..5).collect::<Vec<i64>>());
        type Row = (Option<i64>, Option<i64>, i64, &'static [i64]);
        let rows: [Row; 13] = [
            (None, None, 1, &[0, 1, 2, 3, 4]),
            (None, None, -1, &[4, 3, 2, 1, 0]),
            (Some(1), None, 1, &[1, 2, 3, 4]),
            (None, Some(6), -1, &[]),
            (None, Some(-2), 1, &[0, 1, 2]),
            (None, Some(2), -1, &[4, 3]),
            (Some(-2), None, 1, &[3, 4]),
            (Some(9), Some(-9), -2, &[4, 2, 0]),
            (Some(-9), Some(9), 2, &[0, 2, 4]),
            (Some(3), Some(1), 1, &[]),
            (Some(i64::MIN), Some(i64::MAX), i64::MAX, &[0]),
            (Some(i64::MAX), Some(i64::MIN), i64::MIN, &[4]),
            (Some(3), Some(0), -2, &[3, 1]),
        ];
        for (start, stop, step, want) in rows {
            let of = |value| slice(value, start.into(), stop.into(), step.into()).unwrap();
            meter::start(0);
            let got = of(list.clone());
            assert_eq!(got, Value::from(want.to_vec()), "[{start:?}:{stop:?}:{step}]");
            let text: String = want.iter().map(i64::to_string).collect();
            assert_eq!(of(Value::from("01234")), Value::from(text));
            // Of a slice: backwards, and back again.
            let none = || Value::from(());
            let back = slice(list.clone(), none(), none(), Value::from(-1)).unwrap();
            let again = slice(back, none(), none(), Value::from(-1)).unwrap();
            assert_eq!(of(again), Value::from(want.to_vec()));
        }
    }
}
