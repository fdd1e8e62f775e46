"""The native API for programs: what was generated as typed events, in the pieces in which it came."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Final, TypeAlias, TypeVar, get_args

import msgspec

from crucible.client.http import Address, UnreachableError, ask
from crucible.serve.protocol import ApiError, ErrorKind, FinishReason, Generate

SHORT_SECONDS: Final = 5.0
"""How long a reply may take for which nothing is computed."""
_KINDS: Final = frozenset(get_args(ErrorKind))
Struct = TypeVar("Struct", bound=msgspec.Struct)


class Token(msgspec.Struct, frozen=True):
    """A token was drawn; `text` is what became certain with it, often "" for a part of a character."""

    token_id: int
    text: str
    index: int = 0
    logprob: float | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int


class Done(msgspec.Struct, frozen=True):
    """A choice has ended; the fields are those of `protocol.End`."""

    finish_reason: FinishReason
    seed: int
    usage: Usage
    stop: str | int | None = None
    index: int = 0


Arrival: TypeAlias = Token | Done


class Health(msgspec.Struct, frozen=True):
    """What `GET /health` says. Without a model, the engine has not been ready yet."""

    status: str
    version: str
    reason: str | None = None
    model: str | None = None
    device: str = ""
    backend: str = ""
    weights: str = ""
    max_batch: int = 0
    context: int = 0


class Pages(msgspec.Struct, frozen=True):
    total: int
    used: int


class Batch(msgspec.Struct, frozen=True):
    last: int
    mean: float


class Tokens(msgspec.Struct, frozen=True):
    prompt: int
    generated: int


class Metrics(msgspec.Struct, frozen=True):
    """What `GET /metrics` says in JSON, as far as a person at a terminal looks at it."""

    active: int
    prefilling: int
    queued: int
    pages: Pages
    batch: Batch
    tokens: Tokens
    uptime: float


class _Error(msgspec.Struct):
    message: str
    type: str = "internal"
    param: str | None = None
    code: str | None = None

    def raised(self, retry_after: str | None = None) -> ApiError:
        kind: ErrorKind = self.type if self.type in _KINDS else "internal"  # type: ignore[assignment]
        seconds = int(retry_after) if retry_after and retry_after.isdecimal() else None
        return ApiError(kind, self.message, param=self.param, code=self.code, retry_after=seconds)


class _Failure(msgspec.Struct):
    error: _Error


_TOKEN: Final = msgspec.json.Decoder(Token)
_DONE: Final = msgspec.json.Decoder(Done)


class Client:
    """A server's native API. It holds no connection: each request makes its own.

    Args:
        url: such as http://127.0.0.1:8080.
        api_key: that the server asks for.

    Raises:
        ApiError: the URL is none.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.address = Address.of(url)
        self._headers = {"accept": "application/json"}
        if api_key:
            self._headers["authorization"] = f"Bearer {api_key}"

    async def stream(self, request: Generate) -> AsyncGenerator[Arrival, None]:
        """Generate: each token, and the end of each choice. Closing the generator cancels the request.

        Raises:
            UnreachableError: the server is not there, or went away before the end.
            ApiError: it refused the request, or failed.
        """
        async with contextlib.aclosing(self.arrivals(request)) as arrivals:
            async for events in arrivals:
                for _, event in events:
                    yield event

    async def arrivals(self, request: Generate) -> AsyncGenerator[list[tuple[float, Arrival]], None]:
        """As `stream`, but all that came since one last looked, and when it came by `time.perf_counter`."""
        body = msgspec.json.encode(request)
        headers = {**self._headers, "content-type": "application/json"}
        num_open = request.n or 1
        async with ask(self.address, "POST", "/v1/generate/stream", headers, body) as reply:
            if reply.status != 200:
                raise _refusal(await reply.body(), reply.headers.get("retry-after"))
            pending = b""
            async for pieces in reply.pieces():
                events: list[tuple[float, Arrival]] = []
                failure: ApiError | None = None
                try:
                    for when, data in pieces:
                        *texts, pending = (pending + data).split(b"\n\n")
                        for text in texts:
                            events.append((when, _event(text)))
                except ApiError as error:
                    failure = error
                if events:
                    yield events
                if failure is not None:
                    raise failure
                num_open -= sum(type(event) is Done for _, event in events)
                if num_open <= 0:
                    return
        raise UnreachableError("the stream broke off")

    async def health(self) -> Health:
        """How the server is; not being ready is no error here. Raises ApiError as `stream`."""
        return await self._get("/health", Health)

    async def metrics(self) -> Metrics:
        """What the server counts. Raises ApiError as `stream`."""
        return await self._get("/metrics", Metrics)

    async def _get(self, path: str, type: type[Struct]) -> Struct:
        try:
            async with (
                asyncio.timeout(SHORT_SECONDS),
                ask(self.address, "GET", path, self._headers) as reply,
            ):
                body = await reply.body()
        except TimeoutError:
            raise UnreachableError(f"{self.address} does not answer") from None
        try:
            return msgspec.json.decode(body, type=type)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise _refusal(body, reply.headers.get("retry-after")) from None


def _event(text: bytes) -> Arrival:
    """Raises ApiError: it is the event of one, or none of the native API."""
    name, _, data = text.partition(b"\ndata: ")
    try:
        if name == b"event: token":
            return _TOKEN.decode(data)
        if name == b"event: done":
            return _DONE.decode(data)
    except msgspec.MsgspecError:
        pass
    raise _refusal(data)


def _refusal(body: bytes, retry_after: str | None = None) -> ApiError:
    try:
        return msgspec.json.decode(body, type=_Failure).error.raised(retry_after)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return UnreachableError("what answers there is not Crucible's native API")
