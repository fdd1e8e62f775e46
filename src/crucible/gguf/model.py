"""What a .gguf file says of a model: its configuration, its weights, its special ids.

Nothing about the computation is guessed: a key that it needs and that is missing is an error, and so are a key of the
architecture and a tensor whose meaning is not known here. Only what the format itself defines for an absent key is
taken: as many key/value heads as heads, heads that divide the width, rotation of whole heads, no RoPE scaling, and an
output projection tied to the embedding where it has no tensor of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, get_args

import numpy as np
import numpy.typing as npt

from crucible.config import ConfigError, ModelConfig, RopeScaling, attention_kind
from crucible.engine.artifact import Generation
from crucible.engine.rope import frequencies
from crucible.engine.safetensors_file import ArtifactError, shown
from crucible.gguf.file import GgufFile
from crucible.gguf.names import ROPE_FREQS, Architecture, deinterleave, gguf_name, permuted_heads

SIZES: Final[Mapping[str, str]] = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
}
"""Keys without the architecture's name, by field of the configuration."""

_OPTIONAL: Final = (
    "vocab_size",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
)
_REQUIRED: Final = (*SIZES.values(), "attention.layer_norm_rms_epsilon", "rope.freq_base")
_FIXED: Final[Mapping[str, tuple[Any, ...]]] = {
    "general.type": ("model",),
    "general.quantization_version": (2,),
    "split.count": (1, 0),
}
"""Allowed values of keys that say that a file is something else: an adapter, another packing, a part of a model."""

END_KEYS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Ids of tokenizer.ggml that end a reply: of a text, of a turn, of a message to a tool."""

_TEMPLATE_NAMES: Final = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}

LLAMA3_SCALING: Final = (1.0, 4.0, 8192)
"""Low and high frequency factor and original context of every published Llama with this scaling. The file holds only
what comes of them, which is checked."""


def read_config(file: GgufFile) -> ModelConfig:
    """The model that a file's metadata and the names of its tensors describe.

    Raises:
        ArtifactError: a needed key is missing, a key of the architecture is unknown, or a value is one that this
            project cannot compute; the message names the key.
    """
    keys = _Keys(file)
    heads = keys.size("attention.head_count")
    kv_heads = keys.size("attention.head_count_kv", default=heads)
    tensors = file.tensors
    fields: dict[str, Any] = {
        **{field: keys.size(key) for field, key in SIZES.items()},
        "vocab_size": keys.vocab_size(),
        "num_key_value_heads": kv_heads,
        "head_dim": keys.head_dim(),
        "attention": attention_kind(heads, kv_heads),
        "rope_theta": keys.number("rope.freq_base"),
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": gguf_name("lm_head.weight") not in tensors,
        "qkv_bias": keys.architecture == "qwen2" or "blk.0.attn_q.bias" in tensors,
        "o_bias": "blk.0.attn_output.bias" in tensors,
        "qk_norm": keys.architecture == "qwen3",
    }
    try:
        config = ModelConfig(**fields, rope_scaling=keys.linear_scaling())
        return config if ROPE_FREQS not in tensors else config.vary(rope_scaling=_llama3_scaling(file, config))
    except ConfigError as error:
        raise ArtifactError(f"{file.path}: {error}") from None


def load_weights(file: GgufFile, config: ModelConfig) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of `config.tensor_shapes()` as float32, in that order, rows of queries and keys in halves.

    Raises:
        ArtifactError: as `checked_names`; also the first tensor that holds a value that is not finite.
    """
    names = checked_names(file, config)
    architecture = _Keys(file).architecture
    # Two threads halve the time: numpy holds no lock while it computes, and more would wait for memory.
    with ThreadPoolExecutor(2) as pool:
        loaded = pool.map(lambda name: _load(file, name, config, architecture), names)
        return dict(zip(names, loaded, strict=True))


def checked_names(file: GgufFile, config: ModelConfig) -> dict[str, str]:
    """What the file calls each tensor of `config.tensor_shapes()`, in that order, after every check but of values.

    Raises:
        ArtifactError: a tensor is missing, unexpected or mis-shaped; the message names it.
    """
    # Before tensor_shapes(), whose length a hostile file could put in the billions.
    if config.num_hidden_layers > len(file.tensors):
        raise ArtifactError(f"{file.path}: {len(file.tensors)} tensors cannot fill {config.num_hidden_layers} layers")
    shapes = config.tensor_shapes()
    expected = {gguf_name(name): shape for name, shape in shapes.items()}
    for name in sorted(expected.keys() | file.tensors.keys() - {ROPE_FREQS}):
        if name not in file.tensors:
            raise ArtifactError(f"{file.path}: missing tensor: {name}")
        if name not in expected:
            raise ArtifactError(f"{file.path}: unexpected tensor: {shown(name)}")
        if file.tensors[name].shape != expected[name]:
            found = list(file.tensors[name].shape)
            raise ArtifactError(f"{file.path}: tensor {name}: shape must be {list(expected[name])}, not {found}")
    return {name: gguf_name(name) for name in shapes}


def _load(file: GgufFile, name: str, config: ModelConfig, architecture: Architecture) -> npt.NDArray[np.float32]:
    weight = file.array(gguf_name(name))
    # A NaN anywhere makes both extremes NaN, so no array of flags is needed.
    if not (np.isfinite(weight.min()) and np.isfinite(weight.max())):
        raise ArtifactError(f"{file.path}: tensor {gguf_name(name)} holds a value that is not finite")
    heads = permuted_heads(name, config, architecture)
    return weight if heads is None else deinterleave(weight, heads)


def read_generation(file: GgufFile) -> Generation:
    """The special ids of a file's tokenizer.

    Raises:
        ArtifactError: an id is none of the tokenizer's.
    """
    ends = [_special_id(file, key) for key in END_KEYS]
    return Generation(
        bos_token_id=_special_id(file, "bos_token_id"),
        eos_token_ids=tuple(dict.fromkeys(end for end in ends if end is not None)),
        pad_token_id=_special_id(file, "padding_token_id"),
    )


def special_tokens(file: GgufFile) -> dict[str, str]:
    """The texts of a file's special tokens, by the names that chat templates know. Raises as `read_generation`."""
    ids = {name: _special_id(file, key) for name, key in _TEMPLATE_NAMES.items()}
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _special_id(file: GgufFile, key: str) -> int | None:
    num_tokens = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is None or (type(value) is int and 0 <= value < num_tokens):
        return value
    raise ArtifactError(f"{file.path}: tokenizer.ggml.{key} must be an id below {num_tokens}, not {shown(value)}")


class _Keys:
    """The keys of a file's architecture, checked to be known ones; asked for without the architecture's name."""

    def __init__(self, file: GgufFile) -> None:
        self._path = file.path
        self._values = file.metadata
        architecture: Any = self._values.get("general.architecture")
        if architecture not in get_args(Architecture):
            allowed = ", ".join(get_args(Architecture))
            raise self._error("general.architecture", f"must be one of {allowed}, not {shown(architecture)}")
        self.architecture: Architecture = architecture
        for key, allowed_values in _FIXED.items():
            if (value := self._values.get(key)) is not None and value not in allowed_values:
                raise self._error(key, f"must be {allowed_values[0]!r} or absent, not {shown(value)}")
        known = {self._full(key) for key in (*_REQUIRED, *_OPTIONAL)}
        for key in self._values:
            if key.startswith(f"{architecture}.") and key not in known:
                raise self._error(key, "is a key whose meaning is not known here")
        for key in _REQUIRED:
            if self._full(key) not in self._values:
                raise ArtifactError(f"{file.path}: missing key: {self._full(key)}")

    def _full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def _get(self, key: str) -> Any:
        return self._values.get(self._full(key))

    def _error(self, key: str, why: str) -> ArtifactError:
        return ArtifactError(f"{self._path}: {key} {why}")

    def size(self, key: str, default: int | None = None) -> int:
        value = self._get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise self._error(self._full(key), f"must be a positive integer, not {shown(value)}")
        return value

    def number(self, key: str) -> float:
        value = self._get(key)
        if type(value) is not float:
            raise self._error(self._full(key), f"must be a number, not {shown(value)}")
        return value

    def vocab_size(self) -> int:
        tokens = self._values.get("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not tokens:
            raise self._error("tokenizer.ggml.tokens", "must hold the vocabulary")
        return self.size("vocab_size", default=len(tokens))

    def head_dim(self) -> int:
        width, heads = self.size("embedding_length"), self.size("attention.head_count")
        if self._get("attention.key_length") is None and width % heads:
            raise ArtifactError(f"{self._path}: missing key: {self._full('attention.key_length')}")
        head_dim = self.size("attention.key_length", default=width // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if self.size(key, default=head_dim) != head_dim:
                raise self._error(self._full(key), f"must be {head_dim}, the size of a head, not {self._get(key)}")
        return head_dim

    def linear_scaling(self) -> RopeScaling | None:
        kind = self._get("rope.scaling.type")
        if kind in (None, "none"):
            if self._get("rope.scaling.factor") is not None:
                raise self._error(self._full("rope.scaling.factor"), "is given without rope.scaling.type")
            return None
        if kind != "linear":
            raise self._error(self._full("rope.scaling.type"), f"must be none or linear, not {shown(kind)}")
        return RopeScaling(kind="linear", factor=self.number("rope.scaling.factor"))


def _llama3_scaling(file: GgufFile, config: ModelConfig) -> RopeScaling | None:
    """The scaling of Llama 3 that gives exactly the divisors in the file, to the rounding of float32."""
    if config.rope_scaling is not None:
        raise ArtifactError(f"{file.path}: has both rope.scaling.type and a tensor {ROPE_FREQS}")
    divisor = file.array(ROPE_FREQS)
    if np.array_equal(divisor, np.ones(config.head_dim // 2)):
        return None
    low, high, original = LLAMA3_SCALING
    scaling = RopeScaling(
        kind="llama3",
        factor=float(divisor.max()),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
    )
    expected = frequencies(config) / frequencies(config.vary(rope_scaling=scaling))
    # The converter computed them in float32: a few roundings off.
    if divisor.shape != expected.shape or not np.allclose(divisor, expected, rtol=1e-5, atol=0):
        raise ArtifactError(f"{file.path}: tensor {ROPE_FREQS} is not a scaling of RoPE that is known here")
    return scaling
