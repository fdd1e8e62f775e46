"""What a step is measured by: the rows of log.csv, the device's rates, and the watch over lasting changes of speed."""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final

from crucible import hardware
from crucible.errors import CrucibleError
from crucible.files import write_file

SAMPLE_SECONDS: Final = 1.0
"""Power limit and clock are asked for at most this often; a row carries the latest answer."""
NOT_AVAILABLE: Final = "n/a"


class LogError(CrucibleError):
    """A log.csv that is not what this version writes: the message names file and line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRow:
    """One step. A field that is None was not measured: `val_loss` between evaluations, the rest on this device."""

    step: int
    tokens: int
    """Targets trained on up to and including this step."""
    loss: float
    """Nats per target, mean over the step, before its update."""
    val_loss: float | None
    """Nats per target on the val split, after the update."""
    lr: float
    grad_norm: float
    """Joint L2 norm of all gradients before clipping."""
    ms_per_step: float
    """From fetching the batches to the end of the update; evaluation and saving are not part of it."""
    tokens_per_second: float
    """Of this step alone, over `ms_per_step`."""
    mfu: float | None
    """Model FLOPs per second as a fraction of the peak measured on a device of this name."""
    power_limit_w: float | None
    sm_clock_mhz: int | None


COLUMNS: Final = tuple(field.name for field in fields(LogRow))
_INTEGERS: Final = frozenset({"step", "tokens", "sm_clock_mhz"})
_ABSENT: Final = {
    "val_loss": "",
    "mfu": NOT_AVAILABLE,
    "power_limit_w": NOT_AVAILABLE,
    "sm_clock_mhz": NOT_AVAILABLE,
}
"""How each column that may be None is written."""


# ---- log.csv --------------------------------------------------------------------------------------------------------


class LogWriter:
    """Appends rows to log.csv, each handed to the system at once, so that a killed process loses none.

    Rows after step `after` are cut when the file is opened, and with them a last line left half written: the log of a
    resumed run has each step once.

    Raises:
        LogError: here and in every method: the rows to keep are malformed, or the file cannot be written.
    """

    def __init__(self, path: Path, *, after: int = 0) -> None:
        kept = read_log(path, up_to=after) if after else []
        if [row.step for row in kept] != list(range(1, after + 1)):
            raise LogError(f"{path} does not hold the steps 1 to {after} that the checkpoint comes after")
        self._path = path
        with self._explained():
            write_file(path, "".join([",".join(COLUMNS) + "\n", *map(_format, kept)]).encode())
            self._file = path.open("ab", buffering=0)

    def write(self, row: LogRow) -> None:
        """Adds one row."""
        line = _format(row).encode()
        with self._explained():
            while line:
                line = line[self._file.write(line) :]

    def sync(self) -> None:
        """Returns once all rows are on disk."""
        with self._explained():
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LogError(f"cannot write {self._path}: {error.strerror}; then resume the run") from error


def read_log(path: Path, *, up_to: int | None = None) -> list[LogRow]:
    """The rows of a log.csv in order, those of steps after `up_to` left out.

    A last line without its newline is one that is being, or never was, written to its end, and does not count.

    Raises:
        LogError: the header is not this version's, or a row among those asked for cannot be understood.
    """
    try:
        header, *lines = path.read_text(encoding="utf-8").split("\n")[:-1] or [""]
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror}") from error
    if header != ",".join(COLUMNS):
        raise LogError(f"{path}: the first line must be {','.join(COLUMNS)}")
    rows = []
    for number, line in enumerate(lines[:up_to], start=2):
        try:
            cells = zip(COLUMNS, line.split(","), strict=True)
            rows.append(LogRow(**{name: _parse(name, cell) for name, cell in cells}))
        except ValueError as error:
            raise LogError(f"{path}: line {number}: {error}") from error
    return rows


def _format(row: LogRow) -> str:
    values = ((name, getattr(row, name)) for name in COLUMNS)
    # repr is the shortest text that reads back as the same float.
    return ",".join(_ABSENT[name] if value is None else repr(value) for name, value in values) + "\n"


def _parse(name: str, cell: str) -> Any:
    if _ABSENT.get(name) == cell:
        return None
    return int(cell) if name in _INTEGERS else float(cell)


# ---- the device -----------------------------------------------------------------------------------------------------


class DeviceMonitor:
    """Rates of the device that a run is on. `cuda_index` is None on the CPU, which has neither limit nor clock here.

    `peak_flops` is the matrix rate that a benchmark measured and saved for this device and dtype, or None.
    """

    def __init__(self, *, device_name: str, cuda_index: int | None, dtype: str) -> None:
        self.peak_flops = hardware.measured_peak_flops(device_name, dtype)
        self._cuda_index = cuda_index
        self._reading: hardware.PowerReading | None = None
        self._read_at = float("-inf")

    def power_and_clock(self) -> tuple[float | None, int | None]:
        """Power limit in W and SM clock in MHz, asked for at most once a second; None where the driver has none."""
        if self._cuda_index is None:
            return None, None
        if time.monotonic() - self._read_at >= SAMPLE_SECONDS:
            self._reading = hardware.power_and_clock(self._cuda_index)
            self._read_at = time.monotonic()
        if self._reading is None:
            return None, None
        return self._reading.power_limit_w, self._reading.sm_clock_mhz


# ---- speed over time ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedChange:
    """Steps have taken another time for long enough not to be a disturbance."""

    step: int
    before_ms: float
    after_ms: float
    before_power_limit_w: float | None
    after_power_limit_w: float | None
    before_sm_clock_mhz: int | None
    after_sm_clock_mhz: int | None

    def __str__(self) -> str:
        """One sentence with what was measured before and after."""

        def pair(before: float | None, after: float | None, unit: str) -> str:
            if before is None and after is None:
                return NOT_AVAILABLE
            return " -> ".join(NOT_AVAILABLE if value is None else f"{value:g} {unit}" for value in (before, after))

        return (
            f"step time changed for good: {self.before_ms:.4g} -> {self.after_ms:.4g} ms around step {self.step}; "
            f"power limit {pair(self.before_power_limit_w, self.after_power_limit_w, 'W')}, "
            f"SM clock {pair(self.before_sm_clock_mhz, self.after_sm_clock_mhz, 'MHz')}"
        )


class SpeedWatch:
    """Tells a lasting change of step time from noise.

    The median of the last 20 steps is held against the median of the last 200 steps that were in line with it. Only a
    ratio beyond 1.5 either way, at 20 steps and over 10 s of step time in a row, is a change; the new speed is then
    the baseline.
    """

    RECENT: Final = 20
    BASELINE: Final = 200
    RATIO: Final = 1.5
    PATIENCE_STEPS: Final = 20
    PATIENCE_MS: Final = 10_000.0

    def __init__(self) -> None:
        self._recent: deque[LogRow] = deque(maxlen=self.RECENT)
        self._baseline: deque[float] = deque(maxlen=self.BASELINE)
        # A row from before any change that may be under way: the median lags behind the steps by half its window.
        self._normal: LogRow | None = None
        self._off: list[LogRow] = []

    def add(self, row: LogRow) -> SpeedChange | None:
        """Takes the next step in; returns a change at the step where it has lasted long enough."""
        self._recent.append(row)
        if len(self._recent) < self.RECENT:
            return None
        if self._normal is None:
            self._settle()
            return None
        recent = statistics.median(r.ms_per_step for r in self._recent)
        baseline = statistics.median(self._baseline)
        if 1 / self.RATIO <= recent / baseline <= self.RATIO:
            self._baseline.append(row.ms_per_step)
            self._normal = self._recent[0]
            self._off.clear()
            return None
        self._off.append(row)
        if len(self._off) < self.PATIENCE_STEPS or sum(r.ms_per_step for r in self._off) < self.PATIENCE_MS:
            return None
        change = SpeedChange(
            step=self._off[0].step - self.RECENT // 2,
            before_ms=baseline,
            after_ms=recent,
            before_power_limit_w=self._normal.power_limit_w,
            after_power_limit_w=row.power_limit_w,
            before_sm_clock_mhz=self._normal.sm_clock_mhz,
            after_sm_clock_mhz=row.sm_clock_mhz,
        )
        self._settle()
        return change

    def _settle(self) -> None:
        """Takes the recent steps as the baseline."""
        self._baseline = deque((row.ms_per_step for row in self._recent), maxlen=self.BASELINE)
        self._normal = self._recent[0]
        self._off.clear()


class Pace:
    """Time left, from recent steps: their median, plus the evaluations and saves so far spread over all steps."""

    RECENT: Final = 20

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=self.RECENT)
        self._others = 0.0
        self._steps = 0

    def add(self, step_seconds: float, other_seconds: float) -> None:
        """Takes in a step and what was done between it and the next."""
        self._recent.append(step_seconds)
        self._others += other_seconds
        self._steps += 1

    def seconds_left(self, steps_left: int) -> float | None:
        """Estimated seconds for that many steps more; None before the first."""
        return None if not self._steps else steps_left * self.seconds_per_step

    @property
    def seconds_per_step(self) -> float:
        """Of one step more. Raises StatisticsError before the first."""
        return statistics.median(self._recent) + self._others / self._steps
