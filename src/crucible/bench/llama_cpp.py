"""llama.cpp through the C functions that llama-cpp-python binds: nothing of Python's in the loop but an argmax.

Needs the extra `peers`. Only the benchmark's child processes import this.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Literal

import llama_cpp  # type: ignore[import-not-found,unused-ignore]
import numpy as np

from crucible.bench.harness import BenchError

_IGNORE: Final = llama_cpp.llama_log_callback(lambda *_: None)
"""Kept here, because C holds no reference to it."""

FileType = Literal["F32", "Q8_0"]

_COMPILER: Final = re.compile(rb"GCC: \([^)]*\) [\d.]+|clang version [\d.]+")
_FILE_TYPES: Final = {"F32": llama_cpp.LLAMA_FTYPE_ALL_F32, "Q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0}


class LlamaCpp:
    """A .gguf model, greedy, one sequence; every setting but threads and context is llama.cpp's own default."""

    def __init__(self, path: Path, *, threads: int, context: int) -> None:
        _be_quiet()
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not self._model:
            raise BenchError(f"{path}: llama.cpp cannot load it")
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch = context, context
        params.n_threads = params.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        if not self._context:
            raise BenchError(f"{path}: llama.cpp makes no context of {context}")
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def begin(self, ids: Sequence[int]) -> int:
        """Forget everything, read a prompt and return the likeliest next token."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        return self._read(ids)

    def next(self, token_id: int) -> int:
        """Read one more token and return the likeliest after it."""
        return self._read((token_id,))

    def _read(self, ids: Sequence[int]) -> int:
        tokens = (llama_cpp.llama_token * len(ids))(*ids)
        if llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, len(ids))) != 0:
            raise BenchError(f"llama.cpp failed on {len(ids)} tokens")
        logits_V = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, -1), (self._vocab_size,))
        return int(logits_V.argmax())


def requantise(source: Path, out: Path, file_type: FileType) -> None:
    """Write a .gguf file's weights in another type, by llama.cpp's own tool. Raises BenchError where it fails."""
    _be_quiet()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = _FILE_TYPES[file_type], True
    if llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(params)) != 0:
        raise BenchError(f"{source}: llama.cpp cannot write it as {file_type}")


def describe() -> str:
    """Version, compiler and processor features of the library that is installed."""
    library = Path(llama_cpp.__file__).parent / "lib"
    found: set[str] = set()
    for path in library.glob("*ggml-cpu*"):
        found |= {
            text.decode() for text in re.findall(rb"GCC: \([^)]*\) [\d.]+|clang version [\d.]+", path.read_bytes())
        }
    features = llama_cpp.llama_print_system_info().decode().strip().rstrip("|").strip()
    return f"llama-cpp-python {llama_cpp.__version__}, {', '.join(sorted(found)) or 'compiler unknown'}; {features}"


def _be_quiet() -> None:
    llama_cpp.llama_log_set(_IGNORE, ctypes.c_void_p(0))
