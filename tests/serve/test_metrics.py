"""What the service says of itself: `/health`, and `/metrics` in both forms, held against what was asked of it."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from serve_process import Server

from crucible import __version__
from crucible.serve.channel import Ready, Stats
from crucible.serve.metrics import Histogram, Metrics

GENERATE = "/v1/generate"
TIMES = ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time")


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


@pytest.fixture
def generate(client: httpx.Client, server: Server) -> Callable[..., Any]:
    def generate(**fields: Any) -> Any:
        return client.post(GENERATE, json={"prompt": "the cat", "ignore_eos": True, **fields}).json()

    return generate


Values = dict[tuple[str, frozenset[tuple[str, str]]], float]


def told(client: httpx.Client) -> Values:
    """Every sample for Prometheus, by name and labels."""
    reply = client.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = list(text_string_to_metric_families(reply.text))
    assert len({family.name for family in families}) == len(families)
    samples = [sample for family in families for sample in family.samples]
    found = {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}
    assert len(found) == len(samples)
    return found


def value(values: Values, name: str, **labels: str) -> float:
    return values.get((name, frozenset(labels.items())), 0.0)


# ---- health -------------------------------------------------------------------------------------------------------


def test_health_says_what_is_served_and_how(client: httpx.Client, server: Server) -> None:
    reply = client.get("/health")
    body = reply.json()
    assert reply.status_code == 200
    assert re.fullmatch(r"[\w/+=.:-]+", body.pop("fingerprint"))
    assert body.pop("device").endswith("threads")
    assert body == {
        "status": "ok",
        "version": __version__,
        "model": server.model_id,
        "aliases": ["gpt-4o"],
        "backend": "reference",
        "weights": "f32",
        "max_batch": 64,
        "max_in_flight": 320,
        "context": 256,
        "vocab_size": 320,
        "pages": 64 * 16,
        "sampling": "greedy without a positive temperature; without a seed it is 1234",
    }
    assert client.head("/health").status_code == 200
    assert client.head("/health").content == b""


# ---- counting -----------------------------------------------------------------------------------------------------


def test_what_was_asked_for_is_counted_in_both_forms(client: httpx.Client, server: Server, generate: Any) -> None:
    json_before, before = server.wait_until_idle(), told(client)
    replies = [generate(max_tokens=9), generate(max_tokens=5, n=3, temperature=1.0)["choices"][0]]
    text = generate(max_tokens=20)["text"]
    replies.append(generate(max_tokens=20, stop=text[4:6]))
    assert replies[-1]["finish_reason"] == "stop"
    assert client.post(GENERATE, json={"prompt": ""}).status_code == 400
    json_after, after = server.wait_until_idle(), told(client)
    num_prompt = replies[0]["usage"]["prompt_tokens"]
    num_output = 9 + 3 * 5 + 20 + replies[-1]["usage"]["completion_tokens"]

    def more(name: str, **labels: str) -> float:
        return value(after, name, **labels) - value(before, name, **labels)

    assert more("crucible:prompt_tokens_total") == 6 * num_prompt
    assert more("crucible:generation_tokens_total") == num_output
    assert more("crucible:requests_total") == 6
    assert more("crucible:request_success_total", finished_reason="length") == 5
    assert more("crucible:request_success_total", finished_reason="stop") == 1
    assert more("crucible:request_success_total", finished_reason="error") == 0
    assert more("crucible:requests_cancelled_total") == more("crucible:requests_refused_total") == 0
    for name in TIMES:
        assert more(f"crucible:{name}_seconds_count") == more(f"crucible:{name}_seconds_bucket", le="+Inf") == 6
        assert 0 < more(f"crucible:{name}_seconds_sum") < 60
    assert more("crucible:inter_token_latency_seconds_count") == num_output - 6
    assert more("http_requests_total", handler=GENERATE, method="POST", status="200") == 4
    assert more("http_requests_total", handler=GENERATE, method="POST", status="400") == 1
    # What the engine counts; it draws some tokens more before it hears of a stop string.
    assert 4 <= more("crucible:prefill_plans_total") <= more("crucible:prefill_chunks_total") == 6
    assert more("crucible:prefill_rows_total") == 6 * num_prompt
    assert num_output - 6 <= more("crucible:decode_rows_total") < num_output + 10
    assert more("crucible:decode_plans_total") < more("crucible:decode_rows_total")

    for path, amount in {
        ("completed",): 6,
        ("cancelled",): 0,
        ("finished", "length"): 5,
        ("tokens", "prompt"): 6 * num_prompt,
        ("tokens", "generated"): num_output,
        ("prefill", "chunks"): 6,
        ("prefill", "rows"): 6 * num_prompt,
    }.items():
        start, end = json_before, json_after
        for name in path:
            start, end = start[name], end[name]
        assert end - start == amount, path
    assert json_after["uptime"] > json_before["uptime"]
    assert json_after["steps"] - json_before["steps"] == more("crucible:engine_steps_total")


def test_an_idle_server_has_nothing_but_room(server: Server, client: httpx.Client) -> None:
    body = server.wait_until_idle()
    assert {name: body[name] for name in ("active", "prefilling", "queued", "in_flight", "restarts")} == {
        "active": 0,
        "prefilling": 0,
        "queued": 0,
        "in_flight": 0,
        "restarts": 0,
    }
    assert body["pages"] == {"total": 1024, "free": 1024, "used": 0}
    values = told(client)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert ("crucible:" + name, frozenset()) in values
        assert value(values, "crucible:" + name) == 0
    assert value(values, "crucible:kv_cache_pages") == 1024


def test_requests_are_seen_while_they_run_and_wait(make_server: Any, long_model: Path) -> None:
    server = make_server("--max-batch", "1", model=long_model)
    body = {"prompt": "the cat", "ignore_eos": True}
    with (
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", GENERATE + "/stream", json=body) as running,
        client.stream("POST", GENERATE + "/stream", json=body) as waiting,
    ):
        pieces = running.iter_raw()  # kept: without it the reply counts as read, and is closed
        next(pieces)
        seen = told(client)
        metrics = server.metrics()
        assert waiting.status_code == 200  # the stream is begun, though it has no token yet
    assert value(seen, "crucible:num_requests_running") == metrics["active"] + metrics["prefilling"] == 1
    assert value(seen, "crucible:num_requests_waiting") == metrics["queued"] == 1
    assert metrics["in_flight"] == 2
    assert metrics["pages"]["used"] == metrics["pages"]["total"] == 1024
    assert value(seen, "crucible:kv_cache_usage_perc") == 1.0
    assert metrics["batch"] == {"last": 1, "mean": 1.0}
    assert server.wait_until_idle()["cancelled"] >= 1


@pytest.mark.parametrize("accept", ["application/json", "text/html, application/json;q=0.9"])
def test_json_is_for_those_who_ask_for_it(client: httpx.Client, accept: str) -> None:
    reply = client.get("/metrics", headers={"accept": accept})
    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["pages"]


def test_paths_and_methods_that_a_caller_makes_up_make_no_series(client: httpx.Client) -> None:
    before = len(told(client))
    for number in range(20):
        client.get(f"/made-up-{number}")
        client.request(f"MADE{number}", "/health")
        client.get(f"/v1/models/made-up-{number}")
    values = told(client)
    assert len(values) < before + 8
    assert value(values, "http_requests_total", handler="other", method="GET", status="404") >= 20


# ---- in themselves ------------------------------------------------------------------------------------------------


def test_a_histogram_counts_up_to_its_bounds() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds, times in ((0.05, 1), (0.1, 2), (0.5, 3), (1.0, 4), (7.0, 5)):
        histogram.observe(seconds, times)
    samples = {
        (sample.name, sample.labels.get("le")): sample.value for sample in histogram.family("time", "Of all.").samples
    }
    assert samples == {
        ("time_bucket", "0.1"): 3,
        ("time_bucket", "1.0"): 10,
        ("time_bucket", "+Inf"): 15,
        ("time_count", None): 15,
        ("time_sum", None): pytest.approx(0.05 + 0.2 + 1.5 + 4.0 + 35.0),
    }


def test_before_the_first_engine_everything_is_zero() -> None:
    metrics = Metrics()
    body = metrics.json(None, Stats(), 0, 0)
    assert body["pages"] == {"total": 0, "free": 0, "used": 0}
    assert body["batch"]["mean"] == 0.0
    assert b"crucible:kv_cache_usage_perc 0.0\n" in metrics.text(None, Stats(), 0, 0)


def test_an_engine_that_is_gone_uses_no_pages() -> None:
    ready = Ready("null", "none", "f32", 4, 64, 16, 256, 320, "mark", 0.1)
    body = Metrics().json(ready, Stats(), 3, 1)
    assert (body["active"], body["queued"], body["restarts"]) == (0, 3, 1)
    assert body["uptime"] <= time.monotonic()
