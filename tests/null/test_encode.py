"""Long documents are encoded in pieces: the ids must be those of the whole text."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.data import encode as encode_module
from crucible.data.encode import encode
from crucible.tokenizer import Tokenizer

GPT2 = Tokenizer.gpt2()
TRICKY = [
    "a",
    "word",
    "Ünï",
    "字",
    "9",
    "42",
    "'s",
    "'",
    ".",
    "。",
    "/",
    "\n",
    "\r\n",
    "\n\n",
    " ",
    "  ",
    "\t",
    "\u00a0",
]
TRICKY += ["\u2028", "\x1c", "²", "\u3000", "e\u0301", "😀", "<|endoftext|>", "\x00", "_"]


PATTERNS = {
    "llama-3": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    r"?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
"""How other byte-level tokenizers split text into words."""


def with_pattern(name: str) -> Tokenizer:
    document = json.loads(GPT2.to_json())
    split = {"type": "Split", "pattern": {"Regex": PATTERNS[name]}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    document["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
    return Tokenizer.from_bytes(json.dumps(document).encode())


def pieces_of(tokenizer: Tokenizer, text: str, length: int) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_module, "_PIECE_CHARS", length)
        return list(encode_module._pieces(tokenizer, text))


@pytest.mark.parametrize("tokenizer", [GPT2, *map(with_pattern, PATTERNS)], ids=["gpt-2", *PATTERNS])
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.sampled_from(TRICKY), max_size=40), length=st.integers(1, 12))
def test_pieces_have_the_ids_of_the_whole(tokenizer: Tokenizer, parts: list[str], length: int) -> None:
    text = "".join(parts)
    pieces = pieces_of(tokenizer, text, length)
    assert "".join(pieces) == text
    assert [t for piece in pieces for t in tokenizer.encode(piece)] == tokenizer.encode(text)


def test_long_text_is_cut_wherever_its_words_are_letters() -> None:
    rng = random.Random(0)
    words = ["stage", "world,", "player", "7", "мир", "\n\nexit"]
    pieces = pieces_of(GPT2, " ".join(rng.choices(words, k=5000)), 100)
    assert max(map(len, pieces)) < 200


class Prefixing:
    """As SentencePiece's: a space is put before every text, so that pieces are not encoded like their whole."""

    vocab_size, eot_id = 300, 299

    def encode(self, text: str) -> list[int]:
        return list(f" {text}".encode())

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]


def test_a_tokenizer_that_minds_gets_the_text_whole() -> None:
    text = "word " * 1000
    assert pieces_of(Prefixing(), text, 100) == [text]  # type: ignore[arg-type]


@pytest.mark.parametrize("at_once", [1, 2, 64])
def test_documents_keep_their_pieces_and_begin_with_end_of_text(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    monkeypatch.setattr(encode_module, "_PIECE_CHARS", 30)
    monkeypatch.setattr(encode_module, "_PIECES_AT_ONCE", at_once)
    texts = ["all the world's a stage " * 5, "", "and all the men and women", "merely players " * 20]
    found = encode(GPT2, [text.encode() for text in texts])
    assert [ids.tolist() for ids in found] == [[GPT2.eot_id, *GPT2.encode(text)] for text in texts]
    assert {ids.dtype for ids in found} == {np.dtype("<u2")}
    assert encode(GPT2, []) == []
