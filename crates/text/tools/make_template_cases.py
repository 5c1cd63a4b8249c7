#!/usr/bin/env python3
"""Writes tests/data/template_conversations.json and template_expected.json: conversations, and how transformers renders
them with published chat templates and with the templates of tests/data/template_sources.json.

Usage: make_template_cases.py TEMPLATES_DIR

TEMPLATES_DIR holds `*.jinja` and `expected.json` (for the begin and end tokens under `special`). What the published
templates render is kept as a SHA-256 only: it is compared where the templates are at hand. Needs transformers.
"""
import copy
import hashlib
import json
import pathlib
import sys
from datetime import datetime

import jinja2
import transformers.utils.chat_template_utils as utils

DATA = pathlib.Path(__file__).resolve().parent.parent / "tests" / "data"
NOW = datetime(2026, 1, 2, 3, 4, 5)


def user(text):
    return dict(role="user", content=text)


def answer(text, **more):
    return dict(role="assistant", content=text, **more)


def system(text):
    return dict(role="system", content=text)


def call(name, arguments, id="abc123XYZ"):
    return dict(id=id, type="function", function=dict(name=name, arguments=arguments))


def result(text, name="get_tide", id="abc123XYZ"):
    return dict(role="tool", tool_call_id=id, name=name, content=text)


def tool(name, description, properties, required=(), **more):
    return dict(type="function", function=dict(name=name, description=description, parameters=dict(
        type="object", properties=properties, required=list(required), **more)))


TIDE = tool("get_tide", "Time of high tide.", dict(port=dict(type="string", description="A port.")), ["port"])
DEEP = tool("plan_trip", "Plans a \"trip\" <b>&</b> 'more'.\nTwo lines.", dict(
    stops=dict(type="array", items=dict(type="object", properties=dict(
        name=dict(type="string"), nights=dict(type="integer", minimum=1, default=2)), required=["name"])),
    mode=dict(type="string", enum=["boat", "train"], description="How."),
    budget=dict(type=["number", "null"]), flag=dict(type="boolean", default=False),
    extra=dict(anyOf=[dict(type="string"), dict(type="integer")])), ["stops", "mode"], additionalProperties=False)
EMPTY = tool("ping", "Pings.", {})
WIDE = tool("\u00fcber", "H\u00f6he \u65e5\u672c \U0001f986", {"gr\u00f6\u00dfe": dict(type="number", description="\u00e9")})

TALK = [user("Tide?"), answer("", tool_calls=[call("get_tide", dict(port="Oban"))]), result("06:12")]

CONVERSATIONS = dict(
    system_only_rules=dict(messages=[system("Line one.\n\nLine two. "), user(" padded \n")]),
    empty_user=dict(messages=[user("")]),
    empty_answer=dict(messages=[user("a"), answer(""), user("b")]),
    empty_system=dict(messages=[system(""), user("a")]),
    long_turns=dict(messages=[m for i in range(6) for m in (user(f"question {i}"), answer(f"answer {i}"))] + [user("last")]),
    unicode=dict(messages=[system("\u0394\u03b5\u03bd"), user("na\u00efve \u65e5\u672c\u8a9e \U0001f986 \u2028 \u200b \u0000 \\ \" ' <>&")]),
    braces=dict(messages=[user("{{ 1 + 1 }} {% raw %} {# c #} %} }}"), answer("{{x}}"), user("$")]),
    think_in_text=dict(messages=[user("a"), answer("<think>\nhm\n</think>\n\nb"), user("c"), answer("</think>d"), user("e")]),
    reasoning_last=dict(messages=[user("a"), answer("b", reasoning_content="because\nof it"), user("c"),
                                  answer("d", reasoning_content="  spaced  ")], add_generation_prompt=False),
    reasoning_turns=dict(messages=[user("a"), answer("b", reasoning_content="r1"), user("c"),
                                   answer("d", reasoning_content="r2"), user("e")]),
    reasoning_tools=dict(messages=[user("a"), answer("", reasoning_content="look it up",
                                   tool_calls=[call("get_tide", dict(port="Oban"))]), result("06:12")], tools=[TIDE]),
    one_tool=dict(messages=[user("Tide?")], tools=[TIDE]),
    tools_system=dict(messages=[system("Be brief."), user("Tide?")], tools=[TIDE, EMPTY]),
    deep_tool=dict(messages=[user("Trip?")], tools=[DEEP]),
    wide_tool=dict(messages=[user("Trip?")], tools=[WIDE, TIDE]),
    talk=dict(messages=TALK, tools=[TIDE]),
    talk_done=dict(messages=TALK + [answer("At 06:12."), user("Thanks")], tools=[TIDE]),
    talk_no_prompt=dict(messages=TALK + [answer("At 06:12.")], tools=[TIDE], add_generation_prompt=False),
    text_and_call=dict(messages=[user("Tide?"), answer("Let me see.", tool_calls=[call("get_tide", dict(port="Oban"))]),
                                 result("06:12"), answer("06:12"), user("And Mull?")], tools=[TIDE]),
    two_calls=dict(messages=[user("Tides?"), answer("", tool_calls=[
        call("get_tide", dict(port="Oban"), "aaaaaaaa1"), call("get_tide", dict(port="Mull"), "aaaaaaaa2")]),
        result("06:12", id="aaaaaaaa1"), result("07:01", id="aaaaaaaa2")], tools=[TIDE]),
    odd_arguments=dict(messages=[user("x"), answer("", tool_calls=[call("plan_trip", dict(
        stops=[dict(name="\u00c5 \"q\"", nights=1)], mode="boat", budget=None, flag=True, n=1.5, big=12345678901234567890,
        html="<a href='x'>&</a>", nested=dict(a=[], b={})))]), result('{"ok": true, "list": [1, 2]}', "plan_trip")], tools=[DEEP]),
    no_arguments=dict(messages=[user("x"), answer("", tool_calls=[call("ping", {})]), result("", "ping")], tools=[EMPTY]),
    result_lines=dict(messages=TALK[:2] + [result("a\nb\n\n<tool_response>\n")], tools=[TIDE]),
    tool_without_tools=dict(messages=TALK),
    system_late=dict(messages=[user("a"), answer("b"), system("Now rhyme."), user("c")]),
    answer_first=dict(messages=[answer("Hello."), user("Hi")]),
    two_users=dict(messages=[user("a"), user("b")]),
    two_answers=dict(messages=[user("a"), answer("b"), answer("c"), user("d")]),
    developer=dict(messages=[dict(role="developer", content="Be kind."), user("a")]),
    odd_role=dict(messages=[user("a"), dict(role="narrator", content="b")]),
    ends_with_answer=dict(messages=[user("a"), answer("b")]),
    thinking_on=dict(messages=[system("s"), user("a")], kwargs=dict(enable_thinking=True)),
    thinking_off_tools=dict(messages=TALK, tools=[TIDE], kwargs=dict(enable_thinking=False)),
    effort_high=dict(messages=[system("s"), user("a")], kwargs=dict(reasoning_effort="high")),
    identity=dict(messages=[user("a")], kwargs=dict(model_identity="You are a heron.", date_string="01 Feb 2025")),
    parts=dict(messages=[dict(role="user", content=[dict(type="text", text="one"), dict(type="text", text="two")])]),
    parts_system=dict(messages=[dict(role="system", content=[dict(type="text", text="s")]), user("a")]),
)


def compile_template(source):
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)
    template = utils._compile_jinja_template(source)
    template.globals["strftime_now"] = lambda format: NOW.strftime(format)
    return template


def render(template, conversation, special):
    more = conversation.get("kwargs", {})
    try:
        return template.render(messages=conversation["messages"], tools=conversation.get("tools"), documents=None,
                               add_generation_prompt=conversation.get("add_generation_prompt", True), **special, **more)
    except jinja2.exceptions.TemplateError as e:
        if type(e) is jinja2.exceptions.TemplateError:
            return dict(error=str(e))
        return dict(fails=f"{type(e).__name__}: {e}")
    except Exception as e:
        return dict(fails=f"{type(e).__name__}: {e}")


def takes_parts(template, special):
    text = render(template, dict(messages=[dict(role="user", content=[dict(type="text", text="PartProbe")])]), special)
    return isinstance(text, str) and "PartProbe" in text and text[text.index("PartProbe") - 1] not in "'\""


def one_form(conversation, parts):
    """The form in which templates see a request: texts joined where the template knows no parts; the reasoning under
    both of its names, as templates ask for one or the other."""
    conversation = copy.deepcopy(conversation)
    for m in conversation["messages"]:
        if isinstance(m["content"], list) and not parts:
            m["content"] = "\n".join(p["text"] for p in m["content"])
        if "reasoning_content" in m:
            m["thinking"] = m["reasoning_content"]
    return conversation


def main():
    folder = pathlib.Path(sys.argv[1])
    special = json.loads((folder / "expected.json").read_text())["special"]
    sources = {name: (folder / f"{name}.jinja").read_text() for name in special}
    own = json.loads((DATA / "template_sources.json").read_text())
    published, bundled = {}, {}
    for name, source in {**sources, **own}.items():
        template = compile_template(source)
        tokens = special.get(name, dict(bos_token="<s>", eos_token="</s>"))
        parts = takes_parts(template, tokens)
        rows = {}
        for id, conversation in CONVERSATIONS.items():
            got = render(template, one_form(conversation, parts), tokens)
            if isinstance(got, str) and name in special:
                got = dict(sha256=hashlib.sha256(got.encode()).hexdigest())
            rows[id] = got
        (published if name in special else bundled)[name] = rows
    write("template_conversations.json", [dict(id=id, **c) for id, c in CONVERSATIONS.items()])
    write("template_expected.json", dict(now="2026-01-02T03:04:05", special=special, published=published, bundled=bundled))
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w") as f:
            full = {n: {i: render(compile_template(s), one_form(c, takes_parts(compile_template(s), special[n])), special[n])
                        for i, c in CONVERSATIONS.items()} for n, s in sources.items()}
            json.dump(full, f)


def write(name, value):
    (DATA / name).write_text(json.dumps(value, indent=0, ensure_ascii=True) + "\n")


main()
