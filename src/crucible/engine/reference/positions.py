"""What tells attention where a token stands: the RoPE rotation, whose table is `engine/rope.py`'s, and ALiBi's slopes.

Slopes are computed in float64 and rounded once to float32, so that every backend holds the same numbers.
"""

from __future__ import annotations

import numpy as np

from crucible.engine.reference.ops import F32, F64


def rotate(x_MHK: F64, cos: F64, sin: F64) -> F64:
    """Every head of row m turned by row m of cos and sin, [M, head_dim / 2]; element i pairs with i + head_dim / 2."""
    first, second = np.split(x_MHK, 2, axis=-1)
    cos_M1, sin_M1 = cos[:, None, :], sin[:, None, :]
    return np.concatenate((first * cos_M1 - second * sin_M1, second * cos_M1 + first * sin_M1), axis=-1)


def alibi_slopes(num_heads: int) -> F32:
    """The slope of each head, f32 [H] (Press, Smith and Lewis 2022, section 3, and its published code).

    A power of two n has 2^(-8/n), 2^(-16/n), ..., 2^-8. Another count takes the slopes of the power of two below it,
    then every other slope of the power of two above it.
    """
    below = 1 << (num_heads.bit_length() - 1)
    own = 2.0 ** (-8.0 * np.arange(1, below + 1) / below)
    between = 2.0 ** (-4.0 * np.arange(1, 2 * below, 2) / below)
    return np.concatenate((own, between[: num_heads - below])).astype(np.float32)
