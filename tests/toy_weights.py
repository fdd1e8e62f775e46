"""Random weights for any config, scaled so that no part of a model hides: activations keep a size near 1 through the
layers, attention is far from uniform, norm weights differ from 1 and biases from 0."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig


def toy_weights(config: ModelConfig, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Every tensor of `config.tensor_shapes()`, f32."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in config.tensor_shapes().items():
        values = rng.standard_normal(shape)
        if len(shape) == 1:
            values = 0.3 * values + (0.0 if name.endswith("bias") else 1.0)
        elif name.endswith("_proj.weight"):
            values *= (2.0 if "q_proj" in name or "k_proj" in name else 1.0) / np.sqrt(shape[1])
        weights[name] = values.astype(np.float32)
    return weights
