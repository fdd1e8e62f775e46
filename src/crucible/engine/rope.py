"""RoPE's table of cosines and sines, which every backend is given (docs/arithmetic.md, section 2)."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig, RopeScaling

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]


def rope_table(config: ModelConfig, num_positions: int | None = None) -> tuple[F32, F32]:
    """cos and sin of the angle p * frequency_i of position p and pair i, each f32 [T, K/2], C-contiguous.

    Computed in float64 and rounded once, so that every backend holds the same numbers. T is `num_positions`, by
    default max_position_embeddings.
    """
    if num_positions is None:
        num_positions = config.max_position_embeddings
    angle = np.outer(np.arange(num_positions, dtype=np.float64), frequencies(config))
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def frequencies(config: ModelConfig) -> F64:
    """theta^(-2i / K) for pair i (Su et al. 2021, section 3.4), float64 [K/2], scaled as `rope_scaling` says."""
    pair = np.arange(config.head_dim // 2, dtype=np.float64)
    frequency = config.rope_theta ** (-2 * pair / config.head_dim)
    return frequency if config.rope_scaling is None else _scaled(frequency, config.rope_scaling)


def _scaled(frequency: F64, scaling: RopeScaling) -> F64:
    if scaling.kind == "linear":
        return frequency / scaling.factor
    # None of the three is None: RopeScaling has seen to that.
    fields = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_max_position_embeddings
    low, high, original = (field for field in fields if field is not None)
    # Turns over the original context: at most `low` of them and the frequency is divided, at least `high` and it stays.
    turns = original * frequency / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return kept * frequency + (1 - kept) * frequency / scaling.factor
