"""The rows of a step as the kernels read them: 32-bit integers in one block, copied to the device at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from crucible.engine.backend import PAGE_SIZE
from crucible.engine.host_backend import Ids, Span

WIDE_ROWS: Final = 64
"""Rows of (position, query head) that a block of kernels/attention.cuh takes."""

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A step's integers and where each array of them begins.

    Attributes:
        block: all of them, int32; the arrays lie one behind the other.
        num_rows: M.
        num_wanted: W, rows whose logits are wanted.
        wanted: index of `wanted` [W] in the block, or -1: all rows in order.
        ids, position, table: indices of arrays [M]; `table` says where in `pages` a row's request begins.
        pages: index of the requests' page tables.
        spans, items: indices of [S][4] row, start, length, table and [I][2] span, first row; -1: one row per request.
        num_items: I.
    """

    block: I32
    num_rows: int
    num_wanted: int
    ids: int
    position: int
    table: int
    wanted: int
    pages: int
    spans: int
    items: int
    num_items: int

    @property
    def is_decode(self) -> bool:
        """Whether each request has one row, and its logits are wanted: the arrays then lie where M alone decides."""
        return self.items < 0 and self.wanted < 0


def make_batch(ids_M: Ids, spans: Sequence[Span], wanted_M: npt.NDArray[np.bool_], group: int) -> Batch:
    """The batch of the M rows that `spans` cover in order; `group` query heads share a key/value head."""
    num_rows, num_wanted = len(ids_M), int(np.count_nonzero(wanted_M))
    length = np.array([span.length for span in spans], dtype=np.int64)
    start = np.array([span.start for span in spans], dtype=np.int64)
    used = -(-(start + length) // PAGE_SIZE)
    table = np.cumsum(used) - used
    first_row = np.cumsum(length) - length
    arrays = {
        "ids": ids_M,
        "position": np.arange(num_rows) + np.repeat(start - first_row, length),
        "table": np.repeat(table, length),
    }
    items = np.empty((0, 2), dtype=np.int64)
    if num_rows > len(spans):
        items = _items(start, length, group)
        arrays["spans"] = np.stack([first_row, start, length, table], axis=1)
        arrays["items"] = items
    if num_wanted < num_rows:
        arrays["wanted"] = np.flatnonzero(wanted_M)
    arrays["pages"] = np.concatenate([span.page_table[:count] for span, count in zip(spans, used, strict=True)])
    at, offsets = 0, {}
    for name, array in arrays.items():
        offsets[name] = at
        at += array.size
    return Batch(
        block=np.concatenate([array.reshape(-1) for array in arrays.values()]).astype(np.int32),
        num_rows=num_rows,
        num_wanted=num_wanted,
        ids=offsets["ids"],
        position=offsets["position"],
        table=offsets["table"],
        wanted=offsets.get("wanted", -1),
        pages=offsets["pages"],
        spans=offsets.get("spans", -1),
        items=offsets.get("items", -1),
        num_items=len(items),
    )


def block_size(num_rows: int, num_slots: int, pages_per_slot: int, group: int) -> int:
    """Integers that the largest batch of so many rows and requests takes."""
    items = -(-num_rows * group // WIDE_ROWS) + num_slots
    return 4 * num_rows + 4 * num_slots + 2 * items + num_slots * pages_per_slot


def _items(start: Ids, length: Ids, group: int) -> Ids:
    """Blocks of attention, those that read the most chunks first, so that none of them is left alone at the end."""
    blocks = -(-length * group // WIDE_ROWS)
    span = np.repeat(np.arange(len(length)), blocks)
    first = (np.arange(blocks.sum()) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * WIDE_ROWS
    longest_first = np.argsort(-(start[span] + first // group), kind="stable")
    return np.stack([span, first], axis=1)[longest_first]
