"""The reference backend: the step model of `engine/backend.py` in numpy, one row after another.

A plan is run when it is submitted, so tickets are always ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from crucible.config import ModelConfig
from crucible.engine.backend import (
    NO_TOKEN,
    NONE,
    PAGE_SIZE,
    SAMPLE,
    Segment,
    SlotBook,
    SlotSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
    decode,
)
from crucible.engine.reference.cache import PagedCache, Pages
from crucible.engine.reference.decoder import Decoder, Span
from crucible.engine.reference.ops import F32
from crucible.engine.request import FinishReason
from crucible.engine.sampling import logprobs, sample, top_tokens

Counts = npt.NDArray[np.int64]


@dataclass(slots=True)
class _Slot:
    """A request as a device would hold it."""

    spec: SlotSpec
    page_table: Pages
    position: int
    num_output: int
    prompt_counts: Counts | None
    output_counts: Counts | None
    last_token: int = NO_TOKEN
    finish: FinishReason | None = None

    @classmethod
    def open(cls, spec: SlotSpec, vocab_size: int) -> _Slot:
        counted = spec.params.counts_tokens
        return cls(
            spec=spec,
            page_table=np.array(spec.page_table, dtype=np.int64),
            position=spec.position,
            num_output=len(spec.output_ids),
            prompt_counts=_count(spec.prompt_ids, vocab_size) if counted else None,
            output_counts=_count(spec.output_ids, vocab_size) if counted else None,
        )

    def draw(self, logits_V: F32) -> int:
        """The request's next token, which stands at the slot's position; updates counts and says whether it ends."""
        spec = self.spec
        draw = sample(
            logits_V,
            spec.params,
            self.position,
            prompt_counts_V=self.prompt_counts,
            output_counts_V=self.output_counts,
            forbidden_ids=spec.end_ids if self.num_output < spec.params.min_tokens else (),
        )
        self.last_token = draw.token_id
        self.num_output += 1
        if self.output_counts is not None:
            self.output_counts[draw.token_id] += 1
        if draw.failed:
            self.finish = "error"
        elif draw.token_id in spec.end_ids:
            self.finish = "stop"
        elif self.position + 1 == spec.limit:
            self.finish = "length"
        return draw.token_id


@dataclass(frozen=True, slots=True)
class _Done:
    """The ticket of a plan that has been run."""

    result: StepResult

    def wait(self) -> StepResult:
        return self.result


class ReferenceBackend:
    """The oracle: float64 arithmetic on every architecture (docs/arithmetic.md, section 4).

    Memory: 8 bytes per weight beside the given arrays, and f32 keys and values of all pages.

    Args:
        config: the architecture.
        weights: the tensors of `config.tensor_shapes()` by name; f32, as `engine.weights.load_weights` gives them.
        num_slots: requests that can be open at once.
        num_pages: pages of 16 positions that they share; the default lets every slot reach the context.

    Raises:
        CrucibleError: a tensor is missing, unknown or of another shape.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, npt.NDArray[np.float32]],
        *,
        num_slots: int = 1,
        num_pages: int | None = None,
    ) -> None:
        if num_pages is None:
            num_pages = num_slots * -(-config.max_position_embeddings // PAGE_SIZE)
        self.config = config
        self.num_slots = num_slots
        self.num_pages = num_pages
        self.cache = PagedCache(config, num_pages)
        self.decoder = Decoder(config, weights)
        self._book = SlotBook(config, num_slots, num_pages)
        self._slots: dict[int, _Slot] = {}

    def open_slot(self, slot: int, spec: SlotSpec) -> None:
        self._book.open(slot, spec)
        self._slots[slot] = _Slot.open(spec, self.config.vocab_size)

    def rewind_slot(self, slot: int, position: int) -> None:
        self._book.rewind(slot, position)
        self._slots[slot].position = position

    def close_slot(self, slot: int) -> None:
        self._book.close(slot)
        del self._slots[slot]

    def submit(self, plan: StepPlan) -> _Done:
        self._book.admit(plan)
        columns = [segment.slot for segment in plan.segments if segment.kinds[-1] == SAMPLE]
        ids = np.full((plan.steps, len(columns)), NO_TOKEN, dtype=np.int64)
        drawn_logprobs: list[tuple[TokenLogprobs | None, ...]] = []
        scores: list[float] = []
        logits: list[F32] = []
        segments: Sequence[Segment] = plan.segments
        for step in range(plan.steps):
            if step > 0:
                segments = [decode(slot, self._slots[slot].position) for slot in columns]
            logits_MV = self._compute(segments, plan.want_logits)
            scores += self._scores(segments, logits_MV)
            drawn = self._draw(segments, logits_MV)
            ids[step] = [token_id for token_id, _ in drawn]
            drawn_logprobs.append(tuple(logprob for _, logprob in drawn))
            logits.append(logits_MV)
        return _Done(
            StepResult(
                ids=ids,
                counts=np.count_nonzero(ids != NO_TOKEN, axis=0).astype(np.int64),
                finish=tuple(self._slots[slot].finish for slot in columns),
                logprobs=tuple(drawn_logprobs),
                scores=np.array(scores, dtype=np.float64),
                logits=np.stack(logits) if plan.want_logits else None,
            )
        )

    def _compute(self, segments: Sequence[Segment], all_rows: bool) -> F32:
        """Run the rows of the requests that have not ended; logits [M, V] of all M rows, NaN where none are needed."""
        kinds_M = np.concatenate([segment.kinds for segment in segments])
        alive_M = np.concatenate([[self._slots[s.slot].finish is None] * len(s.kinds) for s in segments])
        logits_MV = np.full((len(kinds_M), self.config.vocab_size), np.nan, dtype=np.float32)
        spans: list[Span] = []
        row_ids: list[int] = []
        for segment in segments:
            slot = self._slots[segment.slot]
            if slot.finish is None:
                spans.append(Span(slot.page_table, segment.start, len(segment.kinds)))
                row_ids += [slot.last_token] if segment.ids is None else segment.ids
                slot.position = segment.start + len(segment.kinds)
        if spans:
            x_MD = self.decoder.forward(np.array(row_ids, dtype=np.int64), spans, self.cache)
            needed_M = alive_M & ((kinds_M != NONE) | all_rows)
            logits_MV[needed_M] = self.decoder.logits(x_MD[needed_M[alive_M]])
        return logits_MV

    def _scores(self, segments: Sequence[Segment], logits_MV: F32) -> list[float]:
        """Log-probability of each score row's target, NaN where the request has ended."""
        kinds = [(segment.slot, kind) for segment in segments for kind in segment.kinds]
        return [
            float(logprobs(logits_V)[kind]) if self._slots[slot].finish is None else float("nan")
            for logits_V, (slot, kind) in zip(logits_MV, kinds, strict=True)
            if kind >= 0
        ]

    def _draw(self, segments: Sequence[Segment], logits_MV: F32) -> list[tuple[int, TokenLogprobs | None]]:
        """The id drawn after each SAMPLE row, or NO_TOKEN where the request has ended, with what is known of it."""
        drawn: list[tuple[int, TokenLogprobs | None]] = []
        last_row = -1
        for segment in segments:
            last_row += len(segment.kinds)
            if segment.kinds[-1] != SAMPLE:
                continue
            slot = self._slots[segment.slot]
            if slot.finish is not None:
                drawn.append((NO_TOKEN, None))
                continue
            token_id = slot.draw(logits_MV[last_row])
            num_top = slot.spec.params.logprobs
            drawn.append((token_id, None if num_top is None else _logprobs(logits_MV[last_row], token_id, num_top)))
        return drawn


def _count(ids: Sequence[int], vocab_size: int) -> Counts:
    return np.bincount(np.array(ids, dtype=np.int64), minlength=vocab_size).astype(np.int64)


def _logprobs(logits_V: F32, token_id: int, num_top: int) -> TokenLogprobs:
    logprobs_V = logprobs(logits_V)
    top_ids = top_tokens(logits_V, num_top) if num_top else np.array([], dtype=np.int64)
    return TokenLogprobs(
        logprob=float(logprobs_V[token_id]),
        top_ids=tuple(top_ids.tolist()),
        top_logprobs=tuple(logprobs_V[top_ids].tolist()),
    )
