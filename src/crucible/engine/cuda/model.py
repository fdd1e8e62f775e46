"""A model with int8 or f16 weights on the device, and the kernels of a step in order.

    embed -> [ norm, qkv, RoPE, cache -> attention -> o, residual -> norm, gate, up, SwiGLU -> down, residual ] -> head

Up to `NARROW_ROWS` rows a linear layer is a block per 16 outputs, above that tiles of one of `WIDE_SHAPES`; which it is
changes no bit (kernels/linear.cuh). The shape letters are config.py's; M counts rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np

from crucible.config import ModelConfig
from crucible.engine.backend import PAGE_SIZE
from crucible.engine.cuda.batch import Batch
from crucible.engine.cuda.compile import compile_source
from crucible.engine.cuda.driver import Gpu, Kernel
from crucible.engine.cuda.weights import STEP, UNIT, Matrix, gate_up_order, pack, qkv_order
from crucible.engine.quant import CHUNK, Weight, WeightFormat, chunk_size, dense
from crucible.engine.rope import rope_table
from crucible.hardware import usable_cores

NARROW_TILES: Final = (1, 2, 4)
"""Tiles of 16 rows that there are narrow kernels for."""
NARROW_ROWS: Final = 64
NARROW_HEAD_ROWS: Final = 32
"""The output projection has outputs enough for many tiles of 64 x 64."""

WARP: Final = 32
MAX_WARPS: Final = 16
HEAD_WARPS: Final = 8
"""Of a block of the output projection, which has outputs enough for many blocks."""
ROW_WARPS: Final = 8
WARPS_PER_SM: Final = 24
"""Warps of narrow kernels that a multiprocessor surely holds at once: more blocks than these take turns."""
PAD_ROWS: Final = 128
ATTEND_ROWS_WARPS: Final = (4, 8)
"""Of a block of attention for one row: few where there are blocks enough, else many."""
ATTEND_SPANS_THREADS: Final = 128

i32, f32 = np.int32, np.float32


@dataclass(frozen=True, slots=True)
class WideShape:
    """A shape of kernels/linear.cu: rows and outputs of a block, and how fast one is compared with the largest."""

    rows: int
    outputs: int
    threads: int
    speed: float

    @property
    def name(self) -> str:
        """Of its kernel."""
        return f"wide_{self.rows}x{self.outputs}"

    def shared_bytes(self, weight_format: WeightFormat) -> int:
        """Four stages of 64 inputs."""
        return 4 * (self.rows * 128 + self.outputs * (64 if weight_format == "int8" else 128))

    def grid(self, rows: int, outputs: int) -> tuple[int, int]:
        return -(-outputs // self.outputs), -(-rows // self.rows)

    def cost(self, rows: int, outputs: int, num_sms: int) -> float:
        """Time, in no unit."""
        x, y = self.grid(rows, outputs)
        return -(-x * y // num_sms) * self.rows * self.outputs / self.speed


def narrow_shared(warps: int, tiles: int) -> int:
    """Bytes of shared memory of a narrow block."""
    return 2 * warps * (tiles * 1024 + 64)


WIDE_SHAPES: Final = (WideShape(128, 128, 256, 1.0), WideShape(64, 64, 128, 0.97))


class Model(Protocol):
    """What the backend needs of a model in one format."""

    keys: Any
    values: Any
    logits: Any
    logits_width: int

    def queue(self, batch: Batch, block: int) -> None:
        """Queue all layers over a batch whose integers lie at address `block` on the device."""

    def queue_head(self, batch: Batch, block: int, first: int, count: int) -> None:
        """Queue the logits of `count` wanted rows from number `first` on, into the front of `logits`."""

    def saturations(self) -> int:
        """How many operands were beyond the range of f16 so far."""


@dataclass(frozen=True, slots=True, eq=False)
class Resident:
    """A matrix on the device."""

    matrix: Matrix
    words: Any
    scales: Any

    @classmethod
    def upload(cls, gpu: Gpu, matrix: Matrix) -> Resident:
        return cls(matrix, gpu.upload(matrix.words), gpu.upload(matrix.scales))

    @property
    def args(self) -> tuple[Any, ...]:
        """MATRIX_ARGS of kernels/linear.cu."""
        m = self.matrix
        return self.words, self.scales, i32(m.padded), i32(m.steps), i32(m.chunks), i32(m.last_steps)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    attention_norm: Any
    qkv: Resident
    qkv_bias: Any
    o: Resident
    o_bias: Any
    mlp_norm: Any
    mlp_in: Resident
    mlp_out: Resident


class TensorModel:
    """A model whose matrices are int8 or f16.

    Args:
        gpu: the device.
        config: an architecture that the backend takes.
        weights: the tensors, every matrix in the format.
        weight_format: int8 or f16.
        num_pages: pages of the cache.
        max_rows: rows of the largest step.
        max_logits: rows of logits at a time.
    """

    def __init__(
        self,
        gpu: Gpu,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        weight_format: WeightFormat,
        *,
        num_pages: int,
        max_rows: int,
        max_logits: int,
    ) -> None:
        self.gpu, self.config, self._format = gpu, config, weight_format
        self._o_chunk = chunk_size(config, "model.layers.0.self_attn.o_proj.weight")
        self._wide_shapes = [shape for shape in WIDE_SHAPES if shape.shared_bytes(weight_format) <= gpu.max_shared]
        self._kernels = self._compile()
        self._upload(weights)
        cos, sin = rope_table(config)
        self._cos, self._sin = gpu.upload(cos), gpu.upload(sin)
        self._saturations = gpu.allocate(16, 0)
        kv = config.num_key_value_heads * config.head_dim
        self._layer_bytes = num_pages * PAGE_SIZE * kv * 2
        # 0xFF everywhere is NaN in f16: what was never written shows if it is read.
        self.keys = gpu.allocate(config.num_hidden_layers * self._layer_bytes, 0xFF)
        self.values = gpu.allocate(config.num_hidden_layers * self._layer_bytes, 0xFF)
        rows = -(-max_rows // PAD_ROWS) * PAD_ROWS
        heads = config.num_attention_heads * config.head_dim
        self._x = gpu.allocate(max_rows * config.hidden_size * 4)
        self._operand = _operand(gpu, rows, config.hidden_size)
        self._q = gpu.allocate(max_rows * heads * 2)
        self._attended = _operand(gpu, rows, heads)
        self._hidden = _operand(gpu, rows, config.intermediate_size)
        self.logits_width = self._head.matrix.num_units * UNIT
        self.logits = gpu.allocate(max_logits * self.logits_width * 4)
        gpu.sync()

    def _sources(self) -> list[tuple[str, dict[str, int | str]]]:
        """Source files and definitions of all kernels."""
        fmt = {"WEIGHTS": "Int8" if self._format == "int8" else "F16"}
        steps = CHUNK // STEP
        kinds: list[dict[str, int | str]] = [
            {"KIND": "QKV", "HEAD_DIM": self.config.head_dim, "CHUNK_STEPS": steps},
            {"KIND": "SWIGLU", "CHUNK_STEPS": steps},
            {"KIND": "RESIDUAL", "CHUNK_STEPS": steps},
            {"KIND": "LOGITS", "CHUNK_STEPS": steps, "NARROW_WARPS": HEAD_WARPS},
            {"KIND": "RESIDUAL", "CHUNK_STEPS": self._o_chunk // STEP},
        ]
        attention: dict[str, int | str] = {"HEAD_DIM": self.config.head_dim}
        return [
            ("rows.cu", {**fmt}),
            ("attention.cu", attention),
            *(("linear.cu", {"NARROW_WARPS": MAX_WARPS, **fmt, **kind}) for kind in kinds),
        ]

    def _compile(self) -> dict[str, Any]:
        gpu, sources = self.gpu, self._sources()
        with ThreadPoolExecutor(usable_cores()) as pool:
            for _ in pool.map(lambda source: compile_source(source[0], gpu.arch, source[1]), sources):
                pass
        (rows, row_defs), (attention, head), *linears = sources
        halves = 8 if self.config.group_size <= 8 else 16
        kernels: dict[str, Any] = {
            "embed": gpu.kernel(rows, "embed_rows", row_defs),
            "norm": gpu.kernel(rows, "norm_rows", row_defs),
            "attend_rows": gpu.kernel(
                attention, f"attend_rows_{halves}", head, shared_bytes=self._attend_rows_shared(max(ATTEND_ROWS_WARPS))
            ),
            "attend_spans": gpu.kernel(
                attention, "attend_spans", head, shared_bytes=2 * 2 * 64 * self.config.head_dim * 2
            ),
        }
        for name, (source, definitions) in zip(("qkv", "mlp_in", "mlp_out", "head", "o"), linears, strict=True):
            for tiles in NARROW_TILES:
                shared = min(gpu.max_shared, narrow_shared(MAX_WARPS, tiles))
                kernels[f"{name} narrow_{tiles}"] = gpu.kernel(
                    source, f"narrow_{tiles}", definitions, shared_bytes=shared
                )
            for wide in self._wide_shapes:
                shared = wide.shared_bytes(self._format)
                kernels[f"{name} {wide.name}"] = gpu.kernel(source, wide.name, definitions, shared_bytes=shared)
        return kernels

    def _attend_rows_shared(self, warps: int) -> int:
        return warps * (2 * 16 * 4 + self.config.head_dim // 8 * WARP * 16)

    def _upload(self, weights: Mapping[str, Weight]) -> None:
        gpu, config = self.gpu, self.config
        orders = qkv_order(config), gate_up_order(config)

        def packed(layer: int) -> tuple[Matrix, Matrix, Matrix, Matrix]:
            at = f"model.layers.{layer}."
            qkv = [weights[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"]
            mlp = [weights[f"{at}mlp.{name}_proj.weight"] for name in ("gate", "up")]
            return (
                pack(qkv, CHUNK, orders[0]),
                pack([weights[f"{at}self_attn.o_proj.weight"]], self._o_chunk),
                pack(mlp, CHUNK, orders[1]),
                pack([weights[f"{at}mlp.down_proj.weight"]], CHUNK),
            )

        self._layers: list[_Layer] = []
        with ThreadPoolExecutor(usable_cores()) as pool:
            head_name = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
            head = pool.submit(pack, [weights[head_name]], CHUNK)
            embedding = None
            if not config.tie_word_embeddings:
                embedding = pool.submit(pack, [weights["model.embed_tokens.weight"]], CHUNK)
            for layer, (qkv, o, mlp_in, mlp_out) in enumerate(pool.map(packed, range(config.num_hidden_layers))):
                at = f"model.layers.{layer}."
                names = [f"{at}self_attn.{name}_proj.bias" for name in "qkv"]
                self._layers.append(
                    _Layer(
                        attention_norm=gpu.upload(dense(weights[f"{at}input_layernorm.weight"])),
                        qkv=Resident.upload(gpu, qkv),
                        qkv_bias=_bias(gpu, weights, names, orders[0]),
                        o=Resident.upload(gpu, o),
                        o_bias=_bias(gpu, weights, [f"{at}self_attn.o_proj.bias"], None),
                        mlp_norm=gpu.upload(dense(weights[f"{at}post_attention_layernorm.weight"])),
                        mlp_in=Resident.upload(gpu, mlp_in),
                        mlp_out=Resident.upload(gpu, mlp_out),
                    )
                )
            self._head = Resident.upload(gpu, head.result())
            self._embedding = self._head if embedding is None else Resident.upload(gpu, embedding.result())
        self._last_norm = gpu.upload(dense(weights["model.norm.weight"]))

    # ---- a step -----------------------------------------------------------------------------------------------------

    def queue(self, batch: Batch, block: int) -> None:
        config, rows = self.config, batch.num_rows
        embedding = self._embedding
        self._launch(
            "embed", (-(-rows // ROW_WARPS),), ROW_WARPS * WARP,
            block + 4 * batch.ids, *embedding.args[:3], i32(embedding.matrix.groups),
            i32(config.hidden_size), i32(rows), self._x,
        )  # fmt: skip
        for index, layer in enumerate(self._layers):
            self._queue_layer(index, layer, batch, block)

    def _queue_layer(self, index: int, layer: _Layer, batch: Batch, block: int) -> None:
        config, rows = self.config, batch.num_rows
        keys, values = (int(cache.handle) + index * self._layer_bytes for cache in (self.keys, self.values))
        places = block + 4 * batch.position, block + 4 * batch.table, block + 4 * batch.pages
        heads = i32(config.num_attention_heads), i32(config.num_key_value_heads)
        self._linear(
            "qkv", layer.qkv, rows, layer.attention_norm, self._operand,
            *places, self._cos, self._sin, layer.qkv_bias, *heads, self._q, keys, values,
        )  # fmt: skip
        attention = (
            self._q, keys, values, self._attended, places[2], *heads, f32(config.head_dim**-0.5), self._saturations
        )  # fmt: skip
        if batch.items < 0:
            grid = rows, config.num_key_value_heads, -(-config.group_size // 16)
            warps = ATTEND_ROWS_WARPS[math.prod(grid) < self.gpu.num_sms]
            shared = self._attend_rows_shared(warps)
            self._launch("attend_rows", grid, warps * WARP, *attention, *places[:2], shared=shared)
        else:
            grid = batch.num_items, config.num_key_value_heads, 1
            arrays = block + 4 * batch.items, block + 4 * batch.spans
            self._launch("attend_spans", grid, ATTEND_SPANS_THREADS, *attention, *arrays)
        width = i32(config.hidden_size)
        self._linear("o", layer.o, rows, None, self._attended, self._x, width, layer.o_bias)
        hidden_steps = i32(config.intermediate_size // STEP)
        self._linear("mlp_in", layer.mlp_in, rows, layer.mlp_norm, self._operand, self._hidden, hidden_steps)
        self._linear("mlp_out", layer.mlp_out, rows, None, self._hidden, self._x, width, 0)

    def queue_head(self, batch: Batch, block: int, first: int, count: int) -> None:
        config = self.config
        if batch.wanted < 0:
            source, index = int(self._x.handle) + first * config.hidden_size * 4, 0
        else:
            source, index = int(self._x.handle), block + 4 * (batch.wanted + first)
        self._norm(source, index, self._last_norm, count)
        self._linear("head", self._head, count, None, self._operand, self.logits, i32(self.logits_width))

    def saturations(self) -> int:
        return int(self.gpu.download(self._saturations, np.uint32, (1,))[0])

    # ---- launches ---------------------------------------------------------------------------------------------------

    def _linear(self, name: str, weight: Resident, rows: int, norm: Any, operand: Any, *epilogue: Any) -> None:
        """A linear layer of `operand`, or of the residual stream after a norm, which then is brought to `operand`."""
        matrix = weight.matrix
        end = (i32(matrix.num_units), *weight.args, *epilogue, self._saturations, i32(rows))
        if norm is not None:
            self._norm(self._x, 0, norm, rows)
        if rows > (NARROW_HEAD_ROWS if name == "head" else NARROW_ROWS):
            outputs = matrix.num_units * UNIT
            shape = min(self._wide_shapes, key=lambda shape: shape.cost(rows, outputs, self.gpu.num_sms))
            self._launch(f"{name} {shape.name}", shape.grid(rows, outputs), shape.threads, operand, *end)
            return
        tiles = next(tiles for tiles in NARROW_TILES if rows <= tiles * 16)
        warps = min(HEAD_WARPS if name == "head" else MAX_WARPS, matrix.chunks)
        # A warp joins the chunks of each tile.
        warps = max(tiles, min(warps, self.gpu.max_shared // narrow_shared(1, tiles)))
        grid = (min(matrix.num_units, self.gpu.num_sms * max(1, WARPS_PER_SM // warps)),)
        shared = narrow_shared(warps, tiles)
        self._launch(f"{name} narrow_{tiles}", grid, warps * WARP, operand, *end, shared=shared)

    def _norm(self, source: Any, index: Any, weight: Any, rows: int) -> None:
        width = self.config.hidden_size
        threads = WARP * min(ROW_WARPS, -(-width // (4 * WARP)))
        args = source, index, weight, i32(width), f32(self.config.norm_eps), self._operand, self._saturations
        self._launch("norm", (rows,), threads, *args, shared=4 * (-(-width // 32) + 1))

    def _launch(self, name: str, grid: Sequence[int], block: int, *args: Any, shared: int | None = None) -> None:
        kernel: Kernel = self._kernels[name]
        self.gpu.launch(kernel, grid=grid, block=block, args=args, shared_bytes=shared, overlap=True)


def _operand(gpu: Gpu, rows: int, width: int) -> Any:
    """Room for an operand in A order, and for what a kernel copies past its end without using it."""
    return gpu.allocate(rows * width * 2 + 4 * STEP * STEP * 2, 0)


def _bias(gpu: Gpu, weights: Mapping[str, Weight], names: Sequence[str], order: Any) -> Any:
    """Biases one behind the other in an order, or a null pointer where the model has none."""
    if names[0] not in weights:
        return 0
    bias = np.concatenate([dense(weights[name]) for name in names])
    return gpu.upload(bias if order is None else bias[order])
