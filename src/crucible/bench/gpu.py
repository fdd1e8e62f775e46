"""The GPU's side of `bench decode` and `bench prefill`: its ceilings, and a step's kernels without a host beside them.

Ceilings are measured through the engine's own driver layer, in the same rounds: a copy within the device, bytes read
and written, and the rate of the tensor cores' `mma.sync`, which every product of the engine is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Final

import numpy as np

from crucible.engine.backend import PAGE_SIZE
from crucible.engine.cuda import CudaBackend
from crucible.engine.cuda.batch import make_batch
from crucible.engine.cuda.driver import Gpu
from crucible.engine.host_backend import Span
from crucible.hardware import machine

COPY_BYTES: Final = 1 << 30
"""Far more than any cache."""

_REPEATS: Final = 5
_ROUNDS: Final = 4096
_BLOCKS_PER_SM: Final = 2
_THREADS: Final = 256
_CHAINS: Final = 16
"""Of kernels/probe.cu."""

_SEED: Final = 20240520


def copy_bandwidth(gpu: Gpu) -> Callable[[], float]:
    """A probe: bytes per second that a copy within the device reads and writes."""
    source, target = gpu.allocate(COPY_BYTES, 1), gpu.allocate(COPY_BYTES, 0)
    return lambda: 2 * COPY_BYTES / _shortest(gpu, lambda: gpu.copy(source, target, COPY_BYTES))


def tensor_flops(gpu: Gpu) -> Callable[[], float]:
    """A probe: operations per second of f16 `mma.sync` with f32 sums, from registers."""
    kernel = gpu.kernel("probe.cu", "multiply_add")
    blocks = _BLOCKS_PER_SM * gpu.num_sms
    out = gpu.allocate(4 * blocks * _THREADS)
    work = 2 * 16 * 8 * 16 * _CHAINS * _ROUNDS * blocks * _THREADS // 32

    def launch() -> None:
        gpu.launch(kernel, grid=(blocks,), block=_THREADS, args=(np.int32(_ROUNDS), out))

    return lambda: work / _shortest(gpu, launch)


def step_rate(backend: CudaBackend, requests: int, start: int, rows: int, steps: int = 20) -> Callable[[], float]:
    """A probe: rows per second of a step's kernels in a captured graph, replayed; no copies, no drawing, no host.

    Each of `requests` has `rows` new positions from `start` on, and the logits of its last one are computed.
    """
    pages = -(-(start + rows) // PAGE_SIZE)
    spans = [Span(np.arange(index * pages, (index + 1) * pages), start, rows) for index in range(requests)]
    wanted = np.zeros(requests * rows, dtype=bool)
    wanted[rows - 1 :: rows] = True
    ids = np.random.default_rng(_SEED).integers(backend.config.vocab_size, size=requests * rows)
    batch = make_batch(ids, spans, wanted, backend.config.group_size)
    gpu, model = backend.gpu, backend.model
    block = gpu.upload(batch.block)

    def queue() -> None:
        model.queue(batch, int(block.handle))
        model.queue_head(batch, int(block.handle), 0, requests)

    # The graph holds addresses; whoever can replay it has to hold what is there.
    graph, held = gpu.capture(queue), block

    def replay() -> None:
        assert held is not None
        for _ in range(steps):
            gpu.replay(graph)

    def probe() -> float:
        replay()
        return steps * requests * rows / median(gpu.seconds(replay) for _ in range(_REPEATS))

    return probe


def describe(gpu: Gpu) -> str:
    """The card, with the power limit and clock of this moment."""
    for card in machine().gpus:
        if card.name == gpu.name:
            limit = "" if card.power_limit_w is None else f", power limit {card.power_limit_w:.0f} W"
            clock = "" if card.sm_clock_mhz is None else f", SM clock {card.sm_clock_mhz} MHz right after"
            return f"{gpu.name}{limit}{clock}"
    return gpu.name


def _shortest(gpu: Gpu, queue: Callable[[], None]) -> float:
    queue()
    return min(gpu.seconds(queue) for _ in range(_REPEATS))
