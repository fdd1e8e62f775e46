"""The native API: `POST /v1/generate` and `/v1/generate/stream`, `/v1/tokenize` and `/v1/detokenize`.

A stream is a `token` event for each token and a `done` event for each choice, or one `error` event that ends it.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec

from crucible.serve.protocol import ApiError, Burst, Call, Choice, End, Generate, Reply, Served, TokenChance, TokenScore
from crucible.serve.wire import json_text, read_json


class Tokenize(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/tokenize`: exactly one of the two, as for `/v1/generate`."""

    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class Detokenize(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The body of `POST /v1/detokenize`."""

    token_ids: list[int]


class Native:
    """A `Surface`."""

    def __init__(self, *, streams: bool) -> None:
        self._streams = streams

    def read(self, body: bytes, served: Served) -> tuple[list[Call], Reply]:
        """As `Surface.read`."""
        request = read_json(body, Generate)
        return [Call(request=request)], Answer(served, request.n or 1, streams=self._streams)


def refusal(error: ApiError, request_id: str) -> tuple[int, dict[str, str], bytes]:
    """As `protocol.Refusal`, for every path that is no other API's."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    return error.status, headers, msgspec.json.encode({**_envelope(error), "request_id": request_id})


class Answer:
    """A `Reply`."""

    def __init__(self, served: Served, num_choices: int, *, streams: bool) -> None:
        self.streams = streams
        self._num_choices = num_choices
        self._head = {"id": f"gen-{secrets.token_hex(16)}", "model": served.model_id}

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """As `Reply.whole`: the choice itself where there is one, else a list of them."""
        entries = [self._entry(choice) for choice in choices]
        return msgspec.json.encode({**self._head, **(entries[0] if self._num_choices == 1 else {"choices": entries})})

    def begin(self, prompt_tokens: Sequence[int]) -> bytes:
        """As `Reply.begin`; nothing."""
        return b""

    def burst(self, burst: Burst) -> bytes:
        """As `Reply.burst`."""
        if self._num_choices == 1 and burst.scores is None and burst.prompt_scores is None:
            events = list(map(_token_event, burst.token_ids, burst.texts))
        else:
            events = [self._token(burst, position) for position in range(len(burst.token_ids))]
        if burst.end is not None:
            events.append(_event("done", {**self._index(burst.index), **_end(burst.end), "text": ""}))
        return b"".join(events)

    def finish(self) -> bytes:
        """As `Reply.finish`; nothing."""
        return b""

    def failed(self, error: ApiError) -> bytes:
        """As `Reply.failed`."""
        return _event("error", _envelope(error))

    def _index(self, index: int) -> dict[str, int]:
        return {"index": index} if self._num_choices > 1 else {}

    def _token(self, burst: Burst, position: int) -> bytes:
        data: dict[str, Any] = {"token_id": burst.token_ids[position], "text": burst.texts[position]}
        if burst.scores is not None:
            score = burst.scores[position]
            data |= {"logprob": score.chosen.logprob, "top": [_chance(chance) for chance in score.top]}
        if position == 0 and burst.prompt_scores is not None:
            data["prompt_logprobs"] = _prompt(burst.prompt_scores)
        return _event("token", {**self._index(burst.index), **data})

    def _entry(self, choice: Choice) -> dict[str, Any]:
        entry = {**self._index(choice.index), "text": choice.text, "token_ids": choice.token_ids, **_end(choice.end)}
        if choice.scores is not None:
            entry["logprobs"] = [_score(score) for score in choice.scores]
        if choice.prompt_scores is not None:
            entry["prompt_logprobs"] = _prompt(choice.prompt_scores)
        return entry


@lru_cache(1 << 17)
def _token_event(token_id: int, text: str) -> bytes:
    return b'event: token\ndata: {"token_id":%d,"text":%b}\n\n' % (token_id, json_text(text))


def _event(name: str, data: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))


def _envelope(error: ApiError) -> dict[str, Any]:
    code = error.code or error.kind
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": code}}


def _end(end: End) -> dict[str, Any]:
    return {
        "finish_reason": end.finish_reason,
        "stop": end.stop,
        "seed": end.seed,
        "usage": {
            "prompt_tokens": end.prompt_tokens,
            "completion_tokens": end.completion_tokens,
            "total_tokens": end.prompt_tokens + end.completion_tokens,
        },
    }


def _chance(chance: TokenChance) -> dict[str, Any]:
    return {"token_id": chance.token_id, "text": chance.text, "logprob": chance.logprob}


def _score(score: TokenScore) -> dict[str, Any]:
    return {**_chance(score.chosen), "top": [_chance(chance) for chance in score.top]}


def _prompt(scores: Sequence[TokenChance | None]) -> list[dict[str, Any] | None]:
    return [None if chance is None else _chance(chance) for chance in scores]


GENERATE: Final = Native(streams=False)
GENERATE_STREAM: Final = Native(streams=True)
