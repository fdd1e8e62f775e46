"""Benchmarks of the service against the service itself, on a toy model: they run, count and stop what they started."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from serve_process import Server, children, wait_until_gone

from crucible.bench.client import ENDPOINTS
from crucible.bench.compat import bench_compat
from crucible.bench.harness import BenchError
from crucible.bench.load import Job
from crucible.bench.serve import LoadProcess, bench_serve
from crucible.bench.server import serving
from crucible.bench.soak import bench_soak
from crucible.bench.stall import bench_stall
from crucible.bench.traffic import Passages, check, figures, shots
from crucible.models import resolve_text


def test_clients_see_every_token_of_every_surface(toy_model: Path, null_server: Server) -> None:
    asked = Passages(resolve_text(toy_model)).prompts(6, 40)
    with LoadProcess() as load:
        for endpoint in ENDPOINTS.keys() - {"generate"}:
            streams = shots(endpoint, asked, 50, null_server.model_id)
            job = Job(host="127.0.0.1", port=null_server.port, mode="closed", clients=2, shots=streams)
            log = load.run(job)
            check(log.outcomes, 50, asked if endpoint in ("native", "completions") else None)
            assert [sum(outcome.counts) for outcome in log.outcomes] == [50] * 6, endpoint
            assert 0 < figures(log, steady=False)["batch"] <= 2


def test_serve_measures_its_own_server_beside_the_engine_alone(toy_model: Path) -> None:
    report = bench_serve(
        str(toy_model), backend="null", clients=(1, 4), rates=(100.0,), longest_prompt=32, new_tokens=150, rounds=1
    )
    metrics = {(row.name, row.metric) for row in report.rows}
    for name in ("http", "engine"):
        for count in (1, 4):
            assert {(name, f"{figure}@c{count}") for figure in ("decode", "total", "batch", "gap_p99")} <= metrics
    assert ("http", "ttft_p95@100/s") in metrics
    assert set(report.ratios) == {
        f"http/engine:{figure}@c{count}" for figure in ("decode", "total") for count in (1, 4)
    }
    assert report.backend == "null int8"
    assert json.loads(report.to_json())["bench"] == "serve"


def test_compat_finds_the_same_tokens_on_every_surface(toy_model: Path, null_server: Server) -> None:
    report = bench_compat(str(toy_model), clients=(2,), longest_prompt=32, new_tokens=64, rounds=1, url=null_server.url)
    assert len(report.rows) == 5
    assert "raw" in report.notes[0]


def test_stall_tries_each_setting(toy_model: Path) -> None:
    report = bench_stall(
        str(toy_model),
        backend="reference",
        budgets=(64,),
        chunks=(32, 64, 128),
        streams=(2,),
        arrivals=((1, 33), (3, 100)),
        rounds=1,
    )
    assert {row.name for row in report.rows} == {"64/32", "64/off"}
    assert {row.metric for row in report.rows} == {
        "ttft_p50@burst",
        "ttft_p95@burst",
        "total@burst",
        *(f"{metric}@2s+{arrival}" for metric in ("stall", "ttft") for arrival in ("1x33", "3x100")),
    }
    assert all(row.median > 0 for row in report.rows)


def test_a_soak_finds_a_whole_server(toy_model: Path) -> None:
    """Of 60 seconds with `crucible bench soak`; the same on a model that computes."""
    report = bench_soak(str(toy_model), backend="reference", seconds=4)
    found = {(row.name, row.metric): row.median for row in report.rows}
    assert found["mixed", "answered"] > 50
    assert found["mixed", "left"] > 5
    assert found["pool", "answered"] > 20
    assert found["overload", "refused"] > found["overload", "answered"] > 0


def test_a_server_of_a_benchmark_ends_with_it(toy_model: Path) -> None:
    before, family = set(children(os.getpid())), []

    def fail_while_serving() -> None:
        with serving(str(toy_model), backend="null") as server:
            assert server.get("/health")["status"] == "ok"
            (own,) = set(children(os.getpid())) - before
            family.extend([own, *children(own)])
            raise BenchError("on purpose")

    with pytest.raises(BenchError, match="on purpose"):
        fail_while_serving()
    assert len(family) == 2
    wait_until_gone(family)
    with pytest.raises(BenchError, match=r"the server did not start: .*nowhere"), serving("nowhere"):
        pass
