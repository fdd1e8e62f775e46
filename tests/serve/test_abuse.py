"""Requests that nobody should send: each gets a short refusal that names the field and repeats no text of it, and the
server answers the next one as if nothing had been."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from refusals import BODIES, CANARY, CHATTING, GENERATE, GENERATING, TURNS, message_of, raw
from serve_process import Server

each_path = pytest.mark.parametrize("path", BODIES)
each_generating = pytest.mark.parametrize("path", GENERATING)


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    assert "Traceback" not in server.log
    server.wait_until_idle()


Post = Callable[..., httpx.Response]


@pytest.fixture(scope="module")
def post(client: httpx.Client) -> Post:
    """Sends bytes, or a path's own body with some fields changed or left out."""

    def post(path: str, content: bytes | None = None, *, leaves_out: str = "", **fields: Any) -> httpx.Response:
        if content is None:
            body = {name: value for name, value in {**BODIES[path], **fields}.items() if name != leaves_out}
            content = json.dumps(body).encode()
        return client.post(path, content=content, headers={"content-type": "application/json"})

    return post


def test_the_bodies_are_taken_as_they_are(post: Post) -> None:
    for path in BODIES:
        assert post(path).status_code == 200


# ---- size ---------------------------------------------------------------------------------------------------------


LIMIT = 4 << 20


@each_path
def test_a_body_beyond_the_bound_is_refused_before_it_is_read(post: Post, path: str) -> None:
    began = time.perf_counter()
    message = message_of(post(path, b'{"prompt":"' + b"a" * (12 << 20) + b'"}'), 413)
    assert "4,194,304" in message
    assert time.perf_counter() - began < 5


def test_a_length_that_is_announced_is_not_waited_for(server: Server) -> None:
    head = f"POST {GENERATE} HTTP/1.1\nhost: localhost\ncontent-type: application/json\ncontent-length: {{}}\n\n"
    for told in (LIMIT + 1, 10**15):
        assert raw(server, head.format(told), b'{"prompt":').startswith(b"HTTP/1.1 413 ")
    for told in (10**30, -1, "5, 6", "0x10", ""):
        assert raw(server, head.format(told), b"{}").startswith(b"HTTP/1.1 400 ")


def test_a_body_without_a_length_is_counted_as_it_comes(server: Server) -> None:
    head = f"POST {GENERATE} HTTP/1.1\nhost: localhost\ntransfer-encoding: chunked\n\n"
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    assert raw(server, head, *[piece] * 80).startswith(b"HTTP/1.1 413 ")
    small = b"%x\r\n%b\r\n0\r\n\r\n" % (len(b'{"prompt":"a","max_tokens":1}'), b'{"prompt":"a","max_tokens":1}')
    assert raw(server, head, small).startswith(b"HTTP/1.1 200 ")


def test_a_length_beside_chunks_is_refused(server: Server) -> None:
    head = f"POST {GENERATE} HTTP/1.1\nhost: localhost\ncontent-length: 5\ntransfer-encoding: chunked\n\n"
    assert raw(server, head, b"0\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_a_body_of_the_very_bound_is_read(post: Post) -> None:
    body = b'{"prompt":"the cat","max_tokens":1}'
    assert post(GENERATE, body + b" " * (LIMIT - len(body))).status_code == 200
    assert post(GENERATE, body + b" " * (LIMIT + 1 - len(body))).status_code == 413


def test_a_prompt_beyond_the_context_is_refused_with_the_numbers(post: Post) -> None:
    for path in GENERATING:
        name = "messages" if "messages" in BODIES[path] else "prompt"
        text = f"{CANARY} 123456789 " * 5000
        value = [{"role": "user", "content": text}] if name == "messages" else text
        message = message_of(post(path, **{name: value}))
        assert re.search(r"\d{5} tokens", message)
        assert "256" in message


@pytest.mark.parametrize("prompt", [b'"a"', b"[5]"])
def test_more_prompts_than_can_be_are_refused_at_once(post: Post, prompt: bytes) -> None:
    began = time.perf_counter()
    for number in (321, 900_000):
        body = b'{"model":"gpt-4o","prompt":[' + b",".join([prompt] * number) + b"]}"
        message_of(post("/v1/completions", body))
    assert time.perf_counter() - began < 5


def test_other_clients_are_answered_while_a_long_prompt_is_read(client: httpx.Client, server: Server) -> None:
    body = b'{"prompt":"' + b"a b " * 250_000 + b'"}'
    head = f"POST {GENERATE} HTTP/1.1\nhost: localhost\ncontent-length: {len(body)}\n\n".replace("\n", "\r\n")
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=60)) as connection:
        connection.sendall(head.encode() + body)
        began = time.perf_counter()
        assert client.get("/health").status_code == 200
        assert time.perf_counter() - began < 1
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 400 ")


# ---- JSON ---------------------------------------------------------------------------------------------------------

NO_JSON: dict[str, bytes] = {
    "nothing": b"",
    "space": b" \n",
    "no JSON": b"prompt=the+cat",
    "cut off": b'{"prompt": "c4n4ry',
    "more behind": b'{"prompt": "c4n4ry"}}',
    "single quotes": b"{'prompt': 'c4n4ry'}",
    "a comma too many": b'{"prompt": "c4n4ry",}',
    "a comment": b'{"prompt": "c4n4ry" /* */}',
    "a list": b'["c4n4ry"]',
    "a text": b'"c4n4ry"',
    "null": b"null",
    "a number": b"1e999",
    "NaN": b'{"prompt": "c4n4ry", "temperature": NaN}',
    "Infinity": b'{"prompt": "c4n4ry", "temperature": Infinity}',
    "-Infinity": b'{"prompt": "c4n4ry", "temperature": -Infinity}',
    "a lone surrogate": b'{"prompt": "c4n4ry \\ud800"}',
    "the second half of a pair": b'{"prompt": "\\udc00 c4n4ry"}',
    "a lone surrogate in a name": b'{"\\ud800c4n4ry": 1}',
    "no UTF-8": b'{"prompt": "c4n4ry \xff"}',
    "a surrogate in UTF-8": b'{"prompt": "c4n4ry \xed\xa0\x80"}',
    "UTF-16": '{"prompt": "c4n4ry"}'.encode("utf-16"),
    "a byte order mark": b'\xef\xbb\xbf{"prompt": "c4n4ry"}',
    "a control character": b'{"prompt": "c4n4ry \n"}',
    "a zero in front": b'{"prompt": "c4n4ry", "max_tokens": 01}',
    "compressed": b"\x1f\x8b\x08\x00" + bytes(20),
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000,
}


@each_path
@pytest.mark.parametrize("body", NO_JSON.values(), ids=NO_JSON)
def test_what_is_no_json_object_is_refused(post: Post, path: str, body: bytes) -> None:
    message_of(post(path, body))


def nested(depth: int, kind: str) -> str:
    return "[" * depth + "1" + "]" * depth if kind == "lists" else '{"a":' * depth + "1" + "}" * depth


@each_path
@pytest.mark.parametrize("kind", ["lists", "objects"])
@pytest.mark.parametrize("depth", [40, 200, 900, 990, 5000])
def test_depth_is_refused_wherever_it_is(post: Post, path: str, depth: int, kind: str) -> None:
    deep = nested(depth, kind)
    for name in BODIES[path]:
        body = {**BODIES[path], name: "HERE"}
        message_of(post(path, json.dumps(body).replace('"HERE"', deep).encode()))
    if path in CHATTING:
        for name in ("content", "tool_calls", "name", "anything"):
            turn = json.dumps({**BODIES[path], "messages": [{**TURNS[0], name: "HERE"}]})
            message_of(post(path, turn.replace('"HERE"', deep).encode()))


# ---- values -------------------------------------------------------------------------------------------------------

INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs")
NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
NO_INTEGERS = ["true", "false", '"1"', '"c4n4ry"', "1.0", "1.5", "1e3", "[]", "{}", "[1]", "1e999", "9" * 5000]
NO_NUMBERS = ["true", "false", '"1"', "[]", "{}", "1e999", "-1e999", "9" * 400, "9" * 5000]


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name in INTEGERS for value in NO_INTEGERS]
    + [(name, value) for name in NUMBERS for value in NO_NUMBERS],
    ids=lambda text: text[:12],
)
def test_wrong_types_are_refused_by_name(post: Post, name: str, value: str) -> None:
    body = json.dumps({**BODIES[GENERATE], name: "HERE"}).replace('"HERE"', value)
    reply = post(GENERATE, body.encode())
    assert message_of(reply).startswith(f"{name} ")
    assert reply.json()["error"]["param"] == name


OUT_OF_RANGE: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 257),
    ("max_tokens", 10**30),
    ("min_tokens", -1),
    ("min_tokens", 2),
    ("top_k", -1),
    ("top_k", 2**31),
    ("top_p", -0.1),
    ("top_p", 5),
    ("min_p", 1.1),
    ("temperature", -1e-9),
    ("n", 0),
    ("n", -5),
    ("n", 129),
    ("n", 10**9),
    ("logprobs", -1),
    ("logprobs", 21),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("repetition_penalty", 1e300),
    ("frequency_penalty", 2.1),
    ("presence_penalty", -1e300),
    ("stop", ""),
    ("stop", [""]),
    ("stop", ["a", ""]),
    ("stop", ["a"] * 33),
    ("stop", CANARY * 200),
    ("stop", [5]),
    ("stop", {"a": CANARY}),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", [320]),
    ("stop_token_ids", [151645]),
    ("stop_token_ids", [2**70]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", CANARY),
    ("stop_token_ids", list(range(200))),
    ("logit_bias", {"AI": -100}),
    ("logit_bias", {CANARY: 1}),
    ("logit_bias", {"": 1}),
    ("logit_bias", {" 5": 1}),
    ("logit_bias", {"5.0": 1}),
    ("logit_bias", {"-1": 1}),
    ("logit_bias", {"320": 1}),
    ("logit_bias", {"191222": 1}),
    ("logit_bias", {"9" * 5000: 1}),
    ("logit_bias", {"5": None}),
    ("logit_bias", {"5": True}),
    ("logit_bias", {"5": CANARY}),
    ("logit_bias", {"5": 100.1}),
    ("logit_bias", [1]),
    ("ignore_eos", 1),
    ("ignore_eos", "true"),
    ("prompt_logprobs", 1),
    ("prompt", 5),
    ("prompt", {"text": CANARY}),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", [[]]),
    ("prompt", [""]),
    ("prompt", [CANARY]),
    ("prompt", [5, -1]),
    ("prompt", [320]),
    ("prompt", [200000]),
    ("prompt", [2**64]),
    ("prompt", [5.0]),
    ("prompt", [True]),
    ("prompt", [None]),
    ("prompt", "a" * 257),
    ("messages", CANARY),
    ("messages", TURNS),
]


@pytest.mark.parametrize(("name", "value"), OUT_OF_RANGE, ids=lambda value: str(value)[:16])
def test_values_out_of_range_are_refused_by_name(post: Post, name: str, value: Any) -> None:
    for path in (GENERATE, "/v1/generate/stream"):
        reply = post(path, **{name: value})
        assert name in message_of(reply)
        assert str(reply.json()["error"]["param"]).partition("[")[0] in (name, "prompt")


TAKEN: list[tuple[str, Any]] = [
    ("seed", 2**63),
    ("seed", 2**64),
    ("seed", -(2**63)),
    ("seed", 10**400),
    ("top_k", 2**31 - 1),
    ("top_k", 321),
    ("temperature", 1e300),
    ("temperature", 5e-324),
    ("logit_bias", {str(token_id): -100 for token_id in range(320)}),
    ("logit_bias", {"319": 100.0}),
    ("stop", []),
    ("stop", "\0"),
    ("prompt", "\0\ud83d\udc4d\u2028"),
    ("prompt", [319]),
    ("repetition_penalty", 100),
]


@pytest.mark.parametrize(("name", "value"), TAKEN, ids=lambda value: str(value)[:16])
def test_odd_values_in_range_are_taken(post: Post, name: str, value: Any) -> None:
    fields = {"temperature": 1.0, name: value, "logprobs": 20}
    reply = post(GENERATE, **fields)
    assert reply.status_code == 200, reply.text
    (score,) = reply.json()["logprobs"]
    assert all(-9999 <= one["logprob"] <= 0 for one in score["top"])


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [CANARY],
        [None],
        [{}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        [{"role": CANARY, "content": "a"}],
        [{"role": ["user"], "content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": [CANARY]}],
        [{"role": "user", "content": [{"type": CANARY}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "user", "content": [{"type": "text", "text": 5}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": CANARY}}]}],
        [{"role": "user", "content": "a", "tool_calls": [{"id": CANARY}]}],
        [{"role": "tool", "content": CANARY}],
    ],
    ids=lambda messages: str(messages)[:40],
)
@pytest.mark.parametrize("path", [GENERATE, "/v1/tokenize", *CHATTING])
def test_messages_that_are_none_are_refused(post: Post, path: str, messages: Any) -> None:
    leaves_out = "" if path in CHATTING else "prompt"
    assert "messages" in message_of(post(path, messages=messages, leaves_out=leaves_out))


@each_path
@pytest.mark.parametrize("name", ["unknown", "Prompt", "a" * 5000, "new\nline`\u202e", "__class__"])
def test_unknown_fields_are_refused_by_name(post: Post, path: str, name: str) -> None:
    message = message_of(post(path, **{name: CANARY}))
    assert name[:20].partition("\n")[0] in message
    assert len(message) < 150


@each_path
def test_fields_that_are_missing_are_named(post: Post, path: str) -> None:
    for name in BODIES[path]:
        if name != "max_tokens" or path == "/v1/messages":
            message = message_of(post(path, leaves_out=name))
            assert name in message


def test_ids_that_are_none_are_not_detokenized(post: Post) -> None:
    for ids in ([-1], [320], [2**63], [2**64], [5.0], ["5"], [True], [None], "5", {}, [[5]]):
        assert message_of(post("/v1/detokenize", token_ids=ids)).startswith("token_ids")


def test_no_name_of_a_model_is_repeated(client: httpx.Client, post: Post) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/messages/count_tokens"):
        message_of(post(path, model=CANARY), 404)
        message_of(post(path, model=f"../{CANARY}/\0"), 404)
    for name in (CANARY, f"a/b/{CANARY}", f"%2e%2e%2f{CANARY}", f"{CANARY}%00%0a"):
        message_of(client.get(f"/v1/models/{name}"), 404)


# ---- the same fault on every surface ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "fields", "native", "openai", "anthropic"),
    [
        (400, {"temperature": "hot"}, "invalid", "invalid_request_error", "invalid_request_error"),
        (400, {"temperature": -1}, "invalid", "invalid_request_error", "invalid_request_error"),
        (400, {"min_p": 2.0}, "invalid", "invalid_request_error", "invalid_request_error"),
        (400, {"top_k": 5}, "invalid", "invalid_request_error", "invalid_request_error"),
        (400, {"never_heard_of": 1}, "invalid", "invalid_request_error", "invalid_request_error"),
        (400, {"logit_bias": {"999": 1}}, "invalid", "invalid_request_error", "invalid_request_error"),
    ],
    ids=["type", "range", "needs a temperature and is out of range", "needs a temperature", "unknown", "id"],
)
def test_a_fault_has_the_envelope_of_the_surface(
    post: Post, status: int, fields: dict[str, Any], native: str, openai: str, anthropic: str
) -> None:
    (name,) = fields
    for path in GENERATING:
        reply = post(path, **fields)
        assert name in message_of(reply, status)
        error = reply.json()["error"]
        expected = {"/v1/messages": anthropic}.get(path, native if path.startswith(GENERATE) else openai)
        assert error["type"] == expected
        assert error.get("param", name) == name


# ---- anything at all ----------------------------------------------------------------------------------------------

FIELDS = sorted(
    {*INTEGERS, *NUMBERS, "stop", "stop_token_ids", "logit_bias", "ignore_eos", "prompt_logprobs", "prompt", "messages"}
    | {"model", "stream", "stream_options", "echo", "best_of", "suffix", "top_logprobs", "tools", "tool_choice", "user"}
    | {"system", "metadata", "thinking", "stop_sequences", "response_format", "token_ids", "max_completion_tokens"}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 400)
    | st.sampled_from([2**31, 2**63, 2**64, -(2**64), 10**30])
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from([CANARY, "", "user", "assistant", "text", "auto", "\0", "5", "\u202e" + CANARY])
    | st.text(max_size=8)
)
KEYS = st.sampled_from(["role", "content", "type", "text", "5", "-1", "999", "name", "include_usage", CANARY])
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3), max_leaves=6
)


def check_any(reply: httpx.Response) -> None:
    """Whatever it was, it is answered, and not with a failure."""
    assert reply.status_code in (200, 400, 404), (reply.status_code, reply.request.content, reply.text)
    if reply.status_code != 200:
        message_of(reply, reply.status_code)


@pytest.mark.parametrize("path", BODIES)
@given(fields=st.dictionaries(st.sampled_from(FIELDS), VALUES, min_size=1, max_size=3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_values_of_known_fields(post: Post, path: str, fields: dict[str, Any]) -> None:
    check_any(post(path, **fields))


@pytest.mark.parametrize("path", BODIES)
@given(data=st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_bytes_that_were_once_a_request(post: Post, path: str, data: st.DataObject) -> None:
    body = bytearray(
        json.dumps({**BODIES[path], "model": CANARY} if "model" in BODIES[path] else BODIES[path]).encode()
    )
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        body[at : at + data.draw(st.integers(0, 4))] = data.draw(
            st.binary(max_size=3) | st.sampled_from([b"[", b"]", b"{", b"}", b'"', b"\\u", b"1e9", b"null", b",", b":"])
        )
    check_any(post(path, bytes(body)))


def test_the_server_is_as_it_was(post: Post, server: Server) -> None:
    metrics = server.wait_until_idle()
    assert (metrics["in_flight"], metrics["pages"]["used"], metrics["restarts"]) == (0, 0, 0)
    for path in BODIES:
        assert post(path).status_code == 200
