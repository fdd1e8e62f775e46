"""What replies of both endpoints have in common: the envelope, the stream of chunks, the usage."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from crucible.serve.openai.errors import envelope
from crucible.serve.openai.requests import Request, StreamOptions
from crucible.serve.protocol import ApiError, Burst, Choice, End, Served, TokenScore, no_usable_logit
from crucible.serve.wire import json_text

_DONE: Final = b"data: [DONE]\n\n"
_MARK: Final = "\0"
"""Stands for a token's text in a chunk that is a pattern for others; nothing else in it has this character."""


class Answer:
    """A `Reply`. An endpoint adds what a choice looks like there.

    A chunk for every token that shows something, and before the first one what the endpoint opens a choice with: only
    then is it sent, so that the first event of a stream is a sign of the first token. Another one ends a choice.

    Args:
        request: what is answered.
        served: by whom.
        id_prefix: of the reply's id.
        whole_type, chunk_type: `object` of a reply that is no stream, and of a chunk.
    """

    def __init__(self, request: Request, served: Served, *, id_prefix: str, whole_type: str, chunk_type: str) -> None:
        self.streams = bool(request.stream)
        self._options = request.stream_options or StreamOptions()
        self._num_choices = request.n or 1
        """Of each prompt."""
        self._head = {
            "id": f"{id_prefix}-{secrets.token_hex(16)}",
            "object": chunk_type if self.streams else whole_type,
            "created": int(time.time()),
            "model": served.model_id,
            "system_fingerprint": served.fingerprint,
        }
        self._patterns: dict[int, tuple[bytes, bytes]] = {}
        """Of choices that have begun: what stands before and behind a token's text in a chunk that has no more."""
        self._num_prompt = self._num_output = 0
        self._has_failed = False

    # ---- of an endpoint ---------------------------------------------------------------------------------------

    def _choice(self, choice: Choice) -> dict[str, Any]:
        """A finished choice, without index and finish_reason."""
        raise NotImplementedError

    def _opening(self, burst: Burst) -> dict[str, Any] | None:
        """What the first chunk of a choice has, without index and finish_reason; None for no such chunk."""
        raise NotImplementedError

    def _piece(self, index: int, text: str, scores: Sequence[TokenScore] | None) -> dict[str, Any]:
        """What a chunk of a choice has, without index and finish_reason."""
        raise NotImplementedError

    def _closing(self) -> dict[str, Any]:
        """What the last chunk of a choice has, without index and finish_reason."""
        raise NotImplementedError

    # ---- Reply ------------------------------------------------------------------------------------------------

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """As `Reply.whole`. Raises ApiError if a choice failed: OpenAI knows no finish reason for that."""
        if any(choice.end.finish_reason == "error" for choice in choices):
            raise no_usable_logit()
        entries = [
            {"index": choice.index, **self._choice(choice), "finish_reason": choice.end.finish_reason}
            for choice in choices
        ]
        usage = _usage(
            sum(choice.end.prompt_tokens for choice in choices[:: self._num_choices]),
            sum(choice.end.completion_tokens for choice in choices),
        )
        return msgspec.json.encode({**self._head, "choices": entries, "usage": usage})

    def begin(self, prompt_tokens: Sequence[int]) -> bytes:
        """As `Reply.begin`; nothing yet."""
        self._num_prompt = sum(prompt_tokens)
        return b""

    def burst(self, burst: Burst) -> bytes:
        """As `Reply.burst`."""
        chunks = []
        if burst.index not in self._patterns:
            self._patterns[burst.index] = self._pattern(burst.index)
            if (opening := self._opening(burst)) is not None:
                chunks.append(self._chunk(burst.index, opening))
        if burst.scores is None and not self._options.continuous_usage_stats:
            self._num_output += len(burst.token_ids)
            chunks.append(self._plain(burst))
        else:
            chunks += self._detailed(burst)
        if burst.end is not None:
            chunks.append(self._ended(burst.index, burst.end))
        return b"".join(chunks)

    def finish(self) -> bytes:
        """As `Reply.finish`."""
        if self._has_failed:
            return b""
        if not self._options.include_usage:
            return _DONE
        return _event({**self._head, "choices": [], "usage": self._usage_so_far()}) + _DONE

    def failed(self, error: ApiError) -> bytes:
        """As `Reply.failed`. No [DONE] comes after it: what was sent is not all."""
        self._has_failed = True
        return b"data: " + envelope(error) + b"\n\n"

    # ---- chunks -----------------------------------------------------------------------------------------------

    def _plain(self, burst: Burst) -> bytes:
        """A chunk for each token's text, at the cost of one join."""
        before, behind = self._patterns[burst.index]
        texts = [json_text(text) for text in burst.texts if text]
        return before + (behind + before).join(texts) + behind if texts else b""

    def _detailed(self, burst: Burst) -> list[bytes]:
        """A chunk for each token that has text or log-probabilities, with the usage so far if that was asked for."""
        chunks = []
        for position, text in enumerate(burst.texts):
            self._num_output += 1
            scores = None if burst.scores is None else [burst.scores[position]]
            if text or scores:
                chunks.append(self._chunk(burst.index, self._piece(burst.index, text, scores)))
        return chunks

    def _ended(self, index: int, end: End) -> bytes:
        if end.finish_reason == "error":
            return self.failed(no_usable_logit())
        return self._chunk(index, self._closing(), end.finish_reason)

    def _pattern(self, index: int) -> tuple[bytes, bytes]:
        before, behind = self._chunk(index, self._piece(index, _MARK, None)).split(msgspec.json.encode(_MARK))
        return before, behind

    def _chunk(self, index: int, choice: dict[str, Any], finish_reason: str | None = None) -> bytes:
        chunk: dict[str, Any] = {
            **self._head,
            "choices": [{"index": index, **choice, "finish_reason": finish_reason}],
        }
        if self._options.include_usage:
            chunk["usage"] = self._usage_so_far() if self._options.continuous_usage_stats else None
        return _event(chunk)

    def _usage_so_far(self) -> dict[str, int]:
        return _usage(self._num_prompt, self._num_output)


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _usage(num_prompt: int, num_output: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
