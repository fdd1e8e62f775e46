"""A `crucible serve` of a benchmark's own, or one that runs already; and what its metrics say."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from crucible.bench.harness import BenchError

MODEL_ID: Final = "bench"
START_SECONDS: Final = 300.0
STOP_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.05
_HOST: Final = "127.0.0.1"
_PROGRAM: Final = """
import ctypes, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG
from crucible.cli import main
main()
"""
"""`crucible`, which on Linux ends also where a benchmark is killed and cannot stop it. Done in the new program and not
between fork and exec, where a lock that another thread held would never be free again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Where a server is, and what it calls its model."""

    host: str
    port: int
    model_id: str
    health: Mapping[str, Any]

    @property
    def backend(self) -> str:
        """Backend and weights."""
        return f"{self.health['backend']} {self.health['weights']}"

    @property
    def card(self) -> str | None:
        """The graphics card, if that is what computes."""
        return str(self.health["device"]) if self.health["backend"] == "cuda" else None

    def get(self, path: str) -> Any:
        """A reply in JSON. Raises BenchError: there is none."""
        return _get(self.host, self.port, path)


@contextmanager
def serving(
    model: str, *, backend: str = "auto", weights: str = "auto", options: Mapping[str, object] | None = None
) -> Iterator[Server]:
    """A server of a model, ready; it is stopped with the block, whatever happens in that.

    Args:
        model, backend, weights: as for `crucible serve`.
        options: more of its options by name, without the dashes.

    Raises:
        BenchError: it does not start, or ended by itself before it was stopped.
    """
    port = _free_port()
    given = {"backend": backend, "weights": weights, "port": port, "model-id": MODEL_ID, **(options or {})}
    command = [sys.executable, "-c", _PROGRAM, "serve", model]
    command += [text for name, value in given.items() for text in (f"--{name}", str(value))]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env={name: value for name, value in os.environ.items() if name != "CRUCIBLE_API_KEY"},
        )
        try:
            yield _ready(process, errors, port)
            if process.poll() is not None:
                raise BenchError(f"the server ended by itself: {_end_of(errors)}")
        finally:
            _stop(process)


def at_url(url: str) -> Server:
    """A server that runs already. Raises BenchError: it does not answer, or is not ready."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/"):
        raise BenchError(f"a server's URL is http://HOST:PORT, not {url!r}")
    return _server(parts.hostname, parts.port or 80)


def counters(metrics: str) -> dict[str, float]:
    """The metrics without labels, by name without the project's prefix, of Prometheus' text format."""
    found = {}
    for line in metrics.splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("crucible:") and "{" not in name:
            found[name.removeprefix("crucible:")] = float(value)
    return found


# ---- a process and its end ------------------------------------------------------------------------------------------


def _ready(process: subprocess.Popen[bytes], errors: Any, port: int) -> Server:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchError(f"the server did not start: {_end_of(errors)}")
        with contextlib.suppress(BenchError):
            return _server(_HOST, port)
        time.sleep(_POLL_SECONDS)
    raise BenchError(f"the server was not ready within {START_SECONDS:.0f} s: {_end_of(errors)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """The first signal lets it finish what is under way, the second does not."""
    for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=STOP_SECONDS)
            return


def _end_of(errors: Any) -> str:
    errors.seek(0)
    lines = errors.read().strip().splitlines() or ["it said nothing"]
    return str(lines[-1])[-300:]


def _server(host: str, port: int) -> Server:
    health = _get(host, port, "/health")
    return Server(host=host, port=port, model_id=_get(host, port, "/v1/models")["data"][0]["id"], health=health)


def _get(host: str, port: int, path: str) -> Any:
    url = f"http://{host}:{port}{path}"
    request = urllib.request.Request(url, headers={"accept": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return json.load(reply)
    except (OSError, ValueError) as error:  # HTTPError is an OSError
        raise BenchError(f"{url}: {error}") from None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        return int(probe.getsockname()[1])
