"""NVRTC with a cache on disk: kernels to machine code (cubin) for one exact architecture, no toolkit and no GPU needed.

Kernels include only files of their own folder. Numbers cross from Python as definitions, so that none is typed twice.
The key of the cache covers everything that the code depends on: sources, definitions, options, architecture and
compiler version.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from crucible.errors import CrucibleError
from crucible.files import write_file
from crucible.hardware import cache_dir

KERNELS: Final = Path(__file__).parent / "kernels"

OPTIONS: Final = (
    "--std=c++17",
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--ptxas-options=-v",
)
"""Strict arithmetic: left alone, a compiler contracts two copies of one formula differently. The last one makes the
compiler report registers and spills."""

NO_COMPILE: Final = "CRUCIBLE_NO_COMPILE"
"""Environment variable: if it is 1, what the cache lacks is an error, so that a warm start can be proved warm."""

Definitions = Mapping[str, int | str]


class CompileError(CrucibleError):
    """A kernel that cannot be had; where the compiler refused it, its log follows the first line."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one source file, and what the compiler reported of it (registers, spills)."""

    code: bytes
    log: str


def compile_source(source: str, arch: str, definitions: Definitions | None = None) -> Cubin:
    """The cubin of a file of the kernels folder, from the cache or compiled now.

    Args:
        source: file name, as `linear.cu`.
        arch: as NVRTC writes it, `sm_90a`.
        definitions: what the preprocessor is told.

    Raises:
        CompileError: NVRTC is not installed, or refuses the source, or the cache lacks it and NO_COMPILE is set.
    """
    definitions = definitions or {}
    options = [*OPTIONS, f"--gpu-architecture={arch}"]
    options += [f"--define-macro={name}={value}" for name, value in sorted(definitions.items())]
    path = cache_folder() / f"{Path(source).stem}-{arch}-{_digest(source, options)}.cubin"
    with suppress(OSError):
        return Cubin(path.read_bytes(), path.with_suffix(".log").read_text())
    if os.environ.get(NO_COMPILE) == "1":
        raise CompileError(f"{source} for {arch} is not in {path.parent}, and {NO_COMPILE}=1 forbids to compile it")
    cubin = _compile(source, options)
    # A folder that cannot be written costs time at the next start and nothing else.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path.with_suffix(".log"), cubin.log.encode())
        write_file(path, cubin.code)
    return cubin


def cache_folder() -> Path:
    """Where cubins are kept."""
    return cache_dir() / "cuda"


@cache
def sources() -> dict[str, bytes]:
    """Every file of the kernels folder by name."""
    return {path.name: path.read_bytes() for path in sorted(KERNELS.iterdir()) if path.suffix in (".cu", ".cuh")}


def _digest(source: str, options: list[str]) -> str:
    digest = hashlib.sha256(repr((_version(), options)).encode())
    for name, text in sources().items():
        if name == source or name.endswith(".cuh"):
            digest.update(f"\n{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:24]


@cache
def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise CompileError(
            f"backend 'cuda' needs NVRTC, which cannot be loaded: pip install '.[cuda]' in the checkout ({reason})"
        ) from None
    return nvrtc


@cache
def _version() -> tuple[int, int]:
    nvrtc = _nvrtc()
    status, major, minor = nvrtc.nvrtcVersion()
    _check(status)
    return major, minor


def _compile(source: str, options: list[str]) -> Cubin:
    nvrtc, files = _nvrtc(), sources()
    headers = {name: text for name, text in files.items() if name.endswith(".cuh")}
    names, texts = [name.encode() for name in headers], list(headers.values())
    status, program = nvrtc.nvrtcCreateProgram(files[source], source.encode(), len(names), texts, names)
    _check(status)
    (failed,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    try:
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode().rstrip("\0\n")
        if failed != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{source} does not compile with {' '.join(options)}\n{log}")
        return Cubin(_text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(get_size: Any, get: Any, program: Any) -> bytes:
    status, size = get_size(program)
    _check(status)
    text: bytes = b" " * size
    _check(*get(program, text))
    return text


def _check(status: Any) -> None:
    if status != type(status).NVRTC_SUCCESS:
        raise CompileError(f"NVRTC: {status.name}")
