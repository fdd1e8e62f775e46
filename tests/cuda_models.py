"""Small models that the CUDA backend takes, and what its GPU tests share. Importing it skips where there is no GPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from toy_weights import toy_weights

pytest.importorskip("cuda.bindings")

from crucible.config import ModelConfig, RopeScaling
from crucible.engine.backend import NONE, PAGE_SIZE, Segment, SlotSpec, StepPlan, prefill
from crucible.engine.cuda.backend import CudaBackend
from crucible.engine.cuda.driver import CudaError, Gpu
from crucible.engine.request import SamplingParams

F32 = npt.NDArray[np.float32]

try:
    GPU = Gpu.open()
except CudaError as error:
    pytest.skip(str(error), allow_module_level=True)


def small(**changes: Any) -> ModelConfig:
    """Sizes that are multiples of 16 and of little else: chunks, tiles and blocks end short."""
    sizes = {
        "vocab_size": 300,
        "max_position_embeddings": 640,
        "hidden_size": 144,
        "intermediate_size": 208,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    return ModelConfig.build(**{**sizes, **changes})


LLAMA3 = RopeScaling(
    kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)

CONFIGS = {
    "group 3, o in chunks of 64": small(),
    "group 4, o in chunks of 128": small(num_attention_heads=8, hidden_size=256, intermediate_size=512),
    "80 wide heads, mha, untied": small(
        head_dim=80, num_attention_heads=3, num_key_value_heads=3, attention="mha", tie_word_embeddings=False
    ),
    "96 wide heads, biases": small(head_dim=96, num_attention_heads=4, qkv_bias=True, o_bias=True),
    "128 wide heads, mqa of 12": small(head_dim=128, num_attention_heads=12, num_key_value_heads=1, attention="mqa"),
    "mqa of 20, scaled rope": small(
        num_attention_heads=20, num_key_value_heads=1, attention="mqa", rope_scaling=LLAMA3, rope_theta=500.0
    ),
}
"""A model for each way through the kernels."""


def make_backend(config: ModelConfig, **changes: Any) -> CudaBackend:
    return CudaBackend(config, toy_weights(config), **{"num_slots": 1, **changes})


def draw_ids(config: ModelConfig, seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, config.vocab_size, count).tolist()


def open_slot(backend: CudaBackend, slot: int, pages: Sequence[int], **changes: Any) -> None:
    limit = min(len(pages) * PAGE_SIZE, backend.config.max_position_embeddings)
    spec = {"page_table": tuple(pages), "limit": limit, "prompt_ids": (), "params": SamplingParams(), **changes}
    backend.open_slot(slot, SlotSpec(**spec))


def run(backend: CudaBackend, *segments: Segment) -> list[F32]:
    """The logits of each segment's rows."""
    rows = backend.submit(StepPlan(segments, want_logits=True)).wait().logits
    assert rows is not None
    return np.split(rows[0], np.cumsum([len(segment.kinds) for segment in segments])[:-1])


def in_chunks(backend: CudaBackend, ids: list[int], size: int, *, slot: int = 0, start: int = 0) -> F32:
    chunks = [(at, ids[at : at + size]) for at in range(start, len(ids), size)]
    return np.concatenate([run(backend, prefill(slot, chunk, at, last=NONE))[0] for at, chunk in chunks])


def assert_same_bits(found: F32, expected: F32) -> None:
    assert not np.isnan(expected).any()
    different = (found.view(np.uint32) != expected.view(np.uint32)).reshape(len(found), -1)
    worst = np.abs(found - expected).max()
    rows = np.flatnonzero(different.any(axis=1))
    assert not different.any(), f"{different.sum()} of {different.size} differ, by up to {worst}, in rows {rows[:20]}"
