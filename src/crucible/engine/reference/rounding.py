"""The reference backend with one rounding of the faster backends put in, to see what that rounding alone costs.

"f16-operands": what meets a weight is rounded to f16 (the inputs of all linear layers and of the output projection).
"f16-kv": keys, after their rotation, and values are rounded to f16 when they are stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, Literal, get_args

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.engine.reference.backend import ReferenceBackend
from crucible.engine.reference.cache import PagedCache, Pages
from crucible.engine.reference.decoder import Decoder
from crucible.engine.reference.ops import F32, F64

Rounding = Literal["f16-operands", "f16-kv"]
ROUNDINGS: Final[tuple[Rounding, ...]] = get_args(Rounding)

_F16_MAX: Final = float(np.finfo(np.float16).max)


def rounded_backend(
    rounding: Rounding,
    config: ModelConfig,
    weights: Mapping[str, npt.NDArray[np.float32]],
    *,
    num_slots: int = 1,
    num_pages: int | None = None,
) -> ReferenceBackend:
    """A reference backend with that rounding and no other; arguments and errors are those of `ReferenceBackend`."""
    backend = ReferenceBackend(config, weights, num_slots=num_slots, num_pages=num_pages)
    if rounding == "f16-kv":
        backend.cache = _HalfCache(config, backend.num_pages)
    else:
        backend.decoder = _HalfOperands(config, weights)
    return backend


def to_half(x: F64) -> F64:
    """Rounded to f16, ties to even, saturating at its largest number."""
    half: F64 = np.clip(x, -_F16_MAX, _F16_MAX).astype(np.float16).astype(np.float64)
    return half


class _HalfOperands(Decoder):
    def logits(self, x_MD: F64) -> F32:
        return super().logits(to_half(x_MD))

    def _linear(self, layer: int, name: str, x_MK: F64) -> F64:
        return super()._linear(layer, name, to_half(x_MK))


class _HalfCache(PagedCache):
    def write(self, layer: int, page_table: Pages, start: int, k_NGK: F64, v_NGK: F64) -> None:
        super().write(layer, page_table, start, to_half(k_NGK), to_half(v_NGK))
