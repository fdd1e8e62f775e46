"""Philox4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as
1, 2, 3" (SC 2011), section 3.3: a keyed bijection of 128-bit counters, ten rounds, no state.

All words are held in uint64, where the product of two of them is exact and shifts never meet a sign.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

WordArray = npt.NDArray[np.uint64]
"""32-bit words, each in the low half of a uint64."""

ROUNDS: Final = 10
MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
WEYL: Final = (0x9E3779B9, 0xBB67AE85)
"""What the two key words grow by between rounds: golden ratio and sqrt(3) - 1."""

_M0, _M1 = map(np.uint64, MULTIPLIERS)
_MASK32: Final = np.uint64(0xFFFFFFFF)
_BITS32: Final = np.uint64(32)


def philox4x32(
    counter: tuple[WordArray, WordArray, WordArray, WordArray], key: tuple[int, int]
) -> tuple[WordArray, WordArray, WordArray, WordArray]:
    """The four output words of each counter; counter words broadcast against each other, key words are below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (
            (p1 >> _BITS32) ^ c1 ^ np.uint64(k0),
            p1 & _MASK32,
            (p0 >> _BITS32) ^ c3 ^ np.uint64(k1),
            p0 & _MASK32,
        )
        k0, k1 = (k0 + WEYL[0]) % 2**32, (k1 + WEYL[1]) % 2**32
    return c0, c1, c2, c3


def uniform(seed: int, position: int, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """A number strictly between 0 and 1 for each token id: an odd multiple of 2^-53, exact in float64.

    Args:
        seed: any integer; it counts mod 2^64.
        position: of the token drawn in its sequence, the prompt's first token being 0; below 2^64.
        token_ids: [N], each in 0..2^32 - 1.
    """
    low, high, zero = (np.array(word, np.uint64) for word in (position % 2**32, position >> 32, 0))
    key = (seed % 2**32, (seed >> 32) % 2**32)
    w0, w1, _, _ = philox4x32((low, high, token_ids.astype(np.uint64), zero), key)
    bits52 = (w0 << np.uint64(20)) | (w1 >> np.uint64(12))
    return (bits52.astype(np.float64) + 0.5) * 2.0**-52
