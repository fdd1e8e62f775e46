"""exp and log of the sampler: the same bits on every backend (docs/sampling.md, "exp" and "log").

A math library's exp and log differ in their last bit from platform to platform. These two are built from nothing but
additions, multiplications, one division and bit casts, each of which IEEE 754 defines exactly, so whoever repeats the
operations in this order gets these bits. What must not happen on the way is a fused multiply-add, which rounds once
where two operations round twice. numpy cannot fuse: every operator is a loop of its own that stores its rounded result.

The constants are hexadecimal floats, made by scripts/fit_polynomials.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

LOG2_E: Final = float.fromhex("0x1.71547652b82fep+0")
"""log2(e), rounded."""

LN2_HIGH: Final = float.fromhex("0x1.62e42fefa3800p-1")
"""The first 42 bits of ln 2: times an integer of at most 11 bits, still exact."""

LN2_LOW: Final = float.fromhex("0x1.ef35793c76730p-45")
"""ln 2 - LN2_HIGH, rounded."""

EXP_MIN: Final = -708.0
"""exp of less than this is +0. At and above it every intermediate and the result are normal numbers."""

EXP_Q: Final = tuple(
    map(
        float.fromhex,
        (
            "0x1.0000000000000p-1",
            "0x1.5555555555557p-3",
            "0x1.5555555555558p-5",
            "0x1.11111111100dfp-7",
            "0x1.6c16c16c15201p-10",
            "0x1.a01a01abe651dp-13",
            "0x1.a01a01acf8f25p-16",
            "0x1.71de0236f26c6p-19",
            "0x1.27e4ccd26d257p-22",
            "0x1.af4dde3d63703p-26",
            "0x1.1f8b44bf8ffe8p-29",
        ),
    )
)
"""Q with exp(r) = 1 + r + r^2 Q(r) on |r| <= ln(2)/2, lowest degree first."""

LOG_R: Final = tuple(
    map(
        float.fromhex,
        (
            "0x1.5555555555558p-1",
            "0x1.999999999522ep-2",
            "0x1.2492492e02b0fp-2",
            "0x1.c71c62d1c7546p-3",
            "0x1.7462b9b7cb0c5p-3",
            "0x1.39fdc7dff97b0p-3",
            "0x1.2b5f0a3e7cb11p-3",
        ),
    )
)
"""R with 2 atanh(s) = 2s + s z R(z), z = s^2, for arguments between sqrt(1/2) and sqrt(2); lowest degree first."""

_MANTISSA_BITS: Final = np.int64(52)
_EXPONENT_BIAS: Final = np.int64(1023)
_SQRT_HALF_BITS: Final = np.int64(0x3FE6A09E667F3BCD)


def exp(x: FloatArray) -> FloatArray:
    """e to the power of each x, for x in [-inf, 0]; within 1 ulp, exactly 1 at 0 and +0 below EXP_MIN.

    Cody and Waite (1980), chapter 6: x = n ln 2 + r with ln 2 in two parts, a polynomial in r, n into the exponent.
    """
    clipped = np.maximum(x, EXP_MIN)
    n = np.floor(clipped * LOG2_E + 0.5)
    r = (clipped - n * LN2_HIGH) - n * LN2_LOW
    y = 1.0 + (r + r * (r * _horner(EXP_Q, r)))
    power_of_two = ((n.astype(np.int64) + _EXPONENT_BIAS) << _MANTISSA_BITS).view(np.float64)
    return np.where(x < EXP_MIN, 0.0, y * power_of_two)


def log(x: FloatArray) -> FloatArray:
    """The natural logarithm of each x, for positive normal finite x; within 1 ulp, exactly +0 at 1.

    The reduction of FreeBSD's e_log.c (Sun Microsystems, 1993): x = 2^e (1 + f) with 1 + f in [sqrt(1/2), sqrt(2)),
    s = f / (2 + f), and f itself kept apart from the small terms, so that nothing cancels next to 1.
    """
    bits = x.view(np.int64)
    e = (bits - _SQRT_HALF_BITS) >> _MANTISSA_BITS
    f = (bits - (e << _MANTISSA_BITS)).view(np.float64) - 1.0
    s = f / (f + 2.0)
    z = s * s
    tail = z * _horner(LOG_R, z)
    half_square = 0.5 * f * f
    k = e.astype(np.float64)
    return k * LN2_HIGH - ((half_square - (s * (half_square + tail) + k * LN2_LOW)) - f)


def _horner(coefficients: Sequence[float], x: FloatArray) -> FloatArray:
    y = np.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        y *= x
        y += coefficient
    return y
