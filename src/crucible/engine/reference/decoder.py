"""The forward pass of every architecture that `ModelConfig` describes, over rows of any number of requests at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.engine.host_backend import Span, check_weights
from crucible.engine.reference import ops
from crucible.engine.reference.attention import attend
from crucible.engine.reference.cache import PagedCache
from crucible.engine.reference.ops import F32, F64
from crucible.engine.reference.positions import alibi_slopes, rotate
from crucible.engine.rope import rope_table


@dataclass(frozen=True, slots=True)
class _Rows:
    """What a layer needs to know of the rows besides their activations."""

    positions: npt.NDArray[np.int64]
    spans: Sequence[Span]
    cache: PagedCache


class Decoder:
    """Weights and the computation on them, in float64. M counts rows; the other shape letters are config.py's.

    Args:
        config: the architecture.
        weights: the tensors of `config.tensor_shapes()`, by name.

    Raises:
        CrucibleError: a tensor is missing, unknown or of another shape.
    """

    def __init__(self, config: ModelConfig, weights: Mapping[str, npt.NDArray[np.floating]]) -> None:
        check_weights(config, weights)
        shapes = config.tensor_shapes()
        self.config = config
        self._embedding_VD = weights["model.embed_tokens.weight"]
        self._position_TD = weights.get("model.embed_positions.weight")
        self._linears = {
            name.removesuffix(".weight"): ops.transposed(weights[name])
            for name in shapes
            if name.endswith("_proj.weight")
        }
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self._head_DV = ops.transposed(weights[head])
        self._vectors = {name: weights[name].astype(np.float64) for name, shape in shapes.items() if len(shape) == 1}
        self._rope: tuple[F64, F64] | None = None
        if config.pos_encoding == "rope":
            cos, sin = rope_table(config)
            self._rope = cos.astype(np.float64), sin.astype(np.float64)
        self._slopes_H = alibi_slopes(config.num_attention_heads) if config.pos_encoding == "alibi" else None

    def forward(self, ids_M: npt.NDArray[np.int64], spans: Sequence[Span], cache: PagedCache) -> F64:
        """The residual stream that the output projection reads, [M, D]; writes the rows' keys and values.

        `spans` covers the M rows in order. Earlier positions of each span must be in the cache.
        """
        position_M = np.concatenate([np.arange(span.start, span.start + span.length) for span in spans])
        rows = _Rows(position_M, spans, cache)
        x_MD = self._embedding_VD[ids_M].astype(np.float64)
        if self._position_TD is not None:
            x_MD = x_MD + self._position_TD[position_M]
        for layer in range(self.config.num_hidden_layers):
            x_MD = self._block(layer, x_MD, rows)
        return self._norm("model.norm", x_MD) if self.config.norm_placement == "pre" else x_MD

    def logits(self, x_MD: F64) -> F32:
        """Rows of `forward`'s result to logits, rounded to f32 [M, V]."""
        return ops.linear(x_MD, self._head_DV).astype(np.float32)

    def _block(self, layer: int, x_MD: F64, rows: _Rows) -> F64:
        attention_norm, mlp_norm = (f"model.layers.{layer}.{name}" for name in self.config.norm_names)
        if self.config.norm_placement == "pre":
            x_MD = x_MD + self._attention(layer, self._norm(attention_norm, x_MD), rows)
            return x_MD + self._mlp(layer, self._norm(mlp_norm, x_MD))
        x_MD = self._norm(attention_norm, x_MD + self._attention(layer, x_MD, rows))
        return self._norm(mlp_norm, x_MD + self._mlp(layer, x_MD))

    def _norm(self, name: str, x_MD: F64) -> F64:
        weight_D = self._vectors[f"{name}.weight"]
        if self.config.norm == "rmsnorm":
            return ops.rms_norm(x_MD, weight_D, self.config.norm_eps)
        return ops.layer_norm(x_MD, weight_D, self._vectors[f"{name}.bias"], self.config.norm_eps)

    def _linear(self, layer: int, name: str, x_MK: F64) -> F64:
        name = f"model.layers.{layer}.{name}"
        y_MN = ops.linear(x_MK, self._linears[name])
        bias_N = self._vectors.get(f"{name}.bias")
        return y_MN if bias_N is None else y_MN + bias_N

    def _head_norm(self, layer: int, name: str, x_MHK: F64) -> F64:
        weight_K = self._vectors[f"model.layers.{layer}.self_attn.{name}.weight"]
        return ops.rms_norm(x_MHK, weight_K, self.config.norm_eps)

    def _attention(self, layer: int, x_MD: F64, rows: _Rows) -> F64:
        num_rows, head_dim = len(x_MD), self.config.head_dim
        q_MHK = self._linear(layer, "self_attn.q_proj", x_MD).reshape(num_rows, -1, head_dim)
        k_MGK = self._linear(layer, "self_attn.k_proj", x_MD).reshape(num_rows, -1, head_dim)
        v_MGK = self._linear(layer, "self_attn.v_proj", x_MD).reshape(num_rows, -1, head_dim)
        if self.config.qk_norm:
            q_MHK, k_MGK = self._head_norm(layer, "q_norm", q_MHK), self._head_norm(layer, "k_norm", k_MGK)
        if self._rope is not None:
            cos_MK, sin_MK = (table[rows.positions] for table in self._rope)
            q_MHK, k_MGK = rotate(q_MHK, cos_MK, sin_MK), rotate(k_MGK, cos_MK, sin_MK)
        o_MHK = np.empty_like(q_MHK)
        row = 0
        for span in rows.spans:
            own = slice(row, row + span.length)
            rows.cache.write(layer, span.page_table, span.start, k_MGK[own], v_MGK[own])
            k_TGK, v_TGK = rows.cache.read(layer, span.page_table, span.start + span.length)
            for allowed in range(span.start + 1, span.start + span.length + 1):
                o_MHK[row] = attend(q_MHK[row], k_TGK[:allowed], v_TGK[:allowed], self._slopes_H)
                row += 1
        return self._linear(layer, "self_attn.o_proj", o_MHK.reshape(num_rows, -1))

    def _mlp(self, layer: int, x_MD: F64) -> F64:
        up_MF = self._linear(layer, "mlp.up_proj", x_MD)
        if self.config.activation == "swiglu":
            hidden_MF = ops.silu(self._linear(layer, "mlp.gate_proj", x_MD)) * up_MF
        else:
            hidden_MF = ops.gelu(up_MF)
        return self._linear(layer, "mlp.down_proj", hidden_MF)
