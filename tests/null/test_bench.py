"""Benchmarks on toy models: what is counted, in which order, against which ceiling, and what the last line says."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cells import axis_cells, toy
from rich.console import Console
from toy_artifact import write_toy_artifact
from toy_weights import toy_weights

from crucible.bench import compare, probes
from crucible.bench.compare import bench_compare
from crucible.bench.generation import (
    Subject,
    bench_decode,
    bench_prefill,
    measure_decode,
    measure_prefill,
    prompt_flops,
    run_engine,
    step_bytes,
)
from crucible.bench.harness import BenchError, BenchReport, Row, interleave, ratio
from crucible.bench.process import EngineProcess, EngineSpec, Reply, time_to_first_token
from crucible.config import ModelConfig
from crucible.engine.quant import WEIGHT_FORMATS, convert
from crucible.engine.reference import ReferenceBackend
from crucible.llm import LLM
from crucible.models import resolve


@pytest.fixture
def quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(probes, "_MATMUL", probes._MATMUL.replace("1536", "64"))


def text(report: BenchReport) -> str:
    console = Console(width=140, record=True)
    console.print(report.render())
    return console.export_text()


# ---- rows, rounds, the last line --------------------------------------------------------------------------------


def test_a_row_is_its_median_and_its_spread() -> None:
    row = Row(name="a", metric="m", unit="u", values=(10.0, 12.0, 9.0), ceiling=20.0)
    assert (row.median, row.spread, row.is_unreliable) == (10.0, 0.3, False)
    assert Row(name="a", metric="m", unit="u", values=(10.0, 12.1, 9.0)).is_unreliable
    assert Row(name="a", metric="m", unit="u", values=(0.0,)).spread == 0


def test_rounds_go_forwards_and_backwards_and_the_warm_up_does_not_count() -> None:
    calls: list[str] = []
    done: list[tuple[int, int]] = []

    def variant(name: str) -> Any:
        def measure() -> dict[tuple[str, str], float]:
            calls.append(name)
            return {(name, "m"): float(len(calls))}

        return measure

    samples = interleave(
        {"a": variant("a"), "b": variant("b")}, 3, on_round=lambda now, total: done.append((now, total))
    )
    assert "".join(calls) == "abbaabba"
    assert samples == {("a", "m"): (4, 5, 8), ("b", "m"): (3, 6, 7)}
    assert done == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert ratio(samples, ("a", "m"), ("b", "m")) == pytest.approx(8 / 7)  # of 4/3, 5/6 and 8/7
    with pytest.raises(BenchError, match="at least 1, not 0"):
        interleave({"a": variant("a")}, 0)
    with pytest.raises(BenchError, match="a round measured"):
        interleave({"a": lambda: {("a", str(len(calls))): 1.0}, "b": variant("b")}, 3)


def test_the_last_line_is_one_json_object_of_the_documented_keys() -> None:
    row = Row(name="a", metric="decode@b1", unit="tok/s", values=(1.0, 2.0), ceiling=3.0)
    report = BenchReport(
        bench="decode", backend="cpu int8", model="toy", threads=2, rows=(row,), ratios={"a/b:decode": 1.5}
    )
    found = json.loads(report.to_json())
    assert {"bench", "device", "backend", "model", "rows", "ratios"} <= found.keys()
    assert found["rows"] == [
        {
            "name": "a",
            "metric": "decode@b1",
            "unit": "tok/s",
            "median": 1.5,
            "spread": 0.6667,
            "ceiling": 3.0,
            "unreliable": True,
        }
    ]
    assert found["ratios"] == {"a/b:decode": 1.5}
    assert "2 threads" in found["device"]
    assert "\n" not in report.to_json()
    shown = text(report)
    assert "unreliable" in shown
    assert "50%" in shown
    assert "a/b:decode  1.500" in shown


def test_probes_measure_something(quick_probes: None) -> None:
    assert probes.read_bandwidth(2)() > 1e7
    assert probes.matmul_flops(1)() > 1e6


def test_a_probe_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "_MATMUL", "raise SystemExit('no numpy here')")
    with pytest.raises(BenchError, match="no numpy here"):
        probes.matmul_flops(1)()


# ---- decode and prefill -----------------------------------------------------------------------------------------


def subject(config: ModelConfig, **sizes: int) -> Subject:
    return Subject("toy", ReferenceBackend(config, toy_weights(config), **sizes), "reference", "f32")


def test_decode_counts_its_tokens_and_names_its_ceiling(quick_probes: None) -> None:
    report = measure_decode(subject(toy(), num_slots=3), batches=(1, 3), prompt_tokens=20, new_tokens=6, rounds=2)
    rows = {row.metric: row for row in report.rows}
    assert list(rows) == ["read", "decode@b1", "decode@b3"]
    bandwidth = 1e9 * rows["read"].median
    step, cache = step_bytes(toy(), "f32"), toy().kv_bytes_per_token(4) * 23
    assert rows["decode@b1"].ceiling == pytest.approx(bandwidth / (step + cache))
    assert rows["decode@b3"].ceiling == pytest.approx(3 * bandwidth / (step + 3 * cache))
    assert all(len(row.values) == 2 and min(row.values) > 0 for row in report.rows)
    assert report.load is not None
    assert "reference f32" in text(report)


def test_prefill_counts_its_tokens_and_names_its_ceiling(quick_probes: None) -> None:
    report = measure_prefill(subject(toy(), num_slots=2), shapes=((1, 40), (2, 17)), rounds=1)
    rows = {row.metric: row for row in report.rows}
    assert list(rows) == ["f32 matmul", "prefill@1x40", "prefill@2x17"]
    rate = 1e9 * rows["f32 matmul"].median
    assert rows["prefill@2x17"].ceiling == pytest.approx(17 * rate / prompt_flops(toy(), 17))


def test_both_run_a_model_by_its_name(quick_probes: None, tmp_path: Path) -> None:
    folder = write_toy_artifact(tmp_path / "model")
    shared: dict[str, Any] = {"backend": "reference", "rounds": 1}
    decode = bench_decode(folder, batches=(2,), prompt_tokens=5, new_tokens=3, **shared)
    prefill = bench_prefill(folder, shapes=((1, 9),), weight_format="f16", **shared)
    assert (decode.model, decode.backend) == ("model", "reference int8")
    assert (prefill.model, prefill.backend) == ("model", "reference f16")


def test_the_clock_stops_between_first_and_later_tokens() -> None:
    backend = ReferenceBackend(toy(), toy_weights(toy()), num_slots=2)
    first, rest = run_engine(backend, 2, 10, 4)
    assert first > 0
    assert rest > 0
    assert run_engine(backend, 1, 10, 1)[1] < 0.1


@pytest.mark.parametrize("config", axis_cells())
@pytest.mark.parametrize("tied", [True, False])
def test_step_bytes_are_those_of_the_weights(config: ModelConfig, tied: bool) -> None:
    config = config.vary(tie_word_embeddings=tied)
    for weight_format in WEIGHT_FORMATS:
        weights: Mapping[str, Any] = convert(config, toy_weights(config), weight_format)
        skipped = {"model.embed_positions.weight"} | (set() if tied else {"model.embed_tokens.weight"})
        expected = sum(weight.nbytes for name, weight in weights.items() if name not in skipped)
        assert step_bytes(config, weight_format) == expected


def test_prompt_flops_count_every_product() -> None:
    """Two per multiply-add: projections of every token, scores and weighted values of every pair, one row of logits."""
    config, tokens = toy(), 30
    matrices = sum(np.prod(shape) for name, shape in config.tensor_shapes().items() if "_proj" in name)
    pairs = config.num_hidden_layers * config.num_attention_heads * config.head_dim * tokens * tokens // 2
    expected = 2 * (tokens * matrices + 2 * pairs + config.vocab_size * config.hidden_size)
    assert prompt_flops(config, tokens) == expected


def test_what_cannot_be_measured_is_refused_by_name(tmp_path: Path) -> None:
    toys = subject(toy())
    for batches, prompt, new, message in [
        ((1,), 5, 1, "at least 2 new tokens, not 1"),
        ((0,), 5, 2, "0 requests of 5"),
        ((1,), 0, 2, "are not work"),
        ((1,), 95, 2, "97 tokens do not fit the context of 96"),
        ((2,), 5, 2, "take 2 slots and 2 pages; the backend has 1 and 6"),
    ]:
        with pytest.raises(BenchError, match=message):
            measure_decode(toys, batches=batches, prompt_tokens=prompt, new_tokens=new, rounds=1)
    with pytest.raises(BenchError, match="do not fit the context"):
        measure_prefill(toys, shapes=((1, 96),), rounds=1)
    with pytest.raises(BenchError, match="do not fit the context"):
        bench_decode(write_toy_artifact(tmp_path / "model"), prompt_tokens=90, new_tokens=50, rounds=1)


# ---- engines in processes of their own --------------------------------------------------------------------------


def test_a_process_draws_what_the_library_draws(tmp_path: Path) -> None:
    folder = write_toy_artifact(tmp_path / "model")
    spec = EngineSpec(engine="crucible", model=str(folder), format="f32", threads=1, context=40, backend="reference")
    llm = LLM(folder, backend="reference")
    prompt = llm.encode("It is a truth")
    with EngineProcess(spec) as process:
        reply = process.ask(prompt, 6)
        again = process.ask(prompt, 6)
        assert process.wait_ready() == "crucible, backend reference"
    assert reply.ids == again.ids
    assert len(reply.ids) == 6
    assert reply.first > 0
    assert reply.rest > 0
    logits = llm.logits([*prompt, *reply.ids[:-1]])
    assert tuple(logits[len(prompt) - 1 :].argmax(axis=-1).tolist()) == reply.ids
    assert time_to_first_token(spec, prompt) > reply.first


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    spec = EngineSpec(engine="crucible", model=str(tmp_path / "none"), format="f32", threads=1, context=40)
    with (
        EngineProcess(spec) as process,
        pytest.raises(BenchError, match=r"crucible f32 ended: .*no such file or folder"),
    ):
        process.ask([1], 2)


# ---- compare ----------------------------------------------------------------------------------------------------


class FakeProcess:
    """Engines of known speed; ours draws twice as fast, starts half as fast and reads prompts equally fast."""

    def __init__(self, spec: EngineSpec) -> None:
        self.spec = spec

    def __enter__(self) -> FakeProcess:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def wait_ready(self) -> str:
        return "described"

    def ask(self, ids: Sequence[int], new_tokens: int) -> Reply:
        ours = self.spec.engine == "crucible"
        drawn = tuple(range(new_tokens)) if ours or len(ids) > 5 else (9,) * new_tokens
        return Reply(drawn, len(ids) / 100, (new_tokens - 1) / (80 if ours else 40))


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, quick_probes: None, tmp_path: Path) -> Path:
    folder = write_toy_artifact(tmp_path / "toy")
    gguf = tmp_path / "toy.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(compare, "resolve", lambda _: resolve(folder))
    monkeypatch.setattr(compare, "EngineProcess", FakeProcess)
    monkeypatch.setattr(compare, "requantised", lambda source, kind: source.with_suffix(f".{kind}.gguf"))
    monkeypatch.setattr(compare, "time_to_first_token", lambda spec, ids: 2.0 if spec.engine == "crucible" else 1.0)
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: name)
    return gguf


def test_compare_gives_rates_ceilings_and_ratios(fakes: Path) -> None:
    report = bench_compare(str(fakes), prompt_tokens=64, new_tokens=5, rounds=3, threads=1)
    rows = {(row.name, row.metric): row for row in report.rows}
    assert list(rows) == [
        ("crucible", "decode@b1"),
        ("llama-cpp", "decode@b1"),
        ("crucible", "prefill@1x64"),
        ("llama-cpp", "prefill@1x64"),
        ("crucible", "ttft@64"),
        ("llama-cpp", "ttft@64"),
        ("memory", "read"),
        ("numpy", "f32 matmul"),
    ]
    assert rows["crucible", "decode@b1"].median == pytest.approx(80)
    assert rows["llama-cpp", "prefill@1x64"].median == pytest.approx(100)
    assert report.ratios == pytest.approx(
        {"crucible/llama-cpp:decode": 2, "crucible/llama-cpp:prefill": 1, "crucible/llama-cpp:ttft": 2}
    )
    config, read = toy(vocab_size=320), 1e9 * rows["memory", "read"].median
    step = step_bytes(config, "int8") + config.kv_bytes_per_token(2) * 66.5
    assert rows["crucible", "decode@b1"].ceiling == pytest.approx(read / step)
    assert report.backend == "crucible int8 / llama-cpp Q8_0"
    assert any("of 4 prompts are continued by the same 32 greedy tokens" in note for note in report.notes)
    assert "crucible: described" in report.notes


def test_compare_can_run_ours_alone(fakes: Path) -> None:
    report = bench_compare(str(fakes), engines=("crucible",), prompt_tokens=64, new_tokens=5, rounds=1)
    assert report.ratios == {}
    assert {row.name for row in report.rows} == {"crucible", "memory", "numpy"}


def test_what_cannot_be_compared_is_refused_by_name(
    fakes: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"engines": ("crucible", "vllm")}, "must be one of crucible, llama-cpp, not 'vllm'"),
        ({"engines": ()}, "at least one, not none"),
        ({"engines": ("crucible", "crucible")}, "different ones"),
        ({"new_tokens": 1}, "at least 2 new tokens"),
        ({"prompt_tokens": 0}, "from 1 to"),
        ({"model": str(tmp_path / "toy")}, "reads a .gguf file, or smollm2"),
    ]
    for options, message in cases:
        with pytest.raises(BenchError, match=message):
            bench_compare(options.pop("model", str(fakes)), **options)
    monkeypatch.setattr(compare.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(BenchError, match="llama-cpp-python is not installed"):
        bench_compare(str(fakes))
