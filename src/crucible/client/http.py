"""HTTP/1.1 as far as the native API needs it, over asyncio: one request a connection, the reply's bytes as they come.

A library for all of HTTP would cost several times as much for each token of a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from crucible.serve.protocol import ApiError

CONNECT_SECONDS: Final = 5.0
_MAX_HEAD_BYTES: Final = 1 << 16
Piece: TypeAlias = tuple[float, bytes]
"""When it came, by `time.perf_counter`, and what."""


class UnreachableError(ApiError):
    """Nobody answers, or the answer broke off, or is none in HTTP."""

    def __init__(self, message: str) -> None:
        super().__init__("unavailable", message)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: the scheme, name and port of its URL, and a path before its own ones."""

    host: str
    port: int
    prefix: str
    is_secure: bool

    @classmethod
    def of(cls, url: str) -> Address:
        """Raises ApiError: it is no http or https URL of a server."""
        try:
            parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
            port = parts.port
        except ValueError:
            parts, port = urllib.parse.urlsplit(""), None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.username:
            raise ApiError("invalid", f"a server's URL is http://HOST:PORT, not {url!r}")
        is_secure = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_secure else 80), parts.path.rstrip("/"), is_secure)

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http{'s' if self.is_secure else ''}://{host}:{self.port}{self.prefix}"


class Connection(asyncio.Protocol):
    """What comes on a connection, with the time at which it came.

    Nobody is woken for what comes while nobody waits, so that a reader who looks now and again costs little.
    """

    def __init__(self) -> None:
        self._pieces: list[Piece] = []
        self._lost: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.transport: asyncio.Transport | None = None

    async def take(self) -> list[Piece]:
        """All that has come since the last call, at least one piece. Raises UnreachableError: nothing more will."""
        while not self._pieces:
            if self._lost is not None:
                raise UnreachableError(f"the connection broke off: {self._lost}")
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        pieces, self._pieces = self._pieces, []
        return pieces

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """As asyncio's."""
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """As asyncio's."""
        self._pieces.append((time.perf_counter(), data))
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        """As asyncio's."""
        self._lost = str(error or "closed by the server")
        self._wake()


class Reply:
    """One reply, whose head has come; `rest` is what came with it."""

    def __init__(self, connection: Connection, head: bytes, rest: list[Piece]) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(first)
        self.status = int(status)
        pairs = (line.partition(":") for line in lines)
        self.headers: Mapping[str, str] = {name.lower(): value.strip() for name, _, value in pairs}
        self._length = int(self.headers.get("content-length", "0"))
        self._connection, self._rest = connection, rest

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """The body, as it comes. Raises UnreachableError: it breaks off, or is none in HTTP."""
        chunks = Chunks() if self.headers.get("transfer-encoding") == "chunked" else None
        pieces, left = self._rest, self._length
        while True:
            if chunks is not None:
                try:
                    pieces = [(when, body) for when, data in pieces if (body := chunks.feed(data))]
                except ValueError:
                    raise UnreachableError("the reply is none in HTTP") from None
            left -= sum(len(data) for _, data in pieces)
            if pieces:
                yield pieces
            if chunks.ended if chunks is not None else left <= 0:
                return
            pieces = await self._connection.take()

    async def body(self) -> bytes:
        """All of it. Raises UnreachableError as `pieces`."""
        return b"".join([data async for pieces in self.pieces() for _, data in pieces])


class Chunks:
    """Takes a chunked body apart; `ended` after its last chunk."""

    def __init__(self) -> None:
        self.ended = False
        self._pending = b""

    def feed(self, data: bytes) -> bytes:
        """What of the body has wholly come with more of its bytes. Raises ValueError: it is not chunked."""
        data = self._pending + data
        position, bodies = 0, []
        while (line_end := data.find(b"\r\n", position)) >= 0:
            begin = line_end + 2
            end = begin + int(data[position:line_end].partition(b";")[0], 16)
            if end + 2 > len(data):
                break
            position = end + 2
            if begin == end:
                self.ended = True
                break
            bodies.append(data[begin:end])
        self._pending = data[position:]
        return b"".join(bodies)


@contextlib.asynccontextmanager
async def ask(
    address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[Reply]:
    """A request; the connection ends with the block, which is how a server learns that nobody waits any more.

    Raises:
        UnreachableError: there is no reply.
    """
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, connection = await asyncio.get_running_loop().create_connection(
                Connection, address.host, address.port, ssl=ssl.create_default_context() if address.is_secure else None
            )
    except OSError as error:  # TimeoutError is one
        raise UnreachableError(f"{address} cannot be reached: {error.strerror or error or 'no answer'}") from None
    assert connection.transport is not None
    try:
        host = str(address).removesuffix(address.prefix).partition("://")[2]
        lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"host: {host}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in {**headers, "content-length": str(len(body))}.items()]
        connection.transport.write("\r\n".join((*lines, "", "")).encode("latin-1") + body)
        yield await _head(connection)
    finally:
        connection.transport.abort()


async def _head(connection: Connection) -> Reply:
    head = b""
    while True:
        pieces = await connection.take()
        head += b"".join(data for _, data in pieces)
        text, blank_line, rest = head.partition(b"\r\n\r\n")
        if blank_line:
            try:
                return Reply(connection, text, [(pieces[-1][0], rest)] if rest else [])
            except ValueError:
                raise UnreachableError("the reply is none in HTTP") from None
        if len(head) > _MAX_HEAD_BYTES:
            raise UnreachableError("the reply is none in HTTP")
