"""docs/sampling.md once more in plain Python: floats, ints and loops, one token at a time, no numpy.

Written from the page and not from the engine, to be compared with it bit for bit. The constants are read from the
page. A row is a list of floats that float32 can hold; names and section numbers are the page's.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from crucible.engine.request import SamplingParams

PAGE = Path(__file__).parents[1] / "docs" / "sampling.md"
CONSTANTS = {
    name: float.fromhex(value)
    for name, value in re.findall(r"^(\w+) += (-?0x1\.[0-9a-f]+p[+-]\d+)$", PAGE.read_text("utf-8"), re.MULTILINE)
}
NAN, INF = math.nan, math.inf


def f32(x: float) -> float:
    """x rounded to float32. One float64 operation on float32 values, rounded again, is the float32 operation."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(INF, x)


def bits_of(x: float) -> int:
    return struct.unpack("<q", struct.pack("<d", x))[0]


def float_of(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<q", bits))[0]


# ---- 3 to 6: from logits to scores ----------------------------------------------------------------------------------


def adjusted(
    row: Sequence[float],
    params: SamplingParams,
    prompt_counts: Sequence[int],
    output_counts: Sequence[int],
    forbidden_ids: Sequence[int],
) -> list[float]:
    result = []
    for t, logit in enumerate(row):
        if t in params.logit_bias:
            logit = f32(logit + f32(params.logit_bias[t]))
        if prompt_counts[t] + output_counts[t] > 0:
            r = f32(params.repetition_penalty)
            logit = f32(logit / r) if logit > 0 else f32(logit * r)
        if output_counts[t] > 0:
            logit = f32(logit - f32(f32(params.frequency_penalty) * f32(output_counts[t])))
            logit = f32(logit - f32(params.presence_penalty))
        if t in forbidden_ids:
            logit = -INF
        result.append(logit)
    return result


def comes_before(row: Sequence[float], a: int, b: int) -> bool:
    if math.isnan(row[a]) or math.isnan(row[b]):
        return a < b if math.isnan(row[a]) and math.isnan(row[b]) else math.isnan(row[b])
    return row[a] > row[b] or (row[a] == row[b] and a < b)


def in_order(row: Sequence[float]) -> list[int]:
    order: list[int] = []
    for t in range(len(row)):
        place = len(order)
        while place > 0 and comes_before(row, t, order[place - 1]):
            place -= 1
        order.insert(place, t)
    return order


def usable(logit: float) -> bool:
    return logit > -INF  # false for NaN


def score(logit: float, best: float, temperature: float) -> float:
    if logit == best:
        return 0.0
    if not usable(logit):
        return -INF
    return (logit - best) * (1.0 / temperature)


# ---- 7 to 9: exp, log, mass -----------------------------------------------------------------------------------------


def exp(x: float) -> float:
    if x < CONSTANTS["EXP_MIN"]:
        return 0.0
    n = math.floor(x * CONSTANTS["LOG2_E"] + 0.5)
    r = (x - n * CONSTANTS["LN2_HIGH"]) - n * CONSTANTS["LN2_LOW"]
    q = CONSTANTS["Q10"]
    for i in range(9, -1, -1):
        q = q * r + CONSTANTS[f"Q{i}"]
    return (1.0 + (r + r * (r * q))) * float_of((n + 1023) << 52)


def log(x: float) -> float:
    bits = bits_of(x)
    e = (bits - 0x3FE6A09E667F3BCD) >> 52
    f = float_of(bits - (e << 52)) - 1.0
    s = f / (f + 2.0)
    z = s * s
    p = CONSTANTS["R6"]
    for i in range(5, -1, -1):
        p = p * z + CONSTANTS[f"R{i}"]
    h = 0.5 * f * f
    return e * CONSTANTS["LN2_HIGH"] - ((h - (s * (h + z * p) + e * CONSTANTS["LN2_LOW"])) - f)


def mass(score: float) -> int:
    return math.floor(exp(score) * 2.0**34 + 0.5)


# ---- 10: candidates -------------------------------------------------------------------------------------------------


@dataclass
class Candidate:
    token_id: int
    score: float
    mass: int


def candidates(row: Sequence[float], params: SamplingParams) -> list[Candidate]:
    """The survivors of the three filters, in order; `row` is adjusted and has a usable token."""
    order = in_order(row)
    best = row[order[0]]
    kept = []
    for t in order:
        s = score(row[t], best, params.temperature)
        kept.append(Candidate(t, s, mass(s)))
    if params.top_k != 0:
        kept = kept[: params.top_k]
    if params.top_p != 1:
        total = sum(candidate.mass for candidate in kept)
        need = min(max(math.ceil(float(total) * params.top_p), 1), total)
        reached = size = 0
        while reached < need:
            reached += kept[size].mass
            size += 1
        kept = kept[:size]
    return [candidate for candidate in kept if candidate.mass >= math.ceil(params.min_p * 2.0**34)]


# ---- 11: noise and the winner ---------------------------------------------------------------------------------------


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for number in range(10):
        if number > 0:
            k0 = (k0 + 0x9E3779B9) % 2**32
            k1 = (k1 + 0xBB67AE85) % 2**32
        product0, product2 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (
            (product2 // 2**32) ^ c1 ^ k0,
            product2 % 2**32,
            (product0 // 2**32) ^ c3 ^ k1,
            product0 % 2**32,
        )
    return c0, c1, c2, c3


def uniform(seed: int, position: int, token_id: int) -> float:
    seed %= 2**64
    w0, w1, _, _ = philox((position % 2**32, position // 2**32, token_id, 0), (seed % 2**32, seed // 2**32))
    return (w0 * 2**20 + w1 // 2**12 + 0.5) * 2.0**-52


def sample(
    row: Sequence[float],
    params: SamplingParams,
    position: int,
    prompt_counts: Sequence[int] | None = None,
    output_counts: Sequence[int] | None = None,
    forbidden_ids: Sequence[int] = (),
) -> tuple[int, bool]:
    """The token id, and whether no token was usable."""
    none = [0] * len(row)
    row = adjusted(row, params, prompt_counts or none, output_counts or none, forbidden_ids)
    if not any(usable(logit) for logit in row):
        return 0, True
    if params.temperature == 0:
        return in_order(row)[0], False
    winner, highest = -1, -INF
    for candidate in sorted(candidates(row, params), key=lambda candidate: candidate.token_id):
        value = candidate.score + -log(-log(uniform(params.seed, position, candidate.token_id)))
        if value > highest:
            winner, highest = candidate.token_id, value
    return winner, False


# ---- 13: log-probabilities ------------------------------------------------------------------------------------------


def logprobs(row: Sequence[float]) -> list[float]:
    if not any(usable(logit) for logit in row):
        return [-9999.0] * len(row)
    best = row[in_order(row)[0]]
    differences = []
    for logit in row:
        if logit == best:
            differences.append(0.0)
        else:
            differences.append(-INF if math.isnan(logit) else f32(logit - best))
    total = sum(mass(d) for d in differences)
    log_total = log(float(total) * 2.0**-34)
    return [max(d - log_total, -9999.0) for d in differences]
