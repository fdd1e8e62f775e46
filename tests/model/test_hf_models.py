"""Models of other makers: the engine's logits against the classes of `transformers` that define them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cells import LINEAR, LLAMA3, toy
from toy_weights import toy_weights
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from crucible.config import UNTRAINED_FIELDS, ConfigError, ModelConfig, RopeScaling
from crucible.engine.reference import ReferenceBackend
from crucible.engine.rope import frequencies
from crucible.engine.runner import logits
from crucible.model.transformer import Transformer

ROUNDING = 2.0**-24
"""Of f32, relative."""

BOUND = 512 * ROUNDING
"""3.1e-5 of the root mean square of a row of logits, as between this engine and the trainable model in f32: the other
side rounds every operation, and here the angles of RoPE as well. Observed: 9.4e-6 at most."""

CAUGHT = 1000 * BOUND
"""What leaving out any one of the fields exceeds."""

MODELS: dict[str, tuple[type[PreTrainedModel], ModelConfig]] = {
    "llama": (LlamaForCausalLM, toy()),
    "llama with biases": (LlamaForCausalLM, toy(qkv_bias=True, o_bias=True)),
    "llama, linear": (LlamaForCausalLM, toy(rope_scaling=LINEAR, rope_theta=500.0)),
    "llama 3": (LlamaForCausalLM, toy(rope_scaling=LLAMA3, head_dim=16, rope_theta=500.0, tie_word_embeddings=False)),
    "qwen2": (Qwen2ForCausalLM, toy(qkv_bias=True)),
    "qwen3": (Qwen3ForCausalLM, toy(qk_norm=True, tie_word_embeddings=False)),
    "qwen3 with biases": (Qwen3ForCausalLM, toy(qk_norm=True, qkv_bias=True, o_bias=True)),
}
CONFIGS = {LlamaForCausalLM: LlamaConfig, Qwen2ForCausalLM: Qwen2Config, Qwen3ForCausalLM: Qwen3Config}


def theirs(kind: type[PreTrainedModel], config: ModelConfig) -> PreTrainedModel:
    """Their model of a config of ours, made by their names and not through any code of ours."""
    torch.set_num_threads(1)
    sizes = (
        "vocab_size",
        "max_position_embeddings",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "tie_word_embeddings",
    )
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        rope |= {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind == "llama3":
            rope |= {
                "low_freq_factor": scaling.low_freq_factor,
                "high_freq_factor": scaling.high_freq_factor,
                "original_max_position_embeddings": scaling.original_max_position_embeddings,
            }
    return kind(
        CONFIGS[kind](
            **{name: getattr(config, name) for name in sizes},
            rms_norm_eps=config.norm_eps,
            rope_parameters=rope,
            attention_bias=config.o_bias,
            attn_implementation="eager",
        )
    ).eval()


def load(model: PreTrainedModel, weights: dict[str, npt.NDArray[np.float32]], *, tied: bool) -> None:
    missing, unexpected = model.load_state_dict({n: torch.from_numpy(w) for n, w in weights.items()}, strict=False)
    assert unexpected == []
    assert missing == (["lm_head.weight"] if tied else [])
    model.tie_weights()


@torch.no_grad()
def their_logits(model: PreTrainedModel, ids: list[int]) -> npt.NDArray[np.float64]:
    return model(torch.tensor(ids)[None]).logits[0].double().numpy()


def draw_ids(config: ModelConfig, count: int) -> list[int]:
    return np.random.default_rng(7).integers(0, config.vocab_size, count).tolist()


def error(found: npt.NDArray[np.floating], expected: npt.NDArray[np.float64]) -> float:
    rms = np.sqrt(np.mean(expected**2, axis=-1, keepdims=True))
    return float(np.max(np.abs(found - expected) / rms))


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str) -> None:
    kind, config = MODELS[name]
    config = config.vary(norm_eps=0.03)  # one that shows, of the norms of heads too
    weights = toy_weights(config)
    model = theirs(kind, config)
    load(model, weights, tied=config.tie_word_embeddings)
    backend = ReferenceBackend(config, weights)
    for length in (1, 2, 17, 64, 96):
        ids = draw_ids(config, length)
        assert error(logits(backend, ids), their_logits(model, ids)) < BOUND
    # Each field shows: without it the comparison would fail.
    for field in UNTRAINED_FIELDS:
        if getattr(config, field):
            plain = config.vary(**{field: None if field == "rope_scaling" else False})
            kept = {n: weights[n] for n in plain.tensor_shapes()}
            assert error(logits(ReferenceBackend(plain, kept), ids), their_logits(model, ids)) > CAUGHT


def test_the_frequencies_of_llama_3_2_are_those_of_transformers() -> None:
    """Which computes them in f32: 32 pairs of which some are kept, some divided and some in between."""
    scaling = RopeScaling(
        kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    config = toy(head_dim=64, rope_theta=500_000.0, rope_scaling=scaling)
    expected = theirs(LlamaForCausalLM, config).model.rotary_emb.inv_freq.numpy()
    found = frequencies(config)
    np.testing.assert_allclose(found, expected, rtol=8 * ROUNDING)
    unscaled = frequencies(config.vary(rope_scaling=None))
    kept, divided = found == unscaled, found == unscaled / 32
    assert kept.any()
    assert divided.any()
    assert not (kept | divided).all()


@pytest.mark.parametrize("field", UNTRAINED_FIELDS)
def test_what_cannot_be_trained_is_refused_by_name(field: str) -> None:
    config = toy(**{field: LINEAR if field == "rope_scaling" else True})
    with pytest.raises(ConfigError, match=f"^models with {field} run in the engine but cannot be trained$"):
        Transformer(config)
