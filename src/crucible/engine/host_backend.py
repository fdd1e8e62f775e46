"""What backends have in common whose logits arrive in host memory: slots, drawing, and the order of a plan.

A plan is run when it is submitted, so tickets are always ready. A subclass says what the logits of rows are.

Shape letters: M rows of a step, W of them whose logits are wanted; the others are config.py's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
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
from crucible.engine.quant import Weight
from crucible.engine.request import FinishReason
from crucible.engine.sampling import Choose, logprobs, sample, top_tokens
from crucible.errors import CrucibleError

F32 = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive rows of one request: positions `start` to `start` + `length` - 1."""

    page_table: Ids
    start: int
    length: int


@dataclass(slots=True)
class _Slot:
    """A request as a device would hold it."""

    spec: SlotSpec
    page_table: Ids
    position: int
    num_output: int
    prompt_counts: Ids | None
    output_counts: Ids | None
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

    def draw(self, logits_V: F32, choose: Choose | None) -> int:
        """The request's next token, which stands at the slot's position; updates counts and says whether it ends."""
        spec = self.spec
        draw = sample(
            logits_V,
            spec.params,
            self.position,
            prompt_counts_V=self.prompt_counts,
            output_counts_V=self.output_counts,
            forbidden_ids=spec.end_ids if self.num_output < spec.params.min_tokens else (),
            choose=choose,
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


@dataclass(frozen=True, slots=True)
class _Logits:
    """What `_forward` gave: wanted rows [W, V], and for each of the M rows of the step its place there, or -1."""

    wanted: F32
    index: Ids

    def spread(self) -> F32:
        """[M, V], NaN in rows that have none."""
        logits_MV = np.full((len(self.index), self.wanted.shape[1]), np.nan, dtype=np.float32)
        logits_MV[self.index >= 0] = self.wanted
        return logits_MV


class HostBackend(ABC):
    """The step model of `engine/backend.py` around one function, `_forward`.

    Args:
        config: the architecture.
        num_slots: requests that can be open at once.
        num_pages: pages of 16 positions that they share; None lets every slot reach the context.
    """

    _choose: Choose | None = None
    """A faster way to the same tokens, see `sampling.sample`."""

    def __init__(self, config: ModelConfig, num_slots: int, num_pages: int | None) -> None:
        if num_pages is None:
            num_pages = num_slots * -(-config.max_position_embeddings // PAGE_SIZE)
        self.config = config
        self.num_slots = num_slots
        self.num_pages = num_pages
        self._book = SlotBook(config, num_slots, num_pages)
        self._slots: dict[int, _Slot] = {}

    @abstractmethod
    def _forward(self, ids_M: Ids, spans: Sequence[Span], wanted_M: npt.NDArray[np.bool_]) -> F32:
        """Logits [W, V] of the wanted rows; stores keys and values of all rows.

        `spans` covers the M rows in order. Earlier positions of each span are in the cache.
        """

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
            computed = self._compute(segments, plan.want_logits)
            scores += self._scores(segments, computed)
            drawn = self._draw(segments, computed)
            ids[step] = [token_id for token_id, _ in drawn]
            drawn_logprobs.append(tuple(logprob for _, logprob in drawn))
            if plan.want_logits:
                logits.append(computed.spread())
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

    def _compute(self, segments: Sequence[Segment], all_rows: bool) -> _Logits:
        """Run the rows of the requests that have not ended."""
        spans: list[Span] = []
        ids: list[int] = []
        wanted: list[bool] = []
        alive: list[bool] = []
        for segment in segments:
            slot, length = self._slots[segment.slot], len(segment.kinds)
            alive += [slot.finish is None] * length
            if slot.finish is None:
                spans.append(Span(slot.page_table, segment.start, length))
                ids += [slot.last_token] if segment.ids is None else segment.ids
                wanted += [all_rows or kind != NONE for kind in segment.kinds]
                slot.position = segment.start + length
        index_M = np.full(len(alive), -1, dtype=np.int64)
        index_M[np.flatnonzero(alive)[wanted]] = np.arange(sum(wanted))
        if not spans:
            return _Logits(np.empty((0, self.config.vocab_size), dtype=np.float32), index_M)
        return _Logits(self._forward(np.array(ids, dtype=np.int64), spans, np.array(wanted)), index_M)

    def _scores(self, segments: Sequence[Segment], logits: _Logits) -> list[float]:
        """Log-probability of each score row's target, NaN where the request has ended."""
        kinds = [kind for segment in segments for kind in segment.kinds]
        return [
            float(logprobs(logits.wanted[index])[kind]) if index >= 0 else float("nan")
            for index, kind in zip(logits.index, kinds, strict=True)
            if kind >= 0
        ]

    def _draw(self, segments: Sequence[Segment], logits: _Logits) -> list[tuple[int, TokenLogprobs | None]]:
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
            logits_V = logits.wanted[logits.index[last_row]]
            token_id = slot.draw(logits_V, self._choose)
            num_top = slot.spec.params.logprobs
            drawn.append((token_id, None if num_top is None else _logprobs(logits_V, token_id, num_top)))
        return drawn


def cut(spans: Sequence[Span], max_rows: int) -> Iterator[list[Span]]:
    """The same rows in the same order, in parts of at most so many."""
    part: list[Span] = []
    room = max_rows
    for span in spans:
        done = 0
        while done < span.length:
            length = min(span.length - done, room)
            part.append(Span(span.page_table, span.start + done, length))
            done, room = done + length, room - length
            if room == 0:
                yield part
                part, room = [], max_rows
    if part:
        yield part


def check_weights(config: ModelConfig, weights: Mapping[str, Weight]) -> None:
    """Raises CrucibleError: a tensor of `config.tensor_shapes()` is missing, or one is unknown or of another shape."""
    shapes = config.tensor_shapes()
    if unknown := sorted(weights.keys() - shapes.keys()):
        raise CrucibleError(f"the weights have {unknown[0]}, which the config does not")
    for name, shape in shapes.items():
        if name not in weights:
            raise CrucibleError(f"the weights lack {name}")
        if weights[name].shape != shape:
            raise CrucibleError(f"{name} must have shape {list(shape)}, not {list(weights[name].shape)}")


def _count(ids: Sequence[int], vocab_size: int) -> Ids:
    return np.bincount(np.array(ids, dtype=np.int64), minlength=vocab_size).astype(np.int64)


def _logprobs(logits_V: F32, token_id: int, num_top: int) -> TokenLogprobs:
    logprobs_V = logprobs(logits_V)
    top_ids = top_tokens(logits_V, num_top) if num_top else np.array([], dtype=np.int64)
    return TokenLogprobs(
        logprob=float(logprobs_V[token_id]),
        top_ids=tuple(top_ids.tolist()),
        top_logprobs=tuple(logprobs_V[top_ids].tolist()),
    )
