"""Write the test vectors of docs/sampling.md from its plain Python twin: `python make_vectors.py`.

Results come from tests/sampling_twin.py alone, never from the engine, except Random123's known answers, which were
published with Salmon et al. (2011). Nothing is drawn from a generator that could change: inputs come from Philox too.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

import sampling_twin as twin  # noqa: E402
from sampling_twin import INF, NAN  # noqa: E402

from crucible.engine.request import SamplingParams  # noqa: E402

PUBLISHED = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Counter, key and output of philox4x32 with ten rounds: zeros, ones and the digits of pi (Random123, kat_vectors)."""

POSITIONS = (0, 1, 2, 3, 17, 1023, 2**32 - 1, 2**32, 2**64 - 1)


def number(stream: int, index: int) -> float:
    """Number `index` of a stream of fixed numbers in (0, 1)."""
    return twin.uniform(stream, index, 0)


def normal_row(stream: int, size: int, spread: float) -> list[float]:
    """Roughly normal float32 numbers: sums of twelve uniform ones."""
    return [twin.f32(spread * (sum(number(stream, 12 * t + i) for i in range(12)) - 6)) for t in range(size)]


# ---- the files ------------------------------------------------------------------------------------------------------


def philox() -> dict[str, Any]:
    uniform = [
        {"seed": seed, "position": position, "token_id": t, "u": twin.uniform(seed, position, t).hex()}
        for seed in (0, 1, 1234, 2**32, 2**63, 2**64 - 1)
        for position in (0, 5, 2**32 - 1, 2**32, 2**64 - 1)
        for t in (0, 1, 50303, 2**18 - 1)
    ]
    published = [dict(zip(("counter", "key", "output"), words, strict=True)) for words in PUBLISHED]
    return {"published": published, "uniform": uniform}


def numerics() -> dict[str, Any]:
    return {
        "exp": [[x.hex(), twin.exp(x).hex()] for x in exp_arguments()],
        "log": [[x.hex(), twin.log(x).hex()] for x in log_arguments()],
    }


def exp_arguments() -> list[float]:
    special = [0.0, -0.0, -5e-324, -(2.0**-60), -(2.0**-53), -1.0, -707.0, -INF, -1e308]
    borders = [-708.0, -math.log(2) / 2, -1.5 * math.log(2), -35 * math.log(2), -36 * math.log(2)]
    around = [x for border in borders for x in (math.nextafter(border, -INF), border, math.nextafter(border, 0))]
    drawn = [-scale * number(1, i) for i in range(70) for scale in (1.0, 25.0, 708.0)]
    return special + around + drawn


def log_arguments() -> list[float]:
    special = [1.0, 2.0**-53, 1 - 2.0**-53, 1 + 2.0**-52, 0.5, 2.0, 2.0**18, 2.0**-1022, sys.float_info.max]
    borders = [math.sqrt(0.5), math.sqrt(2.0), 1 - 2.0**-20, 1 + 2.0**-20]
    around = [x for border in borders for x in (math.nextafter(border, 0), border, math.nextafter(border, INF))]
    uniform = [number(2, i) for i in range(70)]
    return special + around + uniform + [-twin.log(u) for u in uniform] + [2**18 * u for u in uniform]


def draws() -> list[dict[str, Any]]:
    return [draw_case(name, row, **given) for name, row, given in [*rows_as_they_are(), *filters(), *penalties()]]


Case = tuple[str, Sequence[float], dict[str, Any]]


def rows_as_they_are() -> Iterable[Case]:
    warm = {"temperature": 0.8}
    rows: list[tuple[str, list[float]]] = [
        ("one token", [-3.5]),
        ("eight tokens", normal_row(3, 8, 2.0)),
        ("all equal", [1.25] * 6),
        ("zeros of both signs", [-0.0, 0.0, -1.0, 0.0, -0.0]),
        ("subnormal", [2.0**-149, 0.0, -(2.0**-149), 2.0**-140]),
        ("largest float32", [3.4028234663852886e38, -3.4028234663852886e38, 0.0, 3.4028232635611926e38]),
        ("NaN first", [NAN, 0.5, 0.25]),
        ("NaN last", [0.5, 0.25, NAN]),
        ("NaN between", [0.5, NAN, 0.75, NAN, -1.0]),
        ("all but one unusable", [-INF, NAN, -80.0, NAN, -INF]),
        ("one at infinity", [2.0, INF, 3.0]),
        ("two at infinity", [INF, NAN, INF, 9.0, -INF]),
        ("all NaN", [NAN, NAN, NAN]),
        ("all -inf", [-INF, -INF]),
        ("nothing usable", [NAN, -INF, NAN, -INF]),
    ]
    for name, row in rows:
        yield f"greedy, {name}", row, {}
        yield f"drawn, {name}", row, warm
    mixed = normal_row(4, 12, 1.5)
    for temperature in (5e-324, 1e-310, 1e-30, 0.05, 1, 1.5, 1e30, 1e308):
        yield f"temperature {temperature}", mixed, {"temperature": temperature}
    for seed in (0, -1, 2**64 - 1, 2**32, 10**20, 1234):
        yield f"seed {seed}", mixed, {"temperature": 2.0, "seed": seed}
    yield "300 tokens", normal_row(5, 300, 2.5), {"temperature": 1.0}


def filters() -> Iterable[Case]:
    twelve, equal = normal_row(6, 12, 2.0), [0.5, 2.0, 2.0, -1.0, 2.0, 0.5, 2.0]
    for top_k in (1, 2, 3, 5, 7, 100):
        yield f"top_k {top_k} among equals", equal, {"temperature": 1.0, "top_k": top_k}
    for top_p in (0.0, 1e-300, 0.3, 0.9, 0.999999, math.nextafter(1, 0), 1.0):
        yield f"top_p {top_p}", twelve, {"temperature": 1.3, "top_p": top_p}
    for top_p in (0.25, math.nextafter(0.25, 1), 0.5, math.nextafter(0.5, 0), math.nextafter(0.5, 1), 0.75):
        yield f"top_p {top_p} of four equals", [1.0, 1.0, 1.0, 1.0], {"temperature": 1.0, "top_p": top_p}
    for min_p in (1e-300, 2.0**-34, 0.05, 0.5, math.nextafter(1, 0), 1.0):
        yield f"min_p {min_p}", [*twelve, max(twelve)], {"temperature": 0.7, "min_p": min_p}
    edge = [0.0, *(twin.f32(-35 * math.log(2) + i * 2.0**-19) for i in range(-2, 3)), -24.0, -25.0]
    yield "the edge of mass 0", edge, {"temperature": 1.0}
    yield "the edge of mass 0, top_p", edge, {"temperature": 1.0, "top_p": math.nextafter(1, 0)}
    yield "the edge of mass 0, min_p", edge, {"temperature": 1.0, "min_p": 2.0**-35}
    holes = [NAN, *twelve, -INF, NAN]
    for top_k in (1, 6, 13, 14, 15):
        yield f"top_k {top_k} with holes", holes, {"temperature": 1.0, "top_k": top_k, "top_p": 0.97, "min_p": 1e-3}
    yield (
        "300 tokens, all filters",
        normal_row(7, 300, 2.5),
        {
            "temperature": 0.9,
            "top_k": 40,
            "top_p": 0.95,
            "min_p": 0.02,
        },
    )
    yield "300 tokens, top_p", normal_row(8, 300, 2.5), {"temperature": 1.1, "top_p": 0.9}


def penalties() -> Iterable[Case]:
    row = [twin.f32(x) for x in (1.3, -0.7, 0.0, -0.0, 2.1, 0.4, NAN, -INF, 0.9, -1.9)]
    counted = {"prompt_counts": [1, 1, 1, 1, 0, 0, 2, 1, 0, 0], "output_counts": [0, 0, 1, 1, 3, 1, 1, 1, 0, 7]}
    for name, given in {
        "repetition": {"repetition_penalty": 1.3},
        "repetition below 1": {"repetition_penalty": 0.85},
        "frequency": {"frequency_penalty": 0.3},
        "presence": {"presence_penalty": 0.6},
        "negative": {"frequency_penalty": -0.7, "presence_penalty": -1.1},
        "all": {"repetition_penalty": 1.17, "frequency_penalty": 0.21, "presence_penalty": 0.37},
    }.items():
        yield f"{name}, drawn", row, {"temperature": 1.0, **given, **counted}
        yield f"{name}, greedy", row, {**given, **counted}
    biased = {"logit_bias": {0: -100, 1: 3.3, 6: 100.0, 7: 100.0, 9: 0.1}}
    yield "bias", row, {"temperature": 1.0, **biased}
    yield "bias, then penalties", row, {"temperature": 1.0, "repetition_penalty": 1.2, **biased, **counted}
    yield "forbidden", row, {"temperature": 1.0, "forbidden_ids": [4, 0, 6]}
    yield "all but NaN forbidden", [0.5, NAN, 0.25], {"forbidden_ids": [0, 2]}
    yield (
        "penalties on infinities",
        [INF, -INF, 1.0],
        {
            "temperature": 1.0,
            "repetition_penalty": 1.5,
            "frequency_penalty": 2.0,
            "prompt_counts": [1, 1, 0],
            "output_counts": [1, 1, 1],
        },
    )
    largest = [3.4028234663852886e38, -3.4028234663852886e38, 1.0]
    yield (
        "overflow",
        largest,
        {
            "repetition_penalty": 0.01,
            "temperature": 1.0,
            "prompt_counts": [1, 0, 1],
            "output_counts": [0, 0, 0],
        },
    )
    yield (
        "underflow",
        [2.0**-149, -(2.0**-149), 2.0**-126],
        {
            "repetition_penalty": 3.0,
            "temperature": 1.0,
            "prompt_counts": [1, 1, 1],
            "output_counts": [0, 0, 0],
        },
    )


def draw_case(
    name: str,
    row: Sequence[float],
    prompt_counts: Sequence[int] = (),
    output_counts: Sequence[int] = (),
    forbidden_ids: Sequence[int] = (),
    **fields: Any,
) -> dict[str, Any]:
    params = SamplingParams(**fields)
    none = [0] * len(row)
    adjusted = twin.adjusted(row, params, prompt_counts or none, output_counts or none, forbidden_ids)
    case: dict[str, Any] = {"name": name, "logits": [x.hex() for x in row], "params": fields}
    if prompt_counts:
        case |= {"prompt_counts": prompt_counts, "output_counts": output_counts}
    if forbidden_ids:
        case["forbidden_ids"] = forbidden_ids
    results = [
        twin.sample(row, params, position, prompt_counts, output_counts, forbidden_ids) for position in POSITIONS
    ]
    case["adjusted"] = [x.hex() for x in adjusted]
    case["failed"] = results[0][1]
    if params.temperature > 0 and not case["failed"]:
        kept = sorted(twin.candidates(adjusted, params), key=lambda candidate: candidate.token_id)
        case["candidates"] = [[c.token_id, c.score.hex(), c.mass] for c in kept]
    case["draws"] = [[position, token] for position, (token, _) in zip(POSITIONS, results, strict=True)]
    return case


def logprobs() -> list[dict[str, Any]]:
    rows = {name.removeprefix("greedy, "): row for name, row, given in rows_as_they_are() if not given}
    rows["300 tokens"] = normal_row(9, 300, 4.0)
    rows["below the floor"] = [0.0, -9998.0, -9999.0, -10000.0, 1e-3]
    return [
        {
            "name": name,
            "logits": [x.hex() for x in row],
            "logprobs": [x.hex() for x in twin.logprobs(row)],
            "order": twin.in_order(row),
        }
        for name, row in rows.items()
    ]


FILES = {"philox": philox, "numerics": numerics, "draws": draws, "logprobs": logprobs}


def as_text(content: dict[str, Any] | list[Any]) -> str:
    """JSON with one case to a line."""
    if isinstance(content, dict):
        return "{" + ",\n".join(f"{json.dumps(key)}: {as_text(value)}" for key, value in content.items()) + "}"
    return "[\n" + ",\n".join(json.dumps(case) for case in content) + "\n]"


if __name__ == "__main__":
    for name, make in FILES.items():
        (HERE / f"{name}.json").write_text(as_text(make()) + "\n", encoding="utf-8")
