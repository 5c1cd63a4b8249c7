//! Typed access to the fields of a request; what is wrong is named by its path. Null is as absent.

use serde_json::{Map, Value};

use crate::error::{ApiError, Kind};

type Result<T> = std::result::Result<T, ApiError>;

/// An object of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Fields<'a> {
    object: &'a Map<String, Value>,
    path: &'a str,
}

impl<'a> Fields<'a> {
    /// The body itself.
    pub fn of(body: &'a Value) -> Result<Fields<'a>> {
        let object = body.as_object();
        let object =
            object.ok_or_else(|| ApiError::new(Kind::Invalid, "the body must be a JSON object"))?;
        Ok(Fields { object, path: "" })
    }

    /// An object inside, with its name.
    pub fn inside(object: &'a Map<String, Value>, path: &'a str) -> Fields<'a> {
        Fields { object, path }
    }

    /// Full path of a field.
    pub fn path(&self, name: &str) -> String {
        match self.path {
            "" => name.to_owned(),
            path => format!("{path}.{name}"),
        }
    }

    pub fn get(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    pub fn wrong(&self, name: &str, what: impl std::fmt::Display) -> ApiError {
        ApiError::field(self.path(name), what)
    }

    pub fn str(&self, name: &str) -> Result<Option<&'a str>> {
        let text =
            |value: &'a Value| value.as_str().ok_or_else(|| self.wrong(name, "must be a string"));
        self.get(name).map(text).transpose()
    }

    pub fn bool(&self, name: &str) -> Result<Option<bool>> {
        let wrong = || self.wrong(name, "must be true or false");
        self.get(name).map(|value| value.as_bool().ok_or_else(wrong)).transpose()
    }

    pub fn array(&self, name: &str) -> Result<Option<&'a Vec<Value>>> {
        let wrong = || self.wrong(name, "must be a list");
        self.get(name).map(|value| value.as_array().ok_or_else(wrong)).transpose()
    }

    /// An object inside, with `path` as its name in messages.
    pub fn object(&self, name: &'a str) -> Result<Option<Fields<'a>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let object = value.as_object().ok_or_else(|| self.wrong(name, "must be an object"))?;
        Ok(Some(Fields { object, path: name }))
    }

    /// The same with its full path, where it is deeper.
    pub fn object_at(&self, name: &str, path: &'a str) -> Result<Option<Fields<'a>>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        let object = value.as_object().ok_or_else(|| self.wrong(name, "must be an object"))?;
        Ok(Some(Fields { object, path }))
    }

    /// A whole number of at least `least`.
    pub fn count(&self, name: &str, least: usize) -> Result<Option<usize>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        // Some clients write 5.0.
        let whole = value.as_f64().filter(|x| x.fract() == 0.0 && *x >= 0.0 && *x < 1e15);
        let count = value.as_u64().or(whole.map(|x| x as u64));
        match count {
            Some(n) if n as usize >= least => Ok(Some(n as usize)),
            _ => Err(self.wrong(name, format_args!("must be a whole number of at least {least}"))),
        }
    }

    /// A number in `range`.
    pub fn number(&self, name: &str, range: std::ops::RangeInclusive<f64>) -> Result<Option<f32>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        match value.as_f64().filter(|x| range.contains(x)) {
            Some(x) => Ok(Some(x as f32)),
            None => {
                let (from, to) = (range.start(), range.end());
                let range = match *to == f64::MAX {
                    true => format!("of at least {from}"),
                    false => format!("between {from} and {to}"),
                };
                Err(self.wrong(name, format_args!("must be a number {range}")))
            }
        }
    }

    /// A string, or a list of at most `most` strings.
    pub fn strings(&self, name: &str, most: usize) -> Result<Vec<String>> {
        let wrong = || self.wrong(name, "must be a string or a list of strings");
        let list = match self.get(name) {
            None => return Ok(Vec::new()),
            Some(Value::String(one)) => vec![one.clone()],
            Some(Value::Array(many)) => {
                let text = |value: &Value| value.as_str().map(str::to_owned).ok_or_else(wrong);
                many.iter().map(text).collect::<Result<_>>()?
            }
            Some(_) => return Err(wrong()),
        };
        if list.len() > most {
            return Err(self.wrong(name, format_args!("may have at most {most} entries")));
        }
        if list.iter().any(String::is_empty) {
            return Err(self.wrong(name, "must not be empty"));
        }
        Ok(list)
    }

    /// Refuses a field that says anything but one of these words, which stand for what is done anyway.
    pub fn only(&self, name: &str, words: &[&str], instead: &str) -> Result<()> {
        match self.str(name)? {
            Some(word) if !words.contains(&word) => {
                let known = words.join(" or ");
                let what =
                    format!("`{word}` is not supported by this server; use {known}, {instead}");
                Err(self.wrong(name, what))
            }
            _ => Ok(()),
        }
    }

    /// Refuses fields that say something.
    pub fn refuse(&self, names: &[(&str, &str)]) -> Result<()> {
        for (name, instead) in names {
            let says_nothing = |value: &Value| match value {
                Value::Bool(b) => !b,
                Value::Number(n) => n.as_f64() == Some(0.0),
                Value::Array(list) => list.is_empty(),
                Value::Object(object) => object.is_empty(),
                Value::String(text) => text.is_empty(),
                _ => false,
            };
            if self.get(name).is_some_and(|value| !says_nothing(value)) {
                return Err(ApiError::unsupported(self.path(name), instead));
            }
        }
        Ok(())
    }
}
