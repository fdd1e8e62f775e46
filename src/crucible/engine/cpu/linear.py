"""Linear layers: a lane is an output row, and every lane adds its products in ascending k.

So nothing is ever summed across lanes, and what a row of activations gives does not depend on how many rows there are:
blocks of many rows, of four and of one run the same chain of operations per row, and differ in what they keep in
registers.

    c_i = fma(w[n, k], x[k], c_i) over the k of chunk i, ascending, from zero
    y = c_0 * s_0;  y = fma(c_i, s_i, y) for i = 1, 2, ...
"""

from __future__ import annotations

from typing import Any, Final

from crucible.engine.cpu.compiling import HAS_WIDE_REGISTERS, jit
from crucible.engine.cpu.lanes import LANES, accumulate, fma, load, put, store, zeros
from crucible.engine.cpu.state import F32, Linear

TILE: Final = 32
"""Outputs of a tile."""


BLOCK_ROWS: Final = 8 if HAS_WIDE_REGISTERS else 6
"""Rows of the largest block. A block may run past the last row by as many less one, and buffers have room for it."""

SUMS: Final = BLOCK_ROWS * TILE
"""Floats of scratch that `multiply` needs."""


def _make_block(rows: int, vectors: int) -> Any:
    """A function that multiplies one tile by `rows` rows, `vectors` lanes of each in registers at a time."""
    count, width = rows * vectors, vectors * LANES

    @jit
    def block(
        weights: Any, at: int, layer: Linear, scale_at: int, x: F32, x_at: int, x_stride: int, y: F32, y_at: int,
        y_stride: int, sums: F32, sums_at: int,
    ) -> None:  # fmt: skip
        scales, scale_step, inputs, chunk = layer.scales, layer.scale_step, layer.inputs, layer.chunk
        for first in range(0, inputs, chunk):
            last = min(first + chunk, inputs)
            for column in range(0, TILE, width):
                tile = zeros(count)
                for k in range(first, last):
                    tile = accumulate(tile, vectors, weights, at + k * TILE + column, x, x_at + k, x_stride)
                put(tile, vectors, sums, sums_at + column, TILE)
            for row in range(rows):
                for column in range(0, TILE, LANES):
                    scale = load(scales, scale_at + column)
                    part = load(sums, sums_at + row * TILE + column)
                    target = y_at + row * y_stride + column
                    if first == 0:
                        store(y, target, part * scale)
                    else:
                        store(y, target, fma(part, scale, load(y, target)))
            scale_at += scale_step

    return block


# One vector of each row keeps the sums, and with 16 registers of 256 bits the weights too, in registers; a row alone
# needs more than one chain of additions to hide their latency.
_many_rows = _make_block(BLOCK_ROWS, 1)
_four_rows = _make_block(4, 1)
_one_row = _make_block(1, 2)


@jit
def multiply(
    weights: Any, layer: Linear, layer_index: int, tile: int, x: F32, x_stride: int, num_rows: int, y: F32, y_at: int,
    y_stride: int, sums: F32, sums_at: int,
) -> None:  # fmt: skip
    """One tile's outputs for all rows: 32 columns of y from y_at on. Rows up to the end of a block are written too."""
    tile += layer_index * layer.tiles
    at = layer.start + tile * layer.inputs * TILE
    per_tile = TILE
    if layer.scale_step > 0:
        per_tile *= (layer.inputs + layer.chunk - 1) // layer.chunk
    scale_at = tile * per_tile
    row = 0
    while row < num_rows:
        x_at, target = row * x_stride, y_at + row * y_stride
        if num_rows - row > 4:
            _many_rows(weights, at, layer, scale_at, x, x_at, x_stride, y, target, y_stride, sums, sums_at)
            row += BLOCK_ROWS
        elif num_rows - row > 1:
            _four_rows(weights, at, layer, scale_at, x, x_at, x_stride, y, target, y_stride, sums, sums_at)
            row += 4
        else:
            _one_row(weights, at, layer, scale_at, x, x_at, x_stride, y, target, y_stride, sums, sums_at)
            row += 1
