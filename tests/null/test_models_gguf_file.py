"""The strict reader of .gguf files: what comes back, and that anything malformed is refused by name."""

from __future__ import annotations

import math
import re
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_bytes import ARRAY, BOOL, STRING, U64, Raw, gguf_bytes, string
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.engine.safetensors_file import ArtifactError
from crucible.gguf.file import TENSOR_TYPES, GgufFile

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "a.size": 7,
    "a.epsilon": 1e-5,
    "a.flag": True,
    "a.words": ["one", "zwei", "三"],
    "a.ids": [3, -1, 5],
    "a.scores": [0.5, -1.25],
    "a.long": Raw((U64, struct.pack("<Q", 2**40))),
    "a.double": Raw((12, struct.pack("<d", 1 / 3))),
}
WEIGHTS = np.linspace(0.1, 2, 12, dtype=np.float32).reshape(3, 4)
TENSORS = {
    "plain": (0, (3, 4), WEIGHTS.tobytes()),
    "half": (1, (5,), np.arange(5, dtype=np.float16).tobytes()),
    "brain": (30, (2, 2), np.array([0x3F80, 0x4000, 0xBF80, 0x3F81], dtype="<u2").tobytes()),
}
WHOLE = gguf_bytes(METADATA, TENSORS)


def read(path: Path, data: bytes) -> GgufFile:
    file = path / "model.gguf"
    file.write_bytes(data)
    return GgufFile(file)


def refused(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ArtifactError, match=re.escape(str(tmp_path / "model.gguf")) + ": .*" + re.escape(message)):
        read(tmp_path, data)


def test_everything_comes_back(tmp_path: Path) -> None:
    file = read(tmp_path, WHOLE)
    assert file.metadata == {
        **METADATA,
        "a.long": 2**40,
        "a.double": 1 / 3,
    }
    assert isinstance(file.metadata["a.flag"], bool)
    assert {name: info.shape for name, info in file.tensors.items()} == {"plain": (3, 4), "half": (5,), "brain": (2, 2)}
    np.testing.assert_array_equal(file.array("plain"), WEIGHTS)
    np.testing.assert_array_equal(file.array("half"), [0, 1, 2, 3, 4])
    np.testing.assert_array_equal(file.array("brain"), [[1, 2], [-1, 1.0078125]])
    assert all(file.array(name).dtype == np.float32 for name in file.tensors)
    with pytest.raises(ArtifactError, match="holds no tensor 'other'"):
        file.array("other")


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [1, 8, 32, 4096])
def test_versions_and_alignments(tmp_path: Path, version: int, alignment: int) -> None:
    metadata = {**METADATA, "general.alignment": alignment}
    file = read(tmp_path, gguf_bytes(metadata, TENSORS, version=version, alignment=alignment))
    np.testing.assert_array_equal(file.array("plain"), WEIGHTS)


def test_a_float_is_the_decimal_that_its_writer_was_given(tmp_path: Path) -> None:
    for value in (1e-5, 1e-6, 10000.0, 500000.0, 0.1, 32.0):
        assert read(tmp_path, gguf_bytes({"a.x": value}, TENSORS)).metadata["a.x"] == value


# ---- malformed ----------------------------------------------------------------------------------------------------


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    for length in range(0, len(WHOLE) - 24, 3):  # the last tensor's bytes end 24 before the padding does
        with pytest.raises(ArtifactError, match=r"runs past the end|does not begin with GGUF"):
            read(tmp_path, WHOLE[:length])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(WHOLE) - 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_any_bytes_are_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, changes: list[tuple[int, int]]
) -> None:
    data = bytearray(WHOLE)
    for at, value in changes:
        data[at] = value
    try:
        file = read(tmp_path_factory.mktemp("any"), bytes(data))
    except ArtifactError:
        return
    for name, info in file.tensors.items():
        if info.type.block == 1:
            assert file.array(name).shape == info.shape


def with_pair(kind: int, data: bytes) -> bytes:
    return gguf_bytes({"a.b": Raw((kind, data))}, TENSORS)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin with GGUF"),
        (b"PK\3\4" + WHOLE[4:], "does not begin with GGUF"),
        (WHOLE[:4] + struct.pack("<I", 1) + WHOLE[8:], "version must be one of (2, 3), little-endian, not 1"),
        (WHOLE[:4] + struct.pack(">I", 3) + WHOLE[8:], "little-endian, not 50331648"),
        (WHOLE[:8] + struct.pack("<Q", 2**63) + WHOLE[16:], "tensor '': must have 1 to 4 dimensions, not 0"),
        (WHOLE[:16] + struct.pack("<Q", 2**64 - 1) + WHOLE[24:], "runs past the end"),
        (with_pair(13, b""), "metadata 'a.b': unknown type 13"),
        (with_pair(BOOL, b"\2"), "metadata 'a.b': a bool must be 0 or 1, not 2"),
        (with_pair(STRING, struct.pack("<Q", 2**63) + b"x"), "metadata 'a.b' runs past the end"),
        (with_pair(STRING, struct.pack("<Q", 1) + b"\xff"), "metadata 'a.b' is not UTF-8"),
        (with_pair(ARRAY, struct.pack("<IQ", STRING, 2**61)), "metadata 'a.b' runs past the end"),
        (with_pair(ARRAY, struct.pack("<IQ", 0, 2**63)), "metadata 'a.b' runs past the end"),
        (with_pair(ARRAY, struct.pack("<IQ", ARRAY, 1)), "metadata 'a.b': array of unknown or nested type 9"),
        (with_pair(ARRAY, struct.pack("<IQ", STRING, 2) + string("x")), "runs past the end"),
        (gguf_bytes({"a.b": 1}, TENSORS).replace(b"a.b", b"\xff.b"), "metadata pair 0 of 1 is not UTF-8"),
        (gguf_bytes({"a.b": 1, "a.c": 1}, TENSORS).replace(b"a.c", b"a.b"), "metadata holds 'a.b' twice"),
        (gguf_bytes({"general.alignment": 24}, TENSORS), "general.alignment must be a power of two, not 24"),
        (gguf_bytes({"general.alignment": 0}, TENSORS), "general.alignment must be a power of two, not 0"),
        (gguf_bytes({"general.alignment": "32"}, TENSORS), "general.alignment must be a power of two, not '32'"),
        (
            gguf_bytes({}, TENSORS | {"plant": TENSORS["plain"]}).replace(b"plant", b"plain"),
            "holds tensor 'plain' twice",
        ),
        (gguf_bytes({}, {"x": (0, (), b"")}), "tensor 'x': must have 1 to 4 dimensions, not 0"),
        (gguf_bytes({}, {"x": (0, (1,) * 5, bytes(4))}), "tensor 'x': must have 1 to 4 dimensions, not 5"),
        (gguf_bytes({}, {"x": (0, (3, 0), b"")}), "tensor 'x': shape [3, 0] is empty or overflows"),
        (gguf_bytes({}, {"x": (0, (2**40, 2**40), bytes(4))}), "is empty or overflows"),
        (gguf_bytes({}, {"x": (0, (2**40,), bytes(4))}), "tensor 'x' runs past the end"),
        (gguf_bytes({}, {"x": (8, (2, 33), bytes(68))}), "tensor 'x': rows of 33 are no multiple of Q8_0's 32"),
        (gguf_bytes({}, {"x": (4, (2, 32), bytes(68))}), "tensor 'x': type 4 is not one of F32, F16"),
        (gguf_bytes({}, {"x": (0, (8,), bytes(32))}, alignment=1).ljust(200, b"\0"), None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_malformed_files_are_refused_by_name(tmp_path: Path, data: bytes, message: str | None) -> None:
    if message is None:
        assert read(tmp_path, data).tensors["x"].shape == (8,)
    else:
        refused(tmp_path, data, message)


def test_tensors_lie_apart_and_aligned(tmp_path: Path) -> None:
    data = gguf_bytes({}, {"first": (0, (16,), bytes(64)), "second": (0, (8,), bytes(32))})
    at = data.index(b"second") + 6 + 4 + 8 + 4
    assert struct.unpack_from("<Q", data, at) == (64,)
    refused(tmp_path, data[:at] + struct.pack("<Q", 32) + data[at + 8 :], "tensors 'first' and 'second' overlap")
    refused(
        tmp_path, data[:at] + struct.pack("<Q", 65) + data[at + 8 :], "offset 65 is not a multiple of the alignment"
    )
    refused(tmp_path, data[:at] + struct.pack("<Q", 2**63) + data[at + 8 :], "tensor 'second' runs past the end")


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="not a regular file"):
        GgufFile(tmp_path)
    with pytest.raises(ArtifactError, match="cannot be read"):
        GgufFile(tmp_path / "absent.gguf")


# ---- quantised tensors --------------------------------------------------------------------------------------------

QUANTISED = [number for number, kind in TENSOR_TYPES.items() if kind.block > 1]


@pytest.mark.parametrize("number", QUANTISED, ids=lambda number: TENSOR_TYPES[number].name)
def test_quantised_tensors_are_what_the_package_makes_of_their_rows(tmp_path: Path, number: int) -> None:
    gguf = pytest.importorskip("gguf", reason="needs the package gguf (extra gguf)")
    kind = TENSOR_TYPES[number]
    assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(number)] == (kind.block, kind.nbytes)
    assert gguf.GGMLQuantizationType(number).name == kind.name
    rng = np.random.default_rng(number)
    rows, columns = 3, 2 * kind.block
    # The upper byte of an f16 scale is kept low, so that no scale is an infinity.
    raw = rng.integers(0, 0x7A, (rows, columns // kind.block * kind.nbytes), dtype=np.uint8)
    file = read(tmp_path, gguf_bytes({}, {"x": (number, (rows, columns), raw.tobytes())}))
    found = file.array("x")
    assert (found.shape, found.dtype, found.flags.c_contiguous) == ((rows, columns), np.float32, True)
    for row in range(rows):
        np.testing.assert_array_equal(found[row], gguf.quants.dequantize(raw[row], gguf.GGMLQuantizationType(number)))
    assert len(np.unique(found)) > columns // 4


def test_q8_0_and_q4_1_by_hand(tmp_path: Path) -> None:
    """The two types of SmolLM2's file. Q8_0: an f16 scale, 32 int8. Q4_1: f16 scale and minimum, 32 nibbles, the low
    ones of the 16 bytes first."""
    pytest.importorskip("gguf", reason="needs the package gguf (extra gguf)")
    integers = np.arange(-16, 16, dtype=np.int8)
    q8_0 = np.float16(0.25).tobytes() + integers.tobytes()
    nibbles = [i % 16 for i in range(32)]
    packed = bytes(nibbles[i] | nibbles[i + 16] << 4 for i in range(16))
    q4_1 = np.float16(0.5).tobytes() + np.float16(-3).tobytes() + packed
    file = read(tmp_path, gguf_bytes({}, {"a": (8, (1, 32), q8_0), "b": (3, (32,), q4_1)}))
    np.testing.assert_array_equal(file.array("a"), 0.25 * integers[None])
    np.testing.assert_array_equal(file.array("b"), 0.5 * np.array(nibbles) - 3)
    assert math.prod(file.tensors["a"].shape) == 32


def test_what_a_quantised_file_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = read(tmp_path, gguf_bytes({}, {"x": (8, (1, 32), bytes(34))}))
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(ArtifactError, match=r"tensor 'x' is Q8_0.*not installed: pip install .*gguf.* checkout$"):
        file.array("x")
