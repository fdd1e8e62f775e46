"""Causal self-attention with grouped heads: mha, gqa and mqa are one computation at different group sizes.

Two functions compute it: `fused` by torch's kernels, and `materialised`, its slow twin, by writing out every score.
Extra shape letters: S key positions, E heads times K.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Final, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from crucible.config import ModelConfig
from crucible.model.linear import Linear
from crucible.model.positions import PositionEncoding

AttentionPath = Literal["fused", "materialised"]


def fused(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, bias_HTS: Tensor | None) -> Tensor:
    """Attention by torch's kernels; same arguments and result as `materialised`."""
    num_heads = q_BHTK.shape[1]
    # On a GPU torch's kernels take grouped heads only in half precision and without a bias; otherwise enable_gqa writes
    # out every score: a step of 120m with ALiBi (16 x 1024 tokens, H200) then takes 113 ms and 27 GiB, not 70 and 18.
    if bias_HTS is not None or (q_BHTK.is_cuda and q_BHTK.dtype == torch.float32):
        k_BGSK, v_BGSK = repeat_heads(k_BGSK, num_heads), repeat_heads(v_BGSK, num_heads)
    # A bias of three dimensions would do the same on the CPU, hence the fourth.
    return scaled_dot_product_attention(
        q_BHTK,
        k_BGSK,
        v_BGSK,
        attn_mask=None if bias_HTS is None else bias_HTS.type_as(q_BHTK)[None],
        is_causal=bias_HTS is None,
        enable_gqa=k_BGSK.shape[1] != num_heads,
    )


def materialised(q_BHTK: Tensor, k_BGSK: Tensor, v_BGSK: Tensor, bias_HTS: Tensor | None) -> Tensor:
    """softmax(q k^T / sqrt(K) + bias) v with every step written out (Vaswani et al. 2017, equation 1).

    Without a bias the mask is the causal one; a bias carries its own. Returns [B, H, T, K].
    """
    k_BHSK, v_BHSK = repeat_heads(k_BGSK, q_BHTK.shape[1]), repeat_heads(v_BGSK, q_BHTK.shape[1])
    score_BHTS = q_BHTK @ k_BHSK.transpose(-2, -1) * q_BHTK.shape[-1] ** -0.5
    if bias_HTS is None:
        future_TS = torch.ones(score_BHTS.shape[-2:], dtype=torch.bool, device=score_BHTS.device).triu(1)
        score_BHTS = score_BHTS.masked_fill(future_TS, -math.inf)
    else:
        score_BHTS = score_BHTS + bias_HTS
    return score_BHTS.softmax(dim=-1).type_as(v_BHSK) @ v_BHSK


def repeat_heads(x_BGSK: Tensor, num_heads: int) -> Tensor:
    """[B, H, S, K] in which query head h finds its key/value head h // (H / G)."""
    return x_BGSK.repeat_interleave(num_heads // x_BGSK.shape[1], dim=1)


ATTENTION_PATHS: Final[Mapping[AttentionPath, Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]]] = {
    "fused": fused,
    "materialised": materialised,
}


class Attention(nn.Module):
    """Projections, position rotation, causal attention over H query and G key/value heads, output projection."""

    def __init__(self, config: ModelConfig, path: AttentionPath) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attend = ATTENTION_PATHS[path]
        query_size = config.num_attention_heads * config.head_dim
        kv_size = config.num_key_value_heads * config.head_dim
        self.q_proj = Linear(config.hidden_size, query_size)
        self.k_proj = Linear(config.hidden_size, kv_size)
        self.v_proj = Linear(config.hidden_size, kv_size)
        self.o_proj = Linear(query_size, config.hidden_size)

    def forward(self, x_BTD: Tensor, positions: PositionEncoding, bias_HTT: Tensor | None) -> Tensor:
        """[B, T, D] to [B, T, D]. `bias_HTT` is `positions.bias(T)`, passed in so that all layers share it."""
        q_BTHK = positions.rotate(self._heads(self.q_proj(x_BTD)))
        k_BTGK = positions.rotate(self._heads(self.k_proj(x_BTD)))
        v_BTGK = self._heads(self.v_proj(x_BTD))
        o_BHTK = self.attend(q_BTHK.transpose(1, 2), k_BTGK.transpose(1, 2), v_BTGK.transpose(1, 2), bias_HTT)
        return self.o_proj(o_BHTK.transpose(1, 2).flatten(2))

    def _heads(self, x_BTE: Tensor) -> Tensor:
        return x_BTE.view(*x_BTE.shape[:2], -1, self.head_dim)
