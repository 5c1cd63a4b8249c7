//! Values as Python would hold and print them.

use std::fmt;
use std::sync::Arc;

use minijinja::value::{Enumerator, Object, ObjectRepr, ValueKind};
use minijinja::{Error, State, Value as Jinja};
use serde_json::{Map, Value};

use super::methods;

/// A JSON value as templates see it.
pub(crate) fn value(json: &Value) -> Jinja {
    match json {
        Value::Object(map) => Jinja::from_object(Dict::new(map)),
        Value::Array(items) => list(items),
        scalar => Jinja::from_serialize(scalar),
    }
}

/// A list of JSON values as templates see it.
pub(crate) fn list(items: &[Value]) -> Jinja {
    Jinja::from(items.iter().map(value).collect::<Vec<_>>())
}

/// A dict whose methods are Python's even where a key has a method's name: `schema.items()`.
struct Dict {
    keys: Vec<Jinja>,
    values: std::collections::HashMap<String, Jinja>,
}

impl Dict {
    fn new(map: &Map<String, Value>) -> Self {
        Self {
            keys: map.keys().map(|key| Jinja::from(key.as_str())).collect(),
            values: map.iter().map(|(key, json)| (key.clone(), value(json))).collect(),
        }
    }
}

impl fmt::Debug for Dict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.keys).finish()
    }
}

impl Object for Dict {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Map
    }

    fn get_value(self: &Arc<Self>, key: &Jinja) -> Option<Jinja> {
        self.values.get(key.as_str()?).cloned()
    }

    fn get_value_by_str(self: &Arc<Self>, key: &str) -> Option<Jinja> {
        self.values.get(key).cloned()
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.keys.clone())
    }

    fn call_method(
        self: &Arc<Self>,
        state: &State<'_, '_>,
        method: &str,
        args: &[Jinja],
    ) -> Result<Jinja, Error> {
        methods::call(state, &Jinja::from_dyn_object(self.clone()), method, args)
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = String::new();
        write_repr(&Jinja::from_dyn_object(self.clone()), &mut out);
        f.write_str(&out)
    }
}

/// `str(value)`.
pub(crate) fn str_of(value: &Jinja) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None if value.is_undefined() => String::new(),
        None => {
            let mut out = String::new();
            write_repr(value, &mut out);
            out
        }
    }
}

/// `repr(value)`.
pub(crate) fn write_repr(value: &Jinja, out: &mut String) {
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => write_text_repr(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.push_str(&float_repr(number)),
            Err(_) => out.push_str(&value.to_string()),
        },
        ValueKind::Seq => {
            out.push('[');
            for (index, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                write_repr(&item, out);
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if index > 0 { ", " } else { "" });
                write_repr(&key, out);
                out.push_str(": ");
                write_repr(&value.get_item(&key).unwrap_or_default(), out);
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
}

fn write_text_repr(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if (c as u32) < 0x20 || (0x7f..0xa1).contains(&(c as u32)) || c == '\u{ad}' => {
                out.push_str(&format!("\\x{:02x}", c as u32));
            }
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// `repr` of a float: the shortest digits, an exponent below 1e-4 and from 1e16.
pub(crate) fn float_repr(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let size = number.abs();
    if number != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = match exponent.strip_prefix('-') {
            Some(exponent) => ('-', exponent),
            None => ('+', exponent),
        };
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = number.to_string();
    if text.contains('.') { text } else { text + ".0" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats() {
        for (number, want) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1.5e-5, "1.5e-05"),
            (-2e300, "-2e+300"),
            (123456789012345.0, "123456789012345.0"),
            (-0.0, "-0.0"),
        ] {
            assert_eq!(float_repr(number), want);
        }
    }

    #[test]
    fn prints_as_python() {
        let json = serde_json::json!({"a": [1, 2.5, true, null, "it's"], "b": {"c": "x\n\"'"}});
        assert_eq!(
            str_of(&value(&json)),
            r#"{'a': [1, 2.5, True, None, "it's"], 'b': {'c': 'x\n"\''}}"#
        );
    }
}
