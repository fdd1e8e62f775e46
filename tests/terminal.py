"""A command in a terminal of its own: keys go in, and what stands on the screen can be read."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import pyte

KEYS = {
    "enter": "\r",
    "alt+enter": "\x1b\r",
    "escape": "\x1b",
    "f2": "\x1bOQ",
    "ctrl+c": "\x03",
    "ctrl+home": "\x1b[1;5H",
}


class Terminal:
    """`crucible` with arguments in a pseudo-terminal; `raw` is all that it has written."""

    def __init__(self, arguments: tuple[str, ...], size: tuple[int, int], environment: dict[str, str]) -> None:
        self._screen = pyte.Screen(*size)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            # Not what readline may have put into the C library's own: COLUMNS and LINES hide the terminal's size.
            variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
            variables |= {"TERM": "xterm-256color", "OMP_NUM_THREADS": "1", **environment}
            os.execve(sys.executable, [sys.executable, "-m", "crucible.cli", *arguments], variables)
        self._set_size(*size)

    def press(self, *keys: str) -> None:
        """Names of keys, or text."""
        for key in keys:
            os.write(self._file, KEYS.get(key, key).encode())

    def resize(self, columns: int, lines: int) -> None:
        self._screen.resize(lines, columns)
        self._set_size(columns, lines)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._file, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def run(self, seconds: float) -> None:
        """Take what is written, for a while."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if not select.select([self._file], [], [], left)[0]:
                return
            try:
                data = os.read(self._file, 1 << 16)
            except OSError:  # the other end is closed
                return
            self.raw += data
            self._stream.feed(data)

    def until(self, condition: Callable[[], Any], seconds: float = 20.0) -> Any:
        """What a function returns once it is true."""
        deadline = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < deadline, f"it did not happen within {seconds} s; the screen:\n{self.text}"
            self.run(0.02)
        return found

    def until_shown(self, text: str, seconds: float = 20.0) -> None:
        self.until(lambda: text in self.text, seconds)

    @property
    def text(self) -> str:
        return "\n".join(self._screen.display)

    @property
    def cpu_seconds(self) -> float:
        """Of the process itself, so far."""
        with open(f"/proc/{self.pid}/stat") as file:  # noqa: PTH123
            fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def wait(self, seconds: float = 15.0) -> int:
        """Its exit status, once it has ended."""
        _, status = self.until(lambda: (ended := os.waitpid(self.pid, os.WNOHANG))[0] and ended, seconds)
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._file)


@contextlib.contextmanager
def terminal(*arguments: str, size: tuple[int, int] = (80, 24), **environment: str) -> Iterator[Terminal]:
    """A command in a terminal, ended with the block."""
    made = Terminal(arguments, size, environment)
    try:
        yield made
    finally:
        made.close()
