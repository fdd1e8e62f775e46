"""A run on the screen: a live line on a terminal, plain lines anywhere else.

with Display() as display:
    result = train(config, on_event=display)
"""

from __future__ import annotations

import os
import time
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from crucible.train.events import Event, Interrupting, Notice, Started, Stepped
from crucible.train.metrics import LogRow

PLAIN_SECONDS: Final = 10.0
"""Without a terminal a step is printed at most this often, and whenever it was evaluated."""


class Display:
    """An `on_event` that shows a run, on standard error unless a console is given.

    On a terminal: bar, step, loss, validation loss, tokens per second and time left, redrawn in place, with notices
    above. Elsewhere: one line per evaluation and at most one every 10 s between them.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._val_loss: float | None = None
        self._printed_at = float("-inf")

    def __enter__(self) -> Display:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._progress is not None:
            self._progress.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._start(event)
            case Stepped():
                self._step(event)
            case Notice(text):
                self._print(text)
            case Interrupting(signal):
                self._interrupting(signal)

    def _start(self, event: Started) -> None:
        config = event.config
        tokens = config.windows_per_step * config.context_length
        self._print(
            f"{event.num_parameters / 1e6:.4g} M parameters on {event.device}, {event.dtype}; "
            f"{config.steps} steps of {tokens:,} tokens into {config.run}"
        )
        if event.first_step > 1:
            self._print(f"going on at step {event.first_step}")
        if self.console.is_terminal:
            self._progress = Progress(
                BarColumn(bar_width=None), TextColumn("{task.description}"), console=self.console, expand=True
            )
            self._task = self._progress.add_task("", total=config.steps, completed=event.first_step - 1)
            self._progress.start()

    def _step(self, event: Stepped) -> None:
        row = event.row
        if row.val_loss is not None:
            self._val_loss = row.val_loss
        if self._progress is not None and self._task is not None:
            text = describe(row, steps=event.steps, val_loss=self._val_loss, seconds_left=event.seconds_left)
            self._progress.update(self._task, completed=row.step, total=event.steps, description=text)
        elif row.val_loss is not None or time.monotonic() - self._printed_at >= PLAIN_SECONDS:
            self._printed_at = time.monotonic()
            self._print(describe(row, steps=event.steps, val_loss=row.val_loss, seconds_left=event.seconds_left))

    def _interrupting(self, signal: str) -> None:
        text = f"{signal}: finishing this step and saving; once more stops at once"
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, description=text)
        else:
            # Inside a signal handler a buffered stream may be in the middle of a write.
            os.write(2, f"{text}\n".encode())

    def _print(self, text: str) -> None:
        # A terminal wraps; elsewhere a line is a line.
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def describe(row: LogRow, *, steps: int, val_loss: float | None, seconds_left: float | None) -> str:
    """A step in one line; `val_loss` is the latest one known."""
    parts = [f"step {row.step:,}/{steps:,}", f"loss {row.loss:.3f}"]
    if val_loss is not None:
        parts.append(f"val {val_loss:.3f}")
    parts.append(f"{row.tokens_per_second:,.0f} tok/s")
    if row.mfu is not None:
        parts.append(f"MFU {row.mfu:.0%}")
    if seconds_left is not None:
        parts.append(f"{duration(seconds_left)} left")
    return "  ".join(parts)


def duration(seconds: float) -> str:
    """Seconds as 45s, 3m20s or 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"
