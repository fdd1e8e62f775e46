"""What happens when somebody leaves: clients, the engine, the server itself; and when there are too many."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serve_process import Server, children, events_of, free_port, serving, stop, wait_until_gone
from toy_artifact import write_toy_artifact

GENERATE = "/v1/generate"
STREAM = "/v1/generate/stream"
LONG = {"prompt": "the cat", "ignore_eos": True}
"""Fills the context."""
SHORT = {"prompt": "the cat", "max_tokens": 4, "ignore_eos": True}
TURNS = [{"role": "user", "content": "the cat"}]

DOORS: dict[str, tuple[str, dict[str, Any]]] = {
    "native": (GENERATE, LONG),
    "native stream": (STREAM, LONG),
    "several choices": (STREAM, {**LONG, "n": 3, "max_tokens": 5000}),
    "completions": ("/v1/completions", {"model": "m", **LONG}),
    "chat stream": ("/v1/chat/completions", {"model": "m", "messages": TURNS, "ignore_eos": True, "stream": True}),
    "messages": ("/v1/messages", {"model": "m", "messages": TURNS, "ignore_eos": True, "max_tokens": 99999}),
}


@pytest.fixture(scope="module")
def long_server(
    long_model: Path, tmp_path_factory: pytest.TempPathFactory, start: Callable[..., Server]
) -> Iterator[Server]:
    """One that needs many seconds for a request without a limit."""
    return start(long_model, "--model-id", "m", "--max-batch", "4")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Starts servers that live as long as the module's tests."""
    with contextlib.ExitStack() as stack:

        def start(model: Path, *options: str) -> Server:
            log = tmp_path_factory.mktemp("log") / "server.txt"
            return stack.enter_context(serving(model, log, "--backend", "reference", *options))

        yield start


class Streaming:
    """A stream that is read in a thread, until it ends or is left."""

    def __init__(self, server: Server, **fields: Any) -> None:
        self._has_begun = threading.Event()
        self._pieces: list[str] = []
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._read, args=(server, {**LONG, **fields}), daemon=True)
        self._thread.start()
        assert self._has_begun.wait(20)

    def _read(self, server: Server, body: dict[str, Any]) -> None:
        try:
            with httpx.stream("POST", server.url + STREAM, json=body, timeout=60) as reply:
                for piece in reply.iter_text():
                    self._pieces.append(piece)
                    self._has_begun.set()
        except httpx.HTTPError as error:
            self.error = error

    def events(self) -> list[tuple[str, Any]]:
        """All of them, once it has ended."""
        self._thread.join(20)
        assert not self._thread.is_alive()
        return events_of("".join(self._pieces))


def send(server: Server, path: str, body: dict[str, Any]) -> socket.socket:
    """A request on a connection of its own, whose reply nobody has read yet."""
    request = httpx.Request("POST", server.url + path, json=body)
    lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + request.read())
    return connection


def reset(connection: socket.socket) -> None:
    """Close without the usual farewell."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


# ---- clients leave ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leave", [socket.socket.close, reset], ids=["close", "reset"])
@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_a_client_that_leaves_ends_its_request(long_server: Server, door: Any, leave: Any) -> None:
    path, body = door
    before = long_server.wait_until_idle()
    connection = send(long_server, path, body)
    num_choices = body.get("n", 1)
    long_server.wait_for(lambda: long_server.metrics()["active"] == num_choices)
    leave(connection)
    after = long_server.wait_until_idle()
    assert after["cancelled"] - before["cancelled"] == num_choices
    assert after["completed"] == before["completed"]
    assert after["pages"]["free"] == after["pages"]["total"]


def test_one_that_waits_for_a_slot_can_leave_too(long_server: Server) -> None:
    before = long_server.wait_until_idle()
    connections = [send(long_server, STREAM, LONG) for _ in range(7)]
    seen = long_server.wait_for(lambda: (found := long_server.metrics())["in_flight"] == 7 and found)
    assert seen["queued"] == 3
    for connection in reversed(connections):
        connection.close()
    assert long_server.wait_until_idle()["cancelled"] - before["cancelled"] == 7


def test_a_client_that_leaves_in_the_middle_of_its_request_is_nothing_to_speak_of(long_server: Server) -> None:
    head = f"POST {GENERATE} HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\n"
    for part in (head[:20], head, head + '{"prompt": '):
        with socket.create_connection(("127.0.0.1", long_server.port)) as connection:
            connection.sendall(part.encode())
            time.sleep(0.02)
    assert long_server.post(GENERATE, json=SHORT).status_code == 200
    assert "Traceback" not in long_server.log
    assert long_server.log.count("\n") == 6, long_server.log


def test_pages_are_free_within_two_steps(tmp_path: Path, start: Callable[..., Server]) -> None:
    """Steps of this model take far longer than it takes a client to leave."""
    model = write_toy_artifact(tmp_path / "deep", num_hidden_layers=150, max_position_embeddings=512)
    server = start(model, "--max-batch", "2")

    def next_step() -> int:
        steps = server.metrics()["steps"]
        return server.wait_for(lambda: (found := server.metrics()["steps"]) > steps and found)

    for path in (GENERATE, STREAM):
        connection = send(server, path, LONG)
        server.wait_for(lambda: server.metrics()["active"] == 1)
        steps = next_step()
        connection.close()
        assert server.wait_until_idle()["steps"] - steps <= 2


def test_clients_that_come_and_go_leave_nothing(long_server: Server) -> None:
    """Requests of all lengths, many of which are left at some moment or other."""

    def visit(number: int) -> None:
        path, body = list(DOORS.values())[number % len(DOORS)]
        if number % 3 == 0:
            limited = {"max_tokens": 1 + number % 9}
            assert long_server.post(path, json={**body, **limited}).status_code == 200
        else:
            connection = send(long_server, path, body)
            time.sleep(number % 7 / 200)
            connection.close()

    with ThreadPoolExecutor(8) as crowd:
        list(crowd.map(visit, range(60)))
    long_server.wait_until_idle()
    assert long_server.post(GENERATE, json=SHORT).status_code == 200


# ---- too many clients ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_server(long_model: Path, start: Callable[..., Server]) -> Server:
    return start(long_model, "--model-id", "m", "--max-batch", "1", "--max-queue", "1")


@contextlib.contextmanager
def filled(server: Server) -> Iterator[None]:
    """While there is no room."""
    connections = [send(server, STREAM, LONG) for _ in range(2)]
    server.wait_for(lambda: server.metrics()["in_flight"] == 2)
    yield
    for connection in connections:
        connection.close()
    server.wait_until_idle()


def test_beyond_batch_and_queue_the_answer_comes_at_once(small_server: Server) -> None:
    with filled(small_server):
        for path, body in DOORS.values():
            began = time.perf_counter()
            reply = small_server.post(path, json={**body, "n": 1} if path == STREAM else body)
            assert time.perf_counter() - began < 2
            assert reply.status_code == (529 if path == "/v1/messages" else 429)
            assert int(reply.headers["retry-after"]) >= 1
            assert "too many requests" in reply.json()["error"]["message"]
        assert small_server.get("/health").status_code == 200
    assert small_server.post(GENERATE, json=SHORT).status_code == 200


def test_a_request_enters_with_all_its_choices_or_with_none(small_server: Server) -> None:
    before = small_server.wait_until_idle()
    reply = small_server.post(GENERATE, json={**SHORT, "n": 3})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "n")
    with contextlib.closing(send(small_server, STREAM, LONG)):
        small_server.wait_for(lambda: small_server.metrics()["active"] == 1)
        assert small_server.post(GENERATE, json={**SHORT, "n": 2}).status_code == 429
        assert small_server.metrics()["in_flight"] == 1
    assert small_server.wait_until_idle()["tokens"]["prompt"] - before["tokens"]["prompt"] == 3


def test_every_connection_of_a_crowd_is_answered(small_server: Server) -> None:
    """All of them sent before the first answer is read."""
    with filled(small_server):
        before = small_server.metrics()["refused"]
        crowd = [send(small_server, GENERATE, SHORT) for _ in range(300)]
        for connection in crowd:
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 429 ")
            connection.close()
        assert small_server.metrics()["refused"] - before == 300


def test_a_crowd_that_fits_is_served_and_the_rest_refused(small_server: Server) -> None:
    small_server.wait_until_idle()
    with ThreadPoolExecutor(16) as crowd:
        replies = list(crowd.map(lambda _: small_server.post(GENERATE, json=SHORT), range(64)))
    assert {reply.status_code for reply in replies} <= {200, 429}
    served = {reply.json()["text"] for reply in replies if reply.status_code == 200}
    assert len(served) == 1
    small_server.wait_until_idle()


# ---- the engine leaves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "why"), [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "answer for")])
def test_an_engine_that_dies_or_freezes_is_replaced(
    long_model: Path, start: Callable[..., Server], number: int, why: str
) -> None:
    server = start(long_model, "--engine-timeout", "1")
    expected = server.post(GENERATE, json=SHORT).json()["text"]
    streams = [Streaming(server), Streaming(server, n=2, max_tokens=8000)]
    with ThreadPoolExecutor(1) as waiting:
        whole = waiting.submit(server.post, GENERATE, json=LONG)
        server.wait_for(lambda: server.metrics()["active"] == 4)
        engine = server.engine_pid()
        os.kill(engine, number)
        health = server.wait_for(lambda: (found := server.get("/health")).status_code == 503 and found)
        reply = whole.result()
    assert health.json()["status"] == "restarting"
    assert int(health.headers["retry-after"]) >= 1
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "unavailable")
    assert int(reply.headers["retry-after"]) >= 1
    for stream in streams:
        *_, (name, data) = stream.events()
        assert stream.error is None
        assert (name, data["error"]["code"]) == ("error", "unavailable")
        assert why in data["error"]["message"]
    refused = server.post(GENERATE, json=SHORT)
    if refused.status_code != 200:  # the next one can be there already
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
    server.wait_for(lambda: server.get("/health").status_code == 200)
    assert server.post(GENERATE, json=SHORT).json()["text"] == expected
    metrics = server.wait_until_idle()
    assert metrics["restarts"] == 1
    assert server.engine_pid() != engine
    wait_until_gone([engine])


# ---- the server leaves --------------------------------------------------------------------------------------------


def ended(server: Server, seconds: float = 10.0) -> int:
    """The exit status, after a look that nobody is left."""
    status = server.process.wait(seconds)
    wait_until_gone([server.pid, *server.family])
    return status


@pytest.fixture
def family(make_server: Callable[..., Server], long_model: Path) -> Callable[..., Server]:
    """Makes servers that remember their processes."""

    def make(*options: str, **more: Any) -> Server:
        server = make_server(*options, **{"model": long_model, **more})
        server.family = children(server.pid)
        assert len(server.family) == 1
        return server

    return make


def test_an_idle_server_ends_when_it_is_asked(family: Callable[..., Server]) -> None:
    server = family()
    stop(server)
    assert ended(server) == 0
    assert "Traceback" not in server.log


def test_what_is_under_way_is_finished_and_nothing_new_is_taken(family: Callable[..., Server]) -> None:
    server = family("--model-id", "m")
    with httpx.Client(base_url=server.url, timeout=60) as kept:
        assert kept.get("/health").status_code == 200
        stream = Streaming(server, max_tokens=800)
        stop(server)
        health = server.wait_for(lambda: (found := kept.get("/health")).status_code == 503 and found)
        assert health.json()["status"] == "draining"
        for path, body in DOORS.values():
            reply = kept.post(path, json=body)
            assert (reply.status_code, reply.json()["error"]["message"]) == (503, "the server is stopping")
        assert server.post(GENERATE, json=SHORT).status_code == 503
    *tokens, (name, done) = stream.events()
    assert (len(tokens), name, done["finish_reason"]) == (800, "done", "length")
    assert ended(server) == 0


def test_after_the_deadline_streams_are_told_and_the_server_ends(family: Callable[..., Server]) -> None:
    server = family("--drain-seconds", "0.5")
    streams = [Streaming(server), Streaming(server, n=2, max_tokens=8000)]
    silent = send(server, STREAM, LONG)  # nobody reads what is written to it
    with ThreadPoolExecutor(1) as waiting:
        whole = waiting.submit(server.post, GENERATE, json=LONG)
        server.wait_for(lambda: server.metrics()["active"] == 5)
        began = time.perf_counter()
        stop(server)
        reply = whole.result()
        assert 0.4 < time.perf_counter() - began < 5
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "the server is stopping")
    for stream in streams:
        *_, (name, data) = stream.events()
        assert stream.error is None
        assert (name, data["error"]["message"]) == ("error", "the server is stopping")
    assert ended(server) == 0
    silent.close()
    assert "Traceback" not in server.log


def test_a_second_signal_ends_it_at_once(family: Callable[..., Server]) -> None:
    server = family("--drain-seconds", "300")
    stream = Streaming(server)
    stop(server)
    server.wait_for(lambda: server.get("/health").json()["status"] == "draining")
    began = time.perf_counter()
    stop(server, signal.SIGINT)
    assert ended(server) == 128 + signal.SIGINT
    assert time.perf_counter() - began < 5
    *_, (name, _) = stream.events() if stream.error is None else [("cut", None)]
    assert name in ("cut", "error")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a stopped process outlives its parent")
def test_no_engine_outlives_a_server_that_is_killed(family: Callable[..., Server]) -> None:
    server = family()
    stream = Streaming(server)
    os.kill(server.family[0], signal.SIGSTOP)
    stop(server, signal.SIGKILL)
    assert ended(server) == -signal.SIGKILL
    with contextlib.suppress(AssertionError):
        stream.events()
    assert stream.error is not None


def test_a_server_with_a_frozen_engine_ends_too(family: Callable[..., Server]) -> None:
    server = family("--drain-seconds", "0.2")
    stream = Streaming(server)
    os.kill(server.family[0], signal.SIGSTOP)
    stop(server)
    *_, (name, data) = stream.events()
    assert (name, data["error"]["message"]) == ("error", "the server is stopping")
    assert ended(server) == 0


# ---- the beginning ------------------------------------------------------------------------------------------------


@pytest.fixture
def starting(make_server: Callable[..., Server]) -> Callable[..., Server]:
    """Makes servers whose engine is held before it is ready."""

    def make(*options: str) -> Server:
        port = free_port()
        server = make_server("--port", str(port), *options, wait=False)
        server.url = f"http://127.0.0.1:{port}"
        server.family = server.wait_for(lambda: children(server.pid))
        (engine,) = server.family
        # Before it is a program of its own its parent waits for it, as for any it starts.
        server.wait_for(lambda: b"crucible.serve.worker" in Path(f"/proc/{engine}/cmdline").read_bytes())
        os.kill(engine, signal.SIGSTOP)
        server.wait_for(lambda: server.get("/health"))
        return server

    return make


def test_a_server_that_loads_says_so(starting: Callable[..., Server]) -> None:
    server = starting("--model-id", "m")
    health = server.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "starting")
    assert int(health.headers["retry-after"]) >= 1
    for path, body in DOORS.values():
        reply = server.post(path, json=body)
        assert (reply.status_code, "starting" in reply.json()["error"]["message"]) == (503, True)
        assert int(reply.headers["retry-after"]) >= 1
    assert server.get("/v1/models").status_code == 503
    assert server.post("/v1/tokenize", json={"prompt": "the cat"}).status_code == 503
    assert server.get("/metrics").status_code == 200
    os.kill(server.family[0], signal.SIGCONT)
    server.wait_for(lambda: server.get("/health").status_code == 200)
    assert server.post(GENERATE, json=SHORT).status_code == 200


def test_a_signal_ends_a_server_that_loads(starting: Callable[..., Server]) -> None:
    server = starting()
    stop(server)
    assert ended(server) == 0
    assert "Traceback" not in server.log


def test_a_start_that_takes_too_long_is_given_up(starting: Callable[..., Server]) -> None:
    server = starting("--startup-deadline", "1")
    assert ended(server) == 1
    assert server.log.strip().endswith("crucible: the engine was not ready within 1 seconds")
