"""The engine's logits against the trainable model's, for every combination of axis values: two independent programs.

A transposed projection, the other RoPE pairing or a wrong head mapping all still write fluent text. So the second half
of this file breaks the engine in such ways, one at a time, and asserts that the comparison of the first half fails.

Errors are relative to the root mean square of the row of logits they stand in.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cells import all_cells, axis_cells, toy
from toy_weights import toy_weights

from crucible.config import ModelConfig
from crucible.engine.reference import ReferenceBackend, decoder, ops
from crucible.engine.reference.attention import Partial
from crucible.engine.reference.cache import PagedCache
from crucible.engine.reference.positions import alibi_slopes
from crucible.engine.rope import rope_table
from crucible.engine.runner import logits
from crucible.model.transformer import Transformer

Weights = dict[str, npt.NDArray[np.float32]]
F64 = npt.NDArray[np.float64]

ROUNDING = 2.0**-24
"""Of f32, relative."""

AGAINST_F64 = 64 * ROUNDING
"""3.8e-6. Only keys, values and logits are rounded. A rounded key moves a score s by about |s| roundings, and these
weights make scores of some tens on purpose, in two layers. Observed: 1.9e-6 at most."""

AGAINST_F32 = 512 * ROUNDING
"""3.1e-5. Here torch rounds every operation: sums of 24 to 40 products on the way to each of those scores, twice.
Observed: 1.1e-5 at most, and the same between torch in f32 and in float64."""

NOT_ROUNDED = 1e-12
"""Before any rounding to f32 both are float64 programs. Observed: 3e-14 at most."""

CAUGHT = 10 * AGAINST_F32
"""What every mutation exceeds. Closest is the erf form of GELU, within 5e-4 of the tanh form; others give over 0.2."""


def sharpen(config: ModelConfig, **changes: Any) -> ModelConfig:
    """The cell with an epsilon that shows: at 1e-5 beside a mean square near 1 it would drown in the bounds."""
    return config.vary(norm_eps=0.03, **changes)


def torch_model(config: ModelConfig, weights: Weights) -> Transformer:
    torch.set_num_threads(1)
    model = Transformer(config)
    model.load_state_dict({name.removeprefix("model."): torch.from_numpy(w) for name, w in weights.items()})
    return model


@torch.no_grad()
def torch_logits(model: Transformer, ids: list[int]) -> F64:
    return model(torch.tensor(ids)[None])[0].double().numpy()


def draw_ids(config: ModelConfig, count: int) -> list[int]:
    return np.random.default_rng(7).integers(0, config.vocab_size, count).tolist()


def error(found: npt.NDArray[np.floating], expected: F64) -> float:
    rms = np.sqrt(np.mean(expected**2, axis=-1, keepdims=True))
    return float(np.max(np.abs(found.astype(np.float64) - expected) / rms))


def unrounded_logits(config: ModelConfig, weights: Weights, ids: list[int]) -> F64:
    """The engine without its two roundings to f32: a float64 cache, and float64 logits."""
    num_pages = -(-len(ids) // 16)
    cache = PagedCache(config, num_pages)
    cache.keys, cache.values = cache.keys.astype(np.float64), cache.values.astype(np.float64)
    engine = decoder.Decoder(config, weights)
    x_MD = engine.forward(np.array(ids), [decoder.Span(np.arange(num_pages), 0, len(ids))], cache)
    head = weights["model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"]
    return x_MD @ head.astype(np.float64).T


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("config", all_cells())
def test_every_cell(config: ModelConfig, tied: bool) -> None:
    """All 96 positions of the context: rows on both sides of every page border and of the chunk border at 64."""
    config = sharpen(config, tie_word_embeddings=tied)
    weights, ids = toy_weights(config), draw_ids(config, config.max_position_embeddings)
    model = torch_model(config, weights)
    found = logits(ReferenceBackend(config, weights), ids)
    assert error(found, torch_logits(model, ids)) < AGAINST_F32
    expected = torch_logits(model.double(), ids)
    assert error(found, expected) < AGAINST_F64
    assert error(unrounded_logits(config, weights, ids), expected) < NOT_ROUNDED


@pytest.mark.parametrize("length", [1, 2, 15, 16, 17, 63, 64, 65])
@pytest.mark.parametrize("config", axis_cells())
def test_prompt_lengths(config: ModelConfig, length: int) -> None:
    config = sharpen(config)
    weights, ids = toy_weights(config), draw_ids(config, length)
    expected = torch_logits(torch_model(config, weights).double(), ids)
    assert error(logits(ReferenceBackend(config, weights), ids), expected) < AGAINST_F64


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 1, "attention": "mha"},
        {"num_attention_heads": 6, "attention": "mha", "pos_encoding": "alibi"},
        {"num_attention_heads": 6, "attention": "gqa", "num_key_value_heads": 2},
        {"num_attention_heads": 12, "attention": "mqa", "pos_encoding": "alibi"},
        {"num_attention_heads": 3, "attention": "mqa", "head_dim": 5, "pos_encoding": "none"},
        {"head_dim": 2, "num_hidden_layers": 1},
        {"rope_theta": 100_000.0, "norm_eps": 1e-6, "head_dim": 16},
    ],
    ids=lambda changes: "-".join(f"{key}={value}" for key, value in changes.items()),
)
def test_odd_head_counts_and_sizes(changes: dict[str, Any]) -> None:
    config = toy(**changes)
    weights, ids = toy_weights(config), draw_ids(config, 80)
    model = torch_model(config, weights).double()
    assert error(unrounded_logits(config, weights, ids), torch_logits(model, ids)) < NOT_ROUNDED


@pytest.mark.parametrize(("head_dim", "theta"), [(8, 10_000.0), (64, 100_000.0), (128, 500_000.0)])
def test_both_hold_the_same_rope_table(head_dim: int, theta: float) -> None:
    """But for the last bit of an entry in ten thousand: two libraries' float64 pow and cos may differ in theirs."""
    model = Transformer(toy(head_dim=head_dim, rope_theta=theta, max_position_embeddings=2048))
    ones_and_zeros = (torch.arange(head_dim) < head_dim // 2).float()
    cos_sin = model.embed_positions.rotate(ones_and_zeros.expand(1, 2048, 1, head_dim))[0, :, 0].numpy()
    found = np.concatenate(rope_table(model.config), axis=1)
    np.testing.assert_array_max_ulp(found, cos_sin, maxulp=1)
    assert np.mean(found != cos_sin) < 1e-4


@pytest.mark.parametrize("heads", [1, 2, 6, 12, 16])
def test_both_hold_the_same_alibi_slopes(heads: int) -> None:
    model = Transformer(toy(num_attention_heads=heads, attention="mha", pos_encoding="alibi"))
    np.testing.assert_array_equal(alibi_slopes(heads), model.embed_positions.slopes.numpy())


# ---- the comparison catches what it is for --------------------------------------------------------------------------


def caught(config: ModelConfig, weights: Weights, mutated: Weights) -> float:
    """The engine's error with `mutated` weights against torch with the right ones; at most AGAINST_F32 if equal."""
    ids = draw_ids(config, config.max_position_embeddings)
    return error(logits(ReferenceBackend(config, mutated), ids), torch_logits(torch_model(config, weights), ids))


def transposed(name: str) -> Callable[[ModelConfig, Weights], Weights]:
    """A projection whose numbers are laid out [inputs, outputs] under the shape [outputs, inputs]."""
    return lambda config, weights: {n: w.T.reshape(w.shape) if name in n else w for n, w in weights.items()}


def scaled(name: str, factor: float) -> Callable[[ModelConfig, Weights], Weights]:
    return lambda config, weights: {n: w * np.float32(factor) if name in n else w for n, w in weights.items()}


def swapped(one: str, other: str) -> Callable[[ModelConfig, Weights], Weights]:
    def swap(config: ModelConfig, weights: Weights) -> Weights:
        return {n: weights[n.replace(one, "?").replace(other, one).replace("?", other)] for n in weights}

    return swap


def heads_dealt_round(config: ModelConfig, weights: Weights) -> Weights:
    """Query head h reads key/value head h % G: the same as giving the heads to h // R in this other order."""
    kv_heads = config.num_key_value_heads
    order = [h for g in range(kv_heads) for h in range(g, config.num_attention_heads, kv_heads)]

    def reorder(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return rows.reshape(config.num_attention_heads, config.head_dim, -1)[order].reshape(rows.shape)

    mutated = dict(weights)
    for name, weight in weights.items():
        if "q_proj" in name:
            mutated[name] = reorder(weight)
        elif "o_proj" in name:
            mutated[name] = np.ascontiguousarray(reorder(np.ascontiguousarray(weight.T)).T)
    return mutated


def shifted_positions(config: ModelConfig, weights: Weights) -> Weights:
    return {n: np.roll(w, 1, axis=0) if "embed_positions" in n else w for n, w in weights.items()}


@pytest.mark.parametrize(
    ("changes", "mutate"),
    [
        *[
            pytest.param({}, transposed(name), id=f"transposed {name}")
            for name in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
        ],
        pytest.param({"tie_word_embeddings": False}, transposed("lm_head"), id="transposed lm_head"),
        pytest.param({}, heads_dealt_round, id="head mapping"),
        pytest.param({}, swapped("gate_proj", "up_proj"), id="gate and up"),
        pytest.param({"attention": "mha"}, swapped("q_proj", "k_proj"), id="q and k"),
        pytest.param({}, swapped("layers.0", "layers.1"), id="layer order"),
        pytest.param({}, swapped("input_layernorm", "post_attention_layernorm"), id="norms of a layer"),
        pytest.param({}, scaled("q_proj", 8**0.5), id="no softmax scale"),
        pytest.param({"norm": "layernorm"}, scaled("layernorm.bias", 0.0), id="no norm bias"),
        pytest.param({"pos_encoding": "learned"}, shifted_positions, id="positions from 1"),
    ],
)
def test_wrong_weights_are_caught(changes: dict[str, Any], mutate: Callable[[ModelConfig, Weights], Weights]) -> None:
    config = sharpen(toy(**changes))
    weights = toy_weights(config)
    assert caught(config, weights, mutate(config, weights)) > CAUGHT


def interleaved_rotate(x_MHK: F64, cos: F64, sin: F64) -> F64:
    """The paper's pairing of neighbours."""
    rotated = np.empty_like(x_MHK)
    even, odd, cos, sin = x_MHK[..., 0::2], x_MHK[..., 1::2], cos[:, None], sin[:, None]
    rotated[..., 0::2], rotated[..., 1::2] = even * cos - odd * sin, odd * cos + even * sin
    return rotated


def erf_gelu(x: F64) -> F64:
    return x * np.vectorize(lambda value: 0.5 * (1 + math.erf(value / math.sqrt(2))))(x)


def unbiased_layer_norm(x: F64, weight: F64, bias: F64, eps: float) -> F64:
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, ddof=1, keepdims=True) + eps) * weight + bias


def eps_outside_the_root(x: F64, weight: F64, eps: float) -> F64:
    return x / (np.sqrt((x * x).mean(-1, keepdims=True)) + eps) * weight


def without_own_position(attend: Callable[..., F64]) -> Callable[..., F64]:
    """Attention to earlier positions only, where there are any."""
    return lambda q, k, v, slopes: attend(q, k[: max(1, len(k) - 1)], v[: max(1, len(v) - 1)], slopes)


@pytest.mark.parametrize(
    ("changes", "where", "name", "mutant"),
    [
        pytest.param({}, decoder, "rotate", interleaved_rotate, id="interleaved RoPE pairs"),
        pytest.param({}, decoder, "rotate", lambda x, cos, sin: x, id="no RoPE"),
        pytest.param(
            {}, decoder, "rope_table", lambda config: rope_table(config.vary(rope_theta=5_000.0)), id="RoPE base"
        ),
        pytest.param({}, decoder, "attend", without_own_position(decoder.attend), id="strictly causal"),
        pytest.param({}, Partial, "merge", lambda self, later: later, id="last chunk only"),
        pytest.param({}, ops, "silu", ops.gelu, id="gelu for silu"),
        pytest.param({}, ops, "rms_norm", eps_outside_the_root, id="eps outside the root"),
        pytest.param({"activation": "gelu"}, ops, "gelu", erf_gelu, id="erf GELU"),
        pytest.param({"norm": "layernorm"}, ops, "layer_norm", unbiased_layer_norm, id="unbiased variance"),
        pytest.param({"pos_encoding": "alibi"}, decoder, "alibi_slopes", lambda n: -alibi_slopes(n), id="ALiBi sign"),
        pytest.param(
            {"pos_encoding": "alibi"}, decoder, "alibi_slopes", lambda n: alibi_slopes(n)[::-1], id="ALiBi head order"
        ),
    ],
)
def test_wrong_computation_is_caught(
    changes: dict[str, Any], where: Any, name: str, mutant: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = sharpen(toy(**changes))
    weights = toy_weights(config)
    monkeypatch.setattr(where, name, mutant)
    assert caught(config, weights, weights) > CAUGHT
