"""A model written as a .gguf file, for llama.cpp and whatever is built on it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from crucible.config import AXES, ModelConfig
from crucible.engine.quant import Weight, dense
from crucible.engine.rope import frequencies
from crucible.engine.safetensors_file import ArtifactError, shown
from crucible.errors import install
from crucible.files import partial_path, sync_file, sync_folder
from crucible.gguf.file import TENSOR_TYPES, TensorType
from crucible.gguf.model import END_KEYS, LLAMA3_SCALING, SIZES
from crucible.gguf.names import ROPE_FREQS, Architecture, gguf_name, interleave, permuted_heads
from crucible.gguf.tokenizer import CONTROL, NORMAL, PRE_TOKENIZERS, UNUSED, USER_DEFINED, PreTokenizer
from crucible.models import LoadedModel
from crucible.tokenizer.spec import Spec

if TYPE_CHECKING:
    from gguf import GGUFWriter

GgufType = Literal["f32", "f16", "q8_0"]

_FILE_TYPES: Final[Mapping[GgufType, int]] = {"f32": 0, "f16": 1, "q8_0": 7}
"""general.file_type, by which tools tell files apart."""

_TYPES: Final[Mapping[str, TensorType]] = {kind.name: kind for kind in TENSOR_TYPES.values()}
_MAX_F16: Final = 65504.0


def export_gguf(model: LoadedModel, out: Path, *, dtype: GgufType = "f32", force: bool = False) -> Path:
    """Writes a model with its tokenizer and chat template as a .gguf file, which appears whole or not at all.

    Args:
        model: as `crucible.models.resolve` gives it. An int8 artifact is written as the numbers that it stands for.
        out: the file to make; with `force` one that is there is replaced.
        dtype: how matrices are stored. Vectors stay f32. Q8_0 holds 32 weights of a row in 34 bytes; a matrix whose
            rows are no multiple of 32 is stored as f16 then, as llama.cpp's own tool does.

    Raises:
        ArtifactError: the format or llama.cpp has no such model, tokenizer or dtype, a weight is out of the dtype's
            range, `out` exists or cannot be written, or the package `gguf` is not installed.
    """
    if dtype not in get_args(GgufType):
        raise ArtifactError(f"dtype must be one of {', '.join(get_args(GgufType))}, not {dtype!r}")
    out = Path(out)
    if out.suffix != ".gguf":
        raise ArtifactError(f"{out}: a GGUF file's name must end in .gguf")
    if out.exists() and not (force and out.is_file()):
        raise ArtifactError(f"{out} exists; choose another name or replace it with force (--force)")
    try:
        import gguf
    except ModuleNotFoundError:
        raise ArtifactError(
            f"writing .gguf needs the package gguf, which is not installed: {install('gguf')}"
        ) from None
    architecture = architecture_of(model.config)
    tensors = _tensors(model, architecture)
    partial = partial_path(out)
    writer = gguf.GGUFWriter(None, architecture)
    try:
        _add_model(writer, model.config, architecture)
        _add_tokenizer(writer, model)
        writer.add_type("model")
        writer.add_name(model.name)
        writer.add_file_type(_FILE_TYPES[dtype])
        writer.add_quantization_version(2)
        out.parent.mkdir(parents=True, exist_ok=True)
        _write(writer, partial, tensors, dtype)
        sync_file(partial)
        partial.replace(out)
        sync_folder(out.parent)
    except OSError as error:
        raise ArtifactError(f"{out} cannot be written: {error}") from error
    finally:
        writer.close()
        partial.unlink(missing_ok=True)
    return out


def architecture_of(config: ModelConfig) -> Architecture:
    """The architecture of llama.cpp that computes this. Raises ArtifactError where there is none."""
    if not config.has_llama_axes:
        found = ", ".join(f"{axis} {getattr(config, axis)}" for axis in AXES)
        raise ArtifactError(f"only rope, swiglu, rmsnorm and pre can be written as GGUF, not {found}")
    if config.qk_norm:
        if config.qkv_bias or config.o_bias:
            raise ArtifactError("llama.cpp has no architecture with both qk_norm and biases")
        return "qwen3"
    return "qwen2" if config.qkv_bias and not config.o_bias else "llama"


# ---- tensors ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Tensor:
    """A tensor as it is held here, and how many heads' rows llama.cpp has in its own order."""

    weight: Weight
    heads: int | None

    def rows(self) -> npt.NDArray[np.float32]:
        weight = dense(self.weight)
        return weight if self.heads is None else interleave(weight, self.heads)


def _tensors(model: LoadedModel, architecture: Architecture) -> dict[str, _Tensor]:
    """Every tensor of the file, by its name there."""
    config = model.config
    tensors = {
        gguf_name(name): _Tensor(weight, permuted_heads(name, config, architecture))
        for name, weight in model.weights.items()
    }
    if (scaling := config.rope_scaling) is not None and scaling.kind == "llama3":
        given = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
        if given != LLAMA3_SCALING:
            raise ArtifactError(f"rope_scaling llama3 can be written with {LLAMA3_SCALING} only, not {given}")
        divisors = frequencies(config.vary(rope_scaling=None)) / frequencies(config)
        tensors[ROPE_FREQS] = _Tensor(divisors.astype(np.float32), None)
    return tensors


def _write(writer: GGUFWriter, path: Path, tensors: Mapping[str, _Tensor], dtype: GgufType) -> None:
    """The file, one tensor after the other, so that no second copy of the model is held."""
    from gguf import GGMLQuantizationType, quants

    types = {name: _stored_type(tensor.weight.shape, dtype) for name, tensor in tensors.items()}
    for name, kind in types.items():
        shape = tensors[name].weight.shape
        nbytes = math.prod(shape) // kind.block * kind.nbytes
        writer.add_tensor_info(name, shape, np.dtype(np.float32), nbytes, raw_dtype=GGMLQuantizationType[kind.name])
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, kind in types.items():
        rows = tensors[name].rows()
        largest = max(abs(float(rows.min())), abs(float(rows.max())))
        if kind.name != "F32" and not largest <= _MAX_F16:
            raise ArtifactError(f"tensor {name}: {largest:.6g} is out of range for {kind.name}; choose f32")
        writer.write_tensor_data(np.ascontiguousarray(quants.quantize(rows, GGMLQuantizationType[kind.name])))


def _stored_type(shape: tuple[int, ...], dtype: GgufType) -> TensorType:
    if len(shape) == 1:
        return _TYPES["F32"]
    kind = _TYPES[dtype.upper()]
    return kind if shape[-1] % kind.block == 0 else _TYPES["F16"]


# ---- metadata ---------------------------------------------------------------------------------------------------


def _add_model(writer: GGUFWriter, config: ModelConfig, architecture: Architecture) -> None:
    sizes = {key: getattr(config, field) for field, key in SIZES.items()} | {
        "vocab_size": config.vocab_size,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.dimension_count": config.head_dim,
    }
    for key, size in sizes.items():
        writer.add_uint32(f"{architecture}.{key}", size)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", config.norm_eps)
    writer.add_float32(f"{architecture}.rope.freq_base", config.rope_theta)
    if (scaling := config.rope_scaling) is not None and scaling.kind == "linear":
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_float32(f"{architecture}.rope.scaling.factor", scaling.factor)


def _add_tokenizer(writer: GGUFWriter, model: LoadedModel) -> None:
    tokenizer, generation = model.tokenizer, model.generation
    spec = Spec.from_json(tokenizer.to_json())
    rule = _rule(spec)
    tokens, types = _pieces(spec, model.config.vocab_size)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in spec.document["model"]["merges"]]
    writer.add_string("tokenizer.ggml.model", "gpt2")
    writer.add_string("tokenizer.ggml.pre", rule.names[0])
    writer.add_array("tokenizer.ggml.tokens", tokens)
    writer.add_array("tokenizer.ggml.token_type", types)
    writer.add_array("tokenizer.ggml.merges", merges)
    if model.prefix_ids not in ((), (generation.bos_token_id,)):
        raise ArtifactError(f"GGUF can put its one beginning-of-text id before a text, not {list(model.prefix_ids)}")
    writer.add_bool("tokenizer.ggml.add_bos_token", bool(model.prefix_ids))
    ends = generation.eos_token_ids
    if len(ends) > len(END_KEYS):
        raise ArtifactError(f"GGUF has room for {len(END_KEYS)} ids that end a reply, not for {list(ends)}")
    ids: dict[str, int | None] = dict(zip(END_KEYS, ends, strict=False))
    ids |= {"bos_token_id": generation.bos_token_id, "padding_token_id": generation.pad_token_id}
    ids["unknown_token_id"] = tokenizer.control_tokens.get(model.special_tokens.get("unk_token", ""))
    for key, token_id in ids.items():
        if token_id is not None:
            writer.add_uint32(f"tokenizer.ggml.{key}", token_id)
    writer.add_string("tokenizer.chat_template", model.chat_template or "")  # nothing is written for none


def _rule(spec: Spec) -> PreTokenizer:
    """The rule of llama.cpp that cuts text as a tokenizer does. Raises ArtifactError where there is none."""
    document = spec.document
    if spec.model_type == "BPE" and (document.get("decoder") or {}).get("type") == "ByteLevel":
        ours = (
            _without_offsets(document.get("pre_tokenizer")),
            document.get("normalizer"),
            bool(document["model"].get("ignore_merges")),
        )
        for rule in PRE_TOKENIZERS:
            if ours == (_without_offsets(rule.pre_tokenizer), rule.normalizer, rule.ignore_merges):
                return rule
    known = ", ".join(rule.names[0] for rule in PRE_TOKENIZERS)
    raise ArtifactError(
        f"the tokenizer cuts text in a way that has no name here; GGUF can be written with those called {known} there"
    )


def _without_offsets(step: Any) -> Any:
    """A step without `trim_offsets`, which says where tokens stand in the text and changes no id."""
    text = json.dumps(step, sort_keys=True).replace(', "trim_offsets": true', "").replace(', "trim_offsets": false', "")
    return json.loads(text)


def _pieces(spec: Spec, vocab_size: int) -> tuple[list[str], list[int]]:
    """Text and type of every id of the model; ids that the tokenizer does not have are padding."""
    tokens = [f"[PAD{token_id}]" for token_id in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token_id, piece in spec.pieces.items():
        tokens[token_id], types[token_id] = piece, NORMAL
    for token in spec.added.values():
        if token.single_word or token.lstrip or token.rstrip or token.normalized:
            raise ArtifactError(
                f"added token {shown(token.content)} takes white space, whole words or normalised text: "
                "GGUF cannot say so"
            )
        tokens[token.id], types[token.id] = token.content, CONTROL if token.special else USER_DEFINED
    return tokens, types
