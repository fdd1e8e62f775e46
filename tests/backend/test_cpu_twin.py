"""The CPU backend against its slow twin in numpy, bit for bit, and against the reference backend to rounding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cells import all_cells, axis_cells, toy
from toy_weights import toy_weights

pytest.importorskip("numba")

import cpu_twin
import numba
from cpu_twin import Twin

from crucible.config import ModelConfig, RopeScaling
from crucible.engine.cpu import CpuBackend, functions
from crucible.engine.cpu.lanes import LANES, load, store
from crucible.engine.quant import WeightFormat, convert, dense
from crucible.engine.reference import ReferenceBackend
from crucible.engine.runner import logits

F32 = npt.NDArray[np.float32]

GOLDEN = Path(__file__).parents[1] / "golden" / "arithmetic"

BORROWED = toy(
    num_hidden_layers=1, head_dim=10, qkv_bias=True, o_bias=True, qk_norm=True,
    rope_scaling=RopeScaling(
        kind="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=48
    ),
)  # fmt: skip
"""What only models of others have."""

WIDE = toy(
    num_hidden_layers=1, hidden_size=300, intermediate_size=270, num_key_value_heads=2, head_dim=72,
    tie_word_embeddings=False,
)  # fmt: skip
"""Three chunks of inputs, the last one short; in o_proj four chunks of 72."""

FORMATS: list[WeightFormat] = ["f32", "f16", "int8"]


def draw_ids(config: ModelConfig, count: int) -> list[int]:
    return np.random.default_rng(0).integers(0, config.vocab_size, count).tolist()


def assert_twins(config: ModelConfig, weight_format: WeightFormat, num_tokens: int) -> None:
    weights, ids = toy_weights(config), draw_ids(config, num_tokens)
    found = logits(CpuBackend(config, weights, weight_format=weight_format, num_threads=1), ids)
    twin = Twin(config, convert(config, weights, weight_format))
    expected = np.array([twin.feed(token_id) for token_id in ids])
    assert not np.isnan(expected).any()
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    "config",
    [pytest.param(cell.values[0].vary(num_hidden_layers=1), id=cell.id) for cell in axis_cells()]
    + [pytest.param(BORROWED, id="borrowed")],
)
def test_every_bit_is_the_twins(config: ModelConfig) -> None:
    """67 tokens are two chunks of attention."""
    assert_twins(config, "f32", 67)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_bit_is_the_twins_in_every_format(weight_format: WeightFormat) -> None:
    assert_twins(WIDE, weight_format, 10)


@pytest.mark.parametrize("weight_format", FORMATS)
def test_embeddings_are_looked_up_in_the_tied_matrix(weight_format: WeightFormat) -> None:
    assert_twins(WIDE.vary(tie_word_embeddings=True), weight_format, 3)


def test_the_twins_multiply_add_rounds_once() -> None:
    """Against exact rational arithmetic; ties that a second rounding would break are among the cases."""
    from fractions import Fraction

    rng = np.random.default_rng(1)
    a, b, c = (rng.standard_normal(2000).astype(np.float32) for _ in range(3))
    c[:1000] = (-a[:1000] * b[:1000]).astype(np.float32)  # cancels
    c[1000:1500] *= np.float32(2.0) ** rng.integers(-60, 60, 500).astype(np.float32)
    for x, y, z, found in zip(a, b, c, cpu_twin.fma(a, b, c), strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        near = [np.nextafter(found, np.float32(side)) for side in (-np.inf, np.inf)]
        assert all(abs(Fraction(float(found)) - exact) <= abs(Fraction(float(other)) - exact) for other in near)
    tie = np.float32(1 + 2**-23) * np.array([1], np.float32)
    # 1 + 2^-24 exactly between two f32 numbers, and a little more than that by a product of 2^-60.
    above = cpu_twin.fma(np.float32(2.0**-30), np.float32(2.0**-30), np.float32(1))
    assert above == 1
    assert cpu_twin.fma(np.float32(1 + 2.0**-23), np.float32(2.0**-24), np.float32(1)) == tie[0]


# ---- against the reference ------------------------------------------------------------------------------------------


def error(found: F32, expected: F32) -> float:
    """The largest error, relative to the root mean square of its row."""
    return float((np.abs(found - expected).max(axis=1) / np.sqrt((expected**2).mean(axis=1))).max())


@pytest.mark.parametrize("config", all_cells())
def test_every_architecture_is_the_references_to_rounding(config: ModelConfig) -> None:
    """The toys make attention sharp on purpose, which amplifies every rounding of a key: at most 1.2e-5 was seen."""
    weights, ids = toy_weights(config), draw_ids(config, 96)
    expected = logits(ReferenceBackend(config, weights), ids)
    assert error(logits(CpuBackend(config, weights, num_threads=1), ids), expected) < 2e-5


@pytest.mark.parametrize("weight_format", ["f16", "int8"])
@pytest.mark.parametrize(
    "config", [*axis_cells(), pytest.param(BORROWED, id="borrowed"), pytest.param(WIDE, id="wide")]
)
def test_formats_are_the_reference_on_the_numbers_they_stand_for(
    config: ModelConfig, weight_format: WeightFormat
) -> None:
    weights, ids = toy_weights(config), draw_ids(config, 96)
    held = {name: dense(weight) for name, weight in convert(config, weights, weight_format).items()}
    expected = logits(ReferenceBackend(config, held), ids)
    backend = CpuBackend(config, weights, weight_format=weight_format, num_threads=1)
    assert error(logits(backend, ids), expected) < 2e-5


# ---- functions ------------------------------------------------------------------------------------------------------


def over_lanes(function: Any) -> Any:
    """A function of lanes as one of arrays [N]; N is a multiple of 16."""

    @numba.njit(error_model="numpy")
    def apply(x: F32, y: F32) -> None:
        for i in range(0, x.size, LANES):
            store(y, i, function(load(x, i)))

    def call(x: F32) -> F32:
        y = np.empty_like(x)
        apply(x, y)
        return y

    return call


def test_exp_is_within_two_ulps_and_has_its_limits() -> None:
    exp = over_lanes(functions.exp)
    x = np.linspace(-87.3, 88.0, 1 << 18, dtype=np.float32)
    true = np.exp(x.astype(np.float64))
    assert (np.abs(exp(x) - true) / np.spacing(true.astype(np.float32))).max() < 2
    np.testing.assert_array_equal(exp(x), cpu_twin.exp(x))
    special = np.array(
        [0, -0.0, -np.inf, np.inf, np.nan, -87.4, 88.1, -1e30, 1e30, -1e-30, 1e-40] + [0] * 5, np.float32
    )
    expected = np.array([1, 1, 0, np.inf, np.nan, 0, np.inf, 0, np.inf, 1, 1] + [1] * 5, np.float32)
    np.testing.assert_array_equal(exp(special), expected)


def hexed(value: Any) -> Any:
    """Nested lists of hexadecimal floats as an array."""
    return np.vectorize(float.fromhex)(np.array(value))


@pytest.mark.parametrize(("name", "golden_name"), [("silu", "silu"), ("gelu", "gelu_tanh")])
def test_activations_are_the_golden_ones(name: str, golden_name: str) -> None:
    golden = json.loads((GOLDEN / "activations.json").read_text())
    x, expected = hexed(golden["x"]).astype(np.float32), hexed(golden[golden_name])
    padded = np.zeros(-(-len(x) // LANES) * LANES, dtype=np.float32)
    padded[: len(x)] = x
    found = over_lanes(getattr(functions, name))(padded)[: len(x)]
    # In GELU's left tail the relative error is that of e^-2u, |2u| roundings of u.
    np.testing.assert_allclose(found, expected, rtol=4e-6 if name == "gelu" else 4e-7, atol=1e-12)


def test_the_twins_norms_and_attention_are_the_golden_ones() -> None:
    """What holds for the twin holds for the backend, bit for bit."""
    for golden in json.loads((GOLDEN / "norms.json").read_text()):
        x, weight, bias = (hexed(golden[key]).astype(np.float32) for key in ("x", "weight", "bias"))
        eps = float.fromhex(golden["eps"])
        for found, key in (
            (cpu_twin.rms_norm(x, weight, eps), "rmsnorm"),
            (cpu_twin.layer_norm(x, weight, bias, eps), "layernorm"),
        ):
            expected = hexed(golden[key])
            assert np.abs(found - expected).max() < 1e-6 * np.abs(expected).max()
    golden = json.loads((GOLDEN / "attention.json").read_text())
    q, k, v = (hexed(golden[key]).astype(np.float32) for key in "qkv")
    for case in golden["cases"]:
        found, expected = cpu_twin.attend(q, k, v, np.float32(float.fromhex(case["slope"]))), hexed(case["output"])
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
