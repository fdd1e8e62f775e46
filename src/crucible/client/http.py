"""HTTP/1.1 as far as the native API needs it, over asyncio: one request a connection, the reply's bytes as they come.

A library for all of HTTP would cost several times as much for each token of a stream.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import urllib.parse
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Final

from crucible.serve.protocol import ApiError

CONNECT_SECONDS: Final = 5.0
_READ_BYTES: Final = 1 << 16


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


class Reply:
    """One reply, whose head has come."""

    def __init__(self, reader: asyncio.StreamReader, head: bytes) -> None:
        first, *lines = head.decode("latin-1").rstrip().split("\r\n")
        version, status, *_ = first.split(" ")
        if not version.startswith("HTTP/1."):
            raise ValueError(first)
        self.status = int(status)
        pairs = (line.partition(":") for line in lines)
        self.headers: Mapping[str, str] = {name.lower(): value.strip() for name, _, value in pairs}
        self._reader = reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body, in pieces as they come. Raises UnreachableError: it breaks off, or is none in HTTP."""
        chunks = Chunks() if self.headers.get("transfer-encoding") == "chunked" else None
        left = int(self.headers.get("content-length", "0"))
        try:
            while not chunks.ended if chunks else left > 0:
                data = await self._reader.read(_READ_BYTES)
                if not data:
                    raise UnreachableError("the connection broke off")
                if chunks:
                    data = chunks.feed(data)
                else:
                    left -= len(data)
                if data:
                    yield data
        except (OSError, ValueError) as error:
            if isinstance(error, ApiError):
                raise
            raise UnreachableError(f"the connection broke off: {error}") from None

    async def body(self) -> bytes:
        """All of it. Raises UnreachableError as `pieces`."""
        return b"".join([piece async for piece in self.pieces()])


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
            reader, writer = await asyncio.open_connection(
                address.host, address.port, ssl=ssl.create_default_context() if address.is_secure else None
            )
    except OSError as error:  # TimeoutError is one
        raise UnreachableError(f"{address} cannot be reached: {error.strerror or error or 'no answer'}") from None
    try:
        host = str(address).removesuffix(address.prefix).partition("://")[2]
        lines = [f"{method} {address.prefix}{path} HTTP/1.1", f"host: {host}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in {**headers, "content-length": str(len(body))}.items()]
        writer.write("\r\n".join((*lines, "", "")).encode("latin-1") + body)
        try:
            reply = Reply(reader, await reader.readuntil(b"\r\n\r\n"))
        except (OSError, EOFError, ValueError, asyncio.LimitOverrunError) as error:
            raise UnreachableError(f"{address} gave no reply in HTTP: {error}") from None
        yield reply
    finally:
        writer.transport.abort()
