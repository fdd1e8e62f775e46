"""The reference's pure functions against the test vectors of docs/arithmetic.md and against formulas written anew."""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cells import toy

from crucible.engine.reference import ops
from crucible.engine.reference.attention import CHUNK, attend, attend_chunk
from crucible.engine.reference.positions import alibi_slopes, rotate
from crucible.engine.rope import rope_table

VECTORS = Path(__file__).parents[1] / "golden" / "arithmetic"
EPS = 2.0**-53
"""Of float64, relative."""

F64 = npt.NDArray[np.float64]


def load(name: str) -> Any:
    return json.loads((VECTORS / name).read_text())


def floats(values: Any) -> F64:
    """Nested lists of hexadecimal floats as an array."""
    return np.vectorize(float.fromhex, otypes=[np.float64])(np.array(values))


def test_the_vectors_are_what_their_script_makes() -> None:
    pytest.importorskip("mpmath")
    spec = importlib.util.spec_from_file_location("make_vectors", VECTORS / "make_vectors.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = script.vectors()
    assert {path.name for path in VECTORS.glob("*.json")} == made.keys()
    for name, content in made.items():
        assert load(name) == content


# ---- linear ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inputs", "outputs"), [(1, 1), (24, 32), (40, 24), (129, 67), (256, 704)])
def test_linear_is_the_exact_product_to_rounding(inputs: int, outputs: int) -> None:
    rng = np.random.default_rng(inputs)
    x = rng.standard_normal((3, inputs))
    weight = rng.standard_normal((outputs, inputs)).astype(np.float32)
    expected = np.array([[math.fsum(row * column) for column in weight.astype(np.float64)] for row in x])
    size = np.abs(x) @ np.abs(weight.T.astype(np.float64))
    # inputs products, each rounded, and a sum of them: at most inputs + 1 roundings of at most the sum of sizes.
    assert (np.abs(ops.linear(x, ops.transposed(weight)) - expected) <= (inputs + 1) * EPS * size).all()


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 64])
def test_linear_treats_each_row_as_if_it_were_alone(rows: int) -> None:
    rng = np.random.default_rng(rows)
    for inputs, outputs in [(24, 32), (40, 24), (256, 704), (704, 256), (67, 2048)]:
        x, weight = rng.standard_normal((rows, inputs)), rng.standard_normal((inputs, outputs))
        alone = np.concatenate([ops.linear(row[None].copy(), weight) for row in x])
        np.testing.assert_array_equal(ops.linear(x, weight), alone)


# ---- norms and activations ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", load("norms.json"), ids=lambda case: f"D={len(case['x'])}")
def test_norms(case: dict[str, Any]) -> None:
    x, weight, bias = (floats(case[name])[None] for name in ("x", "weight", "bias"))
    eps = float.fromhex(case["eps"])
    expected = floats(case["rmsnorm"])[None]
    np.testing.assert_allclose(ops.rms_norm(x, weight[0], eps), expected, rtol=16 * EPS, atol=0)
    expected = floats(case["layernorm"])[None]
    found = ops.layer_norm(x, weight[0], bias[0], eps)
    # Subtracting the mean cancels; what is left is as uncertain as the larger of x and the mean.
    allowed = 16 * EPS * (np.abs(x).max() / np.sqrt(x.var() + eps) * np.abs(weight) + np.abs(bias))
    assert (np.abs(found - expected) <= allowed).all()


def test_activations() -> None:
    case = load("activations.json")
    x = floats(case["x"])
    np.testing.assert_allclose(ops.silu(x), floats(case["silu"]), rtol=8 * EPS, atol=0)
    # 1 + tanh cancels far below zero, where the result itself is next to nothing.
    assert (np.abs(ops.gelu(x) - floats(case["gelu_tanh"])) <= 8 * EPS * np.abs(x)).all()


def test_activations_at_the_ends_of_the_range() -> None:
    x = np.array([-1e300, -1e4, 0.0, 1e4])
    np.testing.assert_array_equal(ops.silu(x), [0, 0, 0, 1e4])
    np.testing.assert_array_equal(ops.gelu(np.array([-1e4, 0.0, 1e4])), [0, 0, 1e4])


# ---- positions ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", load("rope.json"), ids=lambda case: f"{case['theta']}-{case['head_dim']}")
def test_rope_table_holds_the_exact_f32_numbers(case: dict[str, Any]) -> None:
    cos, sin = rope_table(toy(head_dim=case["head_dim"], rope_theta=case["theta"]), max(case["positions"]) + 1)
    chosen = np.ix_(case["positions"], case["pairs"])
    np.testing.assert_array_equal(cos[chosen], floats(case["cos_f32"]))
    np.testing.assert_array_equal(sin[chosen], floats(case["sin_f32"]))


def test_rotation_is_multiplication_by_a_complex_number() -> None:
    """Element i is the real part and element i + K/2 the imaginary part of number i."""
    rng = np.random.default_rng(0)
    x_MHK, angle_MK = rng.standard_normal((5, 3, 8)), rng.uniform(0, 7, (5, 4))
    turned = (x_MHK[..., :4] + 1j * x_MHK[..., 4:]) * np.exp(1j * angle_MK)[:, None]
    found = rotate(x_MHK, np.cos(angle_MK), np.sin(angle_MK))
    np.testing.assert_allclose(found, np.concatenate((turned.real, turned.imag), axis=-1), rtol=0, atol=32 * EPS)


@pytest.mark.parametrize("num_heads", range(1, 17))
def test_alibi_slopes_hold_the_exact_f32_numbers(num_heads: int) -> None:
    np.testing.assert_array_equal(alibi_slopes(num_heads), floats(load("alibi.json")[str(num_heads)]))


# ---- attention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1], ids=["plain", "alibi"])
def test_attention_vectors(index: int) -> None:
    vectors = load("attention.json")
    case = vectors["cases"][index]
    q, k, v = floats(vectors["q"]), floats(vectors["k"]), floats(vectors["v"])
    slope = float.fromhex(case["slope"])
    bias = -slope * np.arange(len(k) - 1, -1, -1.0)
    for start, expected in zip(range(0, len(k), CHUNK), case["chunks"], strict=True):
        chunk = slice(start, start + CHUNK)
        found = attend_chunk(q.reshape(1, 1, -1), k[chunk, None], v[chunk, None], bias[None, None, chunk])
        # A score of size s is off by s roundings, which its exponential turns into a relative error.
        np.testing.assert_allclose(found.maximum.item(), float.fromhex(expected["max"]), rtol=16 * EPS)
        np.testing.assert_allclose(found.total.item(), float.fromhex(expected["sum"]), rtol=256 * EPS)
        np.testing.assert_allclose(found.weighted[0, 0], floats(expected["value"]), rtol=256 * EPS, atol=256 * EPS)
    slopes = np.array([slope], dtype=np.float32) if slope else None
    found = attend(q[None], k[:, None], v[:, None], slopes)
    np.testing.assert_allclose(found[0], floats(case["output"]), rtol=256 * EPS, atol=256 * EPS)


@pytest.mark.parametrize("num_positions", [1, 2, 63, 64, 65, 128, 129, 200])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (1, 1)])
@pytest.mark.parametrize("alibi", [False, True], ids=["plain", "alibi"])
def test_attention_is_softmax_over_all_positions_at_once(
    num_positions: int, heads: int, kv_heads: int, alibi: bool
) -> None:
    rng = np.random.default_rng(num_positions)
    q = 3 * rng.standard_normal((heads, 8))
    k, v = 2 * rng.standard_normal((num_positions, kv_heads, 8)), rng.standard_normal((num_positions, kv_heads, 8))
    slopes = alibi_slopes(heads) if alibi else None
    found = attend(q, k, v, slopes)
    for head in range(heads):
        kv_head = head // (heads // kv_heads)
        score = k[:, kv_head] @ q[head] / math.sqrt(8)
        if slopes is not None:
            score -= float(slopes[head]) * (num_positions - 1 - np.arange(num_positions))
        weight = np.exp(score - score.max())
        np.testing.assert_allclose(found[head], weight @ v[:, kv_head] / weight.sum(), rtol=0, atol=1e-13)


def test_attention_reads_nothing_past_the_row() -> None:
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((4, 8)), rng.standard_normal((80, 2, 8)), rng.standard_normal((80, 2, 8))
    expected = attend(q, k[:70].copy(), v[:70].copy())
    k[70:], v[70:] = np.nan, np.nan
    np.testing.assert_array_equal(attend(q, k[:70], v[:70]), expected)


def test_attention_survives_scores_that_overflow_an_exponential() -> None:
    q = np.full((1, 2), 1e4)
    k, v = np.array([[[-1.0, 0.0]], [[1.0, 0.0]]]), np.array([[[5.0, 0.0]], [[7.0, 1.0]]])
    np.testing.assert_array_equal(attend(q, k, v), [[7.0, 1.0]])
