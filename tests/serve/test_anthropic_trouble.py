"""What Anthropic's clients see of a server that is locked, full, or loses its engine."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serve_process import Server, serving
from toy_artifact import write_toy_artifact

anthropic = pytest.importorskip("anthropic", reason="Anthropic's client is not installed")

KEY = "a-key-of-this-test"
TURNS: Any = [{"role": "user", "content": "the cat"}]


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a key and room for one request, whose context takes seconds to fill."""
    folder = tmp_path_factory.mktemp("trouble")
    model = write_toy_artifact(folder / "toy", max_position_embeddings=16384)
    options = ("--backend", "reference", "--api-key", KEY, "--max-batch", "1", "--max-queue", "0")
    with serving(model, folder / "log.txt", *options) as server:
        yield server


def ask(server: Server, **fields: Any) -> dict[str, Any]:
    return {"model": server.model_id, "max_tokens": 4, "messages": TURNS, **fields}


def test_a_key_comes_either_way_and_a_wrong_one_is_refused(locked: Server):
    for headers in ({"x-api-key": KEY}, {"authorization": f"Bearer {KEY}"}):
        assert locked.post("/v1/messages", json=ask(locked), headers=headers).status_code == 200
    for headers in ({}, {"x-api-key": "wrong"}, {"authorization": "Bearer wrong"}, {"authorization": KEY}):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            reply = locked.post(path, json=ask(locked), headers=headers)
            body = reply.json()
            assert (reply.status_code, body["type"], body["error"]["type"]) == (401, "error", "authentication_error")
            assert body["request_id"] == reply.headers["request-id"]
    for way in ({"api_key": KEY}, {"auth_token": KEY}):
        with anthropic.Anthropic(base_url=locked.url, max_retries=0, **way) as client:
            assert client.messages.create(**ask(locked)).usage.output_tokens >= 1
    with (
        anthropic.Anthropic(base_url=locked.url, max_retries=0, api_key="wrong") as client,
        pytest.raises(anthropic.AuthenticationError),
    ):
        client.messages.create(**ask(locked))


def test_a_full_server_says_529_and_a_lost_engine_ends_the_stream_with_an_error(locked: Server):
    headers = {"x-api-key": KEY}
    long = ask(locked, max_tokens=128_000, stream=True, temperature=1.0) | {"ignore_eos": True}
    with httpx.stream("POST", f"{locked.url}/v1/messages", json=long, headers=headers, timeout=60) as reply:
        lines = reply.iter_lines()
        assert any("content_block_delta" in line for line in lines)
        for streams in (False, True):
            refused = locked.post("/v1/messages", json=ask(locked, stream=streams), headers=headers)
            assert refused.status_code == 529
            assert int(refused.headers["retry-after"]) >= 1
            assert (refused.json()["type"], refused.json()["error"]["type"]) == ("error", "overloaded_error")
        with (
            anthropic.Anthropic(base_url=locked.url, api_key=KEY, max_retries=0) as client,
            pytest.raises(anthropic.APIStatusError) as caught,
        ):
            client.messages.create(**ask(locked))
        assert caught.value.status_code == 529
        os.kill(locked.engine_pid(), signal.SIGKILL)
        *_, name, data = [line for line in lines if line]
    assert name == "event: error"
    event = json.loads(data.removeprefix("data: "))
    assert (event["type"], event["error"]["type"]) == ("error", "api_error")
    refused = locked.post("/v1/messages", json=ask(locked), headers=headers)
    assert (refused.status_code, refused.json()["error"]["type"]) == (503, "api_error")
    locked.wait_for(lambda: locked.get("/health").status_code == 200)
    assert locked.post("/v1/messages", json=ask(locked), headers=headers).status_code == 200


def test_the_client_raises_what_ends_a_stream(locked: Server):
    with (
        anthropic.Anthropic(base_url=locked.url, api_key=KEY, max_retries=0) as client,
        client.messages.stream(**ask(locked, max_tokens=128_000, extra_body={"ignore_eos": True})) as stream,
    ):
        events = iter(stream)
        next(events)
        os.kill(locked.engine_pid(), signal.SIGKILL)
        with pytest.raises(anthropic.APIStatusError) as caught:
            list(events)
    assert caught.value.body["error"]["type"] == "api_error"
