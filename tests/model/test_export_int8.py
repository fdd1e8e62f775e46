"""Artifacts whose matrices are int8: what export writes, what the reader gives back, and what is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cells import axis_cells, toy
from safetensors.numpy import load_file, save_file
from toy_artifact import write_toy_artifact
from toy_weights import toy_weights

from crucible.config import ModelConfig
from crucible.engine.artifact import (
    ArtifactError,
    config_from_json,
    config_to_json,
    declares_int8,
    read_config,
    read_generation,
    read_json,
)
from crucible.engine.quant import Int8Weight, convert, dense, is_matrix
from crucible.engine.weights import SCALES, WEIGHTS_NAME, load_stored_weights, load_weights, open_weights
from crucible.export.artifact import export_checkpoint, verify
from crucible.export.inspect import inspect
from crucible.export.names import from_artifact
from crucible.export.quantise import export_int8, verify_int8, write_int8
from crucible.llm import LLM
from crucible.models import resolve
from crucible.tokenizer import Tokenizer
from crucible.train.checkpoint import TrainingState, save

VOCAB_SIZE = 320


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return write_toy_artifact(tmp_path / "plain")


@pytest.fixture
def int8(plain: Path, tmp_path: Path) -> Path:
    return write_int8(resolve(plain), tmp_path / "int8")


# ---- what is written and read back ------------------------------------------------------------------------------


@pytest.mark.parametrize("config", axis_cells())
def test_the_artifact_holds_the_int8_weights_of_its_source(config: ModelConfig, tmp_path: Path) -> None:
    changes = {key: value for key, value in config.to_dict().items() if key != "vocab_size"}
    plain = write_toy_artifact(tmp_path / "plain", **changes)
    out = write_int8(resolve(plain), tmp_path / "int8")
    config = read_config(out)
    assert config == read_config(plain)
    weights = load_weights(plain, config)
    wanted = convert(config, weights, "int8")
    found = load_stored_weights(out, config)
    assert list(found) == list(config.tensor_shapes())
    for name, weight in found.items():
        assert isinstance(weight, Int8Weight) == is_matrix(name)
        if isinstance(weight, Int8Weight):
            assert weight.chunk == wanted[name].chunk  # type: ignore[union-attr]
            assert not weight.values.flags.owndata
        assert dense(weight).tobytes() == dense(wanted[name]).tobytes()
        assert load_weights(out, config)[name].tobytes() == dense(wanted[name]).tobytes()
    verify_int8(out, resolve(plain))


def test_the_folder_keeps_what_the_source_says(plain: Path, int8: Path) -> None:
    assert declares_int8(int8)
    assert not declares_int8(plain)
    assert read_json(int8 / "config.json")["quantization_config"] == {
        "quant_method": "crucible",
        "format": "int8",
        "chunk_size": 128,
    }
    assert read_generation(int8) == read_generation(plain)
    provenance = read_json(int8 / "crucible.json")
    assert (provenance["quantised_from"], provenance["dtype"]) == ("plain", "int8")
    assert {path.name for path in int8.parent.iterdir()} == {"plain", "int8"}
    dtypes = {info.dtype for info in inspect(int8).tensors}
    assert dtypes == {"I8", "F32"}
    size = sum(array.nbytes for array in load_file(int8 / WEIGHTS_NAME).values())
    assert size < 0.5 * (plain / WEIGHTS_NAME).stat().st_size


def test_tokenizer_and_chat_template_come_along(plain: Path, tmp_path: Path) -> None:
    """Those of a Hugging Face folder: special tokens by name, several ends, a prefix, a template with odd line ends."""
    values = json.loads((plain / "tokenizer.json").read_text())
    end = next(token["content"] for token in values["added_tokens"])
    values["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": end, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {end: {"id": end, "ids": [VOCAB_SIZE - 21], "tokens": [end]}},
    }
    (plain / "tokenizer.json").write_text(json.dumps(values))
    (plain / "generation_config.json").write_text(json.dumps({"bos_token_id": 1, "eos_token_id": [2, 3]}))
    (plain / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<s>"}, "eos_token": end}))
    (plain / "chat_template.jinja").write_text("{{ messages }}\r\n ß", newline="")
    source = resolve(plain)
    found = resolve(write_int8(source, tmp_path / "int8"))
    assert source.prefix_ids
    for name in ("config", "generation", "special_tokens", "prefix_ids", "chat_template"):
        assert getattr(found, name) == getattr(source, name)
    assert found.tokenizer.sha256 == source.tokenizer.sha256


def test_the_engine_runs_it(plain: Path, int8: Path) -> None:
    config = read_config(plain)
    found, wanted = LLM(int8, backend="reference"), LLM(plain, backend="reference")
    assert found.config == config
    difference = np.abs(found.logits("It is") - wanted.logits("It is")).max()
    assert 0 < difference < 0.1 * np.abs(wanted.logits("It is")).max()


def test_a_run_is_exported_by_way_of_f32(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    run, config = tmp_path / "run", toy(vocab_size=VOCAB_SIZE)
    run.mkdir()
    Tokenizer.train(["a b"] * 2, 258).save(run)
    tensors = {from_artifact(name): torch.from_numpy(w) for name, w in toy_weights(config).items()}
    state = TrainingState(step=3, tokens=9, val_loss=2.5, best_step=3, best_val_loss=2.5, loader={}, rng={})
    checkpoint = save(run, model_config=config, tensors=tensors, optimizer={}, state=state)
    plain = export_checkpoint(run, tmp_path / "plain")
    for source in (run, checkpoint, plain):
        out = export_int8(source, tmp_path / "deep" / source.name)
        assert (out / WEIGHTS_NAME).read_bytes() == (tmp_path / "deep" / "run" / WEIGHTS_NAME).read_bytes()
        assert read_json(out / "crucible.json")["step"] == 3
    assert {path.name for path in tmp_path.iterdir()} == {"run", "plain", "deep"}
    with pytest.raises(ArtifactError, match="verify_int8"):
        verify(out, run)
    with pytest.raises(ArtifactError, match="exists"):
        export_int8(run, tmp_path / "plain")
    export_int8(run, tmp_path / "plain", force=True)
    assert declares_int8(tmp_path / "plain")


def test_transformers_refuses_the_folder(int8: Path) -> None:
    """A Llama configuration would be loaded with a warning, integers for weights."""
    with pytest.raises(ValueError, match="crucible"):
        transformers.AutoModelForCausalLM.from_pretrained(int8)


# ---- what is refused --------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], Any]) -> None:
    arrays = load_file(folder / WEIGHTS_NAME)
    change(arrays)
    save_file(arrays, folder / WEIGHTS_NAME)


UP = "model.layers.1.mlp.up_proj.weight"

BROKEN: dict[str, tuple[Callable[[dict[str, np.ndarray]], Any], str]] = {
    "no scales": (lambda a: a.pop(UP + SCALES), f"missing tensors: '{UP}.scales'"),
    "no values": (lambda a: a.pop(UP), f"missing tensors: '{UP}'"),
    "f32 values": (lambda a: a.update({UP: a[UP].astype("f4")}), f"tensor '{UP}': dtype must be I8, not F32"),
    "f16 scales": (
        lambda a: a.update({UP + SCALES: a[UP + SCALES].astype("f2")}),
        f"tensor '{UP}.scales': dtype must be F32, not F16",
    ),
    "an int8 norm": (
        lambda a: a.update({"model.norm.weight": np.ones(24, "i1")}),
        "tensor 'model.norm.weight': dtype must be one of F32, F16, BF16, not I8",
    ),
    "scales of a norm": (
        lambda a: a.update({"model.norm.weight.scales": np.ones((24, 1), "f4")}),
        "unexpected tensors: 'model.norm.weight.scales'",
    ),
    "scales of other chunks": (
        lambda a: a.update({UP + SCALES: np.ones((40, 2), "f4")}),
        f"tensor '{UP}.scales': shape must be [40, 1], not [40, 2]",
    ),
    "-128": (lambda a: a[UP].__setitem__((0, 0), -128), f"tensor '{UP}': values must be from -127 to 127"),
    "a negative scale": (lambda a: a[UP + SCALES].__setitem__(0, -1), "scales must be finite and not negative"),
    "a NaN scale": (lambda a: a[UP + SCALES].__setitem__(0, np.nan), "scales must be finite and not negative"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_an_inconsistent_artifact_is_refused_by_name(case: str, int8: Path) -> None:
    change, message = BROKEN[case]
    rewrite(int8, change)
    with pytest.raises(ArtifactError) as error:
        load_stored_weights(int8, read_config(int8))
    assert message in str(error.value)
    assert str(int8) in str(error.value)


def test_config_and_tensors_must_agree(plain: Path, int8: Path) -> None:
    config = read_config(plain)
    shutil.copyfile(plain / WEIGHTS_NAME, int8 / WEIGHTS_NAME)
    with pytest.raises(ArtifactError, match="missing tensors"):
        open_weights(int8, config)
    write_int8(resolve(plain), plain.parent / "other")
    shutil.copyfile(plain.parent / "other" / WEIGHTS_NAME, plain / WEIGHTS_NAME)
    with pytest.raises(ArtifactError, match="unexpected tensors"):
        open_weights(plain, config)


def test_a_config_that_declares_anything_else_is_refused() -> None:
    values = config_to_json(toy(), dtype="int8", bos_token_id=0, eos_token_id=0)
    assert config_from_json(values, "x") == toy()
    for change, message in (
        ({"model_type": "llama", "architectures": None}, "model_type must be crucible"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config must be absent or"),
        ({"quantization_config": {**values["quantization_config"], "chunk_size": 64}}, "quantization_config must be"),
        ({"quantization_config": True}, "quantization_config must be absent or"),
    ):
        changed = {**values, **change}
        if changed["model_type"] == "llama":
            axes = ("attention", "pos_encoding", "activation", "norm", "norm_placement")
            changed = {key: value for key, value in changed.items() if key not in axes}
        with pytest.raises(ArtifactError, match=message):
            config_from_json(changed, "x")


def test_int8_is_not_made_of_int8_and_a_difference_is_found(plain: Path, int8: Path, tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="int8 already"):
        write_int8(resolve(int8), tmp_path / "again")
    with pytest.raises(ArtifactError, match="exists"):
        write_int8(resolve(plain), int8)
    rewrite(int8, lambda arrays: arrays[UP].__setitem__((3, 5), 99))
    with pytest.raises(ArtifactError, match=f"tensor '{UP}' is not that of"):
        verify_int8(int8, resolve(plain))
    values = json.loads((int8 / "config.json").read_text())
    (int8 / "config.json").write_text(json.dumps({**values, "rope_theta": 5.0}))
    with pytest.raises(ArtifactError, match="configuration is not that of"):
        verify_int8(int8, resolve(plain))
