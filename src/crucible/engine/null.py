"""A backend without a model: fixed tokens at once, to see what everything around a model costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from crucible.config import ModelConfig
from crucible.engine.backend import (
    NO_TOKEN,
    PAGE_SIZE,
    SAMPLE,
    PlanError,
    SlotSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
)
from crucible.engine.request import FinishReason

_DEFAULT_IDS: Final = 64


@dataclass(slots=True)
class _Slot:
    """A request: the tokens that it draws, how many it may still draw, and what is told of each."""

    tokens: Iterator[int]
    num_left: int
    num_top: int | None
    top_ids: tuple[int, ...]

    def logprobs(self, token_id: int) -> TokenLogprobs | None:
        """The drawn token shares the probability with as many others as are asked for."""
        if self.num_top is None:
            return None
        top_ids = (token_id, *(other for other in self.top_ids if other != token_id))[: self.num_top]
        logprob = -math.log(max(1, self.num_top))
        return TokenLogprobs(logprob, top_ids, (logprob,) * len(top_ids))


@dataclass(frozen=True, slots=True)
class _Done:
    """The ticket of a plan, whose result is there."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class NullBackend:
    """Each request draws `token_ids` over and over, from the first one on, and ends at its limit alone.

    Ids that would end a request are left out of what it draws, unless all would. Nothing is computed, and no plan is
    checked: it is to cost as little as a backend can.

    Args:
        config: says which vocabulary and which context there would be.
        token_ids: what requests draw; the vocabulary's first ones if there are none.
        num_slots: requests that can be open at once.
        num_pages: pages of 16 positions that they share; the default lets every slot reach the context.
    """

    def __init__(
        self, config: ModelConfig, token_ids: Sequence[int] = (), *, num_slots: int = 1, num_pages: int | None = None
    ) -> None:
        self.config = config
        self.num_slots = num_slots
        pages_of_one = -(-config.max_position_embeddings // PAGE_SIZE)
        self.num_pages = num_slots * pages_of_one if num_pages is None else num_pages
        self._token_ids = tuple(token_ids) or tuple(range(min(config.vocab_size, _DEFAULT_IDS)))
        self._slots: dict[int, _Slot] = {}

    def open_slot(self, slot: int, spec: SlotSpec) -> None:
        tokens = [token_id for token_id in self._token_ids if token_id not in spec.end_ids]
        self._slots[slot] = _Slot(
            tokens=itertools.cycle(tokens or self._token_ids),
            num_left=spec.limit - len(spec.prompt_ids) - len(spec.output_ids),
            num_top=spec.params.logprobs,
            top_ids=tuple(range(spec.params.logprobs or 0)),
        )

    def rewind_slot(self, slot: int, position: int) -> None:
        """Positions stand for nothing here."""

    def close_slot(self, slot: int) -> None:
        del self._slots[slot]

    def submit(self, plan: StepPlan) -> _Done:
        """Raises PlanError: logits are wanted, of which there are none."""
        if plan.want_logits:
            raise PlanError("the null backend has no logits")
        slots = [self._slots[segment.slot] for segment in plan.segments if segment.kinds[-1] == SAMPLE]
        ids: list[list[int]] = []
        logprobs: list[tuple[TokenLogprobs | None, ...]] = []
        for _ in range(plan.steps):
            drawn = []
            for slot in slots:
                slot.num_left -= 1
                drawn.append(next(slot.tokens) if slot.num_left >= 0 else NO_TOKEN)
            ids.append(drawn)
            logprobs.append(
                tuple(
                    None if slot.num_top is None or token_id == NO_TOKEN else slot.logprobs(token_id)
                    for slot, token_id in zip(slots, drawn, strict=True)
                )
            )
        finish: list[FinishReason | None] = ["length" if slot.num_left <= 0 else None for slot in slots]
        num_scores = sum(kind >= 0 for segment in plan.segments if segment.ids is not None for kind in segment.kinds)
        ids_array = np.array(ids, dtype=np.int64).reshape(plan.steps, len(slots))
        return _Done(
            StepResult(
                ids=ids_array,
                counts=(ids_array != NO_TOKEN).sum(axis=0),
                finish=tuple(finish),
                logprobs=tuple(logprobs),
                scores=np.zeros(num_scores),
                logits=None,
            )
        )
