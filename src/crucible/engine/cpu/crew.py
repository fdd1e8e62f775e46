"""The threads that compute a step: the caller, and helpers that wait for work in between.

Helpers are threads of Python that run compiled code without the interpreter's lock. The work itself is divided by
`step.take_part`, so a step needs no helper: one that the system starts late, or that died with a fork, is not missed.
"""

from __future__ import annotations

import threading
import weakref
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np

from crucible.engine.cpu.state import State
from crucible.engine.cpu.step import NUM_COUNTERS, take_part

_Task: TypeAlias = "tuple[Any, State, int, int, Any] | None"


class Crew:
    """`num_threads` threads, the caller's included. Helpers end when the crew is collected."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._queues: list[SimpleQueue[_Task]] = [SimpleQueue() for _ in range(num_threads - 1)]
        for queue in self._queues:
            threading.Thread(target=_help, args=(queue,), name="crucible-cpu", daemon=True).start()
        weakref.finalize(self, _dismiss, self._queues)

    def run(self, weights: Any, state: State) -> None:
        """One step; see `step.take_part`."""
        counters = np.zeros(NUM_COUNTERS, dtype=np.int64)
        counters[0] = -1
        for thread, queue in enumerate(self._queues, start=1):
            queue.put((weights, state, thread, self.num_threads, counters))
        take_part(weights, state, 0, self.num_threads, counters)


def _help(queue: SimpleQueue[_Task]) -> None:
    while (task := queue.get()) is not None:
        take_part(*task)
        del task  # the arrays are the step's, and the next one may be long in coming


def _dismiss(queues: list[SimpleQueue[_Task]]) -> None:
    for queue in queues:
        queue.put(None)
