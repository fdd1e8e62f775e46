"""A server of the client's own, which ends with it however that ends."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Final

from crucible.serve.protocol import ApiError

_URL: Final = re.compile(r"(https?://\S+)/v1 for OpenAI's clients")
_STOP_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.05
_PROGRAM: Final = """
import os, signal, sys, threading

def watch():
    while os.read(0, 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=watch, daemon=True).start()
sys.argv[0] = "crucible"
from crucible.cli import main
main()
"""
"""`crucible`, which stops when its standard input ends. The client holds the other end, and even one that is killed
lets go of it."""


@contextlib.contextmanager
def serving(
    model: str, options: Sequence[str] = (), *, api_key: str | None = None, on_progress: Callable[[str], None]
) -> Iterator[str]:
    """Runs `crucible serve MODEL` on a free port, for the block alone.

    Args:
        model: as for that command.
        options: more of its options.
        api_key: that it is to ask for.
        on_progress: called with what it says while it starts.

    Yields:
        its URL, when it is ready.

    Raises:
        ApiError: it does not start; the message is its own.
    """
    command = [sys.executable, "-c", _PROGRAM, "serve", model, "--port", "0", "--drain-seconds", "0", *options]
    environment = {name: value for name, value in os.environ.items() if name != "CRUCIBLE_API_KEY"}
    if api_key:
        environment["CRUCIBLE_API_KEY"] = api_key
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # Ctrl-C at the terminal is for the client
        )
        try:
            yield _ready(process, log, on_progress)
        finally:
            _stop(process)


def _ready(process: subprocess.Popen[bytes], log: IO[str], on_progress: Callable[[str], None]) -> str:
    said = ""
    while True:
        ended = process.poll() is not None
        text = _read(log)
        if found := _URL.search(text):
            return found[1]
        *_, last = text.strip().splitlines() or [""]
        if ended:
            raise ApiError("unavailable", last.removeprefix("crucible: ") or "the server did not start")
        if last != said:
            said = last
            on_progress(said)
        time.sleep(_POLL_SECONDS)


def _read(log: IO[str]) -> str:
    """All that was written. By position, because the child writes where this file stands."""
    return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    for end in (process.terminate, process.kill):
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
            return
        end()
    process.wait()
