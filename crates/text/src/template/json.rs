//! `json.dumps` as Python writes it.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value as Jinja};
use serde_json::Value;

use super::environment::PLACEHOLDERS;
use super::python::float_repr;

/// How a value is laid out.
#[derive(Clone, Debug)]
pub(crate) struct Layout {
    /// A level's indentation; everything on one line without.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

impl Default for Layout {
    fn default() -> Self {
        Self {
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            ensure_ascii: false,
            sort_keys: false,
        }
    }
}

/// One line, with Python's separators.
pub(crate) fn dumps(value: &Value) -> String {
    let mut out = String::new();
    // A JSON value holds nothing that JSON cannot say.
    let _ = Layout::default().write(&super::python::value(value), 0, &mut out);
    out
}

/// The `tojson` filter with transformers' arguments: `ensure_ascii`, `indent`, `separators`, `sort_keys`.
pub(crate) fn tojson(
    value: &Jinja,
    positional: minijinja::value::Rest<Jinja>,
) -> Result<String, Error> {
    let mut positional = positional.0;
    let kwargs = match positional.last() {
        Some(last) if last.is_kwargs() => Kwargs::try_from(positional.pop().unwrap_or_default())?,
        _ => Kwargs::from_iter(std::iter::empty::<(String, Jinja)>()),
    };
    let argument = |index: usize, name: &str| -> Result<Option<Jinja>, Error> {
        let named: Option<Jinja> = kwargs.get(name)?;
        let given = positional.get(index).cloned().or(named);
        Ok(given.filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let mut layout = Layout {
        ensure_ascii: argument(0, "ensure_ascii")?.is_some_and(|value| value.is_true()),
        sort_keys: argument(3, "sort_keys")?.is_some_and(|value| value.is_true()),
        ..Layout::default()
    };
    if let Some(indent) = argument(1, "indent")? {
        layout.indent = Some(match indent.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(usize::try_from(i64::try_from(indent)?.max(0)).unwrap_or(0).min(64)),
        });
        layout.item_separator = ",".to_owned();
    }
    if let Some(separators) = argument(2, "separators")? {
        let text = |index: usize| {
            separators.get_item_by_index(index).ok().and_then(|v| v.as_str().map(str::to_owned))
        };
        match (text(0), text(1)) {
            (Some(item), Some(key)) => (layout.item_separator, layout.key_separator) = (item, key),
            _ => {
                return Err(Error::new(
                    ErrorKind::InvalidOperation,
                    "tojson: separators must be two strings",
                ));
            }
        }
    }
    kwargs.assert_all_used()?;
    let mut out = String::new();
    layout.write(value, 0, &mut out)?;
    Ok(out)
}

impl Layout {
    fn write(&self, value: &Jinja, depth: usize, out: &mut String) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => write_number(value, out),
            ValueKind::String => self.write_text(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Jinja> = value.try_iter()?.collect();
                self.write_list(items.iter(), ('[', ']'), depth, out, |item, out| {
                    self.write(item, depth + 1, out)
                })?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Jinja> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.write_list(keys.iter(), ('{', '}'), depth, out, |key, out| {
                    match key.as_str() {
                        Some(text) => self.write_text(text, out),
                        None => {
                            let mut text = String::new();
                            self.write(key, depth, &mut text)?;
                            self.write_text(&text, out);
                        }
                    }
                    out.push_str(&self.key_separator);
                    self.write(&value.get_item(key)?, depth + 1, out)
                })?;
            }
            kind => {
                let detail = format!("tojson: a value of type {kind} is not JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, detail));
            }
        }
        Ok(())
    }

    fn write_list<'a>(
        &self,
        items: impl ExactSizeIterator<Item = &'a Jinja>,
        (open, close): (char, char),
        depth: usize,
        out: &mut String,
        mut one: impl FnMut(&'a Jinja, &mut String) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let empty = items.len() == 0;
        out.push(open);
        for (index, item) in items.enumerate() {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            self.new_line(depth + 1, out);
            one(item, out)?;
        }
        if !empty {
            self.new_line(depth, out);
        }
        out.push(close);
        Ok(())
    }

    fn new_line(&self, depth: usize, out: &mut String) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    fn write_text(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if c < ' ' => drop(write!(out, "\\u{:04x}", c as u32)),
                // Placeholders stand for characters of their own and go back to these after rendering.
                c if self.ensure_ascii
                    && (c == '\u{7f}' || !c.is_ascii())
                    && !PLACEHOLDERS.contains(&c) =>
                {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        let _ = write!(out, "\\u{unit:04x}");
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn write_number(value: &Jinja, out: &mut String) {
    match i128::try_from(value.clone()) {
        Ok(number) if value.is_integer() => drop(write!(out, "{number}")),
        _ => match f64::try_from(value.clone()) {
            Ok(number) if number.is_nan() => out.push_str("NaN"),
            Ok(number) if number.is_infinite() => {
                out.push_str(if number > 0.0 { "Infinity" } else { "-Infinity" })
            }
            Ok(number) => out.push_str(&float_repr(number)),
            Err(_) => drop(write!(out, "{value}")),
        },
    }
}
