"""The feed-forward sublayer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from crucible.config import Activation, ModelConfig
from crucible.model.linear import Linear


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, equation 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class GELU(nn.Module):
    """down(gelu(up(x))) with the tanh form of GELU (Hendrycks and Gimpel 2016, section 2), as in GPT-2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(gelu(self.up_proj(x_BTD), approximate="tanh"))


MLPS: Final[Mapping[Activation, type[SwiGLU] | type[GELU]]] = {"swiglu": SwiGLU, "gelu": GELU}


def make_mlp(config: ModelConfig) -> nn.Module:
    """The feed-forward sublayer that `config.activation` names."""
    return MLPS[config.activation](config)
