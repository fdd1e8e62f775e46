"""One request at a time over an idle backend: the engine's slow twin, which can do without a cache, and logits of given
tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from crucible.engine.backend import (
    NONE,
    PAGE_SIZE,
    SAMPLE,
    Backend,
    SlotSpec,
    StepPlan,
    StepResult,
    TokenLogprobs,
    decode,
    prefill,
)
from crucible.engine.request import FinishReason, RequestError, SamplingParams, checked_limit, checked_prompt

PREFILL_ROWS: Final = 256
"""Prompt tokens per step: bounds memory and answers an interrupt on any prompt. No result depends on it."""


@dataclass(frozen=True, slots=True)
class GeneratedToken:
    """One token as it is drawn.

    Attributes:
        token_id: the id. Where the request ends with "stop" this is the id that ended it: counted, but not text.
            Where it ends with "error", no logit was usable and the id means nothing.
        finish: why the request ends with this token, or None if another follows.
        logprobs: of this token, if the parameters ask for them.
    """

    token_id: int
    finish: FinishReason | None
    logprobs: TokenLogprobs | None


def generate(
    backend: Backend,
    prompt_ids: Sequence[int],
    params: SamplingParams,
    *,
    eos_ids: Collection[int],
    use_cache: bool = True,
) -> Iterator[GeneratedToken]:
    """Draw the continuation of a prompt, one token at a time; the last token has a finish reason.

    Takes slot 0 and the first pages of an otherwise idle backend, until the iterator is exhausted or closed.

    Args:
        backend: holds the model; none of its slots is open.
        prompt_ids: at least one id.
        params: how to draw and when to end; n must be 1 (`SamplingParams.choices` makes such parameters).
        eos_ids: the model's end-of-text ids.
        use_cache: False computes the whole sequence anew for every token: slower, the same tokens.

    Raises:
        RequestError: at the call, not at the first token: the prompt is empty, holds an id that the model does not
            have, or does not fit the context with max_tokens; n is not 1; or the parameters do not fit the model.
    """
    config = backend.config
    ids = checked_prompt(prompt_ids, config.vocab_size)
    if params.n != 1:
        raise RequestError(f"n must be 1 here, not {params.n}; run each of the parameters' choices() by itself")
    limit = checked_limit(len(ids), params.max_tokens, config.max_position_embeddings)
    params.check_vocabulary(config.vocab_size)
    spec = SlotSpec(
        page_table=_pages(backend, limit),
        limit=limit,
        prompt_ids=ids,
        params=params,
        end_ids=params.end_ids(eos_ids),
    )
    return _generate(backend, spec, use_cache)


def _generate(backend: Backend, spec: SlotSpec, use_cache: bool) -> Iterator[GeneratedToken]:
    ids = list(spec.prompt_ids)
    backend.open_slot(0, spec)
    try:
        result = _prefill(backend, ids)
        while True:
            token = GeneratedToken(int(result.ids[0, 0]), result.finish[0], result.logprobs[0][0])
            yield token
            if token.finish is not None:
                return
            ids.append(token.token_id)
            if use_cache:
                result = backend.submit(StepPlan((decode(0, len(ids) - 1),))).wait()
            else:
                backend.rewind_slot(0, 0)
                result = _prefill(backend, ids)
    finally:
        backend.close_slot(0)


def _prefill(backend: Backend, ids: Sequence[int]) -> StepResult:
    """Compute all of `ids` from position 0 and draw the token after them."""
    for start in range(0, len(ids), PREFILL_ROWS):
        chunk = ids[start : start + PREFILL_ROWS]
        last = SAMPLE if start + len(chunk) == len(ids) else NONE
        result = backend.submit(StepPlan((prefill(0, chunk, start, last=last),))).wait()
    return result


def logits(backend: Backend, ids: Sequence[int]) -> npt.NDArray[np.float32]:
    """Logits f32 [T, V] after each of T given tokens, on slot 0 of an otherwise idle backend.

    Raises:
        RequestError: `ids` is empty, longer than the context, or holds an id that the model does not have.
    """
    ids = checked_prompt(ids, backend.config.vocab_size)
    if len(ids) > backend.config.max_position_embeddings:
        raise RequestError(f"{len(ids)} tokens do not fit the context of {backend.config.max_position_embeddings}")
    pages = _pages(backend, len(ids))
    backend.open_slot(0, SlotSpec(page_table=pages, limit=len(ids), prompt_ids=(), params=SamplingParams()))
    try:
        chunks = []
        for start in range(0, len(ids), PREFILL_ROWS):
            segment = prefill(0, ids[start : start + PREFILL_ROWS], start, last=NONE)
            chunk = backend.submit(StepPlan((segment,), want_logits=True)).wait().logits
            assert chunk is not None, "the plan wants logits"
            chunks.append(chunk[0])
        return np.concatenate(chunks)
    finally:
        backend.close_slot(0)


def _pages(backend: Backend, num_positions: int) -> tuple[int, ...]:
    """The first pages, enough for so many positions.

    Raises:
        RequestError: the backend has fewer.
    """
    count = -(-num_positions // PAGE_SIZE)
    if count > backend.num_pages:
        raise RequestError(
            f"{num_positions} tokens need {count} pages of the cache; the backend has {backend.num_pages}"
        )
    return tuple(range(count))
