"""The client library: against the real service, and against one that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from pathlib import Path

import msgspec
import pytest
from fake_native import FakeServer
from serve_process import Server

from crucible.client import Client, Done, Link, Token, UnreachableError, link
from crucible.client.http import Address, Chunks
from crucible.client.measure import Speed
from crucible.client.store import Conversation, Settings, Store, Turn
from crucible.serve.protocol import ApiError, Generate

QUESTION = Generate(messages=[{"role": "user", "content": "Hello"}], max_tokens=24)


async def collect(client: Client, request: Generate) -> list[Token | Done]:
    return [event async for event in client.stream(request)]


def test_a_stream_is_the_whole_reply_token_by_token(server: Server) -> None:
    request = Generate(prompt="Once", max_tokens=40, temperature=0.9, seed=11, n=2)
    events = asyncio.run(collect(Client(server.url), request))
    whole = server.post("/v1/generate", content=msgspec.json.encode(request)).json()["choices"]
    for index, choice in enumerate(whole):
        tokens = [event for event in events if isinstance(event, Token) and event.index == index]
        assert [token.token_id for token in tokens] == choice["token_ids"]
        assert "".join(token.text for token in tokens) == choice["text"]
        (done,) = (event for event in events if isinstance(event, Done) and event.index == index)
        assert (done.seed, done.finish_reason) == (11 + index, choice["finish_reason"])
        assert done.usage.completion_tokens == len(tokens)


def test_what_the_service_says_of_itself(server: Server) -> None:
    async def ask() -> None:
        health, metrics = await Client(server.url).health(), await Client(server.url).metrics()
        assert (health.status, health.model, health.backend, health.context) == ("ok", "toy", "reference", 256)
        assert metrics.pages.total > 0
        assert metrics.uptime > 0

    asyncio.run(ask())


def test_a_refusal_is_an_error_with_its_fields(server: Server) -> None:
    with pytest.raises(ApiError, match="temperature") as refused:
        asyncio.run(collect(Client(server.url), Generate(prompt="x", temperature=-1.0)))
    assert (refused.value.kind, refused.value.param) == ("invalid", "temperature")


def test_a_key_is_sent() -> None:
    async def ask(key: str | None) -> bool:
        async with FakeServer().running() as server:
            await collect(Client(server.url, key), QUESTION)
            await Client(server.url, key).metrics()
            (first, second) = ("\r\nauthorization: Bearer secret\r\n" in head for head in server.headers)
            return first and second

    assert asyncio.run(ask("secret"))
    assert not asyncio.run(ask(None))


@pytest.mark.parametrize("piece_bytes", [None, 1, 7])
def test_events_come_whole_however_they_are_cut(piece_bytes: int | None) -> None:
    texts = ["a", "", "é€😀", "\n\n", "data: ", '"', "end"]

    async def ask() -> None:
        async with FakeServer(texts=texts, piece_bytes=piece_bytes).running() as server:
            *tokens, done = await collect(Client(server.url), QUESTION)
            assert [token.text for token in tokens if isinstance(token, Token)] == texts
            assert isinstance(done, Done)
            assert server.requests == [{"messages": QUESTION.messages, "max_tokens": 24}]

    asyncio.run(ask())


def test_a_chunked_body_cut_anywhere() -> None:
    data = b"5\r\nab\r\nc\r\n1a;note=1\r\n" + b"x" * 26 + b"\r\n0\r\n\r\n"
    for first in range(len(data)):
        for second in range(first, len(data)):
            chunks = Chunks()
            parts = (data[:first], data[first:second], data[second:])
            assert b"".join(map(chunks.feed, parts)) == b"ab\r\nc" + b"x" * 26
            assert chunks.ended


def test_what_came_before_a_break_is_there() -> None:
    async def ask(**script: object) -> tuple[list[Token | Done], ApiError]:
        async with FakeServer(**script).running() as server:  # type: ignore[arg-type]
            events = []
            try:
                async for event in Client(server.url).stream(QUESTION):
                    events.append(event)
            except ApiError as error:
                return events, error
            raise AssertionError("it did not fail")

    events, error = asyncio.run(ask(breaks_after=2))
    assert len(events) == 2
    assert isinstance(error, UnreachableError)
    failure = {"error": {"message": "the engine failed", "type": "unavailable", "param": None, "code": "x"}}
    events, error = asyncio.run(ask(error_event=failure))
    assert len(events) == 3
    assert (error.kind, error.message, error.code) == ("unavailable", "the engine failed", "x")
    events, error = asyncio.run(ask(refusal=(429, {"error": {"message": "too many", "type": "overloaded"}})))
    assert (events, error.kind, error.retry_after) == ([], "overloaded", 3)
    _, error = asyncio.run(ask(refusal=(200, {"hello": 1})))
    assert isinstance(error, UnreachableError)


def test_nobody_there() -> None:
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:9 cannot be reached"):
        asyncio.run(collect(Client("http://127.0.0.1:9"), QUESTION))
    for url in ("ftp://host", "http://", "http://host:x", "http://u@host"):
        with pytest.raises(ApiError, match="http://HOST:PORT"):
            Client(url)
    assert str(Address.of("https://[::1]/base/")) == "https://[::1]:443/base"
    assert str(Address.of("localhost:81")) == "http://localhost:81"


def test_who_stops_reading_leaves() -> None:
    async def ask() -> None:
        async with FakeServer(texts=["x"] * 100_000).running() as server:
            async with contextlib.aclosing(Client(server.url).stream(QUESTION)) as events:
                async for _ in events:
                    break
            async with asyncio.timeout(5):
                while not server.left:
                    await asyncio.sleep(0.01)

    asyncio.run(ask())


# ---- the link -----------------------------------------------------------------------------------------------------


def test_a_server_that_goes_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(link, "_FIRST_PAUSE", 0.002)
    seen: list[str] = []

    async def watch() -> None:
        fake = FakeServer()
        watched = Link(Client("http://127.0.0.1:1"), lambda: seen.append(watched.state))

        async def until(state: str) -> None:
            async with asyncio.timeout(10):
                while watched.state != state:
                    await asyncio.sleep(0.002)

        async with fake.running():
            watched = Link(Client(fake.url), lambda: seen.append(watched.state))
            task = asyncio.create_task(watched.run())
            await until("connected")
            assert watched.metrics is not None
        await until("reconnecting")
        assert "cannot be reached" in watched.reason
        await until("disconnected")
        fake.health["status"], fake.health["reason"] = "starting", "loading"
        async with fake.running():
            async with asyncio.timeout(10):
                while watched.reason != "the server is starting: loading":
                    await asyncio.sleep(0.002)
            fake.health["status"] = "ok"
            watched.hurry()
            await until("connected")
        task.cancel()

    asyncio.run(watch())
    order = [state for i, state in enumerate(seen) if i == 0 or seen[i - 1] != state]
    assert order == ["connected", "reconnecting", "disconnected", "connected"]


def test_pauses_grow_up_to_a_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random, "uniform", lambda low, high: 1.0)
    watched = Link(Client("http://127.0.0.1:9"))
    pauses = []
    for _ in range(8):
        asyncio.run(watched._attempt())
        pauses.append(watched._pause())
    assert pauses == [0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0]


def test_a_server_that_does_not_start_says_why() -> None:
    from crucible.client.child import serving

    with pytest.raises(ApiError, match="no-such-model"), serving("no-such-model", on_progress=str):
        pass


# ---- conversations ------------------------------------------------------------------------------------------------


def test_conversations_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "conversations")
    assert store.all() == []
    first = Conversation(turns=[Turn("user", "One\nand  more"), Turn("assistant", "1\r\n\0", "stopped")])
    second = Conversation(turns=[Turn("user", "x" * 100)], settings=Settings(sampled=True, seed=3))
    store.save(first)
    store.save(second)
    assert store.all() == [second, first]
    assert (first.title, len(second.title)) == ("One and more", 60)
    (tmp_path / "conversations" / "other.json").write_text("{")
    time.sleep(0.002)
    store.save(first)
    assert store.all() == [first, second]
    store.delete(first)
    assert store.all() == [second]
    assert not list(tmp_path.rglob("*.partial"))


def test_the_request_of_a_conversation() -> None:
    turns = [Turn("user", "a"), Turn("assistant", "b"), Turn("user", "lost"), Turn("assistant", "", "refused")]
    conversation = Conversation(turns=[*turns, Turn("user", "c"), Turn("assistant", "")])
    request = conversation.request()
    assert request.messages is not None
    assert [message["content"] for message in request.messages] == ["a", "b", "c"]
    assert request == Generate(messages=request.messages)
    conversation.settings = Settings(sampled=True, temperature=0.5, seed=3, max_tokens=9, system="Be brief.")
    request = conversation.request()
    assert request.messages is not None
    assert request.messages[0] == {"role": "system", "content": "Be brief."}
    assert (request.temperature, request.top_k, request.top_p, request.seed, request.max_tokens) == (
        0.5,
        40,
        0.95,
        3,
        9,
    )


def test_speed_is_measured_from_when_tokens_came() -> None:
    speed = Speed()
    assert (speed.first_token, speed.rate, speed.gap) == (None, None, None)
    began = speed._began
    speed.add([began + 0.5])
    speed.add([began + 0.6, began + 1.0, began + 1.0, began + 1.0, began + 1.0])
    assert speed.first_token == pytest.approx(0.5)
    assert speed.rate == pytest.approx(5 / 0.5)
    assert speed.gap == pytest.approx(0.1)
    assert speed.tokens == 6
