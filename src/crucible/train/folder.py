"""The run folder: what it holds, who may write it, and config.json, from which the run can be made again.

RUN/config.json      TrainConfig, data, versions, commit, device
    tokenizer.json   of the data, so that a checkpoint never goes without
    log.csv          one row per step
    checkpoints/     see checkpoint.py
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

import crucible
from crucible import hardware
from crucible.config import ConfigError
from crucible.files import write_file, write_json
from crucible.train.config import TrainConfig, TrainError
from crucible.train.inputs import Inputs
from crucible.train.step import Learner

try:
    import fcntl
except ImportError:  # a system without it goes unlocked
    fcntl = None  # type: ignore[assignment]

FORMAT: Final = 1
CONFIG_FILE: Final = "config.json"
TOKENIZER_FILE: Final = "tokenizer.json"
LOG_FILE: Final = "log.csv"
_PACKAGES: Final = ("numpy", "safetensors", "tokenizers", "torch")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """What config.json of an existing run says."""

    config: TrainConfig
    """As it runs: `steps` is a number."""
    asked: TrainConfig
    """As it was asked for, with `max_minutes` where that was given instead."""
    data: dict[str, Any]
    environment: dict[str, Any]


def check_vacant(run: Path) -> None:
    """Whether a new run may be made in a folder: it is absent, empty, or holds what a start cut short left there.

    Raises:
        TrainError: it holds a run, or files of something else.
    """
    if (run / CONFIG_FILE).exists():
        raise TrainError(f"{run} already holds a run: resume it (--resume) or give another folder")
    others = (
        [p.name for p in run.iterdir() if not p.name.startswith(".") and p.name != TOKENIZER_FILE]
        if run.exists()
        else []
    )
    if others:
        raise TrainError(f"{run} holds other files ({', '.join(sorted(others)[:3])}): give a new folder")


@contextmanager
def locked(run: Path) -> Iterator[None]:
    """Makes the folder if needed and keeps every other process from training in it, as long as this one lives.

    Raises:
        TrainError: another process trains in it, or the folder cannot be made.
    """
    try:
        run.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(run, os.O_RDONLY)
    except OSError as error:
        raise TrainError(f"cannot make the run folder {run}: {error.strerror}") from error
    try:
        _lock(descriptor, run)
        yield
    finally:
        os.close(descriptor)
        with suppress(OSError):  # not empty: something was made in it
            run.rmdir()


def _lock(descriptor: int, run: Path) -> None:
    if fcntl is None:
        return
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise TrainError(f"another process is training in {run}") from None


def create(config: TrainConfig, *, time_budget: Mapping[str, float] | None, inputs: Inputs, learner: Learner) -> None:
    """Writes tokenizer.json and, last, config.json, which makes the folder a run.

    `time_budget` is what was asked for (`max_minutes`, `warmup_steps`) and the timings that `config.steps` was first
    estimated from, None where steps were given.

    Raises:
        TrainError: the folder cannot be written.
    """
    try:
        if inputs.tokenizer is not None:
            write_file(config.run / TOKENIZER_FILE, inputs.tokenizer)
        write_json(
            config.run / CONFIG_FILE,
            {
                "format": FORMAT,
                "train": config.to_dict(),
                "time_budget": time_budget,
                "num_parameters": config.model.num_parameters(),
                "data": inputs.identity,
                "environment": environment(learner),
                "resumed_in": [],
            },
        )
    except OSError as error:
        raise TrainError(f"cannot write into {config.run}: {error.strerror}") from error


def update(config: TrainConfig, *, after_step: int = 0, environment: Mapping[str, Any] | None = None) -> None:
    """Puts a run's config into its config.json in place of the one there.

    `environment` is the one that the steps after `after_step` are made in, noted where it is not the run's first.
    Raises TrainError as `create`.
    """
    path = config.run / CONFIG_FILE
    try:
        values = json.loads(path.read_bytes()) | {"train": config.to_dict()}
        if environment is not None:
            values["resumed_in"] += [{"after_step": after_step, "environment": environment}]
        write_json(path, values)
    except OSError as error:
        raise TrainError(f"cannot write {path}: {error.strerror}") from error


def read(run: Path) -> StoredRun:
    """What an existing run was started with.

    Raises:
        TrainError: there is no run, or its config.json is malformed.
    """
    path = run / CONFIG_FILE
    if not path.exists():
        raise TrainError(f"{run} holds no run to resume (no {CONFIG_FILE})")
    try:
        values = json.loads(path.read_bytes())
        if values.get("format") != FORMAT:
            raise TrainError(f"{path}: format {values.get('format')!r}, this version reads {FORMAT}")
        config, budget = TrainConfig.from_dict(values["train"]), values["time_budget"]
        asked = (
            {} if budget is None else {key: budget[key] for key in ("max_minutes", "warmup_steps")} | {"steps": None}
        )
        return StoredRun(
            config=config,
            asked=dataclasses.replace(config, **asked),
            data=values["data"],
            environment=values["environment"],
        )
    except KeyError as error:
        raise TrainError(f"{path}: missing key {error}") from error
    except (OSError, json.JSONDecodeError, AttributeError, TypeError, ConfigError) as error:
        raise TrainError(f"cannot read {path}: {error}") from error


def environment(learner: Learner) -> dict[str, Any]:
    """Everything outside the config that a result may depend on, ready for JSON."""
    return {
        "versions": {"crucible": crucible.__version__, "python": platform.python_version()}
        | {package: importlib.metadata.version(package) for package in _PACKAGES},
        "git": git_state(),
        "device": {
            "type": learner.device.type,
            "name": learner.device_name,
            "dtype": learner.precision,
            "compiled": learner.is_compiled,
        },
        # The order of a CPU's sums depends on how many threads share them.
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": dataclasses.asdict(hardware.machine()),
    }


@cache
def git_state() -> dict[str, Any] | None:
    """Commit of this package's own repository and whether it has uncommitted changes; None for an installed package.

    Asked for once in a process, which goes on with the code it has imported.
    """
    package = Path(crucible.__file__).parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(package), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        # An installed package may lie inside somebody's repository without being part of it.
        git("ls-files", "--error-unmatch", "__init__.py")
        return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return None


def what_changed(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What is different between two environments and may change the bits of a result, in words."""
    pairs = {
        "device": (before["device"], after["device"]),
        "threads": (before["threads"], after["threads"]),
        "cpu_capability": (before["cpu_capability"], after["cpu_capability"]),
        "torch": (before["versions"]["torch"], after["versions"]["torch"]),
        "commit": (before["git"], after["git"]),
    }
    return [f"{name} was {old}, is {new}" for name, (old, new) in pairs.items() if old != new]
