"""A server that draws a token for each of its streams in every tick, and speaks just enough HTTP for a client of load.

It answers every endpoint as the service does, on a thread of its own, and can be told to misbehave.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

TICK_SECONDS = 0.002


@dataclass
class Stub:
    """A running server and what it saw.

    Attributes:
        room: requests at once; more are refused.
        lost: tokens of each reply that are not drawn, though they are counted.
        cut: whether streams end before their last event.
        count: the prompt tokens of a request.
    """

    port: int = 0
    room: int = 1000
    lost: int = 0
    cut: bool = False
    count: Callable[[dict[str, Any]], int] = lambda request: 7
    plans: int = 0
    rows: int = 0
    requests: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    num_left: int = 0
    streams: dict[object, asyncio.Event] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def metrics(self) -> str:
        lines = ("# HELP crucible:x y", f"crucible:decode_plans_total {self.plans}.0")
        labelled = 'crucible:request_success_total{finished_reason="stop"} 1.0'
        return "\n".join((*lines, f"crucible:decode_rows_total {float(self.rows)}", labelled, ""))


class running:  # noqa: N801 - reads as a verb
    """`with running() as stub`."""

    def __init__(self, **settings: Any) -> None:
        self.stub = Stub(**settings)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self) -> Stub:
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        return self.stub

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._server = await asyncio.start_server(lambda *streams: connection(self.stub, *streams), "127.0.0.1", 0)
        self.stub.port = self._server.sockets[0].getsockname()[1]
        self._ticker = asyncio.create_task(tick(self.stub))

    async def _stop(self) -> None:
        self._server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def tick(stub: Stub) -> None:
    """A step of the engine that is not there."""
    while True:
        await asyncio.sleep(TICK_SECONDS)
        if stub.streams:
            stub.plans += 1
            stub.rows += len(stub.streams)
        for event in stub.streams.values():
            event.set()


async def connection(stub: Stub, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while True:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split()[1]
            length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
            await answer(stub, path, await reader.readexactly(length), writer)
    except (asyncio.IncompleteReadError, ConnectionError):
        stub.num_left += bool(stub.streams.pop(writer, None))
    finally:
        writer.close()


async def answer(stub: Stub, path: str, body: bytes, writer: asyncio.StreamWriter) -> None:
    if not body:
        found: Any = {
            "/health": {"backend": "stub", "weights": "none"},
            "/v1/models": {"data": [{"id": "stub"}]},
        }.get(path)
        text = stub.metrics() if found is None else json.dumps(found)
        writer.write(whole(200, text.encode()))
        return
    request = json.loads(body)
    stub.requests.append((path, request))
    if len(stub.streams) >= stub.room:
        status = 529 if path == "/v1/messages" else 429
        writer.write(whole(status, b'{"error": "full"}', b"retry-after: 1\r\n"))
        return
    stub.streams[writer] = asyncio.Event()
    streams = request.get("stream", path == "/v1/generate/stream")
    if streams:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
    for index in range(request["max_tokens"] - stub.lost):
        await stub.streams[writer].wait()
        stub.streams[writer].clear()
        if streams:
            writer.write(chunk(EVENTS[path](index)))
            await writer.drain()
    del stub.streams[writer]
    usage = {"prompt_tokens": stub.count(request), "completion_tokens": request["max_tokens"]}
    if streams:
        writer.write((b"" if stub.cut else chunk(ENDS[path](json.dumps(usage, separators=(",", ":"))))) + b"0\r\n\r\n")
    else:
        writer.write(whole(200, json.dumps({"usage": usage}, separators=(",", ":")).encode()))


EVENTS: dict[str, Callable[[int], str]] = {
    "/v1/generate/stream": lambda i: f'event: token\ndata: {{"token_id":{i},"text":"event: token"}}\n\n',
    "/v1/completions": lambda i: 'data: {"choices":[{"text":"a \\"finish_reason\\":null","finish_reason":null}]}\n\n',
    "/v1/chat/completions": lambda i: (
        'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n' * (i == 0)
        + 'data: {"choices":[{"delta":{"content":"b"}}]}\n\n'
    ),
    "/v1/messages": lambda i: 'event: content_block_delta\ndata: {"delta":{"text":"c"}}\n\n',
}
ENDS: dict[str, Callable[[str], str]] = {
    "/v1/generate/stream": lambda usage: f'event: done\ndata: {{"usage":{usage}}}\n\n',
    "/v1/completions": lambda usage: f'data: {{"choices":[],"usage":{usage}}}\n\ndata: [DONE]\n\n',
    "/v1/chat/completions": lambda usage: f'data: {{"choices":[],"usage":{usage}}}\n\ndata: [DONE]\n\n',
    "/v1/messages": lambda usage: (
        "event: message_delta\ndata: "
        + json.dumps({"usage": messages_usage(usage)}, separators=(",", ":"))
        + "\n\nevent: message_stop\ndata: {}\n\n"
    ),
}


def messages_usage(usage: str) -> dict[str, int]:
    found = json.loads(usage)
    return {"input_tokens": found["prompt_tokens"], "output_tokens": found["completion_tokens"]}


def chunk(text: str) -> bytes:
    data = text.encode()
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole(status: int, body: bytes, headers: bytes = b"") -> bytes:
    return b"HTTP/1.1 %d X\r\n%bcontent-length: %d\r\n\r\n%b" % (status, headers, len(body), body)
