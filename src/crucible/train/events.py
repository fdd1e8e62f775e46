"""What a run tells whoever watches it, in the order it happens. Nothing here changes what the run does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from crucible.train.config import TrainConfig
from crucible.train.metrics import LogRow


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Everything is checked and in place; steps follow."""

    config: TrainConfig
    """As the run uses it: `steps` is a number."""
    first_step: int
    """1, or the step after the checkpoint that the run goes on from."""
    num_parameters: int
    device: str
    """Name of the device, as its maker gives it."""
    dtype: str
    """Of matrix products: "f32" or "bf16"."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """One update is done and its row is in log.csv."""

    row: LogRow
    steps: int
    """Steps of the whole run; under a time budget it moves until the rate begins to fall."""
    seconds_left: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    """A checkpoint is on disk."""

    step: int
    path: Path
    is_best: bool


@dataclass(frozen=True, slots=True)
class Notice:
    """Something a person should read: one or two sentences."""

    text: str


@dataclass(frozen=True, slots=True)
class Interrupting:
    """A signal has come; the step under way is finished and saved. Told inside the signal's handler: do no I/O that the
    interrupted code may be in the middle of."""

    signal: str


Event = Started | Stepped | Saved | Notice | Interrupting
OnEvent = Callable[[Event], None]
