"""The CPU backend: the step model of `engine/backend.py` over one compiled function."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.engine.backend import PAGE_SIZE
from crucible.engine.cpu import attention
from crucible.engine.cpu.compiling import HAS_HALF_PRECISION, compile_once
from crucible.engine.cpu.crew import Crew
from crucible.engine.cpu.lanes import LANES
from crucible.engine.cpu.linear import BLOCK_ROWS, TILE
from crucible.engine.cpu.packing import look_up, pack, round_up
from crucible.engine.cpu.sampling import CHOOSE_SIGNATURE, Sampler, choose
from crucible.engine.cpu.state import F32, Batch, Memory, Model, State
from crucible.engine.cpu.step import scratch_size, step_signature, take_part
from crucible.engine.host_backend import HostBackend, Ids, Span, cut
from crucible.engine.quant import Weight, WeightFormat
from crucible.errors import CrucibleError
from crucible.hardware import usable_cores

MAX_ROWS: Final = 256
"""Rows that go through the model at a time: bounds buffers and keeps them in cache. No result depends on it."""


class CpuBackend(HostBackend):
    """Every architecture in f32, on all cores that this process may use (docs/arithmetic.md, section 6).

    Memory: the matrices in their format, f32 keys and values of all pages, and buffers for `MAX_ROWS` rows. The first
    backend of a weight format on a machine compiles for it before the constructor returns; the code is kept on disk.

    Args:
        config: the architecture.
        weights: the tensors of `config.tensor_shapes()` by name.
        weight_format: what matrices are held in.
        num_slots: requests that can be open at once.
        num_pages: pages of 16 positions that they share; the default lets every slot reach the context.
        num_threads: threads to compute with; the default is one for each usable core. No result depends on it.
        notify: is told what takes long, in a line; by default printed on standard error.

    Raises:
        CrucibleError: a tensor is missing, unknown or of another shape, or has no such format; the CPU has no f16.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Weight],
        *,
        weight_format: WeightFormat = "f32",
        num_slots: int = 1,
        num_pages: int | None = None,
        num_threads: int | None = None,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        super().__init__(config, num_slots, num_pages)
        if weight_format == "f16" and not HAS_HALF_PRECISION:
            raise CrucibleError("this CPU has no instruction for f16 (F16C); take another weight format")
        if num_threads is not None and num_threads < 1:
            raise CrucibleError(f"num_threads must be at least 1, not {num_threads}")
        self._crew = Crew(usable_cores() if num_threads is None else num_threads)
        self._packed = pack(config, weights, weight_format)
        notify = notify or _print
        compile_once(choose, CHOOSE_SIGNATURE, "sampling", notify)
        compile_once(take_part, step_signature(self._packed.weights), f"{weight_format} weights", notify)
        self._choose = Sampler(config.vocab_size).choose
        self._memory = _allocate(self._packed.model, config, self.num_pages, self._crew.num_threads)

    @property
    def keys(self) -> F32:
        """The cache's keys, [L, G, P, K, 16]; the array itself."""
        model, memory = self._packed.model, self._memory
        return memory.keys.reshape(model.num_layers, model.num_kv_heads, memory.num_pages, model.k, PAGE_SIZE)

    @property
    def values(self) -> F32:
        """The cache's values, [L, G, P, 16, K rounded up to 32]; the array itself."""
        model, memory = self._packed.model, self._memory
        return memory.values.reshape(model.num_layers, model.num_kv_heads, memory.num_pages, PAGE_SIZE, model.k_stride)

    def _forward(self, ids_M: Ids, spans: Sequence[Span], wanted_M: npt.NDArray[np.bool_]) -> F32:
        logits: list[F32] = []
        done = 0
        for part in cut(spans, MAX_ROWS):
            rows = slice(done, done + sum(span.length for span in part))
            logits.append(self._run(ids_M[rows], part, np.flatnonzero(wanted_M[rows])))
            done = rows.stop
        return logits[0] if len(logits) == 1 else np.concatenate(logits)

    def _run(self, ids_M: Ids, spans: Sequence[Span], wanted_W: Ids) -> F32:
        """As `_forward`, for at most `MAX_ROWS` rows."""
        batch = self._batch(spans, wanted_W)
        x_MD = look_up(self._packed, ids_M)
        if self._packed.positions is not None:
            x_MD = x_MD + self._packed.positions[batch.position]
        model, memory = self._packed.model, self._memory
        memory.x.reshape(-1, model.d_stride)[: len(ids_M), : model.d] = x_MD
        self._crew.run(self._packed.weights, State(model, memory, batch))
        return batch.logits.reshape(-1, model.head.tiles * TILE)[: len(wanted_W), : self.config.vocab_size]

    def _batch(self, spans: Sequence[Span], wanted_W: Ids) -> Batch:
        length = np.array([span.length for span in spans], dtype=np.int64)
        start = np.array([span.start for span in spans], dtype=np.int64)
        first_row = np.cumsum(length) - length
        tables = [span.page_table for span in spans]
        sizes = np.array([len(table) for table in tables], dtype=np.int64)
        num_logits = (len(wanted_W) + BLOCK_ROWS) * self._packed.model.head.tiles * TILE
        return Batch(
            position=np.arange(length.sum()) + np.repeat(start - first_row, length),
            table=np.repeat(np.cumsum(sizes) - sizes, length),
            pages=np.concatenate(tables),
            first_row=first_row,
            length=length,
            start=start,
            wanted=wanted_W,
            logits=np.empty(num_logits, dtype=np.float32),
        )


def _allocate(model: Model, config: ModelConfig, num_pages: int, num_threads: int) -> Memory:
    """Pages and buffers, zero; the system gives memory to those parts that are used."""

    def zeros(*shape: int) -> F32:
        # Lanes are loaded whole, so the last row of a buffer may be read past its end.
        return np.zeros(int(np.prod(shape)) + LANES, dtype=np.float32)[: int(np.prod(shape))]

    rows, per_page = MAX_ROWS + BLOCK_ROWS, model.num_layers * num_pages * model.num_kv_heads * PAGE_SIZE
    chunks = -(-config.max_position_embeddings // attention.CHUNK)
    partial = attention.BLOCK * (model.k_stride + LANES)
    own = round_up(max(scratch_size(rows), attention.scratch_size(model.k_stride)) + LANES, LANES)
    return Memory(
        num_pages=num_pages,
        keys=zeros(per_page, model.k),
        values=zeros(per_page, model.k_stride),
        x=zeros(rows, model.d_stride),
        h=zeros(rows, model.d_stride),
        y=zeros(rows, model.d_stride),
        qkv=zeros(rows, model.qkv_stride),
        attended=zeros(rows, model.num_heads * model.k),
        hidden=zeros(rows, model.f_stride),
        partials=zeros(attention.FEW_BLOCKS * num_threads, chunks, partial),
        scratch=zeros(num_threads, own),
        scratch_size=own,
    )


def _print(line: str) -> None:
    print(line, file=sys.stderr)
