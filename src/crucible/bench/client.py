"""An HTTP/1.1 client for load: it looks at a stream's bytes just enough to count and time what the tokens came in.

No event is decoded and no object made per token, so that one core can play 64 clients of a server that is slower than
the client. What a stream claims at its end, tokens and their number, is read once, when it has ended.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

import msgspec

from crucible.errors import CrucibleError

ANSWER_SECONDS: Final = 120.0
"""How long a client waits for the end of a reply."""
_LAST_CHUNKS: Final = 8
_SHOWN_LENGTH: Final = 300
_PROMPT_TOKENS: Final = re.compile(rb'"(?:prompt|input)_tokens":(\d+)')
_OUTPUT_TOKENS: Final = re.compile(rb'"(?:completion|output)_tokens":(\d+)')


class LoadError(CrucibleError):
    """A server that cannot be reached, or whose reply is not HTTP as it is written here."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a request goes, and what tells the events of its reply apart.

    Attributes:
        path: of the URL.
        token: is in each event that shows a token, and nowhere else: no JSON text has a line's end or a bare quote.
        last: is in the event that ends a stream, and in no other; empty for replies that are no streams.
    """

    path: str
    token: bytes = b""
    last: bytes = b""


_NATIVE: Final = Endpoint("/v1/generate/stream", b"event: token\n", b"event: done\n")
ENDPOINTS: Final = {
    "generate": Endpoint("/v1/generate"),
    "native": _NATIVE,
    "native-chat": _NATIVE,
    "completions": Endpoint("/v1/completions", b'"finish_reason":null', b"data: [DONE]\n"),
    "chat": Endpoint("/v1/chat/completions", b'"delta":{"content":', b"data: [DONE]\n"),
    "messages": Endpoint("/v1/messages", b"event: content_block_delta\n", b"event: message_stop\n"),
}
"""By name; the last three answer whole too, if the request asks for no stream."""


class Outcome(msgspec.Struct):
    """What became of a request.

    Attributes:
        shot: its number in the load.
        status: of the reply; 0 where none came.
        began: when it was due to be sent, in seconds of one clock.
        ended: when the last of it came.
        times, counts: when tokens came, and how many at once. A reply that is no stream has none.
        prompt_tokens, tokens: by the reply's own account.
        retry_after: that header's value, "" without it.
        error: why it is no success, "" where it is one.
        has_left: it was given up by the client, as it was meant to be.
    """

    shot: int
    status: int
    began: float
    ended: float
    times: list[float]
    counts: list[int]
    prompt_tokens: int = 0
    tokens: int = 0
    retry_after: str = ""
    error: str = ""
    has_left: bool = False


class Reply:
    """One reply as its bytes come.

    Args:
        endpoint: that it comes from.
        on_first: called when the first token has come.
    """

    def __init__(self, endpoint: Endpoint, on_first: Callable[[], None] | None = None) -> None:
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.times: list[float] = []
        self.counts: list[int] = []
        self.is_complete = False
        self._endpoint = endpoint
        self._on_first = on_first
        self._pending = b""
        """Bytes of a head or a chunk that has not wholly come."""
        self._partial = b""
        """Of the body, the beginning of an event that has not wholly come."""
        self._last_chunks: deque[bytes] = deque(maxlen=_LAST_CHUNKS)
        self._length = 0
        self._read = self._read_head

    def feed(self, data: bytes, now: float) -> None:
        """Takes what came at a time. Raises LoadError: it is no such reply."""
        if self._pending:
            data, self._pending = self._pending + data, b""
        self._read(data, now)

    @property
    def end(self) -> bytes:
        """The last of the body; all of one that came in few pieces."""
        return b"".join(self._last_chunks) + self._partial

    def _read_head(self, data: bytes, now: float) -> None:
        head, blank_line, body = data.partition(b"\r\n\r\n")
        if not blank_line:
            self._pending = data
            return
        first, *lines = head.split(b"\r\n")
        if not (match := re.match(rb"HTTP/1\.1 (\d{3})", first)):
            raise LoadError(f"the server's reply begins with {first[:_SHOWN_LENGTH]!r}")
        self.status = int(match[1])
        pairs = (line.partition(b":") for line in lines)
        self.headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if self.headers.get(b"transfer-encoding") == b"chunked":
            self._read = self._read_chunks
        else:
            self._length = int(self.headers.get(b"content-length", b"0"))
            self._read = self._read_whole
        self._read(body, now)

    def _read_whole(self, data: bytes, now: float) -> None:
        if len(data) < self._length:
            self._pending = data
        else:
            self._last_chunks.append(data)
            self.is_complete = True

    def _read_chunks(self, data: bytes, now: float) -> None:
        position = num_tokens = 0
        while (line_end := data.find(b"\r\n", position)) >= 0:
            begin = line_end + 2
            end = begin + int(data[position:line_end], 16)
            if end + 2 > len(data):
                break
            position = end + 2
            if begin == end:
                self.is_complete = True
                break
            num_tokens += self._count(data[begin:end])
        self._pending = data[position:]
        if num_tokens:
            self.times.append(now)
            self.counts.append(num_tokens)
            if self._on_first is not None:
                self._on_first()
                self._on_first = None

    def _count(self, body: bytes) -> int:
        """Tokens in the events that are complete with a piece of the body."""
        if not self._endpoint.token:
            self._last_chunks.append(body)
            return 0
        if self._partial:
            body = self._partial + body
        events_end = body.rfind(b"\n\n") + 2
        if events_end < 2:
            self._partial = body
            return 0
        self._partial = body[events_end:]
        self._last_chunks.append(body[:events_end])
        return body.count(self._endpoint.token, 0, events_end)

    def outcome(self, shot: int, began: float, ended: float) -> Outcome:
        """What a complete reply was."""
        end = self.end
        prompt_tokens, tokens = _PROMPT_TOKENS.findall(end), _OUTPUT_TOKENS.findall(end)
        is_stream = self.headers.get(b"content-type", b"").startswith(b"text/event-stream")
        error = ""
        if self.status != 200 or (is_stream and self._endpoint.last not in end):
            error = end[-_SHOWN_LENGTH:].decode(errors="replace") or "the reply is empty"
        return Outcome(
            shot=shot,
            status=self.status,
            began=began,
            ended=ended,
            times=self.times,
            counts=self.counts,
            # Anthropic's streams tell the prompt's at their beginning too, and the output's as 0 there.
            prompt_tokens=int(prompt_tokens[-1]) if prompt_tokens else 0,
            tokens=int(tokens[-1]) if tokens else 0,
            retry_after=self.headers.get(b"retry-after", b"").decode(errors="replace"),
            error=error,
        )


class Connection(asyncio.Protocol):
    """A connection that is kept for one request after the other."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._reply: Reply | None = None
        self._done: asyncio.Future[float] | None = None
        self._has_left = False

    @classmethod
    async def open(cls, host: str, port: int) -> Connection:
        """Raises LoadError: nobody answers there."""
        try:
            async with asyncio.timeout(ANSWER_SECONDS):
                _, connection = await asyncio.get_running_loop().create_connection(cls, host, port)
        except OSError as error:  # TimeoutError is one
            raise LoadError(f"http://{host}:{port} cannot be reached: {str(error) or 'it does not answer'}") from None
        return connection

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def is_idle(self) -> bool:
        """Whether no reply is awaited."""
        return self._done is None

    @property
    def num_tokens(self) -> int:
        """Tokens of the reply that is awaited."""
        return 0 if self._reply is None else sum(self._reply.counts)

    async def ask(
        self,
        request: bytes,
        endpoint: Endpoint,
        *,
        shot: int = 0,
        due: float | None = None,
        leaves_after: float | None = None,
        on_first: Callable[[], None] | None = None,
    ) -> Outcome:
        """Sends a request and waits for the end of its reply, which may be that of the connection.

        Args:
            request: head and body.
            endpoint: that it is for.
            shot: its number.
            due: when it ought to be sent, if not now.
            leaves_after: seconds after which the client closes the connection.
            on_first: called when the first token has come.
        """
        reply = Reply(endpoint, on_first)
        began = time.perf_counter() if due is None else due
        try:
            ended = await self._exchange(request, reply, leaves_after)
        except LoadError as error:
            return Outcome(
                shot=shot,
                status=reply.status,
                began=began,
                ended=time.perf_counter(),
                times=reply.times,
                counts=reply.counts,
                error=str(error),
                has_left=self._has_left,
            )
        return reply.outcome(shot, began, ended)

    async def get(self, request: bytes) -> str:
        """The body of a small reply. Raises LoadError: there is none, or the status is not 200."""
        reply = Reply(Endpoint(""))
        await self._exchange(request, reply)
        text = reply.end.decode()
        if reply.status != 200:
            raise LoadError(f"the server answered {reply.status}: {text[:_SHOWN_LENGTH]}")
        return text

    async def _exchange(self, request: bytes, reply: Reply, leaves_after: float | None = None) -> float:
        """When the last of the reply came. Raises LoadError: it did not all come."""
        loop = asyncio.get_running_loop()
        self._reply, self._done = reply, loop.create_future()
        if leaves_after is None:
            timer = loop.call_later(ANSWER_SECONDS, self._give_up)
        else:
            timer = loop.call_later(leaves_after, self.leave)
        try:
            if self._transport is None or self._transport.is_closing():
                raise LoadError("the connection is closed")
            self._transport.write(request)
            return await self._done
        finally:
            timer.cancel()
            self._reply = self._done = None

    def leave(self) -> None:
        """Closes the connection without waiting for anything."""
        self._has_left = True
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Closes the connection."""
        if self._transport is not None:
            self._transport.close()

    def _give_up(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(LoadError(f"the reply had not ended after {ANSWER_SECONDS:.0f} s"))
        self.close()

    # ---- asyncio.Protocol -------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without inheriting from it

    def data_received(self, data: bytes) -> None:
        now, reply, done = time.perf_counter(), self._reply, self._done
        if reply is None or done is None or done.done():
            return
        try:
            reply.feed(data, now)
        except (LoadError, ValueError) as error:
            done.set_exception(LoadError(f"not a reply in HTTP/1.1: {error}"))
            self.close()
            return
        if reply.is_complete:
            done.set_result(now)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            reason = "the client left" if self._has_left else f"the connection ended: {error or 'closed by the server'}"
            self._done.set_exception(LoadError(reason))


def request_bytes(host: str, port: int, path: str, body: str | None = None) -> bytes:
    """A request: POST with a body of JSON, GET without one."""
    content = b"" if body is None else body.encode()
    lines = [f"{'GET' if body is None else 'POST'} {path} HTTP/1.1", f"host: {host}:{port}"]
    if body is not None:
        lines += ["content-type: application/json", f"content-length: {len(content)}"]
    return "\r\n".join((*lines, "", "")).encode() + content
