"""Backends by name: which one a name gives, in which format, and what is said where one cannot be had."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import pytest
from cells import toy
from toy_weights import toy_weights

from crucible.engine import backends
from crucible.engine.backends import make_backend, resolve_backend
from crucible.engine.quant import WEIGHT_FORMATS, convert, dense
from crucible.engine.reference import ReferenceBackend
from crucible.engine.request import RequestError
from crucible.engine.runner import logits
from crucible.errors import CrucibleError

CONFIG = toy()
WEIGHTS = toy_weights(CONFIG)
IDS = [5, 61, 17, 5, 40, 2, 33]


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "find_spec", lambda name: None if name == "numba" else find_spec(name))


@pytest.mark.usefixtures("without_numba")
def test_a_missing_package_is_named_with_its_extra() -> None:
    with pytest.raises(CrucibleError, match=r"^backend 'cpu' needs numba.*'\.\[cpu\]'"):
        make_backend("cpu", CONFIG, WEIGHTS)
    assert resolve_backend("auto") == "reference"
    assert isinstance(make_backend("auto", CONFIG, WEIGHTS), ReferenceBackend)


@pytest.mark.skipif(find_spec("numba") is None, reason="the cpu backend needs numba")
def test_auto_is_the_fast_one() -> None:
    assert resolve_backend("auto") == "cpu"


def test_an_unknown_name_is_refused_with_those_there_are() -> None:
    with pytest.raises(RequestError, match=r"^backend must be one of auto, reference, cpu, .*, not 'tpu'$"):
        make_backend("tpu", CONFIG, WEIGHTS)
    assert [resolve_backend(name) for name in ("reference", "null")] == ["reference", "null"]


@pytest.mark.parametrize("weight_format", WEIGHT_FORMATS)
def test_the_reference_computes_with_the_numbers_that_a_format_stands_for(weight_format: backends.WeightFormat) -> None:
    held = {name: dense(weight) for name, weight in convert(CONFIG, WEIGHTS, weight_format).items()}
    expected = logits(ReferenceBackend(CONFIG, held), IDS)
    backend = make_backend("reference", CONFIG, WEIGHTS, weight_format=weight_format, num_slots=3, num_pages=7)
    assert (backend.num_slots, backend.num_pages) == (3, 7)
    np.testing.assert_array_equal(logits(backend, IDS), expected)
    assert (weight_format == "f32") == np.array_equal(expected, logits(ReferenceBackend(CONFIG, WEIGHTS), IDS))


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(CrucibleError, match="the weight format must be one of f32, f16, int8, not 'fp8'"):
        make_backend("reference", CONFIG, WEIGHTS, weight_format="fp8")  # type: ignore[arg-type]
