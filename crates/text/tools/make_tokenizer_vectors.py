#!/usr/bin/env python3
"""Writes tests/data/tokenizer_vectors.json: texts and the ids that the Python package gives for them.

Needs `pip install tokenizers`. Run from anywhere; the result is committed.
"""
import json
import pathlib

import tokenizers

CRATE = pathlib.Path(__file__).resolve().parent.parent
MODEL = CRATE.parent.parent / "models" / "tiny-gpt-oss" / "tokenizer.json"

TEXTS = [
    "",
    "a",
    " ",
    "Hello, world!",
    "  two\n\n  lines \t",
    "I'll, I'LL, don't; it's 'quoted'.",
    "naïve café — 日本語 🦆 \u200b end",
    "e\u0301 \u0928\u092e\u0938\u094d\u0924\u0947 \u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627",
    "👩‍👩‍👧 🏳️‍🌈 🇫🇮",
    "\x00\x01\x1b[0m\x7f\u0085\ufeff",
    "12345 3.14159 ½ ² Ⅷ",
    "fn main() {\r\n\tprintln!(\"{}\", 1 << 2);\r\n}\r\n",
    "   \n \n\t\t\n    x",
    "\n",
    "\r\n\r\n",
    "ab  cd   ef    gh",
    "\u3000ideographic\u00a0nbsp\u2003em",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<|im_end|><|im_end|> <|endoftext|>x",
    "<|im_end |> <|im_start",
    "Once upon a time, there was a little girl named Lily. She loved to play outside.",
    "ＦＵＬＬ ﬁ ǅ ß İ",
    "𝔘𝔫𝔦 \U0010ffff \ue000",
]


def main() -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(MODEL))
    rows = []
    for text in TEXTS:
        tokenizer.encode_special_tokens = False
        parsed = tokenizer.encode(text, add_special_tokens=False).ids
        tokenizer.encode_special_tokens = True
        ignored = tokenizer.encode(text, add_special_tokens=False).ids
        rows.append({"text": text, "parsed": parsed, "ignored": ignored})
    out = CRATE / "tests" / "data" / "tokenizer_vectors.json"
    lines = ",\n".join(json.dumps(row) for row in rows)
    out.write_text(f'{{"tokenizers": "{tokenizers.__version__}", "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
