"""exp, norms, activations and rotation, on lanes or one element at a time, each operation rounded once."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from crucible.engine.cpu.compiling import jit
from crucible.engine.cpu.lanes import LANES, Lanes, fma, keep, load, power_of_two, splat, store, total, where_below
from crucible.engine.cpu.state import F32

_EXP_MIN: Final = np.float32(-87.33)
"""exp of less than this is 0: it would not be a normal number."""

_EXP_MAX: Final = np.float32(88.02)
"""exp of more than this is inf."""

_LOG2_E: Final = np.float32(math.log2(math.e))
_LN2_HIGH: Final = np.float32(float.fromhex("0x1.62e4p-1"))
_LN2_LOW: Final = np.float32(math.log(2) - float.fromhex("0x1.62e4p-1"))
_ROUND: Final = np.float32(1.5 * 2**23)
"""Added to a small number, it leaves the nearest integer in the last bits of the mantissa."""

_ZERO, _ONE, _HALF = np.float32(0), np.float32(1), np.float32(0.5)
_INFINITY: Final = np.float32(np.inf)
_Q1, _Q2, _Q3, _Q4, _Q5 = (np.float32(1 / math.factorial(n)) for n in range(3, 8))

_GELU_SCALE: Final = np.float32(2 * math.sqrt(2 / math.pi))
_GELU_CUBIC: Final = np.float32(0.044715)


@jit
def exp(x: Lanes) -> Lanes:
    """e^x within 2 ulp; 0 below -87.33, inf above 88.02, NaN for NaN.

    x = n ln 2 + r with ln 2 in two parts (Cody and Waite 1980, chapter 6), Taylor's polynomial of degree 7 in r, whose
    error on |r| <= ln(2)/2 is 2^-27, and n into the exponent.
    """
    shifted = fma(x, splat(_LOG2_E), splat(_ROUND))
    n = shifted - splat(_ROUND)
    r = fma(n, splat(-_LN2_LOW), fma(n, splat(-_LN2_HIGH), x))
    q = fma(fma(fma(fma(splat(_Q5), r, splat(_Q4)), r, splat(_Q3)), r, splat(_Q2)), r, splat(_Q1))
    q = fma(q, r, splat(_HALF))
    y = (fma(q, r * r, r) + splat(_ONE)) * power_of_two(shifted)
    y = where_below(x, splat(_EXP_MIN), splat(_ZERO), y)
    return where_below(splat(_EXP_MAX), x, splat(_INFINITY), y)


@jit
def silu(x: Lanes) -> Lanes:
    """x / (1 + e^-x)."""
    return x / (splat(_ONE) + exp(splat(_ZERO) - x))


@jit
def gelu(x: Lanes) -> Lanes:
    """x / (1 + e^(-2 sqrt(2/pi) (x + 0.044715 x^3))), which is the tanh form: (1 + tanh(u)) / 2 = 1 / (1 + e^-2u)."""
    u = splat(_GELU_SCALE) * fma(splat(_GELU_CUBIC), x * x * x, x)
    return x / (splat(_ONE) + exp(splat(_ZERO) - u))


@jit
def rms_norm(x: F32, at: int, size: int, weight: F32, weight_at: int, eps: np.float32, out: F32, out_at: int) -> None:
    """(x * (1 / sqrt(mean(x^2) + eps))) * weight over `size` elements; writes whole lanes."""
    zero = splat(_ZERO)
    squares = zero
    for i in range(0, size, LANES):
        value = keep(load(x, at + i), size - i, zero)
        squares = fma(value, value, squares)
    scale = splat(_ONE / np.sqrt(total(squares) / np.float32(size) + eps))
    for i in range(0, size, LANES):
        store(out, out_at + i, load(x, at + i) * scale * load(weight, weight_at + i))


@jit
def layer_norm(
    x: F32, at: int, size: int, weight: F32, weight_at: int, bias_at: int, eps: np.float32, out: F32, out_at: int
) -> None:
    """((x - mean) * (1 / sqrt(variance + eps))) * weight + bias; the biased variance, from squared deviations."""
    zero = splat(_ZERO)
    sums = zero
    for i in range(0, size, LANES):
        sums = sums + keep(load(x, at + i), size - i, zero)
    mean = splat(total(sums) / np.float32(size))
    squares = zero
    for i in range(0, size, LANES):
        deviation = keep(load(x, at + i) - mean, size - i, zero)
        squares = fma(deviation, deviation, squares)
    scale = splat(_ONE / np.sqrt(total(squares) / np.float32(size) + eps))
    for i in range(0, size, LANES):
        value = (load(x, at + i) - mean) * scale
        store(out, out_at + i, value * load(weight, weight_at + i) + load(weight, bias_at + i))


@jit
def rotate(x: F32, at: int, head_dim: int, cos: F32, sin: F32, angle_at: int) -> None:
    """RoPE in place: element i turns with element i + head_dim / 2; products and their sum are rounded one by one."""
    half = head_dim // 2
    for i in range(half):
        a, b, c, s = x[at + i], x[at + half + i], cos[angle_at + i], sin[angle_at + i]
        x[at + i] = a * c - b * s
        x[at + half + i] = b * c + a * s
