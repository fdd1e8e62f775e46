"""What a .gguf file means: configuration, weights, tokenizer and special ids, each against what was put in."""

from __future__ import annotations

import functools
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from cells import LINEAR, toy
from gguf_bytes import VOCAB_SIZE, Metadata, Tensors, toy_metadata, toy_tensors, write_gguf
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_tokenizers import TRAINING_TEXT, toy_document
from toy_weights import toy_weights

from crucible.config import ModelConfig, RopeScaling
from crucible.engine.artifact import ArtifactError, Generation
from crucible.engine.rope import frequencies
from crucible.gguf.names import deinterleave, interleave
from crucible.gguf.tokenizer import PRE_TOKENIZERS, merges_by_score
from crucible.models import LoadedModel, resolve
from crucible.tokenizer import Tokenizer, TokenizerError

LLAMA32 = RopeScaling(
    kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
)
MODELS: dict[str, tuple[str, ModelConfig]] = {
    "llama": ("llama", toy(vocab_size=320)),
    "untied": ("llama", toy(vocab_size=320, tie_word_embeddings=False)),
    "mha": ("llama", toy(vocab_size=320, attention="mha")),
    "biases": ("llama", toy(vocab_size=320, qkv_bias=True, o_bias=True)),
    "linear": ("llama", toy(vocab_size=320, rope_scaling=LINEAR)),
    "qwen2": ("qwen2", toy(vocab_size=320, qkv_bias=True, rope_theta=1_000_000.0, norm_eps=1e-6)),
    "qwen3": ("qwen3", toy(vocab_size=320, qk_norm=True)),
}


def parts(name: str = "llama") -> tuple[Metadata, Tensors]:
    architecture, config = MODELS[name]
    metadata = toy_metadata(config, architecture)
    if config.rope_scaling is not None:
        metadata |= {f"{architecture}.rope.scaling.type": "linear", f"{architecture}.rope.scaling.factor": 4.0}
    return metadata, toy_tensors(config, toy_weights(config), architecture)


def load(folder: Path, metadata: Metadata, tensors: Tensors) -> LoadedModel:
    return resolve(write_gguf(folder / "toy.gguf", metadata, tensors))


# ---- the model ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back(tmp_path: Path, name: str) -> None:
    _, config = MODELS[name]
    model = load(tmp_path, *parts(name))
    assert model.name == "toy"
    assert model.config == config
    weights = toy_weights(config)
    assert list(model.weights) == list(weights)
    for tensor, weight in weights.items():
        np.testing.assert_array_equal(model.weights[tensor], weight)
    tokenizer = Tokenizer.train([TRAINING_TEXT], VOCAB_SIZE)
    assert model.tokenizer.encode(TRAINING_TEXT) == tokenizer.encode(TRAINING_TEXT)
    assert model.tokenizer.control_tokens == {"<|endoftext|>": VOCAB_SIZE - 1}
    assert model.generation == Generation(VOCAB_SIZE - 1, (VOCAB_SIZE - 1,), None)
    assert model.special_tokens == {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"}
    assert (model.chat_template, model.prefix_ids) == ("{{ messages }}", ())


@given(st.integers(1, 5), st.integers(1, 8), st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_rows_come_back_from_either_order(heads: int, half: int, width: int) -> None:
    rows = np.arange(heads * 2 * half * width, dtype=np.float32).reshape(-1, width)
    np.testing.assert_array_equal(deinterleave(interleave(rows, heads), heads), rows)
    np.testing.assert_array_equal(interleave(rows, heads)[:, 0], interleave(np.ascontiguousarray(rows[:, 0]), heads))


def test_what_the_format_defines_for_absent_keys(tmp_path: Path) -> None:
    config = toy(vocab_size=320, attention="mha", hidden_size=32)
    metadata = toy_metadata(config)
    for key in ("attention.head_count_kv", "attention.key_length", "attention.value_length", "vocab_size"):
        del metadata[f"llama.{key}"]
    del metadata["llama.rope.dimension_count"], metadata["general.type"], metadata["general.quantization_version"]
    assert load(tmp_path, metadata, toy_tensors(config, toy_weights(config))).config == config


def test_llama_3s_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    config = toy(vocab_size=320, head_dim=64, rope_theta=500_000.0, rope_scaling=LLAMA32)
    divisors = (frequencies(config.vary(rope_scaling=None)) / frequencies(config)).astype(np.float32)
    assert {1.0, 32.0} < set(divisors.tolist())
    metadata, tensors = toy_metadata(config), toy_tensors(config, toy_weights(config))

    def with_divisors(values: Any) -> LoadedModel:
        data = np.asarray(values, dtype="<f4")
        return load(tmp_path, metadata, tensors | {"rope_freqs.weight": (0, data.shape, data.tobytes())})

    assert with_divisors(divisors).config == config
    assert with_divisors(np.ones(32)).config == config.vary(rope_scaling=None)
    for wrong in (divisors * 1.001, divisors[:16], np.full(32, np.nan), -divisors, np.ones((2, 16))):
        with pytest.raises(ArtifactError, match=r"rope_freqs\.weight is not a scaling|rope_scaling\.factor must be"):
            with_divisors(wrong)
    metadata |= {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}
    with pytest.raises(ArtifactError, match=r"has both rope\.scaling\.type and a tensor rope_freqs"):
        with_divisors(divisors)


REFUSED: dict[str, tuple[Metadata, str]] = {
    "another architecture": (
        {"general.architecture": "gemma"},
        "general.architecture must be one of llama, qwen2, qwen3",
    ),
    "a number as architecture": ({"general.architecture": 3}, "general.architecture must be one of"),
    "an adapter": ({"general.type": "adapter"}, "general.type must be 'model' or absent, not 'adapter'"),
    "old packing": ({"general.quantization_version": 1}, "general.quantization_version must be 2 or absent, not 1"),
    "a part": ({"split.count": 3}, "split.count must be 1 or absent, not 3"),
    "unknown key": ({"llama.logit_scale": 2.0}, "llama.logit_scale is a key whose meaning is not known here"),
    "experts": ({"llama.expert_count": 8}, "llama.expert_count is a key whose meaning is not known here"),
    "a window": ({"llama.attention.sliding_window": 8}, "llama.attention.sliding_window is a key whose meaning"),
    "no base": ({"llama.rope.freq_base": None}, "missing key: llama.rope.freq_base"),
    "no epsilon": ({"llama.attention.layer_norm_rms_epsilon": None}, "missing key: llama.attention.layer_norm_rms"),
    "no layers": ({"llama.block_count": None}, "missing key: llama.block_count"),
    "zero layers": ({"llama.block_count": 0}, "llama.block_count must be a positive integer, not 0"),
    "a billion layers": ({"llama.block_count": 2**31}, "tensors cannot fill 2147483648 layers"),
    "heads per layer": (
        {"llama.attention.head_count": [4, 4]},
        "llama.attention.head_count must be a positive integer",
    ),
    "heads do not divide": ({"llama.attention.head_count_kv": 3}, "num_key_value_heads must divide"),
    "rotation of a part": (
        {"llama.rope.dimension_count": 4},
        "llama.rope.dimension_count must be 8, the size of a head",
    ),
    "values of another size": ({"llama.attention.value_length": 4}, "llama.attention.value_length must be 8"),
    "base an integer": ({"llama.rope.freq_base": 10000}, "llama.rope.freq_base must be a number, not 10000"),
    "epsilon infinite": (
        {"llama.attention.layer_norm_rms_epsilon": float("inf")},
        "norm_eps must be a positive finite number, not inf",
    ),
    "yarn": ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type must be none or linear, not 'yarn'"),
    "a factor alone": ({"llama.rope.scaling.factor": 2.0}, "llama.rope.scaling.factor is given without"),
    "linear alone": ({"llama.rope.scaling.type": "linear"}, "llama.rope.scaling.factor must be a number, not None"),
    "vocabulary too large": ({"llama.vocab_size": 2**18 + 1}, "vocab_size must be at most 262144"),
    "vocabulary too small": ({"llama.vocab_size": 310}, "token_embd.weight: shape must be [310, 24], not [320, 24]"),
    "smaller than the tokenizer's": ({"llama.vocab_size": 200}, "its tokenizer has 300 tokens, its model 200"),
    "no vocabulary": ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens must hold the vocabulary"),
    "an id out of range": ({"tokenizer.ggml.eos_token_id": 320}, "tokenizer.ggml.eos_token_id must be an id below 320"),
    "an id a text": ({"tokenizer.ggml.bos_token_id": "x"}, "tokenizer.ggml.bos_token_id must be an id below 320"),
    "a template a number": ({"tokenizer.chat_template": 3}, "tokenizer.chat_template must be a string, not 3"),
    # ---- the tokenizer
    "another tokenizer": ({"tokenizer.ggml.model": "bert"}, "tokenizer.ggml.model must be gpt2 or llama, not 'bert'"),
    "no tokenizer": ({"tokenizer.ggml.model": None}, "missing key: tokenizer.ggml.model"),
    "no rule": ({"tokenizer.ggml.pre": None}, "missing key: tokenizer.ggml.pre"),
    "another rule": (
        {"tokenizer.ggml.pre": "gpt-4o"},
        "tokenizer.ggml.pre must be one of gpt-2, smollm, llama-bpe, llama3, llama-v3, qwen2, deepseek-r1-qwen, not",
    ),
    "no merges": ({"tokenizer.ggml.merges": None}, "missing key: tokenizer.ggml.merges"),
    "merges of numbers": ({"tokenizer.ggml.merges": [1, 2]}, "tokenizer.ggml.merges must be an array of strings"),
    "no types": ({"tokenizer.ggml.token_type": None}, "missing key: tokenizer.ggml.token_type"),
    "too few types": ({"tokenizer.ggml.token_type": [1]}, "token_type must have 320 elements, as tokens has, not 1"),
    "an unknown type": ({"tokenizer.ggml.token_type": [7] * 320}, "token_type holds an unknown type 7"),
    "a flag a number": ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token must be of type bool, not 1"),
    "a piece twice": (
        {"tokenizer.ggml.tokens": ["a", "a", *map(str, range(318))]},
        "tokenizer.ggml.tokens gives 'a' the ids 0 and 1",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_run_is_refused_by_name(tmp_path: Path, case: str) -> None:
    changes, message = REFUSED[case]
    metadata, tensors = parts()
    metadata = {key: value for key, value in (metadata | changes).items() if value is not None}
    with pytest.raises((ArtifactError, TokenizerError), match=rf"toy\.gguf: .*{re.escape(message)}"):
        load(tmp_path, metadata, tensors)


VALUES = st.one_of(
    st.integers(0, 2**32 - 1),
    st.floats(width=32),
    st.booleans(),
    st.text(max_size=6),
    st.lists(st.integers(-8, 400), min_size=1, max_size=400),
    st.lists(st.text(max_size=3), min_size=1, max_size=400),
)


@settings(max_examples=120, deadline=None)
@given(st.dictionaries(st.sampled_from(sorted(parts()[0])), VALUES, min_size=1, max_size=3))
def test_any_metadata_is_a_model_or_refused(tmp_path_factory: pytest.TempPathFactory, changes: dict[str, Any]) -> None:
    metadata, tensors = parts()
    try:
        model = load(tmp_path_factory.mktemp("any"), metadata | changes, tensors)
    except (ArtifactError, TokenizerError):
        return
    assert list(model.weights) == list(model.config.tensor_shapes())


def test_a_head_that_does_not_divide_is_asked_for(tmp_path: Path) -> None:
    metadata, tensors = parts()
    metadata = {k: v for k, v in metadata.items() if "_length" not in k or "embedding" in k or "context" in k}
    metadata |= {"llama.embedding_length": 26, "llama.feed_forward_length": 40}
    with pytest.raises(ArtifactError, match=r"missing key: llama\.attention\.key_length"):
        load(tmp_path, metadata, tensors)


def test_tensors_are_exactly_those_of_the_model(tmp_path: Path) -> None:
    metadata, tensors = parts()

    def refused(changed: Tensors, message: str) -> None:
        with pytest.raises(ArtifactError, match=re.escape(message)):
            load(tmp_path, metadata, changed)

    def numbers(shape: tuple[int, ...], value: float = 1.0) -> tuple[int, tuple[int, ...], bytes]:
        return 0, shape, np.full(shape, value, dtype="<f4").tobytes()

    without = {name: tensor for name, tensor in tensors.items() if name != "blk.1.ffn_up.weight"}
    refused(without, "missing tensor: blk.1.ffn_up.weight")
    refused(tensors | {"blk.0.ffn_up.bias": numbers((40,))}, "unexpected tensor: 'blk.0.ffn_up.bias'")
    refused(tensors | {"blk.0.attn_q.bias": numbers((32,))}, "missing tensor: blk.0.attn_k.bias")
    refused(tensors | {"blk.1.attn_q.bias": numbers((32,))}, "unexpected tensor: 'blk.1.attn_q.bias'")
    refused(tensors | {"blk.1.ffn_up.weight": numbers((24, 40))}, "ffn_up.weight: shape must be [40, 24], not [24, 40]")
    for value in (np.nan, np.inf, -np.inf):
        refused(tensors | {"output_norm.weight": numbers((24,), value)}, "output_norm.weight holds a value that is not")


# ---- the tokenizer ------------------------------------------------------------------------------------------------


def with_types(types: dict[int, int], **changes: Any) -> Metadata:
    metadata, _ = parts()
    kinds = metadata["tokenizer.ggml.token_type"]
    return metadata | {
        "tokenizer.ggml.token_type": [types.get(i, kind) for i, kind in enumerate(kinds)],
        **{f"tokenizer.ggml.{key}": value for key, value in changes.items()},
    }


def test_control_tokens_are_special_and_those_of_users_are_not(tmp_path: Path) -> None:
    tokens = parts()[0]["tokenizer.ggml.tokens"]
    tokens[300:303] = ["<tool>", "    ", "<|im_end|>"]
    metadata = with_types({300: 4, 301: 4, 302: 3}, tokens=tokens, eot_token_id=302)
    model = load(tmp_path, metadata, parts()[1])
    assert model.tokenizer.control_tokens == {"<|endoftext|>": 299, "<tool>": 300, "<|im_end|>": 302}
    assert model.tokenizer.special_ids == {299, 302}
    assert 301 in model.tokenizer.encode("x    y")
    assert 300 not in model.tokenizer.encode("<tool>")
    assert model.generation.eos_token_ids == (299, 302)


@pytest.mark.parametrize(
    ("changes", "prefix"),
    [
        ({"pre": "gpt-2"}, ()),
        ({"pre": "gpt-2", "add_bos_token": True}, (299,)),
        ({"pre": "llama-bpe"}, (299,)),
        ({"pre": "llama-bpe", "add_bos_token": False}, ()),
        ({"pre": "qwen2"}, ()),
    ],
    ids=str,
)
def test_the_token_before_a_text(tmp_path: Path, changes: dict[str, Any], prefix: tuple[int, ...]) -> None:
    assert load(tmp_path, with_types({}, **changes), parts()[1]).prefix_ids == prefix


def test_a_beginning_of_text_must_be_there(tmp_path: Path) -> None:
    metadata = with_types({}, pre="llama-bpe")
    del metadata["tokenizer.ggml.bos_token_id"]
    with pytest.raises(ArtifactError, match=r"missing key: tokenizer\.ggml\.bos_token_id"):
        load(tmp_path, metadata, parts()[1])


def test_rules_cut_words_as_they_are_said_to() -> None:
    text = "it's 12345 naïve\n\n  e\u0301"  # the last character in two code points
    expected = {
        "gpt-2": ["it", "'s", " 12345", " naïve", "\n\n ", " e", "\u0301"],
        "smollm": ["it", "'s", " ", "1", "2", "3", "4", "5", " naïve", "\n\n ", " e", "\u0301"],
        "llama-bpe": ["it", "'s", " ", "123", "45", " naïve", "\n\n", " ", " e", "\u0301"],
        "qwen2": ["it", "'s", " ", "1", "2", "3", "4", "5", " naïve", "\n\n", " ", " é"],
    }
    for rule in PRE_TOKENIZERS:
        steps = {"normalizer": rule.normalizer, "pre_tokenizer": rule.pre_tokenizer}
        library = tokenizers.Tokenizer.from_str(toy_document("byte_level", **steps).decode())
        normalised = library.normalizer.normalize_str(text) if library.normalizer else text
        words = [normalised[slice(*span)] for _, span in library.pre_tokenizer.pre_tokenize_str(normalised)]
        assert words == expected[rule.names[0]], rule.names


# ---- SentencePiece ------------------------------------------------------------------------------------------------


@functools.cache
def sentencepiece_parts() -> Metadata:
    words = ["▁the", "▁cat", "▁a", "at", "he", "▁t", "▁c", "th", "▁th", "ca", "cat", "▁▁"]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz.,"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(letters) + len(words))
    scores = [0.0] * 259 + [-100.0 - i for i in range(len(letters))] + [-1.0 - i for i in range(len(words))]
    metadata = {key: value for key, value in parts()[0].items() if not key.startswith("tokenizer.")}
    return metadata | {
        "llama.vocab_size": 320,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def by_scores(text: str, metadata: Metadata) -> list[int]:
    """SentencePiece's BPE, as slow as can be: the neighbours that make the piece of the highest score, leftmost first,
    are merged until none do; what is no piece is spelt in bytes."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    known = {
        t: s for t, s, kind in zip(tokens, scores, metadata["tokenizer.ggml.token_type"], strict=True) if kind == 1
    }
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [(known[a + b], -i) for i, (a, b) in enumerate(pairwise(pieces)) if a + b in known]
        if not pairs:
            break
        at = -max(pairs)[1]
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    ids: list[int] = []
    for piece in pieces:
        ids += [tokens.index(piece)] if piece in known else [3 + byte for byte in piece.encode()]
    return ids


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(tmp_path_factory.mktemp("sentencepiece"), sentencepiece_parts(), parts()[1])


@settings(max_examples=100, deadline=None)
@given(text=st.text(alphabet="the cat.é世 ", min_size=1, max_size=30))
def test_sentencepiece_merges_by_score(sentencepiece: LoadedModel, text: str) -> None:
    assert sentencepiece.tokenizer.encode(text) == by_scores(text, sentencepiece_parts())
    assert sentencepiece.tokenizer.decode(sentencepiece.tokenizer.encode(text)) == text


def test_sentencepiece_has_its_special_ids(sentencepiece: LoadedModel) -> None:
    assert sentencepiece.prefix_ids == (1,)
    assert sentencepiece.generation == Generation(1, (2,), None)
    assert sentencepiece.tokenizer.special_ids == {0, 1, 2}
    assert sentencepiece.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_sentencepiece_without_a_space_in_front(tmp_path: Path) -> None:
    metadata = sentencepiece_parts() | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False}
    model = load(tmp_path, metadata, parts()[1])
    tokens = metadata["tokenizer.ggml.tokens"]
    assert [tokens[i] for i in model.tokenizer.encode("the cat")] == ["t", "he", "▁cat"]
    assert model.prefix_ids == ()


def test_pairs_of_one_piece_are_ranked_together() -> None:
    vocab = {piece: i for i, piece in enumerate(["a", "b", "c", "ab", "bc", "abc"])}
    assert merges_by_score(vocab, [0, 0, 0, -2, -1, -3]) == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]


@pytest.mark.parametrize("scores", [[1, 2, 3], [0.5], ["a"] * 299], ids=["integers", "too few", "texts"])
def test_scores_are_a_number_for_each_piece(tmp_path: Path, scores: list[Any]) -> None:
    with pytest.raises(ArtifactError, match=r"tokenizer\.ggml\.scores must be \d+ numbers, one for each of tokens"):
        load(tmp_path, sentencepiece_parts() | {"tokenizer.ggml.scores": scores}, parts()[1])
