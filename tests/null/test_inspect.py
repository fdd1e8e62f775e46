"""What `inspect` reports, and that it refuses whatever a load would refuse. No torch: see the last test."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import LINEAR, all_cells, toy
from gguf_bytes import toy_metadata, toy_tensors, write_gguf
from rich.console import Console
from safetensors.numpy import save_file
from toy_weights import toy_weights

from crucible.config import PRESETS, ModelConfig
from crucible.engine.artifact import ArtifactError, Generation, config_to_json, generation_to_json
from crucible.engine.weights import INDEX_NAME, WEIGHTS_NAME
from crucible.export.inspect import Inspection, inspect
from crucible.export.names import from_artifact, to_artifact
from crucible.tokenizer import Tokenizer

PROVENANCE = {"run": "demo", "step": 1200, "val_loss": 3.25, "data": {"name": "prose", "tokens": 10}}


def put(folder: Path, name: str, values: Any) -> None:
    (folder / name).write_text(json.dumps(values))


def write_artifact(folder: Path, config: ModelConfig, dtype: Any = "f4") -> Path:
    folder.mkdir(exist_ok=True)
    save_file({n: w.astype(dtype) for n, w in toy_weights(config).items()}, folder / WEIGHTS_NAME)
    put(folder, "config.json", config_to_json(config, dtype="f32", bos_token_id=5, eos_token_id=5))
    put(folder, "generation_config.json", generation_to_json(Generation(5, (5, 6), None)))
    put(folder, "crucible.json", PROVENANCE)
    return folder


def write_checkpoint(folder: Path, config: ModelConfig) -> Path:
    folder.mkdir(exist_ok=True, parents=True)
    save_file({from_artifact(n): w for n, w in toy_weights(config).items()}, folder / WEIGHTS_NAME)
    put(folder, "state.json", {"step": 7, "tokens": 99, "val_loss": None, "rng": "AAAA", "model": config.to_dict()})
    return folder


def rendered(inspection: Inspection, width: int = 200) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=True, color_system=None).print(inspection.render())
    return out.getvalue()


# ---- what it finds ----------------------------------------------------------------------------------------------


def test_a_gguf_file_is_described_as_a_model(tmp_path: Path) -> None:
    config = toy(vocab_size=320, rope_scaling=LINEAR)
    metadata = toy_metadata(config) | {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "x.gguf", metadata, toy_tensors(config, toy_weights(config)))
    found = inspect(path)
    assert (found.kind, found.config, found.end_ids) == ("GGUF file", config, (299,))
    assert [info.name for info in found.tensors] == list(config.tensor_shapes())
    text = rendered(found)
    assert "Llama: attention gqa" in text
    assert "rope_scaling linear by 4" in text
    assert "general.quantization_version  2" in text
    tensors = toy_tensors(config, toy_weights(config)) | {"other": (0, (1,), bytes(4))}
    with pytest.raises(ArtifactError, match=r"x\.gguf: unexpected tensor: 'other'"):
        inspect(write_gguf(path, metadata, tensors))


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({"qkv_bias": True}, "Qwen2: .*, qkv_bias$"),
        ({"qk_norm": True}, "Qwen3: .*, qk_norm$"),
        ({"o_bias": True}, "crucible: .*, o_bias$"),
    ],
    ids=str,
)
def test_a_family_is_named(changes: dict[str, Any], family: str, tmp_path: Path) -> None:
    text = rendered(inspect(write_artifact(tmp_path / "x", toy(**changes))))
    assert re.search(f"^architecture +{family}", re.sub(" +\n", "\n", text), re.MULTILINE)


@pytest.mark.parametrize("config", all_cells()[::5])
def test_an_artifact_is_described_from_its_config(config: ModelConfig, tmp_path: Path) -> None:
    found = inspect(write_artifact(tmp_path, config))
    assert (found.kind, found.config, found.end_ids) == ("artifact", config, (5, 6))
    assert {info.name: info.shape for info in found.tensors} == config.tensor_shapes()
    assert [info.name for info in found.tensors] == list(config.tensor_shapes())
    assert sum(info.nbytes for info in found.tensors) == 4 * config.num_parameters()
    assert found.bytes_on_disk == (tmp_path / WEIGHTS_NAME).stat().st_size
    assert found.provenance == PROVENANCE
    assert found.tokenizer is None


def test_the_report_has_what_a_reader_looks_for(tmp_path: Path) -> None:
    config = toy(vocab_size=300, norm="layernorm")
    folder = write_artifact(tmp_path, config, "f2")
    tokenizer = Tokenizer.train(["a rose is a rose is a rose"] * 2, 260)
    tokenizer.save(folder / "tokenizer.json")
    text = rendered(inspect(folder))
    for expected in (
        str(folder),
        "crucible: attention gqa, pos_encoding rope, activation swiglu, norm layernorm, norm_placement pre",
        "2 layers, hidden 24, intermediate 40, 4 heads and 2 for keys and values, each of 8",
        f"{config.num_parameters():,} ({config.num_non_embedding_parameters():,} outside embeddings)",
        f"{config.kv_bytes_per_token():,} bytes per token",
        "25: 25 F16",
        f"260 tokens, end of text 259, sha256 {tokenizer.sha256.hex()[:16]}",
        "5, 6",
        "demo",
        "3.25",
        "data.name",
        "prose",
        "model.layers.1.mlp.down_proj.weight",
        "24 x 40",
    ):
        assert expected in text, expected


def test_known_sizes_in_words(tmp_path: Path) -> None:
    """By hand: nano has 3 layers of 4 heads, one for keys and values, each of 64: 2 x 3 x 64 x 2 bytes."""
    config = PRESETS["nano"].vary(num_key_value_heads=1, attention="mqa", hidden_size=64, head_dim=64, vocab_size=67)
    text = rendered(inspect(write_artifact(tmp_path, config)))
    assert "768 bytes per token" in text


def test_sharded_artifacts_are_one(tmp_path: Path) -> None:
    config = toy()
    folder = write_artifact(tmp_path, config)
    weights = list(toy_weights(config).items())
    (folder / WEIGHTS_NAME).unlink()
    save_file(dict(weights[:8]), folder / "a.safetensors")
    save_file(dict(weights[8:]), folder / "b.safetensors")
    weight_map = {name: "a.safetensors" if i < 8 else "b.safetensors" for i, (name, _) in enumerate(weights)}
    put(folder, INDEX_NAME, {"weight_map": weight_map})
    found = inspect(folder)
    assert len(found.tensors) == len(weights)
    assert found.bytes_on_disk == sum((folder / f).stat().st_size for f in ("a.safetensors", "b.safetensors"))


def test_a_checkpoint_is_described_from_its_state(tmp_path: Path) -> None:
    found = inspect(write_checkpoint(tmp_path / "step-00000007", toy()))
    assert (found.kind, found.config) == ("checkpoint", toy())
    assert found.provenance == {"step": 7, "tokens": 99, "val_loss": None}
    assert [to_artifact(info.name) for info in found.tensors] == list(toy().tensor_shapes())


def test_a_single_file_is_listed_with_its_metadata(tmp_path: Path) -> None:
    path = tmp_path / "any.safetensors"
    save_file({"b": np.zeros((2, 3), "f8"), "a": np.zeros((), "i4")}, path, metadata={"note": "hello"})
    found = inspect(path)
    assert found.kind == "safetensors file"
    assert [(info.name, info.shape, info.dtype) for info in found.tensors] == [("b", (2, 3), "F64"), ("a", (), "I32")]
    text = rendered(found)
    assert "hello" in text
    assert "scalar" in text


def test_nothing_in_a_file_reaches_the_terminal_as_a_command(tmp_path: Path) -> None:
    path = tmp_path / "any.safetensors"
    save_file({"\x1b[2J[red]w[/red]": np.zeros(2, "f4")}, path, metadata={"\x1b]0;t\x07": "\u202eevil[bold]"})
    text = rendered(inspect(path))
    assert "\x1b" not in text.replace("\x1b[1m", "").replace("\x1b[0m", "")
    assert "\u202e" not in text
    assert "\x07" not in text
    assert "[red]w[/red]" in text


def test_a_narrow_terminal_shows_whole_names(tmp_path: Path) -> None:
    text = rendered(inspect(write_artifact(tmp_path, toy())), width=40)
    assert "post_attention" in "".join(line.split()[0] for line in text.splitlines() if line.strip())


# ---- what it refuses --------------------------------------------------------------------------------------------


def cut(folder: Path) -> None:
    path = folder / WEIGHTS_NAME
    path.write_bytes(path.read_bytes()[:-4])


def claim_all(folder: Path) -> None:
    path = folder / WEIGHTS_NAME
    path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])


def edit(name: str, **changes: Any) -> Callable[[Path], None]:
    return lambda folder: put(folder, name, {**json.loads((folder / name).read_text()), **changes})


MALFORMED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "data cut": (cut, "model.safetensors: tensor"),
    "header length 2^64-1": (claim_all, "model.safetensors: header length 18446744073709551615 is over the limit"),
    "no weights": (lambda folder: (folder / WEIGHTS_NAME).unlink(), "holds neither model.safetensors"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json: no such file"),
    "unknown key": (edit("config.json", sliding_window=8), "config.json: unknown key: 'sliding_window'"),
    "another shape": (edit("config.json", intermediate_size=48), "shape must be [48, 24], not [40, 24]"),
    "more layers": (edit("config.json", num_hidden_layers=3), "missing tensors: 'model.layers.2"),
    "bad end id": (edit("generation_config.json", eos_token_id="</s>"), "generation_config.json: eos_token_id must be"),
    "bad provenance": (lambda folder: (folder / "crucible.json").write_text("{"), "crucible.json: not valid JSON"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_artifact_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, message = MALFORMED[case]
    change(write_artifact(tmp_path, toy()))
    with pytest.raises(ArtifactError) as refused:
        inspect(tmp_path)
    assert message in str(refused.value)
    assert str(tmp_path) in str(refused.value)


BAD_CHECKPOINTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no model": (edit("state.json", model=None), "state.json: missing key: model"),
    "model lacks a key": (edit("state.json", model={"vocab_size": 5}), "state.json: model: missing keys:"),
    "another shape": (edit("state.json", model=toy(hidden_size=32).to_dict()), "by state.json (67, 32)"),
    "too many layers": (edit("state.json", model=toy(num_hidden_layers=10**12).to_dict()), "too few tensors"),
    "no weights": (lambda folder: (folder / WEIGHTS_NAME).unlink(), "model.safetensors: cannot be read"),
}


@pytest.mark.parametrize("case", BAD_CHECKPOINTS)
def test_a_malformed_checkpoint_is_refused_by_name(case: str, tmp_path: Path) -> None:
    change, message = BAD_CHECKPOINTS[case]
    change(write_checkpoint(tmp_path, toy()))
    with pytest.raises(ArtifactError) as refused:
        inspect(tmp_path)
    assert message in str(refused.value)


def test_a_run_and_a_wrong_path_say_what_to_do(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "run" / "checkpoints" / "best", toy())
    with pytest.raises(ArtifactError, match=r"is a run's folder: inspect one of its checkpoints, .*checkpoints/best"):
        inspect(tmp_path / "run")
    with pytest.raises(ArtifactError, match="no such file or folder"):
        inspect(tmp_path / "none")


def test_inspecting_needs_no_torch(tmp_path: Path) -> None:
    folder = write_artifact(tmp_path, toy())
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import rich; from crucible.export.inspect import inspect\n"
        f"rich.print(inspect({str(folder)!r}).render())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "model.norm.weight" in done.stdout
