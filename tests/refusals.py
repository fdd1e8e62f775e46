"""For tests of what the service refuses: every path that takes a body, and what a refusal must look like."""

from __future__ import annotations

import socket
from contextlib import closing
from typing import Any

import httpx
from serve_process import Server

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
