"""A short name for everything that a request's bits depend on beside the request itself."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from crucible import __version__
from crucible.config import ModelConfig
from crucible.engine.quant import F16Weight, Int8Weight, Weight
from crucible.hardware import usable_cores


def fingerprint(config: ModelConfig, weights: Mapping[str, Weight], backend: str, weight_format: str) -> str:
    """`fp_` and 12 hexadecimal digits: equal ones stand for equal bits, different ones for no promise.

    Every byte of the weights counts: SHA-256 of each tensor, several at a time, then of all of them in order of their
    names beside architecture, backend, format and the version of this package.
    """
    with ThreadPoolExecutor(usable_cores()) as pool:
        digests = dict(zip(weights, pool.map(_digest, weights.values()), strict=True))
    told = [__version__, backend, weight_format, dataclasses.asdict(config), sorted(digests.items())]
    return f"fp_{hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:12]}"


def _digest(weight: Weight) -> str:
    parts: list[npt.NDArray[np.generic]]
    parts = [weight.values, weight.scales] if isinstance(weight, (Int8Weight, F16Weight)) else [weight]
    found = hashlib.sha256()
    for part in parts:
        found.update(f"{part.dtype.str} {part.shape}".encode())
        found.update(np.ascontiguousarray(part).data)
    return found.hexdigest()
