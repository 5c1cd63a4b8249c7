//! `<function=NAME><parameter=KEY>value</parameter></function>`, inside `<tool_call>` or not.
//!
//! The value is no XML: nothing is decoded in it, and `</parameter>` ends it only where the format goes on.

use serde_json::{Map, Value};

use super::{Attempt, Call, Site, json};

const OPENER: &str = "<tool_call>";
const CLOSER: &str = "</tool_call>";
const FUNCTION: &str = "<function=";
const FUNCTION_END: &str = "</function>";
const PARAMETER: &str = "<parameter=";
const PARAMETER_END: &str = "</parameter>";
/// A name is not longer: what has no end by then is no tag.
const MAX_NAME_BYTES: usize = 256;

/// A call that begins with `<tool_call>`, around a function or around JSON.
pub(crate) fn tagged(site: Site<'_>) -> Attempt {
    let start = site.skip_blanks(OPENER.len());
    if site.text[start..].starts_with('{') {
        return json::tagged(site, OPENER, CLOSER);
    }
    match site.has(start, FUNCTION) {
        None => Attempt::Incomplete,
        Some(false) => Attempt::No,
        Some(true) => function(site, start, false),
    }
}

/// A call that begins with `<function=`; only of a tool that is known.
pub(crate) fn bare(site: Site<'_>) -> Attempt {
    function(site, 0, true)
}

fn function(site: Site<'_>, start: usize, known_only: bool) -> Attempt {
    let (name, mut at) = match tag_name(site, start + FUNCTION.len()) {
        Name::Open => return site.unfinished(),
        Name::Broken => return Attempt::No,
        Name::Is(name, after) => (name, after),
    };
    if known_only && !site.knows(name) {
        return Attempt::No;
    }
    let properties = site
        .tools
        .iter()
        .find(|tool| tool.name == name)
        .map_or(&Value::Null, |tool| &tool.parameters["properties"]);
    let mut arguments = Map::new();
    loop {
        at = site.skip_blanks(at);
        let (Some(more), Some(end), Some(close)) =
            (site.has(at, PARAMETER), site.has(at, FUNCTION_END), site.has(at, CLOSER))
        else {
            return Attempt::Incomplete;
        };
        if end || close {
            if end {
                at += FUNCTION_END.len();
            }
            let call =
                Call { name: name.to_owned(), arguments: Value::Object(arguments).to_string() };
            return match site.skip_closer(at, CLOSER) {
                None => Attempt::Incomplete,
                Some(after) => Attempt::Done(after, vec![call]),
            };
        }
        if !more {
            let rest = &site.text[at..];
            return if rest.is_empty() { site.unfinished() } else { Attempt::No };
        }
        let (key, from) = match tag_name(site, at + PARAMETER.len()) {
            Name::Open => return site.unfinished(),
            Name::Broken => return Attempt::No,
            Name::Is(key, after) => (key, after),
        };
        let Some((to, after)) = value_end(site, from) else { return site.unfinished() };
        arguments.insert(key.to_owned(), typed(trim_one(&site.text[from..to]), &properties[key]));
        at = after;
    }
}

enum Name<'a> {
    Open,
    Broken,
    Is(&'a str, usize),
}

/// The name from `at` to `>`.
fn tag_name(site: Site<'_>, at: usize) -> Name<'_> {
    let rest = &site.text[at..];
    match rest.find(['>', '\n', '<']) {
        Some(n) if n > 0 && n <= MAX_NAME_BYTES && rest[n..].starts_with('>') => {
            Name::Is(rest[..n].trim(), at + n + 1)
        }
        Some(_) => Name::Broken,
        None if rest.len() > MAX_NAME_BYTES => Name::Broken,
        None => Name::Open,
    }
}

/// Where the value that starts at `from` ends, and where the format goes on. None: not yet.
fn value_end(site: Site<'_>, from: usize) -> Option<(usize, usize)> {
    let mut at = from;
    loop {
        at += site.text[at..].find('<')?;
        if site.has(at, PARAMETER)? || site.has(at, FUNCTION_END)? {
            return Some((at, at));
        }
        if site.has(at, PARAMETER_END)? {
            let after = at + PARAMETER_END.len();
            let next = site.skip_blanks(after);
            let goes_on = [PARAMETER, FUNCTION_END, CLOSER];
            for word in goes_on {
                if site.has(next, word)? {
                    return Some((at, after));
                }
            }
            if next == site.text.len() {
                return None;
            }
        }
        at += 1;
    }
}

/// Without the newline that the format puts at either end.
fn trim_one(text: &str) -> &str {
    let text = text.strip_prefix('\n').unwrap_or(text);
    text.strip_suffix('\n').unwrap_or(text)
}

/// The value as its schema wants it; as a string where it does not fit.
fn typed(text: &str, schema: &Value) -> Value {
    let mut types = Vec::new();
    collect_types(schema, &mut types);
    if types.is_empty() || types.contains(&"string") {
        return text.into();
    }
    let value = match text.trim() {
        "True" => Value::Bool(true),
        "False" => Value::Bool(false),
        "None" => Value::Null,
        other => match serde_json::from_str(other) {
            Ok(value) => value,
            Err(_) => return text.into(),
        },
    };
    let fits = types.iter().any(|kind| match *kind {
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "null" => value.is_null(),
        _ => false,
    });
    if fits { value } else { text.into() }
}

fn collect_types<'v>(schema: &'v Value, types: &mut Vec<&'v str>) {
    match &schema["type"] {
        Value::String(one) => types.push(one),
        Value::Array(many) => types.extend(many.iter().filter_map(Value::as_str)),
        _ => {}
    }
    for key in ["anyOf", "oneOf"] {
        for one in schema[key].as_array().into_iter().flatten() {
            collect_types(one, types);
        }
    }
}
