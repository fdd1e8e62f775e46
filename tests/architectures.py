"""Models of any architecture and size, for hypothesis."""

from __future__ import annotations

from collections.abc import Callable

from cells import toy
from hypothesis import strategies as st

from crucible.config import AXES, ModelConfig, default_kv_heads


@st.composite
def architectures(draw: st.DrawFn, make: Callable[..., ModelConfig] = toy) -> ModelConfig:
    """Configs by `make` of any axes and sizes, most of them no multiple of a lane, a tile, a chunk or a cache line."""
    axes = {axis: draw(st.sampled_from(values)) for axis, values in AXES.items()}
    heads = draw(st.sampled_from([4, 6, 8, 9]))
    head_dim = draw(st.integers(1, 70))
    return make(
        **axes,
        vocab_size=draw(st.integers(2, 300)),
        hidden_size=draw(st.integers(1, 300)),
        intermediate_size=draw(st.integers(1, 600)),
        num_attention_heads=heads,
        num_key_value_heads=default_kv_heads(heads, axes["attention"]),
        head_dim=head_dim + head_dim % 2,
        tie_word_embeddings=draw(st.booleans()),
    )
