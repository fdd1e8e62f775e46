"""A real `crucible serve` in a process of its own, for tests: on a free port, always stopped, never orphaned."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

_URL = re.compile(r"(http://\S+)/v1 for OpenAI's clients")


class Server:
    """A running server; `log` is what it has written so far."""

    def __init__(self, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.process = process
        self.pid = process.pid
        self._log_path = log_path
        self.url = ""
        self.model_id = ""

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    @property
    def log(self) -> str:
        return self._log_path.read_text(errors="replace")

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=60, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(self.url + path, timeout=60, **options)

    def metrics(self) -> Any:
        return self.get("/metrics", headers={"accept": "application/json"}).json()

    def engine_pid(self) -> int:
        (pid,) = children(self.pid)
        return pid

    def wait_for(self, condition: Any, seconds: float = 20.0) -> Any:
        """What a function returns once it is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(httpx.HTTPError):
                if found := condition():
                    return found
            time.sleep(0.02)
        raise AssertionError(f"it did not happen within {seconds} s; the server says:\n{self.log}")

    def wait_until_idle(self) -> Any:
        """The metrics once no request is left and all pages are free."""

        def idle() -> Any:
            found = self.metrics()
            return found if found["in_flight"] == 0 and found["pages"]["used"] == 0 else None

        return self.wait_for(idle)


@contextlib.contextmanager
def serving(
    model: Path | str, log_path: Path, *options: str, wait: bool = True, **environment: str
) -> Iterator[Server]:
    """A server of a model, with further options of the command."""
    command = [sys.executable, "-m", "crucible.cli", "serve", str(model), "--port", "0", *options]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}
        )
    server = Server(process, log_path)
    try:
        if wait:
            server.url = server.wait_for(lambda: _ready_url(server), 120.0)
            server.model_id = server.get("/health").json()["model"]
        yield server
    finally:
        family = [process.pid, *children(process.pid)]
        process.kill()
        process.wait()
        wait_until_gone(family)


def free_port() -> int:
    """One that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def events_of(body: str) -> list[tuple[str, Any]]:
    """The events of a native or an Anthropic stream, name and data, of which each has both and nothing else."""
    *events, rest = body.split("\n\n")
    assert rest == "", "the last event is not complete"
    found = []
    for event in events:
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def _ready_url(server: Server) -> str | None:
    assert server.process.poll() is None, f"the server has ended:\n{server.log}"
    found = _URL.search(server.log)
    return None if found is None else found[1]


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    path = Path(f"/proc/{pid}/task/{pid}/children")
    return [int(child) for child in path.read_text().split()] if path.exists() else []


def wait_until_gone(pids: list[int], seconds: float = 10.0) -> None:
    """Raises AssertionError for processes that are left, which are ended then all the same."""
    deadline = time.monotonic() + seconds
    while left := [pid for pid in pids if _is_alive(pid)]:
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise AssertionError(f"processes are left: {left}")
        time.sleep(0.01)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def stop(server: Server, number: int = signal.SIGTERM) -> None:
    os.kill(server.pid, number)
