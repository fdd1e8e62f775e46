"""The compiled sampler draws what the host's does, from any row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from crucible.engine.cpu.sampling import CHOOSE_SIGNATURE, Sampler, choose
from crucible.engine.request import SamplingParams
from crucible.engine.sampling import sample

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "sampling" / "draws.json").read_text("utf-8"))

AWKWARD = [
    np.nan,
    np.inf,
    -np.inf,
    0.0,
    -0.0,
    1.0,
    1.0000001192092896,
    -1.0,
    2.0**-149,
    -(2.0**-149),
    3.4028234663852886e38,
]
AWKWARD += [-3.4028234663852886e38, 88.0, -87.5, -24.2, -24.26, -24.3]
ROWS = st.one_of(
    st.lists(st.sampled_from(AWKWARD), min_size=1, max_size=24),
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=64),
    st.lists(st.one_of(st.sampled_from(AWKWARD), st.floats(width=32)), min_size=1, max_size=40),
)
SHARES = st.one_of(st.floats(0, 1), st.sampled_from([0, 1, 0.5, 2.0**-34, 2.0**-35, 1 - 2.0**-53, 5e-324]))
PARAMS = st.builds(
    SamplingParams,
    temperature=st.one_of(st.floats(0.05, 3), st.sampled_from([1, 5e-324, 1e-30, 1e300])),
    top_k=st.integers(0, 70),
    top_p=SHARES,
    min_p=SHARES,
    seed=st.integers(-(2**70), 2**70),
)


def assert_same_draw(row_V: npt.NDArray[np.float32], params: SamplingParams, position: int, **rest: Any) -> None:
    expected = sample(row_V, params, position, **rest)
    assert sample(row_V, params, position, **rest, choose=Sampler(len(row_V)).choose) == expected


@settings(max_examples=500, deadline=None)
@given(ROWS, PARAMS, st.one_of(st.integers(0, 5000), st.integers(0, 2**64 - 1)))
def test_draws_are_the_hosts(row: list[float], params: SamplingParams, position: int) -> None:
    with np.errstate(over="ignore"):
        assert_same_draw(np.array(row, np.float32), params, position)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 40}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 900, "top_p": 0.95, "min_p": 1e-4}]
)
def test_draws_from_a_large_vocabulary_are_the_hosts(filters: dict[str, Any]) -> None:
    """Rounded logits have many ties, which only the ids put in order."""
    rng = np.random.default_rng(1)
    for position in range(20):
        row_V = rng.normal(0, 3, 50_000).astype(np.float32)
        assert_same_draw(
            row_V.round(1) if position % 2 else row_V, SamplingParams(temperature=0.9, **filters), position
        )


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["name"])
def test_draws_are_the_golden_ones(case: dict[str, Any]) -> None:
    fields = dict(case["params"])
    fields["logit_bias"] = {int(token_id): bias for token_id, bias in fields.get("logit_bias", {}).items()}
    row_V = np.array([float.fromhex(value) for value in case["logits"]], np.float32)
    counts = {f"{name}_V": np.array(case[name]) for name in ("prompt_counts", "output_counts") if name in case}
    sampler = Sampler(len(row_V))
    for position, token_id in case["draws"]:
        draw = sample(
            row_V,
            SamplingParams(**fields),
            position,
            **counts,
            forbidden_ids=case.get("forbidden_ids", []),
            choose=sampler.choose,
        )
        assert draw == (token_id, case["failed"])


def test_one_compilation_serves_every_row() -> None:
    Sampler(3).choose(np.array([1, 2, 3], np.float32), SamplingParams(temperature=1.0), 0)
    assert choose.signatures in ([], [CHOOSE_SIGNATURE])
