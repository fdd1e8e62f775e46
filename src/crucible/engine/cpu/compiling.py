"""Numba as this backend uses it: strict arithmetic, and a cache that cannot be stale."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import llvmlite
import numba
import numpy as np
from numba.core.registry import cpu_target

jit: Final[Callable[..., Any]] = numba.njit(error_model="numpy", nogil=True)
"""Compiles a function into its callers. There is no fast-math, so LLVM neither reorders nor contracts operations."""

TRIPLE, _CPU, _FEATURES = cpu_target.target_context.codegen().magic_tuple()

HAS_WIDE_REGISTERS: Final = "+avx512f" in _FEATURES.split(",")
"""Whether there are 32 registers of 16 lanes: decides how much is kept in registers, and no bit of a result."""

HAS_HALF_PRECISION: Final = not TRIPLE.startswith(("x86", "i686")) or "+f16c" in _FEATURES.split(",")
"""Whether an instruction widens f16; Numba's runtime has no function that could do it instead."""


def cache_folder() -> Path:
    """Where compiled code is kept: a folder for just these sources, package versions and this type of CPU.

    Numba's own key looks at the file of the function that is called from Python. It misses a change in a function of
    another file that was compiled into it.
    """
    versions = (numba.__version__, llvmlite.__version__, np.__version__, sys.version, TRIPLE, _CPU, _FEATURES)
    digest = hashlib.sha256("\n".join(versions).encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.name.encode() + b"\n" + source.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "crucible" / "cpu" / digest.hexdigest()[:20]


def entry(function: Callable[..., Any]) -> Any:
    """Compiles a function that Python calls, and keeps the machine code in `cache_folder()` if that can be written."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return jit(function)
    if not os.access(folder, os.W_OK):
        return jit(function)
    # Numba looks at this setting when it decorates, and has no other way to be told per function.
    before, numba.config.CACHE_DIR = numba.config.CACHE_DIR, str(folder)
    try:
        return numba.njit(error_model="numpy", nogil=True, cache=True)(function)
    finally:
        numba.config.CACHE_DIR = before


def compile_once(function: Any, signature: tuple[Any, ...], name: str, notify: Callable[[str], None]) -> None:
    """Have an `entry` ready for arguments of these types: from the cache, or compiled now after saying so.

    `name` says which of the function's signatures it is.
    """
    marker = cache_folder() / f"{function.__name__}-{name.replace(' ', '-')}"
    if not marker.exists():
        notify(f"compiling for {name}, once: some seconds")
    function.compile(signature)
    if function.stats.cache_path is not None:
        marker.touch()
