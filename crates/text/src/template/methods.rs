//! Methods of Python's strings and dicts, where they differ from what `minijinja-contrib` has or are missing there.
//! Positions count characters, white space is Python's, and keyword arguments are taken.

use minijinja::value::{Kwargs, ValueKind, from_args};
use minijinja::{Error, ErrorKind, State, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

use super::costs;

/// Calls a method on a value.
pub(crate) fn call(
    state: &State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    costs::before_method(value, method, args)?;
    let own = match (value.kind(), value.as_str()) {
        (ValueKind::String, Some(text)) => on_text(text, method, args)?,
        (ValueKind::Map, _) => on_dict(value, method, args)?,
        _ => None,
    };
    match own {
        Some(result) => Ok(result),
        None => unknown_method_callback(state, value, method, args),
    }
}

/// What `str.strip` strips.
pub(crate) fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

/// `str.strip` from the chosen ends.
pub(crate) fn strip<'t>(text: &'t str, chars: Option<&str>, left: bool, right: bool) -> &'t str {
    let strips = |c: char| match chars {
        Some(chars) => chars.contains(c),
        None => is_space(c),
    };
    let text = if left { text.trim_start_matches(strips) } else { text };
    if right { text.trim_end_matches(strips) } else { text }
}

/// Positional arguments and keyword arguments in the order of `names`.
fn arguments<const N: usize>(
    args: &[Value],
    names: [&str; N],
) -> Result<[Option<Value>; N], Error> {
    let (positional, kwargs): (minijinja::value::Rest<Value>, Kwargs) = from_args(args)?;
    if positional.0.len() > N {
        return Err(Error::from(ErrorKind::TooManyArguments));
    }
    let mut positional = positional.0.into_iter();
    let mut out = [const { None }; N];
    for (slot, name) in out.iter_mut().zip(names) {
        let given = match positional.next() {
            Some(value) => Some(value),
            None => kwargs.get::<Option<Value>>(name)?,
        };
        *slot = given.filter(|value| !value.is_none());
    }
    kwargs.assert_all_used()?;
    Ok(out)
}

fn text_of(value: &Value) -> Result<&str, Error> {
    let wrong = || {
        Error::new(
            ErrorKind::InvalidOperation,
            format!("expected a string, found {}", value.kind()),
        )
    };
    value.as_str().ok_or_else(wrong)
}

fn required(value: Option<Value>) -> Result<Value, Error> {
    value.ok_or_else(|| Error::from(ErrorKind::MissingArgument))
}

fn on_text(text: &str, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let list =
        |items: Vec<&str>| Value::from(items.into_iter().map(Value::from).collect::<Vec<_>>());
    Ok(Some(match method {
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = arguments(args, ["chars"])?;
            let chars = chars.as_ref().map(text_of).transpose()?;
            Value::from(strip(text, chars, method != "rstrip", method != "lstrip"))
        }
        "split" | "rsplit" => {
            let [separator, most] = arguments(args, ["sep", "maxsplit"])?;
            let most = most.map(i64::try_from).transpose()?.and_then(|n| usize::try_from(n).ok());
            let separator = separator.as_ref().map(text_of).transpose()?;
            if separator == Some("") {
                return Err(Error::new(ErrorKind::InvalidOperation, "empty separator"));
            }
            let parts = match (separator, method) {
                (None, _) => split_spaces(text, most, method == "rsplit"),
                (Some(by), "split") => {
                    text.splitn(most.map_or(usize::MAX, |n| n + 1), by).collect()
                }
                (Some(by), _) => {
                    let mut parts: Vec<&str> =
                        text.rsplitn(most.map_or(usize::MAX, |n| n + 1), by).collect();
                    parts.reverse();
                    parts
                }
            };
            list(parts)
        }
        "partition" | "rpartition" => {
            let [separator] = arguments(args, ["sep"])?;
            let separator = required(separator)?;
            let by = text_of(&separator)?;
            let cut =
                if method == "partition" { text.split_once(by) } else { text.rsplit_once(by) };
            list(match cut {
                Some((left, right)) => vec![left, by, right],
                None if method == "partition" => vec![text, "", ""],
                None => vec!["", "", text],
            })
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = arguments(args, ["affix"])?;
            let affix = required(affix)?;
            let affix = text_of(&affix)?;
            let rest = if method == "removeprefix" {
                text.strip_prefix(affix)
            } else {
                text.strip_suffix(affix)
            };
            Value::from(rest.unwrap_or(text))
        }
        "find" | "rfind" | "index" | "rindex" => {
            let [what] = arguments(args, ["sub"])?;
            let what = required(what)?;
            let what = text_of(&what)?;
            let found = if method.starts_with('r') { text.rfind(what) } else { text.find(what) };
            match found {
                Some(at) => Value::from(text[..at].chars().count()),
                None if method.ends_with("find") => Value::from(-1),
                None => return Err(Error::new(ErrorKind::InvalidOperation, "substring not found")),
            }
        }
        "isspace" => Value::from(!text.is_empty() && text.chars().all(is_space)),
        "isdigit" | "isnumeric" | "isdecimal" => {
            Value::from(!text.is_empty() && text.chars().all(char::is_numeric))
        }
        "isalpha" => Value::from(!text.is_empty() && text.chars().all(char::is_alphabetic)),
        "isalnum" => Value::from(!text.is_empty() && text.chars().all(char::is_alphanumeric)),
        "casefold" => Value::from(text.to_lowercase()),
        _ => return Ok(None),
    }))
}

/// Splits on runs of white space, at most so often.
fn split_spaces(text: &str, most: Option<usize>, from_right: bool) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = strip(text, None, true, true);
    while !rest.is_empty() {
        let cut = if from_right { rest.rfind(is_space) } else { rest.find(is_space) };
        let Some(at) = cut.filter(|_| most.is_none_or(|most| parts.len() < most)) else {
            // The end that was not trimmed on the way keeps its white space.
            parts.push(rest);
            break;
        };
        let space = rest[at..].chars().next().map_or(1, char::len_utf8);
        let (left, right) = (&rest[..at], &rest[at + space..]);
        if from_right {
            parts.push(right);
            rest = strip(left, None, false, true);
        } else {
            parts.push(left);
            rest = strip(right, None, true, false);
        }
    }
    if from_right {
        parts.reverse();
    }
    parts
}

fn on_dict(dict: &Value, method: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let keys = || -> Result<Vec<Value>, Error> { Ok(dict.try_iter()?.collect()) };
    Ok(Some(match method {
        "keys" => {
            let () = from_args(args)?;
            Value::from(keys()?)
        }
        "values" => {
            let () = from_args(args)?;
            Value::from(
                keys()?.iter().map(|key| dict.get_item(key)).collect::<Result<Vec<_>, _>>()?,
            )
        }
        "items" => {
            let () = from_args(args)?;
            let pair = |key: Value| Ok(Value::from(vec![key.clone(), dict.get_item(&key)?]));
            Value::from(keys()?.into_iter().map(pair).collect::<Result<Vec<_>, Error>>()?)
        }
        "get" => {
            let (key, default): (Value, Option<Value>) = from_args(args)?;
            let found = dict.get_item(&key).ok().filter(|value| !value.is_undefined());
            found.or(default).unwrap_or_else(|| Value::from(()))
        }
        _ => return Ok(None),
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(value: Value) -> Vec<String> {
        value.try_iter().unwrap().map(|item| item.to_string()).collect()
    }

    #[test]
    fn splits_as_python() {
        let split = |text: &str, method: &str, args: &[Value]| {
            texts(on_text(text, method, args).unwrap().unwrap())
        };
        assert_eq!(split(" a  b c ", "split", &[]), ["a", "b", "c"]);
        assert_eq!(split("a,b,c", "split", &[Value::from(","), Value::from(1)]), ["a", "b,c"]);
        assert_eq!(split("a,b,c", "rsplit", &[Value::from(","), Value::from(1)]), ["a,b", "c"]);
        assert_eq!(split(" a b  c", "split", &[Value::from(()), Value::from(1)]), ["a", "b  c"]);
        assert_eq!(split("", "split", &[]), [""; 0]);
        assert_eq!(split("", "split", &[Value::from(",")]), [""]);
        assert_eq!(split("a=b=c", "partition", &[Value::from("=")]), ["a", "=", "b=c"]);
        assert_eq!(split("abc", "rpartition", &[Value::from("=")]), ["", "", "abc"]);
    }

    #[test]
    fn finds_by_character() {
        let find = |what: &str| on_text("éa", "find", &[Value::from(what)]).unwrap().unwrap();
        assert_eq!(find("a"), Value::from(1));
        assert_eq!(find("x"), Value::from(-1));
        assert_eq!(strip("\u{1c} x\u{a0}", None, true, true), "x");
    }
}
