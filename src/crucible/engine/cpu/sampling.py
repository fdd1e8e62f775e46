"""The sampler of `engine/sampling.py`, compiled: the same token from every row, in a tenth of the time.

Its float64 operations are the contract's (docs/sampling.md), one by one, and compiled code neither fuses nor reorders
them. What differs is how tokens are put in order: not at all. The candidates of top_k and of top_p are a prefix of the
contract's order, so the key of its last token says who belongs to it, and a search through the keys' digits finds it.

Loops go over whole rows in several passes, so that LLVM computes eight tokens at once. Shape letters: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic

from crucible.engine.cpu.compiling import entry, jit
from crucible.engine.numerics import EXP_MIN, EXP_Q, LN2_HIGH, LN2_LOW, LOG2_E, LOG_R
from crucible.engine.philox import MULTIPLIERS, WEYL
from crucible.engine.request import SamplingParams
from crucible.engine.sampling import MASS_ONE, LogitArray

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

_ZERO: Final = np.uint64(0)
_MASK32: Final = np.uint64(0xFFFFFFFF)
_BITS32, _BITS20, _BITS12 = np.uint64(32), np.uint64(20), np.uint64(12)
_MULTIPLIER_0, _MULTIPLIER_1 = (np.uint64(multiplier) for multiplier in MULTIPLIERS)
_WEYL_0, _WEYL_1 = (np.uint64(word) for word in WEYL)
_MANTISSA_BITS: Final = np.int64(52)
_EXPONENT_BIAS: Final = np.int64(1023)
_SQRT_HALF_BITS: Final = np.int64(0x3FE6A09E667F3BCD)
_SIGN32: Final = np.int64(1 << 31)

_DIGIT: Final = 8
"""Bits of a key that the search looks at in one pass."""


class Sampler:
    """Draws from rows of one length.

    Args:
        vocab_size: V.
    """

    def __init__(self, vocab_size: int) -> None:
        # Kept, because memory that the system hands out anew for every draw takes longer than the draw.
        self._scores_V, self._noise_V = np.zeros(vocab_size), np.zeros(vocab_size)
        self._masses_V, self._keys_V = np.zeros(vocab_size, dtype=np.int64), np.zeros(vocab_size, dtype=np.uint64)

    def choose(self, adjusted_V: LogitArray, params: SamplingParams, position: int) -> int:
        """What `engine.sampling.sample` takes as its `choose`."""
        chosen = choose(
            adjusted_V,
            float(adjusted_V.max()),
            1.0 / params.temperature,
            min(params.top_k or len(adjusted_V), len(adjusted_V)),
            float(params.top_p),
            math.ceil(params.min_p * MASS_ONE),
            np.uint64(params.seed % 2**64),
            np.uint64(position),
            self._scores_V,
            self._noise_V,
            self._masses_V,
            self._keys_V,
        )
        return int(chosen)


# ---- float64, operation by operation as numerics.py and philox.py ---------------------------------------------------


def _bit_cast(source: Any, target: Any) -> Any:
    @intrinsic
    def cast(typing: Any, x: Any) -> Any:
        def generate(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), generate

    return cast


_bits_of_double = _bit_cast(types.float64, types.int64)
_double_of_bits = _bit_cast(types.int64, types.float64)
_bits_of_float = _bit_cast(types.float32, types.int32)


def _make_horner(coefficients: Sequence[float]) -> Any:
    """A polynomial by Horner's rule, lowest degree first, with separate multiplications and additions."""
    lowest = coefficients[0]
    if len(coefficients) == 1:
        return jit(lambda x: lowest)
    higher = _make_horner(coefficients[1:])
    return jit(lambda x: higher(x) * x + lowest)


_exp_polynomial = _make_horner(EXP_Q)
_log_polynomial = _make_horner(LOG_R)


@jit
def _exp(x: float) -> float:
    clipped = x if x > EXP_MIN else EXP_MIN
    n = np.floor(clipped * LOG2_E + 0.5)
    r = (clipped - n * LN2_HIGH) - n * LN2_LOW
    y = 1.0 + (r + r * (r * _exp_polynomial(r)))
    power_of_two = _double_of_bits((np.int64(n) + _EXPONENT_BIAS) << _MANTISSA_BITS)
    return 0.0 if x < EXP_MIN else y * power_of_two


@jit
def _log(x: float) -> float:
    bits = _bits_of_double(x)
    e = (bits - _SQRT_HALF_BITS) >> _MANTISSA_BITS
    f = _double_of_bits(bits - (e << _MANTISSA_BITS)) - 1.0
    s = f / (f + 2.0)
    z = s * s
    tail = z * _log_polynomial(z)
    half_square = 0.5 * f * f
    k = np.float64(e)
    return k * LN2_HIGH - ((half_square - (s * (half_square + tail) + k * LN2_LOW)) - f)


@jit
def _round(c0: Any, c1: Any, c2: Any, c3: Any, k0: Any, k1: Any) -> Any:
    """One round of Philox, and the next one's key."""
    p0, p1 = _MULTIPLIER_0 * c0, _MULTIPLIER_1 * c2
    counter = (p1 >> _BITS32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> _BITS32) ^ c3 ^ k1, p0 & _MASK32
    return *counter, (k0 + _WEYL_0) & _MASK32, (k1 + _WEYL_1) & _MASK32


# ---- order ----------------------------------------------------------------------------------------------------------


@jit
def _order_key(logit: Any, token_id: int) -> Any:
    """As `sampling.top_tokens` orders: the float's bits, mapped so that integers compare as floats do; then the id."""
    bits = np.int64(_bits_of_float(logit + np.float32(0)))
    ordered = bits + _SIGN32 if bits >= 0 else ~bits & np.int64(0xFFFFFFFF)
    return (np.uint64(ordered) << _BITS32) | (_MASK32 - np.uint64(token_id))


# ---- passes over a row ----------------------------------------------------------------------------------------------


@jit
def _score(logits_V: LogitArray, best: float, inverse_temperature: float, scores_V: F64) -> None:
    for i in range(scores_V.size):
        score = (np.float64(logits_V[i]) - best) * inverse_temperature
        scores_V[i] = 0.0 if logits_V[i] == best else score


@jit
def _weigh(scores_V: F64, masses_V: I64) -> None:
    for i in range(masses_V.size):
        masses_V[i] = np.int64(np.floor(_exp(scores_V[i]) * MASS_ONE + 0.5))


@jit
def _order(logits_V: LogitArray, keys_V: U64) -> None:
    for i in range(keys_V.size):
        keys_V[i] = _order_key(logits_V[i], i)


@jit
def _drop_below(values_V: Any, lowest: Any, scores_V: F64) -> None:
    for i in range(scores_V.size):
        scores_V[i] = scores_V[i] if values_V[i] >= lowest else -np.inf


@jit
def _make_noise(seed: Any, position: Any, noise_V: F64) -> None:
    high, low, k0, k1 = position >> _BITS32, position & _MASK32, seed & _MASK32, seed >> _BITS32
    for i in range(noise_V.size):
        # Ten rounds, written out: LLVM computes eight tokens at once only where there is no loop within.
        a = _round(low, high, np.uint64(i), _ZERO, k0, k1)
        b = _round(*a)
        a = _round(*b)
        b = _round(*a)
        a = _round(*b)
        b = _round(*a)
        a = _round(*b)
        b = _round(*a)
        a = _round(*b)
        b = _round(*a)
        noise_V[i] = (np.float64((b[0] << _BITS20) | (b[1] >> _BITS12)) + 0.5) * 2.0**-52
    for i in range(noise_V.size):
        noise_V[i] = -_log(-_log(noise_V[i]))


@jit
def _last_key(keys_V: U64, amounts_V: I64, target: int) -> Any:
    """The highest key at which the amounts of all keys not below it reach `target`, which is positive and reached."""
    totals = np.empty(1 << _DIGIT, dtype=np.int64)
    prefix = _ZERO
    for shift in range(64 - _DIGIT, -1, -_DIGIT):
        above = np.uint64(shift + _DIGIT)
        totals[:] = 0
        for i in range(keys_V.size):
            # A shift by 64 is undefined, and in the first pass every key counts.
            if shift == 64 - _DIGIT or keys_V[i] >> above == prefix:
                totals[np.int64((keys_V[i] >> np.uint64(shift)) & np.uint64((1 << _DIGIT) - 1))] += amounts_V[i]
        digit = (1 << _DIGIT) - 1
        while totals[digit] < target:
            target -= totals[digit]
            digit -= 1
        prefix = (prefix << np.uint64(_DIGIT)) | np.uint64(digit)
    return prefix


@entry
def choose(
    adjusted_V: LogitArray,
    best: float,
    inverse_temperature: float,
    top_k: int,
    top_p: float,
    min_mass: int,
    seed: Any,
    position: Any,
    scores_V: F64,
    noise_V: F64,
    masses_V: I64,
    keys_V: U64,
) -> int:
    """The candidate of highest score + noise; `best` is the highest logit and above -inf. The last four are scratch."""
    _score(adjusted_V, best, inverse_temperature, scores_V)
    if top_k < scores_V.size or top_p < 1:
        _order(adjusted_V, keys_V)
    if top_k < scores_V.size:
        masses_V[:] = 1
        _drop_below(keys_V, _last_key(keys_V, masses_V, top_k), scores_V)
    if top_p < 1:
        _weigh(scores_V, masses_V)
        total = masses_V.sum()
        threshold = min(max(np.int64(np.ceil(np.float64(total) * top_p)), 1), total)
        _drop_below(keys_V, _last_key(keys_V, masses_V, threshold), scores_V)
    if min_mass > 0:
        _weigh(scores_V, masses_V)
        _drop_below(masses_V, min_mass, scores_V)
    _make_noise(seed, position, noise_V)
    for i in range(scores_V.size):
        noise_V[i] += scores_V[i]
    highest = noise_V.max()
    chosen = 0
    while noise_V[chosen] != highest:
        chosen += 1
    return chosen


_DOUBLES: Final = numba.typeof(np.empty(0))
CHOOSE_SIGNATURE: Final = (
    numba.typeof(np.empty(0, dtype=np.float32)),
    types.float64,
    types.float64,
    types.int64,
    types.float64,
    types.int64,
    types.uint64,
    types.uint64,
    _DOUBLES,
    _DOUBLES,
    numba.typeof(np.empty(0, dtype=np.int64)),
    numba.typeof(np.empty(0, dtype=np.uint64)),
)
