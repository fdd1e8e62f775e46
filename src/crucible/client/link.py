"""Whether the server is there: asked again and again, less often the longer it is away."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable
from typing import Final, Literal

from crucible.client.api import Client, Health, Metrics
from crucible.serve.protocol import ApiError

State = Literal["connecting", "connected", "reconnecting", "disconnected"]

POLL_SECONDS: Final = 1.0
_FIRST_PAUSE: Final = 0.25
_LONGEST_PAUSE: Final = 8.0
_PATIENCE: Final = 6
"""Attempts that fail, about eight seconds of them, before the server counts as gone. It is looked for all the same."""
_HOPELESS: Final = frozenset({"authentication", "host"})


class Link:
    """The state of a server as one client sees it.

    Attributes:
        state: what to tell people.
        reason: why it is not `connected`, "" where it is.
        health: the server's last word about itself.
        metrics: the last ones that came.
    """

    def __init__(self, client: Client, on_change: Callable[[], None] = lambda: None) -> None:
        self.state: State = "connecting"
        self.reason = ""
        self.health: Health | None = None
        self.metrics: Metrics | None = None
        self._client = client
        self._on_change = on_change
        self._failures = 0
        self._hurry = asyncio.Event()

    def hurry(self) -> None:
        """Try again now."""
        self._hurry.set()

    async def run(self) -> None:
        """Watch, until cancelled; `on_change` is called after every attempt."""
        while True:
            self._hurry.clear()
            await self._attempt()
            self._on_change()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._hurry.wait()

    async def _attempt(self) -> None:
        try:
            if self.state != "connected":
                self.health = await self._client.health()
                if self.health.status != "ok":
                    reason = f": {self.health.reason}" if self.health.reason else ""
                    raise ApiError("unavailable", f"the server is {self.health.status}{reason}")
            self.metrics = await self._client.metrics()
        except ApiError as error:
            self._failures += 1
            gone = error.kind in _HOPELESS or self._failures >= _PATIENCE
            self.state, self.reason = "disconnected" if gone else "reconnecting", error.message
        else:
            self._failures, self.state, self.reason = 0, "connected", ""

    def _pause(self) -> float:
        """Seconds: doubled with each failure, spread so that clients of one server do not all come back at once."""
        if not self._failures:
            return POLL_SECONDS
        return min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** (self._failures - 1)) * random.uniform(0.75, 1.25)
