"""Attention and its position encodings: the fused path against the materialised one, causality, tables."""

from __future__ import annotations

import math
from typing import Literal, get_args

import numpy as np
import pytest
import torch
from cells import axis_cells, toy
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from crucible.config import AXES, ModelConfig
from crucible.model.attention import ATTENTION_PATHS, AttentionPath, fused, materialised
from crucible.model.positions import POSITIONS, Alibi, Learned, Rope, alibi_slopes, make_positions
from crucible.model.transformer import Transformer

PATHS = get_args(AttentionPath)
NUM_HEADS, HEAD_DIM = 12, 16


def test_every_literal_has_its_entry() -> None:
    assert set(ATTENTION_PATHS) == set(PATHS)
    assert set(POSITIONS) == set(AXES["pos_encoding"])


# ---- fused against materialised -------------------------------------------------------------------------------------


def draw(group: int, num_positions: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys, values and a cotangent of the output; scores of order 1, so that softmax is far from uniform."""
    generator = torch.Generator().manual_seed(group * 1000 + num_positions)
    heads = (NUM_HEADS, NUM_HEADS // group, NUM_HEADS // group, NUM_HEADS)
    return [
        torch.randn(2, h, num_positions, HEAD_DIM, generator=generator, dtype=torch.float64).to(dtype) for h in heads
    ]


def output_and_gradients(path: AttentionPath, drawn: list[Tensor], bias: Tensor | None) -> list[Tensor]:
    inputs = [x.clone().requires_grad_() for x in drawn[:3]]
    out = ATTENTION_PATHS[path](*inputs, bias)
    return [out.detach(), *torch.autograd.grad(out, inputs, drawn[3])]


def make_bias(num_positions: int, dtype: torch.dtype = torch.float32) -> Tensor | None:
    return Alibi(toy(num_attention_heads=NUM_HEADS, pos_encoding="alibi")).to(dtype).bias(num_positions)


BOUNDS = {torch.float64: 1e-14, torch.float32: 2e-6}
"""Of outputs and gradients of order 1. Observed: 2e-15 and 7e-7 at most."""


@pytest.mark.parametrize("dtype", BOUNDS, ids=["f64", "f32"])
@pytest.mark.parametrize("biased", [False, True], ids=["causal", "alibi"])
@pytest.mark.parametrize("group", [1, 2, 4, 12])
@pytest.mark.parametrize("num_positions", [1, 33, 130])
def test_fused_equals_materialised(num_positions: int, group: int, biased: bool, dtype: torch.dtype) -> None:
    bias = make_bias(num_positions, dtype) if biased else None
    drawn = draw(group, num_positions, dtype)
    got, want = (output_and_gradients(path, drawn, bias) for path in PATHS)
    for name, one, other in zip(("output", "dq", "dk", "dv"), got, want, strict=True):
        # At least 1, because the gradients of q and k at a single position are nothing but rounding.
        error = (one - other).abs().max() / other.abs().max().clamp(min=1.0)
        assert error <= BOUNDS[dtype], f"{name}: {error:.2g}"


@pytest.mark.parametrize("biased", [False, True], ids=["causal", "alibi"])
@pytest.mark.parametrize("group", [1, 2, 4, 12])
def test_fused_is_fused(group: int, biased: bool) -> None:
    """Torch would fall back without a word; with one kernel allowed it says which condition fails."""
    q, k, v, _ = draw(group, 40, torch.float32)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        fused(q, k, v, make_bias(40) if biased else None)


@pytest.mark.parametrize("group", [2, 4, 12])
def test_query_head_reads_the_key_value_head_of_its_group(group: int) -> None:
    q, k, v, _ = draw(group, 9, torch.float64)
    for path in (fused, materialised):
        together = path(q, k, v, None)
        for head in range(NUM_HEADS):
            kv = slice(head // group, head // group + 1)
            alone = path(q[:, head : head + 1], k[:, kv], v[:, kv], None)
            torch.testing.assert_close(together[:, head : head + 1], alone, rtol=0, atol=1e-14)


def test_scores_are_scaled_by_the_root_of_the_head_size() -> None:
    q, k, v, _ = draw(1, 2, torch.float64)
    scores = (q[:, :, 1:] * k).sum(-1) / math.sqrt(HEAD_DIM)
    weight_of_second = 1 / (1 + torch.exp(scores[..., 0] - scores[..., 1]))
    expected = v[:, :, 0] + weight_of_second[..., None] * (v[:, :, 1] - v[:, :, 0])
    for path in (fused, materialised):
        torch.testing.assert_close(path(q, k, v, None)[:, :, 1], expected, rtol=0, atol=1e-14)


# ---- causality ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("config", axis_cells())
def test_a_later_token_leaves_earlier_logits_bit_identical(config: ModelConfig, path: AttentionPath) -> None:
    model = Transformer(config, attention_path=path)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (2, config.max_position_embeddings), generator=generator)
    with torch.no_grad():
        before = model(tokens)
        for position in (1, 31, 32, 64, config.max_position_embeddings - 1):
            edited = tokens.clone()
            edited[:, position] = (edited[:, position] + 1) % config.vocab_size
            after = model(edited)
            assert torch.equal(after[:, :position], before[:, :position])
            # Every later position sees the edit, so the equality above is not that of a model blind to its context.
            assert (after[:, position:] != before[:, position:]).any(dim=-1).all()


# ---- position encodings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("head_dim", "theta"), [(8, 10_000.0), (64, 10_000.0), (64, 500_000.0)])
def test_rope_tables_are_float64_rounded_once(head_dim: int, theta: float) -> None:
    rope = Rope(toy(head_dim=head_dim, rope_theta=theta, max_position_embeddings=1024))
    angle_TK = np.arange(1024)[:, None] / theta ** (np.arange(0, head_dim, 2) / head_dim)
    for table, exact in ((rope.cos, np.cos(angle_TK)), (rope.sin[:, head_dim // 2 :], np.sin(angle_TK))):
        error = np.abs(table[:, : head_dim // 2].double().numpy() - exact)
        assert error.max() <= 2.0**-25, "more than half a unit in the last place below 1"


def test_rope_turns_element_i_with_its_partner_half_a_head_away() -> None:
    config = toy()
    rope, half = Rope(config), config.head_dim // 2
    x_BTHK = torch.randn(2, 11, 3, config.head_dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x = x_BTHK.numpy()
    angle_THK = np.arange(11)[:, None, None] * config.rope_theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle_THK)
    np.testing.assert_allclose(rope.rotate(x_BTHK), np.concatenate((turned.real, turned.imag), -1), rtol=0, atol=3e-7)


def test_rope_rotates_half_precision_in_f32() -> None:
    config = toy()
    rope = Rope(config)
    x_BTHK = torch.randn(2, 96, 3, config.head_dim, generator=torch.Generator().manual_seed(2)).bfloat16()
    rotated = rope.rotate(x_BTHK)
    assert rotated.dtype == torch.bfloat16
    assert torch.equal(rotated, rope.rotate(x_BTHK.float()).bfloat16())


PUBLISHED_SLOPES = {
    1: [2**-8],
    2: [2**-4, 2**-8],
    3: [2**-4, 2**-8, 2**-2],
    4: [2**-2, 2**-4, 2**-6, 2**-8],
    6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3],
    8: [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8],
    12: [2**-1, 2**-2, 2**-3, 2**-4, 2**-5, 2**-6, 2**-7, 2**-8, 2**-0.5, 2**-1.5, 2**-2.5, 2**-3.5],
}
"""What get_slopes() of the paper's code returns (github.com/ofirpress/attention_with_linear_biases)."""


@pytest.mark.parametrize("num_heads", PUBLISHED_SLOPES)
def test_alibi_slopes_are_the_published_ones(num_heads: int) -> None:
    assert alibi_slopes(num_heads) == pytest.approx(PUBLISHED_SLOPES[num_heads], rel=1e-15)


@pytest.mark.parametrize("num_heads", range(1, 65))
def test_every_head_has_a_slope_of_its_own(num_heads: int) -> None:
    slopes = alibi_slopes(num_heads)
    assert len(set(slopes)) == num_heads
    assert all(2**-8 <= slope < 1 for slope in slopes)


def test_alibi_bias_falls_with_distance_and_hides_the_future() -> None:
    inf = math.inf
    bias_HTT = Alibi(toy()).bias(3)
    assert bias_HTT is not None
    assert bias_HTT.shape == (4, 3, 3)
    assert bias_HTT[0].tolist() == [[0, -inf, -inf], [-0.25, 0, -inf], [-0.5, -0.25, 0]]
    assert bias_HTT[3].tolist() == [[0, -inf, -inf], [-(2**-8), 0, -inf], [-(2**-7), -(2**-8), 0]]


@pytest.mark.parametrize("name", AXES["pos_encoding"])
def test_an_encoding_acts_in_one_place_only(name: Literal["rope", "alibi", "learned", "none"]) -> None:
    config = toy(pos_encoding=name)
    positions = make_positions(config)
    if isinstance(positions, Learned):
        torch.nn.init.ones_(positions.weight)
    x_BTD, x_BTHK = torch.ones(1, 5, config.hidden_size), torch.ones(1, 5, 2, config.head_dim)
    acts = {
        "learned": not torch.equal(positions.embed(x_BTD), x_BTD),
        "rope": not torch.equal(positions.rotate(x_BTHK), x_BTHK),
        "alibi": positions.bias(5) is not None,
    }
    assert [place for place, acting in acts.items() if acting] == ([] if name == "none" else [name])
