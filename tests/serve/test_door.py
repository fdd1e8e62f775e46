"""Who is let in and where to: hosts, keys, origins, paths, methods, content types, request ids."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from refusals import BODIES, CANARY, GENERATE, message_of, raw
from serve_process import Server

from crucible.models import resolve_text
from crucible.prompts import Prompts
from crucible.serve.app import AppSettings, create_app
from crucible.serve.channel import EngineConfig
from crucible.serve.service import Service
from crucible.serve.supervisor import Supervisor


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
    assert "Traceback" not in server.log


# ---- headers, paths and methods -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", "json", ""])
@pytest.mark.parametrize("path", BODIES)
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
