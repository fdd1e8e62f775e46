"""The engine: any number of requests over one backend, token ids in and token ids out.

    engine = Engine(backend, eos_ids=(2,))
    engine.add("a", [5, 61, 17], SamplingParams(max_tokens=20))
    engine.add("b", [5, 40], SamplingParams(temperature=0.8, seed=7))
    while engine.has_work:
        for event in engine.step():
            print(event.request_id, event.token_id, event.finish)

What a request gets is a function of the weights, its own tokens and its own parameters: who shares its steps, when it
came and how its prompt was cut change no bit of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

from crucible.engine.backend import (
    NONE,
    PAGE_SIZE,
    SAMPLE,
    Backend,
    Segment,
    SlotSpec,
    StepPlan,
    Ticket,
    TokenLogprobs,
    decode,
)
from crucible.engine.request import FinishReason, RequestError, SamplingParams, checked_limit, checked_prompt
from crucible.engine.scheduler import Admission, Plan, RequestId, Rows, Scheduler
from crucible.errors import CrucibleError

PREFILL_BUDGET: Final = 512
"""Prompt tokens per step: bounds the memory of a step, and how long running requests wait for their next token."""

PREFILL_CHUNK: Final = 256
"""Prompt tokens per step of one request, so that a long prompt leaves room for others."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a request took to its first event, in seconds: from `add` to a slot of its own, and from there."""

    queue_seconds: float
    prefill_seconds: float


@dataclass(frozen=True, slots=True)
class Event:
    """What a step gave a request: a token, its end, or both. Each request has one event with a finish reason, its last.

    Attributes:
        request_id: as it was added.
        token_id: the token drawn. With finish "stop" it is the id that ended the request: counted, but not text.
            None where the request ends without a token, as "cancelled" or "error".
        finish: why the request ends here, None if it goes on.
        logprobs: of the token, if the parameters ask for them.
        prompt_logprobs: log-probabilities of the prompt's tokens from the second on, with the first event of a
            request whose parameters ask for them.
        timing: with the first event, but of a request that is cancelled before. No part of what makes events equal.
    """

    request_id: RequestId
    token_id: int | None
    finish: FinishReason | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[float, ...] | None = None
    timing: Timing | None = field(default=None, compare=False)


@dataclass(slots=True)
class EngineStats:
    """What an engine has done, and how it stands.

    Attributes:
        steps: plans submitted.
        prefill_plans: those with rows of prompts; in them `prefill_chunks` of requests, `prefill_rows` tokens long.
        decode_plans: those with rows of running requests, `decode_rows` in all.
        tokens: drawn for requests that had not ended.
        running, prefilling, waiting: requests that decode, compute their prompt, or have no slot yet.
        free_pages: of the key/value cache.
        batch: requests with rows in the last plan.
    """

    steps: int = 0
    prefill_plans: int = 0
    prefill_chunks: int = 0
    prefill_rows: int = 0
    decode_plans: int = 0
    decode_rows: int = 0
    tokens: int = 0
    running: int = 0
    prefilling: int = 0
    waiting: int = 0
    free_pages: int = 0
    batch: int = 0


@dataclass(slots=True, eq=False)
class _Request:
    """A request that has not ended, or whose rows are still under way; `slot` is None until it is open."""

    request_id: RequestId
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    end_ids: tuple[int, ...]
    limit: int
    added_at: float
    opened_at: float = 0.0
    slot: int | None = None
    prompt_scores: list[float] = field(default_factory=list)
    has_begun: bool = False
    has_ended: bool = False


@dataclass(frozen=True, slots=True)
class _Flight:
    """A submitted plan: who draws its columns, in order, and who asked for its scores, in runs of so many rows."""

    ticket: Ticket
    drawers: tuple[_Request, ...]
    scorers: tuple[tuple[_Request, int], ...]


class Engine:
    """Continuous batching. Not for several threads at once.

    Args:
        backend: holds the model; none of its slots is open, and nobody else opens one while the engine has work.
        eos_ids: the model's end-of-text ids.
        prefill_budget: prompt tokens per step over all requests, beside one row of each running request.
        prefill_chunk: prompt tokens per step of one request.
        look_ahead: plans submitted before the oldest one is read. 0 reads each at once; with more, a device computes
            while the host reads, and events come that many steps later. No token depends on it.

    Raises:
        CrucibleError: a number is out of range, or the model does not have one of eos_ids.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        eos_ids: Collection[int] = (),
        prefill_budget: int = PREFILL_BUDGET,
        prefill_chunk: int = PREFILL_CHUNK,
        look_ahead: int = 0,
    ) -> None:
        if look_ahead < 0:
            raise CrucibleError(f"look_ahead must be at least 0, not {look_ahead}")
        vocab_size = backend.config.vocab_size
        if unknown := [token_id for token_id in eos_ids if not 0 <= token_id < vocab_size]:
            raise CrucibleError(f"end-of-text id {unknown[0]} is not one of the model's, 0 to {vocab_size - 1}")
        self.backend = backend
        self.eos_ids = tuple(eos_ids)
        self.look_ahead = look_ahead
        self.scheduler = Scheduler(
            backend.num_slots,
            backend.num_pages,
            page_size=PAGE_SIZE,
            prefill_budget=prefill_budget,
            prefill_chunk=prefill_chunk,
        )
        self._requests: dict[RequestId, _Request] = {}
        self._flights: deque[_Flight] = deque()
        self._cancelled: list[Event] = []
        self._stats = EngineStats()

    @property
    def stats(self) -> EngineStats:
        """As of now; the same object each time."""
        stats, scheduler = self._stats, self.scheduler
        stats.prefilling, stats.waiting = scheduler.num_prefilling, scheduler.num_waiting
        stats.running = scheduler.num_resident - stats.prefilling
        stats.free_pages = scheduler.num_free_pages
        return stats

    @property
    def has_work(self) -> bool:
        """Whether an event is still to come."""
        return bool(self._requests or self._cancelled)

    def add(self, request_id: RequestId, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Queue a request: first come, first served. Too few free pages or slots only make it wait.

        Args:
            request_id: any hashable value that no request under way has.
            prompt_ids: at least one id.
            params: how to draw and when to end. n must be 1: `SamplingParams.choices` makes such parameters, and
                each choice is a request of its own.

        Raises:
            RequestError: the prompt is empty or has an id that the model does not have; prompt and max_tokens do not
                fit the context, or not even the empty cache; the parameters name unknown tokens; n is not 1; the id
                is in use.
        """
        config = self.backend.config
        ids = checked_prompt(prompt_ids, config.vocab_size)
        if params.n != 1:
            raise RequestError(f"n must be 1 here, not {params.n}; add each of the parameters' choices()")
        params.check_vocabulary(config.vocab_size)
        end_ids = params.end_ids(self.eos_ids)
        limit = checked_limit(len(ids), params.max_tokens, config.max_position_embeddings)
        self.scheduler.add(request_id, len(ids), params.max_tokens)
        self._requests[request_id] = _Request(request_id, ids, params, end_ids, limit, time.perf_counter())

    def cancel(self, request_id: RequestId) -> None:
        """End a request in whatever state it is: its slot and pages are free at once, the event comes with the next
        step. No effect on one that has ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request)
            self._cancelled.append(Event(request_id, None, "cancelled"))

    def step(self) -> list[Event]:
        """Submit the next plan and read the oldest one that is due; the events of a request are in order.

        An exception of the backend goes through. Requests that were under way then cannot go on, but they can be
        cancelled, after which the engine serves others.
        """
        plan = self.scheduler.plan()
        if plan.rows:
            self._flights.append(self._submit(plan))
        events: list[Event] = []
        if self._flights and (len(self._flights) > self.look_ahead or not plan.rows):
            events = self._read(self._flights.popleft())
        if not self._requests:
            self._settle()
        cancelled, self._cancelled = self._cancelled, []
        return cancelled + events

    def _settle(self) -> None:
        """Nobody is left: wait for rows of requests that have ended, and audit slots and pages."""
        while self._flights:
            self._flights.popleft().ticket.wait()
        self.scheduler.check()

    def _submit(self, plan: Plan) -> _Flight:
        for admission in plan.admissions:
            self._open(admission)
        work = [(self._requests[rows.request_id], rows) for rows in plan.rows]
        self._count(work)
        return _Flight(
            ticket=self.backend.submit(StepPlan(tuple(_segment(request, rows) for request, rows in work))),
            drawers=tuple(request for request, rows in work if rows.draws),
            scorers=tuple(
                (request, len(_scored(request, rows))) for request, rows in work if request.params.prompt_logprobs
            ),
        )

    def _count(self, work: list[tuple[_Request, Rows]]) -> None:
        stats = self._stats
        prefill = [rows.length for request, rows in work if rows.start < len(request.prompt_ids)]
        num_decode = len(work) - len(prefill)
        stats.steps += 1
        stats.batch = len(work)
        stats.prefill_plans += bool(prefill)
        stats.prefill_chunks += len(prefill)
        stats.prefill_rows += sum(prefill)
        stats.decode_plans += num_decode > 0
        stats.decode_rows += num_decode

    def _open(self, admission: Admission) -> None:
        request = self._requests[admission.request_id]
        spec = SlotSpec(
            page_table=admission.pages,
            limit=request.limit,
            prompt_ids=request.prompt_ids,
            params=request.params,
            end_ids=request.end_ids,
        )
        self.backend.open_slot(admission.slot, spec)
        request.slot = admission.slot
        request.opened_at = time.perf_counter()

    def _read(self, flight: _Flight) -> list[Event]:
        result = flight.ticket.wait()
        scores = iter(result.scores.tolist())
        for request, count in flight.scorers:
            request.prompt_scores += [next(scores) for _ in range(count)]
        ids, finish, logprobs = result.ids[0].tolist(), result.finish, result.logprobs[0]
        return [
            self._event(request, ids[column], finish[column], logprobs[column])
            for column, request in enumerate(flight.drawers)
            if not request.has_ended
        ]

    def _event(
        self, request: _Request, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None
    ) -> Event:
        prompt_logprobs = timing = None
        if not request.has_begun:
            request.has_begun = True
            if request.params.prompt_logprobs:
                prompt_logprobs = tuple(request.prompt_scores)
            timing = Timing(request.opened_at - request.added_at, time.perf_counter() - request.opened_at)
        if finish is not None:
            self._end(request)
        if finish == "error":
            return Event(request.request_id, None, finish, None, prompt_logprobs, timing)
        self._stats.tokens += 1
        return Event(request.request_id, token_id, finish, logprobs, prompt_logprobs, timing)

    def _end(self, request: _Request) -> None:
        """Free slot and pages. Calls reach a backend in order, so rows that are under way come before any reuse."""
        request.has_ended = True
        del self._requests[request.request_id]
        self.scheduler.end(request.request_id)
        if request.slot is not None:
            self.backend.close_slot(request.slot)


def _segment(request: _Request, rows: Rows) -> Segment:
    """Rows as a backend takes them: ids of the prompt, or the token drawn last; and what is asked of their logits."""
    if rows.start >= len(request.prompt_ids):
        return decode(rows.slot, rows.start)
    ids = request.prompt_ids[rows.start : rows.start + rows.length]
    kinds = _scored(request, rows) or (NONE,) * (rows.length - rows.draws)
    return Segment(rows.slot, rows.start, kinds + (SAMPLE,) * rows.draws, ids)


def _scored(request: _Request, rows: Rows) -> tuple[int, ...]:
    """Tokens whose log-probability the rows give: the one after each row, also where it belongs to the next chunk."""
    if not request.params.prompt_logprobs:
        return ()
    return request.prompt_ids[rows.start + 1 : rows.start + rows.length + 1]
