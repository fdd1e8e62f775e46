"""The tensors of an artifact: model.safetensors or its shards, held against what the configuration says they are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from crucible.config import ModelConfig
from crucible.engine.artifact import declares_int8, read_json
from crucible.engine.quant import Int8Weight, QuantError, Weight, chunk_size, dense, is_matrix, num_chunks
from crucible.engine.safetensors_file import WEIGHT_DTYPES, ArtifactError, SafetensorsFile, shown

SCALES: Final = ".scales"
"""What the name of a tensor of scales adds to that of the int8 tensor it belongs to."""

WEIGHTS_NAME: Final = "model.safetensors"
INDEX_NAME: Final = "model.safetensors.index.json"

_INV_FREQ: Final = re.compile(r"model\.layers\.(0|[1-9][0-9]{0,5})\.self_attn\.rotary_emb\.inv_freq")
_SHARD_NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*\.safetensors")
_EMBEDDING: Final = "model.embed_tokens.weight"
_HEAD: Final = "lm_head.weight"


def load_weights(folder: Path, config: ModelConfig, *, check_finite: bool = True) -> dict[str, NDArray[np.float32]]:
    """Every tensor of an artifact as float32, in the order of `config.tensor_shapes()`.

    An F32 tensor is a read-only view of the mapped file where its bytes are aligned; F16, BF16 and int8 are widened,
    the first two exactly and the last with one rounding of value * scale. `check_finite` reads every value once.

    Raises:
        ArtifactError: as `load_stored_weights`.
    """
    stored = load_stored_weights(folder, config, check_finite=check_finite)
    return {name: dense(weight) for name, weight in stored.items()}


def load_stored_weights(folder: Path, config: ModelConfig, *, check_finite: bool = True) -> dict[str, Weight]:
    """As `load_weights`, but a matrix that the artifact holds in int8 stays so: values are views of the mapped file.

    Raises:
        ArtifactError: as `open_weights`; also the first tensor that holds a NaN, an infinity, or as int8 what
            `Int8Weight.check` refuses.
    """
    weights: dict[str, Weight] = {}
    files = open_weights(folder, config)
    for name in config.tensor_shapes():
        file = files[name]
        if name + SCALES in files:
            weights[name] = _int8_weight(name, files, config, check_finite)
            continue
        weight = np.require(file.array(name), np.float32, ["C", "ALIGNED"])
        # A NaN anywhere makes both extremes NaN, so no array of flags is needed.
        if check_finite and not (np.isfinite(weight.min()) and np.isfinite(weight.max())):
            raise ArtifactError(f"{file.path}: tensor {name!r} holds a value that is not finite")
        weights[name] = weight
    return weights


def open_weights(folder: Path, config: ModelConfig) -> dict[str, SafetensorsFile]:
    """The file that holds each tensor of `stored_tensors`, in that order, after every check but of values.

    Two kinds of tensor that `transformers` itself ignores may be there too: a tied lm_head.weight, if it equals the
    embedding byte for byte, and the rotary_emb.inv_freq buffers of old Llama files, which rope_theta determines.

    Raises:
        ArtifactError: a file is missing or malformed, the index and the shards disagree, or a tensor is missing,
            unexpected, mis-shaped or not of its dtype; config.json decides whether matrices are int8. The message
            names the file and the tensors.
    """
    folder = Path(folder)
    files = open_files(folder)
    # Before tensor_shapes(), whose length a hostile config could put in the billions.
    if config.num_hidden_layers > len(files):
        raise ArtifactError(f"{folder}: {len(files)} tensors cannot fill num_hidden_layers={config.num_hidden_layers}")
    tensors = stored_tensors(config, int8=declares_int8(folder))
    missing = [name for name in tensors if name not in files]
    if missing:
        raise ArtifactError(f"{folder}: missing tensors: {_listed(missing)}")
    unexpected = [name for name in files if name not in tensors and not _is_redundant(name, files, config)]
    if unexpected:
        raise ArtifactError(f"{folder}: unexpected tensors: {_listed(unexpected)}")
    for name, (shape, dtypes) in tensors.items():
        info, where = files[name].tensors[name], f"{files[name].path}: tensor {name!r}"
        if info.shape != shape:
            raise ArtifactError(f"{where}: shape must be {list(shape)}, not {list(info.shape)}")
        if info.dtype not in dtypes:
            allowed = f"one of {', '.join(dtypes)}" if len(dtypes) > 1 else dtypes[0]
            raise ArtifactError(f"{where}: dtype must be {allowed}, not {info.dtype}")
    return {name: files[name] for name in tensors}


def stored_tensors(config: ModelConfig, *, int8: bool) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Shape and allowed dtypes of every tensor that an artifact's files hold, in order.

    With `int8` each matrix is I8 and followed by its scales, F32 [N, C], under its name and `SCALES`.
    """
    tensors: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {}
    for name, shape in config.tensor_shapes().items():
        if int8 and is_matrix(name):
            tensors[name] = shape, ("I8",)
            tensors[name + SCALES] = (shape[0], num_chunks(shape[1], chunk_size(config, name))), ("F32",)
        else:
            tensors[name] = shape, WEIGHT_DTYPES
    return tensors


def _int8_weight(name: str, files: Mapping[str, SafetensorsFile], config: ModelConfig, check: bool) -> Int8Weight:
    values, file = np.require(files[name].array(name), np.int8, ["C"]), files[name + SCALES]
    scales = np.require(file.array(name + SCALES), np.float32, ["C", "ALIGNED"])
    weight = Int8Weight(values, scales, chunk_size(config, name))
    try:
        if check:
            weight.check()
    except QuantError as error:
        raise ArtifactError(f"{files[name].path}: tensor {name!r}: {error}") from None
    return weight


def open_files(folder: Path) -> dict[str, SafetensorsFile]:
    """The file of every tensor stored in a folder, by tensor name: of model.safetensors, or of the shards of its index.

    Raises:
        ArtifactError: there are neither or both, or as for `SafetensorsFile`; with an index also when it names a file
            outside the folder or one that is missing, or does not map exactly the tensors of its files.
    """
    whole, index = folder / WEIGHTS_NAME, folder / INDEX_NAME
    if not folder.is_dir():
        raise ArtifactError(f"{folder}: no such folder")
    if whole.exists() and index.exists():
        raise ArtifactError(f"{folder}: holds both {WEIGHTS_NAME} and {INDEX_NAME}; which one counts is not guessed")
    if not index.exists():
        if not whole.exists():
            raise ArtifactError(f"{folder}: holds neither {WEIGHTS_NAME} nor {INDEX_NAME}; no other format is read")
        file = SafetensorsFile(whole)
        return dict.fromkeys(file.tensors, file)
    weight_map = _read_index(index)
    shards = {name: SafetensorsFile(folder / name) for name in dict.fromkeys(weight_map.values())}
    for name, shard in weight_map.items():
        if name not in shards[shard].tensors:
            raise ArtifactError(f"{index}: weight_map: {shard} holds no tensor {shown(name)}")
    for shard, file in shards.items():
        unmapped = [name for name in file.tensors if weight_map.get(name) != shard]
        if unmapped:
            raise ArtifactError(f"{index}: weight_map lacks tensors of {shard}: {_listed(unmapped)}")
    return {name: shards[shard] for name, shard in weight_map.items()}


def _read_index(path: Path) -> dict[str, str]:
    weight_map: Any = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ArtifactError(f"{path}: weight_map must be an object that maps tensors to files")
    for name, shard in weight_map.items():
        if not (isinstance(shard, str) and _SHARD_NAME.fullmatch(shard)):
            raise ArtifactError(
                f"{path}: weight_map: {shown(name)} must map to a plain .safetensors file name, not {shown(shard)}"
            )
    return weight_map


def _is_redundant(name: str, files: Mapping[str, SafetensorsFile], config: ModelConfig) -> bool:
    """Whether a tensor beyond the expected ones says nothing that the others do not."""
    info = files[name].tensors[name]
    if name == _HEAD:  # only ever beyond the expected ones when tied
        embedding = files[_EMBEDDING].tensors[_EMBEDDING]
        if (info.dtype, info.shape) == (embedding.dtype, embedding.shape) and np.array_equal(
            files[name].raw(name), files[_EMBEDDING].raw(_EMBEDDING)
        ):
            return True
        raise ArtifactError(f"{files[name].path}: tensor {name!r} differs from {_EMBEDDING!r}, to which it is tied")
    layer = _INV_FREQ.fullmatch(name)
    return (
        layer is not None
        and int(layer[1]) < config.num_hidden_layers
        and config.pos_encoding == "rope"
        and info.shape == (config.head_dim // 2,)
    )


def _listed(names: Iterable[str], limit: int = 5) -> str:
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(shown(name) for name in names[:limit]) + more
