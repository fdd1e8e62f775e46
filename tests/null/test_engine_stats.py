"""What an engine counts of itself, and how long it says that a request took."""

from __future__ import annotations

import time

import pytest
from engine_session import LONG, Session
from hypothesis import given, settings
from hypothesis import strategies as st
from null_backend import BROKEN_ID, NullBackend

from crucible.engine.backend import SAMPLE
from crucible.engine.engine import EngineStats, Timing
from crucible.engine.request import SamplingParams


@pytest.mark.parametrize("look_ahead", [0, 2])
@settings(max_examples=25)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12), st.integers(0, 4)), min_size=1, max_size=8),
    chunk=st.integers(1, 30),
)
def test_counters_are_those_of_the_plans_that_the_backend_got(
    look_ahead: int, lengths: list[tuple[int, int, int]], chunk: int
) -> None:
    backend = NullBackend()
    session = Session(backend, look_ahead=look_ahead, prefill_chunk=chunk)
    for name, (num_prompt, max_tokens, steps) in enumerate(lengths):
        session.add(name, [3] * num_prompt, SamplingParams(max_tokens=max_tokens, seed=name))
        session.step(steps)
    session.settle()
    stats = session.engine.stats
    prefill = [[segment for segment in plan.segments if segment.ids is not None] for plan in backend.plans]
    decode = [[segment for segment in plan.segments if segment.ids is None] for plan in backend.plans]
    assert stats == EngineStats(
        steps=len(backend.plans),
        prefill_plans=sum(bool(segments) for segments in prefill),
        prefill_chunks=sum(map(len, prefill)),
        prefill_rows=sum(len(segment.kinds) for segments in prefill for segment in segments),
        decode_plans=sum(bool(segments) for segments in decode),
        decode_rows=sum(map(len, decode)),
        tokens=sum(event.token_id is not None for events in session.events.values() for event in events),
        free_pages=backend.num_pages,
        batch=len(backend.plans[-1].segments),
    )
    assert stats.prefill_rows == sum(num_prompt for num_prompt, _, _ in lengths)
    assert all(segment.kinds == (SAMPLE,) for segments in decode for segment in segments)


def test_gauges_say_how_it_stands() -> None:
    session = Session(NullBackend(num_slots=2, num_pages=24), prefill_chunk=4, prefill_budget=4)
    for name in range(4):
        session.add(name, range(8), LONG)
    stats = session.engine.stats
    assert (stats.waiting, stats.prefilling, stats.running, stats.free_pages) == (4, 0, 0, 24)
    session.step(3)
    stats = session.engine.stats
    assert (stats.waiting, stats.prefilling, stats.running, stats.free_pages, stats.batch) == (2, 1, 1, 20, 1)
    session.step()
    stats = session.engine.stats
    assert (stats.waiting, stats.prefilling, stats.running, stats.batch) == (2, 0, 2, 2)
    session.cancel(3)
    assert session.engine.stats.waiting == 1
    session.settle()


def test_a_first_event_says_how_long_the_request_waited_and_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    session = Session(NullBackend(num_slots=1), prefill_chunk=4)
    session.add("first", range(8), SamplingParams(max_tokens=2, ignore_eos=True))
    now[0] = 101.0
    session.add("bad", [1, BROKEN_ID], LONG)
    session.add("cancelled", [1], LONG)
    for now[0] in (103.0, 107.0, 115.0):
        session.step()
    session.cancel("cancelled")
    now[0] = 131.0
    session.settle()
    assert [event.timing for event in session.events["first"]] == [Timing(3.0, 4.0), None]
    assert [event.timing for event in session.events["bad"]] == [Timing(30.0, 0.0)]
    assert [event.timing for event in session.events["cancelled"]] == [None]
