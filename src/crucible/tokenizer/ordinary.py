"""The encoder of ordinary text: a tokenizer as it would be had its control tokens never existed.

The `tokenizers` library can be told to leave alone added tokens that are marked special, but chat markers often are
not (Qwen's `<tool_call>`), and merges or whole pieces of the model may spell one too. So the encoder is built from
the file's parts without them: no control token among the added ones, none that the model can reach, no
post-processor to add a beginning or end of text, no truncation, padding or dropout.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import tokenizers
from tokenizers import models, pre_tokenizers

from crucible.tokenizer.pieces import BYTE_PIECE
from crucible.tokenizer.spec import AddedToken, Spec, TokenizerError

_NAMELESS = ""
"""The empty piece matches no text: it holds the place of one that must stay out of reach."""


def ordinary_encoder(spec: Spec) -> tokenizers.Tokenizer:
    """The library's tokenizer that encodes text with the ids of `spec` and never with one of its control tokens.

    Only an unknown-character token comes out still, of tokenizers that have one and lack that character.

    Raises:
        TokenizerError: the library refuses a part of the file.
    """
    kept = sorted((token for token in spec.added.values() if token.is_text), key=lambda token: token.id)
    try:
        encoder = tokenizers.Tokenizer.from_str(json.dumps(_shell(spec.document)))
        encoder.model = _bpe(spec, kept) if spec.model_type == "BPE" else _unigram(spec, kept)
        if spec.model_type == "Unigram" and spec.document["model"].get("byte_fallback"):
            _keep_byte_pieces_apart(encoder)
        for token in kept:
            encoder.add_tokens([_library_token(token)])
    except TokenizerError:
        raise
    except Exception as error:  # the library raises Exception itself
        reason, _, _ = str(error).partition("\n")
        raise TokenizerError(f"not a usable tokenizer.json: {reason}") from None
    return encoder


def _shell(document: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "version": document.get("version", "1.0"),
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": document.get("normalizer"),
        "pre_tokenizer": document.get("pre_tokenizer"),
        "post_processor": None,
        "decoder": None,
        "model": {"type": "BPE", "vocab": {}, "merges": []},
    }


def _bpe(spec: Spec, kept: Iterable[AddedToken]) -> models.BPE:
    model = spec.document["model"]
    for name in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(name):  # neither family has them
            raise TokenizerError(f"model.{name} must be absent, not {model[name]!r:.60}")
    names = ("unk_token", "fuse_unk", "byte_fallback", "ignore_merges")
    options = {name: model[name] for name in names if model.get(name) is not None}
    vocab = dict(model["vocab"])
    for content in spec.control_tokens:
        token_id = vocab.pop(content, None)
        if content == options.get("unk_token") and token_id is not None:
            vocab[_NAMELESS] = token_id
            options["unk_token"] = _NAMELESS
    vocab |= {token.content: token.id for token in kept}
    merges = _merges(model.get("merges"), spec.control_tokens, bool(model.get("byte_fallback")))
    return models.BPE(vocab=vocab, merges=merges, **options)


def _merges(merges: Any, control: Collection[str], byte_fallback: bool) -> list[tuple[str, str]]:
    """The merge pairs, without those that make, or are made of, a control token or the name of a byte."""
    if not isinstance(merges, list):
        raise TokenizerError("model.merges must be a list")
    # Older files write a pair as one string, the two joined by a space.
    pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
    if not all(len(pair) == 2 and type(pair[0]) is type(pair[1]) is str for pair in pairs):
        raise TokenizerError("model.merges must be pairs of pieces")
    if control:
        pairs = [(a, b) for a, b in pairs if a not in control and b not in control and a + b not in control]
    if byte_fallback:
        pairs = [(a, b) for a, b in pairs if not (b.endswith(">") and BYTE_PIECE.fullmatch(a + b))]
    return pairs


def _unigram(spec: Spec, kept: Iterable[AddedToken]) -> models.Unigram:
    model = spec.document["model"]
    lowest = min((float(score) for _, score in model["vocab"]), default=0.0)
    # A piece's id is its place in the list, so places are kept and names taken away.
    vocab = [(_NAMELESS if piece in spec.control_tokens else piece, float(score)) for piece, score in model["vocab"]]
    for token in kept:
        if token.id >= len(vocab):
            vocab += [(_NAMELESS, lowest)] * (token.id - len(vocab))
            vocab.append((token.content, lowest))
    return models.Unigram(vocab=vocab, unk_id=model.get("unk_id"), byte_fallback=bool(model.get("byte_fallback")))


def _keep_byte_pieces_apart(encoder: tokenizers.Tokenizer) -> None:
    """Cut the text `<0x0A>` after its `<`: Unigram would take it for the piece that stands for the byte."""
    cut = pre_tokenizers.Split(tokenizers.Regex(f"<(?={BYTE_PIECE.pattern[1:]})"), "isolated")
    before = [encoder.pre_tokenizer] if encoder.pre_tokenizer else []
    encoder.pre_tokenizer = pre_tokenizers.Sequence([*before, cut])


def _library_token(token: AddedToken) -> tokenizers.AddedToken:
    return tokenizers.AddedToken(
        token.content,
        single_word=token.single_word,
        lstrip=token.lstrip,
        rstrip=token.rstrip,
        normalized=token.normalized,
    )
