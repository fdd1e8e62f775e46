"""One request and its reply, in the same way for every surface: read, refuse or compute, and write as it comes.

A client that leaves is noticed in either kind of reply, and what it asked for is ended at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, Final, TypeAlias

from starlette.requests import Request
from starlette.responses import Response

from crucible.serve.protocol import ApiError, Reply, Surface
from crucible.serve.reading import read_body
from crucible.serve.running import Running, collect
from crucible.serve.service import Service

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

_STREAM_HEADERS: Final = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-store",
    "x-accel-buffering": "no",  # nginx would hold events back
}
GONE: Final = 499
"""The status, seen in metrics alone, of a reply to a client that has left."""
_log: Final = logging.getLogger(__name__)


async def respond(surface: Surface, request: Request, service: Service, max_body_bytes: int) -> Response:
    """The reply to a request that generates. Raises ApiError before the first byte of one, for the application to put
    into the caller's envelope."""
    body = await read_body(request, max_body_bytes)
    calls, reply = surface.read(body, service.served)
    prepared = await service.prepare(calls)
    running = service.start(prepared)
    if reply.streams:
        return EventStream(running, reply, [len(one.prompt_ids) for one in prepared])
    async with _watched(request.receive, running):
        choices = await collect(running)
    if choices is None:
        return Response(status_code=GONE)
    return Response(reply.whole(choices), 200, {"content-type": "application/json"})


class EventStream(Response):
    """A reply in server-sent events. All events that are pending of a request leave in one piece."""

    def __init__(self, running: Running, reply: Reply, prompt_tokens: list[int]) -> None:
        super().__init__(headers=_STREAM_HEADERS)
        del self.headers["content-length"]
        self._running, self._reply = running, reply
        self._prompt_tokens = prompt_tokens

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Write the stream. A client that has left is no error."""
        with contextlib.suppress(OSError):
            async with _watched(receive, self._running):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for data in self._events():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        reply = self._reply
        if opening := reply.begin(self._prompt_tokens):
            yield opening
        try:
            async for bursts in self._running.bursts():
                if data := b"".join([reply.burst(burst) for burst in bursts]):
                    yield data
            if not self._running.num_open:
                yield reply.finish()
        except ApiError as error:
            yield reply.failed(error)
        except Exception:
            _log.exception("a stream failed")
            yield reply.failed(ApiError("internal", "the server failed"))


@contextlib.asynccontextmanager
async def _watched(receive: Receive, running: Running) -> AsyncIterator[None]:
    """Cancel what is running as soon as the client has left, and at the end whatever happens."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        running.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        running.cancel()
