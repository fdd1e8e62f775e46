"""Weight formats against a slow twin in Python's own floats, and the bounds that their docstrings state."""

from __future__ import annotations

import math
import struct
from itertools import pairwise

import numpy as np
import pytest
from cells import all_cells, toy
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_weights import toy_weights

from crucible.config import ModelConfig, attention_kind
from crucible.engine.backends import make_backend
from crucible.engine.quant import (
    CHUNK,
    F16Weight,
    Int8Weight,
    QuantError,
    balance,
    chunk_size,
    convert,
    dense,
    halve,
    is_matrix,
    num_chunks,
    quantise,
)
from crucible.engine.runner import logits

TINY = 2.0**-126
LARGEST = float(np.finfo(np.float32).max)


@st.composite
def matrices(draw: st.DrawFn) -> np.ndarray:
    """f32 [N, K] with rows of very different magnitude, zero rows, zero chunks and single entries of any f32 value."""
    num_rows, num_inputs = draw(st.integers(1, 6)), draw(st.integers(1, 300))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weight = rng.standard_normal((num_rows, num_inputs))
    weight *= np.exp2(draw(st.lists(st.integers(-150, 120), min_size=num_rows, max_size=num_rows)))[:, None]
    if draw(st.booleans()):
        weight[draw(st.integers(0, num_rows - 1))] = 0
    if draw(st.booleans()):
        weight[:, : draw(st.integers(1, num_inputs))] = 0
    any_f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
    for value in draw(st.lists(any_f32, max_size=3)):
        weight[draw(st.integers(0, num_rows - 1)), draw(st.integers(0, num_inputs - 1))] = value
    return weight.astype(np.float32)


def to_f32(value: float) -> float:
    """A double rounded to f32. A quotient of two f32 numbers may be rounded to double first (Figueroa 1995)."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def slow_chunk(chunk: list[float]) -> tuple[float, list[int]]:
    scale = to_f32(max(abs(w) for w in chunk) / 127)
    if 127 * scale > LARGEST:
        scale = float(np.nextafter(np.float32(scale), np.float32(0)))
    if scale < TINY:
        return 0.0, [0] * len(chunk)
    return scale, [round(to_f32(w / scale)) for w in chunk]


@settings(max_examples=60, deadline=None)
@given(matrices(), st.sampled_from([16, 64, 128]))
def test_int8_equals_its_slow_twin(weight: np.ndarray, chunk: int) -> None:
    found = quantise(weight, chunk)
    found.check()
    for n, row in enumerate(weight.tolist()):
        bounds = [*range(0, len(row), chunk), len(row)]
        for c, (begin, end) in enumerate(pairwise(bounds)):
            scale, values = slow_chunk(row[begin:end])
            assert found.scales[n, c] == scale
            assert found.values[n, begin:end].tolist() == values
            assert found.dequantise()[n, begin:end].tolist() == [to_f32(value * scale) for value in values]


@settings(max_examples=100, deadline=None)
@given(matrices())
def test_int8_is_off_by_half_a_scale(weight: np.ndarray) -> None:
    found = quantise(weight)
    scales = np.repeat(found.scales.astype(np.float64), CHUNK, axis=1)[:, : weight.shape[1]]
    error = np.abs(weight - found.values * scales)
    zero = scales == 0
    assert (error[~zero] <= scales[~zero] / 2 * (1 + 2**-16)).all()
    assert (error[zero] < 127 * TINY).all()
    # The largest of a chunk is kept to the scale's own rounding; the zero rows and chunks exactly.
    largest = np.abs(weight).max(axis=1)
    np.testing.assert_allclose(np.abs(dense(found)).max(axis=1), largest, rtol=2**-22, atol=127 * TINY)
    assert not dense(found)[weight == 0].any()


@settings(max_examples=60, deadline=None)
@given(matrices(), st.randoms(use_true_random=False))
def test_int8_of_a_row_depends_on_nothing_else(weight: np.ndarray, random: object) -> None:
    found = quantise(weight)
    row = random.randrange(len(weight))  # type: ignore[attr-defined]
    alone = quantise(weight[row : row + 1])
    assert alone.values.tobytes() == found.values[row].tobytes()
    assert alone.scales.tobytes() == found.scales[row].tobytes()
    strided = np.asfortranarray(np.concatenate([weight, weight], axis=1))[:, : weight.shape[1]]
    assert quantise(strided).values.tobytes() == found.values.tobytes()


def test_int8_of_many_rows_equals_that_of_each() -> None:
    """Rows are taken in blocks; the borders must not show."""
    weight = np.random.default_rng(3).standard_normal((1000, 300), dtype=np.float32)
    found = quantise(weight)
    assert all(quantise(weight[n : n + 1]).values.tobytes() == found.values[n].tobytes() for n in range(1000))
    assert found.dequantise()[[999, 0, 500]].tobytes() == found.rows(np.array([999, 0, 500])).tobytes()
    assert found.shape == (1000, 300)
    assert found.nbytes == 1000 * 300 + 4 * 1000 * 3


def test_ties_go_to_even_and_the_sign_is_symmetric() -> None:
    weight = np.array([[127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, -127]], dtype=np.float32)
    assert quantise(weight).values.tolist() == [[127, 0, 2, 2, 0, -2, -2, -127]]
    assert (quantise(-weight).values == -quantise(weight).values).all()


@settings(max_examples=100, deadline=None)
@given(matrices())
def test_f16_is_off_by_half_a_unit_in_the_last_place(weight: np.ndarray) -> None:
    if np.abs(weight).max() >= 2.0**128 - 2.0**116:
        with pytest.raises(QuantError, match="out of range for f16"):
            halve(weight)
        return
    found = halve(weight)
    fraction, exponent = np.frexp(found.scales)
    assert (fraction == 0.5).all()
    assert (found.scales >= TINY).all()
    # From the values and scales themselves: the product may be a subnormal f32.
    error = np.abs(weight - found.values.astype(np.float64) * found.scales[:, None].astype(np.float64))
    unit = np.maximum(2.0**-11 * np.abs(weight.astype(np.float64)), 2.0**-25 * found.scales[:, None].astype(np.float64))
    assert (error <= unit).all()
    in_range = (np.abs(weight).max(axis=1) > 0) & (exponent > -125)
    assert (np.abs(found.values).max(axis=1)[in_range] >= 2**14).all()
    for n, row in enumerate(weight.tolist()):
        scale = float(found.scales[n])
        assert found.values[n].tolist() == [struct.unpack("<e", struct.pack("<e", w / scale))[0] for w in row]


def test_f16_keeps_what_bf16_holds() -> None:
    """A bf16 number has 8 bits, f16 11: rows of any magnitude come back exactly, if they span fewer than 2^28."""
    rng = np.random.default_rng(0)
    bits = (
        (rng.standard_normal((9, 200)) * np.exp2(np.arange(-100, 125, 25))[:, None]).astype(np.float32).view(np.uint32)
    )
    weight = (bits & np.uint32(0xFFFF0000)).view(np.float32)
    assert (halve(weight).dequantise() == weight).all()
    assert halve(weight).rows(np.array([8, 1])).tobytes() == weight[[8, 1]].tobytes()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(value: float) -> None:
    weight = np.zeros((3, 200), dtype=np.float32)
    weight[2, 199] = value
    for form in (quantise, halve):
        with pytest.raises(QuantError, match="not finite"):
            form(weight)


@pytest.mark.parametrize("weight", [np.zeros((2, 3)), np.zeros(3, np.float32), np.zeros((1, 2, 3), np.float32)])
def test_what_is_no_f32_matrix_is_refused(weight: np.ndarray) -> None:
    for form in (quantise, halve):
        with pytest.raises(QuantError, match=r"must be float32 \[N, K\]"):
            form(weight)


def test_arrays_that_do_not_fit_are_refused() -> None:
    values, scales = np.zeros((2, 130), np.int8), np.zeros((2, 2), np.float32)
    Int8Weight(values, scales, 128).check()
    for bad_values, bad_scales, chunk, message in [
        (values, scales, 0, "chunk must be positive"),
        (values.astype(np.uint8), scales, 128, "values must be int8"),
        (values[0], scales, 128, "values must be int8"),
        (values, scales, 64, r"scales must be float32 \[2, 3\]"),
        (values, scales[:1], 128, r"scales must be float32 \[2, 2\]"),
        (values, scales.astype(np.float64), 128, "scales must be float32"),
    ]:
        with pytest.raises(QuantError, match=message):
            Int8Weight(bad_values, bad_scales, chunk)
    with pytest.raises(QuantError, match="-128"):
        Int8Weight(values - np.int8(127) - np.int8(1), scales, 128).check()
    for value in (-1, math.nan, math.inf):
        with pytest.raises(QuantError, match="finite and not negative"):
            Int8Weight(values, scales + np.float32(value), 128).check()
    with pytest.raises(QuantError, match="values must be float16"):
        F16Weight(values, scales[:, 0])  # type: ignore[arg-type]
    with pytest.raises(QuantError, match=r"scales must be float32 \[2\]"):
        F16Weight(values.astype(np.float16), scales)


@settings(max_examples=300)
@given(st.integers(1, 300), st.integers(1, 12), st.integers(1, 40))
def test_a_chunk_of_o_proj_never_spans_two_groups(head_dim: int, kv_heads: int, group: int) -> None:
    heads = kv_heads * group
    config = toy(
        head_dim=2 * head_dim,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        attention=attention_kind(heads, kv_heads),
    )
    chunk = chunk_size(config, "model.layers.0.self_attn.o_proj.weight")
    span = config.group_size * config.head_dim
    allowed = [c for c in range(config.head_dim, CHUNK + 1, config.head_dim) if span % c == 0]
    assert chunk == (max(allowed) if allowed else config.head_dim)
    assert chunk_size(config, "model.layers.0.self_attn.q_proj.weight") == CHUNK
    assert chunk_size(config, "model.embed_tokens.weight") == CHUNK


@pytest.mark.parametrize("config", all_cells())
def test_every_matrix_of_a_model_is_converted_and_nothing_else(config: ModelConfig) -> None:
    config = config.vary(tie_word_embeddings=False)
    weights = toy_weights(config)
    for weight_format, kind in (("int8", Int8Weight), ("f16", F16Weight), ("f32", np.ndarray)):
        found = convert(config, weights, weight_format)
        assert list(found) == list(weights)
        for name, weight in found.items():
            matrix = weights[name].ndim == 2 and name != "model.embed_positions.weight"
            assert is_matrix(name) == matrix
            assert isinstance(weight, kind if matrix else np.ndarray)
            assert dense(weight).shape == weights[name].shape
            if isinstance(weight, Int8Weight):
                assert weight.scales.shape[1] == num_chunks(weights[name].shape[1], chunk_size(config, name))


def test_converting_again_changes_nothing() -> None:
    config = toy()
    int8 = convert(config, toy_weights(config), "int8")
    again = convert(config, int8, "int8")
    assert all(again[name] is int8[name] for name in int8)
    for name, weight in convert(config, int8, "f32").items():
        assert dense(weight).tobytes() == dense(int8[name]).tobytes()


def test_errors_name_the_format_and_the_tensor() -> None:
    config = toy()
    weights = toy_weights(config)
    with pytest.raises(QuantError, match="must be one of f32, f16, int8, not 'int4'"):
        convert(config, weights, "int4")  # type: ignore[arg-type]
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = np.nan
    with pytest.raises(QuantError, match=r"tensor 'model.layers.1.mlp.up_proj.weight': a weight is not finite"):
        convert(config, weights, "int8")


# ---- balance ----------------------------------------------------------------------------------------------------


def _skewed(config: ModelConfig) -> dict[str, np.ndarray]:
    """Toy weights with a norm whose entries differ by powers of ten, and v columns that differ the other way."""
    weights = dict(toy_weights(config))
    scales = np.exp(np.random.default_rng(5).normal(0, 1.5, config.hidden_size)).astype(np.float32)
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}."
        weights[f"{at}input_layernorm.weight"] = weights[f"{at}input_layernorm.weight"] * scales
        for x in "qkv":
            weights[f"{at}self_attn.{x}_proj.weight"] = weights[f"{at}self_attn.{x}_proj.weight"] / scales
    return weights


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_a_balanced_model_computes_the_same_bits_in_f32(norm: str):
    config = toy(norm=norm)
    weights = _skewed(config)
    balanced = balance(config, weights, "int8")
    changed = [name for name in weights if not np.array_equal(weights[name], balanced[name])]
    assert {name.split(".", 3)[-1] for name in changed} >= {"self_attn.v_proj.weight", "input_layernorm.weight"}
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    dense_again = {name: dense(weight) for name, weight in balanced.items()}
    plain, moved = (logits(make_backend("reference", config, each), ids) for each in (weights, dense_again))
    assert np.array_equal(plain, moved)


def test_balancing_brings_small_columns_of_v_nearer_to_their_values():
    config = toy()
    weights = _skewed(config)
    name, norm = "model.layers.0.self_attn.v_proj.weight", "model.layers.0.input_layernorm.weight"
    held = convert(config, weights, "int8")
    kept = dense(held[name]) * dense(held[norm])
    alone = quantise(weights[name]).dequantise() * weights[norm]
    wanted = weights[name] * weights[norm]
    assert np.square(kept - wanted).mean() < 0.5 * np.square(alone - wanted).mean()


def test_nothing_is_balanced_where_no_norm_is_before_the_projections_or_int8_is_stored():
    post = toy(norm_placement="post")
    assert balance(post, weights := toy_weights(post), "int8") == weights
    config = toy()
    weights = _skewed(config)
    assert balance(config, weights, "f16") == weights
    stored = convert(config, weights, "int8")
    assert balance(config, stored, "int8") == stored
    assert convert(config, stored, "int8") == stored


def test_columns_of_zeros_stay_as_they_are():
    config = toy()
    weights = _skewed(config)
    for x in "qkv":
        weights[f"model.layers.0.self_attn.{x}_proj.weight"][:, 3] = 0
    balanced = balance(config, weights, "int8")
    norm = "model.layers.0.input_layernorm.weight"
    assert dense(balanced[norm])[3] == weights[norm][3]
    assert all(np.isfinite(dense(weight)).all() for weight in balanced.values())
