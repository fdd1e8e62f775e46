"""What the HTTP process and the engine's process say to each other, and how: msgpack over one ZeroMQ pair of sockets.

Messages are structs that msgpack writes as arrays, told apart by a number in front. All tokens of an engine step are
one message of columns: what the HTTP process pays for a token must not be an object.
"""

from __future__ import annotations

from typing import Any, Generic, TypeAlias, TypeVar, cast

import msgspec
import zmq


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is started with.

    Attributes:
        model: as for `models.resolve`.
        backend, weights: as for `LLM`.
        max_batch: requests that are computed at once; more wait.
        kv_pages: pages of 16 positions of the key/value cache; None for as many as `max_batch` requests may need, as
            far as memory goes.
        prefill_budget, prefill_chunk, look_ahead: as for `Engine`; None for its defaults, but for a budget
            that suits the backend.
    """

    model: str
    backend: str = "auto"
    weights: str = "auto"
    max_batch: int = 64
    kv_pages: int | None = None
    prefill_budget: int | None = None
    prefill_chunk: int | None = None
    look_ahead: int | None = None


# ---- to the engine ----------------------------------------------------------------------------------------------


class _Message(msgspec.Struct, array_like=True):
    """Base of all messages."""


class Start(_Message, tag=0):
    """The first message, once."""

    config: EngineConfig


class Add(_Message, tag=1):
    """A request: `params` are the fields of the engine's SamplingParams that are not at their defaults; n is 1."""

    number: int
    prompt_ids: list[int]
    params: dict[str, Any]


class Cancel(_Message, tag=2):
    """End a request, if it has not ended."""

    number: int


class Ping(_Message, tag=3):
    """To be answered by a Pong between two steps."""

    sequence: int


class Stop(_Message, tag=4):
    """End the process."""


# ---- from the engine --------------------------------------------------------------------------------------------


class Loading(_Message, tag=16):
    """What it does before it is ready, and how far it is, from 0 to 1 where that is known. The first one of a process
    says that it listens."""

    stage: str
    done: float | None = None


class Ready(_Message, tag=17):
    """It takes requests from here on.

    Attributes:
        backend: by name, never "auto".
        device: in words.
        weights: the format that matrices are held in.
        max_batch, num_pages: as they are.
        page_size: positions per page.
        context: tokens of prompt and output together.
        vocab_size: ids are 0 to one less.
        fingerprint: of architecture, weights, their format, backend and version: equal ones give equal bits.
        seconds: from the process' first to this message.
    """

    backend: str
    device: str
    weights: str
    max_batch: int
    num_pages: int
    page_size: int
    context: int
    vocab_size: int
    fingerprint: str
    seconds: float


class Failed(_Message, tag=18):
    """It cannot start, and would not the next time either: one line for the user."""

    message: str


class Logprobs(msgspec.Struct, array_like=True):
    """The engine's `TokenLogprobs`."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Detail(msgspec.Struct, array_like=True):
    """What is known of one drawn token, or of an end without one, beside it.

    There is one for the first token of each request, and one for each token of a request that asks for logprobs.

    Attributes:
        logprobs: of the token, if they were asked for.
        prompt_logprobs: with the first, if they were asked for: of the prompt's tokens from the second on.
        queue_seconds: with the first: from the engine's taking the request to its entering a slot.
        prefill_seconds: with the first: from there to this token.
    """

    number: int
    logprobs: Logprobs | None = None
    prompt_logprobs: list[float] | None = None
    queue_seconds: float | None = None
    prefill_seconds: float | None = None


class Stats(msgspec.Struct, array_like=True):
    """The engine's `EngineStats`: counters since the process began, then how it stands."""

    steps: int = 0
    prefill_plans: int = 0
    prefill_chunks: int = 0
    prefill_rows: int = 0
    decode_plans: int = 0
    decode_rows: int = 0
    tokens: int = 0
    running: int = 0
    prefilling: int = 0
    waiting: int = 0
    free_pages: int = 0
    batch: int = 0


class Step(_Message, tag=19):
    """What a step of the engine gave: request `numbers[i]` drew `ids[i]`; then those that ended, and why.

    The token that ends a request by "stop" is among the ids. A request that ends by "error" or "cancelled" drew none.
    """

    numbers: list[int]
    ids: list[int]
    ends: list[tuple[int, str]]
    details: list[Detail]
    stats: Stats


class Refused(_Message, tag=20):
    """A request that was not taken, and why."""

    number: int
    message: str


class Pong(_Message, tag=21):
    """The answer to the Ping of the same number."""

    sequence: int


ToEngine: TypeAlias = Start | Add | Cancel | Ping | Stop
FromEngine: TypeAlias = Loading | Ready | Failed | Step | Refused | Pong

Sent = TypeVar("Sent", bound=_Message)
Received = TypeVar("Received", bound=_Message)


class Channel(Generic[Sent, Received]):
    """One end, which belongs to one thread. What waits to be sent or to be read is bounded by nothing but memory.

    Args:
        socket: a pair socket that is bound or connected.
        received: the type of the messages that come here, `ToEngine` or `FromEngine`.
    """

    def __init__(self, socket: zmq.Socket[bytes], received: Any) -> None:
        self._socket = socket
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(received).decode

    @property
    def descriptor(self) -> int:
        """Becomes readable when something happens here. It says so once: everything must be read then, and
        `has_message` asked after each `send`."""
        return cast(int, self._socket.getsockopt(zmq.FD))

    @property
    def has_message(self) -> bool:
        """Whether `receive` would return at once."""
        return bool(cast(int, self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    def send(self, message: Sent) -> bool:
        """Never waits. False if nobody is there to send to."""
        try:
            self._socket.send(self._encode(message), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def receive(self) -> Received:
        """The next message, waited for without using the processor."""
        return cast(Received, self._decode(self._socket.recv()))

    def close(self, linger_ms: int = 0) -> None:
        """What was sent has so many milliseconds to leave, once the socket's context ends."""
        self._socket.close(linger_ms)


def listen(context: zmq.Context[zmq.Socket[bytes]], address: str) -> Channel[ToEngine, FromEngine]:
    """The HTTP process' end. It can send once it has received."""
    socket = _pair(context)
    socket.bind(address)
    return Channel(socket, FromEngine)


def connect(context: zmq.Context[zmq.Socket[bytes]], address: str) -> Channel[FromEngine, ToEngine]:
    """The engine's end."""
    socket = _pair(context)
    socket.connect(address)
    return Channel(socket, ToEngine)


def _pair(context: zmq.Context[zmq.Socket[bytes]]) -> zmq.Socket[bytes]:
    socket = context.socket(zmq.PAIR)
    socket.set_hwm(0)  # a full queue would make one process wait for the other; requests in flight are bounded anyway
    return socket
