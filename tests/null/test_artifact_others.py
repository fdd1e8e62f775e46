"""Configurations of other makers: read as what they are, refused by name where this project cannot compute them."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cells import LINEAR, toy
from config_json import LLAMA32, QWEN3, QWEN25, SMOLLM2, Json, changed

from crucible.config import ModelConfig, RopeScaling
from crucible.engine.artifact import ArtifactError, config_from_json


def test_a_published_config_reads() -> None:
    assert config_from_json(SMOLLM2, "x") == ModelConfig.build(
        hidden_size=576,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        intermediate_size=1536,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
    )


def test_other_families_read() -> None:
    llama = config_from_json(LLAMA32, "x")
    assert llama.rope_scaling == RopeScaling(
        kind="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    assert (llama.qkv_bias, llama.o_bias, llama.qk_norm, llama.num_parameters()) == (False, False, False, 1235814400)
    qwen2 = config_from_json(QWEN25, "x")
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm, qwen2.num_parameters()) == (True, False, False, 494032768)
    qwen3 = config_from_json(QWEN3, "x")
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm, qwen3.head_dim) == (False, False, True, 128)


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"use_sliding_window": True}, "sliding_window=32768 from layer 21 of 24 on"),
        ({"use_sliding_window": True, "max_window_layers": 24}, None),
        ({"use_sliding_window": True, "sliding_window": None}, None),
        ({"use_sliding_window": True, "max_window_layers": None}, "sliding_window=32768 from layer None of 24 on"),
        ({"use_sliding_window": "no"}, "use_sliding_window must be true, false or null, not 'no'"),
        ({"layer_types": ["full_attention"] * 24}, None),
        ({"layer_types": ["full_attention"] * 23 + ["sliding_attention"]}, "is not supported; only full_attention"),
        ({"layer_types": ["full_attention"]}, "is not supported; only full_attention"),
        ({"attention_bias": True}, "unknown key: 'attention_bias'"),
        ({"use_mrope": True}, "use_mrope=True is not supported"),
    ],
    ids=str,
)
def test_windows_are_refused_where_they_are_used(changes: Json, refused: str | None) -> None:
    if refused is None:
        assert config_from_json(QWEN25 | changes, "x") == config_from_json(QWEN25, "x")
        return
    with pytest.raises(ArtifactError, match=f"^x: .*{re.escape(refused)}"):
        config_from_json(QWEN25 | changes, "x")


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500.0},
        {"rope_theta": 500},
        {"rope_theta": 500.0, "rope_scaling": None},
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "default"}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 1.0}},
        {"rope_theta": 500.0, "rope_parameters": {"rope_theta": 500, "rope_type": "default"}},
    ],
)
def test_rope_theta_is_found_where_either_transformers_puts_it(rope: Json) -> None:
    assert config_from_json(changed(drop=("rope_theta",)) | rope, "x").rope_theta == 500.0


@pytest.mark.parametrize(
    ("rope", "scaling"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4}}, LINEAR),
        ({"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 4.0}}, LINEAR),
        ({"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, LINEAR),
        ({"rope_parameters": {"rope_type": "default"}}, None),
    ],
    ids=str,
)
def test_rope_scaling_is_found_where_either_transformers_puts_it(rope: Json, scaling: Any) -> None:
    assert config_from_json(changed(**rope), "x").rope_scaling == scaling


@pytest.mark.parametrize("absent", [{}, {"head_dim": None}])
def test_head_dim_is_derived_as_transformers_does(absent: Json) -> None:
    values = changed(drop=("head_dim",), hidden_size=32) | absent
    assert config_from_json(values, "x").head_dim == 8


def test_neutral_and_inert_keys_are_accepted() -> None:
    values = changed(
        attention_dropout=0.0,
        rope_interleaved=False,
        partial_rotary_factor=1.0,
        initializer_range=0.5,
        pretraining_tp=2,
        dtype="bfloat16",
        _name_or_path="/elsewhere",
        eos_token_id=[1, 2],
        pad_token_id=None,
        architectures=None,
    )
    assert config_from_json(values, "x") == toy()
