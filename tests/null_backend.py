"""A backend without a model: each request draws fixed tokens, so that what an engine makes of them can be foretold.

It keeps the step model to the letter: plans are refused by the same account as everywhere (`SlotBook`), rows behind an
end are dead, and a slot's state changes in the order of the calls. Results are read later than they are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from cells import toy

from crucible.engine.backend import (
    NO_TOKEN,
    SAMPLE,
    Segment,
    SlotBook,
    SlotSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from crucible.engine.request import FinishReason, SamplingParams

VOCAB_SIZE = 67
BROKEN_ID = 66
"""A prompt with this id gives no usable logits."""


def fixed_token(prompt_ids: Sequence[int], params: SamplingParams, position: int, forbidden: Sequence[int]) -> int:
    """The token at a position: any function of the request alone."""
    token = (sum(prompt_ids) * 31 + position * 17 + params.seed * 7) % (VOCAB_SIZE - 1)
    while token in forbidden:
        token = (token + 1) % (VOCAB_SIZE - 1)
    return token


def fixed_score(position: int, target: int) -> float:
    return -(target + position / 1024)


def expected_tokens(
    prompt_ids: Sequence[int], params: SamplingParams, eos_ids: Sequence[int]
) -> tuple[list[int], FinishReason]:
    """All that a request draws, and why it ends."""
    end_ids = params.end_ids(eos_ids)
    tokens: list[int] = []
    if BROKEN_ID in prompt_ids:
        return tokens, "error"
    while len(tokens) < params.max_tokens:
        forbidden = end_ids if len(tokens) < params.min_tokens else ()
        tokens.append(fixed_token(prompt_ids, params, len(prompt_ids) + len(tokens), forbidden))
        if tokens[-1] in end_ids:
            return tokens, "stop"
    return tokens, "length"


@dataclass
class _Slot:
    spec: SlotSpec
    computed: list[int] = field(default_factory=list)
    last_token: int = NO_TOKEN
    num_output: int = 0
    finish: FinishReason | None = None


@dataclass
class NullTicket:
    """Counts that each plan is waited for, and in the order of submission."""

    backend: NullBackend
    number: int
    result: StepResult

    def wait(self) -> StepResult:
        assert self.number == self.backend.num_read, "tickets are read in order"
        self.backend.num_read += 1
        return self.result


class NullBackend:
    def __init__(self, num_slots: int = 4, num_pages: int = 24, *, context: int = 96) -> None:
        self.config = toy(vocab_size=VOCAB_SIZE, max_position_embeddings=context)
        self.num_slots, self.num_pages = num_slots, num_pages
        self.slots: dict[int, _Slot] = {}
        self.num_submitted = self.num_read = 0
        self.plans: list[StepPlan] = []
        self._book = SlotBook(self.config, num_slots, num_pages)

    def open_slot(self, slot: int, spec: SlotSpec) -> None:
        self._book.open(slot, spec)
        for other in self.slots.values():
            assert not set(other.spec.page_table) & set(spec.page_table), "a page serves one request at a time"
        self.slots[slot] = _Slot(spec)

    def rewind_slot(self, slot: int, position: int) -> None:
        self._book.rewind(slot, position)

    def close_slot(self, slot: int) -> None:
        self._book.close(slot)
        del self.slots[slot]

    def submit(self, plan: StepPlan) -> NullTicket:
        assert plan.steps == 1
        self._book.admit(plan)
        self.plans.append(plan)
        ids: list[int] = []
        finish: list[FinishReason | None] = []
        logprobs: list[TokenLogprobs | None] = []
        scores: list[float] = []
        for segment in plan.segments:
            slot = self.slots[segment.slot]
            scores += self._compute(slot, segment)
            if segment.kinds[-1] == SAMPLE:
                ids.append(self._draw(slot))
                finish.append(slot.finish)
                told = slot.spec.params.logprobs is not None and ids[-1] != NO_TOKEN
                logprobs.append(TokenLogprobs(-ids[-1] / 8, (), ()) if told else None)
        self.num_submitted += 1
        result = StepResult(
            ids=np.array([ids], dtype=np.int64).reshape(1, len(ids)),
            counts=np.array([token != NO_TOKEN for token in ids], dtype=np.int64),
            finish=tuple(finish),
            logprobs=(tuple(logprobs),),
            scores=np.array(scores, dtype=np.float64),
            logits=None,
        )
        return NullTicket(self, self.num_submitted - 1, result)

    def _compute(self, slot: _Slot, segment: Segment) -> list[float]:
        if slot.finish is not None:
            return [float("nan") for kind in segment.kinds if kind >= 0]
        slot.computed += [slot.last_token] if segment.ids is None else segment.ids
        return [fixed_score(segment.start + i, kind) for i, kind in enumerate(segment.kinds) if kind >= 0]

    def _draw(self, slot: _Slot) -> int:
        if slot.finish is not None:
            return NO_TOKEN
        spec, position = slot.spec, len(slot.computed)
        assert slot.computed[: len(spec.prompt_ids)] == list(spec.prompt_ids), "the whole prompt was computed"
        if BROKEN_ID in spec.prompt_ids:
            slot.finish = "error"
            return 0
        forbidden = tuple(spec.end_ids) if slot.num_output < spec.params.min_tokens else ()
        slot.last_token = fixed_token(spec.prompt_ids, spec.params, position, forbidden)
        slot.num_output += 1
        if slot.last_token in spec.end_ids:
            slot.finish = "stop"
        elif position + 1 == spec.limit:
            slot.finish = "length"
        return slot.last_token
