#!/usr/bin/env python3
"""Writes the first inputs of the fuzz targets into fuzz/corpus/, from files of this repository.

Usage: make_fuzz_corpus.py [BAD_FILES]

BAD_FILES is a folder of malformed GGUF and safetensors files, each a few hundred bytes, if there is one. Inputs are
small on purpose: vocabularies of some hundred tokens, models whose weights are left out (see crates/inputs/src/).
Only the standard library and the `gguf` package are used. What fuzzing adds is kept beside these under hashed names.
"""
import glob
import json
import os
import struct
import sys

import gguf

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
CORPUS = f"{ROOT}/fuzz/corpus"
FAMILIES = f"{ROOT}/crates/forebay/tests/families"


def put(target, name, data):
    os.makedirs(f"{CORPUS}/{target}", exist_ok=True)
    with open(f"{CORPUS}/{target}/{name}", "wb") as f:
        f.write(data)


def text(value):
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()


def header(path):
    with open(path, "rb") as f:
        return f.read(struct.unpack("<Q", f.read(8))[0]).rstrip()


def read(path):
    with open(path, "rb") as f:
        return f.read()


# ---- descriptions ----------------------------------------------------------------------------------------------

def descriptions():
    for config in glob.glob(f"{FAMILIES}/*/config.json"):
        folder = os.path.dirname(config)
        value = text(json.loads(read(config)))
        put("config", os.path.basename(folder), value + b"\0" + header(f"{folder}/model.safetensors"))
    for name in ("tiny-gpt-oss", "tiny-gemma4-mlx4"):
        folder = f"{ROOT}/models/{name}"
        config, tensors = json.loads(read(f"{folder}/config.json")), json.loads(header(f"{folder}/model.safetensors"))
        put("config", name, text(config) + b"\0" + text(first_layers(config, tensors, 2)))
    for path in glob.glob(f"{FAMILIES}/*/gguf/model.gguf") + glob.glob(f"{ROOT}/models/*/*.gguf"):
        name = path.split("/gguf/")[0] if "/gguf/" in path else os.path.dirname(path)
        put("config", os.path.basename(name) + ".gguf", gguf_header(path))


def first_layers(config, tensors, layers):
    """Keeps the tensors of the first layers, moved together, and says so in the config."""
    inner = config.get("text_config", config)
    for c in (config, inner):
        if "num_hidden_layers" in c:
            c["num_hidden_layers"] = layers
        if "layer_types" in c:
            c["layer_types"] = c["layer_types"][:layers]
    kept, at = {}, 0
    for name, t in sorted(tensors.items()):
        number = [p for p in name.split(".") if p.isdigit()]
        if name == "__metadata__" or (number and int(number[0]) >= layers):
            continue
        start, end = t["data_offsets"]
        kept[name] = dict(t, data_offsets=[at, at + end - start])
        at += end - start
    return kept


def gguf_header(path, layers=2):
    """The header of a GGUF file: its keys but for the vocabulary, the tensors of its first layers."""
    reader = gguf.GGUFReader(path)
    keys, arch = [], None
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or (field.name.startswith("tokenizer.") and len(field.data) > 8):
            continue
        value = field.contents()
        if field.name.endswith(".block_count"):
            value = min(value, layers)
        keys.append((field.name, field.types, value))
    tensors, at = [], 0
    for t in reader.tensors:
        parts = t.name.split(".")
        if parts[0] == "blk" and int(parts[1]) >= layers:
            continue
        tensors.append((t.name, list(map(int, t.shape)), int(t.tensor_type), at))
        at += -(-int(t.n_bytes) // 32) * 32
    return container(keys, tensors)


# ---- GGUF, written by hand ---------------------------------------------------------------------------------------

def string(value):
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


def plain(kind, value):
    return string(value) if kind == 8 else struct.pack("<" + SCALARS[kind], value)


def key(name, types, value):
    types = [int(t) for t in types]
    data = string(name) + struct.pack("<I", types[0])
    if types[0] != 9:
        return data + plain(types[0], value)
    items = list(value)
    data += struct.pack("<IQ", types[-1], len(items))
    return data + b"".join(plain(types[-1], item) for item in items)


def container(keys, tensors=(), data=b""):
    out = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(keys))
    out += b"".join(key(*k) for k in keys)
    for name, shape, kind, offset in tensors:
        out += string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)
    return out + (b"\0" * (-len(out) % 32) + data if tensors else b"")


# ---- tokenizers --------------------------------------------------------------------------------------------------

def alphabet():
    """GPT-2's characters for the 256 bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in shown]
    return [chr(b) for b in shown] + [chr(256 + i) for i in range(len(rest))]


MARKERS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def added(texts, first, special=True):
    return [dict(id=first + i, content=t, single_word=False, lstrip=False, rstrip=False, normalized=False,
                 special=special) for i, t in enumerate(texts)]


def byte_level():
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u0120", "d"), ("t", "h"), ("\u00e6", "\u0139")]
    vocab = MARKERS + alphabet() + ["".join(m) for m in merges]
    return vocab, merges


def marked():
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    pieces += ["\u2581", "\u2581\u2581", "h", "e", "l", "o", "d", "he", "ll", "hell", "\u2581d", "\u00e9", "a", "aa"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("\u2581", "d"), ("\u2581", "\u2581"), ("a", "a")]
    return pieces, merges


def ids(tokens):
    return {t: i for i, t in enumerate(tokens)}


def tokenizers():
    vocab, merges = byte_level()
    level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=False, use_regex=False)
    split = dict(type="Split", pattern=dict(Regex=SPLIT), behavior="Isolated", invert=False)
    bpe = dict(type="BPE", vocab=ids(vocab), merges=[list(m) for m in merges], ignore_merges=True)
    config = dict(eos_token="<|im_end|>", bos_token=dict(content="<|endoftext|>"), add_bos_token=True)
    folder("byte_level", dict(model=bpe, added_tokens=added(MARKERS, 0), normalizer=dict(type="NFC"),
                              pre_tokenizer=dict(type="Sequence", pretokenizers=[split, level]), decoder=level,
                              post_processor=level), config)
    pieces, merges = marked()
    bpe = dict(type="BPE", vocab=ids(pieces), merges=[" ".join(m) for m in merges], unk_token="<unk>",
               fuse_unk=True, byte_fallback=True)
    replace = dict(type="Replace", pattern=dict(String=" "), content="\u2581")
    back = dict(type="Replace", pattern=dict(String="\u2581"), content=" ")
    decoder = dict(type="Sequence", decoders=[back, dict(type="ByteFallback"), dict(type="Fuse"),
                                              dict(type="Strip", content=" ", start=1, stop=0)])
    single = [dict(SpecialToken=dict(id="<s>", type_id=0)), dict(Sequence=dict(id="A", type_id=0))]
    template = dict(type="TemplateProcessing", single=single, pair=single,
                    special_tokens={"<s>": dict(id="<s>", ids=[1], tokens=["<s>"])})
    normalizer = dict(type="Sequence", normalizers=[dict(type="Prepend", prepend="\u2581"), replace])
    folder("marks", dict(model=bpe, added_tokens=added(pieces[:3], 0), normalizer=normalizer, pre_tokenizer=None,
                         decoder=decoder, post_processor=template), dict(bos_token="<s>", eos_token="</s>"))
    metaspace = dict(type="Metaspace", replacement="\u2581", prepend_scheme="first", split=False)
    folder("metaspace", dict(model=bpe, added_tokens=added(pieces[:3], 0), normalizer=None, pre_tokenizer=metaspace,
                             decoder=metaspace), {})
    unigram = dict(type="Unigram", unk_id=0, byte_fallback=True, vocab=[[p, -float(i)] for i, p in enumerate(pieces)])
    folder("unigram", dict(model=unigram, normalizer=dict(type="NFKC"), pre_tokenizer=metaspace, decoder=metaspace,
                           added_tokens=added(["</s>"], 2) + added(["<x>"], 400, False)), {})
    words = ids(["[UNK]", "hello", "##lo", "h", "1"])
    piece = dict(type="WordPiece", unk_token="[UNK]", continuing_subword_prefix="##", max_input_chars_per_word=100,
                 vocab=words)
    folder("wordpiece", dict(model=piece, normalizer=dict(type="Lowercase"), pre_tokenizer=dict(type="Whitespace")), {})
    level = dict(type="WordLevel", unk_token="[UNK]", vocab=words)
    steps = [dict(type="Digits", individual_digits=True), dict(type="Punctuation", behavior="Contiguous")]
    folder("wordlevel", dict(model=level, normalizer=dict(type="Strip", strip_left=True, strip_right=True),
                             pre_tokenizer=dict(type="Sequence", pretokenizers=steps)), {})

    vocab, merges = byte_level()
    types = [3] * len(MARKERS) + [1] * (len(vocab) - len(MARKERS))
    for pre in ("qwen2", "llama-bpe", "deepseek-llm", "no-such"):
        vocabulary("gpt2-" + pre, "gpt2", vocab, types, [
            ("tokenizer.ggml.pre", [8], pre),
            ("tokenizer.ggml.merges", [9, 8], [" ".join(m) for m in merges]),
            ("tokenizer.ggml.eos_token_id", [4], 2), ("tokenizer.ggml.bos_token_id", [4], 0),
            ("tokenizer.ggml.add_bos_token", [7], True)])
    pieces, merges = marked()
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    scores = [("tokenizer.ggml.scores", [9, 6], [-float(i) for i in range(len(pieces))])]
    vocabulary("llama", "llama", pieces, types, scores + [("tokenizer.ggml.unknown_token_id", [4], 0)])
    vocabulary("llama-plain", "llama", pieces, types, scores + [("tokenizer.ggml.add_space_prefix", [7], False)])
    vocabulary("gemma4", "gemma4", pieces, types,
               [("tokenizer.ggml.merges", [9, 8], [" ".join(m) for m in merges])])


def folder(name, tokenizer, config):
    put("tokenizer_folder", name, text(dict(version="1.0", **tokenizer)) + b"\0" + text(config))


def vocabulary(name, model, tokens, types, more):
    keys = [("general.architecture", [8], "x"), ("tokenizer.ggml.model", [8], model),
            ("tokenizer.ggml.tokens", [9, 8], tokens), ("tokenizer.ggml.token_type", [9, 5], types)]
    put("tokenizer_gguf", name, container(keys + more))


# ---- templates ---------------------------------------------------------------------------------------------------

TEMPLATES = {
    "chatml": "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m['content'] + '<|im_end|>\\n' }}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "tools": "{%- if tools %}{{- bos_token ~ 'Tools:' }}{% for t in tools %}{{ t | tojson(indent=2) }}{% endfor %}{% endif %}"
             "{%- set ns = namespace(last=messages|length - 1, text='') %}{%- for m in messages[::-1] %}"
             "{%- if m.role == 'user' and m.content is string and not m.content.startswith('<x>') %}"
             "{%- set ns.last = (messages|length - 1) - loop.index0 %}{%- endif %}"
             "{%- set ns.text = ns.text + m.role[:3] | upper %}{%- endfor %}{{ ns.last }} {{ ns.text.split('U')[-1] }}"
             "{%- for m in messages %}{%- for c in m.tool_calls or [] %}{{ c.function.name }}"
             "{%- for k, v in c.function.arguments|items %}<{{ k }}>{{ v if v is string else v|tojson }}{% endfor %}{% endfor %}"
             "{%- if m.reasoning_content is defined %}<think>{{ m.reasoning_content.strip('\\n') }}</think>{% endif %}{% endfor %}",
    "macros": "{%- macro type(p, seen=[]) -%}{%- if p.type == 'object' -%}{ {%- for n, q in p.properties|dictsort -%}"
              "{{ n }}: {{ type(q) }}{{ ', ' if not loop.last }}{%- endfor -%} }{%- elif p.type is iterable and p.type is not string -%}"
              "{{ p.type | join(' | ') }}{%- else -%}{{ p.type | default('any') }}{%- endif -%}{%- endmacro -%}"
              "{{ strftime_now('%d %B %Y, %H:%M') }}{% for t in tools %}{{ type(t.function.parameters) }}{% endfor %}"
              "{% set x %}{{ messages | map(attribute='role') | list | join(',') | replace('user', 'u') }}{% endset %}{{ x | trim }}"
              "{% for i in range(0, 6, 2) %}{% if i == 4 %}{% break %}{% endif %}{{ '%s-%03d' | format('a', i) }}{% endfor %}",
    "refusal": "{% if messages[0].role != 'user' %}{{ raise_exception('Must start with ' ~ 'user: ' ~ messages[0]) }}{% endif %}"
               "{% generation %}{{ messages[1].content.rstrip().lstrip('ab').title() * 3 }}{% endgeneration %}"
               "{{ {'a': [1, 2.5, none, true], \"b\": 'é<&>'} | tojson }}{{ 7 // 2 }}{{ -7 % 3 }}{{ 2 ** 8 }}{{ 1 / 3 }}",
    "growth": "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x | length }}",
    "growth-call": "{% macro m(s) %}{{ s }}{{ s }}{% endmacro %}{% set ns = namespace(x='ab') %}"
                   "{% for i in range(40) %}{% set ns.x = m(ns.x) %}{% endfor %}{{ ns.x | length }}",
    "growth-list": "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x | list | length }}",
    "growth-join": "{% set ns = namespace(x='ab') %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] | join %}{% endfor %}{{ ns.x | length }}",
    "growth-replace": "{% set ns = namespace(x='aa') %}{% for i in range(40) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}{{ ns.x | length }}",
    "growth-format": "{{ '%999999999d' | format(1) }}{{ 'x'.center(999999999) if false }}{{ 'ab' * 999999999 }}",
    "deep": "{{ " + "(" * 60 + "1" + ")" * 60 + " }}" + "{% if true %}" * 60 + "{% endif %}" * 60,
}


def templates():
    request = dict(messages=[dict(role="user", content="Hi")], add_generation_prompt=False, bos_token="<s>",
                   kwargs=dict(enable_thinking=False), now="2026-01-02T03:04:05")
    for name, source in TEMPLATES.items():
        put("template", name, source.encode())
    put("template", "request", TEMPLATES["chatml"].encode() + b"\0" + text(request))


def containers(bad):
    for name in ("*.gguf", "*.safetensors", "*/*.gguf"):
        for path in glob.glob(f"{bad}/{name}"):
            target = "gguf" if path.endswith(".gguf") else "safetensors"
            put(target, os.path.relpath(path, bad).replace("/", "-"), read(path))


def main():
    descriptions()
    tokenizers()
    templates()
    if len(sys.argv) > 1:
        containers(sys.argv[1])


main()
