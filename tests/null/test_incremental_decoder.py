"""The stream joined is the decoding of the whole, after every token: shown and held text are right at each step."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import TOYS, TRAINING_TEXT, toy_json

from crucible.tokenizer import IncrementalDecoder, Tokenizer, TokenizerError

EMOJI = ["👍", "👍🏽", "👩‍👩‍👧‍👦", "🇩🇪🇫🇷", "❤️", "🏳️‍🌈"]
BROKEN = [
    b"\x80",  # a continuation byte alone
    b"\xc3",  # a character begun
    b"\xc0\xaf",  # overlong
    b"\xe4\xbd",
    b"\xed\xa0\x80",  # a surrogate
    b"\xf0\x9f\x91",
    b"\xf4\x90\x80\x80",  # past U+10FFFF
    b"\xff\xfe",
]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    toys = {name: Tokenizer.from_bytes(toy_json(name)) for name in TOYS}
    return {"gpt2": Tokenizer.gpt2(), "trained": Tokenizer.train([TRAINING_TEXT], 340), **toys}


@pytest.fixture(scope="module")
def byte_ids(tokenizers: dict[str, Tokenizer]) -> dict[str, dict[int, int]]:
    """For each tokenizer, by byte value, a token that is that byte alone."""
    tables = {}
    for name, tokenizer in tokenizers.items():
        pieces = {tokenizer.token_bytes(i): i for i in reversed(range(min(tokenizer.vocab_size, 400)))}
        tables[name] = {byte: pieces[bytes([byte])] for byte in range(256)}
    return tables


def assert_streams_as_decoded(tokenizer: Tokenizer, ids: Sequence[int], **options: Any) -> None:
    """At every prefix: what was pushed out, with what a flush there would add, is `decode` of the prefix."""
    shown = ""
    decoder = IncrementalDecoder(tokenizer, **options)
    for end, token_id in enumerate(ids, start=1):
        shown += decoder.push(token_id)
        stopped = IncrementalDecoder(tokenizer, **options)
        text = "".join(map(stopped.push, ids[:end]))
        assert text == shown
        assert text + stopped.flush() == tokenizer.decode(ids[:end], **options)
        assert stopped.flush() == ""
    assert shown + decoder.flush() == tokenizer.decode(ids, **options)


NAMES = ["gpt2", "trained", *TOYS]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_text(tokenizers: dict[str, Tokenizer], data: st.DataObject) -> None:
    tokenizer = tokenizers[data.draw(st.sampled_from(NAMES))]
    fragments = st.sampled_from(
        [*EMOJI, "你好，世界", "こんにちは", "안녕", "Привет", " the", "\n", "\0", "\ufeff", "<|endoftext|>"]
    )
    text = "".join(data.draw(st.lists(fragments | st.text(max_size=4), max_size=6)))
    assert_streams_as_decoded(tokenizer, tokenizer.encode(text), continuing=data.draw(st.booleans()))


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_ids(tokenizers: dict[str, Tokenizer], data: st.DataObject) -> None:
    tokenizer = tokenizers[data.draw(st.sampled_from(NAMES))]
    special = st.sampled_from(sorted(tokenizer.special_ids))
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1) | st.integers(0, 255) | special, max_size=20))
    assert_streams_as_decoded(
        tokenizer, ids, skip_special=data.draw(st.booleans()), continuing=data.draw(st.booleans())
    )


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_broken_utf8(
    tokenizers: dict[str, Tokenizer], byte_ids: dict[str, dict[int, int]], data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(NAMES))
    whole = [text.encode() for text in ["a", " ", "é", "你", *EMOJI]]
    data_bytes = b"".join(data.draw(st.lists(st.sampled_from([*BROKEN, *whole]) | st.binary(max_size=4), max_size=6)))
    ids = [byte_ids[name][byte] for byte in data_bytes]
    assert_streams_as_decoded(tokenizers[name], ids, continuing=True)
    assert tokenizers[name].decode(ids, continuing=True) == data_bytes.decode("utf-8", errors="replace")


def test_every_sequence_of_byte_classes(tokenizers: dict[str, Tokenizer], byte_ids: dict[str, dict[int, int]]) -> None:
    """All sequences of up to four bytes over one of each class that UTF-8 tells apart (Unicode, table 3-7)."""
    gpt2, ids = tokenizers["gpt2"], byte_ids["gpt2"]
    classes = [0x41, 0x80, 0x90, 0xA0, 0xC1, 0xC3, 0xE0, 0xE4, 0xED, 0xF0, 0xF1, 0xF4, 0xF5]
    for length in range(1, 5):
        for sequence in itertools.product(classes, repeat=length):
            decoder = IncrementalDecoder(gpt2)
            streamed = "".join([decoder.push(ids[byte]) for byte in sequence]) + decoder.flush()
            assert streamed == bytes(sequence).decode("utf-8", errors="replace")


def test_a_character_shows_with_its_last_byte(
    tokenizers: dict[str, Tokenizer], byte_ids: dict[str, dict[int, int]]
) -> None:
    for name, tokenizer in tokenizers.items():
        decoder = IncrementalDecoder(tokenizer, continuing=True)
        for character in "aé你👍":
            *begun, last = [byte_ids[name][byte] for byte in character.encode()]
            assert [decoder.push(token_id) for token_id in begun] == [""] * len(begun)
            assert decoder.push(last) == character
        assert decoder.flush() == ""


def test_what_cannot_become_a_character_is_not_held(
    tokenizers: dict[str, Tokenizer], byte_ids: dict[str, dict[int, int]]
) -> None:
    ids = byte_ids["gpt2"]
    decoder = IncrementalDecoder(tokenizers["gpt2"])
    assert decoder.push(ids[0xFF]) == "\ufffd"
    assert decoder.push(ids[0xF0]) == ""
    assert decoder.push(ids[0x41]) == "\ufffdA"


def test_ending_within_a_character_flushes_once(
    tokenizers: dict[str, Tokenizer], byte_ids: dict[str, dict[int, int]]
) -> None:
    decoder = IncrementalDecoder(tokenizers["gpt2"])
    assert [decoder.push(byte_ids["gpt2"][byte]) for byte in "👍".encode()[:3]] == ["", "", ""]
    assert decoder.flush() == "\ufffd"
    assert decoder.flush() == ""


def test_only_one_leading_space_goes(tokenizers: dict[str, Tokenizer]) -> None:
    bpe, unigram = tokenizers["metaspace_bpe"], tokenizers["metaspace_unigram"]
    ids = {bpe.token_bytes(i): i for i in range(bpe.vocab_size)}
    assert bpe.decode([ids[b"  "], ids[b" the"]]) == "  the"
    assert_streams_as_decoded(bpe, [ids[b"  "], ids[b" the"]])
    # A token without bytes is not yet the start of the text.
    nothing = next(i for i in range(unigram.vocab_size) if unigram.token_bytes(i) == b"")
    assert_streams_as_decoded(unigram, [nothing, *unigram.encode("the")])


def test_an_unknown_id_changes_nothing(tokenizers: dict[str, Tokenizer], byte_ids: dict[str, dict[int, int]]) -> None:
    decoder = IncrementalDecoder(tokenizers["metaspace_bpe"])
    with pytest.raises(TokenizerError, match=r"^token id 99999 is outside the vocabulary of 343 tokens$"):
        decoder.push(99999)
    first, second = tokenizers["metaspace_bpe"].encode("the cat")
    assert [decoder.push(first), decoder.push(second)] == ["the", " cat"]


def test_a_token_is_looked_at_once() -> None:
    """What makes a stream linear in its length: one look-up a push, and never more than a character held."""

    class Counting:
        strips_leading_space = True
        calls = 0

        def token_bytes(self, token_id: int) -> bytes:
            self.calls += 1
            return "👍".encode()[token_id % 4 : token_id % 4 + 1]

    tokenizer = Counting()
    decoder = IncrementalDecoder(tokenizer)  # type: ignore[arg-type]
    shown = [decoder.push(i) for i in range(4000)]
    assert tokenizer.calls == 4000
    assert shown == ["", "", "", "👍"] * 1000
