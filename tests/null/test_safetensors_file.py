"""The safetensors reader against well-formed files, every malformation we know, and the reference library."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.numpy import load, save, save_file

from crucible.engine.safetensors_file import MAX_HEADER_BYTES, ArtifactError, SafetensorsFile, parse_header

ENTRY = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}
DEEP = 100_000


def raw_file(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    """A file with any header, well-formed or not, that claims `length` (its own by default)."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def dense(*shape: int, dtype: str = "f4") -> np.ndarray:
    return np.random.default_rng(7).standard_normal(shape).astype(dtype)


# ---- well-formed files ----------------------------------------------------------------------------------------


def test_reads_what_the_reference_library_writes(tmp_path: Path) -> None:
    tensors = {"a.weight": dense(5, 7), "half": dense(3, 2, 2, dtype="f2"), "scalar": dense(), "none": dense(0, 4)}
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt", "note": "ä"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.metadata == {"format": "pt", "note": "ä"}
    assert file.tensors.keys() == tensors.keys()
    for name, expected in tensors.items():
        found = file.array(name)
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes() == file.raw(name).tobytes()
    offsets = [info.offset for info in file.tensors.values()]
    assert offsets == sorted(offsets)


def test_arrays_are_read_only_views_that_outlive_the_file_object(tmp_path: Path) -> None:
    expected = dense(64, 33)
    save_file({"w": expected}, tmp_path / "x.safetensors")
    view = SafetensorsFile(tmp_path / "x.safetensors").array("w")
    assert not view.flags.owndata
    assert not view.flags.writeable
    assert type(view) is np.ndarray
    np.testing.assert_array_equal(view, expected)


def test_bf16_widens_to_the_same_value(tmp_path: Path) -> None:
    bits = np.arange(2**16, dtype="<u2")
    header = {"w": {"dtype": "BF16", "shape": [256, 256], "data_offsets": [0, 2**17]}}
    (tmp_path / "x.safetensors").write_bytes(raw_file(header, bits.tobytes()))
    found = SafetensorsFile(tmp_path / "x.safetensors").array("w")
    assert found.dtype == np.float32
    sign = np.where(bits & 0x8000, -1.0, 1.0)
    exponent, mantissa = (bits >> 7 & 0xFF).astype(np.int64), (bits & 0x7F).astype(np.float64)
    value = sign * np.where(exponent > 0, (1 + mantissa / 128) * 2.0 ** (exponent - 127), mantissa / 128 * 2.0**-126)
    finite = exponent < 255
    np.testing.assert_array_equal(found.ravel()[finite], value[finite].astype(np.float32))
    special = found.ravel()[~finite]
    np.testing.assert_array_equal(np.isnan(special), mantissa[~finite] != 0)
    np.testing.assert_array_equal(np.signbit(special), sign[~finite] < 0)


def test_an_unaligned_header_still_reads(tmp_path: Path) -> None:
    expected = dense(2, 3)
    text = json.dumps({"w": ENTRY}).encode()
    text += b" " * ((1 - len(text)) % 8)  # data starts at an odd offset
    (tmp_path / "x.safetensors").write_bytes(raw_file(text, expected.tobytes()))
    np.testing.assert_array_equal(SafetensorsFile(tmp_path / "x.safetensors").array("w"), expected)


def test_order_in_the_header_is_free_and_a_file_may_be_empty() -> None:
    header = {
        "b": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]},
        "nothing": {"dtype": "F32", "shape": [0, 9], "data_offsets": [2, 2]},
        "a": {"dtype": "BF16", "shape": [], "data_offsets": [0, 2]},
    }
    tensors, metadata = parse_header(raw_file(header, bytes(5)), "x")
    assert list(tensors) == ["a", "nothing", "b"]
    assert metadata == {}
    assert parse_header(raw_file({}), "x") == ({}, {})


# ---- malformed files ------------------------------------------------------------------------------------------


def changed(**entry: Any) -> bytes:
    """One tensor of 24 bytes of data whose header entry has some fields changed; None drops a field."""
    fields = {key: value for key, value in {**ENTRY, **entry}.items() if value is not None}
    return raw_file({"some.weight": fields}, bytes(24))


def pair(first: list[int], second: list[int], size: int) -> bytes:
    """Two U8 tensors at the given offsets in `size` bytes of data."""
    header = {
        name: {"dtype": "U8", "shape": [at[1] - at[0]], "data_offsets": at}
        for name, at in (("one", first), ("two", second))
    }
    return raw_file(header, bytes(size))


MALFORMED = {
    # the length
    "empty": (b"", "too few"),
    "seven bytes": (b"\0" * 7, "too few"),
    "length 2^64-1": (raw_file({"w": ENTRY}, bytes(24), length=2**64 - 1), "18446744073709551615"),
    "length 2^63": (raw_file({"w": ENTRY}, bytes(24), length=2**63), "over the limit"),
    "length over the cap": (raw_file({}, length=MAX_HEADER_BYTES + 1), "over the limit"),
    "length past the end": (raw_file({"w": ENTRY}, bytes(24), length=1000), "past the end"),
    "length one past the end": (raw_file({}, length=3), "past the end"),
    "length zero": (raw_file(b""), "begin with"),
    # the JSON
    "leading space": (raw_file(b" {}"), "begin with"),
    "byte order mark": (raw_file(b"\xef\xbb\xbf{}"), "begin with"),
    "a list": (raw_file([]), "begin with"),
    "cut": (raw_file(b'{"w": '), "not valid JSON"),
    "text after": (raw_file(b"{} x"), "not valid JSON"),
    "not UTF-8": (raw_file(b'{"\xff": 1}'), "not valid JSON"),
    "NaN": (raw_file(b'{"w": NaN}'), "NaN is not JSON"),
    "deep": (raw_file(b'{"w": ' + b"[" * DEEP), "nested too deeply"),
    "endless number": (raw_file(b'{"w": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "duplicate tensor": (
        raw_file(f'{{"w": {json.dumps(ENTRY)}, "w": {json.dumps(ENTRY)}}}'.encode(), bytes(24)),
        "duplicate key 'w'",
    ),
    "duplicate field": (
        raw_file(b'{"w": {"dtype": "F32", "dtype": "F32", "shape": [2,3], "data_offsets": [0,24]}}', bytes(24)),
        "duplicate key 'dtype'",
    ),
    "duplicate metadata": (raw_file(b'{"__metadata__": {"a": "1", "a": "2"}}'), "duplicate key 'a'"),
    # the entry
    "entry is a list": (raw_file({"w": [1]}), "exactly the keys"),
    "no dtype": (changed(dtype=None), "exactly the keys"),
    "no shape": (changed(shape=None), "exactly the keys"),
    "no offsets": (changed(data_offsets=None), "exactly the keys"),
    "extra field": (changed(strides=[1]), "exactly the keys"),
    "dtype unknown": (changed(dtype="Q4"), "dtype 'Q4'"),
    "dtype lower case": (changed(dtype="f32"), "dtype 'f32'"),
    "dtype a number": (changed(dtype=4), "dtype 4"),
    "dtype a list": (changed(dtype=["F32"]), "dtype"),
    "shape a number": (changed(shape=6), "shape 6"),
    "shape negative": (changed(shape=[-2, -3]), "shape"),
    "shape bool": (changed(shape=[True, 6]), "shape"),
    "shape float": (changed(shape=[2.0, 3]), "shape"),
    "shape string": (changed(shape="23"), "shape"),
    "shape nested": (changed(shape=[[2, 3]]), "shape"),
    "too many dimensions": (changed(shape=[1] * 31 + [2, 3]), "33 dimensions"),
    "overflow in bytes": (changed(shape=[2**62]), "overflows"),
    "overflow to the right span": (changed(shape=[2**32 + 1, 2**32, 6]), "overflows"),
    "overflow beside zero": (changed(shape=[0, 2**40, 2**40], data_offsets=[0, 0]), "overflows"),
    "huge": (changed(shape=[10**4000], data_offsets=[0, 10**4000]), "overflows"),
    "offsets []": (changed(data_offsets=[]), "data_offsets []"),
    "offsets of one": (changed(data_offsets=[24]), "data_offsets"),
    "offsets of three": (changed(data_offsets=[0, 24, 24]), "data_offsets"),
    "offsets [10, 2]": (changed(data_offsets=[10, 2]), "data_offsets [10, 2]"),
    "offsets negative": (changed(data_offsets=[-24, 0]), "data_offsets"),
    "offsets bool": (changed(data_offsets=[False, 24]), "data_offsets"),
    "offsets float": (changed(data_offsets=[0, 24.0]), "data_offsets"),
    "offsets an object": (changed(data_offsets={"0": 24}), "data_offsets"),
    "offsets null": (raw_file({"w": {**ENTRY, "data_offsets": None}}, bytes(24)), "data_offsets"),
    "offsets nested": (
        raw_file(b'{"w": {"dtype": "U8", "shape": [], "data_offsets": ' + b"[" * 400 + b"]" * 400 + b"}}"),
        "data_offsets [[[",
    ),
    "span too short": (changed(shape=[2, 2]), "takes 16 bytes, data_offsets span 24"),
    "span too long": (changed(shape=[2, 4]), "takes 32 bytes, data_offsets span 24"),
    # the data
    "past the end": (changed(shape=[2, 4], data_offsets=[0, 32]), "past the end"),
    "far past the end": (changed(shape=[2**60], data_offsets=[0, 2**62]), "past the end"),
    "data cut": (changed()[:-1], "past the end"),
    "data longer": (changed() + b"\0", "1 bytes after tensor 'some.weight' belong to no tensor"),
    "data without tensors": (raw_file({}, b"\0"), "belong to no tensor"),
    "overlap": (pair([0, 10], [9, 20], 20), "tensor 'two': overlaps tensor 'one'"),
    "same bytes": (pair([0, 10], [0, 10], 10), "overlaps"),
    "inside": (pair([0, 20], [5, 10], 20), "tensor 'two': overlaps tensor 'one'"),
    "hole": (pair([0, 10], [12, 20], 20), "tensor 'two': leaves a hole of 2 bytes after tensor 'one'"),
    "hole at the start": (changed(data_offsets=[4, 28]) + bytes(4), "hole of 4 bytes after the header"),
    # the metadata
    "metadata a list": (raw_file({"__metadata__": []}), "__metadata__ must be an object"),
    "metadata a number": (raw_file({"__metadata__": {"format": 1}}), "'format' must be a string"),
    "metadata null": (raw_file({"__metadata__": None}), "__metadata__ must be an object"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_malformed_files_are_refused_by_name(case: str, tmp_path: Path) -> None:
    content, message = MALFORMED[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(ArtifactError) as refused:
        SafetensorsFile(path)
    assert str(refused.value).startswith(str(path))
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "case", ["span too short", "dtype unknown", "offsets [10, 2]", "shape negative", "past the end"]
)
def test_a_bad_tensor_is_named(case: str) -> None:
    with pytest.raises(ArtifactError, match=r"tensor 'some\.weight': "):
        parse_header(MALFORMED[case][0], "x")


def test_messages_stay_short_and_printable() -> None:
    name = "\x1b[31m\ud800" + "n" * 10_000
    with pytest.raises(ArtifactError) as refused:
        parse_header(raw_file({name: {**ENTRY, "shape": [[[[[[[[9]]]]]]]]}}), "x")
    assert str(refused.value).isprintable()
    assert len(str(refused.value)) < 400


def test_what_is_not_a_file_is_refused(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none", "cannot be read: No such file"), (tmp_path, "not a regular file")):
        with pytest.raises(ArtifactError, match=message):
            SafetensorsFile(path)


def test_only_weights_become_arrays_and_only_by_a_name_that_exists(tmp_path: Path) -> None:
    save_file({"ids": np.arange(6, dtype=np.int64)}, tmp_path / "x.safetensors")
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert file.raw("ids").tobytes() == np.arange(6, dtype="<i8").tobytes()
    with pytest.raises(ArtifactError, match="tensor 'ids': dtype I64 is not one of F32, F16, BF16"):
        file.array("ids")
    with pytest.raises(ArtifactError, match="holds no tensor 'w'"):
        file.raw("w")


# ---- properties -----------------------------------------------------------------------------------------------

VALID = save({"model.a": dense(3, 4), "model.b": dense(5, dtype="f2"), "model.c": dense(2, 2, 2)}, {"format": "pt"})
HEADER_END = 8 + int.from_bytes(VALID[:8], "little")


@settings(max_examples=600, deadline=None)
@given(st.dictionaries(st.integers(0, HEADER_END - 1), st.integers(0, 255), min_size=1, max_size=4))
def test_flipped_header_bytes_raise_nothing_else_and_pass_only_what_the_reference_passes(flips: dict[int, int]) -> None:
    data = bytearray(VALID)
    for at, byte in flips.items():
        data[at] = byte
    try:
        tensors, _ = parse_header(bytes(data), "x")
    except ArtifactError:
        return
    reference = load(bytes(data))  # raises where the reference library is stricter than we are
    assert {name: info.shape for name, info in tensors.items()} == {name: a.shape for name, a in reference.items()}


SCALARS = st.none() | st.booleans() | st.integers(-3, 2**70) | st.floats() | st.text(max_size=4)
SIZES = st.lists(st.integers(0, 9) | SCALARS, max_size=4)
ENTRIES = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["F32", "U8", "BF16", "X"]) | SCALARS, "shape": SIZES, "data_offsets": SIZES}
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES | SCALARS, max_size=3), st.binary(max_size=40)
)
def test_any_json_header_raises_nothing_else(header: dict[str, Any], data: bytes) -> None:
    content = raw_file(header, data)
    try:
        parse_header(content, "x")
    except ArtifactError:
        return
    load(content)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["U8", "F16", "F32"]), st.lists(st.integers(0, 4), max_size=3)), max_size=5))
def test_reader_and_reference_agree_on_any_tiling(layout: list[tuple[str, list[int]]]) -> None:
    kinds = {"U8": "u1", "F16": "f2", "F32": "f4"}
    arrays = {f"t{i}": dense(*shape, dtype=kinds[dtype]) for i, (dtype, shape) in enumerate(layout)}
    tensors, _ = parse_header(content := save(arrays), "x")
    for name, array in arrays.items():
        info = tensors[name]
        assert info.shape == array.shape
        assert content[info.offset : info.offset + info.nbytes] == array.tobytes()


def test_only_the_known_malformations_pass_the_reference() -> None:
    """Being stricter than the reference library is a choice per case, not an accident."""
    lenient = set()
    for case, (content, _) in MALFORMED.items():
        try:
            load(content)
        except (SafetensorError, KeyError):
            continue
        lenient.add(case)
    assert lenient <= {
        "duplicate metadata",
        "duplicate tensor",
        "extra field",
        "leading space",
        "metadata null",
        "too many dimensions",
    }
