"""The engine without a server, given the same load: `python -m crucible.bench.direct MODEL ...`.

Each line on standard input is a `Batch`, the reply one line with a `Log` as that of the clients over HTTP: the
difference is what the server costs. The first line written says that the model is loaded.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from crucible.bench.client import Outcome
from crucible.bench.load import Log, Mark
from crucible.engine.backend import PAGE_SIZE
from crucible.engine.backends import default_weight_format, make_backend, resolve_backend
from crucible.engine.engine import Engine
from crucible.engine.request import SamplingParams
from crucible.models import resolve


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """A closed load: `clients` prompts at once, the next one as soon as one has drawn its `new_tokens`."""

    prompts: Sequence[Sequence[int]]
    new_tokens: int
    clients: int


def run(engine: Engine, batch: Batch) -> Log:
    """The batch in an engine that has no other work."""
    params = SamplingParams(max_tokens=batch.new_tokens, ignore_eos=True)
    waiting = deque(enumerate(batch.prompts))
    outcomes: dict[int, Outcome] = {}
    marks: dict[str, Mark] = {}
    num_begun = 0

    def add() -> None:
        if not waiting:
            marks.setdefault("end", _mark(engine))
            return
        number, ids = waiting.popleft()
        outcomes[number] = Outcome(number, 200, time.perf_counter(), 0.0, [], [], len(ids))
        engine.add(number, ids, params)

    for _ in range(batch.clients):
        add()
    while engine.has_work:
        events, now = engine.step(), time.perf_counter()
        for event in events:
            assert isinstance(event.request_id, int)
            outcome = outcomes[event.request_id]
            if event.token_id is not None:
                num_begun += not outcome.tokens and outcome.shot < batch.clients
                outcome.tokens += 1
                outcome.times.append(now)
                outcome.counts.append(1)
            if event.finish is not None:
                outcome.ended = now
                add()
        if num_begun == batch.clients and "end" not in marks:
            marks.setdefault("begin", _mark(engine))
    end = marks["end"]
    return Log(list(outcomes.values()), marks.get("begin", end), end)


def _mark(engine: Engine) -> Mark:
    """As the server's metrics say it."""
    stats = engine.stats
    lines = (f"crucible:decode_{name}_total {getattr(stats, f'decode_{name}')}\n" for name in ("plans", "rows"))
    return Mark(time.perf_counter(), "".join(lines))


def main() -> None:
    """Serve batches until standard input ends."""
    # Libraries that print must not break the protocol: their standard output becomes standard error.
    replies = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--backend", required=True)
    parser.add_argument("--weights", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--positions", type=int, required=True)
    arguments = parser.parse_args()
    name = resolve_backend(arguments.backend)
    loaded = resolve(arguments.model)
    backend = make_backend(
        name,
        loaded.config,
        loaded.weights,
        weight_format=default_weight_format(name) if arguments.weights == "auto" else arguments.weights,
        num_slots=arguments.slots,
        num_pages=arguments.slots * -(-arguments.positions // PAGE_SIZE),
    )
    engine = Engine(backend, eos_ids=loaded.generation.eos_token_ids)

    def reply(line: bytes) -> None:
        replies.write(line + b"\n")
        replies.flush()

    reply(f"{name}".encode())
    for line in sys.stdin.buffer:
        reply(msgspec.json.encode(run(engine, msgspec.json.decode(line, type=Batch))))


if __name__ == "__main__":
    main()
