"""Engines in processes of their own for tests: on a toy artifact, watched by receivers that keep an account."""

from __future__ import annotations

import asyncio
import contextlib
import os
import textwrap
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from crucible.serve.channel import Detail, EngineConfig
from crucible.serve.protocol import ApiError
from crucible.serve.supervisor import Supervisor

SLOW_STEPS = """
    import sys, time
    from pathlib import Path
    if "crucible.serve.worker" in sys.orig_argv:
        from crucible.engine.null import NullBackend
        submit = NullBackend.submit
        def slow(self, plan):
            time.sleep({seconds})
            return submit(self, plan)
        NullBackend.submit = slow
"""

SLOW = SLOW_STEPS.format(seconds=0.02)

AT_START = """
    import os, sys, time
    if "crucible.serve.worker" in sys.orig_argv:
        from crucible import models
        resolve_text = models.resolve_text
        def tampered(model):
            {action}
            return resolve_text(model)
        models.resolve_text = tampered
"""


def tampering(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """A function that lets code run in every Python process that is started, before anything else."""
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)

    def write(code: str) -> None:
        (folder / "sitecustomize.py").write_text(textwrap.dedent(code))

    return write


class Account:
    """A receiver that checks the order of what it is told."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.details: list[Detail] = []
        self.finish: str | None = None
        self.error: ApiError | None = None
        self.is_over = asyncio.Event()

    def tokens(self, ids: list[int], details: Sequence[Detail]) -> None:
        assert not self.is_over.is_set()
        assert ids
        self.ids += ids
        self.details += details

    def end(self, finish: str) -> None:
        assert not self.is_over.is_set()
        self.finish = finish
        self.is_over.set()

    def lost(self, error: ApiError) -> None:
        assert not self.is_over.is_set()
        self.error = error
        self.is_over.set()

    async def wait(self) -> Account:
        await asyncio.wait_for(self.is_over.wait(), 20)
        return self


@contextlib.asynccontextmanager
async def supervised(model: Path, *, backend: str = "null", **options: Any) -> AsyncIterator[Supervisor]:
    """A supervisor that is ready; afterwards its process is gone. Options of both it and its engine."""
    of_supervisor = {
        key: options.pop(key) for key in ("startup_deadline", "ping_deadline", "on_progress") if key in options
    }
    supervisor = Supervisor(EngineConfig(model=str(model), backend=backend, **options), **of_supervisor)
    await supervisor.start()
    try:
        yield supervisor
    finally:
        pid = supervisor.engine_pid
        await supervisor.stop()
        assert pid is None or is_gone(pid)


def submit(supervisor: Supervisor, prompt_ids: Sequence[int] = (5, 6, 7), **params: Any) -> tuple[int, Account]:
    account = Account()
    return supervisor.submit(prompt_ids, params, account), account


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.005)


def is_gone(pid: int) -> bool:
    """Whether a process is no more; one that nobody has waited for yet counts as gone."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):
        return True
