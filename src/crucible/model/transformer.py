"""The decoder-only transformer that all axes of `ModelConfig` describe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear

from crucible.config import UNTRAINED_FIELDS, ConfigError, ModelConfig, NormPlacement
from crucible.model.attention import Attention, AttentionPath
from crucible.model.linear import Linear
from crucible.model.mlp import make_mlp
from crucible.model.norms import make_norm
from crucible.model.positions import PositionEncoding, make_positions

INIT_STD: Final = 0.02
IGNORED_TARGET: Final = -1
"""The target of a position that no loss counts."""


class PreNormBlock(nn.Module):
    """One layer with its norms on the way into the sublayers (Xiong et al. 2020, figure 1b)."""

    def __init__(self, config: ModelConfig, path: AttentionPath) -> None:
        super().__init__()
        self.input_layernorm = make_norm(config)
        self.self_attn = Attention(config, path)
        self.post_attention_layernorm = make_norm(config)
        self.mlp = make_mlp(config)

    def forward(self, x_BTD: Tensor, positions: PositionEncoding, bias_HTT: Tensor | None) -> Tensor:
        x_BTD = x_BTD + self.self_attn(self.input_layernorm(x_BTD), positions, bias_HTT)
        return x_BTD + self.mlp(self.post_attention_layernorm(x_BTD))


class PostNormBlock(nn.Module):
    """One layer with its norms on the residual stream, after each addition (Vaswani et al. 2017, section 3.1)."""

    def __init__(self, config: ModelConfig, path: AttentionPath) -> None:
        super().__init__()
        self.post_attention_layernorm = make_norm(config)
        self.self_attn = Attention(config, path)
        self.post_feedforward_layernorm = make_norm(config)
        self.mlp = make_mlp(config)

    def forward(self, x_BTD: Tensor, positions: PositionEncoding, bias_HTT: Tensor | None) -> Tensor:
        x_BTD = self.post_attention_layernorm(x_BTD + self.self_attn(x_BTD, positions, bias_HTT))
        return self.post_feedforward_layernorm(x_BTD + self.mlp(x_BTD))


BLOCKS: Final[Mapping[NormPlacement, type[PreNormBlock] | type[PostNormBlock]]] = {
    "pre": PreNormBlock,
    "post": PostNormBlock,
}


class Transformer(nn.Module):
    """Token ids to next-token logits.

    The names of `state_dict()` are those of `config.tensor_shapes()` without the leading "model."; position tables are
    not part of it. Weights start as `init_weights(0)` leaves them.

    Raises:
        ConfigError: the config has one of `UNTRAINED_FIELDS`.
    """

    def __init__(self, config: ModelConfig, *, attention_path: AttentionPath = "fused") -> None:
        super().__init__()
        if given := [name for name in UNTRAINED_FIELDS if getattr(config, name)]:
            raise ConfigError(f"models with {', '.join(given)} run in the engine but cannot be trained")
        self.config = config
        self.embed_tokens = nn.Embedding(
            config.vocab_size, config.hidden_size, _weight=torch.empty(config.vocab_size, config.hidden_size)
        )
        self.embed_positions = make_positions(config)
        block = BLOCKS[config.norm_placement]
        self.layers = nn.ModuleList(block(config, attention_path) for _ in range(config.num_hidden_layers))
        if config.norm_placement == "pre":
            self.norm = make_norm(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size)
        held = sum(parameter.numel() for parameter in self.parameters())
        assert held == config.num_parameters(), f"model holds {held} parameters, config says {config.num_parameters()}"
        self.init_weights(0)

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Matrices normal(0, 0.02), norms 1 and 0; the same seed gives the same bits on every device.

        The two projections that write to the residual stream are scaled by 1/sqrt(2 layers), so that its variance does
        not grow with depth (GPT-2: Radford et al. 2019, section 2.3).
        """
        generator = torch.Generator().manual_seed(seed)
        residual_std = INIT_STD / math.sqrt(2 * self.config.num_hidden_layers)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if parameter.ndim == 1:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            std = residual_std if name.endswith(("o_proj.weight", "down_proj.weight")) else INIT_STD
            drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
            parameter.copy_(drawn.normal_(0.0, std, generator=generator))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits [B, T, V], f32 also under autocast, of int64 ids [B, T].

        Raises:
            ValueError: more positions than the model has.
        """
        num_positions = tokens_BT.shape[1]
        if num_positions > self.config.max_position_embeddings:
            raise ValueError(
                f"{num_positions} tokens do not fit max_position_embeddings={self.config.max_position_embeddings}"
            )
        x_BTD = self.embed_positions.embed(self.embed_tokens(tokens_BT))
        bias_HTT = self.embed_positions.bias(num_positions)
        for layer in self.layers:
            x_BTD = layer(x_BTD, self.embed_positions, bias_HTT)
        if self.config.norm_placement == "pre":
            x_BTD = self.norm(x_BTD)
        head = self.embed_tokens if self.config.tie_word_embeddings else self.lm_head
        logits_BTV = linear(x_BTD, head.weight)
        return logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Scalar f32: the sum, not the mean, of cross-entropy in nats over the targets that are not -1.

        Raises:
            ValueError: as `forward`.
        """
        logits_BTV = self(tokens_BT)
        return cross_entropy(
            logits_BTV.flatten(0, 1), targets_BT.flatten(), ignore_index=IGNORED_TARGET, reduction="sum"
        )
