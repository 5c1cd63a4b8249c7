//! Grammars of calls in the languages whose arguments are no JSON: Gemma 4's and the XML of Qwen3-Coder.
//!
//! An object becomes its properties in the order of the schema, those that are not required being optional.
//! What these languages have no word for (patterns, lengths, alternatives, free objects) is written as JSON,
//! which the readers take at the same place. Strings hold everything but what their readers take for their end.

use serde_json::{Map, Value, json};

use crate::grammar::with_bounded_blanks;

/// Words that say nothing about a value's form.
const SILENT: [&str; 7] = ["type", "description", "title", "default", "examples", "enum", "const"];
const QUOTE: &str = "<|\"|>";
/// What ends a value in XML.
const CLOSE: &str = "\n</parameter>\n";

/// Collects rules under names of their own.
pub(crate) struct Rules<'a> {
    rules: Vec<String>,
    /// Turns a text into an expression.
    literal: &'a dyn Fn(&str) -> String,
}

impl<'a> Rules<'a> {
    pub fn new(literal: &'a dyn Fn(&str) -> String) -> Rules<'a> {
        Rules { rules: Vec::new(), literal }
    }

    pub fn into_text(self) -> String {
        self.rules.join("\n")
    }

    /// A text.
    pub fn m(&self, text: &str) -> String {
        (self.literal)(text)
    }

    /// A rule under a fresh name.
    fn rule(&mut self, body: &str) -> String {
        let name = format!("r{}", self.rules.len());
        self.rules.push(format!("{name}: {body}"));
        name
    }

    /// JSON of a schema.
    pub fn json(&mut self, schema: &Value) -> String {
        self.rule(&format!("%json {}", with_bounded_blanks(schema)))
    }

    /// `call:NAME{key:value}`, without its tags.
    pub fn gemma(&mut self, name: &str, parameters: &Value) -> String {
        let arguments = match refers(parameters) {
            true => self.json(parameters),
            false => self.gemma_value(parameters),
        };
        format!("{} {arguments}", self.m(&format!("call:{name}")))
    }

    fn gemma_value(&mut self, schema: &Value) -> String {
        if let Some(words) = words(schema) {
            let words: Vec<String> =
                words.iter().map(|w| self.m(&format!("{QUOTE}{w}{QUOTE}"))).collect();
            return format!("({})", words.join(" | "));
        }
        if is_text(schema) {
            let quote = self.m(QUOTE);
            // Where the quote is no token of its own, it belongs to what ends with it.
            return match quote.starts_with("<[") {
                true => format!("({quote} TEXT {quote})"),
                false => format!("({quote} quoted)"),
            };
        }
        if let Some(properties) = properties(schema) {
            let members: Vec<(String, bool)> = properties
                .iter()
                .map(|(key, value)| {
                    let bare = !key.is_empty()
                        && key.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
                    let key_text = if bare { key.clone() } else { format!("{QUOTE}{key}{QUOTE}") };
                    let value = self.gemma_value(value);
                    (
                        format!("{} {value}", self.m(&format!("{key_text}:"))),
                        is_required(schema, key),
                    )
                })
                .collect();
            let members = self.members(&members);
            return self.rule(&format!("\"{{\" {members} \"}}\""));
        }
        if let Some(items) = items(schema) {
            let item = self.gemma_value(items);
            return self.rule(&format!("\"[\" ({item} (\",\" {item})*)? \"]\""));
        }
        self.json(schema)
    }

    /// Members with commas between those that are there. Two rules for each: with something before it, and not.
    fn members(&mut self, members: &[(String, bool)]) -> String {
        let (mut first, mut later) = ("\"\"".to_owned(), "\"\"".to_owned());
        for (member, required) in members.iter().rev() {
            let (mut begin, mut go_on) =
                (format!("{member} {later}"), format!("\",\" {member} {later}"));
            if !required {
                begin = format!("{begin} | {first}");
                go_on = format!("{go_on} | {later}");
            }
            first = self.rule(&begin);
            later = self.rule(&go_on);
        }
        first
    }

    /// `<function=NAME>…</function>`, without the tags around it. None: the arguments have no such form.
    pub fn xml(&mut self, name: &str, parameters: &Value) -> Option<String> {
        let properties = properties(parameters).filter(|_| !refers(parameters))?;
        if properties.keys().any(|key| key.is_empty() || key.contains(['<', '>', '\n'])) {
            return None;
        }
        let mut parts = vec![self.m(&format!("<function={name}>\n"))];
        for (key, schema) in properties {
            let value = if let Some(words) = words(schema) {
                let words: Vec<String> =
                    words.iter().map(|w| self.m(&format!("{w}{CLOSE}"))).collect();
                format!("({})", words.join(" | "))
            } else if is_text(schema) {
                // With the closer, at the first place where it stands.
                "lines".to_owned()
            } else {
                format!("{} {}", self.json(schema), self.m(CLOSE))
            };
            let open = self.m(&format!("<parameter={key}>\n"));
            let optional = if is_required(parameters, key) { "" } else { "?" };
            parts.push(format!("({open} {value}){optional}"));
        }
        parts.push(self.m("</function>"));
        Some(parts.join(" "))
    }
}

/// Terminals and rules that the others name: a text of Gemma's up to its closing quote, and one of XML's with its closer.
/// In XML, the tags of what may follow end a text wherever they stand.
pub(crate) const TERMINALS: &str = r#"TEXT: /(?s:.*)/ & ~/(?s:.*)<\|"\|>(?s:.*)/
quoted[suffix="<|\"|>"]: /(?s:.*)/
lines[suffix="\n</parameter>\n"]: LINES
LINES: /(?s:.*)/ & ~/(?s:.*)(<parameter=|<\/function>|<\/tool_call>|<tool_call>)(?s:.*)/"#;

/// Parts that stand elsewhere in the schema cannot be followed piece by piece.
fn refers(schema: &Value) -> bool {
    match schema {
        Value::Object(object) => object.contains_key("$ref") || object.values().any(refers),
        Value::Array(items) => items.iter().any(refers),
        _ => false,
    }
}

fn only(schema: &Value, words: &[&str]) -> bool {
    let known = |key: &String| SILENT.contains(&key.as_str()) || words.contains(&key.as_str());
    schema.as_object().is_some_and(|object| object.keys().all(known))
}

/// A string of any text.
fn is_text(schema: &Value) -> bool {
    schema["type"] == "string"
        && only(schema, &[])
        && schema.get("enum").is_none()
        && schema.get("const").is_none()
}

/// One of these strings.
fn words(schema: &Value) -> Option<Vec<&str>> {
    let values = match (&schema["enum"], schema.get("const")) {
        (Value::Array(values), _) => values.iter().collect::<Vec<_>>(),
        (_, Some(value)) => vec![value],
        _ => return None,
    };
    let words: Option<Vec<&str>> = values.into_iter().map(Value::as_str).collect();
    words.filter(|words| {
        !words.is_empty()
            && words.iter().all(|w| !w.contains('<') && !w.is_empty() && w.trim() == *w)
    })
}

/// Properties of an object that has no others.
fn properties(schema: &Value) -> Option<&Map<String, Value>> {
    let plain =
        only(schema, &["properties", "required", "additionalProperties", "strict", "$schema"]);
    let closed = matches!(schema.get("additionalProperties"), None | Some(Value::Bool(_)));
    let properties = schema["properties"].as_object().filter(|_| plain && closed)?;
    let is_required = |r: &Value| r.as_str().is_some_and(|r| properties.contains_key(r));
    // What is required without being described has to be written, too.
    let described = schema["required"].as_array().is_none_or(|all| all.iter().all(is_required));
    (schema["type"] == "object" && described).then_some(properties)
}

fn is_required(schema: &Value, key: &str) -> bool {
    schema["required"].as_array().is_some_and(|all| all.iter().any(|r| r == key))
}

fn items(schema: &Value) -> Option<&Value> {
    let plain = schema["type"] == "array" && only(schema, &["items"]);
    schema.get("items").filter(|items| plain && items.is_object())
}

/// The schema of a call's arguments, which are an object in every language.
pub(crate) fn arguments(parameters: &Value) -> Value {
    let Value::Object(object) = parameters else { return json!({ "type": "object" }) };
    let mut schema = object.clone();
    let or_else = |kind: &Value| kind.as_array().is_some_and(|all| all.contains(&json!("object")));
    if schema.get("type").map_or(!schema.contains_key("$ref"), or_else) {
        schema.insert("type".into(), "object".into());
    }
    schema.into()
}

/// Turns what a schema says of its own parts (`#/$defs/x`) into what it is below `at`, a pointer into the schema that
/// it becomes a part of.
fn moved(schema: &mut Value, at: &str) {
    match schema {
        Value::Array(items) => items.iter_mut().for_each(|item| moved(item, at)),
        // With a name of its own it is a document of its own.
        Value::Object(object) if object.get("$id").is_none_or(|id| !id.is_string()) => {
            for (key, value) in object {
                match key.as_str() {
                    "const" | "enum" | "default" | "examples" => {}
                    "$ref" => {
                        let own = value.as_str().and_then(|r| r.strip_prefix('#'));
                        let own = own.filter(|rest| rest.is_empty() || rest.starts_with('/'));
                        if let Some(rest) = own {
                            *value = format!("#{at}{rest}").into();
                        }
                    }
                    // Names of people's own, which are no words of schemas.
                    "properties" | "patternProperties" | "$defs" | "definitions"
                    | "dependentSchemas" => {
                        let all = value.as_object_mut();
                        all.into_iter().flatten().for_each(|(_, value)| moved(value, at));
                    }
                    _ => moved(value, at),
                }
            }
        }
        _ => {}
    }
}

/// A call as an object: `{"name": …, KEY: arguments}`.
pub(crate) fn whole(name: &str, key: &str, parameters: &Value) -> Value {
    let mut parameters = parameters.clone();
    moved(&mut parameters, &format!("/properties/{key}"));
    json!({
        "type": "object",
        "properties": { "name": { "const": name }, key: parameters },
        "required": ["name", key],
        "additionalProperties": false,
    })
}
