"""The openai and anthropic packages, unchanged, against a server: suite.py BASE_URL MODEL"""

import json
import sys
import threading
import time
import urllib.request
from typing import Literal

import anthropic
import openai
from pydantic import BaseModel

BASE, MODEL = sys.argv[1:3]
oai = openai.OpenAI(base_url=BASE + "/v1", api_key="none", max_retries=0, timeout=120)
ant = anthropic.Anthropic(base_url=BASE, api_key="none", max_retries=0, timeout=120)
ASK = [{"role": "user", "content": "Tell me a story about a brave fox."}]
TIDE = {
    "type": "object",
    "properties": {"port": {"type": "string", "enum": ["Oban", "Lerwick"]}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["port", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_tide", "description": "Tides", "parameters": TIDE}}]
# Newer versions of a package leave fields out of their signatures that the API still has.
GREEDY = {"temperature": 0}
FORCED = {"type": "function", "function": {"name": "get_tide"}}


class Animal(BaseModel):
    name: Literal["fox", "owl"]
    legs: Literal[2, 4]


def metric(name):
    text = urllib.request.urlopen(BASE + "/metrics").read().decode()
    return float(next(line for line in text.splitlines() if line.startswith(name + " ")).split()[-1])


def fails(kind, call):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} expected")


def openai_chat():
    answer = oai.chat.completions.create(model=MODEL, messages=ASK, max_tokens=20, temperature=0)
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.completion_tokens <= 20
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(oai.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=20, temperature=0, stream=True,
        stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == answer.choices[0].message.content, (text, answer)
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert oai.models.list().data[0].id == MODEL
    assert oai.models.retrieve(MODEL).id == MODEL


def openai_logprobs():
    answer = oai.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=5, temperature=0, logprobs=True, top_logprobs=3)
    tokens = answer.choices[0].logprobs.content
    assert len(tokens) == answer.usage.completion_tokens or answer.choices[0].finish_reason == "stop"
    for token in tokens:
        assert token.logprob <= 0 and len(token.top_logprobs) == 3
        assert token.top_logprobs[0].logprob >= token.top_logprobs[1].logprob
        assert bytes(token.bytes).decode(errors="replace") == token.token


def openai_tools():
    answer = oai.chat.completions.create(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice=FORCED, max_tokens=200, seed=1)
    call = answer.choices[0].message.tool_calls[0]
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "get_tide" and arguments["port"] in ("Oban", "Lerwick")
    assert isinstance(arguments["days"], int)
    parts = {}
    for chunk in oai.chat.completions.create(
            model=MODEL, messages=ASK, tools=TOOLS, tool_choice="required", max_tokens=200, seed=1, stream=True):
        for call in chunk.choices[0].delta.tool_calls or []:
            name, text = parts.get(call.index, ("", ""))
            parts[call.index] = (name + (call.function.name or ""), text + (call.function.arguments or ""))
    assert parts[0][0] == "get_tide" and json.loads(parts[0][1])["port"] in ("Oban", "Lerwick")
    with oai.chat.completions.stream(
            model=MODEL, messages=ASK, tools=TOOLS, tool_choice=FORCED, max_tokens=200, seed=1) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.tool_calls[0].function.name == "get_tide"
    history = ASK + [
        {"role": "assistant", "content": None, "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_tide", "arguments": '{"port": "Oban", "days": 1}'}}]},
        {"role": "tool", "tool_call_id": "call_1", "content": "high at seven"},
    ]
    answer = oai.chat.completions.create(model=MODEL, messages=history, tools=TOOLS, max_tokens=5, tool_choice="none")
    assert not answer.choices[0].message.tool_calls


def openai_structured():
    answer = oai.chat.completions.parse(
        model=MODEL, messages=ASK, response_format=Animal, max_tokens=60, temperature=0)
    assert isinstance(answer.choices[0].message.parsed, Animal)
    schema = {"type": "object", "properties": {"kind": {"enum": ["fox", "owl"]}}, "required": ["kind"], "additionalProperties": False}
    answer = oai.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=60,
        response_format={"type": "json_schema", "json_schema": {"name": "kind", "schema": schema}})
    assert json.loads(answer.choices[0].message.content)["kind"] in ("fox", "owl")


def openai_completions():
    answer = oai.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=6, temperature=0, logprobs=2)
    assert answer.choices[0].text == "".join(answer.choices[0].logprobs.tokens)
    text = "".join(c.choices[0].text for c in oai.completions.create(
        model=MODEL, prompt="Once upon a time", max_tokens=6, temperature=0, stream=True))
    assert text == answer.choices[0].text


def openai_bias_and_echo():
    plain = oai.completions.create(model=MODEL, prompt="Once upon", max_tokens=4, temperature=0).choices[0].text
    echo = oai.completions.create(model=MODEL, prompt="Once upon", max_tokens=4, temperature=0, echo=True)
    assert echo.choices[0].text == "Once upon" + plain, echo
    forced = oai.chat.completions.create(
        model=MODEL, messages=ASK, max_tokens=3, temperature=0, logit_bias={"300": 100}, logprobs=True)
    assert len({token.token for token in forced.choices[0].logprobs.content}) == 1, forced


def openai_responses():
    answer = oai.responses.create(model=MODEL, input="Tell me a story.", instructions="Be brief.",
                                  max_output_tokens=16, temperature=0)
    kinds, text = [], ""
    for event in oai.responses.create(model=MODEL, input="Tell me a story.", instructions="Be brief.",
                                      max_output_tokens=16, temperature=0, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == answer.output_text and kinds[0] == "response.created", kinds
    assert kinds[-1] in ("response.completed", "response.incomplete")
    tool = {"type": "function", "name": "get_tide", "parameters": TIDE, "strict": True}
    answer = oai.responses.create(model=MODEL, input="The tide?", tools=[tool], max_output_tokens=200,
                                  tool_choice={"type": "function", "name": "get_tide"})
    assert json.loads(answer.output[0].arguments)["port"] in ("Oban", "Lerwick")
    with oai.responses.stream(model=MODEL, input="A story.", max_output_tokens=60, text_format=Animal) as stream:
        for _ in stream:
            pass
        assert isinstance(stream.get_final_response().output_parsed, Animal)


def openai_errors():
    bad = [
        (openai.BadRequestError, lambda: oai.chat.completions.create(model=MODEL, messages=[])),
        (openai.NotFoundError, lambda: oai.chat.completions.create(model="other", messages=ASK)),
        (openai.BadRequestError, lambda: oai.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)),
        (openai.BadRequestError, lambda: oai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])),
        (openai.NotFoundError, lambda: oai.embeddings.create(model=MODEL, input="x")),
    ]
    for kind, call in bad:
        assert fails(kind, call).message
    long = fails(openai.BadRequestError, lambda: oai.completions.create(model=MODEL, prompt="word " * 9000))
    assert long.code == "context_length_exceeded"


def openai_cancel():
    stream = oai.completions.create(model=MODEL, prompt="Once", max_tokens=3000, stream=True,
                                    extra_body={"response_format": {"type": "json_schema", "json_schema": {
                                        "schema": {"type": "array", "items": {"type": "integer"}, "minItems": 2000}}}})
    next(iter(stream))
    assert metric("forebay_requests_running") >= 1
    stream.close()
    for _ in range(200):
        if metric("forebay_requests_running") == 0:
            return
        time.sleep(0.05)
    raise AssertionError("the answer runs on")


def anthropic_messages():
    answer = ant.messages.create(model=MODEL, max_tokens=16, messages=ASK, system="Be brief.", extra_body=GREEDY)
    assert answer.stop_reason in ("end_turn", "max_tokens") and answer.usage.output_tokens <= 16
    with ant.messages.stream(model=MODEL, max_tokens=16, messages=ASK, system="Be brief.", extra_body=GREEDY) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == answer.content[0].text and final.stop_reason == answer.stop_reason
    count = ant.messages.count_tokens(model=MODEL, messages=ASK, system="Be brief.").input_tokens
    usage = answer.usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


def anthropic_tools():
    tool = {"name": "get_tide", "description": "Tides", "input_schema": TIDE}
    choice = {"type": "tool", "name": "get_tide"}
    answer = ant.messages.create(model=MODEL, max_tokens=200, messages=ASK, tools=[tool], tool_choice=choice)
    block = answer.content[0]
    assert answer.stop_reason == "tool_use" and block.type == "tool_use" and block.input["port"] in ("Oban", "Lerwick")
    with ant.messages.stream(model=MODEL, max_tokens=200, messages=ASK, tools=[tool], tool_choice={"type": "any"}) as s:
        assert s.get_final_message().content[0].input["port"] in ("Oban", "Lerwick")
    history = ASK + [
        {"role": "assistant", "content": [block.model_dump()]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": block.id, "content": "high at seven"}]},
    ]
    ant.messages.create(model=MODEL, max_tokens=5, messages=history, tools=[tool])


def anthropic_errors():
    fails(anthropic.NotFoundError, lambda: ant.messages.create(model="other", max_tokens=5, messages=ASK))
    error = fails(anthropic.BadRequestError, lambda: ant.messages.create(
        model=MODEL, max_tokens=5, messages=[{"role": "user", "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}]}]))
    assert "image" in str(error)
    with ant.messages.create(model=MODEL, max_tokens=3000, messages=ASK, stream=True) as stream:
        next(iter(stream))


def many_at_once():
    want = oai.completions.create(model=MODEL, prompt="Once upon a time", max_tokens=24, seed=5, temperature=1)
    texts = [None] * 8

    def ask(i):
        answer = oai.completions.create(
            model=MODEL, prompt="Once upon a time", max_tokens=24, seed=5 if i % 2 else 50 + i, temperature=1)
        texts[i] = answer.choices[0].text

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    assert all(texts[i] == want.choices[0].text for i in range(1, 8, 2)), texts


TESTS = [openai_chat, openai_logprobs, openai_tools, openai_structured, openai_completions, openai_bias_and_echo,
         openai_responses,
         openai_errors, openai_cancel, anthropic_messages, anthropic_tools, anthropic_errors, many_at_once]
failed = 0
for test in TESTS:
    began = time.time()
    try:
        test()
        print(f"ok   {test.__name__} ({time.time() - began:.1f} s)")
    except Exception as error:
        failed += 1
        import traceback
        traceback.print_exc()
        print(f"FAIL {test.__name__}: {error!r}")
print(f"{len(TESTS) - failed} passed, {failed} failed")
sys.exit(failed > 0)
