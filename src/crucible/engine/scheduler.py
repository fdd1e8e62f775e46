"""Who computes what in the next step: continuous batching in plain integers, with neither device nor tensor.

A request waits, is admitted to a slot with all pages of its lifetime, computes its prompt in chunks beside other
prompts, and from then on one row a step. docs/scheduling.md states what is promised.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from crucible.engine.pages import PageError, PagePool
from crucible.engine.request import RequestError
from crucible.errors import CrucibleError

RequestId = Hashable


class Admission(NamedTuple):
    """A request that enters a slot; `pages` hold positions 0-15, 16-31, ... until it leaves."""

    request_id: RequestId
    slot: int
    pages: tuple[int, ...]


class Rows(NamedTuple):
    """Rows of one request in a step: positions `start` to `start` + `length` - 1; `draws` a token after the last."""

    request_id: RequestId
    slot: int
    start: int
    length: int
    draws: bool


class Plan(NamedTuple):
    """A step: the slots to open first, then the rows, those of running requests before those of prompts."""

    admissions: tuple[Admission, ...]
    rows: tuple[Rows, ...]


@dataclass(slots=True)
class _Request:
    """A request as the scheduler counts it: every planned row as computed, and as if no end id were ever drawn."""

    request_id: RequestId
    num_prompt: int
    limit: int
    slot: int = -1
    pages: tuple[int, ...] = ()
    position: int = 0

    @property
    def num_rows(self) -> int:
        """Rows of its whole life: the token that reaches the limit is drawn and never computed."""
        return self.limit - 1


class Scheduler:
    """Requests in slots, and the rows of each step.

    It plans ahead of the device: a plan counts as computed once it is made, and a request goes on until `end` is
    called or its limit is planned.

    Args:
        num_slots: requests that can be resident at once, at least 1.
        num_pages: pages they share.
        page_size: positions per page.
        prefill_budget: prompt tokens of a step, over all requests and beside the decode rows, at least 1.
        prefill_chunk: prompt tokens of one request in a step, at least 1.

    Raises:
        CrucibleError: an argument is out of range.
    """

    def __init__(
        self, num_slots: int, num_pages: int, *, page_size: int, prefill_budget: int, prefill_chunk: int
    ) -> None:
        sizes = {"num_slots": num_slots, "prefill_budget": prefill_budget, "prefill_chunk": prefill_chunk}
        for name, value in sizes.items():
            if value < 1:
                raise CrucibleError(f"{name} must be at least 1, not {value}")
        self.num_slots = num_slots
        self.page_size = page_size
        self.prefill_budget = prefill_budget
        self.prefill_chunk = prefill_chunk
        self._pages = PagePool(num_pages)
        self._free_slots = list(range(num_slots - 1, -1, -1))
        # Dicts keep the order of insertion and lose any member in constant time: queues one can leave in the middle.
        self._waiting: dict[RequestId, _Request] = {}
        self._resident: dict[RequestId, _Request] = {}
        self._prefilling: dict[RequestId, _Request] = {}
        self._running: dict[RequestId, _Request] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    @property
    def num_prefilling(self) -> int:
        """Of the residents, those whose prompt is not wholly planned."""
        return len(self._prefilling)

    @property
    def num_free_pages(self) -> int:
        return self._pages.num_free

    def num_pages_of(self, limit: int) -> int:
        """Pages that hold `limit` positions."""
        return -(-limit // self.page_size)

    def add(self, request_id: RequestId, num_prompt: int, max_tokens: int) -> None:
        """Queue a request behind those that wait.

        Raises:
            RequestError: the id is in use, or not even an empty cache would hold the request.
        """
        if request_id in self._waiting or request_id in self._resident:
            raise RequestError(f"request id {request_id!r} is in use")
        limit = num_prompt + max_tokens
        needed = self.num_pages_of(limit)
        if needed > self._pages.num_pages:
            raise RequestError(
                f"{limit} tokens need {needed} pages of the cache; the backend has {self._pages.num_pages}"
            )
        self._waiting[request_id] = _Request(request_id, num_prompt, limit)

    def plan(self) -> Plan:
        """The next step; no rows if there is nothing to do."""
        admissions = tuple(self._admit())
        # Requests that finish their prompt in this step decode from the next one on.
        decode = self._decode()
        return Plan(admissions, (*decode, *self._prefill()))

    def end(self, request_id: RequestId) -> int | None:
        """Forget a request in whatever state it is; its pages are free at once. The slot it was in, if it was in one.

        A plan made before this may still name the request: what reuses its slot and pages must be computed later.

        Raises:
            KeyError: there is no such request.
        """
        if self._waiting.pop(request_id, None) is not None:
            return None
        request = self._resident.pop(request_id)
        self._prefilling.pop(request_id, None)
        self._running.pop(request_id, None)
        self._pages.give(request.pages)
        self._free_slots.append(request.slot)
        return request.slot

    def check(self) -> None:
        """Audit: every page and every slot is either free or held by exactly one request. Raises PageError if not."""
        self._pages.check(page for request in self._resident.values() for page in request.pages)
        slots = [*self._free_slots, *(request.slot for request in self._resident.values())]
        if sorted(slots) != list(range(self.num_slots)):
            raise PageError(f"free and taken slots are {sorted(slots)}, not 0 to {self.num_slots - 1}")

    def _admit(self) -> Iterator[Admission]:
        """First come, first served: nobody overtakes a request that waits for pages, so none waits for ever."""
        while self._waiting and self._free_slots:
            request = next(iter(self._waiting.values()))
            needed = self.num_pages_of(request.limit)
            if needed > self._pages.num_free:
                return
            del self._waiting[request.request_id]
            request.slot, request.pages = self._free_slots.pop(), self._pages.take(needed)
            self._resident[request.request_id] = self._prefilling[request.request_id] = request
            yield Admission(request.request_id, request.slot, request.pages)

    def _decode(self) -> list[Rows]:
        """A row of each running request. Whoever has planned its last one is no longer among them."""
        rows: list[Rows] = []
        last: list[RequestId] = []
        for request_id, request in self._running.items():
            rows.append(Rows(request_id, request.slot, request.position, 1, True))
            request.position += 1
            if request.position == request.num_rows:
                last.append(request_id)
        for request_id in last:
            del self._running[request_id]
        return rows

    def _prefill(self) -> Iterator[Rows]:
        """Chunks of prompts until the budget is used up. Whoever got one and is not done goes to the back."""
        budget = self.prefill_budget
        for request in list(self._prefilling.values()):
            if budget == 0:
                return
            length = min(budget, self.prefill_chunk, request.num_prompt - request.position)
            budget -= length
            yield self._take(request, length)

    def _take(self, request: _Request, length: int) -> Rows:
        """Plan a chunk of a prompt and put the request at the back of the queue it now belongs to, if any."""
        start = request.position
        request.position += length
        del self._prefilling[request.request_id]
        if request.position < request.num_prompt:
            self._prefilling[request.request_id] = request
        elif request.position < request.num_rows:
            self._running[request.request_id] = request
        return Rows(request.request_id, request.slot, start, length, draws=request.position >= request.num_prompt)
