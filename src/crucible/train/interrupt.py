"""Ctrl-C and SIGTERM as a wish that the loop reads between steps."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Context manager that turns the first SIGINT or SIGTERM into `requested` and lets the second act as ever.

    Handlers belong to a process's main thread; entered from another one this changes nothing and never reports.
    """

    def __init__(self, on_request: Callable[[str], None]) -> None:
        """`on_request` is called with the signal's name, inside the handler."""
        self.requested: str | None = None
        self._on_request = on_request
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Interrupt:
        if threading.current_thread() is threading.main_thread():
            # A signal that the parent set to be ignored (nohup, a background job) stays ignored.
            heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
            self._previous = {number: signal.signal(number, self._handle) for number in heeded}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._restore()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._restore()
        self.requested = signal.Signals(number).name
        self._on_request(self.requested)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that was not installed from Python and cannot be put back.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
