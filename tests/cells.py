"""Toy configs for every ablation cell, made from the config's own literals so that a new value cannot go untested."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from crucible.config import AXES, ModelConfig, RopeScaling

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


LINEAR = RopeScaling(kind="linear", factor=4.0)
LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
"""With rope_theta=500 the toy's frequencies are of all three sorts: kept, divided and in between."""


def foreign_cells() -> list[Any]:
    """What only models of others have, each alone and then all of it, as pytest parameters."""
    given: list[dict[str, Any]] = [{"qkv_bias": True}, {"o_bias": True}, {"qk_norm": True}]
    given += [{"rope_scaling": scaling, "rope_theta": 500.0} for scaling in (LINEAR, LLAMA3)]
    every = {key: value for one in given for key, value in one.items()}
    named = [("qkv_bias", given[0]), ("o_bias", given[1]), ("qk_norm", given[2]), ("linear", given[3])]
    return [pytest.param(toy(**one), id=name) for name, one in [*named, ("llama3", given[4]), ("every", every)]]


def all_cells() -> list[Any]:
    """Every combination of axis values (96 of them), as pytest parameters."""
    return [
        pytest.param(toy(**dict(zip(AXES, values, strict=True))), id="-".join(values))
        for values in itertools.product(*AXES.values())
    ]
