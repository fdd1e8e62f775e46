"""The one map between the names of the torch model's state_dict and those of an artifact's tensors.

An artifact has Hugging Face's Llama names, where everything but the output projection sits inside a `model.` module.
"""

from __future__ import annotations

from typing import Final

_PREFIX: Final = "model."
_OUTSIDE: Final = "lm_head."


def to_artifact(name: str) -> str:
    """Artifact name of a state_dict name: `layers.0.mlp.up_proj.weight` to `model.layers.0.mlp.up_proj.weight`."""
    return name if name.startswith(_OUTSIDE) else _PREFIX + name


def from_artifact(name: str) -> str:
    """State_dict name of an artifact name: the inverse of `to_artifact`.

    Raises:
        ValueError: no state_dict name maps to this one.
    """
    if name.startswith(_OUTSIDE):
        return name
    inside = name.removeprefix(_PREFIX)
    if inside == name or inside.startswith(_OUTSIDE):
        raise ValueError(f"{name!r} is not the name of an artifact's tensor")
    return inside
