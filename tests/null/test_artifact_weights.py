"""Tensors of an artifact, in one file or in shards: what comes back, and what is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import all_cells, toy
from safetensors.numpy import save_file
from toy_weights import toy_weights

from crucible.config import ModelConfig
from crucible.engine.artifact import ArtifactError, read_json
from crucible.engine.safetensors_file import SafetensorsFile
from crucible.engine.weights import INDEX_NAME, WEIGHTS_NAME, load_weights, open_weights


@pytest.mark.parametrize("config", all_cells()[::7])
def test_weights_come_back_in_order_and_in_f32(config: ModelConfig, tmp_path: Path) -> None:
    weights = toy_weights(config)
    save_file(weights, tmp_path / WEIGHTS_NAME)
    found = load_weights(tmp_path, config)
    assert list(found) == list(config.tensor_shapes())
    for name, weight in found.items():
        assert weight.dtype == np.float32
        assert not weight.flags.owndata
        np.testing.assert_array_equal(weight, weights[name])


def test_half_precision_is_widened_exactly(tmp_path: Path) -> None:
    weights = {name: weight.astype(np.float16) for name, weight in toy_weights(toy()).items()}
    save_file(weights, tmp_path / WEIGHTS_NAME)
    for name, weight in load_weights(tmp_path, toy()).items():
        assert weight.dtype == np.float32
        np.testing.assert_array_equal(weight, weights[name].astype(np.float32))


def test_an_unaligned_file_loads_aligned(tmp_path: Path) -> None:
    weights = toy_weights(toy())
    save_file(weights, tmp_path / WEIGHTS_NAME)
    data = (tmp_path / WEIGHTS_NAME).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length] + b" "
    (tmp_path / WEIGHTS_NAME).write_bytes((length + 1).to_bytes(8, "little") + header + data[8 + length :])
    for name, weight in load_weights(tmp_path, toy()).items():
        assert weight.flags.aligned
        np.testing.assert_array_equal(weight, weights[name])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_weight_that_is_not_finite_is_named(value: float, dtype: Any, tmp_path: Path) -> None:
    weights = {name: weight.astype(dtype) for name, weight in toy_weights(toy()).items()}
    weights["model.layers.1.mlp.up_proj.weight"][3, 2] = value
    save_file(weights, tmp_path / WEIGHTS_NAME)
    with pytest.raises(ArtifactError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' holds a value that is not fini"):
        load_weights(tmp_path, toy())
    assert load_weights(tmp_path, toy(), check_finite=False).keys() == weights.keys()


def broken(change: Callable[[dict[str, np.ndarray]], Any], config: ModelConfig | None = None) -> dict[str, np.ndarray]:
    weights = toy_weights(config or toy())
    change(weights)
    return weights


WRONG_TENSORS: dict[str, tuple[dict[str, np.ndarray], str]] = {
    "missing": (broken(lambda w: w.pop("model.norm.weight")), "missing tensors: 'model.norm.weight'"),
    "many missing": (
        broken(lambda w: [w.pop(name) for name in list(w)[2:9]]),
        "'model.layers.0.self_attn.o_proj.weight', 'model.layers.0.post_attention_layernorm.weight' and 2 more",
    ),
    "unexpected": (broken(lambda w: w.update(extra=w["model.norm.weight"])), "unexpected tensors: 'extra'"),
    "a bias": (
        broken(lambda w: w.update({"model.layers.0.self_attn.q_proj.bias": np.ones(32, "f4")})),
        "unexpected tensors: 'model.layers.0.self_attn.q_proj.bias'",
    ),
    "transposed": (
        broken(lambda w: w.update({"model.layers.0.mlp.up_proj.weight": np.ones((24, 40), "f4")})),
        "tensor 'model.layers.0.mlp.up_proj.weight': shape must be [40, 24], not [24, 40]",
    ),
    "integers": (
        broken(lambda w: w.update({"model.norm.weight": np.ones(24, "i4")})),
        "tensor 'model.norm.weight': dtype must be one of F32, F16, BF16, not I32",
    ),
    "a head that is not tied": (
        broken(lambda w: w.update({"lm_head.weight": w["model.embed_tokens.weight"] + 1})),
        "tensor 'lm_head.weight' differs from 'model.embed_tokens.weight', to which it is tied",
    ),
    "inv_freq of no layer": (
        broken(lambda w: w.update({"model.layers.2.self_attn.rotary_emb.inv_freq": np.ones(4, "f4")})),
        "unexpected tensors: 'model.layers.2.self_attn.rotary_emb.inv_freq'",
    ),
    "inv_freq mis-shaped": (
        broken(lambda w: w.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, "f4")})),
        "unexpected tensors",
    ),
}


@pytest.mark.parametrize("case", WRONG_TENSORS)
def test_wrong_tensors_are_named(case: str, tmp_path: Path) -> None:
    weights, message = WRONG_TENSORS[case]
    save_file(weights, tmp_path / WEIGHTS_NAME)
    with pytest.raises(ArtifactError, match=re.escape(message)):
        open_weights(tmp_path, toy())


def test_what_the_other_tensors_say_already_is_accepted(tmp_path: Path) -> None:
    weights = toy_weights(toy())
    extra = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(4, "f4") for i in range(2)}
    save_file({**weights, **extra, "lm_head.weight": weights["model.embed_tokens.weight"]}, tmp_path / WEIGHTS_NAME)
    assert list(load_weights(tmp_path, toy())) == list(toy().tensor_shapes())
    with pytest.raises(ArtifactError, match="unexpected tensors"):  # without RoPE nothing says what they are
        open_weights(tmp_path, toy(pos_encoding="alibi"))


def test_an_untied_head_is_needed(tmp_path: Path) -> None:
    untied = toy(tie_word_embeddings=False)
    save_file(toy_weights(toy()), tmp_path / WEIGHTS_NAME)
    with pytest.raises(ArtifactError, match=r"missing tensors: 'lm_head\.weight'"):
        open_weights(tmp_path, untied)


def test_a_hostile_number_of_layers_costs_nothing(tmp_path: Path) -> None:
    save_file(toy_weights(toy()), tmp_path / WEIGHTS_NAME)
    with pytest.raises(ArtifactError, match="20 tensors cannot fill num_hidden_layers=1000000000000"):
        open_weights(tmp_path, toy(num_hidden_layers=10**12))


# ---- shards -----------------------------------------------------------------------------------------------------


def write_index(folder: Path, values: Any) -> None:
    (folder / INDEX_NAME).write_text(json.dumps(values))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A folder with toy weights in two shards and their index."""
    weights = list(toy_weights(toy()).items())
    parts = {"model-00001-of-00002.safetensors": weights[:9], "model-00002-of-00002.safetensors": weights[9:]}
    for file, part in parts.items():
        save_file(dict(part), tmp_path / file)
    weight_map = {name: file for file, part in parts.items() for name, _ in part}
    write_index(tmp_path, {"metadata": {"total_size": 1}, "weight_map": weight_map})
    return tmp_path


def remap(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    index = read_json(folder / INDEX_NAME)
    change(index["weight_map"])
    write_index(folder, index)


def test_shards_load_as_one(sharded: Path) -> None:
    for name, weight in load_weights(sharded, toy()).items():
        np.testing.assert_array_equal(weight, toy_weights(toy())[name])


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/etc/x.safetensors",
        "a/b.safetensors",
        "..",
        "",
        ".safetensors",
        ".x.safetensors",
        "a\\b.safetensors",
        "x.safetensors\0",
        "x.safetensors\n",
        "pytorch_model.bin",
        5,
        None,
        ["x.safetensors"],
    ],
)
def test_an_index_cannot_point_elsewhere(name: Any, sharded: Path) -> None:
    remap(sharded, lambda weights: weights.update({"model.norm.weight": name}))
    with pytest.raises(ArtifactError, match=r"must map to a plain \.safetensors file name"):
        open_weights(sharded, toy())


def test_index_and_shards_must_agree(sharded: Path) -> None:
    remap(sharded, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(ArtifactError, match=r"weight_map lacks tensors of .*: 'model\.norm\.weight'"):
        open_weights(sharded, toy())
    remap(sharded, lambda weights: weights.update({"model.norm.weight": "model-00001-of-00002.safetensors"}))
    with pytest.raises(ArtifactError, match=r"model-00001-of-00002\.safetensors holds no tensor 'model\.norm\.weight'"):
        open_weights(sharded, toy())
    remap(sharded, lambda weights: weights.update({"model.norm.weight": "model-00003-of-00003.safetensors"}))
    with pytest.raises(ArtifactError, match=r"model-00003-of-00003\.safetensors: cannot be read: No such file"):
        open_weights(sharded, toy())


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first = sharded / "model-00001-of-00002.safetensors"
    file = SafetensorsFile(first)
    save_file(
        {name: file.array(name).copy() for name in file.tensors} | {"model.norm.weight": np.ones(24, "f4")}, first
    )
    with pytest.raises(ArtifactError, match=r"lacks tensors of model-00001-of-00002\.safetensors: 'model\.norm"):
        open_weights(sharded, toy())


@pytest.mark.parametrize("index", [{}, {"weight_map": {}}, {"weight_map": []}, {"weight_map": None}])
def test_an_index_without_a_map_is_refused(index: dict[str, Any], sharded: Path) -> None:
    write_index(sharded, index)
    with pytest.raises(ArtifactError, match="weight_map must be an object"):
        open_weights(sharded, toy())


def test_one_file_or_an_index_but_not_both_nor_neither(sharded: Path, tmp_path: Path) -> None:
    shutil.copy(sharded / "model-00001-of-00002.safetensors", sharded / WEIGHTS_NAME)
    with pytest.raises(ArtifactError, match="holds both"):
        open_weights(sharded, toy())
    with pytest.raises(ArtifactError, match="no such folder"):
        open_weights(tmp_path / "none", toy())
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "pytorch_model.bin").touch()
    with pytest.raises(ArtifactError, match=r"holds neither model\.safetensors nor model\.safetensors\.index\.json"):
        open_weights(tmp_path / "empty", toy())
