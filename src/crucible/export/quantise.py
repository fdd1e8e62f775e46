"""An artifact made into one whose matrices are int8: a quarter of the bytes, for the engine alone. Needs no torch."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

import crucible
from crucible.engine import runner
from crucible.engine.artifact import (
    CONFIG_NAME,
    GENERATION_NAME,
    PROVENANCE_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    ArtifactError,
    config_to_json,
    declares_int8,
    generation_to_json,
    read_config,
    read_generation,
    read_json,
)
from crucible.engine.quant import Int8Weight, Weight, convert, dense
from crucible.engine.reference import ReferenceBackend
from crucible.engine.weights import SCALES, WEIGHTS_NAME, load_stored_weights, load_weights
from crucible.export.target import check_target, new_artifact
from crucible.files import write_json

KEPT_FILES: Final = (TOKENIZER_NAME, TOKENIZER_CONFIG_NAME, "chat_template.jinja")
"""What is copied as it is, where it is there."""

CHECK_LENGTHS: Final = (1, 17, 130)
"""Sequences that `verify_int8` runs on the reference backend, which is slow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Int8Check:
    """How far the logits of an int8 artifact are from those of the artifact it was made from.

    Attributes:
        lengths: tokens of each sequence.
        max_relative_error: largest over all positions of max |a - b| / max |b|, both over the vocabulary.
        top1_agreement: part of the positions at which both have the same likeliest token.
    """

    lengths: tuple[int, ...]
    max_relative_error: float
    top1_agreement: float

    def __str__(self) -> str:
        """One line for people."""
        return (
            f"int8 tensors are those of the source, bit for bit; their logits differ by at most "
            f"{self.max_relative_error:.1e} relative and have the same likeliest token at {self.top1_agreement:.1%} "
            f"of {sum(self.lengths)} random positions"
        )


def export_int8(
    source: Path, out: Path, *, which: Literal["best", "last"] = "best", force: bool = False
) -> tuple[Path, Int8Check]:
    """Writes the int8 artifact of a run, a checkpoint or an artifact, and compares it with what it was made from.

    A run or a checkpoint needs torch; it is first exported in f32 beside `out`, for as long as this takes.

    Args:
        source: a run's folder, of which `which` is taken, a checkpoint's, or an artifact's (`quantise_artifact`).
        out: the folder to make; with `force` an artifact of ours that stands there is replaced.

    Raises:
        ArtifactError, CheckpointError, TrainError: as `quantise_artifact` and `export_checkpoint`.
    """
    source, out = Path(source), Path(out)
    if not (source / "checkpoints").is_dir() and not (source / "state.json").is_file():
        return quantise_artifact(source, out, force=force), verify_int8(out, source)
    from crucible.export.artifact import export_checkpoint

    check_target(out, force=force)
    existing = next(folder for folder in out.resolve().parents if folder.is_dir())
    with tempfile.TemporaryDirectory(prefix=".tmp-", dir=existing) as folder:
        plain = export_checkpoint(source, Path(folder) / "f32", which=which)
        return quantise_artifact(plain, out, force=force), verify_int8(out, plain)


def quantise_artifact(source: Path, out: Path, *, force: bool = False) -> Path:
    """Writes an artifact's int8 form and returns its folder, which appears complete or not at all.

    Args:
        source: an artifact, or a Hugging Face folder that is one; f32, f16 or bf16.
        out: as `export_int8`.

    Raises:
        ArtifactError: the source is malformed or int8 already, or `out` exists and may not be replaced or written.
    """
    source = Path(source)
    config, generation = read_config(source), read_generation(source)
    if declares_int8(source):
        raise ArtifactError(f"{source}: its matrices are int8 already")
    with new_artifact(out, force=force) as folder:
        stored = _stored_arrays(convert(config, load_weights(source, config), "int8"))
        save_file(stored, folder / WEIGHTS_NAME)
        eos = generation.eos_token_ids
        values = config_to_json(
            config, dtype="int8", bos_token_id=generation.bos_token_id, eos_token_id=eos[0] if eos else None
        )
        write_json(folder / CONFIG_NAME, values)
        write_json(folder / GENERATION_NAME, generation_to_json(generation))
        write_json(folder / PROVENANCE_NAME, _provenance(source))
        for name in KEPT_FILES:
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
    return Path(out)


def verify_int8(artifact: Path, source: Path, *, lengths: Iterable[int] = CHECK_LENGTHS) -> Int8Check:
    """Reads an int8 artifact back and compares it with its source: every tensor, then logits of random tokens.

    The size of the difference is reported and not judged: what int8 costs in cross-entropy is for `crucible eval`.

    Raises:
        ArtifactError: a tensor is not the source's in int8, bit for bit, or the configurations differ.
    """
    config = read_config(artifact)
    if config != read_config(source):
        raise ArtifactError(f"{artifact}: its configuration is not that of {source}")
    plain, found = load_weights(source, config), load_stored_weights(artifact, config)
    wanted = _stored_arrays(convert(config, plain, "int8"))
    for name, array in _stored_arrays(found).items():
        if name not in wanted or array.tobytes() != wanted[name].tobytes():
            raise ArtifactError(f"{artifact}: tensor {name!r} is not that of {source} in int8")
    lengths = tuple(sorted({min(length, config.max_position_embeddings) for length in lengths}))
    backends = [
        ReferenceBackend(config, weights)
        for weights in ({name: dense(weight) for name, weight in found.items()}, plain)
    ]
    rng = np.random.default_rng(0)
    largest, agreed = 0.0, 0
    for length in lengths:
        ids = rng.integers(config.vocab_size, size=length).tolist()
        found_TV, wanted_TV = (runner.logits(backend, ids) for backend in backends)
        error_T = np.abs(found_TV - wanted_TV).max(axis=-1) / np.abs(wanted_TV).max(axis=-1)
        largest = max(largest, float(error_T.max()))
        agreed += int((found_TV.argmax(axis=-1) == wanted_TV.argmax(axis=-1)).sum())
    return Int8Check(lengths=lengths, max_relative_error=largest, top1_agreement=agreed / sum(lengths))


def _stored_arrays(weights: dict[str, Weight]) -> dict[str, npt.NDArray[Any]]:
    """Arrays by the names that the file has for them."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, weight in weights.items():
        if isinstance(weight, Int8Weight):
            arrays |= {name: weight.values, name + SCALES: weight.scales}
        else:
            arrays[name] = dense(weight)
    return arrays


def _provenance(source: Path) -> dict[str, Any]:
    """The source's own, with what was done to it. Nothing needs this to run the model."""
    path = source / PROVENANCE_NAME
    values = read_json(path) if path.is_file() else {"quantised_from": source.resolve().name}
    versions = {"crucible": crucible.__version__, "numpy": version("numpy"), "safetensors": version("safetensors")}
    return {**values, "dtype": "int8", "quantised_with": versions}
