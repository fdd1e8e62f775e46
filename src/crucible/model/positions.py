"""How a model knows where a token stands: one class per value of `pos_encoding`, one interface."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from crucible.config import ModelConfig, PosEncoding


class PositionEncoding(nn.Module):
    """The three places where an encoding may act. This class acts in none of them: it is `pos_encoding="none"`.

    A causal model without any encoding still tells positions apart, by how many tokens each one attends to
    (Haviv et al. 2022).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def embed(self, x_BTD: Tensor) -> Tensor:
        """The token embeddings, with whatever the encoding adds to them."""
        return x_BTD

    def rotate(self, x_BTHK: Tensor) -> Tensor:
        """Queries or keys as attention compares them. Position t is row t of dimension T."""
        return x_BTHK

    def bias(self, num_positions: int) -> Tensor | None:
        """f32 [H, T, T] to be added to attention's scores, -inf after the query; None is plain causal attention."""
        return None


class Rope(PositionEncoding):
    """Rotation of query and key pairs by position-proportional angles (Su et al. 2021, section 3.2).

    Element i pairs with element i + K/2, as in Hugging Face's Llama; the paper pairs neighbours. The angles are
    computed in float64 and their cosine and sine rounded once to float32, so that every backend holds the same table.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        half = torch.arange(config.head_dim // 2, dtype=torch.float64)
        frequencies = config.rope_theta ** (-2 * half / config.head_dim)
        angles = torch.outer(torch.arange(config.max_position_embeddings, dtype=torch.float64), frequencies)
        cos, sin = angles.cos().float(), angles.sin().float()
        # Both halves of a head, with the sign of the rotation in the sine: rotate() is then two products and a sum.
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1), persistent=False)
        self.register_buffer("sin", torch.cat((-sin, sin), dim=-1), persistent=False)

    def rotate(self, x_BTHK: Tensor) -> Tensor:
        num_positions, half = x_BTHK.shape[1], x_BTHK.shape[3] // 2
        cos_T1K, sin_T1K = self.cos[:num_positions, None], self.sin[:num_positions, None]
        # The f32 tables lift a half-precision operand, so the rotation is f32 under autocast too.
        return (x_BTHK * cos_T1K + x_BTHK.roll(half, dims=-1) * sin_T1K).type_as(x_BTHK)


class Alibi(PositionEncoding):
    """A penalty on attention's scores that grows linearly with distance (Press, Smith and Lewis 2022, section 3)."""

    slopes: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        slopes = torch.tensor(alibi_slopes(config.num_attention_heads), dtype=torch.float32)
        self.register_buffer("slopes", slopes, persistent=False)

    def bias(self, num_positions: int) -> Tensor | None:
        position_T = torch.arange(num_positions, device=self.slopes.device)
        distance_TT = position_T[:, None] - position_T[None, :]
        bias_HTT = -self.slopes[:, None, None] * distance_TT
        return bias_HTT.masked_fill(distance_TT < 0, -math.inf)


class Learned(PositionEncoding):
    """One trained vector per position, added to the token embedding (GPT-2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.max_position_embeddings, config.hidden_size))

    def embed(self, x_BTD: Tensor) -> Tensor:
        return x_BTD + self.weight[: x_BTD.shape[1]]


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of each head, by the paper's published rule (github.com/ofirpress/attention_with_linear_biases).

    For n a power of two: 2^(-8/n), 2^(-16/n), ..., 2^-8. For other n: the slopes of the power of two below, followed
    by every other slope of the power of two above.
    """
    below = 2 ** (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / below) for i in range(below)]
    return slopes + [2.0 ** (-4 * (i + 1) / below) for i in range(0, 2 * (num_heads - below), 2)]


POSITIONS: Final[Mapping[PosEncoding, type[PositionEncoding]]] = {
    "rope": Rope,
    "alibi": Alibi,
    "learned": Learned,
    "none": PositionEncoding,
}


def make_positions(config: ModelConfig) -> PositionEncoding:
    """The encoding that `config.pos_encoding` names."""
    return POSITIONS[config.pos_encoding](config)
