"""An engine over a backend of fixed tokens, with an account of what each request must get."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from null_backend import NullBackend, expected_tokens

from crucible.engine.engine import Engine, Event
from crucible.engine.request import FinishReason, SamplingParams

EOS_IDS = (7, 50)
LONG = SamplingParams(max_tokens=20, ignore_eos=True)


def finished(events: Sequence[Event]) -> tuple[list[int], FinishReason]:
    """Tokens and end of a request, after the check that its events are well formed."""
    assert [event.finish for event in events[:-1]] == [None] * (len(events) - 1)
    finish = events[-1].finish
    assert finish is not None
    has_token = finish in ("stop", "length")
    assert (events[-1].token_id is not None) == has_token
    return [event.token_id for event in events if event.token_id is not None], finish


class Session:
    """An engine and all its events; `settle` checks them against what each request must have drawn."""

    def __init__(self, backend: NullBackend, **options: Any) -> None:
        self.backend = backend
        self.engine = Engine(backend, eos_ids=EOS_IDS, **options)
        self.added: dict[Any, tuple[tuple[int, ...], SamplingParams]] = {}
        self.cancelled: set[Any] = set()
        self.events: defaultdict[Any, list[Event]] = defaultdict(list)

    def add(self, name: Any, prompt: Sequence[int], params: SamplingParams) -> None:
        self.engine.add(name, prompt, params)
        self.added[name] = tuple(prompt), params

    def cancel(self, name: Any) -> None:
        if name in self.added and not self.is_done(name):
            self.cancelled.add(name)
        self.engine.cancel(name)

    def is_done(self, name: Any) -> bool:
        return bool(self.events[name]) and self.events[name][-1].finish is not None

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            for event in self.engine.step():
                assert not self.is_done(event.request_id), "nothing follows an end"
                self.events[event.request_id].append(event)
            self.engine.scheduler.check()

    def settle(self) -> None:
        for steps in itertools.count():
            if not self.engine.has_work:
                break
            assert steps < 5_000, "the engine makes no progress"
            self.step()
        for name, (prompt, params) in self.added.items():
            tokens, finish = finished(self.events[name])
            expected, expected_finish = expected_tokens(prompt, params, EOS_IDS)
            if name in self.cancelled:
                assert (finish, tokens) == ("cancelled", expected[: len(tokens)])
            else:
                assert (finish, tokens) == (expected_finish, expected)
        assert self.backend.slots == {}
        assert self.backend.num_read == self.backend.num_submitted
        assert self.engine.scheduler.num_free_pages == self.backend.num_pages
        assert self.engine.step() == []
