"""A model with f32 weights on the device: every number f32, every chain in one thread. Slow; other formats are judged
by it (kernels/f32.cuh)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from crucible.config import ModelConfig
from crucible.engine.backend import PAGE_SIZE
from crucible.engine.cuda.batch import Batch
from crucible.engine.cuda.driver import Gpu
from crucible.engine.quant import CHUNK, Weight, chunk_size, dense
from crucible.engine.rope import rope_table

THREADS: Final = 128
ROWS: Final = 4
"""Rows that a thread of a linear layer takes."""
i32, f32 = np.int32, np.float32

KERNELS: Final = (
    "embed_f32", "norm_f32", "linear_rows_f32", "place_f32", "attend_rows_f32", "swiglu_f32",
)  # fmt: skip


class PlainModel:
    """As `model.TensorModel`, in f32."""

    def __init__(
        self,
        gpu: Gpu,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        *,
        num_pages: int,
        max_rows: int,
        max_logits: int,
    ) -> None:
        self.gpu, self.config = gpu, config
        self._kernels = {name: gpu.kernel("f32.cu", name) for name in KERNELS}
        self._o_chunk = chunk_size(config, "model.layers.0.self_attn.o_proj.weight")
        d, f = config.hidden_size, config.intermediate_size
        self._heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self._upload(weights)
        cos, sin = rope_table(config)
        self._cos, self._sin = gpu.upload(cos), gpu.upload(sin)
        self._layer_bytes = num_pages * PAGE_SIZE * config.num_key_value_heads * config.head_dim * 4
        self.keys = gpu.allocate(config.num_hidden_layers * self._layer_bytes, 0xFF)
        self.values = gpu.allocate(config.num_hidden_layers * self._layer_bytes, 0xFF)
        self._x, self._normed = gpu.allocate(max_rows * d * 4), gpu.allocate(max_rows * d * 4)
        self._qkv = gpu.allocate(max_rows * self._heads * config.head_dim * 4)
        self._attended = gpu.allocate(max_rows * config.num_attention_heads * config.head_dim * 4)
        self._gate_up, self._hidden = gpu.allocate(max_rows * 2 * f * 4), gpu.allocate(max_rows * f * 4)
        self.logits_width = config.vocab_size
        self.logits = gpu.allocate(max_logits * config.vocab_size * 4)
        gpu.sync()

    def _upload(self, weights: Mapping[str, Weight]) -> None:
        config, gpu = self.config, self.gpu

        def matrix(*names: str) -> Any:
            """[K, N] of matrices [N_i, K], side by side."""
            return gpu.upload(np.concatenate([dense(weights[f"{name}.weight"]).T for name in names], axis=1))

        def bias(*names: str) -> Any:
            if f"{names[0]}.bias" not in weights:
                return 0
            return gpu.upload(np.concatenate([dense(weights[f"{name}.bias"]) for name in names]))

        self._layers: list[dict[str, Any]] = []
        for layer in range(config.num_hidden_layers):
            at = f"model.layers.{layer}."
            qkv = [f"{at}self_attn.{name}_proj" for name in "qkv"]
            self._layers.append(
                {
                    "attention_norm": gpu.upload(dense(weights[f"{at}input_layernorm.weight"])),
                    "qkv": matrix(*qkv),
                    "qkv_bias": bias(*qkv),
                    "o": matrix(f"{at}self_attn.o_proj"),
                    "o_bias": bias(f"{at}self_attn.o_proj"),
                    "mlp_norm": gpu.upload(dense(weights[f"{at}post_attention_layernorm.weight"])),
                    "gate_up": matrix(f"{at}mlp.gate_proj", f"{at}mlp.up_proj"),
                    "down": matrix(f"{at}mlp.down_proj"),
                }
            )
        tied = config.tie_word_embeddings
        self._head = matrix("model.embed_tokens" if tied else "lm_head")
        self._embedding = self._head if tied else gpu.upload(dense(weights["model.embed_tokens.weight"]))
        self._last_norm = gpu.upload(dense(weights["model.norm.weight"]))

    def queue(self, batch: Batch, block: int) -> None:
        config, rows = self.config, batch.num_rows
        d, f, dim = config.hidden_size, config.intermediate_size, config.head_dim
        heads = i32(config.num_attention_heads), i32(config.num_key_value_heads), i32(dim)
        position, table, pages = (block + 4 * at for at in (batch.position, batch.table, batch.pages))
        # A tied embedding is a column of the head's matrix.
        strides = (1, config.vocab_size) if config.tie_word_embeddings else (d, 1)
        ids = block + 4 * batch.ids
        self._launch("embed_f32", (rows,), THREADS, ids, self._embedding, *map(i32, strides), i32(d), self._x)
        for index, layer in enumerate(self._layers):
            keys, values = (int(cache.handle) + index * self._layer_bytes for cache in (self.keys, self.values))
            self._norm(self._x, 0, layer["attention_norm"], rows)
            self._linear(self._normed, layer["qkv"], layer["qkv_bias"], d, self._heads * dim, CHUNK, rows, self._qkv)
            self._launch(
                "place_f32", (rows, self._heads), dim // 2,
                self._qkv, position, table, pages, self._cos, self._sin, *heads, keys, values,
            )  # fmt: skip
            self._launch(
                "attend_rows_f32", (rows, config.num_attention_heads), 32,
                self._qkv, keys, values, position, table, pages, *heads, f32(dim**-0.5), self._attended,
            )  # fmt: skip
            width = config.num_attention_heads * dim
            self._linear(self._attended, layer["o"], layer["o_bias"], width, d, self._o_chunk, rows, self._x, add=True)
            self._norm(self._x, 0, layer["mlp_norm"], rows)
            self._linear(self._normed, layer["gate_up"], 0, d, 2 * f, CHUNK, rows, self._gate_up)
            self._launch("swiglu_f32", (-(-f // THREADS), rows), THREADS, self._gate_up, i32(f), self._hidden)
            self._linear(self._hidden, layer["down"], 0, f, d, CHUNK, rows, self._x, add=True)

    def queue_head(self, batch: Batch, block: int, first: int, count: int) -> None:
        d = self.config.hidden_size
        if batch.wanted < 0:
            self._norm(int(self._x.handle) + first * d * 4, 0, self._last_norm, count)
        else:
            self._norm(self._x, block + 4 * (batch.wanted + first), self._last_norm, count)
        self._linear(self._normed, self._head, 0, d, self.config.vocab_size, CHUNK, count, self.logits)

    def saturations(self) -> int:
        return 0

    def _norm(self, source: Any, index: Any, weight: Any, rows: int) -> None:
        width = self.config.hidden_size
        args = source, index, weight, i32(width), f32(self.config.norm_eps), self._normed
        self._launch("norm_f32", (rows,), THREADS, *args, shared=4 * (-(-width // 32) + 1))

    def _linear(
        self, x: Any, weight: Any, bias: Any, k: int, n: int, chunk: int, rows: int, out: Any, *, add: bool = False
    ) -> None:
        grid, sizes = (-(-n // THREADS), -(-rows // ROWS)), map(i32, (k, n, chunk, add, rows))
        self._launch("linear_rows_f32", grid, THREADS, x, weight, bias, *sizes, out)

    def _launch(self, name: str, grid: tuple[int, ...], block: int, *args: Any, shared: int = 0) -> None:
        self.gpu.launch(self._kernels[name], grid=grid, block=block, args=args, shared_bytes=shared)
