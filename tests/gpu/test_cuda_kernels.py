"""Each CUDA kernel against its twin in numpy: exact operands, sums in float64, operands dense and positive."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cuda_models import GPU, assert_same_bits

from crucible.engine.cuda.batch import make_batch
from crucible.engine.cuda.model import WIDE_SHAPES, Resident, narrow_shared
from crucible.engine.cuda.weights import pack
from crucible.engine.host_backend import Span
from crucible.engine.quant import F16Weight, Int8Weight, halve, quantise
from crucible.engine.reference.attention import attend

F32 = npt.NDArray[np.float32]
F16 = npt.NDArray[np.float16]

i32, f32 = np.int32, np.float32

OPERAND_BOUND = 2.0**-11
"""Relative, of what is rounded to f16 once."""
F32_BOUND = 64 * 2.0**-24
"""Relative, of sums in f32 over positive terms."""


SHAPES = (
    (1, "narrow_1"), (16, "narrow_1"), (17, "narrow_2"), (40, "narrow_4"), (64, "narrow_4"),
    (65, "wide_128x128"), (70, "wide_64x64"), (130, "wide_128x128"), (200, "wide_64x64"),
)  # fmt: skip
"""Numbers of rows, and a kernel for as many."""


def a_order(x_MK: F16) -> F16:
    """An operand as the kernels read it, its rows padded to 128 (kernels/layout.cuh)."""
    rows, inputs = x_MK.shape
    padded = np.zeros((-(-rows // 128) * 128, inputs), dtype=np.float16)
    padded[:rows] = x_MK
    # [tile, half, row, step, half, pair, element] to [tile, step, row, pair, half of k, half of rows, element].
    parts = padded.reshape(-1, 2, 8, inputs // 16, 2, 4, 2).transpose(0, 3, 2, 5, 4, 1, 6)
    return np.ascontiguousarray(parts)


def from_a_order(words: F16, rows: int, inputs: int) -> F16:
    return words.reshape(-1, inputs // 16, 8, 4, 2, 2, 2).transpose(0, 5, 2, 1, 4, 3, 6).reshape(-1, inputs)[:rows]


def slack(operand: F16) -> Any:
    """On the device, with room behind it for what is copied and not used."""
    return GPU.upload(np.concatenate([operand.reshape(-1), np.zeros(2048, dtype=np.float16)]))


def linear(weight: Int8Weight | F16Weight, chunk: int, x_MK: F16, shape: str) -> F32:
    """The kind LOGITS of kernels/linear.cu in one of its shapes."""
    matrix = pack([weight], chunk)
    resident = Resident.upload(GPU, matrix)
    is_int8 = isinstance(weight, Int8Weight)
    definitions = {
        "WEIGHTS": "Int8" if is_int8 else "F16",
        "KIND": "LOGITS",
        "CHUNK_STEPS": chunk // 16,
        "NARROW_WARPS": 16,
    }
    wide = next((wide for wide in WIDE_SHAPES if wide.name == shape), None)
    most_shared = narrow_shared(16, 4) if wide is None else wide.shared_bytes("int8" if is_int8 else "f16")
    kernel = GPU.kernel("linear.cu", shape, definitions, shared_bytes=most_shared)
    rows, width = len(x_MK), matrix.num_units * 16
    out, count = GPU.upload(np.full((rows, width), np.nan, dtype=np.float32)), GPU.allocate(16, 0)
    operand = slack(a_order(x_MK))
    args = (operand, i32(matrix.num_units), *resident.args, out, i32(width), count, i32(rows))
    if wide is not None:
        GPU.launch(kernel, grid=wide.grid(rows, width), block=wide.threads, args=args)
    else:
        tiles = int(shape[-1])
        warps = max(tiles, min(16, matrix.chunks))
        shared = narrow_shared(warps, tiles)
        # Two units to each block, as far as they go.
        GPU.launch(kernel, grid=(-(-matrix.num_units // 2),), block=warps * 32, args=args, shared_bytes=shared)
    return GPU.download(out, np.float32, (rows, width))[:, : weight.shape[0]]


@pytest.mark.parametrize("weight_format", ["int8", "f16"])
@pytest.mark.parametrize(
    ("outputs", "inputs", "chunk"),
    [(144, 128, 128), (304, 208, 128), (48, 576, 128), (130, 2560, 128), (64, 240, 80), (272, 192, 96), (96, 192, 64)],
)
def test_linear_layers_in_every_shape(weight_format: str, outputs: int, inputs: int, chunk: int) -> None:
    rng = np.random.default_rng(outputs)
    weight_NK = rng.uniform(0.1, 1.0, (outputs, inputs)).astype(np.float32)
    weight: Int8Weight | F16Weight = quantise(weight_NK, chunk) if weight_format == "int8" else halve(weight_NK)
    x_MK = rng.uniform(0.1, 2.0, (300, inputs)).astype(np.float16)
    expected = x_MK.astype(np.float64) @ weight.dequantise().astype(np.float64).T
    whole = linear(weight, chunk, x_MK, "wide_128x128")
    assert np.abs(whole / expected - 1).max() < F32_BOUND
    for rows, shape in SHAPES:
        assert_same_bits(linear(weight, chunk, x_MK[:rows], shape), whole[:rows])
        assert_same_bits(linear(weight, chunk, x_MK[100 : 100 + rows], shape), whole[100 : 100 + rows])


def test_sums_that_cancel_have_the_same_bits_in_every_shape() -> None:
    rng = np.random.default_rng(3)
    for weight_format, scale in itertools.product(("int8", "f16"), (1e-3, 1.0, 1e3)):
        weight_NK = rng.standard_normal((144, 768)).astype(np.float32)
        weight: Int8Weight | F16Weight = quantise(weight_NK) if weight_format == "int8" else halve(weight_NK)
        x_MK = (scale * rng.standard_normal((150, 768))).astype(np.float16)
        whole = linear(weight, 128, x_MK, "wide_128x128")
        for rows, shape in SHAPES[:-1]:
            assert_same_bits(linear(weight, 128, x_MK[:rows], shape), whole[:rows])


@pytest.mark.parametrize("width", [144, 768, 2048])
def test_norms(width: int) -> None:
    rng = np.random.default_rng(width)
    x = rng.uniform(0.2, 3.0, (21, width)).astype(np.float32)
    weight = rng.uniform(0.5, 1.5, width).astype(np.float32)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + 1e-5) * weight
    kernel = GPU.kernel("rows.cu", "norm_rows", {"WEIGHTS": "Int8"})
    index = rng.permutation(21).astype(np.int32)
    operand, count = GPU.allocate(128 * width * 2, 0), GPU.allocate(16, 0)
    args = GPU.upload(x), GPU.upload(index), GPU.upload(weight), i32(width), f32(1e-5), operand, count
    GPU.launch(kernel, grid=(21,), block=64, args=args, shared_bytes=4 * (width // 32 + 2))
    found = from_a_order(GPU.download(operand, np.float16, (128, width)), 21, width)
    assert np.abs(found / expected[index] - 1).max() < OPERAND_BOUND * 1.01


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(6, 2), (3, 3), (12, 1), (20, 1)])
def test_attention_by_rows_and_by_spans(head_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """Requests of which some positions are new; pages in disorder and NaN where nobody wrote."""
    rng = np.random.default_rng(head_dim + num_heads)
    lengths, starts = [150, 1, 70, 16, 3], [0, 600, 58, 48, 126]
    spans, page = [], 0
    order = rng.permutation(120)
    for start, length in zip(starts, lengths, strict=True):
        used = -(-(start + length) // 16)
        spans.append(Span(order[page : page + used], start, length))
        page += used
    rows = sum(lengths)
    q = rng.standard_normal((rows, num_heads, head_dim)).astype(np.float16)
    keys, values = (np.full((120, num_kv_heads, 16, head_dim), np.nan, dtype=np.float16) for _ in range(2))
    expected = np.empty((rows, num_heads, head_dim))
    row = 0
    for span in spans:
        written = span.start + span.length
        k = rng.standard_normal((written, num_kv_heads, head_dim)).astype(np.float16)
        v = rng.uniform(0.5, 2.0, (written, num_kv_heads, head_dim)).astype(np.float16)
        for p in range(written):
            keys[span.page_table[p // 16], :, p % 16] = k[p]
            values[span.page_table[p // 16], :, p % 16] = v[p]
        for p in range(span.start, written):
            expected[row] = attend(
                q[row].astype(np.float64), k[: p + 1].astype(np.float64), v[: p + 1].astype(np.float64)
            )
            row += 1
    # kernels/layout.cuh: [step of 16 dims, lane, 8] of a page and head.
    key_words = keys.reshape(120, num_kv_heads, 2, 8, head_dim // 16, 2, 4, 2).transpose(0, 1, 4, 3, 6, 2, 5, 7)
    value_words = values.reshape(120, num_kv_heads, 2, 4, 2, head_dim // 16, 2, 8).transpose(0, 1, 5, 7, 3, 6, 2, 4)
    count = GPU.allocate(16, 0)
    device = GPU.upload(q), GPU.upload(key_words), GPU.upload(value_words)
    batch = make_batch(np.zeros(rows, dtype=np.int64), spans, np.ones(rows, dtype=bool), num_heads // num_kv_heads)
    block = GPU.upload(batch.block)
    address = int(block.handle)
    found = []
    by_row = "attend_rows_8" if num_heads // num_kv_heads <= 8 else "attend_rows_16"
    for name, warps in ((by_row, 8), (by_row, 4), (by_row, 5), ("attend_spans", 4)):
        by_rows = name == by_row
        shared = warps * (128 + head_dim // 8 * 512) if by_rows else 512 * head_dim
        kernel = GPU.kernel("attention.cu", name, {"HEAD_DIM": head_dim}, shared_bytes=shared)
        out = GPU.allocate(-(-rows // 128) * 128 * num_heads * head_dim * 2, 0xFF)
        args = (*device, out, address + 4 * batch.pages, i32(num_heads), i32(num_kv_heads), f32(head_dim**-0.5), count)
        if by_rows:
            arrays, grid = (batch.position, batch.table), (rows, num_kv_heads, -(-(num_heads // num_kv_heads) // 16))
        else:
            arrays, grid = (batch.items, batch.spans), (batch.num_items, num_kv_heads, 1)
        GPU.launch(kernel, grid=grid, block=32 * warps,
                   args=(*args, *(address + 4 * at for at in arrays)))  # fmt: skip
        words = GPU.download(out, np.float16, (-(-rows // 128) * 128, num_heads * head_dim))
        found.append(from_a_order(words, rows, num_heads * head_dim).reshape(rows, num_heads, head_dim))
    error = np.abs(found[0] / expected - 1)
    assert error.max() < 3 * OPERAND_BOUND, f"{error.max()} at {np.unravel_index(error.argmax(), error.shape)}"
    for other in found[1:]:
        np.testing.assert_array_equal(other.view(np.uint16), found[0].view(np.uint16))
