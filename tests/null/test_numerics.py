"""The sampler's exp, log and Philox: accuracy, and the bits that docs/sampling.md fixes."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Callable, Iterator
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import sampling_twin as twin

from crucible.engine import numerics
from crucible.engine.philox import philox4x32, uniform

REPO = Path(__file__).parents[2]
VECTORS = REPO / "tests" / "golden" / "sampling"
MAX_ULP = 1.0
"""Stated in docs/sampling.md, section 8."""

FloatArray = npt.NDArray[np.float64]


def exp_arguments(rng: np.random.Generator, count: int) -> FloatArray:
    """Where masses are not 0, the whole range, and close to 0."""
    third = count // 3
    near = 25 * rng.random(count - 2 * third)
    return -np.concatenate([near, 708 * rng.random(third), np.exp2(-60 * rng.random(third))])


def log_arguments(rng: np.random.Generator, count: int) -> FloatArray:
    """What the sampler feeds it: u, -log u, totals; and the neighbourhood of 1, where a careless log is inaccurate."""
    part = count // 5
    u = (rng.integers(0, 2**52, part) + 0.5) * 2.0**-52
    around_one = 1 + np.exp2(-52 * rng.random(part)) * rng.choice([-0.5, 1.0], part)
    totals = np.exp2(18 * rng.random(part))
    core = 0.7 + 0.72 * rng.random(count - 4 * part)
    return np.concatenate([u, -numerics.log(u), around_one, totals, core])


@pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="long double is no wider than float64 here")
@pytest.mark.parametrize(
    ("function", "exact", "arguments"),
    [(numerics.exp, np.exp, exp_arguments), (numerics.log, np.log, log_arguments)],
    ids=["exp", "log"],
)
def test_ten_million_arguments_are_within_an_ulp(
    function: Callable[[FloatArray], FloatArray],
    exact: Callable[..., Any],
    arguments: Callable[[np.random.Generator, int], FloatArray],
) -> None:
    rng = np.random.default_rng(20240520)
    worst = 0.0
    for _ in range(80):
        x = arguments(rng, 125_000)
        reference = exact(x.astype(np.longdouble))
        ulp = np.spacing(np.abs(reference.astype(np.float64)))
        worst = max(worst, float(np.max(np.abs(function(x) - reference) / ulp)))
    print(f"largest error {worst:.4f} ulp")
    assert worst < MAX_ULP


def vectors(name: str) -> Any:
    return json.loads((VECTORS / f"{name}.json").read_text("utf-8"))


def special_arguments(name: str) -> Iterator[float]:
    return (float.fromhex(x) for x, _ in vectors("numerics")[name])


@pytest.mark.parametrize("name", ["exp", "log"])
def test_fifty_digits_agree_within_an_ulp(name: str) -> None:
    """Without long double, and at the borders of the reductions, which random arguments miss."""
    rng = np.random.default_rng(7)
    drawn = {"exp": exp_arguments, "log": log_arguments}[name](rng, 5_000)
    arguments = [*special_arguments(name), *drawn.tolist()]
    results = getattr(numerics, name)(np.array(arguments)).tolist()
    with localcontext(prec=50):
        for x, y in zip(arguments, results, strict=True):
            if name == "exp" and x < numerics.EXP_MIN:
                assert y == 0
                continue
            exact = Decimal(x).exp() if name == "exp" else Decimal(x).ln()
            assert abs(Decimal(y) - exact) <= Decimal(math.ulp(float(exact))) * Decimal(MAX_ULP), x.hex()


@pytest.mark.parametrize("name", ["exp", "log"])
def test_bits_equal_the_plain_python_twin_and_the_vectors(name: str) -> None:
    function, slow = getattr(numerics, name), getattr(twin, name)
    drawn = {"exp": exp_arguments, "log": log_arguments}[name](np.random.default_rng(3), 20_000)
    assert_same_bits(function(drawn), [slow(x) for x in drawn.tolist()])
    pairs = [(float.fromhex(x), float.fromhex(y)) for x, y in vectors("numerics")[name]]
    assert_same_bits(function(np.array([x for x, _ in pairs])), [y for _, y in pairs])


def assert_same_bits(found: FloatArray, expected: list[float]) -> None:
    np.testing.assert_array_equal(found.view(np.int64), np.array(expected).view(np.int64))


def test_exact_values() -> None:
    below = math.nextafter(numerics.EXP_MIN, -math.inf)
    assert_same_bits(numerics.exp(np.array([0.0, -0.0, below, -1e308, -math.inf])), [1.0, 1.0, 0.0, 0.0, 0.0])
    assert numerics.exp(np.array([numerics.EXP_MIN]))[0] > 2.0**-1022
    assert_same_bits(numerics.log(np.array([1.0])), [0.0])


def test_shape_does_not_change_bits() -> None:
    """A vector loop and its scalar remainder must round alike."""
    x = exp_arguments(np.random.default_rng(5), 997)
    alone = [float(numerics.exp(x[i : i + 1])[0]) for i in range(len(x))]
    assert_same_bits(numerics.exp(x), alone)
    assert_same_bits(numerics.exp(np.repeat(x, 3)[::3]), alone)


def test_constants_are_those_of_the_page() -> None:
    page = twin.CONSTANTS
    here = {"LOG2_E": numerics.LOG2_E, "LN2_HIGH": numerics.LN2_HIGH, "LN2_LOW": numerics.LN2_LOW}
    here |= {"EXP_MIN": numerics.EXP_MIN}
    here |= {f"Q{i}": c for i, c in enumerate(numerics.EXP_Q)} | {f"R{i}": c for i, c in enumerate(numerics.LOG_R)}
    assert here == page


def test_constants_are_those_of_the_fit() -> None:
    pytest.importorskip("mpmath")
    spec = importlib.util.spec_from_file_location("fit_polynomials", REPO / "scripts" / "fit_polynomials.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    for name, values in script.fit().items():
        assert values == list(np.atleast_1d(getattr(numerics, name))), name


# ---- Philox ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", vectors("philox")["published"], ids=lambda known: known["key"])
def test_philox_gives_the_published_answers(known: dict[str, str]) -> None:
    words = {name: [int(word, 16) for word in text.split()] for name, text in known.items()}
    c0, c1, c2, c3 = (np.array([word], np.uint64) for word in words["counter"])
    k0, k1 = words["key"]
    assert [int(word[0]) for word in philox4x32((c0, c1, c2, c3), (k0, k1))] == words["output"]
    assert list(twin.philox(words["counter"], words["key"])) == words["output"]


def test_philox_broadcasts_counters_and_equals_its_twin() -> None:
    rng = np.random.default_rng(11)
    c0, c1, c2, c3 = (rng.integers(0, 2**32, shape, np.uint64) for shape in ((5, 1), (1,), (1, 7), ()))
    key = (0xDEADBEEF, 0xFFFFFFFF)
    out = philox4x32((c0, c1, c2, c3), key)
    for i in range(5):
        for j in range(7):
            expected = twin.philox((int(c0[i, 0]), int(c1[0]), int(c2[0, j]), int(c3)), key)
            assert tuple(int(word[i, j]) for word in out) == expected


def test_uniform_vectors() -> None:
    for case in vectors("philox")["uniform"]:
        ids = np.array([case["token_id"]])
        assert uniform(case["seed"], case["position"], ids)[0].hex() == case["u"]


def test_seeds_count_modulo_two_to_the_sixty_four() -> None:
    ids = np.arange(50)
    for seed, same in ((-1, 2**64 - 1), (2**64, 0), (10**20, 10**20 % 2**64)):
        assert_same_bits(uniform(seed, 3, ids), uniform(same, 3, ids).tolist())
    assert not np.array_equal(uniform(2**32, 3, ids), uniform(0, 3, ids))  # the high word counts
    assert not np.array_equal(uniform(0, 2**32, ids), uniform(0, 0, ids))


def test_uniform_is_strictly_between_zero_and_one_even_at_its_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for word, u in ((0, 2.0**-53), (2**32 - 1, 1 - 2.0**-53)):
        words = (np.array([word], np.uint64),) * 4
        monkeypatch.setattr("crucible.engine.philox.philox4x32", lambda counter, key, words=words: words)
        (found,) = uniform(0, 0, np.array([0]))
        assert found == u
        (noise,) = -numerics.log(-numerics.log(np.array([u])))
        assert -3.604 < noise < 36.737
