"""The engine's process alone: how it ends with its parent, and how events become the columns of a message."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import zmq
from cells import toy

from crucible.engine.backend import TokenLogprobs
from crucible.engine.engine import Engine, EngineStats, Event, Timing
from crucible.engine.null import NullBackend
from crucible.serve.channel import Detail, Loading, Logprobs, Stats, Step, listen
from crucible.serve.worker import _step


def start(address: str, parent: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "crucible.serve.worker", address, str(parent)], stdin=subprocess.PIPE
    )


def test_the_end_of_its_input_ends_it(tmp_path: Path) -> None:
    """What tells it of its parent's end where the system does not."""
    with zmq.Context[zmq.Socket[bytes]]() as context:
        ours = listen(context, f"ipc://{tmp_path / 'socket'}")
        with start(f"ipc://{tmp_path / 'socket'}", os.getpid()) as process:
            assert ours.receive() == Loading("starting the engine")
            assert process.poll() is None
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(10) == 1
        ours.close()


def test_a_parent_that_was_gone_before_ends_it(tmp_path: Path) -> None:
    with start(f"ipc://{tmp_path / 'socket'}", 1) as process:
        assert process.wait(10) == 1


def test_events_become_columns() -> None:
    scores = TokenLogprobs(-0.5, (7, 9), (-0.5, -2.0))
    events = [
        Event(4, None, "cancelled"),
        Event(1, 7, None, scores, (-1.0, -2.0), Timing(0.25, 0.5)),
        Event(2, 9, "stop"),
        Event(3, None, "error", None, None, Timing(0.0, 1.0)),
        Event(5, 8, None, scores),
    ]
    assert _step(events, Engine(NullBackend(toy(), num_pages=3))) == Step(
        numbers=[1, 2, 5],
        ids=[7, 9, 8],
        ends=[(4, "cancelled"), (2, "stop"), (3, "error")],
        details=[
            Detail(1, Logprobs(-0.5, [7, 9], [-0.5, -2.0]), [-1.0, -2.0], 0.25, 0.5),
            Detail(3, None, None, 0.0, 1.0),
            Detail(5, Logprobs(-0.5, [7, 9], [-0.5, -2.0])),
        ],
        stats=Stats(free_pages=3),
    )


def test_the_channels_stats_are_the_engines() -> None:
    assert Stats.__struct_fields__ == tuple(EngineStats.__dataclass_fields__)
