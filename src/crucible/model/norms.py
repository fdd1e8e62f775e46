"""Normalisation over the hidden dimension.

Both accumulate in at least float32 whatever the type of their input, and stay in float32 under autocast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm, rms_norm

from crucible.config import ModelConfig, Norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019, equation 4, with eps inside the root)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias, the variance biased (Ba, Kiros and Hinton 2016)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.weight = nn.Parameter(torch.ones(config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.hidden_size))

    def forward(self, x_BTD: Tensor) -> Tensor:
        return layer_norm(x_BTD, self.weight.shape, self.weight, self.bias, self.eps)


NORMS: Final[Mapping[Norm, type[RMSNorm] | type[LayerNorm]]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def make_norm(config: ModelConfig) -> nn.Module:
    """The norm that `config.norm` names."""
    return NORMS[config.norm](config)
