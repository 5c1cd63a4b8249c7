//! Outputs of models with the parse that is wanted, whole and in pieces; then garbage.

use forebay_chat::{Delta, End, Format, Parsed, Parser, Tool};
use proptest::prelude::*;
use serde_json::Value;

const CASES: &str = include_str!("tool_calls.jsonl");

struct Case {
    id: String,
    format: Format,
    tools: Vec<Tool>,
    tail: String,
    raw: String,
    end: End,
    expect: Value,
}

fn cases() -> Vec<Case> {
    let case = |line: &str| {
        let v: Value = serde_json::from_str(line).unwrap();
        let text = |key: &str| v[key].as_str().unwrap().to_owned();
        Case {
            id: text("id"),
            format: text("family").parse().unwrap(),
            tools: v["tools"].as_array().unwrap().iter().filter_map(Tool::from_json).collect(),
            tail: text("prompt_tail"),
            raw: text("raw"),
            end: if v["end"] == "length" { End::Length } else { End::Eos },
            expect: v["expect"].clone(),
        }
    };
    CASES.lines().map(case).collect()
}

/// Parses pieces; no delta may be empty or hold a part of a marker.
fn parse<'p>(case: &Case, raw: &str, pieces: impl IntoIterator<Item = &'p [u8]>) -> Parsed {
    let mut parser = Parser::new(case.format, &case.tools, &case.tail, &[]);
    let mut deltas = Vec::new();
    for piece in pieces {
        deltas.extend(parser.push_bytes(piece));
    }
    deltas.extend(parser.finish(case.end));
    let mut parsed = Parsed::default();
    for delta in deltas {
        if let Delta::Reasoning(text) | Delta::Content(text) = &delta {
            assert!(!text.is_empty(), "{}: an empty delta", case.id);
            assert!(
                !text.contains('\u{fffd}') || raw.contains('\u{fffd}'),
                "{}: {text:?}",
                case.id
            );
        }
        parsed.add(delta);
    }
    parsed.finish_reason = parser.finish_reason(case.end);
    parsed
}

#[test]
fn every_case_whole_and_split_everywhere() {
    let cases = cases();
    assert_eq!(cases.len(), 47);
    let mut bad = Vec::new();
    for case in &cases {
        let raw = case.raw.as_bytes();
        let whole = parse(case, &case.raw, [raw]).json();
        if whole != case.expect {
            bad.push(format!("{}:\n  got    {whole}\n  wanted {}", case.id, case.expect));
            continue;
        }
        let mut ways: Vec<Vec<&[u8]>> = vec![raw.chunks(1).collect(), raw.chunks(3).collect()];
        ways.extend((0..=raw.len()).map(|at| vec![&raw[..at], &raw[at..]]));
        for (i, way) in ways.into_iter().enumerate() {
            let got = parse(case, &case.raw, way).json();
            if got != case.expect {
                bad.push(format!(
                    "{}, way {i}:\n  got    {got}\n  wanted {}",
                    case.id, case.expect
                ));
                break;
            }
        }
    }
    assert!(bad.is_empty(), "{}", bad.join("\n"));
}

/// Without the end marker, which a server never shows to a parser, the parse is the same.
#[test]
fn every_case_without_its_end_marker() {
    const ENDS: [&str; 8] = [
        "<|return|>",
        "<|call|>",
        "<|im_end|>",
        "</s>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<turn|>",
        "<|tool_response>",
    ];
    for mut case in cases() {
        for end in ENDS {
            case.raw = case.raw.strip_suffix(end).unwrap_or(&case.raw).to_owned();
        }
        let got = parse(&case, &case.raw, case.raw.as_bytes().chunks(1)).json();
        assert_eq!(got, case.expect, "{}", case.id);
    }
}

/// Cut off anywhere, an answer is a part of the whole one: text that is a prefix, calls that are the first.
#[test]
fn cut_off_anywhere_nothing_leaks() {
    for mut case in cases() {
        let whole = parse(&case, &case.raw, [case.raw.as_bytes()]);
        case.end = End::Length;
        for at in (0..case.raw.len()).filter(|&at| case.raw.is_char_boundary(at)) {
            let cut = parse(&case, &case.raw, [&case.raw.as_bytes()[..at]]);
            assert!(whole.tool_calls.starts_with(&cut.tool_calls), "{} at {at}: {cut:?}", case.id);
            assert_eq!(cut.finish_reason, "length");
        }
    }
}

/// Text that looks like parts of the formats.
fn noise() -> impl Strategy<Value = String> {
    let words = prop_oneof![
        Just("<think>"),
        Just("</think>"),
        Just("<tool_call>"),
        Just("</tool_call>"),
        Just("<function=f>"),
        Just("<parameter=a>"),
        Just("</parameter>"),
        Just("</function>"),
        Just("{\"name\": \"f\", \"arguments\": {\"a\": 1}}"),
        Just("{"),
        Just("}"),
        Just("["),
        Just("]"),
        Just("\""),
        Just("<|channel>"),
        Just("<channel|>"),
        Just("thought\n"),
        Just("<|tool_call>"),
        Just("call:f{"),
        Just("a:"),
        Just("<|\"|>"),
        Just("<tool_call|>"),
        Just("[TOOL_CALLS]"),
        Just("[ARGS]"),
        Just("[CALL_ID]"),
        Just("[THINK]"),
        Just("[/THINK]"),
        Just("<|python_tag|>"),
        Just("<|channel|>"),
        Just("<|message|>"),
        Just("<|start|>"),
        Just("assistant"),
        Just("analysis"),
        Just("final"),
        Just(" to=functions.f"),
        Just("<|constrain|>json"),
        Just("<|end|>"),
        Just("<|call|>"),
        Just("<|return|>"),
        Just(" "),
        Just("\n"),
        Just("words é🌊"),
        Just("<"),
        Just("<|"),
        Just(","),
        Just("7"),
        Just(";"),
    ];
    proptest::collection::vec(words, 0..24).prop_map(|words| words.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(3000) })]

    #[test]
    fn garbage_parses_the_same_however_it_is_cut(
        raw in noise(),
        cuts in proptest::collection::vec(0usize..400, 0..8),
        format in 0usize..Format::NAMED.len(),
        eos in any::<bool>(),
        tail in prop_oneof![
            Just(""), Just("<|start|>assistant"), Just("<think>\n"), Just("<|channel>thought\n"), Just("[THINK]"),
        ],
        tools in any::<bool>(),
    ) {
        let tool = Tool { name: "f".into(), ..Tool::default() };
        let case = Case {
            id: format!("{raw:?}"),
            format: Format::NAMED[format].1,
            tools: if tools { vec![tool] } else { Vec::new() },
            tail: tail.into(),
            raw: raw.clone(),
            end: if eos { End::Eos } else { End::Length },
            expect: Value::Null,
        };
        let bytes = raw.as_bytes();
        let whole = parse(&case, &raw, [bytes]);
        prop_assert_eq!(&parse(&case, &raw, bytes.chunks(1)), &whole);
        let mut bounds: Vec<usize> = cuts.into_iter().map(|c| c.min(bytes.len())).collect();
        bounds.extend([0, bytes.len()]);
        bounds.sort_unstable();
        prop_assert_eq!(&parse(&case, &raw, bounds.windows(2).map(|w| &bytes[w[0]..w[1]])), &whole);
        for call in &whole.tool_calls {
            prop_assert!(call.json()["arguments"].is_object());
        }
    }
}

#[test]
fn stop_strings_end_content_only() {
    let stops = ["STOP".to_owned()];
    let mut parser = Parser::new(Format::Qwen3Json, &[], "", &stops);
    let mut parsed = Parsed::default();
    for piece in ["<think>a STOP b</think>", "one ST", "OP two"] {
        parser.push(piece).into_iter().for_each(|delta| parsed.add(delta));
    }
    assert_eq!(parser.stopped(), Some(0));
    parser.finish(End::Length).into_iter().for_each(|delta| parsed.add(delta));
    assert_eq!(parsed.reasoning.as_deref(), Some("a STOP b"));
    assert_eq!(parsed.content.as_deref(), Some("one"));
    assert_eq!(parser.finish_reason(End::Length), "stop");
}

#[test]
fn text_goes_out_at_once() {
    let mut parser = Parser::new(Format::Harmony, &[], "<|start|>assistant", &[]);
    assert!(parser.push("<|channel|>final<|mess").is_empty());
    assert!(parser.push("age|>").is_empty());
    assert_eq!(parser.push("Hello"), [Delta::Content("Hello".into())]);
    assert_eq!(parser.push(" there <"), [Delta::Content(" there".into())]);
    assert_eq!(parser.push("b"), [Delta::Content(" <b".into())]);
}
