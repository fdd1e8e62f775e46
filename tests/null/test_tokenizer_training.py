"""Training a tokenizer: what it learns, that it repeats, and what it refuses."""

from __future__ import annotations

import collections
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers
from toy_tokenizers import TRAINING_TEXT

from crucible.tokenizer import Tokenizer, TokenizerError, parse_train_spec

GOLDEN = json.loads((Path(__file__).parent.parent / "golden/tokenizer_gpt2.json").read_text())
VARIED = [case["text"] for case in GOLDEN["cases"]]


@pytest.fixture(scope="module")
def trained() -> Tokenizer:
    return Tokenizer.train([TRAINING_TEXT], 340)


def test_training_fills_the_vocabulary_exactly(trained: Tokenizer) -> None:
    assert trained.vocab_size == 340
    assert trained.eot_id == 339
    assert trained.encode("<|endoftext|>")[-1] != trained.eot_id
    everything = "".join(map(chr, range(0x800))) + "你👍🏽"
    assert trained.decode(trained.encode(everything)) == everything
    assert len(trained.encode(TRAINING_TEXT)) < 0.6 * len(TRAINING_TEXT.encode())


def test_training_merges_the_most_frequent_pair_each_time() -> None:
    """Against the definition: replay the merges over the words and count all pairs before each."""
    tokenizer = Tokenizer.train([TRAINING_TEXT], 330)
    words = [list(word) for word, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(TRAINING_TEXT)]
    merges = [tuple(merge.split(" ")) for merge in json.loads(tokenizer.to_json())["model"]["merges"]]
    assert len(merges) == 330 - 257
    for pair in merges:
        counts = collections.Counter(pair for word in words for pair in itertools.pairwise(word))
        assert counts[pair] == max(counts.values()) >= 2
        words = [_merged(word, pair) for word in words]


def test_encoding_is_bpe_by_rank(trained: Tokenizer) -> None:
    """Against the definition: merge the pair of lowest rank until there is none."""
    model = json.loads(trained.to_json())["model"]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(model["merges"])}
    text = "the words of the text sat on the mat; unseen wordsmith, naïvely 你们世界👍🏿"
    expected = []
    for word, _ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text):
        symbols = list(word)
        while known := [pair for pair in itertools.pairwise(symbols) if pair in ranks]:
            symbols = _merged(symbols, min(known, key=ranks.__getitem__))
        expected += [model["vocab"][symbol] for symbol in symbols]
    assert trained.encode(text) == expected


def _merged(symbols: list[str], pair: tuple[str, ...]) -> list[str]:
    out: list[str] = []
    i = 0
    while i < len(symbols):
        width = 2 if tuple(symbols[i : i + 2]) == pair else 1
        out.append("".join(symbols[i : i + width]))
        i += width
    return out


def test_training_is_deterministic(trained: Tokenizer) -> None:
    script = (
        "from toy_tokenizers import TRAINING_TEXT; from crucible.tokenizer import Tokenizer;"
        "print(Tokenizer.train([TRAINING_TEXT], 340).sha256.hex())"
    )
    for threads, hash_seed in (("1", "1"), ("4", "2")):
        environment = {
            **os.environ,
            "RAYON_NUM_THREADS": threads,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")]),
        }
        printed = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert printed.stdout.strip() == trained.sha256.hex()


def test_training_takes_any_iterable_and_any_text() -> None:
    lines = TRAINING_TEXT.splitlines(keepends=True)
    assert Tokenizer.train(iter(lines), 300).sha256 == Tokenizer.train(lines, 300).sha256
    assert Tokenizer.train(["aa aa \ud800", ""], 258).vocab_size == 258
    bare = Tokenizer.train([], 257)
    assert bare.encode("é") == bare.encode_batch(["é"])[0]
    assert [bare.token_bytes(i) for i in bare.encode("é")] == [b"\xc3", b"\xa9"]

    def broken() -> collections.abc.Iterator[str]:
        yield "text"
        raise RuntimeError("the source failed")

    with pytest.raises(RuntimeError, match="the source failed"):
        Tokenizer.train(broken(), 300)


@pytest.mark.parametrize("vocab_size", [-1, 0, 256])
def test_a_vocabulary_too_small_for_the_bytes(vocab_size: int) -> None:
    with pytest.raises(TokenizerError, match=rf"vocab_size must be at least 257 .*, not {vocab_size}$"):
        Tokenizer.train([TRAINING_TEXT], vocab_size)


def test_too_little_text_for_the_vocabulary() -> None:
    with pytest.raises(TokenizerError, match=r"repeated pairs for \d+ tokens only, not for vocab_size=5000"):
        Tokenizer.train([TRAINING_TEXT], 5000)
    with pytest.raises(TokenizerError, match="repeated pairs for 257 tokens only"):
        Tokenizer.train(["abcdefgh"], 258)  # each pair once: nothing repeats


def test_parse_train_spec() -> None:
    assert parse_train_spec("train:4096") == 4096
    assert parse_train_spec("train:257") == 257
    assert parse_train_spec("gpt2") is None
    assert parse_train_spec("some/folder") is None
    for spec in ("train:", "train:4k", "train:-300", "train:4_096", "train:1.5", "train:٣٠٠"):
        with pytest.raises(TokenizerError, match=r"write train:N .* such as train:4096"):
            parse_train_spec(spec)
    with pytest.raises(TokenizerError, match="'train:256': vocab_size must be at least 257"):
        parse_train_spec("train:256")
