"""Anthropic's reply: a message, or the typed events that add up to one."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from crucible.serve.anthropic.errors import envelope
from crucible.serve.protocol import ApiError, Burst, Choice, End, Served, no_usable_logit
from crucible.serve.wire import json_text


class MessageAnswer:
    """A `Reply`: one message with one block of text, which may be empty.

    Args:
        served: by whom.
        streams: whether by events.
    """

    def __init__(self, served: Served, *, streams: bool) -> None:
        self.streams = streams
        self._head = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": served.model_id,
        }
        self._has_failed = False

    def whole(self, choices: Sequence[Choice]) -> bytes:
        """As `Reply.whole`. Raises ApiError if the choice failed: Anthropic knows no stop reason for that."""
        (choice,) = choices
        if choice.end.finish_reason == "error":
            raise no_usable_logit()
        content = [{"type": "text", "text": choice.text}]
        return msgspec.json.encode({**self._head, "content": content, **_stop(choice.end), "usage": _usage(choice.end)})

    def begin(self, prompt_tokens: Sequence[int]) -> bytes:
        """As `Reply.begin`: the message without its text, the block that the text comes in, and a ping."""
        (num_input,) = prompt_tokens
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": num_input, "output_tokens": 0},
        }
        return (
            _event({"type": "message_start", "message": message})
            + _event({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
            + _event({"type": "ping"})
        )

    def burst(self, burst: Burst) -> bytes:
        """As `Reply.burst`: an event for each token that shows something, at the cost of one join."""
        texts = [json_text(text) for text in burst.texts if text]
        events = _BEFORE_TEXT + (_BEHIND_TEXT + _BEFORE_TEXT).join(texts) + _BEHIND_TEXT if texts else b""
        return events if burst.end is None else events + self._ended(burst.end)

    def finish(self) -> bytes:
        """As `Reply.finish`."""
        return b"" if self._has_failed else _event({"type": "message_stop"})

    def failed(self, error: ApiError) -> bytes:
        """As `Reply.failed`. No message_stop comes after it: what was sent is not all."""
        self._has_failed = True
        return _event(envelope(error))

    def _ended(self, end: End) -> bytes:
        if end.finish_reason == "error":
            return self.failed(no_usable_logit())
        return _event({"type": "content_block_stop", "index": 0}) + _event(
            {"type": "message_delta", "delta": _stop(end), "usage": _usage(end)}
        )


def _stop(end: End) -> dict[str, str | None]:
    """Why a message ends. An id of `stop_token_ids`, which Anthropic has not, ends the model's turn as its own do."""
    if isinstance(end.stop, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": end.stop}
    return {"stop_reason": "max_tokens" if end.finish_reason == "length" else "end_turn", "stop_sequence": None}


def _usage(end: End) -> dict[str, int]:
    return {"input_tokens": end.prompt_tokens, "output_tokens": end.completion_tokens}


def _event(data: dict[str, Any]) -> bytes:
    """A server-sent event, which must be named: clients pass over data without a name."""
    return b"event: %b\ndata: %b\n\n" % (data["type"].encode(), msgspec.json.encode(data))


_MARK: Final = "\0"
"""Stands for a token's text in the event that is a pattern for others; nothing else in it has this character."""

_BEFORE_TEXT, _BEHIND_TEXT = _event(
    {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": _MARK}}
).split(msgspec.json.encode(_MARK))
