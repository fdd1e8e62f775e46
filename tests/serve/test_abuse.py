"""Requests that nobody should send: each gets a short refusal that names the field and repeats no text of it, and the
server answers the next one as if nothing had been."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serve_process import Server

from crucible.models import resolve_text
from crucible.prompts import Prompts
from crucible.serve.app import AppSettings, create_app
from crucible.serve.channel import EngineConfig
from crucible.serve.service import Service
from crucible.serve.supervisor import Supervisor

GENERATE = "/v1/generate"
CANARY = "c4n4ry"
"""A text that no refusal may repeat."""
TURNS = [{"role": "user", "content": "the cat"}]

BODIES: dict[str, dict[str, Any]] = {
    GENERATE: {"prompt": "the cat", "max_tokens": 1},
    "/v1/generate/stream": {"prompt": "the cat", "max_tokens": 1},
    "/v1/completions": {"model": "gpt-4o", "prompt": "the cat", "max_tokens": 1},
    "/v1/chat/completions": {"model": "gpt-4o", "messages": TURNS, "max_tokens": 1},
    "/v1/messages": {"model": "gpt-4o", "messages": TURNS, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": "gpt-4o", "messages": TURNS},
    "/v1/tokenize": {"prompt": "the cat"},
    "/v1/detokenize": {"token_ids": [5]},
}
"""Every path that takes a body, with one that it takes."""
GENERATING = list(BODIES)[:5]
CHATTING = [path for path, body in BODIES.items() if "messages" in body]

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


def message_of(reply: httpx.Response, status: int = 400) -> str:
    """What a refusal says, after a look at the envelope of the path's API."""
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    assert CANARY not in reply.text
    body = reply.json()
    if reply.request.url.path.startswith("/v1/messages"):
        assert body.keys() == {"type", "error", "request_id"}
        assert body["type"] == "error"
        assert body["error"].keys() == {"type", "message"}
        assert body["request_id"] == reply.headers["request-id"] == reply.headers["x-request-id"]
    else:
        is_openai = reply.request.url.path.startswith(("/v1/chat", "/v1/completions", "/v1/models"))
        assert body.keys() == ({"error"} if is_openai else {"error", "request_id"})
        assert body["error"].keys() == {"message", "type", "param", "code"}
        assert isinstance(body["error"]["code"], str)
    message = body["error"]["message"]
    assert isinstance(body["error"]["type"], str)
    assert 0 < len(message) < 300
    assert message.isprintable()
    return message


def test_the_bodies_are_taken_as_they_are(post: Post) -> None:
    for path in BODIES:
        assert post(path).status_code == 200


# ---- size ---------------------------------------------------------------------------------------------------------


def raw(server: Server, head: str, *parts: bytes) -> bytes:
    """What a server answers to bytes on a connection of their own, until it closes or is silent."""
    with closing(socket.create_connection(("127.0.0.1", server.port), timeout=20)) as connection:
        connection.sendall(head.replace("\n", "\r\n").encode())
        answer = b""
        try:
            for part in parts:
                connection.sendall(part)
        except OSError:
            pass  # it has answered before it had everything
        while b"\r\n\r\n" not in answer and (data := connection.recv(1 << 16)):
            answer += data
    return answer


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


# ---- headers, paths and methods -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json", ""])
@each_path
def test_other_content_types_are_refused(client: httpx.Client, path: str, kind: str) -> None:
    reply = client.post(path, content=json.dumps(BODIES[path]).encode(), headers={"content-type": kind})
    assert "application/json" in message_of(reply, 415)


@pytest.mark.parametrize(
    "kind", ["application/json; charset=utf-8", "Application/JSON", "application/problem+json", None]
)
def test_content_types_of_json_are_taken(client: httpx.Client, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    assert client.post(GENERATE, content=json.dumps(BODIES[GENERATE]).encode(), headers=headers).status_code == 200


def test_methods_that_a_path_has_not_are_told_those_it_has(client: httpx.Client) -> None:
    for path in BODIES:
        for method in ("GET", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"):
            reply = client.request(method, path)
            assert "not a method" in message_of(reply, 405)
            assert reply.headers["allow"] == "POST"
        assert client.head(path).status_code == 405
    for path in ("/health", "/metrics", "/v1/models", "/v1/models/gpt-4o"):
        reply = client.post(path, content=CANARY)
        assert "not a method" in message_of(reply, 405)
        assert "GET" in reply.headers["allow"]


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v2/models",
        "/v1/c4n4ry",
        "/v1/generate/c4n4ry",
        "/v1//generate",
        "/v1/generate/",
        "/v1/chat/completions/",
        "/V1/generate",
        "/v1/generate%00",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/docs",
        "/redoc",
        "//example.com/v1/generate",
        "/v1/messages/c4n4ry",
        "/v1/messages/batches",
        "/v1/embeddings",
        "/" + "a" * 30_000,
        "/%ff%fe",
        "/v1/\u4f60",
    ],
    ids=lambda path: path[:24],
)
def test_paths_that_are_none(client: httpx.Client, path: str) -> None:
    for method in ("GET", "POST"):
        reply = client.request(method, client.base_url.copy_with(raw_path=httpx.URL("http://a" + path).raw_path))
        assert "there is no such path" in message_of(reply, 404)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/v1/v1/messages", "for /v1/messages a client's base address must end without /v1"),
        ("/v1/v1/chat/completions", "for /v1/chat/completions a client's base address must end without /v1"),
        ("/chat/completions", "for /v1/chat/completions a client's base address must end with /v1"),
        ("/messages", "for /v1/messages a client's base address must end with /v1"),
    ],
)
def test_wrong_base_addresses_get_a_hint_in_the_callers_envelope(client: httpx.Client, path: str, hint: str) -> None:
    reply = client.post(path, json={})
    assert reply.status_code == 404
    assert hint in reply.json()["error"]["message"]
    assert ("type" in reply.json()) == (path == "/v1/v1/messages")


def test_requests_that_are_no_http(server: Server) -> None:
    for head in (
        "nonsense\n\n",
        "GET /health\n\n",
        "GET  /health HTTP/1.1\n\n",
        "POST * HTTP/1.1\nhost: localhost\n\n",
        "CONNECT example.com:80 HTTP/1.1\nhost: localhost\n\n",
        "GET /health HTTP/9.9\nhost: localhost\n\n",
        "GET /health HTTP/1.1\nhost : localhost\n\n",
        "GET /health HTTP/1.1\nno colon\n\n",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n\n",
    ):
        answer = raw(server, head)
        assert re.match(rb"HTTP/1\.1 4\d\d ", answer) or answer == b"", (head, answer)
    assert raw(server, "GET /health HTTP/1.0\nhost: localhost\n\n").startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "host", ["", "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "@", "0x7f.1"]
)
def test_a_host_that_is_not_this_one_is_refused(client: httpx.Client, host: str) -> None:
    for path in (GENERATE, "/v1/chat/completions", "/v1/messages"):
        reply = client.post(path, json=BODIES[path], headers={"host": host})
        assert "host" in message_of(reply, 403)
    assert client.get("/health", headers={"host": host}).status_code == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:80", "localhost.", "a.localhost:1", "127.0.0.1:9", "[::1]:8", "10.1.2.3"]
)
def test_addresses_and_this_machines_own_names_are_taken(client: httpx.Client, host: str) -> None:
    assert client.get("/health", headers={"host": host}).status_code == 200


def test_a_request_id_is_given_back_if_it_is_harmless(client: httpx.Client) -> None:
    for sent, is_kept in (
        ("abc-1.2:3/4+5=", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("a b", False),
        ("<b>", False),
    ):
        reply = client.get("/health", headers={"x-request-id": sent})
        assert (reply.headers["x-request-id"] == sent) == is_kept
        assert reply.headers["request-id"] == reply.headers["x-request-id"]
    ids = {client.get("/health").headers["x-request-id"] for _ in range(5)}
    assert len(ids) == 5
    assert all(re.fullmatch(r"req_[0-9a-f]{24}", one) for one in ids)


# ---- who may ask, in this process ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ask_app(toy_model: Path) -> Callable[..., httpx.Response]:
    """Asks an application whose engine has not begun to start."""

    def ask(settings: AppSettings, method: str, path: str, **options: Any) -> httpx.Response:
        service = Service(Prompts(resolve_text(toy_model)), Supervisor(EngineConfig(model="toy")), model_id="toy")

        async def request() -> httpx.Response:
            transport = httpx.ASGITransport(create_app(service, settings), raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return await client.request(method, path, **options)

        return asyncio.run(request())

    return ask


KEY = "s\u00e9cret-\u4f60"


@pytest.mark.parametrize(
    ("headers", "is_let_in"),
    [
        ({}, False),
        ({"authorization": f"Bearer {KEY}"}, True),
        ({"authorization": f"bearer   {KEY} "}, True),
        ({"x-api-key": KEY}, True),
        ({"x-api-key": KEY, "authorization": "Bearer wrong"}, True),
        ({"x-api-key": "wrong", "authorization": f"Bearer {KEY}"}, True),
        ({"x-api-key": "wrong", "authorization": "Bearer wrong"}, False),
        ({"authorization": KEY}, False),
        ({"authorization": f"Basic {KEY}"}, False),
        ({"authorization": "Bearer"}, False),
        ({"x-api-key": ""}, False),
        ({"x-api-key": KEY[:-1]}, False),
        ({"x-api-key": KEY + "a"}, False),
        ({"x-api-key": KEY.upper()}, False),
        ({"x-api-key": "\u00ff\u4f60"}, False),
    ],
)
def test_a_key_is_asked_for_everywhere_but_at_the_health(
    ask_app: Any, headers: dict[str, str], is_let_in: bool
) -> None:
    settings = AppSettings(api_key=KEY)
    encoded = {name: value.encode() for name, value in headers.items()}
    for method, path in (("GET", "/v1/models"), ("POST", GENERATE), ("GET", "/metrics"), ("GET", "/openapi.json")):
        status = ask_app(settings, method, path, headers=encoded).status_code
        assert (status != 401) == is_let_in, path
    reply = ask_app(settings, "POST", "/v1/messages", headers=encoded, content=CANARY)
    if not is_let_in:
        assert "key" in message_of(reply, 401)
    assert ask_app(settings, "GET", "/health", headers=encoded).status_code == 503  # it is only starting


def test_a_key_of_any_bytes_is_compared_as_bytes(ask_app: Any) -> None:
    settings = AppSettings(api_key=b"\xff\xfekey".decode(errors="surrogateescape"))
    assert ask_app(settings, "GET", "/metrics", headers={"x-api-key": b"\xff\xfekey"}).status_code == 200
    assert ask_app(settings, "GET", "/metrics", headers={"x-api-key": b"\xffkey"}).status_code == 401


def test_web_pages_may_not_call_unless_their_origin_may(ask_app: Any) -> None:
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    for own, origin in (
        (AppSettings(), None),
        (AppSettings(cors_origins=("https://page.example",)), "https://page.example"),
        (AppSettings(cors_origins=("https://other.example",)), None),
        (AppSettings(cors_origins=("https://page.example",), api_key=KEY), "https://page.example"),
    ):
        preflight = ask_app(own, "OPTIONS", GENERATE, headers=asked)
        assert preflight.headers.get("access-control-allow-origin") == origin
        assert (preflight.status_code == 200) == (origin is not None)
        plain = ask_app(own, "GET", "/health", headers={"origin": "https://page.example"})
        assert plain.headers.get("access-control-allow-origin") == origin


def test_a_host_can_be_allowed(ask_app: Any) -> None:
    settings = AppSettings(allowed_hosts=("models.example",))
    for host, status in (("models.example", 200), ("MODELS.example:80", 200), ("a.models.example", 403)):
        assert ask_app(settings, "GET", "/metrics", headers={"host": host}).status_code == status


def test_a_failure_of_the_server_says_nothing_of_itself(ask_app: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError(CANARY)

    monkeypatch.setattr("crucible.serve.app._state", fail)
    assert message_of(ask_app(AppSettings(), "GET", "/health"), 500) == "the server failed"


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
