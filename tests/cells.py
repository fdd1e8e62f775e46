"""Toy configs for every ablation cell, made from the config's own literals so that a new value cannot go untested."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from crucible.config import AXES, ModelConfig

TOY: dict[str, Any] = {
    "vocab_size": 67,
    "max_position_embeddings": 96,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 8,
}
"""Sizes that share no factor by accident: head_dim * heads != hidden_size, so a transposed projection cannot pass."""


def toy(**changes: Any) -> ModelConfig:
    """A toy config: the control unless axes or sizes are changed."""
    return ModelConfig.build(**{**TOY, **changes})


def axis_cells() -> list[Any]:
    """The control and each axis value varied alone, as pytest parameters named axis=value."""
    control = {axis: getattr(toy(), axis) for axis in AXES}
    cells = [pytest.param(toy(), id="control")]
    for axis, values in AXES.items():
        for value in values:
            if value != control[axis]:
                cells.append(pytest.param(toy(**{axis: value}), id=f"{axis}={value}"))
    return cells


def all_cells() -> list[Any]:
    """Every combination of axis values (96 of them), as pytest parameters."""
    return [
        pytest.param(toy(**dict(zip(AXES, values, strict=True))), id="-".join(values))
        for values in itertools.product(*AXES.values())
    ]
