"""Weights in the order of the tensor cores' lanes, and batches as the kernels read them; both need no GPU.

The slow twin of the packing is the comment of kernels/layout.cuh, one element at a time.
"""

from __future__ import annotations

import numpy as np
import pytest
from cells import toy

from crucible.engine.cuda.batch import block_size, make_batch
from crucible.engine.cuda.weights import gate_up_order, pack, qkv_order
from crucible.engine.host_backend import Span
from crucible.engine.quant import F16Weight, Int8Weight, Weight, halve, quantise
from crucible.errors import CrucibleError


def element(matrix_words: np.ndarray, n: int, step: int, k: int, group: int) -> int:
    """The bits of output n at element k of a step that is number `step` in memory."""
    lane, within = n % 8 * 4 + k % 8 // 2, k // 8 * 2 + k % 2
    words = matrix_words[n // 8, step // group, lane]
    if group == 4:
        return int(words[step % group * 4 + within])
    return int(words.view(np.uint16)[step % group * 4 + within])


@pytest.mark.parametrize("weight_format", ["int8", "f16"])
@pytest.mark.parametrize(
    ("outputs", "inputs", "chunk"),
    [(24, 128, 128), (130, 208, 128), (16, 576, 128), (40, 240, 80), (40, 192, 96), (8, 192, 64)],
)
def test_every_weight_is_where_the_kernels_look(weight_format: str, outputs: int, inputs: int, chunk: int) -> None:
    rng = np.random.default_rng(0)
    weight_NK = rng.standard_normal((outputs, inputs)).astype(np.float32)
    weight: Int8Weight | F16Weight = quantise(weight_NK, chunk) if weight_format == "int8" else halve(weight_NK)
    order = rng.permutation(outputs)
    matrix = pack([weight], chunk, order)
    group = 4 if weight_format == "int8" else 2
    assert matrix.padded % 128 == 0
    assert matrix.num_units == -(-outputs // 16)
    assert (matrix.steps, matrix.chunks) == (inputs // 16, -(-inputs // chunk))
    slots = -(-matrix.chunk_steps // 4) * 4
    seen = 0
    for n in range(0, matrix.padded, 3):
        for chunk_index in range(matrix.chunks):
            for slot in range(slots):
                at = chunk_index * slots + slot
                if at >= matrix.groups * group:
                    assert chunk_index == matrix.chunks - 1
                    continue
                for k in range(16):
                    column = chunk_index * chunk + slot * 16 + k
                    real = n < outputs and slot * 16 < chunk and column < inputs
                    found = element(matrix.words, n, at, k, group)
                    if weight_format == "int8":
                        assert found - 128 == (weight.values[order[n], column] if real else 0)
                    else:
                        assert found == (weight.values[order[n], column].view(np.uint16) if real else 0)
                    seen += real
    assert seen == len(range(0, outputs, 3)) * inputs
    expected = weight.scales[order].T if weight_format == "int8" else weight.scales[order]
    np.testing.assert_array_equal(matrix.scales[..., :outputs], expected)
    assert not matrix.scales[..., outputs:].any()


def test_matrices_one_below_the_other_are_packed_as_one() -> None:
    rng = np.random.default_rng(1)
    parts: list[Weight] = [quantise(rng.standard_normal((n, 144)).astype(np.float32)) for n in (32, 16, 48)]
    values = np.concatenate([part.values for part in parts])  # type: ignore[union-attr]
    scales = np.concatenate([part.scales for part in parts])  # type: ignore[union-attr]
    whole = pack([Int8Weight(values, scales, 128)], 128)
    stacked = pack(parts, 128)
    np.testing.assert_array_equal(stacked.words, whole.words)
    np.testing.assert_array_equal(stacked.scales, whole.scales)


def test_a_scale_per_other_chunks_is_refused() -> None:
    with pytest.raises(CrucibleError, match="needs a scale per 128 inputs, and the weights have 64"):
        pack([quantise(np.ones((8, 128), dtype=np.float32), 64)], 128)


def test_pairs_that_rope_turns_and_gates_with_their_ups_share_a_unit() -> None:
    config = toy(head_dim=64, num_attention_heads=6, num_key_value_heads=2, intermediate_size=48)
    order = qkv_order(config)
    assert sorted(order) == list(range((6 + 4) * 64))
    for unit in order[: 8 * 64].reshape(-1, 2, 8):
        np.testing.assert_array_equal(unit[1], unit[0] + 32)
    np.testing.assert_array_equal(order[8 * 64 :], np.arange(8 * 64, 10 * 64))
    for gates, ups in gate_up_order(config).reshape(-1, 2, 8):
        np.testing.assert_array_equal(ups, gates + 48)
        assert (gates < 48).all()


def test_a_batch_says_of_each_row_where_it_stands_and_what_it_reads() -> None:
    spans = [
        Span(np.array([7, 3, 9]), 30, 1),
        Span(np.array([4, 5, 6, 8]), 10, 40),
        Span(np.array([1]), 0, 3),
    ]
    ids = np.arange(100, 144)
    wanted = np.zeros(44, dtype=bool)
    wanted[[0, 40, 43]] = True
    batch = make_batch(ids, spans, wanted, group=3)
    block = batch.block
    assert block.dtype == np.int32
    assert (batch.num_rows, batch.num_wanted, batch.is_decode) == (44, 3, False)
    np.testing.assert_array_equal(block[batch.ids :][:44], ids)
    np.testing.assert_array_equal(block[batch.position :][:44], [30, *range(10, 50), 0, 1, 2])
    np.testing.assert_array_equal(block[batch.table :][:44], [0] + [2] * 40 + [6] * 3)
    np.testing.assert_array_equal(block[batch.pages :], [7, 3, 4, 5, 6, 8, 1])
    np.testing.assert_array_equal(block[batch.wanted :][:3], [0, 40, 43])
    np.testing.assert_array_equal(
        block[batch.spans :][:12].reshape(3, 4), [[0, 30, 1, 0], [1, 10, 40, 2], [41, 0, 3, 6]]
    )
    items = block[batch.items :][: 2 * batch.num_items].reshape(-1, 2)
    # 3, 120 and 9 rows of (position, head) in blocks of 64, the furthest first.
    np.testing.assert_array_equal(items, [[1, 64], [0, 0], [1, 0], [2, 0]])
    assert len(block) <= block_size(44, 3, 4, 3)


def test_a_decode_batch_lies_where_its_size_alone_says() -> None:
    places = set()
    for start in (5, 100):
        spans = [Span(np.arange(10), start, 1), Span(np.arange(10, 20), start + 3, 1)]
        batch = make_batch(np.array([1, 2]), spans, np.array([True, True]), group=4)
        assert batch.is_decode
        places.add((batch.ids, batch.position, batch.table, batch.pages))
    assert len(places) == 1
