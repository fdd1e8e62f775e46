"""What this machine allows: bytes read from memory per second, and f32 operations per second of a matrix product.

Both are measured with libraries that are not ours, in the same run as what they are held against.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

from crucible.bench.harness import BenchError

READ_BYTES: Final = 256 << 20
"""Far more than any cache that a few threads share."""

_REPEATS: Final = 3

_BLAS_THREADS: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")

_MATMUL: Final = """
import time
import numpy as np
n = 1536
a = np.random.default_rng(0).standard_normal((n, n), dtype=np.float32)
b = a.T.copy()
best = 0.0
for _ in range(4):
    began = time.perf_counter()
    a @ b
    best = max(best, 2 * n**3 / (time.perf_counter() - began))
print(best)
"""


def read_bandwidth(threads: int) -> Callable[[], float]:
    """A probe: bytes per second that `threads` threads read from memory together, the best of a few passes.

    Each thread sums a part of one array of 64-bit integers, which numpy does at memory speed without holding the
    interpreter's lock.
    """
    parts = np.array_split(np.ones(READ_BYTES // 8, dtype=np.int64), threads)

    def probe() -> float:
        best = 0.0
        with ThreadPoolExecutor(threads) as pool:
            for _ in range(_REPEATS):
                began = time.perf_counter()
                total = sum(pool.map(np.sum, parts))
                best = max(best, READ_BYTES / (time.perf_counter() - began))
                if total != READ_BYTES // 8:
                    raise BenchError("the memory probe read something else than it wrote")
        return best

    return probe


def matmul_flops(threads: int) -> Callable[[], float]:
    """A probe: f32 operations per second of numpy's matrix product of 1536 x 1536, the best of a few.

    A process of its own, because a BLAS library takes its number of threads from the environment when it is loaded.
    """

    def probe() -> float:
        environment = {**os.environ, **dict.fromkeys(_BLAS_THREADS, str(threads))}
        done = subprocess.run([sys.executable, "-c", _MATMUL], env=environment, capture_output=True, text=True)
        if done.returncode != 0:
            raise BenchError(f"the probe of the matrix product failed: {done.stderr.strip()[-200:]}")
        return float(done.stdout)

    return probe
