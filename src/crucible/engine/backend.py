"""The step model: what every backend is asked, what it answers, and which questions are refused.

A step is a ragged batch of token rows: for each request some consecutive new tokens, and for each row what to do with
its logits. Prefill, decode, both mixed, a prompt in chunks and its log-probabilities are the same thing. Requests live
in slots, whose state stays on the device: a drawn token feeds the next step there, so the host may queue steps ahead
and read ids behind.

    backend.open_slot(0, SlotSpec(page_table=(7, 2), limit=20, prompt_ids=prompt, params=params, end_ids=(50256,)))
    backend.submit(StepPlan((prefill(0, prompt),))).wait().ids        # [[first token]]
    backend.submit(StepPlan((decode(0, len(prompt)),), steps=4)).wait().ids    # four more, -1 after the end
    backend.close_slot(0)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.engine.request import MAX_STOP_IDS, FinishReason, SamplingParams

PAGE_SIZE: Final = 16
"""Positions of all layers that one page of the key/value cache holds."""

NONE: Final = -1
"""Row kind: the row's logits are not needed."""

SAMPLE: Final = -2
"""Row kind: draw the request's next token from the row's logits. Only the last row of a segment can."""

NO_TOKEN: Final = -1
"""What a row of a request that has ended returns in place of an id."""


class PlanError(ValueError):
    """A plan or slot that no backend runs: the caller's mistake, refused before anything changes."""


@dataclass(frozen=True, slots=True)
class Segment:
    """The new rows of one request in a step: positions `start` to `start` + len(`kinds`) - 1.

    Attributes:
        slot: the slot that holds the request.
        start: the slot's position: how many tokens of the request were computed before.
        kinds: for each row NONE, SAMPLE or, if not negative, the id whose log-probability is the row's score.
        ids: the rows' tokens; None is one row with the token that the slot drew last.
    """

    slot: int
    start: int
    kinds: tuple[int, ...]
    ids: tuple[int, ...] | None = None


def prefill(slot: int, ids: Sequence[int], start: int = 0, *, last: int = SAMPLE) -> Segment:
    """A segment of given tokens: nothing is asked after its rows but `last`, after the last one."""
    return Segment(slot, start, (NONE,) * (len(ids) - 1) + (last,), tuple(ids))


def decode(slot: int, start: int) -> Segment:
    """A segment of one row: the token drawn last goes in, the next is drawn."""
    return Segment(slot, start, (SAMPLE,))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One launch.

    Attributes:
        segments: at most one per slot, at least one in all.
        steps: tokens drawn per segment. Above 1 every segment must be one SAMPLE row; each step but the first feeds
            the token that the one before it drew.
        want_logits: return the logits of all rows, to verify a backend by.
    """

    segments: tuple[Segment, ...]
    steps: int = 1
    want_logits: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at temperature 1, before bias and penalties, of one drawn token and the likeliest ones.

    `top_ids` and `top_logprobs` list the likeliest tokens, best first, as many as SamplingParams.logprobs says.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a plan of S SAMPLE rows, C score rows and M rows in all gave. Columns are in the plan's order.

    Attributes:
        ids: int64 [steps, S]; NO_TOKEN from the step after a request's end on. The id that ends a request is included.
        counts: int64 [S], the tokens drawn: ids before the first NO_TOKEN.
        finish: for each column why the request ended, None while it has not. After "error" the last id means nothing.
        logprobs: [steps][S]; None where the request asks for none, and after its end.
        scores: float64 [C], log-probabilities at temperature 1 of the score rows' ids; NaN if the request had ended.
        logits: f32 [steps, M, V] if the plan wants them, else None; NaN after a request's end.
    """

    ids: npt.NDArray[np.int64]
    counts: npt.NDArray[np.int64]
    finish: tuple[FinishReason | None, ...]
    logprobs: tuple[tuple[TokenLogprobs | None, ...], ...]
    scores: npt.NDArray[np.float64]
    logits: npt.NDArray[np.float32] | None


class Ticket(Protocol):
    """A plan under way."""

    def wait(self) -> StepResult:
        """The result, once it is there; the same one each time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotSpec:
    """What a slot is opened with.

    Attributes:
        page_table: pages that hold positions 0-15, 16-31, ...; enough for `limit` positions.
        limit: tokens, prompt and output together, at which the request ends; at most the context.
        prompt_ids: the prompt, for the repetition penalty. The tokens to compute come with the segments.
        output_ids: tokens that were drawn before the slot was opened, if the request is resumed.
        params: how tokens are drawn. Of its fields the backend ignores those that describe a request's end or several
            requests (n, max_tokens, stop_token_ids, ignore_eos): `limit` and `end_ids` say it.
        end_ids: drawing one of these ends the request; at most MAX_STOP_IDS.
        position: computed positions that the pages already hold.
    """

    page_table: tuple[int, ...]
    limit: int
    prompt_ids: Sequence[int]
    params: SamplingParams
    output_ids: Sequence[int] = ()
    end_ids: Collection[int] = ()
    position: int = 0


class Backend(Protocol):
    """A model on a device, with slots and pages. Calls take effect in the order in which they are made.

    A request ends by drawing an end id ("stop"), by reaching its limit ("length") or by having no usable logit
    ("error"). From then on its rows are dead: they write no keys and values and return NO_TOKEN, so that steps queued
    behind the end are harmless.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def num_slots(self) -> int: ...

    @property
    def num_pages(self) -> int: ...

    def open_slot(self, slot: int, spec: SlotSpec) -> None:
        """Give a free slot to a request.

        Raises PlanError if it is open or the spec malformed, RequestError if the params name an unknown token.
        """

    def rewind_slot(self, slot: int, position: int) -> None:
        """Forget the positions from `position` on, but not the tokens drawn: what comes next is computed anew.

        Raises PlanError if the slot is not open or has not computed that many positions.
        """

    def close_slot(self, slot: int) -> None:
        """End the request, if it has not ended, and free the slot. Raises PlanError if the slot is not open."""

    def submit(self, plan: StepPlan) -> Ticket:
        """Queue a plan and return at once. Raises PlanError, changing nothing, if the plan is malformed."""


@dataclass(slots=True)
class _Entry:
    """A slot as the host knows it without waiting for the device: as if no end id were ever drawn."""

    position: int
    limit: int
    can_feed: bool = False


@dataclass(frozen=True, slots=True)
class SlotBook:
    """The host's account of the slots, by which every backend refuses malformed plans before it queues them.

    It runs ahead of the device: it counts every queued step as if the request went on, up to its limit. A plan that
    follows an end id not yet read is therefore fine; its rows are dead.
    """

    config: ModelConfig
    num_slots: int
    num_pages: int
    entries: dict[int, _Entry] = field(default_factory=dict)

    def open(self, slot: int, spec: SlotSpec) -> None:
        """Check a spec and take the slot.

        Raises:
            PlanError: the slot is open or does not exist, or a field of the spec is out of range.
            RequestError: the params name a token that the model does not have.
        """
        if not 0 <= slot < self.num_slots:
            raise PlanError(f"slot {slot} does not exist; there are {self.num_slots}")
        if slot in self.entries:
            raise PlanError(f"slot {slot} is open")
        context = self.config.max_position_embeddings
        if not 1 <= spec.limit <= context:
            raise PlanError(f"slot {slot}: limit must be from 1 to the context of {context}, not {spec.limit}")
        if not 0 <= spec.position < spec.limit:
            raise PlanError(
                f"slot {slot}: position must be below limit={spec.limit} and not negative, not {spec.position}"
            )
        _check_ids(f"slot {slot}: page_table", spec.page_table, self.num_pages)
        if len(spec.page_table) * PAGE_SIZE < spec.limit:
            raise PlanError(f"slot {slot}: {len(spec.page_table)} pages of {PAGE_SIZE} do not hold limit={spec.limit}")
        if len(set(spec.page_table)) < len(spec.page_table):
            raise PlanError(f"slot {slot}: page_table names a page twice")
        if len(spec.end_ids) > MAX_STOP_IDS:
            raise PlanError(f"slot {slot}: end_ids takes at most {MAX_STOP_IDS} ids, not {len(spec.end_ids)}")
        for name in ("prompt_ids", "output_ids", "end_ids"):
            _check_ids(f"slot {slot}: {name}", getattr(spec, name), self.config.vocab_size)
        spec.params.check_vocabulary(self.config.vocab_size)
        self.entries[slot] = _Entry(spec.position, spec.limit)

    def rewind(self, slot: int, position: int) -> None:
        """Raises PlanError: the slot is not open, or `position` is not one it has computed."""
        entry = self._entry(slot)
        if not 0 <= position <= entry.position:
            raise PlanError(f"slot {slot} is at position {entry.position} and cannot rewind to {position}")
        entry.position, entry.can_feed = position, False

    def close(self, slot: int) -> None:
        """Raises PlanError: the slot is not open."""
        self._entry(slot)
        del self.entries[slot]

    def admit(self, plan: StepPlan) -> None:
        """Check a plan, and account for it if it is well formed.

        Raises:
            PlanError: no segments, two of one slot, a slot that is not open, rows that do not continue the slot's
                position or pass its limit, kinds that do not match the ids, an id outside the vocabulary, a token
                to feed where none was drawn, SAMPLE on any row but the last, or steps that the plan cannot have.
        """
        if not plan.segments:
            raise PlanError("a plan needs at least one segment")
        if plan.steps < 1:
            raise PlanError(f"steps must be at least 1, not {plan.steps}")
        slots = [segment.slot for segment in plan.segments]
        if len(set(slots)) < len(slots):
            raise PlanError(f"a plan has one segment per slot; slots are {slots}")
        for segment in plan.segments:
            self._check(segment)
            if plan.steps > 1 and segment.kinds != (SAMPLE,):
                raise PlanError(
                    f"slot {segment.slot}: with steps={plan.steps} a segment is one SAMPLE row, "
                    f"not {len(segment.kinds)} rows of kinds {segment.kinds[:8]}"
                )
        for segment in plan.segments:
            entry = self.entries[segment.slot]
            entry.position = segment.start + len(segment.kinds)
            if plan.steps > 1:
                # The token that reaches the limit is drawn and never fed, so the position stops one short of it.
                entry.position = min(entry.position + plan.steps - 1, entry.limit - 1)
            entry.can_feed = segment.kinds[-1] == SAMPLE

    def _entry(self, slot: int) -> _Entry:
        if slot not in self.entries:
            raise PlanError(f"slot {slot} is not open")
        return self.entries[slot]

    def _check(self, segment: Segment) -> None:
        entry, where = self._entry(segment.slot), f"slot {segment.slot}"
        num_rows = len(segment.kinds)
        if num_rows == 0:
            raise PlanError(f"{where}: a segment needs at least one row")
        if segment.start != entry.position:
            raise PlanError(f"{where} is at position {entry.position}; rows cannot start at {segment.start}")
        if segment.start + num_rows > entry.limit:
            raise PlanError(f"{where}: {num_rows} rows from position {segment.start} pass limit={entry.limit}")
        if segment.ids is None:
            if num_rows != 1:
                raise PlanError(f"{where}: the token drawn last is one row, not {num_rows}")
            if not entry.can_feed:
                raise PlanError(f"{where}: no token was drawn after the last rows, so ids must be given")
        else:
            if len(segment.ids) != num_rows:
                raise PlanError(f"{where}: {len(segment.ids)} ids and {num_rows} kinds")
            _check_ids(f"{where}: ids", segment.ids, self.config.vocab_size)
        if SAMPLE in segment.kinds[:-1]:
            raise PlanError(f"{where}: only the last row of a segment can be SAMPLE")
        if segment.kinds[-1] == SAMPLE and segment.start + num_rows == entry.limit:
            raise PlanError(f"{where}: a token drawn after position {entry.limit - 1} would pass limit={entry.limit}")
        targets = (kind for kind in segment.kinds if kind not in (NONE, SAMPLE))
        _check_ids(f"{where}: a score row's kind", targets, self.config.vocab_size)


def _check_ids(name: str, ids: Iterable[int], end: int) -> None:
    for index in ids:
        if not 0 <= index < end:
            raise PlanError(f"{name} must be from 0 to {end - 1}, not {index}")
