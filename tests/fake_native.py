"""A server that speaks the native API from a script, in the event loop of the test: it can be slow, refuse, and break
off."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

HEALTH = {
    "status": "ok",
    "version": "0",
    "model": "toy",
    "device": "none",
    "backend": "null",
    "weights": "f32",
    "max_batch": 64,
    "context": 256,
}
METRICS = {
    "active": 3,
    "prefilling": 0,
    "queued": 2,
    "pages": {"total": 1024, "used": 178, "free": 846},
    "batch": {"last": 3, "mean": 2.4},
    "tokens": {"prompt": 100, "generated": 9812},
    "uptime": 211.0,
}


@dataclass
class FakeServer:
    """What it answers, and what it was asked.

    Attributes:
        texts: of the tokens of every reply.
        pause: seconds from one to the next.
        breaks_after: so many tokens the connection is closed; None never.
        refusal: status and body that it answers a request with.
        error_event: the data of the event that ends a stream in place of `done`.
        health: what it says of itself, and with which status.
        piece_bytes: how much of the reply is written at once; None for an event.
        requests: bodies that came.
        left: clients that left before the end.
    """

    texts: Sequence[str] = ("Hello", " **world**", ".")
    pause: float = 0.0
    breaks_after: int | None = None
    refusal: tuple[int, dict[str, Any]] | None = None
    error_event: dict[str, Any] | None = None
    health: dict[str, Any] = field(default_factory=lambda: dict(HEALTH))
    piece_bytes: int | None = None
    port: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    left: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[FakeServer]:
        server = await asyncio.start_server(self._answer, "127.0.0.1", self.port)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            self.headers.append(head)
            path = head.split(" ")[1]
            if path == "/v1/generate/stream":
                length = int(head.lower().partition("content-length: ")[2].partition("\r")[0])
                self.requests.append(json.loads(await reader.readexactly(length)))
                await self._stream(writer)
            else:
                found = self.health if path == "/health" else METRICS
                self._whole(writer, 200 if self.health["status"] == "ok" else 503, found)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            self.left += 1
        finally:
            writer.close()

    def _whole(self, writer: asyncio.StreamWriter, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nRetry-After: 3\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)

    async def _stream(self, writer: asyncio.StreamWriter) -> None:
        if self.refusal is not None:
            self._whole(writer, *self.refusal)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        began = time.perf_counter()
        for i, text in enumerate(self.texts):
            if i == self.breaks_after:
                return
            await asyncio.sleep(began + (i + 1) * self.pause - time.perf_counter())
            await self._event(writer, "token", {"token_id": i, "text": text})
        if self.error_event is not None:
            await self._event(writer, "error", self.error_event)
        else:
            usage = {"prompt_tokens": 5, "completion_tokens": len(self.texts), "total_tokens": 5 + len(self.texts)}
            await self._event(
                writer, "done", {"finish_reason": "stop", "stop": None, "seed": 7, "usage": usage, "text": ""}
            )
        writer.write(b"0\r\n\r\n")

    async def _event(self, writer: asyncio.StreamWriter, name: str, data: Any) -> None:
        event = f"event: {name}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n".encode()
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        step = self.piece_bytes or len(chunk)
        for i in range(0, len(chunk), step):
            writer.write(chunk[i : i + step])
            await writer.drain()
            if self.piece_bytes:
                await asyncio.sleep(0)
