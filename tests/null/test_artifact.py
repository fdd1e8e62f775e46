"""Configuration files of an artifact: what comes back, and what is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from cells import LINEAR, LLAMA3, all_cells, toy
from config_json import LLAMA32, QWEN3, Json, changed, to_json
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.config import PRESETS, ModelConfig
from crucible.engine.artifact import (
    ArtifactError,
    Generation,
    config_from_json,
    config_to_json,
    generation_to_json,
    read_config,
    read_generation,
    read_json,
)


def put(folder: Path, name: str, values: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(values))


# ---- config.json: the round trip --------------------------------------------------------------------------------


@pytest.mark.parametrize("config", all_cells())
def test_config_round_trip_over_every_cell(config: ModelConfig) -> None:
    values = to_json(config)
    assert values["model_type"] == ("llama" if config.is_llama else "crucible")
    assert config_from_json(values, "x") == config


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([cell.values[0] for cell in all_cells()]),
    st.booleans(),
    st.floats(min_value=1e-300, max_value=1e300),
    st.floats(min_value=1e-300, max_value=1e300),
    st.integers(1, 2**18),
)
def test_config_round_trip_over_numbers(
    config: ModelConfig, tied: bool, theta: float, eps: float, vocab_size: int
) -> None:
    config = config.vary(tie_word_embeddings=tied, rope_theta=theta, norm_eps=eps, vocab_size=vocab_size)
    assert config_from_json(to_json(config), "x") == config


@pytest.mark.parametrize("name", PRESETS)
def test_config_round_trip_of_presets_through_a_file(name: str, tmp_path: Path) -> None:
    put(tmp_path, "config.json", to_json(PRESETS[name]))
    assert read_config(tmp_path) == PRESETS[name]


@pytest.mark.parametrize("axes", [{}, {"norm": "layernorm"}], ids=["llama axes", "other axes"])
@pytest.mark.parametrize("qk_norm", [False, True], ids=["", "qk_norm"])
@pytest.mark.parametrize("biases", [(False, False), (True, False), (False, True), (True, True)], ids=str)
@pytest.mark.parametrize("scaling", [None, LINEAR, LLAMA3], ids=["", "linear", "llama3"])
def test_config_round_trip_of_what_models_of_others_have(
    axes: Json, qk_norm: bool, biases: tuple[bool, bool], scaling: Any
) -> None:
    config = toy(**axes, qk_norm=qk_norm, qkv_bias=biases[0], o_bias=biases[1], rope_scaling=scaling)
    values = to_json(config)
    of_llama = {(False, False): "llama", (True, True): "llama", (True, False): "qwen2", (False, True): "crucible"}
    of_qwen3 = {(False, False): "qwen3", (True, True): "qwen3"}
    kind = "crucible" if axes else (of_qwen3 if qk_norm else of_llama).get(biases, "crucible")
    assert values["model_type"] == kind
    assert config_from_json(values, "x") == config


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16")])
def test_config_names_the_dtype_as_transformers_does(dtype: Any, torch_dtype: str) -> None:
    assert config_to_json(toy(), dtype=dtype, bos_token_id=1, eos_token_id=2)["torch_dtype"] == torch_dtype


def test_one_head_reads_back_as_mha() -> None:
    config = toy(num_attention_heads=1, num_key_value_heads=1, attention="mqa", head_dim=8)
    assert config_from_json(to_json(config), "x") == config.vary(attention="mha")
    config = config.vary(pos_encoding="alibi")
    assert config_from_json(to_json(config), "x") == config


# ---- config.json: refusals --------------------------------------------------------------------------------------

NEEDED = [
    "vocab_size",
    "max_position_embeddings",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "hidden_act",
    "rms_norm_eps",
    "tie_word_embeddings",
    "rope_theta",
]


@pytest.mark.parametrize("key", NEEDED)
def test_a_missing_key_is_named(key: str) -> None:
    with pytest.raises(ArtifactError, match=f"^x: missing key: {key}$"):
        config_from_json(changed(drop=(key,)), "x")


@pytest.mark.parametrize("key", ["attention", "pos_encoding", "activation", "norm", "norm_placement", "norm_eps"])
def test_a_missing_axis_is_named(key: str) -> None:
    key = "rms_norm_eps" if key == "norm_eps" else key
    with pytest.raises(ArtifactError, match=f"^x: missing key: {key}$"):
        config_from_json(changed(toy(norm="layernorm"), drop=(key,)), "x")


REFUSED: dict[str, tuple[Json, str]] = {
    "no model_type": (
        changed(drop=("model_type",)),
        "model_type must be one of llama, qwen2, qwen3, crucible, not None",
    ),
    "another model": (
        changed(model_type="gpt2"),
        "model_type must be one of llama, qwen2, qwen3, crucible, not 'gpt2'",
    ),
    "a list of models": (changed(model_type=["llama"]), "model_type must be"),
    "unknown key": (changed(sliding_window=4096), "unknown key: 'sliding_window'"),
    "unknown keys": (changed(b=1, a=2), "unknown keys: 'a', 'b'"),
    "an axis in a Llama": (changed(pos_encoding="rope"), "unknown key: 'pos_encoding'"),
    "quantised by others": (changed(quantization_config={"bits": 4}), "quantization_config must be absent or {'quant"),
    "remote code": (changed(auto_map={"AutoConfig": "x.Y"}), "unknown key: 'auto_map'"),
    "several missing": (changed(drop=("hidden_size", "vocab_size")), "missing keys: vocab_size, hidden_size"),
    "not a decoder": (changed(architectures=["LlamaForSequenceClassification"]), "architectures must be"),
    "bias not a flag": (changed(attention_bias="yes"), "attention_bias must be true, false or null, not 'yes'"),
    "our key in a Llama": (changed(qkv_bias=True), "unknown key: 'qkv_bias'"),
    "a Llama's key in ours": (changed(toy(norm="layernorm"), attention_bias=True), "unknown key: 'attention_bias'"),
    "mlp bias": (changed(mlp_bias=True), "mlp_bias=True is not supported"),
    "dropout": (changed(attention_dropout=0.1), "attention_dropout=0.1 is not supported"),
    "interleaved": (changed(rope_interleaved=True), "rope_interleaved=True is not supported"),
    "partial rotary": (changed(partial_rotary_factor=0.5), "partial_rotary_factor=0.5 is not supported"),
    "llama3 without all of it": (
        changed(rope_scaling={"factor": 32.0, "rope_type": "llama3", "high_freq_factor": 4.0}),
        "rope_scaling: missing keys: low_freq_factor, original_max_position_embeddings",
    ),
    "dynamic": (
        changed(rope_scaling={"type": "dynamic", "factor": 2.0}),
        "rope_scaling.type='dynamic' is not supported; only default, linear, llama3 are",
    ),
    "yarn": (changed(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4}), "rope_parameters.rope_type='yarn'"),
    "longrope": (changed(rope_scaling={"rope_type": "longrope"}), "rope_scaling.rope_type='longrope' is not"),
    "mrope": (changed(rope_scaling={"type": "mrope", "mrope_section": [16]}), "rope_scaling.type='mrope' is not"),
    "a type that is a list": (changed(rope_scaling={"type": ["linear"]}), "rope_scaling.type=['linear'] is not"),
    "two types": (
        changed(rope_scaling={"type": "linear", "rope_type": "default", "factor": 2.0}),
        "rope_scaling.rope_type=default and type=linear disagree",
    ),
    "two scalings": (
        changed(rope_scaling={"type": "linear", "factor": 2.0}, rope_parameters={"rope_type": "default"}),
        "rope_parameters and rope_scaling disagree",
    ),
    "linear by nothing": (changed(rope_scaling={"type": "linear"}), "rope_scaling: missing keys: factor"),
    "linear by zero": (changed(rope_scaling={"type": "linear", "factor": 0}), "rope_scaling.factor must be a positive"),
    "attention factor": (
        changed(rope_scaling={"type": "linear", "factor": 2.0, "attention_factor": 2.0}),
        "rope_scaling: unknown keys: 'attention_factor'",
    ),
    "llama3 upside down": (
        changed(rope_scaling={**LLAMA32["rope_scaling"], "low_freq_factor": 5.0}),
        "rope_scaling.low_freq_factor=5.0 must be below high_freq_factor=4.0",
    ),
    "scaling without rope": (
        changed(toy(pos_encoding="alibi"), rope_scaling={"type": "linear", "factor": 2.0}),
        "rope_scaling needs pos_encoding='rope'",
    ),
    "rope with a factor": (changed(rope_scaling={"rope_type": "default", "factor": 2}), "rope_scaling: unknown keys"),
    "rope per layer type": (
        changed(rope_parameters={"full_attention": {"rope_theta": 1e4}}),
        "rope_parameters: unknown keys: 'full_attention'",
    ),
    "partial rope": (
        changed(rope_parameters={"partial_rotary_factor": 0.25, "rope_theta": 1e4}),
        "rope_parameters.partial_rotary_factor must be 1",
    ),
    "rope a number": (changed(rope_scaling=2.0), "rope_scaling must be an object or null"),
    "two bases": (
        changed(rope_parameters={"rope_theta": 5e5}),
        "rope_theta=10000.0 and rope_parameters.rope_theta=500000.0 disagree",
    ),
    "gelu for a Llama": (changed(hidden_act="gelu"), "hidden_act must be 'silu' for swiglu, not 'gelu'"),
    "erf gelu": (changed(toy(activation="gelu"), hidden_act="gelu"), "hidden_act must be 'gelu_pytorch_tanh'"),
    "silu for gelu": (changed(toy(activation="gelu"), hidden_act="silu"), "hidden_act must be 'gelu_pytorch_tanh'"),
    "size a float": (changed(hidden_size=24.0), "hidden_size must be a positive integer, not 24.0"),
    "size a bool": (changed(num_hidden_layers=True), "num_hidden_layers must be a positive integer, not True"),
    "size null": (changed(num_key_value_heads=None), "num_key_value_heads must be a positive integer, not None"),
    "size zero": (changed(vocab_size=0), "vocab_size must be a positive integer, not 0"),
    "size negative": (changed(head_dim=-8), "head_dim must be a positive integer, not -8"),
    "vocabulary too large": (changed(vocab_size=2**18 + 1), "vocab_size must be at most 262144"),
    "head_dim not derivable": (changed(drop=("head_dim",), hidden_size=26), "missing key: head_dim"),
    "odd head_dim": (changed(head_dim=7), "head_dim must be even for rope"),
    "heads do not divide": (changed(num_key_value_heads=3), "num_key_value_heads must divide"),
    "tie a number": (changed(tie_word_embeddings=1), "tie_word_embeddings must be true or false, not 1"),
    "eps zero": (changed(rms_norm_eps=0.0), "rms_norm_eps must be a positive finite number, not 0.0"),
    "eps text": (changed(rms_norm_eps="1e-5"), "rms_norm_eps must be a positive finite number"),
    "theta infinite": (changed(rope_theta=float("inf")), "rope_theta must be a positive finite number"),
    "theta not a number": (changed(rope_theta=float("nan")), "rope_theta must be a positive finite number"),
    "theta beyond floats": (changed(rope_theta=10**400), "rope_theta must be a positive finite number"),
    "theta bool": (changed(rope_theta=True), "rope_theta must be a positive finite number"),
    "unknown axis value": (changed(toy(norm="layernorm"), pos_encoding="xpos"), "pos_encoding must be one of"),
    "axis a list": (changed(toy(norm="layernorm"), norm=["layernorm"]), "norm must be one of"),
    "attention contradicts": (changed(toy(norm="layernorm"), attention="mha"), "attention='mha' contradicts"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_config_we_cannot_compute_is_refused_by_name(case: str) -> None:
    values, message = REFUSED[case]
    with pytest.raises(ArtifactError, match=f"^x: .*{re.escape(message)}"):
        config_from_json(values, "x")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=5,
)
ROPE_BLOCKS = st.dictionaries(
    st.sampled_from([*LLAMA32["rope_scaling"], "type", "rope_theta"]),
    VALUES | st.sampled_from(["linear", "llama3", 1.0, 4.0, 32]),
)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([toy(), toy(norm="layernorm", activation="gelu"), toy(qkv_bias=True), toy(rope_scaling=LLAMA3)]),
    st.dictionaries(st.sampled_from([*to_json(toy(norm="layernorm")), *QWEN3]), VALUES | ROPE_BLOCKS),
    st.sets(st.sampled_from(sorted(to_json(toy()))), max_size=2),
)
def test_any_config_is_read_or_refused(config: ModelConfig, changes: Json, dropped: set[str]) -> None:
    values = changed(config, drop=tuple(dropped), **changes)
    try:
        found = config_from_json(values, "x")
    except ArtifactError:
        return
    assert {f: values[f] for f in ("vocab_size", "hidden_size")} == {
        f: getattr(found, f) for f in ("vocab_size", "hidden_size")
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"[]", "must be a JSON object, not list"),
        (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
        (b'{"rope_theta": Infinity}', "Infinity is not JSON"),
        (b"\xff", "not valid JSON"),
        (b"[" * 100_000, "nested too deeply"),
    ],
)
def test_malformed_json_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=re.escape(str(tmp_path / "config.json")) + ": .*" + message):
        read_config(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"config\.json: no such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ArtifactError, match=r"config\.json: cannot be read: Is a directory"):
        read_json(tmp_path / "config.json")


# ---- generation_config.json -------------------------------------------------------------------------------------


@pytest.mark.parametrize("eos", [(), (7,), (7, 3)])
def test_generation_round_trip(eos: tuple[int, ...], tmp_path: Path) -> None:
    generation = Generation(bos_token_id=5, eos_token_ids=eos, pad_token_id=None)
    put(tmp_path, "config.json", to_json(toy()))
    put(tmp_path, "generation_config.json", generation_to_json(generation))
    assert read_generation(tmp_path) == generation


def test_generation_falls_back_to_config_key_by_key(tmp_path: Path) -> None:
    put(tmp_path, "config.json", {"bos_token_id": 1, "eos_token_id": 2})
    assert read_generation(tmp_path) == Generation(1, (2,), None)
    put(tmp_path, "generation_config.json", {"eos_token_id": [3, 4], "temperature": 0.6, "do_sample": True})
    assert read_generation(tmp_path) == Generation(1, (3, 4), None)
    put(tmp_path, "generation_config.json", {"eos_token_id": None, "bos_token_id": None, "pad_token_id": 0})
    assert read_generation(tmp_path) == Generation(None, (), 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", -1),
        ("eos_token_id", 2**18),
        ("eos_token_id", True),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, None]),
        ("bos_token_id", [1]),
        ("pad_token_id", 0.0),
    ],
)
def test_a_special_id_that_is_none_is_named(key: str, value: Any, tmp_path: Path) -> None:
    put(tmp_path, "config.json", {})
    put(tmp_path, "generation_config.json", {key: value})
    with pytest.raises(ArtifactError, match=rf"generation_config\.json: {key} must be a token id or null"):
        read_generation(tmp_path)
