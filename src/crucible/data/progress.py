"""How far preparing data has come, and a progress bar of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

Stage = Literal["tokenizer", "tokens"]
"""Reading documents to train a tokenizer on, or making tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """What is done so far, earlier runs that were resumed included."""

    stage: Stage
    documents: int
    tokens: int
    fraction: float | None
    """From 0 to 1 by bytes read or by the token limit, whichever is further; None for a stream without a limit."""


OnProgress = Callable[[Progress], None]


@contextmanager
def progress_bar() -> Iterator[OnProgress]:
    """A bar on standard error that shows each `Progress` it is called with: documents, tokens, tokens/s, time left.

    It appears with the first call, so that work which is refused leaves nothing but its error on the screen.
    """
    from rich import progress as rich
    from rich.console import Console

    stage, figures, left = "{task.description}", "{task.fields[figures]}", rich.TimeRemainingColumn()
    columns = (stage, rich.BarColumn(), rich.TaskProgressColumn(), figures, left)
    bar = rich.Progress(*columns, console=Console(stderr=True))
    first: Progress | None = None
    try:
        task = bar.add_task("reading", total=None, figures="")
        started = time.monotonic()

        def show(now: Progress) -> None:
            nonlocal first, started
            if first is None:
                bar.start()
            if first is None or first.stage != now.stage:
                bar.reset(task)
                first, started = now, time.monotonic()
            figures = f"{now.documents:,} documents"
            if now.stage == "tokens":
                figures += f"  {now.tokens:,} tokens"
                if now.tokens > first.tokens:
                    figures += f"  {(now.tokens - first.tokens) / (time.monotonic() - started):,.0f} tok/s"
            total = None if now.fraction is None else 1.0
            bar.update(task, description=now.stage, total=total, completed=now.fraction or 0.0, figures=figures)

        yield show
    finally:
        if first is not None:
            bar.stop()
