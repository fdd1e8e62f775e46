"""Anthropic's endpoints over HTTP, byte by byte: an SDK papers over what is wrong."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
TURNS = [{"role": "user", "content": "the cat"}]
AT_RANDOM = {"temperature": 3.0, "ignore_eos": True}
"""The toy model then draws bytes at random, so that characters are cut in every way."""


@pytest.fixture(scope="module")
def client(server: Any):
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def context(client: httpx.Client) -> int:
    return client.get("/health").json()["context"]


@pytest.fixture
def post(client: httpx.Client, server: Any):
    def post(path: str = MESSAGES, headers: Any = None, **fields: Any) -> httpx.Response:
        return client.post(path, headers=headers, json={"model": server.model_id, "messages": TURNS, **fields})

    return post


@pytest.fixture
def ask(post: Any):
    """The body of a whole reply."""

    def ask(**fields: Any) -> Any:
        reply = post(**{"max_tokens": 8, **fields})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"].startswith("application/json")
        assert reply.headers["request-id"]
        return reply.json()

    return ask


@pytest.fixture
def stream(post: Any):
    """The events of a stream, each with the name that its line gives it."""

    def stream(**fields: Any) -> list[Any]:
        reply = post(**{"max_tokens": 8, "stream": True, **fields})
        assert reply.status_code == 200, reply.text
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert reply.headers["cache-control"] == "no-store"
        assert reply.headers["request-id"]
        *events, rest = reply.content.decode().split("\n\n")
        assert rest == ""
        found = []
        for event in events:
            name, data = event.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
        return found

    return stream


@pytest.fixture
def refuse(post: Any):
    """The error of a refused request."""

    def refuse(status: int = 400, **fields: Any) -> Any:
        return error_of(post(**{"max_tokens": 8, **fields}), status)

    return refuse


def error_of(reply: httpx.Response, status: int) -> Any:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"].startswith("application/json")
    body = reply.json()
    assert set(body) == {"type", "error", "request_id"}
    assert body["type"] == "error"
    assert body["request_id"] == reply.headers["request-id"]
    assert set(body["error"]) == {"type", "message"}
    assert 0 < len(body["error"]["message"]) < 400
    return body["error"]


def text_of(body: Any) -> str:
    (block,) = body["content"]
    assert set(block) == {"type", "text"}
    assert block["type"] == "text"
    return block["text"]


# ---- messages ---------------------------------------------------------------------------------------------------


def test_a_whole_message(ask: Any, server: Any):
    body = ask(max_tokens=5, ignore_eos=True)
    assert set(body) == {"id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage"}
    assert body["id"].startswith("msg_")
    assert (body["type"], body["role"], body["model"]) == ("message", "assistant", server.model_id)
    assert isinstance(text_of(body), str)
    assert (body["stop_reason"], body["stop_sequence"]) == ("max_tokens", None)
    assert set(body["usage"]) == {"input_tokens", "output_tokens"}
    assert body["usage"]["output_tokens"] == 5


@pytest.mark.parametrize("seed", range(3))
def test_a_stream_adds_up_to_the_whole_message(ask: Any, stream: Any, seed: int):
    fields = {"max_tokens": 40, "seed": seed, **AT_RANDOM}
    whole = ask(**fields)
    start, block, ping, *deltas, block_end, end, stop = stream(**fields)
    message = start["message"]
    assert start == {"type": "message_start", "message": message}
    assert message["id"] != whole["id"]
    assert message == {
        **whole,
        "id": message["id"],
        "content": [],
        "stop_reason": None,
        "usage": {"input_tokens": whole["usage"]["input_tokens"], "output_tokens": 0},
    }
    assert block == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert ping == {"type": "ping"}
    texts = [delta["delta"]["text"] for delta in deltas]
    assert deltas == [
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}} for text in texts
    ]
    assert all(texts)
    assert "".join(texts) == text_of(whole)
    assert block_end == {"type": "content_block_stop", "index": 0}
    assert end == {
        "type": "message_delta",
        "delta": {"stop_reason": "max_tokens", "stop_sequence": None},
        "usage": whole["usage"],
    }
    assert stop == {"type": "message_stop"}


def test_the_text_ends_before_a_stop_sequence(ask: Any, stream: Any):
    fields = {"max_tokens": 30, "seed": 11, **AT_RANDOM}
    text = text_of(ask(**fields))
    stop = text[5:8]
    body = ask(**fields, stop_sequences=["\0never", stop])
    assert (body["stop_reason"], body["stop_sequence"]) == ("stop_sequence", stop)
    assert text_of(body) == text[: text.index(stop)]
    assert body["usage"]["output_tokens"] < 30
    *_, end, _ = events = stream(**fields, stop_sequences=[stop])
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": stop}
    assert end["usage"] == body["usage"]
    deltas = [event["delta"]["text"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(deltas) == text_of(body)


def test_a_message_ends_with_the_models_turn(ask: Any):
    drawn = ask(max_tokens=30, seed=1, temperature=3.0, logit_bias=dict.fromkeys(range(256, 300), 4))
    assert drawn["stop_reason"] in ("end_turn", "max_tokens")
    ended = ask(max_tokens=30, stop_token_ids=list(range(60, 70)), logit_bias=dict.fromkeys(range(60, 70), 100))
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
    assert ended["usage"]["output_tokens"] == 1


def test_absent_temperature_is_greedy_and_filters_are_honoured_with_one(ask: Any):
    def text(**fields: Any) -> str:
        return text_of(ask(max_tokens=12, ignore_eos=True, **fields))

    assert text() == text(temperature=0) == text(temperature=0, seed=7, top_p=1, top_k=0) == text(temperature=None)
    assert text(temperature=3, top_k=1) == text(temperature=3, top_p=0) == text(temperature=3, min_p=1) == text()
    assert text(temperature=3, seed=7) == text(temperature=3, seed=7, top_p=1.0)
    assert text(temperature=3, seed=7) != text(temperature=3, seed=8)
    assert text(temperature=3) == text(temperature=3, seed=1234)


@pytest.mark.parametrize("max_tokens", [4096, 128_000, 2**31, 10**30])
def test_a_limit_beyond_the_context_is_what_the_context_leaves(ask: Any, context: int, max_tokens: int):
    body = ask(max_tokens=max_tokens, ignore_eos=True)
    assert body["usage"]["input_tokens"] + body["usage"]["output_tokens"] == context
    assert body["stop_reason"] == "max_tokens"


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(refuse: Any, context: int):
    error = refuse(messages=[{"role": "user", "content": "x " * context}])
    assert error["type"] == "invalid_request_error"
    assert str(context) in error["message"]


@pytest.mark.parametrize("version", [None, "2023-06-01", "2026-10-21"])
@pytest.mark.parametrize("path", [MESSAGES, MESSAGES + "?beta=true"])
def test_versions_and_betas(post: Any, version: str | None, path: str):
    headers = {"anthropic-version": version, "anthropic-beta": "a-2025-01-01"} if version else {}
    assert post(path, headers, max_tokens=1).status_code == 200
    assert post(path.replace(MESSAGES, COUNT), headers).status_code == 200


@pytest.mark.parametrize("version", ["", "2023-01-01", "latest", "2025-02-30"])
@pytest.mark.parametrize("path", [MESSAGES, COUNT])
def test_a_malformed_version_is_refused(post: Any, version: str, path: str):
    error = error_of(post(path, {"anthropic-version": version}, max_tokens=1), 400)
    assert error["type"] == "invalid_request_error"
    assert "anthropic-version" in error["message"]


# ---- prompts ----------------------------------------------------------------------------------------------------

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "one turn": {},
    "system": {"system": "sat on"},
    "system in blocks": {"system": [{"type": "text", "text": "sat "}, {"type": "text", "text": "on"}]},
    "several turns": {"messages": [*TURNS, {"role": "assistant", "content": "sat"}, *TURNS]},
    "two of one role": {"messages": TURNS * 2},
    "to go on from": {"messages": [*TURNS, {"role": "assistant", "content": "sat on "}]},
    "control tokens in the text": {"messages": [{"role": "user", "content": "<|im_end|><|endoftext|>"}]},
    "other scripts": {"messages": [{"role": "user", "content": "你好 👩‍👩‍👧‍👦 \u2028"}]},
    "empty": {"messages": [{"role": "user", "content": ""}]},
}


@pytest.mark.parametrize("fields", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_the_count_of_tokens_is_the_usage(post: Any, ask: Any, stream: Any, fields: dict[str, Any]):
    reply = post(COUNT, **fields)
    assert reply.status_code == 200, reply.text
    assert set(reply.json()) == {"input_tokens"}
    count = reply.json()["input_tokens"]
    assert count == ask(max_tokens=1, **fields)["usage"]["input_tokens"]
    start, *_, end, _ = stream(max_tokens=1, **fields)
    assert start["message"]["usage"]["input_tokens"] == end["usage"]["input_tokens"] == count


def test_blocks_are_the_text_that_they_hold(ask: Any):
    def told(**fields: Any) -> tuple[int, str]:
        body = ask(seed=3, **AT_RANDOM, **fields)
        return body["usage"]["input_tokens"], text_of(body)

    blocks = [
        {"type": "text", "text": "the ", "cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}},
        {"type": "text", "text": "cat", "citations": None},
    ]
    assert told(messages=[{"role": "user", "content": blocks}]) == told()
    assert told(system=blocks) == told(system="the cat") != told()
    assert told(system="") == told(system=[]) == told()
    assert told(messages=[{"role": "system", "content": "the cat"}, *TURNS]) == told(system="the cat")


def test_the_model_goes_on_with_an_assistants_last_text(ask: Any):
    def told(*contents: str) -> tuple[int, str]:
        turns = [{"role": "assistant", "content": content} for content in contents]
        body = ask(messages=[*TURNS, *turns], seed=3, **AT_RANDOM)
        return body["usage"]["input_tokens"], text_of(body)

    assert told("") == told(), "a turn without text is the one that is opened anyway"
    assert told("on the mat")[0] > told()[0]
    assert told("on the mat") != told("on the ma")


# ---- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "secret"}, "temperature"),
        ({"top_k": 5}, "top_k"),
        ({"top_p": 0.5}, "top_p"),
        ({"min_p": 0.5}, "min_p"),
        ({"temperature": 1, "top_p": 5}, "top_p"),
        ({"frequency_penalty": 3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop_sequences": "secret"}, "stop_sequences"),
        ({"stop_sequences": ["a", ""]}, "stop_sequences[1]"),
        ({"stop_sequences": ["a"] * 99}, "stop_sequences"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"seed": "secret"}, "seed"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        ({"tools": [{"name": "secret"}]}, "tools"),
        ({"frobnicate": "secret"}, "frobnicate"),
    ],
)
def test_what_is_refused_is_refused_in_the_name_of_its_field(refuse: Any, fields: dict[str, Any], name: str):
    error = refuse(**fields)
    assert error["type"] == "invalid_request_error"
    assert name in error["message"]
    assert "secret" not in error["message"]


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"secret",
        b"[]",
        b"null",
        b'{"model": "m"',
        b'{"temperature": NaN, "secret": 1}',
        b'{"temperature": -Infinity}',
        b'{"system": "\\ud800"}',
        b'{"system": "\xff"}',
        b'{"tools": ' + b"[" * 5000 + b"]" * 5000 + b"}",
        b'{"max_tokens": 1' + b"0" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_request(client: httpx.Client, path: str, body: bytes):
    reply = client.post(path, content=body, headers={"content-type": "application/json"})
    error = error_of(reply, 400)
    assert error["type"] == "invalid_request_error"
    assert "secret" not in error["message"]


def test_another_model_does_not_answer(post: Any, client: httpx.Client):
    for path in (MESSAGES, COUNT):
        error = error_of(post(path, model="none-such", **({"max_tokens": 1} if path == MESSAGES else {})), 404)
        assert error["type"] == "not_found_error"
        assert "none-such" not in error["message"]


@pytest.mark.parametrize(("path", "method", "status", "kind"), [
    (MESSAGES, "GET", 405, "invalid_request_error"),
    (COUNT, "PUT", 405, "invalid_request_error"),
    (MESSAGES + "/batches", "POST", 404, "not_found_error"),
])  # fmt: skip
def test_paths_and_methods_that_are_none(client: httpx.Client, path: str, method: str, status: int, kind: str):
    assert error_of(client.request(method, path), status)["type"] == kind


def test_a_base_address_that_ends_in_v1_gets_a_hint(client: httpx.Client):
    reply = client.post("/v1/v1/messages", json={}, headers={"anthropic-version": "2023-06-01"})
    assert reply.status_code == 404
    assert "base address must end without /v1" in reply.json()["error"]["message"]


# ---- models -----------------------------------------------------------------------------------------------------


def test_models_in_the_shape_that_the_header_asks_for(client: httpx.Client, server: Any, context: int):
    headers = {"anthropic-version": "2026-10-21"}
    body = client.get("/v1/models", headers=headers).json()
    assert set(body) == {"data", "has_more", "first_id", "last_id"}
    (entry,) = body["data"]
    assert (body["has_more"], body["first_id"], body["last_id"]) == (False, entry["id"], entry["id"])
    assert (entry["type"], entry["id"], entry["max_input_tokens"]) == ("model", server.model_id, context)
    assert client.get(f"/v1/models/{server.model_id}", headers=headers).json() == entry
    assert client.get("/v1/models").json()["object"] == "list"
    error = error_of(client.get("/v1/models/none-such", headers=headers), 404)
    assert error["type"] == "not_found_error"
