"""Attention of one row, in chunks of 64 positions merged in ascending order (docs/arithmetic.md, section 3).

Shape letters: H query heads, G key/value heads, R = H/G query heads per key/value head, K head_dim, S positions of one
chunk, T positions the row may read: all up to its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from crucible.engine.reference.ops import F32, F64

CHUNK: Final = 64
"""Positions per chunk, counted from position 0."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Softmax attention over some positions, not yet divided.

    Attributes:
        maximum: the largest score, [G, R, 1].
        total: the sum of the weights exp(score - maximum), [G, R, 1].
        weighted: the sum of the values, each times its weight, [G, R, K].
    """

    maximum: F64
    total: F64
    weighted: F64

    def merge(self, later: Partial) -> Partial:
        """Attention over the positions of both."""
        maximum = np.maximum(self.maximum, later.maximum)
        scale, later_scale = np.exp(self.maximum - maximum), np.exp(later.maximum - maximum)
        return Partial(
            maximum,
            self.total * scale + later.total * later_scale,
            self.weighted * scale + later.weighted * later_scale,
        )


def attend(q_HK: F64, k_TGK: F64, v_TGK: F64, slopes_H: F32 | None = None) -> F64:
    """Output [H, K] of the row at position T - 1, which reads positions 0 to T - 1.

    Query head h reads key/value head h // R. `slopes_H` adds the ALiBi bias -slope * (T - 1 - position) to the scores.
    Keys and values may be slices of longer arrays; nothing past T is read.
    """
    num_positions, num_kv_heads, head_dim = k_TGK.shape
    q_GRK = q_HK.reshape(num_kv_heads, -1, head_dim)
    merged: Partial | None = None
    for start in range(0, num_positions, CHUNK):
        end = min(start + CHUNK, num_positions)
        bias_GRS = None
        if slopes_H is not None:
            distance_S = np.arange(num_positions - 1 - start, num_positions - 1 - end, -1, dtype=np.float64)
            bias_GRS = -slopes_H.astype(np.float64).reshape(num_kv_heads, -1, 1) * distance_S
        chunk = attend_chunk(q_GRK, k_TGK[start:end], v_TGK[start:end], bias_GRS)
        merged = chunk if merged is None else merged.merge(chunk)
    assert merged is not None, "a row reads at least its own position"
    o_GRK: F64 = merged.weighted / merged.total
    return o_GRK.reshape(q_HK.shape)


def attend_chunk(q_GRK: F64, k_SGK: F64, v_SGK: F64, bias_GRS: F64 | None) -> Partial:
    """Attention over the positions of one chunk, all of them allowed."""
    score_GRS = q_GRK @ k_SGK.transpose(1, 2, 0) * q_GRK.shape[-1] ** -0.5
    if bias_GRS is not None:
        score_GRS = score_GRS + bias_GRS
    max_GR1 = np.max(score_GRS, axis=-1, keepdims=True)
    weight_GRS = np.exp(score_GRS - max_GR1)
    return Partial(max_GR1, np.sum(weight_GRS, axis=-1, keepdims=True), weight_GRS @ v_SGK.transpose(1, 0, 2))
