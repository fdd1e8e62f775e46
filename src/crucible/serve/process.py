"""The engine's process as its parent sees it: one process of `serve/worker.py`, and the channel to it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from crucible.serve.channel import Channel, FromEngine, Start, Stop, ToEngine, listen


class EngineProcess:
    """One process of `serve/worker.py` and the channel to it. Nothing of either is left once `exited` is called.

    Args:
        received: is called with each message, in the event loop.
        exited: is called once the process has ended and all its messages are read, with the reason in words.

    Raises:
        OSError, zmq.ZMQError: there is no room for a folder, a socket or a process.
    """

    def __init__(self, received: Callable[[FromEngine], None], exited: Callable[[str], None]) -> None:
        self._received, self._exited = received, exited
        self._loop = asyncio.get_running_loop()
        self._gone = self._loop.create_future()
        self._why: str | None = None
        self.is_told = False
        """Whether the first message has been sent."""
        with contextlib.ExitStack() as undo:
            self._folder = Path(tempfile.mkdtemp(prefix="crucible-"))
            undo.callback(self._remove_folder)
            self._context = zmq.Context[zmq.Socket[bytes]]()
            undo.callback(self._context.destroy)
            path = self._folder / "engine"
            if len(os.fsencode(path)) > zmq.IPC_PATH_MAX_LEN:
                raise OSError(f"{self._folder.parent} is too long a path for a socket; set TMPDIR to a shorter one")
            address = f"ipc://{path}"
            self._channel: Channel[ToEngine, FromEngine] = listen(self._context, address)
            # The write end of its standard input is held here and by nobody else: it ends when this process does.
            self._process = subprocess.Popen(
                [sys.executable, "-m", "crucible.serve.worker", address, str(os.getpid())],
                stdin=subprocess.PIPE,
                start_new_session=True,
            )
            undo.pop_all()
        self._loop.add_reader(self._channel.descriptor, self.read)
        threading.Thread(target=self._wait, name="engine-sentinel", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: ToEngine) -> bool:
        """Never waits. False if the process is gone."""
        is_sent = self._channel.send(message)
        if self._channel.has_message:  # sending can swallow the sign that there is something to read
            self._loop.call_soon(self.read)
        return is_sent

    def tell(self, start: Start) -> None:
        """Send the first message. The process is connected, and nobody else shall ever be: remove the address."""
        self.is_told = True
        self.send(start)
        self._remove_folder()

    def read(self) -> None:
        """Take in everything that is there; nothing of a process that is killed."""
        while self._why is None and not self._gone.done() and self._channel.has_message:
            self._received(self._channel.receive())

    def kill(self, why: str) -> None:
        """End it at once, whatever it does."""
        self._why = self._why or why
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def stop(self, seconds: float) -> None:
        """End it within so many seconds if it listens, else at once, and wait until it is gone."""
        if seconds and self.send(Stop()):
            await asyncio.wait([self._gone], timeout=seconds)
        if not self._gone.done():
            self.kill("was stopped")
            await asyncio.wait([self._gone])

    def _wait(self) -> None:
        """In a thread of its own: the kernel says at once when a process ends."""
        self._process.wait()
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self.read()
        self._gone.set_result(None)
        self._loop.remove_reader(self._channel.descriptor)
        self._channel.close()
        self._context.term()
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._remove_folder()
        self._exited(self._why or _in_words(self._process.returncode))

    def _remove_folder(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def _in_words(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"ended with status {status}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by {names.get(-status, f'signal {-status}')}"
