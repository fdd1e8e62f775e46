"""What becomes of a request in the engine: its choices, their tokens collected until somebody looks, text made of them.

A slow reader costs memory for its own tokens and delays nobody.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any, Final, cast

from crucible.completion import CompletionText, SamplingParams
from crucible.serve.channel import Detail
from crucible.serve.protocol import ApiError, Burst, Choice, End, FinishReason, TokenScore

if TYPE_CHECKING:
    from crucible.serve.service import Service

_DEFAULTS: Final = {
    field.name: getattr(SamplingParams(), field.name)
    for field in dataclasses.fields(SamplingParams)
    if field.name != "stop"
}
"""The engine's parameters: it knows nothing of stop strings."""


class Running:
    """The choices of one request while the engine computes them: iterate over the bursts, close it when done.

    What is pending of all choices is taken at once, so that whoever is slow does little for each token.
    """

    def __init__(self, service: Service, wanted: Sequence[tuple[tuple[int, ...], SamplingParams]]) -> None:
        self._service = service
        self._is_woken = False
        self._sleep: asyncio.Future[None] | None = None
        self._error: ApiError | None = None
        self.is_cancelled = False
        self.choices = [_Choice(service, self, index, ids, params) for index, (ids, params) in enumerate(wanted)]
        self.num_open = len(self.choices)
        service.running.add(self)
        try:
            for choice in self.choices:
                choice.submit()
        except BaseException:
            self.cancel()
            raise

    async def bursts(self) -> AsyncIterator[list[Burst]]:
        """What has come since the last time, until all choices have ended or the request is cancelled.

        Raises:
            ApiError: the engine has stopped, or refused the request.
        """
        try:
            while self.num_open:
                if not self._is_woken:
                    # An asyncio.Event would do the same, for a tenth of what a stream costs.
                    self._sleep = asyncio.get_running_loop().create_future()
                    await self._sleep
                self._is_woken = False
                if self.is_cancelled:
                    return
                if taken := [burst for choice in self.choices if (burst := choice.take()) is not None]:
                    yield taken
                if self._error is not None and self.num_open:
                    raise self._error
        finally:
            self.cancel()

    def wake(self) -> None:
        """There is something to take."""
        self._is_woken = True
        if self._sleep is not None and not self._sleep.done():
            self._sleep.set_result(None)

    def fail(self, error: ApiError) -> None:
        """End this with an error, after what is there already."""
        self._error = self._error or error
        self.wake()

    def cancel(self) -> None:
        """End whatever has not ended. Any number of times."""
        self.is_cancelled = True
        self._service.running.discard(self)
        for choice in self.choices:
            choice.cancel()
        self.wake()


class _Choice:
    """One completion of one prompt: collects what the engine draws, and makes text of it when it is asked for.

    A `supervisor.Receiver`.
    """

    def __init__(
        self, service: Service, running: Running, index: int, prompt_ids: tuple[int, ...], params: SamplingParams
    ) -> None:
        self.index = index
        self.prompt_ids = prompt_ids
        self.params = params
        self._service, self._running = service, running
        self._text = CompletionText(service.prompts.tokenizer, params)
        self._number: int | None = None
        self._ids: list[int] = []
        self._details: list[Detail] = []
        self._finish: str | None = None
        self._num_tokens = 0
        self._submitted_at = self._last_at = time.perf_counter()
        self._is_open = True

    def submit(self) -> None:
        """Raises ApiError: there is no engine."""
        changed = {
            name: value for name, default in _DEFAULTS.items() if (value := getattr(self.params, name)) != default
        }
        self._number = self._service.supervisor.submit(self.prompt_ids, changed, self)
        self._service.metrics.begin(len(self.prompt_ids))

    # ---- Receiver -------------------------------------------------------------------------------------------------

    def tokens(self, ids: list[int], details: Sequence[Detail]) -> None:
        self._ids += ids
        if details:
            self._details += details
        self._running.wake()

    def end(self, finish: str) -> None:
        self._finish = finish
        self._running.wake()

    def lost(self, error: ApiError) -> None:
        self._running.fail(error)

    # ---- what has come ----------------------------------------------------------------------------------------------

    def take(self) -> Burst | None:
        """Everything since the last time; None for nothing."""
        if not self._is_open or not (self._ids or self._finish):
            return None
        ids, self._ids = self._ids, []
        details, self._details = self._details, []
        burst = Burst(self.index, ids, [])
        self._write(burst)
        self._describe(burst, details)
        self._num_tokens += len(burst.token_ids)
        self._measure(burst, details)
        if burst.end is not None:
            self._close()
        return burst

    def _write(self, burst: Burst) -> None:
        """Fill in texts and end; a stop string cuts off the tokens behind it."""
        ids, finish = burst.token_ids, self._finish
        if finish is None and not self._text.has_stops:
            burst.texts = self._text.push_run(ids)
            return
        if not self._text.has_stops:
            burst.texts = self._text.push_run(ids[:-1])
        for token_id in ids[len(burst.texts) :]:
            is_last = len(burst.texts) + 1 == len(ids)
            piece = self._text.push(token_id, cast(Any, finish) if is_last and finish != "error" else None)
            burst.texts.append(piece.text)
            if self._text.is_finished:
                del ids[len(burst.texts) :]
                burst.end = self._ended(cast(FinishReason, piece.finish_reason), piece.stop_reason, len(ids))
                return
        if finish == "error":
            rest = self._text.push(None, "error").text
            if burst.texts:
                burst.texts[-1] += rest
            burst.end = self._ended("error", None, len(ids))

    def _ended(self, finish: FinishReason, stop: str | int | None, num_new: int) -> End:
        return End(finish, stop, len(self.prompt_ids), self._num_tokens + num_new, self.params.seed)

    def _describe(self, burst: Burst, details: Sequence[Detail]) -> None:
        chance = self._service.chance
        if self.params.logprobs is not None:
            scored = [detail.logprobs for detail in details if detail.logprobs is not None]
            burst.scores = [
                TokenScore(
                    chance(token_id, score.logprob),
                    [chance(i, logprob) for i, logprob in zip(score.top_ids, score.top_logprobs, strict=True)],
                )
                for token_id, score in zip(burst.token_ids, scored, strict=False)
            ]
        for detail in details:
            if detail.prompt_logprobs is not None:
                pairs = zip(self.prompt_ids[1:], detail.prompt_logprobs, strict=True)
                burst.prompt_scores = [None, *(chance(token_id, logprob) for token_id, logprob in pairs)]

    def _measure(self, burst: Burst, details: Sequence[Detail]) -> None:
        now, metrics = time.perf_counter(), self._service.metrics
        for detail in details:
            if detail.queue_seconds is not None:
                metrics.queue_time.observe(detail.queue_seconds)
            if detail.prefill_seconds is not None:
                metrics.prefill_time.observe(detail.prefill_seconds)
        num_new = len(burst.token_ids)
        if num_new:
            is_first = self._num_tokens == num_new
            if is_first:
                metrics.first_token_time.observe(now - self._submitted_at)
            if num_gaps := num_new - is_first:
                metrics.inter_token_time.observe((now - self._last_at) / num_gaps, num_gaps)
            self._last_at = now
            metrics.generation_tokens += num_new
        if burst.end is not None:
            metrics.end(burst.end.finish_reason, now - self._submitted_at)

    def cancel(self) -> None:
        """End it if it has not ended."""
        if self._is_open:
            self._close()
            if self._number is not None:
                self._service.metrics.cancelled += 1

    def _close(self) -> None:
        self._is_open = False
        self._running.num_open -= 1
        if self._number is not None:
            # It has ended already unless a stop string ended it, or its client.
            self._service.supervisor.cancel(self._number)


async def collect(running: Running) -> list[Choice] | None:
    """All choices once they have ended, in order; None if the request was cancelled. Raises as `Running.bursts`."""
    choices: dict[int, Choice] = {}
    async for bursts in running.bursts():
        for burst in bursts:
            own = choices.get(burst.index)
            if own is None:
                prompt_ids = running.choices[burst.index].prompt_ids
                scores, text = burst.scores, "".join(burst.texts)
                own = Choice(burst.index, prompt_ids, burst.token_ids, text, scores, burst.prompt_scores, _NO_END)
                choices[burst.index] = own
            else:
                own.token_ids += burst.token_ids
                own.text += "".join(burst.texts)
                if own.scores is not None:
                    own.scores += burst.scores or []
            own.end = burst.end or own.end
    if len(choices) < len(running.choices) or any(choice.end is _NO_END for choice in choices.values()):
        return None
    return [choices[index] for index in sorted(choices)]


_NO_END: Final = End("error", None, 0, 0, 0)
