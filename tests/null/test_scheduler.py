"""Who computes what in a step: order, budget, back-pressure and fairness, on examples and in any order of calls."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from scheduler_model import CheckedScheduler

from crucible.engine.pages import PageError
from crucible.engine.request import RequestError
from crucible.engine.scheduler import Plan, Rows, Scheduler
from crucible.errors import CrucibleError


def make(num_slots: int = 4, num_pages: int = 100, *, budget: int = 512, chunk: int = 256) -> Scheduler:
    return Scheduler(num_slots, num_pages, page_size=16, prefill_budget=budget, prefill_chunk=chunk)


def shape(plan: Plan) -> list[tuple[Any, int, int, bool]]:
    return [(rows.request_id, rows.start, rows.length, rows.draws) for rows in plan.rows]


# ---- examples -------------------------------------------------------------------------------------------------------


def test_one_request_from_its_first_chunk_to_its_last_row() -> None:
    scheduler = make(chunk=20)
    scheduler.add("a", 50, 4)
    plans = [scheduler.plan() for _ in range(8)]
    (admission,) = plans[0].admissions
    assert (admission.request_id, admission.slot, len(admission.pages)) == ("a", 0, 4)
    assert [shape(plan) for plan in plans] == [
        [("a", 0, 20, False)],
        [("a", 20, 20, False)],
        [("a", 40, 10, True)],
        [("a", 50, 1, True)],
        [("a", 51, 1, True)],
        [("a", 52, 1, True)],  # draws the fourth token, which is never fed
        [],
        [],
    ]
    assert scheduler.num_resident == 1
    assert scheduler.end("a") == 0
    assert (scheduler.num_resident, scheduler.num_free_pages) == (0, 100)


def test_one_token_is_drawn_after_the_prompt_alone() -> None:
    scheduler = make()
    scheduler.add("a", 3, 1)
    assert shape(scheduler.plan()) == [("a", 0, 3, True)]
    assert shape(scheduler.plan()) == []


def test_decode_rows_come_first_and_cost_prompts_no_budget() -> None:
    scheduler = make(budget=8, chunk=8)
    for name in ("a", "b"):
        scheduler.add(name, 4, 10)
    scheduler.plan()
    scheduler.add("c", 20, 10)
    assert shape(scheduler.plan()) == [("a", 4, 1, True), ("b", 4, 1, True), ("c", 0, 8, False)]


def test_prompts_are_packed_under_the_budget_and_rotate() -> None:
    scheduler = make(budget=10, chunk=6)
    for name, length in (("a", 14), ("b", 9), ("c", 2)):
        scheduler.add(name, length, 5)
    assert shape(scheduler.plan()) == [("a", 0, 6, False), ("b", 0, 4, False)]
    assert shape(scheduler.plan()) == [("c", 0, 2, True), ("a", 6, 6, False), ("b", 4, 2, False)]
    assert shape(scheduler.plan()) == [("c", 2, 1, True), ("a", 12, 2, True), ("b", 6, 3, True)]


def test_the_first_in_line_waits_for_pages_and_is_not_overtaken() -> None:
    scheduler = make(num_pages=10)
    scheduler.add("large", 100, 28)  # 8 pages
    scheduler.add("larger", 16, 32)  # 3
    scheduler.add("small", 8, 8)  # 1
    assert [admission.request_id for admission in scheduler.plan().admissions] == ["large"]
    assert scheduler.plan().admissions == ()
    assert (scheduler.num_waiting, scheduler.num_free_pages) == (2, 2)
    scheduler.end("large")
    assert [admission.request_id for admission in scheduler.plan().admissions] == ["larger", "small"]


def test_who_leaves_the_queue_lets_the_next_one_in() -> None:
    scheduler = make(num_pages=10)
    scheduler.add("a", 100, 28)
    scheduler.plan()
    scheduler.add("large", 100, 28)
    scheduler.add("small", 8, 8)
    assert scheduler.plan().admissions == ()
    assert scheduler.end("large") is None
    assert [admission.request_id for admission in scheduler.plan().admissions] == ["small"]


def test_slots_are_the_other_limit() -> None:
    scheduler = make(num_slots=2)
    for name in "abc":
        scheduler.add(name, 5, 5)
    assert [admission.slot for admission in scheduler.plan().admissions] == [0, 1]
    assert scheduler.end("a") == 0
    (admission,) = scheduler.plan().admissions
    assert (admission.request_id, admission.slot) == ("c", 0)


def test_a_request_beyond_the_whole_cache_is_refused_and_one_that_fills_it_is_not() -> None:
    scheduler = make(num_pages=4)
    with pytest.raises(RequestError, match=r"^65 tokens need 5 pages of the cache; the backend has 4$"):
        scheduler.add("a", 60, 5)
    scheduler.add("a", 60, 4)
    assert len(scheduler.plan().admissions) == 1


def test_an_id_serves_one_request_at_a_time() -> None:
    scheduler = make(num_slots=1)
    scheduler.add("a", 1, 1)
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        scheduler.add("a", 1, 1)
    scheduler.plan()
    with pytest.raises(RequestError, match="request id 'a' is in use"):
        scheduler.add("a", 1, 1)
    scheduler.end("a")
    scheduler.add("a", 1, 1)
    with pytest.raises(KeyError):
        scheduler.end("b")


@pytest.mark.parametrize("name", ["num_slots", "prefill_budget", "prefill_chunk"])
def test_sizes_are_positive(name: str) -> None:
    sizes = {"num_slots": 1, "num_pages": 1, "page_size": 16, "prefill_budget": 1, "prefill_chunk": 1, name: 0}
    with pytest.raises(CrucibleError, match=f"^{name} must be at least 1, not 0$"):
        Scheduler(**sizes)


def test_the_audit_finds_a_slot_that_was_lost() -> None:
    scheduler = make()
    scheduler.add("a", 1, 1)
    scheduler.plan()
    scheduler.check()
    scheduler._free_slots.pop()
    with pytest.raises(PageError, match="free and taken slots"):
        scheduler.check()


@pytest.mark.parametrize(("num_prompts", "budget"), [(5, 1), (16, 1), (16, 3), (7, 100)])
def test_every_prompt_gets_its_turn_while_others_arrive_and_leave(num_prompts: int, budget: int) -> None:
    """One long prompt among short ones that end and are replaced all the time."""
    scheduler = make(num_slots=num_prompts, num_pages=10_000, budget=budget, chunk=1)
    scheduler.add("long", 300, 1)
    for i in range(num_prompts - 1):
        scheduler.add(i, 1 + i % 3, 2)
    since_work, num_added = 0, num_prompts
    while True:
        rows = scheduler.plan().rows
        since_work = 0 if any(row.request_id == "long" for row in rows) else since_work + 1
        assert since_work < num_prompts
        if any(row.request_id == "long" and row.draws for row in rows):
            return
        for row in rows:
            if row.draws and row.request_id != "long":
                scheduler.end(row.request_id)
                scheduler.add(num_added, 1 + num_added % 3, 2)
                num_added += 1


# ---- any order of calls ---------------------------------------------------------------------------------------------

FEW = st.integers(0, 6)


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, ends in any state and plans, in any order.

    Each rule makes plans too, because hypothesis leaves out some rules of a run altogether.
    """

    @initialize(
        num_slots=st.integers(1, 6), num_pages=st.integers(2, 24), budget=st.integers(1, 24), chunk=st.integers(1, 16)
    )
    def start(self, num_slots: int, num_pages: int, budget: int, chunk: int) -> None:
        self.checked = CheckedScheduler(num_slots, num_pages, budget, chunk)

    @rule(sizes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 30)), min_size=1, max_size=5), plans=FEW)
    def add(self, sizes: list[tuple[int, int]], plans: int) -> None:
        for num_prompt, max_tokens in sizes:
            self.checked.add(num_prompt, max_tokens)
        self.plan(plans)

    @rule(choice=st.integers(0, 100), plans=FEW)
    def cancel(self, choice: int, plans: int) -> None:
        self.checked.end(choice)
        self.plan(plans)

    @rule(plans=FEW)
    def plan(self, plans: int) -> None:
        for _ in range(plans):
            self.checked.plan()

    @rule(plans=st.integers(0, 40))
    def serve(self, plans: int) -> None:
        for _ in range(plans):
            self.checked.plan()
            self.checked.finish()

    @invariant()
    def an_audit_passes(self) -> None:
        if hasattr(self, "checked"):
            self.checked.check()

    def teardown(self) -> None:
        if hasattr(self, "checked"):
            self.checked.end_all()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=50, deadline=None)


def test_two_thousand_random_runs() -> None:
    """The same moves without a search behind them, which is quick enough for many."""
    num_plans = 0
    for seed in range(2_000):
        rng = random.Random(seed)
        checked = CheckedScheduler(rng.randint(1, 6), rng.randint(1, 20), rng.randint(1, 24), rng.randint(1, 16))
        for _ in range(rng.randint(1, 40)):
            move = rng.random()
            if move < 0.3:
                checked.add(rng.randint(1, 60), rng.randint(1, 30))
            elif move < 0.4:
                checked.end(rng.randint(0, 100))
            else:
                checked.plan()
            if move > 0.7:
                checked.finish()
        num_plans += checked.num_plans
        checked.end_all()
    assert num_plans > 20_000


def test_work_is_done_to_the_end_without_cancels() -> None:
    """Everyone who was admitted computes each of its rows once; nobody is left over."""
    rng = random.Random(0)
    for _ in range(50):
        checked = CheckedScheduler(rng.randint(1, 6), rng.randint(6, 20), rng.randint(1, 24), rng.randint(1, 16))
        sizes = [(rng.randint(1, 60), rng.randint(1, 30)) for _ in range(12)]
        for size in sizes:
            checked.add(*size)
        rows: list[Rows] = []
        while checked.waiting or checked.resident:
            rows += checked.plan().rows
            checked.finish()
        for name, (num_prompt, max_tokens) in enumerate(sizes):
            own = [row for row in rows if row.request_id == name]
            assert sum(row.length for row in own) == num_prompt + max_tokens - 1
            assert sum(row.draws for row in own) == max_tokens
