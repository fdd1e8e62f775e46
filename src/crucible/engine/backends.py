"""Backends by name; each is imported when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Final, Literal, get_args

from crucible.config import ModelConfig
from crucible.engine.backend import PAGE_SIZE, Backend
from crucible.engine.engine import PREFILL_BUDGET
from crucible.engine.quant import Weight, WeightFormat, convert, dense
from crucible.engine.request import RequestError
from crucible.errors import CrucibleError

BackendName = Literal["reference", "cpu", "cuda", "null"]
BACKENDS: Final[tuple[BackendName, ...]] = get_args(BackendName)

CACHE_BYTES: Final = 2**31
"""The key/value cache takes no more by default, unless a single request may need it."""


def resolve_backend(name: str) -> BackendName:
    """The backend that a name stands for; "auto" is the fastest one whose packages are installed.

    Raises:
        RequestError: there is no such backend.
        CrucibleError: it needs a package that is not installed; the message names the extra.
    """
    has_numba = find_spec("numba") is not None
    if name == "auto":
        return "cpu" if has_numba else "reference"
    if name not in BACKENDS:
        raise RequestError(f"backend must be one of auto, {', '.join(BACKENDS)}, not {name!r}")
    if name == "cpu" and not has_numba:
        raise CrucibleError(
            "backend 'cpu' needs numba, which is not installed: pip install '.[cpu]' in the checkout, "
            "or take backend 'reference'"
        )
    return name


def serving_budget(backend: BackendName) -> int:
    """Prompt tokens per step of a server: the fewest at which prompts lose nothing.

    On two cores, SmolLM2 in int8 and four streams, a prompt of 535 tokens stalls them for 0.21 s with 128 and for 0.8 s
    with 512 or 1024, and has its own first token as soon (docs/experiments.md). A GPU needs more rows to be busy.
    """
    return 128 if backend == "cpu" else PREFILL_BUDGET


def default_weight_format(backend: BackendName) -> WeightFormat:
    """What a backend holds matrices in unless asked: the oracle in f32, the fast ones in int8."""
    return "f32" if backend == "reference" else "int8"


def make_backend(
    name: str,
    config: ModelConfig,
    weights: Mapping[str, Weight],
    *,
    weight_format: WeightFormat = "f32",
    num_slots: int = 1,
    num_pages: int | None = None,
    null_ids: Sequence[int] = (),
) -> Backend:
    """A backend that holds a model.

    Args:
        name: "reference" is the float64 oracle in numpy, slow; "cpu" the fast one; "cuda" the one for
            NVIDIA GPUs; "auto" as `resolve_backend`.
        config: the architecture.
        weights: the tensors of `config.tensor_shapes()` by name.
        weight_format: what matrices are held in. The reference computes with the numbers that the format stands for.
        num_slots: requests that can be open at once.
        num_pages: pages of 16 positions that they share; by default every slot can reach the context.
        null_ids: what the backend "null" draws, see `NullBackend`; that one looks at no weights.

    Raises:
        RequestError, CrucibleError: as `resolve_backend`; a tensor is missing, unknown or of another shape.
    """
    name = resolve_backend(name)
    if name == "null":
        from crucible.engine.null import NullBackend

        return NullBackend(config, null_ids, num_slots=num_slots, num_pages=num_pages)
    if name == "cpu":
        from crucible.engine.cpu import CpuBackend

        return CpuBackend(config, weights, weight_format=weight_format, num_slots=num_slots, num_pages=num_pages)
    if name == "cuda":
        from crucible.engine.cuda import CudaBackend

        return CudaBackend(config, weights, weight_format=weight_format, num_slots=num_slots, num_pages=num_pages)
    from crucible.engine.reference import ReferenceBackend

    held = convert(config, weights, weight_format)
    return ReferenceBackend(
        config, {key: dense(weight) for key, weight in held.items()}, num_slots=num_slots, num_pages=num_pages
    )


def affordable_pages(config: ModelConfig, num_slots: int) -> int:
    """Pages for every slot to reach the context, as far as CACHE_BYTES go; enough for one slot in any case."""
    pages_of_one = -(-config.max_position_embeddings // PAGE_SIZE)
    affordable = CACHE_BYTES // (PAGE_SIZE * config.kv_bytes_per_token(bytes_per_element=4))
    return max(pages_of_one, min(num_slots * pages_of_one, affordable))
