"""A strict reader of one .gguf file: everything it says is checked before a byte of a tensor is used.

The format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, the numbers of tensors and of
metadata pairs; the pairs; name, sizes, type and offset of each tensor; then the data, each tensor at a multiple of the
alignment. All of it is little-endian.

The package `gguf` dequantises. Its own reader is not used: it checks no bounds (a wrong count of elements keeps it busy
for hours), and takes 1.5 s for the metadata of a vocabulary of 49,152 tokens where this one takes 0.1 s.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from crucible.engine.safetensors_file import ArtifactError, map_file, shown
from crucible.errors import install

MAGIC: Final = b"GGUF"
VERSIONS: Final = (2, 3)
"""Version 1 counts in 32 bits and was in use for days. Version 3 differs from 2 in allowing big-endian files."""

DEFAULT_ALIGNMENT: Final = 32
MAX_DIMS: Final = 4

_SCALARS: Final[Mapping[int, str]] = {
    0: "<u1",
    1: "<i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_FLOAT32, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9


@dataclass(frozen=True, slots=True)
class TensorType:
    """How a tensor is stored: `block` consecutive elements of a row take `nbytes` bytes."""

    name: str
    block: int
    nbytes: int


TENSOR_TYPES: Final[Mapping[int, TensorType]] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    30: TensorType("BF16", 1, 2),
}
"""By number, the types that are read. A file called Q4_K_M holds Q4_K and Q6_K, and Q5_0 and Q8_0 for the rows that are
no multiple of 256."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor. `shape` is row-major, `offset` counts bytes from the start of the file."""

    name: str
    type: TensorType
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class GgufFile:
    """One file, memory-mapped and checked when it is made.

    Attributes:
        path: the file.
        metadata: the pairs; numbers as int, float or bool, arrays as lists. A float32 is given as the shortest decimal
            number that rounds to it: 1e-05, which the converter was given, and not 9.999999747378752e-06.
        tensors: TensorInfo by name, in the file's order.

    Raises:
        ArtifactError: the file is missing, not a regular file, or malformed in any way, or a tensor is of a type that
            is not read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._data = map_file(path)
        cursor = _Cursor(self._data, path)
        if self._data[:4] != MAGIC:
            raise ArtifactError(f"{path}: is not a GGUF file: it does not begin with {MAGIC.decode()}")
        cursor.at = 4
        version = cursor.number("<u4", "the version")
        if version not in VERSIONS:
            raise ArtifactError(f"{path}: GGUF version must be one of {VERSIONS}, little-endian, not {version}")
        num_tensors, num_pairs = cursor.number("<u8", "the tensor count"), cursor.number("<u8", "the pair count")
        self.metadata: Mapping[str, Any] = _read_pairs(cursor, num_pairs)
        self.tensors: Mapping[str, TensorInfo] = _read_tensors(cursor, num_tensors, self._alignment())

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise ArtifactError(f"{self.path}: general.alignment must be a power of two, not {shown(alignment)}")
        return alignment

    def array(self, name: str) -> NDArray[np.float32]:
        """A tensor as float32 in its own shape; F32 as a read-only view of the mapping where its bytes are aligned.

        Raises:
            ArtifactError: no such tensor, or it is quantised and the package `gguf` is not installed.
        """
        if name not in self.tensors:
            raise ArtifactError(f"{self.path}: holds no tensor {shown(name)}")
        info = self.tensors[name]
        raw = np.frombuffer(self._data, dtype=np.uint8, count=info.nbytes, offset=info.offset)
        if info.type.name == "F32":
            return np.require(raw.view("<f4").reshape(info.shape), np.float32, ["C", "ALIGNED"])
        if info.type.name == "F16":
            return raw.view("<f2").reshape(info.shape).astype(np.float32)
        if info.type.name == "BF16":
            # A bfloat16 is the upper half of the float32 of the same value.
            return (raw.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32).reshape(info.shape)
        return self._dequantise(raw, info)

    def _dequantise(self, raw: NDArray[np.uint8], info: TensorInfo) -> NDArray[np.float32]:
        try:
            import gguf
        except ModuleNotFoundError:
            raise ArtifactError(
                f"{self.path}: tensor {shown(info.name)} is {info.type.name}, which the package gguf makes numbers of, "
                f"and it is not installed: {install('gguf')}"
            ) from None
        row_bytes = info.shape[-1] // info.type.block * info.type.nbytes
        rows = raw.reshape(*info.shape[:-1], row_bytes)
        weight = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[info.type.name])
        return np.require(weight, np.float32, ["C"])


class _Cursor:
    """A place in the file; nothing is read past its end."""

    def __init__(self, data: Any, path: Path) -> None:
        self.data = data
        self.path = path
        self.size = len(data)
        self.at = 0

    def fail(self, what: str) -> NoReturn:
        raise ArtifactError(f"{self.path}: {what} runs past the end of the file ({self.size} bytes)")

    def numbers(self, dtype: str, count: int, what: str) -> NDArray[Any]:
        nbytes = np.dtype(dtype).itemsize * count
        if nbytes > self.size - self.at:
            self.fail(what)
        found = np.frombuffer(self.data, dtype=dtype, count=count, offset=self.at)
        self.at += nbytes
        return found

    def number(self, dtype: str, what: str) -> Any:
        return self.numbers(dtype, 1, what).item()

    def strings(self, count: int, what: str) -> list[str]:
        data, at, size, length_of = self.data, self.at, self.size, struct.Struct("<Q").unpack_from
        if 8 * count > size - at:
            self.fail(what)
        found = []
        try:
            for _ in range(count):
                end = at + 8 + length_of(data, at)[0]
                if end > size:
                    self.fail(what)
                found.append(str(data[at + 8 : end], "utf-8"))
                at = end
        except struct.error:
            self.fail(what)
        except UnicodeDecodeError:
            raise ArtifactError(f"{self.path}: {what} is not UTF-8") from None
        self.at = at
        return found

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]


def _read_pairs(cursor: _Cursor, count: int) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for index in range(count):
        key = cursor.string(f"the key of metadata pair {index} of {count}")
        if key in pairs:
            raise ArtifactError(f"{cursor.path}: metadata holds {shown(key)} twice")
        pairs[key] = _read_value(cursor, f"metadata {shown(key)}")
    return pairs


def _read_value(cursor: _Cursor, what: str) -> Any:
    kind = cursor.number("<u4", what)
    if kind == _STRING:
        return cursor.string(what)
    if kind in _SCALARS:
        return _plain(cursor, kind, 1, what)[0]
    if kind != _ARRAY:
        raise ArtifactError(f"{cursor.path}: {what}: unknown type {kind}")
    kind, count = cursor.number("<u4", what), cursor.number("<u8", what)
    if kind == _STRING:
        return cursor.strings(count, what)
    if kind in _SCALARS:
        return _plain(cursor, kind, count, what)
    raise ArtifactError(f"{cursor.path}: {what}: array of unknown or nested type {kind}")


def _plain(cursor: _Cursor, kind: int, count: int, what: str) -> list[Any]:
    if kind == _BOOL:
        flags = cursor.numbers("<u1", count, what)
        if count and flags.max() > 1:
            raise ArtifactError(f"{cursor.path}: {what}: a bool must be 0 or 1, not {flags.max()}")
        return [bool(flag) for flag in flags]
    numbers = cursor.numbers(_SCALARS[kind], count, what)
    if kind == _FLOAT32 and count == 1:  # digits do not matter in an array, of a vocabulary's scores say
        return [float(str(numbers[0]))]
    return [*numbers.tolist()]


def _read_tensors(cursor: _Cursor, count: int, alignment: int) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    for index in range(count):
        name = cursor.string(f"the name of tensor {index} of {count}")
        if name in found:
            raise ArtifactError(f"{cursor.path}: holds tensor {shown(name)} twice")
        found[name] = _read_tensor(cursor, name, alignment)
    start = -(-cursor.at // alignment) * alignment
    for name, info in found.items():
        if start + info.offset + info.nbytes > cursor.size:
            cursor.fail(f"tensor {shown(name)}")
        found[name] = TensorInfo(name, info.type, info.shape, start + info.offset, info.nbytes)
    for before, after in pairwise(sorted(found.values(), key=lambda info: info.offset)):
        if before.offset + before.nbytes > after.offset:
            raise ArtifactError(f"{cursor.path}: tensors {shown(before.name)} and {shown(after.name)} overlap")
    return found


def _read_tensor(cursor: _Cursor, name: str, alignment: int) -> TensorInfo:
    where = f"tensor {shown(name)}"
    num_dims = cursor.number("<u4", where)
    if not 1 <= num_dims <= MAX_DIMS:
        raise ArtifactError(f"{cursor.path}: {where}: must have 1 to {MAX_DIMS} dimensions, not {num_dims}")
    shape = tuple(cursor.numbers("<u8", num_dims, where)[::-1].tolist())
    number, offset = cursor.number("<u4", where), cursor.number("<u8", where)
    if number not in TENSOR_TYPES:
        allowed = ", ".join(known.name for known in TENSOR_TYPES.values())
        raise ArtifactError(f"{cursor.path}: {where}: type {_type_name(number)} is not one of {allowed}")
    kind = TENSOR_TYPES[number]
    if 0 in shape or math.prod(shape) >= 2**60:
        raise ArtifactError(f"{cursor.path}: {where}: shape {list(shape)} is empty or overflows")
    if shape[-1] % kind.block:
        raise ArtifactError(
            f"{cursor.path}: {where}: rows of {shape[-1]} are no multiple of {kind.name}'s {kind.block}"
        )
    if offset % alignment:
        raise ArtifactError(f"{cursor.path}: {where}: offset {offset} is not a multiple of the alignment {alignment}")
    return TensorInfo(name, kind, shape, offset, math.prod(shape) // kind.block * kind.nbytes)


def _type_name(number: int) -> str:
    """For messages, with the name of a type that we do not read if `gguf` is there to give it."""
    try:
        import gguf

        return f"{gguf.GGMLQuantizationType(number).name} ({number})"
    except (ModuleNotFoundError, ValueError):
        return str(number)
