"""The configuration files of an artifact, read without torch: config.json and generation_config.json.

config.json has the names of Hugging Face's Llama configuration. `model_type` "llama", "qwen2" and "qwen3" are models
that `transformers` can load; "crucible" has the same keys and the five architecture axes. Nothing about the computation
is guessed: a key that it needs and that is missing is an error, and so is a key whose meaning is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from crucible.config import AXES, MAX_VOCAB_SIZE, ConfigError, ModelConfig, RopeScaling, attention_kind
from crucible.engine.quant import CHUNK
from crucible.engine.safetensors_file import ArtifactError, parse_json_object, shown

__all__ = [
    "CONFIG_NAME",
    "GENERATION_NAME",
    "PROVENANCE_NAME",
    "TOKENIZER_CONFIG_NAME",
    "TOKENIZER_NAME",
    "ArtifactError",
    "Dtype",
    "Generation",
    "config_from_json",
    "config_to_json",
    "declares_int8",
    "generation_to_json",
    "model_type_of",
    "read_config",
    "read_generation",
    "read_json",
]

CONFIG_NAME: Final = "config.json"
GENERATION_NAME: Final = "generation_config.json"
TOKENIZER_NAME: Final = "tokenizer.json"
TOKENIZER_CONFIG_NAME: Final = "tokenizer_config.json"
PROVENANCE_NAME: Final = "crucible.json"

Dtype = Literal["f32", "f16", "bf16"]
"""How the tensors of an artifact are stored."""

_TORCH_DTYPES: Final[Mapping[Dtype, str]] = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}

_SIZES: Final = (
    "vocab_size",
    "max_position_embeddings",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
_REQUIRED: Final = (*_SIZES, "hidden_act", "rms_norm_eps", "tie_word_embeddings")
_ROPE_BLOCKS: Final = ("rope_parameters", "rope_scaling")
_SPECIAL_IDS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")
_DERIVABLE: Final = ("head_dim", "rope_theta", *_ROPE_BLOCKS)

_HIDDEN_ACTS: Final = {"swiglu": "silu", "gelu": "gelu_pytorch_tanh"}
"""hidden_act by activation: a SwiGLU's gate is SiLU (Shazeer 2020), GELU is the tanh form."""

_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "crucible": "CrucibleForCausalLM",
}

_OPTIONAL: Final[Mapping[str, tuple[str, ...]]] = {
    "llama": ("attention_bias",),
    "qwen2": ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    "qwen3": ("attention_bias", "use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    "crucible": ("qkv_bias", "o_bias", "qk_norm"),
}
"""Keys that only some types have; absent and null mean no bias, no norm of heads and no window."""

_SCALING_KEYS: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""Keys of a block of rope parameters, by its type. The other types of `transformers` depend on the current length
("dynamic", "longrope") or scale attention too ("yarn"), and are refused."""

_NEUTRAL: Final[Mapping[str, Any]] = {
    "mlp_bias": False,
    "use_mrope": False,
    "attention_dropout": 0,
    "rope_interleaved": False,
    "partial_rotary_factor": 1,
}
"""Keys that would change the computation, with the one value that does not; null and absent mean the same."""

_QUANTIZATION: Final = "quantization_config"
INT8_CONFIG: Final[Mapping[str, Any]] = {"quant_method": "crucible", "format": "int8", "chunk_size": CHUNK}
"""The one value of quantization_config that is read, and only in a configuration of model_type "crucible": a Llama's is
loaded by `transformers` with a warning about the unknown method, its integers taken for weights."""

_INERT: Final = frozenset(
    {
        "_attn_implementation_autoset",
        "_name_or_path",
        "dtype",
        "initializer_range",
        "is_llama_config",
        "pretraining_tp",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "use_cache",
    }
)
"""Keys that never change the computation: notes about training, storage and tools."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The special ids of generation_config.json. Its sampling settings are never taken over."""

    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ArtifactError naming the file: missing, unreadable, or not a JSON object."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise ArtifactError(f"{path}: no such file") from None
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from None
    return parse_json_object(text, path)


def read_config(folder: Path) -> ModelConfig:
    """The model that an artifact folder's config.json describes.

    Raises:
        ArtifactError: the file is missing, or as for `config_from_json`.
    """
    path = Path(folder) / CONFIG_NAME
    return config_from_json(read_json(path), path)


def declares_int8(folder: Path) -> bool:
    """Whether a folder's config.json says that its matrices are int8; false where there is no config.json.

    Raises:
        ArtifactError: it says that they are anything else that is not plain numbers.
    """
    path = Path(folder) / CONFIG_NAME
    return path.exists() and _is_int8(read_json(path), path)


def config_from_json(values: Mapping[str, Any], source: Path | str) -> ModelConfig:
    """The model that the keys of a config.json describe; `source` names the file in messages.

    Raises:
        ArtifactError: a needed key is missing, a key is unknown, or a value is one that this project cannot compute;
            the message names the key.
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in _ARCHITECTURES:
        raise ArtifactError(f"{source}: model_type must be one of {', '.join(_ARCHITECTURES)}, not {shown(model_type)}")
    axes = tuple(AXES) if model_type == "crucible" else ()
    _check_keys(values, axes, _OPTIONAL[model_type], source)
    _check_neutral(values, model_type, source)
    _is_int8(values, source)
    sizes = {key: _size(values, key, source) for key in _SIZES}
    _check_windows(values, sizes["num_hidden_layers"], source)
    rope_theta, rope_scaling = _rope(values, source)
    fields: dict[str, Any] = {
        **sizes,
        "head_dim": _head_dim(values, sizes, source),
        "tie_word_embeddings": values["tie_word_embeddings"],
        "rope_theta": rope_theta,
        "rope_scaling": rope_scaling,
        "norm_eps": _number(values["rms_norm_eps"], "rms_norm_eps", source),
        **_attention_extras(values, model_type, source),
    }
    if axes:
        fields |= {axis: values[axis] for axis in axes}
    else:
        fields["attention"] = attention_kind(sizes["num_attention_heads"], sizes["num_key_value_heads"])
    try:
        config = ModelConfig(**fields)
    except ConfigError as error:
        raise ArtifactError(f"{source}: {error}") from None
    expected = _HIDDEN_ACTS[config.activation]
    if values["hidden_act"] != expected:
        raise ArtifactError(
            f"{source}: hidden_act must be {expected!r} for {config.activation}, not {shown(values['hidden_act'])}"
        )
    return config


def config_to_json(
    config: ModelConfig, *, dtype: Dtype | Literal["int8"], bos_token_id: int | None, eos_token_id: int | None
) -> dict[str, Any]:
    """The config.json of an artifact: the inverse of `config_from_json`.

    rope_theta stands at the top level, where every version of `transformers` reads it. Only the name of a head
    grouping can get lost: one head is mha and mqa at once, and a Llama configuration has no key for the name.
    """
    model_type = "crucible" if dtype == "int8" else model_type_of(config)
    values: dict[str, Any] = {"architectures": [_ARCHITECTURES[model_type]], "model_type": model_type}
    if model_type == "crucible":
        values |= {axis: getattr(config, axis) for axis in AXES}
        values |= {key: True for key in _OPTIONAL["crucible"] if getattr(config, key)}
    elif model_type != "qwen2":
        values["attention_bias"] = config.o_bias
    values |= {key: getattr(config, key) for key in _SIZES}
    values |= {
        "head_dim": config.head_dim,
        "hidden_act": _HIDDEN_ACTS[config.activation],
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "mlp_bias": False,
        "torch_dtype": "float32" if dtype == "int8" else _TORCH_DTYPES[dtype],
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
    }
    if (scaling := config.rope_scaling) is not None:
        block = {key: getattr(scaling, key) for key in _SCALING_KEYS[scaling.kind]}
        values["rope_scaling"] = {"rope_type": scaling.kind, **block}
    return values | ({_QUANTIZATION: dict(INT8_CONFIG)} if dtype == "int8" else {})


def model_type_of(config: ModelConfig) -> str:
    """The type of `transformers` that computes this, or "crucible"."""
    if config.is_llama:
        return "llama"
    if config.has_llama_axes and config.qk_norm and config.qkv_bias == config.o_bias:
        return "qwen3"
    if config.has_llama_axes and not config.qk_norm and config.qkv_bias:
        return "qwen2"
    return "crucible"


def read_generation(folder: Path) -> Generation:
    """Special ids of an artifact: from generation_config.json, and where that lacks a key from config.json.

    Raises:
        ArtifactError: config.json is missing, a file is malformed, or an id is not one; null means none.
    """
    found: dict[str, tuple[Any, Path]] = {}
    paths = [Path(folder) / CONFIG_NAME, Path(folder) / GENERATION_NAME]
    for path in paths[: 1 + paths[1].exists()]:
        values = read_json(path)
        found |= {key: (values[key], path) for key in _SPECIAL_IDS if key in values}

    def ids(key: str) -> tuple[int, ...]:
        value, path = found.get(key, (None, None))
        if value is None:
            return ()
        listed = value if isinstance(value, list) and key == "eos_token_id" else [value]
        if not all(type(item) is int and 0 <= item < MAX_VOCAB_SIZE for item in listed):
            raise ArtifactError(f"{path}: {key} must be a token id or null, not {shown(value)}")
        return tuple(listed)

    bos, pad = ids("bos_token_id"), ids("pad_token_id")
    return Generation(bos[0] if bos else None, ids("eos_token_id"), pad[0] if pad else None)


def generation_to_json(generation: Generation) -> dict[str, Any]:
    """The generation_config.json that `read_generation` reads back."""
    eos = generation.eos_token_ids
    return {
        "bos_token_id": generation.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        "pad_token_id": generation.pad_token_id,
    }


# ---- one check per kind of key --------------------------------------------------------------------------------


def _check_keys(
    values: Mapping[str, Any], axes: tuple[str, ...], optional: tuple[str, ...], source: Path | str
) -> None:
    known = {"model_type", "architectures", *_REQUIRED, *_DERIVABLE, *_NEUTRAL, *_INERT, *_SPECIAL_IDS}
    known |= {_QUANTIZATION, *axes, *optional}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ArtifactError(f"{source}: unknown key{'s' * (len(unknown) > 1)}: {', '.join(map(shown, unknown))}")
    missing = [key for key in (*_REQUIRED, *axes) if key not in values]
    if missing:
        raise ArtifactError(f"{source}: missing key{'s' * (len(missing) > 1)}: {', '.join(missing)}")


def _check_neutral(values: Mapping[str, Any], model_type: str, source: Path | str) -> None:
    for key, neutral in _NEUTRAL.items():
        if values.get(key) is not None and values[key] != neutral:
            raise ArtifactError(f"{source}: {key}={shown(values[key])} is not supported; only {neutral!r} is")
    expected = [_ARCHITECTURES[model_type]]
    if values.get("architectures") is not None and values["architectures"] != expected:
        raise ArtifactError(f"{source}: architectures must be {expected!r}, not {shown(values['architectures'])}")


def _is_int8(values: Mapping[str, Any], source: Path | str) -> bool:
    found = values.get(_QUANTIZATION)
    if found is None:
        return False
    if found != INT8_CONFIG:
        raise ArtifactError(f"{source}: {_QUANTIZATION} must be absent or {dict(INT8_CONFIG)}, not {shown(found)}")
    if values.get("model_type") != "crucible":
        raise ArtifactError(
            f"{source}: with {_QUANTIZATION} model_type must be crucible, so that no other tool loads it"
        )
    return True


def _check_windows(values: Mapping[str, Any], num_layers: int, source: Path | str) -> None:
    """Every layer attends to all positions before it: Qwen's files mention windows that they do not use."""
    kinds = values.get("layer_types")
    if kinds is not None and kinds != ["full_attention"] * num_layers:
        raise ArtifactError(f"{source}: layer_types={shown(kinds)} is not supported; only full_attention layers are")
    if not _flag(values, "use_sliding_window", source) or values.get("sliding_window") is None:
        return
    first = values.get("max_window_layers")
    if type(first) is not int or first < num_layers:
        raise ArtifactError(
            f"{source}: sliding_window={shown(values['sliding_window'])} from layer {shown(first)} of {num_layers} on "
            "(max_window_layers) is not supported; only attention to all positions is"
        )


def _attention_extras(values: Mapping[str, Any], model_type: str, source: Path | str) -> dict[str, bool]:
    """qkv_bias, o_bias and qk_norm: which of them a type has, or which key says so."""
    if model_type == "crucible":
        return {key: _flag(values, key, source) for key in _OPTIONAL["crucible"]}
    if model_type == "qwen2":
        return {"qkv_bias": True}
    bias = _flag(values, "attention_bias", source)
    return {"qkv_bias": bias, "o_bias": bias, "qk_norm": model_type == "qwen3"}


def _flag(values: Mapping[str, Any], key: str, source: Path | str) -> bool:
    value = values.get(key)
    if value is not None and not isinstance(value, bool):
        raise ArtifactError(f"{source}: {key} must be true, false or null, not {shown(value)}")
    return bool(value)


def _size(values: Mapping[str, Any], key: str, source: Path | str) -> int:
    value = values[key]
    if type(value) is not int or value < 1:
        raise ArtifactError(f"{source}: {key} must be a positive integer, not {shown(value)}")
    return value


def _head_dim(values: Mapping[str, Any], sizes: Mapping[str, int], source: Path | str) -> int:
    if values.get("head_dim") is not None:
        return _size(values, "head_dim", source)
    hidden_size, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    if hidden_size % heads:
        raise ArtifactError(
            f"{source}: missing key: head_dim; it cannot be derived, as hidden_size={hidden_size} is not a multiple of "
            f"num_attention_heads={heads}"
        )
    return hidden_size // heads


def _number(value: Any, key: str, source: Path | str) -> float:
    # Beyond 2**1023 an int has no float, and no size or base of this project comes near.
    if type(value) not in (int, float) or not 0 < value < 2.0**1023:
        raise ArtifactError(f"{source}: {key} must be a positive finite number, not {shown(value)}")
    return float(value)


def _rope(values: Mapping[str, Any], source: Path | str) -> tuple[float, RopeScaling | None]:
    """RoPE's base, from the top level (transformers 4) or a block of rope parameters (5), and the block's scaling.

    What is said twice must agree.
    """
    thetas = {"rope_theta": values["rope_theta"]} if values.get("rope_theta") is not None else {}
    scalings = {}
    for name in _ROPE_BLOCKS:
        block = values.get(name)
        if block is None:
            continue
        if not isinstance(block, dict):
            raise ArtifactError(f"{source}: {name} must be an object or null, not {shown(block)}")
        scalings[name] = _scaling(block, name, source)
        if "rope_theta" in block:
            thetas[f"{name}.rope_theta"] = block["rope_theta"]
    if not thetas:
        raise ArtifactError(f"{source}: missing key: rope_theta")
    theta, *others = {_number(value, key, source) for key, value in thetas.items()}
    if others:
        raise ArtifactError(f"{source}: {' and '.join(f'{key}={value}' for key, value in thetas.items())} disagree")
    if len(set(scalings.values())) > 1:
        raise ArtifactError(f"{source}: {' and '.join(scalings)} disagree")
    return theta, next(iter(scalings.values()), None)


def _scaling(block: Mapping[str, Any], name: str, source: Path | str) -> RopeScaling | None:
    kinds = {key: block[key] for key in ("rope_type", "type") if key in block} or {"rope_type": "default"}
    for key, kind in kinds.items():
        if not isinstance(kind, str) or kind not in _SCALING_KEYS:
            raise ArtifactError(
                f"{source}: {name}.{key}={shown(kind)} is not supported; only {', '.join(_SCALING_KEYS)} are"
            )
    kind, *others = set(kinds.values())
    if others:
        raise ArtifactError(f"{source}: {name}.rope_type={kinds['rope_type']} and type={kinds['type']} disagree")
    if block.get("partial_rotary_factor", 1) != 1:
        raise ArtifactError(f"{source}: {name}.partial_rotary_factor must be 1")
    keys = _SCALING_KEYS[kind]
    unknown = sorted(block.keys() - {"rope_theta", "rope_type", "type", "partial_rotary_factor", *keys})
    if unknown:
        raise ArtifactError(f"{source}: {name}: unknown keys: {', '.join(map(shown, unknown))}")
    missing = [key for key in keys if key not in block]
    if missing:
        raise ArtifactError(f"{source}: {name}: missing keys: {', '.join(missing)}")
    if kind == "default":
        return None
    fields = {key: block[key] for key in keys}
    fields |= {key: _number(block[key], f"{name}.{key}", source) for key in keys if key.endswith("factor")}
    try:
        return RopeScaling(kind=kind, **fields)
    except ConfigError as error:
        raise ArtifactError(f"{source}: {error}") from None
