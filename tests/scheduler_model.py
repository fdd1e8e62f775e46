"""What a scheduler promises, checked after every call against an account kept independently of it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from crucible.engine.request import RequestError
from crucible.engine.scheduler import Plan, Scheduler

PAGE_SIZE = 16


@dataclass
class Expected:
    """A request as it must stand: its size, what it has computed, and how long it may still be passed over."""

    num_prompt: int
    max_tokens: int
    slot: int = -1
    pages: tuple[int, ...] = ()
    position: int = 0
    patience: int = 0

    @property
    def num_pages(self) -> int:
        return (self.num_prompt + self.max_tokens + PAGE_SIZE - 1) // PAGE_SIZE

    @property
    def in_prompt(self) -> bool:
        return self.position < self.num_prompt

    @property
    def has_rows(self) -> bool:
        """Its prompt and all tokens but the last are rows; the last is drawn and never fed."""
        return self.position < self.num_prompt + self.max_tokens - 1


class CheckedScheduler:
    """A scheduler with its account. Request ids are 0, 1, 2, ... in the order of arrival."""

    def __init__(self, num_slots: int, num_pages: int, budget: int, chunk: int) -> None:
        self.scheduler = Scheduler(
            num_slots, num_pages, page_size=PAGE_SIZE, prefill_budget=budget, prefill_chunk=chunk
        )
        self.num_slots, self.num_pages, self.budget, self.chunk = num_slots, num_pages, budget, chunk
        self.waiting: dict[int, Expected] = {}
        self.resident: dict[int, Expected] = {}
        self.num_added = 0
        self.num_plans = 0

    @property
    def num_free_pages(self) -> int:
        return self.num_pages - sum(request.num_pages for request in self.resident.values())

    def add(self, num_prompt: int, max_tokens: int) -> None:
        request = Expected(num_prompt, max_tokens)
        if request.num_pages > self.num_pages:
            with pytest.raises(RequestError, match=f"{request.num_pages} pages of the cache; .* {self.num_pages}$"):
                self.scheduler.add(self.num_added, num_prompt, max_tokens)
        else:
            self.scheduler.add(self.num_added, num_prompt, max_tokens)
            self.waiting[self.num_added] = request
        self.num_added += 1
        self.check()

    def end(self, choice: int) -> None:
        """End one of the requests that there are, waiting or resident."""
        ids = [*self.waiting, *self.resident]
        if not ids:
            return
        self._end(ids[choice % len(ids)])

    def finish(self) -> None:
        """End those whose tokens are all planned."""
        for request_id in [name for name, request in self.resident.items() if not request.has_rows]:
            self._end(request_id)

    def _end(self, request_id: int) -> None:
        slot = self.scheduler.end(request_id)
        assert slot == (None if request_id in self.waiting else self.resident[request_id].slot)
        self.waiting.pop(request_id, None)
        self.resident.pop(request_id, None)
        self.check()

    def plan(self) -> Plan:
        plan = self.scheduler.plan()
        self.num_plans += 1
        decoding = {name for name, request in self.resident.items() if not request.in_prompt and request.has_rows}
        self._check_admissions(plan)
        for row in plan.rows:
            request = self.resident[row.request_id]
            assert (row.slot, row.start) == (request.slot, request.position)
            assert row.length > 0
        # Every running request has exactly one row, and these come first.
        first = plan.rows[: len(decoding)]
        assert {row.request_id for row in first} == decoding
        assert all(row.length == 1 and row.draws for row in first)
        self._check_prefill(plan)
        for row in first:
            self.resident[row.request_id].position += 1
        self.check()
        return plan

    def _check_admissions(self, plan: Plan) -> None:
        order = list(self.waiting)
        for admission, expected_id in zip(plan.admissions, order, strict=False):
            assert admission.request_id == expected_id, "first come, first served"
            request = self.waiting.pop(expected_id)
            request.slot, request.pages = admission.slot, admission.pages
            assert len(admission.pages) == request.num_pages
            self.resident[expected_id] = request
        # Nobody waits who could be in.
        if self.waiting and len(self.resident) < self.num_slots:
            assert next(iter(self.waiting.values())).num_pages > self.num_free_pages
        for admission in plan.admissions:
            self.resident[admission.request_id].patience = len(self.resident)

    def _check_prefill(self, plan: Plan) -> None:
        prompts = {name: request for name, request in self.resident.items() if request.in_prompt}
        rows = {row.request_id: row for row in plan.rows if row.request_id in prompts}
        lengths = [row.length for row in rows.values()]
        left = {name: min(self.chunk, request.num_prompt - request.position) for name, request in prompts.items()}
        assert len(plan.rows) == len({row.request_id for row in plan.rows})
        assert all(row.length <= left[name] for name, row in rows.items())
        assert sum(lengths) == min(self.budget, sum(left.values())), "the budget is neither passed nor wasted"
        for name, request in prompts.items():
            if name in rows:
                request.position += rows[name].length
                request.patience = len(self.resident)
                assert rows[name].draws == (not request.in_prompt)
            else:
                request.patience -= 1
                assert request.patience > 0, (
                    "an unfinished prompt gets work within as many plans as there are residents"
                )

    def check(self) -> None:
        self.scheduler.check()
        assert self.scheduler.num_waiting == len(self.waiting)
        assert self.scheduler.num_resident == len(self.resident) <= self.num_slots
        assert self.scheduler.num_free_pages == self.num_free_pages >= 0
        slots = [request.slot for request in self.resident.values()]
        pages = [page for request in self.resident.values() for page in request.pages]
        assert len(set(slots)) == len(slots)
        assert len(set(pages)) == len(pages)
        assert set(slots) <= set(range(self.num_slots))
        assert set(pages) <= set(range(self.num_pages))

    def end_all(self) -> None:
        for choice in range(len(self.waiting) + len(self.resident)):
            self.end(choice * 7)
        assert self.scheduler.num_free_pages == self.num_pages
        assert self.scheduler.plan() == ((), ())
