"""The paged key/value cache: f32 pages of 16 positions of all layers, found through a slot's page table."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.engine.backend import PAGE_SIZE
from crucible.engine.reference.ops import F32, F64

Pages = npt.NDArray[np.int64]


class PagedCache:
    """Keys and values of every layer, f32 [layers, pages, 16, G, K], NaN until written.

    Position p of a request is row p % 16 of page `page_table[p // 16]`. Values are rounded to f32 when they are stored
    and widened when read, so a key is the same number whether its own row or a later one reads it.
    """

    def __init__(self, config: ModelConfig, num_pages: int) -> None:
        shape = (config.num_hidden_layers, num_pages, PAGE_SIZE, config.num_key_value_heads, config.head_dim)
        self.keys: F32 = np.full(shape, np.nan, dtype=np.float32)
        self.values: F32 = np.full(shape, np.nan, dtype=np.float32)

    def write(self, layer: int, page_table: Pages, start: int, k_NGK: F64, v_NGK: F64) -> None:
        """Store N rows from position `start` on."""
        position = np.arange(start, start + len(k_NGK))
        page, row = page_table[position // PAGE_SIZE], position % PAGE_SIZE
        self.keys[layer, page, row] = k_NGK
        self.values[layer, page, row] = v_NGK

    def read(self, layer: int, page_table: Pages, length: int) -> tuple[F64, F64]:
        """Keys and values of positions 0 to `length` - 1 and of the rest of the last page: float64 [T, G, K].

        Whole pages, because slices of a longer array always have the same strides: numpy and BLAS may treat an array
        of a single position differently, and a row's bits must not depend on how many rows it was read with.
        """
        pages = page_table[: -(-length // PAGE_SIZE)]
        shape = (len(pages) * PAGE_SIZE, *self.keys.shape[-2:])
        return (
            self.keys[layer, pages].reshape(shape).astype(np.float64),
            self.values[layer, pages].reshape(shape).astype(np.float64),
        )
