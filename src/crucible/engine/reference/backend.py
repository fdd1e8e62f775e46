"""The reference backend: the step model of `engine/backend.py` in numpy, one row after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.engine.host_backend import F32, HostBackend, Ids, Span
from crucible.engine.reference.cache import PagedCache
from crucible.engine.reference.decoder import Decoder


class ReferenceBackend(HostBackend):
    """The oracle: float64 arithmetic on every architecture (docs/arithmetic.md, section 4).

    Memory: 8 bytes per weight beside the given arrays, and f32 keys and values of all pages.

    Args:
        config: the architecture.
        weights: the tensors of `config.tensor_shapes()` by name; f32, as `engine.weights.load_weights` gives them.
        num_slots: requests that can be open at once.
        num_pages: pages of 16 positions that they share; the default lets every slot reach the context.

    Raises:
        CrucibleError: a tensor is missing, unknown or of another shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, npt.NDArray[np.float32]],
        *,
        num_slots: int = 1,
        num_pages: int | None = None,
    ) -> None:
        super().__init__(config, num_slots, num_pages)
        self.cache = PagedCache(config, self.num_pages)
        self.decoder = Decoder(config, weights)

    def _forward(self, ids_M: Ids, spans: Sequence[Span], wanted_M: npt.NDArray[np.bool_]) -> F32:
        return self.decoder.logits(self.decoder.forward(ids_M, spans, self.cache)[wanted_M])
