"""A strict reader of one safetensors file: everything the header says is checked before a byte of data is used.

The format (https://huggingface.co/docs/safetensors, "Format"): 8 bytes, the little-endian length N of the header;
N bytes of UTF-8 JSON that map each tensor's name to its dtype, shape and data_offsets [begin, end), counted from the
end of the header; then the data, little-endian and row-major, tiled by the tensors without overlap or hole.

A file that passes here is also read by the reference library. That one lets a few things through (duplicate keys,
unknown keys of an entry, whitespace before the header, `null` metadata) which this reader refuses.
"""

from __future__ import annotations

import json
import math
import mmap
import reprlib
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from crucible.errors import CrucibleError

MAX_HEADER_BYTES: Final = 100_000_000
"""Length above which a header is refused unread; the reference library draws the same line."""

MAX_DIMS: Final = 32
"""Dimensions a tensor may have: as many as every supported numpy can index."""

ITEM_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E5M2": 1,
    "F8_E4M3": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
    "C64": 8,
}
"""Bytes per element of each dtype of the format that fills whole bytes."""

WEIGHT_DTYPES: Final = ("F32", "F16", "BF16")
"""The dtypes of weights that stand for themselves."""

READABLE_DTYPES: Final = (*WEIGHT_DTYPES, "I8")
"""The dtypes that can be read as arrays."""

_ENTRY_KEYS: Final = frozenset({"dtype", "shape", "data_offsets"})
_METADATA: Final = "__metadata__"

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 120
_repr.maxlist = MAX_DIMS


class ArtifactError(CrucibleError):
    """A model on disk that cannot be used: the message names the file and, where there is one, tensor or key."""


def shown(value: Any) -> str:
    """`repr`, bounded in length and depth: what a hostile file holds must not fill or break the message about it."""
    return _repr.repr(value)


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies and what it is. `offset` counts bytes from the start of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """One file, memory-mapped and checked when it is made.

    Attributes:
        path: the file.
        tensors: TensorInfo by name, in the order of the data.
        metadata: the header's free text map, empty where it has none.

    Raises:
        ArtifactError: the file is missing, not a regular file, or malformed in any way.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        tensors, self.metadata = parse_header(self._data, path)
        self.tensors: Mapping[str, TensorInfo] = tensors

    def raw(self, name: str) -> NDArray[np.uint8]:
        """The stored bytes of a tensor: a read-only view of the mapping, [nbytes] uint8.

        Raises:
            ArtifactError: the file holds no tensor of that name.
        """
        if name not in self.tensors:
            raise ArtifactError(f"{self.path}: holds no tensor {shown(name)}")
        info = self.tensors[name]
        return np.frombuffer(self._data, dtype=np.uint8, count=info.nbytes, offset=info.offset)

    def array(self, name: str) -> NDArray[np.float32] | NDArray[np.float16] | NDArray[np.int8]:
        """A tensor in its own shape: F32, F16 and I8 as read-only views of the mapping, BF16 widened to float32.

        A view is unaligned where the header's length is not a multiple of the element size.

        Raises:
            ArtifactError: no such tensor, or its dtype is none of `READABLE_DTYPES`.
        """
        raw = self.raw(name)
        info = self.tensors[name]
        if info.dtype == "F32":
            return raw.view("<f4").reshape(info.shape)
        if info.dtype == "F16":
            return raw.view("<f2").reshape(info.shape)
        if info.dtype == "I8":
            return raw.view(np.int8).reshape(info.shape)
        if info.dtype == "BF16":
            # A bfloat16 is the upper half of the float32 of the same value.
            bits = raw.view("<u2").astype(np.uint32) << np.uint32(16)
            return bits.view(np.float32).reshape(info.shape)
        allowed = ", ".join(READABLE_DTYPES)
        raise ArtifactError(f"{self.path}: tensor {shown(name)}: dtype {info.dtype} is not one of {allowed}")


def parse_header(data: bytes | mmap.mmap, source: Path | str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """Check a whole safetensors file given as bytes; `source` names it in messages.

    Returns:
        TensorInfo by name in the order of the data, and the metadata.

    Raises:
        ArtifactError: anything is not as the format has it.
    """
    size = len(data)
    if size < 8:
        raise ArtifactError(f"{source}: {size} bytes are too few for a safetensors file")
    length = int.from_bytes(data[:8], "little")
    if length > MAX_HEADER_BYTES:
        raise ArtifactError(f"{source}: header length {length} is over the limit of {MAX_HEADER_BYTES} bytes")
    if length > size - 8:
        raise ArtifactError(f"{source}: header length {length} runs past the end of the file ({size} bytes)")
    text = data[8 : 8 + length]
    if text[:1] != b"{":
        raise ArtifactError(f"{source}: the header does not begin with '{{'")
    header = parse_json_object(text, f"{source}: header")
    metadata = _check_metadata(header.pop(_METADATA, {}), source)
    entries = [_check_entry(name, entry, 8 + length, source) for name, entry in header.items()]
    entries.sort(key=lambda info: (info.offset, info.nbytes))
    _check_tiling(entries, 8 + length, size, source)
    return {info.name: info for info in entries}, metadata


def parse_json_object(text: bytes, source: Path | str) -> dict[str, Any]:
    """A JSON object of which nothing is dropped silently: duplicate keys, NaN and infinities are refused.

    Raises:
        ArtifactError: the text is not UTF-8, not JSON, or not an object; `source` names it.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ValueError(f"duplicate key {shown(key)}")
            found[key] = value
        return found

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ArtifactError(f"{source}: JSON nested too deeply") from None
    except ValueError as error:
        raise ArtifactError(f"{source}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ArtifactError(f"{source}: must be a JSON object, not {type(value).__name__}")
    return value


def map_file(path: Path) -> bytes | mmap.mmap:
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ArtifactError(f"{path}: not a regular file")
        if status.st_size == 0:
            return b""  # nothing can be mapped, and the header check says what is wrong
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ArtifactError(f"{path}: cannot be read: {error.strerror}") from None


def _check_metadata(metadata: Any, source: Path | str) -> dict[str, str]:
    if not isinstance(metadata, dict):
        raise ArtifactError(f"{source}: {_METADATA} must be an object, not {type(metadata).__name__}")
    for key, value in metadata.items():
        if not isinstance(value, str):
            raise ArtifactError(f"{source}: {_METADATA}: the value of {shown(key)} must be a string")
    return metadata


def _check_entry(name: str, entry: Any, data_start: int, source: Path | str) -> TensorInfo:
    where = f"{source}: tensor {shown(name)}"
    if not isinstance(entry, dict) or entry.keys() != _ENTRY_KEYS:
        raise ArtifactError(f"{where}: must be an object with exactly the keys dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise ArtifactError(f"{where}: dtype {shown(dtype)} is not one of {', '.join(ITEM_BYTES)}")
    if not _is_sizes(shape):
        raise ArtifactError(f"{where}: shape {shown(shape)} is not a list of non-negative integers")
    if len(shape) > MAX_DIMS:
        raise ArtifactError(f"{where}: {len(shape)} dimensions are more than {MAX_DIMS}")
    if not _is_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ArtifactError(f"{where}: data_offsets {shown(offsets)} is not [begin, end] with 0 <= begin <= end")
    # With a zero among them, the other sizes still have to be ones that an index can hold.
    if math.prod(size for size in shape if size) * ITEM_BYTES[dtype] >= 2**63:
        raise ArtifactError(f"{where}: shape {shown(shape)} overflows")
    begin, end = offsets
    nbytes = math.prod(shape) * ITEM_BYTES[dtype]
    if end - begin != nbytes:
        raise ArtifactError(f"{where}: {dtype} {shown(shape)} takes {nbytes} bytes, data_offsets span {end - begin}")
    return TensorInfo(name, dtype, tuple(shape), data_start + begin, nbytes)


def _check_tiling(entries: list[TensorInfo], data_start: int, size: int, source: Path | str) -> None:
    """The tensors, sorted by offset, cover the data from its first byte to its last, each byte once."""
    expected = data_start
    previous = "the header"
    for info in entries:
        where = f"{source}: tensor {shown(info.name)}"
        if info.offset + info.nbytes > size:
            raise ArtifactError(f"{where}: data_offsets run past the end of the file ({size} bytes)")
        if info.offset < expected:
            raise ArtifactError(f"{where}: overlaps {previous}")
        if info.offset > expected:
            raise ArtifactError(f"{where}: leaves a hole of {info.offset - expected} bytes after {previous}")
        expected = info.offset + info.nbytes
        previous = f"tensor {shown(info.name)}"
    if expected != size:
        raise ArtifactError(f"{source}: {size - expected} bytes after {previous} belong to no tensor")


def _is_sizes(value: Any) -> bool:
    """Whether a JSON value is a list of non-negative integers; true, false and 1.0 are not integers."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)
