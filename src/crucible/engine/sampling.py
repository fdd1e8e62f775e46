"""The sampler on the host: one row of logits in, one token id out, by the contract in docs/sampling.md.

A draw is a pure function of the row, the parameters, the position and the token counts. There is no generator state:
the noise of a token is a function of (seed, position, token id), and the token drawn is the argmax of score + noise
(Gumbel 1954; Maddison, Tarlow and Minka 2014), so neither the order of draws nor a neighbour can matter. Probability
is summed in fixed point, where the order of summation cannot matter either.

Token ids, counts and masses are int64; uint64 is left to bit patterns, because numpy turns a mix of the two into
float64.

Shape letters: V vocabulary, N candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from crucible.config import MAX_VOCAB_SIZE
from crucible.engine.numerics import FloatArray, exp, log
from crucible.engine.philox import uniform
from crucible.engine.request import SamplingParams

LogitArray = npt.NDArray[np.float32]
IdArray = npt.NDArray[np.int64]
CountArray = npt.NDArray[np.integer[Any]]

MASS_ONE: Final = 2**34
"""Fixed-point mass of the best token. 2^18 tokens of it sum to 2^52, which float64 still holds exactly."""

LOGPROB_FLOOR: Final = -9999.0
"""Reported for log probabilities below it, -inf included: JSON has no infinity."""

_NOISE_BLOCK: Final = 8192
"""Token ids whose noise is made at a time: temporaries of 64 KiB stay in cache and are no work for the allocator."""

_BITS32: Final = np.uint64(32)
_MASK32: Final = np.uint64(0xFFFFFFFF)
_SIGN32: Final = np.uint32(0x80000000)


Choose: TypeAlias = Callable[[LogitArray, SamplingParams, int], int]
"""From a row of `adjust` with a logit above -inf, a positive temperature and the token's position, the token drawn."""


class Draw(NamedTuple):
    """A token id, and whether it stands for nothing: no logit of the row was above -inf."""

    token_id: int
    failed: bool = False


def sample(
    logits_V: LogitArray,
    params: SamplingParams,
    position: int,
    *,
    prompt_counts_V: CountArray | None = None,
    output_counts_V: CountArray | None = None,
    forbidden_ids: Collection[int] = (),
    choose: Choose | None = None,
) -> Draw:
    """Draws the token that stands at `position` of its sequence.

    Args:
        logits_V: [V] float32, what the model put out at position - 1; not changed. NaN counts as -inf.
        params: n is not looked at: `SamplingParams.choices` makes the n requests.
        position: of the token drawn, the prompt's first token being 0; below 2^64.
        prompt_counts_V: [V] integers, how often each id occurs in the prompt. May be None when
            `params.counts_tokens` is false.
        output_counts_V: the same for the tokens generated so far.
        forbidden_ids: ids not to be drawn: those that would end a request that has not reached min_tokens.
        choose: draws from the adjusted row in place of `_choose`; gives the same token.

    Returns:
        The token; id 0 and failed = True where no logit is above -inf.

    Raises:
        ValueError: an argument has another type or shape, or an id is not below V.
    """
    _check_row(logits_V)
    if not 0 <= position < 2**64:
        raise ValueError(f"position must be from 0 to 2^64 - 1, not {position}")
    adjusted_V = adjust(logits_V, params, prompt_counts_V, output_counts_V, forbidden_ids)
    best = int(adjusted_V.argmax())
    if adjusted_V[best] == -np.inf:
        return Draw(0, failed=True)
    if params.temperature == 0:
        return Draw(best)
    return Draw((choose or _choose)(adjusted_V, params, position))


def _choose(adjusted_V: LogitArray, params: SamplingParams, position: int) -> int:
    """The candidate of highest score + noise; arguments as `candidates` takes them."""
    ids_N, scores_N = candidates(adjusted_V, params)
    values_N = scores_N + gumbel_noise(params.seed, position, ids_N)
    return int(ids_N[values_N == values_N.max()].min())


def gumbel_noise(seed: int, position: int, token_ids: IdArray) -> FloatArray:
    """Standard Gumbel noise -log(-log u) for each of token_ids [N]; finite, between -3.61 and 36.74."""
    noise_N = np.empty(token_ids.shape)
    for start in range(0, len(token_ids), _NOISE_BLOCK):
        block = slice(start, start + _NOISE_BLOCK)
        noise_N[block] = -log(-log(uniform(seed, position, token_ids[block])))
    return noise_N


def logprobs(logits_V: LogitArray) -> FloatArray:
    """Log probability of every token [V] under the raw logits at temperature 1, never below LOGPROB_FLOOR.

    Bias, penalties, temperature and filters do not enter. A row without a logit above -inf is all floor.
    """
    _check_row(logits_V)
    usable_V = _without_nan(logits_V)
    best = usable_V.max()
    if best == -np.inf:
        return np.full(usable_V.shape, LOGPROB_FLOOR)
    with np.errstate(invalid="ignore", over="ignore"):
        below_best_V = np.where(usable_V == best, np.float32(0), usable_V - best).astype(np.float64)
    total = float(masses(below_best_V).sum()) / MASS_ONE
    logprobs_V = below_best_V - log(np.array([total]))
    return np.maximum(logprobs_V, LOGPROB_FLOOR)


def top_tokens(logits_V: LogitArray, count: int) -> IdArray:
    """Ids of the `count` (at most V) highest logits, best first; ties to the lower id, -0 = +0, NaN below all."""
    keys_V = _order_keys(logits_V)
    rest = max(0, len(keys_V) - count)
    keys = np.partition(keys_V, rest - 1)[rest:] if rest else keys_V
    keys.sort()
    return (_MASK32 - (keys[::-1] & _MASK32)).astype(np.int64)


def _order_keys(logits_V: LogitArray) -> npt.NDArray[np.uint64]:
    """One integer per token [V], all different; a higher one comes earlier in the contract's order.

    High word: the float's bits, mapped so that integers compare as the floats do. Low word: the id's complement.
    """
    bits_V = (logits_V + np.float32(0)).view(np.int32)  # -0 + 0 is +0
    # A negative float has all its bits flipped, any other its sign bit alone; an arithmetic shift spreads the sign.
    ordered_V = bits_V.view(np.uint32) ^ ((bits_V >> np.int32(31)).view(np.uint32) | _SIGN32)
    ordered_V[np.isnan(logits_V)] = 0
    ids_V = np.arange(len(logits_V), dtype=np.uint64)
    return (ordered_V.astype(np.uint64) << _BITS32) | (_MASK32 - ids_V)


# ---- step by step, in the contract's order --------------------------------------------------------------------------


def adjust(
    logits_V: LogitArray,
    params: SamplingParams,
    prompt_counts_V: CountArray | None,
    output_counts_V: CountArray | None,
    forbidden_ids: Collection[int],
) -> LogitArray:
    """Bias and penalties, each operation rounded to float32; NaN and forbidden tokens become -inf."""
    adjusted_V = _without_nan(logits_V)
    if params.logit_bias:
        bias_ids = _checked_ids("logit_bias", params.logit_bias, len(logits_V))
        adjusted_V[bias_ids] += np.array(list(params.logit_bias.values()), np.float32)
    if params.counts_tokens:
        prompt_counts_V = _checked_counts("prompt_counts_V", prompt_counts_V, len(logits_V))
        output_counts_V = _checked_counts("output_counts_V", output_counts_V, len(logits_V))
        _penalise(adjusted_V, params, prompt_counts_V, output_counts_V)
    if forbidden_ids:
        adjusted_V[_checked_ids("forbidden_ids", forbidden_ids, len(logits_V))] = -np.inf
    return adjusted_V


def _penalise(
    adjusted_V: LogitArray, params: SamplingParams, prompt_counts_V: CountArray, output_counts_V: CountArray
) -> None:
    seen_ids = np.flatnonzero((prompt_counts_V > 0) | (output_counts_V > 0))
    seen, repetition = adjusted_V[seen_ids], np.float32(params.repetition_penalty)
    with np.errstate(over="ignore"):
        adjusted_V[seen_ids] = np.where(seen > 0, seen / repetition, seen * repetition)
    output_ids = np.flatnonzero(output_counts_V > 0)
    frequency, presence = np.float32(params.frequency_penalty), np.float32(params.presence_penalty)
    adjusted_V[output_ids] -= frequency * output_counts_V[output_ids].astype(np.float32)
    adjusted_V[output_ids] -= presence


def candidates(adjusted_V: LogitArray, params: SamplingParams) -> tuple[IdArray, FloatArray]:
    """Ids [N] that survive top_k, top_p and min_p, in no particular order, and their scores [N].

    The row is that of `adjust` and has a logit above -inf; the temperature is positive.
    """
    top_k = params.top_k or len(adjusted_V)
    if top_k < len(adjusted_V) or params.top_p < 1:
        ids_N = top_tokens(adjusted_V, top_k)
    else:
        ids_N = np.arange(len(adjusted_V), dtype=np.int64)
    scores_N = _scores(adjusted_V[ids_N], adjusted_V.max(), params.temperature)
    if params.top_p < 1:
        kept = _nucleus_size(masses(scores_N), params.top_p)
        ids_N, scores_N = ids_N[:kept], scores_N[:kept]
    if params.min_p > 0:
        survives_N = masses(scores_N) >= math.ceil(params.min_p * MASS_ONE)
        ids_N, scores_N = ids_N[survives_N], scores_N[survives_N]
    return ids_N, scores_N


def _scores(logits: LogitArray, best: np.float32, temperature: float) -> FloatArray:
    """(logit - best) / temperature in float64: the difference first, because it is finite where a quotient need not be.

    Where a logit equals `best` the score is 0 by definition, not by subtraction: inf - inf and 0 * inf are NaN.
    """
    inverse_temperature = 1.0 / temperature
    with np.errstate(invalid="ignore", over="ignore"):
        scores = (logits.astype(np.float64) - float(best)) * inverse_temperature
    scores[logits == best] = 0.0
    return scores


def masses(scores: FloatArray) -> npt.NDArray[np.int64]:
    """exp(score) in units of 2^-34, rounded to the nearest, a half upwards: MASS_ONE for a score of 0."""
    return np.floor(exp(scores) * MASS_ONE + 0.5).astype(np.int64)


def _nucleus_size(masses_N: npt.NDArray[np.int64], top_p: float) -> int:
    """Length of the shortest prefix of masses, best token first, that reaches top_p of their sum."""
    reached = np.cumsum(masses_N)
    total = int(reached[-1])
    threshold = min(max(math.ceil(total * top_p), 1), total)
    return int(np.searchsorted(reached, threshold)) + 1


def _without_nan(logits_V: LogitArray) -> LogitArray:
    """A copy in which NaN is -inf: neither can be drawn or has mass."""
    return np.fmax(logits_V, np.float32(-np.inf))


# ---- arguments ------------------------------------------------------------------------------------------------------


def _check_row(logits_V: LogitArray) -> None:
    if logits_V.dtype != np.float32 or logits_V.ndim != 1:
        raise ValueError(f"logits must be one row of float32, not {logits_V.dtype} {list(logits_V.shape)}")
    if not 1 <= len(logits_V) <= MAX_VOCAB_SIZE:
        raise ValueError(f"logits must be 1 to {MAX_VOCAB_SIZE}, not {len(logits_V)}")


def _checked_counts(name: str, counts_V: CountArray | None, vocab_size: int) -> CountArray:
    if counts_V is None:
        raise ValueError(f"{name} is needed: the request has a repetition, frequency or presence penalty")
    if counts_V.shape != (vocab_size,) or not np.issubdtype(counts_V.dtype, np.integer):
        raise ValueError(f"{name} must be {vocab_size} integers, not {counts_V.dtype} {list(counts_V.shape)}")
    return counts_V


def _checked_ids(name: str, token_ids: Collection[int], vocab_size: int) -> IdArray:
    ids = np.fromiter(token_ids, np.int64, len(token_ids))
    if ids.min() < 0 or ids.max() >= vocab_size:
        raise ValueError(f"{name} has a token id outside 0 to {vocab_size - 1}: {sorted(token_ids)}")
    return ids
