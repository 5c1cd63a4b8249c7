//! What an answer must look like: JSON, JSON of a schema, a call of a tool.
//!
//! Grammars are `llguidance`'s. A constraint covers the whole answer, reasoning included, because tokens are
//! chosen one by one from the first on: so what a format writes around JSON is part of the grammar.

use std::sync::{Arc, OnceLock};

use forebay_chat::{Format, Tool};
use forebay_schedule::Constraint;
use forebay_text::Tokenizer;
use llguidance::api::TopLevelGrammar;
use llguidance::toktrie::{ApproximateTokEnv, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Matcher, ParserFactory};
use serde_json::{Value, json};

use crate::dialect::{self, Rules, TERMINALS};
use crate::error::{ApiError, Kind};

/// What an answer must be.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// A JSON object.
    JsonObject,
    /// JSON of a schema.
    Schema(Value),
    /// One call or more (`many`) of one of these tools.
    Call {
        /// The tools.
        tools: Vec<Tool>,
        /// Whether several calls may follow one another.
        many: bool,
    },
}

/// Makes constraints for one tokenizer. The trie of its tokens is built when it is first needed.
pub(crate) struct Grammars {
    tokenizer: Tokenizer,
    ends: Arc<[u32]>,
    vocab: usize,
    /// Calls are a list of JSON behind one marker, as Mistral's older templates have it.
    lists_calls: bool,
    factory: OnceLock<Result<ParserFactory, String>>,
}

impl Grammars {
    /// `template` is the source of the chat template.
    pub fn new(tokenizer: Tokenizer, ends: Arc<[u32]>, vocab: usize, template: &str) -> Grammars {
        let lists_calls = template.contains("[TOOL_CALLS]") && !template.contains("[ARGS]");
        Grammars { tokenizer, ends, vocab, lists_calls, factory: OnceLock::new() }
    }

    fn factory(&self) -> Result<&ParserFactory, ApiError> {
        let build = || -> Result<ParserFactory, String> {
            let words = (0..self.vocab as u32).map(|id| self.word(id)).collect::<Vec<_>>();
            let first = self.ends.first().copied().unwrap_or(0);
            let info = TokRxInfo::new(self.vocab as u32, first);
            let trie = TokTrie::from(&info, &words).with_eos_tokens(&self.ends);
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let mut factory = ParserFactory::new_simple(&env).map_err(|e| e.to_string())?;
            factory.quiet();
            Ok(factory)
        };
        self.factory
            .get_or_init(build)
            .as_ref()
            .map_err(|e| ApiError::new(Kind::Internal, format!("grammars do not work here: {e}")))
    }

    /// Bytes of a token; control tokens are marked as such.
    fn word(&self, id: u32) -> Vec<u8> {
        let bytes = self.tokenizer.token_bytes(id);
        if self.tokenizer.is_marker(id) || self.ends.contains(&id) {
            let mut word = vec![TokTrie::SPECIAL_TOKEN_MARKER];
            word.extend(bytes);
            return word;
        }
        bytes
    }

    /// A constraint for an answer of at most `most` tokens in this format. `reasons` says whether the prompt leaves the
    /// model inside its reasoning, none whether it may begin any.
    ///
    /// Reasoning takes half of the tokens at most: it would else go on to the limit, and nothing of what was asked for
    /// would come.
    pub fn constraint(
        &self,
        shape: &Shape,
        format: Format,
        reasons: Reasons,
        most: usize,
    ) -> Result<Box<dyn Constraint>, ApiError> {
        let lark = self.lark(shape, format, reasons, most / 2);
        let wrong = |e: &dyn std::fmt::Display| {
            ApiError::new(Kind::Invalid, format!("{UNFOLLOWED}: {}", reason(e)))
        };
        let parser = self.factory()?.create_parser(TopLevelGrammar::from_lark(lark));
        let parser = parser.map_err(|e| wrong(&e))?;
        let mut matcher = Matcher::new(Ok(parser));
        // What cannot even begin is said before anything is computed.
        matcher.compute_mask_or_eos().map_err(|e| wrong(&e))?;
        Ok(Box::new(Grammar { matcher }))
    }

    fn lark(&self, shape: &Shape, format: Format, reasons: Reasons, thoughts: usize) -> String {
        let literal = |text: &str| self.literal(text);
        let m = &literal;
        let mut rules = Rules::new(&literal);
        let answer = match shape {
            Shape::JsonObject => rules.json(&json!({ "type": "object" })),
            Shape::Schema(schema) => rules.json(schema),
            Shape::Call { tools, many } => {
                let calls: Vec<String> =
                    tools.iter().map(|tool| self.call(tool, format, &mut rules)).collect();
                let one = format!("({})", calls.join(" | "));
                // Several only where nothing has to stand between.
                match (*many, format) {
                    (true, Format::Mistral) if self.lists_calls => {
                        format!("{} \"[\" {one} (\", \" {one})* \"]\"", m("[TOOL_CALLS]"))
                    }
                    (false, Format::Mistral) if self.lists_calls => {
                        format!("{} \"[\" {one} \"]\"", m("[TOOL_CALLS]"))
                    }
                    (true, Format::Mistral | Format::Gemma4) => format!("{one}+"),
                    (true, Format::Qwen3Json | Format::QwenXml | Format::Plain) => {
                        format!("{one} (\"\\n\" {one})*")
                    }
                    _ => one,
                }
            }
        };
        let is_call = matches!(shape, Shape::Call { .. });
        let think = |open: &str, close: &str| match reasons {
            Reasons::Inside => format!("thought {} ", m(close)),
            Reasons::May => format!("({} thought {} /\\n{{0,2}}/)? ", m(open), m(close)),
            Reasons::Not => String::new(),
        };
        let start = match format {
            Format::Harmony => {
                let analysis = format!(
                    "({} thought {} {})? ",
                    m("<|channel|>analysis<|message|>"),
                    m("<|end|>"),
                    m("<|start|>assistant"),
                );
                let analysis = if reasons == Reasons::Not { String::new() } else { analysis };
                let head = if is_call { String::new() } else { m("<|channel|>final<|message|>") };
                format!("{analysis}{head} {answer}")
            }
            Format::Qwen3Json | Format::QwenXml => {
                format!("{}/\\n{{0,2}}/ {answer}", think("<think>", "</think>"))
            }
            Format::Gemma4 => format!("{}{answer}", think("<|channel>thought\n", "<channel|>")),
            Format::Mistral => format!("{}{answer}", think("[THINK]", "[/THINK]")),
            Format::Llama3 | Format::Plain => answer,
        };
        let thought = match format {
            Format::Harmony => self.text_before("<|end|>", "<|"),
            Format::Gemma4 => self.text_before("<channel|>", "<channel|>"),
            Format::Mistral => self.text_before("[/THINK]", "[/THINK]"),
            _ => self.text_before("</think>", "</think>"),
        };
        let rules = rules.into_text();
        format!(
            "start: {start}\nthought[max_tokens={thoughts}]: THOUGHT\nTHOUGHT: {thought}\n{TERMINALS}\n{rules}\n"
        )
    }

    /// Text that `closer` ends, and in which `never` does not stand. Where the closer is no token of its own, nothing
    /// that may begin one is in the text: lexers take as much as they can.
    fn text_before(&self, closer: &str, never: &str) -> String {
        let is_token = self.tokenizer.markers().iter().any(|(marker, _)| marker == closer);
        // `\<` is an assertion and no bracket.
        let escape = |c: char| if "|[]/".contains(c) { vec!['\\', c] } else { vec![c] };
        let escaped: String = never.chars().flat_map(escape).collect();
        match is_token {
            true => format!("/(?s:.*)/ & ~/(?s:.*){escaped}(?s:.*)/"),
            false => "/[^<\\[]*/".to_owned(),
        }
    }

    /// A call of a tool in the format's own words.
    fn call(&self, tool: &Tool, format: Format, rules: &mut Rules<'_>) -> String {
        let parameters = dialect::arguments(&tool.parameters);
        let m = |text: &str| self.literal(text);
        match format {
            Format::Harmony => format!(
                "({} {} {} {})",
                m(&format!("<|channel|>commentary to=functions.{} ", tool.name)),
                m("<|constrain|>json"),
                m("<|message|>"),
                rules.json(&parameters),
            ),
            Format::Mistral if self.lists_calls => {
                rules.json(&dialect::whole(&tool.name, "arguments", &parameters))
            }
            Format::Mistral => {
                let head = m(&format!("[TOOL_CALLS]{}[ARGS]", tool.name));
                format!("({head} {})", rules.json(&parameters))
            }
            Format::Llama3 => rules.json(&dialect::whole(&tool.name, "parameters", &parameters)),
            Format::Gemma4 => {
                let call = rules.gemma(&tool.name, &parameters);
                format!("({} {call} {})", m("<|tool_call>"), m("<tool_call|>"))
            }
            Format::QwenXml | Format::Qwen3Json | Format::Plain => {
                let call = match format {
                    Format::QwenXml => rules.xml(&tool.name, &parameters),
                    _ => None,
                };
                // The reader of XML takes JSON as well.
                let call = call.unwrap_or_else(|| {
                    rules.json(&dialect::whole(&tool.name, "arguments", &parameters))
                });
                format!("({} {call} {})", m("<tool_call>\n"), m("\n</tool_call>"))
            }
        }
    }

    /// A text as Lark writes it, control tokens by their names.
    fn literal(&self, text: &str) -> String {
        let mut out = Vec::new();
        let mut rest = text;
        while !rest.is_empty() {
            let found = self
                .tokenizer
                .markers()
                .iter()
                .filter_map(|(marker, id)| Some((rest.find(marker.as_str())?, marker, id)))
                .min_by_key(|(at, marker, _)| (*at, std::cmp::Reverse(marker.len())));
            let plain = &rest[..found.map_or(rest.len(), |(at, ..)| at)];
            if !plain.is_empty() {
                out.push(Value::from(plain).to_string());
            }
            rest = &rest[plain.len()..];
            if let Some((_, marker, id)) = found {
                out.push(format!("<[{id}]>"));
                rest = &rest[marker.len()..];
            }
        }
        out.join(" ")
    }
}

/// How a fault of a grammar begins: it is the request's.
pub(crate) const UNFOLLOWED: &str = "the schema cannot be followed";

fn unfollowed(error: &dyn std::fmt::Display) -> String {
    format!("{UNFOLLOWED} any further: {}", reason(error))
}

/// What is wrong, without the place in our own grammar and without the parser's state.
fn reason(error: &dyn std::fmt::Display) -> String {
    let text = error.to_string();
    let mut lines = text.lines().map(str::trim);
    let first = lines.next().unwrap_or_default();
    let first = first.split_once("failed to compile JSON schema: ").map_or(first, |(_, why)| why);
    let line = match first {
        "NoExtensionBias" => {
            "no text has this form; does it refer to itself without an end?".into()
        }
        // A pattern that cannot be read: the pattern, a pointer into it, and what is wrong.
        _ if first.ends_with(':') => {
            let rest: Vec<&str> = lines.take(4).filter(|l| !l.chars().all(|c| c == '^')).collect();
            format!("{first} {}", rest.join(" "))
        }
        _ => first.to_owned(),
    };
    line.chars().take(300).collect()
}

/// The schema, with at most one blank after a comma or a colon and none elsewhere: a model may like blanks so
/// much that nothing else comes.
pub(crate) fn with_bounded_blanks(schema: &Value) -> Value {
    let mut schema = match schema {
        Value::Object(_) => schema.clone(),
        // `true` and `false` are schemas that hold nothing.
        other => json!({ "allOf": [other] }),
    };
    schema["x-guidance"] = json!({
        "whitespace_flexible": false, "item_separator": ", ?", "key_separator": ": ?",
    });
    schema
}

/// Whether an answer has reasoning in front.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reasons {
    /// The prompt has begun it.
    Inside,
    /// The model may begin it.
    May,
    /// The prompt has ended it.
    Not,
}

struct Grammar {
    matcher: Matcher,
}

impl Constraint for Grammar {
    fn mask(&mut self, logits: &mut [f32]) -> Result<(), String> {
        let mask = self.matcher.compute_mask_or_eos().map_err(|e| unfollowed(&e))?;
        for (word, logits) in mask.as_slice().iter().zip(logits.chunks_mut(32)) {
            if *word == u32::MAX {
                continue;
            }
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word & (1 << bit) == 0 {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
        // Ids beyond the mask stand for nothing.
        let covered = (mask.as_slice().len() * 32).min(logits.len());
        logits[covered..].fill(f32::NEG_INFINITY);
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<bool, String> {
        self.matcher.consume_token(token).map_err(|e| unfollowed(&e))?;
        Ok(self.matcher.is_stopped())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_chat::{End, Parsed, Parser};
    use forebay_text::Specials;
    use std::path::Path;

    fn grammars(model: &str) -> (Tokenizer, Grammars) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(model);
        let tokenizer = Tokenizer::from_folder(&dir).unwrap();
        let ends: Arc<[u32]> = tokenizer.eos_ids().iter().copied().collect();
        let vocab = tokenizer.vocab_size();
        (tokenizer.clone(), Grammars::new(tokenizer, ends, vocab, ""))
    }

    fn tool() -> Tool {
        let text = json!({ "type": "string" });
        let parameters = json!({
            "type": "object", "properties": { "code": text, "n": { "type": "integer" } },
            "required": ["code", "n"], "additionalProperties": false,
        });
        Tool { name: "run".into(), description: None, parameters }
    }

    fn tool_named(name: &str) -> Tool {
        Tool { name: name.into(), description: None, parameters: Value::Null }
    }

    /// Whether the grammar takes all of `text` and lets the answer end there.
    fn takes(constraint: &mut dyn Constraint, tokenizer: &Tokenizer, text: &str) -> bool {
        let ids = tokenizer.encode(text, Specials::Parse).unwrap();
        let mut over = false;
        for id in ids {
            let mut logits = vec![0.0; tokenizer.vocab_size()];
            if over || constraint.mask(&mut logits).is_err() || logits[id as usize] != 0.0 {
                return false;
            }
            over = constraint.accept(id).unwrap();
        }
        let mut logits = vec![0.0; tokenizer.vocab_size()];
        over || {
            constraint.mask(&mut logits).unwrap();
            tokenizer.eos_ids().iter().any(|&id| logits[id as usize] == 0.0)
        }
    }

    /// What the grammar takes as a call is read as that call: strings with everything that could be a closer's beginning.
    #[test]
    fn strings_of_calls_hold_what_their_readers_take() {
        let texts = [
            "a < b && c > d",
            "<b>bold</b>",
            "if (x <| y) { }",
            "<<|\" |>",
            "one\n</param>\ntwo\n",
            "x </parameter> y",
            "[1, 2]: {\"k\": '<'}",
            "",
            "a\n\n<",
        ];
        let shape = Shape::Call { tools: vec![tool()], many: false };
        for (model, format) in [
            // The quote is a token in Gemma's vocabulary and text in the other.
            ("tiny-gemma4-mlx4", Format::Gemma4),
            ("tiny-gpt-oss", Format::Gemma4),
            ("tiny-gpt-oss", Format::QwenXml),
        ] {
            let (tokenizer, grammars) = grammars(model);
            for text in texts {
                let call = match format {
                    Format::Gemma4 => {
                        format!("<|tool_call>call:run{{code:<|\"|>{text}<|\"|>,n:7}}<tool_call|>")
                    }
                    _ => format!(
                        "<tool_call>\n<function=run>\n<parameter=code>\n{text}\n</parameter>\n<parameter=n>\n7\n\
                         </parameter>\n</function>\n</tool_call>"
                    ),
                };
                let constraint = grammars.constraint(&shape, format, Reasons::Not, 400);
                let constraint = &mut *constraint.unwrap();
                assert!(takes(constraint, &tokenizer, &call), "{model} {format:?} {text:?}");
                let mut parser = Parser::new(format, &[tool()], "", &[]);
                let mut parsed = Parsed::default();
                let deltas = parser.push(&call).into_iter().chain(parser.finish(End::Eos));
                deltas.for_each(|delta| parsed.add(delta));
                let arguments = &parsed.json()["tool_calls"][0]["arguments"];
                assert_eq!(*arguments, json!({ "code": text, "n": 7 }), "{format:?}");
            }
        }
        // What ends a string does not stand in it.
        let (tokenizer, grammars) = grammars("tiny-gpt-oss");
        for text in ["<parameter=n>", "</function>", "</tool_call>"] {
            let call = format!(
                "<tool_call>\n<function=run>\n<parameter=code>\n{text}\n</parameter>\n<parameter=n>\n7\n\
                 </parameter>\n</function>\n</tool_call>"
            );
            let constraint = grammars.constraint(&shape, Format::QwenXml, Reasons::Not, 400);
            assert!(!takes(&mut *constraint.unwrap(), &tokenizer, &call), "{text}");
        }
    }

    /// What a schema says of its own parts holds where the schema is a part of a call, in every language.
    #[test]
    fn schemas_that_refer_to_themselves() {
        let node = json!({
            "type": "object", "required": ["v"], "additionalProperties": false,
            "properties": { "v": { "type": "integer" }, "next": { "$ref": "#/$defs/node" } },
        });
        let parameters = json!({
            "$defs": { "node": node }, "type": "object", "required": ["list", "$ref"],
            "additionalProperties": false,
            // A property may have any name.
            "properties": { "list": { "$ref": "#/$defs/node" }, "$ref": { "const": "#/$defs/node" } },
        });
        let tool = Tool { parameters, ..tool() };
        let shape = Shape::Call { tools: vec![tool], many: false };
        let (tokenizer, grammars) = grammars("tiny-gpt-oss");
        let arguments = |v: &str| {
            format!(
                "{{\"list\": {{\"v\": {v}, \"next\": {{\"v\": 2}}}}, \"$ref\": \"#/$defs/node\"}}"
            )
        };
        let tagged = |call: String| format!("<tool_call>\n{call}\n</tool_call>");
        let whole =
            |key: &str, v: &str| format!("{{\"name\": \"run\", \"{key}\": {}}}", arguments(v));
        for (format, right, wrong) in [
            (
                Format::Qwen3Json,
                tagged(whole("arguments", "1")),
                tagged(whole("arguments", "\"1\"")),
            ),
            (Format::QwenXml, tagged(whole("arguments", "1")), tagged(whole("arguments", "\"1\""))),
            (Format::Llama3, whole("parameters", "1"), whole("parameters", "\"1\"")),
            (
                Format::Gemma4,
                format!("<|tool_call>call:run{}<tool_call|>", arguments("1")),
                format!("<|tool_call>call:run{}<tool_call|>", arguments("\"1\"")),
            ),
        ] {
            for (text, taken) in [(right, true), (wrong, false)] {
                let constraint = grammars.constraint(&shape, format, Reasons::Not, 400).unwrap();
                let constraint = &mut *{ constraint };
                assert_eq!(takes(constraint, &tokenizer, &text), taken, "{format:?} {text}");
            }
        }
        // Without an end, and said so.
        let shape = Shape::Schema(json!({ "$ref": "#" }));
        let fault = grammars.constraint(&shape, Format::Plain, Reasons::Not, 400).err().unwrap();
        assert_eq!(fault.kind, Kind::Invalid);
        assert!(fault.message.contains("refer to itself"), "{}", fault.message);
    }

    /// Arguments are an object, also where a schema leaves that open.
    #[test]
    fn arguments_are_objects() {
        let (tokenizer, grammars) = grammars("tiny-gpt-oss");
        let one_of = json!({ "anyOf": [
            { "properties": { "a": { "type": "integer" } }, "required": ["a"] },
            { "properties": { "b": { "type": "integer" } }, "required": ["b"] },
        ] });
        for parameters in [
            json!({}),
            json!({ "description": "anything" }),
            json!({ "type": ["object", "null"] }),
            one_of,
        ] {
            let tool = Tool { parameters: parameters.clone(), ..tool_named("run") };
            let shape = Shape::Call { tools: vec![tool], many: false };
            for (arguments, taken) in [("{\"a\": 1}", true), ("null", false), ("[1]", false)] {
                let call = format!(
                    "<tool_call>\n{{\"name\": \"run\", \"arguments\": {arguments}}}\n</tool_call>"
                );
                let constraint =
                    grammars.constraint(&shape, Format::Qwen3Json, Reasons::Not, 400).unwrap();
                let got = takes(&mut *{ constraint }, &tokenizer, &call);
                assert_eq!(got, taken, "{parameters} {arguments}");
            }
        }
    }

    /// A pattern that cannot be read is told with what is wrong with it.
    #[test]
    fn what_is_wrong_with_a_schema_is_told() {
        let (_, grammars) = grammars("tiny-gpt-oss");
        for (schema, word) in [
            (json!({ "type": "string", "pattern": "((" }), "unclosed group"),
            (json!({ "type": "string", "pattern": "(?=a)b" }), "look-around"),
            (json!({ "type": "martian" }), "martian"),
            (json!({ "$ref": "#/$defs/none" }), "/$defs/none"),
            (json!({ "anyOf": [] }), "anyOf is empty"),
        ] {
            let shape = Shape::Schema(schema.clone());
            let fault = grammars.constraint(&shape, Format::Plain, Reasons::Not, 40).err().unwrap();
            assert!(fault.message.contains(word), "{schema}: {}", fault.message);
            assert!(!fault.message.contains("failed to compile"), "{}", fault.message);
        }
    }

    /// After half of the tokens, reasoning has to end.
    #[test]
    fn reasoning_leaves_room_for_the_call() {
        let (tokenizer, grammars) = grammars("tiny-gpt-oss");
        let shape = Shape::Call { tools: vec![tool()], many: false };
        let constraint = grammars.constraint(&shape, Format::Harmony, Reasons::May, 20);
        let constraint = &mut *constraint.unwrap();
        let begin = tokenizer.encode("<|channel|>analysis<|message|>", Specials::Parse).unwrap();
        let word = tokenizer.encode(" a", Specials::Ignore).unwrap()[0];
        begin.into_iter().for_each(|id| assert!(!constraint.accept(id).unwrap()));
        let mut thought = 0;
        loop {
            let mut logits = vec![0.0; tokenizer.vocab_size()];
            constraint.mask(&mut logits).unwrap();
            let open = (0..logits.len() as u32).filter(|&id| logits[id as usize] == 0.0);
            let mut closers =
                open.map(|id| b"<|end|>".starts_with(tokenizer.token_bytes(id).as_slice()));
            if logits[word as usize] != 0.0 {
                assert_eq!(thought, 10);
                assert!(closers.all(|is| is), "nothing but the end may come then");
                break;
            }
            assert!(closers.any(|is| is), "it may end after {thought}");
            thought += 1;
            assert!(!constraint.accept(word).unwrap());
        }
    }
}
