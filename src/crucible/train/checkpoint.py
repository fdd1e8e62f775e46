"""Checkpoints: a folder per saved step, complete from the moment its name exists, and two links into them.

    RUN/checkpoints/step-00000500/model.safetensors       parameters, f32, by the model's state_dict names
                                  optimizer.safetensors   optimizer state, `exp_avg.NAME` and so on
                                  state.json              model config, step, losses, loader position, random state
                    last -> step-00000500                 the newest
                    best -> step-00000450                 lowest validation loss among those saved

A folder is written under a temporary name, synced, and renamed; only then do the links move and older folders go.
Everything but the folder's rename can be redone from what is on disk, and is, after a save and before a resume
alike: a kill at any point in between costs nothing.
"""

from __future__ import annotations

import base64
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Final, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from crucible.config import ConfigError, ModelConfig
from crucible.errors import CrucibleError
from crucible.files import replace_link, sync_file, sync_folder, write_json

Which = Literal["best", "last"]

FORMAT: Final = 1
MODEL_FILE: Final = "model.safetensors"
OPTIMIZER_FILE: Final = "optimizer.safetensors"
STATE_FILE: Final = "state.json"
_STEP_FOLDER: Final = re.compile(r"step-(\d{8,})")
_TEMPORARY: Final = ".tmp-"


class CheckpointError(CrucibleError):
    """A checkpoint that cannot be found, read or written: the message names the file."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingState:
    """Where a run stands after `step` updates, apart from its tensors."""

    step: int
    tokens: int
    """Targets trained on so far; padding is not counted."""
    val_loss: float | None
    """Nats per token after this step, or None where the run was interrupted between evaluations."""
    best_step: int | None
    """The saved step of the lowest validation loss, this one included; None before the first evaluation."""
    best_val_loss: float | None
    loader: Mapping[str, int]
    """`LoaderState.to_dict()` of the next batch."""
    rng: Mapping[str, str]
    """`capture_rng()`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint read back, apart from its optimizer (`load_optimizer`)."""

    path: Path
    model_config: ModelConfig
    tensors: dict[str, Tensor]
    """Parameters by the torch model's names, f32, on the CPU."""
    state: TrainingState


# ---- writing --------------------------------------------------------------------------------------------------------


def save(
    run: Path,
    *,
    model_config: ModelConfig,
    tensors: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: TrainingState,
) -> Path:
    """Writes a checkpoint into a run folder, makes it `last`, and `best` where `state` says so.

    Returns its folder. Older folders that neither link points to are removed. Needs room for one checkpoint more than
    the run keeps, which is two.

    Raises:
        CheckpointError: it could not be written (disk full, no permission); what was there before is untouched.
    """
    checkpoints = run / "checkpoints"
    final = checkpoints / f"step-{state.step:08d}"
    temporary = checkpoints / f"{_TEMPORARY}{final.name}"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        write_tensors(temporary, tensors, optimizer)
        write_json(temporary / STATE_FILE, {"format": FORMAT, **asdict(state), "model": model_config.to_dict()})
        temporary.rename(final)
        sync_folder(checkpoints)
        _tidy(run)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"cannot save {final}: {error}") from error
    return final


def write_tensors(folder: Path, tensors: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]) -> None:
    """Makes a folder with a checkpoint's two tensor files, on disk when it returns. Raises OSError, SafetensorError."""
    folder.mkdir(parents=True)
    for name, content in ((MODEL_FILE, tensors), (OPTIMIZER_FILE, optimizer)):
        save_file({key: tensor.detach().cpu().contiguous() for key, tensor in content.items()}, folder / name)
        # The library makes its files readable by their owner alone; what the folder grants to others they get too.
        (folder / name).chmod(folder.stat().st_mode & 0o666)
        sync_file(folder / name)


def repair(run: Path) -> None:
    """Finishes what a kill or a power cut in the middle of a save left open. Raises CheckpointError."""
    try:
        _tidy(run)
    except OSError as error:
        raise CheckpointError(f"cannot repair {run / 'checkpoints'}: {error}") from error


def _tidy(run: Path) -> None:
    """Makes links and folders what the newest complete checkpoint says."""
    checkpoints = run / "checkpoints"
    saved = [path for path in _children(checkpoints) if _STEP_FOLDER.fullmatch(path.name)]
    saved.sort(key=lambda path: int(path.name.removeprefix("step-")))
    if saved:
        state, _ = _read_state(saved[-1])
        _point(checkpoints / "last", saved[-1].name)
        if state.best_step is not None and checkpoints / f"step-{state.best_step:08d}" in saved:
            _point(checkpoints / "best", f"step-{state.best_step:08d}")
    kept = {link.readlink().name for link in (checkpoints / "last", checkpoints / "best") if link.is_symlink()}
    for folder in saved:
        if folder.name not in kept:
            # Renamed before it is emptied: a kill in between must not leave half a checkpoint under a real name.
            folder.rename(folder.with_name(_TEMPORARY + folder.name))
    for leftover in _children(checkpoints):
        if leftover.name.startswith(_TEMPORARY):
            shutil.rmtree(leftover) if leftover.is_dir() and not leftover.is_symlink() else leftover.unlink()


def capture_rng() -> dict[str, str]:
    """State of torch's generators, the CPU's and those of all CUDA devices, base64 by device name."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states |= {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return {device: base64.b64encode(state.numpy().tobytes()).decode() for device, state in states.items()}


def restore_rng(rng: Mapping[str, str]) -> None:
    """The inverse of `capture_rng`; generators of devices that are not here are left out."""
    for device, text in rng.items():
        state = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
        if device == "cpu":
            torch.set_rng_state(state)
        elif torch.cuda.is_available() and int(device.removeprefix("cuda:")) < torch.cuda.device_count():
            torch.cuda.set_rng_state(state, device)


# ---- reading --------------------------------------------------------------------------------------------------------


def resolve(path: Path, which: Which = "best") -> Path:
    """The checkpoint folder that a path means: itself if it is one, else the `best` or `last` of a run folder.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(path)
    if (path / STATE_FILE).is_file():
        return path.resolve()
    for link in (path / "checkpoints" / which, path / which):
        if (link / STATE_FILE).is_file():
            return link.resolve()
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    other: Which = "last" if which == "best" else "best"
    if (path / "checkpoints" / other / STATE_FILE).is_file():
        raise CheckpointError(f"{path} has no {which!r} checkpoint yet, but a {other!r} one")
    raise CheckpointError(f"{path} is neither a checkpoint (no {STATE_FILE}) nor a run that has saved one")


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint folder (see `resolve`), all but its optimizer.

    Raises:
        CheckpointError: a file is missing or malformed, or the tensors are not those of the model config.
    """
    path = Path(path)
    state, config = _read_state(path)
    tensors = _read_tensors(path / MODEL_FILE)
    expected = {name.removeprefix("model."): shape for name, shape in config.tensor_shapes().items()}
    for name in expected.keys() | tensors.keys():
        found = (tuple(tensors[name].shape), tensors[name].dtype) if name in tensors else "missing"
        wanted = (expected[name], torch.float32) if name in expected else "not part of the model"
        if found != wanted:
            raise CheckpointError(f"{path / MODEL_FILE}: tensor {name} is {found}, the config says {wanted}")
    return Checkpoint(path=path, model_config=config, tensors=tensors, state=state)


def load_optimizer(path: Path) -> dict[str, Tensor]:
    """Reads a checkpoint's optimizer tensors, on the CPU. Raises CheckpointError as `load`."""
    return _read_tensors(Path(path) / OPTIMIZER_FILE)


# ---- parts ----------------------------------------------------------------------------------------------------------


def _read_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _read_state(folder: Path) -> tuple[TrainingState, ModelConfig]:
    path = folder / STATE_FILE
    try:
        values = json.loads(path.read_bytes())
        if values.get("format") != FORMAT:
            raise CheckpointError(f"{path}: format {values.get('format')!r}, this version reads {FORMAT}")
        config = ModelConfig.from_dict(values["model"])
        return TrainingState(**{field.name: values[field.name] for field in fields(TrainingState)}), config
    except KeyError as error:
        raise CheckpointError(f"{path}: missing key {error}") from error
    except (OSError, json.JSONDecodeError, AttributeError, TypeError, ConfigError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error


def _point(link: Path, target: str) -> None:
    if not (link.is_symlink() and link.readlink() == Path(target)):
        replace_link(link, target)


def _children(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []
