"""A model made into an artifact whose matrices are int8: a quarter of the bytes, for our engine; without torch."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy.typing as npt
from safetensors.numpy import save_file

import crucible
from crucible.engine.artifact import (
    CONFIG_NAME,
    GENERATION_NAME,
    PROVENANCE_NAME,
    TOKENIZER_CONFIG_NAME,
    ArtifactError,
    config_to_json,
    generation_to_json,
    read_config,
    read_json,
)
from crucible.engine.quant import Int8Weight, Weight, convert, dense
from crucible.engine.weights import SCALES, WEIGHTS_NAME, load_stored_weights
from crucible.export.target import check_target, new_artifact
from crucible.files import write_json
from crucible.models import CHAT_TEMPLATE_NAME, LoadedModel, resolve


def export_int8(source: str | Path, out: Path, *, which: Literal["best", "last"] = "best", force: bool = False) -> Path:
    """Writes the int8 artifact of a run, a checkpoint or any model, reads it back and returns its folder.

    A run or a checkpoint needs torch; it is first exported in f32 beside `out`, for as long as this takes.

    Args:
        source: a run's folder, of which `which` is taken, a checkpoint's, or a model as `models.resolve` finds it.
        out: the folder to make, which appears complete or not at all; with `force` an artifact of ours that stands
            there is replaced.

    Raises:
        ArtifactError: the source is malformed or int8 already, or `out` exists and may not be replaced or written.
        CheckpointError, TrainError, TokenizerError: the source is malformed.
    """
    path, out = Path(source), Path(out)
    check_target(out, force=force)  # before the work
    if not (path / "checkpoints").is_dir() and not (path / "state.json").is_file():
        loaded = resolve(source)
        verify_int8(write_int8(loaded, out, origin=path, force=force), loaded)
        return out
    from crucible.export.artifact import export_checkpoint

    existing = next(folder for folder in out.resolve().parents if folder.is_dir())
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=existing) as folder:
        plain = export_checkpoint(path, Path(folder) / path.resolve().name, which=which)
        loaded = resolve(plain)
        verify_int8(write_int8(loaded, out, origin=plain, force=force), loaded)
    return out


def write_int8(loaded: LoadedModel, out: Path, *, origin: Path | None = None, force: bool = False) -> Path:
    """Writes a model's int8 form, tokenizer and chat template with it, and returns its folder.

    Args:
        loaded: the model.
        out, force: as `export_int8`.
        origin: the folder it came from, whose crucible.json is taken over if there is one.

    Raises:
        ArtifactError: the model is int8 already, or `out` exists and may not be replaced or written.
    """
    config, generation = loaded.config, loaded.generation
    if any(isinstance(weight, Int8Weight) for weight in loaded.weights.values()):
        raise ArtifactError(f"{loaded.name}: its matrices are int8 already")
    with new_artifact(out, force=force) as folder:
        save_file(_stored_arrays(convert(config, loaded.weights, "int8")), folder / WEIGHTS_NAME)
        eos = generation.eos_token_ids
        values = config_to_json(
            config, dtype="int8", bos_token_id=generation.bos_token_id, eos_token_id=eos[0] if eos else None
        )
        write_json(folder / CONFIG_NAME, values)
        write_json(folder / GENERATION_NAME, generation_to_json(generation))
        write_json(folder / TOKENIZER_CONFIG_NAME, dict(loaded.special_tokens))
        write_json(folder / PROVENANCE_NAME, _provenance(loaded.name, origin))
        loaded.tokenizer.save(folder)
        if loaded.chat_template is not None:
            (folder / CHAT_TEMPLATE_NAME).write_text(loaded.chat_template, encoding="utf-8", newline="")
    return Path(out)


def verify_int8(artifact: Path, source: LoadedModel) -> None:
    """Reads an int8 artifact back and compares it with its source. What int8 costs is for `crucible eval` to show.

    Raises:
        ArtifactError: a tensor is not the source's in int8, bit for bit, or the configurations differ.
    """
    config = read_config(artifact)
    if config != source.config:
        raise ArtifactError(f"{artifact}: its configuration is not that of {source.name}")
    wanted = _stored_arrays(convert(config, source.weights, "int8"))
    for name, array in _stored_arrays(load_stored_weights(artifact, config)).items():
        if name not in wanted or array.tobytes() != wanted[name].tobytes():
            raise ArtifactError(f"{artifact}: tensor {name!r} is not that of {source.name} in int8")


def _stored_arrays(weights: Mapping[str, Weight]) -> dict[str, npt.NDArray[Any]]:
    """Arrays by the names that the file has for them."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, weight in weights.items():
        if isinstance(weight, Int8Weight):
            arrays |= {name: weight.values, name + SCALES: weight.scales}
        else:
            arrays[name] = dense(weight)
    return arrays


def _provenance(name: str, origin: Path | None) -> dict[str, Any]:
    """The source's own, with what was done to it. Nothing needs this to run the model."""
    path = None if origin is None else origin / PROVENANCE_NAME
    values = read_json(path) if path is not None and path.is_file() else {"quantised_from": name}
    versions = {"crucible": crucible.__version__, "numpy": version("numpy"), "safetensors": version("safetensors")}
    return {**values, "dtype": "int8", "quantised_with": versions}
