"""Writes tests/golden/tokenizer_gpt2.json: ids of varied strings by tiktoken, which the tests then need not have.

    python scripts/make_tokenizer_golden.py

Needs tiktoken and no network: the encoding is built from the merge table that the package ships.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import tiktoken
from tiktoken_ext import openai_public

ROOT = Path(__file__).resolve().parent.parent
TABLE = ROOT / "src/crucible/tokenizer/gpt2/vocab.bpe.gz"
GOLDEN = ROOT / "tests/golden/tokenizer_gpt2.json"

TEXTS = [
    "The World is a stage",
    "The World is having",
    "Hello, world!",
    "The quick brown fox jumps over the lazy dog.",
    "",
    " ",
    "  ",
    "\n",
    "\n\n\n",
    "\t\tx",
    "a" + " " * 17 + "b",
    "trailing spaces   ",
    "   leading",
    "line one\r\nline two\r\n\r\n",
    " \n \n\t \n  end",
    "I'm you're he'd we'll they've it's 's 'S DON'T",
    "def f(x):\n    return x ** 2  # square\n\n\nif __name__ == '__main__':\n\tprint(f(3.14))",
    'for (int i = 0; i < n; ++i) { sum += a[i]->b["key"]; }',
    '{"a": [1, 2.5e-10, null], "b\\n": "\\u00e9"}',
    "<html><body class='x'>&nbsp;</body></html>",
    "1234567890 3.14159 1,000,000 0x7fff 2026-01-31 ½ Ⅷ ٣٤",
    "!!! ... --- *** ###### ======== ???",
    "https://example.org/a/b?c=d&e=%20f#g",
    "naïve café Ångström cafe\u0301 ﬁ Straße İstanbul",
    "Привет, мир! Γειά σου Κόσμε. שלום עולם مرحبا بالعالم",
    "नमस्ते दुनिया สวัสดีชาวโลก",
    "你好，世界。こんにちは世界！안녕하세요 세계",
    "𠮷野家 𝕳𝖊𝖑𝖑𝖔 𓀀",
    "👍 😀😃😄 👍🏽 ❤️",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👨🏿‍🚀",
    "🇩🇪🇫🇷🇯🇵 🏴󠁧󠁢󠁥󠁮󠁧󠁿",
    "nul\x00byte \x00\x00 \x01\x1b[0m \x7f",
    "\ufeffBOM first, BOM\ufeff amid",
    "next\x85line \x85 \u2028 \u2029 \xa0 \u3000 \u200b \u00ad",
    "\ufffd \uffff \U0010ffff \ue000",
    "<|endoftext|>",
    "a<|endoftext|>b <|endoftext|> <|endoftext|><|endoftext|>",
    "<|endof text|> <|endoftext <|im_start|>user\n",
    "ĠThe Ċ âĢ Ä",
    "supercalifragilisticexpialidocious antidisestablishmentarianism " + "x" * 50,
    "SolidGoldMagikarp rawdownloadcloneembedreportprint",
]


def gpt2_encoding(table: bytes) -> tiktoken.Encoding:
    """tiktoken's GPT-2 encoding, from the merge table alone."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    order = printable + [byte for byte in range(0x100) if byte not in printable]
    byte_of = {chr(byte if byte in printable else 0x100 + i - len(printable)): byte for i, byte in enumerate(order)}
    ranks = {bytes([byte]): rank for rank, byte in enumerate(order)}
    for line in table.decode().splitlines()[1:]:
        ranks[bytes(byte_of[character] for character in line if character != " ")] = len(ranks)
    return tiktoken.Encoding(
        "gpt2",
        pat_str=openai_public.r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": len(ranks)},
        explicit_n_vocab=50257,
    )


def main() -> None:
    table = gzip.decompress(TABLE.read_bytes())
    encoding = gpt2_encoding(table)
    golden = {
        "made_by": "python scripts/make_tokenizer_golden.py",
        "tiktoken": tiktoken.__version__,
        "vocab_bpe_sha256": hashlib.sha256(table).hexdigest(),
        "cases": [{"text": text, "ids": encoding.encode_ordinary(text)} for text in TEXTS],
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in golden.items() if key != "cases"]
    cases = ",\n".join(json.dumps(case) for case in golden["cases"])
    GOLDEN.write_text("{\n" + ",\n".join(lines) + ',\n"cases": [\n' + cases + "\n]\n}\n")


if __name__ == "__main__":
    main()
