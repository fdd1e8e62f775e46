"""The HTTP process from its first to its last moment: socket, engine, signals, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import uvicorn

from crucible.errors import CrucibleError
from crucible.models import resolve_text
from crucible.prompts import Prompts
from crucible.serve.app import AppSettings, create_app
from crucible.serve.channel import EngineConfig
from crucible.serve.protocol import ApiError
from crucible.serve.security import is_loopback
from crucible.serve.service import Service
from crucible.serve.supervisor import PING_DEADLINE, STARTUP_DEADLINE, Supervisor

_BACKLOG: Final = 2048
"""Connections that wait to be accepted: each gets an answer, if only that there is no room."""
_KEEP_ALIVE_SECONDS: Final = 75
_FLUSH_SECONDS: Final = 2.0
"""That streams have to write the error with which they end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """What is served, where, and for whom.

    Attributes:
        engine: what the engine is started with.
        app: how requests are answered.
        model_id: what clients call the model; None for its own name.
        aliases: other names that it answers to.
        host, port: where to listen; port 0 for any free one.
        max_queue: requests that may wait beside those that are computed.
        default_seed: of requests without one; None draws one for each.
        drain_seconds: that requests under way have to end once the server is asked to stop.
        startup_deadline, engine_timeout: as `Supervisor`'s startup_deadline and ping_deadline.

    Raises:
        CrucibleError: others could reach it, and no key is asked for.
    """

    engine: EngineConfig
    app: AppSettings
    model_id: str | None = None
    aliases: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    max_queue: int = 256
    default_seed: int | None = 1234
    drain_seconds: float = 30.0
    startup_deadline: float = STARTUP_DEADLINE
    engine_timeout: float = PING_DEADLINE
    allow_unauthenticated: bool = False

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and self.app.api_key is None and not self.allow_unauthenticated:
            raise CrucibleError(
                f"others can reach {self.host}: set --api-key (or CRUCIBLE_API_KEY), or say --allow-unauthenticated"
            )


def run(
    settings: ServerSettings,
    *,
    on_progress: Callable[[str, float | None], None],
    on_ready: Callable[[Service, str], None],
) -> int:
    """Serve until a signal says to stop.

    Args:
        on_progress: is told the stages of the engine's start.
        on_ready: is told the service and its address once it takes requests.

    Returns:
        The exit status: 0 after all requests were answered or told that they are not.

    Raises:
        CrucibleError: there is no such model, the engine cannot be started, or the address cannot be had.
    """
    model = resolve_text(settings.engine.model)
    with _bound_socket(settings.host, settings.port) as listener:
        service = Service(
            Prompts(model),
            Supervisor(
                settings.engine,
                startup_deadline=settings.startup_deadline,
                ping_deadline=settings.engine_timeout,
                on_progress=on_progress,
            ),
            model_id=settings.model_id or model.name,
            aliases=settings.aliases,
            created=int(time.time()),
            max_in_flight=settings.engine.max_batch + settings.max_queue,
            default_seed=settings.default_seed,
        )
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            return runner.run(_Server(settings, service, listener).run(lambda url: on_ready(service, url)))


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ModuleNotFoundError:  # it has no build for Windows
        return None
    return uvloop.new_event_loop


def _bound_socket(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
    except OSError as error:
        raise CrucibleError(f"cannot listen on {host}, port {port}: {error.strerror or error}") from None
    return listener


class _Uvicorn(uvicorn.Server):
    """Signals are `_Server`'s."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Server:
    def __init__(self, settings: ServerSettings, service: Service, listener: socket.socket) -> None:
        self._settings, self._service, self._listener = settings, service, listener
        self._signals: asyncio.Queue[int] = asyncio.Queue()
        config = uvicorn.Config(
            create_app(service, settings.app),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_ALIVE_SECONDS,
            timeout_graceful_shutdown=int(_FLUSH_SECONDS),
        )
        self._http = _Uvicorn(config)

    async def run(self, on_ready: Callable[[str], None]) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        supervisor = self._service.supervisor
        serving = asyncio.create_task(self._http.serve([self._listener]))
        starting = asyncio.create_task(supervisor.start())
        stopping = asyncio.create_task(self._signals.get())
        try:
            await asyncio.wait({starting, stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                await starting
                on_ready(self._url())
                await asyncio.wait({stopping, serving}, return_when=asyncio.FIRST_COMPLETED)
                if stopping.done():
                    await self._drain()
            return 0
        finally:
            starting.cancel()
            await supervisor.stop()
            self._http.should_exit = True
            await serving
            await asyncio.gather(starting, return_exceptions=True)

    def _url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def _drain(self) -> None:
        """Take nothing new, let what is under way end, then tell the rest; at a second signal at once."""
        service = self._service
        service.is_draining = True
        again = asyncio.create_task(self._signals.get())
        deadline = time.monotonic() + self._settings.drain_seconds
        if service.running:
            print(
                f"stopping: {len(service.running)} requests have {self._settings.drain_seconds:g} s to end; "
                "once more to stop at once",
                file=sys.stderr,
            )
        while service.running and time.monotonic() < deadline and not again.done():
            await asyncio.sleep(0.05)
        if again.done():
            await service.supervisor.stop()
            os._exit(128 + again.result())
        service.stop_all(ApiError("unavailable", "the server is stopping"))
        flushed = time.monotonic() + _FLUSH_SECONDS
        while service.running and time.monotonic() < flushed:
            await asyncio.sleep(0.01)
        again.cancel()
