"""Processes that answer line by line: the parent's side of `bench/worker.py` and of the like."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from crucible.bench.harness import BenchError

_THREADS: Final = ("NUMBA_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineSpec:
    """An engine with a model: what a process of it is started with.

    Attributes:
        engine: "crucible" or "llama-cpp".
        model: what that engine loads.
        format: of the weights; of llama.cpp only a name, since its file decides.
        threads: threads to compute with.
        context: positions to have room for.
        backend: of crucible's engine.
    """

    engine: str
    model: str
    format: str
    threads: int
    context: int
    backend: str = "auto"

    @property
    def label(self) -> str:
        """Engine and format, for messages."""
        return f"{self.engine} {self.format}"

    def command(self) -> list[str]:
        """The command line of the process."""
        options = ("--format", self.format, "--threads", str(self.threads), "--context", str(self.context))
        return worker_command(self.engine, self.model, *options, "--backend", self.backend)


@dataclass(frozen=True, slots=True)
class Reply:
    """Greedy tokens, seconds from the request to the first of them as the engine's process saw it, and to the last."""

    ids: tuple[int, ...]
    first: float
    rest: float


class LineProcess:
    """A running process that answers each line on its standard input by one on its standard output.

    As a context manager it ends with the block. Each method raises BenchError where the process has ended; the message
    has the end of its standard error.

    Args:
        label: what it is called in messages.
        command: the command line.
        threads: that libraries for numbers may compute with; None for their own choice.
    """

    def __init__(self, label: str, command: Sequence[str], *, threads: int | None = None) -> None:
        self.label = label
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the process; a full pipe would block it
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=None if threads is None else _environment(threads),
        )

    def send(self, line: bytes) -> None:
        """Write a line, given without its end."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise BenchError(self._failure()) from None

    def receive(self) -> bytes:
        """Wait for a line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise BenchError(self._failure())
        return line

    def close(self) -> None:
        """End the process and wait for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _failure(self) -> str:
        self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().strip().splitlines() or ["it said nothing"]
        return f"the process of {self.label} ended: {lines[-1][-300:]}"


class EngineProcess(LineProcess):
    """An engine that continues one prompt at a time. Raises as `LineProcess`."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__(spec.label, spec.command(), threads=spec.threads)
        self._description: str | None = None

    def wait_ready(self) -> str:
        """Wait until the model is loaded; what the process says it is."""
        if self._description is None:
            self._description = str(json.loads(self.receive())["ready"])
        return self._description

    def ask(self, ids: Sequence[int], new_tokens: int) -> Reply:
        """Draw that many greedy tokens after a prompt. Raises BenchError where the process fails or draws others."""
        self.send(json.dumps({"ids": list(ids), "new_tokens": new_tokens}).encode())
        self.wait_ready()
        found = json.loads(self.receive())
        if len(found["ids"]) != new_tokens:
            raise BenchError(f"{self.label} was asked for {new_tokens} tokens and drew {len(found['ids'])}")
        return Reply(tuple(found["ids"]), found["first"], found["rest"])


def time_to_first_token(spec: EngineSpec, ids: Sequence[int]) -> float:
    """Seconds from the start of a new process of the engine, through loading its model, to its first token."""
    began = time.perf_counter()
    with EngineProcess(spec) as process:
        process.ask(ids, 1)
        return time.perf_counter() - began


def worker_command(*arguments: str) -> list[str]:
    """The command line of `bench/worker.py`."""
    return [sys.executable, "-m", "crucible.bench.worker", *arguments]


def _environment(threads: int) -> dict[str, str]:
    return {**os.environ, **dict.fromkeys(_THREADS, str(threads))}
