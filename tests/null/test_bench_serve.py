"""Benchmarks of the service against a server that is known to the token: what clients count, time and refuse."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import stub_server
from cells import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from toy_artifact import write_toy_artifact
from toy_weights import toy_weights

from crucible.bench import client
from crucible.bench.client import ENDPOINTS, Connection, LoadError, Outcome, Reply
from crucible.bench.compat import bench_compat
from crucible.bench.direct import Batch
from crucible.bench.direct import run as run_direct
from crucible.bench.harness import BenchError, BenchReport
from crucible.bench.load import Job, Log, Mark, Shot
from crucible.bench.serve import DirectProcess, LoadProcess, bench_serve
from crucible.bench.server import at_url, counters
from crucible.bench.stall import worst_gap_ms
from crucible.bench.traffic import (
    Passages,
    body,
    check,
    figures,
    first_token_ms,
    gaps_ms,
    poisson,
    total_rate,
    unit,
)
from crucible.engine.engine import Engine
from crucible.engine.reference import ReferenceBackend
from crucible.models import ModelText, resolve_text

CONTEXT = 96


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_artifact(tmp_path_factory.mktemp("bench") / "toy")


@pytest.fixture(scope="module")
def text(folder: Path) -> ModelText:
    return resolve_text(folder)


@pytest.fixture(scope="module")
def load() -> Any:
    with LoadProcess() as process:
        yield process


def shown(report: BenchReport) -> str:
    console = Console(width=160, record=True)
    console.print(report.render())
    return console.export_text()


# ---- replies by bytes -------------------------------------------------------------------------------------------


def stream_bytes(path: str, num_tokens: int) -> bytes:
    events = [stub_server.EVENTS[path](index) for index in range(num_tokens)]
    usage = json.dumps({"prompt_tokens": 5, "completion_tokens": num_tokens}, separators=(",", ":"))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunks = [stub_server.chunk("".join(events[at : at + 3])) for at in range(0, num_tokens, 3)]
    return head + b"".join(chunks) + stub_server.chunk(stub_server.ENDS[path](usage)) + b"0\r\n\r\n"


@pytest.mark.parametrize("name", ["native", "completions", "chat", "messages"])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_a_stream_is_counted_wherever_its_bytes_are_cut(name: str, data: st.DataObject) -> None:
    endpoint = ENDPOINTS[name]
    content = stream_bytes(endpoint.path, 7)
    cuts = sorted(data.draw(st.sets(st.integers(1, len(content) - 1), max_size=40)))
    firsts: list[None] = []
    reply = Reply(endpoint, lambda: firsts.append(None))
    for now, (start, end) in enumerate(zip([0, *cuts], [*cuts, len(content)], strict=True)):
        assert not reply.is_complete
        reply.feed(content[start:end], float(now))
    assert reply.is_complete
    assert sum(reply.counts) == 7
    assert reply.times == sorted(set(reply.times))
    assert len(firsts) == 1
    outcome = reply.outcome(3, 1.0, 2.0)
    assert (outcome.status, outcome.prompt_tokens, outcome.tokens, outcome.error) == (200, 5, 7, "")


@given(st.integers(1, 6))
def test_an_event_that_is_split_between_chunks_counts_once(cut: int) -> None:
    event = stub_server.EVENTS["/v1/generate/stream"](0)
    parts = [stub_server.chunk(event[: cut * 8]), stub_server.chunk(event[cut * 8 :] + event)]
    reply = Reply(ENDPOINTS["native"])
    reply.feed(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", 0.0)
    reply.feed(parts[0], 1.0)
    assert reply.counts == []
    reply.feed(parts[1], 2.0)
    assert (reply.times, reply.counts) == ([2.0], [2])


def test_a_whole_reply_tells_its_tokens() -> None:
    content = b'{"usage":{"input_tokens":3,"output_tokens":9}}'
    reply = Reply(ENDPOINTS["messages"])
    for byte in stub_server.whole(200, content):
        reply.feed(bytes([byte]), 0.0)
    outcome = reply.outcome(0, 0.0, 1.0)
    assert reply.is_complete
    assert (outcome.prompt_tokens, outcome.tokens, outcome.times, outcome.error) == (3, 9, [], "")


def test_a_refusal_and_a_stream_without_its_end_are_errors() -> None:
    reply = Reply(ENDPOINTS["native"])
    reply.feed(stub_server.whole(429, b'{"error": "full"}', b"Retry-After: 2\r\n"), 0.0)
    outcome = reply.outcome(0, 0.0, 1.0)
    assert (outcome.status, outcome.retry_after, outcome.error) == (429, "2", '{"error": "full"}')
    failed = 'event: error\ndata: {"error":{"message":"lost"}}\n\n'
    reply = Reply(ENDPOINTS["native"])
    reply.feed(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n", 0.0)
    reply.feed(stub_server.chunk(failed) + b"0\r\n\r\n", 0.0)
    assert reply.outcome(0, 0.0, 1.0).error == failed
    with pytest.raises(LoadError, match=r"begins with b'SSH-2\.0"):
        Reply(ENDPOINTS["native"]).feed(b"SSH-2.0\r\n\r\n", 0.0)


def test_a_client_that_nobody_answers_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.05)

    async def ask() -> list[Outcome]:
        server = await asyncio.start_server(lambda reader, writer: reader.read(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        connection = await Connection.open("127.0.0.1", port)
        outcomes = [await connection.ask(b"x", ENDPOINTS["native"]) for _ in range(2)]
        server.close()
        return outcomes

    first, second = asyncio.run(ask())
    assert (first.status, first.error) == (0, "the reply had not ended after 0 s")
    assert second.error == "the connection is closed"


# ---- loads ------------------------------------------------------------------------------------------------------


def job(stub: stub_server.Stub, mode: Any, shots: Sequence[Shot], **fields: Any) -> Job:
    return Job(host="127.0.0.1", port=stub.port, mode=mode, shots=list(shots), **fields)


def native(new_tokens: int, **fields: Any) -> Shot:
    return Shot("native", body("native", [1, 2, 3], new_tokens, "stub"), **fields)


def test_a_closed_load_keeps_every_client_at_work(load: LoadProcess) -> None:
    with stub_server.running() as stub:
        log = load.run(job(stub, "closed", [native(25)] * 12, clients=4))
    check(log.outcomes, 25)
    assert sorted(outcome.shot for outcome in log.outcomes) == list(range(12))
    assert all(sum(outcome.counts) == 25 for outcome in log.outcomes)
    found = figures(log, steady=True)
    assert log.begin.at > min(outcome.times[0] for outcome in log.outcomes)
    assert found["batch"] == pytest.approx(4, rel=0.15)
    assert found["decode"] >= 0.8 * found["total"]
    assert set(found) == {"decode", "total", "batch", "ttft_p50", "ttft_p95", "gap_p50", "gap_p95", "gap_p99", "client"}
    assert [unit(name) for name in ("decode", "gap_p50", "client")] == ["tok/s", "ms", "us/tok"]


def test_a_load_of_some_seconds_goes_round(load: LoadProcess) -> None:
    with stub_server.running() as stub:
        log = load.run(job(stub, "closed", [native(3), native(4)], clients=2, seconds=0.2))
    assert len(log.outcomes) > 6
    for outcome in log.outcomes:
        check([outcome], 3 + outcome.shot)


def test_open_arrivals_come_at_their_time_whatever_is_under_way(load: LoadProcess) -> None:
    times = [0.0, 0.01, 0.02, 0.15]
    with stub_server.running() as stub:
        log = load.run(job(stub, "open", [native(30, at=at) for at in times]))
    check(log.outcomes, 30)
    began = sorted(outcome.began for outcome in log.outcomes)
    assert [at - began[0] for at in began] == pytest.approx(times)
    assert 1 < figures(log, steady=False)["batch"] <= 4
    assert "decode" not in figures(log, steady=False)


def test_streams_are_left_when_what_arrived_is_answered(load: LoadProcess) -> None:
    with stub_server.running() as stub:
        log = load.run(job(stub, "interrupt", [native(10_000)] * 2 + [native(4)] * 3, clients=2))
        deadline = asyncio.run(settled(stub))
    assert deadline
    assert stub.num_left == 2
    assert [outcome.shot for outcome in log.outcomes if outcome.has_left] in ([0, 1], [1, 0])
    newcomers = [outcome for outcome in log.outcomes if not outcome.has_left]
    check(newcomers, 4)
    assert len(newcomers) == 3
    for stream in (outcome for outcome in log.outcomes if outcome.has_left):
        assert sum(count for at, count in zip(stream.times, stream.counts, strict=True) if at <= log.cut_at) >= 16


async def settled(stub: stub_server.Stub) -> bool:
    for _ in range(200):
        if not stub.streams:
            return True
        await asyncio.sleep(0.01)
    return False


def test_clients_that_leave_close_their_connection(load: LoadProcess) -> None:
    with stub_server.running() as stub:
        log = load.run(job(stub, "closed", [native(10_000, leaves_after=0.05), native(5)] * 2, clients=1))
        assert asyncio.run(settled(stub))
    assert [outcome.has_left for outcome in log.outcomes] == [True, False, True, False]
    assert stub.num_left == 2
    check([outcome for outcome in log.outcomes if not outcome.has_left], 5)


def test_a_server_that_is_not_there_is_named(load: LoadProcess) -> None:
    gone = stub_server.Stub(port=1)
    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:1 cannot be reached"):
        load.run(job(gone, "closed", [native(1)], clients=1))
    with pytest.raises(BenchError, match=r"http://127\.0\.0\.1:1/health: "):
        at_url("http://127.0.0.1:1")
    with pytest.raises(BenchError, match="a server's URL is http://HOST:PORT"):
        at_url("localhost:8080")


# ---- prompts, arrivals, bodies ----------------------------------------------------------------------------------


def test_prompts_are_passages_of_all_lengths_and_the_same_every_time(text: ModelText) -> None:
    passages = Passages(text)
    found = passages.prompts(60, 40, seed=3)
    lengths = [len(prompt.ids) for prompt in found]
    assert max(lengths) <= 40
    assert len(set(lengths)) > 15
    assert found == Passages(text).prompts(60, 40, seed=3)
    assert found != passages.prompts(60, 40, seed=4)
    for prompt in found:
        assert prompt.ids == (*text.prefix_ids, *text.tokenizer.encode(prompt.text))
    assert len(passages.exact(33)) == 33
    assert passages.exact(33) != passages.exact(33, seed=1)
    with pytest.raises(BenchError, match="must have from 8 to"):
        passages.prompts(1, 7)
    with pytest.raises(BenchError, match="must have from 1 to"):
        passages.exact(0)


def test_poisson_arrivals_have_their_rate_and_are_seeded() -> None:
    times = poisson(4000, 50.0)
    gaps = [after - before for before, after in zip([0.0, *times], times, strict=False)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.05)
    # An exponential distribution's deviation is its mean.
    assert math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) == pytest.approx(mean, rel=0.05)
    assert times == poisson(4000, 50.0)
    assert times != poisson(4000, 50.0, seed=1)


def test_each_endpoint_gets_its_own_body() -> None:
    found = {name: json.loads(body(name, "hi", 5, "m")) for name in ENDPOINTS}
    assert all(request["max_tokens"] == 5 and request["ignore_eos"] is True for request in found.values())
    assert found["generate"] == found["native"] == {"prompt": "hi", "max_tokens": 5, "ignore_eos": True}
    says = [{"role": "user", "content": "hi"}]
    assert [found[name].get("messages") for name in ("native-chat", "chat", "messages")] == [says] * 3
    assert found["completions"]["prompt"] == "hi"
    assert found["chat"]["stream_options"] == {"include_usage": True}
    assert "stream_options" not in found["messages"]
    assert found["messages"]["stream"] is True
    assert "stream" not in json.loads(body("chat", "hi", 5, "m", streams=False))


# ---- figures ----------------------------------------------------------------------------------------------------


def outcome(shot: int, began: float, times: Sequence[float], counts: Sequence[int], **fields: Any) -> Outcome:
    return Outcome(shot, 200, began, times[-1], list(times), list(counts), 7, sum(counts), **fields)


def mark(at: float, plans: int, rows: int) -> Mark:
    return Mark(at, f"crucible:decode_plans_total {plans}\ncrucible:decode_rows_total {rows}\n")


def test_figures_are_those_of_the_log() -> None:
    outcomes = [outcome(0, 1.0, [1.5, 2.0, 4.0], [1, 2, 1]), outcome(1, 1.25, [2.25, 2.5], [1, 3])]
    log = Log(outcomes, mark(2.0, 10, 30), mark(3.0, 14, 40), cpu_seconds=0.004)
    found = figures(log, steady=True)
    assert found["total"] == pytest.approx(8 / 3)
    assert found["decode"] == pytest.approx(4)  # those at 2.25 and 2.5
    assert found["batch"] == pytest.approx(2.5)
    assert first_token_ms(outcomes) == [500, 1000]
    assert gaps_ms(outcomes[0]) == [500, 0, 2000]
    assert found["gap_p50"] == pytest.approx(125)  # of 500, 0, 2000, 250, 0, 0
    assert found["client"] == pytest.approx(500)
    with pytest.raises(BenchError, match="the first client was done before the last had begun"):
        figures(Log(outcomes, mark(3.0, 1, 1), mark(3.0, 1, 1)), steady=True)
    with pytest.raises(BenchError, match="lack crucible:decode_plans_total"):
        figures(Log(outcomes, Mark(1.0, ""), Mark(2.0, "")), steady=True)


def test_missing_tokens_are_found() -> None:
    check([outcome(0, 0.0, [1.0], [4])], 4)
    with pytest.raises(BenchError, match="request 2 was to draw 5 tokens and drew 4"):
        check([outcome(2, 0.0, [1.0], [4])], 5)
    with pytest.raises(BenchError, match="request 0 failed with status 200: cut"):
        check([outcome(0, 0.0, [1.0], [4], error="cut")], 4)


def test_counters_are_read_from_prometheus_text() -> None:
    text = '# TYPE x counter\ncrucible:a_total 3.0\ncrucible:b{x="y z"} 1\nprocess_cpu 5\ncrucible:c 1e3\n'
    assert counters(text) == {"a_total": 3.0, "c": 1000.0}


def test_the_worst_gap_is_the_one_that_the_arrival_made() -> None:
    stream = outcome(0, 0.0, [0.0, 3.0, 3.5, 4.5, 4.6, 9.0], [1] * 6)
    assert worst_gap_ms(stream, 3.2, 4.0) == 1000
    assert worst_gap_ms(stream, 1.0, 4.0) == 3000
    assert worst_gap_ms(stream, 9.5, 9.6) == 0
    assert total_rate([stream]) == pytest.approx(6 / 9)


# ---- the engine alone -------------------------------------------------------------------------------------------


def test_the_engine_alone_is_kept_as_busy_as_by_clients() -> None:
    backend = ReferenceBackend(toy(), toy_weights(toy()), num_slots=3)
    asked = [[1, 2, 3 + number] for number in range(7)]
    log = run_direct(Engine(backend), Batch(prompts=asked, new_tokens=9, clients=3))
    check(log.outcomes, 9)
    assert sorted(outcome.shot for outcome in log.outcomes) == list(range(7))
    found = figures(log, steady=True)
    assert 2 < found["batch"] <= 3
    assert "client" not in found
    assert all(outcome.ended == outcome.times[-1] > outcome.began for outcome in log.outcomes)


def test_a_process_of_the_engine_alone_answers_as_the_clients_do(folder: Path) -> None:
    with DirectProcess(str(folder), "reference", "f32", slots=2, positions=40) as process:
        for _ in range(2):
            log = process.run(Batch(prompts=[[5, 6, 7]] * 4, new_tokens=6, clients=2))
            check(log.outcomes, 6)
            assert figures(log, steady=True)["decode"] > 0
    with (
        DirectProcess("nowhere", "reference", "f32", slots=1, positions=1) as process,
        pytest.raises(BenchError, match="the process of the engine ended: "),
    ):
        process.run(Batch(prompts=[[5]], new_tokens=2, clients=1))


# ---- whole benchmarks -------------------------------------------------------------------------------------------


def counting(text: ModelText) -> Any:
    def count(request: dict[str, Any]) -> int:
        prompt = request["prompt"] if "prompt" in request else request["messages"][0]["content"]
        return len(prompt) if isinstance(prompt, list) else len(text.prefix_ids) + len(text.tokenizer.encode(prompt))

    return count


def test_serve_reports_each_number_of_clients_and_each_rate(folder: Path, text: ModelText) -> None:
    with stub_server.running(count=counting(text)) as stub:
        report = bench_serve(
            str(folder),
            clients=(1, 3),
            rates=(200.0,),
            longest_prompt=20,
            new_tokens=12,
            rounds=2,
            url=stub.url,
        )
    rows = {(row.name, row.metric): row for row in report.rows}
    assert {name for name, _ in rows} == {"http"}
    assert {metric.partition("@")[2] for _, metric in rows} == {"c1", "c3", "200/s"}
    assert rows["http", "batch@c3"].ceiling == 3
    assert rows["http", "batch@c3"].median == pytest.approx(3, rel=0.25)
    assert rows["http", "decode@c3"].median > 2 * rows["http", "decode@c1"].median
    assert rows["http", "gap_p50@c1"].unit == "ms"
    assert report.ratios == {}
    assert report.backend == "stub none"
    last = json.loads(report.to_json())
    assert last["bench"] == "serve"
    assert {"name", "metric", "unit", "median", "spread", "ceiling", "unreliable"} == last["rows"][0].keys()
    assert "batch@c3" in shown(report)
    prompts_sent = {json.dumps(request) for _, request in stub.requests}
    assert len(prompts_sent) == 8 + 8 + 32  # the same in each round


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lost": 1}, "the tokens that were seen are not those that were counted"),
        ({"cut": True}, "request 0 failed with status 200"),
        ({"count": lambda request: 1}, "prompt tokens, and the server counted 1"),
        ({"room": 0}, 'request 0 failed with status 429: {"error": "full"}'),
    ],
)
def test_a_server_that_does_less_than_it_says_is_found(
    folder: Path, text: ModelText, settings: dict[str, Any], message: str
) -> None:
    with stub_server.running(**{"count": counting(text), **settings}) as stub, pytest.raises(BenchError) as caught:
        bench_serve(str(folder), clients=(1,), rates=(), longest_prompt=9, new_tokens=3, rounds=1, url=stub.url)
    assert message in str(caught.value)


def test_compat_compares_surfaces_by_equal_prompts(folder: Path, text: ModelText) -> None:
    def count(request: dict[str, Any]) -> int:
        return counting(text)(request) + 11 * ("messages" in request)

    context = {"longest_prompt": 8, "new_tokens": 20, "clients": (2,), "rounds": 2}
    with stub_server.running(count=count) as stub, pytest.MonkeyPatch.context() as patch:
        patch.setattr("crucible.bench.compat.TEMPLATE_ROOM", 16)
        report = bench_compat(str(folder), url=stub.url, **context)
    assert [row.name for row in report.rows] == ["native", "completions", "native-chat", "chat", "messages"]
    assert set(report.ratios) == {
        "completions/native:total@c2",
        "chat/native-chat:total@c2",
        "messages/native-chat:total@c2",
    }
    assert all(0.5 < value < 2 for value in report.ratios.values())
    _, raw, chat, messages = (int(word) for word in report.notes[0].split() if word.isdigit())
    assert chat == messages == raw + 8 * 11
