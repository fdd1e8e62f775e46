"""The CUDA backend: the step model of `engine/backend.py` on one NVIDIA GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.engine.backend import PAGE_SIZE
from crucible.engine.cuda.batch import Batch, block_size, make_batch
from crucible.engine.cuda.driver import CudaError, Gpu
from crucible.engine.cuda.model import Model, TensorModel
from crucible.engine.cuda.plain import PlainModel
from crucible.engine.host_backend import F32, HostBackend, Ids, Span, check_weights, cut
from crucible.engine.quant import Weight, WeightFormat, convert

HEAD_DIMS: Final = (64, 80, 96, 128)
SIZE_MULTIPLE: Final = 16

MAX_ROWS: Final = 4096
"""Rows that go through the model at a time: bounds the buffers. No result depends on it."""

MAX_LOGITS: Final = 256
"""Rows of logits at a time."""

GRAPH_ROWS: Final = 64
"""Decode steps of up to so many requests are captured, each size when it first comes, and then replayed."""


class CudaBackend(HostBackend):
    """RoPE, RMSNorm, SwiGLU and norms before the sublayers, with any grouping of heads (docs/arithmetic.md, section 5).

    Memory on the device: the matrices in their format, keys and values of all pages (f16; f32 with f32 weights) and
    buffers for `MAX_ROWS` rows. The first backend of a kind on a machine compiles its kernels, which takes seconds;
    they are kept on disk.

    Args:
        config: the architecture.
        weights: the tensors of `config.tensor_shapes()` by name.
        weight_format: what matrices are held in.
        num_slots: requests that can be open at once.
        num_pages: pages of 16 positions that they share; the default lets every slot reach the context.
        use_graphs: replay captured decode steps; without, kernels are launched one by one. No result depends on it.

    Raises:
        CrucibleError: the architecture is not one of these; a tensor is missing, unknown or of another shape; there is
            no device, driver or compiler.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        *,
        weight_format: WeightFormat = "int8",
        num_slots: int = 1,
        num_pages: int | None = None,
        use_graphs: bool = True,
    ) -> None:
        check_architecture(config)
        check_weights(config, weights)
        super().__init__(config, num_slots, num_pages)
        self.gpu = Gpu.open()
        held = convert(config, weights, weight_format)
        sizes = {"num_pages": self.num_pages, "max_rows": MAX_ROWS, "max_logits": MAX_LOGITS}
        self.model: Model = (
            PlainModel(self.gpu, config, held, **sizes)
            if weight_format == "f32"
            else TensorModel(self.gpu, config, held, weight_format, **sizes)
        )
        pages_per_slot = -(-config.max_position_embeddings // PAGE_SIZE)
        block_bytes = 4 * block_size(MAX_ROWS, num_slots, pages_per_slot, config.group_size)
        self._block = self.gpu.allocate(block_bytes)
        self._staging, self._block_view = self.gpu.pinned(block_bytes)
        row_bytes = 4 * self.model.logits_width
        self._landing, landing = self.gpu.pinned(MAX_LOGITS * row_bytes)
        self._logits_view = landing.view(np.float32).reshape(MAX_LOGITS, self.model.logits_width)
        self._use_graphs = use_graphs
        self._graph_integers = 3 + pages_per_slot
        self._graphs: dict[int, Any] = {}

    max_rows: Final = MAX_ROWS
    """Rows of a step that are computed at once; more are taken in parts."""

    @property
    def saturations(self) -> int:
        """Operands beyond the range of f16 since the backend was made: 0 for a model that is fit to be served."""
        return self.model.saturations()

    def fill_cache(self, value: float) -> None:
        """Overwrite all keys and values, to prove that what nobody wrote is not read. No slot may be open."""
        for cache in (self.model.keys, self.model.values):
            if isinstance(self.model, PlainModel):
                cache.fill(np.float32(value), stream=self.gpu.stream)
            else:
                cache.fill(np.float16(np.clip(value, -65504, 65504)), stream=self.gpu.stream)

    def _forward(self, ids_M: Ids, spans: Sequence[Span], wanted_M: npt.NDArray[np.bool_]) -> F32:
        self.gpu.use()
        parts = list(cut(spans, MAX_ROWS))
        if len(parts) == 1 and np.count_nonzero(wanted_M) <= MAX_LOGITS:
            # Read before the next step comes, so there is no need to move them.
            return next(self._run(make_batch(ids_M, parts[0], wanted_M, self.config.group_size)))
        logits = np.empty((np.count_nonzero(wanted_M), self.config.vocab_size), dtype=np.float32)
        row = num_logits = 0
        for part in parts:
            rows = slice(row, row + sum(span.length for span in part))
            for landed in self._run(make_batch(ids_M[rows], part, wanted_M[rows], self.config.group_size)):
                logits[num_logits : num_logits + len(landed)] = landed
                num_logits += len(landed)
            row = rows.stop
        return logits

    def _run(self, batch: Batch) -> Iterator[F32]:
        """Logits of the wanted rows, once at least and at most `MAX_LOGITS`, each until the next is asked for."""
        self._block_view.view(np.int32)[: batch.block.size] = batch.block
        if self._use_graphs and batch.is_decode and batch.num_rows <= GRAPH_ROWS:
            self._replay(batch)
            yield self._land(batch.num_rows)
            return
        address = int(self._block.handle)
        self._send(batch.block.size)
        self.model.queue(batch, address)
        for first in range(0, max(1, batch.num_wanted), MAX_LOGITS):
            count = min(MAX_LOGITS, batch.num_wanted - first)
            if count > 0:
                self.model.queue_head(batch, address, first, count)
                self._receive(count)
            yield self._land(count)

    def _replay(self, batch: Batch) -> None:
        """Queue a decode step as a graph. Where its arrays lie depends on the number of rows alone; as many pages are
        copied as its requests could have."""
        rows = batch.num_rows
        if rows not in self._graphs:

            def step() -> None:
                self._send(rows * self._graph_integers)
                self.model.queue(batch, int(self._block.handle))
                self.model.queue_head(batch, int(self._block.handle), 0, rows)
                self._receive(rows)

            self._graphs[rows] = self.gpu.capture(step)
        self.gpu.replay(self._graphs[rows])

    def _send(self, size: int) -> None:
        self.gpu.copy(self._staging, self._block, 4 * size)

    def _receive(self, count: int) -> None:
        self.gpu.copy(self.model.logits, self._landing, 4 * count * self.model.logits_width)

    def _land(self, count: int) -> F32:
        self.gpu.sync()
        return self._logits_view[:count, : self.config.vocab_size]


def check_architecture(config: ModelConfig) -> None:
    """Raises CudaError: a field of the config is not one that the kernels compute; the message names it."""
    for name, value, allowed in (
        ("pos_encoding", config.pos_encoding, "rope"),
        ("norm", config.norm, "rmsnorm"),
        ("activation", config.activation, "swiglu"),
        ("norm_placement", config.norm_placement, "pre"),
        ("qk_norm", config.qk_norm, False),
    ):
        if value != allowed:
            raise CudaError(f"backend 'cuda' computes {name}={allowed}, not {value}; backend 'cpu' does")
    if config.head_dim not in HEAD_DIMS:
        raise CudaError(
            f"backend 'cuda' takes a head_dim of {', '.join(map(str, HEAD_DIMS))}, not {config.head_dim}; "
            "backend 'cpu' takes any"
        )
    for name in ("hidden_size", "intermediate_size"):
        size = getattr(config, name)
        if size % SIZE_MULTIPLE:
            raise CudaError(
                f"backend 'cuda' takes only a {name} that is a multiple of {SIZE_MULTIPLE}, not {size}; "
                "backend 'cpu' takes any"
            )
