"""What a model is: its sizes, the five architecture axes, and what the models of others add to them.

Standard library only, so that every part of the project can import it: training, export, the engine and the server.
Field names are those of Hugging Face's Llama configuration; the axes are the project's own.

Shape letters used throughout the project:
    B batch, T positions, D hidden_size, F intermediate_size, H query heads, G key/value heads, K head_dim,
    V vocabulary.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

Attention = Literal["mha", "gqa", "mqa"]
PosEncoding = Literal["rope", "alibi", "learned", "none"]
Activation = Literal["swiglu", "gelu"]
Norm = Literal["rmsnorm", "layernorm"]
NormPlacement = Literal["pre", "post"]
RopeScalingKind = Literal["linear", "llama3"]

AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "attention": get_args(Attention),
    "pos_encoding": get_args(PosEncoding),
    "activation": get_args(Activation),
    "norm": get_args(Norm),
    "norm_placement": get_args(NormPlacement),
}
"""Legal values of each ablation axis, in the order reports use."""

MAX_VOCAB_SIZE: Final = 2**18
"""The sampler sums integer probability masses exactly up to this many tokens (docs/sampling.md)."""

_HIDDEN_MULTIPLE: Final = 64
_DEFAULT_GROUP: Final = 4


class ConfigError(ValueError):
    """A configuration that names no model: the message gives the field and what is allowed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RopeScaling:
    """RoPE frequencies stretched for contexts longer than the model was first trained on.

    "linear" divides every frequency by `factor` (Chen et al. 2023, section 3.2). "llama3" divides those whose
    wavelength is over original_max_position_embeddings / low_freq_factor, keeps those under
    original_max_position_embeddings / high_freq_factor, and interpolates in between (Llama 3.1). The last three
    fields belong to "llama3" and are None for "linear".

    Raises:
        ConfigError: there is no such kind, a field of it is missing or one of the other is given, or a value is not
            a positive number.
    """

    kind: RopeScalingKind
    factor: float
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    original_max_position_embeddings: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(RopeScalingKind):
            raise ConfigError(
                f"rope_scaling.kind must be one of {', '.join(get_args(RopeScalingKind))}, not {self.kind!r}"
            )
        _check_number("rope_scaling.factor", self.factor)
        if self.kind == "linear":
            if (self.low_freq_factor, self.high_freq_factor, self.original_max_position_embeddings) != (None,) * 3:
                raise ConfigError("rope_scaling of kind linear has a factor alone; the other fields are llama3's")
            return
        low = _check_number("rope_scaling.low_freq_factor", self.low_freq_factor)
        high = _check_number("rope_scaling.high_freq_factor", self.high_freq_factor)
        _check_size("rope_scaling.original_max_position_embeddings", self.original_max_position_embeddings)
        if not low < high:
            raise ConfigError(f"rope_scaling.low_freq_factor={low} must be below high_freq_factor={high}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """One decoder-only transformer. Frozen, checked once here, refuses what it does not know.

    `norm_placement="pre"` normalises the input of each sublayer and the final residual stream;
    `"post"` normalises after each residual addition (Vaswani et al. 2017) and has no final norm.
    GELU is the tanh form that GPT-2 uses. The last four fields are found in models of others and not trained here:
    biases of the query, key and value projections and of the output projection, a norm of each query and key head
    (RMSNorm over K before RoPE, whatever `norm` is), and a scaling of RoPE's frequencies. No other layer has a bias.

    Raises:
        ConfigError: a size is not positive, heads do not divide, an axis contradicts the head counts, or
            rope_scaling is given without rope.
    """

    vocab_size: int
    max_position_embeddings: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    attention: Attention = "gqa"
    pos_encoding: PosEncoding = "rope"
    activation: Activation = "swiglu"
    norm: Norm = "rmsnorm"
    norm_placement: NormPlacement = "pre"
    tie_word_embeddings: bool = True
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-5
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int":
                _check_size(field.name, value)
            if field.type == "bool" and not isinstance(value, bool):
                raise ConfigError(f"{field.name} must be true or false, not {value!r}")
            if field.type == "float":
                _check_number(field.name, value)
        for axis in AXES:
            _check_axis(axis, getattr(self, axis))
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise ConfigError(f"vocab_size must be at most {MAX_VOCAB_SIZE}, not {self.vocab_size}")
        if self.pos_encoding == "rope" and self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for rope, not {self.head_dim}")
        if not isinstance(self.rope_scaling, (RopeScaling, type(None))):
            raise ConfigError(f"rope_scaling must be a RopeScaling or None, not {self.rope_scaling!r}")
        if self.rope_scaling is not None and self.pos_encoding != "rope":
            raise ConfigError(f"rope_scaling needs pos_encoding='rope', not {self.pos_encoding!r}")
        self._check_heads()

    def _check_heads(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.num_key_value_heads
        if kv_heads > heads or heads % kv_heads:
            raise ConfigError(f"num_key_value_heads must divide num_attention_heads={heads}, not {kv_heads}")
        found = attention_kind(heads, kv_heads)
        # One head is mha, gqa and mqa at once, so only that count may carry any of the three names.
        if heads > 1 and found != self.attention:
            raise ConfigError(
                f"attention={self.attention!r} contradicts num_attention_heads={heads} with "
                f"num_key_value_heads={kv_heads}, which is {found}"
            )
        if heads == 1 and self.attention == "gqa":
            raise ConfigError("attention='gqa' needs at least 4 heads; one head is mha")

    # ---- making one -------------------------------------------------------------------------------------------

    @classmethod
    def build(
        cls,
        *,
        hidden_size: int,
        num_hidden_layers: int,
        num_attention_heads: int,
        vocab_size: int = 50304,
        max_position_embeddings: int = 1024,
        attention: Attention = "gqa",
        activation: Activation = "swiglu",
        num_key_value_heads: int | None = None,
        intermediate_size: int | None = None,
        head_dim: int | None = None,
        **rest: Any,
    ) -> ModelConfig:
        """A config whose derived sizes follow from the axes where they are not given.

        Raises:
            ConfigError: as the class; also where grouped-query attention would collapse to mha or mqa.
        """
        if head_dim is None:
            _check_size("hidden_size", hidden_size)
            _check_size("num_attention_heads", num_attention_heads)
            if hidden_size % num_attention_heads:
                raise ConfigError(f"hidden_size={hidden_size} is not a multiple of {num_attention_heads} heads")
            head_dim = hidden_size // num_attention_heads
        if num_key_value_heads is None:
            num_key_value_heads = default_kv_heads(num_attention_heads, attention)
        if intermediate_size is None:
            intermediate_size = default_intermediate_size(hidden_size, activation)
        return cls(
            vocab_size=vocab_size,
            max_position_embeddings=max_position_embeddings,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            head_dim=head_dim,
            attention=attention,
            activation=activation,
            **_known(rest, cls),
        )

    def vary(self, **changes: Any) -> ModelConfig:
        """This config with some fields changed and the sizes that depend on an axis derived anew.

        Changing `attention` derives num_key_value_heads, changing `activation` or `hidden_size` derives
        intermediate_size (so that activations compare at equal parameter count), unless they are given too.
        """
        changes = dict(_known(changes, type(self)))
        if "attention" in changes and changes["attention"] != self.attention and "num_key_value_heads" not in changes:
            heads = changes.get("num_attention_heads", self.num_attention_heads)
            changes["num_key_value_heads"] = default_kv_heads(heads, changes["attention"])
        if {"activation", "hidden_size"} & changes.keys() and "intermediate_size" not in changes:
            activation = changes.get("activation", self.activation)
            hidden_size = changes.get("hidden_size", self.hidden_size)
            if (activation, hidden_size) != (self.activation, self.hidden_size):
                changes["intermediate_size"] = default_intermediate_size(hidden_size, activation)
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """The inverse of `to_dict`. Raises ConfigError naming every missing or unknown key.

        The fields that no trained model has may be missing: files written before there were such fields lack them.
        """
        missing = [f.name for f in dataclasses.fields(cls) if f.name not in values and f.name not in UNTRAINED_FIELDS]
        if missing:
            raise ConfigError(f"missing key{'s' * (len(missing) > 1)}: {', '.join(missing)}")
        values = _known(values, cls)
        scaling = values.get("rope_scaling")
        if isinstance(scaling, Mapping):
            if not {"kind", "factor"} <= scaling.keys():
                raise ConfigError("rope_scaling must have the keys kind and factor")
            values["rope_scaling"] = RopeScaling(**_known(scaling, RopeScaling))
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """Every field by name, ready for JSON."""
        return dataclasses.asdict(self)

    # ---- what follows from the structure ----------------------------------------------------------------------

    @property
    def group_size(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_attention_heads // self.num_key_value_heads

    @property
    def is_llama(self) -> bool:
        """Whether the computation is a plain Llama's, so that `transformers` can load the artifact as one."""
        return self.has_llama_axes and self.qkv_bias == self.o_bias and not self.qk_norm

    @property
    def has_llama_axes(self) -> bool:
        """Whether the axes are those of Llama and its relatives: RoPE, SwiGLU, RMSNorm, norms before the sublayers."""
        axes = (self.pos_encoding, self.activation, self.norm, self.norm_placement)
        return axes == ("rope", "swiglu", "rmsnorm", "pre")

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of an artifact, in file order; Hugging Face Llama names.

        A linear weight is [outputs, inputs]. A tied output projection is not stored a second time.
        """
        d, f = self.hidden_size, self.intermediate_size
        q, kv = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, d)}
        if self.pos_encoding == "learned":
            shapes["model.embed_positions.weight"] = (self.max_position_embeddings, d)
        for layer in range(self.num_hidden_layers):
            at = f"model.layers.{layer}."
            attention_norm, mlp_norm = self.norm_names
            shapes |= self._norm_shapes(at + attention_norm)
            shapes |= _linear_shapes(at + "self_attn.q_proj", (q, d), self.qkv_bias)
            shapes |= _linear_shapes(at + "self_attn.k_proj", (kv, d), self.qkv_bias)
            shapes |= _linear_shapes(at + "self_attn.v_proj", (kv, d), self.qkv_bias)
            shapes |= _linear_shapes(at + "self_attn.o_proj", (d, q), self.o_bias)
            if self.qk_norm:
                shapes |= {at + f"self_attn.{x}_norm.weight": (self.head_dim,) for x in "qk"}
            shapes |= self._norm_shapes(at + mlp_norm)
            if self.activation == "swiglu":
                shapes[at + "mlp.gate_proj.weight"] = (f, d)
            shapes[at + "mlp.up_proj.weight"] = (f, d)
            shapes[at + "mlp.down_proj.weight"] = (d, f)
        if self.norm_placement == "pre":
            shapes |= self._norm_shapes("model.norm")
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes

    @property
    def norm_names(self) -> tuple[str, str]:
        """Names of a layer's attention and MLP norms: Llama's before the sublayers, OLMo 2's after them."""
        if self.norm_placement == "pre":
            return "input_layernorm", "post_attention_layernorm"
        return "post_attention_layernorm", "post_feedforward_layernorm"

    def _norm_shapes(self, name: str) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (self.hidden_size,)}
        if self.norm == "layernorm":
            shapes[f"{name}.bias"] = (self.hidden_size,)
        return shapes

    def num_parameters(self) -> int:
        """All trainable parameters; a tied output projection counts once."""
        total = sum(math.prod(shape) for shape in self.tensor_shapes().values())
        parts = self._num_embedding() + self.num_hidden_layers * self._num_per_layer() + self._num_final_norm()
        assert total == parts, f"tensor table holds {total} parameters, the structure {parts}"
        return total

    def num_non_embedding_parameters(self) -> int:
        """Parameters outside token, position and output embeddings (Kaplan et al. 2020, section 2.1)."""
        return self.num_parameters() - self._num_embedding()

    def _num_embedding(self) -> int:
        tables = self.vocab_size * (1 if self.tie_word_embeddings else 2)
        positions = self.max_position_embeddings if self.pos_encoding == "learned" else 0
        return (tables + positions) * self.hidden_size

    def _num_matmul_per_layer(self) -> int:
        attention = 2 * (self.num_attention_heads + self.num_key_value_heads) * self.head_dim * self.hidden_size
        matrices = 3 if self.activation == "swiglu" else 2
        return attention + matrices * self.hidden_size * self.intermediate_size

    def _num_norm(self) -> int:
        return self.hidden_size * (2 if self.norm == "layernorm" else 1)

    def _num_attention_vectors(self) -> int:
        qkv = (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_dim
        return self.qkv_bias * qkv + self.o_bias * self.hidden_size + self.qk_norm * 2 * self.head_dim

    def _num_per_layer(self) -> int:
        return self._num_matmul_per_layer() + self._num_attention_vectors() + 2 * self._num_norm()

    def _num_final_norm(self) -> int:
        return self._num_norm() if self.norm_placement == "pre" else 0

    def flops_per_token(self, context_length: int, *, backward: bool = True) -> int:
        """Floating-point operations of one token at `context_length` attended positions.

        Two per multiply-add of every matrix product, the output projection included, plus attention without a
        discount for causality; the backward pass costs twice the forward (Chowdhery et al. 2022, appendix B).
        """
        matmul = self.num_hidden_layers * self._num_matmul_per_layer() + self.vocab_size * self.hidden_size
        attention = 2 * self.num_hidden_layers * self.num_attention_heads * self.head_dim * context_length
        return 2 * (matmul + attention) * (3 if backward else 1)

    def kv_bytes_per_token(self, bytes_per_element: int = 2) -> int:
        """Bytes of key/value cache that one position takes over all layers."""
        return 2 * self.num_hidden_layers * self.num_key_value_heads * self.head_dim * bytes_per_element


UNTRAINED_FIELDS: Final = ("qkv_bias", "o_bias", "qk_norm", "rope_scaling")
"""Fields that only models of others have; their defaults are what every model trained here is."""


def attention_kind(num_attention_heads: int, num_key_value_heads: int) -> Attention:
    """Name of a head grouping."""
    if num_key_value_heads == num_attention_heads:
        return "mha"
    return "mqa" if num_key_value_heads == 1 else "gqa"


def default_kv_heads(num_attention_heads: int, attention: Attention) -> int:
    """Key/value heads of an attention kind: for gqa the largest group of at most four that stays gqa.

    Raises:
        ConfigError: no grouping of that many heads is gqa; no such number of heads or kind.
    """
    _check_size("num_attention_heads", num_attention_heads)
    _check_axis("attention", attention)
    if attention == "mha":
        return num_attention_heads
    if attention == "mqa":
        return 1
    for group in range(_DEFAULT_GROUP, 1, -1):
        if num_attention_heads % group == 0 and num_attention_heads // group > 1:
            return num_attention_heads // group
    raise ConfigError(
        f"attention='gqa' with num_attention_heads={num_attention_heads} would collapse: one key/value head is mqa, "
        f"{num_attention_heads} are mha, and no group of 2 to {_DEFAULT_GROUP} lies between; change the number of "
        "heads or give num_key_value_heads"
    )


def default_intermediate_size(hidden_size: int, activation: Activation) -> int:
    """4 D for GELU; 2/3 of that, rounded up to a multiple of 64, for SwiGLU's three matrices (Shazeer 2020).

    Raises:
        ConfigError: no such size or activation.
    """
    _check_size("hidden_size", hidden_size)
    _check_axis("activation", activation)
    if activation == "gelu":
        return 4 * hidden_size
    return -(-8 * hidden_size // (3 * _HIDDEN_MULTIPLE)) * _HIDDEN_MULTIPLE  # in integers, rounded up


def _check_size(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a positive integer, not {value!r}")


def _check_number(name: str, value: Any) -> float:
    # Bounded by comparison, because an integer may be too large for math.isfinite.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= sys.float_info.max:
        raise ConfigError(f"{name} must be a positive finite number, not {value!r}")
    return value


def _check_axis(axis: str, value: Any) -> None:
    if value not in AXES[axis]:
        raise ConfigError(f"{axis} must be one of {', '.join(AXES[axis])}, not {value!r}")


def _linear_shapes(name: str, shape: tuple[int, int], bias: bool) -> dict[str, tuple[int, ...]]:
    return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})


def _known(values: Mapping[str, Any], cls: type) -> dict[str, Any]:
    allowed = [f.name for f in dataclasses.fields(cls)]
    unknown = [key for key in values if key not in allowed]
    if unknown:
        raise ConfigError(f"unknown key{'s' * (len(unknown) > 1)} {', '.join(unknown)}; allowed: {', '.join(allowed)}")
    return dict(values)


PRESETS: Final[Mapping[str, ModelConfig]] = {
    "nano": ModelConfig.build(
        hidden_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=2048,
        max_position_embeddings=256,
    ),
    "30m": ModelConfig.build(hidden_size=384, num_hidden_layers=6, num_attention_heads=6),
    "120m": ModelConfig.build(hidden_size=768, num_hidden_layers=12, num_attention_heads=12),
    "350m": ModelConfig.build(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16),
}
"""Named sizes. The three larger ones take the GPT-2 vocabulary padded to a multiple of 64."""


def preset(name: str) -> ModelConfig:
    """A preset by name. Raises ConfigError naming those that exist."""
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}; there are {', '.join(PRESETS)}")
    return PRESETS[name]
