//! The environment that transformers gives to chat templates, in minijinja.

use std::ops::RangeInclusive;

use minijinja::value::{Rest, ValueKind};
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Output, State, Value};

use super::{costs, json, meter, methods, python};
use crate::error::{TextError, one_line};

/// Private-use characters that stand for characters of user text while a template runs.
pub(crate) const PLACEHOLDERS: RangeInclusive<char> = '\u{f1000}'..='\u{f1fff}';

/// Work that one rendering may do: a template is somebody else's program.
const FUEL: u64 = 30_000_000;

/// An empty environment with everything that templates count on.
pub(super) fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    env.set_debug(false);
    env.set_auto_escape_callback(|_| AutoEscape::None);
    env.set_unknown_method_callback(methods::call);
    env.set_formatter(|out, _, value| write(out, value));
    set_fuel(&mut env);
    costs::install(&mut env);
    costs::install_operations(&mut env);

    let tojson =
        |value: Value, args: Rest<Value>| json::tojson(&value, args).map(Value::from_safe_string);
    // Of a list, the letters of its repr: types of a parameter are given so.
    let upper = |value: Value| python::str_of(&value).to_uppercase();
    let lower = |value: Value| python::str_of(&value).to_lowercase();
    let trim = |value: Value, chars: Option<String>| {
        methods::strip(&python::str_of(&value), chars.as_deref(), true, true).to_owned()
    };
    for (name, filter) in [
        ("tojson", Value::from_function(tojson)),
        ("string", Value::from_function(|value: Value| python::str_of(&value))),
        ("upper", Value::from_function(upper)),
        ("lower", Value::from_function(lower)),
        ("trim", Value::from_function(trim)),
        ("items", Value::from_function(items)),
        ("join", Value::from_function(join)),
    ] {
        costs::own_filter(&mut env, name, filter);
    }

    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::Map | ValueKind::String)
    });
    env.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool)
    });

    env.add_function("raise_exception", |message: Value| -> Result<Value, Error> {
        meter::make(meter::weigh(&message)?.bytes().saturating_mul(2))?;
        let refusal = Refusal(python::str_of(&message));
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(refusal))
    });
    env
}

/// Writes a value as Python prints it.
fn write(out: &mut Output<'_>, value: &Value) -> Result<(), Error> {
    if let Some(text) = value.as_str() {
        meter::make(text.len() as u64)?;
        return out.write_str(text).map_err(Error::from);
    }
    // Printed once and written once.
    meter::make(meter::weigh(value)?.bytes().saturating_mul(2))?;
    out.write_str(&python::str_of(value)).map_err(Error::from)
}

/// Bounds the work of a rendering.
fn set_fuel(env: &mut Environment<'static>) {
    env.set_fuel(Some(FUEL));
    env.set_recursion_limit(200);
}

/// `dict.items`; of an undefined value there are none.
fn items(state: &State, value: &Value) -> Result<Value, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        ValueKind::Map => methods::call(state, value, "items", &[]),
        kind => {
            Err(Error::new(ErrorKind::InvalidOperation, format!("items: {kind} is not a mapping")))
        }
    }
}

/// `join`, each item as Python prints it.
fn join(value: Value, by: Option<String>, rest: minijinja::value::Kwargs) -> Result<String, Error> {
    let attribute: Option<String> = rest.get("attribute")?;
    rest.assert_all_used()?;
    let mut texts = Vec::new();
    for item in value.try_iter()? {
        let item = match &attribute {
            Some(name) => item.get_attr(name)?,
            None => item,
        };
        texts.push(python::str_of(&item));
    }
    Ok(texts.join(by.as_deref().unwrap_or_default()))
}

/// What a template said to `raise_exception`.
#[derive(Debug)]
struct Refusal(String);

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Refusal {}

/// A template's own refusal, a limit that it ran into, or what went wrong and where.
pub(super) fn template_error(name: &str, error: &Error) -> TextError {
    let out_of_fuel = (error.kind() == ErrorKind::OutOfFuel).then_some("the steps it may take");
    if let Some(what) = meter::exceeded().or(out_of_fuel) {
        return TextError::LimitExceeded {
            template: one_line(name).chars().take(60).collect(),
            what,
            limit: match what {
                "the steps it may take" => format!("{FUEL} steps"),
                _ => meter::limits(),
            },
        };
    }
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
    let mut innermost = error;
    while let Some(at) = cause {
        if let Some(Refusal(message)) = at.downcast_ref() {
            return TextError::Refused { message: one_line(message) };
        }
        if let Some(at) = at.downcast_ref::<Error>() {
            innermost = at;
        }
        cause = at.source();
    }
    let detail = match innermost.detail() {
        Some(detail) => format!("{}: {detail}", innermost.kind()),
        None => innermost.kind().to_string(),
    };
    TextError::Template { line: innermost.line().unwrap_or(0), detail: one_line(&detail) }
}

/// `{% generation %}` marks what the model wrote, for training; here its content is all that counts.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        // Behind the opening: `{%}` shares its sign with no ending.
        let Some(end) = tag[2..].find("%}").map(|end| end + 4) else {
            rest = tag;
            break;
        };
        let (tag, after) = tag.split_at(end);
        let word =
            tag[2..end - 2].trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        match word {
            "generation" => out.push_str(&tag.replacen("generation", "if true", 1)),
            "endgeneration" => out.push_str(&tag.replacen("endgeneration", "endif", 1)),
            _ => out.push_str(tag),
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags() {
        for (source, want) in [
            ("{% generation %}a{%- endgeneration -%}b", "{% if true %}a{%- endif -%}b"),
            ("{%}", "{%}"),
            ("{%", "{%"),
            ("{%%}", "{%%}"),
            ("{%}{% generation %}", "{%}{% generation %}"),
        ] {
            assert_eq!(without_generation_tags(source), want, "{source}");
        }
    }
}
