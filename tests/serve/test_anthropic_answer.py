"""Anthropic's replies and errors, field by field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crucible.serve.anthropic import refusal
from crucible.serve.anthropic.answer import MessageAnswer
from crucible.serve.protocol import STATUS, ApiError, Burst, Choice, End, ErrorKind, FinishReason, Served

SERVED = Served(
    model_id="toy",
    aliases=frozenset(),
    created=0,
    context=128,
    vocab_size=300,
    fingerprint="fp_abc",
    decode=lambda ids: "",
)


def end(finish_reason: FinishReason = "length", stop: str | int | None = None) -> End:
    return End(finish_reason=finish_reason, stop=stop, prompt_tokens=11, completion_tokens=3, seed=7)


def whole(text: str, ending: End) -> dict[str, Any]:
    choice = Choice(0, (1, 2), [3, 4], text, None, None, ending)
    return json.loads(MessageAnswer(SERVED, streams=False).whole([choice]))


def stream(*bursts: Sequence[str], ending: End) -> list[dict[str, Any]]:
    reply = MessageAnswer(SERVED, streams=True)
    data = reply.begin([11])
    for index, texts in enumerate(bursts):
        is_last = index == len(bursts) - 1
        data += reply.burst(Burst(0, [5] * len(texts), list(texts), end=ending if is_last else None))
    return events(data + reply.finish())


def events(data: bytes) -> list[dict[str, Any]]:
    """The data of events, after a check that each is framed as a named one."""
    assert data.endswith(b"\n\n")
    found = []
    for event in data.removesuffix(b"\n\n").split(b"\n\n"):
        name, content = event.split(b"\n")
        found.append(json.loads(content.removeprefix(b"data: ")))
        assert name == b"event: " + found[-1]["type"].encode()
        assert content.startswith(b"data: ")
    return found


STOPS = {
    "max_tokens": (end("length"), {"stop_reason": "max_tokens", "stop_sequence": None}),
    "end_turn": (end("stop"), {"stop_reason": "end_turn", "stop_sequence": None}),
    "stop_sequence": (end("stop", "\n\n"), {"stop_reason": "stop_sequence", "stop_sequence": "\n\n"}),
    "stop_token_id": (end("stop", 7), {"stop_reason": "end_turn", "stop_sequence": None}),
}

each_stop = pytest.mark.parametrize(("ending", "stop"), STOPS.values(), ids=STOPS)


@each_stop
def test_a_whole_message(ending: End, stop: dict[str, Any]):
    message = whole("Hé\n", ending)
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "toy",
        "content": [{"type": "text", "text": "Hé\n"}],
        **stop,
        "usage": {"input_tokens": 11, "output_tokens": 3},
    }


@each_stop
def test_the_events_of_a_stream(ending: End, stop: dict[str, Any]):
    start, *rest = stream(["H", ""], ["é\u2028"], [], [""], ending=ending)
    assert start["message"].pop("id").startswith("msg_")
    assert start == {
        "type": "message_start",
        "message": {
            "type": "message",
            "role": "assistant",
            "model": "toy",
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 11, "output_tokens": 0},
        },
    }
    assert rest == [
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "ping"},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "H"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "é\u2028"}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": stop, "usage": {"input_tokens": 11, "output_tokens": 3}},
        {"type": "message_stop"},
    ]


def test_a_message_without_text_has_its_block_all_the_same():
    assert whole("", end())["content"] == [{"type": "text", "text": ""}]
    assert [event["type"] for event in stream([""], ending=end())] == [
        *("message_start", "content_block_start", "ping", "content_block_stop", "message_delta", "message_stop")
    ]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.text(max_size=5), max_size=4), min_size=1, max_size=5))
def test_deltas_add_up_to_the_text_one_for_each_token_that_shows_something(bursts: list[list[str]]):
    deltas = [e["delta"]["text"] for e in stream(*bursts, ending=end()) if e["type"] == "content_block_delta"]
    assert deltas == [text for burst in bursts for text in burst if text]


def test_ids_of_messages_differ():
    assert len({whole("", end())["id"] for _ in range(20)}) == 20


# ---- errors -----------------------------------------------------------------------------------------------------

TYPES: dict[ErrorKind, tuple[int, str]] = {
    "invalid": (400, "invalid_request_error"),
    "unsupported": (400, "invalid_request_error"),
    "too_long": (400, "invalid_request_error"),
    "authentication": (401, "authentication_error"),
    "host": (403, "permission_error"),
    "not_found": (404, "not_found_error"),
    "method": (405, "invalid_request_error"),
    "too_large": (413, "request_too_large"),
    "media_type": (415, "invalid_request_error"),
    "overloaded": (529, "overloaded_error"),
    "unavailable": (503, "api_error"),
    "internal": (500, "api_error"),
}


def test_every_kind_of_error_has_its_envelope():
    assert TYPES.keys() == STATUS.keys()
    for kind, (status, error_type) in TYPES.items():
        error = ApiError(kind, "why", param="x", code="y")
        found_status, headers, body = refusal(error, "req_1")
        assert found_status == status
        # A request that failed for good is not to be sent again by the client.
        assert headers == ({"x-should-retry": "false"} if kind == "internal" else {})
        assert json.loads(body) == {
            "type": "error",
            "error": {"type": error_type, "message": "why"},
            "request_id": "req_1",
        }


def test_an_overload_says_when_to_come_again():
    _, headers, _ = refusal(ApiError("overloaded", "full", retry_after=3), "req_1")
    assert headers == {"retry-after": "3"}


def test_a_failure_ends_a_stream_with_an_error_event_and_nothing_after_it():
    reply = MessageAnswer(SERVED, streams=True)
    reply.begin([11])
    data = reply.failed(ApiError("unavailable", "the engine stopped"))
    assert events(data) == [{"type": "error", "error": {"type": "api_error", "message": "the engine stopped"}}]
    assert reply.finish() == b""


def test_a_message_without_a_usable_logit_is_an_error():
    reply = MessageAnswer(SERVED, streams=True)
    reply.begin([11])
    *_, last = events(reply.burst(Burst(0, [5], ["a"])) + reply.burst(Burst(0, [], [], end=end("error"))))
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert reply.finish() == b""
    with pytest.raises(ApiError, match="logit") as caught:
        whole("", end("error"))
    assert caught.value.status == 500
