"""Byte-level BPE as in GPT-2 (Radford et al. 2019, section 2.2): its tokenizer from the shipped table, and new ones.

Both have one id layout: 0 to 255 the bytes in GPT-2's order (printable ones first), then one id for each merge in
rank order, and END_OF_TEXT last.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from crucible.tokenizer.pieces import BYTE_CHARACTERS
from crucible.tokenizer.spec import TokenizerError

END_OF_TEXT: Final = "<|endoftext|>"

MIN_VOCAB_SIZE: Final = len(BYTE_CHARACTERS) + 1
"""Every byte and END_OF_TEXT."""

_TRAIN_PREFIX: Final = "train:"
_MERGES_FILE: Final = Path(__file__).parent / "gpt2" / "vocab.bpe.gz"
_MIN_PAIR_COUNT: Final = 2
"""A pair seen once says nothing about other text."""


def gpt2_document() -> dict[str, Any]:
    """GPT-2's tokenizer, 50,257 tokens, as the JSON value of a tokenizer.json."""
    lines = gzip.decompress(_MERGES_FILE.read_bytes()).decode().splitlines()
    return _document(lines[1:])  # the first names the table's version


def train_document(texts: Iterable[str], vocab_size: int) -> dict[str, Any]:
    """A tokenizer trained on `texts`, as the JSON value of a tokenizer.json.

    Merges are those of the most frequent pairs within GPT-2's words (Sennrich et al. 2016, section 3.2), ties to the
    smaller pair of ids. `vocab_size` counts bytes and END_OF_TEXT too.

    Raises:
        TokenizerError: `vocab_size` is below MIN_VOCAB_SIZE, or more than the text has repeated pairs for.
    """
    check_vocab_size(vocab_size)
    learner = tokenizers.Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        min_frequency=_MIN_PAIR_COUNT,
        initial_alphabet=list(BYTE_CHARACTERS.values()),
        show_progress=False,
    )
    learner.train_from_iterator(map(well_formed, texts), trainer)
    merges = json.loads(learner.to_str())["model"]["merges"]
    document = _document([f"{left} {right}" for left, right in merges])
    if (reached := len(document["model"]["vocab"])) != vocab_size:
        raise TokenizerError(
            f"the text has repeated pairs for {reached} tokens only, not for vocab_size={vocab_size}: "
            "give more text or ask for fewer tokens"
        )
    return document


def check_vocab_size(vocab_size: int) -> None:
    """Raises TokenizerError if that many tokens cannot hold every byte and END_OF_TEXT."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise TokenizerError(
            f"vocab_size must be at least {MIN_VOCAB_SIZE} (256 bytes and {END_OF_TEXT}), not {vocab_size}"
        )


def parse_train_spec(spec: str) -> int | None:
    """The vocabulary size in `train:N`, the name of a tokenizer yet to be trained; None for any other name.

    Raises:
        TokenizerError: N is not a whole number, or too small.
    """
    if not spec.startswith(_TRAIN_PREFIX):
        return None
    size = spec.removeprefix(_TRAIN_PREFIX)
    if not (size.isascii() and size.isdecimal()):
        raise TokenizerError(f"tokenizer {spec!r}: write train:N with the number of tokens, such as train:4096")
    try:
        check_vocab_size(int(size))
    except ValueError as error:
        raise TokenizerError(f"tokenizer {spec!r}: {error}") from None
    return int(size)


def well_formed(text: str) -> str:
    """`text` with surrogate pairs joined and lone surrogates, which UTF-8 cannot spell, turned into U+FFFD.

    JSON may hold them as escapes; tiktoken treats them the same way.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _document(merges: Sequence[str]) -> dict[str, Any]:
    vocab = {character: token_id for token_id, character in enumerate(BYTE_CHARACTERS.values())}
    for merge in merges:
        # Were a piece ever spelt by two merges, it would keep the id of the first.
        vocab.setdefault(merge.replace(" ", ""), len(vocab))
    vocab[END_OF_TEXT] = len(vocab)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    end_of_text = {
        "id": vocab[END_OF_TEXT],
        "content": END_OF_TEXT,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end_of_text],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": list(merges),
        },
    }
