"""The engine over a backend that draws fixed tokens: events, ends, back-pressure, look-ahead and failures."""

from __future__ import annotations

import dataclasses
import random

import pytest
from engine_session import LONG, Session, finished
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from null_backend import BROKEN_ID, VOCAB_SIZE, NullBackend, expected_tokens, fixed_score

from crucible.engine.backend import PlanError
from crucible.engine.engine import Engine, Event
from crucible.engine.pages import PageError
from crucible.engine.request import RequestError, SamplingParams

# ---- events ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look_ahead", [0, 1, 3])
def test_each_request_gets_its_tokens_and_one_end(look_ahead: int) -> None:
    session = Session(NullBackend(), look_ahead=look_ahead, prefill_chunk=7, prefill_budget=16)
    for i in range(12):
        params = SamplingParams(max_tokens=1 + 3 * i, min_tokens=i, seed=i, stop_token_ids=(i, 40))
        session.add(i, range(1 + i, 3 + 4 * i), params)
    session.settle()
    assert {finished(events)[1] for events in session.events.values()} == {"stop", "length"}


def test_an_error_ends_one_request_without_a_token() -> None:
    session = Session(NullBackend())
    session.add("good", [1, 2], LONG)
    session.add("bad", [1, BROKEN_ID], dataclasses.replace(LONG, logprobs=1))
    session.settle()
    assert session.events["bad"] == [Event("bad", None, "error")]


def test_a_token_comes_with_its_logprobs_if_asked() -> None:
    session = Session(NullBackend())
    session.add("with", [1, 2], SamplingParams(max_tokens=3, logprobs=0))
    session.add("without", [1, 2], SamplingParams(max_tokens=3))
    session.settle()
    assert [event.logprobs.logprob for event in session.events["with"] if event.logprobs] == [
        -event.token_id / 8 for event in session.events["with"] if event.token_id is not None
    ]
    assert {event.logprobs for event in session.events["without"]} == {None}


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
@pytest.mark.parametrize("look_ahead", [0, 2])
def test_prompt_logprobs_come_with_the_first_event_across_chunks(chunk: int, look_ahead: int) -> None:
    """Beside a neighbour that also scores, one that doesn't, and one that ends with an error."""
    session = Session(NullBackend(), prefill_chunk=chunk, prefill_budget=2 * chunk, look_ahead=look_ahead)
    scored = SamplingParams(max_tokens=3, ignore_eos=True, prompt_logprobs=True)
    prompts = {"a": range(3, 22), "b": range(20, 50), "one": [5], "bad": [4, BROKEN_ID, 6]}
    for name, prompt in prompts.items():
        session.add(name, prompt, scored)
        session.add(f"{name} unscored", prompt, dataclasses.replace(scored, prompt_logprobs=False))
    session.settle()
    for name, prompt in prompts.items():
        first, *rest = session.events[name]
        assert first.prompt_logprobs == tuple(fixed_score(i, target) for i, target in enumerate(prompt[1:]))
        assert {event.prompt_logprobs for event in [*rest, *session.events[f"{name} unscored"]]} <= {None}


def test_choices_are_requests_of_their_own() -> None:
    session = Session(NullBackend())
    params = SamplingParams(max_tokens=5, n=3, seed=2**64 - 1, ignore_eos=True)
    for choice, its_params in enumerate(params.choices()):
        session.add(("a", choice), [1, 2, 3], its_params)
    session.settle()
    assert len({tuple(finished(session.events["a", choice])[0]) for choice in range(3)}) == 3


def test_an_id_can_be_used_again() -> None:
    session = Session(NullBackend())
    for _ in range(3):
        session.added.clear()
        session.events.clear()
        session.add("a", [1, 2], LONG)
        session.settle()


def test_a_step_without_work_does_nothing() -> None:
    backend = NullBackend()
    engine = Engine(backend)
    assert (engine.has_work, engine.step(), backend.num_submitted) == (False, [], 0)


# ---- cancelling -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("look_ahead", [0, 1, 2])
@pytest.mark.parametrize("steps", range(27))
def test_a_cancel_at_any_time_frees_slot_and_pages_at_once(steps: int, look_ahead: int) -> None:
    """From before the first chunk, over the prompt's five chunks, to before the last of twenty tokens and after."""
    session = Session(NullBackend(), prefill_chunk=4, look_ahead=look_ahead)
    session.add("cancelled", range(20), LONG)
    session.add("neighbour", range(10, 20), dataclasses.replace(LONG, max_tokens=40))
    session.step(steps)
    was_done = session.is_done("cancelled")
    free = session.engine.scheduler.num_free_pages
    session.cancel("cancelled")
    had_pages = steps > 0 and not was_done
    assert session.engine.scheduler.num_free_pages == free + 3 * had_pages
    session.step()
    assert session.is_done("cancelled")
    session.settle()


def test_pages_of_a_cancelled_request_serve_the_next_one_in_the_same_step() -> None:
    session = Session(NullBackend(num_slots=2, num_pages=3), look_ahead=2)
    session.add("first", range(20), LONG)
    session.step(4)
    session.add("second", range(21), LONG)
    session.step()
    assert session.engine.scheduler.num_waiting == 1
    session.cancel("first")
    session.step()
    assert (session.engine.scheduler.num_waiting, session.engine.scheduler.num_resident) == (0, 1)
    session.settle()


def test_a_cancel_that_comes_too_late_or_twice_has_no_effect() -> None:
    session = Session(NullBackend())
    session.add("a", [1], SamplingParams(max_tokens=1))
    session.settle()
    session.cancel("a")
    session.cancel("never added")
    assert not session.engine.has_work
    session.add("b", [1], LONG)
    session.step(3)
    session.cancel("b")
    session.cancel("b")
    assert session.engine.has_work
    assert [event.finish for event in session.engine.step()] == ["cancelled"]
    assert not session.engine.has_work


# ---- back-pressure and order ----------------------------------------------------------------------------------------


def test_too_few_pages_make_requests_wait_and_all_are_served() -> None:
    session = Session(NullBackend(num_slots=4, num_pages=4))
    for i in range(10):
        session.add(i, range(i, i + 20), LONG)
    session.step()
    assert (session.engine.scheduler.num_resident, session.engine.scheduler.num_waiting) == (1, 9)
    session.settle()
    ends = [name for name in session.events if session.is_done(name)]
    assert ends == list(range(10))


def test_running_requests_get_a_token_every_step_beside_a_long_prompt() -> None:
    session = Session(NullBackend(), prefill_budget=2, prefill_chunk=2)
    session.add("running", [1], dataclasses.replace(LONG, max_tokens=50))
    session.step()
    session.add("long", [1] * 60, LONG)
    for count in range(2, 32):
        session.step()
        assert len(session.events["running"]) == count
    session.settle()


def test_look_ahead_submits_before_it_reads() -> None:
    backend = NullBackend()
    engine = Engine(backend, look_ahead=1)
    engine.add("a", [1, 2], dataclasses.replace(LONG, max_tokens=3))
    seen = []
    while engine.has_work:
        events = engine.step()
        seen.append((backend.num_submitted, backend.num_read, len(events)))
    assert seen == [(1, 0, 0), (2, 1, 1), (3, 2, 1), (3, 3, 1)]


def test_rows_queued_behind_an_end_are_dropped() -> None:
    """The stop id is drawn first; two more steps are on their way by then, and the slot serves another request."""
    backend = NullBackend(num_slots=1)
    session = Session(backend, look_ahead=2)
    params = SamplingParams(max_tokens=30)
    (first, *_), _ = expected_tokens([3, 4], params, ())
    session.add("stops", [3, 4], dataclasses.replace(params, stop_token_ids=(first,)))
    session.add("next", [5, 6], LONG)
    session.settle()
    assert finished(session.events["stops"]) == ([first], "stop")


# ---- any order of calls ---------------------------------------------------------------------------------------------


FEW = st.integers(0, 8)


class EngineMachine(RuleBasedStateMachine):
    """Requests of all kinds come, are cancelled and served in any order; at the end each has exactly what it must."""

    @initialize(
        num_slots=st.integers(1, 5),
        num_pages=st.integers(2, 16),
        chunk=st.integers(1, 20),
        budget=st.integers(1, 30),
        look_ahead=st.integers(0, 3),
    )
    def start(self, num_slots: int, num_pages: int, chunk: int, budget: int, look_ahead: int) -> None:
        backend = NullBackend(num_slots, num_pages)
        self.session = Session(backend, prefill_chunk=chunk, prefill_budget=budget, look_ahead=look_ahead)

    @rule(
        prompt=st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=50),
        max_tokens=st.integers(1, 40),
        min_tokens=st.integers(0, 40),
        seed=st.integers(0, 9),
        stops=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4),
        flags=st.tuples(st.booleans(), st.booleans()),
        steps=FEW,
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        seed: int,
        stops: list[int],
        flags: tuple[bool, bool],
        steps: int,
    ) -> None:
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            seed=seed,
            stop_token_ids=stops,
            ignore_eos=flags[0],
            prompt_logprobs=flags[1],
        )
        name = len(self.session.added)
        needed = -(-(len(prompt) + max_tokens) // 16)
        if needed > self.session.backend.num_pages:
            with pytest.raises(RequestError, match="pages of the cache"):
                self.session.add(name, prompt, params)
        else:
            self.session.add(name, prompt, params)
        self.session.step(steps)

    @rule(choice=st.integers(0, 30), steps=FEW)
    def cancel(self, choice: int, steps: int) -> None:
        if self.session.added:
            self.session.cancel(list(self.session.added)[choice % len(self.session.added)])
        self.session.step(steps)

    def teardown(self) -> None:
        if hasattr(self, "session"):
            self.session.settle()


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)


def test_three_hundred_random_sessions() -> None:
    num_steps = 0
    for seed in range(300):
        rng = random.Random(seed)
        backend = NullBackend(rng.randint(1, 5), rng.randint(6, 16))
        session = Session(
            backend,
            prefill_chunk=rng.randint(1, 20),
            prefill_budget=rng.randint(1, 30),
            look_ahead=rng.randint(0, 3),
        )
        for name in range(rng.randint(1, 12)):
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 50))]
            session.add(name, prompt, SamplingParams(max_tokens=rng.randint(1, 40), seed=name))
            session.step(rng.randint(0, 8))
            if rng.random() < 0.3:
                session.cancel(rng.randrange(name + 1))
        session.settle()
        num_steps += backend.num_submitted
    assert num_steps > 5_000


# ---- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["open_slot", "submit"])
def test_after_a_failing_backend_the_rest_can_be_cancelled(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = NullBackend()
    session = Session(backend, prefill_chunk=4)
    session.add("a", range(9), LONG)
    session.step(2)
    session.add("b", range(9), LONG)
    with monkeypatch.context() as patch:
        patch.setattr(backend, fails, lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.engine.step()
        session.cancel("a")
        with pytest.raises((ZeroDivisionError, PlanError)):
            session.engine.step()
    session.cancel("b")
    session.settle()
    session.add("c", range(9), LONG)
    session.settle()


def test_going_on_after_a_failure_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = NullBackend()
    session = Session(backend)
    session.add("a", range(9), LONG)
    session.step(2)
    with monkeypatch.context() as patch:
        patch.setattr(backend, "submit", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            session.engine.step()
    with pytest.raises(PlanError, match="rows cannot start at"):
        session.engine.step()


def test_a_lost_page_is_found_when_the_engine_is_idle() -> None:
    session = Session(NullBackend())
    session.add("a", [1], SamplingParams(max_tokens=1))
    session.engine.scheduler._pages._free.pop()
    with pytest.raises(PageError, match="pages are not the 24"):
        session.engine.step()
