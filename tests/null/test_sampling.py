"""The host sampler: docs/sampling.md held to the bit, the distribution it draws from, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import sampling_twin as twin
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.engine import numerics, sampling
from crucible.engine.philox import philox4x32
from crucible.engine.request import SamplingParams
from crucible.engine.sampling import LOGPROB_FLOOR, MASS_ONE, Draw, logprobs, sample, top_tokens

VECTORS = Path(__file__).parents[1] / "golden" / "sampling"
NAN, INF = math.nan, math.inf


def f32(values: Sequence[float]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return np.array(values, np.float32)


def vectors(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text("utf-8"))


def from_hex(values: Sequence[str]) -> list[float]:
    return [float.fromhex(value) for value in values]


def assert_same_bits(found: npt.NDArray[np.float64], expected: Sequence[float]) -> None:
    np.testing.assert_array_equal(found.view(np.int64), np.array(expected, np.float64).view(np.int64))


# ---- the vectors ----------------------------------------------------------------------------------------------------


def params_of(case: dict[str, Any]) -> SamplingParams:
    fields = dict(case["params"])
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token_id): bias for token_id, bias in fields["logit_bias"].items()}
    return SamplingParams(**fields)


@pytest.mark.parametrize("case", vectors("draws"), ids=lambda case: case["name"])
def test_draw_vectors(case: dict[str, Any]) -> None:
    row, params = from_hex(case["logits"]), params_of(case)
    prompt, output = case.get("prompt_counts"), case.get("output_counts")
    counts = {"prompt_counts_V": prompt and np.array(prompt), "output_counts_V": output and np.array(output)}
    forbidden = case.get("forbidden_ids", [])
    adjusted_V = sampling.adjust(f32(row), params, counts["prompt_counts_V"], counts["output_counts_V"], forbidden)
    expected_V = np.fmax(f32(from_hex(case["adjusted"])), f32([-INF]))
    np.testing.assert_array_equal(adjusted_V.view(np.int32), expected_V.view(np.int32))
    if "candidates" in case:
        ids_N, scores_N = sampling.candidates(adjusted_V, params)
        masses_N = sampling.masses(scores_N)
        found = sorted(zip(ids_N.tolist(), (s.hex() for s in scores_N.tolist()), masses_N.tolist(), strict=True))
        assert [list(candidate) for candidate in found] == case["candidates"]
    for position, token_id in case["draws"]:
        draw = sample(f32(row), params, position, **counts, forbidden_ids=forbidden)
        assert draw == Draw(token_id, case["failed"])
        assert twin.sample(row, params, position, prompt, output, forbidden) == draw


@pytest.mark.parametrize("case", vectors("logprobs"), ids=lambda case: case["name"])
def test_logprob_vectors(case: dict[str, Any]) -> None:
    row = f32(from_hex(case["logits"]))
    assert_same_bits(logprobs(row), from_hex(case["logprobs"]))
    assert top_tokens(row, len(row)).tolist() == case["order"]


def test_vectors_are_those_that_the_twin_makes_now() -> None:
    spec = importlib.util.spec_from_file_location("make_vectors", VECTORS / "make_vectors.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, make in script.FILES.items():
        assert (VECTORS / f"{name}.json").read_text("utf-8") == script.as_text(make()) + "\n", name
    assert sum(path.stat().st_size for path in VECTORS.glob("*.json")) < 300_000


# ---- numpy against plain Python -------------------------------------------------------------------------------------

AWKWARD = [NAN, INF, -INF, 0.0, -0.0, 1.0, 1.0000001192092896, -1.0, 2.0**-149, -(2.0**-149), 3.4028234663852886e38]
AWKWARD += [-3.4028234663852886e38, 88.0, -87.5, *map(twin.f32, (-24.2, -24.26, -24.3))]
ROWS = st.one_of(
    st.lists(st.sampled_from(AWKWARD), min_size=1, max_size=24),
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=64),
    st.lists(st.one_of(st.sampled_from(AWKWARD), st.floats(width=32)), min_size=1, max_size=40),
)
SHARES = st.one_of(st.floats(0, 1), st.sampled_from([0, 1, 0.5, 2.0**-34, 2.0**-35, 1 - 2.0**-53, 5e-324]))
FILTERS = {"top_k": st.integers(0, 70), "top_p": SHARES, "min_p": SHARES}
TEMPERATURES = st.one_of(st.floats(0.05, 3), st.sampled_from([1, 5e-324, 1e-30, 1e300]))
PENALTIES = {
    "repetition_penalty": st.one_of(st.just(1.0), st.floats(0.01, 100)),
    "frequency_penalty": st.one_of(st.just(0), st.floats(-2, 2)),
    "presence_penalty": st.one_of(st.just(0), st.floats(-2, 2)),
}


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[float], SamplingParams, int, list[int], list[int], list[int]]:
    row = draw(ROWS)
    ids = st.integers(0, len(row) - 1)
    fields = draw(st.fixed_dictionaries({}, optional={**FILTERS, **PENALTIES}))
    fields["logit_bias"] = draw(st.dictionaries(ids, st.floats(-100, 100), max_size=3))
    fields["seed"] = draw(st.integers(-(2**70), 2**70))
    fields["temperature"] = draw(TEMPERATURES)
    if draw(st.integers(0, 9)) == 0:
        fields = {name: value for name, value in fields.items() if name not in FILTERS} | {"temperature": 0}
    counts = st.lists(st.integers(0, 3), min_size=len(row), max_size=len(row))
    position = draw(st.one_of(st.integers(0, 5000), st.integers(0, 2**64 - 1)))
    forbidden = draw(st.lists(ids, max_size=2, unique=True))
    return row, SamplingParams(**fields), position, draw(counts), draw(counts), forbidden


@settings(max_examples=400, deadline=None)
@given(requests())
def test_draws_equal_the_plain_python_twin(
    request: tuple[list[float], SamplingParams, int, list[int], list[int], list[int]],
) -> None:
    row, params, position, prompt, output, forbidden = request
    counts = {"prompt_counts_V": np.array(prompt), "output_counts_V": np.array(output)}
    adjusted_V = sampling.adjust(f32(row), params, *counts.values(), forbidden)
    expected = twin.adjusted(row, params, prompt, output, forbidden)
    np.testing.assert_array_equal(adjusted_V, np.fmax(f32(expected), f32([-INF])))
    if params.temperature > 0 and any(map(twin.usable, expected)):
        kept = sorted((c.token_id, c.score, c.mass) for c in twin.candidates(expected, params))
        ids_N, scores_N = sampling.candidates(adjusted_V, params)
        found = sorted(zip(ids_N.tolist(), scores_N.tolist(), sampling.masses(scores_N).tolist(), strict=True))
        assert found == kept
    drawn = sample(f32(row), params, position, **counts, forbidden_ids=forbidden)
    assert drawn == twin.sample(row, params, position, prompt, output, forbidden)


@settings(max_examples=200, deadline=None)
@given(ROWS, st.integers(0, 70))
def test_order_and_logprobs_equal_the_plain_python_twin(row: list[float], count: int) -> None:
    assert top_tokens(f32(row), count).tolist() == twin.in_order(row)[:count]
    assert_same_bits(logprobs(f32(row)), twin.logprobs(row))


@pytest.mark.parametrize("filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 100, "top_p": 0.95, "min_p": 0.01}])
def test_a_larger_vocabulary_equals_the_plain_python_twin(filters: dict[str, float]) -> None:
    row = f32(np.random.default_rng(1).normal(0, 3, 1200).round(1).tolist())  # rounded: many ties
    params = SamplingParams(temperature=0.9, **filters)
    for position in (0, 1, 1023):
        assert sample(row, params, position) == twin.sample(row.tolist(), params, position)


# ---- what a draw depends on -----------------------------------------------------------------------------------------

DRAWN = SamplingParams(temperature=1.0)
FILTERED = SamplingParams(temperature=1.0, top_k=30, top_p=0.9, min_p=0.01)
PENALISED = SamplingParams(temperature=0.7, repetition_penalty=1.1, presence_penalty=0.5, logit_bias={3: 1.5})


@pytest.mark.parametrize("params", [DRAWN, FILTERED, PENALISED, SamplingParams()])
def test_a_row_alone_draws_what_it_draws_among_others_in_any_order(params: SamplingParams) -> None:
    rng = np.random.default_rng(2)
    logits_BV = rng.normal(0, 2, (12, 300)).astype(np.float32)
    counts_V = rng.integers(0, 2, 300)
    counts = {"prompt_counts_V": counts_V, "output_counts_V": counts_V}
    alone = [sample(logits_BV[row].copy(), params, row, **counts) for row in range(12)]
    before = logits_BV.copy()
    logits_VB = np.asfortranarray(logits_BV)  # a row of it is strided
    logits_VB.setflags(write=False)
    for row in rng.permutation(12):
        assert sample(logits_VB[row], params, int(row), **counts) == alone[row]
    np.testing.assert_array_equal(logits_BV, before)


def test_temperature_zero_uses_no_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    row = f32([0.0, 2.0, NAN, 2.0])
    assert {sample(row, SamplingParams(seed=seed), seed) for seed in range(50)} == {Draw(1)}
    monkeypatch.setattr(sampling, "uniform", None)
    assert sample(row, SamplingParams(), 0) == Draw(1)
    with pytest.raises(TypeError):
        sample(row, DRAWN, 0)


def test_noise_of_a_token_does_not_depend_on_the_other_candidates() -> None:
    ids = np.arange(20_000)  # more than two blocks
    noise = sampling.gumbel_noise(5, 77, ids)
    for token_id in (0, 1, 8191, 8192, 8193, 16384, 19_999):
        expected = -twin.log(-twin.log(twin.uniform(5, 77, token_id)))
        assert noise[token_id] == expected
    shuffled = np.random.default_rng(0).permutation(ids)[:9000]
    assert_same_bits(sampling.gumbel_noise(5, 77, shuffled), noise[shuffled].tolist())


def test_equal_values_go_to_the_lower_id(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "gumbel_noise", lambda seed, position, ids: np.zeros(len(ids)))
    row = f32([1.0, 5.0, 0.0, 5.0, 5.0])
    for filters in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.5}):
        assert sample(row, SamplingParams(temperature=1.0, **filters), 0) == Draw(1)


def test_a_score_that_the_page_calls_hopeless_cannot_win() -> None:
    least = -twin.log(-twin.log(2.0**-53))
    most = -twin.log(-twin.log(1 - 2.0**-53))
    assert -41 + most < 0 + least


def test_the_largest_vocabulary_keeps_totals_exact() -> None:
    row = np.zeros(2**18, np.float32)
    _, scores_N = sampling.candidates(row, DRAWN)
    assert int(sampling.masses(scores_N).sum()) == 2**52
    for top_p, kept in ((0.5, 2**17), (math.nextafter(0.5, 1), 2**17 + 1), (2.0**-18, 1), (0, 1)):
        ids_N, _ = sampling.candidates(row, SamplingParams(temperature=1.0, top_p=top_p))
        assert sorted(ids_N.tolist()) == list(range(kept))
    assert logprobs(row)[-1] == -twin.log(2.0**18)


# ---- the distribution -----------------------------------------------------------------------------------------------

DRAWS = 20_000


def draw_many(scores: Sequence[float], seed: int, count: int = DRAWS) -> npt.NDArray[np.int64]:
    """The tokens at positions 0 to count - 1, all at once; the tests hold it against `sample`."""
    positions, ids = np.arange(count, dtype=np.uint64)[:, None], np.arange(len(scores), dtype=np.uint64)[None, :]
    zero = np.zeros((1, 1), np.uint64)
    w0, w1, _, _ = philox4x32((positions, zero, ids, zero), (seed, 0))
    u = (((w0 << np.uint64(20)) | (w1 >> np.uint64(12))).astype(np.float64) + 0.5) * 2.0**-52
    return np.argmax(np.array(scores) - numerics.log(-numerics.log(u)), axis=1)


def chi_square(counts: npt.NDArray[np.int64], expected: npt.NDArray[np.float64]) -> float:
    return float((((counts - expected) ** 2) / expected).sum())


def chi_square_limit(degrees: int) -> float:
    """What chance exceeds once in 10,000 times (Wilson and Hilferty 1931); seeds are fixed, so the tests are too."""
    spread = 2 / (9 * degrees)
    return float(degrees * (1 - spread + 3.719 * math.sqrt(spread)) ** 3)


DISTRIBUTIONS = {
    "uniform": [0.0] * 8,
    "peaked": [math.log(0.5**i) for i in range(1, 8)],
    "mixed": [1.5, -0.25, 0.0, 2.0, 0.5, -1.0, 1.25, 0.75, -2.0, 0.3125],
    "rare": [0.0, -6.0, -5.0],
}


@pytest.mark.parametrize("seed", [0, 1, 1234, 2**31])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_frequencies_follow_softmax(name: str, seed: int) -> None:
    row = f32(DISTRIBUTIONS[name])
    scores = (row.astype(np.float64) - float(row.max())).tolist()
    tokens = draw_many(scores, seed)
    params = SamplingParams(temperature=1.0, seed=seed)
    assert [sample(row, params, position).token_id for position in range(60)] == tokens[:60].tolist()
    weights = np.exp(np.array(scores))
    expected = DRAWS * weights / weights.sum()
    assert chi_square(np.bincount(tokens, minlength=len(row)), expected) < chi_square_limit(len(row) - 1)


@pytest.mark.parametrize("apart", ["next position", "next seed", "two ids"])
def test_neighbouring_draws_are_independent(apart: str) -> None:
    tokens = draw_many([0.0] * 16, 99)
    if apart == "next position":
        first, second = tokens[::2], tokens[1::2]
    elif apart == "next seed":
        first, second = tokens, draw_many([0.0] * 16, 100)
    else:  # eight ids against the eight beside them, each pair of draws within one position
        first, second = draw_many([0.0] * 8 + [-INF] * 8, 99), draw_many([-INF] * 8 + [0.0] * 8, 99) - 8
    sides = int(first.max()) + 1
    counts = np.bincount(first * sides + second, minlength=sides * sides)
    assert chi_square(counts, np.full(sides * sides, len(first) / sides**2)) < chi_square_limit(sides * sides - 1)


def test_filtered_frequencies_follow_the_renormalised_softmax() -> None:
    row = f32([2.0, 1.0, 1.5, -1.0, 0.0, 1.75, -3.0])
    params = SamplingParams(temperature=0.8, top_k=5, top_p=0.9, min_p=0.1, seed=4)
    kept = [0, 1, 2, 5]  # 0.39, 0.29, 0.21, 0.11 of the five best; the fifth is past 0.9 and under min_p
    draws = 4_000
    counts = np.bincount([sample(row, params, position).token_id for position in range(draws)], minlength=len(row))
    assert counts.sum() == counts[kept].sum()
    weights = np.exp(row[kept].astype(np.float64) / 0.8)
    assert chi_square(counts[kept], draws * weights / weights.sum()) < chi_square_limit(len(kept) - 1)


# ---- log-probabilities ----------------------------------------------------------------------------------------------


def test_logprobs_are_close_to_the_exact_ones() -> None:
    row = np.random.default_rng(3).uniform(-32, 31.9, 50304).astype(np.float32)
    exact = row.astype(np.longdouble)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    assert np.abs(logprobs(row) - exact).max() < 2.0**-19 + len(row) * 2.0**-35


def test_logprobs_can_be_written_as_json() -> None:
    for row in ([NAN, -INF, 0.0], [INF, 0.0, NAN], [NAN, NAN], [0.0, -3.4e38, -1e4]):
        text = json.dumps(logprobs(f32(row)).tolist(), allow_nan=False)
        assert min(json.loads(text)) == LOGPROB_FLOOR


# ---- arguments ------------------------------------------------------------------------------------------------------


def test_wrong_arguments_are_refused() -> None:
    row, counts = f32([0.0, 1.0]), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match=r"logits must be one row of float32, not float64 \[2\]"):
        sample(row.astype(np.float64), DRAWN, 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"logits must be one row of float32, not float32 \[1, 2\]"):
        sample(row[None], DRAWN, 0)
    with pytest.raises(ValueError, match="logits must be 1 to 262144, not 0"):
        logprobs(row[:0])
    for position in (-1, 2**64):
        with pytest.raises(ValueError, match="position must be from 0 to"):
            sample(row, DRAWN, position)
    penalised = SamplingParams(presence_penalty=1)
    with pytest.raises(ValueError, match="output_counts_V is needed"):
        sample(row, penalised, 0, prompt_counts_V=counts)
    with pytest.raises(ValueError, match="prompt_counts_V must be 2 integers"):
        sample(row, penalised, 0, prompt_counts_V=counts[:1], output_counts_V=counts)
    with pytest.raises(ValueError, match="logit_bias has a token id outside 0 to 1"):
        sample(row, SamplingParams(logit_bias={2: 1.0}), 0)
    with pytest.raises(ValueError, match="forbidden_ids has a token id outside 0 to 1"):
        sample(row, DRAWN, 0, forbidden_ids=(-1,))


def test_mass_of_the_best_token_is_the_unit() -> None:
    assert sampling.masses(np.array([0.0, -INF, -35 * math.log(2) + 1e-9, -35.1 * math.log(2)])).tolist() == [
        MASS_ONE,
        0,
        1,
        0,
    ]
