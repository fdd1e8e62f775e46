"""The messages between the two processes, and the pair of sockets that they go through."""

from __future__ import annotations

import select
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from crucible.serve.channel import (
    Add,
    Cancel,
    Channel,
    Detail,
    EngineConfig,
    Failed,
    FromEngine,
    Loading,
    Logprobs,
    Ping,
    Pong,
    Ready,
    Refused,
    Start,
    Stats,
    Step,
    Stop,
    ToEngine,
    connect,
    listen,
)

TO_ENGINE: list[ToEngine] = [
    Start(EngineConfig(model="a/b", kv_pages=7, look_ahead=1)),
    Add(2**40, [0, 5, 262143], {"seed": 2**64 - 1, "logit_bias": {7: -1.5, 9: 2}, "stop_token_ids": [3], "top_p": 0.9}),
    Cancel(3),
    Ping(4),
    Stop(),
]
DETAILS = [
    Detail(1, Logprobs(-0.1 / 3, [7, 9], [-0.1 / 3, -float("inf")]), [-1.5], 0.25, 1e-9),
    Detail(2, queue_seconds=0.0),
]
FROM_ENGINE: list[FromEngine] = [
    Loading("reading"),
    Loading("reading", 0.5),
    Ready("cpu", "a CPU, 2 threads", "int8", 64, 100, 16, 2048, 49152, "fp_0", 1.5),
    Failed("no such model"),
    Step([1, 2], [61, 40], [(2, "stop"), (3, "cancelled")], DETAILS, Stats(*range(12))),
    Refused(9, "too long"),
    Pong(4),
]


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[Channel[Any, Any], Channel[Any, Any]]]:
    """The HTTP process' and the engine's."""
    with zmq.Context[zmq.Socket[bytes]]() as context:
        address = f"ipc://{tmp_path / 'socket'}"
        ours, engines = listen(context, address), connect(context, address)
        yield ours, engines
        ours.close()
        engines.close()


def test_every_message_arrives_as_it_was_sent_and_in_order(ends: tuple[Channel[Any, Any], Channel[Any, Any]]) -> None:
    ours, engines = ends
    for message in FROM_ENGINE:
        assert engines.send(message)
    assert [ours.receive() for _ in FROM_ENGINE] == FROM_ENGINE
    for order in TO_ENGINE:
        assert ours.send(order)
    assert [engines.receive() for _ in TO_ENGINE] == TO_ENGINE
    assert not ours.has_message
    assert not engines.has_message


def test_messages_are_arrays_and_a_step_is_columns() -> None:
    step = Step([1000 + i for i in range(64)], [40000] * 64, [], [], Stats())
    encoded = msgspec.msgpack.encode(step)
    assert len(encoded) < 64 * 6 + 40
    assert msgspec.msgpack.decode(encoded)[:3] == [19, step.numbers, step.ids]


def test_nobody_is_waited_for(tmp_path: Path) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        ours = listen(context, f"ipc://{tmp_path / 'socket'}")
        assert not ours.has_message
        assert not ours.send(Ping(1))
        ours.close()


def test_the_descriptor_says_that_something_came(ends: tuple[Channel[Any, Any], Channel[Any, Any]]) -> None:
    """As the event loop uses it: read everything when it is readable, and look after each send."""
    ours, engines = ends
    total, got = 3000, []

    def answer() -> None:
        for _ in range(total):
            engines.send(Pong(engines.receive().sequence))

    engines.send(Loading("there"))
    assert ours.receive() == Loading("there")
    thread = threading.Thread(target=answer)
    thread.start()
    sent = 0
    while len(got) < total:
        if sent < total:
            ours.send(Ping(sent))
            sent += 1
            is_due = ours.has_message
        else:
            assert select.select([ours.descriptor], [], [], 10)[0], "a message is there, and nothing said so"
            is_due = True
        while is_due and ours.has_message:
            got.append(ours.receive().sequence)
    thread.join()
    assert got == list(range(total))


def test_what_is_sent_last_arrives_if_the_end_lingers(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path / 'socket'}"
    with zmq.Context[zmq.Socket[bytes]]() as context:
        ours = listen(context, address)
        with zmq.Context[zmq.Socket[bytes]]() as theirs:
            engines = connect(theirs, address)
            engines.send(Failed("x" * 1_000_000))
            engines.close(1000)
        assert ours.receive() == Failed("x" * 1_000_000)
        ours.close()
