"""Small tokenizer.json files of each family, made to be awkward: markers not marked special, markers that merges or
pieces of the model spell, text tokens among the added ones, and everything that would alter an encoding unasked."""

from __future__ import annotations

import functools
import json
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

TRAINING_TEXT = (
    "The quick brown fox jumps over the lazy dog. the cat sat on the mat, and the dog sat on the cat.\n"
    "\tfor i in range(10):\n\t\tprint(i, i ** 2)\n    # naïve café: 你好，世界。 Привет 👍🏽 👩‍👩‍👧‍👦 🇩🇪\n"
    "<|endoftext|> <tool_call> and other words of the text, text with words, words and words\r\n"
) * 3

MARKERS = ["<tool_call>", "<|fim_prefix|>", "[INST]"]
"""Control tokens that are not marked special."""

TEXT_TOKENS = ["    ", "\n\n\n", "covfefe"]
"""Added tokens that are text."""


def byte_level() -> bytes:
    """As Qwen's and Llama 3's: markers of both kinds behind the model's ids, two of them whole pieces of the model
    as well; and "zyzzyva", a piece that no merge makes, for `ignore_merges` to find."""
    from crucible.tokenizer import Tokenizer

    document = json.loads(Tokenizer.train([TRAINING_TEXT], 300).to_json())
    vocab = document["model"]["vocab"]
    for piece in ("zyzzyva", "<|im_end|>", "<tool_call>"):
        vocab[piece] = len(vocab)
    document["model"]["ignore_merges"] = True
    # The text is one word, so that a marker can be a whole one.
    document["pre_tokenizer"]["use_regex"] = False
    library = tokenizers.Tokenizer.from_str(json.dumps(document))
    library.add_special_tokens(["<|im_start|>", "<|im_end|>", "PAD"])
    _add_distractions(library, bos="<|im_start|>")
    return library.to_str().encode()


def metaspace_bpe() -> bytes:
    """As Llama 2's: a space before every text, `<0xNN>` for what is not in the vocabulary; merges spell markers."""
    words = ["▁", *"abcdefghijklmnopqrstuvwxyzT.,<>/|_[]IN0x14", "é", "世", "界", "🙂"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(words)]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    merges = []
    for word in ["▁the", "▁a", "▁cat", "▁▁", "at", "on", "ing", "世界", "</s>", "<tool_call>", "<0x41>", "▁</s>"]:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab or word[:end] == "</s>":
                merges.append((word[: end - 1], word[end - 1]))
                vocab.setdefault(word[:end], len(vocab))
    vocab.setdefault("<0x41>", len(vocab))
    merges.append(("<0x41", ">"))
    model = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    _add_distractions(library, bos="<s>")
    return library.to_str().encode()


def metaspace_unigram() -> bytes:
    """As T5's with byte fallback: the Metaspace pre-tokenizer and decoder, scores instead of merges."""
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyzT.,<>/|_[]IN0x14", "é", "世"]
    words = ["▁the", "▁a", "▁cat", "at", "on", "ing", "世界"]
    pieces = [(piece, 0.0) for piece in ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]]
    pieces += [(piece, -8.0 - i / 16) for i, piece in enumerate(dict.fromkeys(letters))]
    pieces += [(piece, -6.0 - i / 16) for i, piece in enumerate(words)]
    pieces += [("", -20.0)]
    library = tokenizers.Tokenizer(models.Unigram(vocab=pieces, unk_id=0, byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first")])
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    _add_distractions(library, bos="<s>")
    return library.to_str().encode()


def _add_distractions(library: tokenizers.Tokenizer, bos: str) -> None:
    library.add_tokens([tokenizers.AddedToken(content, normalized=False) for content in MARKERS + TEXT_TOKENS])
    bos_id = library.token_to_id(bos)
    library.post_processor = processors.TemplateProcessing(f"{bos} $A {bos}", special_tokens=[(bos, bos_id)])
    library.enable_truncation(5)
    library.enable_padding(length=7)


TOYS = {"byte_level": byte_level, "metaspace_bpe": metaspace_bpe, "metaspace_unigram": metaspace_unigram}


@functools.cache
def toy_json(name: str) -> bytes:
    return TOYS[name]()


def toy_document(name: str, **changes: Any) -> bytes:
    """A toy's file with some top-level entries changed."""
    return json.dumps({**json.loads(toy_json(name)), **changes}).encode()


def library_tokenizer(json_bytes: bytes) -> tokenizers.Tokenizer:
    """The library's own reading of a file, the twin to compare with: only padding and truncation are turned off."""
    library = tokenizers.Tokenizer.from_str(json_bytes.decode())
    library.no_padding()
    library.no_truncation()
    return library
