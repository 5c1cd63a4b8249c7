//! What each filter, test, function and method may make, said before it runs.
//!
//! Every filter and every test that goes over its operands is wrapped, under its own name, so that `map` and `select`,
//! which call filters by name, cannot go around. What is charged is an upper bound of the order of the result; a bound
//! that is too high only costs allowance.

use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr, Rest, ValueKind};
use minijinja::{Environment, Error, State, Value, filters, functions, tests};

use super::meter::{self, VALUE_BYTES};
use super::slice;

/// How the result of an operation grows with its operands.
#[derive(Clone, Copy, PartialEq)]
enum Growth {
    /// Not at all: the result is one of the operands, or a number.
    None,
    /// With the number of items: they are held again, not copied.
    Items,
    /// As `Items`, of values that are also compared.
    Compared,
    /// With all that is in the operands, as it is written out.
    Written,
    /// By its own rule, in [`own_rule`], besides `Written`.
    Own,
}

/// Puts the wrapped filters, tests and functions in place of minijinja's.
pub(super) fn install(env: &mut Environment<'static>) {
    use Growth::{Compared, Items, None, Own, Written};
    macro_rules! filters {
        ($($growth:ident: $($name:ident)+;)+) => {
            $($(filter(env, stringify!($name), $growth, Value::from_function(filters::$name));)+)+
        };
    }
    filters! {
        None: safe length default round abs int float attr first last bool;
        Items: items reverse list select reject selectattr rejectattr map chain;
        Compared: dictsort min max sort unique;
        Written: escape upper lower title capitalize trim pprint sum string;
        Own: replace join split lines batch slice indent format tojson zip groupby;
    }
    filter(env, "e", Written, Value::from_function(filters::escape));
    filter(env, "count", None, Value::from_function(filters::length));
    filter(env, "d", None, Value::from_function(filters::default));

    for (names, test) in [
        (["eq", "equalto", "=="], Value::from_function(tests::is_eq)),
        (["ne", "ne", "!="], Value::from_function(tests::is_ne)),
        (["lt", "lessthan", "<"], Value::from_function(tests::is_lt)),
        (["le", "le", "<="], Value::from_function(tests::is_le)),
        (["gt", "greaterthan", ">"], Value::from_function(tests::is_gt)),
        (["ge", "ge", ">="], Value::from_function(tests::is_ge)),
        (["in", "in", "in"], Value::from_function(tests::is_in)),
    ] {
        for name in names {
            let test = test.clone();
            env.add_test(name, move |state: &State, args: Rest<Value>| {
                weigh_all(&args)?;
                test.call(state, &args).map(|value| value.is_true())
            });
        }
    }

    env.add_function("range", range);
    // It prints everything that there is, to nobody's use.
    env.remove_global("debug");
    for (name, function) in [
        ("dict", Value::from_function(functions::dict)),
        ("namespace", Value::from_function(functions::namespace)),
    ] {
        env.add_function(name, move |state: &State, args: Rest<Value>| {
            for arg in args.iter() {
                held(arg)?;
            }
            meter::make(256)?;
            function.call(state, &args)
        });
    }
}

/// What `range` gives. Templates loop over one per message, and no item of it is ever held: it is known by its type.
#[derive(Debug)]
struct Range {
    start: i64,
    step: i64,
    len: usize,
}

impl Object for Range {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Iterable
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        let (start, step) = (self.start, self.step);
        let items = (0..self.len).map(move |i| Value::from(start + step * i as i64));
        Enumerator::Iter(Box::new(items))
    }
}

fn range(lower: isize, upper: Option<isize>, step: Option<isize>) -> Result<Value, Error> {
    // Refuses what is no range, and what is too long.
    let len = functions::range(lower, upper, step)?.len().unwrap_or(0);
    let start = upper.map_or(0, |_| lower as i64);
    Ok(Value::from_object(Range { start, step: step.map_or(1, |s| s as i64), len }))
}

/// Adds a filter under its cost.
pub(super) fn own_filter(env: &mut Environment<'static>, name: &'static str, filter_value: Value) {
    let growth = match name {
        "tojson" | "join" => Growth::Own,
        "items" => Growth::Items,
        _ => Growth::Written,
    };
    filter(env, name, growth, filter_value);
}

fn filter(env: &mut Environment<'static>, name: &'static str, growth: Growth, function: Value) {
    env.add_filter(name, move |state: &State, args: Rest<Value>| {
        before(name, growth, &args)?;
        let result = function.call(state, &args)?;
        if growth != Growth::None {
            after(&result)?;
        }
        Ok::<Value, Error>(result)
    });
}

/// A method of a string or another value, before it runs.
pub(super) fn before_method(value: &Value, method: &str, args: &[Value]) -> Result<(), Error> {
    if value.kind() == ValueKind::Map {
        return meter::make(64 + meter::len(value).saturating_mul(4 * VALUE_BYTES));
    }
    let growth = match method {
        "startswith" | "endswith" | "find" | "rfind" | "index" | "rindex" | "count" => {
            return weigh_all(args).and(meter::scan(meter::len(value)));
        }
        "replace" | "join" | "split" | "rsplit" | "splitlines" | "format" => Growth::Own,
        _ => Growth::Written,
    };
    let mut all = Vec::with_capacity(1 + args.len());
    all.push(value.clone());
    all.extend_from_slice(args);
    // `separator.join(items)` is `items|join(separator)`.
    if method == "join" {
        all.reverse();
    }
    before(method, growth, &all)
}

fn before(name: &str, growth: Growth, args: &[Value]) -> Result<(), Error> {
    let value = args.first().cloned().unwrap_or_default();
    match growth {
        Growth::None => Ok(()),
        Growth::Items => items(&value),
        Growth::Compared => {
            weigh_all(args)?;
            items(&value)
        }
        Growth::Written => {
            let weight = weigh_all(args)?;
            meter::make(weight.saturating_mul(2))
        }
        Growth::Own => {
            let weight = weigh_all(args)?;
            meter::make(weight.saturating_mul(2))?;
            meter::make(own_rule(name, &value, &args[1..], weight)?)
        }
    }
}

/// The sum of the operands' weights, in bytes.
fn weigh_all(args: &[Value]) -> Result<u64, Error> {
    let mut sum = 0u64;
    for arg in args {
        // Two short texts need no walk.
        sum = sum.saturating_add(match arg.as_str() {
            Some(text) => text.len() as u64,
            None => meter::weigh(arg)?.bytes(),
        });
    }
    meter::scan(sum)?;
    Ok(sum)
}

/// Each item is held once more; of a text, each letter becomes one.
fn items(value: &Value) -> Result<(), Error> {
    let each = if value.kind() == ValueKind::Map { 4 * VALUE_BYTES } else { VALUE_BYTES };
    meter::make(64 + meter::len(value).saturating_mul(each))
}

/// What a result is, besides what was charged before.
fn after(result: &Value) -> Result<(), Error> {
    match result.as_str() {
        Some(text) => meter::make(text.len() as u64),
        // A lazy one holds what it was made from.
        None if result.kind() == ValueKind::Iterable => meter::nest(),
        None => Ok(()),
    }
}

fn text(value: Option<&Value>) -> &str {
    value.and_then(Value::as_str).unwrap_or_default()
}

fn count(text: &str, what: &str) -> u64 {
    let found = if what.is_empty() { text.chars().count() + 1 } else { text.matches(what).count() };
    found as u64
}

/// The numbers among arguments, given by position or by name.
fn numbers(args: &[Value]) -> impl Iterator<Item = u64> {
    let named = args.iter().filter(|arg| arg.kind() == ValueKind::Map);
    let named = named.flat_map(|map| {
        let keys = map.try_iter().into_iter().flatten();
        keys.filter_map(|key| map.get_item(&key).ok()).collect::<Vec<_>>()
    });
    let all = args.iter().cloned().chain(named);
    all.filter_map(|value| i64::try_from(value).ok()).map(i64::unsigned_abs)
}

/// For operations whose result is more than their operands.
fn own_rule(name: &str, value: &Value, args: &[Value], weight: u64) -> Result<u64, Error> {
    let most_number = || numbers(args).max().unwrap_or(0);
    Ok(match name {
        "replace" => {
            let written;
            let of = match value.as_str() {
                Some(text) => text,
                None => {
                    written = super::python::str_of(value);
                    &written
                }
            };
            let by = args.get(1).map_or(Ok(0), |by| Ok::<_, Error>(meter::weigh(by)?.bytes()))?;
            count(of, text(args.first())).saturating_mul(by)
        }
        "join" => {
            let by = args.iter().map(|arg| text(Some(arg)).len() as u64).max().unwrap_or(0);
            meter::len(value).saturating_mul(by + VALUE_BYTES)
        }
        "split" | "rsplit" | "splitlines" | "lines" => {
            let text = text(Some(value));
            let parts = match args.first().and_then(Value::as_str) {
                Some(by) if !by.is_empty() => count(text, by),
                _ => text.chars().filter(|c| c.is_whitespace()).count() as u64,
            };
            (parts + 1).saturating_mul(2 * VALUE_BYTES)
        }
        "batch" | "slice" => {
            meter::nest()?;
            let parts = if name == "slice" { most_number() } else { most_number().max(1) };
            (parts + meter::len(value)).saturating_mul(4 * VALUE_BYTES)
        }
        "zip" | "groupby" => {
            meter::nest()?;
            meter::len(value).saturating_mul(8 * VALUE_BYTES)
        }
        "indent" => {
            let width = numbers(args).max().unwrap_or(4);
            count(text(Some(value)), "\n").saturating_add(2).saturating_mul(width)
        }
        // A pad for each value at each depth.
        "tojson" if !args.is_empty() => {
            let shape = meter::weigh(value)?;
            let pads: u64 =
                args.iter().map(|a| Ok(meter::weigh(a)?.text_bytes)).sum::<Result<_, Error>>()?;
            let pads = pads.saturating_add(most_number().min(64));
            shape.nodes.saturating_mul(shape.depth + 1).saturating_mul(pads)
        }
        "format" => {
            let format = text(Some(value));
            let places = format.matches(['%', '{']).count() as u64;
            let mut widths = 0u64;
            for digits in format.split(|c: char| !c.is_ascii_digit()).filter(|d| !d.is_empty()) {
                widths = widths.saturating_add(digits.parse().unwrap_or(u64::MAX));
            }
            if format.contains('*') || format.contains(":{") {
                widths = widths.saturating_add(numbers(args).fold(0, u64::saturating_add));
            }
            widths.saturating_add(places.saturating_mul(weight))
        }
        _ => 0,
    })
}

/// A list, dict or what is like them, made by the template: what it holds is counted once, what is in that is not.
fn held(value: &Value) -> Result<(), Error> {
    items(value)?;
    let nests = match value.kind() {
        ValueKind::Map => {
            value.try_iter()?.any(|key| value.get_item(&key).is_ok_and(|held| meter::holds(&held)))
        }
        ValueKind::Seq => value.try_iter()?.any(|item| meter::holds(&item)),
        _ => meter::holds(value),
    };
    if nests { meter::nest() } else { Ok(()) }
}

/// The operations that [`super::metered`] puts into a template's program, by the names it calls them.
pub(super) fn install_operations(env: &mut Environment<'static>) {
    env.add_filter(super::metered::HELD, |value: Value| held(&value).map(|()| value));
    env.add_filter(super::metered::WEIGHED, |value: Value| {
        match value.as_str() {
            Some(text) => meter::scan(text.len() as u64)?,
            None if meter::holds(&value) => drop(meter::weigh(&value)?),
            None => {}
        }
        Ok::<Value, Error>(value)
    });
    env.add_filter(super::metered::DEFINED, |_: Value| meter::make(1024).map(|()| ""));
    env.add_filter(super::metered::LOOPED, |value: Value| {
        meter::make(256)?;
        if value.downcast_object_ref::<Range>().is_none() {
            items(&value)?;
        }
        Ok::<Value, Error>(value)
    });
    env.add_filter(super::metered::SLICED, slice::slice);
    env.add_filter(super::metered::JOINED, |value: Value, constant_bytes: u64| {
        let bytes = match value.as_str() {
            Some(text) => text.len() as u64,
            None if meter::holds(&value) => meter::weigh(&value)?.bytes().saturating_mul(2),
            None => 64,
        };
        meter::make(bytes.saturating_add(constant_bytes))?;
        Ok::<Value, Error>(value)
    });
    env.add_filter(super::metered::ADDED, |value: Value, constant_bytes: u64| {
        match value.as_str() {
            Some(text) => meter::make(constant_bytes + text.len() as u64)?,
            // The sum is lazy, and becomes a list of its items only now and then.
            None if meter::holds(&value) => {
                let items = meter::len(&value);
                meter::make(128 + items)?;
                meter::fits(items.saturating_mul(VALUE_BYTES))?;
            }
            None => {}
        }
        Ok::<Value, Error>(value)
    });
    env.add_filter(super::metered::TIMES, times);
}

/// `left * right`.
fn times(left: Value, right: Value) -> Result<Value, Error> {
    let (of, by) = match (left.as_str(), meter::holds(&left)) {
        (None, false) => (&right, &left),
        _ => (&left, &right),
    };
    let repeats = || {
        let n = i64::try_from(by.clone())?;
        Ok::<_, Error>(usize::try_from(n).unwrap_or(0))
    };
    if let Some(text) = of.as_str() {
        let n = repeats()?;
        meter::make((text.len() as u64).saturating_mul(n as u64))?;
        return Ok(Value::from(text.repeat(n)));
    }
    if meter::holds(of) {
        let n = repeats()?;
        meter::make(meter::len(of).max(1).saturating_mul(n as u64).saturating_mul(VALUE_BYTES))?;
        meter::nest()?;
        let items: Vec<Value> = of.try_iter()?.collect();
        let repeated = std::iter::repeat_n(items, n).flatten();
        return Ok(Value::from(repeated.collect::<Vec<_>>()));
    }
    let refused = || {
        let detail = format!("cannot multiply {} and {}", left.kind(), right.kind());
        Error::new(minijinja::ErrorKind::InvalidOperation, detail)
    };
    let whole = |value: &Value| value.is_integer() || value.kind() == ValueKind::Bool;
    if whole(&left) && whole(&right) {
        let product = i128::try_from(left.clone())?.checked_mul(i128::try_from(right.clone())?);
        let product = product.ok_or_else(refused)?;
        return Ok(i64::try_from(product).map_or_else(|_| Value::from(product), Value::from));
    }
    let number = |value: &Value| f64::try_from(value.clone()).map_err(|_| refused());
    Ok(Value::from(number(&left)? * number(&right)?))
}
